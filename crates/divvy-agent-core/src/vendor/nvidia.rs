//! Shares of NVIDIA's GPUs, and whole ones.

use divvy_cdi::NVIDIA_KIND;
use divvy_model::{Gpu, GrantRecord, names};

use super::{Edits, NodeFiles, Rules};

#[derive(Debug)]
pub(super) struct Nvidia;

/// The device node of the driver itself.
const CONTROL: &str = "/dev/nvidiactl";

impl Rules for Nvidia {
    fn device_id(&self, gpu: &Gpu) -> String {
        gpu.uuid.clone()
    }

    fn shared_devices(&self) -> &'static [&'static str] {
        &["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"]
    }

    /// The environment contains gpushare's variables, for programs that read them, and a variable that keeps NVIDIA's own runtime
    /// from adding GPUs. gpushare's variables describe shares, so a container with whole GPUs gets only the other one.
    fn edits(&self, record: &GrantRecord, gpus: &[&Gpu], node: &NodeFiles) -> Edits {
        let own = gpus.iter().flat_map(|gpu| &gpu.nodes).map(|node| format!("/dev/{node}"));
        let shared = self.shared_devices().iter().filter(|path| node.devices.contains_key(**path));
        let device_nodes = own.chain([CONTROL.to_owned()]).chain(shared.map(|path| (*path).to_owned()));
        let units = record
            .container_gpus
            .iter()
            .map(|share| record.unit.units_in(share.memory))
            .fold(0, u64::saturating_add)
            .to_string();
        let indexes: Vec<String> = gpus.iter().map(|gpu| gpu.index.to_string()).collect();
        let void = (names::VISIBLE_DEVICES, names::VISIBLE_NONE.to_owned());
        if !record.gpus.is_empty() && record.gpus.iter().all(|share| share.whole) {
            return Edits {
                device_nodes: device_nodes.collect(),
                env: vec![void],
                groups: Vec::new(),
            };
        }
        Edits {
            device_nodes: device_nodes.collect(),
            // gpushare never has several GPUs. With several, the index is a list, and DEV belongs to the first GPU.
            env: vec![
                (names::ALIYUN_IDX, indexes.join(",")),
                (names::ALIYUN_POD, units.clone()),
                (names::ALIYUN_CONTAINER, units),
                // In the same unit as the other two values, even if --memory-unit has changed since.
                (
                    names::ALIYUN_DEV,
                    gpus.first().map_or(0, |gpu| gpu.units_of(record.unit)).to_string(),
                ),
                void,
            ],
            groups: Vec::new(),
        }
    }

    fn libraries(&self) -> Option<&'static str> {
        Some(NVIDIA_KIND)
    }
}
