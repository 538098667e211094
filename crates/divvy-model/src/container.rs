//! What one container of a pod requests.

use serde::{Deserialize, Serialize};

/// The phase of a pod in which a container runs, which decides how its request counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContainerKind {
    /// An init container that ends before the next container starts.
    Init,
    /// An init container with `restartPolicy: Always`: it keeps running alongside the later containers (KEP-753).
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
    /// `aliyun.com/gpu-mem`, in units.
    pub units: u64,
    /// `aliyun.com/gpu-count`. It has no effect on what the container gets.
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
