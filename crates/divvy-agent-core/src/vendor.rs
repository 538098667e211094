//! What differs between vendors when a container gets a GPU: one module for each vendor. Nothing else in this crate names a vendor.

mod amd;
mod intel;
mod nvidia;

use divvy_model::{Gpu, GrantRecord, Partition, Vendor, names};

use super::{NodeFiles, Settings};

/// A vendor's rules.
pub(crate) trait Rules {
    /// Report whether the node shares the memory of such a GPU, or of such a partition of one.
    fn is_shared(&self, settings: &Settings, partition: Option<&Partition>) -> bool;

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
pub(crate) fn of(vendor: Vendor) -> &'static dyn Rules {
    match vendor {
        Vendor::Nvidia => &nvidia::Nvidia,
        Vendor::Amd => &amd::Amd,
        Vendor::Intel => &intel::Intel,
    }
}
