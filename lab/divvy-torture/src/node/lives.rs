//! The life of the pods of a node, from the first call of PreStartContainer to their end.

use std::collections::BTreeSet;

use divvy_agent_core::{Reason, ResourceSpec};
use divvy_cdi as cdi;
use divvy_model::{ContainerKind, ContainerRequest, Health, Held, MiB, Pod, names};
use divvy_testkit::dice::Dice;

use super::{CgroupModel, SimNode, WaitingCall};
use crate::agent::PreStartResult;
use crate::api::{ApiModel, Bound, GIB, booked};
use crate::kubelet::{ContainerStage, Local};
use crate::ops::ContainerEnding;
use crate::story::{Story, ensure};
use crate::whole::{devices, is_by_ids};
use crate::{Violation, chance};

impl SimNode {
    /// Let the kubelet abandon a pod's PreStartContainer call.
    pub(super) fn hang_up(&mut self, uid: &str) {
        if let (Some(waiting), Some(agent)) = (self.waiting.remove(uid), &mut self.agent) {
            agent.core.list_failed(waiting.begun);
        }
    }

    /// Deliver the lists for which container starts wait.
    pub fn answer_starts(&mut self, api: &mut ApiModel, story: &mut Story) -> Result<(), Violation> {
        while let Some(uid) = self.waiting.keys().next().cloned() {
            self.work(api, &uid, 1, story)?;
        }
        Ok(())
    }

    /// Let a pod's worker take its next step.
    pub fn work(&mut self, api: &mut ApiModel, uid: &str, luck: u8, story: &mut Story) -> Result<(), Violation> {
        let creating = self
            .creating
            .keys()
            .find(|(of, _)| of == uid)
            .map(|(_, container)| container.clone());
        if let Some(container) = creating {
            return self.create(api, uid, &container, story);
        }
        if let Some(waiting) = self.waiting.remove(uid) {
            let WaitingCall {
                container,
                ids,
                begun,
                listing,
            } = waiting;
            if luck.is_multiple_of(16) {
                story.tell(|| format!("  the agent's list for {uid} gets no answer"));
                if let Some(agent) = &mut self.agent {
                    agent.core.list_failed(begun);
                }
                self.finish(uid);
                return Ok(());
            }
            let spec = self.spec(uid, &container.name).unwrap_or(ResourceSpec::MEMORY);
            let Some(listing) = listing else {
                story.tell(|| format!("  the API server takes the list that the agent requested for {uid}"));
                let listing = self.agent.as_ref().map(|agent| agent.pods.ask(api));
                let waiting = WaitingCall {
                    container,
                    ids,
                    begun,
                    listing,
                };
                self.waiting.insert(uid.to_owned(), waiting);
                return Ok(());
            };
            let answer = self.with_agent(story, |agent, disk, sight, story| {
                agent.pre_start_listed(spec, &ids, begun, listing, api, disk, sight, story)
            })?;
            let waits = self.kubelet.pods.get(uid).is_some_and(Local::is_live);
            let answered = if waits {
                self.answered(api, uid, &container, ids, true, answer, story)
            } else {
                // The kubelet has ended the pod in the meantime: its sync is canceled, and the container is not created.

                self.stream();
                Ok(())
            };
            self.finish(uid);
            return answered;
        }
        let Some(local) = self.kubelet.pods.get(uid).filter(|local| local.is_live()) else {
            return Ok(());
        };
        if !self.cgroups.contains_key(uid) {
            self.cgroups.insert(uid.to_owned(), CgroupModel::default());
            self.populated.insert(uid.to_owned());
            story.tell(|| format!("  {}: the sandbox of {uid} runs", self.name));
            return Ok(());
        }
        let mut chance = chance::of_step(luck, uid);
        let mut startable = local.startable();
        chance.shuffle(&mut startable);
        let Some(container) = startable.pop() else {
            return Ok(());
        };
        if devices(&local.pod.request, &container.name).is_none() {
            self.runs(uid, &container.name, BTreeSet::new());
            self.report(api, uid);
            return Ok(());
        }
        self.pre_start(api, uid, &container, &mut chance, story)
    }

    pub(super) fn pre_start(
        &mut self,
        api: &ApiModel,
        uid: &str,
        container: &ContainerRequest,
        chance: &mut Dice,
        story: &mut Story,
    ) -> Result<(), Violation> {
        let (handout, spec) = (self.kubelet.handout(uid, &container.name), self.spec(uid, &container.name));
        let (Some(handout), Some(spec)) = (handout.cloned(), spec) else {
            return Err(Violation(format!(
                "{uid} is admitted, but its container {} has no ids",
                container.name
            )));
        };
        let mut ids: Vec<String> = handout.ids.iter().cloned().collect();
        chance.shuffle(&mut ids);
        let events = if chance.one_in(4) { 2 } else { 0 };
        let answer = self.with_agent(story, |agent, disk, sight, story| {
            agent.pre_start(spec, &ids, events, api, disk, sight, story)
        })?;
        if let Some(PreStartResult::Refused(Reason::MemoryHeld)) = answer {
            self.check_refusal(api, uid)?;
        }
        // Some requests take time on the way to the API server; all of them take time on the way back.
        let at_once = chance.below(4) > 0;
        self.answered(api, uid, container, ids, at_once, answer, story)
    }

    /// Check a refusal that the agent gave without querying the API server: pods that have not ended, or whose processes still
    /// run, must really hold the memory.
    pub(super) fn check_refusal(&self, api: &ApiModel, uid: &str) -> Result<(), Violation> {
        // If the running pods are unknown, every pod with a grant counts as running.
        if self.no_pod_cgroups {
            return Ok(());
        }
        let allocation = api.bound.get(uid).and_then(Bound::allocation);
        for wanted in allocation.iter().flat_map(|allocation| &allocation.gpus) {
            let others = api
                .pods
                .values()
                .filter(|pod| pod.uid != uid && pod.node.as_deref() == Some(&self.name));
            let has = |pod: &Pod| self.holds.get(&(pod.uid.clone(), wanted.uuid.clone())).copied();
            let promised = others.map(|pod| {
                if is_by_ids(pod) && !pod.ended() {
                    has(pod).unwrap_or(MiB::ZERO)
                } else {
                    booked(pod, &wanted.uuid, api.gpus(&self.name))
                }
            });
            let ended = self.populated.iter().filter(|other| api.pod(other).is_none_or(Pod::ended));
            let running = ended.filter_map(|other| self.holds.get(&(other.clone(), wanted.uuid.clone())).copied());
            let taken = promised.chain(running).fold(wanted.memory, MiB::saturating_add);
            let offered = self.agent.as_ref().map_or(MiB::ZERO, |agent| agent.capacity(&wanted.uuid));
            if taken > offered {
                return Ok(());
            }
        }
        ensure!(
            allocation.is_none(),
            "{uid} was refused for memory that others hold, but they have ended, and the API server was not queried"
        );
        Ok(())
    }

    /// Apply the result of PreStartContainer.
    #[expect(clippy::too_many_arguments, reason = "the whole world, part by part")]
    pub(super) fn answered(
        &mut self,
        api: &ApiModel,
        uid: &str,
        container: &ContainerRequest,
        ids: Vec<String>,
        at_once: bool,
        answer: Option<PreStartResult>,
        story: &mut Story,
    ) -> Result<(), Violation> {
        self.stream();
        let key = match answer {
            Some(PreStartResult::Granted(key)) => key,
            Some(PreStartResult::Lists(begun)) => {
                let listing = self.agent.as_ref().filter(|_| at_once).map(|agent| agent.pods.ask(api));
                let waiting = WaitingCall {
                    container: container.clone(),
                    ids,
                    begun,
                    listing,
                };
                self.waiting.insert(uid.to_owned(), waiting);
                return Ok(());
            }
            Some(PreStartResult::Refused(_)) | None => return Ok(()),
        };
        story.tell(|| format!("  {uid}/{} is granted", container.name));
        ensure!(
            key.uid == uid,
            "PreStartContainer of {uid}/{} granted {}/{}",
            container.name,
            key.uid,
            key.container
        );
        let Some(bound) = api.bound.get(uid) else {
            return Err(Violation(format!("{uid} was granted memory but has no allocation")));
        };
        let record = self.disk.records.get(&key).ok_or("a grant without a record")?.clone();
        let given: BTreeSet<&String> = self
            .kubelet
            .handouts
            .iter()
            .filter(|handout| handout.key.uid == uid)
            .flat_map(|handout| &handout.ids)
            .collect();
        let is_whole = self.is_whole(uid);
        let given = if is_whole { MiB::ZERO } else { MiB(given.len() as u64 * GIB) };
        let ours = bound.allocation().map(|allocation| allocation.gpus.as_slice());
        let shares = ours.unwrap_or(&record.gpus);
        let sum = shares.iter().fold(MiB::ZERO, |sum, share| sum.saturating_add(share.memory));
        let own = record
            .container_gpus
            .iter()
            .fold(MiB::ZERO, |sum, share| sum.saturating_add(share.memory));
        ensure!(
            is_whole || sum >= given && own >= MiB(ids.len() as u64 * GIB),
            "invariant 1: {uid}/{} was granted {own} of its pod's {sum}, and the kubelet gave it {} ids, its pod {given}",
            container.name,
            ids.len()
        );
        let distinct: BTreeSet<&String> = record.container_gpus.iter().map(|share| &share.uuid).collect();
        ensure!(
            !is_whole || distinct.len() == ids.len() && shares.iter().all(|share| share.whole),
            "invariant 1: {uid}/{} was granted {shares:?}, and the kubelet gave it {} whole GPUs",
            container.name,
            ids.len()
        );
        for share in shares {
            let failed = self.gpus.iter().any(|gpu| gpu.uuid == share.uuid && gpu.health != Health::Ok);
            ensure!(!failed, "{uid} was granted memory of GPU {}, which has failed", share.uuid);
            if let Some(agent) = &self.agent {
                let of = (uid.to_owned(), share.uuid.clone());
                self.granted_under.insert(of.clone(), agent.capacity(&share.uuid));
                let memory = if is_whole { agent.capacity(&share.uuid) } else { share.memory };
                self.holds.insert(of, memory);
            }
        }
        let handout = self.kubelet.handout(uid, &container.name);
        if let Some(name) = handout.and_then(|handout| handout.grant.clone()) {
            self.creating.insert((uid.to_owned(), container.name.clone()), name);
        }
        Ok(())
    }

    /// Let the runtime resolve the CDI name that the kubelet recorded, and run the container with what the spec contains.
    pub(super) fn create(&mut self, api: &mut ApiModel, uid: &str, container: &str, story: &mut Story) -> Result<(), Violation> {
        let name = self.creating.remove(&(uid.to_owned(), container.to_owned()));
        let Some((spec, _)) = name.and_then(|name| self.disk.specs.get(&name)) else {
            story.tell(|| format!("  {uid}/{container}: unresolvable CDI device, to be retried"));
            self.finish(uid);
            self.report(api, uid);
            return Ok(());
        };
        let spec = cdi::Spec::parse(spec).map_err(|error| error.to_string())?;
        let edits = &spec.devices[0].container_edits;
        let there = self.gpus.iter().filter(|gpu| gpu.health != Health::Lost);
        let gpus: BTreeSet<String> = there
            .filter(|gpu| {
                let path = format!("/dev/{}", gpu.nodes[0]);
                edits.device_nodes.iter().any(|node| node.path == path)
            })
            .map(|gpu| gpu.uuid.clone())
            .collect();
        story.tell(|| format!("  {uid}/{container} runs on {gpus:?}"));
        let bound = api.bound.get(uid).ok_or("a container of an unbound pod is created")?;
        let void = format!("{}={}", names::VISIBLE_DEVICES, names::VISIBLE_NONE);
        ensure!(
            edits.env.contains(&void),
            "invariant 7: {uid}/{container} runs with {:?} instead of {void}",
            edits.env
        );
        match (&bound.held, bound.allocation()) {
            (_, Some(allocation)) => {
                let shares = allocation.containers.get(container).map(Vec::as_slice).unwrap_or_default();
                let allocated: BTreeSet<String> = shares.iter().map(|share| share.uuid.clone()).collect();
                ensure!(
                    gpus == allocated,
                    "invariant 2: {uid}/{container} runs on {gpus:?} but is allocated {allocated:?}"
                );
                let units = shares.iter().map(|share| share.memory.0 / GIB).sum::<u64>();
                let units = format!("{}={units}", names::ALIYUN_CONTAINER);
                ensure!(
                    self.is_whole(uid) || edits.env.contains(&units),
                    "invariant 7: {uid}/{container} runs with {:?} instead of {units}",
                    edits.env
                );
            }
            (Held::Nothing | Held::Legacy(_), None) if self.is_whole(uid) => {
                let record = self.disk.records.values();
                let record = record.filter(|record| record.uid == uid && record.container == container);
                let granted: BTreeSet<String> = record
                    .flat_map(|record| record.container_gpus.iter().map(|share| share.uuid.clone()))
                    .collect();
                let ids = self
                    .kubelet
                    .handout(uid, container)
                    .map_or(gpus.len(), |handout| handout.ids.len());
                ensure!(
                    gpus == granted && gpus.len() == ids,
                    "invariant 2: {uid}/{container} runs on {gpus:?}, but is granted {granted:?} for {ids} ids"
                );
            }
            (Held::Legacy(legacy), None) => {
                let mut indices = self.gpus.iter().filter(|gpu| gpus.contains(&gpu.uuid)).map(|gpu| gpu.index);
                ensure!(
                    gpus.len() == 1 && indices.all(|index| legacy.gpus.contains_key(&index)),
                    "invariant 2: {uid}/{container} runs on {gpus:?}, but gpushare's annotations say {legacy:?}"
                );
            }
            (held, None) => ensure!(
                gpus.iter().all(|uuid| crate::api::share(held, uuid).is_some()),
                "invariant 2: {uid}/{container} runs on {gpus:?}, but its annotation says {held:?}"
            ),
        }
        self.runs(uid, container, gpus);
        self.finish(uid);
        self.report(api, uid);
        Ok(())
    }

    /// Return the resource of which a pod's container has devices.
    pub(super) fn spec(&self, uid: &str, container: &str) -> Option<ResourceSpec> {
        let local = self.kubelet.pods.get(uid)?;
        devices(&local.pod.request, container).map(|(spec, _)| spec)
    }

    /// Report whether a pod requests whole GPUs.
    pub(super) fn is_whole(&self, uid: &str) -> bool {
        let local = self.kubelet.pods.get(uid);
        local.is_some_and(|local| local.pod.request.whole.is_some())
    }

    pub(super) fn runs(&mut self, uid: &str, container: &str, gpus: BTreeSet<String>) {
        if let Some(cgroup) = self.cgroups.get_mut(uid) {
            cgroup.running.insert(container.to_owned(), gpus);
        }
        if let Some(local) = self.kubelet.pods.get_mut(uid) {
            local.set(container, ContainerStage::Running);
        }
    }

    /// Return the UIDs of pods for which [`SimNode::end`] has an effect.
    pub fn endable(&self) -> BTreeSet<String> {
        let terminating = self.kubelet.pods.iter().filter(|(_, local)| local.terminating);
        self.cgroups.keys().chain(terminating.map(|(uid, _)| uid)).cloned().collect()
    }

    /// End a container. If no container of an ended pod runs any more, remove its sandbox, and, if it is being deleted, its
    /// object.
    pub fn end(&mut self, api: &mut ApiModel, uid: &str, container: usize, how: ContainerEnding, story: &mut Story) {
        let leaves = self.kubelet.pods.get(uid).is_none_or(|local| !local.is_live());
        if let Some(cgroup) = self.cgroups.get_mut(uid) {
            let names: Vec<String> = cgroup.running.keys().cloned().collect();
            if let Some(name) = names.get(container % names.len().max(1)) {
                cgroup.running.remove(name);
                story.tell(|| format!("  {uid}/{name} ends ({how:?})"));
                self.ended(uid, name, how);
                self.report(api, uid);
                return;
            }
            if leaves {
                self.cgroups.remove(uid);
                self.populated.remove(uid);
                self.creating.retain(|(of, _), _| of != uid);
                self.hang_up(uid);
                story.tell(|| format!("  the sandbox of {uid} ends"));
                self.left(api, uid);
            }
        } else {
            self.left(api, uid);
        }
    }

    pub(super) fn ended(&mut self, uid: &str, container: &str, how: ContainerEnding) {
        let Some(local) = self.kubelet.pods.get_mut(uid) else { return };
        let kind = local
            .pod
            .request
            .containers
            .iter()
            .find(|c| c.name == container)
            .map(|c| c.kind);
        let restarts = local.is_live() && (how == ContainerEnding::Crash || kind == Some(ContainerKind::Sidecar));
        local.set(
            container,
            if restarts {
                ContainerStage::Waiting
            } else {
                ContainerStage::Done
            },
        );
        self.finish(uid);
    }

    /// If the last app container has ended, end the sidecars and the pod. Pod workers are serial: a create call in progress is
    /// completed first, and every status that is written includes the call's result.
    pub(super) fn finish(&mut self, uid: &str) {
        if self.is_busy(uid) {
            return;
        }
        let Some(local) = self.kubelet.pods.get_mut(uid) else { return };
        if local.is_live() && local.apps_done() {
            local.finished = true;
            if let Some(cgroup) = self.cgroups.get_mut(uid) {
                cgroup.running.clear();
            }
        }
    }

    /// Handle a pod that has nothing left on the node.
    pub(super) fn left(&mut self, api: &mut ApiModel, uid: &str) {
        let Some(local) = self.kubelet.pods.get_mut(uid) else { return };
        if local.removed {
            self.kubelet.pods.remove(uid);
        } else if local.terminating {
            api.remove(uid);
            self.kubelet.pods.remove(uid);
        } else {
            local.finished = true;
            self.report(api, uid);
        }
    }
}
