//! What NVIDIA's device plugin offers to the kubelet and answers to its calls (<https://github.com/NVIDIA/k8s-device-plugin>), as functions of
//! values.
//!
//! ```text
//! Config, Machine ─► offer ─► Resource ─► devices     ListAndWatch
//!                                     ├─► allocate    Allocate
//!                                     └─► preferred   GetPreferredAllocation
//! ```
//!
//! What differs from NVIDIA's plugin, by intent:
//!
//! - A GPU that is lost is an unhealthy device. NVIDIA's plugin ends, and the node offers nothing.
//! - All replicas of a GPU, and all of its MIG devices, are unhealthy together.
//! - The configuration's `rename`, `devices`, and `resources` take effect. NVIDIA's plugin reads them and ignores them.
//! - A MIG profile that is newer than this program is offered like any other.
//! - Replicas are spread over GPUs also when they are replicas of MIG devices.
//! - [`Resource::preferred`] never fails: an error would reject the pod, although the kubelet can choose devices on its own.

mod allocate;
mod error;
mod health;
mod machine;
mod offer;
mod preferred;
mod wildcard;

pub use allocate::{Access, DeviceNode, Mount};
pub use error::Error;
pub use health::HealthChecks;
pub use machine::{Gpu, Machine};
pub use offer::{Device, Offer, Resource, first_match, has_uniform_mig_devices, offer};
