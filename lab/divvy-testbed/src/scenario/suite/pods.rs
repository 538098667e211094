//! Scenes about pods of every kind.

use std::collections::BTreeMap;

use divvy_model::names;
use tokio::time::Instant;

use crate::builders::pod;
use crate::scenario::devices::{check_own_gpu, is_gpu};
use crate::scenario::{Cluster, Play, PlayStop, SelfReport, TestbedMachine};

pub(super) async fn too_large<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("A pod asks for more memory than any GPU has, another for more than is free")
        .await?;
    let node = play.ready(TestbedMachine::Laptop).await?;
    let mixed = play.ready(TestbedMachine::Mixed).await?;
    for (name, units) in [("small-0", 3), ("small-1", 5)] {
        play.create(&pod(name).gpu_mem(units).select(&node), &format!("asks for {units} GiB"))
            .await?;
        play.started("default", name).await?;
    }
    // kube-scheduler on its own knows only the node's total, and would bind the pod.
    let text = format!(
        "asks for 41 GiB: the GPUs of node {mixed} have {} in all, none more than 40",
        TestbedMachine::Mixed.units()
    );
    play.create(&pod("too-large").gpu_mem(41), &text).await?;
    play.create(&pod("waits").gpu_mem(12).select(&node), "asks for 12 GiB")
        .await?;
    play.refused("too-large", "Insufficient GPU Memory in one device").await?;
    play.refused("waits", "Insufficient").await?;
    play.why(
        "too-large",
        &["Pod default/too-large waits: it asks for 41 GiB", "is that large, even empty"],
    )
    .await?;
    play.why("waits", &["default/small-0", "default/small-1", "8 GiB"]).await?;
    for name in ["too-large", "waits"] {
        let bound = play.get("default", name).await?.spec.node_name;
        play.check(bound.is_none(), &format!("{name} is not bound"), || format!("{bound:?}"))?;
    }
    Ok(())
}

pub(super) async fn several_containers<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("The containers of one pod, with an init container and a sidecar, share the pod's GPU")
        .await?;
    let node = play.ready(TestbedMachine::Laptop).await?;
    let manifest = pod("several").select(&node).init("init", 4).sidecar("side", 2);
    let manifest = manifest.gpu_mem(3).container("other", 1);
    play.create(&manifest, "init 4, sidecar 2, main 3, other 1").await?;
    let (_, reports) = play.started("default", "several").await?;
    check_own_gpu(play, "several", &reports, 0)?;
    let uid = play.uid("several").await?;
    for (container, units) in [("init", 4), ("side", 2), ("main", 3), ("other", 1)] {
        let report = play
            .eventually(&format!("a report of {container}"), async |play| {
                Ok(play.cluster.report(&uid, container).await?.ok_or_else(|| "none".to_owned()))
            })
            .await?;
        let has = |key: &str, value: &str| report.env.get(key).map(String::as_str) == Some(value);
        let good = has(names::ALIYUN_CONTAINER, &units.to_string())
            && has(names::ALIYUN_IDX, "0")
            && has(names::VISIBLE_DEVICES, names::VISIBLE_NONE);
        play.check(good, &format!("{container} has its own units, {units}, on GPU 0"), || {
            format!("{report:?}")
        })?;
    }
    play.used(&node, 6).await
}

pub(super) async fn deployment<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("A Deployment is scaled up beyond what fits, then down").await?;
    let node = play.ready(TestbedMachine::Laptop).await?;
    play.create_deployment("web", 2, &pod("web").gpu_mem(5).select(&node)).await?;
    play.replicas("web", 2, 2).await?;
    play.used(&node, 10).await?;
    play.scale("web", 4).await?;
    play.replicas("web", 4, 3).await?;
    play.used(&node, 15).await?;
    play.scale("web", 1).await?;
    play.replicas("web", 1, 1).await?;
    play.used(&node, 5).await
}

pub(super) async fn past_the_scheduler<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("A pod sets spec.nodeName itself: it is not started on memory that was not allocated to it")
        .await?;
    let node = play.ready(TestbedMachine::Laptop).await?;
    play.create(
        &pod("direct").gpu_mem(3).on_node(&node),
        &format!("asks for 3 GiB, with nodeName: {node}"),
    )
    .await?;
    play.event("direct", "NoAllocation", "without an allocation").await?;
    play.why(
        "direct",
        &["without an allocation: Divvy's extender was not called", "kubectl delete pod"],
    )
    .await?;
    let uid = play.uid("direct").await?;
    let report = play.cluster.report(&uid, "main").await?;
    play.check(report.is_none(), "its container has not started", || format!("{report:?}"))?;
    Ok(())
}

/// The number of pods of each kind whose start is timed.
const TIMED: usize = 20;

pub(super) async fn speed<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("The time from a pod's creation until it runs, alternating between pods with and without a GPU")
        .await?;
    let node = play.ready(TestbedMachine::Laptop).await?;
    let mut times = [Vec::new(), Vec::new()];
    for number in 0..TIMED {
        for (kind, times) in times.iter_mut().enumerate() {
            let name = format!("timed-{kind}-{number}");
            let manifest = pod(&name).grace_seconds(1).select(&node);
            let manifest = if kind == 0 { manifest } else { manifest.gpu_mem(3) };
            let began = Instant::now();
            play.create_quietly(&manifest).await?;
            play.eventually(&format!("pod {name} to run"), async |play| {
                let pod = play.get("default", &name).await?;
                let phase = pod.status.and_then(|status| status.phase).unwrap_or_default();
                Ok(if phase == "Running" { Ok(()) } else { Err(phase) })
            })
            .await?;
            times.push(began.elapsed().as_millis());
            play.delete_quietly(&name).await?;
        }
    }
    for (text, times) in ["without a GPU", "with 3 GiB of one"].iter().zip(&mut times) {
        times.sort_unstable();
        let (least, most) = (times.first().copied().unwrap_or(0), times.last().copied().unwrap_or(0));
        let median = times.get(times.len() / 2).copied().unwrap_or(0);
        play.measured(&format!("{text}: {median} ms, the median of {TIMED} ({least} to {most})"))?;
    }
    Ok(())
}

const MANY: usize = 40;

pub(super) async fn many<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("Many pods at once").await?;
    for machine in [TestbedMachine::Laptop, TestbedMachine::Mixed] {
        play.ready(machine).await?;
    }
    let began = Instant::now();
    for number in 0..MANY {
        play.create_quietly(&pod(&format!("many-{number}")).gpu_mem(2)).await?;
    }
    play.step("created", &format!("{MANY} pods"), "each asks for 2 GiB", Vec::new())?;
    let reports = play
        .eventually(&format!("{MANY} pods to run"), async |play| {
            let mut found = BTreeMap::new();
            for pod in play.all_pods().await? {
                let (name, uid) = (pod.metadata.name.unwrap_or_default(), pod.metadata.uid.unwrap_or_default());
                let report = play.cluster.report(&uid, "main").await?.filter(|report| report.running);
                let running = pod.status.and_then(|status| status.phase).as_deref() == Some("Running");
                if let Some(report) = report.filter(|_| running) {
                    found.insert(name, (pod.spec.node_name.unwrap_or_default(), report));
                }
            }
            Ok(match found.len() {
                MANY => Ok(found),
                running => Err(format!("{running} run")),
            })
        })
        .await?;
    play.measured(&format!("{} ms until all {MANY} run", began.elapsed().as_millis()))?;
    let number = |report: &SelfReport, key: &str| report.env.get(key).and_then(|text| text.parse::<u64>().ok());
    let mut used: BTreeMap<(String, u64), (u64, u64)> = BTreeMap::new();
    for (name, (node, report)) in &reports {
        let index = number(report, names::ALIYUN_IDX).unwrap_or(u64::MAX);
        let gpus: Vec<_> = report.devices.iter().filter(|path| is_gpu(path)).collect();
        if gpus != [&format!("/dev/nvidia{index}")] {
            play.check(false, &format!("{name} has the GPU that its variables name"), || {
                format!("{report:?}")
            })?;
        }
        let entry = used.entry((node.clone(), index)).or_default();
        entry.0 += number(report, names::ALIYUN_CONTAINER).unwrap_or(u64::MAX / 1000);
        entry.1 = number(report, names::ALIYUN_DEV).unwrap_or(0);
    }
    play.check(
        used.values().all(|(used, has)| used <= has),
        &format!("no GPU holds more units than it has: {}", shares(&used)),
        || shares(&used),
    )?;
    let sum: u64 = used.values().map(|(used, _)| used).sum();
    play.check(
        sum == 2 * MANY as u64,
        "the GPUs hold all units that the pods asked for",
        || shares(&used),
    )?;
    Ok(())
}

fn shares(used: &BTreeMap<(String, u64), (u64, u64)>) -> String {
    let parts = used
        .iter()
        .map(|((node, gpu), (used, has))| format!("{node}'s GPU {gpu} {used}/{has}"));
    parts.collect::<Vec<_>>().join(", ")
}
