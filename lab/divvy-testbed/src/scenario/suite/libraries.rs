//! The driver's files in containers.

use std::io;

use divvy_model::Inventory;
use serde_json::json;

use crate::builders::pod;
use crate::scenario::tour::check_own_gpu;
use crate::scenario::{Cluster, Machine, Play, Report, Stop};

const SPEC: &str = "/etc/cdi/nvidia.json";
/// What the simulated driver says of its version; its files are on every node.
const LOADED: &str = "550.54.15";
/// Another one.
const OTHER: &str = "560.35.03";

/// Where containers find a library.
fn in_container(version: &str) -> String {
    format!("/usr/lib/x86_64-linux-gnu/libcuda.so.{version}")
}

/// On the node. A driver keeps it elsewhere; here is a folder that every node has for itself.
fn on_node(version: &str) -> String {
    format!("/etc/cdi/libcuda.so.{version}")
}

/// What `nvidia-ctk cdi generate` writes for a driver, shortened: GPUs by UUID, the libraries for all of them.
fn spec_of(version: &str, uuids: &[String]) -> String {
    let devices = uuids.iter().enumerate().map(|(index, uuid)| {
        let nodes = [json!({"path": format!("/dev/nvidia{index}")})];
        json!({"name": uuid, "containerEdits": {"deviceNodes": nodes}})
    });
    let spec = json!({
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": devices.collect::<Vec<_>>(),
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=all"],
            "mounts": [{
                "hostPath": on_node(version),
                "containerPath": in_container(version),
                "options": ["ro", "nosuid", "nodev", "bind"],
            }],
        },
    });
    spec.to_string()
}

pub(super) async fn play<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), Stop> {
    play.scene("The libraries of the driver that is loaded are in containers, whatever the CDI spec in /etc/cdi names")
        .await?;
    let node = play.ready(Machine::Mixed).await?;
    let uuids = uuids(play, &node).await?;
    let report = runs(play, "first", &node).await?;
    has_loaded(play, "first", &report)?;
    play.cluster.place(&node, &on_node(OTHER), Some(OTHER))?;
    play.cluster.place(&node, SPEC, Some(&spec_of(OTHER, &uuids)))?;
    play.step(
        "installed",
        &format!("a CDI spec of driver {OTHER} on node {node}"),
        SPEC,
        Vec::new(),
    )?;
    let report = runs(play, "second", &node).await?;
    has_loaded(play, "second", &report)?;
    let before = play.reports().await?;
    play.cluster.place(&node, SPEC, None)?;
    play.step("removed", SPEC, "", Vec::new())?;
    let report = runs(play, "third", &node).await?;
    has_loaded(play, "third", &report)?;
    play.unmoved(&before).await?;
    let trouble = inventory(play, &node).await?.driver_trouble;
    play.check(
        trouble.is_none(),
        "the node's inventory has nothing to say of its driver",
        || format!("{trouble:?}"),
    )?;
    play.cluster.place(&node, &on_node(OTHER), None)?;
    Ok(())
}

/// The libraries of the driver that is loaded, and none of the other one.
fn has_loaded<C: Cluster>(play: &mut Play<'_, C>, name: &str, report: &Report) -> Result<(), Stop> {
    let mounts = &report.mounts;
    let other = mounts.iter().any(|path| path.contains(OTHER));
    play.check(
        mounts.contains(&in_container(LOADED)) && !other,
        &format!("{name} has the library of driver {LOADED}, which is loaded, and of no other"),
        || format!("{report:?}"),
    )
    .map(drop)
}

async fn runs<C: Cluster>(play: &mut Play<'_, C>, name: &str, node: &str) -> Result<Report, Stop> {
    play.create(&pod(name).gpu_mem(3).select(node), "asks for 3 GiB").await?;
    let (_, reports) = play.started("default", name).await?;
    // The T4, being the smallest that fits.
    check_own_gpu(play, name, &reports, 2)?;
    Ok(reports.into_iter().next().unwrap_or_default())
}

async fn uuids<C: Cluster>(play: &Play<'_, C>, node: &str) -> Result<Vec<String>, Stop> {
    Ok(inventory(play, node).await?.gpus.into_iter().map(|gpu| gpu.uuid).collect())
}

async fn inventory<C: Cluster>(play: &Play<'_, C>, node: &str) -> Result<Inventory, Stop> {
    let found = divvy_kube::list::node(&play.cluster.client(), node).await;
    let node = found.map_err(|error| io::Error::other(error.to_string()))?;
    match node.inventory {
        Some(Ok(inventory)) => Ok(inventory),
        other => Err(io::Error::other(format!("no inventory: {other:?}")).into()),
    }
}
