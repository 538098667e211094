//! The guard takes the place of CUDA's driver library (`divvy agent --guard shadow`).
//!
//! The libraries are text files here, and no program loads them. The tests of `divvy-guard` and the scenario `isolation` run programs
//! with the real ones.

use divvy_model::{Enforcement, names};
use serde_json::json;

use super::node_configs::configure;
use crate::builders::pod;
use crate::scenario::{Cluster, ClusterProgram, End, NodeConfigs, Play, PlayStop, SelfReport, TestbedMachine};

/// Where the libraries are on the node. Real ones come with the agent. `/etc/cdi` is used here because each node has its own.
const DIRECTORY: &str = "/etc/cdi";
const LIBRARIES: [&str; 2] = ["/etc/cdi/libdivvy-guard.so", "/etc/cdi/libdivvy-guard-nvml.so"];

/// The machine has one GPU.
pub(in crate::scenario) async fn play<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("Nothing enforces shares; a pod wants its share to be enforced, in any way")
        .await?;
    let node = play.ready(TestbedMachine::Laptop).await?;
    let played = guarded(play, &node).await;
    let restored = restored(play, &node).await;
    played.and(restored)
}

async fn guarded<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    let wants = |name: &str, isolation: &str| {
        let pod = pod(name).gpu_mem(3).select(node).grace_seconds(1);
        pod.annotation(names::ISOLATION, isolation)
    };
    play.create(&wants("soft", "soft"), "asks for 3 GiB, with divvy.dev/isolation: soft")
        .await?;
    play.why("soft", &["no GPU on which shares are enforced"]).await?;

    play.scene("The agent gets the guard: the pod starts with it, and so does a pod without the annotation")
        .await?;
    for library in LIBRARIES {
        play.cluster.place(node, library, Some(b"the guard"))?;
    }
    let directory = play.cluster.agents_path(node, DIRECTORY);
    configure(play, json!({"default": {"guard": "shadow", "guard-dir": directory}})).await?;
    let (_, soft) = play.started("default", "soft").await?;
    has_guard(play, "soft", &soft, true)?;
    play.create(&pod("plain").gpu_mem(2).select(node).grace_seconds(1), "asks for 2 GiB")
        .await?;
    let (_, plain) = play.started("default", "plain").await?;
    has_guard(play, "plain", &plain, true)?;
    let args = ["inspect", "gpushare", "-o", "wide", node];
    let table = play.run(&format!("kubectl {}", args.join(" ")), &args).await?;
    play.check(table.contains("  guard  "), "it says that the guard enforces shares", || {
        table.clone()
    })?;

    play.scene("A pod with isolation: none has the driver's own library; isolation: hard needs more than the guard")
        .await?;
    play.create(&wants("free", "none"), "asks for 3 GiB, with divvy.dev/isolation: none")
        .await?;
    let (_, free) = play.started("default", "free").await?;
    has_guard(play, "free", &free, false)?;
    play.create(&wants("hard", "hard"), "asks for 3 GiB, with divvy.dev/isolation: hard")
        .await?;
    play.why("hard", &["no GPU on which the driver enforces shares"]).await?;
    play.delete("default", "hard", "because it would wait forever").await?;

    play.scene("Pods limit themselves to shares of the compute time, which are at most all of it together")
        .await?;
    let limited = |name: &str, cores: &str| {
        let pod = pod(name).gpu_mem(1).select(node).grace_seconds(1);
        pod.annotation(names::GPU_CORES, cores)
    };
    play.create(&limited("busy", "60"), "asks for 1 GiB and 60 % of the compute time")
        .await?;
    let (_, busy) = play.started("default", "busy").await?;
    has_guard(play, "busy", &busy, true)?;
    play.create(&limited("calm", "50"), "asks for 1 GiB and 50 % of the compute time")
        .await?;
    play.why(
        "calm",
        &["40 % of the compute time is free", "Wait until pod default/busy (1 GiB)"],
    )
    .await?;
    play.delete("default", "busy", "so that its compute time is free again")
        .await?;
    let (_, calm) = play.started("default", "calm").await?;
    has_guard(play, "calm", &calm, true)?;
    let table = play.run(&format!("kubectl {}", args.join(" ")), &args).await?;
    play.check(
        table.contains("  50%  "),
        "it says how much of the compute time pods have",
        || table.clone(),
    )?;
    play.delete_quietly("calm").await?;

    play.scene("The next agent has another version of the guard, and is then killed: no pod that runs notices")
        .await?;
    let before = play.reports().await?;
    play.cluster.place(node, LIBRARIES[0], Some(b"the next guard"))?;
    play.cluster.stop(ClusterProgram::Agent(node), End::Stopped).await?;
    play.cluster.start(ClusterProgram::Agent(node)).await?;
    play.step("restarted", &format!("the agent of {node}"), "", Vec::new())?;
    play.create(&pod("next").gpu_mem(2).select(node).grace_seconds(1), "asks for 2 GiB")
        .await?;
    let (_, next) = play.started("default", "next").await?;
    has_guard(play, "next", &next, true)?;
    play.unmoved(&before).await?;
    let before = play.reports().await?;
    play.cluster.stop(ClusterProgram::Agent(node), End::Killed).await?;
    play.step("killed", &format!("the agent of {node}"), "kill -9", Vec::new())?;
    play.cluster.start(ClusterProgram::Agent(node)).await?;
    play.offers(node, TestbedMachine::Laptop.units()).await?;
    play.unmoved(&before).await
}

async fn restored<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    play.scene("Without the guard, nothing enforces shares").await?;
    play.delete_all().await?;
    play.cluster.configure_nodes(&NodeConfigs::new()).await?;
    for library in LIBRARIES {
        play.cluster.place(node, library, None)?;
    }
    play.enforces(node, Enforcement::GUARD, false).await?;
    play.offers(node, TestbedMachine::Laptop.units()).await
}

/// Check that each container of a pod has the driver's library, and also what the guard needs, or nothing of that.
fn has_guard<C: Cluster>(play: &mut Play<'_, C>, pod: &str, reports: &[SelfReport], expected: bool) -> Result<(), PlayStop> {
    let mounts: Vec<&String> = reports.iter().flat_map(|report| &report.mounts).collect();
    let has = |end: &str| {
        mounts
            .iter()
            .any(|path| path.starts_with("/run/divvy/") && path.ends_with(end))
    };
    let found = ["/libcuda.so.real", "/libnvidia-ml.so.real", "/limits", "/usage"].map(has);
    let has_library = mounts
        .iter()
        .any(|path| path.contains("/libcuda.so.") && !path.starts_with("/run/divvy/"));
    let what = if expected {
        "has the guard, and its share"
    } else {
        "has the driver's own library"
    };
    play.check(found == [expected; 4] && has_library, &format!("{pod} {what}"), || {
        format!("{mounts:?}")
    })?;
    Ok(())
}
