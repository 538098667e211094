//! When kube-scheduler's preemption finds nobody to evict, though somebody's end would make room: it counts what a node has left in all.

use std::collections::BTreeMap;

use divvy_model::Pod;
use divvy_placement::{Ask, Ledger, gpu_list};

use super::{Site, asked};

/// For each node where the sum is enough, no GPU has room, and pods of lower priority are in the way: who, and what to type.
pub(super) fn by_sums_there_is_room(ledger: &Ledger, ask: &Ask, pod: &Pod, sites: &BTreeMap<String, Site>) -> Vec<String> {
    let nodes = sites.iter().filter(|(_, site)| site.sum.free() >= ask.units);
    let hints = nodes.filter_map(|(node, site)| {
        let victims = ledger.in_the_way(node, pod).filter(|victims| !victims.pods.is_empty())?;
        let gpus = gpu_list(&victims.indices);
        let names: Vec<String> = victims
            .pods
            .iter()
            .map(|victim| format!("{} (priority {})", victim.key(), victim.priority))
            .collect();
        let commands: Vec<String> = victims
            .pods
            .iter()
            .map(|victim| format!("kubectl delete pod -n {} {}", victim.namespace, victim.name))
            .collect();
        Some(format!(
            "node {node}: the pod has priority {}, and {} would have {} free without {}; but kube-scheduler evicts nobody for it, since by its sums \
             the node has {} units free already. If it matters that much: {}",
            pod.priority,
            gpus,
            asked(ask),
            names.join(" and "),
            site.sum.free(),
            commands.join("; ")
        ))
    });
    hints.collect()
}
