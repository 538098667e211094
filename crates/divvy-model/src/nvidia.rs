//! Definitions that several modules for NVIDIA's GPUs share: the names of device nodes, and the catalog of XIDs (the driver's error
//! codes). All other modules treat a device node as a path, and an XID as a named fault.

pub mod xid;

const PREFIX: &str = "nvidia";

/// Return the device node of the GPU with this minor number, as [`Gpu::nodes`](crate::Gpu::nodes) lists it: `nvidia0`.
pub fn node(minor: u32) -> String {
    format!("{PREFIX}{minor}")
}

/// Return the minor number of a GPU, given the names of its device nodes (`nvidia<minor>`). `None` for a GPU of another vendor.
pub fn minor(nodes: &[String]) -> Option<u32> {
    let [node] = nodes else { return None };
    let minor = node.strip_prefix(PREFIX)?.parse().ok()?;
    (self::node(minor) == *node).then_some(minor)
}
