//! The API server: objects, their history, and watches that lag.

use crate::Violation;
use std::collections::BTreeMap;

use divvy_extender::core::BindingRequest;
use divvy_extender::election::LeaseRecord;
use divvy_model::{Allocation, Gpu, Health, Held, Inventory, MiB, Node, Phase, Pod, PodKey, PodRequest};

/// The number of MiB in one unit on every node.
pub const GIB: u64 = 1024;

/// The longest time for which an API server may hold a request.
const REQUEST_TIMEOUT_NS: u64 = 60_000_000_000;

/// A change of an object.
#[derive(Debug, Clone)]
pub enum PodEvent {
    Applied(Pod),
    Deleted(Pod),
}

/// The content of a pod's Binding, which is kept even after the pod is gone.
#[derive(Debug, Clone)]
pub struct Bound {
    pub node: String,
    pub held: Held,
    /// Whether the extender sent the Binding. If not, the pod's owner wrote `spec.nodeName` and the annotations.
    pub ours: bool,
}

impl Bound {
    /// Return the allocation, if the extender made it.
    pub fn allocation(&self) -> Option<&Allocation> {
        match &self.held {
            Held::Allocation(allocation) if self.ours => Some(allocation),
            _ => None,
        }
    }
}

/// A Binding that has received no response, and may still be carried out.
#[derive(Debug, Clone)]
pub struct Late {
    pub binding: BindingRequest,
    pub since_ns: u64,
    /// The number of the process that sent the Binding.
    pub life: u32,
}

/// The current objects and their history.
#[derive(Debug, Default)]
pub struct ApiModel {
    /// The monotonic time, which is the same for all machines.
    pub now_ns: u64,
    /// The Lease with its version.
    pub lease: Option<(LeaseRecord, u64)>,
    pub late: Vec<Late>,
    /// The number of the extender process that most recently listed the pods in order to bind.
    pub writer: u32,
    /// Whether a Binding of an earlier process was carried out after the list of the current `writer`. For the rest of the
    /// history, the ledger may then allocate more memory than there is.
    pub two_writers: bool,
    /// Whether an extender was told that an existing pod is gone. Until the extender checks again, it does not count this pod,
    /// and may allocate too much memory.
    pub misled: bool,
    lives: u32,
    pub pods: BTreeMap<PodKey, Pod>,
    pub nodes: BTreeMap<String, Node>,
    pub pod_log: Vec<PodEvent>,
    pub node_log: Vec<Node>,
    /// The Bindings by pod UID.
    pub bound: BTreeMap<String, Bound>,
    /// For each GPU, the largest amount of memory that was ever reported as shareable.
    pub most: BTreeMap<String, MiB>,
    created: u32,
}

/// The API server's verdict on a Binding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BindingVerdict {
    Created,
    Conflict(String),
    NotFound,
}

impl ApiModel {
    /// Let time pass. Requests that the API server has held for too long are dropped.
    pub fn tick(&mut self, ns: u64) {
        self.now_ns += ns;
        let now = self.now_ns;
        self.late.retain(|late| now - late.since_ns < REQUEST_TIMEOUT_NS);
    }

    /// Return the number for a new process.
    pub fn new_life(&mut self) -> u32 {
        self.lives += 1;
        self.lives
    }

    /// Create the Lease, or replace it if its current version is `version`. As with any update, a write that changes nothing
    /// creates no new version.
    pub fn write_lease(&mut self, record: &LeaseRecord, version: Option<&str>) -> Option<String> {
        let now = self.lease.as_ref().map(|(_, version)| version.to_string());
        if now.as_deref() != version {
            return None;
        }
        let next = match &self.lease {
            Some((known, version)) if known == record => *version,
            Some((_, version)) => version + 1,
            None => 1,
        };
        self.lease = Some((record.clone(), next));
        Some(next.to_string())
    }

    pub fn create(&mut self, name: &str, request: PodRequest, priority: i32) -> Option<String> {
        self.create_as(name, |pod| {
            pod.request = request;
            pod.priority = priority;
        })
    }

    /// Create a pod whose owner has already written a node and an allocation, in a cluster that does not prevent this.
    pub fn forge(&mut self, name: &str, request: PodRequest, node: &str, held: Held) -> Option<String> {
        let uid = self.create_as(name, |pod| {
            pod.request = request;
            pod.node = Some(node.to_owned());
            pod.held = held.clone();
        })?;
        let bound = Bound {
            node: node.to_owned(),
            held,
            ours: false,
        };
        self.bound.insert(uid.clone(), bound);
        Some(uid)
    }

    fn create_as(&mut self, name: &str, fill: impl FnOnce(&mut Pod)) -> Option<String> {
        let key = key(name);
        if self.pods.contains_key(&key) {
            return None;
        }
        self.created += 1;
        let uid = format!("{name}{}", self.created);
        let mut pod = Pod {
            uid: uid.clone(),
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            ..Pod::default()
        };
        fill(&mut pod);
        self.pod_log.push(PodEvent::Applied(pod.clone()));
        self.pods.insert(key, pod);
        Some(uid)
    }

    pub fn pod(&self, uid: &str) -> Option<&Pod> {
        self.pods.values().find(|pod| pod.uid == uid)
    }

    /// Change the pod with this UID, if it exists.
    pub fn update(&mut self, uid: &str, change: impl FnOnce(&mut Pod)) {
        if let Some(pod) = self.pods.values_mut().find(|pod| pod.uid == uid) {
            let before = pod.clone();
            change(pod);
            if *pod != before {
                self.pod_log.push(PodEvent::Applied(pod.clone()));
            }
        }
    }

    /// Request a deletion as `kubectl delete` does. A pod that is not bound to a node is removed immediately.
    pub fn delete(&mut self, uid: &str) {
        match self.pod(uid) {
            Some(pod) if pod.node.is_none() => self.remove(uid),
            Some(_) => self.update(uid, |pod| pod.deleting = true),
            None => {}
        }
    }

    /// Write or clear `status.nominatedNodeName`, as kube-scheduler does.
    pub fn nominate(&mut self, uid: &str, node: Option<&str>) {
        self.update(uid, |pod| pod.nominated = node.map(Box::from));
    }

    /// Return the unbound pods that were nominated to a node because other pods were evicted there for them.
    pub fn nominated(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values().filter(|pod| pod.nominated.is_some() && pod.node.is_none())
    }

    /// Remove a pod's object.
    pub fn remove(&mut self, uid: &str) {
        let key = self.pod(uid).map(Pod::key);
        if let Some(pod) = key.and_then(|key| self.pods.remove(&key)) {
            self.pod_log.push(PodEvent::Deleted(pod));
        }
    }

    /// Carry out a Binding as `BindingREST.Create` (registry/core/pod/storage) does: write node and annotations in one
    /// transaction. `life` is the number of the process that sent the Binding.
    pub fn bind(&mut self, binding: &BindingRequest, life: u32) -> Result<BindingVerdict, Violation> {
        let key = PodKey {
            namespace: binding.namespace.clone(),
            name: binding.name.clone(),
        };
        let Some(pod) = self.pods.get_mut(&key) else {
            return Ok(BindingVerdict::NotFound);
        };
        let refused = if pod.uid != binding.uid {
            Some("the UID in the precondition is another one")
        } else if pod.deleting {
            Some("pod is being deleted, cannot be assigned to a host")
        } else if pod.node.is_some() {
            Some("pod is already assigned to a node")
        } else {
            None
        };
        if let Some(text) = refused {
            return Ok(BindingVerdict::Conflict(text.to_owned()));
        }
        let held = Held::from_annotations(&binding.annotations);
        if !matches!(held, Held::Allocation(_)) {
            return Err(Violation(format!(
                "the Binding of {} carries no allocation: {held:?}",
                binding.uid
            )));
        }
        self.bound.insert(
            binding.uid.clone(),
            Bound {
                node: binding.node.clone(),
                held: held.clone(),
                ours: true,
            },
        );
        self.two_writers |= life != self.writer;
        pod.node = Some(binding.node.clone());
        // The field stays in the status but has no meaning anymore.
        pod.nominated = None;
        pod.held = held;
        self.pod_log.push(PodEvent::Applied(pod.clone()));
        Ok(BindingVerdict::Created)
    }

    /// Write the status of a pod, as its kubelet does. Nothing happens if no object with this UID exists.
    pub fn status(&mut self, uid: &str, phase: Phase, container_running: bool) {
        self.update(uid, |pod| {
            // Terminal phases are final.
            if !matches!(pod.phase, Phase::Succeeded | Phase::Failed) {
                pod.phase = phase;
            }
            pod.container_running = container_running;
        });
    }

    pub fn update_node(&mut self, name: &str, change: impl FnOnce(&mut Node)) {
        let node = self.nodes.entry(name.to_owned()).or_insert_with(|| Node {
            uid: name.to_owned(),
            name: name.to_owned(),
            ..Node::default()
        });
        let before = node.clone();
        change(node);
        if *node != before {
            if let Some(Ok(inventory)) = &node.inventory {
                for gpu in &inventory.gpus {
                    let offered = inventory.unit.memory(gpu.units).unwrap();
                    let most = self.most.entry(gpu.uuid.clone()).or_default();
                    *most = offered.max(*most);
                }
            }
            self.node_log.push(node.clone());
        }
    }

    /// Apply the agent's patch of the inventory annotation. The inventory is converted to text and back.
    pub fn publish(&mut self, node: &str, inventory: &Inventory) {
        let same = self
            .nodes
            .get(node)
            .is_some_and(|node| node.inventory.as_ref().is_some_and(|have| have.as_ref() == Ok(inventory)));
        if !same {
            self.update_node(node, |node| node.inventory = Some(Inventory::parse(&inventory.to_json())));
        }
    }

    /// Return the GPUs in the inventory of a node.
    pub fn gpus(&self, node: &str) -> &[Gpu] {
        gpus(self.nodes.get(node))
    }

    /// Return how much memory of a GPU is held by pods that have not ended.
    pub fn ledger(&self, uuid: &str) -> MiB {
        self.sum(uuid, |_| true)
    }

    /// Return how much memory of a GPU the extender has allocated to pods that have not ended.
    pub fn promised(&self, uuid: &str) -> MiB {
        self.sum(uuid, |pod| self.bound.get(&pod.uid).is_some_and(|bound| bound.ours))
    }

    fn sum(&self, uuid: &str, counts: impl Fn(&Pod) -> bool) -> MiB {
        let pods = self.pods.values().filter(|pod| counts(pod));
        pods.map(|pod| booked(pod, uuid, pod.node.as_deref().map_or(&[], |node| self.gpus(node))))
            .fold(MiB::ZERO, MiB::saturating_add)
    }
}

/// Return the GPUs in the inventory of a node object.
pub fn gpus(node: Option<&Node>) -> &[Gpu] {
    match node.and_then(|node| node.inventory.as_ref()) {
        Some(Ok(inventory)) => &inventory.gpus,
        _ => &[],
    }
}

/// Return [`gpus`] with the numbers of units that a scheduler may allocate. While the kubelet lags behind the inventory, this is
/// the smaller of two numbers: the units in the inventory, and the node's capacity divided by the number of GPUs.
pub fn offered(node: &Node) -> Vec<Gpu> {
    let mut offered = gpus(Some(node)).to_vec();
    let (units, count) = (node.capacity_units, node.capacity_gpus);
    let agree = offered.iter().map(|gpu| gpu.units).sum::<u64>() == units;
    if !agree && units > 0 && count == offered.len() as u64 && units % count == 0 {
        for gpu in &mut offered {
            gpu.units = gpu.units.min(units / count);
        }
    }
    offered
}

pub fn key(name: &str) -> PodKey {
    PodKey {
        namespace: "default".to_owned(),
        name: name.to_owned(),
    }
}

/// Compute in a simple way how much memory one pod takes of a GPU of its node. `gpus` are the GPUs of that node. A pod that has
/// no node or has ended takes nothing. Otherwise it takes the memory in its annotations, but at least what the kubelet gives it.
pub fn booked(pod: &Pod, uuid: &str, gpus: &[Gpu]) -> MiB {
    if pod.node.is_none() || pod.ended() {
        return MiB::ZERO;
    }
    // At most what the GPU offers, if it offers less than before.
    let gpu = gpus.iter().find(|gpu| gpu.uuid == uuid);
    if pod.request.whole.is_some() {
        return taken_by(&pod.held, uuid, gpu, true).unwrap_or(MiB::ZERO);
    }
    let asked = pod.request.effective_units().unwrap();
    let given = MiB(asked * GIB).min(gpu.map_or(MiB(u64::MAX), |gpu| MiB(gpu.units * GIB)));
    let at_least = |memory: MiB| {
        if memory < MiB(asked * GIB) {
            memory.max(given)
        } else {
            memory
        }
    };
    match &pod.held {
        Held::Allocation(allocation) => match (allocation.share(uuid), allocation.gpus.len()) {
            (Some(share), 1) => at_least(share.memory),
            (Some(share), _) => share.memory,
            (None, _) => MiB::ZERO,
        },
        Held::Legacy(legacy) => {
            let units = legacy.gpus.iter().find(|(index, _)| at_index(gpus, **index) == Some(uuid));
            units.map_or(MiB::ZERO, |(_, units)| at_least(MiB(units * GIB)))
        }
        Held::Nothing | Held::Unreadable(_) => MiB::ZERO,
    }
}

/// Return the GPU that an index in gpushare's annotations means. If two GPUs have this index, return the one that is present.
pub fn at_index(gpus: &[Gpu], index: u32) -> Option<&str> {
    let here = gpus.iter().filter(|gpu| gpu.index == index);
    here.min_by_key(|gpu| (gpu.health == Health::Lost, &gpu.uuid))
        .map(|gpu| gpu.uuid.as_str())
}

/// Return how much memory of a GPU a reservation takes.
pub fn reserved(held: &Held, uuid: &str, gpus: &[Gpu]) -> Option<MiB> {
    let whole = matches!(held, Held::Allocation(allocation) if allocation.gpus.iter().any(|share| share.whole));
    taken_by(held, uuid, gpus.iter().find(|gpu| gpu.uuid == uuid), whole)
}

/// Return how much memory of a GPU the extender's allocation takes. A whole GPU is all that the GPU offers now.
fn taken_by(held: &Held, uuid: &str, gpu: Option<&Gpu>, whole: bool) -> Option<MiB> {
    let Held::Allocation(_) = held else { return None };
    let memory = share(held, uuid)?;
    Some(gpu.filter(|_| whole).map_or(memory, |gpu| MiB(gpu.units * GIB)))
}

/// Return how much memory of a GPU the extender's allocation assigns to the pod.
pub fn share(held: &Held, uuid: &str) -> Option<MiB> {
    match held {
        Held::Allocation(allocation) => allocation.share(uuid).map(|share| share.memory),
        Held::Legacy(_) => panic!("every node has an inventory, so the extender must write more than gpushare's form"),
        Held::Nothing | Held::Unreadable(_) => None,
    }
}

/// A watch of pods: its position in the history, and the pods that it has shown so far.
#[derive(Debug, Clone, Default)]
pub struct PodWatch {
    node: Option<String>,
    at: usize,
    pub view: BTreeMap<String, Pod>,
}

/// An event as a watcher receives it.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "there is one at a time")]
pub enum WatcherEvent {
    Applied(Pod),
    Deleted(String),
}

impl PodWatch {
    /// Create a watch of all pods, or of the pods on one node (field selector `spec.nodeName`).
    pub fn new(node: Option<&str>) -> PodWatch {
        PodWatch {
            node: node.map(str::to_owned),
            ..PodWatch::default()
        }
    }

    fn selects(&self, pod: &Pod) -> bool {
        self.node.is_none() || pod.node == self.node
    }

    /// Return the next event that is relevant for this watch.
    pub fn next(&mut self, api: &ApiModel) -> Option<WatcherEvent> {
        while let Some(event) = api.pod_log.get(self.at) {
            self.at += 1;
            match event {
                PodEvent::Applied(pod) if self.selects(pod) => {
                    self.view.insert(pod.uid.clone(), pod.clone());
                    return Some(WatcherEvent::Applied(pod.clone()));
                }
                PodEvent::Deleted(pod) if self.view.remove(&pod.uid).is_some() => {
                    return Some(WatcherEvent::Deleted(pod.uid.clone()));
                }
                PodEvent::Applied(_) | PodEvent::Deleted(_) => {}
            }
        }
        None
    }

    /// Make the API server take a list, which arrives later.
    pub fn ask(&self, api: &ApiModel) -> ListInFlight {
        ListInFlight {
            pods: api.pods.values().filter(|pod| self.selects(pod)).cloned().collect(),
            at: api.pod_log.len(),
        }
    }

    /// Deliver a list. The watch continues from the moment at which the API server took the list.
    pub fn arrive(&mut self, listing: ListInFlight) -> Vec<Pod> {
        self.at = listing.at;
        self.view = listing.pods.iter().map(|pod| (pod.uid.clone(), pod.clone())).collect();
        listing.pods
    }

    /// Return the position in the history up to which the watch has shown events.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Report whether the watch has shown all events so far.
    pub fn is_current(&self, api: &ApiModel) -> bool {
        self.at == api.pod_log.len()
    }
}

/// A list of pods that the API server has taken and that is on its way.
#[derive(Debug, Clone)]
pub struct ListInFlight {
    pub pods: Vec<Pod>,
    /// The length of the history when the list was taken.
    pub at: usize,
}
