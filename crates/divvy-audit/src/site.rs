use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_model::{Allocation, Health, Held, MemoryUnit, MiB, Node, Pod};

use super::finding::{AuditedCard, FindingKind, Moment};
use super::gpu::{self, AuditedGpu};
use super::{AuditLimits, who};

/// A suspicion that may only be due to the order in which two watches were recorded. It becomes a finding if the next state of
/// the node does not explain it.
#[derive(Debug)]
pub(super) struct Suspect {
    pub(super) at: Moment,
    pub(super) what: FindingKind,
    /// The position of the GPU whose memory is in question.
    pub(super) position: Option<usize>,
}

/// A node: the GPUs that it lists, and the pods on it.
#[derive(Debug)]
pub(super) struct AuditedNode {
    /// Whether the node's object was seen.
    pub(super) known: bool,
    pub(super) revision: Option<u64>,
    pub(super) generation: u64,
    /// The units in which the node's pods may request memory, the node's own unit first.
    pub(super) units: Vec<MemoryUnit>,
    /// GPUs that the node lists or has listed, in the order in which they were first seen.
    pub(super) gpus: Vec<AuditedGpu>,
    by_uuid: BTreeMap<String, usize>,
    pub(super) pods: BTreeSet<Arc<str>>,
    /// The number of pods that were allocated something here before the node's object was seen.
    pub(super) allocated: u64,
    /// The number of such pods that were also gone before the node's object was seen.
    pub(super) missed: u64,
    pub(super) suspects: Vec<Suspect>,
    /// Whether containers on this node report.
    pub(super) reports: bool,
}

impl AuditedNode {
    pub(super) fn new(unit: MemoryUnit) -> AuditedNode {
        AuditedNode {
            known: false,
            revision: None,
            generation: 0,
            units: vec![unit],
            gpus: Vec::new(),
            by_uuid: BTreeMap::new(),
            pods: BTreeSet::new(),
            allocated: 0,
            missed: 0,
            suspects: Vec::new(),
            reports: false,
        }
    }

    pub(super) fn unit(&self) -> MemoryUnit {
        self.units.first().copied().unwrap_or_default()
    }

    /// Return the memory that `held` takes on each GPU, by the position of the GPU. GPUs that are not known are left out.
    pub(super) fn parts(&self, held: &Held) -> Vec<(usize, MiB)> {
        if !self.known {
            return Vec::new();
        }
        let mut parts: Vec<(usize, MiB)> = Vec::new();
        match held {
            Held::Nothing | Held::Unreadable(_) => {}
            Held::Allocation(allocation) => {
                for share in &allocation.gpus {
                    if let Some(position) = self.by_uuid.get(&share.uuid) {
                        let memory = match self.gpus.get(*position) {
                            Some(gpu) if gpu.whole => gpu.capacity,
                            Some(gpu) if share.whole => gpu.capacity,
                            _ => share.memory,
                        };
                        parts.push((*position, memory));
                    }
                }
            }
            Held::Legacy(legacy) => {
                for (index, units) in &legacy.gpus {
                    // gpushare's indices are those of shared GPUs. Each vendor counts its own.
                    if let Some(position) = self.gpus.iter().position(|gpu| !gpu.whole && gpu.card.index == *index) {
                        parts.push((position, self.unit().memory(*units).unwrap_or(MiB(u64::MAX))));
                    }
                }
            }
        }
        parts
    }

    pub(super) fn position_of(&self, uuid: &str) -> Option<usize> {
        self.by_uuid.get(uuid).copied()
    }

    /// Process a new state of the node's object. Return whether the change affects the pods on the node, and findings about
    /// memory that was held too long and is now released, as (since, until, finding).
    pub(super) fn update(&mut self, at: Moment, node: &Node, limits: &AuditLimits) -> (bool, Vec<(Moment, Moment, FindingKind)>) {
        let (units, listed) = gpu::listed(node, limits.unit);
        let mut news = !self.known || self.units != units;
        (self.known, self.revision, self.units) = (true, at.revision, units);
        let mut long = Vec::new();
        for listed in listed {
            let position = match &listed.uuid {
                Some(uuid) => self.by_uuid.get(uuid).copied(),
                None => self.gpus.iter().position(|gpu| gpu.card.index == listed.index),
            };
            let position = position.unwrap_or_else(|| {
                news = true;
                if let Some(uuid) = &listed.uuid {
                    self.by_uuid.insert(uuid.clone(), self.gpus.len());
                }
                self.gpus.push(AuditedGpu {
                    card: AuditedCard {
                        node: node.name.clone(),
                        index: listed.index,
                        uuid: listed.uuid.clone(),
                    },
                    nodes: Vec::new(),
                    whole: false,
                    units: 0,
                    shared: MiB::ZERO,
                    capacity: MiB::ZERO,
                    held: MiB::ZERO,
                    levels: gpu::Levels::default(),
                    failed: None,
                    booked: gpu::Bookings::default(),
                    departed: BTreeMap::new(),
                    used: BTreeMap::new(),
                    over: None,
                    over_used: None,
                });
                self.gpus.len() - 1
            });
            let Some(gpu) = self.gpus.get_mut(position) else {
                continue;
            };
            gpu.card.index = listed.index;
            gpu.nodes = listed.nodes;
            gpu.whole = listed.whole;
            gpu.units = listed.units;
            gpu.shared = listed.shared;
            gpu.capacity = listed.capacity;
            gpu.held = listed.held;
            // As in the ledger: from now on, the agent counts these pods itself.
            if listed.held > MiB::ZERO && listed.held >= gpu.sum_departed() {
                gpu.departed.clear();
            }
            let ended = gpu.levels.set(listed.held, at);
            let most = ended.into_iter().find_map(|(held, since)| {
                let for_ms = at.at_ms?.saturating_sub(since.at_ms?);
                (for_ms > limits.leak_ms).then_some((held, since, for_ms))
            });
            if let Some((held, since, for_ms)) = most {
                let card = gpu.card.clone();
                long.push((since, at, FindingKind::HeldLong { card, held, for_ms }));
            }
            gpu.failed = match (listed.health, gpu.failed.take()) {
                (Health::Ok, _) => None,
                (_, Some(known)) => Some(known),
                (_, None) => Some((at, listed.reason.unwrap_or_else(|| "no reason given".to_owned()))),
            };
        }
        (news, long)
    }

    /// Check the suspicions against the node's new state. Drop the suspicions that this state explains. Return those that it
    /// should have explained but does not, and keep the others.
    pub(super) fn resolve(&mut self, at: Moment) -> Vec<Suspect> {
        let mut found = Vec::new();
        for suspect in std::mem::take(&mut self.suspects) {
            let explained = match (&suspect.what, suspect.position.and_then(|position| self.gpus.get(position))) {
                (FindingKind::NotOnNode { gpu, .. }, _) => self.by_uuid.contains_key(gpu),
                // Recorded late: by its revision, the node's state is older than the binding.
                (FindingKind::GivenEarly { capacity, booked, .. }, Some(gpu)) => {
                    at.revision < suspect.at.revision && booked.saturating_add(gpu.held) <= *capacity
                }
                _ => false,
            };
            if explained {
                continue;
            }
            let waits_on = self.reports && matches!(suspect.what, FindingKind::GivenEarly { .. });
            if waits_on || (at.revision.is_some() && at.revision < suspect.at.revision) {
                self.suspects.push(suspect);
            } else {
                found.push(suspect);
            }
        }
        found
    }

    /// Check a pod's allocation, now that its node is known.
    pub(super) fn check(
        &self,
        node: &str,
        pod: &Pod,
        at: Moment,
        newly: bool,
        limits: &AuditLimits,
    ) -> Vec<Result<FindingKind, Suspect>> {
        let mut found = Vec::new();
        let who = || who(pod);
        let mut missing = Vec::new();
        match &pod.held {
            Held::Nothing | Held::Unreadable(_) => return found,
            Held::Legacy(legacy) => {
                let (allocated, asked) = (
                    legacy.gpus.values().fold(0, |sum: u64, units| sum.saturating_add(*units)),
                    pod.request.effective_units().unwrap_or(u64::MAX),
                );
                if allocated != asked {
                    let memory = |units: u64| self.unit().memory(units).unwrap_or(MiB(u64::MAX));
                    found.push(Ok(FindingKind::NotAsAsked {
                        who: who(),
                        container: None,
                        asked: memory(asked),
                        allocated: memory(allocated),
                    }));
                }
                for index in legacy.gpus.keys() {
                    if !self.gpus.iter().any(|gpu| !gpu.whole && gpu.card.index == *index) {
                        missing.push(index.to_string());
                    }
                }
            }
            Held::Allocation(allocation) => {
                for share in &allocation.gpus {
                    match self.position_of(&share.uuid).and_then(|position| self.gpus.get(position)) {
                        None => missing.push(share.uuid.clone()),
                        Some(gpu) => {
                            let failed = gpu.failed.as_ref().filter(|_| newly);
                            let for_ms = failed.and_then(|(since, _)| Some(at.at_ms?.saturating_sub(since.at_ms?)));
                            if let (Some((_, reason)), Some(for_ms)) = (failed, for_ms)
                                && for_ms > limits.failed_ms
                            {
                                found.push(Ok(FindingKind::BoundToFailed {
                                    who: who(),
                                    card: gpu.card.clone(),
                                    reason: reason.clone(),
                                    for_ms,
                                }));
                            }
                        }
                    }
                }
                if !self
                    .units
                    .iter()
                    .chain(&former(pod, allocation))
                    .any(|unit| allocation.is_in(*unit, &pod.request))
                {
                    for (container, asked, allocated) in allocation.differs(self.unit(), &pod.request) {
                        found.push(Ok(FindingKind::NotAsAsked {
                            who: who(),
                            container: container.map(str::to_owned),
                            asked,
                            allocated,
                        }));
                    }
                }
            }
        }
        for gpu in missing {
            let what = FindingKind::NotOnNode {
                who: who(),
                node: node.to_owned(),
                gpu,
                elsewhere: None,
            };
            let position = None;
            found.push(Err(Suspect { at, what, position }));
        }
        found
    }
}

/// Return the unit with which an ended pod's allocation matches its request. If no pod with memory in that unit is left, the
/// agent no longer reports the unit.
fn former(pod: &Pod, allocation: &Allocation) -> Option<MemoryUnit> {
    let asked = pod.request.effective_units().filter(|units| *units > 0 && pod.ended())?;
    MemoryUnit::new(allocation.total().0 / asked)
}
