//! Settings of single nodes (`divvy agent --node-configs`), which a node label chooses.

use divvy_model::Vendor;
use serde_json::json;

use super::whole::whole_gpus;
use crate::builders::pod;
use crate::scenario::devices::gpus;
use crate::scenario::{Cluster, NodeConfigs, Play, PlayStop, TestbedMachine};

pub(super) const LABEL: &str = "nvidia.com/device-plugin.config";
/// The GPUs of [`TestbedMachine::Mixed`].
const GPUS: u64 = 3;

/// The machines have one GPU and three GPUs.
pub(in crate::scenario) async fn node_configs<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("Two nodes offer shares; the agents get settings that no node uses yet")
        .await?;
    let small = play.ready(TestbedMachine::Laptop).await?;
    let large = play.ready(TestbedMachine::Mixed).await?;
    let played = labelled(play, &small, &large).await;
    let restored = restored(play, &small, &large).await;
    played.and(restored)
}

async fn restored<C: Cluster>(play: &mut Play<'_, C>, small: &str, large: &str) -> Result<(), PlayStop> {
    play.scene("Without the settings, both nodes offer shares only").await?;
    play.delete_all().await?;
    play.label(large, LABEL, None).await?;
    play.cluster.configure_nodes(&NodeConfigs::new()).await?;
    play.offers(small, TestbedMachine::Laptop.units()).await?;
    play.offers(large, TestbedMachine::Mixed.units()).await
}

async fn labelled<C: Cluster>(play: &mut Play<'_, C>, small: &str, large: &str) -> Result<(), PlayStop> {
    let resource = Vendor::Nvidia.whole_resource();
    for (name, node) in [("small", small), ("large", large)] {
        play.create(&pod(name).gpu_mem(3).select(node).grace_seconds(1), "asks for 3 GiB")
            .await?;
        play.started("default", name).await?;
    }
    let before = play.reports().await?;
    configure(play, json!({"whole": {"whole-gpus": true}})).await?;
    play.offers(large, TestbedMachine::Mixed.units()).await?;
    play.has(large, resource, 0).await?;

    play.scene("A label lets one node offer whole GPUs, too").await?;
    play.label(large, LABEL, Some("whole")).await?;
    play.has(large, resource, GPUS).await?;
    play.has(small, resource, 0).await?;
    play.unmoved(&before).await?;
    play.create(&whole_gpus("train", 1).grace_seconds(1), "asks for 1 whole GPU")
        .await?;
    let (object, reports) = play.started("default", "train").await?;
    let found = gpus(&reports);
    let on = object.spec.node_name.unwrap_or_default();
    play.check(on == large && found.len() == 1, "train has one GPU of that node", || {
        format!("{found:?} on {on}")
    })?;

    play.scene("An edit of the settings is noticed, and a mistake changes nothing")
        .await?;
    let before = play.reports().await?;
    configure(play, json!({"whole": {"whole-gpus": true, "reserve-memory": "1GiB"}})).await?;
    play.offers(large, TestbedMachine::Mixed.units() - GPUS).await?;
    play.unmoved(&before).await?;
    configure(play, json!({"whole": {"whole-gpus": "yes"}})).await?;
    play.node_event(large, "ConfigNotUsed", "expected a boolean").await?;
    play.label(large, LABEL, Some("hole")).await?;
    play.node_event(large, "ConfigNotUsed", "names \"hole\", which is not in")
        .await?;
    play.offers(large, TestbedMachine::Mixed.units() - GPUS).await?;
    play.has(large, resource, GPUS).await?;
    play.unmoved(&before).await?;

    play.scene("Nodes without the label get the settings `default`").await?;
    play.delete("default", "train", "so that no whole GPU is used").await?;
    configure(play, json!({"default": {"reserve-memory": "2GiB"}})).await?;
    play.offers(small, TestbedMachine::Laptop.units() - 2).await?;
    play.label(large, LABEL, None).await?;
    play.offers(large, TestbedMachine::Mixed.units() - 2 * GPUS).await?;
    play.has(large, resource, 0).await?;
    play.create(
        &pod("rest").gpu_mem(11).select(small).grace_seconds(1),
        "asks for 11 GiB: all that is left on the small node",
    )
    .await?;
    play.started("default", "rest").await?;
    Ok(())
}

pub(super) async fn configure<C: Cluster>(play: &mut Play<'_, C>, configs: serde_json::Value) -> Result<(), PlayStop> {
    let configs: NodeConfigs = serde_json::from_value(configs).map_err(std::io::Error::other)?;
    play.cluster.configure_nodes(&configs).await?;
    let mut lines = Vec::new();
    for (name, settings) in &configs {
        lines.push(format!("{name}:"));
        lines.extend(settings.iter().map(|(key, value)| format!("  {key} = {value}")));
    }
    play.step("configured", "divvy-agent", "the settings of single nodes are now:", lines)
}
