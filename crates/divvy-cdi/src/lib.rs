//! CDI, the Container Device Interface (`cncf-tags/container-device-interface`, SPEC.md 1.1.0): specs, what makes one valid,
//! how those of a machine are looked up, and how they are made.
//!
//! - [`Spec`] and its parts: every field of the standard, and those that it does not know yet
//! - [`Version`]: what each version added, and the least that a spec needs
//! - [`Problem`]: what is wrong with a spec, by field and rule
//! - [`QualifiedName`], [`annotations`]: how devices are asked for
//! - [`Registry`]: all specs of a machine: priorities, conflicts, the order of edits
//! - [`driver`]: what the spec of a node's driver depends on, and that spec
//! - [`stale`]: whether a spec was made for the driver that is loaded
//! - [`moved`]: a spec whose paths are below another root
//! - [`generate`]: from a machine's files and GPUs to a spec
//! - [`GrantSpec`]: the projection of a grant to the spec that the runtime reads
//!
//! What a spec carries is applied by the runtime after the pod's own settings: a variable set here replaces the pod's
//! (research/reliability.md section 1.1), which is why the grant's variables live here and not in AllocateResponse.

#![forbid(unsafe_code)]

pub mod annotations;
pub mod driver;
pub mod generate;
mod grant;
pub mod moved;
mod name;
mod registry;
mod spec;
pub mod stale;
mod validate;
mod version;

pub use grant::{GrantSpec, OWNER, VERSION, file_name, grant_name, grant_spec, is_grant_name, name_of_file, qualified_name};
pub use name::{NameError, QualifiedName};
pub use registry::{DIRECTORIES, Found, FoundDevice, Registry, Unresolved, is_spec_file};
pub use spec::{Device, DeviceNode, Edits, Error, Format, Hook, IntelRdt, Mount, NetDevice, Spec};
pub use validate::{Problem, Severity};
pub use version::{Need, Version};

/// The kind under which NVIDIA's tools describe whole GPUs.
pub const NVIDIA_KIND: &str = "nvidia.com/gpu";
