//! The scene in which the operator changes `--memory-unit` while pods run.

use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, ListParams};

use divvy_model::MemoryUnit;

use super::one_runs;
use crate::builders::pod;
use crate::scenario::devices::check_own_gpu;
use crate::scenario::history::AuditHistory;
use crate::scenario::{Cluster, Play, PlayStop};

pub(super) async fn play<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("The memory unit is made smaller, then larger again, while pods run")
        .await?;
    let played = both_ways(play).await;
    // The next scene expects units of 1 GiB.
    play.cluster.change_unit(MemoryUnit::GIB).await?;
    played
}

async fn both_ways<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    let small = MemoryUnit::new(256).unwrap_or_default();
    let (node, _) = one_runs(play, "three").await?;
    let history = AuditHistory::begin(play).await?;
    play.create(&pod("five").gpu_mem(5).select(&node), "asks for 5 GiB").await?;
    play.started("default", "five").await?;
    let before = play.reports().await?;
    changed(play, small, &node, 64).await?;
    play.unmoved(&before).await?;
    play.used(&node, 32).await?;
    is_well(play).await?;
    let wide = play
        .run("kubectl inspect gpushare -o wide", &["inspect", "gpushare", "-o", "wide"])
        .await?;
    for part in [
        "64 x 256MiB",
        "default/three (asks for 3 GiB)",
        "default/five (asks for 5 GiB)",
    ] {
        play.check(wide.contains(part), &format!("it says {part:?}"), || wide.clone())?;
    }
    play.why(
        "three",
        &[
            "a unit of aliyun.com/gpu-mem was 1 GiB, and it asked for 3 units",
            "it holds 12 of these units",
        ],
    )
    .await?;

    play.create(
        &pod("rest").gpu_mem(32).select(&node),
        "asks for 32 x 256 MiB: all that is left",
    )
    .await?;
    let (_, reports) = play.started("default", "rest").await?;
    check_own_gpu(play, "rest", &reports, 0)?;
    play.create(&pod("more").gpu_mem(1).select(&node), "asks for 256 MiB more")
        .await?;
    play.refused("more", "nsufficient").await?;
    play.delete_quietly("more").await?;
    play.used(&node, 64).await?;
    is_well(play).await?;

    let before = play.reports().await?;
    changed(play, MemoryUnit::GIB, &node, 16).await?;
    play.unmoved(&before).await?;
    play.used(&node, 16).await?;
    is_well(play).await?;
    play.why(
        "rest",
        &[
            "a unit of aliyun.com/gpu-mem was 256 MiB, and it asked for 32 units",
            "it holds 8 of these units",
        ],
    )
    .await?;
    play.delete_quietly("rest").await?;
    play.create(
        &pod("eight").gpu_mem(8).select(&node),
        "asks for 8 GiB: what the deleted pod left",
    )
    .await?;
    play.started("default", "eight").await?;
    is_well(play).await?;

    history.end(play)
}

async fn changed<C: Cluster>(play: &mut Play<'_, C>, unit: MemoryUnit, node: &str, units: u64) -> Result<(), PlayStop> {
    play.cluster.change_unit(unit).await?;
    play.step("changed", "the memory unit", &format!("to {unit}"), Vec::new())?;
    play.offers(node, units).await
}

/// Check that neither `divvy audit` nor an event reports a problem with a pod.
async fn is_well<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    let (output, errors, ok) = play.run_divvy(&["audit"]).await?;
    play.check(ok, "divvy audit finds no problem", || format!("{output}{errors}"))?;
    let pods: Vec<Option<String>> = play.all_pods().await?.into_iter().map(|pod| pod.metadata.uid).collect();
    let events: Api<Event> = Api::namespaced(play.cluster.client(), "default");
    let told = events.list(&ListParams::default()).await;
    let told = told.map_err(|source| PlayStop::Api {
        what: "list of events".to_owned(),
        source: Box::new(source),
    })?;
    let accused = told.items.into_iter().find(|event| {
        // The extender refuses a node until it has heard from the node's new agent.
        let warns = event.type_.as_deref() == Some("Warning") && event.reason.as_deref() != Some("FailedScheduling");
        warns && pods.contains(&event.involved_object.uid)
    });
    play.check(accused.is_none(), "no Warning event is about one of the pods", || {
        format!("{accused:?}")
    })?;
    Ok(())
}
