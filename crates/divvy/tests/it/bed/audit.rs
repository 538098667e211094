//! Runs the audit of `divvy audit` on the whole history: every commit of the API server, and every container that ran, with the
//! GPUs and the environment variables that it really had. Before that, compares the agents' inventories with the machine
//! description.

use divvy_audit::{Audit, Fact, Level, Limits, Moment, Outcome, Report};
use divvy_kube::convert;
use divvy_kube::convert::ReadPod;
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_model::machine::Machines;
use divvy_testbed::api::{Event, EventKind};
use divvy_testbed::node::ContainerView;

/// Audit a history and the containers that ran, and return the findings.
pub(super) fn audit<'a>(
    history: &[Event],
    runs: impl Iterator<Item = &'a (String, ContainerView)>,
    machines: &Machines,
) -> Outcome {
    assert!(!history.is_empty(), "there is a history");
    let mut audit = Audit::new(Limits::default());
    for event in history {
        let at = Moment {
            revision: Some(event.revision),
            at_ms: None,
        };
        let object = (*event.object).clone();
        let gone = event.kind == EventKind::Deleted;
        let fact = match &*event.resource {
            "pods" => {
                let object: PodObject = serde_json::from_value(object).expect("a pod");
                let (pod, _) = ReadPod::from(object).into_parts();
                let delete_by_ms = None;
                if gone {
                    Fact::PodGone(pod)
                } else {
                    Fact::Pod { pod, delete_by_ms }
                }
            }
            "nodes" => {
                let object: NodeObject = serde_json::from_value(object).expect("a node");
                let node = convert::node(&object);
                published(&node, machines);
                if gone { Fact::NodeGone(node.name) } else { Fact::Node(node) }
            }
            _ => continue,
        };
        audit.take(at, fact);
    }
    for (at_ms, report) in reports(runs) {
        let at = Moment {
            revision: None,
            at_ms: Some(at_ms),
        };
        audit.take(at, Fact::Report(report));
    }
    let mut outcome = audit.finish(None);
    // The API server's history does not show when a container of a vanished pod ended, but the bed knows it.
    outcome.findings.retain(|finding| finding.what.level() == Level::Fault);
    outcome
}

/// Panic if a node's inventory contains a GPU that does not exist, or that is larger than the real GPU.
fn published(node: &divvy_model::Node, machines: &Machines) {
    let Some(Ok(inventory)) = &node.inventory else {
        return;
    };
    let Some(machine) = machines.node(&node.name) else {
        panic!("node {} is no machine", node.name);
    };
    let (whole, shared): (Vec<_>, Vec<_>) = inventory.gpus.iter().partition(|gpu| !gpu.is_shared());
    let whole: Vec<_> = whole.iter().map(|gpu| gpu.total.0).collect();
    let amd = machine.amd.iter().map(|gpu| gpu.memory_mib);
    let expected: Vec<_> = amd.chain(machine.intel.iter().map(|gpu| gpu.memory_mib)).collect();
    assert!(
        whole.is_empty() || whole == expected,
        "{} has whole GPUs {whole:?}",
        node.name
    );
    for gpu in shared {
        let index = (0..machine.gpus.len()).find(|index| machine.gpu_uuid(*index) == gpu.uuid);
        let index = index.unwrap_or_else(|| panic!("{} is no GPU of {}", gpu.uuid, node.name));
        let minor = divvy_model::nvidia::minor(&gpu.nodes);
        assert_eq!(minor, Some(machine.gpu_minor(index)), "{} of {}", gpu.uuid, node.name);
        let offered = inventory.unit.memory(gpu.units).expect("a sum");
        assert!(
            offered.0 <= machine.gpus[index].memory_mib,
            "node {} offers {offered} of {}",
            node.name,
            gpu.uuid
        );
    }
}

/// Return the starts and ends of containers in chronological order. At the same instant, an end precedes a start, so that a GPU
/// that passes from one container to another counts only once.
fn reports<'a>(runs: impl Iterator<Item = &'a (String, ContainerView)>) -> Vec<(i64, Report)> {
    let mut all = Vec::new();
    for (node, view) in runs {
        let report = Report {
            node: node.clone(),
            pod_uid: view.pod_uid.clone(),
            container: view.container.clone(),
            id: view.id.clone(),
            running: true,
            gpus: view.devices.iter().filter_map(|path| minor(path)).collect(),
            env: view.env.clone(),
        };
        if let Some(end) = view.finished_at {
            let running = false;
            all.push((
                end,
                Report {
                    running,
                    ..report.clone()
                },
            ));
        }
        all.push((view.started_at, report));
    }
    all.sort_by_key(|(at, report)| (*at, report.running));
    all.into_iter().map(|(at, report)| (at.as_millisecond(), report)).collect()
}

/// Return the minor number of a GPU's device node, such as 0 for `/dev/nvidia0`. `None` for other device nodes, such as
/// `/dev/nvidiactl`.
fn minor(path: &str) -> Option<u32> {
    path.strip_prefix("/dev/nvidia")?.parse().ok()
}
