//! The end of each update: every node on which something changed is counted again.

use divvy_model::Pod;

use super::Ledger;
use crate::node_account::NodeAccount;
use crate::nominated;
use crate::reservation::Reservation;
use crate::usage::TakenUsage;

impl Ledger {
    /// Count again all nodes on which something changed, and forget nodes about which nothing is left to know.
    pub(crate) fn settle(&mut self) {
        for name in std::mem::take(&mut self.dirty) {
            self.hear_of_departed(&name);
            // It is counted right below.
            self.dirty.remove(&name);
            let Some(entry) = self.nodes.get(&name) else {
                continue;
            };
            self.overbooked.remove(&(entry.version, name.clone()));
            self.versions.remove(&entry.version);
            let unused = entry.pods.is_empty() && entry.reserved.is_empty() && entry.departed.is_empty();
            if entry.state.is_none() && unused && entry.nominated.is_empty() {
                if let Some(gone) = self.nodes.remove(&name) {
                    gone.each_free_piece().for_each(|free| self.free_pieces.remove(free));
                }
                self.last_version += 1;
                self.last_gone = self.last_version;
                continue;
            }
            let usage = self.count(&name, entry);
            self.last_version += 1;
            let version = self.last_version;
            if let Some(entry) = self.nodes.get_mut(&name) {
                entry.usage = usage;
                entry.version = version;
                entry.usage.most_free = entry.count_most_free();
                let free = entry.count_free_pieces();
                entry.each_free_piece().for_each(|free| self.free_pieces.remove(free));
                entry.free_pieces = free;
                entry.each_free_piece().for_each(|free| self.free_pieces.add(free));
                let gpus = entry.state.iter().flat_map(|state| &state.gpus);
                if gpus.zip(&entry.usage.gpus).any(|(gpu, used)| *used > gpu.capacity) {
                    self.overbooked.insert((version, name.clone()));
                }
                self.versions.insert(version, name.clone());
            }
            self.keep_for_nominated(&name);
        }
    }

    /// Return what is taken on a node, counted from all pods and reservations that are known for it.
    fn count(&self, name: &str, entry: &NodeAccount) -> TakenUsage {
        let mut usage = TakenUsage::none(entry.state.as_ref());
        for pod in entry.pods.keys().filter(|pod| !pod.ended()) {
            usage.add_pod(pod);
            let unknown = usage.book_pod(pod, entry.state.as_ref(), self.unit);
            // A node that has not been seen has no anomalies.
            if entry.state.is_some() {
                usage.anomalies.add(pod, unknown);
            }
        }
        for uid in &entry.reserved {
            if let Some(pod) = self.pods.get(uid) {
                usage.add_pod(pod);
            }
            for held in self.reservation(uid, name).into_iter().flat_map(Reservation::possible) {
                usage.book(held, entry.state.as_ref(), self.unit);
            }
        }
        if let Some(state) = entry.state.as_ref().filter(|_| !entry.departed.is_empty()) {
            let kept = self.kept(state, &entry.departed);
            usage.departed = kept.gpus;
            usage.departed_anywhere = kept.anywhere;
        }
        usage
    }

    /// Choose the GPUs of a node that are kept for the pods nominated to it.
    fn keep_for_nominated(&mut self, node: &str) {
        let Some(entry) = self.nodes.get_mut(node) else {
            return;
        };
        entry.nominated_to.clear();
        if entry.state.is_none() {
            return;
        }
        let pods = entry.nominated.iter().filter_map(|uid| self.pods.get(uid));
        // A reservation on this node is counted already. A reservation on another node belongs to a bind whose outcome is not
        // known yet, so the pod still waits here.
        let is_reserved = |pod: &Pod| self.reservations.get(&pod.uid).is_some_and(|nodes| nodes.contains_key(node));
        let waiting = pods.filter(|pod| !pod.deleting && pod.request.wants_gpus() && !is_reserved(pod));
        let waiting: Vec<Pod> = waiting.cloned().collect();
        if !waiting.is_empty() {
            nominated::keep(entry, waiting, self.unit);
        }
    }
}
