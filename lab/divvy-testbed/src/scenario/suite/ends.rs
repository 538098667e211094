//! Scenes about pods that end, and about their successors.

use std::time::Duration;

use crate::builders::pod;
use crate::scenario::devices::check_own_gpu;
use crate::scenario::{Cluster, ClusterProgram, End, Play, PlayStop, SelfReport, TestbedMachine};

/// Create pod `old`, which only SIGKILL ends, and wait until it runs. Return its UID.
async fn old_runs<C: Cluster>(play: &mut Play<'_, C>, node: &str, units: u64, grace_s: u64) -> Result<String, PlayStop> {
    let old = pod("old").gpu_mem(units).args(&["run", "--ignore-term"]);
    let text = format!("asks for {units} GiB; its program ignores SIGTERM, and its grace period is {grace_s} s");
    play.create(&old.grace_seconds(grace_s).select(node), &text).await?;
    play.started("default", "old").await?;
    play.uid("old").await
}

/// Create pod `new`, which asks for the memory that `old` holds.
async fn new_comes<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    play.create(&pod("new").gpu_mem(12).select(node), "asks for 12 GiB")
        .await
        .map(drop)
}

/// Wait until `new` runs, and check that it was neither bound nor started too early.
async fn handed_over<C: Cluster>(play: &mut Play<'_, C>, old: &str) -> Result<Vec<SelfReport>, PlayStop> {
    let handed = play.hand_over(old, "new").await?;
    play.check(!handed.early, "new was not bound while old's program ran", || {
        "it was bound".to_owned()
    })?;
    play.check(!handed.overlap, "new's program never ran at the same time as old's", || {
        "both ran at the same moment".to_owned()
    })?;
    play.measured(&format!(
        "{} ms from the end of old's program to the start of new's",
        handed.gap.as_millis()
    ))?;
    let (_, reports) = play.started("default", "new").await?;
    Ok(reports)
}

pub(super) async fn stubborn<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("A pod whose container ignores SIGTERM is deleted; the next pod waits until the container ends")
        .await?;
    let node = play.ready(TestbedMachine::Mixed).await?;
    play.create(&pod("filler").gpu_mem(40).select(&node), "asks for 40 GiB: all of GPU 0")
        .await?;
    play.started("default", "filler").await?;
    let old = old_runs(play, &node, 20, 4).await?;
    play.delete("default", "old", "").await?;
    // `new` is created only now because kube-scheduler does not retry when a deletion is merely requested. It asks for less than is free on the
    // node in total because kube-scheduler would not call the extender otherwise.
    play.create(
        &pod("new").gpu_mem(30).select(&node),
        "asks for 30 GiB: 20 are free on GPU 1, and 15 on GPU 2",
    )
    .await?;
    play.refused("new", "Insufficient GPU Memory in one device").await?;
    play.why("new", &["Pod default/old is being deleted"]).await?;
    let reports = handed_over(play, &old).await?;
    check_own_gpu(play, "new", &reports, 1)
}

pub(super) async fn forced<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("A pod is deleted by force; its container runs on for a while and keeps its memory")
        .await?;
    let node = play.ready(TestbedMachine::Laptop).await?;
    let old = old_runs(play, &node, 12, 30).await?;
    play.force_delete("old").await?;
    new_comes(play, &node).await?;
    // The event also says that the program runs on without its pod.
    play.event("old", "MemoryHeldWithoutPod", "").await?;
    handed_over(play, &old).await.map(drop)
}

pub(super) async fn forced_while_one_waits<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("A pod is deleted by force while another waits for its memory")
        .await?;
    let node = play.ready(TestbedMachine::Laptop).await?;
    let old = old_runs(play, &node, 12, 30).await?;
    new_comes(play, &node).await?;
    play.refused("new", "Insufficient").await?;
    play.force_delete("old").await?;
    handed_over(play, &old).await.map(drop)
}

pub(super) async fn forced_without_kubelet<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("A pod is deleted by force while its node's kubelet is down and another pod waits")
        .await?;
    let node = play.ready(TestbedMachine::Laptop).await?;
    let old = old_runs(play, &node, 12, 30).await?;
    new_comes(play, &node).await?;
    play.refused("new", "Insufficient").await?;
    play.cluster.stop(ClusterProgram::Kubelet(&node), End::Stopped).await?;
    play.step("stopped", &format!("the kubelet of {node}"), "", Vec::new())?;
    play.force_delete("old").await?;
    // Long enough for an extender that frees the memory at once to bind `new`.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let report = play.cluster.report(&old, "main").await?;
    play.check(
        report.is_some_and(|report| report.running),
        "old's program is still running",
        || "it is not running".to_owned(),
    )?;
    let bound = play.get("default", "new").await?.spec.node_name;
    play.check(bound.is_none(), "new is not bound while old's program runs", || {
        format!("{bound:?}")
    })?;
    play.cluster.start(ClusterProgram::Kubelet(&node)).await?;
    play.step("started", &format!("the kubelet of {node}"), "", Vec::new())?;
    handed_over(play, &old).await.map(drop)
}
