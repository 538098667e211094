//! The driver limits the GPU memory of pods (NVIDIA from R615 on).
//!
//! The simulated driver stores the limits and reports them, but nothing allocates memory here.

use std::collections::BTreeMap;

use divvy_model::{Inventory, names};
use serde_json::json;

use crate::builders::pod;
use crate::scenario::{Cluster, Play, PlayStop, TestbedMachine};
use crate::simulated_driver::{ask, limits};

const GIB: u64 = 1 << 30;
/// NVML_ERROR_NO_PERMISSION.
const NO_PERMISSION: u32 = 4;

/// The machine has one GPU.
pub(in crate::scenario) async fn play<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("The driver enforces no shares; one pod does not care, and another one wants its share to be enforced")
        .await?;
    let node = play.ready(TestbedMachine::Laptop).await?;
    play.create(&pod("any").gpu_mem(1).select(&node).grace_seconds(1), "asks for 1 GiB")
        .await?;
    play.started("default", "any").await?;
    let hard = |name: &str, units: u64| {
        let pod = pod(name).gpu_mem(units).select(&node).grace_seconds(1);
        pod.annotation(names::ISOLATION, "hard")
    };
    play.create(&hard("first", 3), "asks for 3 GiB, with divvy.dev/isolation: hard")
        .await?;
    play.why("first", &["no GPU on which the driver enforces shares"]).await?;

    play.scene("The driver has the functions that enforce shares: the waiting pod starts, limited to its share")
        .await?;
    let nvml = play.cluster.nvml(&node);
    let enforces = async |mode: Option<&str>| ask(&nvml, &json!({"op": "limit_mode", "mode": mode})).await;
    enforces(Some("misc")).await?;
    if !play.cluster.has_cgroups_v2() {
        return without_cgroups_v2(play, &node, enforces(None)).await;
    }
    play.started("default", "first").await?;
    let first = play.uid("first").await?;
    limited(play, &node, &[(&first, 3)]).await?;

    play.scene("A pod without the annotation is limited as well, a pod with isolation: none is not")
        .await?;
    play.create(&pod("second").gpu_mem(2).select(&node).grace_seconds(1), "asks for 2 GiB")
        .await?;
    play.started("default", "second").await?;
    let free = pod("free").gpu_mem(2).select(&node).grace_seconds(1);
    play.create(
        &free.annotation(names::ISOLATION, "none"),
        "asks for 2 GiB, with divvy.dev/isolation: none",
    )
    .await?;
    play.started("default", "free").await?;
    let second = play.uid("second").await?;
    limited(play, &node, &[(&first, 3), (&second, 2)]).await?;

    play.scene("The driver refuses: a pod without the annotation starts and has an event, one with isolation: hard waits")
        .await?;
    let refuses = async |error: u32| ask(&nvml, &json!({"op": "limit", "gpu": 0, "error": error})).await;
    refuses(NO_PERMISSION).await?;
    play.create(&pod("third").gpu_mem(1).select(&node).grace_seconds(1), "asks for 1 GiB")
        .await?;
    play.started("default", "third").await?;
    play.event("third", "NotLimited", "may use more than its share").await?;
    play.create(&hard("fourth", 1), "asks for 1 GiB, with divvy.dev/isolation: hard")
        .await?;
    play.event("fourth", "Failed", "wants its share of the GPU to be enforced")
        .await?;
    refuses(0).await?;
    play.started("default", "fourth").await?;
    let fourth = play.uid("fourth").await?;
    limited(play, &node, &[(&first, 3), (&second, 2), (&fourth, 1)]).await?;

    play.scene("The pods end, and nothing is limited any more").await?;
    play.delete_all().await?;
    limited(play, &node, &[]).await?;
    enforces(None).await?;
    play.eventually("nothing to enforce shares", async |play| {
        let nodes = play.nodes().await?;
        let found = nodes.into_iter().find(|found| found.metadata.name.as_deref() == Some(&node));
        let annotations = found.and_then(|found| found.metadata.annotations).unwrap_or_default();
        let text = annotations.get(names::INVENTORY).cloned().unwrap_or_default();
        Ok(match Inventory::parse(&text) {
            Ok(inventory) if inventory.gpus.iter().all(|gpu| gpu.enforcement.is_none()) => Ok(()),
            _ => Err(text),
        })
    })
    .await
}

/// The driver can limit cgroups of version 2 only.
async fn without_cgroups_v2<C: Cluster>(
    play: &mut Play<'_, C>,
    node: &str,
    end: impl Future<Output = std::io::Result<()>>,
) -> Result<(), PlayStop> {
    play.scene("This machine has cgroups of version 1, which the driver cannot limit: the pod waits, and no other pod notices")
        .await?;
    play.create(&pod("second").gpu_mem(2).select(node).grace_seconds(1), "asks for 2 GiB")
        .await?;
    play.started("default", "second").await?;
    limited(play, node, &[]).await?;
    play.why("first", &["no GPU on which the driver enforces shares"]).await?;
    play.delete_all().await?;
    Ok(end.await?)
}

/// Wait until the driver has exactly these limits, by the UID of the pod, in GiB.
async fn limited<C: Cluster>(play: &mut Play<'_, C>, node: &str, expected: &[(&str, u64)]) -> Result<(), PlayStop> {
    let nvml = play.cluster.nvml(node);
    let expected: BTreeMap<String, u64> = expected.iter().map(|(uid, gib)| ((*uid).to_owned(), gib * GIB)).collect();
    let what = format!("the driver to have {} limits", expected.len());
    let paths = play
        .eventually(&what, async |_| {
            let found = limits(&nvml).await?;
            let of_pods = found.iter().filter_map(|(path, hard)| Some((pod_of(path)?, *hard)));
            let of_pods: BTreeMap<String, u64> = of_pods.collect();
            Ok(if of_pods == expected {
                Ok(found)
            } else {
                Err(format!("{found:?}"))
            })
        })
        .await?;
    let lines = paths
        .iter()
        .map(|(path, hard)| format!("{path}: {} MiB", hard >> 20))
        .collect();
    play.step("limited", node, "by the driver", lines)?;
    play.check(true, "the driver's limits are the pods' shares", String::new)?;
    Ok(())
}

/// Return the UID of the pod to which a cgroup belongs.
fn pod_of(path: &str) -> Option<String> {
    divvy_model::cgroup::pod_uid(path.rsplit('/').next()?)
}
