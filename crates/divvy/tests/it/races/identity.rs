//! R15 to R18 (docs/compatibility/races.md): what the agent knows about a container before its start, and what it has forgotten.

use std::collections::BTreeSet;
use std::time::Duration;

use divvy_testbed::builders::pod;
use divvy_testbed::node::Bugs;

use crate::bed::Bed;

#[tokio::test]
async fn r15_a_start_waits_for_a_pod_that_the_agent_has_not_seen_yet() {
    let bed = Bed::new(&[&[4, 4]]).await;
    bed.create(&pod("known").gpu_mem(3));
    bed.running("known").await;
    let cut = bed.cut_off_agent("n1").await;
    let uid = bed.create(&pod("unseen").gpu_mem(3));
    bed.admitted("n1", &uid, 1).await;
    cut.waited_for(&bed).await;
    bed.stays("it does not start unidentified", Duration::from_millis(300), |bed| {
        !bed.runs(&uid, "main") && !bed.has_grant("n1", &uid)
    })
    .await;
    cut.heal(&bed);
    bed.running("unseen").await;
    assert_eq!(bed.refused_starts("unseen"), [""; 0], "it waited, and was not refused");
    bed.end().await;
}

/// Until the agent sees the pod, it refuses the pod with an explanation.
#[tokio::test]
async fn r15_an_unseen_pod_starts_when_it_is_seen() {
    let bed = Bed::new(&[&[4]]).await;
    let cut = bed.cut_off_agent("n1").await;
    let uid = bed.create(&pod("unseen").gpu_mem(3));
    let text = bed.start_refused("unseen", "is not known to this agent yet").await;
    assert!(
        text.contains(&uid) && text.contains("the API server does not answer"),
        "{text}"
    );
    assert_eq!(bed.ever_ran(&uid), 0);
    cut.heal(&bed);
    bed.running("unseen").await;
    bed.end().await;
}

#[tokio::test]
async fn r16_an_agent_killed_while_starts_wait_has_forgotten_nothing() {
    let mut bed = Bed::new(&[&[4, 4]]).await;
    let cut = bed.cut_off_agent("n1").await;
    let uids = ["a", "b"].map(|name| bed.create(&pod(name).gpu_mem(3)));
    for uid in &uids {
        bed.admitted("n1", uid, 1).await;
    }
    cut.waited_for(&bed).await;
    bed.cluster.kill_agent("n1").await.expect("killed");
    assert!(bed.grants("n1").is_empty(), "killed before anything was granted");
    cut.heal(&bed);
    bed.cluster.start_agent("n1").await.expect("started");
    for name in ["a", "b"] {
        bed.running(name).await;
    }
    assert_ne!(bed.gpu_of("a"), bed.gpu_of("b"));
    bed.end().await;
}

/// The agent is killed between Allocate and PreStartContainer.
#[tokio::test]
async fn r16_a_killed_agent_starts_the_pod_when_back() {
    let mut bed = Bed::with(&[&[4, 4]], |spec| spec.timings.container_start = Duration::from_millis(300)).await;
    let uids = ["a", "b"].map(|name| bed.create(&pod(name).gpu_mem(3)));
    for uid in &uids {
        bed.admitted("n1", uid, 1).await;
    }
    let ids = uids.each_ref().map(|uid| bed.ids("n1", uid));
    bed.cluster.kill_agent("n1").await.expect("killed");
    bed.until("the starts to fail", async |bed: &Bed| {
        let failed = |name: &str| bed.pod(name)["status"].to_string().contains("CreateContainerConfigError");
        if failed("a") && failed("b") {
            Ok(())
        } else {
            Err(bed.pod("a")["status"].to_string())
        }
    })
    .await;
    bed.cluster.start_agent("n1").await.expect("started");
    for name in ["a", "b"] {
        bed.running(name).await;
    }
    assert_eq!(
        ids,
        uids.each_ref().map(|uid| bed.ids("n1", uid)),
        "they were not allocated again"
    );
    bed.end().await;
}

/// How long a kubelet waits before it handles pods after its start, so that plugins can register first.
const PLUGINS_FIRST: Duration = Duration::from_millis(1200);

#[tokio::test]
async fn r17_a_kubelet_restarted_in_mid_admission_goes_on() {
    let bed = Bed::with(&[&[4, 4]], |spec| {
        spec.timings.pods_after = PLUGINS_FIRST;
        spec.timings.allocate = Duration::from_millis(150);
    })
    .await;
    let many = bed.create(
        &pod("many")
            .gpu_mem(1)
            .container("c1", 1)
            .container("c2", 1)
            .container("c3", 1),
    );
    let other = bed.create(&pod("other").gpu_mem(3));
    let (first, second) = bed
        .until("a pod to be admitted in part", async |bed: &Bed| {
            let ids = bed.ids("n1", &many);
            match ids.len() {
                2 => Ok((ids, bed.ids("n1", &other))),
                n => Err(format!("{n} containers have ids")),
            }
        })
        .await;
    bed.node("n1").stop_kubelet(true).await;
    bed.node("n1").start_kubelet().await.expect("started");
    bed.running("many").await;
    bed.running("other").await;
    let now = bed.ids("n1", &many);
    assert_eq!(now.len(), 4);
    assert!(first.iter().all(|(name, ids)| now[name] == *ids), "{first:?} {now:?}");
    if !second.is_empty() {
        assert_eq!(bed.ids("n1", &other), second);
    }
    assert_ne!(bed.gpu_of("many"), bed.gpu_of("other"));
    assert!(bed.refused_pods().is_empty(), "{:?}", bed.refused_pods());
    bed.end().await;
}

#[tokio::test]
async fn r17_a_kubelet_restart_starts_a_waiting_pod_once() {
    let bed = Bed::with(&[&[4]], |spec| spec.timings.pods_after = PLUGINS_FIRST).await;
    let cut = bed.cut_off_agent("n1").await;
    let uid = bed.create(&pod("a").gpu_mem(3));
    bed.admitted("n1", &uid, 1).await;
    cut.waited_for(&bed).await;
    bed.node("n1").stop_kubelet(true).await;
    // The agent learns of the pod, but the kubelet's call has already ended.
    cut.heal(&bed);
    assert_eq!(bed.ever_ran(&uid), 0);
    bed.node("n1").start_kubelet().await.expect("started");
    bed.running("a").await;
    assert_eq!(bed.ever_ran(&uid), 1);
    assert!(bed.refused_pods().is_empty(), "{:?}", bed.refused_pods());
    bed.end().await;
}

/// Make a node whose kubelet has bug B1. Its calls are slow, which makes the bug more likely.
async fn with_double_hand_out(gpus: &[u64]) -> Bed {
    Bed::with(&[gpus], |spec| {
        spec.timings.allocate = Duration::from_millis(700);
        // A start that was refused is tried again before the agent has cleared up after the pod in its way.
        spec.timings.start_retry.first = Duration::from_millis(5);
        spec.timings.start_retry.max = Duration::from_millis(5);
        spec.bugs = Bugs {
            double_hand_out: true,
            ..Bugs::default()
        };
    })
    .await
}

/// Admit the pod `name`, let the kubelet forget the admission in progress, and wait until the pod runs. In between, a short-lived
/// pod that requests `short` units ends, and releases its device ids.
async fn admit_and_forget(bed: &Bed, name: &str, short: u64) -> String {
    let ending = format!("short-{name}");
    bed.create(&pod(&ending).gpu_mem(short).once().args(&["sleep", "0.35"]));
    bed.running(&ending).await;
    let uid = bed.create(&pod(name).gpu_mem(3));
    bed.phase(&ending, "Succeeded").await;
    // As every monitoring tool does.
    bed.node("n1").list_pod_resources();
    bed.running(name).await;
    uid
}

fn all_ids(bed: &Bed, uid: &str) -> BTreeSet<String> {
    bed.ids("n1", uid).into_values().flatten().collect()
}

/// The refusal names both pods.
#[tokio::test]
async fn r18_a_pod_with_anothers_ids_does_not_start() {
    // The short pod is on the small GPU, so that the lowest slots of the large one are given twice.
    let bed = with_double_hand_out(&[8, 2]).await;
    for round in 0..4 {
        let [one, two] = [format!("one-{round}"), format!("two-{round}")];
        let first = admit_and_forget(&bed, &one, 2).await;
        let second = bed.create(&pod(&two).gpu_mem(3));
        bed.admitted("n1", &second, 1).await;
        if all_ids(&bed, &first) != all_ids(&bed, &second) {
            // The machine was too slow for the bug: once more.
            bed.delete(&one);
            bed.delete(&two);
            bed.gone(&one).await;
            bed.gone(&two).await;
            continue;
        }
        let text = bed.start_refused(&two, "kubernetes#137534").await;
        assert!(
            text.contains(&format!("default/{one}")) && text.contains(&format!("default/{two}")),
            "{text}"
        );
        assert!(text.contains("delete one of them, or wait until one ends"), "{text}");
        let status = bed.pod(&two)["status"].to_string();
        assert!(status.contains("kubernetes#137534"), "{status}");
        assert!(bed.runs(&first, "main"), "who ran runs on");
        assert_eq!(bed.ever_ran(&second), 0);
        let specs = bed.specs("n1");
        bed.delete(&one);
        bed.running(&two).await;
        // The same ids have the same name: the old pod's end must not take the new one's spec along.
        bed.gone(&one).await;
        bed.until("the old grant to be gone", async |bed: &Bed| {
            if bed.has_grant("n1", &first) {
                Err("it is there".to_owned())
            } else {
                Ok(())
            }
        })
        .await;
        assert!(bed.has_grant("n1", &second));
        assert_eq!(bed.specs("n1"), specs);
        bed.end().await;
        return;
    }
    panic!("the kubelet never gave the same ids twice");
}

/// The pod starts on the GPU of its allocation.
#[tokio::test]
async fn r18_a_pod_with_some_ids_of_another_starts() {
    let bed = with_double_hand_out(&[8]).await;
    for round in 0..4 {
        let [one, two] = [format!("one-{round}"), format!("two-{round}")];
        let first = admit_and_forget(&bed, &one, 1).await;
        let second = bed.create(&pod(&two).gpu_mem(3));
        bed.running(&two).await;
        let (ids, other) = (all_ids(&bed, &first), all_ids(&bed, &second));
        if ids.is_disjoint(&other) {
            bed.delete(&one);
            bed.delete(&two);
            bed.gone(&one).await;
            bed.gone(&two).await;
            continue;
        }
        assert_ne!(ids, other);
        bed.event(&one, "DoubleHandout", &format!("default/{two}")).await;
        bed.end().await;
        return;
    }
    panic!("the kubelet never gave an id twice");
}
