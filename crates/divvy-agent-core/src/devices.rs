//! The device ids that are offered to the kubelet, and which of them are healthy.

use std::collections::BTreeSet;

use divvy_model::{DeviceId, Gpu, Health, MemoryUnit};

use super::{Core, Settings};

/// Ids above which the kubelet's checkpoint, rewritten at every change, and our messages become slow
/// (research/reliability.md section 1.6).
pub(super) const IDS_COMFORTABLE: u64 = 4_096;
/// Ids above which the kubelet refuses the ListAndWatch message (4 MiB) for good.
pub(super) const IDS_MAX: u64 = 60_000;

/// One id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The id.
    pub id: DeviceId,
    /// Whether the kubelet may hand it out.
    pub healthy: bool,
    /// NUMA node of its GPU.
    pub numa: Option<u32>,
}

/// The ids of both resources: one ListAndWatch message each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Devices {
    /// `aliyun.com/gpu-mem`.
    pub memory: Vec<Device>,
    /// `aliyun.com/gpu-count`.
    pub count: Vec<Device>,
}

/// The unit works, but is too small for comfort.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizeWarning {
    /// Ids of the node.
    pub ids: u64,
    /// The smallest power-of-two chunk with a comfortable number.
    pub suggestion: MemoryUnit,
}

impl std::fmt::Display for SizeWarning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "this node offers {} device ids; above {IDS_COMFORTABLE} the kubelet rewrites a large checkpoint at every change. \
             --memory-unit {} would keep it below (the unit must be the same on all nodes)",
            self.ids, self.suggestion
        )
    }
}

/// The unit is too small for this node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "with --memory-unit {unit} this node would offer {ids} device ids; the kubelet takes at most about {IDS_MAX}, more and it refuses \
     the whole resource. Use --memory-unit {smallest} or more; {comfortable} also keeps the kubelet's checkpoint small \
     (the unit must be the same on all nodes)"
)]
pub struct TooManyIds {
    /// Ids there would be.
    pub ids: u64,
    /// The unit that was chosen.
    pub unit: MemoryUnit,
    /// The smallest power-of-two chunk that the kubelet takes.
    pub smallest: MemoryUnit,
    /// The smallest power-of-two chunk without the warning.
    pub comfortable: MemoryUnit,
}

/// Units that a GPU offers, by its own size.
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
    /// All ids, GPUs in NVML's order, slots ascending.
    ///
    /// gpu-mem: of each failed GPU as many ids stay healthy as pods hold there, whether their containers started or not, so that
    /// kube-scheduler's `healthy − requested` is what the other GPUs have free; the others turn unhealthy. Ids are fungible, so
    /// those that turn are taken from the ones that the kubelet has free, first the failed GPU's own, and only when those run out
    /// from ids that are handed out (DESIGN.md section 8, "Health").
    ///
    /// gpu-count: a failed GPU's one id turns unhealthy. The resource grants nothing, so nothing depends on it.
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

    /// Units of a GPU that non-terminal pods of this node hold by their allocations.
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
        // Entries of ended pods linger in the checkpoint; the kubelet drops them at its next allocation.
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
    // The number of ids is limited to IDS_MAX by check_size.
    0..u32::try_from(gpu.units).unwrap_or(u32::MAX)
}
