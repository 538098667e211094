use std::collections::BTreeSet;
use std::fmt;

use divvy_model::limits::NODE_GPUS;
use divvy_model::{
    Enforcement, Error, Gpu, Health, Inventory, MemoryUnit, MiB, Node, Prefer, TestRun, Vendor, WholeKind, legacy,
};

use crate::hash::rank;
use crate::node_gpus::{GpuRef, NodeGpus};
use crate::products::{Product, Products};
use crate::speed;
use crate::topology::Topology;

/// A node's GPUs, and whether and on what basis the extender may offer them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeState {
    pub name: String,
    /// The UID of the node object. A node object with the same name and another UID is a different node.
    pub uid: String,
    /// Where the description of the GPUs comes from, and whether they may be offered.
    pub source: GpuSource,
    /// The GPUs in ascending order of vendor and index, including those that failed or cannot be offered.
    pub gpus: Vec<GpuState>,
    /// Units in which pods of this node may request memory, in addition to the cluster's unit ([`Inventory::other_units`]).
    pub other_units: BTreeSet<MemoryUnit>,
    /// What another device plugin offers as a whole on this node: the node has capacity of the resource, but Divvy's agent offers none of it.
    /// Which GPUs or MIG devices these are is not known.
    pub elsewhere: BTreeSet<WholeKind>,
    /// How the GPUs are connected, by their positions in [`NodeState::gpus`].
    pub topology: Topology,
    /// Allocatable CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Allocatable main memory in bytes.
    pub memory_bytes: u64,
    /// The number of pods that the node can take (`status.allocatable.pods`).
    pub pods: u64,
    /// Whether the node is cordoned. For policies and reports only: kube-scheduler decides whether a cordoned node takes pods.
    pub unschedulable: bool,
}

/// One GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuState {
    /// The vendor, whose driver reports the GPU.
    pub vendor: Vendor,
    /// As what the GPU is offered as a whole; `None` if it is not. A pod that gets the GPU in this way holds all of its memory. If the
    /// GPU is shared as well, the memory is shared as long as no pod has the whole GPU.
    pub whole: Option<WholeKind>,
    /// Whether this is a part of a GPU, such as a MIG device.
    pub is_part: bool,
    /// The driver's UUID; `None` on a node known only by gpushare's two capacities, where the index is the GPU's only name.
    pub uuid: Option<String>,
    /// The index among the vendor's GPUs.
    pub index: u32,
    /// Product name; empty if unknown.
    pub model: String,
    /// The number of units that the GPU offers (`DEV` in gpushare).
    pub units: u64,
    /// The memory that the GPU offers: its units times the size of a unit; all of it for a GPU that is offered only as a whole.
    pub capacity: MiB,
    /// The maximum memory that all pods together may hold according to the node's inventory ([`Inventory::capacity`]), even
    /// while the kubelet offers a different amount. If no more than this is promised, every pod can get its memory.
    pub most: MiB,
    /// The memory that the GPU has in total; where that is not known, the memory that it offers.
    pub total: MiB,
    /// The GPU's estimated speed: higher is faster, 0 if nothing is known (see the module `speed`).
    pub speed: u64,
    /// The memory that containers still hold although their pod object is gone. It must not be granted again yet.
    pub held: MiB,
    /// Whether a pod without an allocation that names the GPU has it as a whole ([`Gpu::held_by_pod`]).
    pub held_by_pod: Option<bool>,
    /// The GPU's health: pods are placed only on a healthy GPU.
    pub health: Health,
    /// Why the GPU is not healthy, for example `XID 79`.
    pub reason: Option<String>,
    /// The run whose pod may use the GPU while it is being tested.
    pub test: Option<TestRun>,
    /// What holds pods to their shares of the GPU; `None` if nothing does.
    pub enforcement: Option<Enforcement>,
    /// The hash of the UUID, so that a pod that names other GPUs can be compared without reading the text.
    pub(crate) uuid_hash: u64,
    /// The number of the GPU's product in the ledger; `None` outside a ledger.
    pub(crate) product: Option<Product>,
    /// Whether the GPU counts as failed only because it was named unhealthy ([`crate::Ledger::name_unhealthy`]), although its
    /// inventory says that it is healthy.
    pub(crate) only_named: bool,
}

impl GpuState {
    /// Return [`NodeState::gpus`] of a node, without the rest of its state. The list is empty if the node has no GPUs, or if they cannot be told apart
    /// ([`UnusableGpus::Uneven`], [`UnusableGpus::Unreadable`]).
    pub fn list(node: &Node, unit: MemoryUnit) -> Vec<GpuState> {
        read_gpus(node, unit).1
    }

    /// Report whether the GPU's memory is shared. A GPU can be offered as a whole as well.
    pub fn is_shared(&self) -> bool {
        self.whole.is_none() || self.units > 0 || self.vendor.is_shared_by_default()
    }

    /// Return how much a pod with this preference likes the GPU: higher is better. Without a preference, all GPUs return 0.
    pub fn preference(&self, prefer: Option<Prefer>) -> u64 {
        match prefer {
            None => 0,
            Some(Prefer::MostMemory) => self.total.0,
            Some(Prefer::LeastMemory) => u64::MAX - self.total.0,
            Some(Prefer::Fastest) => self.speed,
        }
    }
}

fn topology(node: &Node, gpus: &[GpuState]) -> Topology {
    let Some(Ok(inventory)) = &node.inventory else {
        return Topology::default();
    };
    if inventory.gpus.iter().all(|gpu| gpu.links.is_empty()) {
        return Topology::default();
    }
    let links = |uuid: &str| inventory.gpu(uuid).map_or(&[][..], |gpu| gpu.links.as_slice());
    let uuids = gpus.iter().map(|gpu| gpu.uuid.as_deref().unwrap_or_default());
    let gpus: Vec<_> = uuids.map(|uuid| (uuid, links(uuid))).collect();
    Topology::new(&gpus)
}

/// Where the description of a node's GPUs comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuSource {
    /// A valid annotation `divvy.dev/inventory`, which gives each GPU's own size.
    Inventory,
    /// The capacity of gpu-mem divided by gpu-count, the way gpushare reads a node.
    Division,
    /// The node's GPUs are not offered to any pod.
    Unusable(UnusableGpus),
}

/// Why a node's GPUs are not offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnusableGpus {
    /// The node has no capacity of gpu-mem.
    NotShared,
    /// The inventory counts in a different unit than the cluster.
    OtherUnit {
        /// The inventory's unit.
        node: MemoryUnit,
        /// The cluster's unit.
        cluster: MemoryUnit,
    },
    /// The units of the inventory do not add up to the node's capacity: the kubelet has not caught up yet, or another device
    /// plugin took over the node.
    UnitsDiffer {
        /// The number of units of all GPUs in the inventory.
        inventory: u64,
        /// The node's capacity of gpu-mem.
        capacity: u64,
    },
    /// The agent or the kubelet is starting or stopping: the kubelet would refuse pods that arrive now.
    Unschedulable,
    /// The inventory cannot be read.
    Unreadable(Error),
    /// There is no inventory, and the capacity cannot be divided evenly among the node's GPUs.
    Uneven {
        /// The node's capacity of gpu-mem.
        units: u64,
        /// The node's capacity of gpu-count.
        gpus: u64,
    },
}

impl fmt::Display for UnusableGpus {
    /// Say what is wrong and what to do, as text that follows "node n1: ".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnusableGpus::NotShared => f.write_str("it offers no aliyun.com/gpu-mem (does the Divvy agent run there?)"),
            UnusableGpus::OtherUnit { node, cluster } => write!(
                f,
                "its agent counts memory in {node}, the cluster in {cluster}; give both the same --memory-unit"
            ),
            UnusableGpus::UnitsDiffer { inventory, capacity } => write!(
                f,
                "its inventory lists {inventory} units of gpu-mem but the node's capacity is {capacity}; \
                 this passes when the kubelet has caught up with the agent; otherwise another device plugin advertises gpu-mem there"
            ),
            UnusableGpus::Unschedulable => f.write_str(
                "its agent or its kubelet is starting or stopping; this passes when the agent has registered with the kubelet",
            ),
            UnusableGpus::Unreadable(error) => write!(f, "{error}"),
            UnusableGpus::Uneven { units, gpus } => write!(
                f,
                "it has no annotation divvy.dev/inventory, and its {units} units of gpu-mem cannot be divided evenly among {gpus} GPUs{}",
                if *gpus > NODE_GPUS as u64 {
                    format!(" (at most {NODE_GPUS} are accepted)")
                } else {
                    String::new()
                }
            ),
        }
    }
}

impl NodeState {
    /// Read a node: its inventory if that adds up to the capacity, otherwise gpushare's division if that can be trusted
    /// (`docs/design/placement.md`).
    ///
    /// When an inventory does not add up, the division is trusted only if it has the same number of GPUs, and no GPU counts as
    /// larger than the inventory says. So a node that Aliyun's device plugin took over keeps working, and no GPU is overcommitted
    /// while the kubelet has not caught up with a change.
    pub fn read(node: &Node, unit: MemoryUnit) -> NodeState {
        let (source, gpus) = read_gpus(node, unit);
        NodeState {
            name: node.name.clone(),
            uid: node.uid.clone(),
            source,
            topology: topology(node, &gpus),
            elsewhere: elsewhere(node, &gpus),
            other_units: match &node.inventory {
                Some(Ok(inventory)) => inventory.other_units.clone(),
                _ => BTreeSet::new(),
            },
            gpus,
            cpu_milli: node.cpu_milli,
            memory_bytes: node.memory_bytes,
            pods: node.pods,
            unschedulable: node.unschedulable,
        }
    }

    /// Return why the node's GPUs are not offered in one of the two ways: as a whole, or as shared GPUs if `whole` is
    /// `None`. Most reasons are about units of gpu-mem, which do not concern whole GPUs.
    pub fn unusable(&self, whole: Option<WholeKind>) -> Option<&UnusableGpus> {
        match (&self.source, whole) {
            (GpuSource::Inventory | GpuSource::Division, _) => None,
            (GpuSource::Unusable(why @ (UnusableGpus::Unschedulable | UnusableGpus::Unreadable(_))), _) => Some(why),
            (GpuSource::Unusable(_), Some(_)) => None,
            (GpuSource::Unusable(why), None) => Some(why),
        }
    }

    /// Report whether this GPU is offered, shared or as a whole.
    pub(crate) fn is_offered(&self, gpu: &GpuState) -> bool {
        (gpu.is_shared() && self.unusable(None).is_none()) || (gpu.whole.is_some() && self.unusable(gpu.whole).is_none())
    }

    /// Report whether the node shares GPUs of a vendor other than the default one.
    pub(crate) fn shares_other_vendors(&self) -> bool {
        // The GPUs of the default vendor come first.
        let others = self.gpus.iter().rev().take_while(|gpu| gpu.vendor != Vendor::default());
        others.into_iter().any(GpuState::is_shared)
    }

    /// Mark exactly the healthy shared GPUs with these indices as failed. GPUs that are offered only as a whole, and those of other
    /// vendors than gpushare's, stay as they are, because gpushare does not know them.
    pub(crate) fn name_unhealthy(&mut self, indices: &BTreeSet<u32>) {
        let known = |gpu: &&mut GpuState| gpu.is_shared() && gpu.vendor == Vendor::default();
        for gpu in self.gpus.iter_mut().filter(known) {
            if gpu.only_named {
                (gpu.health, gpu.reason, gpu.only_named) = (Health::Ok, None, false);
            }
            if gpu.health == Health::Ok && indices.contains(&gpu.index) {
                gpu.health = Health::Failed;
                gpu.reason = Some(format!(
                    "named in ConfigMap {}/unhealthy-gpu-{}",
                    legacy::UNHEALTHY_NAMESPACE,
                    self.name
                ));
                gpu.only_named = true;
            }
        }
    }

    /// Count the node's GPUs among the products, and set the numbers of their products.
    pub(crate) fn hold_products(&mut self, products: &mut Products) {
        for gpu in &mut self.gpus {
            gpu.product = Some(products.hold(&gpu.model));
        }
    }

    /// Remove the node's GPUs from the products' counts.
    pub(crate) fn release_products(&self, products: &mut Products) {
        for gpu in &self.gpus {
            products.release(&gpu.model, gpu.product);
        }
    }
}

impl NodeGpus for NodeState {
    fn gpu(&self, position: usize) -> Option<GpuRef<'_>> {
        self.gpus.get(position).map(|gpu| GpuRef {
            vendor: gpu.vendor,
            uuid: gpu.uuid.as_deref(),
            index: gpu.index,
            whole: gpu.whole,
            is_shared: gpu.is_shared(),
            is_lost: gpu.health == Health::Lost,
            capacity: gpu.capacity,
        })
    }

    fn other_units(&self) -> impl Iterator<Item = MemoryUnit> {
        self.other_units.iter().copied()
    }
}

/// Return what another device plugin offers as a whole.
///
/// An inventory stays on the node when its agent stops. If the kubelet then offers whole GPUs, but nothing of what the agent
/// registers along with them, the node went back to the other plugin. After a plugin has ended, the kubelet still lists its
/// capacity for some minutes.
fn elsewhere(node: &Node, gpus: &[GpuState]) -> BTreeSet<WholeKind> {
    let leaving = match &node.inventory {
        Some(Err(_)) => return BTreeSet::new(),
        Some(Ok(inventory)) => inventory.unschedulable,
        None => false,
    };
    let gone = (node.capacity_units, node.capacity_gpus) == (0, 0)
        || (leaving && (node.allocatable_units, node.allocatable_gpus) == (0, 0));
    // The agent serves all kinds of a vendor, or none. The kubelet lists a kind of which no device is left for some seconds.
    let serves = |gpu: &GpuState, kind: WholeKind| gpu.vendor == kind.vendor() && (gpu.whole.is_some() || gpu.is_part);
    let is_shared = |kind: WholeKind| gpus.iter().any(|gpu| gpu.vendor == kind.vendor() && gpu.is_shared());
    let ours = |kind: WholeKind| gpus.iter().any(|gpu| serves(gpu, kind)) && !(gone && is_shared(kind));
    node.whole.keys().copied().filter(|kind| !ours(*kind)).collect()
}

fn read_gpus(node: &Node, unit: MemoryUnit) -> (GpuSource, Vec<GpuState>) {
    match &node.inventory {
        None => read_division(node, unit),
        Some(Ok(inventory)) => read_inventory(node, inventory, unit),
        Some(Err(_)) if node.capacity_units == 0 => (GpuSource::Unusable(UnusableGpus::NotShared), Vec::new()),
        Some(Err(error)) => (GpuSource::Unusable(UnusableGpus::Unreadable(error.clone())), Vec::new()),
    }
}

fn read_division(node: &Node, unit: MemoryUnit) -> (GpuSource, Vec<GpuState>) {
    match divided(node) {
        Ok(each) => {
            // `divided` bounds the count.
            let count = u32::try_from(node.capacity_gpus).unwrap_or(0);
            let gpus = (0..count)
                .map(|index| GpuState {
                    // gpushare serves the GPUs of one vendor, which is also that of an inventory that names none.
                    vendor: Vendor::default(),
                    whole: None,
                    is_part: false,
                    uuid: None,
                    index,
                    model: String::new(),
                    units: each,
                    capacity: unit.memory(each).unwrap_or(MiB::ZERO),
                    most: unit.memory(each).unwrap_or(MiB::ZERO),
                    total: unit.memory(each).unwrap_or(MiB::ZERO),
                    speed: 0,
                    held: MiB::ZERO,
                    held_by_pod: None,
                    health: Health::Ok,
                    reason: None,
                    uuid_hash: 0,
                    product: None,
                    test: None,
                    enforcement: None,
                    only_named: false,
                })
                .collect();
            (GpuSource::Division, gpus)
        }
        Err(why) => (GpuSource::Unusable(why), Vec::new()),
    }
}

fn read_inventory(node: &Node, inventory: &Inventory, unit: MemoryUnit) -> (GpuSource, Vec<GpuState>) {
    let mut gpus: Vec<GpuState> = inventory.gpus.iter().map(|gpu| read_gpu(inventory, gpu)).collect();
    gpus.sort_by(|a, b| (a.vendor, a.index, &a.uuid).cmp(&(b.vendor, b.index, &b.uuid)));
    let inventory_units = inventory.total_units();
    let offers_whole = gpus.iter().any(|gpu| gpu.whole.is_some());
    let shares = node.capacity_units > 0;
    let source = if !shares && !offers_whole {
        GpuSource::Unusable(UnusableGpus::NotShared)
    } else if inventory.unschedulable {
        GpuSource::Unusable(UnusableGpus::Unschedulable)
    } else if !shares && inventory_units == 0 {
        GpuSource::Inventory
    } else if !shares {
        GpuSource::Unusable(UnusableGpus::NotShared)
    } else if inventory.unit != unit {
        GpuSource::Unusable(UnusableGpus::OtherUnit {
            node: inventory.unit,
            cluster: unit,
        })
    } else if inventory_units == node.capacity_units {
        GpuSource::Inventory
    } else {
        match divided(node) {
            Ok(each) if usize::try_from(node.capacity_gpus) == Ok(gpus.iter().filter(|gpu| gpu.is_shared()).count()) => {
                for gpu in gpus.iter_mut().filter(|gpu| gpu.is_shared()) {
                    gpu.units = gpu.units.min(each);
                    gpu.capacity = unit.memory(gpu.units).unwrap_or(MiB::ZERO);
                }
                GpuSource::Division
            }
            _ => GpuSource::Unusable(UnusableGpus::UnitsDiffer {
                inventory: inventory_units,
                capacity: node.capacity_units,
            }),
        }
    };
    (source, gpus)
}

fn read_gpu(inventory: &Inventory, gpu: &Gpu) -> GpuState {
    // A whole GPU whose size the driver does not say still has something that a pod can hold, so that it is not free twice.
    let size = MiB(gpu.total.0.max(1));
    let (capacity, most, total) = if gpu.is_shared() {
        (
            gpu.at_least_whole(inventory.unit.memory(gpu.units).unwrap_or(MiB::ZERO)),
            inventory.capacity(gpu),
            gpu.total,
        )
    } else {
        (size, size, size)
    };
    GpuState {
        vendor: gpu.vendor,
        whole: gpu.whole,
        is_part: gpu.partition.is_some(),
        uuid: Some(gpu.uuid.clone()),
        index: gpu.index,
        model: gpu.model.clone(),
        units: gpu.units,
        capacity,
        most,
        total,
        speed: speed::of(gpu),
        held: gpu.held,
        held_by_pod: gpu.held_by_pod,
        health: gpu.health,
        reason: gpu.reason.clone(),
        test: gpu.test.clone(),
        enforcement: gpu.enforcement,
        uuid_hash: rank(&gpu.uuid),
        product: None,
        only_named: false,
    }
}

/// Return the number of units per GPU by gpushare's division. The division must come out even, as it does on every node that
/// gpushare's plugin serves: a remainder means GPUs of different sizes, and an average would promise too much memory of the small
/// ones.
fn divided(node: &Node) -> Result<u64, UnusableGpus> {
    let (units, gpus) = (node.capacity_units, node.capacity_gpus);
    if units == 0 {
        return Err(UnusableGpus::NotShared);
    }
    if gpus == 0 || gpus > NODE_GPUS as u64 || units % gpus != 0 {
        return Err(UnusableGpus::Uneven { units, gpus });
    }
    Ok(units / gpus)
}
