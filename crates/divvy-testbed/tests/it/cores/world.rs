//! The world: an API server, an extender, nodes with a kubelet and an agent each, and the steps that change it.

use std::collections::{BTreeMap, BTreeSet};

use divvy_extender::core::BindArgs;
use divvy_model::ContainerKind::{App, Init, Sidecar};
use divvy_model::{ContainerKind, ContainerRequest, GpuRules, Health, MiB, Pod, PodKey, PodRequest};

use super::api::{Api, booked, share};
use super::extender::Extender;
use super::node::{GIB, SimNode};
use super::ops::{Fate, Op};
use super::story::{Story, ensure};

/// Names of pods; few, so that they come back.
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

/// Nodes by name with their GPUs in units.
const NODES: [(&str, &[u64]); 2] = [("n1", &[4]), ("n2", &[6, 4])];

/// Over how many GPUs what these ask for is spread.
type Shape = (u32, &'static [(&'static str, ContainerKind, u64)]);

fn shapes() -> [Shape; 10] {
    [
        (1, &[("m", App, 1)]),
        (1, &[("m", App, 2)]),
        (1, &[("m", App, 4)]),
        (1, &[("m", App, 3)]),
        (1, &[("m", App, 1), ("n", App, 2)]),
        (1, &[("i", Init, 3), ("m", App, 1)]),
        (1, &[("i", Init, 2), ("s", Sidecar, 1), ("m", App, 1), ("n", App, 0)]),
        (1, &[("i", Init, 2), ("m", App, 2)]),
        (2, &[("m", App, 4)]),
        (2, &[("i", Init, 4), ("s", Sidecar, 2), ("m", App, 2)]),
    ]
}

pub(crate) fn request(containers: &[(&str, ContainerKind, u64)]) -> PodRequest {
    PodRequest {
        containers: containers
            .iter()
            .map(|(name, kind, units)| ContainerRequest {
                name: (*name).to_owned(),
                kind: *kind,
                units: *units,
                gpu_count: 0,
            })
            .collect(),
        ..PodRequest::default()
    }
}

/// Everything.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) api: Api,
    pub(crate) extender: Extender,
    pub(crate) nodes: Vec<SimNode>,
    pub(crate) story: Story,
    /// Nodes on which something happened in this step.
    touched: BTreeSet<usize>,
    /// Position in the history of pods up to which the ledger was checked.
    checked: usize,
}

/// The `n`th of what is there.
fn pick<T: Clone>(items: impl IntoIterator<Item = T>, n: u8) -> Option<T> {
    let items: Vec<T> = items.into_iter().collect();
    items.get(usize::from(n) % items.len().max(1)).cloned()
}

impl World {
    /// Nodes whose agents run, and an extender that knows them.
    pub(crate) fn new(told: bool) -> Result<World, String> {
        let mut api = Api::default();
        let nodes = NODES
            .iter()
            .map(|(name, units)| SimNode::new(name, units, &mut api))
            .collect::<Result<Vec<_>, _>>()?;
        let extender = Extender::new(&api, 0);
        Ok(World {
            api,
            extender,
            nodes,
            story: Story::new(told),
            touched: BTreeSet::new(),
            checked: 0,
        })
    }

    /// One step, and what must hold after it.
    pub(crate) fn step(&mut self, op: Op) -> Result<(), String> {
        self.extender.tick(1_000_000);
        self.apply(op)?;
        self.check()
    }

    fn node(&mut self, n: u8) -> usize {
        let node = usize::from(n) % self.nodes.len();
        self.touched.insert(node);
        node
    }

    fn all_pods(&self) -> Vec<Pod> {
        self.api.pods.values().cloned().collect()
    }

    /// The node whose kubelet has this pod.
    fn home(&mut self, uid: &str) -> Option<usize> {
        let node = self
            .nodes
            .iter()
            .position(|node| node.kubelet.pods.contains_key(uid) || node.cgroups.contains_key(uid))?;
        self.touched.insert(node);
        Some(node)
    }

    fn apply(&mut self, op: Op) -> Result<(), String> {
        let World { api, story, .. } = self;
        match op {
            Op::Create { name, shape } => self.create(name, shape),
            Op::Delete { pod } => {
                if let Some(pod) = pick(self.all_pods(), pod) {
                    self.story.tell(|| format!("deletion of {} is asked for", pod.uid));
                    self.api.delete(&pod.uid);
                }
            }
            Op::ForceDelete { pod } => {
                if let Some(pod) = pick(self.all_pods(), pod) {
                    self.story.tell(|| format!("{} is force-deleted", pod.uid));
                    self.api.remove(&pod.uid);
                }
            }
            Op::Recreate { pod } => {
                if let Some(pod) = pick(self.all_pods(), pod) {
                    self.api.remove(&pod.uid);
                    let uid = self.api.create(&pod.name, pod.request.clone());
                    self.story
                        .tell(|| format!("{} is force-deleted and made again: {uid:?}", pod.uid));
                }
            }
            Op::Evict { pod } => {
                if let Some(pod) = pick(self.all_pods(), pod)
                    && let Some(node) = self.home(&pod.uid)
                {
                    self.story.tell(|| format!("{} is evicted", pod.uid));
                    self.nodes[node].evict(&mut self.api, &pod.uid);
                }
            }
            Op::Schedule { pod, node, lost } => self.schedule_one(pod, node, lost)?,
            Op::Bind { pod, node } => {
                let node = usize::from(node) % self.nodes.len();
                if let Some(pod) = pick(self.all_pods(), pod) {
                    self.bind(&pod, node)?;
                }
            }
            Op::Call { call, fate } => {
                if self.extender.calls.is_empty() {
                    self.schedule_one(call, call, false)?;
                } else {
                    let call = usize::from(call) % self.extender.calls.len();
                    self.story.tell(|| format!("{}: {fate:?}", self.extender.describe(call)));
                    self.extender.call(&mut self.api, call, fate, &mut self.story)?;
                }
            }
            Op::LateWrite { call } => {
                if self.extender.late.is_empty() {
                    self.schedule_one(call, call, true)?;
                } else {
                    let call = usize::from(call) % self.extender.late.len();
                    self.story
                        .tell(|| "a Binding without an answer is carried out late".to_owned());
                    self.extender.late_write(&mut self.api, call, &mut self.story)?;
                }
            }
            Op::Sweep => {
                story.tell(|| "the extender looks after its reservations".to_owned());
                self.extender.sweep(api, story)?;
            }
            Op::Tick { seconds } => {
                story.tell(|| format!("{seconds} s pass"));
                self.extender.tick(u64::from(seconds) * 1_000_000_000);
            }
            Op::ToExtender { pods, nodes } => {
                story.tell(|| format!("the extender sees {pods} events of pods and {nodes} of nodes"));
                self.extender.watch(api, usize::from(pods), usize::from(nodes));
            }
            Op::RelistExtender => {
                story.tell(|| "the extender lists pods and nodes again".to_owned());
                self.extender.list(api);
            }
            Op::RestartExtender { leftover } => {
                story.tell(|| format!("the extender is restarted; Bindings under way: {leftover:?}"));
                self.extender.restart(api, leftover, story)?;
            }
            Op::Work { pod, luck } => {
                let live = |node: &SimNode| -> Vec<String> {
                    let live = node.kubelet.pods.iter().filter(|(_, local)| local.is_live());
                    let creating = node.creating.keys().map(|(uid, _)| uid);
                    live.map(|(uid, _)| uid).chain(creating).cloned().collect()
                };
                if let Some(uid) = pick(self.nodes.iter().flat_map(live).collect::<Vec<_>>(), pod)
                    && let Some(node) = self.home(&uid)
                {
                    self.story.tell(|| format!("the kubelet works on {uid}"));
                    self.nodes[node].work(&mut self.api, &uid, luck, &mut self.story)?;
                }
            }
            Op::End { pod, container, how } => {
                if let Some(uid) = pick(self.nodes.iter().flat_map(SimNode::endable).collect::<Vec<_>>(), pod)
                    && let Some(node) = self.home(&uid)
                {
                    self.story.tell(|| format!("something of {uid} ends"));
                    self.nodes[node].end(&mut self.api, &uid, usize::from(container), how, &mut self.story);
                }
            }
            Op::Fail { gpu } => self.set_health(gpu, Health::Failed),
            Op::Recover { gpu } => self.set_health(gpu, Health::Ok),
            Op::Hurry { pod, steps, luck } => {
                if let Some(pod) = pick(self.all_pods(), pod) {
                    self.hurry(&pod.uid, steps, luck)?;
                }
            }
            Op::Calm => {
                self.story.tell(|| "everything under way arrives".to_owned());
                self.calm()?;
            }
            Op::ToAgent { .. }
            | Op::ToKubelet { .. }
            | Op::RelistAgent { .. }
            | Op::Report { .. }
            | Op::Heartbeat { .. }
            | Op::Reconcile { .. }
            | Op::Publish { .. }
            | Op::KillAgent { .. }
            | Op::KillAgentAfter { .. }
            | Op::StartAgent { .. }
            | Op::RestartKubelet { .. }
            | Op::Reboot { .. } => self.on_node(op)?,
        }
        Ok(())
    }

    fn on_node(&mut self, op: Op) -> Result<(), String> {
        let (Op::ToAgent { node, .. }
        | Op::ToKubelet { node, .. }
        | Op::RelistAgent { node }
        | Op::Report { node }
        | Op::Heartbeat { node }
        | Op::Reconcile { node, .. }
        | Op::Publish { node }
        | Op::KillAgent { node }
        | Op::KillAgentAfter { node, .. }
        | Op::StartAgent { node, .. }
        | Op::RestartKubelet { node, .. }
        | Op::Reboot { node, .. }) = op
        else {
            return Ok(());
        };
        let index = self.node(node);
        let World { api, story, nodes, .. } = self;
        let node = &mut nodes[index];
        let name = node.name.clone();
        match op {
            Op::ToAgent { events, .. } => {
                story.tell(|| format!("the agent of {name} sees {events} events"));
                node.agent_sees(api, usize::from(events), story)?;
            }
            Op::ToKubelet { events, luck, .. } => {
                story.tell(|| format!("the kubelet of {name} sees {events} events"));
                node.kubelet_sees(api, usize::from(events), luck, story)?;
            }
            Op::RelistAgent { .. } => {
                story.tell(|| format!("the agent of {name} lists its pods again"));
                node.relist_agent(api, story)?;
            }
            Op::Report { .. } => node.report_all(api),
            Op::Heartbeat { .. } => {
                story.tell(|| format!("the kubelet of {name} writes the node's status"));
                node.heartbeat(api);
            }
            Op::Reconcile { events, .. } => {
                story.tell(|| format!("the agent of {name} reconciles, and sees {events} events before it decides"));
                node.reconcile(api, usize::from(events), story)?;
            }
            Op::Publish { .. } => {
                story.tell(|| format!("the agent of {name} publishes its inventory"));
                node.publish(api);
            }
            Op::KillAgent { .. } => {
                story.tell(|| format!("the agent of {name} is killed"));
                node.kill_agent();
            }
            Op::KillAgentAfter { actions, .. } => {
                story.tell(|| format!("the agent of {name} will be killed after {actions} actions"));
                if let Some(agent) = &mut node.agent {
                    agent.dies_after = Some(actions);
                }
            }
            Op::StartAgent { reserve, listed, .. } => {
                story.tell(|| format!("the agent of {name} starts, {reserve} units kept back, has listed: {listed}"));
                node.start_agent(api, MiB(u64::from(reserve) * GIB), listed, story)?;
            }
            Op::RestartKubelet { registered, .. } => {
                story.tell(|| format!("the kubelet of {name} is restarted, the agent registers before pods: {registered}"));
                node.restart_kubelet(api, registered, story)?;
            }
            Op::Reboot { registered, .. } => {
                story.tell(|| format!("{name} is rebooted, the agent registers before pods: {registered}"));
                node.reboot(api, registered, story)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn create(&mut self, name: u8, shape: u8) {
        let free = NAMES
            .iter()
            .filter(|name| !self.api.pods.contains_key(&super::api::key(name)));
        let (gpus, shape) = shapes()[usize::from(shape) % shapes().len()];
        let rules = GpuRules {
            gpus: Some(gpus),
            ..GpuRules::default()
        };
        let request = PodRequest::new(request(shape).containers, (gpus > 1).then_some(Ok(rules)));
        if let Some(uid) = pick(free, name).and_then(|name| self.api.create(name, request)) {
            self.story.tell(|| format!("{uid} is created: {shape:?} on {gpus} GPUs"));
        }
    }

    fn set_health(&mut self, gpu: u8, health: Health) {
        let gpus: Vec<(usize, usize)> = (0..self.nodes.len())
            .flat_map(|node| (0..self.nodes[node].gpus.len()).map(move |gpu| (node, gpu)))
            .collect();
        if let Some((node, gpu)) = pick(gpus, gpu) {
            self.touched.insert(node);
            let uuid = &self.nodes[node].gpus[gpu].uuid;
            self.story.tell(|| format!("GPU {uuid} is {health:?}"));
            self.nodes[node].set_health(gpu, health);
        }
    }

    /// Nodes by name that filter passes.
    fn filter(&self, pod: &Pod) -> Result<Vec<usize>, String> {
        let names = self.nodes.iter().map(|node| node.name.as_str());
        Ok(self.extender.core.filter(pod, names)?.passed)
    }

    /// NodeResourcesFit: healthy ids less what pods that are not in a terminal phase ask for.
    fn resources_fit(&self, pod: &Pod, node: usize) -> bool {
        let name = &self.nodes[node].name;
        let requested: u64 = self
            .api
            .pods
            .values()
            .filter(|other| other.node.as_ref() == Some(name))
            .filter(|other| !matches!(other.phase, divvy_model::Phase::Succeeded | divvy_model::Phase::Failed))
            .filter_map(|other| other.request.effective_units())
            .sum();
        let wanted = pod.request.effective_units().unwrap();
        requested + wanted <= self.api.nodes[name].allocatable_units
    }

    /// Schedules one of the pods that wait; if none does there is one now.
    fn schedule_one(&mut self, pod: u8, node: u8, lost: bool) -> Result<(), String> {
        let Some(waiting) = pick(self.pending(), pod) else {
            self.create(pod, node);
            return Ok(());
        };
        let calls = self.extender.calls.len();
        self.schedule(&waiting, node)?;
        if lost && self.extender.calls.len() > calls {
            self.extender.call(&mut self.api, calls, Fate::Lost, &mut self.story)?;
        }
        Ok(())
    }

    fn schedule(&mut self, pod: &Pod, choice: u8) -> Result<(), String> {
        let passed = self.filter(pod)?;
        let fit = passed.into_iter().filter(|node| self.resources_fit(pod, *node));
        match pick(fit.collect::<Vec<_>>(), choice) {
            Some(node) => self.bind(pod, node),
            None => {
                self.story.tell(|| format!("{} fits nowhere", pod.uid));
                Ok(())
            }
        }
    }

    pub(crate) fn bind(&mut self, pod: &Pod, node: usize) -> Result<(), String> {
        let args = BindArgs {
            pod_name: pod.name.clone(),
            pod_namespace: pod.namespace.clone(),
            pod_uid: pod.uid.clone(),
            node: self.nodes[node].name.clone(),
        };
        self.story
            .tell(|| format!("kube-scheduler asks to bind {} to {}", pod.uid, args.node));
        self.extender.bind(&self.api, args, &mut self.story)
    }

    /// Scheduled, bound, admitted and started, as far as that goes.
    fn hurry(&mut self, uid: &str, steps: u8, luck: u8) -> Result<(), String> {
        self.story.tell(|| format!("{uid} hurries"));
        if let Some(pod) = self.api.pod(uid).filter(|pod| pod.node.is_none() && !pod.deleting).cloned() {
            self.extender.watch(&self.api, usize::MAX, usize::MAX);
            self.schedule(&pod, luck)?;
            self.answer_all()?;
        }
        let Some(node) = self.api.pod(uid).and_then(|pod| pod.node.clone()) else {
            return Ok(());
        };
        let node = self.nodes.iter().position(|other| other.name == node).unwrap();
        self.touched.insert(node);
        let World { api, story, nodes, .. } = self;
        let node = &mut nodes[node];
        node.kubelet_sees(api, usize::MAX, luck, story)?;
        if luck.is_multiple_of(4) {
            node.agent_sees(api, usize::MAX, story)?;
        }
        for _ in 0..steps {
            node.work(api, uid, luck, story)?;
            let init = node.kubelet.pods.get(uid).map(|local| &local.pod.request);
            let init = init
                .and_then(|request| request.containers.iter().find(|c| c.kind == Init))
                .map(|c| c.name.clone());
            let runs = |name: &String| node.cgroups.get(uid).is_some_and(|cgroup| cgroup.running.contains_key(name));
            if let Some(name) = init.filter(runs) {
                let position = node.cgroups[uid].running.keys().position(|other| *other == name).unwrap();
                node.end(api, uid, position, super::ops::Ending::Well, story);
            }
        }
        Ok(())
    }

    /// Every call of the extender's is carried out and answered, in order.
    pub(crate) fn answer_all(&mut self) -> Result<(), String> {
        for _ in 0..1_000 {
            if self.extender.calls.is_empty() {
                return Ok(());
            }
            self.extender.call(&mut self.api, 0, Fate::Answered, &mut self.story)?;
        }
        Err("the extender does not stop calling the API server".to_owned())
    }

    /// What has happened so far, in numbers.
    fn history(&self) -> (usize, usize, usize) {
        let reserved = self.extender.core.index().ledger().reservations().count();
        (self.api.pod_log.len(), self.api.node_log.len(), reserved)
    }

    /// Everything under way arrives, until nothing moves; containers, also those of pods that are gone, run on.
    pub(crate) fn calm(&mut self) -> Result<(), String> {
        self.touched = (0..self.nodes.len()).collect();
        for _ in 0..20 {
            let before = self.history();
            self.answer_all()?;
            // Bindings without an answer are not carried out any more.
            self.extender.tick(70_000_000_000);
            self.extender.sweep(&self.api, &mut self.story)?;
            self.answer_all()?;
            for node in &mut self.nodes {
                let (api, story) = (&mut self.api, &mut self.story);
                if let Some(agent) = &mut node.agent {
                    agent.dies_after = None;
                } else {
                    node.start_agent(api, node.reserve, true, story)?;
                }
                node.agent_sees(api, usize::MAX, story)?;
                node.kubelet_sees(api, usize::MAX, 1, story)?;
                node.report_all(api);
                node.agent_sees(api, usize::MAX, story)?;
                node.reconcile(api, 0, story)?;
                node.publish(api);
                node.heartbeat(api);
            }
            self.extender.watch(&self.api, usize::MAX, usize::MAX);
            // Nothing is kept for pods that vanished any more: what they hold the agents have said by now.
            let kept = self.extender.core.index().ledger().departed().count();
            if self.history() == before && self.extender.calls.is_empty() && kept == 0 {
                self.extender.check_at_rest()?;
                return self.check_calm();
            }
        }
        Err("the world does not come to rest".to_owned())
    }

    /// What holds after every step.
    pub(crate) fn check(&mut self) -> Result<(), String> {
        self.check_all()?;
        for node in std::mem::take(&mut self.touched) {
            let node = &mut self.nodes[node];
            node.check_rebuilt()
                .map_err(|text| format!("invariant 6, node {}: {text}", node.name))?;
        }
        Ok(())
    }

    /// What does not depend on where something happened.
    pub(crate) fn check_all(&mut self) -> Result<(), String> {
        for node in &self.nodes {
            node.check(&self.api).map_err(|text| format!("node {}: {text}", node.name))?;
        }
        self.check_ledger()?;
        self.check_recount()
    }

    /// Invariant 1 for what is promised: at every change of the pods, no GPU is promised beyond what it was ever said to have. It
    /// needs a single extender; with two the agents' arbiters alone keep the memory.
    fn check_ledger(&mut self) -> Result<(), String> {
        if self.checked == self.api.pod_log.len() || self.extender.two_writers {
            return Ok(());
        }
        self.checked = self.api.pod_log.len();
        for (uuid, most) in &self.api.most {
            let sum = self.api.ledger(uuid);
            ensure!(
                sum <= *most,
                "invariant 1: {sum} of GPU {uuid} are allocated, which has {most} to share"
            );
        }
        Ok(())
    }

    /// The extender's ledger is what a naive count of what it has seen and reserved gives.
    fn check_recount(&self) -> Result<(), String> {
        let ledger = self.extender.core.index().ledger();
        for view in ledger.nodes() {
            let Some(state) = view.state() else { continue };
            let seen = self
                .extender
                .pods
                .view
                .values()
                .filter(|pod| pod.node.as_deref() == Some(view.name()));
            // A pod that the API server said is gone counts for nothing, even while its last event is on its way.
            let gone = |pod: &&Pod| ledger.pod(&pod.uid).is_none() && self.api.pod(&pod.uid).is_none();
            let seen: Vec<&Pod> = seen.filter(|pod| !gone(pod)).collect();
            for (position, gpu) in state.gpus.iter().enumerate() {
                let uuid = gpu.uuid.as_deref().unwrap_or_default();
                let bound = booked(seen.iter().copied(), uuid);
                let reserved = ledger.reservations().filter(|(_, node, _)| *node == view.name());
                let reserved = reserved
                    .flat_map(|(_, _, reservation)| reservation.possible())
                    .filter_map(|held| share(held, uuid))
                    .fold(MiB::ZERO, MiB::saturating_add);
                ensure!(
                    view.used(position) == bound.saturating_add(reserved),
                    "the extender counts {} on GPU {uuid}; bound are {bound}, reserved {reserved}",
                    view.used(position)
                );
            }
        }
        Ok(())
    }

    /// What holds when nothing is under way: the extender knows what is so.
    fn check_calm(&self) -> Result<(), String> {
        let ledger = self.extender.core.index().ledger();
        let rebuilt = self.extender.rebuilt();
        let rebuilt = rebuilt.index().ledger();
        for node in &self.nodes {
            let view = ledger.node(&node.name).ok_or("the extender has forgotten a node")?;
            let again = rebuilt.node(&node.name).ok_or("a new extender does not know a node")?;
            let state = view.state().ok_or("the extender does not know a node")?;
            ensure!(
                again.state() == Some(state),
                "a new extender would read node {} as {:?} and not {state:?}",
                node.name,
                again.state()
            );
            ensure!(
                state.source == divvy_placement::Source::Inventory,
                "node {} is read by {:?} at rest",
                node.name,
                state.source
            );
            for (position, gpu) in state.gpus.iter().enumerate() {
                let uuid = gpu.uuid.as_deref().unwrap_or_default();
                let (ours, naive) = (view.used(position), self.api.ledger(uuid));
                ensure!(
                    ours == naive && again.used(position) == naive,
                    "GPU {uuid}: the extender counts {ours}, a new one {}, the pods hold {naive}",
                    again.used(position)
                );
                let ghosts = self.ghosts(node, uuid);
                ensure!(
                    gpu.held == ghosts,
                    "GPU {uuid}: {} are published as held, containers of pods that are gone hold {ghosts}",
                    gpu.held
                );
                let real = node.gpus.iter().find(|real| real.uuid == uuid).ok_or("an unknown GPU")?;
                ensure!(
                    gpu.health == real.health,
                    "GPU {uuid} is {:?}, the extender takes it for {:?}",
                    real.health,
                    gpu.health
                );
            }
        }
        for pod in self.api.pods.values().filter(|pod| pod.node.is_none()) {
            let passed = self.filter(pod)?;
            let naive: Vec<usize> = (0..self.nodes.len()).filter(|node| self.fits(pod, *node)).collect();
            ensure!(passed == naive, "{} fits on {naive:?}, filter says {passed:?}", pod.uid);
        }
        Ok(())
    }

    /// Memory of a GPU that granted pods without a living object have, while they have processes.
    pub(crate) fn ghosts(&self, node: &SimNode, uuid: &str) -> MiB {
        let granted: BTreeMap<&String, MiB> = node
            .disk
            .records
            .values()
            .filter_map(|record| Some((&record.uid, record.gpus.iter().find(|share| share.uuid == uuid)?.memory)))
            .collect();
        granted
            .into_iter()
            .filter(|(uid, _)| node.populated.contains(*uid) && self.api.pod(uid).is_none_or(Pod::ended))
            .fold(MiB::ZERO, |sum, (_, memory)| sum.saturating_add(memory))
    }

    /// Naively: some good GPU of the node, or as many as it asks for, has its part left.
    fn fits(&self, pod: &Pod, node: usize) -> bool {
        let node = &self.nodes[node];
        let rules = pod.request.rules.as_deref().and_then(|rules| rules.as_ref().ok());
        let gpus = rules.and_then(|rules| rules.gpus).unwrap_or(1);
        let wanted = pod.request.effective_units().unwrap() / u64::from(gpus) * GIB;
        let good = node.gpus.iter().filter(|gpu| gpu.health == Health::Ok);
        let with_room = good.filter(|gpu| {
            let offered = gpu.total.saturating_sub(node.reserve).0 / GIB * GIB;
            let taken = self.api.ledger(&gpu.uuid).saturating_add(self.ghosts(node, &gpu.uuid));
            taken.0 + wanted <= offered
        });
        with_room.count() >= gpus as usize
    }

    /// The pods that wait.
    pub(crate) fn pending(&self) -> Vec<Pod> {
        let pending = self.api.pods.values().filter(|pod| pod.node.is_none() && !pod.deleting);
        pending.cloned().collect()
    }

    pub(crate) fn place(&mut self, key: &PodKey) -> Result<bool, String> {
        let Some(pod) = self.api.pods.get(key).filter(|pod| pod.node.is_none()).cloned() else {
            return Ok(false);
        };
        let nodes: Vec<usize> = (0..self.nodes.len()).filter(|node| self.fits(&pod, *node)).collect();
        let Some(node) = nodes.first().copied() else {
            return Ok(false);
        };
        self.bind(&pod, node)?;
        self.answer_all()?;
        let bound = self.api.pods.get(key).is_some_and(|pod| pod.node.is_some());
        ensure!(bound, "{} fits on {} and was not bound", pod.uid, self.nodes[node].name);
        self.extender.watch(&self.api, usize::MAX, usize::MAX);
        Ok(true)
    }
}
