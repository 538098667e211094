//! Tests of a ledger's nodes under a policy: a fleet that is kept up to date equals a freshly built one, and what it chooses
//! fits.

use std::collections::BTreeMap;

use divvy_model::{GpuRules, Health, Node, Phase, Pod, PodRequest};
use divvy_placement::{Ask, Choice, Ledger, Reservation, Standing};
use divvy_policy::{CacheLimits, Fleet, Policy, Ranking};
use proptest::prelude::*;

use crate::fixture::*;

const NODES: [&str; 5] = ["n0", "n1", "n2", "n3", "n4"];

/// A node of the kind with this number: identical GPUs, mixed products, a node of gpushare's device plugin, or a node that offers
/// nothing; each with or without a failed GPU.
fn node(at: usize, kind: usize) -> Node {
    let name = NODES[at];
    let mut node = match kind % 6 {
        0 => divvy_node(name, &[16, 16, 16]),
        1 => {
            let mut node = divvy_node(name, &[16, 16, 16, 16]);
            for (a, b) in [(0, 2), (1, 3)] {
                let link = divvy_model::GpuLink {
                    peer: uuid(name, b),
                    kind: divvy_model::LinkKind::NvLink,
                    count: 4,
                };
                edit_gpu(&mut node, a, |gpu| gpu.links.push(link));
            }
            node
        }
        2 => divvy_node(name, &[16, 40, 16]),
        3 => gpushare_node(name, 32, 2),
        4 => gpushare_node(name, 0, 0),
        _ => {
            let mut node = divvy_node(name, &[16, 16]);
            edit_gpu(&mut node, 0, |gpu| gpu.health = Health::Failed);
            node
        }
    };
    (node.cpu_milli, node.memory_bytes, node.pods) = (96_000, 256 << 30, 110);
    node
}

fn asking(number: usize, units: u64) -> Pod {
    Pod {
        cpu_milli: 500 * (1 + number as u32 % 4),
        memory_bytes: 1 << 30,
        ..pending(&format!("p{number}"), units)
    }
}

/// A pod like that of `asking`, which requests this many units of each of `gpus` GPUs.
fn asking_several(number: usize, units: u64, gpus: u32) -> Pod {
    let mut pod = asking(number, units * u64::from(gpus));
    if gpus > 1 {
        let rules = GpuRules {
            gpus: Some(gpus),
            ..GpuRules::default()
        };
        pod.request = PodRequest::new(pod.request.containers, Some(Ok(rules)));
    }
    pod
}

#[derive(Debug, Clone)]
enum Event {
    Node(usize, usize),
    NodeGone(usize),
    /// A pod arrives and is bound to the best node and GPU, or is only reserved there.
    Arrive(u64, u32, bool),
    /// A pod appears on a node where another client has put it.
    Appear(usize, usize, u64),
    End(usize),
    Gone(usize),
    Released(usize),
    /// The pods are listed again, and every second one is gone.
    Relist,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => (0..NODES.len(), 0_usize..6).prop_map(|(at, kind)| Event::Node(at, kind)),
        1 => (0..NODES.len()).prop_map(Event::NodeGone),
        8 => (0_u64..20, 1_u32..4, any::<bool>()).prop_map(|(units, gpus, bound)| Event::Arrive(units, gpus, bound)),
        2 => (0..NODES.len(), 0_usize..3, 1_u64..10).prop_map(|(node, gpu, units)| Event::Appear(node, gpu, units)),
        2 => any::<usize>().prop_map(Event::End),
        2 => any::<usize>().prop_map(Event::Gone),
        1 => any::<usize>().prop_map(Event::Released),
        1 => Just(Event::Relist),
    ]
}

struct World {
    ledger: Ledger,
    fleet: Fleet,
    pods_end: bool,
    /// All pods that arrived.
    history: Vec<Pod>,
    pods: BTreeMap<String, Pod>,
    number: usize,
}

impl World {
    fn new(policy: Policy, pods_end: bool) -> World {
        let mut fleet = Fleet::new(policy, CacheLimits::SMALL);
        fleet.set_pods_end(Some(pods_end));
        World {
            ledger: Ledger::new(GIB),
            fleet,
            pods_end,
            history: Vec::new(),
            pods: BTreeMap::new(),
            number: 0,
        }
    }

    fn afresh(&self) -> Fleet {
        let mut fleet = Fleet::new(self.fleet.policy(), CacheLimits::SMALL);
        fleet.set_pods_end(Some(self.pods_end));
        for pod in &self.history {
            fleet.arrived(pod, &self.ledger);
        }
        fleet.follow(&self.ledger);
        fleet.refresh();
        fleet
    }

    fn put(&mut self, pod: Pod) {
        self.pods.insert(pod.uid.clone(), pod.clone());
        self.ledger.apply_pod(pod);
    }

    /// Check the policy's answers for the pod, and return where the policy would place it.
    fn place(&mut self, pod: &Pod) -> Option<(&'static str, Choice)> {
        let ask = Ask::of(&pod.request, GIB);
        self.fleet.follow(&self.ledger);
        // Prices date from the last refresh.
        self.fleet.refresh();
        let found = self.fleet.rank(pod, &ask, NODES, &self.ledger);
        let backwards: Vec<&str> = NODES.iter().rev().copied().collect();
        let mut turned = self.fleet.rank(pod, &ask, backwards, &self.ledger);
        turned.costs.reverse();
        turned.best = turned.best.map(|best| NODES.len() - 1 - best);
        assert_eq!(found, turned, "the order of the nodes does not matter");
        let mut fresh = self.afresh();
        assert_eq!(found, fresh.rank(pod, &ask, NODES, &self.ledger), "{pod:?}");
        for (name, cost) in NODES.iter().zip(&found.costs).filter(|_| ask.units > 0) {
            let fits = self.ledger.fits(name, &ask, "somebody").is_ok();
            assert_eq!(fits, self.ledger.choose(name, &ask).is_ok(), "{name} for {ask}");
            // The policies do not know sets of GPUs of several products.
            assert!(fits || cost.is_none(), "{name} for {ask}");
            assert!(cost.is_some() || !fits || ask.gpus > 1, "{name} for {ask}");
            let gpus = self.fleet.gpus(pod, &ask, name, &self.ledger);
            assert_eq!(gpus.is_some(), cost.is_some(), "{name} for {ask}");
            assert_eq!(gpus, fresh.gpus(pod, &ask, name, &self.ledger), "{name} for {ask}");
            let chosen = self.fleet.choose(pod, &ask, name, &self.ledger);
            assert_eq!(chosen.is_some(), fits, "{name} for {ask}");
            if let Some(positions) = gpus {
                let choice = self.ledger.choose_at(name, &positions, &ask).expect("what is chosen fits");
                assert_eq!((choice.units, choice.gpus.len()), (ask.units, ask.gpus));
                assert_eq!(Some(choice), chosen);
            }
        }
        self.alone_is_no_worse(pod, &ask, &found);
        let best = NODES[found.best?];
        Some((
            best,
            self.fleet.choose(pod, &ask, best, &self.ledger).filter(|_| ask.units > 0)?,
        ))
    }

    /// Check that the other nodes have the same costs when the best node is not offered, and that none of these costs is
    /// lower than that of the best node.
    fn alone_is_no_worse(&mut self, pod: &Pod, ask: &Ask, found: &Ranking) {
        let Some(best) = found.best else { return };
        let others: Vec<usize> = (0..NODES.len()).filter(|at| *at != best).collect();
        let without = self.fleet.rank(pod, ask, others.iter().map(|at| NODES[*at]), &self.ledger);
        let costs: Vec<_> = others.iter().map(|at| found.costs[*at]).collect();
        assert_eq!(without.costs, costs);
        let amount = |at: usize| found.costs[at].map(|cost| cost.amount);
        assert!(
            others
                .iter()
                .filter_map(|at| amount(*at))
                .all(|other| Some(other) >= amount(best))
        );
    }

    fn nth(&self, at: usize) -> Option<Pod> {
        self.pods.values().nth(at.checked_rem(self.pods.len())?).cloned()
    }

    fn play(&mut self, event: Event) {
        match event {
            Event::Node(at, kind) => {
                self.ledger.apply_node(&node(at, kind));
            }
            Event::NodeGone(at) => {
                self.ledger.delete_node(NODES[at]);
            }
            Event::Arrive(units, gpus, bound) => self.arrive(units, gpus, bound),
            Event::Appear(node, gpu, units) => {
                self.number += 1;
                self.put(divvy_pod(&format!("p{}", self.number), NODES[node], gpu, units));
            }
            Event::End(at) => {
                if let Some(pod) = self.nth(at) {
                    self.put(Pod {
                        phase: Phase::Succeeded,
                        ..pod
                    });
                }
            }
            Event::Gone(at) => {
                if let Some(pod) = self.nth(at) {
                    self.pods.remove(&pod.uid);
                    self.ledger.delete_pod(&pod.uid);
                }
            }
            Event::Released(at) => {
                if let Some(pod) = self.nth(at) {
                    for node in NODES {
                        self.ledger.release(&pod.uid, node);
                    }
                }
            }
            Event::Relist => {
                let kept: Vec<Pod> = self.pods.values().step_by(2).cloned().collect();
                self.pods = kept.iter().map(|pod| (pod.uid.clone(), pod.clone())).collect();
                self.ledger.replace_pods(kept);
            }
        }
    }

    fn arrive(&mut self, units: u64, gpus: u32, bound: bool) {
        self.number += 1;
        let pod = asking_several(self.number, units, gpus);
        self.fleet.arrived(&pod, &self.ledger);
        self.history.push(pod.clone());
        self.put(pod.clone());
        let Some((node, choice)) = self.place(&pod) else { return };
        let held = choice.held(&pod.request, GIB);
        if bound {
            self.put(Pod {
                node: Some(node.to_owned()),
                phase: Phase::Running,
                held,
                ..pod
            });
        } else {
            let reservation = Reservation {
                pod: pod.key(),
                held,
                earlier: Vec::new(),
                standing: Standing::InFlight,
                since_ns: 0,
            };
            self.ledger.reserve(&pod.uid, node, reservation);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Whatever happened before, the answer equals that of a fleet that sees the ledger for the first time. The chosen GPUs fit,
    /// and there is a choice wherever the ledger has one.
    #[test]
    fn what_is_kept_is_what_would_be_found_afresh(
        policy in (0..Policy::ALL.len()).prop_map(|at| Policy::ALL[at]),
        pods_end: bool,
        events in proptest::collection::vec(event(), 1..40),
    ) {
        let mut world = World::new(policy, pods_end);
        for at in 0..NODES.len() {
            world.ledger.apply_node(&node(at, at));
        }
        events.into_iter().for_each(|event| world.play(event));
    }
}

fn choices(policy: Policy, nodes: &[Node], pods: u64) -> Vec<(String, u32)> {
    let mut ledger = Ledger::new(GIB);
    for node in nodes {
        ledger.apply_node(node);
    }
    let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
    let mut fleet = Fleet::new(policy, CacheLimits::SMALL);
    let mut chosen = Vec::new();
    for number in 0..pods {
        let pod = asking(number as usize, 4);
        let ask = Ask::of(&pod.request, GIB);
        fleet.follow(&ledger);
        fleet.arrived(&pod, &ledger);
        let best = names[fleet.rank(&pod, &ask, names.iter().copied(), &ledger).best.expect("room")];
        let choice = fleet.choose(&pod, &ask, best, &ledger).expect("fits");
        chosen.push((best.to_owned(), choice.gpus[0].index));
        ledger.apply_pod(Pod {
            node: Some(best.to_owned()),
            held: choice.held(&pod.request, GIB),
            ..pod
        });
    }
    chosen
}

/// The policy named divvy fills one GPU first.
#[test]
fn spread_uses_every_gpu_before_it_shares_one() {
    let nodes = [node(0, 0), node(1, 0)];
    let mut spread = choices(Policy::Spread, &nodes, 6);
    assert_ne!(spread[0].0, spread[1].0, "the emptier node comes next");
    spread.sort();
    spread.dedup();
    assert_eq!(spread.len(), 6, "six GPUs, six pods: {spread:?}");
    let mut packed = choices(Policy::Divvy, &nodes, 4);
    packed.dedup();
    assert_eq!(packed.len(), 1, "four pods of a quarter on one GPU: {packed:?}");
}

#[test]
fn costs_that_were_pushed_out_of_memory_are_found_again() {
    // There is room for the costs of eight classes, whatever the limit.
    let limits = CacheLimits {
        costs: 1,
        states: 1,
        hurry: true,
        ..CacheLimits::default()
    };
    let mut ledger = Ledger::new(GIB);
    for at in 0..NODES.len() {
        ledger.apply_node(&node(at, 0));
    }
    let (mut small, mut large) = (
        Fleet::new(Policy::Divvy, limits),
        Fleet::new(Policy::Divvy, CacheLimits::default()),
    );
    small.follow(&ledger);
    large.follow(&ledger);
    for round in 0..3 {
        for units in 1..=16 {
            let pod = asking(1, units);
            let ask = Ask::of(&pod.request, GIB);
            assert_eq!(
                small.rank(&pod, &ask, NODES, &ledger),
                large.rank(&pod, &ask, NODES, &ledger),
                "round {round}, {units} units"
            );
        }
    }
}

/// A node with GPUs of these sizes in GiB and these products, as its agent publishes them.
fn published(name: &str, sizes: &[u64], product: impl Fn(usize) -> String) -> Node {
    let mut node = divvy_node(name, sizes);
    for gpu in 0..sizes.len() {
        edit_gpu(&mut node, gpu, |described| described.model = product(gpu));
    }
    (node.cpu_milli, node.memory_bytes, node.pods) = (96_000, 256 << 30, 110);
    node
}

fn best_on(fleet: &mut Fleet, ledger: &Ledger, node: &str) -> Option<usize> {
    let pod = asking(1, 4);
    fleet.follow(ledger);
    fleet.rank(&pod, &Ask::of(&pod.request, GIB), [node], ledger).best
}

#[test]
fn a_nodes_ever_new_gpus_make_nothing_grow() {
    let mut ledger = Ledger::new(GIB);
    let mut fleet = Fleet::new(Policy::Divvy, CacheLimits::SMALL);
    ledger.apply_node(&published("good", &[16, 16], |_| "T4".to_owned()));
    let mut publish = |number: u64| {
        let sizes = [100 + number, 100_000 - number];
        ledger.apply_node(&published("n", &sizes, |gpu| format!("product {number} {gpu}")));
        fleet.follow(&ledger);
    };
    (0..1_000).for_each(&mut publish);
    let grown = allocation_counter::measure(|| (1_000..4_000).for_each(&mut publish));
    assert!(grown.bytes_current < 1 << 20, "{} bytes", grown.bytes_current);
    // Products that are gone do not keep new ones out.
    ledger.apply_node(&published("late", &[16], |_| "H100".to_owned()));
    assert_eq!(best_on(&mut fleet, &ledger, "late"), Some(0));
    assert_eq!(best_on(&mut fleet, &ledger, "good"), Some(0));
}

/// The policy chooses such a kind once another kind is gone.
#[test]
fn the_ledger_chooses_gpu_kinds_beyond_the_limit() {
    let mut ledger = Ledger::new(GIB);
    let mut fleet = Fleet::new(Policy::Divvy, CacheLimits::SMALL);
    let sizes: Vec<u64> = (0..u64::try_from(CacheLimits::SMALL.kinds).expect("few"))
        .map(|kind| 16 + kind)
        .collect();
    ledger.apply_node(&published("many", &sizes, |_| "T4".to_owned()));
    fleet.follow(&ledger);
    ledger.apply_node(&published("late", &[8], |_| "T4".to_owned()));
    let pod = asking(1, 4);
    let ask = Ask::of(&pod.request, GIB);
    assert_eq!(best_on(&mut fleet, &ledger, "late"), None);
    assert_eq!(
        fleet.choose(&pod, &ask, "late", &ledger).map(|choice| choice.gpus.len()),
        Some(1)
    );
    assert_eq!(best_on(&mut fleet, &ledger, "many"), Some(0));
    ledger.delete_node("many");
    ledger.apply_node(&published("late", &[8, 8], |_| "T4".to_owned()));
    assert_eq!(best_on(&mut fleet, &ledger, "late"), Some(0));
}

/// Users choose their requests freely.
#[test]
fn as_many_kinds_of_pods_as_pods_make_no_table_grow() {
    let used = |pods: u64| {
        let mut ledger = Ledger::new(GIB);
        ledger.apply_node(&published("n", &[80; 8], |_| "A100".to_owned()));
        for number in 0..pods {
            let mut pod = asking_several(number as usize, 1 + number % 900, 1 + (number % 3) as u32);
            pod.cpu_milli = 100 + number as u32 * 10;
            ledger.apply_pod(pod);
        }
        allocation_counter::measure(|| {
            let mut fleet = Fleet::new(Policy::Divvy, CacheLimits::SMALL);
            fleet.learn(&ledger);
            fleet.follow(&ledger);
            for pod in ledger.pods() {
                fleet.arrived(pod, &ledger);
            }
            std::mem::forget(fleet);
        })
        .bytes_current
    };
    let (some, many) = (used(1_000), used(4_000));
    assert!(many < some + (2 << 20), "{some} {many}");
}
