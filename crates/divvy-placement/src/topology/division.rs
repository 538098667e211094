//! The choice that NVIDIA's device plugin makes: divide all GPUs into sets of the requested size so that the sets together are worth the most,
//! and take the best set of this division (github.com/NVIDIA/go-gpuallocator, besteffort_policy.go). What is left then serves the next
//! request as well as possible.
//!
//! NVIDIA's search goes through all divisions, which takes seconds for 16 GPUs. But the best division of the remaining GPUs
//! depends only on which GPUs remain. So here each set of remaining GPUs is examined once, and only if it can still belong to the
//! best division. The search is bounded, because machines without any regularity remain hard. Sets of GPUs are the bits of an
//! integer.

use super::Topology;

/// The maximum number of GPUs.
pub(super) const MOST: usize = 16;

type DivisionSet = u32;

/// The number of examined sets after which the search no longer compares alternatives: it takes the first possible set. Real
/// machines need far fewer, and with up to eight GPUs, the limit is never reached.
const LOOKS: u32 = 30_000;

/// A set of remaining GPUs that has not been examined.
const UNKNOWN: u32 = u32::MAX;
/// The remaining GPUs cannot be divided so that one set has all GPUs that must be chosen.
const IMPOSSIBLE: u32 = u32::MAX - 1;

/// Choose `count` of the GPUs at these positions, which are in ascending order, with all of `must`. Return `None` if that is
/// impossible. There must be at most [`MOST`] GPUs.
pub(super) fn choose(topology: &Topology, positions: &[usize], must: &[usize], count: usize) -> Option<Vec<usize>> {
    let index = |position: &usize| positions.binary_search(position).ok();
    let must: DivisionSet = must.iter().try_fold(0, |set, position| Some(set | (1 << index(position)?)))?;
    let all: DivisionSet = (1_u32 << positions.len()) - 1;
    if count == 0 || count > positions.len() || must.count_ones() as usize > count {
        return None;
    }
    let mut search = DivisionSearch::new(topology, positions, must, u32::try_from(count).ok()?);
    let best = search.best_set(all);
    let chosen = positions.iter().enumerate().filter(|(at, _)| best >> at & 1 == 1);
    Some(chosen.map(|(_, position)| *position).collect())
}

struct DivisionSearch {
    count: u32,
    must: DivisionSet,
    /// For each GPU, the worth of its pairs with the lower eight and with the upper eight GPUs of a set.
    rows: Vec<[[u32; 256]; 2]>,
    /// What each set of remaining GPUs is worth when it is divided in the best way.
    free: Vec<u32>,
    /// The same for divisions in which one set must have all of `must`.
    bound: Vec<u32>,
    /// The most that a set of the requested size is worth, and the most that the smaller set is worth if the GPUs do not divide
    /// evenly.
    most: u32,
    most_of_smaller: u32,
    /// The number of sets examined so far.
    looks: u32,
}

/// One set of a division and what the whole division is worth.
#[derive(Clone, Copy)]
struct FirstSet {
    set: DivisionSet,
    worth: u32,
    total: u32,
}

impl DivisionSearch {
    fn new(topology: &Topology, positions: &[usize], must: DivisionSet, count: u32) -> DivisionSearch {
        let row = |a: &usize| {
            let half = |half: usize| {
                let mut sums = [0; 256];
                for bits in 1..256_usize {
                    let at = half * 8 + bits.trailing_zeros() as usize;
                    let pair = positions.get(at).map_or(0, |b| topology.pair(*a, *b));
                    sums[bits] = sums[bits & (bits - 1)] + pair;
                }
                sums
            };
            [half(0), half(1)]
        };
        let sets = 1_usize << positions.len();
        let mut search = DivisionSearch {
            count,
            must,
            rows: positions.iter().map(row).collect(),
            free: vec![UNKNOWN; sets],
            bound: if must == 0 { Vec::new() } else { vec![UNKNOWN; sets] },
            most: 0,
            most_of_smaller: 0,
            looks: 0,
        };
        let all = (sets - 1) as DivisionSet;
        search.most = search.most_worth(all, count);
        search.most_of_smaller = search.most_worth(all, all.count_ones() % count);
        search
    }

    /// Return the most that any set with this many of the GPUs is worth.
    fn most_worth(&self, all: DivisionSet, count: u32) -> u32 {
        let mut most = 0;
        let keep = &mut |_: DivisionSet, worth: u32| {
            most = most.max(worth);
        };
        self.extend(0, 0, all, count, keep);
        most
    }

    /// Return an upper bound for what these GPUs are worth when they are divided.
    fn most_divided(&self, rest: DivisionSet) -> u32 {
        let (sets, smaller) = (rest.count_ones() / self.count, rest.count_ones() % self.count);
        sets * self.most + if smaller == 0 { 0 } else { self.most_of_smaller }
    }

    /// Return the best set of the best division. On a tie between divisions or between sets, the first in the order of the GPUs
    /// counts.
    fn best_set(&mut self, all: DivisionSet) -> DivisionSet {
        let mut rest = all;
        let mut best: Option<FirstSet> = None;
        let mut is_bound = self.must != 0;
        while rest != 0 {
            let first = self.first_set(rest, is_bound);
            let has_must = first.set & self.must == self.must;
            if first.set.count_ones() == self.count && has_must && best.is_none_or(|best| first.worth > best.worth) {
                best = Some(first);
            }
            is_bound &= !has_must;
            rest &= !first.set;
        }
        best.map_or(0, |best| best.set)
    }

    /// Return the set that has the lowest remaining GPU in the best division.
    fn first_set(&mut self, rest: DivisionSet, is_bound: bool) -> FirstSet {
        let mut best = FirstSet {
            set: 0,
            worth: 0,
            total: 0,
        };
        for (set, worth) in self.sets_with_lowest(rest) {
            let most = worth + self.most_divided(rest & !set);
            let is_better = |total: u32| best.set == 0 || total > best.total || (total == best.total && is_before(set, best.set));
            if !is_better(most) || (best.set != 0 && self.looks > LOOKS) {
                continue;
            }
            if let Some(left) = self.left(rest, set, is_bound)
                && is_better(worth + left)
            {
                best = FirstSet {
                    set,
                    worth,
                    total: worth + left,
                };
            }
        }
        best
    }

    /// Return what the remaining GPUs are worth when they are divided in the best way.
    fn divided(&mut self, rest: DivisionSet, is_bound: bool) -> u32 {
        if rest == 0 {
            return if is_bound { IMPOSSIBLE } else { 0 };
        }
        let memory = if is_bound { &self.bound } else { &self.free };
        let known = memory[rest as usize];
        if known != UNKNOWN {
            return known;
        }
        let mut most = None;
        let possible = self.most_divided(rest);
        for (set, worth) in self.sets_with_lowest(rest) {
            if most.is_some_and(|most| worth + self.most_divided(rest & !set) <= most) {
                continue;
            }
            if let Some(left) = self.left(rest, set, is_bound) {
                most = most.max(Some(worth + left));
            }
            if most == Some(possible) || (most.is_some() && self.looks > LOOKS) {
                break;
            }
        }
        let most = most.unwrap_or(IMPOSSIBLE);
        let memory = if is_bound { &mut self.bound } else { &mut self.free };
        memory[rest as usize] = most;
        most
    }

    /// Return what the other remaining GPUs are worth if this set is taken out. Return `None` if no set can then have all of
    /// `must`.
    fn left(&mut self, rest: DivisionSet, set: DivisionSet, is_bound: bool) -> Option<u32> {
        let mut is_bound = is_bound;
        if is_bound && set & self.must != 0 {
            if set & self.must != self.must || set.count_ones() != self.count {
                return None;
            }
            is_bound = false;
        }
        Some(self.divided(rest & !set, is_bound)).filter(|left| *left != IMPOSSIBLE)
    }

    /// Return the sets that have the lowest of the remaining GPUs, with their worth: first the sets of the requested size in the
    /// order of the GPUs, then the smaller sets if the GPUs do not divide evenly.
    fn sets_with_lowest(&mut self, rest: DivisionSet) -> Vec<(DivisionSet, u32)> {
        let lowest = rest & rest.wrapping_neg();
        let others = rest & !lowest;
        let mut sets = Vec::new();
        let keep = &mut |set: DivisionSet, worth: u32| {
            sets.push((set, worth));
        };
        if rest.count_ones() >= self.count {
            self.extend(lowest, 0, others, self.count - 1, keep);
        }
        if let Some(missing) = (rest.count_ones() % self.count).checked_sub(1) {
            self.extend(lowest, 0, others, missing, keep);
        }
        self.looks += u32::try_from(sets.len()).unwrap_or(LOOKS);
        sets
    }

    /// Visit the sets that consist of `set` and of `missing` GPUs of `others`.
    fn extend(&self, set: DivisionSet, worth: u32, others: DivisionSet, missing: u32, visit: &mut impl FnMut(DivisionSet, u32)) {
        if missing == 0 {
            visit(set, worth);
            return;
        }
        let mut others = others;
        while others.count_ones() >= missing {
            let next = others & others.wrapping_neg();
            others &= !next;
            let [low, high] = &self.rows[next.trailing_zeros() as usize];
            let gain = low[(set & 0xff) as usize] + high[(set >> 8 & 0xff) as usize];
            self.extend(set | next, worth + gain, others, missing - 1, visit);
        }
    }
}

/// Report whether a set comes before another one: by their GPUs in ascending order. A GPU that a smaller set lacks counts as the last.
fn is_before(a: DivisionSet, b: DivisionSet) -> bool {
    let differ = a ^ b;
    a & differ & differ.wrapping_neg() != 0
}

#[cfg(test)]
mod tests {
    use divvy_model::{GpuLink, LinkKind};
    use proptest::prelude::*;

    use super::*;

    fn topology(gpus: usize, links: &[u32]) -> Topology {
        let names: Vec<String> = (0..gpus).map(|gpu| gpu.to_string()).collect();
        let of = |a: usize| -> Vec<GpuLink> {
            let linked = (0..a).map(|b| (b, links[a * gpus + b])).filter(|(_, count)| *count > 0);
            let link = |(b, count): (usize, u32)| GpuLink {
                peer: b.to_string(),
                kind: LinkKind::NvLink,
                count,
            };
            linked.map(link).collect()
        };
        let links: Vec<Vec<GpuLink>> = (0..gpus).map(of).collect();
        let gpus: Vec<(&str, &[GpuLink])> = names
            .iter()
            .zip(&links)
            .map(|(name, links)| (name.as_str(), links.as_slice()))
            .collect();
        Topology::new(&gpus)
    }

    /// Go through all divisions in NVIDIA's order. `rest` is padded with `None` to a multiple of `count`.
    fn each_division(
        rest: &[Option<usize>],
        count: usize,
        done: &mut Vec<Vec<Option<usize>>>,
        visit: &mut impl FnMut(&[Vec<Option<usize>>]),
    ) {
        if rest.is_empty() {
            visit(done);
            return;
        }
        let padding = rest.iter().filter(|gpu| gpu.is_none()).count();
        for set in combinations(&(1..rest.len()).collect::<Vec<_>>(), count - 1) {
            let chosen: Vec<usize> = std::iter::once(0).chain(set).collect();
            let gpus: Vec<Option<usize>> = chosen.iter().map(|at| rest[*at]).collect();
            let nulls = gpus.iter().filter(|gpu| gpu.is_none()).count();
            if nulls != 0 && nulls != padding {
                continue;
            }
            let left: Vec<Option<usize>> = (0..rest.len()).filter(|at| !chosen.contains(at)).map(|at| rest[at]).collect();
            done.push(gpus);
            each_division(&left, count, done, visit);
            done.pop();
        }
    }

    fn combinations(of: &[usize], count: usize) -> Vec<Vec<usize>> {
        if count == 0 {
            return vec![Vec::new()];
        }
        let with_first = |at: usize| {
            let rest = combinations(&of[at + 1..], count - 1);
            rest.into_iter()
                .map(move |rest| std::iter::once(of[at]).chain(rest).collect())
        };
        (0..of.len()).flat_map(with_first).collect()
    }

    fn by_trying_all(topology: &Topology, gpus: usize, must: &[usize], count: usize) -> Option<Vec<usize>> {
        let mut padded: Vec<Option<usize>> = (0..gpus).map(Some).collect();
        while !padded.len().is_multiple_of(count) {
            padded.push(None);
        }
        let known = |set: &[Option<usize>]| -> Vec<usize> { set.iter().flatten().copied().collect() };
        let fits = |set: &[Option<usize>]| known(set).len() == count && must.iter().all(|gpu| set.contains(&Some(*gpu)));
        let mut best: Option<(u32, Vec<Vec<Option<usize>>>)> = None;
        each_division(&padded, count, &mut Vec::new(), &mut |division| {
            let total = division.iter().map(|set| topology.worth(&known(set))).sum();
            if division.iter().any(|set| fits(set)) && best.as_ref().is_none_or(|(most, _)| total > *most) {
                best = Some((total, division.to_vec()));
            }
        });
        let sets = best?.1.into_iter().filter(|set| fits(set)).map(|set| known(&set));
        sets.rev().max_by_key(|set| topology.worth(set))
    }

    proptest! {
            #![proptest_config(ProptestConfig::with_cases(64))]

            #[test]
            fn the_choice_is_the_first_of_the_best_among_all_divisions(
                gpus in 1..8usize,
                links in proptest::collection::vec(0..4u32, 64),
                must in proptest::collection::btree_set(0..8usize, 0..3),
                count in 1..8usize,
            ) {
                let topology = topology(gpus, &links);
                let positions: Vec<usize> = (0..gpus).collect();
                let must: Vec<usize> = must.into_iter().filter(|gpu| *gpu < gpus).collect();
                let chosen = choose(&topology, &positions, &must, count);
                if count <= gpus && must.len() <= count {
    prop_assert_eq!(chosen, by_trying_all(&topology, gpus, &must, count))
    } else {
    prop_assert_eq!(chosen, None)
    }
            }

            #[test]
            fn sixteen_gpus_of_any_kind_give_as_many_as_requested(
                links in proptest::collection::vec(0..6u32, 256),
                must in proptest::collection::btree_set(0..16usize, 0..4),
                count in 4..17usize,
            ) {
                let topology = topology(16, &links);
                let positions: Vec<usize> = (0..16).collect();
                let must: Vec<usize> = must.into_iter().collect();
                let chosen = choose(&topology, &positions, &must, count).expect("a choice");
                prop_assert_eq!(chosen.len(), count);
                prop_assert!(must.iter().all(|gpu| chosen.contains(gpu)));
            }
        }
}
