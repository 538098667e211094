//! The cluster as the tables show it.

use std::collections::{BTreeMap, HashMap};

use divvy_model::{Allocation, ContainerKind, Health, Held, Inventory, Node, Phase, Pod, PodRequest};
use serde::Serialize;

/// The cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct View {
    /// What one unit is: `GiB`, `MiB`, `256MiB`; empty without a GPU node.
    pub unit: String,
    /// The nodes with GPUs to share, by name.
    pub nodes: Vec<NodeView>,
    /// Units given to pods.
    pub allocated: u64,
    /// Units in all.
    pub total: u64,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// Its name.
    pub name: String,
    /// First InternalIP, else `unknown`.
    pub address: String,
    /// Units given to pods, pending ones among them.
    pub allocated: u64,
    /// Units in all.
    pub total: u64,
    /// Its GPUs by index.
    pub gpus: Vec<GpuView>,
    /// Pods on the node without a GPU that the annotations name.
    pub pending: Vec<PodView>,
    /// Why containers get none of the driver's libraries here, or wrong ones, and what to type; as the inventory says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_trouble: Option<String>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuView {
    /// Its index.
    pub index: u32,
    /// Its UUID, where the node's agent publishes an inventory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Its product name, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Whether work may be placed on it, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<Health>,
    /// Why not, `XID 79`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether the node's kubelet offers its units.
    pub offered: bool,
    /// What is wrong with it, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Held by containers whose pod is gone, in MiB.
    #[serde(rename = "heldMiB", skip_serializing_if = "is_zero")]
    pub held_mib: u64,
    /// Units given to pods.
    pub allocated: u64,
    /// Units in all.
    pub total: u64,
    /// The pods on it, by namespace and name.
    pub pods: Vec<PodView>,
}

/// A pod's units on one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PodView {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Units.
    pub units: u64,
    /// What it asks for, where that is in another unit than the node's: it was bound before `--memory-unit` was changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requested: Option<Requested>,
}

/// So many of this unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Requested {
    /// Units.
    pub units: u64,
    /// `GiB`, `MiB`, `256MiB`.
    pub unit: String,
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

impl NodeView {
    /// Units not given to pods.
    pub fn free(&self) -> u64 {
        self.total.saturating_sub(self.allocated)
    }

    /// Units of the pending pods.
    pub fn pending_units(&self) -> u64 {
        self.pending.iter().fold(0, |sum, pod| sum.saturating_add(pod.units))
    }
}

/// What the view needs of a pod; nothing of one that it does not show.
pub fn shown(pod: Pod) -> Option<Pod> {
    let shows = pod.node.is_some() && !done(&pod) && pod.request.wants_memory();
    shows.then(|| Pod {
        uid: String::new(),
        own_visible: None,
        request: PodRequest::new(pod.request.containers, None),
        ..pod
    })
}

/// Makes the view. Nodes without GPUs to share are left out, as the old tool leaves them out.
pub fn view(nodes: &[Node], pods: &[Pod]) -> View {
    let mut by_node: HashMap<&str, Vec<&Pod>> = HashMap::new();
    for pod in pods.iter().filter(|pod| !done(pod)) {
        if let Some(node) = &pod.node {
            by_node.entry(node).or_default().push(pod);
        }
    }
    let of = |node: &Node| by_node.get(node.name.as_str()).map(Vec::as_slice).unwrap_or_default();
    let mut views: Vec<NodeView> = nodes.iter().filter_map(|node| node_view(node, of(node))).collect();
    views.sort_by(|a, b| a.name.cmp(&b.name));
    let unit = nodes
        .iter()
        .filter(|node| views.binary_search_by(|view| view.name.cmp(&node.name)).is_ok())
        .map(unit_label)
        .next()
        .unwrap_or_default();
    let sum = |part: fn(&NodeView) -> u64| views.iter().fold(0u64, |sum, view| sum.saturating_add(part(view)));
    View {
        unit,
        allocated: sum(|view| view.allocated),
        total: sum(|view| view.total),
        nodes: views,
    }
}

/// An inventory names its unit. Without one the size of a GPU tells: none has 1,000 GiB, and none less than 1,000 MiB (the old
/// tool draws the line at 100 and calls an H200's 140 GiB MiB).
fn unit_label(node: &Node) -> String {
    match &node.inventory {
        Some(Ok(inventory)) => inventory.unit.to_string(),
        _ if node.allocatable_units.checked_div(node.allocatable_gpus).unwrap_or(0) > 1000 => "MiB".to_owned(),
        _ => "GiB".to_owned(),
    }
}

fn node_view(node: &Node, pods: &[&Pod]) -> Option<NodeView> {
    let inventory = match &node.inventory {
        Some(Ok(inventory)) if !inventory.gpus.is_empty() => Some(inventory),
        _ => None,
    };
    if node.allocatable_units == 0 && inventory.is_none() {
        return None;
    }
    let mut gpus = match inventory {
        Some(inventory) => inventory.gpus.iter().map(gpu_of_inventory).collect(),
        None => gpus_by_division(node),
    };
    // The inventory stays when the agent goes. Its kubelet then offers nothing, and after a restart it does not name the resource any more.
    if node.allocatable_units == 0 {
        for gpu in &mut gpus {
            gpu.offered = false;
            if gpu.health == Some(Health::Ok) {
                gpu.message = Some("ok, not offered (is the agent away?)".to_owned());
            }
        }
    }
    gpus.sort_by_key(|gpu: &GpuView| gpu.index);
    let mut pending = Vec::new();
    for pod in pods {
        place(pod, inventory, &mut gpus, &mut pending);
    }
    let by_name = |a: &PodView, b: &PodView| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name));
    gpus.iter_mut().for_each(|gpu| gpu.pods.sort_by(by_name));
    pending.sort_by(by_name);
    let total = match inventory {
        Some(inventory) => inventory.total_units(),
        None => node.allocatable_units,
    };
    let on_gpus = gpus.iter().fold(0u64, |sum, gpu| sum.saturating_add(gpu.allocated));
    let allocated = pending.iter().fold(on_gpus, |sum, pod| sum.saturating_add(pod.units));
    let driver_trouble = inventory.and_then(|inventory| inventory.driver_trouble.clone());
    let address = node.address.clone().unwrap_or_else(|| "unknown".to_owned());
    Some(NodeView {
        name: node.name.clone(),
        address,
        allocated,
        total,
        gpus,
        pending,
        driver_trouble,
    })
}

/// The old tool drops pods by phase alone; one that still runs a container holds memory whatever its phase says.
fn done(pod: &Pod) -> bool {
    matches!(pod.phase, Phase::Succeeded | Phase::Failed) && !pod.container_running
}

fn gpu_of_inventory(gpu: &divvy_model::Gpu) -> GpuView {
    let state = match gpu.health {
        Health::Ok => "ok",
        Health::Failed => "failed",
        Health::Lost => "lost",
    };
    let message = match &gpu.reason {
        Some(reason) => Some(format!("{state} ({reason})")),
        None => Some(state.to_owned()).filter(|_| gpu.health != Health::Ok),
    };
    GpuView {
        index: gpu.index,
        uuid: Some(gpu.uuid.clone()),
        model: Some(gpu.model.clone()),
        health: Some(gpu.health),
        reason: gpu.reason.clone(),
        offered: gpu.health == Health::Ok,
        message,
        held_mib: gpu.held.0,
        allocated: 0,
        total: gpu.units,
        pods: Vec::new(),
    }
}

fn gpus_by_division(node: &Node) -> Vec<GpuView> {
    let count = node.allocatable_gpus;
    let total = node.allocatable_units.checked_div(count).unwrap_or(0);
    // A count that no machine has comes from a status that somebody wrote by hand.
    (0..u32::try_from(count.min(1024)).unwrap_or(0))
        .map(|index| GpuView {
            index,
            uuid: None,
            model: None,
            health: None,
            reason: None,
            offered: true,
            message: None,
            held_mib: 0,
            allocated: 0,
            total,
            pods: Vec::new(),
        })
        .collect()
}

/// Adds a pod to the GPUs that it is on, or to the pending ones.
fn place(pod: &Pod, inventory: Option<&Inventory>, gpus: &mut [GpuView], pending: &mut Vec<PodView>) {
    let asked = pod
        .request
        .containers
        .iter()
        .filter(|container| container.kind == ContainerKind::App)
        .fold(0u64, |sum, container| sum.saturating_add(container.units));
    if asked == 0 && !pod.request.wants_memory() {
        return;
    }
    let shares: BTreeMap<Option<u32>, u64> = match &pod.held {
        Held::Allocation(allocation) => by_allocation(allocation, inventory),
        Held::Legacy(legacy) if legacy.gpus.len() == 1 => legacy.gpus.keys().map(|index| (Some(*index), asked)).collect(),
        Held::Legacy(legacy) => legacy.gpus.iter().map(|(index, units)| (Some(*index), *units)).collect(),
        Held::Nothing | Held::Unreadable(_) => BTreeMap::from([(None, asked)]),
    };
    let requested = requested(pod, inventory);
    for (index, units) in shares {
        let row = PodView {
            name: pod.name.clone(),
            namespace: pod.namespace.clone(),
            units,
            requested: requested.clone(),
        };
        match gpus.iter_mut().find(|gpu| Some(gpu.index) == index) {
            Some(gpu) => {
                gpu.allocated = gpu.allocated.saturating_add(units);
                gpu.pods.push(row);
            }
            None => pending.push(row),
        }
    }
}

/// What a pod asks for, if it was bound in one of the node's other units.
fn requested(pod: &Pod, inventory: Option<&Inventory>) -> Option<Requested> {
    let Held::Allocation(allocation) = &pod.held else {
        return None;
    };
    let inventory = inventory?;
    let unit = inventory.units().find(|unit| allocation.is_in(*unit, &pod.request))?;
    (unit != inventory.unit).then(|| Requested {
        units: pod.request.effective_units().unwrap_or(u64::MAX),
        unit: unit.to_string(),
    })
}

/// Units per GPU of an allocation of ours; a GPU that the inventory does not know is `None`.
fn by_allocation(allocation: &Allocation, inventory: Option<&Inventory>) -> BTreeMap<Option<u32>, u64> {
    let mut shares = BTreeMap::new();
    for share in &allocation.gpus {
        let index = inventory
            .and_then(|inventory| inventory.gpu(&share.uuid))
            .map(|gpu| gpu.index);
        let unit = inventory.map_or(divvy_model::MemoryUnit::GIB, |inventory| inventory.unit);
        let sum: &mut u64 = shares.entry(index).or_default();
        *sum = sum.saturating_add(share.memory.0.div_ceil(unit.mib()));
    }
    shares
}
