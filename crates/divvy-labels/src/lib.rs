//! The node labels that describe NVIDIA GPUs, as NVIDIA's GPU feature discovery writes them
//! (<https://github.com/NVIDIA/k8s-device-plugin>, docs/gpu-feature-discovery).
//!
//! What differs by intent:
//!
//! - Keys and values are always such that Kubernetes accepts them: too long ones are cut.
//! - On a node with GPUs of several models, the labels without a model describe the one with the most memory, then the one with the most
//!   GPUs, then the first by name. NVIDIA's choice is random. Each model also has `nvidia.com/model.MODEL.count` and
//!   `nvidia.com/model.MODEL.memory`, so that a pod can select a node by any of them.
//! - A MIG profile that is newer than this program is labelled like any other.
//! - A broken capability of a virtual GPU is no error.

mod error;
mod family;
mod labels;
mod output;
mod text;
mod vgpu;

pub use error::Error;
pub use labels::{Fabric, Gpu, Labels, Machine, PciDevice, labels};
pub use output::{NodeFeature, file, node_feature};
