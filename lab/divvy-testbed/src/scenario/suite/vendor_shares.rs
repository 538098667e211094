//! Another vendor's GPUs in shares and as a whole (`--amd-shares`, `--intel-shares`), next to shares of NVIDIA's.

use std::collections::BTreeMap;

use divvy_model::{Enforcement, Gpu, Inventory, Vendor, names};
use serde_json::json;

use super::node_configs::{LABEL, configure};
use super::vendors::gpus;
use crate::builders::{PodBuilder, pod};
use crate::scenario::{Cluster, NodeConfigs, Play, PlayStop, TestbedMachine};

/// The GPUs of a vendor that [`TestbedMachine::Instinct`] has.
#[derive(Debug, Clone, Copy)]
pub(super) struct Side {
    vendor: Vendor,
    gpus: u64,
    /// The units of each GPU.
    units: u64,
    /// The agent's setting that shares them.
    setting: &'static str,
}

pub(super) const AMD: Side = Side {
    vendor: Vendor::Amd,
    gpus: 4,
    units: 63,
    setting: "amd-shares",
};

pub(super) const INTEL: Side = Side {
    vendor: Vendor::Intel,
    gpus: 2,
    units: 48,
    setting: "intel-shares",
};

/// The machines have an NVIDIA GPU, and these GPUs of the other vendor.
pub(in crate::scenario) async fn vendor_shares<C: Cluster>(play: &mut Play<'_, C>, side: Side) -> Result<(), PlayStop> {
    let Side { vendor, gpus, .. } = side;
    play.scene(&format!(
        "A node with an NVIDIA GPU shares it, and a node with {gpus} {vendor} GPUs gives them out as a whole"
    ))
    .await?;
    play.ready(TestbedMachine::Laptop).await?;
    let instinct = play.ready(TestbedMachine::Instinct).await?;
    play.has(&instinct, vendor.whole_resource(), gpus).await?;
    let played = shared(play, &instinct, side).await;
    let restored = restored(play, &instinct, side).await;
    played.and(restored)
}

async fn restored<C: Cluster>(play: &mut Play<'_, C>, instinct: &str, side: Side) -> Result<(), PlayStop> {
    let Side { vendor, gpus, .. } = side;
    play.scene(&format!(
        "Without the setting, the {vendor} GPUs are given out as a whole only"
    ))
    .await?;
    play.delete_all().await?;
    play.label(instinct, LABEL, None).await?;
    play.has(instinct, names::GPU_MEM, 0).await?;
    play.has(instinct, vendor.whole_resource(), gpus).await?;
    play.cluster.configure_nodes(&NodeConfigs::new()).await?;
    play.offers(instinct, 0).await
}

/// Return a pod with a share of the vendor's GPUs.
fn share(name: &str, vendor: Vendor, units: u64) -> PodBuilder {
    let pod = pod(name).gpu_mem(units).grace_seconds(1).listing("/dev/dri");
    pod.annotation(names::GPU_VENDOR, vendor.name())
}

async fn shared<C: Cluster>(play: &mut Play<'_, C>, instinct: &str, side: Side) -> Result<(), PlayStop> {
    let Side {
        vendor,
        gpus: count,
        units,
        setting,
    } = side;
    play.scene(&format!(
        "A setting lets the node share its {vendor} GPUs, too, and pods say that their programs are made for these"
    ))
    .await?;
    let settings = BTreeMap::from([(setting, true)]);
    configure(play, json!({"shares": settings})).await?;
    play.label(instinct, LABEL, Some("shares")).await?;
    play.offers(instinct, count * units).await?;
    play.has(instinct, vendor.whole_resource(), count).await?;
    let of_vendor = of_vendor(play, vendor).await?;
    play.create(&share("share", vendor, 16), &format!("asks for 16 GiB of an {vendor} GPU"))
        .await?;
    let (object, reports) = play.started("default", "share").await?;
    let (node, found) = (object.spec.node_name.unwrap_or_default(), gpus(&reports));
    let nodes: Vec<String> = of_vendor
        .iter()
        .flat_map(|gpu| &gpu.nodes)
        .map(|node| format!("/dev/{node}"))
        .collect();
    play.check(
        node == instinct && found.len() == 1 && nodes.contains(&found[0]),
        &format!("share sees one GPU, which is of {vendor}"),
        || format!("{found:?} on {node}, of {nodes:?}"),
    )?;
    play.create(&pod("cuda").gpu_mem(3).grace_seconds(1), "asks for 3 GiB")
        .await?;
    let (_, reports) = play.started("default", "cuda").await?;
    let found = gpus(&reports);
    let is_one = matches!(found.as_slice(), [path] if path.starts_with("/dev/nvidia"));
    play.check(is_one, "cuda has a share of an NVIDIA GPU", || format!("{found:?}"))?;
    let large = units - 3;
    play.create(
        &pod("large").gpu_mem(large).grace_seconds(1),
        &format!("asks for {large} GiB, which no NVIDIA GPU has"),
    )
    .await?;
    play.why("large", &["shares of NVIDIA GPUs", names::GPU_VENDOR]).await?;

    play.scene(&format!(
        "An {vendor} GPU with a share is not given out as a whole, and a whole one has no shares"
    ))
    .await?;
    play.create(
        &pod("whole").whole(vendor, count).grace_seconds(1),
        &format!("asks for all {count} {vendor} GPUs"),
    )
    .await?;
    let free = format!("{} of {count} {vendor} GPUs are free", count - 1);
    play.why("whole", &[free.as_str()]).await?;
    play.delete("default", "share", "to make room").await?;
    play.started("default", "whole").await?;
    play.create(&share("next", vendor, 1), &format!("asks for 1 GiB of an {vendor} GPU"))
        .await?;
    let none = format!("no {vendor} GPU has any memory free");
    play.why("next", &[none.as_str(), "default/whole"]).await?;
    play.delete("default", "whole", "to make room").await?;
    play.started("default", "next").await?;

    play.scene("A pod that wants its share to be enforced starts where the kernel can do that")
        .await?;
    let is_enforced = self::of_vendor(play, vendor)
        .await?
        .iter()
        .any(|gpu| gpu.enforcement.is_some_and(Enforcement::has_cgroup));
    play.create(
        &share("hard", vendor, 8).annotation(names::ISOLATION, "hard"),
        &format!("asks for 8 GiB of an {vendor} GPU, with divvy.dev/isolation: hard"),
    )
    .await?;
    if is_enforced {
        play.started("default", "hard").await.map(drop)
    } else {
        play.why("hard", &["on which the driver enforces shares"]).await
    }
}

/// Return the vendor's GPUs on all nodes.
async fn of_vendor<C: Cluster>(play: &Play<'_, C>, vendor: Vendor) -> Result<Vec<Gpu>, PlayStop> {
    let gpus = play.nodes().await?.into_iter().flat_map(|node| {
        let annotations = node.metadata.annotations.unwrap_or_default();
        let inventory = annotations.get(names::INVENTORY).and_then(|text| Inventory::parse(text).ok());
        inventory.map(|inventory| inventory.gpus).unwrap_or_default()
    });
    Ok(gpus.filter(|gpu| gpu.vendor == vendor).collect())
}
