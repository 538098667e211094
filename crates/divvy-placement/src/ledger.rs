use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use divvy_model::{Health, Held, MemoryUnit, MiB, Node, Pod, PodKey, kept};

use crate::pods::{ByUid, Pods};
use crate::products::Products;
use crate::{Departed, GpuState, NodeState, NodeView, Nominated};

/// Nodes, pods and the allocations that are being written, and what each GPU has left.
///
/// Updated in place, event by event. Nothing is counted by differences: what a node's GPUs have left is counted anew from
/// the pods that are known for it whenever one of them changes, so that a missed, repeated or merged event cannot leave
/// anything behind (research/reliability.md R14). Pods are keyed by UID (R7).
///
/// A pod holds what its annotations say from its binding until [`Pod::ended`] or until its object is gone; that deletion was
/// asked for frees nothing (R5). What containers of vanished pods still hold is in the inventory (`heldMiB`); until that says
/// so it is kept here ([`Departed`]).
#[derive(Debug, Clone)]
pub struct Ledger {
    unit: MemoryUnit,
    pub(crate) pods: Pods,
    /// By hash: filter looks every node of the cluster up. What goes through all of them goes by name ([`Ledger::nodes`]).
    pub(crate) nodes: HashMap<String, Entry>,
    products: Products,
    /// Indices of GPUs that gpushare's ConfigMaps call unhealthy, by node, whether the node is known or not.
    unhealthy: BTreeMap<String, BTreeSet<u32>>,
    /// UID → node → what is being written. More than one node only while the outcome of a bind is unknown.
    reservations: BTreeMap<String, BTreeMap<String, Reservation>>,
    /// Pods that vanished while a container was last seen running, by UID.
    pub(crate) departed: BTreeMap<String, Departed>,
    /// Pods that the API server said are gone before their own event came; states of them that come late count for nothing.
    buried: Buried,
    /// Nodes whose count is out of date within one update.
    pub(crate) dirty: BTreeSet<String>,
    /// (version, name) of nodes with a GPU of which more is booked than it has, so that each is looked at once per change.
    overbooked: BTreeSet<(u64, String)>,
    /// Version → name, so that what has changed since some version can be gone through.
    versions: BTreeMap<u64, String>,
    last_version: u64,
    /// The version at which a node was last forgotten.
    last_gone: u64,
    last_arrival: u64,
}

/// All that is known under one node's name.
#[derive(Debug, Clone, Default)]
pub(crate) struct Entry {
    pub(crate) state: Option<NodeState>,
    /// Pod → how many pods had come to nodes when this one came here.
    pub(crate) pods: BTreeMap<ByUid, u64>,
    pub(crate) reserved: BTreeSet<String>,
    pub(crate) departed: BTreeSet<String>,
    /// UIDs of the pods that kube-scheduler has nominated to this node.
    pub(crate) nominated: BTreeSet<String>,
    /// What is kept for them, the highest priority first.
    pub(crate) nominated_to: Vec<Nominated>,
    pub(crate) usage: Usage,
    pub(crate) version: u64,
}

impl Entry {
    pub(crate) fn free_beside(&self, position: usize, own: MiB) -> MiB {
        // What the agent says is held may be what these hold: as much as the larger of the two.
        let departed = self.usage.departed.get(position).copied().unwrap_or(MiB::ZERO);
        self.free_beside_and_kept(position, own, departed)
            .saturating_sub(self.usage.departed_anywhere)
    }

    pub(crate) fn free_beside_and_kept(&self, position: usize, own: MiB, kept: MiB) -> MiB {
        let held = self.gpu(position).map_or(MiB::ZERO, |gpu| gpu.held);
        self.free_in_time(position, own).saturating_sub(held.max(kept))
    }

    /// Free memory once the containers of deleted pods have ended.
    pub(crate) fn free_in_time(&self, position: usize, own: MiB) -> MiB {
        let used = self.usage.gpus.get(position).copied().unwrap_or(MiB::ZERO);
        self.gpu(position)
            .map_or(MiB::ZERO, |gpu| gpu.capacity)
            .saturating_sub(used.saturating_sub(own))
            .saturating_sub(self.usage.anywhere)
    }

    fn gpu(&self, position: usize) -> Option<&GpuState> {
        self.state.as_ref().and_then(|state| state.gpus.get(position))
    }

    fn most_free(&self) -> MiB {
        let gpus = self.state.iter().flat_map(|state| state.gpus.iter().enumerate());
        gpus.filter(|(_, gpu)| gpu.health == Health::Ok)
            .map(|(position, _)| self.free_beside(position, MiB::ZERO))
            .max()
            .unwrap_or(MiB::ZERO)
    }
}

/// The last so many UIDs that were buried: enough to outlast any watch that lags, and bounded.
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

/// What is taken on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Per GPU, in the order of [`NodeState::gpus`].
    pub(crate) gpus: Vec<MiB>,
    /// Allocated on GPUs of a node whose GPUs' UUIDs are not known, so that it may be on any of them.
    pub(crate) anywhere: MiB,
    /// Per GPU, kept for pods that departed.
    pub(crate) departed: Vec<MiB>,
    /// The same on a node whose GPUs' UUIDs are not known.
    pub(crate) departed_anywhere: MiB,
    /// The most that one GPU that is well has left.
    pub(crate) most_free: MiB,
    pub(crate) cpu_milli: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) pods: u64,
    pub(crate) oddities: Oddities,
}

/// How many of a node's live pods have what [`crate::Anomaly`] describes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Oddities {
    pub(crate) unknown_gpu: u64,
    pub(crate) unreadable: u64,
    pub(crate) not_allocated: u64,
}

/// An allocation that was promised to a pod and is not seen in its annotations yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    /// The pod.
    pub pod: PodKey,
    /// What is being written on it.
    pub held: Held,
    /// What was written on it for this node before, without an answer: it may be carried out yet, in place of `held`. Booked like
    /// `held`, so that whichever is carried out was not promised to anybody else.
    pub earlier: Vec<Held>,
    /// How far the write is.
    pub standing: Standing,
    /// When it was last written, by the caller's clock in nanoseconds; the ledger does not look at it.
    pub since_ns: u64,
}

impl Reservation {
    /// All that may turn out to be written on the pod, the last first.
    pub fn possible(&self) -> impl Iterator<Item = &Held> {
        std::iter::once(&self.held).chain(self.earlier.iter().rev())
    }
}

/// How far the write of a reservation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Sent, no answer yet.
    InFlight,
    /// Done; the pod's own event has not come yet.
    Bound,
    /// No answer came; it may have been done or may be done yet.
    Doubt,
}

/// A share of a node's GPU that somebody holds: position in [`NodeState::gpus`], or `None` when there is no such GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The GPU's position in [`NodeState::gpus`]; `None` if the node has no such GPU.
    pub position: Option<usize>,
    /// The GPU's UUID or index, as the pod's annotation names it.
    pub gpu: String,
    /// The share's size.
    pub memory: MiB,
}

impl Ledger {
    /// An empty ledger of a cluster that counts gpu-mem in this unit.
    pub fn new(unit: MemoryUnit) -> Ledger {
        Ledger {
            unit,
            pods: Pods::default(),
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

    /// The cluster's unit of gpu-mem.
    pub fn unit(&self) -> MemoryUnit {
        self.unit
    }

    /// The node, with what is taken on it; also one that is known only because pods say they are on it.
    pub fn node<'a>(&'a self, name: &str) -> Option<NodeView<'a>> {
        let (name, entry) = self.nodes.get_key_value(name)?;
        Some(NodeView {
            ledger: self,
            name,
            entry,
        })
    }

    /// All nodes by name.
    pub fn nodes(&self) -> impl Iterator<Item = NodeView<'_>> {
        let mut nodes: Vec<_> = self.nodes_in_any_order().collect();
        nodes.sort_unstable_by_key(|view| view.name);
        nodes.into_iter()
    }

    /// For sums.
    pub(crate) fn nodes_in_any_order(&self) -> impl Iterator<Item = NodeView<'_>> {
        self.nodes.iter().map(|(name, entry)| NodeView {
            ledger: self,
            name,
            entry,
        })
    }

    /// The pod with this UID.
    pub fn pod(&self, uid: &str) -> Option<&Pod> {
        self.pods.get(uid)
    }

    /// The pod that has this name now.
    pub fn pod_named(&self, key: &PodKey) -> Option<&Pod> {
        self.pods.named(key)
    }

    /// How many pods are known.
    pub fn pod_count(&self) -> usize {
        self.pods.len()
    }

    /// All pods, by UID.
    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values()
    }

    /// A pod is there, in this state. False if nothing changed. A pod without a UID cannot be told from others and is left
    /// out (no API server sends one).
    ///
    /// A pod that has a node confirms or refutes all its reservations: a binding is final. Another pod under the same
    /// name ends the earlier one, since names are unique.
    pub fn apply_pod(&mut self, pod: Pod) -> bool {
        let changed = self.link_pod(pod);
        self.settle();
        changed
    }

    /// The pod with this UID is gone, and its reservations with it. If a container of it was last seen running its memory is kept
    /// for a while ([`Departed`]).
    pub fn delete_pod(&mut self, uid: &str) -> bool {
        let changed = self.unlink_pod(uid);
        self.settle();
        changed
    }

    /// The API server, asked directly, said that the pod with this UID is gone; its events may come late. As
    /// [`Ledger::delete_pod`], and states of it that come later count for nothing: UIDs do not return.
    pub fn bury_pod(&mut self, uid: &str) {
        self.buried.add(uid);
        self.delete_pod(uid);
    }

    /// Whether states of the pod with this UID count for nothing ([`Ledger::bury_pod`]).
    pub fn is_buried(&self, uid: &str) -> bool {
        self.buried.uids.contains(uid)
    }

    /// The API server, asked directly, showed the pod with this UID after all: it counts again from its next state on.
    pub fn unbury_pod(&mut self, uid: &str) {
        self.buried.remove(uid);
    }

    /// Exactly these pods are there. Those known before and not among them are gone, as by [`Ledger::delete_pod`]; reservations of pods never seen
    /// stay, since such a pod may be younger than the list.
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

    /// A node is there, in this state. False if nothing changed that matters here.
    pub fn apply_node(&mut self, node: &Node) -> bool {
        let mut state = NodeState::read(node, self.unit);
        if let Some(indices) = self.unhealthy.get(&node.name) {
            state.name_unhealthy(indices);
        }
        let entry = self.nodes.entry(node.name.clone()).or_default();
        self.products.add(&mut state.gpus);
        if entry.state.as_ref() == Some(&state) {
            self.products.remove(&state.gpus);
            return false;
        }
        self.products.remove(entry.state.as_ref().map_or(&[], |known| &known.gpus));
        let another = entry.state.as_ref().is_some_and(|known| known.uid != state.uid);
        entry.state = Some(state);
        if another {
            self.let_all_go(&node.name);
        }
        self.dirty.insert(node.name.clone());
        self.settle();
        true
    }

    /// Somebody calls the GPUs of these indices on a node unhealthy, and no others there: no work is placed on them. Pods that
    /// are there stay.
    pub fn name_unhealthy(&mut self, node: &str, indices: BTreeSet<u32>) {
        if let Some(state) = self.nodes.get_mut(node).and_then(|entry| entry.state.as_mut()) {
            state.name_unhealthy(&indices);
            self.dirty.insert(node.to_owned());
            self.settle();
        }
        match indices.is_empty() {
            true => self.unhealthy.remove(node),
            false => self.unhealthy.insert(node.to_owned(), indices),
        };
    }

    /// Exactly these nodes have GPUs that somebody calls unhealthy.
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

    /// The node is gone. Pods that say they are on it stay known: they count again when a node of this name appears. Nothing is
    /// kept any more for those that departed from it.
    pub fn delete_node(&mut self, name: &str) -> bool {
        self.let_all_go(name);
        let Some(entry) = self.nodes.get_mut(name) else {
            return false;
        };
        let known = entry.state.take();
        self.products.remove(known.as_ref().map_or(&[], |known| &known.gpus));
        let known = known.is_some();
        self.dirty.insert(name.to_owned());
        self.settle();
        known
    }

    /// Exactly these nodes are there.
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

    /// Adds a reservation that another ledger has, without counting anything.
    pub(crate) fn book_as_it_is(&mut self, uid: &str, node: &str, reservation: Reservation) {
        let of_pod = self.reservations.entry(uid.to_owned()).or_default();
        of_pod.insert(node.to_owned(), reservation);
    }

    /// Books what is about to be written on a pod, or changes how far that is. Ignored for a pod that is known to be bound:
    /// what it holds is known better then.
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

    /// Notes how far the write of a reservation is, if there still is one.
    pub fn set_standing(&mut self, uid: &str, node: &str, standing: Standing, since_ns: u64) {
        if let Some(reservation) = self.reservations.get_mut(uid).and_then(|nodes| nodes.get_mut(node)) {
            reservation.standing = standing;
            reservation.since_ns = since_ns;
        }
    }

    /// The API server has carried this write out. None of the others will be: a binding is final.
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

    /// The last write will not be carried out; those before it still may.
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

    /// Gives a reservation back, with all that may have been written. False if there was none.
    pub fn release(&mut self, uid: &str, node: &str) -> bool {
        let released = self.unreserve(uid, node);
        self.settle();
        released
    }

    /// What is being written on this pod for this node.
    pub fn reservation(&self, uid: &str, node: &str) -> Option<&Reservation> {
        self.reservations.get(uid)?.get(node)
    }

    /// All reservations as (UID, node, reservation).
    pub fn reservations(&self) -> impl Iterator<Item = (&str, &str, &Reservation)> {
        self.reservations.iter().flat_map(|(uid, nodes)| {
            nodes
                .iter()
                .map(move |(node, reservation)| (uid.as_str(), node.as_str(), reservation))
        })
    }

    /// Where something is being written on this pod.
    pub(crate) fn reservations_of(&self, uid: &str) -> Option<&BTreeMap<String, Reservation>> {
        self.reservations.get(uid)
    }

    /// Whether something is promised to this pod on any node, or it has one.
    pub fn is_promised(&self, uid: &str) -> bool {
        self.reservations.contains_key(uid) || self.bound_to(uid).is_some()
    }

    /// The node to which this pod is known to be bound, by its own event or by an answer that came before that.
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
        // A reservation counts the pod's CPU and memory, too.
        for node in self.reservations.get(&pod.uid).into_iter().flat_map(BTreeMap::keys) {
            self.dirty.insert(node.clone());
        }
        self.pods.insert(pod);
        true
    }

    fn unlink_pod(&mut self, uid: &str) -> bool {
        self.unreserve_all(uid);
        let Some(pod) = self.pods.remove(uid) else {
            return false;
        };
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

    /// The pod is no longer nominated to this node.
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

    /// Counts the nodes anew that something changed on, and forgets those of which nothing is left.
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
                self.nodes.remove(&name);
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
                entry.usage.most_free = entry.most_free();
                let gpus = entry.state.iter().flat_map(|state| &state.gpus);
                if gpus.zip(&entry.usage.gpus).any(|(gpu, used)| *used > gpu.capacity) {
                    self.overbooked.insert((version, name.clone()));
                }
                self.versions.insert(version, name.clone());
            }
            self.keep_for_nominated(&name);
        }
    }

    /// Nodes that changed after the one with this version, and have a GPU of which more is booked than it has.
    pub(crate) fn overbooked_nodes(&self, since: u64) -> impl Iterator<Item = NodeView<'_>> {
        let changed = self.overbooked.range((since.saturating_add(1), String::new())..);
        changed.filter_map(|(_, name)| self.node(name))
    }

    /// Nodes that changed after the one with this version, in the order of their versions.
    pub fn changed_since(&self, version: u64) -> impl Iterator<Item = NodeView<'_>> {
        let changed = self.versions.range(version.saturating_add(1)..);
        changed.filter_map(|(_, name)| self.node(name))
    }

    /// The version at which a node was last forgotten, which no node has.
    pub fn last_gone(&self) -> u64 {
        self.last_gone
    }

    /// The version of the last change of any node.
    pub fn version(&self) -> u64 {
        self.last_version
    }

    fn count(&self, name: &str, entry: &Entry) -> Usage {
        let mut usage = Usage {
            gpus: vec![MiB::ZERO; entry.state.as_ref().map_or(0, |state| state.gpus.len())],
            ..Usage::default()
        };
        for pod in entry.pods.keys().filter(|pod| !pod.ended()) {
            usage.add_pod(pod);
            let unknown = self.book_pod(&mut usage, entry.state.as_ref(), pod);
            // Nothing is said about a node that has not been seen.
            if entry.state.is_some() {
                usage.oddities.add(pod, unknown);
            }
        }
        for uid in &entry.reserved {
            if let Some(pod) = self.pods.get(uid) {
                usage.add_pod(pod);
            }
            for held in self.reservation(uid, name).into_iter().flat_map(Reservation::possible) {
                self.book(&mut usage, entry.state.as_ref(), held);
            }
        }
        if let Some(state) = entry.state.as_ref().filter(|_| !entry.departed.is_empty()) {
            let kept = self.kept(state, &entry.departed);
            usage.departed = kept.gpus;
            usage.departed_anywhere = kept.anywhere;
        }
        usage
    }

    /// Adds what a bound pod holds to what is taken. Gives the number of GPUs that the node does not have.
    fn book_pod(&self, usage: &mut Usage, state: Option<&NodeState>, pod: &Pod) -> u64 {
        state.map_or(0, |state| book_parts(usage, state, &pod.held, self.parts_of(state, pod)))
    }

    /// Adds what is held to what is taken.
    pub(crate) fn book(&self, usage: &mut Usage, state: Option<&NodeState>, held: &Held) {
        if let Some(state) = state {
            book_parts(usage, state, held, self.parts(state, held));
        }
    }

    /// What a bound pod holds, resolved against a node's GPUs: what its annotations say, or what it asks for where that is more. The kubelet gave it
    /// devices for all of that, so less in the annotations, as somebody may have written it past the extender, frees nothing. A pod that was bound before the unit
    /// was made larger asks in the former one; the node's agent says which that may be.
    pub(crate) fn parts_of(&self, state: &NodeState, pod: &Pod) -> Vec<Part> {
        let mut parts = self.parts(state, &pod.held);
        if parts.is_empty() || !pod.request.wants_memory() {
            return parts;
        }
        let asked = pod
            .request
            .effective_units()
            .and_then(|units| self.unit.memory(units))
            .unwrap_or(MiB(u64::MAX));
        let held = parts.iter().fold(MiB::ZERO, |sum, part| sum.saturating_add(part.memory));
        if held < asked && state.former_unit(pod).is_none() {
            let each = MiB(asked.0.div_ceil(parts.len() as u64));
            for part in &mut parts {
                // A pod that was bound under a larger number of smaller units cannot hold more than there is.
                let gpu = part.position.and_then(|position| state.gpus.get(position));
                part.memory = part.memory.max(gpu.map_or(each, |gpu| each.min(gpu.capacity)));
            }
        }
        parts
    }

    /// What is held, resolved against a node's GPUs.
    pub(crate) fn parts(&self, state: &NodeState, held: &Held) -> Vec<Part> {
        match held {
            Held::Nothing | Held::Unreadable(_) => Vec::new(),
            Held::Allocation(allocation) => allocation
                .gpus
                .iter()
                .map(|share| {
                    let position = state.by_uuid(&share.uuid);
                    let whole = position.and_then(|position| state.gpus.get(position)).filter(|_| share.whole);
                    Part {
                        position,
                        gpu: share.uuid.clone(),
                        memory: whole.map_or(share.memory, |gpu| share.memory.max(gpu.capacity)),
                    }
                })
                .collect(),
            Held::Legacy(legacy) => legacy
                .gpus
                .iter()
                .map(|(index, units)| Part {
                    position: state.by_index(*index),
                    gpu: index.to_string(),
                    memory: self.unit.memory(*units).unwrap_or(MiB(u64::MAX)),
                })
                .collect(),
        }
    }
}

/// Gives the number of GPUs that the node does not have.
fn book_parts(usage: &mut Usage, state: &NodeState, held: &Held, parts: Vec<Part>) -> u64 {
    let mut unknown = 0;
    for part in parts {
        if let Some(used) = part.position.and_then(|position| usage.gpus.get_mut(position)) {
            *used = used.saturating_add(part.memory);
            continue;
        }
        unknown += 1;
        // On a node whose UUIDs are not known it may be any GPU. Where they are known, the GPU is not there
        // any more, and what was on it takes nothing from the others.
        if state.gpus.iter().all(|gpu| gpu.uuid.is_none()) && matches!(held, Held::Allocation(_)) {
            usage.anywhere = usage.anywhere.saturating_add(part.memory);
        }
    }
    unknown
}

impl Usage {
    fn add_pod(&mut self, pod: &Pod) {
        self.pods = self.pods.saturating_add(1);
        self.cpu_milli = self.cpu_milli.saturating_add(pod.cpu_milli);
        self.memory_bytes = self.memory_bytes.saturating_add(pod.memory_bytes);
    }
}

impl Oddities {
    fn add(&mut self, pod: &Pod, unknown_gpus: u64) {
        self.unknown_gpu = self.unknown_gpu.saturating_add(unknown_gpus);
        match &pod.held {
            Held::Unreadable(_) => self.unreadable = self.unreadable.saturating_add(1),
            Held::Nothing if pod.request.wants_memory() => self.not_allocated = self.not_allocated.saturating_add(1),
            Held::Nothing | Held::Allocation(_) | Held::Legacy(_) => {}
        }
    }
}
