//! AMD's GPUs, whole ones and shares. A container needs `/dev/kfd`, through which all compute goes, and the GPU's own DRI nodes; the kernel lets it use
//! exactly the GPUs whose render nodes it may open (Linux, `drivers/gpu/drm/amd/amdkfd/kfd_chardev.c`). ROCm is in the image.

use divvy_model::{Gpu, GrantRecord};

use super::{NodeFiles, VendorEdits, VendorRules, nodes_with_groups};

#[derive(Debug)]
pub(super) struct AmdVendor;

impl VendorRules for AmdVendor {
    /// Return the PCI address, as AMD's device plugin does (`internal/pkg/amdgpu/amdgpu.go` in ROCm/k8s-device-plugin). The
    /// partitions of one GPU share the address, so a partition's id is its UUID.
    fn device_id(&self, gpu: &Gpu) -> String {
        if gpu.partition.is_none() && !gpu.pci.is_empty() {
            gpu.pci.clone()
        } else {
            gpu.uuid.clone()
        }
    }

    fn shared_devices(&self) -> &'static [&'static str] {
        &["/dev/kfd"]
    }

    fn edits(&self, record: &GrantRecord, gpus: &[&Gpu], node: &NodeFiles) -> VendorEdits {
        nodes_with_groups(self.shared_devices(), record, gpus, node)
    }

    fn libraries(&self) -> Option<&'static str> {
        None
    }
}
