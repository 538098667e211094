//! What the agent knows about the driver's files when it decides what a container gets.

use std::collections::BTreeMap;

use divvy_cdi::Spec;

/// The driver's files on the node, by their paths on the node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeFiles {
    /// The paths of [`AgentCore::device_paths`](crate::AgentCore::device_paths) that exist. The value is the group that a container's
    /// process must be in to use the device, or `None` if any process may use it or if only root may.
    pub devices: BTreeMap<String, Option<u32>>,
    /// CDI specs of whole GPUs, which provide the driver's libraries.
    pub specs: Vec<Spec>,
    /// Whether the MPS control daemon serves, as the marker says that it writes when its GPUs are ready.
    pub mps_serves: bool,
}
