//! R6 and R7 (docs/compatibility/races.md): when memory becomes free, and which pod may use it.

use std::collections::BTreeSet;
use std::time::Duration;

use divvy_testbed::builders::pod;
use divvy_testbed::node::CgroupVersion;

use crate::bed::{Bed, stubborn};

/// The container holds the memory until it ends, even if the agent restarts meanwhile.
#[tokio::test]
async fn r06_a_force_deleted_pods_container_holds_its_memory() {
    force_delete(CgroupVersion::V2).await;
}

#[tokio::test]
async fn r06_the_same_with_cgroups_of_version_1() {
    force_delete(CgroupVersion::V1).await;
}

async fn force_delete(version: CgroupVersion) {
    let mut bed = Bed::with(&[&[4]], |spec| {
        spec.cgroup = version;
        spec.timings.forced_grace = Duration::from_secs(5);
    })
    .await;
    let old = bed.create(&stubborn("old", 3, 3));
    bed.running("old").await;
    let newcomer = bed.create(&pod("newcomer").gpu_mem(3));
    bed.unschedulable("newcomer", "").await;
    // An extender that starts now is faster than the agent's report of the hold: the object is gone, so the API shows free memory.
    let unsaid = bed.agent_says_nothing("n1");
    bed.force_delete("old");
    bed.cluster.restart_extender().await.expect("restarted");
    bed.bound("newcomer").await;
    let text = bed.start_refused("newcomer", "memory is still held by").await;
    let expected = "pod default/newcomer needs 3072 MiB of GPU 0, where 1024 MiB of 4096 MiB are free; memory is still held by default/old \
                    (deleted, container still running): 3072 MiB. The container starts automatically once they have ended";
    assert!(text.contains(expected), "{text}");
    bed.api().faults().remove(unsaid);
    bed.held("n1", 3072).await;
    bed.event(
        "old",
        "MemoryHeldWithoutPod",
        "the memory becomes available when they have ended",
    )
    .await;
    // The extender reads the report, and does not even bind a new pod.
    bed.create(&pod("late").gpu_mem(1));
    bed.unschedulable("late", "").await;
    bed.restart_agent("n1").await;
    bed.ends_before(&old, |bed| bed.runs(&newcomer, "main") || bed.is_bound("late"))
        .await;
    bed.running("newcomer").await;
    bed.running("late").await;
    assert_eq!(bed.held_mib("n1"), 0);
    bed.end().await;
}

#[tokio::test]
async fn r07_a_pod_re_created_under_its_name_is_another_pod() {
    let mut bed = Bed::with(&[&[4]], |spec| spec.timings.forced_grace = Duration::from_secs(5)).await;
    let first = bed.create_by_hand(&stubborn("s-0", 3, 4));
    assert_eq!(bed.bind("s-0", &first, "n1").await, "");
    bed.running("s-0").await;
    // The extender receives neither the deletion nor the creation.
    bed.api().faults().hold_watches(true);
    bed.force_delete("s-0");
    let second = bed.create_by_hand(&pod("s-0").gpu_mem(3));
    assert_ne!(first, second);
    let error = bed.bind("s-0", &first, "n1").await;
    assert!(!bed.is_bound("s-0"), "a late bind of the old pod binds the new one: {error}");
    let error = bed.bind("s-0", &second, "n1").await;
    assert!(
        error.contains("default/s-0"),
        "the old one counts until it is known to be gone: {error}"
    );
    // When it has received both, it waits for the agent's report about the old pod's container.
    let unsaid = bed.agent_says_nothing("n1");
    bed.api().faults().hold_watches(false);
    bed.until(
        "the new pod to be refused for the old one's container",
        async |bed: &Bed| match bed.bind("s-0", &second, "n1").await {
            error if error.contains("default/s-0 3072 MiB (deleted, container was running)") => Ok(()),
            error => Err(error),
        },
    )
    .await;
    // An extender that knows of neither binds the pod, and the agent refuses its start.
    bed.cluster.restart_extender().await.expect("restarted");
    bed.until("the new pod to be bound", async |bed: &Bed| {
        match bed.bind("s-0", &second, "n1").await.as_str() {
            "" => Ok(()),
            error => Err(error.to_owned()),
        }
    })
    .await;
    let error = bed.bind("s-0", &first, "n1").await;
    let expected = format!("The pod s-0 in ns default's uid is {second}, and it's not equal with expected {first}");
    assert_eq!(error, expected);
    let text = bed.start_refused("s-0", "memory is still held by").await;
    assert!(text.contains("default/s-0 (deleted, container still running)"), "{text}");
    assert!(bed.runs(&first, "main") && !bed.runs(&second, "main"));
    bed.api().faults().remove(unsaid);
    bed.running("s-0").await;
    assert!(!bed.runs(&first, "main"));
    bed.end().await;
}

/// The pods come back under this name.
#[tokio::test]
async fn r07_pods_under_one_name_leak_and_lose_nothing() {
    let bed = Bed::with(&[&[4]], |spec| {
        // In half of the cases before the agent has cleaned up after the old pod, in the other half after that.
        spec.timings.start_retry.first = Duration::from_millis(5);
        spec.timings.start_retry.max = Duration::from_millis(5);
    })
    .await;
    let mut uids = BTreeSet::new();
    let mut names = BTreeSet::new();
    for round in 0..10 {
        let uid = bed.create(&pod("s-0").gpu_mem(4));
        assert!(uids.insert(uid.clone()));
        let main = bed.running("s-0").await.remove(0);
        names.extend(main.cdi_devices.clone());
        let own = BTreeSet::from([format!("{uid}_main.json")]);
        bed.until("only the new grant to be left", async |bed: &Bed| match bed.grants("n1") {
            grants if grants == own => Ok(()),
            grants => Err(format!("{grants:?}")),
        })
        .await;
        // The same device ids give the same grant name, so the old pod's end must not remove the new pod's spec.
        assert_eq!(bed.specs("n1").len(), 1, "round {round}");
        match round % 5 {
            0 => bed.delete("s-0"),
            _ => bed.force_delete("s-0"),
        }
        bed.gone("s-0").await;
    }
    assert_eq!(names.len(), 1);
    bed.end().await;
}

/// In this cluster, only the test causes events, so no unrelated event helps a pod that was refused too early.
/// The extender may hear of the freed memory after the scheduler.
#[tokio::test]
async fn a_waiting_pod_gets_what_is_freed() {
    let bed = Bed::new(&[&[4]]).await;
    bed.create(&pod("p-0").gpu_mem(3));
    bed.running("p-0").await;
    for round in 1..16 {
        let name = format!("p-{round}");
        bed.create(&pod(&name).gpu_mem(3));
        bed.unschedulable(&name, "").await;
        // The back-off of the pod is over at its next try, so it is tried immediately.
        tokio::time::sleep(Duration::from_millis(120)).await;
        bed.delete(&format!("p-{}", round - 1));
        bed.running(&name).await;
    }
    bed.end().await;
}
