//! Properties that hold for every policy, whatever happened before.

use divvy_policy::{
    Decision, Demand, DemandShare, FreeOnNode, GpuSet, Mix, Model, ModelSet, Models, NodeShape, NotForScheduling, Placer, Policy,
    rank,
};
use proptest::prelude::*;

/// Three kinds of nodes: two with GPUs of different products and sizes, one without GPUs.
fn shapes() -> Vec<NodeShape> {
    let mut models = Models::default();
    let mut model = |name| models.number(name).expect("a number");
    let shape = |model: Model, gpus, gpu_size, cores: u32| NodeShape {
        model,
        gpus,
        gpu_size,
        cpu_milli: cores * 1000,
        memory_mib: 64 << 10,
    };
    vec![
        shape(model("T4"), 2, 1000, 16),
        shape(model("A100"), 8, 81_920, 64),
        shape(model(""), 0, 1000, 32),
    ]
}

fn demand() -> impl Strategy<Value = Demand> {
    let share = prop_oneof![
        (1_u16..=10).prop_map(|tenths| DemandShare::Milli(tenths * 100)),
        prop_oneof![Just(333_u32), Just(1000), Just(40_960)].prop_map(DemandShare::Memory),
    ];
    let gpus = prop_oneof![
        Just((0_u8, DemandShare::Milli(0))),
        share.prop_map(|share| (1, share)),
        (1_u8..=9).prop_map(|gpus| (gpus, DemandShare::WHOLE))
    ];
    let models = prop_oneof![Just(None), (0_usize..3).prop_map(Some)];
    (0_u32..20, 0_u32..40, gpus, models).prop_map(|(cores, gib, (gpus, share), model)| Demand {
        cpu_milli: cores * 500,
        memory_mib: gib << 10,
        gpus,
        share,
        models: model.map_or(ModelSet::ANY, |at| ModelSet::NONE.with(shapes()[at].model)),
    })
}

/// An event: a pod arrives, an earlier one ends, a node is added or removed, or the mix is set.
#[derive(Debug, Clone)]
enum Event {
    Arrive(Demand),
    End(usize),
    Join(usize),
    Leave(usize),
    Mix,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => demand().prop_map(Event::Arrive),
        2 => any::<usize>().prop_map(Event::End),
        1 => (0_usize..3).prop_map(Event::Join),
        1 => any::<usize>().prop_map(Event::Leave),
        1 => Just(Event::Mix),
    ]
}

/// The placer under test, and the nodes by name.
struct World {
    placer: Placer,
    pods_end: bool,
    nodes: Vec<(String, NodeShape, FreeOnNode, divvy_policy::NodeId)>,
    pods: Vec<(Demand, Decision)>,
    seen: Mix,
    told: Mix,
    joined: usize,
    arrived: u64,
}

impl World {
    fn new(policy: Policy, pods_end: bool) -> World {
        let mut placer = Placer::new(policy);
        // Whether pods end is learned from history, which a fresh placer does not have.
        placer.set_pods_end(Some(pods_end));
        let mut world = World {
            placer,
            pods_end,
            nodes: Vec::new(),
            pods: Vec::new(),
            seen: Mix::new(),
            told: Mix::new(),
            joined: 0,
            arrived: 0,
        };
        (0..6).for_each(|at| world.join(at % 3));
        world
    }

    fn join(&mut self, shape: usize) {
        let shape = shapes()[shape];
        let name = format!("node-{}", self.joined);
        self.joined += 1;
        let id = self.placer.add(shape, shape.empty(), rank(&name));
        self.nodes.push((name, shape, shape.empty(), id));
    }

    /// Build a fresh placer in the current state, with the nodes added in this or in reverse order.
    fn afresh(&self, backwards: bool) -> (Placer, Vec<String>) {
        let mut fresh = Placer::new(self.placer.policy());
        let mut nodes: Vec<_> = self.nodes.iter().collect();
        if backwards {
            nodes.reverse();
        }
        fresh.set_pods_end(Some(self.pods_end));
        fresh.set_mix(&self.told);
        let mut names = Vec::new();
        for (name, shape, free, _) in nodes {
            let id = fresh.add(*shape, *free, rank(name));
            assert_eq!(id.index(), names.len());
            names.push(name.clone());
        }
        (fresh, names)
    }

    fn arrive(&mut self, demand: Demand) {
        self.arrived += 1;
        self.seen.add(&demand);
        // Prices of places date from the last refresh.
        self.placer.refresh();
        let found = self.placer.decide(&demand, self.arrived);
        let name = |id| {
            self.nodes
                .iter()
                .find(|node| node.3 == id)
                .expect("a node that is there")
                .0
                .clone()
        };
        let found_names = found.map(|decision| (name(decision.node), decision.gpus));
        for backwards in [false, true] {
            let (mut fresh, names) = self.afresh(backwards);
            fresh.refresh();
            let expected = fresh.decide(&demand, self.arrived);
            let expected = expected.map(|decision| (names[decision.node.index()].clone(), decision.gpus));
            assert_eq!(found_names, expected, "{demand:?}, nodes backwards: {backwards}");
        }
        let fits = |(_, shape, free, _): &(String, NodeShape, FreeOnNode, _)| free.fits(shape, &demand);
        assert_eq!(
            found.is_some(),
            self.nodes.iter().any(fits),
            "a pod that fits somewhere is placed: {demand:?}"
        );
        let Some(decision) = found else { return };
        let node = self.nodes.iter_mut().find(|node| node.3 == decision.node).expect("there");
        assert!(
            node.2.take(&node.1, &demand, decision.gpus),
            "the chosen GPUs have room: {demand:?}"
        );
        assert!(self.placer.take(&demand, decision));
        assert_eq!(self.placer.node(decision.node).map(|(_, free)| *free), Some(node.2));
        self.pods.push((demand, decision));
    }

    fn end(&mut self, at: usize) {
        if self.pods.is_empty() {
            return;
        }
        let (demand, decision) = self.pods.swap_remove(at % self.pods.len());
        let node = self.nodes.iter_mut().find(|node| node.3 == decision.node).expect("there");
        node.2.give_back(&node.1, &demand, decision.gpus);
        self.placer.give_back(&demand, decision);
    }

    fn leave(&mut self, at: usize) {
        if self.nodes.is_empty() {
            return;
        }
        let (.., id) = self.nodes.swap_remove(at % self.nodes.len());
        self.pods.retain(|(_, decision)| decision.node != id);
        self.placer.remove(id);
    }

    fn play(&mut self, event: Event) {
        match event {
            Event::Arrive(demand) => self.arrive(demand),
            Event::End(at) => self.end(at),
            Event::Join(shape) => self.join(shape),
            Event::Leave(at) => self.leave(at),
            Event::Mix => {
                self.told = self.seen.clone();
                self.placer.set_mix(&self.told);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// The chosen place fits, and there is a choice whenever a place fits. The choice depends neither on earlier questions nor on
    /// the order of the nodes.
    #[test]
    fn decisions_fit_and_are_functions_of_what_is_so(
        policy in (0..Policy::ALL.len()).prop_map(|at| Policy::ALL[at]),
        pods_end: bool,
        events in proptest::collection::vec(event(), 1..60),
    ) {
        let mut world = World::new(policy, pods_end);
        events.into_iter().for_each(|event| world.play(event));
    }

    /// What a pod took is free again when it has ended.
    #[test]
    fn pods_that_end_leave_nothing_behind(demands in proptest::collection::vec(demand(), 1..30)) {
        let mut world = World::new(Policy::BestFit, true);
        demands.into_iter().for_each(|demand| world.arrive(demand));
        while !world.pods.is_empty() {
            world.end(0);
        }
        for (name, shape, free, _) in &world.nodes {
            prop_assert_eq!(*free, shape.empty(), "{}", name);
        }
    }
}

fn share(milli: u16) -> Demand {
    Demand {
        cpu_milli: 1000,
        memory_mib: 0,
        gpus: 1,
        share: DemandShare::Milli(milli),
        models: ModelSet::ANY,
    }
}

#[test]
fn a_place_that_was_taken_by_somebody_else_is_refused() {
    let shape = shapes()[0];
    let mut placer = Placer::new(Policy::BestFit);
    let node = placer.add(shape, shape.empty(), 0);
    let decision = placer.decide(&share(600), 0).expect("fits");
    assert!(placer.take(&share(600), decision));
    assert!(!placer.take(&share(600), decision), "the same GPU has 400 left");
    let several = Decision {
        node,
        gpus: GpuSet(0b11),
    };
    assert!(!placer.take(&share(100), several), "one GPU was asked for, two were named");
    assert_eq!(placer.node(node).expect("there").1.gpus[..2], [400, 1000]);
}

#[test]
fn main_memory_decides_only_where_there_is_not_enough() {
    let shape = shapes()[0];
    let mut placer = Placer::new(Policy::GpuPacking);
    let used = FreeOnNode {
        gpus: {
            let mut gpus = shape.empty().gpus;
            gpus[0] = 500;
            gpus
        },
        memory_mib: 1,
        ..shape.empty()
    };
    let full = placer.add(shape, used, 0);
    let empty = placer.add(shape, shape.empty(), 1);
    assert_eq!(placer.decide(&share(500), 0).expect("fits").node, full);
    let demand = Demand {
        memory_mib: 2,
        ..share(500)
    };
    assert_eq!(placer.decide(&demand, 0).expect("fits").node, empty);
}

#[test]
fn a_policy_is_found_by_the_name_that_it_has() {
    for policy in Policy::ALL {
        assert_eq!(policy.name().parse(), Ok(policy));
    }
    let error = "fdg".parse::<Policy>().expect_err("no such policy").to_string();
    assert!(
        error.starts_with("there is no policy \"fdg\"; the policies are random, best-fit,"),
        "{error}"
    );
}

#[test]
fn with_no_history_divvy_fills_one_node_before_it_opens_another() {
    let shape = shapes()[1];
    let mut placer = Placer::new(Policy::Divvy);
    for node in 0..6 {
        placer.add(shape, shape.empty(), rank(&format!("node-{node}")));
    }
    let mut used = std::collections::BTreeSet::new();
    for pod in 0..8 {
        let demand = share(1000);
        let decision = placer.decide(&demand, pod).expect("fits");
        assert!(placer.take(&demand, decision));
        used.insert(decision.node);
    }
    assert_eq!(used.len(), 1, "eight pods with one GPU each are on one node with eight");
}

#[test]
fn divvy_keeps_scarce_products_for_those_that_name_them() {
    let [t4, a100, _] = shapes()[..] else { panic!("three shapes") };
    let mut placer = Placer::new(Policy::Divvy);
    let scarce = placer.add(t4, t4.empty(), 0);
    for node in 0..4 {
        placer.add(a100, a100.empty(), 1 + node);
    }
    let picky = Demand {
        models: ModelSet::NONE.with(t4.model),
        ..share(1000)
    };
    for pod in 0..10 {
        for demand in [picky, share(1000)] {
            placer.arrived(&demand);
            let decision = placer.decide(&demand, pod);
            if let Some(decision) = decision.filter(|_| demand == share(1000)) {
                assert_ne!(decision.node, scarce, "anybody else goes elsewhere while there is room");
                assert!(placer.take(&demand, decision));
            }
        }
    }
}

#[test]
fn a_decision_does_not_hang_on_how_it_came_about_when_pods_end() {
    // The same pods on the same nodes, once after others that have ended.
    let shape = shapes()[1];
    let ask = share(400);
    let place = |placer: &mut Placer| {
        let decision = placer.decide(&ask, 0).expect("fits");
        assert!(placer.take(&ask, decision));
        decision
    };
    for policy in Policy::ALL.into_iter().filter(|policy| *policy != Policy::Divvy) {
        let mut placers = [Placer::new(policy), Placer::new(policy)];
        for placer in &mut placers {
            (0..4).for_each(|node| {
                placer.add(shape, shape.empty(), node);
            });
        }
        let gone: Vec<_> = (0..10).map(|_| place(&mut placers[0])).collect();
        gone.iter().for_each(|decision| placers[0].give_back(&ask, *decision));
        let [first, second] = &mut placers;
        for _ in 0..20 {
            assert_eq!(place(first), place(second), "{policy}");
        }
    }
}

#[test]
fn a_scheduler_takes_no_policy_that_is_for_comparison_only() {
    for policy in Policy::ALL {
        let taken = Policy::for_scheduling(policy.name());
        if Policy::FOR_SCHEDULING.contains(&policy) {
            assert_eq!(taken, Ok(policy))
        } else {
            assert_eq!(taken, Err(NotForScheduling::OnlySimulated(policy)))
        }
    }
    let error = Policy::for_scheduling("x").expect_err("no policy");
    assert!(error.to_string().contains("best-fit"), "{error}");
}
