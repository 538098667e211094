//! The mix of requests, learned from the pods that have arrived.

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasherDefault;

use super::super::{Demand, Mix, Model, NodeShape};
use crate::mixer::Mixer;

/// The weight of a new arrival.
pub(crate) const ONE: u64 = 1 << 10;
/// When the sum of the weights reaches this value, all weights are halved, so that older arrivals fade.
const WINDOW: u64 = 8192 * ONE;
/// A class whose weight falls below this value is forgotten.
const LEAST: u64 = ONE / 64;

/// The total weight of the arrivals in each class of pods. The weight of an arrival fades with time.
#[derive(Debug)]
pub(crate) struct Mixture {
    /// The maximum number of classes. Users choose their requests freely, so there may be as many classes as pods. Above this
    /// number, the rarest classes are dropped.
    most: usize,
    counts: HashMap<Demand, u64, BuildHasherDefault<Mixer>>,
    total: u64,
    /// The number of arrivals since the start, which decides when the next fit is due.
    arrivals: u64,
    fit_at: u64,
}

impl Mixture {
    pub(crate) fn of_at_most(classes: usize) -> Mixture {
        Mixture {
            most: classes,
            counts: HashMap::default(),
            total: 0,
            arrivals: 0,
            fit_at: 0,
        }
    }

    /// Record an arrival, and report whether it is time to [`Mixture::fit`].
    pub(crate) fn add(&mut self, class: &Demand) -> bool {
        *self.counts.entry(*class).or_default() += ONE;
        self.total += ONE;
        self.arrivals += 1;
        if self.total >= WINDOW {
            self.fade();
        }
        self.leave_out_the_rarest();
        self.arrivals > self.fit_at
    }

    /// Report whether too few pods have arrived to predict the next ones.
    pub(crate) fn is_young(&self) -> bool {
        self.arrivals <= 64
    }

    /// Replace everything learned, as if exactly the pods of `mix` had arrived.
    pub(crate) fn set(&mut self, mix: &Mix) {
        *self = Mixture::of_at_most(self.most);
        for (class, count) in mix.classes() {
            self.counts.insert(*class, count * ONE);
            self.total += count * ONE;
        }
        self.arrivals = mix.total();
        while self.total >= WINDOW {
            self.fade();
        }
        self.leave_out_the_rarest();
    }

    /// Drop the rarest classes if there are too many. A quarter more than necessary are dropped, so that this is not repeated for
    /// each new pod.
    fn leave_out_the_rarest(&mut self) {
        if self.counts.len() <= self.most {
            return;
        }
        let mut classes: Vec<(u64, Demand)> = self.counts.iter().map(|(class, count)| (*count, *class)).collect();
        classes.sort_unstable_by(|a, b| b.cmp(a));
        for (_, class) in classes.drain(self.most - self.most / 4..) {
            self.counts.remove(&class);
        }
        self.total = self.counts.values().sum();
    }

    fn fade(&mut self) {
        self.counts.retain(|_, count| {
            *count /= 2;
            *count >= LEAST
        });
        self.total = self.counts.values().sum();
    }

    /// Return the classes with their weights, the largest requests last. The next fit is due after 40 % more arrivals, and after
    /// at most 2000 more.
    pub(crate) fn fit(&mut self) -> Vec<(Demand, u64)> {
        self.fit_at = match self.arrivals {
            0..64 => self.arrivals.next_power_of_two().max(1),
            arrivals => arrivals + (arrivals * 2 / 5).min(2000),
        };
        let mut classes: Vec<(Demand, u64)> = self.counts.iter().map(|(class, count)| (*class, *count)).collect();
        // Similar classes are neighbors, so that a small change of the mix changes few of the quantiles that `Draw` takes.
        classes.sort_unstable_by_key(|(class, _)| (class.gpus, class.share, class.cpu_milli, *class));
        classes
    }
}

/// Compute the scarcity price of each shape: what a GPU of that shape is worth to the pods that need it, in millionths.
///
/// A class of pods demands a share of the cluster's GPUs: its weight times its request, scaled so that all classes together
/// demand exactly the GPUs of the cluster. This demand is divided by the number of GPUs that the class could use. The price of a
/// shape is the sum of these quotients over all classes that fit an empty node of the shape. So a GPU that every pod can use has
/// a price near 1, a GPU that only a few pods request has a lower price, and a scarce product that many pods insist on has a
/// higher one.
pub(crate) fn scarcity(classes: &[(Demand, u64)], shapes: &[(NodeShape, u64)]) -> Vec<i64> {
    let gpu = |shape: &NodeShape, nodes: u64| u128::from(shape.gpus) * u128::from(nodes);
    let all: u128 = shapes.iter().map(|(shape, nodes)| gpu(shape, *nodes)).sum();
    // There can be as many shapes as nodes, but most of them differ only in CPU. Shapes that differ only in CPU form a group.
    // When a group is sorted by CPU, the shapes with enough CPU for a class form a range.
    let mut groups: BTreeMap<(Model, u32, u8), ShapeGroup> = BTreeMap::new();
    for (number, (shape, nodes)) in shapes.iter().enumerate() {
        let group = groups.entry((shape.model, shape.gpu_size, shape.gpus));
        let group = group.or_insert_with(|| ShapeGroup::like(shape));
        group.by_cpu.push((shape.cpu_milli, number, gpu(shape, *nodes)));
    }
    groups.values_mut().for_each(ShapeGroup::add_up);
    let kinds = kinds(shapes);
    let mut wanted: Vec<(&Demand, u128, u128)> = Vec::new();
    for (class, weight) in classes.iter().filter(|(class, _)| class.gpus > 0) {
        let room: u128 = groups.values().map(|group| group.room(class)).sum();
        if room > 0 {
            wanted.push((class, u128::from(*weight) * u128::from(milli(class, &kinds)), room));
        }
    }
    let total: u128 = wanted.iter().map(|(_, demand, _)| demand).sum();
    // The quotient is demand / total * all / room, in millionths.
    let wanted: Vec<(&Demand, u128)> = wanted
        .into_iter()
        .map(|(class, demand, room)| (class, demand * all * 1_000_000 / (total.max(1) * room)))
        .collect();
    let mut prices = vec![0; shapes.len()];
    for group in groups.values() {
        let mut here: Vec<(u32, u128)> = wanted
            .iter()
            .filter(|(class, _)| group.admits(class))
            .map(|(class, price)| (class.cpu_milli, *price))
            .collect();
        here.sort_unstable();
        let mut here = here.into_iter().peekable();
        let mut sum = 0;
        for (cpu_milli, number, _) in &group.by_cpu {
            while let Some((_, price)) = here.next_if(|(class_cpu, _)| class_cpu <= cpu_milli) {
                sum += price;
            }
            prices[*number] = i64::try_from(sum).unwrap_or(i64::MAX);
        }
    }
    prices
}

/// A group of shapes that differ only in CPU and main memory.
struct ShapeGroup {
    example: NodeShape,
    /// Sorted by CPU in ascending order: the CPU of a shape, the shape's number, and the number of GPUs on nodes of the group
    /// with at least that much CPU.
    by_cpu: Vec<(u32, usize, u128)>,
}

impl ShapeGroup {
    fn like(shape: &NodeShape) -> ShapeGroup {
        ShapeGroup {
            example: *shape,
            by_cpu: Vec::new(),
        }
    }

    fn add_up(&mut self) {
        self.by_cpu.sort_unstable();
        let mut sum = 0;
        for (.., gpus) in self.by_cpu.iter_mut().rev() {
            sum += *gpus;
            *gpus = sum;
        }
    }

    /// Report whether a pod of the class fits an empty node of the group, provided that the node has enough CPU.
    fn admits(&self, class: &Demand) -> bool {
        class.gpus <= self.example.gpus && class.amount(&self.example).is_some()
    }

    /// Return the number of GPUs on those nodes of the group that, when empty, have room for a pod of the class.
    fn room(&self, class: &Demand) -> u128 {
        let first = self.by_cpu.partition_point(|(cpu_milli, ..)| *cpu_milli < class.cpu_milli);
        let room = self.by_cpu.get(first).filter(|_| self.admits(class));
        room.map_or(0, |(.., gpus)| *gpus)
    }
}

/// Return one example shape for each GPU product and size that occurs on a node.
pub(crate) fn kinds(shapes: &[(NodeShape, u64)]) -> Vec<NodeShape> {
    let there = shapes.iter().filter(|(_, nodes)| *nodes > 0);
    let kinds: BTreeMap<(Model, u32), NodeShape> = there.map(|(shape, _)| ((shape.model, shape.gpu_size), *shape)).collect();
    kinds.into_values().collect()
}

/// Return what a pod of the class takes, in thousandths of a GPU: the maximum over those [`kinds`] that the pod may use.
pub(crate) fn milli(class: &Demand, kinds: &[NodeShape]) -> u64 {
    let may = kinds.iter().filter(|shape| class.amount(shape).is_some());
    may.map(|shape| class.milli(shape)).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::super::{DemandShare, ModelSet, Models};
    use super::*;
    use proptest::prelude::*;

    /// Compute [`scarcity`] by its definition, separately for each class and shape.
    fn plain(classes: &[(Demand, u64)], shapes: &[(NodeShape, u64)]) -> Vec<i64> {
        let gpus = |shape: &NodeShape, nodes: u64| u128::from(shape.gpus) * u128::from(nodes);
        let fits = |class: &Demand, shape: &NodeShape| {
            class.gpus <= shape.gpus && class.cpu_milli <= shape.cpu_milli && class.amount(shape).is_some()
        };
        let all: u128 = shapes.iter().map(|(shape, nodes)| gpus(shape, *nodes)).sum();
        let room = |class: &Demand| -> u128 {
            let fitting = shapes.iter().filter(|(shape, _)| fits(class, shape));
            fitting.map(|(shape, nodes)| gpus(shape, *nodes)).sum()
        };
        let most = |class: &Demand| {
            let may = shapes
                .iter()
                .filter(|(shape, nodes)| *nodes > 0 && class.amount(shape).is_some());
            may.map(|(shape, _)| class.milli(shape)).max().unwrap_or(0)
        };
        let wanted: Vec<(&Demand, u128, u128)> = classes
            .iter()
            .filter(|(class, _)| class.gpus > 0 && room(class) > 0)
            .map(|(class, weight)| (class, u128::from(*weight) * u128::from(most(class)), room(class)))
            .collect();
        let total: u128 = wanted.iter().map(|(_, demand, _)| demand).sum();
        let price = |shape: &NodeShape| -> u128 {
            let here = wanted.iter().filter(|(class, ..)| fits(class, shape));
            here.map(|(_, demand, room)| demand * all * 1_000_000 / (total.max(1) * room))
                .sum()
        };
        shapes
            .iter()
            .map(|(shape, _)| i64::try_from(price(shape)).unwrap_or(i64::MAX))
            .collect()
    }

    fn shapes() -> impl Strategy<Value = Vec<(NodeShape, u64)>> {
        let shape = (0_usize..3, 1_u8..5, 1_u32..3, 0_u32..6, 0_u64..4);
        prop::collection::vec(shape, 0..12).prop_map(|shapes| {
            let mut models = Models::default();
            let numbers: Vec<Model> = ["a", "b", "c"].iter().filter_map(|name| models.number(name)).collect();
            let shape = |(model, gpus, size, cpu, nodes): (usize, u8, u32, u32, u64)| {
                let shape = NodeShape {
                    model: numbers[model],
                    gpus,
                    gpu_size: size * 1000,
                    cpu_milli: cpu * 500,
                    memory_mib: 0,
                };
                (shape, nodes)
            };
            shapes.into_iter().map(shape).collect()
        })
    }

    fn classes() -> impl Strategy<Value = Vec<(Demand, u64)>> {
        let class = (0_u8..5, 0_u32..6, 1_u32..2_500, any::<bool>(), 1_u64..9);
        prop::collection::vec(class, 0..10).prop_map(|classes| {
            let mut models = Models::default();
            let one = models.number("a").into_iter().fold(ModelSet::NONE, ModelSet::with);
            let class = |(gpus, cpu, amount, choosy, weight): (u8, u32, u32, bool, u64)| {
                let demand = Demand {
                    cpu_milli: cpu * 500,
                    memory_mib: 0,
                    gpus,
                    share: DemandShare::Memory(amount),
                    models: if choosy { one } else { ModelSet::ANY },
                };
                (demand, weight * ONE)
            };
            classes.into_iter().map(class).collect()
        })
    }

    proptest! {
        #[test]
        fn scarcity_is_what_its_definition_says(classes in classes(), shapes in shapes()) {
            prop_assert_eq!(scarcity(&classes, &shapes), plain(&classes, &shapes));
        }
    }
}
