//! The device ids that the agent advertises to the kubelet, and which of them are healthy.

use std::collections::BTreeSet;

use divvy_model::{DeviceId, Gpu, Health, MemoryUnit};

use super::{Core, Settings};

/// The number of ids above which two things become slow: the kubelet's checkpoint, which is rewritten at every change, and the agent's
/// messages.
pub(super) const IDS_COMFORTABLE: u64 = 4_096;
/// The number of ids above which the ListAndWatch message exceeds 4 MiB, so that the kubelet refuses it permanently.
pub(super) const IDS_MAX: u64 = 60_000;

/// A device id and its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    pub id: DeviceId,
    /// Whether the kubelet may hand out the id.
    pub healthy: bool,
    /// The NUMA node of the id's GPU, or `None` if it is not known.
    pub numa: Option<u32>,
}

/// The ids of both resources. Each resource is one ListAndWatch message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Devices {
    /// Ids of `aliyun.com/gpu-mem`.
    pub memory: Vec<Device>,
    /// Ids of `aliyun.com/gpu-count`.
    pub count: Vec<Device>,
}

/// A warning that the unit works but makes the kubelet slow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizeWarning {
    /// The node's number of ids.
    pub ids: u64,
    /// The smallest power-of-two unit with at most 4,096 ids.
    pub suggestion: MemoryUnit,
}

impl std::fmt::Display for SizeWarning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "this node offers {} device ids; above {IDS_COMFORTABLE}, the kubelet rewrites a large checkpoint at every change. \
             --memory-unit {} would keep the number below that (all nodes must use the same unit)",
            self.ids, self.suggestion
        )
    }
}

/// The error for a unit that is too small for this node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "with --memory-unit {unit} this node would offer {ids} device ids; the kubelet accepts at most about {IDS_MAX} and refuses the whole \
     resource if there are more. Use --memory-unit {smallest} or more; {comfortable} also keeps the kubelet's checkpoint small \
     (all nodes must use the same unit)"
)]
pub struct TooManyIds {
    /// The number of ids that the node would have.
    pub ids: u64,
    /// The unit that the operator chose.
    pub unit: MemoryUnit,
    /// The smallest power-of-two unit that the kubelet accepts.
    pub smallest: MemoryUnit,
    /// The smallest power-of-two unit that does not cause [`SizeWarning`].
    pub comfortable: MemoryUnit,
}

/// The number of units that a GPU offers, computed from its size and the reserve.
pub(super) fn units(gpu: &Gpu, settings: &Settings) -> u64 {
    settings.unit.units_in(gpu.total.saturating_sub(settings.reserve))
}

pub(super) fn check_size(gpus: &[Gpu], settings: &Settings) -> Result<Option<SizeWarning>, TooManyIds> {
    let ids = |unit: MemoryUnit| {
        gpus.iter()
            .map(|gpu| unit.units_in(gpu.total.saturating_sub(settings.reserve)))
            .fold(0_u64, u64::saturating_add)
    };
    let smallest = |limit: u64| {
        (0..63)
            .filter_map(|power| MemoryUnit::new(1 << power))
            .find(|unit| ids(*unit) <= limit)
            .unwrap_or(MemoryUnit::GIB)
    };
    match ids(settings.unit) {
        ids if ids > IDS_MAX => Err(TooManyIds {
            ids,
            unit: settings.unit,
            smallest: smallest(IDS_MAX),
            comfortable: smallest(IDS_COMFORTABLE),
        }),
        ids if ids > IDS_COMFORTABLE => Ok(Some(SizeWarning {
            ids,
            suggestion: smallest(IDS_COMFORTABLE),
        })),
        _ => Ok(None),
    }
}

impl Core {
    /// All ids, with GPUs in NVML's order and slots ascending.
    ///
    /// gpu-mem: each failed GPU keeps as many healthy ids as pods hold units there, whether or not their containers started. The number of
    /// its other ids turns unhealthy. As a result, kube-scheduler's `healthy − requested` equals what the other GPUs have free. The
    /// kubelet picks any free ids, so *which* ids turn unhealthy is chosen in this order: free ids of the failed GPUs, free ids of other
    /// GPUs, and only then ids that are handed out.
    ///
    /// gpu-count: the single id of a failed GPU turns unhealthy. This resource grants nothing, so nothing depends on its ids.
    pub fn devices(&self) -> Devices {
        let unhealthy = self.unhealthy_memory_ids();
        let mut devices = Devices::default();
        for gpu in &self.gpus {
            for slot in slots(gpu) {
                let id = DeviceId::Memory {
                    uuid: gpu.uuid.clone(),
                    slot,
                };
                devices.memory.push(Device {
                    healthy: unhealthy.is_empty() || !unhealthy.contains(&id),
                    id,
                    numa: gpu.numa,
                });
            }
            devices.count.push(Device {
                id: DeviceId::Count { uuid: gpu.uuid.clone() },
                healthy: gpu.health == Health::Ok,
                numa: gpu.numa,
            });
        }
        devices
    }

    /// Units of a GPU that the allocations of this node's non-terminal pods hold.
    fn units_allocated(&self, uuid: &str) -> u64 {
        self.pods
            .values()
            .filter(|known| !known.pod.ended())
            .flat_map(|known| self.shares(&known.pin))
            .filter(|share| share.uuid == uuid)
            .map(|share| share.memory.0.div_ceil(self.settings.unit.mib()))
            .fold(0, u64::saturating_add)
    }

    fn unhealthy_memory_ids(&self) -> BTreeSet<DeviceId> {
        let failed = |gpu: &&Gpu| gpu.health != Health::Ok;
        let wanted = self
            .gpus
            .iter()
            .filter(failed)
            .map(|gpu| gpu.units.saturating_sub(self.units_allocated(&gpu.uuid)))
            .fold(0, u64::saturating_add);
        if wanted == 0 {
            return BTreeSet::new();
        }
        // Entries of ended pods linger in the checkpoint until the kubelet's next allocation drops them.
        let ended = |uid: &str| self.pods.get(uid).is_some_and(|known| known.pod.ended());
        let handed_out: BTreeSet<&str> = self
            .memory_handouts(&self.handouts)
            .filter(|handout| !ended(&handout.key.uid))
            .flat_map(|handout| &handout.ids)
            .chain(self.in_flight.iter().flat_map(|in_flight| &in_flight.ids))
            .map(String::as_str)
            .collect();
        let mut candidates: Vec<(bool, bool, DeviceId)> = Vec::new();
        for gpu in &self.gpus {
            for slot in slots(gpu) {
                let id = DeviceId::Memory {
                    uuid: gpu.uuid.clone(),
                    slot,
                };
                let free = !handed_out.contains(id.to_string().as_str());
                candidates.push((!free, gpu.health == Health::Ok, id));
            }
        }
        candidates.sort();
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
        candidates.into_iter().take(wanted).map(|(_, _, id)| id).collect()
    }
}

fn slots(gpu: &Gpu) -> std::ops::Range<u32> {
    // `check_size` limits the number of ids to IDS_MAX.
    0..u32::try_from(gpu.units).unwrap_or(u32::MAX)
}
