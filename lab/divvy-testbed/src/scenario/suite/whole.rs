//! Whole GPUs of NVIDIA (`nvidia.com/gpu`) and shares (`aliyun.com/gpu-mem`) on one node.

use std::collections::BTreeSet;

use divvy_model::{Vendor, names};

use super::mig;
use crate::builders::{PodBuilder, pod};
use crate::scenario::devices::gpus;
use crate::scenario::play::SeenReport;
use crate::scenario::{Cluster, Play, PlayStop, TestbedMachine, WholeOffer};

/// The machine has two A100, connected by NVLink, and a T4.
pub(in crate::scenario) async fn whole<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("A node with three NVIDIA GPUs offers each of them in shares and as a whole")
        .await?;
    let node = play.ready(TestbedMachine::Mixed).await?;
    play.create(
        &pod("share")
            .gpu_mem(3)
            .select(&node)
            .annotation(names::GPU_MODEL, "*T4")
            .grace_seconds(1),
        "asks for 3 GiB of a T4",
    )
    .await?;
    play.started("default", "share").await?;
    let before = play.reports().await?;
    play.cluster.offer_whole(WholeOffer::Mixed).await?;
    play.step("updated", "divvy-agent", "the agents run with --whole-gpus", Vec::new())?;
    let mut played = beside_shares(play, &node, &before).await;
    play.clear().await?;
    if played.is_ok() {
        played = mig::as_a_whole(play, &node).await;
        play.clear().await?;
        mig::undivide(play, &node).await?;
    }
    if played.is_ok() {
        played = mig::as_gpus(play, &node).await;
        play.clear().await?;
        mig::restore(play, &node).await?;
    }
    // The next scene expects shares only.
    play.cluster.offer_whole(WholeOffer::Nothing).await?;
    played
}

async fn beside_shares<C: Cluster>(play: &mut Play<'_, C>, node: &str, before: &[SeenReport]) -> Result<(), PlayStop> {
    let resource = Vendor::Nvidia.whole_resource();
    play.has(node, resource, 3).await?;
    play.unmoved(before).await?;

    play.create(&whole_gpus("train", 2).select(node).grace_seconds(1), "asks for 2 whole GPUs")
        .await?;
    let (object, reports) = play.started("default", "train").await?;
    let of_train = gpus(&reports);
    let on = object.spec.node_name.unwrap_or_default();
    play.check(
        on == node && of_train == ["/dev/nvidia0", "/dev/nvidia1"],
        "train sees the two A100, which are connected, and no other GPU",
        || format!("{of_train:?} on {on}"),
    )?;
    let about_shares = [names::ALIYUN_IDX, names::ALIYUN_CONTAINER];
    let silent = reports
        .iter()
        .all(|report| about_shares.iter().all(|name| !report.env.contains_key(*name)));
    play.check(silent, "train has no environment variables about shares", || {
        format!("{reports:?}")
    })?;

    play.scene("A GPU is shared or taken as a whole, never both").await?;
    play.create(&whole_gpus("one", 1).select(node), "asks for 1 whole GPU; the T4 has a share")
        .await?;
    play.refused("one", "no free NVIDIA GPU").await?;
    play.why("one", &[resource, "default/share", "default/train"]).await?;
    play.create(
        &pod("large").gpu_mem(20).select(node),
        "asks for 20 GiB, which only an A100 has; both are taken as a whole",
    )
    .await?;
    play.refused("large", "Insufficient GPU Memory in one device").await?;
    play.why("large", &["default/train"]).await?;
    let table = play
        .run("kubectl inspect gpushare -o wide", &["inspect", "gpushare", "-o", "wide"])
        .await?;
    for part in ["default/train (whole)", "default/share", "nvidia.com/gpu 2/"] {
        play.check(table.contains(part), &format!("`inspect` shows {part}"), || table.clone())?;
    }
    play.delete("default", "share", "so that the T4 is free").await?;
    let (_, reports) = play.started("default", "one").await?;
    let of_one = gpus(&reports);
    play.check(of_one == ["/dev/nvidia2"], "one sees the T4", || format!("{of_one:?}"))?;
    play.delete("default", "train", "so that the A100 are free").await?;
    let (_, reports) = play.started("default", "large").await?;
    let of_large = gpus(&reports);
    play.check(
        of_large.len() == 1 && of_large != of_one,
        "large has a share of an A100",
        || format!("{of_large:?}"),
    )?;

    play.scene("A pod that no extender has placed gets a free GPU; another one waits")
        .await?;
    play.create(
        &whole_gpus("direct", 1).on_node(node),
        "asks for 1 whole GPU, with nodeName set",
    )
    .await?;
    let (_, reports) = play.started("default", "direct").await?;
    let of_direct = gpus(&reports);
    let all: BTreeSet<&String> = of_direct.iter().chain(&of_one).chain(&of_large).collect();
    play.check(
        of_direct.len() == 1 && all.len() == 3,
        "direct sees the GPU that no other pod uses",
        || format!("{of_direct:?}; one has {of_one:?}, large has {of_large:?}"),
    )?;
    play.create(&whole_gpus("more", 1).select(node), "asks for 1 whole GPU")
        .await?;
    play.refused("more", "no free NVIDIA GPU").await?;
    play.delete("default", "large", "so that its GPU is free as a whole").await?;
    let (_, reports) = play.started("default", "more").await?;
    let of_more = gpus(&reports);
    play.check(of_more == of_large, "more has the GPU that large shared", || {
        format!("{of_more:?}")
    })?;
    Ok(())
}

pub(super) fn whole_gpus(name: &str, gpus: u64) -> PodBuilder {
    pod(name).limit(Vendor::Nvidia.whole_resource(), &gpus.to_string())
}
