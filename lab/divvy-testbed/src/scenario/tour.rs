//! The tutorial of Aliyun's gpushare, and a day on a small cluster.

use divvy_model::{Health, names};
use kube::Resource as _;

use super::devices::check_own_gpu;
use super::play::state;
use super::{Cluster, ClusterProgram, End, GpuFault, Play, PlayStop, SelfReport, TestbedMachine};
use crate::builders::pod;

/// Return the table that gpushare's `kubectl inspect gpushare` prints in the tutorial after each pod.
fn tutorial_table(node: &str, address: &str, used: u64, percent: u64) -> String {
    let (name, ip) = (node.len().max("NAME".len()), address.len().max("IPADDRESS".len()));
    // The old tool counts the row with its tabs, not the widths of the columns.
    let dashes = "-".repeat(32 + node.len() + address.len());
    format!(
        "{:name$}  {:ip$}  GPU0(Allocated/Total)  GPU Memory(GiB)\n\
         {node:name$}  {address:ip$}  {used}/16                   {used}/16\n\
         {dashes}\n\
         Allocated/Total GPU Memory In Cluster:\n\
         {used}/16 ({percent}%)  \n",
        "NAME", "IPADDRESS"
    )
}

/// The tutorial, then a day on a small cluster.
pub(super) async fn play<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    tutorial(play).await?;
    day(play).await
}

/// Play the tutorial: two pods on one GPU.
pub(super) async fn tutorial<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("Two pods share one GPU").await?;
    let node = ready(play, TestbedMachine::Laptop).await?;
    let address = play.address(&node).await?;
    // In a cluster of one node, as in the tutorial, the command needs no node name.
    let alone = play.nodes().await?.len() == 1;
    let mut args = vec!["inspect", "gpushare"];
    args.extend((!alone).then_some(node.as_str()));
    let steps = [("binpack-0", 3, 3, 18, true), ("binpack-1", 5, 8, 50, false)];
    for (name, units, used, percent, greedy) in steps {
        let mut manifest = pod(name).gpu_mem(units).select(&node);
        let mut text = format!("asks for {units} GiB of GPU memory");
        if greedy {
            manifest = manifest.env(names::VISIBLE_DEVICES, "all");
            text.push_str(", and sets NVIDIA_VISIBLE_DEVICES=all, as tutorials do");
        }
        play.create(&manifest, &text).await?;
        let (_, reports) = play.started("default", name).await?;
        check_own_gpu(play, name, &reports, 0)?;
        check_env(
            play,
            &reports,
            &[
                (names::ALIYUN_IDX, "0"),
                (names::ALIYUN_POD, &units.to_string()),
                (names::ALIYUN_CONTAINER, &units.to_string()),
                (names::ALIYUN_DEV, "16"),
            ],
        )?;
        let table = play.run(&format!("kubectl {}", args.join(" ")), &args).await?;
        let expected = tutorial_table(&node, &address, used, percent);
        play.check(
            table == expected,
            &format!("the table says {used}/16 ({percent}%) and equals the old tool's output byte for byte"),
            || format!("expected:\n{expected}"),
        )?;
    }
    Ok(())
}

/// Play the rest of the tour: mixed GPUs, a waiting pod, a container that ignores SIGTERM, a failing GPU, and restarts.
pub(super) async fn day<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("More nodes: one with 2 x A100 40 GB and a T4, one without GPUs")
        .await?;
    let laptop = ready(play, TestbedMachine::Laptop).await?;
    if let Some(node) = play.cluster.node_of(TestbedMachine::CpuOnly) {
        play.cluster.join(&node).await?;
    }
    let mixed = ready(play, TestbedMachine::Mixed).await?;
    play.run("kubectl inspect gpushare", &["inspect", "gpushare"]).await?;

    waits_for_one_gpu(play, &mixed).await?;
    let train_1 = gpu_dies(play, &mixed).await?;
    restarts(play, &laptop, &mixed, train_1).await
}

async fn waits_for_one_gpu<C: Cluster>(play: &mut Play<'_, C>, mixed: &str) -> Result<(), PlayStop> {
    play.scene("A pod asks for more memory than any single GPU has free, although the node has enough in total")
        .await?;
    let stubborn = pod("train-0").gpu_mem(30).args(&["run", "--ignore-term"]).grace_seconds(2);
    play.create(
        &stubborn,
        "asks for 30 GiB; its program ignores SIGTERM, and its grace period is 2 s",
    )
    .await?;
    let (train_0, _) = play.started("default", "train-0").await?;
    play.create(&pod("train-1").gpu_mem(30), "asks for 30 GiB").await?;
    play.started("default", "train-1").await?;
    play.create(
        &pod("big").gpu_mem(20),
        &format!("asks for 20 GiB: 10, 10 and 15 are free on node {mixed}, 8 on the laptop"),
    )
    .await?;
    let message = play
        .eventually("pod big to be refused by the extender", async |play| {
            let pod = play.get("default", "big").await?;
            let seen = state(&pod);
            Ok(if seen.contains("Insufficient GPU Memory in one device") {
                Ok(seen)
            } else {
                Err(seen)
            })
        })
        .await?;
    play.step("pending", "default/big", &message, Vec::new())?;
    let why = play.run("kubectl divvy why big", &["why", "big"]).await?;
    for part in ["default/train-0", "default/train-1", "20 GiB"] {
        play.check(why.contains(part), &format!("`why` names {part}"), || why.clone())?;
    }

    play.scene("A deleted pod keeps its memory until its container ends, and the waiting pod starts only then")
        .await?;
    play.delete("default", "train-0", "its container runs until SIGKILL ends it")
        .await?;
    let uid = train_0.meta().uid.clone().unwrap_or_default();
    let mut too_early = false;
    play.eventually("train-0's container to end", async |play| {
        let big = play.get("default", "big").await?;
        let report = play.cluster.report(&uid, "main").await?;
        // This order of reads matters: if the pod was bound first and the container still runs afterwards, the pod was bound too early.
        let running = report.is_some_and(|report| report.running);
        too_early |= running && big.spec.node_name.is_some();
        Ok(if running { Err("it is running".to_owned()) } else { Ok(()) })
    })
    .await?;
    play.step("ended", "default/train-0", "its container has ended", Vec::new())?;
    play.check(
        !too_early,
        "big was not bound while train-0's container held the memory",
        || "it was bound".to_owned(),
    )?;
    let (_, reports) = play.started("default", "big").await?;
    check_own_gpu(play, "big", &reports, 0)?;
    Ok(())
}

async fn gpu_dies<C: Cluster>(play: &mut Play<'_, C>, mixed: &str) -> Result<SelfReport, PlayStop> {
    play.scene("A GPU falls off the bus (XID 79) while a pod runs on it").await?;
    let train_1 = play.get("default", "train-1").await?;
    let uid = train_1.meta().uid.clone().unwrap_or_default();
    let before = play.cluster.report(&uid, "main").await?;
    play.cluster.fault(mixed, 1, GpuFault::Dies { xid: 79 }).await?;
    play.step(
        "failed",
        &format!("{mixed} GPU 1"),
        "the driver reports XID 79; train-1 is running on this GPU",
        Vec::new(),
    )?;
    health(play, mixed, 1, Health::Failed).await?;
    play.run("kubectl inspect gpushare -o wide", &["inspect", "gpushare", "-o", "wide"])
        .await?;
    for (name, units, gpu, text) in [
        ("fill-0", 20, 0, "asks for 20 GiB: all that is left on GPU 0"),
        (
            "fill-1",
            10,
            2,
            "asks for 10 GiB: exactly what the failed GPU has free, but a failed GPU is not offered",
        ),
        ("fill-2", 5, 2, "asks for 5 GiB: all that is left on GPU 2"),
    ] {
        play.create(&pod(name).gpu_mem(units).select(mixed), text).await?;
        let (_, reports) = play.started("default", name).await?;
        check_own_gpu(play, name, &reports, gpu)?;
    }
    play.create(
        &pod("patient").gpu_mem(10),
        "asks for 10 GiB: only the failed GPU has that much free",
    )
    .await?;
    let message = play
        .eventually("pod patient to be refused", async |play| {
            let pod = play.get("default", "patient").await?;
            let seen = state(&pod);
            Ok(if seen.contains("Insufficient") { Ok(seen) } else { Err(seen) })
        })
        .await?;
    play.step("pending", "default/patient", &message, Vec::new())?;
    let why = play.run("kubectl divvy why patient", &["why", "patient"]).await?;
    play.check(why.contains("XID 79"), "`why` names XID 79", || why.clone())?;
    let after = play.cluster.report(&uid, "main").await?;
    play.check(before == after && after.is_some(), "train-1's container kept running", || {
        format!("{before:?}, then {after:?}")
    })?;

    play.scene("The GPU recovers").await?;
    play.cluster.fault(mixed, 1, GpuFault::Recovers).await?;
    health(play, mixed, 1, Health::Ok).await?;
    play.step(
        "recovered",
        &format!("{mixed} GPU 1"),
        "it has been healthy for a while, so it is offered again",
        Vec::new(),
    )?;
    let (_, reports) = play.started("default", "patient").await?;
    check_own_gpu(play, "patient", &reports, 1)?;
    Ok(after.unwrap_or_default())
}

async fn restarts<C: Cluster>(play: &mut Play<'_, C>, laptop: &str, mixed: &str, train_1: SelfReport) -> Result<(), PlayStop> {
    play.scene("The agent, the kubelets and the extender are restarted; every pod stays where it is")
        .await?;
    let table = play
        .run("kubectl inspect gpushare -d", &["inspect", "gpushare", "-d"])
        .await?;
    let uid = play.get("default", "train-1").await?.meta().uid.clone().unwrap_or_default();
    play.cluster.stop(ClusterProgram::Agent(mixed), End::Killed).await?;
    play.step("killed", &format!("the agent of {mixed}"), "kill -9", Vec::new())?;
    play.cluster.start(ClusterProgram::Agent(mixed)).await?;
    play.step("started", &format!("the agent of {mixed}"), "", Vec::new())?;
    play.offers(mixed, TestbedMachine::Mixed.units()).await?;
    for node in [laptop, mixed] {
        play.cluster.stop(ClusterProgram::Kubelet(node), End::Stopped).await?;
        play.cluster.start(ClusterProgram::Kubelet(node)).await?;
        play.step("restarted", &format!("the kubelet of {node}"), "", Vec::new())?;
    }
    play.cluster.stop(ClusterProgram::Extender, End::Killed).await?;
    play.cluster.start(ClusterProgram::Extender).await?;
    play.step(
        "restarted",
        "the extender",
        "killed with kill -9, then started again",
        Vec::new(),
    )?;
    play.offers(laptop, TestbedMachine::Laptop.units()).await?;
    play.offers(mixed, TestbedMachine::Mixed.units()).await?;
    let report = play.cluster.report(&uid, "main").await?;
    play.check(
        report.as_ref() == Some(&train_1),
        "train-1 still runs in its first container",
        || format!("{report:?}"),
    )?;
    let (after, ..) = play.run_divvy(&["inspect", "gpushare", "-d"]).await?;
    play.check(after == table, "every pod is still on its GPU", || after.clone())?;
    play.create(&pod("last").gpu_mem(8), "asks for 8 GiB: all that is left on archlinux")
        .await?;
    let (_, reports) = play.started("default", "last").await?;
    check_own_gpu(play, "last", &reports, 0)?;
    play.run("kubectl inspect gpushare", &["inspect", "gpushare"]).await?;
    Ok(())
}

fn check_env<C: Cluster>(play: &mut Play<'_, C>, reports: &[SelfReport], expected: &[(&str, &str)]) -> Result<(), PlayStop> {
    let good = reports.iter().all(|report| {
        expected
            .iter()
            .all(|(key, value)| report.env.get(*key).map(String::as_str) == Some(*value))
    });
    let text = expected
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect::<Vec<_>>()
        .join(" ");
    play.check(good, &format!("its environment has {text}"), || format!("{reports:?}"))?;
    Ok(())
}

/// Wait until a machine's node offers everything that the machine has, and tell the listener.
async fn ready<C: Cluster>(play: &mut Play<'_, C>, machine: TestbedMachine) -> Result<String, PlayStop> {
    let node = play.ready(machine).await?;
    let text = format!("its agent found its GPUs and offers {} GiB", machine.units());
    play.step("joined", &format!("node {node}"), &text, Vec::new())?;
    Ok(node)
}

async fn health<C: Cluster>(play: &Play<'_, C>, node: &str, index: u32, wanted: Health) -> Result<(), PlayStop> {
    play.eventually(&format!("GPU {index} of {node} to be {wanted:?}"), async |play| {
        let found = divvy_kube::list::node(&play.cluster.client(), node).await;
        Ok(match found.as_ref().map(|node| &node.inventory) {
            Ok(Some(Ok(inventory))) => match inventory.gpus.iter().find(|gpu| gpu.index == index) {
                // A dead GPU is reported as failed or, once it stops answering, as lost. Neither is offered.
                Some(gpu) if (gpu.health == Health::Ok) == (wanted == Health::Ok) => Ok(()),
                other => Err(format!("{other:?}")),
            },
            other => Err(format!("{other:?}")),
        })
    })
    .await
}
