//! The names of resources that stand for GPUs.

use divvy_model::names::{GPU_COUNT, GPU_MEM};

/// Report whether a resource stands for GPUs: a resource of gpushare, Divvy, or a vendor's device plugin.
pub(crate) fn is_gpu(resource: &str) -> bool {
    [GPU_MEM, GPU_COUNT, "nvidia.com/", "amd.com/gpu", "gpu.intel.com/"]
        .iter()
        .any(|name| resource.starts_with(name))
}
