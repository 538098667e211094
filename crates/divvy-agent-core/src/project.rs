//! From a grant's record to the CDI spec that the runtime reads. The spec holds nothing that the record and the node do not
//! say, so it can be rebuilt at any time.

use std::collections::BTreeSet;

use divvy_cdi::{self as cdi, GrantSpec, Spec};
use divvy_model::{GrantRecord, names};

use super::Core;

/// Driver files of the node, as the node names them.
#[derive(Debug, Clone, Default)]
pub struct NodeFiles {
    /// Device files that are there, such as `/dev/nvidia-uvm`.
    pub devices: BTreeSet<String>,
    /// CDI specs of whole GPUs, from which the driver's libraries are taken.
    pub specs: Vec<Spec>,
}

/// Device files that every container with a GPU needs where the node has them, beside `/dev/nvidiactl`.
pub const SHARED_DEVICES: [&str; 3] = ["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"];

impl Core {
    /// The spec's text, or `None` if a granted GPU is not known now (its minor number is not in the record: it may change at
    /// a reboot).
    pub(super) fn project(&self, record: &GrantRecord, node: &NodeFiles) -> Option<(String, String)> {
        let name = record.cdi.as_deref()?;
        let gpus = record
            .container_gpus
            .iter()
            .map(|share| self.gpu(&share.uuid))
            .collect::<Option<Vec<_>>>()?;
        let mut device_nodes: Vec<String> = gpus.iter().map(|gpu| format!("/dev/nvidia{}", gpu.minor)).collect();
        device_nodes.push("/dev/nvidiactl".to_owned());
        device_nodes.extend(
            SHARED_DEVICES
                .iter()
                .filter(|path| node.devices.contains(**path))
                .map(|path| (*path).to_owned()),
        );
        let units = record
            .container_gpus
            .iter()
            .map(|share| record.unit.units_in(share.memory))
            .fold(0, u64::saturating_add)
            .to_string();
        let indexes: Vec<String> = gpus.iter().map(|gpu| gpu.index.to_string()).collect();
        // With several GPUs the index is a list, which the old plugin never had to write; DEV is then the first one's.
        let env = [
            (names::ALIYUN_IDX, indexes.join(",")),
            (names::ALIYUN_POD, units.clone()),
            (names::ALIYUN_CONTAINER, units),
            // In the unit of the other two, whatever --memory-unit is by now.
            (
                names::ALIYUN_DEV,
                gpus.first().map_or(0, |gpu| gpu.units_of(record.unit)).to_string(),
            ),
            (names::VISIBLE_DEVICES, names::VISIBLE_NONE.to_owned()),
        ];
        let uuids: Vec<&str> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        let text = cdi::grant_spec(&GrantSpec {
            name,
            owner: &record.to_json(),
            env: &env,
            device_nodes: &device_nodes,
            gpus: &uuids,
            base: &node.specs,
        });
        Some((name.to_owned(), text))
    }
}
