//! How NVIDIA's driver names device nodes.

use crate::Gpu;

const PREFIX: &str = "nvidia";

/// Return the device node of the GPU with this minor number, as [`Gpu::nodes`] lists it: `nvidia0`.
pub fn node(minor: u32) -> String {
    format!("{PREFIX}{minor}")
}

/// Return the minor number of a GPU's device node `/dev/nvidia<minor>`; `None` for a GPU of another vendor.
pub fn minor(gpu: &Gpu) -> Option<u32> {
    let [node] = gpu.nodes.as_slice() else { return None };
    let minor = node.strip_prefix(PREFIX)?.parse().ok()?;
    (self::node(minor) == *node).then_some(minor)
}
