//! A node: GPUs, cgroups, the container runtime, and the life of pods between kubelet and agent.

mod checks;
mod lives;

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{ContainerKind, ContainerRequest, Gpu, Health, MiB, Phase, PodRequest, Vendor, nvidia};
use divvy_testkit::nodes::t4;

use crate::agent::{AgentRun, AgentStop, BegunListing, Disk, Sight, set_hardware};
use crate::api::{ApiModel, GIB, ListInFlight, WatcherEvent};
use crate::kubelet::{ContainerStage, KubeletModel};
use crate::story::Story;
use crate::whole::WHOLE;
use crate::{Violation, chance};

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
}

/// Report whether several containers with whole GPUs run at the same time. If the kubelet forgot the ids of one of them (B1), it would
/// give the same id to another. The grants of both then have the same name, so the agent cannot give them different GPUs.
fn run_together(request: &PodRequest) -> bool {
    let whole = request.whole.iter().flat_map(|whole| &whole.containers);
    whole.filter(|container| container.kind != ContainerKind::Init).count() > 1
}
