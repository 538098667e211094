//! Reconciliation: bring records, specs, the checkpoint, pods, cgroups, and the driver's processes into agreement. It runs at every
//! start and then every 10 s.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_model::{GpuShare, GrantRecord, Held, MiB};

use super::reason::DisagreementClass;
use super::{AgentAction, AgentCore, ContainerKey, DecisionFacts, Escape, Handout, Reaction, SpecOnNode, project};

/// The result of a reconciliation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reconciled {
    /// The actions, to be performed in this order.
    pub actions: Vec<AgentAction>,
    /// The number of occurrences of each class.
    pub classes: BTreeMap<DisagreementClass, u64>,
    /// Memory that containers hold without an allocation, by GPU UUID. The inventory publishes it.
    pub held: BTreeMap<String, MiB>,
    /// The GPUs in [`Reconciled::held`] that pods of the node have as a whole, without an allocation that names them.
    pub held_by_pods: BTreeSet<String>,
}

impl Reconciled {
    fn count(&mut self, class: DisagreementClass) {
        *self.classes.entry(class).or_default() += 1;
    }
}

impl AgentCore {
    /// Run one pass. The caller holds the lock that PreStart also takes, performs the actions, and commits them.
    pub fn reconcile(&mut self, facts: &DecisionFacts) -> Reconciled {
        let mut out = Reconciled::default();
        // The records as they will be after the actions. `self.records` changes only in `commit`.
        let mut records = self.records.clone();
        self.end_grants(facts, &mut records, &mut out);
        self.recover_records(facts, &mut records, &mut out);
        self.repair_specs(facts, &records, &mut out);
        self.measure_held(facts, &records, &mut out);
        self.find_disagreements(facts, &records, &mut out);
        // Forget the events about pods that are gone for good.
        let known: BTreeSet<&String> = self
            .pods
            .keys()
            .chain(self.others.keys())
            .chain(records.keys().map(|key| &key.uid))
            .collect();
        self.reported.retain(|(_, uid)| known.contains(uid));
        self.held = out.held.clone();
        self.held_by_pods.clone_from(&out.held_by_pods);
        self.show_held();
        out
    }

    /// End each grant whose pod has no process left *and* whose pod's object is gone or has ended.
    fn end_grants(&self, facts: &DecisionFacts, records: &mut BTreeMap<ContainerKey, GrantRecord>, out: &mut Reconciled) {
        // Until the list of pods was complete once, an unknown pod may be running.
        let ended: Vec<ContainerKey> = records.keys().filter(|key| !self.may_run(&key.uid, facts)).cloned().collect();
        for key in ended {
            let Some(record) = records.remove(&key) else { continue };
            // The spec goes first: if the agent crashes in between, the next pass removes the spec or the record that is left.
            if let Some(name) = record.cdi
                && records
                    .values()
                    .all(|other| other.cdi.as_ref() != Some(&name) || other.uid != key.uid)
            {
                out.actions.push(AgentAction::RemoveSpec {
                    name,
                    owner: Some(key.uid.clone()),
                });
            }
            out.actions.push(AgentAction::RemoveRecord(key));
            out.count(DisagreementClass::GrantEnded);
        }
    }

    /// Restore missing records, for example after the state directory was lost. Their sources are the specs, which carry a copy of the
    /// record, and the checkpoint together with the allocations of running pods.
    fn recover_records(
        &mut self,
        facts: &DecisionFacts,
        records: &mut BTreeMap<ContainerKey, GrantRecord>,
        out: &mut Reconciled,
    ) {
        let mut found: Vec<GrantRecord> = Vec::new();
        for (name, spec) in &facts.specs {
            if let Some(record) = &spec.record
                && record.cdi.as_ref() == Some(name)
                && !records.contains_key(&ContainerKey::of(record))
                && self.may_run(&record.uid, facts)
            {
                found.push(record.clone());
            }
        }
        for (spec, handout) in self.granting(facts.handouts.as_deref().unwrap_or_default()) {
            let key = &handout.key;
            let running = facts.populated.contains(&key.uid)
                && self
                    .pods
                    .get(&key.uid)
                    .is_some_and(|known| known.pod.container_running && !known.pod.ended());
            let have = records.contains_key(key) || found.iter().any(|record| ContainerKey::of(record) == *key);
            if !running || have {
                continue;
            }
            if let (Ok(booking), Some(known)) = (self.booking(spec, handout, facts), self.pods.get(&key.uid)) {
                // Only some container of the pod is known to run, maybe not this one. If its start would be refused, it has no grant.
                let other = self.has_the_name(records.values().chain(&found), handout, &booking, facts);
                if other.is_some() {
                    continue;
                }
                let threads = self.threads(&key.uid, &booking);
                found.push(GrantRecord {
                    v: 1,
                    namespace: known.pod.namespace.clone(),
                    name: known.pod.name.clone(),
                    uid: key.uid.clone(),
                    container: key.container.clone(),
                    cdi: handout.grant.clone(),
                    unit: self.unit_of(&key.uid),
                    gpus: booking.gpus,
                    container_gpus: booking.container,
                    guarded: false,
                    threads,
                    boot_id: self.settings.boot_id.clone(),
                });
            }
        }
        for record in found {
            out.count(DisagreementClass::RecordRebuilt);
            out.actions.push(AgentAction::WriteRecord(record.clone()));
            records.insert(ContainerKey::of(&record), record);
        }
    }

    /// Make the specs match the records. Every record of a pod that may start a container gets a spec with the current content: after a
    /// reboot the directory is empty, and minor numbers may have changed. Specs without a record are removed.
    fn repair_specs(&mut self, facts: &DecisionFacts, records: &BTreeMap<ContainerKey, GrantRecord>, out: &mut Reconciled) {
        let mut by_name: BTreeMap<&str, Vec<&GrantRecord>> = BTreeMap::new();
        for record in records.values() {
            if let Some(name) = record.cdi.as_deref() {
                by_name.entry(name).or_default().push(record);
            }
        }
        let mut projected = std::mem::take(&mut self.projected);
        projected.keep(&by_name, &facts.node, &self.gpus);
        for (name, candidates) in &by_name {
            let present = facts.specs.get(*name);
            let Some(record) = self.owner_of(name, candidates, present.map(Arc::as_ref), facts) else {
                continue;
            };
            if present.is_some_and(|spec| projected.of(name, spec, records) == Some(record)) {
                continue;
            }
            if let Some((name, text)) = self.project(record, &facts.node) {
                projected.made(name.clone(), &text, record);
                if present.is_none_or(|spec| spec.digest != project::digest(text.as_str())) {
                    out.actions.push(AgentAction::WriteSpec { name, text });
                    out.count(DisagreementClass::SpecRebuilt);
                }
            }
        }
        self.projected = projected;
        if !facts.synced {
            return;
        }
        for (name, spec) in &facts.specs {
            if !by_name.contains_key(name.as_str()) && !out.actions.iter().any(|action| removes(action, name)) {
                out.actions.push(AgentAction::RemoveSpec {
                    name: name.clone(),
                    owner: spec.owner().map(str::to_owned),
                });
                out.count(DisagreementClass::SpecOrphan);
            }
        }
    }

    /// Among the records with the same grant name, return the record that the spec belongs to. Only records of pods that may
    /// start a container count. Several pods share a name while the previous owner of the device ids is still ending. Then the
    /// spec belongs to the container in the kubelet's checkpoint, or else to the owner that the file names.
    fn owner_of<'a>(
        &self,
        name: &str,
        candidates: &[&'a GrantRecord],
        present: Option<&SpecOnNode>,
        facts: &DecisionFacts,
    ) -> Option<&'a GrantRecord> {
        let may_start: Vec<&GrantRecord> = candidates
            .iter()
            .filter(|record| match self.pods.get(&record.uid) {
                Some(known) => !known.pod.ended(),
                None => !facts.synced,
            })
            .copied()
            .collect();
        if let [] | [_] = may_start[..] {
            return may_start.first().copied();
        }
        let present = present.and_then(|spec| spec.record.as_ref());
        let in_file = |record: &&&GrantRecord| present.is_some_and(|p| p.uid == record.uid && p.container == record.container);
        let handouts = facts.handouts.as_deref().unwrap_or_default();
        let in_checkpoint = |record: &&&GrantRecord| {
            handouts
                .iter()
                .any(|handout| handout.grant.as_deref() == Some(name) && handout.key == ContainerKey::of(record))
        };
        may_start
            .iter()
            .find(|record| in_file(record) && in_checkpoint(record))
            .or_else(|| may_start.iter().find(in_checkpoint))
            .or_else(|| may_start.iter().find(in_file))
            .or(may_start.first())
            .copied()
    }

    /// Sum up the memory that containers hold and that the extender cannot see in any pod's allocation. The holders are pods
    /// whose object is gone or has ended, and pods that got whole GPUs without an allocation. Each pod counts once.
    fn measure_held(&mut self, facts: &DecisionFacts, records: &BTreeMap<ContainerKey, GrantRecord>, out: &mut Reconciled) {
        if !facts.synced {
            out.held.clone_from(&self.held);
            out.held_by_pods.clone_from(&self.held_by_pods);
            return;
        }
        let mut by_pod: BTreeMap<&str, (&GrantRecord, BTreeMap<&str, MiB>)> = BTreeMap::new();
        for record in records.values() {
            let without = self.pods.get(&record.uid).is_none_or(|known| known.pod.ended());
            if without && facts.populated.contains(&record.uid) {
                // The records of a pod without an allocation do not all have the same GPUs.
                let (_, gpus) = by_pod.entry(&record.uid).or_insert((record, BTreeMap::new()));
                for share in &record.gpus {
                    let booked = self.gpu(&share.uuid).map_or(share.memory, |gpu| self.booked(share, gpu));
                    let most = gpus.entry(&share.uuid).or_default();
                    *most = booked.max(*most);
                }
            }
        }
        for record in records.values() {
            for (uuid, memory) in self.held_by_choice(record) {
                out.held_by_pods.insert(uuid.clone());
                let held = out.held.entry(uuid).or_default();
                *held = memory.max(*held);
            }
        }
        let handouts = facts.handouts.as_deref().unwrap_or_default();
        for (key, gpu) in self.promised_by_another_plugin(handouts, facts) {
            if !records.contains_key(key) {
                out.held_by_pods.insert(gpu.uuid.clone());
                let held = out.held.entry(gpu.uuid.clone()).or_default();
                *held = self.capacity(gpu).max(*held);
            }
        }
        for (uid, (record, gpus)) in by_pod {
            for (uuid, booked) in gpus {
                let held = out.held.entry(uuid.to_owned()).or_default();
                *held = held.saturating_add(booked);
            }
            out.count(DisagreementClass::HeldWithoutPod);
            let text = format!(
                "the pod's object is gone or has ended, but its containers still run on this node and hold {}; the memory becomes available \
                 when they have ended",
                shares_text(record)
            );
            if self.reported.insert((DisagreementClass::HeldWithoutPod, uid.to_owned())) {
                out.actions.push(AgentAction::Event {
                    pod: record.pod(),
                    uid: uid.to_owned(),
                    reason: DisagreementClass::HeldWithoutPod.event_reason(),
                    text,
                });
            }
        }
    }

    /// Return the GPUs of a record that the extender did not choose, and the memory that the pod books on each. The extender
    /// cannot see them, because the pod's annotation does not name them. The list is empty for a pod that has ended.
    pub(super) fn held_by_choice(&self, record: &GrantRecord) -> Vec<(String, MiB)> {
        let known = self.pods.get(&record.uid).filter(|known| !known.pod.ended());
        let Some(pod) = known.map(|known| &known.pod).filter(|pod| pod.request.whole.is_some()) else {
            return Vec::new();
        };
        let unseen = record.gpus.iter().filter(|share| match &pod.held {
            Held::Allocation(allocation) => allocation.share(&share.uuid).is_none(),
            Held::Nothing | Held::Legacy(_) | Held::Unreadable(_) => true,
        });
        let booked = |share: &GpuShare| self.gpu(&share.uuid).map_or(share.memory, |gpu| self.booked(share, gpu));
        unseen.map(|share| (share.uuid.clone(), booked(share))).collect()
    }

    fn find_disagreements(&mut self, facts: &DecisionFacts, records: &BTreeMap<ContainerKey, GrantRecord>, out: &mut Reconciled) {
        let mut found: Vec<(DisagreementClass, String, String)> = Vec::new();
        if let Some(handouts) = &facts.handouts {
            for key in records.keys() {
                let lost = facts.populated.contains(&key.uid)
                    && self
                        .pods
                        .get(&key.uid)
                        .is_some_and(|known| !known.pod.ended() && !known.pod.deleting)
                    && !self.granting(handouts).any(|(_, handout)| handout.key == *key);
                if lost {
                    let text = format!(
                        "the kubelet has lost its record of the devices of container {} (its checkpoint was lost): the container keeps running, but \
                         it cannot be restarted. Delete the pod when convenient",
                        key.container
                    );
                    found.push((DisagreementClass::CheckpointLost, key.uid.clone(), text));
                }
            }
            for handout in self.given_meanwhile(handouts) {
                let text = format!(
                    "another device plugin gave container {} its {}, while Divvy's agent offers the same GPUs on this node: pods of either plugin \
                     may get a GPU that pods of the other use. Keep NVIDIA's plugin off this node: give its DaemonSet a nodeSelector or an \
                     affinity that excludes the node",
                    handout.key.container, handout.resource
                );
                found.push((DisagreementClass::AnotherPlugin, handout.key.uid.clone(), text));
            }
            for (uid, others) in self.double_handouts(handouts, facts) {
                let text = format!(
                    "the kubelet gave some device ids of this pod to {others} as well (kubernetes#137534); memory is not affected, because each pod \
                     uses the GPU of its allocation"
                );
                found.push((DisagreementClass::DoubleHandout, uid, text));
            }
        }
        for gpu in &self.gpus {
            let capacity = self.capacity(gpu);
            let mut pods: BTreeMap<&str, MiB> = BTreeMap::new();
            for record in records.values().filter(|record| self.may_run(&record.uid, facts)) {
                if let Some(share) = record.gpus.iter().find(|share| share.uuid == gpu.uuid) {
                    let booked = self.booked(share, gpu);
                    let most = pods.entry(&record.uid).or_default();
                    *most = booked.max(*most);
                }
            }
            let sum = pods.values().fold(MiB::ZERO, |sum, memory| sum.saturating_add(*memory));
            if sum > capacity {
                for uid in pods.keys() {
                    let text = format!(
                        "the pods on GPU {} hold {sum}, but it has {capacity} to share: its size or --reserve-memory changed while they ran",
                        gpu.index
                    );
                    found.push((DisagreementClass::Overcommitted, (*uid).to_owned(), text));
                }
            }
        }
        self.find_strays(facts, records, &mut found);
        self.find_escapes(facts, &mut found);
        self.mark_for_eviction(facts);
        for (class, uid, text) in found {
            out.count(class);
            out.actions.extend(self.event_once(class, &uid, &text));
        }
    }

    /// Compare the driver's list of processes with the grants. The agent can only report a difference: the memory is in use already.
    fn find_strays(
        &self,
        facts: &DecisionFacts,
        records: &BTreeMap<ContainerKey, GrantRecord>,
        found: &mut Vec<(DisagreementClass, String, String)>,
    ) {
        for (uuid, pods) in facts.memory_in_use.iter().flatten() {
            let Some(gpu) = self.gpu(uuid) else { continue };
            for (uid, used) in pods {
                // A grant that ends in this very pass was still valid when the driver was queried.
                if is_reported(facts, uid, uuid) {
                    continue;
                }
                let granted = records
                    .values()
                    .chain(self.records_of(uid))
                    .filter(|record| record.uid == *uid)
                    .find_map(|record| record.gpus.iter().find(|share| share.uuid == *uuid));
                match granted.map(|share| self.booked(share, gpu)) {
                    None => {
                        let text = format!(
                            "a process of this pod runs on GPU {} and uses {used} of its memory without a grant from Divvy: this memory may be \
                             promised to other pods. A pod gets a GPU by requesting {}. Check how this pod reaches the GPU: privileged, hostPath, \
                             another device plugin, or nvidia as the default container runtime",
                            gpu.index,
                            AgentCore::resource_of(gpu)
                        );
                        found.push((DisagreementClass::NotGranted, uid.clone(), text));
                    }
                    Some(granted) if *used > granted => {
                        let text = format!(
                            "the pod's processes use {used} of GPU {}, but {granted} were granted: other pods on this GPU may run out of memory. \
                             Request more, or limit what the program uses",
                            gpu.index
                        );
                        found.push((DisagreementClass::MemoryExceeded, uid.clone(), text));
                    }
                    Some(_) => {}
                }
            }
        }
    }

    /// Report whether a GPU was granted to a container of the pod.
    pub fn is_granted(&self, uid: &str, uuid: &str) -> bool {
        self.records_of(uid)
            .any(|record| record.gpus.iter().any(|share| share.uuid == uuid))
    }

    /// Report whether all containers of a pod that were granted a GPU have the guard.
    pub fn is_guarded(&self, uid: &str) -> bool {
        self.records_of(uid).all(|record| record.guarded)
    }

    /// Report pods that are not held to their shares.
    fn find_escapes(&self, facts: &DecisionFacts, found: &mut Vec<(DisagreementClass, String, String)>) {
        let reaction = match self.reaction() {
            Reaction::Event => "",
            Reaction::Throttle => ". Until this ends, the pod's other programs on its GPUs wait (--on-escape throttle)",
            Reaction::Evict => ". The pod is evicted (--on-escape evict)",
            Reaction::Kill => ". The agent kills such processes (--on-escape kill)",
        };
        let has_audit = self.settings.guard.as_ref().is_some_and(|guard| guard.audit.is_some());
        let both = if has_audit {
            ""
        } else {
            " (with --guard both, the guard takes its place)"
        };
        for (uid, escape) in facts
            .escapes
            .iter()
            .flat_map(|(uid, all)| all.iter().map(move |escape| (uid, escape)))
        {
            let Some(gpu) = self.gpu(escape.uuid()) else { continue };
            let index = gpu.index;
            let (class, text) = match escape {
                Escape::Unguarded { pid, .. } => (
                    DisagreementClass::Unguarded,
                    format!(
                        "process {pid} of this pod uses GPU {index} without Divvy's guard, so nothing limits the process to the pod's share. A program \
                         avoids the guard if it loads the driver's library by another path than the usual one, if the image has a CUDA driver library of \
                         its own{both}, or if it uses no CUDA. Use the CUDA library that the container gets, or request a whole GPU{reaction}"
                    ),
                ),
                Escape::Tampered { change, .. } => (
                    DisagreementClass::Tampered,
                    format!(
                        "a program of this pod changed the file in which Divvy's guard counts what the pod uses of GPU {index}, so nothing limits the \
                         pod to its share: {change}. Delete the pod if you do not know the program{reaction}"
                    ),
                ),
                Escape::NotGranted { pid, .. } => (
                    DisagreementClass::NotGranted,
                    format!(
                        "process {pid} of this pod uses GPU {index}, which was not granted to the pod: its memory may be promised to other pods. Check \
                         how this pod reaches the GPU: privileged, hostPath, or another device plugin{reaction}"
                    ),
                ),
                Escape::Exceeded { used, share, .. } => (
                    DisagreementClass::MemoryExceeded,
                    format!(
                        "the pod's processes use {used} of GPU {index}, but {share} were granted: other pods on this GPU may run out of memory. Request \
                         more, or limit what the program uses{reaction}"
                    ),
                ),
                Escape::Busy { .. } => (
                    DisagreementClass::Busy,
                    format!(
                        "the file in which Divvy's guard counts what this pod uses of GPU {index} cannot be read in time, so the agent measures nothing for this \
                         pod. A program of the pod that writes to the file all the time causes this, and so does a slow disk"
                    ),
                ),
                Escape::Crowded { .. } => (
                    DisagreementClass::Crowded,
                    format!(
                        "at most {} processes of a pod can use GPU {index} at the same time; others were refused memory (CUDA_ERROR_OUT_OF_MEMORY). \
                         Start fewer processes, or several pods",
                        divvy_share::usage::SLOTS
                    ),
                ),
                Escape::Untimed { text, .. } => (
                    DisagreementClass::Untimed,
                    format!(
                        "nothing limits the compute time of this pod on GPU {index}, so it may use more than its share: the driver does not report how \
                         long processes keep the GPU busy ({text})"
                    ),
                ),
            };
            found.push((class, uid.clone(), text));
        }
    }

    fn reaction(&self) -> Reaction {
        self.settings.guard.as_ref().map(|guard| guard.reaction).unwrap_or_default()
    }

    /// Mark pods for eviction. A pod stays marked until it ends, because the extender may see the mark later than the program has ended.
    fn mark_for_eviction(&mut self, facts: &DecisionFacts) {
        if self.reaction() == Reaction::Evict {
            let escaped = facts.escapes.iter();
            let escaped = escaped.filter(|(_, all)| all.iter().any(Escape::is_serious));
            self.evict.extend(escaped.map(|(uid, _)| uid.clone()));
        }
        let pods = &self.pods;
        self.evict
            .retain(|uid| pods.get(uid).is_some_and(|known| !known.pod.ended() && !known.pod.deleting));
    }

    /// Return the pairs of live pods with a device id of one resource in common: the UID of one pod and the name of the other. Two resources
    /// can have the same ids, if the MIG strategy has changed since the kubelet gave out the first.
    fn double_handouts(&self, handouts: &[Handout], facts: &DecisionFacts) -> Vec<(String, String)> {
        let mut owner: BTreeMap<(&str, &str), &str> = BTreeMap::new();
        let mut pairs: BTreeSet<(&str, &str)> = BTreeSet::new();
        for (_, handout) in self.granting(handouts) {
            let uid = handout.key.uid.as_str();
            let live = facts.populated.contains(uid) || self.pods.get(uid).is_some_and(|known| !known.pod.ended());
            if !live {
                continue;
            }
            for id in &handout.ids {
                match owner.insert((&handout.resource, id), uid) {
                    Some(other) if other != uid => {
                        pairs.insert((other.min(uid), other.max(uid)));
                    }
                    _ => {}
                }
            }
        }
        pairs
            .into_iter()
            .map(|(one, other)| (one.to_owned(), self.pod_name(other)))
            .collect()
    }

    /// Return an event, or `None` if an event of this class was posted for this pod before.
    pub(super) fn event_once(&mut self, class: DisagreementClass, uid: &str, text: &str) -> Option<AgentAction> {
        let pod = match (self.pods.get(uid), self.others.get(uid)) {
            (Some(known), _) => known.pod.key(),
            (None, Some(key)) => key.clone(),
            (None, None) => self.records_of(uid).next()?.pod(),
        };
        self.reported.insert((class, uid.to_owned())).then(|| AgentAction::Event {
            pod,
            uid: uid.to_owned(),
            reason: class.event_reason(),
            text: text.to_owned(),
        })
    }
}

fn removes(action: &AgentAction, spec: &str) -> bool {
    matches!(action, AgentAction::RemoveSpec { name, .. } if name == spec)
}

fn shares_text(record: &GrantRecord) -> String {
    let shares: Vec<String> = record
        .gpus
        .iter()
        .map(|share| format!("{} of {}", share.memory, share.uuid))
        .collect();
    shares.join(", ")
}

/// Report whether a sign says that the pod uses the GPU without a grant, or too much of it.
fn is_reported(facts: &DecisionFacts, uid: &str, uuid: &str) -> bool {
    let all = facts.escapes.get(uid).into_iter().flatten();
    let mut reports = all.filter(|escape| matches!(escape, Escape::NotGranted { .. } | Escape::Exceeded { .. }));
    reports.any(|escape| escape.uuid() == uuid)
}
