//! CDI, the Container Device Interface (`cncf-tags/container-device-interface`, SPEC.md 1.1.0): parses, validates, looks up, and generates
//! specs.
//!
//! - [`Spec`] and its parts: every field of the standard, and unknown fields of later versions
//! - [`CdiVersion`]: what each version of the standard added, and the lowest version that a spec needs
//! - [`SpecProblem`]: what is wrong with a spec, by field and rule
//! - [`QualifiedName`], [`annotations`]: how a container requests devices
//! - [`Registry`]: all specs of a machine, with their priorities, conflicts, and the order of edits
//! - [`driver_spec`]: the spec of a node's NVIDIA driver, and what that spec depends on
//! - [`stale`]: whether a spec was made for the driver that is loaded
//! - [`moved`]: moves the paths of a spec from one root to another
//! - [`generate`]: makes a spec from a machine's files and GPUs
//! - [`GrantSpec`]: the spec that the container runtime reads for a grant
//!
//! The container runtime applies a spec after the pod's own settings, so an environment variable in a spec replaces the pod's. In contrast, a
//! variable in the kubelet's AllocateResponse comes before the pod's `env` and loses to it. Therefore a grant's variables are in its spec.

#![forbid(unsafe_code)]

pub mod annotations;
pub mod driver_spec;
pub mod driver_version;
pub mod generate;
mod grant;
pub mod moved;
mod name;
mod registry;
pub mod shadow;
mod spec;
pub mod stale;
mod validate;
mod version;

pub use grant::{GrantSpec, OWNER, VERSION, file_name, grant_name, grant_spec, is_grant_name, name_of_file, qualified_name};
pub use name::{NameError, QualifiedName};
pub use registry::{DIRECTORIES, FoundDevice, FoundSpec, Registry, Unresolved, is_spec_file};
pub use spec::{CdiMount, CdiSpecDevice, DeviceNode, Edits, Hook, IntelRdt, NetDevice, Spec, SpecError, SpecFormat};
pub use validate::{ProblemSeverity, SpecProblem};
pub use version::{CdiVersion, Need};

/// The CDI kind (`vendor/class`) under which NVIDIA's tools describe GPUs.
pub const NVIDIA_KIND: &str = "nvidia.com/gpu";
