//! The ledger itself: nodes, pods, and reservations, updated event by event.

mod departures;
mod settle;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use divvy_model::{Held, MemoryUnit, Node, Pod, PodKey, kept};

use crate::amounts::AmountCounts;
use crate::ask::Ask;
use crate::departed::Departed;
use crate::node::NodeState;
use crate::node_account::NodeAccount;
use crate::node_view::LedgerNode;
use crate::pods::{ByUid, Pods};
use crate::products::Products;
use crate::reservation::{Reservation, Standing};
use crate::waiting::{WaitReason, WaitingPods};

/// Nodes, pods, and the allocations that are being written, and what is free on each GPU.
///
/// The ledger is updated in place, event by event. It never counts by differences: whenever a pod of a node changes, what is free
/// on the node's GPUs is counted again from all pods known for it. So a missed, repeated, or merged event cannot leave an error
/// behind (`docs/compatibility/races.md`, R14). Pods are identified by UID (R7).
///
/// A pod holds what its annotations say from its binding until [`Pod::ended`] or until its object is gone. A request to delete
/// the pod frees nothing (R5). Memory that containers of departed pods still hold is in the inventory (`heldMiB`). Until the
/// inventory reports this memory, the ledger itself counts it as taken ([`Departed`]).
#[derive(Debug, Clone)]
pub struct Ledger {
    unit: MemoryUnit,
    pub(crate) pods: Pods,
    waiting: WaitingPods,
    /// What the pods that have not ended ask of one GPU.
    pub(crate) asked: AmountCounts,
    /// What is free on each healthy, shared GPU.
    pub(crate) free_pieces: AmountCounts,
    /// Hashed by name, because filter looks up every node of the cluster. To iterate in order of the names, use
    /// [`Ledger::nodes`].
    pub(crate) nodes: HashMap<String, NodeAccount>,
    products: Products,
    /// The indices of the GPUs that gpushare's ConfigMaps call unhealthy, by node name, even for nodes that are not known.
    unhealthy: BTreeMap<String, BTreeSet<u32>>,
    /// UID → node → the reservation. A pod has reservations on several nodes only while the outcome of a bind is unknown.
    reservations: BTreeMap<String, BTreeMap<String, Reservation>>,
    /// Departed pods by UID.
    pub(crate) departed: BTreeMap<String, Departed>,
    /// Pods that the API server reported as gone before their own event arrived. Later states of these pods are ignored.
    buried: Buried,
    /// Nodes that must be counted again before the current update ends.
    pub(crate) dirty: BTreeSet<String>,
    /// (version, name) of the nodes with an overbooked GPU, so that each is examined once per change.
    overbooked: BTreeSet<(u64, String)>,
    /// Version → node name, to iterate over the changes since a version.
    versions: BTreeMap<u64, String>,
    last_version: u64,
    /// The version at which the last node was forgotten.
    last_gone: u64,
    last_arrival: u64,
}

/// The UIDs that were buried most recently. Their number is limited, but it is large enough for any watch that lags behind.
#[derive(Debug, Clone, Default)]
struct Buried {
    uids: BTreeSet<String>,
    order: VecDeque<String>,
}

impl Buried {
    const MOST: usize = 1024;

    fn add(&mut self, uid: &str) {
        if self.uids.insert(uid.to_owned()) {
            self.order.push_back(uid.to_owned());
        }
        while self.order.len() > Self::MOST {
            if let Some(oldest) = self.order.pop_front() {
                self.uids.remove(&oldest);
            }
        }
    }

    fn remove(&mut self, uid: &str) {
        if self.uids.remove(uid) {
            self.order.retain(|other| other != uid);
        }
    }
}

impl Ledger {
    /// Create an empty ledger for a cluster that counts gpu-mem in this unit.
    pub fn new(unit: MemoryUnit) -> Ledger {
        Ledger {
            unit,
            pods: Pods::default(),
            waiting: WaitingPods::default(),
            asked: AmountCounts::default(),
            free_pieces: AmountCounts::default(),
            nodes: HashMap::new(),
            products: Products::default(),
            unhealthy: BTreeMap::new(),
            reservations: BTreeMap::new(),
            departed: BTreeMap::new(),
            buried: Buried::default(),
            dirty: BTreeSet::new(),
            overbooked: BTreeSet::new(),
            versions: BTreeMap::new(),
            last_version: 0,
            last_gone: 0,
            last_arrival: 0,
        }
    }

    /// Return the cluster's unit of gpu-mem.
    pub fn unit(&self) -> MemoryUnit {
        self.unit
    }

    /// Return the node with what is taken on it, even if it is known only because pods say that they are on it.
    pub fn node<'a>(&'a self, name: &str) -> Option<LedgerNode<'a>> {
        let (name, entry) = self.nodes.get_key_value(name)?;
        Some(self.view(name, entry))
    }

    /// Return all nodes, ordered by name.
    pub fn nodes(&self) -> impl Iterator<Item = LedgerNode<'_>> {
        let mut nodes: Vec<_> = self.nodes_in_any_order().collect();
        nodes.sort_unstable_by_key(|view| view.name);
        nodes.into_iter()
    }

    /// Return all nodes in any order, for sums.
    pub(crate) fn nodes_in_any_order(&self) -> impl Iterator<Item = LedgerNode<'_>> {
        self.nodes.iter().map(|(name, entry)| self.view(name, entry))
    }

    fn view<'a>(&'a self, name: &'a str, entry: &'a NodeAccount) -> LedgerNode<'a> {
        LedgerNode {
            name,
            entry,
            unit: self.unit,
            all_departed: &self.departed,
            all_reservations: &self.reservations,
        }
    }

    /// Return the pod with this UID.
    pub fn pod(&self, uid: &str) -> Option<&Pod> {
        self.pods.get(uid)
    }

    /// Return the pod that has this name now.
    pub fn pod_named(&self, key: &PodKey) -> Option<&Pod> {
        self.pods.named(key)
    }

    /// Return the number of known pods.
    pub fn pod_count(&self) -> usize {
        self.pods.len()
    }

    /// Return all pods, ordered by UID.
    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values()
    }

    /// Return how many pods wait for GPUs, for each reason in the order of [`WaitReason::ALL`]. The reason of a pod is
    /// [`WaitReason::Other`] until it is set.
    pub fn waiting(&self) -> [u64; WaitReason::ALL.len()] {
        self.waiting.counts()
    }

    /// Return the pods that wait for GPUs and whose UIDs come after this one, in the order of their UIDs, each with whether
    /// [`Ledger::answer_wait_reason`] has set its reason.
    pub fn waiting_after<'a>(&'a self, uid: &str) -> impl Iterator<Item = (&'a Pod, bool)> {
        self.waiting.after(uid)
    }

    /// Set why a pod waits, from an answer to kube-scheduler. Nothing changes if the pod does not wait for GPUs.
    pub fn answer_wait_reason(&mut self, uid: &str, reason: WaitReason) {
        self.waiting.set(uid, reason, true);
    }

    /// Set why a pod waits, as far as the ledger can tell. Nothing changes if kube-scheduler was given an answer: it has asked only about the nodes on
    /// which the pod may be.
    pub fn guess_wait_reason(&mut self, uid: &str, reason: WaitReason) {
        self.waiting.set(uid, reason, false);
    }

    /// Record the current state of a pod, and report whether anything changed. A pod without a UID cannot be told from others and
    /// is ignored (no API server sends one).
    ///
    /// A pod that has a node confirms or refutes all its reservations, because a binding is final. A new pod with the same name
    /// ends the previous one, because names are unique.
    pub fn apply_pod(&mut self, pod: Pod) -> bool {
        let changed = self.link_pod(pod);
        self.settle();
        changed
    }

    /// Record that the pod with this UID is gone, together with its reservations. If one of its containers was last seen running,
    /// its memory is kept for a while ([`Departed`]).
    pub fn delete_pod(&mut self, uid: &str) -> bool {
        let changed = self.unlink_pod(uid);
        self.settle();
        changed
    }

    /// Delete a pod as [`Ledger::delete_pod`] does, because the API server reported it as gone in answer to a direct request. The
    /// pod's events may arrive late, so the ledger ignores later states of the pod. UIDs are never reused.
    pub fn bury_pod(&mut self, uid: &str) {
        self.buried.add(uid);
        self.delete_pod(uid);
    }

    /// Report whether states of the pod with this UID are ignored ([`Ledger::bury_pod`]).
    pub fn is_buried(&self, uid: &str) -> bool {
        self.buried.uids.contains(uid)
    }

    /// Record that the API server, in answer to a direct request, returned the pod with this UID after all. From its next state
    /// on, it counts again.
    pub fn unbury_pod(&mut self, uid: &str) {
        self.buried.remove(uid);
    }

    /// Replace all pods by these. All other pods are deleted as by [`Ledger::delete_pod`]. Reservations of pods that were never
    /// seen stay, because such a pod may be younger than the list.
    pub fn replace_pods(&mut self, pods: impl IntoIterator<Item = Pod>) {
        let mut gone: BTreeSet<String> = self.pods.uids().map(str::to_owned).collect();
        for pod in pods {
            gone.remove(&pod.uid);
            self.link_pod(pod);
        }
        for uid in gone {
            self.unlink_pod(&uid);
        }
        self.settle();
    }

    /// Record the current state of a node, and report whether anything changed that the ledger uses.
    pub fn apply_node(&mut self, node: &Node) -> bool {
        let mut state = NodeState::read(node, self.unit);
        if let Some(indices) = self.unhealthy.get(&node.name) {
            state.name_unhealthy(indices);
        }
        let entry = self.nodes.entry(node.name.clone()).or_default();
        state.hold_products(&mut self.products);
        if entry.state.as_ref() == Some(&state) {
            state.release_products(&mut self.products);
            return false;
        }
        if let Some(known) = &entry.state {
            known.release_products(&mut self.products);
        }
        let another = entry.state.as_ref().is_some_and(|known| known.uid != state.uid);
        entry.state = Some(state);
        if another {
            self.let_all_go(&node.name);
        }
        self.dirty.insert(node.name.clone());
        self.settle();
        true
    }

    /// Set which GPUs of a node are called unhealthy from outside, by their indices. No pod is placed on these GPUs any more.
    /// Pods that are already there stay.
    pub fn name_unhealthy(&mut self, node: &str, indices: BTreeSet<u32>) {
        if let Some(state) = self.nodes.get_mut(node).and_then(|entry| entry.state.as_mut()) {
            state.name_unhealthy(&indices);
            self.dirty.insert(node.to_owned());
            self.settle();
        }
        if indices.is_empty() {
            self.unhealthy.remove(node)
        } else {
            self.unhealthy.insert(node.to_owned(), indices)
        };
    }

    /// Replace the GPUs that are called unhealthy from outside, for all nodes.
    pub fn replace_unhealthy(&mut self, named: impl IntoIterator<Item = (String, BTreeSet<u32>)>) {
        let named: BTreeMap<String, BTreeSet<u32>> = named.into_iter().collect();
        let before: Vec<String> = self.unhealthy.keys().cloned().collect();
        for node in before.into_iter().filter(|node| !named.contains_key(node)) {
            self.name_unhealthy(&node, BTreeSet::new());
        }
        for (node, indices) in named {
            self.name_unhealthy(&node, indices);
        }
    }

    /// Record that a node is gone. Pods that say they are on it stay known, and count again when a node with this name appears.
    /// Nothing is kept any longer for departed pods of the node.
    pub fn delete_node(&mut self, name: &str) -> bool {
        self.let_all_go(name);
        let Some(entry) = self.nodes.get_mut(name) else {
            return false;
        };
        let known = entry.state.take();
        if let Some(known) = &known {
            known.release_products(&mut self.products);
        }
        let known = known.is_some();
        self.dirty.insert(name.to_owned());
        self.settle();
        known
    }

    /// Replace all nodes by these.
    pub fn replace_nodes<'a>(&mut self, nodes: impl IntoIterator<Item = &'a Node>) {
        let mut gone: BTreeSet<String> = self.nodes.keys().cloned().collect();
        for node in nodes {
            gone.remove(&node.name);
            self.apply_node(node);
        }
        for name in gone {
            self.delete_node(&name);
        }
    }

    /// Add a reservation from another ledger, without counting the node again.
    pub(crate) fn book_as_it_is(&mut self, uid: &str, node: &str, reservation: Reservation) {
        let of_pod = self.reservations.entry(uid.to_owned()).or_default();
        of_pod.insert(node.to_owned(), reservation);
    }

    /// Add or change the reservation of an allocation that is about to be written to a pod. Do nothing for a pod that is known to
    /// be bound, because its own annotations say what it holds.
    pub fn reserve(&mut self, uid: &str, node: &str, reservation: Reservation) {
        if self.pods.get(uid).is_some_and(|pod| pod.node.is_some()) {
            return;
        }
        self.nodes.entry(node.to_owned()).or_default().reserved.insert(uid.to_owned());
        self.reservations
            .entry(uid.to_owned())
            .or_default()
            .insert(node.to_owned(), reservation);
        self.dirty.insert(node.to_owned());
        self.settle();
    }

    /// Update the progress of a reservation's write, if the reservation still exists.
    pub fn set_standing(&mut self, uid: &str, node: &str, standing: Standing, since_ns: u64) {
        if let Some(reservation) = self.reservations.get_mut(uid).and_then(|nodes| nodes.get_mut(node)) {
            reservation.standing = standing;
            reservation.since_ns = since_ns;
        }
    }

    /// Record that the write of `held` took effect. No other write will take effect, because a binding is final.
    pub fn confirm(&mut self, uid: &str, node: &str, held: &Held, since_ns: u64) {
        if let Some(reservation) = self.reservations.get_mut(uid).and_then(|nodes| nodes.get_mut(node)) {
            reservation.held = held.clone();
            reservation.earlier.clear();
            reservation.standing = Standing::Bound;
            reservation.since_ns = since_ns;
            self.dirty.insert(node.to_owned());
            self.settle();
        }
    }

    /// Record that the last write of a reservation will not take effect. Earlier writes still may.
    pub fn withdraw(&mut self, uid: &str, node: &str, since_ns: u64) {
        let Some(reservation) = self.reservations.get_mut(uid).and_then(|nodes| nodes.get_mut(node)) else {
            return;
        };
        match reservation.earlier.pop() {
            None => {
                self.unreserve(uid, node);
            }
            Some(earlier) => {
                reservation.held = earlier;
                reservation.standing = Standing::Doubt;
                reservation.since_ns = since_ns;
                self.dirty.insert(node.to_owned());
            }
        }
        self.settle();
    }

    /// Drop a reservation with everything that may have been written. Report whether there was one.
    pub fn release(&mut self, uid: &str, node: &str) -> bool {
        let released = self.unreserve(uid, node);
        self.settle();
        released
    }

    /// Return the pod's reservation on this node.
    pub fn reservation(&self, uid: &str, node: &str) -> Option<&Reservation> {
        self.reservations.get(uid)?.get(node)
    }

    /// Return all reservations as (UID, node, reservation).
    pub fn reservations(&self) -> impl Iterator<Item = (&str, &str, &Reservation)> {
        self.reservations.iter().flat_map(|(uid, nodes)| {
            nodes
                .iter()
                .map(move |(node, reservation)| (uid.as_str(), node.as_str(), reservation))
        })
    }

    /// Return the pod's reservations by node.
    pub(crate) fn reservations_of(&self, uid: &str) -> Option<&BTreeMap<String, Reservation>> {
        self.reservations.get(uid)
    }

    /// Report whether the pod has a reservation on any node, or is bound.
    pub fn is_promised(&self, uid: &str) -> bool {
        self.reservations.contains_key(uid) || self.bound_to(uid).is_some()
    }

    /// Return the node to which the pod is known to be bound, by its own event or by an answer that arrived before it.
    pub fn bound_to(&self, uid: &str) -> Option<&str> {
        if let Some(node) = self.pods.get(uid).and_then(|pod| pod.node.as_deref()) {
            return Some(node);
        }
        self.reservations
            .get(uid)?
            .iter()
            .find(|(_, reservation)| reservation.standing == Standing::Bound)
            .map(|(node, _)| node.as_str())
    }

    fn link_pod(&mut self, pod: Pod) -> bool {
        if pod.uid.is_empty() || self.buried.uids.contains(&pod.uid) {
            return false;
        }
        self.let_go(&pod.uid);
        let pod = kept(pod);
        let namesake = self.pods.named(&pod.key()).filter(|other| other.uid != pod.uid);
        if let Some(other) = namesake.map(|other| other.uid.clone()) {
            self.unlink_pod(&other);
        }
        if let Some(known) = self.pods.get(&pod.uid) {
            if *known == pod {
                return false;
            }
            if let Some(asked) = Ask::of_one_gpu(known, self.unit) {
                self.asked.remove(asked);
            }
            let left = known.node.clone().filter(|_| known.node != pod.node);
            let renounced = known.nominated.clone().filter(|_| known.nominated != pod.nominated);
            if let Some(node) = left {
                self.leave(&node, &pod.uid);
            }
            if let Some(node) = renounced {
                self.renounce(&node, &pod.uid);
            }
        }
        if let Some(node) = &pod.nominated {
            self.nodes
                .entry(String::from(&**node))
                .or_default()
                .nominated
                .insert(pod.uid.clone());
            self.dirty.insert(String::from(&**node));
        }
        let pod = Arc::new(pod);
        if let Some(node) = &pod.node {
            let pods = &mut self.nodes.entry(node.clone()).or_default().pods;
            let arrival = pods.remove(pod.uid.as_str()).unwrap_or_else(|| {
                self.last_arrival += 1;
                self.last_arrival
            });
            pods.insert(ByUid(pod.clone()), arrival);
            self.dirty.insert(node.clone());
            self.unreserve_all(&pod.uid);
        }
        // A reservation also counts the pod's CPU and memory.
        for node in self.reservations.get(&pod.uid).into_iter().flat_map(BTreeMap::keys) {
            self.dirty.insert(node.clone());
        }
        if let Some(asked) = Ask::of_one_gpu(&pod, self.unit) {
            self.asked.add(asked);
        }
        self.waiting.apply(&pod);
        self.pods.insert(pod);
        true
    }

    fn unlink_pod(&mut self, uid: &str) -> bool {
        self.unreserve_all(uid);
        self.waiting.remove(uid);
        let Some(pod) = self.pods.remove(uid) else {
            return false;
        };
        if let Some(asked) = Ask::of_one_gpu(&pod, self.unit) {
            self.asked.remove(asked);
        }
        if let Some(node) = &pod.node {
            self.leave(node, uid);
        }
        if let Some(node) = &pod.nominated {
            self.renounce(node, uid);
        }
        self.depart(Arc::unwrap_or_clone(pod));
        true
    }

    fn leave(&mut self, node: &str, uid: &str) {
        if let Some(entry) = self.nodes.get_mut(node) {
            entry.pods.remove(uid);
            self.dirty.insert(node.to_owned());
        }
    }

    /// Remove the pod from the pods nominated to this node.
    fn renounce(&mut self, node: &str, uid: &str) {
        if let Some(entry) = self.nodes.get_mut(node) {
            entry.nominated.remove(uid);
            self.dirty.insert(node.to_owned());
        }
    }

    fn unreserve_all(&mut self, uid: &str) {
        let nodes: Vec<String> = self
            .reservations
            .get(uid)
            .map(|nodes| nodes.keys().cloned().collect())
            .unwrap_or_default();
        for node in nodes {
            self.unreserve(uid, &node);
        }
    }

    fn unreserve(&mut self, uid: &str, node: &str) -> bool {
        let Some(nodes) = self.reservations.get_mut(uid) else {
            return false;
        };
        let released = nodes.remove(node).is_some();
        if nodes.is_empty() {
            self.reservations.remove(uid);
        }
        if let Some(entry) = self.nodes.get_mut(node) {
            entry.reserved.remove(uid);
            self.dirty.insert(node.to_owned());
        }
        released
    }

    /// Return the nodes that changed after this version and have an overbooked GPU.
    pub(crate) fn overbooked_nodes(&self, since: u64) -> impl Iterator<Item = LedgerNode<'_>> {
        let changed = self.overbooked.range((since.saturating_add(1), String::new())..);
        changed.filter_map(|(_, name)| self.node(name))
    }

    /// Return the nodes that changed after this version, in the order of their versions.
    pub fn changed_since(&self, version: u64) -> impl Iterator<Item = LedgerNode<'_>> {
        let changed = self.versions.range(version.saturating_add(1)..);
        changed.filter_map(|(_, name)| self.node(name))
    }

    /// Return the version at which the last node was forgotten. No node has this version.
    pub fn last_gone(&self) -> u64 {
        self.last_gone
    }

    /// Return the version of the last change of any node.
    pub fn version(&self) -> u64 {
        self.last_version
    }
}
