use divvy_model::{Health, MiB, Pod};

use crate::{Ask, Ledger, NodeView, Source};

/// Pods without which a GPU, or several of a node, have room for another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Victims<'a> {
    /// The GPUs' indices, ascending.
    pub indices: Vec<u32>,
    /// The pods; none if there is room already.
    pub pods: Vec<&'a Pod>,
}

/// How dear victims are: the highest priority among them, how many, how much memory they have there.
type Price = (Option<i64>, usize, MiB);

impl Ledger {
    /// Which pods of a node are to be evicted so that one GPU, or as many as it asks for, has room for a pod, when kube-scheduler, which knows sums only, proposes these UIDs; as UIDs, in
    /// the order of the node's pods. `None`: there is no room whoever of lower priority goes.
    ///
    /// Those proposed are enough where they can be: kube-scheduler has seen to disruption budgets for them. Else all pods of lower priority count. The
    /// fewest of the lowest priority are taken. One that was proposed and has no GPU memory here is kept: it is in the way for another reason. So are
    /// as many of the others as the sums of CPU, main memory and pods need; and all, where no reason for any can be seen.
    pub fn victims(&self, node: &str, pod: &Pod, proposed: &[String]) -> Option<Vec<String>> {
        let view = self.node(node)?;
        let ask = Ask::of_pod(pod, self.unit());
        let is_proposed = |uid: &str| proposed.iter().any(|other| other == uid);
        let (of_proposed, others): (Vec<&Pod>, Vec<&Pod>) = view.pods().partition(|other| is_proposed(&other.uid));
        let (_, mut gone) = self.fewest(&view, &ask, &of_proposed).or_else(|| {
            let lower = others.iter().filter(|other| other.priority < pod.priority);
            let all: Vec<&Pod> = of_proposed.iter().chain(lower).copied().collect();
            self.fewest(&view, &ask, &all)
        })?;
        gone.extend(of_proposed.iter().filter(|other| !self.holds_here(&view, other)));
        let mut rest: Vec<&Pod> = of_proposed
            .into_iter()
            .filter(|other| !gone.iter().any(|pod| pod.uid == other.uid))
            .collect();
        rest.sort_by_key(|other| (other.priority, other.uid.as_str()));
        let mut rest = rest.into_iter();
        while !sums_allow(&view, pod, &gone) {
            let Some(next) = rest.next() else { break };
            gone.push(next);
        }
        let known = |uid: &&String| view.pods().any(|other| other.uid == **uid);
        let mut uids: Vec<String> = gone.iter().map(|pod| pod.uid.clone()).collect();
        // Of those that are not known here yet nothing can be said.
        uids.extend(proposed.iter().filter(|uid| !known(uid)).cloned());
        if uids.is_empty() {
            uids.extend(proposed.iter().cloned());
        }
        uids.sort();
        Some(uids)
    }

    /// The pods of lower priority that would have to go for a pod to have room on GPUs of a node, whatever else is in its way there.
    pub fn in_the_way(&self, node: &str, pod: &Pod) -> Option<Victims<'_>> {
        let view = self.node(node)?;
        let lower: Vec<&Pod> = view.pods().filter(|other| other.priority < pod.priority).collect();
        let (positions, pods) = self.fewest(&view, &Ask::of_pod(pod, self.unit()), &lower)?;
        let gpus = &view.state()?.gpus;
        let mut indices: Vec<u32> = positions.into_iter().map(|position| gpus[position].index).collect();
        indices.sort_unstable();
        Some(Victims { indices, pods })
    }

    /// Of all GPUs the one with the cheapest victims among the candidates; of several one after the other, as who goes for one may make room on
    /// others. Gives the GPUs' positions, and the victims.
    pub(crate) fn fewest<'a>(
        &self,
        view: &NodeView<'a>,
        ask: &Ask,
        candidates: &[&'a Pod],
    ) -> Option<(Vec<usize>, Vec<&'a Pod>)> {
        let state = view.state().filter(|state| !matches!(state.source, Source::Unusable(_)))?;
        if ask.gpus > 1 && state.source != Source::Inventory {
            return None;
        }
        ask.memory?;
        let mut open: Vec<usize> = (0..state.gpus.len())
            .filter(|position| state.gpus[*position].health == Health::Ok && ask.takes(&state.gpus[*position]))
            .collect();
        let mut positions = Vec::new();
        let mut pods: Vec<&Pod> = Vec::new();
        for _ in 0..ask.gpus {
            let priced = open.iter().filter_map(|position| {
                let (price, more) = self.fewest_of(view, *position, ask, candidates, &pods)?;
                Some((price, state.gpus[*position].index, *position, more))
            });
            let (_, _, position, more) = priced.min_by_key(|(price, index, ..)| (*price, *index))?;
            open.retain(|other| *other != position);
            positions.push(position);
            pods.extend(more);
        }
        if ask.gpus > 1 {
            self.spare(view, &positions, ask, &mut pods);
        }
        Some((positions, pods))
    }

    /// Keeps those that need not go any more since others do, the dearest first.
    fn spare<'a>(&self, view: &NodeView<'a>, positions: &[usize], ask: &Ask, pods: &mut Vec<&'a Pod>) {
        let mut order = pods.clone();
        order.sort_by_key(|pod| (std::cmp::Reverse(dearness(pod)), pod.uid.as_str()));
        for pod in order {
            let others: Vec<&Pod> = pods.iter().filter(|other| other.uid != pod.uid).copied().collect();
            let room = |position: &usize| {
                let freed = self.held_by(view, *position, &others);
                Some(view.free_for_beside(*position, ask, freed)) >= ask.memory
            };
            if positions.iter().all(room) {
                *pods = others;
            }
        }
    }

    /// Who has to go beside those that are gone.
    fn fewest_of<'a>(
        &self,
        view: &NodeView<'a>,
        position: usize,
        ask: &Ask,
        candidates: &[&'a Pod],
        gone: &[&'a Pod],
    ) -> Option<(Price, Vec<&'a Pod>)> {
        let freed = self.held_by(view, position, gone);
        let room = |own: MiB| Some(view.free_for_beside(position, ask, own.saturating_add(freed))) >= ask.memory;
        if room(MiB::ZERO) {
            return Some(((None, 0, MiB::ZERO), Vec::new()));
        }
        let mut here: Vec<(i64, MiB, &Pod)> = candidates
            .iter()
            .filter(|pod| !gone.iter().any(|other| other.uid == pod.uid))
            .map(|pod| (dearness(pod), self.held_at(view, position, pod), *pod))
            .filter(|(_, held, _)| *held > MiB::ZERO)
            .collect();
        here.sort_by_key(|(dearness, _, pod)| (*dearness, pod.uid.as_str()));
        // Nobody dearer than need be.
        let mut sum = MiB::ZERO;
        let last = here.iter().find(|(_, held, _)| {
            sum = sum.saturating_add(*held);
            room(sum)
        });
        let most = last?.0;
        here.retain(|(dearness, ..)| *dearness <= most);
        // The largest first are the fewest; in place of the last the smallest that is enough.
        here.sort_by_key(|(dearness, held, pod)| (std::cmp::Reverse(*held), *dearness, pod.uid.as_str()));
        let mut sum = MiB::ZERO;
        let mut taken = 0;
        while taken < here.len() && !room(sum.saturating_add(here[taken].1)) {
            sum = sum.saturating_add(here[taken].1);
            taken += 1;
        }
        let enough = here[taken..].iter().filter(|(_, held, _)| room(sum.saturating_add(*held)));
        let last = *enough.min_by_key(|(dearness, held, pod)| (*held, *dearness, pod.uid.as_str()))?;
        let mut chosen = here[..taken].to_vec();
        chosen.push(last);
        let dearest = chosen.iter().map(|(dearness, ..)| *dearness).max();
        let price = (dearest, chosen.len(), sum.saturating_add(last.1));
        Some((price, chosen.into_iter().map(|(.., pod)| pod).collect()))
    }

    fn held_at(&self, view: &NodeView<'_>, position: usize, pod: &Pod) -> MiB {
        let parts = view.state().map(|state| self.parts_of(state, pod)).unwrap_or_default();
        let here = parts.iter().filter(|part| part.position == Some(position));
        here.fold(MiB::ZERO, |sum, part| sum.saturating_add(part.memory))
    }

    fn held_by(&self, view: &NodeView<'_>, position: usize, pods: &[&Pod]) -> MiB {
        let held = pods.iter().map(|pod| self.held_at(view, position, pod));
        held.fold(MiB::ZERO, MiB::saturating_add)
    }

    fn holds_here(&self, view: &NodeView<'_>, pod: &Pod) -> bool {
        let parts = view.state().map(|state| self.parts_of(state, pod)).unwrap_or_default();
        parts.iter().any(|part| part.position.is_some() && part.memory > MiB::ZERO)
    }
}

/// A pod that is being deleted anyway costs nothing.
fn dearness(pod: &Pod) -> i64 {
    if pod.deleting { i64::MIN } else { i64::from(pod.priority) }
}

/// Whether the node has CPU, main memory and a place for the pod when these are gone.
fn sums_allow(view: &NodeView<'_>, pod: &Pod, gone: &[&Pod]) -> bool {
    let Some(state) = view.state() else { return false };
    let (cpu, memory, pods) = view.requested();
    let without = |used: u64, of: fn(&Pod) -> u64| {
        let freed = gone.iter().fold(0, |sum: u64, other| sum.saturating_add(of(other)));
        used.saturating_sub(freed).saturating_add(of(pod))
    };
    without(cpu, |pod| pod.cpu_milli) <= state.cpu_milli
        && without(memory, |pod| pod.memory_bytes) <= state.memory_bytes
        && without(pods, |_| 1) <= state.pods
}
