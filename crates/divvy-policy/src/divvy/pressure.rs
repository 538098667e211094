//! Slot pressure: a price for places that only some pods need, so that other pods do not use them up.
//!
//! The stranding term does not care which pods fill a node. On its own, it would give an empty 8-GPU node to one-GPU pods, and a
//! rare product to any pod. Therefore the policy watches the constrained classes, whose pods cannot run everywhere: pods with
//! several GPUs, and pods that name the products that they accept. Each place for such a pod has a price, and a placement pays
//! for the places that it takes away.
//!
//! The price of a place is the class's request times a factor lambda, which compares demand with supply. The demand is the
//! class's share of all demand, applied to the GPU capacity that is idle now; the supply is the capacity of all places of the
//! class now. Lambda is demand divided by supply, and at most 3. While no pods end, lambda is squared, so that places are nearly
//! free until they become rare.

use super::super::state::PolicyNodeState;
use std::collections::BTreeMap;

use super::super::{Demand, DemandShare, MOST_GPUS, Model, ModelSet, NodeShape};

/// The maximum number of watched classes. The classes with the largest demand are kept.
const MOST: usize = 256;

/// If arrivals of this total weight include no pod with several GPUs, such pods are no longer expected (see [`whole_nodes`]).
const MANY: u64 = 1000 * super::mixture::ONE;

/// The number 1 in fixed-point arithmetic in millionths.
pub(crate) const MICRO: i64 = 1_000_000;

#[derive(Debug, Clone)]
struct WatchedClass {
    class: Demand,
    weight: u64,
    milli: u64,
    /// The number of places that the class has in the cluster now.
    places: u128,
}

/// Watched classes that take the same amount of the same number of GPUs, so that the same GPUs have room for them.
#[derive(Debug, Clone)]
struct Alike {
    gpus: u8,
    amount: u32,
    classes: Vec<Priced>,
}

#[derive(Debug, Clone)]
struct Priced {
    cpu_milli: u32,
    /// The index of the class in [`Pressure::watched`].
    watched: usize,
    /// The price of one place, in millionths of a thousandth of a GPU.
    price: i64,
}

/// The constrained classes, and the current price of a place for each of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pressure {
    watched: Vec<WatchedClass>,
    /// By shape number: the index of the shape's kind in `kinds`.
    kind_of: Vec<usize>,
    /// By kind of GPU (product and size): the classes that may use it.
    kinds: Vec<Vec<Alike>>,
    /// The sum, over all classes, of the weight times the request in thousandths of a GPU.
    demand: u128,
}

/// How lambda depends on the ratio of demand to supply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rise {
    /// Lambda is the ratio.
    Linear,
    /// Lambda is the square of the ratio.
    Square,
}

impl Pressure {
    pub(crate) fn new<'a>(classes: &[(Demand, u64)], shapes: &'a [(NodeShape, u64)]) -> Pressure {
        let with_nodes = super::mixture::kinds(shapes);
        let watch = |(class, weight): &(Demand, u64)| WatchedClass {
            class: *class,
            weight: *weight,
            milli: super::mixture::milli(class, &with_nodes),
            places: 0,
        };
        let mut classes: Vec<(Demand, u64)> = classes.iter().filter(|(class, _)| class.gpus > 0).copied().collect();
        let seen: u64 = classes.iter().map(|(_, weight)| weight).sum();
        if seen < MANY || classes.iter().any(|(class, _)| class.gpus > 1) {
            classes.extend(whole_nodes(shapes));
        }
        let all: Vec<WatchedClass> = classes.iter().map(watch).collect();
        let wanted = |watched: &WatchedClass| u128::from(watched.weight) * u128::from(watched.milli);
        let demand = all.iter().map(wanted).sum();
        let mut watched: Vec<WatchedClass> = all
            .into_iter()
            .filter(|watched| watched.milli > 0)
            .filter(|watched| watched.class.gpus > 1 || watched.class.models != ModelSet::ANY)
            .collect();
        watched.sort_by_key(|watched| (std::cmp::Reverse(wanted(watched)), watched.class));
        watched.truncate(MOST);
        let mut examples: Vec<&NodeShape> = Vec::new();
        let mut kind = |shape: &'a NodeShape| {
            let same = |other: &&NodeShape| (other.model, other.gpu_size) == (shape.model, shape.gpu_size);
            examples.iter().position(same).unwrap_or_else(|| {
                examples.push(shape);
                examples.len() - 1
            })
        };
        Pressure {
            kind_of: shapes.iter().map(|(shape, _)| kind(shape)).collect(),
            kinds: examples.into_iter().map(|shape| alike(&watched, shape)).collect(),
            watched,
            demand,
        }
    }

    /// Compute the prices from the idle GPU capacity (in thousandths of a GPU), and from the states of the nodes, each with its
    /// number of nodes.
    pub(crate) fn refresh(
        &mut self,
        idle_milli: u64,
        rise: Rise,
        shapes: &[(NodeShape, u64)],
        states: &[(&PolicyNodeState, usize)],
    ) {
        self.watched.iter_mut().for_each(|watched| watched.places = 0);
        for (state, nodes) in states {
            let number = state.shape as usize;
            for alike in &self.kinds[self.kind_of[number]] {
                alike.places(state, &shapes[number].0, |class, places| {
                    self.watched[class.watched].places += u128::from(places) * *nodes as u128;
                });
            }
        }
        let demand = self.demand.max(1);
        let price = |watched: &WatchedClass| {
            // Demand per place: the class's share of the idle capacity, divided by the capacity of its places; at most 3.
            let wanted = u128::from(watched.weight) * u128::from(idle_milli) * MICRO as u128;
            let per_place = wanted
                .checked_div(demand * watched.places)
                .map_or(3 * MICRO, |ratio| i64::try_from(ratio).unwrap_or(i64::MAX).min(3 * MICRO));
            let lambda = match rise {
                Rise::Linear => per_place,
                Rise::Square => per_place * per_place / MICRO,
            };
            lambda.saturating_mul(i64::try_from(watched.milli).unwrap_or(i64::MAX))
        };
        for class in self.kinds.iter_mut().flatten().flat_map(|alike| &mut alike.classes) {
            class.price = price(&self.watched[class.watched]);
        }
    }

    /// Return the value of all places of a node in this state, in millionths of a thousandth of a GPU.
    pub(crate) fn worth(&self, state: &PolicyNodeState, shape: &NodeShape) -> i64 {
        let mut worth = 0;
        let kind = self.kind_of.get(state.shape as usize).and_then(|kind| self.kinds.get(*kind));
        for alike in kind.into_iter().flatten() {
            alike.places(state, shape, |class, places| worth += class.price * i64::from(places));
        }
        worth
    }
}

impl Alike {
    /// Call `tell` for each class that has places in this state, with the number of places.
    fn places(&self, state: &PolicyNodeState, shape: &NodeShape, mut tell: impl FnMut(&Priced, u32)) {
        let by_gpu = by_gpu(self.gpus, self.amount, state, shape);
        if by_gpu > 0 {
            for class in &self.classes {
                tell(class, by_gpu.min(by_cpu(class.cpu_milli, by_gpu, state)));
            }
        }
    }
}

fn alike(watched: &[WatchedClass], shape: &NodeShape) -> Vec<Alike> {
    let mut all: Vec<Alike> = Vec::new();
    for (number, watched) in watched.iter().enumerate() {
        let Some(amount) = watched.class.amount(shape) else { continue };
        let gpus = watched.class.gpus;
        let priced = Priced {
            cpu_milli: watched.class.cpu_milli,
            watched: number,
            price: 0,
        };
        match all.iter_mut().find(|alike| (alike.gpus, alike.amount) == (gpus, amount)) {
            Some(alike) => alike.classes.push(priced),
            None => all.push(Alike {
                gpus,
                amount,
                classes: vec![priced],
            }),
        }
    }
    all
}

/// Return an imaginary class for each product and number of GPUs: a pod that takes a whole node, with half the weight of one
/// arrival. Such pods must be expected until enough pods have arrived. Otherwise the first small pods would break up every large
/// node.
fn whole_nodes(shapes: &[(NodeShape, u64)]) -> impl Iterator<Item = (Demand, u64)> {
    let mut least_cpu: BTreeMap<(Model, u8), u32> = BTreeMap::new();
    for (shape, _) in shapes.iter().filter(|(shape, nodes)| *nodes > 0 && shape.gpus > 1) {
        let cpu = least_cpu.entry((shape.model, shape.gpus)).or_insert(u32::MAX);
        *cpu = shape.cpu_milli.min(*cpu);
    }
    least_cpu.into_iter().map(|((model, gpus), cpu_milli)| {
        let class = Demand {
            // Pods that run on every node, such as DaemonSets, take a little CPU.
            cpu_milli: cpu_milli - cpu_milli / 16,
            memory_mib: 0,
            gpus,
            share: DemandShare::WHOLE,
            models: ModelSet::NONE.with(model),
        };
        (class, super::mixture::ONE / 2)
    })
}

/// Return how many pods of a class fit a node in this state if only pods of that class arrive. `amount` is what such a pod takes
/// of each GPU.
pub(crate) fn places(class: &Demand, amount: u32, state: &PolicyNodeState, shape: &NodeShape) -> u32 {
    let by_gpu = by_gpu(class.gpus, amount, state, shape);
    by_gpu.min(by_cpu(class.cpu_milli, by_gpu, state))
}

fn by_gpu(gpus: u8, amount: u32, state: &PolicyNodeState, shape: &NodeShape) -> u32 {
    let left = &state.left[..usize::from(shape.gpus).min(MOST_GPUS)];
    match gpus {
        0 => u32::MAX,
        1 if amount == shape.gpu_size => state.whole(shape),
        1 => left.iter().map(|left| times(*left, amount)).sum(),
        gpus => times(left.iter().map(|left| u32::from(*left >= amount)).sum(), u32::from(gpus)),
    }
}

/// Return for how many pods the CPU suffices. The result need not be exact above `by_gpu`, the number of pods for which the GPUs
/// suffice.
fn by_cpu(cpu_milli: u32, by_gpu: u32, state: &PolicyNodeState) -> u32 {
    match by_gpu {
        0 => 0,
        1 => u32::from(cpu_milli <= state.cpu_milli),
        _ if cpu_milli == 0 => u32::MAX,
        _ => times(state.cpu_milli, cpu_milli),
    }
}

/// Return `whole / part`. The result is mostly 0 or 1, and a division would take most of the time for counting places.
fn times(whole: u32, part: u32) -> u32 {
    match whole {
        whole if whole < part => 0,
        whole if whole - part < part => 1,
        whole => whole / part,
    }
}
