//! Shares of NVIDIA's GPUs, and whole ones.

use divvy_cdi::NVIDIA_KIND;
use divvy_model::{Gpu, GrantRecord, names};

use super::{NodeFiles, VendorEdits, VendorRules, gpushare_env};

#[derive(Debug)]
pub(super) struct NvidiaRules;

/// The device node of the driver itself.
const CONTROL: &str = "/dev/nvidiactl";

impl VendorRules for NvidiaRules {
    fn device_id(&self, gpu: &Gpu) -> String {
        gpu.uuid.clone()
    }

    /// The ids of time-slicing have a number after the UUID, as in `GPU-…::0`.
    fn names(&self, gpu: &Gpu, id: &str) -> bool {
        id.split("::").next() == Some(gpu.uuid.as_str())
    }

    fn shared_devices(&self) -> &'static [&'static str] {
        &["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"]
    }

    /// Next to gpushare's variables, the environment contains one that keeps NVIDIA's own runtime from adding GPUs.
    fn edits(&self, record: &GrantRecord, gpus: &[&Gpu], node: &NodeFiles) -> VendorEdits {
        let own = gpus.iter().flat_map(|gpu| &gpu.nodes).map(|node| format!("/dev/{node}"));
        let shared = self.shared_devices().iter().filter(|path| node.devices.contains_key(**path));
        let device_nodes = own.chain([CONTROL.to_owned()]).chain(shared.map(|path| (*path).to_owned()));
        let mut env = gpushare_env(record, gpus);
        env.push((names::VISIBLE_DEVICES, names::VISIBLE_NONE.to_owned()));
        VendorEdits {
            device_nodes: device_nodes.collect(),
            env,
            groups: Vec::new(),
        }
    }

    fn libraries(&self) -> Option<&'static str> {
        Some(NVIDIA_KIND)
    }
}
