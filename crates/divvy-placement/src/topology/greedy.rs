//! The search for more GPUs than can be searched exactly: from several starts, add the next best GPU each time, then exchange
//! GPUs one by one.

use std::cmp::Reverse;

use super::{GpuCandidate, Topology};

/// The number of starts. Each start is one of the best-connected GPUs.
const STARTS: usize = 16;
/// The maximum number of exchanges from one start. Each exchange improves the set, so the search also ends without this limit.
const EXCHANGES: usize = 64;

/// The price of a set, where less is better: its worth (reversed), how strongly it is connected to the other GPUs, the free
/// memory of its GPUs, and their indices.
type Price = (Reverse<u64>, u64, u64, Vec<usize>);

/// Choose a good set. Return indices into the list of candidates, which is sorted by position, in ascending order. There must be
/// at least `count` candidates.
pub(super) fn choose(topology: &Topology, candidates: &[GpuCandidate], count: usize) -> Vec<usize> {
    let pair = |a: usize, b: usize| u64::from(topology.pair(candidates[a].position, candidates[b].position));
    let ties: Vec<u64> = (0..candidates.len())
        .map(|a| (0..candidates.len()).filter(|b| *b != a).map(|b| pair(a, b)).sum())
        .collect();
    let must: Vec<usize> = (0..candidates.len()).filter(|at| candidates[*at].must).collect();
    let mut others: Vec<usize> = (0..candidates.len()).filter(|at| !must.contains(at)).collect();
    others.sort_unstable_by_key(|at| (Reverse(ties[*at]), candidates[*at].free, *at));
    let mut starts: Vec<Vec<usize>> = others
        .into_iter()
        .take(STARTS)
        .map(|at| [must.as_slice(), &[at]].concat())
        .collect();
    if !must.is_empty() {
        starts.push(must.clone());
    }
    if must.len() == count {
        return must;
    }
    let price = |chosen: &[usize]| -> Price {
        let mut chosen = chosen.to_vec();
        chosen.sort_unstable();
        let twice: u64 = chosen
            .iter()
            .flat_map(|a| chosen.iter().filter(move |b| *b != a).map(|b| pair(*a, *b)))
            .sum();
        let all: u64 = chosen.iter().map(|at| ties[*at]).sum();
        let free = chosen
            .iter()
            .fold(0_u64, |sum, at| sum.saturating_add(candidates[*at].free.0));
        (Reverse(twice / 2), all - twice, free, chosen)
    };
    let grown = starts.into_iter().map(|mut chosen| {
        // What each GPU is worth to the chosen ones.
        let mut worth: Vec<u64> = (0..candidates.len())
            .map(|at| chosen.iter().map(|other| pair(at, *other)).sum())
            .collect();
        let mut is_chosen = vec![false; candidates.len()];
        chosen.iter().for_each(|at| is_chosen[*at] = true);
        while chosen.len() < count {
            let others = (0..candidates.len()).filter(|at| !is_chosen[*at]);
            let Some(next) = others.min_by_key(|at| (Reverse(worth[*at]), ties[*at], candidates[*at].free, *at)) else {
                break;
            };
            chosen.push(next);
            is_chosen[next] = true;
            worth.iter_mut().enumerate().for_each(|(at, worth)| *worth += pair(at, next));
        }
        for _ in 0..EXCHANGES {
            // Make the exchange that gains the most.
            let gain = |out: usize, other: usize| (worth[other] - pair(other, out)).checked_sub(worth[out]);
            let outs = chosen.iter().enumerate().filter(|(_, out)| !candidates[**out].must);
            let others: Vec<usize> = (0..candidates.len()).filter(|other| !is_chosen[*other]).collect();
            let exchanges = outs.flat_map(|(place, out)| {
                let others = others.iter().copied();
                others.filter_map(move |other| Some((gain(*out, other).filter(|gain| *gain > 0)?, place, other)))
            });
            let Some((_, place, other)) = exchanges.max_by_key(|(gain, place, other)| (*gain, Reverse(*place), Reverse(*other)))
            else {
                break;
            };
            let out = std::mem::replace(&mut chosen[place], other);
            (is_chosen[out], is_chosen[other]) = (false, true);
            worth
                .iter_mut()
                .enumerate()
                .for_each(|(at, worth)| *worth = *worth + pair(at, other) - pair(at, out));
        }
        price(&chosen)
    });
    grown.min().map(|(.., chosen)| chosen).unwrap_or_default()
}
