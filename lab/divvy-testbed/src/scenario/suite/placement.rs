//! Scenes about the choice of node and GPU, and about the pods that are evicted for a more important one.

use std::collections::{BTreeMap, BTreeSet};

use divvy_kube::objects::PodObject;
use divvy_model::names;

use crate::builders::pod;
use crate::scenario::{Cluster, Play, PlayStop, SelfReport, TestbedMachine};

const PACKED: usize = 4;

pub(super) async fn packed<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("Small pods that fit anywhere are packed together, and leave the other GPUs empty")
        .await?;
    for machine in [TestbedMachine::Laptop, TestbedMachine::Mixed] {
        play.ready(machine).await?;
    }
    let mut on: BTreeSet<(String, String)> = BTreeSet::new();
    for number in 0..PACKED {
        let name = format!("packed-{number}");
        // By CPU, kube-scheduler on its own would alternate between the nodes: it prefers the node with the most CPU left.
        let manifest = pod(&name).gpu_mem(3).limit("cpu", "200m");
        play.create(&manifest, "asks for 3 GiB and 200m CPU, and names no node")
            .await?;
        let (object, reports) = play.started("default", &name).await?;
        on.insert((object.spec.node_name.unwrap_or_default(), index(&reports)));
    }
    play.run("kubectl inspect gpushare", &["inspect", "gpushare"]).await?;
    let args = ["why", "packed-0", "--placement"];
    let said = play.run("kubectl divvy why packed-0 --placement", &args).await?;
    let prefers = said.contains("Policy divvy prefers node") && said.contains("SLOT PRESSURE");
    play.check(
        prefers,
        "`why --placement` says which node the policy prefers, and names the terms",
        || said.clone(),
    )?;
    // If other scenes were played before, the extender has learned from their pods and may prefer another GPU after the next pod.
    if !play.cluster.agents_are_pods() {
        play.check(on.len() == 1, &format!("all {PACKED} are on one GPU"), || format!("{on:?}"))?;
    }
    Ok(())
}

fn index(reports: &[SelfReport]) -> String {
    let index = reports.first().and_then(|report| report.env.get(names::ALIYUN_IDX));
    index.cloned().unwrap_or_default()
}

/// Play pods with rules about the GPU. The expected indices are those of GPUs of the mixed node, which has two A100 and a T4. The
/// laptop has a GeForce with 16 GiB.
pub(super) async fn wanted<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("Pods choose their GPU by product, memory size, and preference")
        .await?;
    play.ready(TestbedMachine::Laptop).await?;
    let mixed = play.ready(TestbedMachine::Mixed).await?;
    for (name, key, value, gpus) in [
        ("product", names::GPU_MODEL, "T4", &["2"][..]),
        ("no-product", names::GPU_MODEL, "!*GeForce*, !A100*", &["2"]),
        ("size", names::GPU_MEMORY, ">=40Gi", &["0", "1"]),
        ("most", names::GPU_PREFER, "most-memory", &["0", "1"]),
        ("least", names::GPU_PREFER, "least-memory", &["2"]),
    ] {
        let manifest = pod(name).gpu_mem(2).annotation(key, value);
        play.create(&manifest, &format!("asks for 2 GiB, with {key}: {value:?}"))
            .await?;
        let (object, reports) = play.started("default", name).await?;
        let (node, gpu) = (object.spec.node_name.unwrap_or_default(), index(&reports));
        play.check(
            node == mixed && gpus.contains(&gpu.as_str()),
            &format!("{name} is on GPU {} of {mixed}", gpus.join(" or ")),
            || format!("on GPU {gpu} of {node}"),
        )?;
    }
    play.create(
        &pod("nowhere").gpu_mem(2).annotation(names::GPU_MODEL, "H100*"),
        &format!("asks for 2 GiB, with {}: \"H100*\"", names::GPU_MODEL),
    )
    .await?;
    play.refused("nowhere", "2 no GPU of a product like H100*").await?;
    play.why(
        "nowhere",
        &["asks for 2 GiB on a GPU of a product like H100*, and no node has such a GPU"],
    )
    .await
}

/// On the mixed node, the two A100 are connected by NVLink; the T4 has no NVLink.
pub(super) async fn several<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("A pod's memory is on two GPUs: the best connected pair; the pod sees these two and no other GPU")
        .await?;
    let mixed = play.ready(TestbedMachine::Mixed).await?;
    let on_two = |name: &str, units: u64| pod(name).gpu_mem(units).grace_seconds(1).annotation(names::GPUS, "2");
    let text = |units: u64| format!("asks for {units} GiB, with {}: \"2\"", names::GPUS);
    play.create(&on_two("pair", 20), &text(20)).await?;
    sees_both(play, "pair", &mixed, 20).await?;
    play.used(&mixed, 20).await?;
    play.create(&on_two("larger", 62), &text(62)).await?;
    play.refused("larger", "fewer than 2 GPUs with 31744 MiB free").await?;
    let why = ["asks for 31 GiB on each of 2 GPUs", "0 of 3", "aliyun.com/gpu-mem: 60"];
    play.why("larger", &why).await?;
    play.create(
        &on_two("no-two", 2).annotation(names::GPU_MODEL, "T4"),
        &format!("{} and {}: T4, of which there is one", text(2), names::GPU_MODEL),
    )
    .await?;
    play.refused("no-two", "fewer than 2 GPUs of a product like T4").await?;
    play.delete("default", "pair", "to make room").await?;
    sees_both(play, "larger", &mixed, 62).await
}

async fn sees_both<C: Cluster>(play: &mut Play<'_, C>, name: &str, mixed: &str, units: u64) -> Result<(), PlayStop> {
    let (object, reports) = play.started("default", name).await?;
    let node = object.spec.node_name.unwrap_or_default();
    let Some(report) = reports.first() else { return Ok(()) };
    let is_gpu = |path: &&String| {
        path.strip_prefix("/dev/nvidia")
            .is_some_and(|minor| minor.parse::<u32>().is_ok())
    };
    let gpus: Vec<&String> = report.devices.iter().filter(is_gpu).collect();
    play.check(
        node == mixed && gpus == ["/dev/nvidia0", "/dev/nvidia1"],
        &format!("{name}'s container sees both A100 of {mixed} and no other GPU"),
        || format!("{gpus:?} of {node}"),
    )?;
    let env = |key: &str| report.env.get(key).map(String::as_str);
    let told = [env(names::ALIYUN_IDX), env(names::ALIYUN_CONTAINER), env(names::ALIYUN_DEV)];
    let units = units.to_string();
    play.check(
        told == [Some("0,1"), Some(&units), Some("40")],
        "its variables name both indices and its memory on both GPUs",
        || format!("{told:?}"),
    )?;
    Ok(())
}

/// A PriorityClass that every cluster has and whose pods may preempt ordinary pods.
const URGENT: &str = "system-cluster-critical";

pub(super) async fn preempted<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("A pod of high priority needs room on one GPU: only pods of that GPU are evicted")
        .await?;
    let node = play.ready(TestbedMachine::Mixed).await?;
    let mut on: BTreeMap<String, (String, PodObject, Vec<SelfReport>)> = BTreeMap::new();
    for (name, units) in [("low-0", 20), ("low-1", 20), ("low-2", 20), ("low-3", 20), ("low-4", 5)] {
        play.create(
            &pod(name).gpu_mem(units).grace_seconds(1).select(&node),
            &format!("asks for {units} GiB"),
        )
        .await?;
        let (object, reports) = play.started("default", name).await?;
        on.insert(name.to_owned(), (index(&reports), object, reports));
    }
    play.used(&node, TestbedMachine::Mixed.units() - 10).await?;
    let text = format!("asks for 30 GiB, with priorityClassName: {URGENT}");
    play.create(&pod("urgent").gpu_mem(30).select(&node).priority_class(URGENT), &text)
        .await?;
    // A ReplicaSet would create this pod in place of a victim. By the node's total it fits next to the urgent pod: 10 GiB are free on the T4, and
    // 10 GiB of what the victims leave.
    let replacement = pod("replacement").gpu_mem(20).grace_seconds(1).select(&node);
    play.create(&replacement, "asks for 20 GiB, as the evicted pods did").await?;
    let (_, reports) = play.started("default", "urgent").await?;
    play.refused("replacement", "Insufficient GPU Memory in one device").await?;
    let gpu = index(&reports);
    let left: BTreeMap<String, PodObject> = play
        .all_pods()
        .await?
        .into_iter()
        .filter(|pod| pod.metadata.deletion_timestamp.is_none())
        .map(|pod| (pod.metadata.name.clone().unwrap_or_default(), pod))
        .collect();
    for (name, (index, before, reports)) in &on {
        let uid = before.metadata.uid.clone().unwrap_or_default();
        let stays = left.get(name).is_some_and(|pod| pod.metadata.uid.as_ref() == Some(&uid));
        let expected = *index != gpu;
        let what = if expected { "is not evicted" } else { "was evicted" };
        play.check(
            stays == expected,
            &format!("{name} on GPU {index} {what}; urgent is on GPU {gpu}"),
            || format!("{:?}", left.keys()),
        )?;
        if expected {
            let now = play.cluster.report(&uid, "main").await?;
            let same = now.as_ref().map(|report| &report.id) == reports.first().map(|report| &report.id);
            play.check(same, &format!("{name}'s container kept running"), || format!("{now:?}"))?;
        }
    }
    play.clear().await?;
    by_sums_there_is_room(play, &node).await
}

/// kube-scheduler's preemption evicts no pod when the node's total is large enough. `why` must say so and name the pods in the way.
async fn by_sums_there_is_room<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    for name in ["low-0", "low-1"] {
        let manifest = pod(name).gpu_mem(25).grace_seconds(1).select(node);
        play.create(&manifest, "asks for 25 GiB").await?;
        play.started("default", name).await?;
    }
    let text = format!("asks for 30 GiB, with priorityClassName: {URGENT}; 45 GiB are free on the node in total");
    play.create(&pod("urgent").gpu_mem(30).select(node).priority_class(URGENT), &text)
        .await?;
    play.refused("urgent", "Insufficient GPU Memory in one device").await?;
    play.why(
        "urgent",
        &[
            "kube-scheduler evicts no pod",
            "45 units",
            "kubectl delete pod -n default low-",
        ],
    )
    .await?;
    for name in ["low-0", "low-1"] {
        let deleted = play.get("default", name).await?.metadata.deletion_timestamp.is_some();
        play.check(!deleted, &format!("{name} is not evicted"), || {
            "it is being deleted".to_owned()
        })?;
    }
    play.delete("default", "low-0", "as `why` suggests").await?;
    play.started("default", "urgent").await?;
    Ok(())
}
