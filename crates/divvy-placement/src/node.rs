use std::collections::BTreeSet;
use std::fmt;

use divvy_model::limits::NODE_GPUS;
use divvy_model::{Error, Health, Held, Inventory, MemoryUnit, MiB, Node, Pod, Prefer, legacy};

use crate::Topology;
use crate::hash::rank;
use crate::products::Product;
use crate::speed;

/// What is known of one node: its GPUs, and whether and from what they may be offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeState {
    /// The node's name.
    pub name: String,
    /// The node object's UID; another one under the same name is another node.
    pub uid: String,
    /// What the GPUs below were read from, and whether they may be offered.
    pub source: Source,
    /// The GPUs in ascending order of index, those that failed or cannot be offered among them.
    pub gpus: Vec<GpuState>,
    /// Units in which pods of this node may ask, beside the cluster's ([`Inventory::other_units`]).
    pub other_units: BTreeSet<MemoryUnit>,
    /// How they are connected, by their positions in the list.
    pub topology: Topology,
    /// Allocatable CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Allocatable main memory in bytes.
    pub memory_bytes: u64,
    /// Allocatable pods.
    pub pods: u64,
    /// Cordoned. For policies and reports; whether a cordoned node takes pods is kube-scheduler's decision.
    pub unschedulable: bool,
}

/// One GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuState {
    /// NVML's UUID; `None` on a node that is known only by gpushare's two capacities, where the index is the only name.
    pub uuid: Option<String>,
    /// NVML index.
    pub index: u32,
    /// Product name; empty if unknown.
    pub model: String,
    /// Units that it offers in all (what gpushare calls DEV).
    pub units: u64,
    /// Memory that it offers in all: the units' worth.
    pub capacity: MiB,
    /// Memory that pods may have of it together, by the node's inventory even while the kubelet offers something else ([`Inventory::capacity`]): who has been promised no more
    /// than this will get it.
    pub most: MiB,
    /// Memory that it has in all; where that is not known, what it offers.
    pub total: MiB,
    /// How fast it is, by an estimate: the higher, the faster; 0 if nothing is known of it.
    pub speed: u64,
    /// Held by containers whose pod object is gone; not to be given again yet.
    pub held: MiB,
    /// Whether work may be placed on it.
    pub health: Health,
    /// Why not, `XID 79`.
    pub reason: Option<String>,
    /// Of its UUID, so that a pod that names others need not look at the text.
    pub(crate) uuid_hash: u64,
    /// Its product among those of the ledger; `None` outside of one, or if the ledger knows too many others.
    pub(crate) product: Option<Product>,
    /// It is well by all else, and only somebody's word keeps work off it ([`crate::Ledger::name_unhealthy`]).
    pub(crate) only_named: bool,
}

impl GpuState {
    /// The higher, the more a pod with this preference likes it; all are alike without one.
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

/// Where a node's GPUs were read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A valid annotation `divvy.dev/inventory`: each GPU by its own size.
    Inventory,
    /// Capacity of gpu-mem divided by gpu-count, as gpushare reads a node.
    Division,
    /// The node is offered to nobody.
    Unusable(Unusable),
}

/// Why a node's GPUs are not offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unusable {
    /// The node has no capacity of gpu-mem.
    NotShared,
    /// The inventory counts in another unit than the cluster.
    OtherUnit {
        /// The inventory's unit.
        node: MemoryUnit,
        /// The cluster's.
        cluster: MemoryUnit,
    },
    /// The inventory's units are not the node's capacity: the kubelet has not caught up yet, or another
    /// plugin took the node over.
    UnitsDiffer {
        /// Units of all GPUs of the inventory.
        inventory: u64,
        /// The node's capacity of gpu-mem.
        capacity: u64,
    },
    /// The agent starts or ends, or the kubelet does: the kubelet would refuse what comes now.
    Unschedulable,
    /// The inventory cannot be read.
    Unreadable(Error),
    /// No inventory, and the capacity cannot be divided evenly among the GPUs that the node says it has.
    Uneven {
        /// The node's capacity of gpu-mem.
        units: u64,
        /// The node's capacity of gpu-count.
        gpus: u64,
    },
}

impl fmt::Display for Unusable {
    /// What is wrong and what to do, to be read after "node n1: ".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::NotShared => f.write_str("it offers no aliyun.com/gpu-mem (does the Divvy agent run there?)"),
            Unusable::OtherUnit { node, cluster } => write!(
                f,
                "its agent counts memory in {node}, the cluster in {cluster}; give both the same --memory-unit"
            ),
            Unusable::UnitsDiffer { inventory, capacity } => write!(
                f,
                "its inventory lists {inventory} units of gpu-mem but the node's capacity is {capacity}; \
                 this passes when the kubelet has caught up with the agent, else another device plugin advertises gpu-mem there"
            ),
            Unusable::Unschedulable => f.write_str(
                "its agent or its kubelet is starting or stopping; this passes when the agent has registered with the kubelet",
            ),
            Unusable::Unreadable(error) => write!(f, "{error}"),
            Unusable::Uneven { units, gpus } => write!(
                f,
                "it has no annotation divvy.dev/inventory, and its {units} units of gpu-mem cannot be divided evenly among {gpus} GPUs{}",
                if *gpus > NODE_GPUS as u64 {
                    format!(" (at most {NODE_GPUS} are believed)")
                } else {
                    String::new()
                }
            ),
        }
    }
}

impl NodeState {
    /// Reads a node (DESIGN.md section 8, "Inventory"): its inventory while that adds up to the capacity,
    /// else gpushare's division where it can be trusted.
    ///
    /// When an inventory does not add up, the division is trusted only if it names as many GPUs, and no GPU is taken
    /// for larger than the inventory says: so a node that Aliyun's plugin took over goes on, and none is overcommitted
    /// while the kubelet has not caught up with a change.
    pub fn read(node: &Node, unit: MemoryUnit) -> NodeState {
        let (source, gpus) = match &node.inventory {
            None => read_division(node, unit),
            Some(Ok(inventory)) => read_inventory(node, inventory, unit),
            Some(Err(_)) if node.capacity_units == 0 => (Source::Unusable(Unusable::NotShared), Vec::new()),
            Some(Err(error)) => (Source::Unusable(Unusable::Unreadable(error.clone())), Vec::new()),
        };
        NodeState {
            name: node.name.clone(),
            uid: node.uid.clone(),
            source,
            topology: topology(node, &gpus),
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

    /// GPUs of these indices, and no others, count as failed though they are well.
    pub(crate) fn name_unhealthy(&mut self, indices: &BTreeSet<u32>) {
        for gpu in &mut self.gpus {
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

    /// The one of the node's other units in which a bound pod was allocated what it asks for, by the sums.
    pub fn former_unit(&self, pod: &Pod) -> Option<MemoryUnit> {
        let Held::Allocation(allocation) = &pod.held else {
            return None;
        };
        let units = pod.request.effective_units()?;
        let mut others = self.other_units.iter();
        others.find(|unit| unit.memory(units) == Some(allocation.total())).copied()
    }

    /// Position in [`NodeState::gpus`] of the GPU with this UUID.
    pub fn by_uuid(&self, uuid: &str) -> Option<usize> {
        self.gpus.iter().position(|gpu| gpu.uuid.as_deref() == Some(uuid))
    }

    /// Position in [`NodeState::gpus`] of the GPU with this index. Where a card was replaced two have it: then it is the one that is there, as
    /// for the node's agent.
    pub fn by_index(&self, index: u32) -> Option<usize> {
        let of_index = self.gpus.iter().enumerate().filter(|(_, gpu)| gpu.index == index);
        // Of equals the first.
        let present = of_index.min_by_key(|(_, gpu)| gpu.health == Health::Lost);
        present.map(|(position, _)| position)
    }
}

fn read_division(node: &Node, unit: MemoryUnit) -> (Source, Vec<GpuState>) {
    match divided(node) {
        Ok(each) => {
            // `divided` bounds the count.
            let count = u32::try_from(node.capacity_gpus).unwrap_or(0);
            let gpus = (0..count)
                .map(|index| GpuState {
                    uuid: None,
                    index,
                    model: String::new(),
                    units: each,
                    capacity: unit.memory(each).unwrap_or(MiB::ZERO),
                    most: unit.memory(each).unwrap_or(MiB::ZERO),
                    total: unit.memory(each).unwrap_or(MiB::ZERO),
                    speed: 0,
                    held: MiB::ZERO,
                    health: Health::Ok,
                    reason: None,
                    uuid_hash: 0,
                    product: None,
                    only_named: false,
                })
                .collect();
            (Source::Division, gpus)
        }
        Err(why) => (Source::Unusable(why), Vec::new()),
    }
}

fn read_inventory(node: &Node, inventory: &Inventory, unit: MemoryUnit) -> (Source, Vec<GpuState>) {
    let mut gpus: Vec<GpuState> = inventory
        .gpus
        .iter()
        .map(|gpu| GpuState {
            uuid: Some(gpu.uuid.clone()),
            index: gpu.index,
            model: gpu.model.clone(),
            units: gpu.units,
            capacity: inventory.unit.memory(gpu.units).unwrap_or(MiB::ZERO),
            most: inventory.capacity(gpu),
            total: gpu.total,
            speed: speed::of(gpu),
            held: gpu.held,
            health: gpu.health,
            reason: gpu.reason.clone(),
            uuid_hash: rank(&gpu.uuid),
            product: None,
            only_named: false,
        })
        .collect();
    gpus.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
    let inventory_units = inventory.total_units();
    let source = if node.capacity_units == 0 {
        Source::Unusable(Unusable::NotShared)
    } else if inventory.unschedulable {
        Source::Unusable(Unusable::Unschedulable)
    } else if inventory.unit != unit {
        Source::Unusable(Unusable::OtherUnit {
            node: inventory.unit,
            cluster: unit,
        })
    } else if inventory_units == node.capacity_units {
        Source::Inventory
    } else {
        match divided(node) {
            Ok(each) if usize::try_from(node.capacity_gpus) == Ok(gpus.len()) => {
                for gpu in &mut gpus {
                    gpu.units = gpu.units.min(each);
                    gpu.capacity = unit.memory(gpu.units).unwrap_or(MiB::ZERO);
                }
                Source::Division
            }
            _ => Source::Unusable(Unusable::UnitsDiffer {
                inventory: inventory_units,
                capacity: node.capacity_units,
            }),
        }
    };
    (source, gpus)
}

/// Units per GPU by gpushare's division. It must come out even, as it does on every node that gpushare's plugin serves: a
/// remainder means GPUs of different sizes, and an average would promise the small ones too much.
fn divided(node: &Node) -> Result<u64, Unusable> {
    let (units, gpus) = (node.capacity_units, node.capacity_gpus);
    if units == 0 {
        return Err(Unusable::NotShared);
    }
    if gpus == 0 || gpus > NODE_GPUS as u64 || units % gpus != 0 {
        return Err(Unusable::Uneven { units, gpus });
    }
    Ok(units / gpus)
}
