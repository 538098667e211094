//! What the nodes offer of GPUs, for a pod that asks for something else.

use std::collections::BTreeSet;

use divvy_model::names;

use crate::{ClusterSnapshot, Wants};

/// The beginnings of the names of resources that stand for GPUs or parts of them.
const OF_GPUS: [&str; 7] = [
    "aliyun.com/gpu",
    "nvidia.com/",
    "amd.com/gpu",
    "gpu.intel.com/",
    "volcano.sh/vgpu-",
    "volcano.sh/gpu-",
    "tencent.com/vcuda-",
];
/// The programs whose schedulers and device plugins know resources that start with these names.
const OWNERS: [(&str, &str); 7] = [
    ("nvidia.com/gpumem", "HAMi"),
    ("nvidia.com/gpucores", "HAMi"),
    ("nvidia.com/priority", "HAMi"),
    ("volcano.sh/", "Volcano"),
    ("tencent.com/vcuda-", "Tencent's GPU manager"),
    ("nvidia.com/mig-", "NVIDIA's device plugin, for GPUs in MIG mode"),
    ("nvidia.com/pgpu", "NVIDIA's plugin for virtual machines"),
];

fn is_of_gpus(resource: &str) -> bool {
    OF_GPUS.iter().any(|start| resource.starts_with(start))
}

/// Return the resources of GPUs of which a node has at least one.
pub(crate) fn offered(snapshot: &ClusterSnapshot) -> BTreeSet<&str> {
    let amounts = snapshot.sites.iter().flat_map(|site| &site.allocatable);
    let there = amounts.filter(|(resource, amount)| **amount > 0 && is_of_gpus(resource));
    there.map(|(resource, _)| resource.as_str()).collect()
}

/// Describe the resources of GPUs that the pod asks for and no node offers, and what the nodes offer. `None` if the pod asks for none of them, or
/// if no node offers any GPU.
pub(crate) fn instead(snapshot: &ClusterSnapshot, wants: &Wants) -> Option<String> {
    let offered = offered(snapshot);
    let asked = wants.requests.iter().map(|(resource, _)| &**resource);
    let missing: BTreeSet<&str> = asked
        .filter(|resource| is_of_gpus(resource) && !offered.contains(resource))
        // That no node offers these says that Divvy does not run.
        .filter(|resource| ![names::GPU_MEM, names::GPU_COUNT].contains(resource))
        .collect();
    if missing.is_empty() || offered.is_empty() {
        return None;
    }
    let sentences = missing.into_iter().map(|resource| {
        let owner = OWNERS.iter().find(|(start, _)| resource.starts_with(start));
        let of = owner.map_or_else(String::new, |(_, name)| format!(" is a resource of {name}, and it"));
        format!("{resource}{of} is offered by no node.")
    });
    let list = offered.into_iter().collect::<Vec<_>>().join(", ");
    Some(format!("{} The nodes offer {list}.", sentences.collect::<Vec<_>>().join(" ")))
}

/// Return how a container asks for what the nodes offer.
pub(crate) fn how_to_ask(snapshot: &ClusterSnapshot) -> Vec<String> {
    let offered = offered(snapshot);
    let mut notes = Vec::new();
    if offered.contains(names::GPU_MEM) {
        notes.push(format!(
            "To share a GPU, write {} (in units of {}) in the limits of the container instead. To offer whole NVIDIA GPUs, start Divvy's agent with --whole-gpus \
             (in the chart: agent.wholeGpus=true).",
            names::GPU_MEM,
            snapshot.ledger.unit()
        ));
    }
    let shared = offered.iter().filter(|name| name.ends_with(".shared"));
    notes.extend(shared.map(|name| format!("A share of NVIDIA's device plugin is {name} in the limits of the container.")));
    notes
}
