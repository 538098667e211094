//! A cluster moves from `nvidia-device-plugin`, which offers whole GPUs, to `divvy agent --whole-gpus`, and back.

use std::collections::BTreeMap;

use divvy_model::{Vendor, names};

use super::whole::whole_gpus;
use crate::builders::pod;
use crate::scenario::devices::{gpus, is_gpu};
use crate::scenario::play::SeenReport;
use crate::scenario::{Cluster, Play, PlayStop, PluginSetup, TestbedMachine, WholeOffer};

const WHOLE: PluginSetup<'_> = PluginSetup {
    config: "version: v1\n",
    with_mps: false,
};

/// The machines have one GPU and three GPUs.
pub(in crate::scenario) async fn migration<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("Two nodes run nvidia-device-plugin, which offers whole GPUs; a pod runs on each")
        .await?;
    let small = play.ready(TestbedMachine::Laptop).await?;
    let large = play.ready(TestbedMachine::Mixed).await?;
    for node in [&small, &large] {
        play.run_plugin(node, WHOLE).await?;
    }
    play.cluster.offer_whole(WholeOffer::Mixed).await?;
    let played = there_and_back(play, &small, &large).await;
    let restored = shares_only(play, &small, &large).await;
    played.and(restored)
}

async fn shares_only<C: Cluster>(play: &mut Play<'_, C>, small: &str, large: &str) -> Result<(), PlayStop> {
    play.scene("Divvy's agent runs on both nodes, and offers shares only").await?;
    play.delete_all().await?;
    // Before the second node's agent starts, so that it need not be replaced.
    play.cluster.offer_whole(WholeOffer::Nothing).await?;
    for node in [large, small] {
        play.cluster.run_plugin(node, None).await?;
    }
    play.offers(small, TestbedMachine::Laptop.units()).await?;
    play.offers(large, TestbedMachine::Mixed.units()).await
}

async fn there_and_back<C: Cluster>(play: &mut Play<'_, C>, small: &str, large: &str) -> Result<(), PlayStop> {
    let resource = Vendor::Nvidia.whole_resource();
    for (name, node, gpus) in [("small", small, 1), ("large", large, 3)] {
        play.has(node, resource, gpus).await?;
        starts(play, name, node, false).await?;
    }
    let mut before = play.reports().await?;

    play.scene("The first node moves to divvy agent; its pod keeps the only GPU")
        .await?;
    moves(play, small, 1, &before).await?;
    play.create(&whole_gpus("next", 1).select(small).grace_seconds(1), "asks for 1 whole GPU")
        .await?;
    play.refused("next", &format!("Insufficient {resource}")).await?;
    let uid = play.uid("small").await?;
    before.retain(|(of, ..)| *of != uid);
    play.delete("default", "small", "so that the GPU is free").await?;
    play.started("default", "next").await?;

    play.scene("The second node moves; new pods get the GPUs that the old pod does not have")
        .await?;
    moves(play, large, 3, &before).await?;
    starts(play, "whole", large, true).await?;
    play.create(
        &pod("share").gpu_mem(4).select(large).grace_seconds(1),
        "asks for 4 GiB of a GPU",
    )
    .await?;
    play.started("default", "share").await?;
    each_gpu_has_one_user(play)?;
    play.create(&whole_gpus("waits", 1).select(large), "asks for 1 whole GPU")
        .await?;
    play.refused("waits", "no free NVIDIA GPU").await?;

    play.scene("The second node moves back").await?;
    for name in ["share", "waits"] {
        play.delete_quietly(name).await?;
    }
    let before = play.reports().await?;
    play.run_plugin(large, WHOLE).await?;
    play.has(large, resource, 3).await?;
    play.unmoved(&before).await?;
    starts(play, "after", large, false).await?;
    play.unmoved(&before).await?;
    each_gpu_has_one_user(play)
}

/// Let a node move from `nvidia-device-plugin` to the agent, and check that nothing happens to its pods.
async fn moves<C: Cluster>(play: &mut Play<'_, C>, node: &str, gpus: u64, before: &[SeenReport]) -> Result<(), PlayStop> {
    play.cluster.run_plugin(node, None).await?;
    play.step(
        "moved",
        node,
        "divvy agent --whole-gpus runs in place of nvidia-device-plugin",
        Vec::new(),
    )?;
    play.has(node, Vendor::Nvidia.whole_resource(), gpus).await?;
    play.unmoved(before).await?;
    each_gpu_has_one_user(play)
}

/// Create a pod with a whole GPU, and check who chose the GPU.
async fn starts<C: Cluster>(play: &mut Play<'_, C>, name: &str, node: &str, by_divvy: bool) -> Result<(), PlayStop> {
    play.create(&whole_gpus(name, 1).select(node).grace_seconds(1), "asks for 1 whole GPU")
        .await?;
    let (object, reports) = play.started("default", name).await?;
    let found = gpus(&reports);
    let annotations = object.metadata.annotations.unwrap_or_default();
    let is_allocated = annotations.contains_key(names::ALLOCATION);
    let who = if by_divvy { "Divvy" } else { "nvidia-device-plugin" };
    play.check(
        found.len() == 1 && is_allocated == by_divvy,
        &format!("{name} sees one GPU, which {who} chose"),
        || format!("{found:?}, allocated: {is_allocated}"),
    )?;
    Ok(())
}

/// Check that no GPU is in the containers of two pods.
fn each_gpu_has_one_user<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    let living = play.cluster.witness()()?;
    let mut users: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for container in living {
        for device in container.devices.into_iter().filter(|path| is_gpu(path)) {
            let users = users.entry((container.node.clone(), device)).or_default();
            users.push(container.pod_uid.clone());
        }
    }
    let good = !users.is_empty() && users.values().all(|pods| pods.len() == 1);
    let text = format!("no GPU is used by two pods ({} GPUs are used)", users.len());
    play.check(good, &text, || format!("{users:?}"))?;
    Ok(())
}
