//! PreStartContainer: which container this is, which GPU it was given, and whether its memory is really free.
//!
//! This is the only call of the device plugin protocol whose error the kubelet retries, so everything that can be wrong is
//! decided here (DESIGN.md section 8).

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{GpuShare, GrantRecord, Health, MiB, names};

use super::booking::Booking;
use super::driver::Trouble;
use super::{Action, Core, Facts, Handout, Key, NodeFiles};

/// Why a start was refused, for metrics and events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The checkpoint cannot be read, or does not have these ids.
    Identity,
    /// Two live pods have exactly these ids, or one has those of another that has not ended.
    DoubleHandout,
    /// The pod's object has not been seen.
    UnknownPod,
    /// The pod has no allocation that can be read.
    NoAllocation,
    /// The allocated GPU is not there, failed, or was lost.
    GpuUnavailable,
    /// Other containers still hold the memory.
    MemoryHeld,
}

/// Reason of the event about a pod that chooses its GPUs by itself, too.
pub const OWN_VISIBLE_DEVICES: &str = "OwnVisibleDevices";

impl Reason {
    /// Value of the metrics' label.
    pub fn label(self) -> &'static str {
        match self {
            Reason::Identity => "identity",
            Reason::DoubleHandout => "double-handout",
            Reason::UnknownPod => "unknown-pod",
            Reason::NoAllocation => "no-allocation",
            Reason::GpuUnavailable => "gpu-unavailable",
            Reason::MemoryHeld => "memory-held",
        }
    }
}

/// The answer to PreStartContainer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PreStart {
    /// The container may start once these actions are performed, in this order.
    Granted {
        /// Record first, then spec.
        actions: Vec<Action>,
        /// Which container.
        key: Key,
        /// `namespace/name`.
        pod: String,
        /// GPUs of the container.
        gpus: Vec<String>,
        /// The kubelet's ids lie on another GPU.
        steered_wrong: bool,
        /// Other live pods have some of the same ids (kubernetes#137534); harmless to memory, counted.
        shared_ids: bool,
    },
    /// Something that will be known soon is not known yet: read checkpoint and pods again, then ask again; after the
    /// deadline this is the error.
    Wait(Reason, String),
    /// Not now; the kubelet tries again. An event goes with it where the user has to act.
    Refused {
        /// Class.
        reason: Reason,
        /// In words, shown in the container's status.
        text: String,
        /// At most one event.
        actions: Vec<Action>,
    },
}

impl Core {
    /// Decides whether the container that the kubelet gave these ids may start.
    pub fn pre_start(&mut self, ids: &[String], facts: &Facts) -> PreStart {
        let ids: BTreeSet<String> = ids.iter().cloned().collect();
        let Some(handouts) = &facts.handouts else {
            return PreStart::Wait(
                Reason::Identity,
                "the kubelet's checkpoint (device-plugins/kubelet_internal_checkpoint) cannot be read, so it is not known which container \
                 this is"
                    .to_owned(),
            );
        };
        let handout = match self.identify(&ids, handouts, facts) {
            Ok(handout) => handout,
            Err(answer) => return answer,
        };
        let key = handout.key.clone();
        let booking = match self.booking(&handout) {
            Ok(booking) => booking,
            Err((Reason::UnknownPod, text)) if !facts.fresh => return PreStart::Wait(Reason::UnknownPod, text),
            Err((reason, text)) => return self.refuse(&key, reason, text),
        };
        let checked = self.name_is_free(&handout, &booking, facts);
        match checked.and_then(|()| self.arbitrate(&key.uid, &booking, facts)) {
            Ok(()) => {}
            // The pods that hold the memory may have ended, and the agent may not know it yet.
            Err((reason @ (Reason::MemoryHeld | Reason::DoubleHandout), text)) if !facts.fresh => {
                return PreStart::Wait(reason, text);
            }
            Err((reason, text)) => return self.refuse(&key, reason, text),
        }
        self.grant(&handout, handouts, booking, facts)
    }

    /// The handout whose ids are exactly these. Entries of pods that ended do not count: the kubelet drops them at its next
    /// allocation only.
    fn identify(&self, ids: &BTreeSet<String>, handouts: &[Handout], facts: &Facts) -> Result<Handout, PreStart> {
        let mut by_pod: BTreeMap<&str, Vec<&Handout>> = BTreeMap::new();
        let mut unknown = false;
        for handout in self.memory_handouts(handouts).filter(|handout| handout.ids == *ids) {
            let uid = handout.key.uid.as_str();
            let populated = facts.populated.contains(uid);
            match self.pods.get(uid) {
                Some(known) if known.pod.ended() && !populated => continue,
                Some(_) => {}
                None if populated => {}
                None if facts.fresh => continue,
                None => unknown = true,
            }
            by_pod.entry(uid).or_default().push(handout);
        }
        let text = |ids: &BTreeSet<String>| {
            let first = ids.first().map_or("", String::as_str);
            format!("{} device ids ({first}, …)", ids.len())
        };
        if by_pod.len() > 1 {
            if unknown {
                return Err(PreStart::Wait(
                    Reason::UnknownPod,
                    format!("several pods have these {}, one of which is not known yet", text(ids)),
                ));
            }
            let names: Vec<String> = by_pod.keys().map(|uid| self.pod_name(uid)).collect();
            return Err(PreStart::Refused {
                reason: Reason::DoubleHandout,
                text: format!(
                    "the kubelet gave the same {} to {} (a known fault of the kubelet, kubernetes#137534), so it cannot be told which of \
                     them is starting; delete one of them, or wait until one ends",
                    text(ids),
                    names.join(" and ")
                ),
                actions: Vec::new(),
            });
        }
        let Some((uid, found)) = by_pod.pop_first() else {
            return Err(PreStart::Wait(
                Reason::Identity,
                format!(
                    "no container of a live pod has exactly these {} in the kubelet's checkpoint",
                    text(ids)
                ),
            ));
        };
        // An init container's ids come back to a later container of the pod. Which of them starts now is not in the call; they
        // run one after the other, so it is the first that has no grant yet, or a restart of the last.
        let mut found = found;
        if let Some(known) = self.pods.get(uid) {
            let place = |handout: &Handout| {
                let containers = &known.pod.request.containers;
                containers
                    .iter()
                    .position(|container| container.name == handout.key.container)
            };
            found.sort_by_key(|handout| place(handout));
        }
        let next = found.iter().find(|handout| !self.records.contains_key(&handout.key));
        match next.or(found.last()) {
            Some(handout) => Ok((*handout).clone()),
            None => Err(PreStart::Wait(Reason::Identity, text(ids))),
        }
    }

    /// A record of another pod that has the name of this handout's grant for other GPUs. Names return with ids. While a container of the old owner may
    /// still be on its way (its runtime has not looked at the spec yet, its pod was force-deleted meanwhile), the spec must not become another GPU's.
    pub(super) fn has_the_name<'a>(
        &self,
        mut records: impl Iterator<Item = &'a GrantRecord>,
        handout: &Handout,
        booking: &Booking,
        facts: &Facts,
    ) -> Option<&'a GrantRecord> {
        records.find(|record| {
            record.uid != handout.key.uid
                && handout.grant.is_some()
                && record.cdi == handout.grant
                && record.container_gpus != booking.container
                && self.may_run(&record.uid, facts)
        })
    }

    fn name_is_free(&self, handout: &Handout, booking: &Booking, facts: &Facts) -> Result<(), (Reason, String)> {
        match self.has_the_name(self.records.values(), handout, booking, facts) {
            None => Ok(()),
            Some(other) => Err((
                Reason::DoubleHandout,
                format!(
                    "the kubelet gave pod {} the device ids of {}, whose containers have not ended and which is on another GPU. It starts by \
                     itself once they have ended",
                    self.pod_name(&handout.key.uid),
                    other.pod()
                ),
            )),
        }
    }

    /// Every GPU of the pod must be usable, and what its live pods have plus this pod's total must fit: the sum over *pods*
    /// that were granted something there and may still have a running container, each pod's effective total once.
    fn arbitrate(&self, uid: &str, booking: &Booking, facts: &Facts) -> Result<(), (Reason, String)> {
        let pod = self.pod_name(uid);
        if booking.container.is_empty() {
            return Err((
                Reason::NoAllocation,
                format!("the allocation of pod {pod} gives this container no GPU"),
            ));
        }
        for share in &booking.gpus {
            let Some(gpu) = self.gpu(&share.uuid) else {
                return Err((
                    Reason::GpuUnavailable,
                    format!(
                        "pod {pod} is allocated on GPU {}, which this node does not have now (GPUs: {}). If the card was replaced, delete the \
                         pod so that it is placed anew",
                        share.uuid,
                        self.gpu_list()
                    ),
                ));
            };
            if gpu.health != Health::Ok {
                return Err((
                    Reason::GpuUnavailable,
                    format!(
                        "pod {pod} is allocated on GPU {} (index {}), which {}{}. It starts by itself when the GPU recovers; delete the pod to \
                         have it placed on another",
                        gpu.uuid,
                        gpu.index,
                        if gpu.health == Health::Lost { "is lost" } else { "has failed" },
                        gpu.reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default()
                    ),
                ));
            }
            let capacity = self.capacity(gpu);
            let wanted = booked(share, capacity);
            let others = self.booked_by_others(&share.uuid, uid, capacity, facts);
            let taken = others.values().fold(MiB::ZERO, |sum, memory| sum.saturating_add(*memory));
            if taken.checked_add(wanted).is_none_or(|sum| sum > capacity) {
                return Err((
                    Reason::MemoryHeld,
                    self.memory_held_text(&pod, gpu.index, wanted, capacity, taken, &others),
                ));
            }
        }
        Ok(())
    }

    /// Memory of a GPU that each other pod with a live grant books.
    fn booked_by_others(&self, uuid: &str, uid: &str, capacity: MiB, facts: &Facts) -> BTreeMap<String, MiB> {
        let mut others: BTreeMap<String, MiB> = BTreeMap::new();
        for record in self.records.values().filter(|record| record.uid != uid) {
            let Some(share) = record.gpus.iter().find(|share| share.uuid == uuid) else {
                continue;
            };
            if self.may_run(&record.uid, facts) {
                let booked = booked(share, capacity);
                let entry = others.entry(record.uid.clone()).or_default();
                *entry = booked.max(*entry);
            }
        }
        others
    }

    fn memory_held_text(
        &self,
        pod: &str,
        index: u32,
        wanted: MiB,
        capacity: MiB,
        taken: MiB,
        others: &BTreeMap<String, MiB>,
    ) -> String {
        if others.is_empty() {
            return format!(
                "pod {pod} is allocated {wanted} of GPU {index}, which has only {capacity} to share; its size or --reserve-memory changed \
                 since. Delete the pod so that it is placed anew"
            );
        }
        let holders: Vec<String> = others
            .iter()
            .map(|(uid, memory)| {
                let state = match self.pods.get(uid) {
                    None => " (deleted, container still running)",
                    Some(known) if known.pod.ended() => " (ended, container still running)",
                    Some(known) if known.pod.deleting => " (being deleted)",
                    Some(_) => "",
                };
                format!("{}{state}: {memory}", self.pod_name(uid))
            })
            .collect();
        format!(
            "pod {pod} needs {wanted} of GPU {index}, where {} of {capacity} are free: memory still held by {}. It starts by itself once they \
             have ended",
            capacity.saturating_sub(taken),
            holders.join(", ")
        )
    }

    fn grant(&self, handout: &Handout, handouts: &[Handout], booking: Booking, facts: &Facts) -> PreStart {
        let key = &handout.key;
        let (namespace, name) = match (self.pods.get(&key.uid), self.records.get(key)) {
            (Some(known), _) => (known.pod.namespace.clone(), known.pod.name.clone()),
            (None, Some(record)) => (record.namespace.clone(), record.name.clone()),
            (None, None) => (String::new(), String::new()),
        };
        let record = GrantRecord {
            v: 1,
            namespace,
            name,
            uid: key.uid.clone(),
            container: key.container.clone(),
            // From the recorded answer, never derived anew: what the runtime will look for is what the kubelet recorded.
            cdi: handout.grant.clone(),
            unit: self.unit_of(&key.uid),
            gpus: booking.gpus,
            container_gpus: booking.container,
            boot_id: self.settings.boot_id.clone(),
        };
        let mut actions = Vec::new();
        let before = self.records.get(key);
        if before != Some(&record) {
            actions.push(Action::WriteRecord(record.clone()));
        }
        // Once for a pod: with its first grant.
        let first = self.records.keys().all(|other| other.uid != key.uid);
        if let Some(known) = self.pods.get(&key.uid).filter(|_| first)
            && let Some((container, value)) = known.pod.own_visible.as_deref()
        {
            actions.push(Action::Event {
                pod: known.pod.key(),
                uid: key.uid.clone(),
                reason: OWN_VISIBLE_DEVICES,
                text: format!(
                    "container {container} sets {}={value} itself. That has no effect: it runs with the GPU that was allocated to the pod and sees \
                     no other. Take the variable out of the pod; more of a GPU is asked for by limits: {{{}: N}}",
                    names::VISIBLE_DEVICES,
                    names::GPU_MEM
                ),
            });
        }
        if let Some(known) = self.pods.get(&key.uid).filter(|_| first)
            && let Some(trouble) = self.without_libraries(&record, &facts.node)
        {
            actions.push(Action::Event {
                pod: known.pod.key(),
                uid: key.uid.clone(),
                reason: trouble.reason(),
                text: trouble.text,
            });
        }
        if let Some((name, text)) = self.project(&record, &facts.node) {
            actions.push(Action::WriteSpec { name, text });
        }
        if let Some(old) = before.and_then(|before| before.cdi.clone())
            && record.cdi.as_ref() != Some(&old)
            && self
                .records
                .iter()
                .all(|(other, record)| other == key || record.cdi.as_ref() != Some(&old))
        {
            actions.push(Action::RemoveSpec {
                name: old,
                owner: Some(key.uid.clone()),
            });
        }
        let gpus: Vec<String> = record.container_gpus.iter().map(|share| share.uuid.clone()).collect();
        let steered_wrong = handout.ids.iter().any(|id| {
            id.parse::<divvy_model::DeviceId>()
                .is_ok_and(|id| gpus.iter().all(|uuid| uuid != id.uuid()))
        });
        let shared_ids = self
            .memory_handouts(handouts)
            .any(|other| other.key.uid != key.uid && self.may_run(&other.key.uid, facts) && !other.ids.is_disjoint(&handout.ids));
        PreStart::Granted {
            actions,
            key: key.clone(),
            pod: record.pod().to_string(),
            gpus,
            steered_wrong,
            shared_ids,
        }
    }

    /// Why a container gets none of the driver's libraries, or wrong ones. That a spec has just gone the last look at the driver may not have seen.
    fn without_libraries(&self, record: &GrantRecord, node: &NodeFiles) -> Option<Trouble> {
        let named = |uuid: &str| {
            let mut devices = node.specs.iter().flat_map(|spec| &spec.devices);
            devices.any(|device| device.name == uuid)
        };
        let unnamed = record.container_gpus.iter().find(|share| !named(&share.uuid));
        match &self.driver_trouble {
            Some(trouble) if trouble.stale != unnamed.is_some() => Some(trouble.clone()),
            _ => {
                unnamed.map(|share| Trouble::of_none(&share.uuid).and("On the node: divvy cdi generate -o /etc/cdi/nvidia.yaml"))
            }
        }
    }

    fn refuse(&mut self, key: &Key, reason: Reason, text: String) -> PreStart {
        let class = match reason {
            Reason::NoAllocation => super::Class::NoAllocation,
            Reason::GpuUnavailable => super::Class::GpuUnavailable,
            Reason::MemoryHeld | Reason::Identity | Reason::DoubleHandout | Reason::UnknownPod => {
                return PreStart::Refused {
                    reason,
                    text,
                    actions: Vec::new(),
                };
            }
        };
        let actions = self.event_once(class, &key.uid, &text).into_iter().collect();
        PreStart::Refused { reason, text, actions }
    }
}

/// What a share books of a GPU: all of it if the GPU is given whole.
pub(super) fn booked(share: &GpuShare, capacity: MiB) -> MiB {
    if share.whole {
        capacity.max(share.memory)
    } else {
        share.memory
    }
}
