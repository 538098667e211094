//! Scenes in which programs end and come back while pods keep running.

use divvy_model::names;
use tokio::time::Instant;

use super::one_runs;
use crate::builders::pod;
use crate::scenario::devices::check_own_gpu;
use crate::scenario::{Cluster, ClusterProgram, End, Play, PlayStop};

const WAYS: [(End, &str); 2] = [(End::Stopped, "SIGTERM"), (End::Killed, "kill -9")];

pub(super) async fn agent<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("The agent is stopped, then killed; pods keep running").await?;
    let (node, before) = one_runs(play, "one").await?;
    play.cluster.stop(ClusterProgram::Agent(&node), End::Stopped).await?;
    play.step("stopped", &format!("the agent of {node}"), "SIGTERM", Vec::new())?;
    play.offers(&node, 0).await?;
    play.create(&pod("two").gpu_mem(5).select(&node), "asks for 5 GiB").await?;
    play.refused("two", names::GPU_MEM).await?;
    play.why("two", &["agent"]).await?;
    let began = Instant::now();
    play.cluster.start(ClusterProgram::Agent(&node)).await?;
    play.offers(&node, 16).await?;
    play.measured(&format!(
        "{} ms from the agent's start to the units in the node's allocatable",
        began.elapsed().as_millis()
    ))?;
    play.started("default", "two").await?;
    play.unmoved(&before).await?;
    let before = play.reports().await?;
    play.cluster.stop(ClusterProgram::Agent(&node), End::Killed).await?;
    play.step("killed", &format!("the agent of {node}"), "kill -9", Vec::new())?;
    play.cluster.start(ClusterProgram::Agent(&node)).await?;
    play.offers(&node, 16).await?;
    play.unmoved(&before).await?;
    play.used(&node, 8).await
}

pub(super) async fn kubelet<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("The kubelet is restarted, then killed; pods keep running, and the agent registers again")
        .await?;
    let (node, before) = one_runs(play, "one").await?;
    let grants = play.cluster.grants(&node)?;
    for (number, (end, how)) in WAYS.into_iter().enumerate() {
        play.cluster.stop(ClusterProgram::Kubelet(&node), end).await?;
        play.cluster.start(ClusterProgram::Kubelet(&node)).await?;
        play.step("restarted", &format!("the kubelet of {node}"), how, Vec::new())?;
        // A pod that starts proves more than the node's status, which may still be from before the restart.
        let name = format!("after-{number}");
        play.create(&pod(&name).gpu_mem(2).select(&node), "asks for 2 GiB").await?;
        let (_, reports) = play.started("default", &name).await?;
        check_own_gpu(play, &name, &reports, 0)?;
        play.offers(&node, 16).await?;
        play.unmoved(&before).await?;
    }
    let after = play.cluster.grants(&node)?;
    play.check(
        grants.iter().all(|file| after.contains(file)),
        "every earlier grant still exists",
        || format!("{grants:?}, then {after:?}"),
    )?;
    Ok(())
}

pub(super) async fn runtime<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("containerd is restarted, then killed; pods keep running").await?;
    let (node, before) = one_runs(play, "one").await?;
    for (number, (end, how)) in WAYS.into_iter().enumerate() {
        play.cluster.stop(ClusterProgram::Runtime(&node), end).await?;
        let name = format!("meanwhile-{number}");
        play.create(&pod(&name).gpu_mem(2).select(&node), "asks for 2 GiB").await?;
        play.cluster.start(ClusterProgram::Runtime(&node)).await?;
        play.step("restarted", &format!("containerd of {node}"), how, Vec::new())?;
        let (_, reports) = play.started("default", &name).await?;
        check_own_gpu(play, &name, &reports, 0)?;
        play.unmoved(&before).await?;
    }
    Ok(())
}

pub(super) async fn extender<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("The extender is killed; pods wait, and no pod is bound without it")
        .await?;
    let (node, before) = one_runs(play, "one").await?;
    play.cluster.stop(ClusterProgram::Extender, End::Killed).await?;
    play.step("killed", "the extender", "kill -9", Vec::new())?;
    play.create(&pod("meanwhile").gpu_mem(5).select(&node), "asks for 5 GiB")
        .await?;
    play.refused("meanwhile", "onnect").await?;
    play.why("meanwhile", &["extender"]).await?;
    let bound = play.get("default", "meanwhile").await?.spec.node_name;
    play.check(bound.is_none(), "meanwhile is not bound", || format!("{bound:?}"))?;
    let began = Instant::now();
    play.cluster.start(ClusterProgram::Extender).await?;
    play.measured(&format!("{} ms until the extender answers", began.elapsed().as_millis()))?;
    play.started("default", "meanwhile").await?;
    play.measured(&format!(
        "{} ms from the extender's start until the waiting pod runs",
        began.elapsed().as_millis()
    ))?;
    play.unmoved(&before).await?;
    play.used(&node, 8).await
}

pub(super) async fn scheduler<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("kube-scheduler is killed and started again").await?;
    let (node, before) = one_runs(play, "one").await?;
    play.cluster.stop(ClusterProgram::Scheduler, End::Killed).await?;
    play.step("killed", "kube-scheduler", "kill -9", Vec::new())?;
    play.create(&pod("two").gpu_mem(5).select(&node), "asks for 5 GiB").await?;
    play.create(&pod("three").gpu_mem(12).select(&node), "asks for 12 GiB")
        .await?;
    let began = Instant::now();
    play.cluster.start(ClusterProgram::Scheduler).await?;
    // The two pods never fit together next to pod `one`. The scheduler's order decides which of them runs.
    let first = play
        .eventually("one of the two pods to be bound", async |play| {
            for name in ["two", "three"] {
                if play.get("default", name).await?.spec.node_name.is_some() {
                    return Ok(Ok(name));
                }
            }
            Ok(Err("neither is bound".to_owned()))
        })
        .await?;
    play.measured(&format!(
        "{} ms from the scheduler's start until a waiting pod is bound",
        began.elapsed().as_millis()
    ))?;
    play.started("default", first).await?;
    play.unmoved(&before).await?;
    let (other, used) = if first == "two" { ("three", 8) } else { ("two", 15) };
    play.refused(other, "Insufficient").await?;
    play.used(&node, used).await
}
