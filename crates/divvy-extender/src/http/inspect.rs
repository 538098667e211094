use divvy_model::MiB;
use divvy_placement::{Ledger, LedgerNode};
use serde::Serialize;

/// The answer to `inspect`, in the form of gpushare's extender (`pkg/scheduler/inspect.go`). All amounts are in units.
#[derive(Debug, Serialize)]
pub(super) struct InspectReport {
    nodes: Option<Vec<InspectedNode>>,
    #[serde(skip_serializing_if = "String::is_empty")]
    error: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct InspectedNode {
    name: String,
    #[serde(rename = "totalGPU")]
    total: u64,
    #[serde(rename = "usedGPU")]
    used: u64,
    devs: Vec<InspectedDevice>,
}

#[derive(Debug, Serialize)]
struct InspectedDevice {
    id: u32,
    #[serde(rename = "totalGPU")]
    total: u64,
    #[serde(rename = "usedGPU")]
    used: u64,
    pods: Vec<InspectedPod>,
}

#[derive(Debug, Serialize)]
struct InspectedPod {
    name: String,
    namespace: String,
    #[serde(rename = "usedGPU")]
    used: u64,
}

/// Report all nodes that have shared GPUs, sorted by name, with devices by index and pods by namespace and name.
pub(super) fn all(ledger: &Ledger) -> InspectReport {
    let nodes = ledger
        .nodes()
        .filter(|view| view.state().is_some_and(|state| state.gpus.iter().any(|gpu| gpu.is_shared())));
    InspectReport {
        nodes: Some(nodes.map(|view| node(ledger, &view)).collect()),
        error: String::new(),
    }
}

/// Report one node, even if it has no GPUs.
pub(super) fn one(ledger: &Ledger, name: &str) -> InspectReport {
    match ledger.node(name).filter(|view| view.state().is_some()) {
        Some(view) => InspectReport {
            nodes: Some(vec![node(ledger, &view)]),
            error: String::new(),
        },
        None => InspectReport {
            nodes: None,
            error: format!("node {name:?} not found"),
        },
    }
}

fn node(ledger: &Ledger, view: &LedgerNode<'_>) -> InspectedNode {
    let units = |memory: MiB| memory.0.div_ceil(ledger.unit().mib());
    let gpus = view.state().map(|state| state.gpus.as_slice()).unwrap_or_default();
    let devs: Vec<InspectedDevice> = gpus
        .iter()
        .enumerate()
        // gpushare's form counts units, which a GPU that is offered only as a whole does not have.
        .filter(|(_, gpu)| gpu.is_shared())
        .map(|(position, gpu)| {
            let mut holders = view.holders(position);
            holders.sort_by(|a, b| (&a.pod, &a.uid).cmp(&(&b.pod, &b.uid)));
            InspectedDevice {
                id: gpu.index,
                total: gpu.units,
                used: units(view.used(position)),
                pods: holders
                    .into_iter()
                    .map(|holder| InspectedPod {
                        name: holder.pod.name,
                        namespace: holder.pod.namespace,
                        used: units(holder.memory),
                    })
                    .collect(),
            }
        })
        .collect();
    InspectedNode {
        name: view.name().to_owned(),
        total: devs.iter().fold(0, |sum, dev| sum.saturating_add(dev.total)),
        used: devs.iter().fold(0, |sum, dev| sum.saturating_add(dev.used)),
        devs,
    }
}
