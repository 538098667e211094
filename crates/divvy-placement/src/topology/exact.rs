//! The exact search, for up to 16 GPUs. Sets of GPUs are the bits of an integer.
//!
//! NVIDIA's search goes through all divisions of the GPUs into sets; 16 GPUs have millions of them. But the best division of the
//! remaining GPUs depends only on which GPUs remain. So here, each set of remaining GPUs is examined once, and only if it can
//! still belong to the best division. GPUs that are connected to all others in the same way are not distinguished. The search is
//! bounded, because machines without any regularity remain hard.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::{GpuCandidate, Topology};

/// The maximum number of candidates.
pub(super) const MOST: usize = 16;
/// The number of examined parts after which the search no longer compares alternatives: it takes the part that is worth the
/// most. Real machines need far fewer, and with up to eight GPUs, the limit is never reached.
const LOOKS: u32 = 6_000;

/// A set of GPUs, by their places in the order of [`alike_side_by_side`].
type GpuBits = u32;

/// Sums over the GPUs of a set, precomputed for its lower and its upper half.
struct SetSums<T>([[T; 256]; 2]);

#[derive(Clone, Copy)]
enum KnownWorth {
    Is(u32),
    AtMost(u32),
}

struct ExactSearch {
    count: u32,
    /// For each GPU, what it is worth to a set.
    worth: Vec<SetSums<u32>>,
    /// An upper bound for what the best partners are worth to the GPUs of a set.
    partners: SetSums<u32>,
    /// The most that a set of `count` GPUs is worth, and the most that the smaller set is worth if the remaining GPUs do not
    /// divide evenly.
    most: u32,
    most_over: u32,
    /// For each GPU, the GPUs that are connected like it, including itself. They are next to each other in the order.
    alike: Vec<GpuBits>,
    /// What a set is worth when it is divided in the best way.
    divided: BTreeMap<GpuBits, KnownWorth>,
    /// The number of parts examined so far.
    looks: u32,
}

/// Choose the best set. Return indices into the list of candidates, which is sorted by position, in ascending order. There must
/// be at least `count` and at most [`MOST`] candidates.
pub(super) fn choose(topology: &Topology, candidates: &[GpuCandidate], count: usize) -> Vec<usize> {
    let order = alike_side_by_side(topology, candidates);
    let mut search = ExactSearch::new(topology, candidates, &order, count);
    let all: GpuBits = (1 << order.len()) - 1;
    let must = bits(order.iter().map(|at| candidates[*at].must));
    let left = SetSums::new(order.len(), |at| candidates[order[at]].free.0);
    // The lower a GPU's index in the list, the higher its bit.
    let places = SetSums::new(order.len(), |at| 1_u64 << (MOST - 1 - order[at]));
    let mut best: Vec<GpuBits> = Vec::new();
    let mut most = 0;
    let mut most_of_all = 0;
    search.each_set(all, search.count, &mut |set, worth| {
        most_of_all = most_of_all.max(worth);
        if set & must != must || worth < most {
            return;
        }
        if worth > most {
            best.clear();
            most = worth;
        }
        best.push(set);
    });
    search.consider_leftovers(all, most_of_all);
    let ordered = best
        .into_iter()
        .map(|set| Reverse((left.of(set), Reverse(places.of(set)), set)));
    let mut ordered: BinaryHeap<_> = ordered.collect();
    // Take the first set that leaves the most. A set that leaves no more than the current one need not be examined; after a set
    // that leaves the possible maximum, none need be.
    let highest = i64::from(search.bound_by_size(all.count_ones() - search.count));
    let (mut chosen, mut leaves) = (0, -1);
    while let Some(Reverse((.., set))) = ordered.pop() {
        let rest = all & !set;
        if i64::from(search.bound(rest)) > leaves {
            let value = search.divide(rest, leaves);
            if value > leaves {
                (chosen, leaves) = (set, value);
            }
        }
        if leaves == highest || search.looks > LOOKS {
            break;
        }
    }
    let mut chosen: Vec<usize> = (0..order.len())
        .filter(|at| chosen >> at & 1 == 1)
        .map(|at| order[at])
        .collect();
    chosen.sort_unstable();
    chosen
}

/// Return indices into the list, ordered so that GPUs that are connected to all others in the same way follow each other.
fn alike_side_by_side(topology: &Topology, candidates: &[GpuCandidate]) -> Vec<usize> {
    let pair = |a: usize, b: usize| topology.pair(candidates[a].position, candidates[b].position);
    let alike = |a: usize, b: usize| (0..candidates.len()).all(|c| c == a || c == b || pair(a, c) == pair(b, c));
    let mut order: Vec<usize> = Vec::new();
    for at in 0..candidates.len() {
        if !order.contains(&at) {
            order.push(at);
            order.extend((at + 1..candidates.len()).filter(|other| alike(at, *other)));
        }
    }
    order
}

fn bits(flags: impl Iterator<Item = bool>) -> GpuBits {
    flags.enumerate().fold(0, |set, (at, flag)| set | GpuBits::from(flag) << at)
}

impl<T: Copy + Default + std::ops::Add<Output = T>> SetSums<T> {
    fn new(gpus: usize, of: impl Fn(usize) -> T) -> SetSums<T> {
        let mut halves = [[T::default(); 256]; 2];
        for (half, sums) in halves.iter_mut().enumerate() {
            let first = 8 * half;
            for set in 1..1_usize << gpus.saturating_sub(first).min(8) {
                sums[set] = sums[set & (set - 1)] + of(first + set.trailing_zeros() as usize);
            }
        }
        SetSums(halves)
    }

    fn of(&self, set: GpuBits) -> T {
        self.0[0][set as usize & 255] + self.0[1][set as usize >> 8 & 255]
    }
}

impl ExactSearch {
    fn new(topology: &Topology, candidates: &[GpuCandidate], order: &[usize], count: usize) -> ExactSearch {
        let gpus = order.len();
        let pair = |a: usize, b: usize| topology.pair(candidates[order[a]].position, candidates[order[b]].position);
        // A GPU is worth nothing to itself.
        let worth: Vec<_> = (0..gpus)
            .map(|a| SetSums::new(gpus, |b| if a == b { 0 } else { pair(a, b) }))
            .collect();
        let partners = (0..gpus).map(|a| {
            let mut pairs: Vec<u32> = (0..gpus).filter(|b| *b != a).map(|b| pair(a, b)).collect();
            pairs.sort_unstable_by(|a, b| b.cmp(a));
            pairs.into_iter().take(count - 1).sum()
        });
        let partners: Vec<u32> = partners.collect();
        let alike = |a: usize, b: usize| (0..gpus).all(|c| c == a || c == b || pair(a, c) == pair(b, c));
        ExactSearch {
            count: u32::try_from(count).unwrap_or(u32::MAX),
            worth,
            partners: SetSums::new(gpus, |at| partners[at]),
            most: 0,
            most_over: 0,
            alike: (0..gpus).map(|a| bits((0..gpus).map(|b| a == b || alike(a, b)))).collect(),
            divided: BTreeMap::new(),
            looks: 0,
        }
    }

    /// Set the upper bounds for the worth of the sets into which the remaining GPUs can be divided.
    fn consider_leftovers(&mut self, all: GpuBits, most: u32) {
        self.most = most;
        let over = (all.count_ones() - self.count) % self.count;
        let mut most_over = 0;
        self.each_kind(all, over, &mut |_, worth| most_over = most_over.max(worth));
        self.most_over = most_over;
    }

    /// Call `each` for all sets of `count` of these GPUs, with what they are worth.
    fn each_set(&self, of: GpuBits, count: u32, each: &mut impl FnMut(GpuBits, u32)) {
        self.more((0, 0), of, count, false, each);
    }

    /// Call `each` as [`ExactSearch::each_set`] does, but only once for sets that are alike.
    fn each_kind(&self, of: GpuBits, count: u32, each: &mut impl FnMut(GpuBits, u32)) {
        self.more((0, 0), of, count, true, each);
    }

    fn more(
        &self,
        (set, worth): (GpuBits, u32),
        mut of: GpuBits,
        missing: u32,
        kinds: bool,
        each: &mut impl FnMut(GpuBits, u32),
    ) {
        if missing == 0 {
            return each(set, worth);
        }
        while of.count_ones() >= missing {
            let at = of.trailing_zeros();
            let next = 1 << at;
            of &= !next;
            let with = (set | next, worth + self.worth[at as usize].of(set));
            self.more(with, of, missing - 1, kinds, each);
            if kinds {
                of &= !self.alike[at as usize];
            }
        }
    }

    /// Return an upper bound for what `size` GPUs are worth when they are divided.
    fn bound_by_size(&self, size: u32) -> u32 {
        let over = if size.is_multiple_of(self.count) { 0 } else { self.most_over };
        size / self.count * self.most + over
    }

    /// Return the tighter of two upper bounds: [`ExactSearch::bound_by_size`], and the best partners that each GPU of the set could
    /// have.
    fn bound(&self, set: GpuBits) -> u32 {
        self.bound_by_size(set.count_ones()).min(self.partners.of(set) / 2)
    }

    /// Return the first of all sets that are like this one.
    fn kind_of(&self, set: GpuBits) -> GpuBits {
        let mut kind = 0;
        let mut at = 0;
        while let Some(alike) = self.alike.get(at) {
            let first = (1 << (set & alike).count_ones()) - 1;
            kind |= first << at;
            at += alike.count_ones() as usize;
        }
        kind
    }

    fn worth_of(&self, set: GpuBits) -> u32 {
        let gpus = (0..self.worth.len()).filter(|at| set >> at & 1 == 1);
        gpus.map(|at| self.worth[at].of(set)).sum::<u32>() / 2
    }

    /// Return what a set is worth when it is divided in the best way into sets of `count` GPUs and a smaller one for the rest, if
    /// that is more than `beat`; otherwise any value that is not more than `beat`. After [`LOOKS`] examined parts, return the
    /// value of the greedy division.
    fn divide(&mut self, set: GpuBits, beat: i64) -> i64 {
        let size = set.count_ones();
        if size <= self.count {
            return i64::from(self.worth_of(set));
        }
        let set = self.kind_of(set);
        let at_most = match self.divided.get(&set) {
            Some(KnownWorth::Is(value)) => return i64::from(*value),
            Some(KnownWorth::AtMost(value)) => i64::from(*value),
            None => i64::from(self.bound(set)),
        };
        if at_most <= beat {
            return at_most;
        }
        // The lowest GPU is in some part: one of full size, or the smaller one.
        let at = set.trailing_zeros();
        let rest = set & !(1 << at);
        let mut parts: Vec<(u32, GpuBits)> = Vec::new();
        for part in [self.count, size % self.count] {
            if part > 0 {
                self.more((1 << at, 0), rest, part - 1, true, &mut |part, worth| {
                    parts.push((worth, part))
                });
            }
        }
        parts.sort_unstable_by_key(|(worth, part)| (Reverse(*worth), *part));
        self.looks = self.looks.saturating_add(u32::try_from(parts.len()).unwrap_or(u32::MAX));
        if self.looks > LOOKS {
            let (worth, part) = parts[0];
            return i64::from(worth) + self.divide(set & !part, -1);
        }
        let mut best = beat;
        for (worth, part) in parts {
            let (others, worth) = (set & !part, i64::from(worth));
            if best < at_most && worth + i64::from(self.bound(others)) > best {
                best = best.max(worth + self.divide(others, best - worth));
            }
        }
        if self.looks <= LOOKS {
            let value = u32::try_from(best.max(0)).unwrap_or(u32::MAX);
            let known = if best > beat {
                KnownWorth::Is(value)
            } else {
                KnownWorth::AtMost(value)
            };
            self.divided.insert(set, known);
        }
        best
    }
}
