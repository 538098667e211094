//! Expected stranding: how much of a node's free GPU capacity remains unusable when the usual pods are offered to the node, one
//! after another.
//!
//! Each of 64 sequences offers 60 pods to the node. A pod is placed if it fits. A pod that takes a part of a GPU goes to the GPU
//! with the least free capacity that still suffices. The expected stranding is the mean, over all sequences, of the capacity that
//! is still free at the end. It covers what a static measure cannot: CPU that runs out before the GPUs do, and remainders that no
//! combination of pods fills.
//!
//! The sequences are the same for all nodes (common random numbers), so a difference between two nodes is not due to chance. At
//! each step, the 64 pods are quantiles of the mix in random order (stratified sampling): each class occurs as often as its
//! frequency requires. Therefore 64 sequences are as good as many more independent ones, and a small change of the mix changes
//! few of the pods.
//!
//! The code runs as many sequences in parallel as the processor has lanes for 16-bit integers. The test `lanes_and_words_agree`
//! compares the result with that of a plain loop.

use std::ops::Range;

use fearless_simd::prelude::*;
use fearless_simd::{Level, Simd, dispatch};

use super::super::state::PolicyNodeState;
use super::super::{Demand, MOST_GPUS, NodeShape};
use divvy_placement::hash::mix as scramble;

/// The number of sequences; a power of two.
pub(crate) const SEQUENCES: usize = 64;
/// The number of pods in each sequence.
const STEPS: usize = 60;

/// The class of the pod at each step of each sequence.
#[derive(Debug, Clone)]
pub(crate) struct Draw {
    /// By step, then by sequence: the number of the class.
    classes: Vec<[u16; SEQUENCES]>,
}

impl Draw {
    /// Draw from classes with these weights. There must be at least one class.
    pub(crate) fn new(weights: &[u64]) -> Draw {
        let mut upto = Vec::with_capacity(weights.len());
        let mut total: u128 = 0;
        for weight in weights {
            total += u128::from(*weight);
            upto.push(total);
        }
        let step = |step: usize| {
            let mut quantiles: [usize; SEQUENCES] = std::array::from_fn(|at| at);
            let mut seed = scramble(step as u64 + 1);
            for last in (1..SEQUENCES).rev() {
                seed = scramble(seed.wrapping_add(0x9e37_79b9_7f4a_7c15));
                quantiles.swap(last, (seed % (last as u64 + 1)) as usize);
            }
            let within = u128::from(scramble(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) >> 32);
            quantiles.map(|quantile| {
                // The point at (quantile + within / 2^32) / 64 of the total weight.
                let point = ((((quantile as u128) << 32) | within) * total) >> 38;
                let class = upto
                    .partition_point(|upto| *upto <= point)
                    .min(weights.len().saturating_sub(1));
                u16::try_from(class).unwrap_or(u16::MAX)
            })
        };
        Draw {
            classes: (0..STEPS).map(step).collect(),
        }
    }
}

/// A request larger than any node or GPU, so that a pod with it is never placed.
const NEVER: i16 = i16::MAX;
/// The maximum scaled size of one GPU. It is divisible by all numbers from 1 to 10, so the usual fractions of a GPU are
/// exact.
const FINEST: u32 = 25_200;

/// A pod that takes a part of each of several GPUs. These pods are rare, and they are handled one by one.
#[derive(Debug, Clone, Copy)]
struct Several {
    sequence: usize,
    cpu: i16,
    amount: i16,
    gpus: usize,
}

/// One step of all sequences: the pod that each sequence offers.
#[derive(Debug, Clone)]
struct SequenceStep {
    cpus: [i16; SEQUENCES],
    /// What each pod takes of one GPU. The value is [`NEVER`] for pods that take several GPUs or may not use this kind of GPU,
    /// and 0 for pods that take no GPU.
    amounts: [i16; SEQUENCES],
    /// The number of GPUs, for pods that take several whole GPUs; 0 for other pods.
    whole: [i16; SEQUENCES],
    /// Whether any pod of this step takes several whole GPUs.
    any_whole: bool,
    /// The pods that take a part of each of several GPUs, in the order of their sequences.
    several: Vec<Several>,
}

/// The sequences, scaled for nodes of one shape. All amounts are 16-bit integers, so that one instruction handles many sequences.
#[derive(Debug, Clone)]
pub(crate) struct Sequences {
    steps: Vec<SequenceStep>,
    /// A node with less CPU than `least_cpu`, or with less GPU capacity than `least_amount`, has no room for any pod with a GPU.
    least_cpu: i16,
    least_amount: i16,
    /// The unit in which CPU is counted here, in thousandths of a core.
    cpu_unit: u32,
    /// The size of one GPU, in the unit of [`NodeShape::gpu_size`] and as a scaled number.
    size: u32,
    scaled_size: u32,
    /// The level of SIMD instructions of this processor. The result is the same for all levels.
    level: Level,
}

impl Sequences {
    /// Scale the drawn pods for nodes of this shape.
    pub(crate) fn new(draw: &Draw, classes: &[Demand], shape: &NodeShape) -> Sequences {
        let empty = SequenceStep {
            cpus: [0; SEQUENCES],
            amounts: [0; SEQUENCES],
            whole: [0; SEQUENCES],
            any_whole: false,
            several: Vec::new(),
        };
        let mut sequences = Sequences {
            steps: vec![empty; STEPS],
            least_cpu: NEVER,
            least_amount: NEVER,
            cpu_unit: shape.cpu_milli.div_ceil(NEVER as u32 - 1).next_power_of_two(),
            size: shape.gpu_size.max(1),
            scaled_size: shape.gpu_size.clamp(1, FINEST),
            level: Level::new(),
        };
        for (number, drawn) in draw.classes.iter().enumerate() {
            for (sequence, class) in drawn.iter().enumerate() {
                if let Some(demand) = classes.get(usize::from(*class)) {
                    sequences.enter(number, sequence, demand, shape);
                }
            }
        }
        sequences
    }

    /// Report whether nodes of both shapes see the same scaled pods.
    pub(crate) fn same(one: &NodeShape, other: &NodeShape) -> bool {
        let unit = |shape: &NodeShape| shape.cpu_milli.div_ceil(NEVER as u32 - 1).next_power_of_two();
        (one.model, one.gpu_size, unit(one)) == (other.model, other.gpu_size, unit(other))
    }

    fn enter(&mut self, number: usize, sequence: usize, demand: &Demand, shape: &NodeShape) {
        // A node has less CPU than NEVER, so a request of NEVER or more never fits, and its exact size does not matter.
        let cpu = i16::try_from(demand.cpu_milli.div_ceil(self.cpu_unit)).unwrap_or(NEVER);
        let amount = demand.amount(shape).map(|amount| self.scaled(amount));
        if let Some(amount) = amount.filter(|_| demand.gpus > 0) {
            self.least_cpu = self.least_cpu.min(cpu);
            self.least_amount = self.least_amount.min(amount);
        }
        let whole = self.scaled(self.size);
        let step = &mut self.steps[number];
        step.cpus[sequence] = cpu;
        step.amounts[sequence] = match amount {
            None => NEVER,
            Some(_) if demand.gpus == 0 => 0,
            Some(amount) if demand.gpus == 1 => amount,
            Some(amount) if amount == whole => {
                step.whole[sequence] = i16::from(demand.gpus);
                step.any_whole = true;
                NEVER
            }
            Some(amount) => {
                let gpus = usize::from(demand.gpus);
                step.several.push(Several {
                    sequence,
                    cpu,
                    amount,
                    gpus,
                });
                NEVER
            }
        };
    }

    /// Scale an amount of GPU capacity. A positive amount never becomes 0.
    fn scaled(&self, amount: u32) -> i16 {
        let scaled = u64::from(amount) * u64::from(self.scaled_size) / u64::from(self.size);
        let scaled = i16::try_from(scaled).unwrap_or(NEVER - 1);
        scaled.max(i16::from(amount > 0))
    }

    /// Return the GPU capacity that is still free at the end, summed over all sequences, in thousandths of a GPU.
    pub(crate) fn stranded(&self, state: &PolicyNodeState) -> u64 {
        let whole = self.scaled(self.size);
        let mut node = SequenceNode {
            cpu: i16::try_from(state.cpu_milli / self.cpu_unit)
                .unwrap_or(NEVER - 1)
                .min(NEVER - 1),
            whole: 0,
            left: [0; MOST_GPUS],
        };
        let mut count = 0;
        for amount in state.left.iter().filter(|left| **left > 0) {
            match self.scaled(*amount) {
                amount if amount == whole => node.whole += 1,
                amount => node.left[count - usize::from(node.whole.unsigned_abs())] = amount,
            }
            count += 1;
        }
        let sum = match count {
            0 => 0,
            1 => dispatch!(self.level, simd => self.offer::<_, 1>(simd, &node)),
            2 => dispatch!(self.level, simd => self.offer::<_, 2>(simd, &node)),
            3 | 4 => dispatch!(self.level, simd => self.offer::<_, 4>(simd, &node)),
            5..=8 => dispatch!(self.level, simd => self.offer::<_, 8>(simd, &node)),
            _ => dispatch!(self.level, simd => self.offer::<_, MOST_GPUS>(simd, &node)),
        };
        sum * 1000 / u64::from(self.scaled_size)
    }

    /// Offer the sequences to a node with at most `GPUS` GPUs. Return the scaled GPU capacity that is still free at the end,
    /// summed over all sequences.
    #[inline(always)]
    fn offer<S: Simd, const GPUS: usize>(&self, simd: S, node: &SequenceNode) -> u64 {
        let size = self.scaled(self.size);
        let mut sum = 0;
        // Process two groups of lanes at a time. Each step of a group depends on the group's previous step. Meanwhile, the
        // processor can work on the other group.
        for first in (0..SEQUENCES).step_by(2 * S::i16s::LEN) {
            let mut one = Lanes::<S, GPUS>::new(simd, first, node);
            let mut other = Lanes::<S, GPUS>::new(simd, first + S::i16s::LEN, node);
            for (number, step) in self.steps.iter().enumerate() {
                one.offer(simd, step, size);
                other.offer(simd, step, size);
                let ended = |lanes: &Lanes<S, GPUS>| lanes.ended(simd, self.least_cpu, self.least_amount, size);
                if number % 8 == 7 && ended(&one) && ended(&other) {
                    break;
                }
            }
            sum += one.left(size) + other.left(size);
        }
        sum
    }
}

/// The state of a node in as many sequences as the processor has lanes.
///
/// All whole GPUs are alike, so they are only counted. When a pod takes a part of a whole GPU, this GPU moves to an unused entry
/// of `gpus`, which is one with the value 0. There always is one, because `gpus` has as many entries as the node has GPUs.
struct Lanes<S: Simd, const GPUS: usize> {
    first: usize,
    cpu: S::i16s,
    whole: S::i16s,
    gpus: [S::i16s; GPUS],
}

impl<S: Simd, const GPUS: usize> Lanes<S, GPUS> {
    /// Start the sequences, beginning with number `first`.
    #[inline(always)]
    fn new(simd: S, first: usize, node: &SequenceNode) -> Self {
        Lanes {
            first,
            cpu: S::i16s::splat(simd, node.cpu),
            whole: S::i16s::splat(simd, node.whole),
            gpus: std::array::from_fn(|gpu| S::i16s::splat(simd, node.left[gpu])),
        }
    }

    #[inline(always)]
    fn offer(&mut self, simd: S, step: &SequenceStep, whole: i16) {
        let lanes = |all: &[i16; SEQUENCES]| S::i16s::from_slice(simd, &all[self.first..self.first + S::i16s::LEN]);
        let splat = |value: i16| S::i16s::splat(simd, value);
        let (none, one, never, size) = (splat(0), splat(1), splat(NEVER), splat(whole));
        let (cpus, amounts) = (lanes(&step.cpus), lanes(&step.amounts));
        // Find the GPU with the least left that is enough; a whole GPU if there is no other.
        let mut best = never;
        for gpu in &self.gpus {
            best = best.min(gpu.simd_lt(amounts).select(never, *gpu));
        }
        let opens = best.simd_eq(never);
        let enough = !(opens & (self.whole.simd_eq(none) | size.simd_lt(amounts)));
        // True in a lane where the pod is placed and its GPU is not found yet. No comparison waits for the result of another one.
        let mut open = enough & !self.cpu.simd_lt(cpus);
        self.cpu -= open.select(cpus, none);
        self.whole -= (opens & open).select(one, none);
        let after = opens.select(size, best) - amounts;
        let best = opens.select(none, best);
        for gpu in &mut self.gpus {
            let here = gpu.simd_eq(best) & open;
            *gpu = here.select(after, *gpu);
            open &= !here;
        }
        if step.any_whole {
            let wanted = lanes(&step.whole);
            let placed = !(self.whole.simd_lt(wanted) | self.cpu.simd_lt(cpus) | wanted.simd_eq(none));
            self.cpu -= placed.select(cpus, none);
            self.whole -= placed.select(wanted, none);
        }
        if !step.several.is_empty() {
            self.offer_one_by_one(simd, &step.several, whole);
        }
    }

    #[inline(always)]
    fn offer_one_by_one(&mut self, simd: S, pods: &[Several], size: i16) {
        let mut one_by_one = OneByOne::<GPUS>::new(size);
        self.cpu.store_slice(&mut one_by_one.cpu[..S::i16s::LEN]);
        self.whole.store_slice(&mut one_by_one.whole[..S::i16s::LEN]);
        for (gpu, left) in self.gpus.iter().zip(&mut one_by_one.left) {
            gpu.store_slice(&mut left[..S::i16s::LEN]);
        }
        one_by_one.take(pods, self.first..self.first + S::i16s::LEN);
        self.cpu = S::i16s::from_slice(simd, &one_by_one.cpu[..S::i16s::LEN]);
        self.whole = S::i16s::from_slice(simd, &one_by_one.whole[..S::i16s::LEN]);
        for (gpu, left) in self.gpus.iter_mut().zip(&one_by_one.left) {
            *gpu = S::i16s::from_slice(simd, &left[..S::i16s::LEN]);
        }
    }

    /// Report whether, in every lane, no further pod can get a GPU.
    #[inline(always)]
    fn ended(&self, simd: S, least_cpu: i16, least_amount: i16, size: i16) -> bool {
        let splat = |value: i16| S::i16s::splat(simd, value);
        let mut most = self.whole.simd_eq(splat(0)).select(splat(0), splat(size));
        for gpu in &self.gpus {
            most = most.max(*gpu);
        }
        let ended = self.cpu.simd_lt(splat(least_cpu)) | most.simd_lt(splat(least_amount));
        ended.all_true()
    }

    /// Return the scaled GPU capacity that is free, summed over all lanes.
    #[inline(always)]
    fn left(&self, size: i16) -> u64 {
        // Sums per lane. The sum over a node's GPUs exceeds 16 bits, but it is far below 32 bits, so the wrapping arithmetic
        // never wraps.
        let mut sums = [0_i32; SEQUENCES];
        let mut add = |lanes: &S::i16s, times: i32| {
            let mut left = [0; SEQUENCES];
            lanes.store_slice(&mut left[..S::i16s::LEN]);
            for (sum, left) in sums[..S::i16s::LEN].iter_mut().zip(&left) {
                *sum = sum.wrapping_add(i32::from(*left).wrapping_mul(times));
            }
        };
        add(&self.whole, i32::from(size));
        self.gpus.iter().for_each(|gpu| add(gpu, 1));
        sums[..S::i16s::LEN].iter().map(|sum| u64::from(sum.unsigned_abs())).sum()
    }
}

/// What is free on a node, scaled for the sequences.
struct SequenceNode {
    cpu: i16,
    /// The number of completely free GPUs.
    whole: i16,
    /// The free amount of each partly used GPU; the remaining entries are 0.
    left: [i16; MOST_GPUS],
}

/// What is free in some sequences, as plain arrays, for pods that are handled one by one.
struct OneByOne<const GPUS: usize> {
    size: i16,
    cpu: [i16; SEQUENCES],
    whole: [i16; SEQUENCES],
    left: [[i16; SEQUENCES]; GPUS],
}

impl<const GPUS: usize> OneByOne<GPUS> {
    fn new(size: i16) -> Self {
        OneByOne {
            size,
            cpu: [0; SEQUENCES],
            whole: [0; SEQUENCES],
            left: [[0; SEQUENCES]; GPUS],
        }
    }

    /// Place each pod by best fit, if enough GPUs have room: on the GPUs with the least free capacity that still suffices. This
    /// is a separate function, so that the values in the loop over the steps stay in registers.
    #[inline(never)]
    fn take(&mut self, pods: &[Several], sequences: Range<usize>) {
        for pod in pods.iter().filter(|pod| sequences.contains(&pod.sequence)) {
            let lane = pod.sequence - sequences.start;
            let enough = self.left.iter().filter(|left| left[lane] >= pod.amount).count();
            let whole = usize::from(self.whole[lane].unsigned_abs());
            if self.cpu[lane] < pod.cpu || enough + whole < pod.gpus {
                continue;
            }
            self.cpu[lane] -= pod.cpu;
            let mut taken = [false; GPUS];
            for _ in 0..pod.gpus {
                let fitting = self.left.iter().map(|left| left[lane]).enumerate();
                let fitting = fitting.filter(|(gpu, left)| *left >= pod.amount && !taken[*gpu]);
                let found = fitting.min_by_key(|(_, left)| *left).map(|(gpu, _)| gpu);
                let unused = || self.left.iter().position(|left| left[lane] == 0);
                if let Some(gpu) = found {
                    self.left[gpu][lane] -= pod.amount;
                    taken[gpu] = true;
                } else if let Some(gpu) = unused() {
                    self.whole[lane] -= 1;
                    self.left[gpu][lane] = self.size - pod.amount;
                    taken[gpu] = true;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::{DemandShare, Mix, ModelSet, Models};
    use super::*;
    use proptest::prelude::*;

    fn demand(cores: u32, gpus: u8, milli: u16) -> Demand {
        Demand {
            cpu_milli: cores * 1000,
            memory_mib: 0,
            gpus,
            share: DemandShare::Milli(milli),
            models: ModelSet::ANY,
        }
    }

    fn shape() -> NodeShape {
        NodeShape {
            model: Models::default().number("T4").expect("a number"),
            gpus: 8,
            gpu_size: 1000,
            cpu_milli: 64_000,
            memory_mib: 0,
        }
    }

    /// Compute the stranding by the definition in the module's documentation, step by step.
    fn naive(draw: &Draw, classes: &[Demand], state: &PolicyNodeState) -> u64 {
        let mut sum = 0;
        for sequence in 0..SEQUENCES {
            let mut state = *state;
            for step in &draw.classes {
                let demand = &classes[usize::from(step[sequence])];
                let some_gpu = state.left.iter().any(|left| *left > 0);
                if let Some(amount) = demand
                    .amount(&shape())
                    .filter(|amount| some_gpu && state.fits(demand, *amount))
                {
                    state = state.after(demand, amount, None);
                }
            }
            sum += state.total();
        }
        sum
    }

    proptest! {
        #[test]
        fn lanes_and_words_agree(
            classes in proptest::collection::vec((0_u32..12, 0_u8..5, prop_oneof![Just(10_u16), 1_u16..=10], 1_u64..50), 1..8),
            cores in 0_u32..64,
            left in proptest::collection::vec(prop_oneof![Just(1000_u32), 0..1000_u32], 0..8),
        ) {
            let mut mix = Mix::new();
            for (cores, gpus, tenths, count) in classes {
                let milli = if gpus == 0 { 0 } else { tenths * 100 };
                (0..count).for_each(|_| mix.add(&demand(cores, gpus, milli)));
            }
            let (classes, weights): (Vec<Demand>, Vec<u64>) = mix.classes().unzip();
            let mut state = shape().empty().state(0, Default::default());
            state.cpu_milli = cores * 1000;
            state.left = [0; MOST_GPUS];
            state.left[..left.len()].copy_from_slice(&left);
            let draw = Draw::new(&weights);
            let sequences = Sequences::new(&draw, &classes, &shape());
            prop_assert_eq!(sequences.stranded(&state), naive(&draw, &classes, &state));
        }
    }

    #[test]
    fn each_step_draws_every_class_as_often_as_it_is_asked_for() {
        let draw = Draw::new(&[1, 2, 1]);
        for step in &draw.classes {
            let count = |class: u16| step.iter().filter(|drawn| **drawn == class).count();
            assert_eq!([count(0), count(1), count(2)], [16, 32, 16]);
        }
    }
}
