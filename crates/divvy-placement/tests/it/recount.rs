//! Random events, compared with a naive recount from the final objects.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{Health, Held, MiB, Node, Phase, Pod};
use divvy_placement::{Anomaly, GpuSource, HolderKind, Ledger, Reservation, Standing, WaitReason};
use proptest::prelude::*;

use crate::fixture::*;

#[derive(Debug, Clone)]
enum Event {
    Pod(Pod),
    DeletePod(String),
    Node(Node),
    DeleteNode(String),
    RelistPods,
    RelistNodes,
    Reserve(String, String, u64),
    Release(String, String),
    /// Filter has said why a pod waits.
    Reason(String, WaitReason),
    /// One second passes. What is kept for departed pods is kept for three seconds.
    Second,
}

const KEPT_SECONDS: u64 = 3;

fn node_name() -> impl Strategy<Value = String> {
    (0..3u8).prop_map(|i| format!("n{i}"))
}

fn any_pod() -> impl Strategy<Value = Pod> {
    let held = (0..4usize, 0..3usize, prop_oneof![0..12u64, Just(u64::MAX / 1024)]);
    let deleting = proptest::bool::weighted(0.1);
    (
        0..6u8,
        0..2u8,
        proptest::option::of(node_name()),
        held,
        0..5u8,
        any::<bool>(),
        deleting,
    )
        .prop_map(|(name, generation, node, (kind, index, units), phase, running, deleting)| {
            let on = node.clone().unwrap_or_default();
            let mut pod = match kind {
                0 => gpushare_pod(&format!("p{name}"), &on, index as u32, units),
                1 => pending(&format!("p{name}"), units),
                _ => divvy_pod(&format!("p{name}"), &on, index, units),
            };
            pod.uid = format!("u{name}-{generation}");
            pod.cpu_milli = units as u32;
            if node.is_none() {
                pod.held = Held::Nothing;
            }
            pod.node = node;
            pod.phase = [
                Phase::Pending,
                Phase::Running,
                Phase::Succeeded,
                Phase::Failed,
                Phase::Unknown,
            ][usize::from(phase)];
            pod.container_running = running;
            pod.deleting = deleting;
            pod
        })
}

fn any_node() -> impl Strategy<Value = Node> {
    (
        node_name(),
        proptest::collection::vec(1..16u64, 0..3),
        any::<bool>(),
        proptest::bool::weighted(0.2),
        prop_oneof![2 => Just(0), 1 => 1..12u64],
    )
        .prop_map(|(name, sizes, ours, failed, held)| {
            if ours {
                let mut node = divvy_node(&name, &sizes);
                if !sizes.is_empty() {
                    edit_gpu(&mut node, 0, |gpu| gpu.held = MiB(held * 1024));
                }
                if failed && !sizes.is_empty() {
                    edit_gpu(&mut node, 0, |gpu| gpu.health = Health::Failed);
                }
                node
            } else {
                let each = sizes.first().copied().unwrap_or(0);
                gpushare_node(&name, each * sizes.len() as u64, sizes.len() as u64)
            }
        })
}

fn any_event() -> impl Strategy<Value = Event> {
    let uid = || (0..6u8, 0..2u8).prop_map(|(name, generation)| format!("u{name}-{generation}"));
    prop_oneof![
        6 => any_pod().prop_map(Event::Pod),
        2 => uid().prop_map(Event::DeletePod),
        3 => any_node().prop_map(Event::Node),
        1 => node_name().prop_map(Event::DeleteNode),
        1 => Just(Event::RelistPods),
        1 => Just(Event::RelistNodes),
        2 => (uid(), node_name(), 0..12u64).prop_map(|(uid, node, units)| Event::Reserve(uid, node, units)),
        1 => (uid(), node_name()).prop_map(|(uid, node)| Event::Release(uid, node)),
        2 => (uid(), 0..WaitReason::ALL.len()).prop_map(|(uid, at)| Event::Reason(uid, WaitReason::ALL[at].0)),
        1 => Just(Event::Second),
    ]
}

/// What an API server would hold after the events, and the reservations that are not resolved, in the simplest form.
#[derive(Default)]
struct World {
    pods: BTreeMap<String, Pod>,
    nodes: BTreeMap<String, Node>,
    reserved: BTreeMap<(String, String), u64>,
    /// Departed pods, and when they departed.
    departed: BTreeMap<String, (Pod, u64)>,
    /// Why pods wait, as far as filter has said.
    reasons: BTreeMap<String, WaitReason>,
    now: u64,
}

/// Report whether a pod waits for GPUs.
fn waits(pod: &Pod) -> bool {
    pod.node.is_none() && !pod.deleting && asks(pod).is_some()
}

/// Return what a pod asks of one GPU, in MiB. Here, the whole request is on one GPU.
fn asks(pod: &Pod) -> Option<u128> {
    let ended = matches!(pod.phase, Phase::Succeeded | Phase::Failed) && !pod.container_running;
    let units: u128 = pod
        .request
        .containers
        .iter()
        .map(|container| u128::from(container.units))
        .sum();
    (units > 0 && !ended).then_some(units * 1024)
}

impl World {
    fn vanish(&mut self, uid: &str) {
        let Some(pod) = self.pods.remove(uid) else { return };
        let known = pod.node.as_ref().is_some_and(|node| self.nodes.contains_key(node));
        if pod.container_running && known && pod.held != Held::Nothing {
            self.departed.insert(uid.to_owned(), (pod, self.now));
        }
    }

    /// Return the MiB that are kept on each GPU for the departed pods of a node. `named` says whether the node's GPUs have
    /// UUIDs. If not, an allocation is on none of them, because it names UUIDs.
    fn kept(&self, node: &str, named: bool) -> BTreeMap<usize, u128> {
        let mut kept = BTreeMap::new();
        let here = self.departed.values().filter(|(pod, _)| pod.node.as_deref() == Some(node));
        for (pod, _) in here.filter(|(pod, _)| named || matches!(pod.held, Held::Legacy(_))) {
            for (index, mib) in self.places(node, &pod.held) {
                *kept.entry(index).or_default() += mib;
            }
        }
        kept
    }

    /// Return the GPUs of a node that this allocation uses, and the amount on each. gpushare's form names GPUs by index.
    fn places(&self, node: &str, held: &Held) -> Vec<(usize, u128)> {
        match held {
            Held::Allocation(allocation) => {
                let share = |share: &divvy_model::GpuShare| {
                    let index = (0..3).find(|index| uuid(node, *index) == share.uuid)?;
                    Some((index, u128::from(share.memory.0)))
                };
                allocation.gpus.iter().filter_map(share).collect()
            }
            Held::Legacy(legacy) => {
                let part = |(index, units): (&u32, &u64)| (*index as usize, u128::from(*units) * 1024);
                legacy.gpus.iter().map(part).collect()
            }
            Held::Nothing | Held::Unreadable(_) => Vec::new(),
        }
    }

    /// Forget the departed pods whose memory the agent reports.
    fn hear(&mut self) {
        for (name, node) in &self.nodes {
            let ours = match &node.inventory {
                Some(Ok(inventory)) => Some(inventory),
                _ => None,
            };
            // gpushare's device plugin reports nothing about held memory, and has no UUIDs.
            let held: Vec<u64> = match ours {
                Some(inventory) => inventory.gpus.iter().map(|gpu| gpu.held.0).collect(),
                None if node.capacity_units > 0 => vec![0; node.capacity_gpus as usize],
                None => Vec::new(),
            };
            let kept = self.kept(name, ours.is_some());
            let spoken_of = |index: &usize| {
                let held = held.get(*index);
                held.is_some_and(|held| u128::from(*held) >= kept.get(index).copied().unwrap_or(0))
            };
            let over: Vec<String> = self
                .departed
                .iter()
                .filter(|(_, (pod, _))| pod.node.as_ref() == Some(name))
                .filter(|(_, (pod, _))| ours.is_some() || matches!(pod.held, Held::Legacy(_)))
                .filter(|(_, (pod, _))| {
                    let places = self.places(name, &pod.held);
                    !places.is_empty() && places.iter().all(|(index, _)| spoken_of(index))
                })
                .map(|(uid, _)| uid.clone())
                .collect();
            for uid in over {
                self.departed.remove(&uid);
            }
        }
    }

    fn play(&mut self, ledger: &mut Ledger, event: Event) {
        self.happen(ledger, event);
        ledger.age_departed(self.now, KEPT_SECONDS);
        self.departed.retain(|_, (_, since)| self.now - *since < KEPT_SECONDS);
        self.reasons.retain(|uid, _| self.pods.get(uid).is_some_and(waits));
        self.hear();
    }

    fn happen(&mut self, ledger: &mut Ledger, event: Event) {
        match event {
            Event::Pod(mut pod) => {
                // An API server never unbinds or moves a pod, and never has two pods with one name.
                if let Some(old) = self.pods.get(&pod.uid)
                    && old.node.is_some()
                {
                    pod.node = old.node.clone();
                    pod.held = old.held.clone();
                }
                let older: Vec<String> = self
                    .pods
                    .values()
                    .filter(|old| old.name == pod.name)
                    .map(|old| old.uid.clone())
                    .collect();
                for uid in older.into_iter().filter(|uid| *uid != pod.uid) {
                    self.vanish(&uid);
                    self.reserved.retain(|(reserved, _), _| *reserved != uid);
                }
                if pod.node.is_some() {
                    self.reserved.retain(|(uid, _), _| *uid != pod.uid);
                }
                self.departed.remove(&pod.uid);
                self.pods.insert(pod.uid.clone(), pod.clone());
                ledger.apply_pod(pod);
            }
            Event::DeletePod(uid) => {
                self.vanish(&uid);
                self.reserved.retain(|(reserved, _), _| *reserved != uid);
                ledger.delete_pod(&uid);
            }
            Event::Node(node) => {
                self.nodes.insert(node.name.clone(), node.clone());
                ledger.apply_node(&node);
            }
            Event::DeleteNode(name) => {
                self.nodes.remove(&name);
                self.departed.retain(|_, (pod, _)| pod.node.as_ref() != Some(&name));
                ledger.delete_node(&name);
            }
            Event::RelistPods => ledger.replace_pods(self.pods.values().cloned()),
            Event::RelistNodes => ledger.replace_nodes(self.nodes.values()),
            Event::Reserve(uid, node, units) => {
                let pod = divvy_pod("r", &node, 0, units);
                if self.pods.get(&uid).is_none_or(|pod| pod.node.is_none()) {
                    self.reserved.insert((uid.clone(), node.clone()), units);
                }
                let reservation = Reservation {
                    pod: pod.key(),
                    held: pod.held,
                    earlier: Vec::new(),
                    standing: Standing::Doubt,
                    since_ns: 0,
                };
                ledger.reserve(&uid, &node, reservation);
            }
            Event::Release(uid, node) => {
                self.reserved.remove(&(uid.clone(), node.clone()));
                ledger.release(&uid, &node);
            }
            Event::Reason(uid, reason) => {
                self.reasons.insert(uid.clone(), reason);
                ledger.answer_wait_reason(&uid, reason);
                ledger.guess_wait_reason(&uid, WaitReason::Other);
            }
            Event::Second => self.now += 1,
        }
    }

    /// Return the MiB left per GPU of a node, counted from scratch.
    fn free(&self, name: &str) -> Vec<u64> {
        let Some(node) = self.nodes.get(name) else {
            return Vec::new();
        };
        let ours = match &node.inventory {
            Some(Ok(inventory)) => Some(inventory),
            _ => None,
        };
        let sizes: Vec<u64> = match ours {
            Some(inventory) => inventory.gpus.iter().map(|gpu| gpu.units * 1024).collect(),
            None if node.capacity_units > 0 => {
                vec![node.capacity_units / node.capacity_gpus * 1024; node.capacity_gpus as usize]
            }
            None => Vec::new(),
        };
        let mut left: Vec<u128> = sizes.iter().map(|size| u128::from(*size)).collect();
        // The larger of the held memory and the memory kept for departed pods counts.
        let kept = match ours {
            Some(_) => self.kept(name, true),
            None => BTreeMap::new(),
        };
        for (index, left) in left.iter_mut().enumerate() {
            let held = ours.map_or(0, |inventory| u128::from(inventory.gpus[index].held.0));
            *left = left.saturating_sub(held.max(kept.get(&index).copied().unwrap_or(0)));
        }
        // Here, the whole request is on one GPU. The request counts if it is more than the annotation, up to the size of a known
        // GPU.
        let mut take = |held: &Held, asked: u128| match held {
            Held::Allocation(allocation) => {
                for share in &allocation.gpus {
                    for (index, left) in left.iter_mut().enumerate() {
                        if ours.is_none() {
                            *left = left.saturating_sub(u128::from(share.memory.0).max(asked));
                        } else if uuid(name, index) == share.uuid {
                            *left = left.saturating_sub(u128::from(share.memory.0).max(asked.min(sizes[index].into())));
                        }
                    }
                }
            }
            Held::Legacy(legacy) => {
                for (index, units) in &legacy.gpus {
                    let index = *index as usize;
                    if let Some(left) = left.get_mut(index) {
                        *left = left.saturating_sub((u128::from(*units) * 1024).max(asked.min(sizes[index].into())));
                    }
                }
            }
            Held::Nothing | Held::Unreadable(_) => {}
        };
        for pod in self.pods.values().filter(|pod| pod.node.as_deref() == Some(name)) {
            let ended = matches!(pod.phase, Phase::Succeeded | Phase::Failed) && !pod.container_running;
            if !ended {
                let asked: u128 = pod
                    .request
                    .containers
                    .iter()
                    .map(|container| u128::from(container.units))
                    .sum();
                take(&pod.held, asked * 1024);
            }
        }
        for (pod, _) in self.departed.values().filter(|(pod, _)| pod.node.as_deref() == Some(name)) {
            if ours.is_none() {
                take(&pod.held, 0);
            }
        }
        for ((_, node), units) in &self.reserved {
            if node == name {
                take(&divvy_pod("r", node, 0, *units).held, 0);
            }
        }
        left.into_iter()
            .map(|left| u64::try_from(left).expect("not more than the capacity"))
            .collect()
    }

    /// Return the part of the free memory that a pod cannot use because of the size of the pieces, in millionths, from one look at each GPU for each pod.
    fn fragmentation_ppm(&self, ledger: &Ledger) -> u32 {
        let views = ledger
            .nodes()
            .filter_map(|view| Some((view, view.state().filter(|state| state.unusable(None).is_none())?)));
        let free: Vec<u128> = views
            .flat_map(|(view, state)| {
                let gpus = state.gpus.iter().enumerate();
                let healthy = gpus.filter(|(_, gpu)| gpu.health == Health::Ok && gpu.is_shared());
                healthy.map(move |(position, _)| u128::from(view.free(position).0))
            })
            .collect();
        let (mut lost, mut all) = (0, 0);
        for asked in self.pods.values().filter_map(asks) {
            all += free.iter().sum::<u128>();
            lost += free.iter().filter(|free| **free < asked).sum::<u128>();
        }
        (1_000_000 * lost).checked_div(all).unwrap_or(0) as u32
    }

    fn check(&self, ledger: &Ledger) -> Result<(), TestCaseError> {
        for name in ["n0", "n1", "n2"] {
            let view = ledger.node(name);
            let gpus = view.and_then(|view| view.state()).map_or(0, |state| state.gpus.len());
            let counted: Vec<u64> = (0..gpus).map(|i| view.expect("has GPUs").free(i).0).collect();
            prop_assert_eq!(&counted, &self.free(name), "{}", name);
        }
        prop_assert_eq!(ledger.reservations().count(), self.reserved.len());
        let departed: Vec<&str> = ledger.departed().map(|(uid, _)| uid).collect();
        prop_assert_eq!(departed, self.departed.keys().collect::<Vec<_>>());
        prop_assert_eq!(ledger.pods().count(), self.pods.len());
        let waiting: Vec<&String> = self.pods.iter().filter(|(_, pod)| waits(pod)).map(|(uid, _)| uid).collect();
        let listed: Vec<&String> = ledger.waiting_after("").map(|(pod, _)| &pod.uid).collect();
        prop_assert_eq!(&listed, &waiting);
        let after: Vec<&String> = ledger.waiting_after("u2-1").map(|(pod, _)| &pod.uid).collect();
        prop_assert_eq!(
            after,
            waiting
                .iter()
                .copied()
                .filter(|uid| uid.as_str() > "u2-1")
                .collect::<Vec<_>>()
        );
        let counts = WaitReason::ALL.map(|(reason, _)| {
            let of_pod = |uid: &&&String| self.reasons.get(**uid).copied().unwrap_or(WaitReason::Other);
            waiting.iter().filter(|uid| of_pod(uid) == reason).count() as u64
        });
        prop_assert_eq!(ledger.waiting(), counts);
        prop_assert_eq!(counts.iter().sum::<u64>(), waiting.len() as u64);
        prop_assert_eq!(ledger.fragmentation_ppm(), self.fragmentation_ppm(ledger));
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// After every event, the ledger equals a recount from the objects, and nothing goes below zero.
    #[test]
    fn the_ledger_equals_a_naive_recount(events in proptest::collection::vec(any_event(), 1..60)) {
        let mut world = World::default();
        let mut ledger = Ledger::new(GIB);
        for event in events {
            world.play(&mut ledger, event);
            world.check(&ledger)?;
        }
    }

    /// A copy of one node ([`Ledger::only`]) predicts what the whole ledger does: before and after the end of any pod on
    /// this node, the copy gives the same answers about the node as the whole ledger.
    #[test]
    fn a_part_of_the_ledger_says_of_its_node_what_the_whole_says(events in proptest::collection::vec(any_event(), 1..40)) {
        let mut world = World::default();
        let mut ledger = Ledger::new(GIB);
        for event in events {
            world.play(&mut ledger, event);
        }
        for name in ["n0", "n1", "n2"] {
            let uids = ledger.node(name).map(|view| view.pods().map(|pod| pod.uid.clone()).collect::<Vec<_>>());
            let ends = uids.into_iter().flatten().map(Some);
            for end in ends.chain([None]) {
                let (mut part, mut whole) = (ledger.only(name), ledger.clone());
                if let Some(uid) = &end {
                    part.end_pod(uid);
                    whole.end_pod(uid);
                }
                for units in [1, 4, 8, 16] {
                    prop_assert_eq!(part.explain(name, &ask(units)), whole.explain(name, &ask(units)), "{:?}", &end);
                    prop_assert_eq!(part.room(name, &ask(units)), whole.room(name, &ask(units)));
                }
            }
        }
    }

    /// The same objects in another order lead to the same choice for every request.
    #[test]
    fn choices_do_not_depend_on_the_order_of_arrival(
        nodes in proptest::collection::vec(any_node(), 1..4),
        pods in proptest::collection::vec(any_pod(), 0..12),
        seed in any::<u64>(),
    ) {
        // Later objects with a name replace earlier ones, so only distinct ones commute.
        let nodes: BTreeMap<String, Node> = nodes.into_iter().map(|node| (node.name.clone(), node)).collect();
        let pods: BTreeMap<String, Pod> = pods.into_iter().map(|pod| (pod.name.clone(), pod)).collect();
        let mut shuffled: Vec<&Pod> = pods.values().collect();
        let len = shuffled.len().max(1);
        shuffled.rotate_left(seed as usize % len);
        if seed % 2 == 0 {
            shuffled.reverse();
        }
        let mut first = Ledger::new(GIB);
        nodes.values().for_each(|node| { first.apply_node(node); });
        pods.values().for_each(|pod| { first.apply_pod(pod.clone()); });
        let mut second = Ledger::new(GIB);
        shuffled.into_iter().for_each(|pod| { second.apply_pod(pod.clone()); });
        nodes.values().rev().for_each(|node| { second.apply_node(node); });
        for name in nodes.keys() {
            for units in [1, 3, 7, 16] {
                prop_assert_eq!(first.choose(name, &ask(units)), second.choose(name, &ask(units)));
                prop_assert_eq!(first.explain(name, &ask(units)), second.explain(name, &ask(units)));
            }
        }
        prop_assert_eq!(first.anomalies(), second.anomalies());
        // The totals that are kept equal the totals that are counted, in any order of the events.
        for ledger in [&first, &second] {
            let (totals, anomalies) = (ledger.totals(), ledger.anomalies());
            let count = |kind: fn(&Anomaly) -> bool| anomalies.iter().filter(|anomaly| kind(anomaly)).count() as u64;
            prop_assert_eq!(totals.overcommitted, count(|anomaly| matches!(anomaly, Anomaly::Overcommitted { .. })));
            prop_assert_eq!(totals.unknown_gpu, count(|anomaly| matches!(anomaly, Anomaly::UnknownGpu { .. })));
            prop_assert_eq!(totals.unreadable, count(|anomaly| matches!(anomaly, Anomaly::Unreadable { .. })));
            prop_assert_eq!(totals.not_allocated, count(|anomaly| matches!(anomaly, Anomaly::NotAllocated { .. })));
            let promised_twice = ledger.overbooked_since(0);
            let by_pods = ledger.nodes().flat_map(|view| {
                let gpus = view.state().map_or(0, |state| state.gpus.len());
                let over = (0..gpus).filter(move |position| {
                    let pods = view.holders(*position).into_iter().filter(|holder| holder.kind != HolderKind::Reserved);
                    let promised = pods.fold(MiB::ZERO, |sum, holder| sum.saturating_add(holder.memory));
                    let state = view.state().expect("it has GPUs");
                    !matches!(state.source, GpuSource::Unusable(_)) && promised > state.gpus[*position].capacity
                });
                over.map(move |position| (view.name().to_owned(), position))
            });
            let found: BTreeSet<_> = promised_twice.iter().map(|gpu| (gpu.node.clone(), gpu.index as usize)).collect();
            prop_assert_eq!(found, by_pods.collect::<BTreeSet<_>>());
            prop_assert_eq!(ledger.overbooked_since(ledger.version()), Vec::new());
        }
    }
}
