//! AMD's GPUs, whole ones and shares. A container needs `/dev/kfd`, through which all compute goes, and the GPU's own DRI nodes; the kernel lets it use
//! exactly the GPUs whose render nodes it may open (Linux, `drivers/gpu/drm/amd/amdkfd/kfd_chardev.c`). ROCm is in the image.

use divvy_model::{Gpu, GrantRecord, Partition};

use super::{Edits, NodeFiles, Rules, Settings, gpushare_env};

#[derive(Debug)]
pub(super) struct Amd;

impl Rules for Amd {
    fn is_shared(&self, settings: &Settings, partition: Option<&Partition>) -> bool {
        settings.amd_shares && partition.is_none()
    }

    /// Return the PCI address, as AMD's device plugin does (`internal/pkg/amdgpu/amdgpu.go` in ROCm/k8s-device-plugin). The
    /// partitions of one GPU share the address, so a partition's id is its UUID.
    fn device_id(&self, gpu: &Gpu) -> String {
        match gpu.partition.is_none() && !gpu.pci.is_empty() {
            true => gpu.pci.clone(),
            false => gpu.uuid.clone(),
        }
    }

    fn shared_devices(&self) -> &'static [&'static str] {
        &["/dev/kfd"]
    }

    /// The groups are those of the device nodes: a program that does not run as root needs them, and they differ between
    /// distributions.
    fn edits(&self, record: &GrantRecord, gpus: &[&Gpu], node: &NodeFiles) -> Edits {
        let shared = self.shared_devices().iter().map(|path| (*path).to_owned());
        let own = gpus.iter().flat_map(|gpu| &gpu.nodes).map(|node| format!("/dev/{node}"));
        let device_nodes: Vec<String> = shared.chain(own).collect();
        let mut groups: Vec<u32> = device_nodes
            .iter()
            .filter_map(|path| node.devices.get(path).copied().flatten())
            .collect();
        groups.sort_unstable();
        groups.dedup();
        Edits {
            device_nodes,
            env: gpushare_env(record, gpus),
            groups,
        }
    }

    fn libraries(&self) -> Option<&'static str> {
        None
    }
}
