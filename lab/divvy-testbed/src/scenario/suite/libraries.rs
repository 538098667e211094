//! The scene about the driver's files in containers.

use std::io;

use divvy_model::Inventory;
use serde_json::json;

use crate::builders::pod;
use crate::scenario::devices::check_own_gpu;
use crate::scenario::{Cluster, Play, PlayStop, SelfReport, TestbedMachine};

const SPEC: &str = "/etc/cdi/nvidia.json";
/// The driver version that the simulated driver reports. The files of this version are on every node.
const LOADED: &str = "550.54.15";
/// Another driver version, which is installed but not loaded.
const OTHER: &str = "560.35.03";

/// Return the path at which containers find a library.
fn in_container(version: &str) -> String {
    format!("/usr/lib/x86_64-linux-gnu/libcuda.so.{version}")
}

/// Return the path of a library on the node. A real driver installs it elsewhere. `/etc/cdi` is used here because each node has
/// its own, even if several nodes share a machine.
fn on_node(version: &str) -> String {
    format!("/etc/cdi/libcuda.so.{version}")
}

/// Return a shortened form of the CDI spec that `nvidia-ctk cdi generate` writes for a driver: the GPUs by UUID, and the libraries for all
/// of them.
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

pub(super) async fn play<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("Containers get the libraries of the loaded driver, whichever version the CDI spec in /etc/cdi names")
        .await?;
    let node = play.ready(TestbedMachine::Mixed).await?;
    let uuids = uuids(play, &node).await?;
    let report = runs(play, "first", &node).await?;
    has_loaded(play, "first", &report)?;
    play.cluster.place(&node, &on_node(OTHER), Some(OTHER.as_bytes()))?;
    play.cluster.place(&node, SPEC, Some(spec_of(OTHER, &uuids).as_bytes()))?;
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
        "the node's inventory reports no trouble with its driver",
        || format!("{trouble:?}"),
    )?;
    play.cluster.place(&node, &on_node(OTHER), None)?;
    Ok(())
}

/// Check that a container has the libraries of the loaded driver and none of the other version.
fn has_loaded<C: Cluster>(play: &mut Play<'_, C>, name: &str, report: &SelfReport) -> Result<(), PlayStop> {
    let mounts = &report.mounts;
    let other = mounts.iter().any(|path| path.contains(OTHER));
    play.check(
        mounts.contains(&in_container(LOADED)) && !other,
        &format!("{name} has the library of the loaded driver {LOADED} and of no other version"),
        || format!("{report:?}"),
    )
    .map(drop)
}

async fn runs<C: Cluster>(play: &mut Play<'_, C>, name: &str, node: &str) -> Result<SelfReport, PlayStop> {
    play.create(&pod(name).gpu_mem(3).select(node), "asks for 3 GiB").await?;
    let (_, reports) = play.started("default", name).await?;
    // GPU 2, the T4, is the smallest GPU that fits.
    check_own_gpu(play, name, &reports, 2)?;
    Ok(reports.into_iter().next().unwrap_or_default())
}

async fn uuids<C: Cluster>(play: &Play<'_, C>, node: &str) -> Result<Vec<String>, PlayStop> {
    Ok(inventory(play, node).await?.gpus.into_iter().map(|gpu| gpu.uuid).collect())
}

async fn inventory<C: Cluster>(play: &Play<'_, C>, node: &str) -> Result<Inventory, PlayStop> {
    let found = divvy_kube::list::node(&play.cluster.client(), node).await;
    let node = found.map_err(|error| io::Error::other(error.to_string()))?;
    match node.inventory {
        Some(Ok(inventory)) => Ok(inventory),
        other => Err(io::Error::other(format!("no inventory: {other:?}")).into()),
    }
}
