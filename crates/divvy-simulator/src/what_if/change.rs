use std::borrow::Cow;
use std::collections::BTreeMap;

use divvy_model::{Held, MemoryUnit, MiB, Node, Pod};

use super::{ClusterNode, CurrentCluster, SimulatedChange};
use crate::Error;

/// Return the cluster with another unit and more nodes.
pub(super) fn apply<'a>(cluster: &'a CurrentCluster, change: &SimulatedChange) -> Result<Cow<'a, CurrentCluster>, Error> {
    if cluster.nodes.iter().all(|node| node.node.capacity_units == 0) {
        return Err(Error::NoGpuMemory);
    }
    let mut changed = Cow::Borrowed(cluster);
    if let Some(unit) = change.unit.filter(|unit| *unit != cluster.unit) {
        let own = changed.to_mut();
        own.unit = unit;
        own.nodes
            .iter_mut()
            .for_each(|node| in_units(&mut node.node, cluster.unit, unit));
        own.pods
            .iter_mut()
            .for_each(|pod| ask_in_units(&mut pod.pod, cluster.unit, unit));
    }
    if let Some((count, like)) = &change.add {
        let own = changed.to_mut();
        let model = match like {
            Some(name) => own
                .nodes
                .iter()
                .find(|node| node.node.name == *name)
                .ok_or_else(|| Error::NoSuchNode {
                    name: name.clone(),
                    names: some_names(&own.nodes),
                })?,
            None => most_frequent(&own.nodes).ok_or(Error::NoGpuMemory)?,
        };
        let more: Vec<ClusterNode> = (1..=*count).map(|number| copy(model, number)).collect();
        own.nodes.extend(more);
    }
    Ok(changed)
}

/// Return the number of units that cover an amount of memory, rounded up.
fn units_for(memory: Option<MiB>, unit: MemoryUnit) -> u64 {
    memory.map_or(u64::MAX, |memory| memory.0.div_ceil(unit.mib()))
}

fn in_units(node: &mut Node, old: MemoryUnit, new: MemoryUnit) {
    // For a node without an inventory, only multiples of the old unit are known.
    let memory = node
        .capacity_units
        .checked_div(node.capacity_gpus)
        .and_then(|each| old.memory(each));
    let each = memory.map_or(0, |memory| new.units_in(memory));
    let offered = node.capacity_units > 0;
    node.capacity_units = each.saturating_mul(node.capacity_gpus);
    if let Some(Ok(inventory)) = &mut node.inventory {
        // A node whose agent uses another unit than the cluster is not offered, and would not be.
        if offered && inventory.unit == old {
            inventory.unit = new;
            for gpu in &mut inventory.gpus {
                gpu.units = gpu.units_of(new);
            }
            node.capacity_units = inventory.total_units();
        }
    }
    node.allocatable_units = node.capacity_units;
}

fn ask_in_units(pod: &mut Pod, old: MemoryUnit, new: MemoryUnit) {
    let rules = pod.request.rules.as_deref().and_then(|rules| rules.as_ref().ok());
    let gpus = u64::from(rules.and_then(|rules| rules.gpus).unwrap_or(1).max(1));
    for container in &mut pod.request.containers {
        if container.units > 0 {
            // A request that is spread evenly over several GPUs must remain so.
            container.units = gpus.saturating_mul(units_for(old.memory(container.units.div_ceil(gpus)), new));
        }
    }
    if let Held::Legacy(legacy) = &mut pod.held {
        for units in legacy.gpus.values_mut() {
            *units = units_for(old.memory(*units), new);
        }
    }
}

/// Format the names of up to five nodes with GPUs, for an error message.
fn some_names(nodes: &[ClusterNode]) -> String {
    let with_gpus = nodes.iter().filter(|node| node.node.capacity_units > 0);
    let mut names: Vec<&str> = with_gpus.map(|node| node.node.name.as_str()).collect();
    names.sort_unstable();
    let rest = names.len().saturating_sub(5);
    let shown = names[..names.len() - rest].join(", ");
    if rest > 0 { format!("{shown} and {rest} more") } else { shown }
}

/// Find the most frequent kind of node with GPUs, and return the node of that kind whose name comes first.
fn most_frequent(nodes: &[ClusterNode]) -> Option<&ClusterNode> {
    let kind = |node: &Node| {
        let gpus = node.inventory.as_ref().and_then(|inventory| inventory.as_ref().ok());
        let gpus = gpus.map(|inventory| {
            inventory
                .gpus
                .iter()
                .map(|gpu| (gpu.model.clone(), gpu.total))
                .collect::<Vec<_>>()
        });
        (
            node.capacity_units,
            node.capacity_gpus,
            node.cpu_milli,
            node.memory_bytes,
            gpus,
        )
    };
    let mut kinds: BTreeMap<_, Vec<&ClusterNode>> = BTreeMap::new();
    for node in nodes
        .iter()
        .filter(|node| node.node.capacity_units > 0 && !node.node.unschedulable)
    {
        kinds.entry(kind(&node.node)).or_default().push(node);
    }
    let most = kinds.into_values().rev().max_by_key(Vec::len)?;
    most.into_iter().min_by(|a, b| a.node.name.cmp(&b.node.name))
}

/// Copy a node as a new node that is empty and healthy.
fn copy(node: &ClusterNode, number: u32) -> ClusterNode {
    let mut new = node.clone();
    new.node.name = format!("{}-added-{number}", node.node.name);
    new.node.uid = format!("{}-added-{number}", node.node.uid);
    new.node.unschedulable = false;
    if let Some(Ok(inventory)) = &mut new.node.inventory {
        inventory.unschedulable = false;
        for gpu in &mut inventory.gpus {
            gpu.uuid = format!("{}-added-{number}", gpu.uuid);
            gpu.held = MiB::ZERO;
        }
    }
    new.labels.insert("kubernetes.io/hostname".to_owned(), new.node.name.clone());
    new
}
