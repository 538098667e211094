//! A node: GPUs, cgroups, the container runtime, and the life of pods between kubelet and agent.

use std::collections::{BTreeMap, BTreeSet};

use divvy_agent_core::{Reason, ResourceSpec};
use divvy_cdi as cdi;
use divvy_model::{ContainerKind, ContainerRequest, Gpu, Health, Held, MiB, Phase, Pod, PodRequest, Vendor, names, nvidia};
use divvy_testkit::dice::Dice;
use divvy_testkit::nodes::t4;

use crate::Violation;
use crate::agent::{AgentRun, AgentStop, BegunListing, Disk, PreStartResult, Sight, set_hardware};
use crate::api::{ApiModel, Bound, GIB, ListInFlight, WatcherEvent, booked};
use crate::chance;
use crate::kubelet::{ContainerStage, KubeletModel, Local};
use crate::ops::ContainerEnding;
use crate::story::{Story, ensure};
use crate::whole::{WHOLE, devices, is_by_ids};

/// The processes of a pod: its sandbox, and its containers, each with the GPUs that the runtime gave it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CgroupModel {
    pub running: BTreeMap<String, BTreeSet<String>>,
}

/// A PreStartContainer call that has received no response yet.
#[derive(Debug)]
pub struct WaitingCall {
    container: ContainerRequest,
    ids: Vec<String>,
    /// The list of pods that the agent has begun. `listing` is the API server's response, once it exists.
    begun: BegunListing,
    listing: Option<ListInFlight>,
}

/// A simulated node.
#[derive(Debug)]
pub struct SimNode {
    pub name: String,
    /// The actual state of the GPUs.
    pub gpus: Vec<Gpu>,
    pub cgroups: BTreeMap<String, CgroupModel>,
    pub populated: BTreeSet<String>,
    pub disk: Disk,
    pub agent: Option<AgentRun>,
    pub kubelet: KubeletModel,
    pub reserve: MiB,
    /// Whether the agent runs with `--whole-gpus`.
    whole: bool,
    /// The healthy whole GPUs in the node's status.
    pub allocatable_whole: u64,
    boot: u32,
    /// For each (UID, container) with a create call of the runtime in progress: the CDI name in that call. The call continues
    /// even if the kubelet forgets the pod.
    pub creating: BTreeMap<(String, String), String>,
    /// For each UID: the PreStartContainer call that waits for the agent's list of pods.
    pub waiting: BTreeMap<String, WaitingCall>,
    /// For each (UID, GPU): the memory that counts as held by the pod since its grant. It is the memory of its allocation, but at
    /// least what the kubelet gave it.
    holds: BTreeMap<(String, String), MiB>,
    /// Whether the kubelet creates no cgroups for pods (`cgroupsPerQOS: false`).
    pub no_pod_cgroups: bool,
    /// The number of GPUs that were installed as replacements.
    replaced: u32,
    /// For each (UID, GPU): how much memory the GPU was sharing at the most recent grant for the pod.
    granted_under: BTreeMap<(String, String), MiB>,
}

impl SimNode {
    /// Create a node with a running agent, and with GPUs of these sizes in units.
    pub fn new(name: &str, units: &[u64], whole: bool, api: &mut ApiModel) -> Result<SimNode, Violation> {
        let gpus = (0..)
            .zip(units)
            .map(|(index, units)| t4(format!("GPU-{name}-{index}"), index, *units * GIB))
            .collect();
        let mut node = SimNode {
            name: name.to_owned(),
            gpus,
            cgroups: BTreeMap::new(),
            populated: BTreeSet::new(),
            disk: Disk::default(),
            agent: None,
            kubelet: KubeletModel::new(name),
            reserve: MiB::ZERO,
            whole,
            allocatable_whole: 0,
            boot: 0,
            creating: BTreeMap::new(),
            waiting: BTreeMap::new(),
            holds: BTreeMap::new(),
            no_pod_cgroups: false,
            replaced: 0,
            granted_under: BTreeMap::new(),
        };
        node.start_agent(api, MiB::ZERO, true, &mut Story::default())?;
        node.heartbeat(api);
        Ok(node)
    }

    fn sight(&self) -> Sight<'_> {
        Sight {
            gpus: &self.gpus,
            handouts: &self.kubelet.handouts,
            populated: (!self.no_pod_cgroups).then_some(&self.populated),
        }
    }

    /// Report whether a call for a container of the pod is in progress.
    fn is_busy(&self, uid: &str) -> bool {
        self.waiting.contains_key(uid) || self.creating.keys().any(|(of, _)| of == uid)
    }

    /// Let the agent do something with its disk. If the agent is killed, its process and its ListAndWatch stream are gone.
    fn with_agent<T>(
        &mut self,
        story: &mut Story,
        work: impl FnOnce(&mut AgentRun, &mut Disk, Sight<'_>, &mut Story) -> Result<T, AgentStop>,
    ) -> Result<Option<T>, Violation> {
        let Some(mut agent) = self.agent.take() else {
            return Ok(None);
        };
        let mut disk = std::mem::take(&mut self.disk);
        let done = work(&mut agent, &mut disk, self.sight(), story);
        self.disk = disk;
        match done {
            Ok(value) => {
                self.agent = Some(agent);
                Ok(Some(value))
            }
            Err(AgentStop::Killed) => {
                story.tell(|| format!("  the agent of {} is killed", self.name));
                self.agent_ended();
                Ok(None)
            }
            Err(AgentStop::Broken(violation)) => Err(violation),
        }
    }

    /// Send a ListAndWatch message to the kubelet.
    fn stream(&mut self) {
        if let Some(agent) = &self.agent {
            self.kubelet.devices(agent);
        }
    }

    pub fn kill_agent(&mut self) {
        self.agent = None;
        self.agent_ended();
    }

    fn agent_ended(&mut self) {
        self.kubelet.stream_ended();
        self.waiting.clear();
    }

    /// Start the agent: list, reconcile, publish, register. If an earlier agent process is running, it is replaced.
    pub fn start_agent(&mut self, api: &mut ApiModel, reserve: MiB, listed: bool, story: &mut Story) -> Result<(), Violation> {
        self.reserve = reserve;
        self.waiting.clear();
        let mut agent = AgentRun::new(&self.name, self.boot, reserve, self.whole, &self.disk, self.sight());
        // A registration takes no time here.
        agent.core.set_registered(true);
        self.agent = Some(agent);
        self.with_agent(story, |agent, disk, sight, _| {
            if listed {
                agent.list(api, disk)?;
            }
            agent.reconcile(api, disk, sight, 0)
        })?;
        self.publish(api);
        self.stream();
        Ok(())
    }

    pub fn publish(&mut self, api: &mut ApiModel) {
        if let Some(agent) = &self.agent {
            api.publish(&self.name, &agent.core.inventory());
        }
    }

    /// Write the node's status, as the kubelet does.
    pub fn heartbeat(&mut self, api: &mut ApiModel) {
        let (capacity, healthy) = (self.kubelet.capacity, self.kubelet.healthy.len() as u64);
        let gpus = self.gpus.len() as u64;
        let whole = self.kubelet.whole_capacity;
        self.allocatable_whole = self.kubelet.healthy_of(WHOLE).count() as u64;
        api.update_node(&self.name, |node| {
            node.capacity_units = capacity;
            node.allocatable_units = healthy;
            node.capacity_gpus = gpus;
            node.allocatable_gpus = gpus;
            node.whole = (whole > 0).then_some((Vendor::Nvidia.into(), whole)).into_iter().collect();
        });
    }

    pub fn reconcile(&mut self, api: &ApiModel, events: usize, story: &mut Story) -> Result<(), Violation> {
        let found = self.with_agent(story, |agent, disk, sight, _| agent.reconcile(api, disk, sight, events))?;
        if let Some(found) = found {
            story.tell(|| format!("  {:?}", found.classes));
        }
        self.stream();
        Ok(())
    }

    pub fn agent_sees(&mut self, api: &ApiModel, events: usize, story: &mut Story) -> Result<(), Violation> {
        self.with_agent(story, |agent, disk, _, _| agent.watch(api, disk, events))?;
        self.stream();
        Ok(())
    }

    /// Cut the agent's watch, so that the agent lists again.
    pub fn relist_agent(&mut self, api: &ApiModel) {
        if let Some(agent) = &mut self.agent {
            agent.ask(api);
        }
    }

    /// Deliver the list of the agent's watch, if one is on its way.
    pub fn list_arrives(&mut self, story: &mut Story) -> Result<(), Violation> {
        self.with_agent(story, |agent, disk, _, _| agent.list_arrives(disk))?;
        self.stream();
        Ok(())
    }

    /// Replace a GPU while the node runs. The new GPU gets the old GPU's index and minor number. The agent keeps the old GPU as
    /// lost.
    pub fn replace_card(&mut self, gpu: usize) -> bool {
        let old = self.gpus[gpu].clone();
        if old.health == Health::Lost || !self.creating.is_empty() {
            return false;
        }
        self.replaced += 1;
        let new = Gpu {
            // UUIDs have no particular order.
            uuid: match self.replaced % 2 {
                0 => format!("GPU-{}-{}-r{}", self.name, old.index, self.replaced),
                _ => format!("GPU-{}-{}-{}", self.replaced, self.name, old.index),
            },
            health: Health::Ok,
            reason: None,
            ..old
        };
        self.gpus[gpu].health = Health::Lost;
        self.gpus[gpu].reason = Some("the driver no longer finds it".to_owned());
        self.gpus.push(new);
        self.see_hardware();
        true
    }

    /// Forget lost GPUs, as an agent does when it restarts.
    pub fn forget_lost(&mut self) {
        self.gpus.retain(|gpu| gpu.health != Health::Lost);
    }

    /// Read the hardware as `hardware.rs` does. A lost GPU keeps its index, even if another GPU now has the same index.
    fn see_hardware(&mut self) {
        let order = |gpu: &Gpu| (gpu.index, gpu.health == Health::Lost, gpu.uuid.clone());
        self.gpus.sort_by_key(order);
        if let Some(agent) = &mut self.agent {
            set_hardware(&mut agent.core, &self.gpus);
        }
        self.stream();
    }

    pub fn set_health(&mut self, gpu: usize, health: Health) {
        if self.gpus[gpu].health == Health::Lost {
            return;
        }
        self.gpus[gpu].health = health;
        self.gpus[gpu].reason = (health != Health::Ok).then(|| "XID 79".to_owned());
        self.see_hardware();
    }

    /// Deliver events to the kubelet: deletions, and a batch of new pods, which are admitted in any order.
    pub fn kubelet_sees(&mut self, api: &mut ApiModel, events: usize, luck: u8, story: &mut Story) -> Result<(), Violation> {
        let mut new = Vec::new();
        for _ in 0..events {
            match self.kubelet.watch.next(api) {
                None => break,
                Some(WatcherEvent::Applied(pod)) => match self.kubelet.pods.get_mut(&pod.uid) {
                    Some(local) => local.terminating |= pod.deleting,
                    None => {
                        new.retain(|other: &divvy_model::Pod| other.uid != pod.uid);
                        new.push(pod);
                    }
                },
                Some(WatcherEvent::Deleted(uid)) => {
                    new.retain(|pod| pod.uid != uid);
                    self.object_gone(&uid);
                }
            }
        }
        let mut chance = chance::of_step(luck, &self.name);
        chance.shuffle(&mut new);
        for pod in new {
            self.admit(api, &pod, luck, story);
        }
        Ok(())
    }

    fn object_gone(&mut self, uid: &str) {
        if self.cgroups.contains_key(uid) {
            if let Some(local) = self.kubelet.pods.get_mut(uid) {
                local.removed = true;
            }
        } else {
            self.kubelet.pods.remove(uid);
        }
    }

    fn admit(&mut self, api: &mut ApiModel, pod: &divvy_model::Pod, luck: u8, story: &mut Story) {
        if pod.deleting {
            self.kubelet.know(pod);
            return;
        }
        let mut chance = chance::of_step(luck, &pod.uid);
        let b1 = luck.is_multiple_of(8) && chance.one_in(2) && !run_together(&pod.request);
        let admitted = self.kubelet.admit(pod, self.agent.as_mut(), b1, &mut chance);
        self.stream();
        story.tell(|| {
            let ids: Vec<_> = self
                .kubelet
                .handouts
                .iter()
                .filter(|h| h.key.uid == pod.uid)
                .map(|h| &h.ids)
                .collect();
            let b1 = if b1 { ", and forgets them (B1)" } else { "" };
            let answer = admitted.as_ref().map_err(ToString::to_string);
            format!("  {} admits {}: {answer:?} {ids:?}{b1}", self.name, pod.uid)
        });
        if admitted.is_err() {
            self.reject(api, &pod.uid);
        }
    }

    fn reject(&mut self, api: &mut ApiModel, uid: &str) {
        if let Some(local) = self.kubelet.pods.get_mut(uid) {
            local.finished = true;
            self.report(api, uid);
        }
    }

    /// Write a pod's current status.
    pub fn report(&mut self, api: &mut ApiModel, uid: &str) {
        let running = self.cgroups.get(uid).is_some_and(|cgroup| !cgroup.running.is_empty());
        let Some(local) = self.kubelet.pods.get(uid) else { return };
        let phase = match (local.finished || local.evicted, local.apps_done() && local.finished) {
            (_, true) => Phase::Succeeded,
            (true, false) => Phase::Failed,
            (false, false) if running => Phase::Running,
            (false, false) => api.pod(uid).map_or(Phase::Pending, |pod| pod.phase),
        };
        api.status(uid, phase, running);
    }

    pub fn report_all(&mut self, api: &mut ApiModel) {
        for uid in self.kubelet.pods.keys().cloned().collect::<Vec<_>>() {
            self.report(api, &uid);
        }
    }

    /// Make a pod fail while its containers run. Pod workers are serial, so a create call in progress is completed first.
    pub fn evict(&mut self, api: &mut ApiModel, uid: &str) {
        if self.is_busy(uid) {
            return;
        }
        if let Some(local) = self.kubelet.pods.get_mut(uid).filter(|local| local.is_live()) {
            local.evicted = true;
            local.finished = !self.cgroups.contains_key(uid);
            self.report(api, uid);
        }
    }

    /// Let the kubelet abandon a pod's PreStartContainer call.
    fn hang_up(&mut self, uid: &str) {
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

    fn pre_start(
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
    fn check_refusal(&self, api: &ApiModel, uid: &str) -> Result<(), Violation> {
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
    fn answered(
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
    fn create(&mut self, api: &mut ApiModel, uid: &str, container: &str, story: &mut Story) -> Result<(), Violation> {
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
    fn spec(&self, uid: &str, container: &str) -> Option<ResourceSpec> {
        let local = self.kubelet.pods.get(uid)?;
        devices(&local.pod.request, container).map(|(spec, _)| spec)
    }

    /// Report whether a pod requests whole GPUs.
    fn is_whole(&self, uid: &str) -> bool {
        let local = self.kubelet.pods.get(uid);
        local.is_some_and(|local| local.pod.request.whole.is_some())
    }

    fn runs(&mut self, uid: &str, container: &str, gpus: BTreeSet<String>) {
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

    fn ended(&mut self, uid: &str, container: &str, how: ContainerEnding) {
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
    fn finish(&mut self, uid: &str) {
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
    fn left(&mut self, api: &mut ApiModel, uid: &str) {
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

    /// Start a new kubelet process. It leaves running pods alone, and admits all other pods again.
    pub fn restart_kubelet(&mut self, api: &mut ApiModel, registered: bool, story: &mut Story) -> Result<(), Violation> {
        self.kubelet.restart();
        self.creating.clear();
        for uid in self.waiting.keys().cloned().collect::<Vec<_>>() {
            self.hang_up(&uid);
        }
        for uid in self.kubelet.pods.keys().cloned().collect::<Vec<_>>() {
            self.finish(&uid);
        }
        if registered {
            self.stream();
        }
        let pods = self.kubelet.watch.arrive(self.kubelet.watch.ask(api));
        let gone: Vec<String> = self
            .kubelet
            .pods
            .keys()
            .filter(|uid| !pods.iter().any(|pod| pod.uid == **uid))
            .cloned()
            .collect();
        for uid in gone {
            self.object_gone(&uid);
        }
        for pod in pods {
            let running = self.cgroups.get(&pod.uid).is_some_and(|cgroup| !cgroup.running.is_empty());
            let skip = match self.kubelet.pods.get_mut(&pod.uid) {
                Some(local) => {
                    local.terminating |= pod.deleting;
                    local.terminating || local.finished || running
                }
                None => false,
            };
            if !skip {
                self.admit(api, &pod, 1, story);
            }
        }
        self.stream();
        Ok(())
    }

    /// Reboot the node. All processes and specs disappear, but the records and the checkpoint stay. Minor numbers may change.
    pub fn reboot(&mut self, api: &mut ApiModel, registered: bool, story: &mut Story) -> Result<(), Violation> {
        self.boot += 1;
        self.agent = None;
        self.cgroups.clear();
        self.populated.clear();
        self.disk.specs.clear();
        self.forget_lost();
        let count = u32::try_from(self.gpus.len()).unwrap();
        for gpu in &mut self.gpus {
            gpu.nodes = vec![nvidia::node((gpu.index + self.boot) % count)];
        }
        for local in self.kubelet.pods.values_mut().filter(|local| !local.finished) {
            local.states.values_mut().for_each(|state| *state = ContainerStage::Waiting);
            local.finished = local.evicted;
        }
        self.kubelet.pods.retain(|_, local| !local.removed);
        if registered {
            self.start_agent(api, self.reserve, false, story)?;
        }
        self.restart_kubelet(api, registered, story)?;
        if !registered {
            self.start_agent(api, self.reserve, true, story)?;
        }
        Ok(())
    }

    /// Return the UIDs of pods with a container on this GPU.
    pub fn on_gpu(&self, uuid: &str) -> BTreeSet<&String> {
        self.cgroups
            .iter()
            .filter(|(_, cgroup)| cgroup.running.values().any(|gpus| gpus.contains(uuid)))
            .map(|(uid, _)| uid)
            .collect()
    }

    /// Report whether another pod that has not ended has exactly the same ids. If so, this pod may have to wait.
    pub fn shares_its_ids(&self, uid: &str) -> bool {
        let names = self.kubelet.handouts.iter().map(|handout| (&handout.key.uid, &handout.grant));
        let recorded = self.disk.records.values().map(|record| (&record.uid, &record.cdi));
        let ours: BTreeSet<_> = names.clone().filter(|(of, _)| *of == uid).map(|(_, name)| name).collect();
        let live = |of: &String| self.populated.contains(of) || self.kubelet.pods.get(of).is_some_and(|local| !local.finished);
        names
            .chain(recorded)
            .any(|(of, name)| of != uid && ours.contains(name) && live(of))
    }

    /// Check the invariants that must hold on a node after every step.
    pub fn check(&self) -> Result<(), Violation> {
        for gpu in &self.gpus {
            let live = self.on_gpu(&gpu.uuid);
            let held = |uid: &&&String| self.holds.get(&((**uid).clone(), gpu.uuid.clone())).copied();
            let sum = live.iter().filter_map(|uid| held(&uid)).fold(MiB::ZERO, MiB::saturating_add);
            let under = |uid: &&&String| self.granted_under.get(&((**uid).clone(), gpu.uuid.clone())).copied();
            let capacity = live.iter().filter_map(|uid| under(&uid)).max().unwrap_or(MiB::ZERO);
            ensure!(
                sum <= capacity,
                "invariant 1: pods {live:?} have {sum} of GPU {}, which has {capacity} to share",
                gpu.uuid
            );
            ensure!(
                live.len() <= 1 || !live.iter().any(|uid| self.is_whole(uid)),
                "invariant 1: pods {live:?} are on GPU {}, which one of them has as a whole",
                gpu.uuid
            );
        }
        for (uid, cgroup) in &self.cgroups {
            let on = |gpu: &Gpu| cgroup.running.values().filter(|gpus| gpus.contains(&gpu.uuid)).count();
            let twice = self.gpus.iter().find(|gpu| self.is_whole(uid) && on(gpu) > 1);
            ensure!(
                twice.is_none(),
                "invariant 1: two containers of {uid} have one whole GPU: {cgroup:?}"
            );
            for (container, _) in cgroup.running.iter().filter(|(_, gpus)| !gpus.is_empty()) {
                let recorded = self.disk.records.values().any(|record| record.uid == *uid);
                ensure!(recorded, "invariant 4: {uid}/{container} runs, but its grant was ended");
            }
        }
        Ok(())
    }

    /// Check invariant 6: a restarted agent knows the same as the running one.
    pub fn check_rebuilt(&mut self, api: &ApiModel) -> Result<(), Violation> {
        if let Some(agent) = &mut self.agent {
            let sight = Sight {
                gpus: &self.gpus,
                handouts: &self.kubelet.handouts,
                populated: (!self.no_pod_cgroups).then_some(&self.populated),
            };
            agent.check_rebuilt(api, &self.disk, sight)?;
        }
        Ok(())
    }
}

/// Report whether several containers with whole GPUs run at the same time. If the kubelet forgot the ids of one of them (B1), it would
/// give the same id to another. The grants of both then have the same name, so the agent cannot give them different GPUs.
fn run_together(request: &PodRequest) -> bool {
    let whole = request.whole.iter().flat_map(|whole| &whole.containers);
    whole.filter(|container| container.kind != ContainerKind::Init).count() > 1
}
