//! The driver's files in containers.

use std::io;

use serde_json::json;

use crate::builders::pod;
use crate::scenario::tour::check_own_gpu;
use crate::scenario::{Cluster, Machine, Play, Report, Stop};

const SPEC: &str = "/etc/cdi/nvidia.json";

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
    play.scene("The driver's libraries are mounted as NVIDIA's CDI spec says, and the driver is updated")
        .await?;
    let node = play.ready(Machine::Mixed).await?;
    let uuids = uuids(play, &node).await?;
    for (name, version) in [("first", "550.54.15"), ("second", "560.35.03")] {
        play.cluster.place(&node, &on_node(version), Some(version))?;
        play.cluster.place(&node, SPEC, Some(&spec_of(version, &uuids)))?;
        play.step("installed", &format!("driver {version} on node {node}"), SPEC, Vec::new())?;
        let report = runs(play, name, &node).await?;
        let wanted = [in_container(version)];
        play.check(
            report.mounts == wanted,
            &format!("{name} has the library of driver {version}, and no other"),
            || format!("{report:?}"),
        )?;
    }
    let before = play.reports().await?;
    play.cluster.place(&node, SPEC, None)?;
    play.step("removed", SPEC, "", Vec::new())?;
    let report = runs(play, "third", &node).await?;
    play.check(report.mounts.is_empty(), "third has no library of a driver", || {
        format!("{report:?}")
    })?;
    play.unmoved(&before).await?;
    for version in ["550.54.15", "560.35.03"] {
        play.cluster.place(&node, &on_node(version), None)?;
    }
    Ok(())
}

async fn runs<C: Cluster>(play: &mut Play<'_, C>, name: &str, node: &str) -> Result<Report, Stop> {
    play.create(&pod(name).gpu_mem(3).select(node), "asks for 3 GiB").await?;
    let (_, reports) = play.started("default", name).await?;
    // The T4, being the smallest that fits.
    check_own_gpu(play, name, &reports, 2)?;
    Ok(reports.into_iter().next().unwrap_or_default())
}

async fn uuids<C: Cluster>(play: &Play<'_, C>, node: &str) -> Result<Vec<String>, Stop> {
    let found = divvy_cluster::list::node(&play.cluster.client(), node).await;
    let node = found.map_err(|error| io::Error::other(error.to_string()))?;
    match node.inventory {
        Some(Ok(inventory)) => Ok(inventory.gpus.into_iter().map(|gpu| gpu.uuid).collect()),
        other => Err(io::Error::other(format!("no inventory: {other:?}")).into()),
    }
}
