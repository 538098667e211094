//! Intel's GPUs, whole ones and shares. A container needs the GPU's own DRI nodes. The compute runtime is in the image. It looks for GPUs in
//! `/dev/dri/by-path`. If that directory is missing, it tries the render nodes (`Drm::discoverDevices` in intel/compute-runtime). So the directory is
//! not mounted.

use divvy_model::{Gpu, GrantRecord};

use super::{NodeFiles, VendorEdits, VendorRules, nodes_with_groups};

#[derive(Debug)]
pub(super) struct IntelVendor;

/// Return the name of the GPU's card node, such as `card0`. `None` if it has none.
fn card(gpu: &Gpu) -> Option<&str> {
    let mut names = gpu.nodes.iter().filter_map(|node| node.strip_prefix("dri/"));
    names.find(|name| name.starts_with("card"))
}

impl VendorRules for IntelVendor {
    /// Return the card's name and 0, as in `card0-0`. Intel's device plugin numbers the containers of a card, of which there is one by default
    /// (`cmd/gpu_plugin/gpu_plugin.go` in intel/intel-device-plugins-for-kubernetes).
    fn device_id(&self, gpu: &Gpu) -> String {
        card(gpu).map_or_else(|| gpu.uuid.clone(), |card| format!("{card}-0"))
    }

    /// With its flag `-shared-dev-num`, Intel's plugin gives a card to several containers: `card0-0`, `card0-1`, and so on.
    fn names(&self, gpu: &Gpu, id: &str) -> bool {
        let named = id.rsplit_once('-').map(|(card, _)| card);
        self.device_id(gpu) == id || card(gpu).is_some_and(|card| named == Some(card))
    }

    fn shared_devices(&self) -> &'static [&'static str] {
        &[]
    }

    fn edits(&self, record: &GrantRecord, gpus: &[&Gpu], node: &NodeFiles) -> VendorEdits {
        nodes_with_groups(self.shared_devices(), record, gpus, node)
    }

    fn libraries(&self) -> Option<&'static str> {
        None
    }
}
