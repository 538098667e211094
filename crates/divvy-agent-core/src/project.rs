//! Convert a grant's record to the CDI spec that the container runtime reads. The spec contains only what the record and the node state,
//! so it can be rebuilt at any time.

use std::collections::BTreeSet;

use divvy_cdi::{self as cdi, GrantSpec, Spec};
use divvy_model::{GrantRecord, names};

use super::Core;

/// The driver's files on the node, by their paths on the node.
#[derive(Debug, Clone, Default)]
pub struct NodeFiles {
    /// Device nodes that exist, such as `/dev/nvidia-uvm`.
    pub devices: BTreeSet<String>,
    /// CDI specs of whole GPUs, which provide the driver's libraries.
    pub specs: Vec<Spec>,
}

/// Device nodes that every container with a GPU gets if the node has them, in addition to `/dev/nvidiactl`.
pub const SHARED_DEVICES: [&str; 3] = ["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"];

impl Core {
    /// Return the spec's name and text. `None` if a granted GPU is currently unknown: the record does not contain its minor number, which may
    /// change at a reboot.
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
        // gpushare never has several GPUs. With several, the index is a list, and DEV belongs to the first GPU.
        let env = [
            (names::ALIYUN_IDX, indexes.join(",")),
            (names::ALIYUN_POD, units.clone()),
            (names::ALIYUN_CONTAINER, units),
            // In the same unit as the other two values, even if --memory-unit has changed since.
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
