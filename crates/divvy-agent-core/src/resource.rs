//! The extended resources that the agent offers to the kubelet: which device ids each has, and what a container gets for them.

use std::borrow::Cow;
use std::collections::BTreeSet;

use divvy_model::{DeviceId, Gpu, GpuShare, MiB, PodRequest, WholeKind, names};

use super::AgentCore;
use super::vendor;

/// An extended resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResourceSpec {
    /// The device ids.
    pub ids: Ids,
    /// How ids become GPUs.
    pub grant: GrantSource,
}

/// What the device ids of a resource stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ids {
    /// One id per unit of memory of each shared GPU.
    Units,
    /// One id per shared GPU.
    Count,
    /// One id per GPU or MIG device of this kind that is offered as a whole: the id that the vendor's own device plugin uses.
    Whole(WholeKind),
}

/// Which GPUs a container gets for its ids of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GrantSource {
    /// The ids grant no GPU: the resource only shows a number.
    Nothing,
    /// The GPUs of the pod's allocation. A pod without an allocation does not start.
    Allocation,
    /// The GPUs of the pod's allocation. A pod that was bound by a scheduler without the extender has no allocation: it gets the
    /// GPUs that its ids name, or others if those are taken.
    AllocationOrIds,
}

impl ResourceSpec {
    /// `gpu-mem`: units of shared GPU memory.
    pub const MEMORY: ResourceSpec = ResourceSpec {
        ids: Ids::Units,
        grant: GrantSource::Allocation,
    };

    /// `gpu-count`: the number of shared GPUs.
    pub const COUNT: ResourceSpec = ResourceSpec {
        ids: Ids::Count,
        grant: GrantSource::Nothing,
    };

    /// Return the resource for whole GPUs or MIG devices of a kind.
    pub const fn whole(kind: WholeKind) -> ResourceSpec {
        ResourceSpec {
            ids: Ids::Whole(kind),
            grant: GrantSource::AllocationOrIds,
        }
    }

    /// Return the resource with this name.
    pub fn named(name: &str) -> Option<ResourceSpec> {
        match name {
            names::GPU_MEM => Some(ResourceSpec::MEMORY),
            names::GPU_COUNT => Some(ResourceSpec::COUNT),
            _ => WholeKind::of_resource(name).map(ResourceSpec::whole),
        }
    }

    /// Return the resource's name, such as `aliyun.com/gpu-mem`.
    pub fn name(self) -> Cow<'static, str> {
        match self.ids {
            Ids::Units => Cow::Borrowed(names::GPU_MEM),
            Ids::Count => Cow::Borrowed(names::GPU_COUNT),
            Ids::Whole(kind) => kind.resource(),
        }
    }

    /// Return the prefix of the file name of the device plugin's socket.
    pub fn socket(self) -> Cow<'static, str> {
        match self.ids {
            Ids::Units => Cow::Borrowed("divvy-gpu-mem"),
            Ids::Count => Cow::Borrowed("divvy-gpu-count"),
            Ids::Whole(WholeKind::Gpu(vendor)) => Cow::Owned(format!("divvy-{}-gpu", vendor.name())),
            // A socket's name has no +.
            Ids::Whole(WholeKind::Mig(profile)) => Cow::Owned(format!("divvy-mig-{profile}").replace('+', ".")),
        }
    }

    /// Report whether a container with ids of this resource gets a GPU.
    pub fn grants(self) -> bool {
        self.grant != GrantSource::Nothing
    }

    /// Return the containers of a pod that request this resource, in the kubelet's order, and how much each requests.
    pub(super) fn requests(self, request: &PodRequest) -> impl Iterator<Item = (&str, u64)> {
        let memory = request.memory_containers().filter(move |_| self.ids == Ids::Units);
        let whole = request.whole.iter().filter(move |whole| self.ids == Ids::Whole(whole.kind));
        let memory = memory.map(|container| (container.name.as_str(), container.units));
        let whole = whole.flat_map(|whole| &whole.containers);
        memory.chain(whole.map(|container| (container.name.as_str(), container.gpus)))
    }

    /// Report whether the resource has ids for this GPU.
    pub(super) fn covers(self, gpu: &Gpu) -> bool {
        match self.ids {
            Ids::Units | Ids::Count => gpu.is_shared(),
            Ids::Whole(kind) => gpu.whole == Some(kind),
        }
    }

    /// Return the number of ids that the resource has for this GPU.
    pub(super) fn amount(self, gpu: &Gpu) -> u64 {
        match self.ids {
            _ if !self.covers(gpu) => 0,
            Ids::Units => gpu.units,
            Ids::Count | Ids::Whole(_) => 1,
        }
    }

    /// Return a GPU's ids in ascending order.
    pub(super) fn ids_of(self, gpu: &Gpu) -> impl Iterator<Item = String> {
        // `devices::check_size` limits the number of ids.
        let slots = 0..u32::try_from(self.amount(gpu)).unwrap_or(u32::MAX);
        slots.map(move |slot| match self.ids {
            Ids::Units => DeviceId::Memory {
                uuid: gpu.uuid.clone(),
                slot,
            }
            .to_string(),
            Ids::Count => DeviceId::Count { uuid: gpu.uuid.clone() }.to_string(),
            Ids::Whole(_) => vendor::of(gpu.vendor).device_id(gpu),
        })
    }
}

impl AgentCore {
    /// Return the resources that this node offers. A node without GPUs offers `gpu-mem` and `gpu-count` with no devices. A resource of which
    /// live containers have devices is offered even if it has no devices now, because the kubelet asks its plugin before they start again.
    pub fn offers(&self) -> Vec<ResourceSpec> {
        let shares = self.gpus.is_empty() || self.gpus.iter().any(Gpu::is_shared);
        let shared = [ResourceSpec::MEMORY, ResourceSpec::COUNT].into_iter().filter(|_| shares);
        let mut kinds: BTreeSet<WholeKind> = self.gpus.iter().filter_map(|gpu| gpu.whole).collect();
        let given = self
            .granting(&self.handouts)
            .filter(|(_, handout)| self.records.contains_key(&handout.key));
        kinds.extend(given.filter_map(|(spec, _)| match spec.ids {
            Ids::Whole(kind) => Some(kind),
            Ids::Units | Ids::Count => None,
        }));
        shared.chain(kinds.into_iter().map(ResourceSpec::whole)).collect()
    }

    /// Return the name of the resource through which pods get this GPU. If it is offered in both ways, this is the resource of
    /// shared memory.
    pub(super) fn resource_of(gpu: &Gpu) -> Cow<'static, str> {
        let whole = gpu.whole.filter(|_| !gpu.is_shared());
        whole.map_or(Cow::Borrowed(names::GPU_MEM), WholeKind::resource)
    }

    /// Return the GPU that a device id of a resource names, and the id's slot on it.
    pub(super) fn gpu_of_id(&self, spec: ResourceSpec, id: &str) -> Option<(&Gpu, u32)> {
        let (uuid, slot) = match spec.ids {
            Ids::Whole(_) => {
                let mut gpus = self.gpus.iter().filter(|gpu| spec.covers(gpu));
                return gpus
                    .find(|gpu| vendor::of(gpu.vendor).device_id(gpu) == id)
                    .map(|gpu| (gpu, 0));
            }
            Ids::Units | Ids::Count => match id.parse().ok()? {
                DeviceId::Memory { uuid, slot } => (uuid, slot),
                DeviceId::Count { uuid } => (uuid, 0),
            },
        };
        Some((self.gpu(&uuid)?, slot))
    }

    /// Return how much of a GPU's memory all pods together may hold ([`divvy_model::Inventory::capacity`]).
    pub(super) fn capacity(&self, gpu: &Gpu) -> MiB {
        if !gpu.is_shared() {
            return gpu.whole_capacity();
        }
        let others = self.other_units().map(|unit| unit.memory(gpu.units_of(unit)));
        let most = others.chain([self.settings.unit.memory(gpu.units)]).flatten().max();
        gpu.at_least_whole(most.unwrap_or(MiB::ZERO))
    }

    /// Return the memory that a share books on a GPU. A pod that has the whole GPU books what the GPU offers now. This
    /// may be less than when the pod started, if more memory has been reserved since.
    pub(super) fn booked(&self, share: &GpuShare, gpu: &Gpu) -> MiB {
        if share.whole || !gpu.is_shared() {
            self.capacity(gpu)
        } else {
            share.memory
        }
    }
}
