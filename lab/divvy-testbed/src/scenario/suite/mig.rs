//! MIG devices, which are shared, or had as a whole.

use divvy_model::{Vendor, names};

use crate::builders::{PodBuilder, pod};
use crate::scenario::devices::gpus_and_parts;
use crate::scenario::{Cluster, Machine, Play, Stop};

/// The profiles 3g.20gb and 2g.10gb (`NVML_GPU_INSTANCE_PROFILE_3_SLICE`, `…_2_SLICE`).
const PROFILES: [u32; 2] = [2, 1];
/// The divided GPU.
const GPU: u32 = 1;
/// The device nodes of the larger MIG device.
const OF_LARGE: [&str; 3] = ["/dev/nvidia-caps/nvidia-cap3", "/dev/nvidia-caps/nvidia-cap4", "/dev/nvidia1"];
/// The resource of the larger MIG device.
const LARGE: &str = "nvidia.com/mig-3g.20gb";

/// The machine has two A100 and a T4.
pub(in crate::scenario) async fn mig<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), Stop> {
    play.scene("One of two A100 is divided by MIG while the agent runs; each part is shared by its own memory")
        .await?;
    let node = play.ready(Machine::Mixed).await?;
    play.cluster.divide(&node, GPU, Some(&PROFILES)).await?;
    play.step("divided", &node, "GPU 1 has the MIG devices 3g.20gb and 2g.10gb", Vec::new())?;
    let played = shares(play, &node).await;
    play.clear().await?;
    undivide(play, &node).await?;
    played
}

async fn shares<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), Stop> {
    // 40 and 15 GiB of the other GPUs; 19968 MiB and 9856 MiB of the MIG devices.
    play.has(node, names::GPU_MEM, 40 + 15 + 19 + 9).await?;
    play.create(
        &on("one", 6, "*MIG 2g.10gb").select(node),
        "asks for 6 GiB of a MIG device 2g.10gb",
    )
    .await?;
    let (_, one) = play.started("default", "one").await?;
    play.create(&on("two", 3, "*MIG 2g.10gb").select(node), "asks for 3 GiB of it")
        .await?;
    let (_, two) = play.started("default", "two").await?;
    let of_small = ["/dev/nvidia-caps/nvidia-cap5", "/dev/nvidia-caps/nvidia-cap6", "/dev/nvidia1"];
    for (name, reports) in [("one", &one), ("two", &two)] {
        let found = gpus_and_parts(reports);
        play.check(found == of_small, &format!("{name} sees its MIG device and no other"), || {
            format!("{found:?}")
        })?;
    }
    play.create(
        &on("large", 18, "*MIG 3g.20gb").select(node),
        "asks for 18 GiB of a MIG device 3g.20gb",
    )
    .await?;
    let (_, large) = play.started("default", "large").await?;
    let found = gpus_and_parts(&large);
    play.check(found == OF_LARGE, "large sees the other MIG device", || format!("{found:?}"))?;

    play.create(
        &on("more", 1, "*MIG 2g.10gb").select(node),
        "asks for 1 GiB more of the small one",
    )
    .await?;
    play.refused("more", "Insufficient GPU Memory in one device").await?;
    play.why("more", &["default/one", "default/two"]).await?;
    let table = play
        .run("kubectl inspect gpushare -o wide", &["inspect", "gpushare", "-o", "wide"])
        .await?;
    for part in ["MIG 2g.10gb", "MIG 3g.20gb", "default/large"] {
        play.check(table.contains(part), &format!("`inspect` shows {part}"), || table.clone())?;
    }
    play.delete("default", "one", "so that 6 GiB of it are free").await?;
    let (_, more) = play.started("default", "more").await?;
    let found = gpus_and_parts(&more);
    play.check(found == of_small, "more has the freed memory", || format!("{found:?}"))?;
    Ok(())
}

/// MIG devices as a whole. The agent offers GPUs as a whole as well ([`Cluster::offer_whole`]), and the node has no pods.
pub(super) async fn as_a_whole<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), Stop> {
    play.scene("One A100 is divided by MIG; its parts are offered as a whole as well")
        .await?;
    play.cluster.divide(node, GPU, Some(&PROFILES)).await?;
    play.step("divided", node, "GPU 1 has the MIG devices 3g.20gb and 2g.10gb", Vec::new())?;
    play.has(node, LARGE, 1).await?;
    play.has(node, Vendor::Nvidia.whole_resource(), 2).await?;
    play.create(
        &on("slice", 1, "*MIG 3g.20gb").select(node),
        "asks for 1 GiB of the MIG device 3g.20gb",
    )
    .await?;
    play.started("default", "slice").await?;
    let part = pod("part").limit(LARGE, "1").listing("/dev/nvidia-caps").select(node);
    play.create(&part.grace_seconds(1), "asks for a whole MIG device 3g.20gb")
        .await?;
    play.refused("part", "no free MIG 3g.20gb device").await?;
    play.why("part", &[LARGE, "default/slice"]).await?;
    play.delete("default", "slice", "so that the MIG device is free").await?;
    let (_, reports) = play.started("default", "part").await?;
    let found = gpus_and_parts(&reports);
    play.check(found == OF_LARGE, "part sees its MIG device and no other", || {
        format!("{found:?}")
    })?;
    play.create(&on("later", 1, "*MIG 3g.20gb").select(node), "asks for 1 GiB of it")
        .await?;
    play.refused("later", "Insufficient GPU Memory in one device").await?;
    let table = play
        .run("kubectl inspect gpushare -o wide", &["inspect", "gpushare", "-o", "wide"])
        .await?;
    for part in ["default/part (whole)", "nvidia.com/mig-3g.20gb 1/1"] {
        play.check(table.contains(part), &format!("`inspect` shows {part}"), || table.clone())?;
    }
    play.delete("default", "part", "so that the MIG device is shared again")
        .await?;
    play.started("default", "later").await?;
    Ok(())
}

/// Switch MIG off again.
pub(super) async fn undivide<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), Stop> {
    play.scene("MIG is switched off, and the GPU is whole again").await?;
    play.cluster.divide(node, GPU, None).await?;
    play.has(node, names::GPU_MEM, Machine::Mixed.units()).await
}

fn on(name: &str, units: u64, product: &str) -> PodBuilder {
    pod(name)
        .gpu_mem(units)
        .listing("/dev/nvidia-caps")
        .annotation(names::GPU_MODEL, product)
        .grace_seconds(1)
}
