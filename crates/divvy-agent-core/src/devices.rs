//! The device ids that the agent advertises to the kubelet, and which of them are healthy.

use std::collections::BTreeSet;

use divvy_model::{Gpu, Health, MemoryUnit, Pod};

use super::{AgentCore, CoreSettings, Ids, ResourceSpec};

/// The number of ids above which two things become slow: the kubelet's checkpoint, which is rewritten at every change, and the agent's
/// messages.
pub(super) const IDS_COMFORTABLE: u64 = 4_096;
/// The number of ids above which the ListAndWatch message exceeds 4 MiB, so that the kubelet refuses it permanently.
pub(super) const IDS_MAX: u64 = 60_000;

/// A device id and its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdvertisedDevice {
    pub id: String,
    /// Whether the kubelet may hand out the id.
    pub healthy: bool,
    /// The NUMA node of the id's GPU, or `None` if it is not known.
    pub numa: Option<u32>,
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

pub(super) fn check_size(gpus: &[Gpu], settings: &CoreSettings) -> Result<Option<SizeWarning>, TooManyIds> {
    let ids = |unit: MemoryUnit| gpus.iter().map(|gpu| gpu.units_of(unit)).fold(0_u64, u64::saturating_add);
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

impl AgentCore {
    /// Return all ids of a resource, with GPUs in the order of the inventory and slots ascending.
    ///
    /// A failed GPU keeps as many healthy ids as pods hold of it, whether or not their containers have started. For each of its
    /// remaining ids, one id of the resource becomes unhealthy. As a result, kube-scheduler's `healthy − requested` equals the
    /// number of free ids of the other GPUs. The kubelet may have handed out ids of any GPU, so the unhealthy ids are chosen in
    /// this order: free ids of the failed GPUs, free ids of other GPUs, and only then ids that are handed out.
    ///
    /// For `gpu-count`, the single id of each failed GPU becomes unhealthy. `gpu-count` grants nothing, so no container depends
    /// on its ids.
    pub fn devices(&self, spec: ResourceSpec) -> Vec<AdvertisedDevice> {
        let unhealthy = self.unhealthy_ids(spec);
        let mut devices = Vec::new();
        for gpu in &self.gpus {
            for id in spec.ids_of(gpu) {
                devices.push(AdvertisedDevice {
                    healthy: unhealthy.is_empty() || !unhealthy.contains(&id),
                    id,
                    numa: gpu.numa,
                });
            }
        }
        devices
    }

    /// Return how many of a GPU's ids the pods on this node hold, by their allocations and grants.
    fn amount_held(&self, spec: ResourceSpec, gpu: &Gpu) -> u64 {
        match spec.ids {
            Ids::Units => self.units_allocated(&gpu.uuid),
            Ids::Count => 0,
            Ids::Whole(_) => u64::from(self.holds_whole(gpu)),
        }
    }

    /// Return how many units of a GPU the allocations of this node's pods hold. Ended pods do not count, nor do pods that have the whole
    /// GPU, because they have no ids of units.
    fn units_allocated(&self, uuid: &str) -> u64 {
        self.pods
            .values()
            .filter(|known| !known.pod.ended() && known.pod.request.whole.is_none())
            .flat_map(|known| self.shares(&known.pin))
            .filter(|share| share.uuid == uuid)
            .map(|share| share.memory.0.div_ceil(self.settings.unit.mib()))
            .fold(0, u64::saturating_add)
    }

    /// Report whether a pod that has not ended has the GPU as what it is offered as a whole, or will have it.
    pub fn holds_whole(&self, gpu: &Gpu) -> bool {
        self.has_pod(gpu, |pod| {
            pod.request
                .whole
                .as_deref()
                .is_some_and(|whole| Some(whole.kind) == gpu.whole)
        })
    }

    /// Report whether a pod holds the GPU or a part of it. Only pods that have not ended and that `among` accepts count. A pod
    /// without an allocation holds the GPUs of its records.
    pub(super) fn has_pod(&self, gpu: &Gpu, among: impl Fn(&Pod) -> bool) -> bool {
        let mut here = self.pods.values().filter(|known| !known.pod.ended() && among(&known.pod));
        here.any(|known| {
            let promised = self.shares(&known.pin);
            let granted = self.records_of(&known.pod.uid).flat_map(|record| &record.gpus);
            promised.iter().chain(granted).any(|share| share.uuid == gpu.uuid)
        })
    }

    fn unhealthy_ids(&self, spec: ResourceSpec) -> BTreeSet<String> {
        // The pod that tests a GPU needs an id of it. The extender gives the GPU to no other pod, and PreStartContainer lets no other start.
        let failed = |gpu: &&Gpu| !matches!(gpu.health, Health::Ok | Health::Testing);
        let wanted = self
            .gpus
            .iter()
            .filter(failed)
            .map(|gpu| spec.amount(gpu).saturating_sub(self.amount_held(spec, gpu)))
            .fold(0, u64::saturating_add);
        if wanted == 0 {
            return BTreeSet::new();
        }
        // Entries of ended pods linger in the checkpoint until the kubelet's next allocation drops them.
        let ended = |uid: &str| self.pods.get(uid).is_some_and(|known| known.pod.ended());
        let handed_out: BTreeSet<&str> = self
            .handouts
            .iter()
            .filter(|handout| handout.resource == spec.name() && spec.grants() && !ended(&handout.key.uid))
            .flat_map(|handout| &handout.ids)
            .chain(self.in_flight.iter().flat_map(|in_flight| &in_flight.ids))
            .map(String::as_str)
            .collect();
        let mut candidates: Vec<(bool, bool, &str, usize, String)> = Vec::new();
        for gpu in &self.gpus {
            for (slot, id) in spec.ids_of(gpu).enumerate() {
                let free = !handed_out.contains(id.as_str());
                candidates.push((!free, gpu.health == Health::Ok, &gpu.uuid, slot, id));
            }
        }
        candidates.sort();
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
        candidates.into_iter().take(wanted).map(|(.., id)| id).collect()
    }
}
