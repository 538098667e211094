//! The simulated world: an API server, extenders, nodes with a kubelet and an agent each, and the steps that change them.

use std::collections::{BTreeMap, BTreeSet};

use divvy_extender::core::BindArgs;
use divvy_model::ContainerKind::{App, Init, Sidecar};
use divvy_model::legacy::bind_annotations;
use divvy_model::{
    Allocation, ContainerKind, ContainerRequest, ContainerShare, GpuRules, GpuShare, Health, Held, MiB, Pod, PodKey, PodRequest,
    names,
};

use crate::Violation;
use crate::api::{ApiModel, GIB};
use crate::extender::{ExtenderRun, late_write};
use crate::node::SimNode;
use crate::ops::{EventMix, Fate, Forgery, HistoryOp, LeaseFate};
use crate::story::{Story, ensure};
use crate::whole;

mod checks;
mod scheduler;

use scheduler::SimScheduler;

/// The names of pods. There are only a few, so that names are reused.
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

/// The values of `spec.priority` for new pods.
const PRIORITIES: [i32; 4] = [0, 10, 20, 0];

/// The nodes by name, each with the sizes of its GPUs in units.
type WorldNodes = &'static [(&'static str, &'static [u64])];

fn nodes(mix: EventMix) -> WorldNodes {
    match mix {
        EventMix::Preemption | EventMix::Whole => &[("n1", &[4]), ("n2", &[6, 4, 4])],
        _ => &[("n1", &[4]), ("n2", &[6, 4])],
    }
}

/// The number of GPUs over which the requests are spread, and the pod's containers with their requests.
type PodShape = (u32, &'static [(&'static str, ContainerKind, u64)]);

fn shapes() -> [PodShape; 10] {
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

/// The containers of pods with whole GPUs, with the numbers of GPUs.
const WHOLE_SHAPES: [&[(&str, ContainerKind, u64)]; 6] = [
    &[("m", App, 1)],
    &[("m", App, 1)],
    &[("m", App, 2)],
    &[("m", App, 1), ("n", App, 1)],
    &[("i", Init, 2), ("m", App, 1), ("n", App, 0)],
    &[("s", Sidecar, 1), ("i", Init, 1), ("m", App, 1)],
];

pub fn request(containers: &[(&str, ContainerKind, u64)]) -> PodRequest {
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

/// The simulated world.
#[derive(Debug)]
pub struct World {
    pub api: ApiModel,
    /// A single extender, or several replicas, one of which is the leader.
    pub extenders: Vec<ExtenderRun>,
    pub scheduler: SimScheduler,
    pub nodes: Vec<SimNode>,
    pub story: Story,
    mix: EventMix,
    /// The nodes that the current step has changed.
    touched: BTreeSet<usize>,
    /// The position in the history of pods up to which the ledger has been checked.
    checked: usize,
}

/// Return the `n`th item. `n` is taken modulo the number of items.
fn pick<T: Clone>(items: impl IntoIterator<Item = T>, n: u8) -> Option<T> {
    let items: Vec<T> = items.into_iter().collect();
    items.get(usize::from(n) % items.len().max(1)).cloned()
}

impl World {
    /// Create nodes with running agents, and extenders that know these nodes.
    pub fn new(mix: EventMix, told: bool) -> Result<World, Violation> {
        let mut api = ApiModel::default();
        // Clocks that are set back do not go before 1970.
        api.tick(1_000_000_000_000_000);
        let mut nodes = nodes(mix)
            .iter()
            .map(|(name, units)| SimNode::new(name, units, mix == EventMix::Whole, &mut api))
            .collect::<Result<Vec<_>, _>>()?;
        nodes[0].no_pod_cgroups = mix == EventMix::NoPodCgroups;
        let replicas = if mix == EventMix::Replicas { 2 } else { 1 };
        let extenders = (0..replicas).map(|_| ExtenderRun::new(&mut api, replicas == 1)).collect();
        let mut world = World {
            api,
            extenders,
            scheduler: SimScheduler::default(),
            nodes,
            story: Story::new(told),
            mix,
            touched: BTreeSet::new(),
            checked: 0,
        };
        world.tick(2_000_000_000)?;
        world.lead()?;
        Ok(world)
    }

    /// Take one step and check the invariants.
    pub fn step(&mut self, op: HistoryOp) -> Result<(), Violation> {
        self.tick(1_000_000)?;
        self.apply(op)?;
        self.replace_evicted();
        self.check()
    }

    /// Let time pass. Replicas that are not frozen read the Lease every two seconds.
    pub fn tick(&mut self, ns: u64) -> Result<(), Violation> {
        const LOOK_NS: u64 = 2_000_000_000;
        let end = self.api.now_ns + ns;
        while self.api.now_ns / LOOK_NS != end / LOOK_NS {
            let next = (self.api.now_ns / LOOK_NS + 1) * LOOK_NS;
            self.api.tick(next - self.api.now_ns);
            for replica in 0..self.extenders.len() {
                self.check_lease(replica, LeaseFate::Answered)?;
            }
        }
        self.api.tick(end - self.api.now_ns);
        Ok(())
    }

    fn check_lease(&mut self, replica: usize, fate: LeaseFate) -> Result<(), Violation> {
        let extender = &mut self.extenders[replica];
        if extender.frozen {
            return Ok(());
        }
        extender.check_lease(&mut self.api, fate, &mut self.story)
    }

    /// Let time pass until a replica that is not frozen is the leader. Lists that are on their way are delivered.
    pub fn lead(&mut self) -> Result<(), Violation> {
        for _ in 0..20 {
            for extender in self.extenders.iter_mut().filter(|extender| !extender.frozen) {
                extender.list_arrives(&self.api, &mut self.story)?;
            }
            if self.leader().is_some() {
                return Ok(());
            }
            self.tick(2_000_000_000)?;
        }
        Err("no replica leads".into())
    }

    /// Return the replica that is the leader and is not frozen.
    pub fn leader(&self) -> Option<usize> {
        let leads = |extender: &ExtenderRun| !extender.frozen && extender.leads(&self.api);
        self.extenders.iter().position(leads)
    }

    fn replica(&self, n: u8) -> usize {
        usize::from(n) % self.extenders.len()
    }

    fn node(&mut self, n: u8) -> usize {
        let node = usize::from(n) % self.nodes.len();
        self.touched.insert(node);
        node
    }

    fn all_pods(&self) -> Vec<Pod> {
        self.api.pods.values().cloned().collect()
    }

    /// Return the node whose kubelet has this pod.
    fn home(&mut self, uid: &str) -> Option<usize> {
        let node = self.nodes.iter().position(|node| {
            node.kubelet.pods.contains_key(uid) || node.cgroups.contains_key(uid) || node.waiting.contains_key(uid)
        })?;
        self.touched.insert(node);
        Some(node)
    }

    fn apply(&mut self, op: HistoryOp) -> Result<(), Violation> {
        match op {
            HistoryOp::Create { name, shape, priority } => self.create(name, shape, priority),
            HistoryOp::Forge {
                name,
                shape,
                node,
                gpu,
                how,
            } => self.forge(name, shape, node, gpu, how),
            HistoryOp::Delete { pod } => {
                if let Some(pod) = pick(self.all_pods(), pod) {
                    self.story.tell(|| format!("deletion of {} is requested", pod.uid));
                    self.api.delete(&pod.uid);
                }
            }
            HistoryOp::ForceDelete { pod } => {
                if let Some(pod) = pick(self.all_pods(), pod) {
                    self.story.tell(|| format!("{} is force-deleted", pod.uid));
                    self.api.remove(&pod.uid);
                }
            }
            HistoryOp::Recreate { pod } => {
                if let Some(pod) = pick(self.all_pods(), pod) {
                    self.api.remove(&pod.uid);
                    let uid = self.api.create(&pod.name, pod.request.clone(), pod.priority);
                    self.story
                        .tell(|| format!("{} is force-deleted and created again: {uid:?}", pod.uid));
                }
            }
            HistoryOp::Evict { pod } => {
                if let Some(pod) = pick(self.all_pods(), pod)
                    && let Some(node) = self.home(&pod.uid)
                {
                    self.story.tell(|| format!("{} is evicted", pod.uid));
                    self.nodes[node].evict(&mut self.api, &pod.uid);
                }
            }
            HistoryOp::Schedule {
                pod,
                node,
                lost,
                replica,
            } => self.schedule_one(pod, node, lost, replica)?,
            HistoryOp::Bind { pod, node, replica } => {
                let node = usize::from(node) % self.nodes.len();
                if let Some(pod) = pick(self.all_pods(), pod) {
                    let replica = self.replica(replica);
                    self.bind(replica, &pod, node)?;
                }
            }
            HistoryOp::Call { call, fate } => match pick(self.calls(fate), call) {
                Some((replica, call)) => {
                    let World {
                        extenders, api, story, ..
                    } = self;
                    let extender = &mut extenders[replica];
                    story.tell(|| format!("{}: {fate:?}", extender.describe(call)));
                    extender.call(api, call, fate, story)?;
                }
                None => self.schedule_one(call, call, false, call)?,
            },
            HistoryOp::LateWrite { call } => {
                if self.api.late.is_empty() {
                    self.schedule_one(call, call, true, call)?;
                } else {
                    let call = usize::from(call) % self.api.late.len();
                    self.story
                        .tell(|| "a Binding without an answer is carried out late".to_owned());
                    late_write(&mut self.api, call, &mut self.story)?;
                }
            }
            HistoryOp::Tick { seconds } => {
                self.story.tell(|| format!("{seconds} s pass"));
                self.tick(u64::from(seconds) * 1_000_000_000)?;
            }
            HistoryOp::Sweep { replica }
            | HistoryOp::ToExtender { replica, .. }
            | HistoryOp::RelistExtender { replica }
            | HistoryOp::ListArrives { replica }
            | HistoryOp::RestartExtender { replica, .. }
            | HistoryOp::Retire { replica }
            | HistoryOp::Lease { replica, .. }
            | HistoryOp::Freeze { replica }
            | HistoryOp::Thaw { replica }
            | HistoryOp::Clock { replica, .. } => {
                let replica = self.replica(replica);
                self.on_extender(replica, op)?;
            }
            HistoryOp::Work { pod, luck } => {
                let live = |node: &SimNode| -> Vec<String> {
                    let live = node.kubelet.pods.iter().filter(|(_, local)| local.is_live());
                    let creating = node.creating.keys().map(|(uid, _)| uid);
                    let waiting = node.waiting.keys();
                    live.map(|(uid, _)| uid).chain(creating).chain(waiting).cloned().collect()
                };
                if let Some(uid) = pick(self.nodes.iter().flat_map(live).collect::<Vec<_>>(), pod)
                    && let Some(node) = self.home(&uid)
                {
                    self.story.tell(|| format!("the pod worker of {uid} takes a step"));
                    self.nodes[node].work(&mut self.api, &uid, luck, &mut self.story)?;
                }
            }
            HistoryOp::End { pod, container, how } => {
                if let Some(uid) = pick(self.nodes.iter().flat_map(SimNode::endable).collect::<Vec<_>>(), pod)
                    && let Some(node) = self.home(&uid)
                {
                    self.story.tell(|| format!("a container or the sandbox of {uid} ends"));
                    self.nodes[node].end(&mut self.api, &uid, usize::from(container), how, &mut self.story);
                }
            }
            HistoryOp::ReplaceCard { gpu } => {
                if let Some((node, gpu)) = pick(self.all_gpus(), gpu) {
                    self.touched.insert(node);
                    let uuid = self.nodes[node].gpus[gpu].uuid.clone();
                    // A machine has a limited number of slots.
                    if self.nodes[node].gpus.len() < 4 && self.nodes[node].replace_card(gpu) {
                        self.story.tell(|| format!("another card is put in place of {uuid}"));
                    }
                }
            }
            HistoryOp::Fail { gpu } => self.set_health(gpu, Health::Failed),
            HistoryOp::Recover { gpu } => self.set_health(gpu, Health::Ok),
            HistoryOp::Hurry { pod, steps, luck } => {
                if let Some(pod) = pick(self.all_pods(), pod) {
                    self.hurry(&pod.uid, steps, luck)?;
                }
            }
            HistoryOp::Calm => {
                self.story.tell(|| "everything in progress arrives".to_owned());
                self.calm()?;
            }
            HistoryOp::ToAgent { .. }
            | HistoryOp::ToKubelet { .. }
            | HistoryOp::RelistAgent { .. }
            | HistoryOp::AgentListArrives { .. }
            | HistoryOp::Report { .. }
            | HistoryOp::Heartbeat { .. }
            | HistoryOp::Reconcile { .. }
            | HistoryOp::Publish { .. }
            | HistoryOp::KillAgent { .. }
            | HistoryOp::KillAgentAfter { .. }
            | HistoryOp::StartAgent { .. }
            | HistoryOp::RestartKubelet { .. }
            | HistoryOp::Reboot { .. } => self.on_node(op)?,
        }
        Ok(())
    }

    /// Return the calls that can make progress with this result. A frozen replica receives no response.
    fn calls(&self, fate: Fate) -> Vec<(usize, usize)> {
        let replicas = self.extenders.iter().enumerate();
        replicas
            .filter(|(_, extender)| !extender.frozen || fate == Fate::Taken)
            .flat_map(|(replica, extender)| (0..extender.calls.len()).map(move |call| (replica, call)))
            .collect()
    }

    fn on_extender(&mut self, replica: usize, op: HistoryOp) -> Result<(), Violation> {
        let World {
            extenders, api, story, ..
        } = self;
        let several = extenders.len() > 1;
        let who = if several {
            format!("extender {replica}")
        } else {
            "the extender".to_owned()
        };
        let extender = &mut extenders[replica];
        match op {
            HistoryOp::RestartExtender { leftover, .. } => {
                story.tell(|| format!("{who} is restarted; Bindings in progress: {leftover:?}"));
                return extender.restart(api, leftover, story);
            }
            HistoryOp::Freeze { .. } if several && !extender.frozen => {
                story.tell(|| format!("{who} is frozen"));
                extender.frozen = true;
            }
            HistoryOp::Thaw { .. } if extender.frozen => {
                story.tell(|| format!("{who} continues"));
                extender.frozen = false;
            }
            HistoryOp::Clock { seconds, .. } => {
                story.tell(|| format!("the wall clock of {who} is changed by {seconds} s"));
                extender.wall_s += i64::from(seconds);
            }
            _ if extender.frozen => {}
            HistoryOp::Sweep { .. } => {
                story.tell(|| format!("{who} checks its reservations"));
                extender.sweep(api, story)?;
            }
            HistoryOp::ToExtender { pods, nodes, .. } => {
                story.tell(|| format!("{who} sees {pods} events of pods and {nodes} of nodes"));
                extender.watch(api, usize::from(pods), usize::from(nodes), story)?;
            }
            HistoryOp::RelistExtender { .. } => {
                story.tell(|| format!("{who} lists pods and nodes again"));
                extender.ask(api);
            }
            HistoryOp::ListArrives { .. } if extender.listing.is_some() => {
                story.tell(|| format!("the list of pods arrives at {who}"));
                extender.list_arrives(api, story)?;
            }
            HistoryOp::Retire { .. } if several && extender.retire(api) => {
                story.tell(|| format!("{who} ends, gives the lease back, and starts again"));
                extender.restart(api, crate::ops::Leftover::Late, story)?;
            }
            HistoryOp::Lease { fate, .. } => {
                story.tell(|| format!("{who} checks the lease: {fate:?}"));
                extender.check_lease(api, fate, story)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn on_node(&mut self, op: HistoryOp) -> Result<(), Violation> {
        let (HistoryOp::ToAgent { node, .. }
        | HistoryOp::ToKubelet { node, .. }
        | HistoryOp::RelistAgent { node }
        | HistoryOp::AgentListArrives { node }
        | HistoryOp::Report { node }
        | HistoryOp::Heartbeat { node }
        | HistoryOp::Reconcile { node, .. }
        | HistoryOp::Publish { node }
        | HistoryOp::KillAgent { node }
        | HistoryOp::KillAgentAfter { node, .. }
        | HistoryOp::StartAgent { node, .. }
        | HistoryOp::RestartKubelet { node, .. }
        | HistoryOp::Reboot { node, .. }) = op
        else {
            return Ok(());
        };
        let index = self.node(node);
        let World { api, story, nodes, .. } = self;
        let node = &mut nodes[index];
        let name = node.name.clone();
        match op {
            HistoryOp::ToAgent { events, .. } => {
                story.tell(|| format!("the agent of {name} sees {events} events"));
                node.agent_sees(api, usize::from(events), story)?;
            }
            HistoryOp::ToKubelet { events, luck, .. } => {
                story.tell(|| format!("the kubelet of {name} sees {events} events"));
                node.kubelet_sees(api, usize::from(events), luck, story)?;
            }
            HistoryOp::RelistAgent { .. } => {
                story.tell(|| format!("the agent of {name} lists its pods again"));
                node.relist_agent(api);
            }
            HistoryOp::AgentListArrives { .. } => {
                story.tell(|| format!("the list of pods arrives at the agent of {name}, if it is waiting for one"));
                node.list_arrives(story)?;
            }
            HistoryOp::Report { .. } => node.report_all(api),
            HistoryOp::Heartbeat { .. } => {
                story.tell(|| format!("the kubelet of {name} writes the node's status"));
                node.heartbeat(api);
            }
            HistoryOp::Reconcile { events, .. } => {
                story.tell(|| format!("the agent of {name} reconciles, and sees {events} events before it decides"));
                node.reconcile(api, usize::from(events), story)?;
            }
            HistoryOp::Publish { .. } => {
                story.tell(|| format!("the agent of {name} publishes its inventory"));
                node.publish(api);
            }
            HistoryOp::KillAgent { .. } => {
                story.tell(|| format!("the agent of {name} is killed"));
                node.kill_agent();
            }
            HistoryOp::KillAgentAfter { actions, .. } => {
                story.tell(|| format!("the agent of {name} will be killed after {actions} actions"));
                if let Some(agent) = &mut node.agent {
                    agent.dies_after = Some(actions);
                }
            }
            HistoryOp::StartAgent { reserve, listed, .. } => {
                story.tell(|| format!("the agent of {name} starts, {reserve} units reserved, has listed: {listed}"));
                node.start_agent(api, MiB(u64::from(reserve) * GIB), listed, story)?;
            }
            HistoryOp::RestartKubelet { registered, .. } => {
                story.tell(|| format!("the kubelet of {name} is restarted, the agent registers before pods: {registered}"));
                node.restart_kubelet(api, registered, story)?;
            }
            HistoryOp::Reboot { registered, .. } => {
                story.tell(|| format!("{name} is rebooted, the agent registers before pods: {registered}"));
                node.reboot(api, registered, story)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Return the request of a new pod of this shape, and a free name.
    fn new_pod(&self, name: u8, shape: u8) -> Option<(&'static str, PodRequest)> {
        let free = NAMES
            .iter()
            .filter(|name| !self.api.pods.contains_key(&crate::api::key(name)));
        let name = pick(free, name)?;
        if self.mix == EventMix::Whole && shape.is_multiple_of(2) {
            let shape = WHOLE_SHAPES[usize::from(shape / 2) % WHOLE_SHAPES.len()];
            return Some((name, whole::request(shape)));
        }
        let (gpus, shape) = shapes()[usize::from(shape) % shapes().len()];
        let rules = GpuRules {
            gpus: Some(gpus),
            ..GpuRules::default()
        };
        let request = PodRequest::new(request(shape).containers, (gpus > 1).then_some(Ok(rules)));
        Some((name, request))
    }

    fn create(&mut self, name: u8, shape: u8, priority: u8) {
        let Some((name, request)) = self.new_pod(name, shape) else {
            return;
        };
        let priority = PRIORITIES[usize::from(priority) % PRIORITIES.len()];
        let text = || {
            let containers = request
                .containers
                .iter()
                .map(|c| format!("{} {:?} {}", c.name, c.kind, c.units));
            let gpus = match whole::gpus(&request) {
                0 => request.rules.as_deref().map_or(1, |_| 2),
                gpus => gpus,
            };
            let how = if request.whole.is_some() { "whole " } else { "" };
            format!(
                "{} on {gpus} {how}GPU(s), priority {priority}",
                containers.collect::<Vec<_>>().join(", ")
            )
        };
        let text = text();
        if let Some(uid) = self.api.create(name, request, priority) {
            self.story.tell(|| format!("{uid} is created: {text}"));
        }
    }

    /// Create a pod whose owner set `spec.nodeName` and the allocation's annotations by hand. The annotations are converted to text and back.
    fn forge(&mut self, name: u8, shape: u8, node: u8, gpu: u8, how: Forgery) {
        let Some((name, request)) = self.new_pod(name, shape).filter(|(_, request)| request.rules.is_none()) else {
            return;
        };
        let node = self.node(node);
        let gpus = &self.nodes[node].gpus;
        let gpu = &gpus[usize::from(gpu) % gpus.len()];
        let units = request.effective_units().unwrap();
        let whole = how == Forgery::Exact && request.whole.is_some();
        let (share, container) = match how {
            Forgery::Zero => (0, 0),
            Forgery::ZeroContainer => (units * GIB, 0),
            Forgery::Less => (GIB / 2, GIB / 2),
            _ if whole => (gpu.total.0, gpu.total.0),
            _ => (units * GIB, units * GIB),
        };
        let containers = request.memory_containers().map(|wanted| {
            let share = ContainerShare {
                uuid: gpu.uuid.clone(),
                memory: MiB(container.min(wanted.units * GIB)),
                cores: 0,
            };
            (wanted.name.clone(), vec![share])
        });
        let sole = request.whole.iter().filter(|asked| whole && asked.containers.len() == 1);
        let sole = sole.flat_map(|asked| &asked.containers).map(|asking| {
            let share = ContainerShare {
                uuid: gpu.uuid.clone(),
                memory: MiB(container),
                cores: 0,
            };
            (asking.name.clone(), vec![share])
        });
        let allocation = Allocation {
            v: 1,
            gpus: vec![GpuShare {
                uuid: gpu.uuid.clone(),
                memory: MiB(share),
                cores: 0,
                whole,
                enforcement: None,
            }],
            containers: containers.chain(sole).collect(),
        };
        let ours = |text: String| BTreeMap::from([(names::ALLOCATION.to_owned(), text)]);
        let annotations = match how {
            Forgery::LegacyZero => bind_annotations(gpu.index, 4, 0, 0),
            Forgery::LegacyLess => bind_annotations(gpu.index, 4, 1, 0),
            Forgery::LegacyExact => bind_annotations(gpu.index, 4, units, 0),
            Forgery::Nothing => BTreeMap::new(),
            Forgery::Garbage => ours("{".to_owned()),
            _ => ours(allocation.to_json()),
        };
        let name_of_node = self.nodes[node].name.clone();
        let held = Held::from_annotations(&annotations);
        if let Some(uid) = self.api.forge(name, request, &name_of_node, held) {
            self.story
                .tell(|| format!("{uid} is created with spec.nodeName {name_of_node}, {units} units and {annotations:?}"));
        }
    }

    fn all_gpus(&self) -> Vec<(usize, usize)> {
        (0..self.nodes.len())
            .flat_map(|node| (0..self.nodes[node].gpus.len()).map(move |gpu| (node, gpu)))
            .collect()
    }

    fn set_health(&mut self, gpu: u8, health: Health) {
        if let Some((node, gpu)) = pick(self.all_gpus(), gpu) {
            self.touched.insert(node);
            let uuid = &self.nodes[node].gpus[gpu].uuid;
            self.story.tell(|| format!("GPU {uuid} is {health:?}"));
            self.nodes[node].set_health(gpu, health);
        }
    }

    /// Return the nodes that the extender's filter accepts for a pod.
    pub fn filter(&self, replica: usize, pod: &Pod) -> Result<Vec<usize>, Violation> {
        let names = self.nodes.iter().map(|node| node.name.as_str());
        Ok(self.extenders[replica].core.filter(pod, names)?.passed)
    }

    /// Schedule one of the waiting pods. If there is none, create a pod.
    fn schedule_one(&mut self, pod: u8, node: u8, lost: bool, replica: u8) -> Result<(), Violation> {
        let Some(waiting) = pick(self.pending(), pod) else {
            self.create(pod, node, 0);
            return Ok(());
        };
        let calls: Vec<usize> = self.extenders.iter().map(|extender| extender.calls.len()).collect();
        let replica = self.replica(replica);
        self.schedule(replica, &waiting, node)?;
        let sent = (0..calls.len()).find(|replica| self.extenders[*replica].calls.len() > calls[*replica]);
        if let Some(replica) = sent.filter(|_| lost) {
            let World {
                extenders, api, story, ..
            } = self;
            extenders[replica].call(api, calls[replica], Fate::Lost, story)?;
        }
        Ok(())
    }

    /// Send kube-scheduler's bind request to this replica. If the replica is not the leader, it forwards the request to the
    /// replica that it believes to be the leader.
    pub fn bind(&mut self, replica: usize, pod: &Pod, node: usize) -> Result<(), Violation> {
        let args = BindArgs {
            pod_name: pod.name.clone(),
            pod_namespace: pod.namespace.clone(),
            pod_uid: pod.uid.clone(),
            node: self.nodes[node].name.clone(),
        };
        let asked = &self.extenders[replica];
        let handed = match asked.holder() {
            Some(holder) if !asked.leads(&self.api) => {
                let holder = self.extenders.iter().position(|extender| extender.identity() == holder);
                holder.filter(|holder| !self.extenders[*holder].frozen)
            }
            _ => (!asked.frozen).then_some(replica),
        };
        let Some(replica) = handed else {
            self.story.tell(|| format!("no replica answers the bind of {}", pod.uid));
            return Ok(());
        };
        self.story
            .tell(|| format!("kube-scheduler requests the bind of {} to {}", pod.uid, args.node));
        self.extenders[replica].bind(&self.api, args, &mut self.story)
    }

    /// Schedule, bind, admit, and start a pod, as far as this is possible.
    fn hurry(&mut self, uid: &str, steps: u8, luck: u8) -> Result<(), Violation> {
        self.story.tell(|| format!("{uid} hurries"));
        if let Some(pod) = self.api.pod(uid).filter(|pod| pod.node.is_none() && !pod.deleting).cloned() {
            let replica = self.leader().unwrap_or(0);
            if !self.extenders[replica].frozen {
                self.extenders[replica].catch_up(&self.api, &mut self.story)?;
            }
            self.schedule(replica, &pod, luck)?;
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
                node.end(api, uid, position, crate::ops::ContainerEnding::Well, story);
            }
        }
        Ok(())
    }

    /// Carry out and answer all calls of the extenders that are not frozen, in order.
    pub fn answer_all(&mut self) -> Result<(), Violation> {
        for _ in 0..1_000 {
            let Some((replica, call)) = self.calls(Fate::Answered).first().copied() else {
                return Ok(());
            };
            let World {
                extenders, api, story, ..
            } = self;
            extenders[replica].call(api, call, Fate::Answered, story)?;
        }
        Err("the extender does not stop calling the API server".into())
    }

    /// Return counters, which differ whenever something has happened.
    fn history(&self) -> (usize, usize, usize) {
        let ledgers = self.extenders.iter().map(|extender| extender.core.index().ledger());
        let reserved = ledgers.map(|ledger| ledger.reservations().count()).sum();
        (self.api.pod_log.len(), self.api.node_log.len(), reserved)
    }

    /// Deliver everything in progress until nothing changes any more. Containers keep running, even those of pods that are gone.
    pub fn calm(&mut self) -> Result<(), Violation> {
        self.touched = (0..self.nodes.len()).collect();
        for extender in &mut self.extenders {
            extender.frozen = false;
        }
        for _ in 0..20 {
            let before = self.history();
            self.answer_all()?;
            // After this time, Bindings without a response can no longer be carried out.
            self.tick(70_000_000_000)?;
            self.lead()?;
            for extender in &mut self.extenders {
                extender.sweep(&self.api, &mut self.story)?;
            }
            self.answer_all()?;
            for node in &mut self.nodes {
                let (api, story) = (&mut self.api, &mut self.story);
                if let Some(agent) = &mut node.agent {
                    agent.dies_after = None;
                } else {
                    node.start_agent(api, node.reserve, true, story)?;
                }
                node.answer_starts(api, story)?;
                node.agent_sees(api, usize::MAX, story)?;
                node.kubelet_sees(api, usize::MAX, 1, story)?;
                node.report_all(api);
                node.agent_sees(api, usize::MAX, story)?;
                node.reconcile(api, 0, story)?;
                node.publish(api);
                node.heartbeat(api);
            }
            self.replace_evicted();
            let mut kept = 0;
            for extender in &mut self.extenders {
                extender.catch_up(&self.api, &mut self.story)?;
                kept += extender.core.index().ledger().departed().count();
            }
            // Nothing is held for vanished pods anymore: the agents have reported by now what these hold.
            let calls = self.calls(Fate::Answered);
            if self.history() == before && calls.is_empty() && kept == 0 {
                for extender in &self.extenders {
                    extender.check_at_rest()?;
                }
                return self.check_calm();
            }
        }
        Err("the world does not come to rest".into())
    }

    /// Return the waiting pods.
    pub fn pending(&self) -> Vec<Pod> {
        let pending = self.api.pods.values().filter(|pod| pod.node.is_none() && !pod.deleting);
        pending.cloned().collect()
    }

    /// Bind a pod if it fits on some node and no other pod has precedence. Nothing may be in progress.
    pub fn place(&mut self, key: &PodKey) -> Result<bool, Violation> {
        let Some(pod) = self.api.pods.get(key).filter(|pod| pod.node.is_none()).cloned() else {
            return Ok(false);
        };
        let nodes: Vec<usize> = (0..self.nodes.len()).filter(|node| self.fits(&pod, *node)).collect();
        let Some(node) = nodes.first().copied() else {
            return Ok(false);
        };
        if self.is_outranked(&pod) {
            return Ok(false);
        }
        let leader = self.leader().ok_or("no replica leads")?;
        self.bind(leader, &pod, node)?;
        self.answer_all()?;
        let bound = self.api.pods.get(key).is_some_and(|pod| pod.node.is_some());
        ensure!(bound, "{} fits on {} and was not bound", pod.uid, self.nodes[node].name);
        self.see_all()?;
        Ok(true)
    }

    /// Deliver all events to the extenders.
    pub fn see_all(&mut self) -> Result<(), Violation> {
        for extender in self.extenders.iter_mut().filter(|extender| !extender.frozen) {
            extender.catch_up(&self.api, &mut self.story)?;
        }
        Ok(())
    }
}
