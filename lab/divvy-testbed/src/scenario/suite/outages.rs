//! Scenes in which nodes and control planes go away.

use std::time::Duration;

use tokio::time::Instant;

use super::one_runs;
use crate::builders::pod;
use crate::scenario::devices::check_own_gpu;
use crate::scenario::{Cluster, ClusterProgram, End, Play, PlayStop, TestbedMachine};

/// The length of an outage: enough for watches to end, back-offs to grow, and the extender's lease to expire.
const OUTAGE: Duration = Duration::from_secs(30);

pub(super) async fn api_server_away<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("The API server is down for 30 s; pods keep running").await?;
    let (node, before) = one_runs(play, "one").await?;
    play.cluster.stop(ClusterProgram::ApiServer, End::Killed).await?;
    play.step("killed", "the API server", "kill -9", Vec::new())?;
    tokio::time::sleep(OUTAGE).await;
    for (uid, container, then) in &before {
        let now = play.cluster.report(uid, container).await?;
        play.check(now.as_ref() == Some(then), "pod one keeps running without it", || {
            format!("{now:?}")
        })?;
    }
    play.cluster.start(ClusterProgram::ApiServer).await?;
    play.step("started", "the API server", "", Vec::new())?;
    play.kubernetes_is_back(&node).await?;
    let began = Instant::now();
    play.create(&pod("two").gpu_mem(5).select(&node), "asks for 5 GiB").await?;
    play.started("default", "two").await?;
    play.measured(&format!(
        "{} ms more until a new pod with a GPU runs",
        began.elapsed().as_millis()
    ))?;
    play.unmoved(&before).await?;
    play.used(&node, 8).await?;
    // An extender that no longer watches the pods does not learn that this memory is free.
    play.delete_quietly("one").await?;
    play.create(&pod("three").gpu_mem(11).select(&node), "asks for 11 GiB: all but pod two's")
        .await?;
    play.started("default", "three").await?;
    play.used(&node, 16).await
}

pub(super) async fn node_reboots<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("A node reboots; its kubelet starts before the agent").await?;
    let (node, _) = one_runs(play, "bare").await?;
    play.cluster.power_off(&node).await?;
    play.step(
        "rebooted",
        &node,
        "its processes and cgroups are gone, and its boot id is new",
        Vec::new(),
    )?;
    play.cluster.start(ClusterProgram::Runtime(&node)).await?;
    play.cluster.start(ClusterProgram::Kubelet(&node)).await?;
    play.phase("bare", "Failed").await?;
    play.cluster.start(ClusterProgram::Agent(&node)).await?;
    play.offers(&node, 16).await?;
    play.create(&pod("replacement").gpu_mem(16).select(&node), "asks for all 16 GiB")
        .await?;
    let (_, reports) = play.started("default", "replacement").await?;
    check_own_gpu(play, "replacement", &reports, 0)?;
    if play.cluster.agents_are_pods() {
        // An agent that is a pod always comes after its kubelet, which admits its pods before any of them can run.
        return Ok(());
    }
    play.clear().await?;

    play.scene("The node reboots; the agent starts before the kubelet").await?;
    let (_, before) = one_runs(play, "bare").await?;
    play.cluster.power_off(&node).await?;
    play.step("rebooted", &node, "", Vec::new())?;
    play.cluster.start(ClusterProgram::Agent(&node)).await?;
    // By now the agent has read its GPUs and is waiting for the kubelet's socket.
    tokio::time::sleep(Duration::from_secs(1)).await;
    play.cluster.start(ClusterProgram::Runtime(&node)).await?;
    play.cluster.start(ClusterProgram::Kubelet(&node)).await?;
    let (uid, container, then) = before.first().cloned().unwrap_or_default();
    let report = play
        .eventually("bare to run again", async |play| {
            Ok(match play.cluster.report(&uid, &container).await? {
                Some(report) if report.running && report.id != then.id => Ok(report),
                other => Err(format!("{other:?}")),
            })
        })
        .await?;
    check_own_gpu(play, "bare", std::slice::from_ref(&report), 0)?;
    play.check(
        (&report.env, &report.devices, &report.mounts) == (&then.env, &then.devices, &then.mounts),
        "its environment, devices and mounts are the same as before",
        || format!("{then:?}, then {report:?}"),
    )?;
    play.used(&node, 3).await
}

pub(super) async fn drained<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("A node is drained; its pods move to another node, and the node is used again")
        .await?;
    let laptop = play.ready(TestbedMachine::Laptop).await?;
    let mixed = play.ready(TestbedMachine::Mixed).await?;
    play.cordon(&mixed, true).await?;
    play.create_deployment("web", 3, &pod("web").gpu_mem(5).grace_seconds(2))
        .await?;
    play.replicas("web", 3, 3).await?;
    play.used(&laptop, 15).await?;
    play.cordon(&mixed, false).await?;
    play.cordon(&laptop, true).await?;
    let moved = play.evict_all(&laptop).await?;
    play.check(moved == 3, "three pods were evicted", || moved.to_string())?;
    play.replicas("web", 3, 3).await?;
    play.used(&laptop, 0).await?;
    play.used(&mixed, 15).await?;
    play.cordon(&laptop, false).await?;
    play.create(&pod("back").gpu_mem(16).select(&laptop), "asks for all 16 GiB")
        .await?;
    let (_, reports) = play.started("default", "back").await?;
    check_own_gpu(play, "back", &reports, 0)
}

pub(super) async fn rolling_update<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("Every program of Divvy is replaced while pods are created and deleted")
        .await?;
    let (node, before) = one_runs(play, "steady").await?;
    for number in 0..3 {
        let name = format!("before-{number}");
        play.create_quietly(&pod(&name).gpu_mem(2).grace_seconds(1).select(&node))
            .await?;
    }
    let load = play.come_and_go(&node, 2);
    let began = Instant::now();
    play.cluster.roll().await?;
    play.measured(&format!("{} ms until every program is replaced", began.elapsed().as_millis()))?;
    let guests = load.finish().await?;
    play.check(
        guests.ran > 0,
        &format!(
            "{} of {} pods that were created meanwhile were seen running",
            guests.ran, guests.created
        ),
        || format!("{guests:?}"),
    )?;
    play.unmoved(&before).await?;
    for number in 0..3 {
        play.started("default", &format!("before-{number}")).await?;
    }
    play.create(&pod("after").gpu_mem(7).select(&node), "asks for 7 GiB: all that is left")
        .await?;
    let (_, reports) = play.started("default", "after").await?;
    check_own_gpu(play, "after", &reports, 0)?;
    play.used(&node, 16).await
}
