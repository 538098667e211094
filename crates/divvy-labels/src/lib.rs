//! The node labels that describe NVIDIA GPUs, as NVIDIA's GPU feature discovery writes them
//! (<https://github.com/NVIDIA/k8s-device-plugin>, docs/gpu-feature-discovery).
//!
//! Intended differences from NVIDIA's program:
//!
//! - All keys and values are accepted by Kubernetes: if they are too long, they are cut.
//! - On a node with GPUs of several models, the labels that do not name a model describe one of them: the model with the most
//!   memory; on a tie, the one with the most GPUs; then the first by name. NVIDIA's choice is random. Each model also has
//!   `nvidia.com/model.MODEL.count` and `nvidia.com/model.MODEL.memory`, so that a pod can select a node by any of its models.
//! - A MIG profile that is newer than this program is labelled like any other.
//! - A malformed PCI capability of a virtual GPU is not an error.

mod conflict;
mod error;
mod family;
mod labels;
mod output;
mod pci_ids;
mod repair;
mod text;
mod vgpu;

pub use conflict::{owners, undone};
pub use error::Error;
pub use labels::{LabeledFabric, LabeledGpu, LabeledMachine, Labels, PciDevice, labels};
pub use output::{MANAGER, NodeFeature, file, node, node_feature};
pub use pci_ids::pci_name;
pub use repair::Repairs;
