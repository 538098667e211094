//! Which pods of a node are evicted so that a pod with higher priority has room: kube-scheduler's proposal, corrected.

use std::collections::BTreeSet;

use divvy_model::Pod;

use crate::ask::Ask;
use crate::fewest::{PodOnNode, Victims, fewest, there};
use crate::ledger::Ledger;
use crate::node_view::LedgerNode;

impl Ledger {
    /// Choose the pods of a node to evict so that a pod gets room on one GPU, or on as many GPUs as it requests. `proposed`
    /// holds the UIDs that kube-scheduler proposes. They may be too few or the wrong ones, because kube-scheduler knows only
    /// the node's sums, not its GPUs. Return the UIDs to evict, sorted. Return `None` if there is no room even without all
    /// pods of lower priority.
    ///
    /// If evicting the proposed pods is enough, only they are considered, because kube-scheduler has checked their
    /// PodDisruptionBudgets. Otherwise, all pods of lower priority are considered. Among these, the fewest pods with the
    /// lowest priority are taken.
    ///
    /// A proposed pod that holds no GPU memory on this node stays a victim, because kube-scheduler needs something else of
    /// it, such as its CPU or its ports. Of the other proposed pods, as many stay victims as CPU, main memory, and the
    /// number of pods require. If neither GPUs nor these sums require any victim, all proposed pods stay victims.
    pub fn victims(&self, node: &str, pod: &Pod, proposed: &[String]) -> Option<Vec<String>> {
        let view = self.node(node)?;
        let ask = Ask::of_pod(pod, self.unit());
        if view.state().is_some_and(|state| ask.is_left_to_another_plugin(state)) {
            // kube-scheduler's sums are all that is known there.
            let mut proposed = proposed.to_vec();
            proposed.sort();
            return Some(proposed);
        }
        // A node has at most hundreds of pods, but kube-scheduler names hundreds of nodes. So nothing here grows with the square
        // of the number of pods.
        let is_proposed: BTreeSet<&str> = proposed.iter().map(String::as_str).collect();
        let here = there(view.pods(), view.state(), self.unit());
        let (of_proposed, others): (Vec<&PodOnNode<'_>>, Vec<&PodOnNode<'_>>) =
            here.iter().partition(|other| is_proposed.contains(other.pod.uid.as_str()));
        let chosen = fewest(view.entry, &ask, &of_proposed).or_else(|| {
            let lower = others.iter().filter(|other| other.pod.priority < pod.priority);
            let all: Vec<&PodOnNode<'_>> = of_proposed.iter().chain(lower).copied().collect();
            fewest(view.entry, &ask, &all)
        })?;
        let mut gone = chosen.pods;
        gone.extend(of_proposed.iter().filter(|other| !other.holds_here()).map(|other| other.pod));
        let gone_uids: BTreeSet<&str> = gone.iter().map(|pod| pod.uid.as_str()).collect();
        let known: BTreeSet<&str> = of_proposed.iter().map(|other| other.pod.uid.as_str()).collect();
        let mut rest: Vec<&Pod> = of_proposed
            .iter()
            .map(|other| other.pod)
            .filter(|other| !gone_uids.contains(other.uid.as_str()))
            .collect();
        rest.sort_by_key(|other| (other.priority, other.uid.as_str()));
        let mut sums = Sums::without(&view, pod, &gone);
        let mut rest = rest.into_iter();
        while !sums.allow(&view) {
            let Some(next) = rest.next() else { break };
            sums.free(next);
            gone.push(next);
        }
        let mut uids: Vec<String> = gone.iter().map(|pod| pod.uid.clone()).collect();
        // Proposed pods that are not known here yet cannot be judged, so they stay victims.
        uids.extend(proposed.iter().filter(|uid| !known.contains(uid.as_str())).cloned());
        if uids.is_empty() {
            uids.extend(proposed.iter().cloned());
        }
        uids.sort();
        Some(uids)
    }

    /// Return the pods of lower priority that would have to go so that a pod has room on GPUs of a node, regardless of other
    /// obstacles there.
    pub fn in_the_way(&self, node: &str, pod: &Pod) -> Option<Victims<'_>> {
        let view = self.node(node)?;
        let here = there(view.pods(), view.state(), self.unit());
        let lower: Vec<&PodOnNode<'_>> = here.iter().filter(|other| other.pod.priority < pod.priority).collect();
        fewest(view.entry, &Ask::of_pod(pod, self.unit()), &lower)
    }
}

/// The CPU, main memory, and number of pods that are taken on a node once some pods are gone and the new pod is there.
struct Sums {
    cpu_milli: u64,
    memory_bytes: u64,
    pods: u64,
}

impl Sums {
    fn without(view: &LedgerNode<'_>, pod: &Pod, gone: &[&Pod]) -> Sums {
        let (cpu_milli, memory_bytes, pods) = view.requested();
        let mut sums = Sums {
            cpu_milli: cpu_milli.saturating_add(pod.cpu_milli.into()),
            memory_bytes: memory_bytes.saturating_add(pod.memory_bytes),
            pods: pods.saturating_add(1),
        };
        gone.iter().for_each(|gone| sums.free(gone));
        sums
    }

    fn free(&mut self, gone: &Pod) {
        self.cpu_milli = self.cpu_milli.saturating_sub(gone.cpu_milli.into());
        self.memory_bytes = self.memory_bytes.saturating_sub(gone.memory_bytes);
        self.pods = self.pods.saturating_sub(1);
    }

    fn allow(&self, view: &LedgerNode<'_>) -> bool {
        view.state().is_some_and(|state| {
            self.cpu_milli <= state.cpu_milli && self.memory_bytes <= state.memory_bytes && self.pods <= state.pods
        })
    }
}
