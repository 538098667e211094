//! What NVIDIA's device plugin (<https://github.com/NVIDIA/k8s-device-plugin>) offers to the kubelet, and how it answers the
//! kubelet's calls. All functions here are pure.
//!
//! ```text
//! Config, Machine ─► offer ─► Resource ─► devices     ListAndWatch
//!                                     ├─► allocate    Allocate
//!                                     ├─► preferred   GetPreferredAllocation
//!                                     └─► mps         the MPS control daemons: start, supervision, end
//! ```
//!
//! Intended differences from NVIDIA's plugin:
//!
//! - A lost GPU is an unhealthy device. NVIDIA's plugin exits, and the node offers nothing.
//! - If a GPU is unhealthy, so are all its replicas and all its MIG devices.
//! - The configuration's `rename`, `devices`, and `resources` take effect. NVIDIA's plugin reads them and ignores them.
//! - A MIG profile that is newer than this program is offered like any other.
//! - Replicas are spread over GPUs even if they are replicas of MIG devices.
//! - No MPS control daemon is started for MIG devices. NVIDIA's program says that it skips them, and starts one all the same.
//! - The limits of a control daemon are read back, a daemon that dies is started again, and GPUs are closed to other processes
//!   only as long as their daemon is wanted.
//! - On a Tegra, CDI specs and MPS are refused at the start. NVIDIA's plugin makes CDI specs from the files of its container toolkit, and
//!   waits for an MPS control daemon that cannot start without NVML.
//! - [`OfferedResource::preferred`] never fails. An error would reject the pod, although the kubelet can choose devices on its own.

mod allocate;
mod error;
mod health;
mod machine;
pub mod mps;
mod offer;
mod platform;
mod preferred;
mod wildcard;

pub use allocate::{Access, AccessDeviceNode, CONTROL_NODES, HostMount};
pub use error::Error;
pub use health::HealthChecks;
pub use machine::{PluginGpu, PluginMachine};
pub use offer::{NodeOffer, OfferedDevice, OfferedResource, first_match, has_uniform_mig_devices, offer};
pub use platform::{FAMILY_FILE, Nvml, Platform, RELEASE_FILE, check_tegra, is_tegra_family, platform};
