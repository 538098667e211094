//! MIG devices, which are shared, or had as a whole.

use std::collections::BTreeSet;

use divvy_model::{Vendor, names};

use crate::builders::{PodBuilder, pod};
use crate::scenario::devices::gpus_and_parts;
use crate::scenario::{Cluster, ClusterProgram, End, GpuFault, Play, PlayStop, SelfReport, TestbedMachine, WholeOffer};

/// The profiles 3g.20gb and 2g.10gb (`NVML_GPU_INSTANCE_PROFILE_3_SLICE`, `…_2_SLICE`).
const PROFILES: [u32; 2] = [2, 1];
/// The divided GPU.
const GPU: u32 = 1;
/// The device nodes of the larger MIG device.
const OF_LARGE: [&str; 3] = ["/dev/nvidia-caps/nvidia-cap3", "/dev/nvidia-caps/nvidia-cap4", "/dev/nvidia1"];
/// The resource of the larger MIG device.
const LARGE: &str = "nvidia.com/mig-3g.20gb";
/// The GPUs that can be divided, and the T4, which cannot.
const A100: [u32; 2] = [0, 1];
const T4: u32 = 2;
/// The XID of a GPU that has fallen off the bus.
const XID: u32 = 79;

/// The machine has two A100 and a T4.
pub(in crate::scenario) async fn mig<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("One of two A100 is divided by MIG while the agent runs; each part is shared by its own memory")
        .await?;
    let node = play.ready(TestbedMachine::Mixed).await?;
    play.cluster.divide(&node, &[GPU], Some(&PROFILES)).await?;
    play.step("divided", &node, "GPU 1 has the MIG devices 3g.20gb and 2g.10gb", Vec::new())?;
    let played = shares(play, &node).await;
    play.clear().await?;
    undivide(play, &node).await?;
    played
}

async fn shares<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
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
pub(super) async fn as_a_whole<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    play.scene("One A100 is divided by MIG; its parts are offered as a whole as well")
        .await?;
    play.cluster.divide(node, &[GPU], Some(&PROFILES)).await?;
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
pub(super) async fn undivide<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    play.scene("MIG is switched off, and the GPU is whole again").await?;
    play.cluster.divide(node, &[GPU], None).await?;
    play.has(node, names::GPU_MEM, TestbedMachine::Mixed.units()).await
}

/// MIG devices as GPUs, with `--mig-strategy single`. The node has no pods, and no GPU is divided.
pub(super) async fn as_gpus<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    let resource = Vendor::Nvidia.whole_resource();
    play.scene("With the MIG strategy single, MIG devices are GPUs, but only where all GPUs are divided alike")
        .await?;
    play.cluster.offer_whole(WholeOffer::Single).await?;
    play.step(
        "updated",
        "divvy-agent",
        "the agents run with --mig-strategy single",
        Vec::new(),
    )?;
    play.has(node, resource, 3).await?;
    play.cluster.divide(node, &A100, Some(&[PROFILES[0]; 2])).await?;
    play.step(
        "divided",
        node,
        "each A100 has two MIG devices 3g.20gb; the T4 cannot be divided",
        Vec::new(),
    )?;
    play.has(node, resource, 0).await?;
    play.event(node, "GPUsNotDividedAlike", "GPU 2 is not divided").await?;
    play.cluster.fault(node, T4, GpuFault::Dies { xid: XID }).await?;
    play.step(
        "failed",
        node,
        "the T4 falls off the bus, so all GPUs that are left are divided alike",
        Vec::new(),
    )?;
    play.has(node, resource, 4).await?;

    play.create(
        &as_gpu("part", 1).select(node).grace_seconds(1),
        "asks for 1 nvidia.com/gpu, which is a MIG device now",
    )
    .await?;
    let (_, part) = play.started("default", "part").await?;
    play.create(&on("share", 4, "*MIG 3g.20gb").select(node), "asks for 4 GiB of a MIG device")
        .await?;
    let (_, share) = play.started("default", "share").await?;
    let mut taken = one_part(play, "part", &part)?;
    taken.extend(one_part(play, "share", &share)?);
    play.check(are_different(&taken), "part and share have different MIG devices", || {
        format!("{taken:?}")
    })?;

    play.scene("The agent is restarted; pods keep their MIG devices").await?;
    let before = play.reports().await?;
    play.cluster.stop(ClusterProgram::Agent(node), End::Stopped).await?;
    play.step("stopped", &format!("the agent of {node}"), "SIGTERM", Vec::new())?;
    // The kubelet permanently rejects a pod that it admits before the agent has registered again.
    play.has(node, resource, 0).await?;
    play.cluster.start(ClusterProgram::Agent(node)).await?;
    play.step("started", &format!("the agent of {node}"), "", Vec::new())?;
    play.has(node, resource, 4).await?;
    play.create(
        &as_gpu("rest", 3).select(node),
        "asks for 3 nvidia.com/gpu; only 2 MIG devices have no user",
    )
    .await?;
    play.refused("rest", "fewer than 3 free NVIDIA GPUs").await?;
    play.unmoved(&before).await?;
    play.delete("default", "share", "so that its MIG device is free as a whole")
        .await?;
    let (_, rest) = play.started("default", "rest").await?;
    let of_rest = parts_of(&rest);
    play.check(of_rest.len() == 3, "rest sees three MIG devices", || format!("{rest:?}"))?;
    let taken = [parts_of(&part), of_rest].concat();
    play.check(are_different(&taken), "no MIG device is used by two pods", || {
        format!("{taken:?}")
    })?;
    Ok(())
}

/// Undo what [`as_gpus`] did to the machine.
pub(super) async fn restore<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    play.scene("MIG is switched off, and the T4 recovers").await?;
    play.cluster.divide(node, &A100, None).await?;
    play.cluster.fault(node, T4, GpuFault::Recovers).await?;
    play.has(node, names::GPU_MEM, TestbedMachine::Mixed.units()).await
}

fn as_gpu(name: &str, count: u64) -> PodBuilder {
    let resource = Vendor::Nvidia.whole_resource();
    pod(name).limit(resource, &count.to_string()).listing("/dev/nvidia-caps")
}

/// Return one device node of each MIG device that the containers see: of its two below `/dev/nvidia-caps`, that of the GPU instance.
fn parts_of(reports: &[SelfReport]) -> Vec<String> {
    let is_of_an_instance = |path: &&str| {
        let minor = path.strip_prefix("/dev/nvidia-caps/nvidia-cap");
        minor
            .and_then(|minor| minor.parse::<u32>().ok())
            .is_some_and(|minor| minor % 2 == 1)
    };
    let paths = gpus_and_parts(reports).into_iter();
    paths.filter(is_of_an_instance).map(str::to_owned).collect()
}

/// Check that a pod sees one MIG device, and return it.
fn one_part<C: Cluster>(play: &mut Play<'_, C>, name: &str, reports: &[SelfReport]) -> Result<Vec<String>, PlayStop> {
    let seen = gpus_and_parts(reports);
    let parts = parts_of(reports);
    play.check(
        parts.len() == 1 && seen.len() == 3,
        &format!("{name} sees one MIG device and no other"),
        || format!("{seen:?}"),
    )?;
    Ok(parts)
}

fn are_different(parts: &[String]) -> bool {
    let all: BTreeSet<&String> = parts.iter().collect();
    !parts.is_empty() && all.len() == parts.len()
}

fn on(name: &str, units: u64, product: &str) -> PodBuilder {
    pod(name)
        .gpu_mem(units)
        .listing("/dev/nvidia-caps")
        .annotation(names::GPU_MODEL, product)
        .grace_seconds(1)
}
