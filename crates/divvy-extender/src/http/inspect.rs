use divvy_model::MiB;
use divvy_placement::{Ledger, NodeView};
use serde::Serialize;

/// The answer to `inspect`, in the form of gpushare's extender (`pkg/scheduler/inspect.go`). All amounts are in units.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    nodes: Option<Vec<Node>>,
    #[serde(skip_serializing_if = "String::is_empty")]
    error: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    name: String,
    #[serde(rename = "totalGPU")]
    total: u64,
    #[serde(rename = "usedGPU")]
    used: u64,
    devs: Vec<Device>,
}

#[derive(Debug, Serialize)]
struct Device {
    id: u32,
    #[serde(rename = "totalGPU")]
    total: u64,
    #[serde(rename = "usedGPU")]
    used: u64,
    pods: Vec<Pod>,
}

#[derive(Debug, Serialize)]
struct Pod {
    name: String,
    namespace: String,
    #[serde(rename = "usedGPU")]
    used: u64,
}

/// Report all nodes that have shared GPUs, sorted by name, with devices by index and pods by namespace and name.
pub(super) fn all(ledger: &Ledger) -> Report {
    let nodes = ledger
        .nodes()
        .filter(|view| view.state().is_some_and(|state| state.gpus.iter().any(|gpu| gpu.is_shared())));
    Report {
        nodes: Some(nodes.map(|view| node(ledger, &view)).collect()),
        error: String::new(),
    }
}

/// Report one node, even if it has no GPUs.
pub(super) fn one(ledger: &Ledger, name: &str) -> Report {
    match ledger.node(name).filter(|view| view.state().is_some()) {
        Some(view) => Report {
            nodes: Some(vec![node(ledger, &view)]),
            error: String::new(),
        },
        None => Report {
            nodes: None,
            error: format!("node {name:?} not found"),
        },
    }
}

fn node(ledger: &Ledger, view: &NodeView<'_>) -> Node {
    let units = |memory: MiB| memory.0.div_ceil(ledger.unit().mib());
    let gpus = view.state().map(|state| state.gpus.as_slice()).unwrap_or_default();
    let devs: Vec<Device> = gpus
        .iter()
        .enumerate()
        // gpushare's form counts units, which a GPU that is offered only as a whole does not have.
        .filter(|(_, gpu)| gpu.is_shared())
        .map(|(position, gpu)| {
            let mut holders = view.holders(position);
            holders.sort_by(|a, b| (&a.pod, &a.uid).cmp(&(&b.pod, &b.uid)));
            Device {
                id: gpu.index,
                total: gpu.units,
                used: units(view.used(position)),
                pods: holders
                    .into_iter()
                    .map(|holder| Pod {
                        name: holder.pod.name,
                        namespace: holder.pod.namespace,
                        used: units(holder.memory),
                    })
                    .collect(),
            }
        })
        .collect();
    Node {
        name: view.name().to_owned(),
        total: devs.iter().fold(0, |sum, dev| sum.saturating_add(dev.total)),
        used: devs.iter().fold(0, |sum, dev| sum.saturating_add(dev.used)),
        devs,
    }
}
