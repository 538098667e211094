//! Checks after all faults have ended: Divvy's state must agree with the API server's objects, the runtime's containers, and the files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use divvy_model::{Allocation, Health, Inventory, names};
use divvy_testbed::embedded::Embedded;
use serde_json::Value;

use super::audit::{Gpu, Gpus, UNIT, effective_units, ended};

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// For each node and index of a GPU: the number of units, and the pods that hold them.
type Count = BTreeMap<(String, u64), (u64, BTreeSet<String>)>;

/// Return the held memory according to the objects in the API server: the allocations of all bound pods that have not ended.
fn recount(cluster: &Embedded, gpus: &Gpus) -> Count {
    let mut count: Count = gpus
        .values()
        .map(|gpu| ((gpu.node.clone(), gpu.index as u64), (0, BTreeSet::new())))
        .collect();
    for pod in cluster.api().list("pods", "").expect("pods are a resource") {
        let annotation = pod["metadata"]["annotations"][names::ALLOCATION]
            .as_str()
            .map(Allocation::parse);
        let Some(Ok(allocation)) = annotation.filter(|_| !ended(&pod)) else {
            continue;
        };
        for share in &allocation.gpus {
            let Some(gpu) = gpus.get(&share.uuid) else { continue };
            let entry = count.entry((gpu.node.clone(), gpu.index as u64)).or_default();
            entry.0 += share.memory.0 / UNIT;
            entry.1.insert(text(&pod["metadata"]["name"]));
        }
    }
    count
}

/// Return the held memory according to the extender.
async fn inspected(cluster: &Embedded) -> anyhow::Result<Count> {
    let answer = cluster.ask_extender("GET", "/gpushare-scheduler/inspect", "").await;
    let (_, body) = answer.context("the extender does not answer")?;
    let report: Value = serde_json::from_str(&body).with_context(|| format!("inspect answers {body:?}"))?;
    let mut count = Count::new();
    for node in report["nodes"].as_array().into_iter().flatten() {
        for gpu in node["devs"].as_array().into_iter().flatten() {
            let pods = gpu["pods"].as_array().into_iter().flatten().map(|pod| text(&pod["name"]));
            let key = (text(&node["name"]), gpu["id"].as_u64().unwrap_or(u64::MAX));
            count.insert(key, (gpu["usedGPU"].as_u64().unwrap_or(u64::MAX), pods.collect()));
        }
    }
    Ok(count)
}

/// Check that those metrics of the extender that should be 0 are 0.
async fn extenders_metrics(cluster: &Embedded) -> anyhow::Result<()> {
    let answer = cluster.ask_extender("GET", "/metrics", "").await;
    let (_, body) = answer.context("the extender does not answer")?;
    for name in [
        "divvy_ledger_overcommit_mebibytes",
        "divvy_ledger_anomalies",
        "divvy_ledger_reservations",
        "divvy_extender_binds_under_way",
    ] {
        let lines: Vec<&str> = body.lines().filter(|line| line.starts_with(name)).collect();
        if lines.is_empty() {
            bail!("the extender's metrics do not have {name}");
        }
        if let Some(line) = lines.iter().find(|line| !line.ends_with(" 0")) {
            bail!("the extender's metrics say {line}");
        }
    }
    Ok(())
}

/// Check that every node offers every unit, every GPU is healthy, and no memory is held without a pod.
fn nodes_are_well(cluster: &Embedded, gpus: &Gpus) -> anyhow::Result<()> {
    for machine in &cluster.machines().nodes {
        let node = cluster.api().get("nodes", "", &machine.name)?;
        let units: u64 = gpus
            .values()
            .filter(|gpu| gpu.node == machine.name)
            .map(|gpu| gpu.units)
            .sum();
        for key in ["capacity", "allocatable"] {
            let found = text(&node["status"][key][names::GPU_MEM]);
            if found != units.to_string() {
                bail!("{key} of {} is {found:?} units, not {units}", machine.name);
            }
        }
        let annotation = text(&node["metadata"]["annotations"][names::INVENTORY]);
        let inventory = Inventory::parse(&annotation).with_context(|| machine.name.clone())?;
        for gpu in &inventory.gpus {
            if gpu.health != Health::Ok || gpu.held.0 != 0 {
                bail!(
                    "GPU {} of {} is {:?} ({:?}) and {} of it are held",
                    gpu.index,
                    machine.name,
                    gpu.health,
                    gpu.reason,
                    gpu.held
                );
            }
        }
        if inventory.gpus.len() != machine.gpus.len() {
            bail!("the inventory of {} has {} GPUs", machine.name, inventory.gpus.len());
        }
    }
    Ok(())
}

/// Return the files of grants on a node: the records as pairs of pod UID and container, and the names of the CDI specs.
fn grants_on_disk(cluster: &Embedded, node: &str) -> (BTreeSet<(String, String)>, BTreeSet<String>) {
    let names = |directory: PathBuf| -> Vec<String> {
        let entries = std::fs::read_dir(&directory).into_iter().flatten();
        entries
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect()
    };
    let paths = cluster.node(node).expect("joined").paths();
    let records = names(paths.root.join("state/grants"));
    let records = records.iter().map(|name| {
        let (uid, container) = name
            .strip_suffix(".json")
            .and_then(|name| name.split_once('_'))
            .unwrap_or((name, "?"));
        (uid.to_owned(), container.to_owned())
    });
    let specs = names(paths.cdi_dir).into_iter().filter(|name| name.contains("divvy"));
    (records.collect(), specs.collect())
}

/// Check that the pods that never end are running, and that waiting pods fit on no GPU. `failing` are the pods that fail again
/// and again on purpose.
fn pods_are_well(cluster: &Embedded, gpus: &Gpus, held: &Count, failing: &BTreeSet<String>) -> anyhow::Result<()> {
    let free = |gpu: &Gpu| {
        let taken = held.get(&(gpu.node.clone(), gpu.index as u64)).map_or(0, |(units, _)| *units);
        gpu.units.saturating_sub(taken)
    };
    let free: BTreeMap<&String, u64> = gpus.iter().map(|(uuid, gpu)| (uuid, free(gpu))).collect();
    let mut granted: BTreeSet<(String, String)> = BTreeSet::new();
    for pod in cluster.api().list("pods", "").expect("pods are a resource") {
        let (name, uid) = (text(&pod["metadata"]["name"]), text(&pod["metadata"]["uid"]));
        if !pod["metadata"]["deletionTimestamp"].is_null() {
            bail!("{name} is still being deleted: {}", pod["status"]);
        }
        if ended(&pod) {
            continue;
        }
        let Some(node) = pod["spec"]["nodeName"].as_str() else {
            let units = effective_units(&pod);
            if let Some((uuid, free)) = free.iter().find(|(_, free)| **free >= units) {
                bail!(
                    "{name} waits for {units} units, and GPU {uuid} has {free} free: {}",
                    pod["status"]
                );
            }
            continue;
        };
        let running = cluster.node(node).expect("joined").containers();
        for container in pod["spec"]["containers"].as_array().into_iter().flatten() {
            let container = text(&container["name"]);
            let runs = running
                .iter()
                .any(|view| view.pod_uid == uid && view.container == container && view.is_running());
            if !runs && !failing.contains(&name) {
                bail!("container {container} of {name} does not run on {node}: {}", pod["status"]);
            }
            if runs {
                granted.insert((uid.clone(), container));
            }
        }
    }
    for machine in &cluster.machines().nodes {
        let (records, _) = grants_on_disk(cluster, &machine.name);
        let running = cluster.node(&machine.name).expect("joined").containers();
        let mut here = granted
            .iter()
            .filter(|(uid, _)| running.iter().any(|view| view.pod_uid == *uid));
        if let Some(lost) = here.find(|key| !records.contains(*key)) {
            bail!("{lost:?} runs on {} and has no record", machine.name);
        }
        let live = |uid: &str| running.iter().any(|view| view.pod_uid == uid);
        if let Some((uid, container)) = records.iter().find(|(uid, _)| !live(uid)) {
            bail!(
                "the grant of container {container} of pod {uid} on {} is nobody's",
                machine.name
            );
        }
    }
    Ok(())
}

/// Return an error with the first problem that is found while pods exist.
pub(super) async fn amiss(cluster: &Embedded, gpus: &Gpus, failing: &BTreeSet<String>) -> anyhow::Result<()> {
    let recount = recount(cluster, gpus);
    nodes_are_well(cluster, gpus)?;
    pods_are_well(cluster, gpus, &recount, failing)?;
    extenders_metrics(cluster).await?;
    let inspected = inspected(cluster).await?;
    if inspected != recount {
        bail!("inspect says {inspected:?}, the objects say {recount:?}");
    }
    Ok(())
}

/// Return an error with what is left after all pods were deleted.
pub(super) async fn left_behind(cluster: &Embedded, gpus: &Gpus) -> anyhow::Result<()> {
    let pods = cluster.api().list("pods", "").expect("pods are a resource");
    if let Some(pod) = pods.first() {
        bail!("{} is still there: {}", pod["metadata"]["name"], pod["status"]);
    }
    for machine in &cluster.machines().nodes {
        let running = cluster.node(&machine.name).expect("joined").containers();
        if let Some(view) = running.iter().find(|view| view.is_running()) {
            bail!("{}/{} still runs", view.pod, view.container);
        }
        let (records, specs) = grants_on_disk(cluster, &machine.name);
        if !records.is_empty() || !specs.is_empty() {
            bail!("on {} are left records {records:?} and specs {specs:?}", machine.name);
        }
    }
    amiss(cluster, gpus, &BTreeSet::new()).await?;
    let used = inspected(cluster).await?;
    if let Some(entry) = used.iter().find(|(_, (units, pods))| *units != 0 || !pods.is_empty()) {
        bail!("inspect says {entry:?}");
    }
    Ok(())
}
