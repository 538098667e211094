//! The fewest pods that must go so that GPUs of a node have room for another pod.

use std::collections::BTreeSet;

use divvy_model::{Health, MemoryUnit, MiB, Pod, WholeKind};

use crate::amount::Amount;
use crate::ask::Ask;
use crate::node::NodeState;
use crate::node_account::NodeAccount;
use crate::parts;
use crate::taste::Taste;

/// The pods that must go so that a GPU, or several GPUs of a node, have room for another pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Victims<'a> {
    /// The NVML indices of the GPUs, ascending.
    pub indices: Vec<u32>,
    /// The positions of the GPUs in [`crate::NodeState::gpus`].
    pub(crate) positions: Vec<usize>,
    /// The pods that must go; empty if there is room already.
    pub pods: Vec<&'a Pod>,
}

/// The price of victims: the highest priority among them, their number, and the memory that they hold on the GPU. Lower is
/// better.
type VictimPrice = (Option<i64>, usize, MiB);

/// Returns what is free of the GPU at a position, as if the given allocated amount were free as well.
type FreeAt<'f> = &'f dyn Fn(usize, Amount) -> Amount;

/// Return the positions of the GPUs on which a pod will have room when its victims have ended. The likeliest victims are
/// tried first: pods that are being deleted, then deleted pods whose containers still run, then pods of lower priority.
/// `here` holds the node's pods.
pub(crate) fn room_to_come(entry: &NodeAccount, here: &[PodOnNode<'_>], pod: &Pod, ask: &Ask) -> Option<Vec<usize>> {
    let go = here
        .iter()
        .filter(|other| other.pod.deleting || other.pod.priority < pod.priority);
    let go: Vec<&PodOnNode<'_>> = go.collect();
    let leave: Vec<&PodOnNode<'_>> = go.iter().filter(|other| other.pod.deleting).copied().collect();
    let in_time = |position, own| entry.beside_in_time(position, own);
    let victims = fewest(entry, ask, &leave);
    let victims = victims.or_else(|| fewest_where(entry, ask, &in_time, entry.needed(ask), Vec::new(), &leave));
    let victims = victims.or_else(|| fewest_where(entry, ask, &in_time, entry.needed(ask), Vec::new(), &go));
    victims.map(|victims| victims.positions)
}

/// Return the pods of a node, each with what it holds on each GPU.
pub(crate) fn there<'a>(
    pods: impl IntoIterator<Item = &'a Pod>,
    state: Option<&NodeState>,
    unit: MemoryUnit,
) -> Vec<PodOnNode<'a>> {
    let there = |pod: &'a Pod| {
        let mut shares: Vec<(usize, Amount)> = Vec::new();
        let parts = state.map(|state| parts::of_pod(pod, state, unit)).unwrap_or_default();
        let unnamed = state.and_then(|state| parts::unnamed(pod, state, &parts));
        for part in parts {
            let Some(position) = part.position.filter(|_| part.memory > MiB::ZERO) else {
                continue;
            };
            match shares.iter_mut().find(|(at, _)| *at == position) {
                Some((_, held)) => *held = held.plus(part.amount()),
                None => shares.push((position, part.amount())),
            }
        }
        PodOnNode { pod, shares, unnamed }
    };
    pods.into_iter().map(there).collect()
}

/// Choose the GPU with the cheapest victims among the candidates. If several GPUs are requested, choose one after another,
/// because a victim on one GPU may also free memory on others.
pub(crate) fn fewest<'a>(entry: &NodeAccount, ask: &Ask, candidates: &[&PodOnNode<'a>]) -> Option<Victims<'a>> {
    let free = |position, own| entry.beside(position, own);
    let held = ask.whole.map_or_else(Vec::new, |kind| entry.located_whole(kind).collect());
    fewest_where(entry, ask, &free, entry.needed_now(ask), held, candidates)
}

/// Choose as [`fewest`] does, with a function that returns what is free. `free` must not subtract what is kept for nominated
/// pods.
///
/// `needed` GPUs must have room: those for the pod, and those that pods without an allocation may have. The GPUs at the
/// positions `held` belong to such pods as well; `free` shows no room on them.
fn fewest_where<'a>(
    entry: &NodeAccount,
    ask: &Ask,
    free: FreeAt<'_>,
    mut needed: usize,
    mut held: Vec<usize>,
    candidates: &[&PodOnNode<'a>],
) -> Option<Victims<'a>> {
    let state = entry.state.as_ref().filter(|state| state.unusable(ask.whole).is_none())?;
    if ask.is_too_wide_for(state) {
        return None;
    }
    ask.memory?;
    let taste = Taste::of(ask);
    // What is kept does not depend on which pods leave.
    let kept: Vec<Amount> = (0..state.gpus.len()).map(|position| entry.kept_from(position, ask)).collect();
    // The GPUs of `held` that are free because their pods go.
    let mut left: BTreeSet<usize> = BTreeSet::new();
    let free = |position: usize, own: Amount, left: &BTreeSet<usize>| {
        let free = if left.contains(&position) {
            entry.beside_in_time(position, own)
        } else {
            free(position, own)
        };
        free.minus(kept[position])
    };
    let mut open: Vec<usize> = (0..state.gpus.len())
        .filter(|position| state.gpus[*position].health == Health::Ok && taste.takes(&state.gpus[*position]))
        .collect();
    let mut positions = Vec::new();
    // The victims so far, by their indices among the candidates, and what they free on each GPU.
    let mut gone: Vec<usize> = Vec::new();
    let mut freed = vec![Amount::NONE; state.gpus.len()];
    let mut candidates_on: Vec<Vec<(usize, Amount)>> = vec![Vec::new(); state.gpus.len()];
    for (at, candidate) in candidates.iter().enumerate() {
        for (position, held) in &candidate.shares {
            candidates_on[*position].push((at, *held));
        }
    }
    while positions.len() < needed {
        let priced = open.iter().filter_map(|position| {
            let on = candidates_on[*position].iter().filter(|(at, _)| !gone.contains(at));
            let here = on.map(|(at, held)| (dearness(candidates[*at].pod), *held, *at)).collect();
            let needs = ask.amount_on(&state.gpus[*position])?;
            let room = |own: Amount| free(*position, own.plus(freed[*position]), &left).covers(needs);
            let (price, more) = fewest_on_one(&room, here, candidates)?;
            Some((price, state.gpus[*position].index, *position, more))
        });
        let cheapest = priced.min_by_key(|(price, index, ..)| (*price, *index));
        let unnamed = candidates
            .iter()
            .enumerate()
            .filter(|(at, candidate)| candidate.unnamed(ask.whole) > 0 && !gone.contains(at));
        let unnamed = unnamed.map(|(at, candidate)| ((Some(dearness(candidate.pod)), 1, MiB::ZERO), at));
        let unnamed = unnamed.min_by_key(|(price, at)| (*price, candidates[*at].pod.uid.as_str()));
        if let Some((price, at)) = unnamed
            && cheapest.as_ref().is_none_or(|(other, ..)| price < *other)
        {
            // It does not matter which of these pods has which GPU: as many become free.
            let unnamed = candidates[at].unnamed(ask.whole);
            let located = unnamed.min(held.len());
            left.extend(held.drain(held.len() - located..));
            needed = needed.saturating_sub(unnamed - located).max(ask.gpus);
            gone.push(at);
            for (position, held) in &candidates[at].shares {
                freed[*position] = freed[*position].plus(*held);
            }
            continue;
        }
        let (_, _, position, more) = cheapest?;
        open.retain(|other| *other != position);
        positions.push(position);
        for at in more {
            for (position, held) in &candidates[at].shares {
                freed[*position] = freed[*position].plus(*held);
            }
            gone.push(at);
        }
    }
    if needed > 1 {
        let needs = |position: usize| state.gpus.get(position).and_then(|gpu| ask.amount_on(gpu));
        let free = |position, own| free(position, own, &left);
        spare(&free, &needs, &positions, candidates, &mut gone);
        // The ones beyond what the pod requests stay free for the pods without an allocation.
        positions.truncate(ask.gpus);
    }
    let mut indices: Vec<u32> = positions.iter().map(|position| state.gpus[*position].index).collect();
    indices.sort_unstable();
    Some(Victims {
        indices,
        positions,
        pods: gone.into_iter().map(|at| candidates[at].pod).collect(),
    })
}

/// A pod of a node, and what it holds there.
#[derive(Debug)]
pub(crate) struct PodOnNode<'a> {
    pub(crate) pod: &'a Pod,
    /// What it holds by position in [`crate::NodeState::gpus`]. Each position occurs once, with more than 0 MiB.
    shares: Vec<(usize, Amount)>,
    /// The number of whole GPUs that the pod holds without an allocation, and their kind.
    unnamed: Option<(WholeKind, u64)>,
}

impl PodOnNode<'_> {
    fn held_at(&self, position: usize) -> Amount {
        let here = self.shares.iter().find(|(at, _)| *at == position);
        here.map_or(Amount::NONE, |(_, held)| *held)
    }

    /// Report whether the pod holds a GPU or a part of one.
    pub(crate) fn holds_here(&self) -> bool {
        !self.shares.is_empty() || self.unnamed.is_some()
    }

    /// Return how many whole GPUs of the kind become free when the pod goes, in addition to the GPUs in `shares`.
    fn unnamed(&self, kind: Option<WholeKind>) -> usize {
        let of_kind = self.unnamed.filter(|(of, _)| Some(*of) == kind);
        of_kind.map_or(0, |(_, gpus)| usize::try_from(gpus).unwrap_or(usize::MAX))
    }
}

/// Remove victims that are not needed any longer because other victims go. The most expensive victims are tried first.
fn spare(
    free: FreeAt<'_>,
    needs: &dyn Fn(usize) -> Option<Amount>,
    positions: &[usize],
    candidates: &[&PodOnNode<'_>],
    gone: &mut Vec<usize>,
) {
    let held = |position: usize, gone: &[usize]| {
        let held = gone.iter().map(|at| candidates[*at].held_at(position));
        held.fold(Amount::NONE, Amount::plus)
    };
    let mut order = gone.clone();
    order.sort_by_key(|at| {
        (
            std::cmp::Reverse(dearness(candidates[*at].pod)),
            candidates[*at].pod.uid.as_str(),
        )
    });
    // A victim whose GPUs are not known makes fewer GPUs necessary, wherever they are.
    for at in order.into_iter().filter(|at| candidates[*at].unnamed.is_none()) {
        let others: Vec<usize> = gone.iter().filter(|other| **other != at).copied().collect();
        // On the other GPUs, this victim changes nothing.
        let mut here = positions
            .iter()
            .filter(|position| candidates[at].held_at(**position) != Amount::NONE);
        let has_room = |position| needs(position).is_some_and(|needs| free(position, held(position, &others)).covers(needs));
        if here.all(|position| has_room(*position)) {
            *gone = others;
        }
    }
}

/// Return the pods that must leave a GPU. `here` holds the candidates with memory on this GPU. `room` reports whether the GPU
/// has room when the given amount is freed.
fn fewest_on_one(
    room: &dyn Fn(Amount) -> bool,
    mut here: Vec<(i64, Amount, usize)>,
    candidates: &[&PodOnNode<'_>],
) -> Option<(VictimPrice, Vec<usize>)> {
    if room(Amount::NONE) {
        return Some(((None, 0, MiB::ZERO), Vec::new()));
    }
    let uid = |at: usize| candidates[at].pod.uid.as_str();
    here.sort_by_key(|(dearness, _, at)| (*dearness, uid(*at)));
    // Find the lowest priority that is enough, so that no victim is more expensive than necessary.
    let mut sum = Amount::NONE;
    let last = here.iter().find(|(_, held, _)| {
        sum = sum.plus(*held);
        room(sum)
    });
    let most = last?.0;
    here.retain(|(dearness, ..)| *dearness <= most);
    // Taking the largest first needs the fewest victims. For the last one, the smallest that is enough is taken. If memory alone is not
    // enough, the largest share of the compute time counts first.
    let all_memory = here
        .iter()
        .fold(MiB::ZERO, |sum, (_, held, _)| sum.saturating_add(held.memory));
    let lacks_cores = !room(Amount {
        memory: all_memory,
        cores: 0,
    });
    let size = |held: &Amount| (if lacks_cores { held.cores } else { 0 }, held.memory);
    here.sort_by_key(|(dearness, held, at)| (std::cmp::Reverse(size(held)), *dearness, uid(*at)));
    let mut sum = Amount::NONE;
    let mut taken = 0;
    while taken < here.len() && !room(sum.plus(here[taken].1)) {
        sum = sum.plus(here[taken].1);
        taken += 1;
    }
    let enough = here[taken..].iter().filter(|(_, held, _)| room(sum.plus(*held)));
    let last = *enough.min_by_key(|(dearness, held, at)| (size(held), *dearness, uid(*at)))?;
    let mut chosen = here[..taken].to_vec();
    chosen.push(last);
    if lacks_cores {
        // A pod that was taken for its compute time may not be needed any longer once others free enough memory and compute time.
        for taken in here[..taken].iter().rev() {
            let others = chosen.iter().filter(|other| other.2 != taken.2);
            if room(others.fold(Amount::NONE, |sum, (_, held, _)| sum.plus(*held))) {
                chosen.retain(|other| other.2 != taken.2);
            }
        }
    }
    let dearest = chosen.iter().map(|(dearness, ..)| *dearness).max();
    let memory = chosen
        .iter()
        .fold(MiB::ZERO, |sum, (_, held, _)| sum.saturating_add(held.memory));
    let price = (dearest, chosen.len(), memory);
    Some((price, chosen.into_iter().map(|(.., at)| at).collect()))
}

/// Return the price of one victim: its priority. A pod that is being deleted anyway costs nothing.
fn dearness(pod: &Pod) -> i64 {
    if pod.deleting { i64::MIN } else { i64::from(pod.priority) }
}
