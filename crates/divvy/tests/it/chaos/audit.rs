//! The audit of a sequence: that of [`crate::record`], and what that one cannot check, because it reads pods and nodes as Divvy
//! does. Here, only the API server's objects, the containers that ran, and the machine description count.

use std::collections::BTreeMap;

use divvy_audit::{FindingKind, FindingLevel};
use divvy_model::machine::{MachineNode, Machines};
use divvy_model::{Allocation, names};
use divvy_testbed::api::StoreEvent;
use serde_json::Value;

use crate::record::{self, Record};

/// The size of a unit in MiB, in every cluster here.
pub(super) const UNIT: u64 = 1024;

/// A GPU of the machine description.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) node: String,
    pub(super) index: usize,
    pub(super) units: u64,
}

/// The GPUs of the machine description, by UUID.
pub(super) type Gpus = BTreeMap<String, Gpu>;

pub(super) fn gpus(machines: &Machines) -> Gpus {
    let of_node = |node: &MachineNode| -> Gpus {
        let gpu = |index: usize| Gpu {
            node: node.name.clone(),
            index,
            units: node.gpus[index].memory_mib / UNIT,
        };
        (0..node.gpus.len()).map(|index| (node.gpu_uuid(index), gpu(index))).collect()
    };
    machines.nodes.iter().flat_map(of_node).collect()
}

/// Return a pod's effective number of units: the largest sum over containers that can run at the same time. It is computed as the
/// Kubernetes documentation describes it, and not with our formula.
pub(super) fn effective_units(pod: &Value) -> u64 {
    let units = |container: &Value| -> u64 {
        let amount = &container["resources"]["limits"][names::GPU_MEM];
        amount
            .as_str()
            .and_then(|text| text.parse().ok())
            .or(amount.as_u64())
            .unwrap_or(0)
    };
    let empty = Vec::new();
    let list = |key: &str| pod["spec"][key].as_array().unwrap_or(&empty).clone();
    let (mut beside, mut peak) = (0, 0);
    for container in list("initContainers") {
        let here = beside + units(&container);
        peak = peak.max(here);
        if container["restartPolicy"] == "Always" {
            beside = here;
        }
    }
    peak.max(beside + list("containers").iter().map(units).sum::<u64>())
}

/// Report whether all containers of a pod have ended permanently, according to its object.
pub(super) fn ended(pod: &Value) -> bool {
    let status = &pod["status"];
    let running = ["initContainerStatuses", "containerStatuses"].iter().any(|key| {
        let statuses = status[*key].as_array();
        statuses.is_some_and(|all| all.iter().any(|one| !one["state"]["running"].is_null()))
    });
    matches!(status["phase"].as_str(), Some("Succeeded" | "Failed")) && !running
}

/// Return what was wrong in a history, with the record of the containers that ran.
pub(super) fn faults(history: &[StoreEvent], record: &Record, machines: &Machines) -> Vec<String> {
    let mut found = match record.audit(history, machines) {
        // The history has no times, so the audit cannot tell when memory that a departed pod's container holds is free again.
        // `overlaps` can.
        Ok(outcome) => outcome
            .findings
            .iter()
            .filter(|finding| {
                finding.what.level() != FindingLevel::Note && !matches!(finding.what, FindingKind::GivenEarly { .. })
            })
            .map(|finding| format!("revision {:?}: {}: {}", finding.at.revision, finding.what.id(), finding.what))
            .collect(),
        Err(error) => vec![format!("{error:#}")],
    };
    let gpus = gpus(machines);
    let pods = pods(history, &gpus, &mut found);
    told_of_gpu(record, &pods, &gpus, &mut found);
    overlaps(record, &pods, &gpus, &mut found);
    found
}

/// A pod as it was bound.
struct Bound {
    node: String,
    /// The allocation annotation.
    text: Option<String>,
    allocation: Option<Allocation>,
}

/// Check each state of each pod. Return the pods that were bound, by UID.
fn pods(history: &[StoreEvent], gpus: &Gpus, found: &mut Vec<String>) -> BTreeMap<String, Bound> {
    let mut pods: BTreeMap<String, Bound> = BTreeMap::new();
    for event in history.iter().filter(|event| &*event.resource == "pods") {
        let object = &event.object;
        let pod = record::pod(object);
        let mut complain = |what: String| found.push(format!("revision {}: {} {what}", event.revision, pod.name));
        // What the audit of the record counts as ended has really ended.
        if ended(object) != pod.ended() {
            complain(format!("is read as ended ({}): {}", pod.ended(), object["status"]));
        }
        let annotation = object["metadata"]["annotations"][names::ALLOCATION].as_str();
        let text = annotation.map(str::to_owned);
        if let Some(bound) = pods.get(&pod.uid) {
            if pod.node.as_ref() != Some(&bound.node) {
                complain(format!("moved from {} to {:?}", bound.node, pod.node));
            } else if text != bound.text {
                complain(format!("has another allocation than at its binding: {text:?}"));
            }
            continue;
        }
        let Some(node) = pod.node.clone() else {
            if text.is_some() {
                complain("has an allocation and no node".to_owned());
            }
            continue;
        };
        let units = effective_units(object);
        let is_as_asked = |allocation: &Allocation| match allocation.gpus.as_slice() {
            [share] => {
                let gpu = gpus.get(&share.uuid);
                !share.whole && share.memory.0 == units * UNIT && gpu.is_some_and(|gpu| gpu.node == node)
            }
            _ => false,
        };
        let allocation = match annotation.map(Allocation::parse).transpose() {
            Ok(Some(allocation)) if is_as_asked(&allocation) => Some(allocation),
            Ok(None) if units == 0 => None,
            other => {
                complain(format!("asks for {units} units, and was bound to {node} with {other:?}"));
                None
            }
        };
        pods.insert(pod.uid.clone(), Bound { node, text, allocation });
    }
    pods
}

/// Check what each container was told about its GPU. The audit of `divvy audit` takes the index and the size from the inventory.
fn told_of_gpu(record: &Record, pods: &BTreeMap<String, Bound>, gpus: &Gpus, found: &mut Vec<String>) {
    for (node, view) in record.runs.values() {
        let allocation = pods.get(&view.pod_uid).and_then(|pod| pod.allocation.as_ref());
        let shares = allocation.and_then(|allocation| allocation.containers.get(&view.container));
        for gpu in shares.into_iter().flatten().filter_map(|share| gpus.get(&share.uuid)) {
            for (key, value) in [
                (names::ALIYUN_IDX, gpu.index.to_string()),
                (names::ALIYUN_DEV, gpu.units.to_string()),
            ] {
                let has = view.env.get(key);
                if has != Some(&value) {
                    found.push(format!(
                        "container {}/{} on {node} has {key}={has:?}, and was allocated GPU {} of {}: {value}",
                        view.pod, view.container, gpu.index, gpu.node
                    ));
                }
            }
        }
    }
}

/// Check that at each start of a container, the pods with a running container on its GPU fitted on it together. A pod counts with its
/// whole allocation, as long as any of its containers runs, whether its object still exists or not.
fn overlaps(record: &Record, pods: &BTreeMap<String, Bound>, gpus: &Gpus, found: &mut Vec<String>) {
    let on_gpus = record.runs.values().flat_map(|(_, view)| {
        let allocation = pods.get(&view.pod_uid).and_then(|pod| pod.allocation.as_ref());
        let shares = allocation.into_iter().flat_map(|allocation| &allocation.gpus);
        shares.map(move |share| (share, view))
    });
    let on_gpus: Vec<_> = on_gpus.collect();
    for (share, view) in &on_gpus {
        let at = view.started_at;
        let together: BTreeMap<(&String, &String), u64> = on_gpus
            .iter()
            .filter(|(other, _)| other.uuid == share.uuid)
            .filter(|(_, other)| other.started_at <= at && other.finished_at.is_none_or(|end| end > at))
            .map(|(share, other)| ((&other.pod, &other.pod_uid), share.memory.0 / UNIT))
            .collect();
        let capacity = gpus.get(&share.uuid).map_or(0, |gpu| gpu.units);
        if together.values().sum::<u64>() > capacity {
            found.push(format!(
                "when {}/{} started at {at}, these pods had containers on its GPU of {capacity} units: {together:?}",
                view.pod, view.container
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::effective_units;
    use divvy_testbed::builders::pod;

    #[test]
    fn the_audits_own_formula_counts_what_runs_at_the_same_time() {
        for (manifest, expected) in [
            (pod("a").gpu_mem(3), 3),
            (pod("a").gpu_mem(3).container("b", 2), 5),
            (pod("a").gpu_mem(3).init("i", 4), 4),
            (pod("a").gpu_mem(3).sidecar("s", 2).init("i", 4), 6),
            (pod("a").gpu_mem(3).init("i", 4).sidecar("s", 2), 5),
            (pod("a"), 0),
        ] {
            assert_eq!(effective_units(&manifest.build()), expected);
        }
    }
}
