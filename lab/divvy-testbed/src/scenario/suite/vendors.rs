//! GPUs of two vendors in one cluster: shares of NVIDIA's GPUs, and whole GPUs of AMD.

use std::collections::BTreeSet;

use divvy_model::{Vendor, names};

use crate::builders::pod;
use crate::scenario::devices::is_gpu;
use crate::scenario::{Cluster, Play, PlayStop, SelfReport, TestbedMachine};

/// On the machine with AMD's GPUs, GPUs 0 and 2 are in one hive, and GPUs 1 and 3 in another.
pub(in crate::scenario) async fn vendors<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    let resource = Vendor::Amd.whole_resource();
    play.scene(
        "A node with an NVIDIA GPU, whose memory is shared, and a node with four AMD GPUs, which are given out as a whole",
    )
    .await?;
    let laptop = play.ready(TestbedMachine::Laptop).await?;
    let instinct = play.ready(TestbedMachine::Instinct).await?;
    play.has(&instinct, resource, 4).await?;

    play.create(&pod("cuda").gpu_mem(3).select(&laptop), "asks for 3 GiB of GPU memory")
        .await?;
    let (_, reports) = play.started("default", "cuda").await?;
    let devices = gpus(&reports);
    play.check(
        devices == ["/dev/nvidia0"],
        "cuda sees its NVIDIA GPU and none of AMD's device nodes",
        || format!("{devices:?}"),
    )?;

    play.create(&pod("rocm-2").whole(Vendor::Amd, 2).grace_seconds(1), "asks for 2 AMD GPUs")
        .await?;
    let (object, reports) = play.started("default", "rocm-2").await?;
    let node = object.spec.node_name.unwrap_or_default();
    let pair = gpus(&reports);
    let hives: [&[&str]; 2] = [
        &["/dev/dri/renderD128", "/dev/dri/renderD130"],
        &["/dev/dri/renderD129", "/dev/dri/renderD131"],
    ];
    play.check(
        node == instinct && hives.iter().any(|hive| pair == *hive),
        "rocm-2 sees /dev/kfd and the two GPUs of one hive, and no other GPU",
        || format!("{pair:?} on {node}"),
    )?;
    let untouched = reports.iter().all(|report| !report.env.contains_key(names::VISIBLE_DEVICES));
    play.check(untouched, "rocm-2 has no environment variables of NVIDIA's", || {
        format!("{reports:?}")
    })?;

    play.create(&pod("rocm-1").whole(Vendor::Amd, 1), "asks for 1 AMD GPU")
        .await?;
    let (_, reports) = play.started("default", "rocm-1").await?;
    let one = gpus(&reports);
    play.check(
        one.len() == 1 && !pair.contains(&one[0]),
        "rocm-1 sees one GPU, which is not one of rocm-2's",
        || format!("{one:?}"),
    )?;
    let table = play
        .run("kubectl inspect gpushare -o wide", &["inspect", "gpushare", "-o", "wide"])
        .await?;
    for part in ["AMD Instinct MI210", "rocm-2", "rocm-1"] {
        play.check(table.contains(part), &format!("`inspect` shows {part}"), || table.clone())?;
    }

    play.scene("An AMD GPU reports an uncorrectable memory error, and is offered again once it has been quiet")
        .await?;
    let errors = divvy_amd_sim::memory_errors(3);
    play.cluster.place(&instinct, &errors, Some(b"ue: 1\nce: 7\n"))?;
    play.step("broken", &instinct, "GPU 3 counts an uncorrectable memory error", Vec::new())?;
    play.event(&instinct, "GpuFailed", "uncorrectable memory error").await?;
    play.event(&instinct, "GpuRecovered", "GPU 3").await?;
    play.has(&instinct, resource, 4).await?;

    play.scene("A pod that needs more AMD GPUs than are free waits for them")
        .await?;
    play.create(
        &pod("rocm-3").whole(Vendor::Amd, 2),
        "asks for 2 AMD GPUs, of which one is free",
    )
    .await?;
    play.refused("rocm-3", &format!("Insufficient {resource}")).await?;
    play.why("rocm-3", &[resource, "default/rocm-2"]).await?;
    play.delete("default", "rocm-2", "to make room").await?;
    let (_, reports) = play.started("default", "rocm-3").await?;
    let next: BTreeSet<String> = gpus(&reports).into_iter().collect();
    play.check(
        next.len() == 2 && !next.contains(&one[0]),
        "rocm-3 sees two GPUs, of which none is rocm-1's",
        || format!("{next:?}"),
    )?;
    Ok(())
}

/// Return the device nodes of GPUs in the container, one for each GPU.
pub(super) fn gpus(reports: &[SelfReport]) -> Vec<String> {
    let devices = reports.iter().flat_map(|report| &report.devices);
    let is_any_gpu = |path: &&String| is_gpu(path) || path.starts_with("/dev/dri/renderD");
    devices.filter(is_any_gpu).cloned().collect()
}
