//! What differs between vendors when a container gets a GPU: one module for each vendor. Nothing else in this crate names a vendor.

mod amd;
mod nvidia;

use divvy_model::{Gpu, GrantRecord, Vendor};

use super::NodeFiles;

/// A vendor's rules.
pub(crate) trait Rules {
    /// Return the id under which the vendor's own device plugin offers a whole GPU. Exporters of metrics look for this id.
    fn device_id(&self, gpu: &Gpu) -> String;

    /// Return the device nodes that every container with a GPU gets if the node has them.
    fn shared_devices(&self) -> &'static [&'static str];

    /// Return what a container gets for these GPUs. `gpus` are in the order of the record.
    fn edits(&self, record: &GrantRecord, gpus: &[&Gpu], node: &NodeFiles) -> Edits;

    /// Return the kind of the CDI specs that provide the driver's libraries; `None` if the libraries are in the container's
    /// image.
    fn libraries(&self) -> Option<&'static str>;
}

/// What a container gets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Edits {
    /// Paths of device nodes on the node, which are the same in the container.
    pub(crate) device_nodes: Vec<String>,
    /// Environment variables, in this order.
    pub(crate) env: Vec<(&'static str, String)>,
    /// Groups that may use the device nodes.
    pub(crate) groups: Vec<u32>,
}

/// Return a vendor's rules.
pub(crate) fn of(vendor: Vendor) -> &'static dyn Rules {
    match vendor {
        Vendor::Nvidia => &nvidia::Nvidia,
        Vendor::Amd => &amd::Amd,
    }
}
