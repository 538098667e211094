//! The allocations of the cluster's GPUs as a value, and what is used of them ([`amounts`]). `divvy inspect` prints the allocations as tables and as JSON;
//! `divvy top` and the web page show them with what is used and with the pods that wait.

#![forbid(unsafe_code)]

pub mod amounts;
mod no_usage;
mod waiting;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::sync::Arc;

use divvy_model::{
    ContainerKind, Enforcement, Health, Held, MemoryUnit, MiB, Node, Partition, Pod, PodRequest, Vendor, WholeKind,
};
use divvy_placement::parts::{self, HeldShare};
use divvy_placement::{GpuRef, GpuState, NodeGpus};
use serde::Serialize;

pub use no_usage::NoUsage;
pub use waiting::WaitingPod;

/// The allocations in a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct View {
    /// The size of one unit: `GiB`, `MiB`, or a size such as `256MiB`. Empty if no node has GPUs.
    pub unit: String,
    /// The nodes with GPUs that Divvy offers, sorted by name. Two views of a cluster can have the nodes in common that did not change between them.
    pub nodes: Vec<Arc<NodeView>>,
    /// The units allocated to pods in the whole cluster.
    pub allocated: u64,
    /// The units of all nodes together.
    pub total: u64,
    /// The whole GPUs of all nodes together, by resource (such as `amd.com/gpu`). Omitted if there are no such GPUs.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub whole: BTreeMap<Cow<'static, str>, WholeSum>,
}

/// The numbers of whole GPUs that are offered under one resource name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct WholeSum {
    /// The number of GPUs that are allocated to pods.
    pub allocated: u64,
    /// The number of all GPUs, including failed ones.
    pub total: u64,
}

/// The allocations on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// The node's name.
    pub name: String,
    /// The node's first InternalIP, else `unknown`.
    pub address: String,
    /// The size of the node's units, which may differ from that of another node while it is being changed.
    #[serde(skip)]
    pub unit: MemoryUnit,
    /// The number of units that are allocated to pods, including pending pods.
    pub allocated: u64,
    /// The number of units of all the node's GPUs.
    pub total: u64,
    /// The node's GPUs, sorted by vendor and index.
    pub gpus: Vec<GpuView>,
    /// The pods on the node whose annotations name none of the node's GPUs.
    pub pending: Vec<PodView>,
    /// The pods on the node that have whole GPUs but no allocation, because the kubelet chose the GPUs. Omitted if there are
    /// none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unnamed: Vec<UnnamedView>,
    /// The reason why containers on this node get no driver libraries, or wrong ones, and the command that helps. Both come
    /// from the inventory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_trouble: Option<String>,
}

/// The state of a GPU, and the allocations on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuView {
    /// The GPU's vendor. `None` if the node has no inventory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vendor: Option<Vendor>,
    /// The resource through which the GPU is offered as a whole, such as `nvidia.com/gpu`. Omitted if it is not. A GPU that also has units is
    /// offered in both ways.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whole: Option<WholeKind>,
    /// The GPU's index among the node's GPUs of its vendor.
    pub index: u32,
    /// The GPU's UUID. `None` if the node has no inventory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// The GPU of which this is a part, such as a MIG device. `None` for a GPU that is not divided.
    #[serde(skip)]
    pub partition: Option<Partition>,
    /// The GPU's product name. `None` if the node has no inventory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The GPU's health. `None` if the node has no inventory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<Health>,
    /// The reason why the GPU is not healthy, such as `XID 79`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What holds pods to their shares of the GPU: `cgroup` (the driver) or `guard`. Omitted if nothing does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<&'static str>,
    /// Whether the node's kubelet offers the GPU's units.
    pub offered: bool,
    /// What is wrong with the GPU, as text for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The memory in MiB that containers of departed pods still hold.
    #[serde(rename = "heldMiB", skip_serializing_if = "is_zero")]
    pub held_mib: u64,
    /// The memory that is free by [`parts::free`], regardless of the GPU's health. What only the extender knows is not subtracted: allocations that are
    /// being written, departed pods that the inventory does not count yet, and what is kept for nominated pods. For a GPU that is offered only as a whole,
    /// this is all of its memory, or nothing.
    #[serde(rename = "freeMiB")]
    pub free: MiB,
    /// The number of units that are allocated to pods.
    pub allocated: u64,
    /// The pods' shares of the compute time, in percent. Pods without such a share are not counted, and may use what the others leave.
    #[serde(skip_serializing_if = "is_none")]
    pub cores: u32,
    /// The number of the GPU's units.
    pub total: u64,
    /// The pods on the GPU, sorted by namespace and name.
    pub pods: Vec<PodView>,
}

/// A pod's units on one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PodView {
    /// The pod's UID.
    #[serde(skip)]
    pub uid: String,
    /// The pod's name.
    pub name: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The number of the pod's units on this GPU, in the node's unit. If the pod has the whole GPU, this is the number of all
    /// the GPU's units.
    pub units: u64,
    /// The memory behind `units`, which are rounded up. If the pod has the whole GPU, this is all memory that the GPU offers.
    #[serde(skip)]
    pub memory: MiB,
    /// Whether the pod has the whole GPU.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub whole: bool,
    /// The pod's share of the compute time, in percent. Omitted if it has no limit.
    #[serde(skip_serializing_if = "is_none")]
    pub cores: u32,
    /// What held the pod to its share when it was placed: `cgroup` or `guard`. Omitted if nothing did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<&'static str>,
    /// The pod's request in its own unit, if the pod was bound before `--memory-unit` was changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requested: Option<Box<Requested>>,
    /// When the pod was created, in seconds since 1970. `None` if it is not known.
    #[serde(skip)]
    pub created_s: Option<NonZeroU32>,
}

/// A pod with whole GPUs that the kubelet chose. No allocation says which GPUs these are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UnnamedView {
    /// The pod's name.
    pub name: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The resource that the pod requests: `amd.com/gpu`.
    pub resource: Cow<'static, str>,
    /// The number of GPUs.
    pub gpus: u64,
}

/// A pod's request in a unit that differs from the node's unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Requested {
    /// The number of units.
    pub units: u64,
    /// The size of a unit: `GiB`, `MiB`, or a size such as `256MiB`.
    pub unit: String,
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes the field by reference")]
fn is_none(cores: &u32) -> bool {
    *cores == 0
}

impl View {
    /// Return the view of these nodes, which are sorted by name. Its unit is that of the first node.
    pub fn of(nodes: Vec<Arc<NodeView>>) -> View {
        let sum = |part: fn(&NodeView) -> u64| nodes.iter().fold(0u64, |sum, node| sum.saturating_add(part(node)));
        View {
            unit: nodes.first().map(|node| node.unit.to_string()).unwrap_or_default(),
            allocated: sum(|node| node.allocated),
            total: sum(|node| node.total),
            whole: whole(&nodes),
            nodes,
        }
    }
}

impl NodeView {
    /// Return a node with its pods. Pods on other nodes are not shown. `None` if it has no GPUs that Divvy offers.
    pub fn of<'a>(node: Node, pods: impl IntoIterator<Item = &'a Pod>) -> Option<NodeView> {
        let mut builder = Builder::default();
        builder.node(node);
        for pod in pods {
            builder.pod(pod);
        }
        builder.nodes.pop().map(ended)
    }

    /// Return the GPUs whose memory is shared.
    pub fn shared(&self) -> impl Iterator<Item = &GpuView> {
        self.gpus.iter().filter(|gpu| gpu.is_shared())
    }

    /// Return the number of units that pods can still be allocated: the sum of the whole units that are free on each shared GPU, and no more than
    /// kube-scheduler counts as free, which includes pending pods.
    pub fn free(&self) -> u64 {
        let on_gpus = self.shared().map(|gpu| self.unit.units_in(gpu.free));
        let free = on_gpus.fold(0, u64::saturating_add);
        free.min(self.total.saturating_sub(self.allocated))
    }

    /// Return the number of units of the pending pods.
    pub fn pending_units(&self) -> u64 {
        self.pending.iter().fold(0, |sum, pod| sum.saturating_add(pod.units))
    }
}

impl PodView {
    /// Return `namespace/name`, or the name alone of something that is in no namespace, such as a process of the host.
    pub fn full_name(&self) -> String {
        match self.namespace.as_str() {
            "" => self.name.clone(),
            namespace => format!("{namespace}/{}", self.name),
        }
    }
}

impl GpuView {
    /// Report whether the GPU's memory is shared. A GPU can be offered as a whole as well.
    pub fn is_shared(&self) -> bool {
        self.whole.is_none() || self.total > 0 || self.vendor.is_none_or(Vendor::is_shared_by_default)
    }
}

/// Reduce a pod to what the view needs, to save memory in large clusters. `None` for a pod that the view does not show.
pub fn shown(pod: Pod) -> Option<Pod> {
    // A pod holds what its annotations say, even if it requests nothing.
    let holds = matches!(pod.held, Held::Allocation(_) | Held::Legacy(_));
    let shows = pod.node.is_some() && !pod.ended() && (pod.request.wants_gpus() || holds);
    shows.then_some(Pod {
        own_visible: None,
        request: PodRequest {
            rules: None,
            ..pod.request
        },
        ..pod
    })
}

/// Compute the view. Nodes without GPUs that Divvy offers are omitted, as in gpushare's tool.
pub fn view<'a>(nodes: impl IntoIterator<Item = &'a Node>, pods: impl IntoIterator<Item = &'a Pod>) -> View {
    let mut builder = Builder::default();
    nodes.into_iter().cloned().for_each(|node| builder.node(node));
    for pod in pods {
        // A pod on another node is not shown.
        builder.pod(pod);
    }
    builder.finish()
}

/// Computes a view from nodes and pods as they arrive, so that a large cluster is never in memory as nodes, as pods, and as a view.
#[derive(Debug, Default)]
pub struct Builder {
    nodes: Vec<BegunNode>,
    by_name: HashMap<String, usize>,
    /// The unit of the first node.
    unit: Option<MemoryUnit>,
}

/// A node, and what of its inventory its pods are compared with.
#[derive(Debug)]
struct BegunNode {
    view: NodeView,
    /// The memory that each GPU offers, in the order of the view's GPUs.
    capacities: Box<[MiB]>,
    /// The memory of parts that may be on any GPU.
    anywhere: MiB,
    /// The node's unit, and the other units in which its pods may have made their requests. `None` if it has no inventory with GPUs.
    units: Option<(MemoryUnit, BTreeSet<MemoryUnit>)>,
}

impl Builder {
    /// Add a node.
    pub fn node(&mut self, node: Node) {
        let name = node.name.clone();
        let unit = unit(&node);
        if let Some(begun) = begin(node, unit) {
            self.unit.get_or_insert(unit);
            self.by_name.insert(name, self.nodes.len());
            self.nodes.push(begun);
        }
    }

    /// Add a pod, in any order of the pods. Report whether it can be forgotten: its node was added before, or it is not to be shown.
    pub fn pod(&mut self, pod: &Pod) -> bool {
        let Some(node) = pod.node.as_ref().filter(|_| !pod.ended()) else {
            return true;
        };
        let Some(position) = self.by_name.get(node) else {
            return false;
        };
        self.nodes[*position].place(pod);
        true
    }

    /// Return the view.
    pub fn finish(self) -> View {
        let mut nodes: Vec<Arc<NodeView>> = self.nodes.into_iter().map(|begun| Arc::new(ended(begun))).collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        View {
            unit: self.unit.map(|unit| unit.to_string()).unwrap_or_default(),
            ..View::of(nodes)
        }
    }
}

/// Count the whole GPUs of these nodes by resource.
fn whole(nodes: &[Arc<NodeView>]) -> BTreeMap<Cow<'static, str>, WholeSum> {
    let mut sums: BTreeMap<Cow<'static, str>, WholeSum> = BTreeMap::new();
    for node in nodes {
        for (gpu, kind) in node.gpus.iter().filter_map(|gpu| Some((gpu, gpu.whole?))) {
            let sum = sums.entry(kind.resource()).or_default();
            sum.total += 1;
            sum.allocated += u64::from(gpu.pods.iter().any(|pod| pod.whole));
        }
        for pod in &node.unnamed {
            let sum = sums.entry(pod.resource.clone()).or_default();
            sum.allocated = sum.allocated.saturating_add(pod.gpus);
        }
    }
    sums
}

/// Return a node's unit. Without an inventory, guess it from the number of units of a GPU: no GPU has 1,000 GiB or
/// more, and none has less than 1,000 MiB. (gpushare's tool uses a limit of 100, and therefore shows the 140 GiB of an H200 as
/// MiB.)
fn unit(node: &Node) -> MemoryUnit {
    match &node.inventory {
        Some(Ok(inventory)) => inventory.unit,
        _ if node.allocatable_units.checked_div(node.allocatable_gpus).unwrap_or(0) > 1000 => MemoryUnit::MIB,
        _ => MemoryUnit::GIB,
    }
}

/// Return a node without its pods. `None` if it has no GPUs that Divvy offers.
fn begin(node: Node, unit: MemoryUnit) -> Option<BegunNode> {
    let by_division = gpus_by_division(&node);
    let states = GpuState::list(&node, unit);
    let inventory = match node.inventory {
        Some(Ok(inventory)) if !inventory.gpus.is_empty() => Some(inventory),
        _ => None,
    };
    if node.allocatable_units == 0 && inventory.is_none() {
        return None;
    }
    let total = match &inventory {
        Some(inventory) => inventory.total_units(),
        None => node.allocatable_units,
    };
    let (mut gpus, units, driver_trouble) = match inventory {
        Some(inventory) => (
            inventory.gpus.into_iter().map(gpu_of_inventory).collect(),
            Some((inventory.unit, inventory.other_units)),
            inventory.driver_trouble,
        ),
        None => (by_division, None, None),
    };
    // The inventory stays on the node when the agent stops. The kubelet then offers no units, and after a restart it no longer lists the resource.
    if node.allocatable_units == 0 {
        for gpu in gpus.iter_mut().filter(|gpu| gpu.is_shared()) {
            gpu.offered = false;
            if gpu.health == Some(Health::Ok) {
                gpu.message = Some("ok, not offered (is the agent away?)".to_owned());
            }
        }
    }
    // The order of the states.
    gpus.sort_by(|a: &GpuView, b| (a.vendor, a.index, &a.uuid).cmp(&(b.vendor, b.index, &b.uuid)));
    let capacities = match states.as_slice() {
        // The ledger does not know the GPUs of such a node. They are shown by gpushare's division, even if it leaves a remainder.
        [] => gpus
            .iter()
            .map(|gpu| unit.memory(gpu.total).unwrap_or(MiB(u64::MAX)))
            .collect(),
        states => states.iter().map(|state| state.capacity).collect(),
    };
    // The vector may still have the larger size of the inventory's.
    gpus.shrink_to_fit();
    let view = NodeView {
        name: node.name,
        address: node.address.unwrap_or_else(|| "unknown".to_owned()),
        unit,
        allocated: 0,
        total,
        gpus,
        pending: Vec::new(),
        unnamed: Vec::new(),
        driver_trouble,
    };
    Some(BegunNode {
        view,
        capacities,
        anywhere: MiB::ZERO,
        units,
    })
}

/// Return a node whose pods have all been added, with its sums.
fn ended(begun: BegunNode) -> NodeView {
    let BegunNode {
        view: mut node,
        capacities,
        anywhere,
        units: _,
    } = begun;
    for (position, gpu) in node.gpus.iter_mut().enumerate() {
        let capacity = capacities.get(position).copied().unwrap_or(MiB::ZERO);
        let used = gpu.pods.iter().fold(MiB::ZERO, |sum, pod| sum.saturating_add(pod.memory));
        gpu.free = parts::free(capacity, used, anywhere, MiB(gpu.held_mib));
    }
    let by_name = |a: &PodView, b: &PodView| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name));
    node.gpus.iter_mut().for_each(|gpu| gpu.pods.sort_by(by_name));
    node.pending.sort_by(by_name);
    node.unnamed
        .sort_by(|a: &UnnamedView, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    let on_gpus = node.gpus.iter().fold(0u64, |sum, gpu| sum.saturating_add(gpu.allocated));
    node.allocated = node.pending.iter().fold(on_gpus, |sum, pod| sum.saturating_add(pod.units));
    node
}

/// Add a pod to a list that few are added to. A vector that makes room for more in advance takes half of the memory of a large cluster's view.
fn push(pods: &mut Vec<PodView>, pod: PodView) {
    pods.reserve_exact(1);
    pods.push(pod);
}

fn gpu_of_inventory(gpu: divvy_model::Gpu) -> GpuView {
    let state = gpu.health.word();
    let message = match &gpu.reason {
        Some(reason) => Some(format!("{state} ({reason})")),
        None => Some(state.to_owned()).filter(|_| gpu.health != Health::Ok),
    };
    GpuView {
        vendor: Some(gpu.vendor),
        whole: gpu.whole,
        index: gpu.index,
        uuid: Some(gpu.uuid),
        partition: gpu.partition,
        model: Some(gpu.model),
        health: Some(gpu.health),
        reason: gpu.reason,
        enforcement: gpu.enforcement.map(Enforcement::name),
        offered: gpu.health == Health::Ok,
        message,
        held_mib: gpu.held.0,
        free: MiB::ZERO,
        allocated: 0,
        cores: 0,
        total: gpu.units,
        pods: Vec::new(),
    }
}

fn gpus_by_division(node: &Node) -> Vec<GpuView> {
    let count = node.allocatable_gpus;
    let total = node.allocatable_units.checked_div(count).unwrap_or(0);
    // Limit the count, because anyone who may write node status can set any number.
    (0..u32::try_from(count.min(1024)).unwrap_or(0))
        .map(|index| GpuView {
            vendor: None,
            whole: None,
            index,
            uuid: None,
            partition: None,
            model: None,
            health: None,
            reason: None,
            enforcement: None,
            offered: true,
            message: None,
            held_mib: 0,
            free: MiB::ZERO,
            allocated: 0,
            cores: 0,
            total,
            pods: Vec::new(),
        })
        .collect()
}

impl NodeGpus for BegunNode {
    fn gpu(&self, position: usize) -> Option<GpuRef<'_>> {
        self.view.gpus.get(position).map(|gpu| GpuRef {
            vendor: gpu.vendor.unwrap_or_default(),
            uuid: gpu.uuid.as_deref(),
            index: gpu.index,
            whole: gpu.whole,
            is_shared: gpu.is_shared(),
            is_lost: gpu.health == Some(Health::Lost),
            capacity: self.capacities.get(position).copied().unwrap_or(MiB::ZERO),
        })
    }

    fn other_units(&self) -> impl Iterator<Item = MemoryUnit> {
        self.units.iter().flat_map(|(_, others)| others).copied()
    }
}

impl BegunNode {
    /// Add a pod to the GPUs that it holds, to the pending pods, and to those of whose GPUs only the number is known.
    fn place(&mut self, pod: &Pod) {
        let parts = parts::of_pod(pod, self, self.view.unit);
        let unnamed = self.unnamed(pod, &parts);
        let anywhere = parts.iter().filter(|part| part.is_anywhere(&pod.held, self));
        let anywhere = anywhere.fold(MiB::ZERO, |sum, part| sum.saturating_add(part.memory));
        self.anywhere = self.anywhere.saturating_add(anywhere);
        let requested = requested(pod, self.units.as_ref());
        let node = &mut self.view;
        let row = |units: u64, memory: MiB, whole: bool| PodView {
            uid: pod.uid.clone(),
            name: pod.name.clone(),
            namespace: pod.namespace.clone(),
            units,
            memory,
            whole,
            cores: 0,
            enforcement: None,
            requested: requested.clone().filter(|_| !whole),
            created_s: pod.created_s,
        };
        let (mut gone, is_empty) = (None, parts.is_empty());
        for part in parts {
            let units = part.memory.0.div_ceil(node.unit.mib());
            let Some(gpu) = part.position.and_then(|position| node.gpus.get_mut(position)) else {
                let (sum, memory) = gone.unwrap_or((0_u64, MiB::ZERO));
                gone = Some((sum.saturating_add(units), memory.saturating_add(part.memory)));
                continue;
            };
            let units = if part.whole { gpu.total } else { units };
            gpu.allocated = gpu.allocated.saturating_add(units);
            gpu.cores = gpu.cores.saturating_add(part.cores);
            let enforcement = enforcement(pod, &part).filter(|_| !part.whole);
            push(
                &mut gpu.pods,
                PodView {
                    cores: part.cores,
                    enforcement,
                    ..row(units, part.memory, part.whole)
                },
            );
        }
        if pod.request.wants_memory() && is_empty {
            let asked = asked(pod);
            gone = Some((asked, node.unit.memory(asked).unwrap_or(MiB(u64::MAX))));
        }
        // What a pod holds of a GPU that is gone counts only if it requests memory, or if the GPU may be there.
        let is_there = pod.request.wants_memory() || anywhere > MiB::ZERO;
        if let Some((units, memory)) = gone.filter(|_| is_there) {
            push(&mut node.pending, row(units, memory, false));
        }
        node.unnamed.extend(unnamed);
    }

    /// Return the whole GPUs of a pod of which only the number is known, or which the node no longer has.
    fn unnamed(&self, pod: &Pod, parts: &[HeldShare]) -> Option<UnnamedView> {
        let request = pod.request.whole.as_deref()?;
        // Another device plugin may offer the resource. Then Divvy has nothing to show.
        self.view.gpus.iter().find(|gpu| gpu.whole == Some(request.kind))?;
        let unnamed = parts::unnamed(pod, self, parts).map_or(0, |(_, gpus)| gpus);
        let gone = parts.iter().filter(|part| part.position.is_none()).count() as u64;
        let gpus = unnamed.saturating_add(gone);
        (gpus > 0).then(|| UnnamedView {
            name: pod.name.clone(),
            namespace: pod.namespace.clone(),
            resource: request.kind.resource(),
            gpus,
        })
    }
}

/// Return the units of a pod's containers as gpushare's tool adds them up.
fn asked(pod: &Pod) -> u64 {
    let containers = pod.request.containers.iter();
    let apps = containers.filter(|container| container.kind == ContainerKind::App);
    apps.fold(0, |sum, container| sum.saturating_add(container.units))
}

/// Return what enforces a pod's share of a GPU, as its allocation says.
fn enforcement(pod: &Pod, part: &HeldShare) -> Option<&'static str> {
    let Held::Allocation(allocation) = &pod.held else {
        return None;
    };
    allocation.share(&part.gpu)?.enforcement.map(Enforcement::name)
}

/// Return a pod's request in its own unit, if the pod was bound while the node had another unit.
fn requested(pod: &Pod, units: Option<&(MemoryUnit, BTreeSet<MemoryUnit>)>) -> Option<Box<Requested>> {
    let Held::Allocation(allocation) = &pod.held else {
        return None;
    };
    let (own, others) = units?;
    let mut units = std::iter::once(own).chain(others);
    let unit = units.find(|unit| allocation.is_in(**unit, &pod.request))?;
    (unit != own).then(|| {
        Box::new(Requested {
            units: pod.request.effective_units().unwrap_or(u64::MAX),
            unit: unit.to_string(),
        })
    })
}
