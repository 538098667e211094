//! `nvidia-device-plugin` offers each GPU several times (`sharing.timeSlicing`).

use std::collections::BTreeMap;

use divvy_model::Vendor;

use super::whole::whole_gpus;
use crate::scenario::devices::gpus;
use crate::scenario::{Cluster, ClusterProgram, GpuFault, Play, PlayStop, PluginSetup, TestbedMachine};

/// The XID of a GPU that has fallen off the bus.
const XID: u32 = 79;

/// The machine has three GPUs.
pub(in crate::scenario) async fn time_slicing<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("nvidia-device-plugin runs in place of the agent, and offers each of three GPUs four times")
        .await?;
    let node = play.ready(TestbedMachine::Mixed).await?;
    replicas(play, &node, 4).await?;
    let played = shared(play, &node).await;
    let restored = play.run_agent(&node, TestbedMachine::Mixed).await;
    played.and(restored)
}

async fn shared<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    let resource = Vendor::Nvidia.whole_resource();
    play.has(node, resource, 12).await?;
    let names = ["one", "two", "three", "four"];
    for name in names {
        play.create(
            &whole_gpus(name, 1).select(node).grace_seconds(1),
            "asks for 1 nvidia.com/gpu",
        )
        .await?;
    }
    let mut pods: BTreeMap<String, usize> = BTreeMap::new();
    let mut seen = Vec::new();
    for name in names {
        let (_, reports) = play.started("default", name).await?;
        let found = gpus(&reports);
        play.check(found.len() == 1, &format!("{name} sees one GPU"), || format!("{found:?}"))?;
        for gpu in found {
            *pods.entry(gpu).or_default() += 1;
        }
        seen.extend(reports);
    }
    let shared = pods.iter().max_by_key(|(_, count)| **count);
    let spread = pods.len() == 3 && shared.is_some_and(|(_, count)| *count == 2);
    play.check(spread, "two of the four pods share a GPU", || format!("{pods:?}"))?;
    let before = play.reports().await?;

    play.scene("A GPU fails and recovers: its replicas are offered and withdrawn together")
        .await?;
    let minor = shared
        .and_then(|(gpu, _)| gpu.strip_prefix("/dev/nvidia")?.parse().ok())
        .unwrap_or(0);
    play.cluster.fault(node, minor, GpuFault::Dies { xid: XID }).await?;
    play.step("failed", node, &format!("GPU {minor} with XID {XID}"), Vec::new())?;
    play.has(node, resource, 8).await?;
    play.cluster.fault(node, minor, GpuFault::Recovers).await?;
    play.has(node, resource, 12).await?;
    play.step("recovered", node, &format!("GPU {minor} is offered again"), Vec::new())?;
    play.unmoved(&before).await?;

    play.scene("The configuration changes under load: two pods can share a GPU instead of four")
        .await?;
    replicas(play, node, 2).await?;
    play.has(node, resource, 6).await?;
    for name in ["five", "six"] {
        play.create(
            &whole_gpus(name, 1).select(node).grace_seconds(1),
            "asks for 1 nvidia.com/gpu",
        )
        .await?;
    }
    for name in ["five", "six"] {
        play.started("default", name).await?;
    }
    play.create(&whole_gpus("seven", 1).select(node).grace_seconds(1), "is one too many")
        .await?;
    play.refused("seven", &format!("Insufficient {resource}")).await?;
    play.unmoved(&before).await?;

    play.scene("nvidia-device-plugin is killed while pods run").await?;
    let before = play.reports().await?;
    play.kill_and_start(ClusterProgram::Plugin(node), "nvidia-device-plugin")
        .await?;
    play.has(node, resource, 6).await?;
    play.unmoved(&before).await?;
    play.delete("default", "one", "so that one replica is free").await?;
    let (_, reports) = play.started("default", "seven").await?;
    let found = gpus(&reports);
    play.check(found.len() == 1, "seven sees one GPU", || format!("{found:?}"))?;
    Ok(())
}

async fn replicas<C: Cluster>(play: &mut Play<'_, C>, node: &str, count: u32) -> Result<(), PlayStop> {
    let resource = Vendor::Nvidia.whole_resource();
    let config =
        format!("version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - name: {resource}\n      replicas: {count}\n");
    let plugin = PluginSetup {
        config: &config,
        with_mps: false,
    };
    play.run_plugin(node, plugin).await
}
