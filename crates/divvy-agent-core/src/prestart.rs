//! PreStartContainer: which container starts, which GPU it was given, and whether that GPU's memory is really free.
//!
//! This is the only call of the device plugin protocol that the kubelet retries after an error. Therefore everything that can be
//! wrong is decided here and not in Allocate, whose error is final for the pod (`docs/design/allocation.md`).

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{Enforcement, Gpu, GpuShare, GrantRecord, Health, Isolation, MiB, PodKey, names};

use super::booking::Booking;
use super::driver_spec::DriverSpecTrouble;
use super::limits::nothing_limits;
use super::reason::Reason;
use super::{AgentAction, AgentCore, ContainerKey, DecisionFacts, Handout, NodeFiles, ResourceSpec, mps, vendor};

/// Reason of the event about a pod that sets `NVIDIA_VISIBLE_DEVICES` itself.
pub const OWN_VISIBLE_DEVICES: &str = "OwnVisibleDevices";
/// Why a container does not get the guard.
const NO_CUDA: &str = "no CDI spec of the GPU provides CUDA's driver library (libcuda.so), in whose place a container gets the guard. On the node, run: divvy cdi generate -o /etc/cdi/nvidia.yaml";

/// The answer to PreStartContainer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PreStart {
    /// The container may start once these actions are performed in this order.
    Granted {
        /// The actions: record first, then spec, then limits.
        actions: Vec<AgentAction>,
        /// The container.
        key: ContainerKey,
        /// The pod.
        pod: PodKey,
        /// UUIDs of the container's GPUs.
        gpus: Vec<String>,
        /// Whether some ids from the kubelet lie on a GPU other than the allocated ones.
        steered_wrong: bool,
        /// Whether other live pods have some of the same ids (kubernetes#137534). This does not affect memory and is only
        /// counted.
        shared_ids: bool,
    },
    /// The agent lacks a fact that should arrive soon. The caller reads the checkpoint and the pods again and repeats the call.
    /// At its deadline, the caller returns this text as the error.
    Wait(Reason, String),
    /// The container may not start now, and the kubelet tries again. An event is included if the user has to act.
    Refused {
        /// The class of the refusal.
        reason: Reason,
        /// The message in the container's status.
        text: String,
        /// At most one event.
        actions: Vec<AgentAction>,
    },
}

impl AgentCore {
    /// Decide whether the container with these ids of a resource may start.
    pub fn pre_start(&mut self, spec: ResourceSpec, ids: &[String], facts: &DecisionFacts) -> PreStart {
        let ids: BTreeSet<String> = ids.iter().cloned().collect();
        if !self.knows_service {
            return PreStart::Wait(
                Reason::UnknownNode,
                "the agent has not read this node's annotations since its start, and they may have taken the GPU out of service. The container starts \
                 automatically when the API server answers"
                    .to_owned(),
            );
        }
        let Some(handouts) = &facts.handouts else {
            return PreStart::Wait(
                Reason::Identity,
                "the kubelet's checkpoint (device-plugins/kubelet_internal_checkpoint) cannot be read, so the agent cannot tell which container \
                 is starting"
                    .to_owned(),
            );
        };
        let handout = match self.identify(spec, &ids, handouts, facts) {
            Ok(handout) => handout,
            Err(answer) => return *answer,
        };
        let key = handout.key.clone();
        let mut theirs = self
            .granting(handouts)
            .filter(|(_, other)| other.key == key && other.grant.is_some());
        if let Some((other, _)) = theirs.find(|(other, _)| *other != spec) {
            let (pod, container) = (self.pod_name(&key.uid), &key.container);
            let text = format!(
                "container {container} of pod {pod} requests both {} and {}; a container gets GPUs of one kind. Delete the pod, and request one of \
                 the two",
                spec.name(),
                other.name()
            );
            return self.refuse(&key, Reason::NoAllocation, text);
        }
        let booking = match self.booking(spec, &handout, facts) {
            Ok(booking) => booking,
            Err((Reason::UnknownPod, text)) if !facts.fresh => return PreStart::Wait(Reason::UnknownPod, text),
            Err((reason, text)) => return self.refuse(&key, reason, text),
        };
        let checked = self.name_is_free(&handout, &booking, facts);
        let checked = checked.and_then(|()| self.is_isolated(&key.uid, &booking));
        let checked = checked.and_then(|()| self.has_mps(&booking, &facts.node));
        match checked.and_then(|()| self.arbitrate(&key.uid, &booking, facts)) {
            Ok(()) => {}
            // The pods that hold the memory may have ended without the agent having seen it yet.
            // A daemon that was killed comes back within seconds.
            Err((reason @ Reason::MpsAbsent, text)) => return PreStart::Wait(reason, text),
            Err((reason @ (Reason::MemoryHeld | Reason::DoubleHandout), text)) if !facts.fresh => {
                return PreStart::Wait(reason, text);
            }
            Err((reason, text)) => return self.refuse(&key, reason, text),
        }
        let mut limits = self.limits(&key.uid, &booking);
        let mut unguarded = false;
        if !limits.guarded.is_empty() && (handout.grant.is_none() || !self.has_cuda(&booking, &facts.node)) {
            let isolation = self.isolation(&key.uid);
            let limits_memory = limits
                .guarded
                .iter()
                .all(|of| limits.gpus.iter().any(|(uuid, _)| *uuid == of.uuid));
            let wanted = match isolation {
                _ if limits.guarded.iter().any(|of| of.cores > 0) => Some(names::GPU_CORES),
                Some(_) if !limits_memory => Some(names::ISOLATION),
                _ => None,
            };
            if let Some(wanted) = wanted {
                let text = format!(
                    "pod {} wants its share of the GPU to be enforced ({wanted}), but {NO_CUDA}",
                    self.pod_name(&key.uid)
                );
                return self.refuse(&key, Reason::GpuUnavailable, text);
            }
            limits.guarded.clear();
            limits.are_required = isolation.is_some();
            unguarded = !limits_memory;
        }
        let mut answer = self.grant(spec, &handout, handouts, booking, !limits.guarded.is_empty(), facts);
        if let PreStart::Granted { actions, pod, .. } = &mut answer {
            if unguarded && self.records_of(&key.uid).next().is_none() {
                actions.push(nothing_limits(pod, &key.uid, NO_CUDA));
            }
            actions.extend(limits.steps(pod, &key.uid));
        }
        answer
    }

    /// Return the containers of pods that have not ended to which the kubelet gave exactly these ids of a resource. This names a call in the log;
    /// [`AgentCore::pre_start`] decides with more care.
    pub fn holders(&self, spec: ResourceSpec, ids: &[String]) -> Vec<&ContainerKey> {
        let ids: BTreeSet<&String> = ids.iter().collect();
        let ended = |uid: &str| self.pods.get(uid).is_some_and(|known| known.pod.ended());
        let theirs = self.handouts.iter().filter(|handout| handout.resource == spec.name());
        let holders = theirs.filter(|handout| handout.ids.iter().eq(ids.iter().copied()) && !ended(&handout.key.uid));
        holders.map(|handout| &handout.key).collect()
    }

    /// Return the handout with exactly these ids. Entries of ended pods do not count: the kubelet only drops them at its next
    /// allocation.
    fn identify(
        &self,
        spec: ResourceSpec,
        ids: &BTreeSet<String>,
        handouts: &[Handout],
        facts: &DecisionFacts,
    ) -> Result<Handout, Box<PreStart>> {
        let mut by_pod: BTreeMap<&str, Vec<&Handout>> = BTreeMap::new();
        let mut unknown = false;
        let of_resource = handouts.iter().filter(|handout| handout.resource == spec.name());
        for handout in of_resource.filter(|handout| handout.ids == *ids) {
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
                return Err(Box::new(PreStart::Wait(
                    Reason::UnknownPod,
                    format!("several pods have these {}, and one of the pods is not known yet", text(ids)),
                )));
            }
            let names: Vec<String> = by_pod.keys().map(|uid| self.pod_name(uid)).collect();
            return Err(Box::new(PreStart::Refused {
                reason: Reason::DoubleHandout,
                text: format!(
                    "the kubelet gave the same {} to {} (a known kubelet bug, kubernetes#137534), so the agent cannot tell which of \
                     them is starting; delete one of them, or wait until one ends",
                    text(ids),
                    names.join(" and ")
                ),
                actions: Vec::new(),
            }));
        }
        let Some((uid, found)) = by_pod.pop_first() else {
            return Err(Box::new(PreStart::Wait(
                Reason::Identity,
                format!(
                    "the kubelet's checkpoint has no container of a live pod with exactly these {}",
                    text(ids)
                ),
            )));
        };
        // The kubelet gives an init container's ids to a later container of the same pod, and the call does not say which one
        // starts. Containers that share ids run one after the other. So the first container without a grant starts now, or else
        // the last container restarts.
        let mut found = found;
        if let Some(known) = self.pods.get(uid) {
            let place = |handout: &Handout| {
                let mut containers = spec.requests(&known.pod.request);
                containers.position(|(container, _)| container == handout.key.container)
            };
            found.sort_by_key(|handout| place(handout));
        }
        let next = found.iter().find(|handout| !self.records.contains_key(&handout.key));
        match next.or(found.last()) {
            Some(handout) => Ok((*handout).clone()),
            None => Err(Box::new(PreStart::Wait(Reason::Identity, text(ids)))),
        }
    }

    /// Return a record of another pod that has the same grant name as this handout but other GPUs. Grant names are reused
    /// together with device ids. A container of the previous owner may still be starting: its pod was force-deleted, and the
    /// container runtime has not read the spec yet. Until the runtime has read it, the spec must not change to another GPU.
    pub(super) fn has_the_name<'a>(
        &self,
        mut records: impl Iterator<Item = &'a GrantRecord>,
        handout: &Handout,
        booking: &Booking,
        facts: &DecisionFacts,
    ) -> Option<&'a GrantRecord> {
        records.find(|record| {
            record.uid != handout.key.uid
                && handout.grant.is_some()
                && record.cdi == handout.grant
                && record.container_gpus != booking.container
                && self.may_run(&record.uid, facts)
        })
    }

    fn name_is_free(&self, handout: &Handout, booking: &Booking, facts: &DecisionFacts) -> Result<(), (Reason, String)> {
        match self.has_the_name(self.records.values(), handout, booking, facts) {
            None => Ok(()),
            Some(other) => Err((
                Reason::DoubleHandout,
                format!(
                    "the kubelet gave pod {} the device ids of {}, which is on another GPU and whose containers have not ended. The container \
                     starts automatically once they have ended",
                    self.pod_name(&handout.key.uid),
                    other.pod()
                ),
            )),
        }
    }

    /// Check that every GPU of the pod is usable and that the pod fits next to the pods already there. The sum runs over the *pods* that
    /// have a grant on the GPU and may still have a running container, and counts each pod's effective total once.
    fn arbitrate(&self, uid: &str, booking: &Booking, facts: &DecisionFacts) -> Result<(), (Reason, String)> {
        let pod = self.pod_name(uid);
        if booking.container.is_empty() {
            return Err((
                Reason::NoAllocation,
                format!("the allocation of pod {pod} does not give this container a GPU"),
            ));
        }
        for share in &booking.gpus {
            let Some(gpu) = self.gpu(&share.uuid) else {
                return Err((
                    Reason::GpuUnavailable,
                    format!(
                        "pod {pod} is allocated on GPU {}, which this node does not have now (GPUs: {}). If it does not come back, delete the \
                         pod so that its replacement is placed again",
                        share.uuid,
                        self.gpu_list()
                    ),
                ));
            };
            if !self.accepts_health(uid, gpu) {
                return Err((
                    Reason::GpuUnavailable,
                    format!(
                        "pod {pod} is allocated on GPU {} (index {}), which {}{}. The container starts automatically when the GPU recovers; delete \
                         the pod to have its replacement placed on another GPU",
                        gpu.uuid,
                        gpu.index,
                        match gpu.health {
                            Health::Lost => "is lost",
                            Health::Testing => "is being tested",
                            Health::Ok | Health::Failed => "has failed",
                        },
                        gpu.reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default()
                    ),
                ));
            }
            let capacity = self.capacity(gpu);
            let wanted = self.booked(share, gpu);
            let others = self.booked_by_others(gpu, uid, facts);
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

    /// Report whether a pod may start on a GPU of this health: it is healthy, or the pod is that of its test.
    fn accepts_health(&self, uid: &str, gpu: &Gpu) -> bool {
        let request = self.pods.get(uid).map(|known| &known.pod.request);
        let rules = request.and_then(|request| request.rules.as_deref()?.as_ref().ok());
        gpu.health == Health::Ok || rules.is_some_and(|rules| rules.accept_health(gpu.health, gpu.test.as_ref()))
    }

    /// Return the memory that each other pod with a live grant books on a GPU, by pod UID.
    fn booked_by_others(&self, gpu: &Gpu, uid: &str, facts: &DecisionFacts) -> BTreeMap<String, MiB> {
        let mut others: BTreeMap<String, MiB> = BTreeMap::new();
        for record in self.records.values().filter(|record| record.uid != uid) {
            let Some(share) = record.gpus.iter().find(|share| share.uuid == gpu.uuid) else {
                continue;
            };
            if self.may_run(&record.uid, facts) {
                let booked = self.booked(share, gpu);
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
                "pod {pod} is allocated {wanted} of GPU {index}, which has only {capacity} to share: the GPU's size or --reserve-memory was \
                 changed. Delete the pod so that its replacement is placed again"
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
            "pod {pod} needs {wanted} of GPU {index}, where {} of {capacity} are free; memory is still held by {}. The container starts \
             automatically once they have ended",
            capacity.saturating_sub(taken),
            holders.join(", ")
        )
    }

    fn grant(
        &self,
        spec: ResourceSpec,
        handout: &Handout,
        handouts: &[Handout],
        booking: Booking,
        guarded: bool,
        facts: &DecisionFacts,
    ) -> PreStart {
        let key = &handout.key;
        let (namespace, name) = match (self.pods.get(&key.uid), self.records.get(key)) {
            (Some(known), _) => (known.pod.namespace.clone(), known.pod.name.clone()),
            (None, Some(record)) => (record.namespace.clone(), record.name.clone()),
            (None, None) => (String::new(), String::new()),
        };
        let threads = self.threads(&key.uid, &booking);
        let record = GrantRecord {
            v: 1,
            namespace,
            name,
            uid: key.uid.clone(),
            container: key.container.clone(),
            // Taken from the recorded answer and never derived again: the container runtime looks for the name that the kubelet recorded.
            cdi: handout.grant.clone(),
            unit: self.unit_of(&key.uid),
            gpus: booking.gpus,
            container_gpus: booking.container,
            guarded,
            threads,
            boot_id: self.settings.boot_id.clone(),
        };
        let mut actions = Vec::new();
        let before = self.records.get(key);
        if before != Some(&record) {
            actions.push(AgentAction::WriteRecord(record.clone()));
        }
        // Once per pod, with its first grant.
        let first = self.records.keys().all(|other| other.uid != key.uid);
        if let Some(known) = self.pods.get(&key.uid).filter(|_| first)
            && let Some((container, value)) = known.pod.own_visible.as_deref()
        {
            actions.push(AgentAction::Event {
                pod: known.pod.key(),
                uid: key.uid.clone(),
                reason: OWN_VISIBLE_DEVICES,
                text: format!(
                    "container {container} sets {}={value} itself, which has no effect: the container runs with the GPU that was allocated to the \
                     pod and sees no other. Remove the variable from the pod; to get more GPU memory, set limits: {{{}: N}}",
                    names::VISIBLE_DEVICES,
                    names::GPU_MEM
                ),
            });
        }
        if let Some(known) = self.pods.get(&key.uid).filter(|_| first)
            && let Some(trouble) = self.without_libraries(&record, &facts.node)
        {
            actions.push(AgentAction::Event {
                pod: known.pod.key(),
                uid: key.uid.clone(),
                reason: trouble.reason(),
                text: trouble.text,
            });
        }
        if let Some((name, text)) = self.project(&record, &facts.node) {
            actions.push(AgentAction::WriteSpec { name, text });
        }
        if let Some(old) = before.and_then(|before| before.cdi.clone())
            && record.cdi.as_ref() != Some(&old)
            && self
                .records
                .iter()
                .all(|(other, record)| other == key || record.cdi.as_ref() != Some(&old))
        {
            actions.push(AgentAction::RemoveSpec {
                name: old,
                owner: Some(key.uid.clone()),
            });
        }
        let gpus: Vec<String> = record.container_gpus.iter().map(|share| share.uuid.clone()).collect();
        let steered_wrong = handout.ids.iter().any(|id| {
            self.gpu_of_id(spec, id)
                .is_some_and(|(gpu, _)| gpus.iter().all(|uuid| *uuid != gpu.uuid))
        });
        let shared_ids = self.granting(handouts).any(|(of, other)| {
            of == spec && other.key.uid != key.uid && self.may_run(&other.key.uid, facts) && !other.ids.is_disjoint(&handout.ids)
        });
        PreStart::Granted {
            actions,
            key: key.clone(),
            pod: record.pod(),
            gpus,
            steered_wrong,
            shared_ids,
        }
    }

    /// Return whether a pod must be held to its share, if it says so.
    pub(super) fn isolation(&self, uid: &str) -> Option<Isolation> {
        self.pods.get(uid)?.pod.request.rules.as_deref()?.as_ref().ok()?.isolation
    }

    /// Check that shares of the pod's GPUs are enforced if the pod wants that. They were when the pod was placed.
    fn is_isolated(&self, uid: &str, booking: &Booking) -> Result<(), (Reason, String)> {
        let isolation = self.isolation(uid);
        for share in booking.gpus.iter().filter(|share| !share.whole) {
            let Some(gpu) = self.gpu(&share.uuid) else { continue };
            let (wanted, lacking) = if let Some(isolation) = isolation.filter(|isolation| !isolation.is_met_by(gpu.enforcement)) {
                (format!("{}: {}", names::ISOLATION, isolation.name()), "enforces shares")
            } else if needs_compute_limit(share, isolation) && !gpu.enforcement.is_some_and(Enforcement::limits_compute) {
                (format!("{}: {}", names::GPU_CORES, share.cores), "limits the compute time")
            } else {
                continue;
            };
            return Err((
                Reason::GpuUnavailable,
                format!(
                    "pod {} wants {wanted}, but nothing {lacking} of GPU {} (index {}) now: the driver or the agent's configuration was changed after \
                     the pod was placed. Delete the pod so that its replacement is placed again",
                    self.pod_name(uid),
                    gpu.uuid,
                    gpu.index
                ),
            ));
        }
        Ok(())
    }

    /// Report whether containers use this GPU through the MPS control daemon.
    pub(super) fn uses_mps(&self, uuid: &str) -> bool {
        self.settings.mps.is_some() && self.gpu(uuid).is_some_and(mps::serves)
    }

    /// Check that the MPS control daemon serves if the container needs it. Without the daemon, CUDA could not use the GPU.
    fn has_mps(&self, booking: &Booking, node: &NodeFiles) -> Result<(), (Reason, String)> {
        if node.mps_serves || !booking.container.iter().any(|share| self.uses_mps(&share.uuid)) {
            return Ok(());
        }
        Err((
            Reason::MpsAbsent,
            "the MPS control daemon of this node does not serve, and without it no program can use the GPU. The container starts automatically once it \
             does; its log says what it lacks: kubectl logs -l app.kubernetes.io/component=mps -n NAMESPACE"
                .to_owned(),
        ))
    }

    /// Return the part of a GPU's threads that MPS leaves to each process of the container, in percent; 0 if it has no limit.
    pub(super) fn threads(&self, uid: &str, booking: &Booking) -> u32 {
        let isolation = self.isolation(uid);
        let limited = booking
            .gpus
            .iter()
            .filter(|share| needs_compute_limit(share, isolation) && self.uses_mps(&share.uuid));
        limited.map(|share| share.cores).min().unwrap_or(0)
    }

    /// Report whether the container gets CUDA's driver library from a spec of one of its GPUs.
    fn has_cuda(&self, booking: &Booking, node: &NodeFiles) -> bool {
        booking.container.iter().any(|share| {
            let kind = self.gpu(&share.uuid).and_then(|gpu| vendor::of(gpu.vendor).libraries());
            let mut specs = node.specs.iter().filter(|spec| kind == Some(spec.kind.as_str()));
            specs.any(|spec| spec.mounts_cuda(&share.uuid))
        })
    }

    /// Return why the container gets none of the driver's libraries, or the wrong ones. The specs are checked again here, because a spec may
    /// have disappeared after the last check of the driver.
    fn without_libraries(&self, record: &GrantRecord, node: &NodeFiles) -> Option<DriverSpecTrouble> {
        let first = record.container_gpus.first().and_then(|share| self.gpu(&share.uuid))?;
        vendor::of(first.vendor).libraries()?;
        let named = |uuid: &str| {
            let mut devices = node.specs.iter().flat_map(|spec| &spec.devices);
            devices.any(|device| device.name == uuid)
        };
        let unnamed = record.container_gpus.iter().find(|share| !named(&share.uuid));
        match &self.driver_trouble {
            Some(trouble) if trouble.stale != unnamed.is_some() => Some(trouble.clone()),
            _ => unnamed.map(|share| {
                DriverSpecTrouble::of_none(&share.uuid).and("On the node, run: divvy cdi generate -o /etc/cdi/nvidia.yaml")
            }),
        }
    }

    fn refuse(&mut self, key: &ContainerKey, reason: Reason, text: String) -> PreStart {
        let class = match reason {
            Reason::NoAllocation => super::DisagreementClass::NoAllocation,
            Reason::GpuUnavailable => super::DisagreementClass::GpuUnavailable,
            Reason::MemoryHeld
            | Reason::Identity
            | Reason::DoubleHandout
            | Reason::UnknownPod
            | Reason::MpsAbsent
            | Reason::UnknownNode => {
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

/// Report whether a pod must be held to its share of the compute time, as [`divvy_model::GpuRules::needs_compute_limit`] does for a pod without a GPU.
fn needs_compute_limit(share: &GpuShare, isolation: Option<Isolation>) -> bool {
    share.cores > 0 && isolation != Some(Isolation::None)
}
