//! An artificial cluster for measurements. A third of the nodes are small; the others have 8 GPUs each, of two products. There
//! are 60 classes of pods, of which only a few are frequent. Once the cluster is filled, about 93 % of it is in use.

use divvy_policy::{Decision, Demand, DemandShare, ModelSet, Models, NodeShape, Placer, Policy, rank};

pub(crate) struct Cluster {
    pub(crate) placer: Placer,
    running: Vec<(Demand, Decision)>,
    classes: Vec<Demand>,
    random: u64,
}

impl Cluster {
    /// Create a cluster with this many nodes. With `only_large`, each node has 8 GPUs.
    pub(crate) fn new(policy: Policy, nodes: usize, only_large: bool) -> Cluster {
        let mut models = Models::default();
        let mut model = |name| models.number(name).expect("few models");
        let shape = |model, gpus, cores: u32| NodeShape {
            model,
            gpus,
            gpu_size: 1000,
            cpu_milli: cores * 1000,
            memory_mib: 1 << 20,
        };
        let shapes = [shape(model("A"), 8, 96), shape(model("B"), 8, 128), shape(model("C"), 2, 104)];
        let mut placer = Placer::new(policy);
        for node in 0..nodes {
            let shape = shapes[if only_large { node % 2 } else { node % 3 }];
            placer.add(shape, shape.empty(), rank(&format!("node-{node}")));
        }
        let mut cluster = Cluster {
            placer,
            running: Vec::new(),
            classes: Vec::new(),
            random: 7,
        };
        for class in 0..60 {
            let (gpus, milli) = match class % 6 {
                0 => (0, 0),
                1 | 2 => (1, 1000),
                3 | 4 => (1, 50 * (1 + cluster.below(19) as u16)),
                _ if class % 12 == 5 => (8, 1000),
                _ => (2, 1000),
            };
            let cores = (1 + cluster.below(12) as u32) * u32::from(gpus.max(1));
            cluster.classes.push(Demand {
                cpu_milli: cores * 1000 + 200 * (class as u32 % 3),
                memory_mib: 4096,
                gpus,
                share: DemandShare::Milli(milli),
                models: ModelSet::ANY,
            });
        }
        cluster
    }

    fn below(&mut self, end: usize) -> usize {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % end
    }

    /// Draw a pod; frequent classes are drawn more often.
    pub(crate) fn pod(&mut self) -> Demand {
        let (one, other) = (self.below(60), self.below(60));
        self.classes[one.min(other)]
    }

    /// Try to place a newly arrived pod, and report whether it fits.
    pub(crate) fn arrive(&mut self, demand: &Demand) -> bool {
        self.placer.arrived(demand);
        let Some(decision) = self.placer.decide(demand, 0) else {
            return false;
        };
        self.running.push((*demand, decision));
        self.placer.take(demand, decision)
    }

    /// End one running pod, chosen at random.
    pub(crate) fn end(&mut self) {
        if !self.running.is_empty() {
            let at = self.below(self.running.len());
            let (demand, decision) = self.running.swap_remove(at);
            self.placer.give_back(&demand, decision);
        }
    }

    /// Fill the cluster until 20 pods in a row have not fit.
    pub(crate) fn fill(&mut self) {
        let mut refused = 0;
        while refused < 20 {
            let demand = self.pod();
            refused = if self.arrive(&demand) { 0 } else { refused + 1 };
        }
    }

    /// Copy the nodes, with what is free on them, into a placer that has decided nothing yet.
    pub(crate) fn cold(&self, policy: Policy) -> Placer {
        let mut placer = Placer::new(policy);
        for (node, (shape, free)) in self.placer.nodes().enumerate() {
            placer.add(*shape, *free, rank(&format!("node-{node}")));
        }
        placer.set_mix(&self.classes.iter().collect());
        placer
    }
}
