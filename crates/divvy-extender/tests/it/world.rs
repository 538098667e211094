//! The core with a miniature API server, in random order: POSTs that are carried out late or whose answers
//! are lost, watches that lag or are cut, deletions and re-creations, restarts of the extender.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use divvy_extender::core::{Action, BindingRequest, Core, Got, OpId, Posted, Ticket, Timing};
use divvy_model::{Health, Held, MemoryUnit, Node, Phase, Pod, PodKey};
use proptest::prelude::*;

use crate::values::*;

#[derive(Debug, Clone)]
enum Step {
    Create(u8, u64),
    Delete(u8),
    End(u8),
    /// A container of the pod starts.
    Run(u8),
    /// kube-scheduler asks about both nodes.
    Filter(u8),
    Bind(u8, u8),
    /// The number of a POST (modulo the open ones), and its outcome.
    Post(usize, Fate),
    /// The number of a GET, and whether it is answered.
    Get(usize, bool),
    /// Deliver this many changes.
    Watch(u8),
    CutAndList,
    /// A change of GPU capacity.
    Node(u8, u64),
    /// A GPU of n0 fails or recovers.
    Health(u8, bool),
    Sweep,
    /// POSTs without an answer are carried out now.
    Late,
    /// POSTs of a killed process are carried out now.
    Orphans,
    Time(u64),
    Restart,
}

#[derive(Debug, Clone, Copy)]
enum Fate {
    Done,
    DoneAnswerLost,
    NeverDone,
    /// No answer now; carried out later if still possible.
    DoneLate,
    Refused,
}

/// Few and large pods, so that they compete for the same GPUs.
const PODS: u8 = 4;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let fate = prop_oneof![
        5 => Just(Fate::Done),
        2 => Just(Fate::DoneAnswerLost),
        2 => Just(Fate::NeverDone),
        2 => Just(Fate::DoneLate),
        1 => Just(Fate::Refused),
    ];
    let step = prop_oneof![
        4 => (0..PODS, prop_oneof![1 => 0..5u64, 2 => 5..9u64]).prop_map(|(pod, units)| Step::Create(pod, units)),
        1 => (0..PODS).prop_map(Step::Delete),
        1 => (0..PODS).prop_map(Step::End),
        3 => (0..PODS).prop_map(Step::Run),
        3 => (0..PODS).prop_map(Step::Filter),
        6 => (0..PODS, 0..2u8).prop_map(|(pod, node)| Step::Bind(pod, node)),
        6 => (any::<usize>(), fate).prop_map(|(which, fate)| Step::Post(which, fate)),
        3 => (any::<usize>(), proptest::bool::weighted(0.7)).prop_map(|(which, answered)| Step::Get(which, answered)),
        5 => (1..6u8).prop_map(Step::Watch),
        1 => Just(Step::CutAndList),
        2 => Just(Step::Sweep),
        1 => Just(Step::Late),
        1 => Just(Step::Orphans),
        2 => prop_oneof![Just(10u64), Just(1_000), Just(30_000), Just(70_000)].prop_map(Step::Time),
        1 => Just(Step::Restart),
        1 => (0..2u8, 0..3u64).prop_map(|(node, more)| Step::Node(node, more)),
        2 => (0..2u8, any::<bool>()).prop_map(|(gpu, well)| Step::Health(gpu, well)),
    ];
    proptest::collection::vec(step, 1..100)
}

/// The part of the core that reads a pod.
#[derive(Debug)]
enum Look {
    Bind(OpId),
    Sweep(String, String),
}

struct World {
    core: Core,
    now_ms: u64,
    nodes: BTreeMap<String, Node>,
    /// The API server's pods, by name.
    pods: BTreeMap<String, Pod>,
    created: u64,
    /// Changes that the watch has not delivered: the pod, or the UID of one that is gone.
    feed: VecDeque<Result<Pod, String>>,
    posts: Vec<(OpId, BindingRequest)>,
    /// The GETs under way: who reads which pod, and when the answer is due.
    gets: Vec<(Look, PodKey, u64)>,
    /// POSTs without an answer that will be carried out, and when they were sent.
    late: Vec<(BindingRequest, u64)>,
    /// POSTs of a killed process. They are carried out and seen before its successor allocates anything, or not at all.
    orphans: Vec<BindingRequest>,
    settled_ms: Option<u64>,
    /// Departed pods, and when the extender saw that they had vanished. Their containers may still run for a while.
    departed: Vec<(Pod, u64)>,
    /// Pods for which the extender has seen that no container runs anymore. The next event may be their deletion.
    told_ended: BTreeSet<String>,
    /// Which caller waits for which answer.
    asked: BTreeMap<Ticket, (String, String)>,
}

impl World {
    fn new() -> World {
        let nodes = BTreeMap::from([
            ("n0".to_owned(), node("n0", &[8, 8])),
            ("n1".to_owned(), gpushare_node("n1", 8, 1)),
        ]);
        World {
            core: synced(&nodes.values().cloned().collect::<Vec<_>>(), &[]),
            now_ms: 1,
            nodes,
            pods: BTreeMap::new(),
            created: 0,
            feed: VecDeque::new(),
            posts: Vec::new(),
            gets: Vec::new(),
            late: Vec::new(),
            orphans: Vec::new(),
            settled_ms: None,
            departed: Vec::new(),
            told_ended: BTreeSet::new(),
            asked: BTreeMap::new(),
        }
    }

    fn take(&mut self, actions: Vec<Action>) -> Result<(), TestCaseError> {
        for action in actions {
            match action {
                Action::Post { op, binding } => {
                    prop_assert!(
                        self.posts.iter().all(|(_, other)| other.node != binding.node),
                        "two POSTs for one node at once"
                    );
                    self.posts.push((op, binding));
                }
                Action::Get { op, pod, after_ns } => self.gets.push((Look::Bind(op), pod, self.now_ms + after_ns / MS)),
                Action::Check { uid, node, pod } => self.gets.push((Look::Sweep(uid, node), pod, self.now_ms)),
                Action::Evict { uid, .. } => prop_assert!(false, "{uid} is to be evicted"),
                Action::Warn { text, .. } => prop_assert!(false, "nothing to tell: {text}"),
                Action::Answer { ticket, result } => {
                    let (uid, node) = self.asked.remove(&ticket).expect("asked once");
                    if result.is_ok() {
                        let bound = self.pods.values().find(|pod| pod.uid == uid);
                        // It may have been deleted since.
                        if let Some(pod) = bound {
                            prop_assert_eq!(pod.node.as_deref(), Some(node.as_str()), "an acknowledged bind is there");
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Deliver this state of a pod to the extender.
    fn tell(&mut self, pod: &Pod) {
        if pod.container_running {
            self.told_ended.remove(&pod.uid);
        } else {
            self.told_ended.insert(pod.uid.clone());
        }
    }

    /// Carry out a Binding as the API server does.
    fn carry_out(&mut self, binding: &BindingRequest) -> Posted {
        match self.pods.get_mut(&binding.name) {
            None => Posted::NotFound("not found".to_owned()),
            Some(pod) if pod.uid != binding.uid || pod.node.is_some() || pod.deleting => conflict(),
            Some(pod) => {
                *pod = bound(pod, binding);
                self.feed.push_back(Ok(pod.clone()));
                Posted::Created
            }
        }
    }

    fn carry_out_all(&mut self, late: Vec<(BindingRequest, u64)>) {
        for (binding, _) in late {
            self.carry_out(&binding);
        }
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        // A successor does not know about them.
        let forgets = matches!(step, Step::Restart);
        let ran: Vec<Pod> = self
            .core
            .index()
            .ledger()
            .pods()
            .filter(|pod| pod.container_running)
            .cloned()
            .collect();
        self.happen(step)?;
        let ledger = self.core.index().ledger();
        // One step may bring both the end of a pod's containers and the end of its object.
        let vanished = ran
            .into_iter()
            .filter(|pod| ledger.pod(&pod.uid).is_none() && !self.told_ended.contains(&pod.uid));
        self.departed.extend(vanished.map(|pod| (pod, self.now_ms)));
        self.departed
            .retain(|(_, since)| !forgets && self.now_ms - since < Timing::default().departed_ns / MS);
        self.check()
    }

    fn happen(&mut self, step: Step) -> Result<(), TestCaseError> {
        let now = at(self.now_ms);
        match step {
            Step::Create(name, units) => {
                let name = format!("p{name}");
                if !self.pods.contains_key(&name) {
                    self.created += 1;
                    let mut new = pod(&name, units);
                    new.uid = format!("u{}", self.created);
                    self.feed.push_back(Ok(new.clone()));
                    self.pods.insert(name, new);
                }
            }
            Step::Delete(name) => {
                if let Some(gone) = self.pods.remove(&format!("p{name}")) {
                    self.feed.push_back(Err(gone.uid));
                }
            }
            Step::End(name) => {
                if let Some(pod) = self.pods.get_mut(&format!("p{name}"))
                    && pod.node.is_some()
                {
                    pod.phase = Phase::Succeeded;
                    pod.container_running = false;
                    self.feed.push_back(Ok(pod.clone()));
                }
            }
            Step::Run(name) => {
                if let Some(pod) = self.pods.get_mut(&format!("p{name}"))
                    && pod.node.is_some()
                    && pod.phase != Phase::Succeeded
                {
                    pod.container_running = true;
                    self.feed.push_back(Ok(pod.clone()));
                }
            }
            Step::Filter(name) => {
                if let Some(pod) = self.pods.get(&format!("p{name}")) {
                    match self.core.filter_at(pod, ["n0", "n1"], now) {
                        Ok(answer) => prop_assert_eq!(answer.passed.len() + answer.failed.len(), 2),
                        // A departed pod is in the way.
                        Err(text) => prop_assert!(text.starts_with("no node has room yet"), "{}", text),
                    }
                }
            }
            Step::Bind(name, on) => {
                if let Some(pod) = self.pods.get(&format!("p{name}")).cloned() {
                    let on = format!("n{on}");
                    let (ticket, actions) = self.core.begin_bind(args(&pod, &on), now);
                    self.asked.insert(ticket, (pod.uid, on));
                    self.take(actions)?;
                }
            }
            Step::Post(which, fate) => {
                if !self.posts.is_empty() {
                    let (op, binding) = self.posts.remove(which % self.posts.len());
                    let outcome = match fate {
                        Fate::Done => self.carry_out(&binding),
                        Fate::DoneAnswerLost => {
                            self.carry_out(&binding);
                            lost()
                        }
                        Fate::NeverDone => lost(),
                        Fate::DoneLate => {
                            self.late.push((binding, self.now_ms));
                            lost()
                        }
                        Fate::Refused => Posted::Refused("forbidden".to_owned()),
                    };
                    let actions = self.core.posted(op, outcome, now);
                    self.take(actions)?;
                }
            }
            Step::Get(which, answered) => {
                let due: Vec<usize> = (0..self.gets.len()).filter(|i| self.gets[*i].2 <= self.now_ms).collect();
                if !due.is_empty() {
                    let (look, key, _) = self.gets.remove(due[which % due.len()]);
                    let outcome = match self.pods.get(&key.name) {
                        _ if !answered => Got::Failed("down".to_owned()),
                        Some(pod) => found(pod),
                        None => Got::NotFound,
                    };
                    match look {
                        Look::Sweep(uid, node) => self.core.checked(&uid, &node, outcome, now),
                        Look::Bind(op) => {
                            let actions = self.core.got(op, outcome, now);
                            self.take(actions)?;
                        }
                    }
                }
            }
            Step::Watch(count) => {
                for _ in 0..count {
                    match self.feed.pop_front() {
                        Some(Ok(pod)) => {
                            self.tell(&pod);
                            self.core.index_mut().apply_pod(pod);
                        }
                        Some(Err(uid)) => self.core.index_mut().delete_pod(&uid),
                        None => break,
                    }
                }
            }
            Step::CutAndList => {
                self.feed.clear();
                let listed: Vec<Pod> = self.pods.values().cloned().collect();
                listed.iter().for_each(|pod| self.tell(pod));
                self.core.index_mut().reset_pods(listed);
            }
            Step::Sweep => {
                let actions = self.core.sweep(now);
                self.take(actions)?;
            }
            Step::Time(ms) => {
                // The API server carries requests out within its request timeout.
                let now_ms = self.now_ms + ms;
                let (due, left) = std::mem::take(&mut self.late)
                    .into_iter()
                    .partition(|(_, sent)| now_ms - sent > 60_000);
                self.late = left;
                self.carry_out_all(due);
                self.now_ms = now_ms;
                if self.settled_ms.take_if(|until| now_ms >= *until).is_some() {
                    self.happen(Step::Orphans)?;
                    self.happen(Step::Watch(u8::MAX))?;
                }
            }
            Step::Node(name, more) => {
                let name = format!("n{name}");
                let changed = if name == "n0" {
                    let mut changed = node("n0", &[8, 8 + more]);
                    if let (Some(Ok(new)), Some(Ok(old))) = (&mut changed.inventory, &self.nodes["n0"].inventory) {
                        for (new, old) in new.gpus.iter_mut().zip(&old.gpus) {
                            new.health = old.health;
                        }
                    }
                    changed
                } else {
                    gpushare_node("n1", 8 + more, 1)
                };
                // GPUs only grow: a GPU that shrinks under its pods is overcommitted without any error of the extender.
                if changed.capacity_units > self.nodes[&name].capacity_units {
                    self.core.index_mut().apply_node(&changed);
                    self.nodes.insert(name, changed);
                }
            }
            Step::Late => {
                let late = std::mem::take(&mut self.late);
                self.carry_out_all(late);
            }
            Step::Health(gpu, well) => {
                let mut changed = self.nodes["n0"].clone();
                if let Some(Ok(inventory)) = &mut changed.inventory {
                    inventory.gpus[usize::from(gpu)].health = if well { Health::Ok } else { Health::Failed };
                }
                self.core.index_mut().apply_node(&changed);
                self.nodes.insert("n0".to_owned(), changed);
            }
            Step::Orphans => {
                for binding in std::mem::take(&mut self.orphans) {
                    self.carry_out(&binding);
                }
            }
            Step::Restart => {
                let sent = std::mem::take(&mut self.late).into_iter().map(|(binding, _)| binding);
                self.orphans.extend(sent);
                self.orphans.extend(self.posts.iter().map(|(_, binding)| binding.clone()));
                self.settled_ms = Some(self.now_ms + Timing::default().settle_ns / MS);
                self.posts.clear();
                self.gets.clear();
                self.asked.clear();
                self.feed.clear();
                self.core = Core::new(MemoryUnit::GIB, Timing::default());
                let nodes: Vec<Node> = self.nodes.values().cloned().collect();
                self.core.index_mut().reset_nodes(&nodes);
                self.core.index_mut().reset_pods(self.pods.values().cloned().collect());
                let actions = self.core.pods_listed(now);
                self.take(actions)?;
            }
        }
        let actions = self.core.promised_twice();
        self.take(actions)
    }

    /// Units that the API server's pods hold, by node and GPU index.
    fn held(&self) -> BTreeMap<(String, u32), u64> {
        held_by(self.pods.values().filter(|pod| pod.phase != Phase::Succeeded))
    }

    fn capacity(&self, node: &str, index: u32) -> u64 {
        match &self.nodes[node].inventory {
            Some(Ok(inventory)) => inventory.gpus[index as usize].units,
            _ => self.nodes[node].capacity_units,
        }
    }

    /// Check invariants 1 and 4. This is called after every step.
    fn check(&self) -> Result<(), TestCaseError> {
        let departed = self.departed.iter().map(|(pod, _)| pod);
        let departed = departed.filter(|pod| !self.pods.values().any(|there| there.uid == pod.uid));
        let living = self.pods.values().filter(|pod| pod.phase != Phase::Succeeded);
        for ((node, index), units) in held_by(living.chain(departed)) {
            prop_assert!(
                units <= self.capacity(&node, index),
                "GPU {} of {}: {} units are held",
                index,
                node,
                units
            );
        }
        let ledger = self.core.index().ledger();
        let unbound = ledger
            .pods()
            .filter(|pod| pod.node.is_none() && pod.request.wants_gpus())
            .count();
        prop_assert_eq!(
            ledger.waiting().iter().sum::<u64>(),
            unbound as u64,
            "each waits for one reason"
        );
        for view in self.core.index().ledger().nodes() {
            prop_assert_eq!(view.overcommitted().0, 0, "the ledger overcommits {}", view.name());
        }
        Ok(())
    }

    /// Finish everything that is open. Then the ledger must equal the API server's state.
    fn quiet(&mut self) -> Result<(), TestCaseError> {
        for _ in 0..100 {
            while !self.posts.is_empty() || self.gets.iter().any(|(_, _, due)| *due <= self.now_ms) {
                self.step(Step::Post(0, Fate::Done))?;
                self.step(Step::Get(0, true))?;
            }
            self.step(Step::Watch(u8::MAX))?;
            self.step(Step::Time(70_000))?;
            self.step(Step::Sweep)?;
            let kept = self.core.index().ledger().departed().count();
            if self.posts.is_empty() && self.gets.is_empty() && self.feed.is_empty() && self.late.is_empty() && kept == 0 {
                break;
            }
        }
        prop_assert_eq!(self.core.under_way(), 0, "every bind ended");
        prop_assert!(self.asked.is_empty(), "every caller was answered");
        let ledger = self.core.index().ledger();
        prop_assert_eq!(ledger.reservations().count(), 0, "no reservation stays forever");
        prop_assert_eq!(ledger.departed().count(), 0, "no departed pod stays forever");
        let held = self.held();
        for view in ledger.nodes() {
            let gpus = view.state().expect("nodes stay").gpus.len();
            for position in 0..gpus {
                let units = held.get(&(view.name().to_owned(), position as u32)).copied().unwrap_or(0);
                prop_assert_eq!(view.used(position).0, units * 1024, "GPU {} of {}", position, view.name());
            }
        }
        Ok(())
    }
}

/// Units by node and GPU index.
fn held_by<'a>(pods: impl Iterator<Item = &'a Pod>) -> BTreeMap<(String, u32), u64> {
    let mut held = BTreeMap::new();
    for pod in pods {
        let Some(node) = &pod.node else { continue };
        match &pod.held {
            Held::Allocation(allocation) => {
                for share in &allocation.gpus {
                    let index = share.uuid.rsplit('-').next().and_then(|i| i.parse().ok()).expect("our uuids");
                    *held.entry((node.clone(), index)).or_default() += share.memory.0 / 1024;
                }
            }
            Held::Legacy(legacy) => {
                for (index, units) in &legacy.gpus {
                    *held.entry((node.clone(), *index)).or_default() += units;
                }
            }
            Held::Nothing | Held::Unreadable(_) => {}
        }
    }
    held
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn no_interleaving_promises_a_gpus_memory_twice_or_keeps_it_for_ever(steps in steps()) {
        let mut world = World::new();
        for step in steps {
            world.step(step)?;
        }
        world.quiet()?;
    }
}
