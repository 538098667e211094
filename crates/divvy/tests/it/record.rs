//! The record of what really happens on the nodes of an embedded cluster, and the audit of the whole history: every commit of the
//! API server, and every container that ran, with the GPUs and the environment variables that it really had. Before that, the
//! audit compares the agents' inventories with the machine description.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, bail};
use divvy_audit::{Audit, AuditLimits, AuditOutcome, ContainerReport, Fact, Moment};
use divvy_kube::convert;
use divvy_kube::convert::ReadPod;
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_model::machine::Machines;
use divvy_model::{Node, Pod};
use divvy_testbed::api::{EventKind, StoreEvent};
use divvy_testbed::node::{ContainerView, NodeEvent, TestbedNode};
use serde_json::Value;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;

/// The events of the nodes.
#[derive(Debug, Default)]
pub(crate) struct Record {
    /// Every container that ever ran, by id: its node, and its latest state.
    pub(crate) runs: BTreeMap<String, (String, ContainerView)>,
    /// Starts that the agent refused: pod, container, message.
    pub(crate) refused_starts: Vec<(String, String, String)>,
    /// Pods that the kubelet refused: pod, reason, message.
    pub(crate) refused_pods: Vec<(String, String, String)>,
    lagged: bool,
}

/// Records the events of nodes. The tasks that listen to the nodes end with the recorder.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    record: Arc<Mutex<Record>>,
    listeners: JoinSet<()>,
}

impl Recorder {
    pub(crate) fn listen(&mut self, node: &TestbedNode) {
        let (name, record) = (node.name().to_owned(), self.record.clone());
        let mut events = node.events();
        self.listeners.spawn(async move {
            loop {
                let event = events.recv().await;
                let mut record = record.lock().unwrap_or_else(PoisonError::into_inner);
                match event {
                    Ok(NodeEvent::ContainerStarted(view) | NodeEvent::ContainerEnded(view)) => {
                        record.runs.insert(view.id.clone(), (name.clone(), view));
                    }
                    Ok(NodeEvent::PreStartRefused {
                        pod, container, message, ..
                    }) => record.refused_starts.push((pod, container, message)),
                    Ok(NodeEvent::AdmissionRefused {
                        pod, reason, message, ..
                    }) => record.refused_pods.push((pod, reason, message)),
                    Err(RecvError::Lagged(_)) => record.lagged = true,
                    Err(RecvError::Closed) => return,
                }
            }
        });
    }

    pub(crate) fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Record {
    /// Audit a history together with the containers that ran. Return an error if the record is not whole, or if an inventory does
    /// not match its machine.
    pub(crate) fn audit(&self, history: &[StoreEvent], machines: &Machines) -> anyhow::Result<AuditOutcome> {
        assert!(!history.is_empty(), "there is a history");
        if self.lagged {
            bail!("events of a node were lost");
        }
        // The history has no times, and the audit reads it before the reports: it cannot tell how long a container outlives its pod.
        let mut audit = Audit::new(AuditLimits {
            leak_ms: i64::MAX,
            ..AuditLimits::default()
        });
        for event in history {
            let at = Moment {
                revision: Some(event.revision),
                at_ms: None,
            };
            let gone = event.kind == EventKind::Deleted;
            let fact = match &*event.resource {
                "pods" => {
                    let (pod, delete_by_ms) = (pod(&event.object), None);
                    if gone {
                        Fact::PodGone(pod)
                    } else {
                        Fact::Pod { pod, delete_by_ms }
                    }
                }
                "nodes" => {
                    let object: NodeObject = serde_json::from_value((*event.object).clone()).expect("a node");
                    let node = convert::node(&object);
                    published(&node, machines).with_context(|| format!("revision {}", event.revision))?;
                    if gone { Fact::NodeGone(node.name) } else { Fact::Node(node) }
                }
                _ => continue,
            };
            audit.take(at, fact);
        }
        for (at_ms, report) in reports(self.runs.values()) {
            let at = Moment {
                revision: None,
                at_ms: Some(at_ms),
            };
            audit.take(at, Fact::Report(report));
        }
        Ok(audit.finish(None))
    }
}

/// Read a pod as Divvy does. Its requests may be unreadable; what it holds still counts.
pub(crate) fn pod(object: &Value) -> Pod {
    let object: PodObject = serde_json::from_value(object.clone()).expect("a pod");
    ReadPod::from(object).into_parts().0
}

/// Return an error if a node's inventory contains a GPU that does not exist, or that is larger than the real GPU.
fn published(node: &Node, machines: &Machines) -> anyhow::Result<()> {
    let Some(Ok(inventory)) = &node.inventory else {
        return Ok(());
    };
    let Some(machine) = machines.node(&node.name) else {
        bail!("node {} is not in the description of the machines", node.name);
    };
    let (whole, shared): (Vec<_>, Vec<_>) = inventory.gpus.iter().partition(|gpu| !gpu.is_shared());
    let whole: Vec<_> = whole.iter().map(|gpu| gpu.total.0).collect();
    let amd = machine.amd.iter().map(|gpu| gpu.memory_mib);
    let expected: Vec<_> = amd.chain(machine.intel.iter().map(|gpu| gpu.memory_mib)).collect();
    if !whole.is_empty() && whole != expected {
        bail!("{} has whole GPUs {whole:?}", node.name);
    }
    for gpu in shared {
        let Some(index) = (0..machine.gpus.len()).find(|index| machine.gpu_uuid(*index) == gpu.uuid) else {
            bail!("{} is no GPU of {}", gpu.uuid, node.name);
        };
        let (minor, expected) = (divvy_model::nvidia::minor(&gpu.nodes), machine.gpu_minor(index));
        if minor != Some(expected) {
            bail!("{} of {} has the minor number {minor:?}, not {expected}", gpu.uuid, node.name);
        }
        let offered = inventory.capacity(gpu);
        if offered.0 > machine.gpus[index].memory_mib {
            bail!("node {} offers {offered} of {}", node.name, gpu.uuid);
        }
    }
    Ok(())
}

/// Return the starts and ends of containers in chronological order. At the same instant, an end precedes a start, so that a GPU
/// that passes from one container to another counts only once.
fn reports<'a>(runs: impl Iterator<Item = &'a (String, ContainerView)>) -> Vec<(i64, ContainerReport)> {
    let mut all = Vec::new();
    for (node, view) in runs {
        let report = ContainerReport {
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
                ContainerReport {
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
