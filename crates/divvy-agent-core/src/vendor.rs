//! What differs between vendors when a container gets a GPU: one module for each vendor. Nothing else in this crate names a vendor.

mod amd;
mod intel;
mod nvidia;

use std::collections::BTreeSet;

use divvy_model::{Gpu, GrantRecord, Vendor, names};

use super::NodeFiles;

/// A vendor's rules.
pub(crate) trait VendorRules {
    /// Return the id under which the vendor's own device plugin offers a whole GPU. Exporters of metrics look for this id.
    fn device_id(&self, gpu: &Gpu) -> String;

    /// Report whether an id of the vendor's own device plugin names this GPU. A plugin that gives a GPU to several containers has several ids for it.
    fn names(&self, gpu: &Gpu, id: &str) -> bool {
        self.device_id(gpu) == id
    }

    /// Return the device nodes that every container with a GPU gets if the node has them.
    fn shared_devices(&self) -> &'static [&'static str];

    /// Return what a container gets for these GPUs. `gpus` are in the order of the record.
    fn edits(&self, record: &GrantRecord, gpus: &[&Gpu], node: &NodeFiles) -> VendorEdits;

    /// Return the kind of the CDI specs that provide the driver's libraries; `None` if the libraries are in the container's
    /// image.
    fn libraries(&self) -> Option<&'static str>;
}

/// What a container gets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct VendorEdits {
    /// Paths of device nodes on the node, which are the same in the container.
    pub(crate) device_nodes: Vec<String>,
    /// Environment variables, in this order.
    pub(crate) env: Vec<(&'static str, String)>,
    /// Groups that may use the device nodes.
    pub(crate) groups: Vec<u32>,
}

/// Return what a container gets that uses GPUs through device nodes alone, with a program's own libraries. The groups are those of the nodes: a program
/// that does not run as root needs them, and they differ between distributions.
fn nodes_with_groups(shared: &[&str], record: &GrantRecord, gpus: &[&Gpu], node: &NodeFiles) -> VendorEdits {
    let shared = shared.iter().map(|path| (*path).to_owned());
    let own = gpus.iter().flat_map(|gpu| &gpu.nodes).map(|node| format!("/dev/{node}"));
    let device_nodes: Vec<String> = shared.chain(own).collect();
    let groups: BTreeSet<u32> = device_nodes
        .iter()
        .filter_map(|path| node.devices.get(path).copied().flatten())
        .collect();
    VendorEdits {
        device_nodes,
        env: gpushare_env(record, gpus),
        groups: groups.into_iter().collect(),
    }
}

/// Return gpushare's variables for a container, in the order in which gpushare sets them, for programs that read them. They describe shares, so a
/// container with whole GPUs gets none.
fn gpushare_env(record: &GrantRecord, gpus: &[&Gpu]) -> Vec<(&'static str, String)> {
    if !record.gpus.is_empty() && record.gpus.iter().all(|share| share.whole) {
        return Vec::new();
    }
    let units = record
        .container_gpus
        .iter()
        .map(|share| record.unit.units_in(share.memory))
        .fold(0, u64::saturating_add)
        .to_string();
    let indexes: Vec<String> = gpus.iter().map(|gpu| gpu.index.to_string()).collect();
    // gpushare never has several GPUs. With several, the index is a list, and DEV belongs to the first GPU.
    vec![
        (names::ALIYUN_IDX, indexes.join(",")),
        (names::ALIYUN_POD, units.clone()),
        (names::ALIYUN_CONTAINER, units),
        // In the same unit as the other two values, even if --memory-unit has changed since.
        (
            names::ALIYUN_DEV,
            gpus.first().map_or(0, |gpu| gpu.units_of(record.unit)).to_string(),
        ),
    ]
}

/// Return a vendor's rules.
pub(crate) fn of(vendor: Vendor) -> &'static dyn VendorRules {
    match vendor {
        Vendor::Nvidia => &nvidia::NvidiaRules,
        Vendor::Amd => &amd::AmdVendor,
        Vendor::Intel => &intel::IntelVendor,
    }
}
