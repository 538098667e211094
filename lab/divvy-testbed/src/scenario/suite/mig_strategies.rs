//! `nvidia-device-plugin` offers MIG devices (`migStrategy`).

use divvy_model::Vendor;

use crate::builders::{PodBuilder, pod};
use crate::scenario::devices::gpus_and_parts;
use crate::scenario::{Cluster, ClusterProgram, GpuFault, Play, PlayStop, PluginSetup, TestbedMachine};

/// The divided GPU.
const GPU: u32 = 1;
/// The GPUs that can be divided, and the T4, which cannot.
const A100: [u32; 2] = [0, 1];
const T4: u32 = 2;
/// The XID of a GPU that has fallen off the bus.
const XID: u32 = 79;
/// The profiles 3g.20gb and 2g.10gb (`NVML_GPU_INSTANCE_PROFILE_3_SLICE`, `…_2_SLICE`).
const TWO_PARTS: [u32; 2] = [2, 1];
/// The profile 1g.5gb (`…_1_SLICE`), three times.
const THREE_PARTS: [u32; 3] = [0, 0, 0];
const LARGE: &str = "nvidia.com/mig-3g.20gb";
const SMALL: &str = "nvidia.com/mig-2g.10gb";
const TINY: &str = "nvidia.com/mig-1g.5gb";

/// The machine has two A100 and a T4.
pub(in crate::scenario) async fn mig_strategies<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("nvidia-device-plugin runs in place of the agent with the MIG strategy none, and one of three GPUs is divided")
        .await?;
    let node = play.ready(TestbedMachine::Mixed).await?;
    strategy(play, &node, "none").await?;
    let mut played = parts(play, &node).await;
    if played.is_ok() {
        played = as_gpus(play, &node).await;
    }
    let restored = whole_again(play, &node).await;
    played.and(restored)
}

async fn whole_again<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    play.scene("MIG is switched off, and the agent runs again").await?;
    play.delete_all().await?;
    play.cluster.divide(node, &A100, None).await?;
    play.cluster.fault(node, T4, GpuFault::Recovers).await?;
    play.run_agent(node, TestbedMachine::Mixed).await
}

async fn parts<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    let whole = Vendor::Nvidia.whole_resource();
    play.has(node, whole, 3).await?;
    divide(play, node, &TWO_PARTS, "3g.20gb and 2g.10gb").await?;
    strategy(play, node, "mixed").await?;
    offered(play, node, &[(whole, 2), (LARGE, 1), (SMALL, 1)]).await?;
    let caps = |minors: [u32; 2]| {
        let cap = |minor: u32| format!("/dev/nvidia-caps/nvidia-cap{minor}");
        [cap(minors[0]), cap(minors[1]), format!("/dev/nvidia{GPU}")]
    };
    starts(play, node, "large", LARGE, &caps([3, 4])).await?;
    starts(play, node, "small", SMALL, &caps([5, 6])).await?;

    play.scene("nvidia-device-plugin is killed while pods use the MIG devices")
        .await?;
    let before = play.reports().await?;
    play.kill_and_start(ClusterProgram::Plugin(node), "nvidia-device-plugin")
        .await?;
    offered(play, node, &[(whole, 2), (LARGE, 1), (SMALL, 1)]).await?;
    play.unmoved(&before).await?;
    play.create(&wants("more", SMALL, node), "asks for another MIG device like small's")
        .await?;
    play.refused("more", &format!("Insufficient {SMALL}")).await?;
    play.delete("default", "small", "so that its MIG device is free").await?;
    let (_, reports) = play.started("default", "more").await?;
    let found = gpus_and_parts(&reports);
    play.check(found == caps([5, 6]), "more has the MIG device that small had", || {
        format!("{found:?}")
    })?;

    play.scene("The GPU is divided again while nvidia-device-plugin runs").await?;
    play.delete_all().await?;
    divide(play, node, &THREE_PARTS, "three times 1g.5gb").await?;
    offered(play, node, &[(whole, 2), (TINY, 3), (LARGE, 0), (SMALL, 0)]).await?;
    play.create(&wants("tiny", TINY, node), "asks for 1g.5gb").await?;
    let (_, reports) = play.started("default", "tiny").await?;
    let found = gpus_and_parts(&reports);
    let one_part = [[3, 4], [5, 6], [7, 8]].map(caps).iter().any(|part| found == *part);
    play.check(one_part, "tiny sees one MIG device and no other", || format!("{found:?}"))?;
    Ok(())
}

/// The strategy `single`.
async fn as_gpus<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    let whole = Vendor::Nvidia.whole_resource();
    play.scene("With the strategy single, MIG devices are GPUs, but only where all GPUs are divided alike")
        .await?;
    play.delete_all().await?;
    play.cluster.divide(node, &A100, Some(&THREE_PARTS)).await?;
    play.step(
        "divided",
        node,
        "each A100 has three MIG devices 1g.5gb; the T4 cannot be divided",
        Vec::new(),
    )?;
    offered(play, node, &[(whole, 1), (TINY, 6)]).await?;
    play.cluster.fault(node, T4, GpuFault::Dies { xid: XID }).await?;
    play.step("failed", node, "the T4 falls off the bus", Vec::new())?;
    strategy(play, node, "single").await?;
    offered(play, node, &[(whole, 6), (TINY, 0)]).await?;
    play.create(
        &wants("part", whole, node),
        &format!("asks for 1 {whole}, which is a MIG device now"),
    )
    .await?;
    let (_, reports) = play.started("default", "part").await?;
    let found = gpus_and_parts(&reports);
    play.check(found.len() == 3, "part sees one MIG device and no other", || {
        format!("{found:?}")
    })?;
    Ok(())
}

async fn strategy<C: Cluster>(play: &mut Play<'_, C>, node: &str, strategy: &str) -> Result<(), PlayStop> {
    let config = format!("version: v1\nflags:\n  migStrategy: {strategy}\n");
    let plugin = PluginSetup {
        config: &config,
        with_mps: false,
    };
    play.run_plugin(node, plugin).await
}

async fn divide<C: Cluster>(play: &mut Play<'_, C>, node: &str, profiles: &[u32], text: &str) -> Result<(), PlayStop> {
    play.cluster.divide(node, &[GPU], Some(profiles)).await?;
    play.step("divided", node, &format!("GPU {GPU} has the MIG devices {text}"), Vec::new())
}

async fn offered<C: Cluster>(play: &mut Play<'_, C>, node: &str, resources: &[(&str, u64)]) -> Result<(), PlayStop> {
    for (resource, amount) in resources {
        play.has(node, resource, *amount).await?;
    }
    let texts = resources.iter().map(|(resource, amount)| format!("{amount} {resource}"));
    play.step("offered", node, &texts.collect::<Vec<_>>().join(", "), Vec::new())
}

async fn starts<C: Cluster>(
    play: &mut Play<'_, C>,
    node: &str,
    name: &str,
    resource: &str,
    expected: &[String],
) -> Result<(), PlayStop> {
    play.create(&wants(name, resource, node), &format!("asks for 1 {resource}"))
        .await?;
    let (_, reports) = play.started("default", name).await?;
    let found = gpus_and_parts(&reports);
    play.check(found == expected, &format!("{name} sees its MIG device and no other"), || {
        format!("{found:?}")
    })?;
    Ok(())
}

fn wants(name: &str, resource: &str, node: &str) -> PodBuilder {
    pod(name)
        .listing("/dev/nvidia-caps")
        .limit(resource, "1")
        .select(node)
        .grace_seconds(1)
}
