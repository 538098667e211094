//! AMD's GPUs in shares and as a whole (`--amd-shares`), next to shares of NVIDIA's.

use divvy_model::{Enforcement, Inventory, Vendor, names};
use serde_json::json;

use super::node_configs::{LABEL, configure};
use super::vendors::gpus;
use crate::builders::{PodBuilder, pod};
use crate::scenario::{Cluster, Machine, NodeConfigs, Play, Stop};

/// The GPUs of [`Machine::Instinct`], and the units of each.
const GPUS: u64 = 4;
const UNITS: u64 = 63;

/// The machines have an NVIDIA GPU and four AMD GPUs.
pub(in crate::scenario) async fn amd_shares<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), Stop> {
    play.scene("A node with an NVIDIA GPU shares it, and a node with four AMD GPUs gives them out as a whole")
        .await?;
    play.ready(Machine::Laptop).await?;
    let instinct = play.ready(Machine::Instinct).await?;
    play.has(&instinct, Vendor::Amd.whole_resource(), GPUS).await?;
    let played = shared(play, &instinct).await;
    let restored = restored(play, &instinct).await;
    played.and(restored)
}

async fn restored<C: Cluster>(play: &mut Play<'_, C>, instinct: &str) -> Result<(), Stop> {
    play.scene("Without the setting, the AMD GPUs are given out as a whole only")
        .await?;
    play.delete_all().await?;
    play.label(instinct, LABEL, None).await?;
    play.has(instinct, names::GPU_MEM, 0).await?;
    play.has(instinct, Vendor::Amd.whole_resource(), GPUS).await?;
    play.cluster.configure_nodes(&NodeConfigs::new()).await?;
    play.offers(instinct, 0).await
}

fn rocm(name: &str, units: u64) -> PodBuilder {
    let pod = pod(name).gpu_mem(units).grace_seconds(1).listing("/dev/dri");
    pod.annotation(names::GPU_VENDOR, Vendor::Amd.name())
}

async fn shared<C: Cluster>(play: &mut Play<'_, C>, instinct: &str) -> Result<(), Stop> {
    play.scene("A setting lets the node share its AMD GPUs, too, and pods say that their programs are made for these")
        .await?;
    configure(play, json!({"amd": {"amd-shares": true}})).await?;
    play.label(instinct, LABEL, Some("amd")).await?;
    play.offers(instinct, GPUS * UNITS).await?;
    play.has(instinct, Vendor::Amd.whole_resource(), GPUS).await?;
    play.create(&rocm("rocm", 16), "asks for 16 GiB of an AMD GPU").await?;
    let (object, reports) = play.started("default", "rocm").await?;
    let (node, found) = (object.spec.node_name.unwrap_or_default(), gpus(&reports));
    play.check(
        node == instinct && found.len() == 1,
        "rocm sees /dev/kfd and one AMD GPU",
        || format!("{found:?} on {node}"),
    )?;
    play.create(&pod("cuda").gpu_mem(3).grace_seconds(1), "asks for 3 GiB")
        .await?;
    let (_, reports) = play.started("default", "cuda").await?;
    let found = gpus(&reports);
    let is_one = matches!(found.as_slice(), [path] if path.starts_with("/dev/nvidia"));
    play.check(is_one, "cuda has a share of an NVIDIA GPU", || format!("{found:?}"))?;
    play.create(
        &pod("large").gpu_mem(60).grace_seconds(1),
        "asks for 60 GiB, which only AMD GPUs have",
    )
    .await?;
    play.why("large", &["shares of NVIDIA GPUs", names::GPU_VENDOR]).await?;

    play.scene("An AMD GPU with a share is not given out as a whole, and a whole one has no shares")
        .await?;
    play.create(
        &pod("whole").whole(Vendor::Amd, GPUS).grace_seconds(1),
        "asks for all 4 AMD GPUs",
    )
    .await?;
    play.why("whole", &["3 of 4 AMD GPUs are free"]).await?;
    play.delete("default", "rocm", "to make room").await?;
    play.started("default", "whole").await?;
    play.create(&rocm("next", 1), "asks for 1 GiB of an AMD GPU").await?;
    play.why("next", &["no AMD GPU has any memory free", "default/whole"]).await?;
    play.delete("default", "whole", "to make room").await?;
    play.started("default", "next").await?;

    play.scene("A pod that wants its share to be enforced starts where the kernel can do that")
        .await?;
    let is_enforced = play.nodes().await?.into_iter().any(|node| {
        let annotations = node.metadata.annotations.unwrap_or_default();
        let inventory = annotations.get(names::INVENTORY).and_then(|text| Inventory::parse(text).ok());
        let gpus = inventory.map(|inventory| inventory.gpus).unwrap_or_default();
        let mut amd = gpus.iter().filter(|gpu| gpu.vendor == Vendor::Amd);
        amd.any(|gpu| gpu.enforcement.is_some_and(Enforcement::has_cgroup))
    });
    play.create(
        &rocm("hard", 8).annotation(names::ISOLATION, "hard"),
        "asks for 8 GiB of an AMD GPU, with divvy.dev/isolation: hard",
    )
    .await?;
    match is_enforced {
        true => play.started("default", "hard").await.map(drop),
        false => play.why("hard", &["on which the driver enforces shares"]).await,
    }
}
