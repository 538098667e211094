//! The request of a single container.

use serde::{Deserialize, Serialize};

/// The phase of the pod's life in which a container runs. It determines how the container's request counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContainerKind {
    /// An init container that ends before the next container starts.
    Init,
    /// An init container with `restartPolicy: Always`, which keeps running while the later containers run (KEP-753).
    Sidecar,
    /// A container of `spec.containers`.
    App,
}

/// The request of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRequest {
    /// The container's name.
    pub name: String,
    /// The phase in which the container runs.
    pub kind: ContainerKind,
    /// The request for `aliyun.com/gpu-mem`, in units.
    pub units: u64,
    /// The request for `aliyun.com/gpu-count`. It has no effect on what the container gets.
    pub gpu_count: u64,
}

/// The request of one container for whole GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WholeContainer {
    /// The container's name.
    pub name: String,
    /// The phase in which the container runs.
    pub kind: ContainerKind,
    /// The number of GPUs, at least 1.
    pub gpus: u64,
}
