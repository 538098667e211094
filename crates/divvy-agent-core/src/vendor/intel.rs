//! Intel's GPUs, whole ones and shares. A container needs the GPU's own DRI nodes. The compute runtime is in the image.

use divvy_model::{Gpu, GrantRecord, Partition};

use super::{Edits, NodeFiles, Rules, Settings, gpushare_env};

#[derive(Debug)]
pub(super) struct Intel;

impl Rules for Intel {
    fn is_shared(&self, _settings: &Settings, _partition: Option<&Partition>) -> bool {
        false
    }

    fn device_id(&self, gpu: &Gpu) -> String {
        gpu.uuid.clone()
    }

    fn shared_devices(&self) -> &'static [&'static str] {
        &[]
    }

    fn edits(&self, record: &GrantRecord, gpus: &[&Gpu], _node: &NodeFiles) -> Edits {
        let own = gpus.iter().flat_map(|gpu| &gpu.nodes).map(|node| format!("/dev/{node}"));
        Edits {
            device_nodes: own.collect(),
            env: gpushare_env(record, gpus),
            groups: Vec::new(),
        }
    }

    fn libraries(&self) -> Option<&'static str> {
        None
    }
}
