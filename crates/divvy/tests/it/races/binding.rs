//! R8 to R10, and R19 (docs/compatibility/races.md): how a pod gets its allocation, or why it gets none.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use divvy_model::names;
use divvy_testbed::api::{Clock, Effect, FaultRule, Match, PatchKind};
use divvy_testbed::builders::pod;
use jiff::{SignedDuration, Timestamp};
use serde_json::json;

use crate::bed::Bed;

/// Return a [`Match`] for the Bindings that the extender sends.
fn bindings() -> Match {
    Match::any().verb("create").resource("pods/binding").client("extender")
}

fn refuse(code: u16) -> Effect {
    Effect::Refuse(code)
}

#[tokio::test]
async fn r08_a_bind_that_failed_leaves_no_annotation_and_no_booking() {
    let bed = Bed::new(&[&[4]]).await;
    let effects = [refuse(403), refuse(409), refuse(429), refuse(500), Effect::LoseRequest];
    for (i, effect) in effects.into_iter().enumerate() {
        let name = format!("p-{i}");
        let rule = bed.api().faults().add(FaultRule::new(bindings(), effect.clone()).times(2));
        bed.create(&pod(&name).gpu_mem(4));
        bed.running(&name).await;
        assert_eq!(bed.api().faults().remove(rule), 2, "{effect:?}");
        bed.delete(&name);
        bed.gone(&name).await;
    }
    // A pod whose bind never succeeds holds no memory once it is gone. The audit checks that it had no annotation meanwhile.
    let rule = bed.api().faults().add(FaultRule::new(bindings(), refuse(500)));
    bed.create(&pod("never").gpu_mem(4));
    bed.event("never", "FailedScheduling", "Internal error occurred").await;
    assert!(!bed.is_bound("never"));
    bed.delete("never");
    bed.api().faults().remove(rule);
    bed.create(&pod("next").gpu_mem(4));
    bed.running("next").await;
    bed.end().await;
}

#[tokio::test]
async fn r09_a_bind_whose_answer_was_lost_is_not_written_again() {
    let mut bed = Bed::new(&[&[4, 4], &[4]]).await;
    let rule = bed
        .api()
        .faults()
        .add(FaultRule::new(bindings(), Effect::LoseAnswer).times(1));
    let uid = bed.create(&pod("a").gpu_mem(3));
    bed.running("a").await;
    assert_eq!(bed.api().faults().remove(rule), 1);
    let allocation = bed.allocation("a");
    let annotations = bed.pod("a")["metadata"]["annotations"].clone();
    let node = bed.pod("a")["spec"]["nodeName"].as_str().expect("bound").to_owned();
    let other = if node == "n1" { "n2" } else { "n1" };
    // kube-scheduler repeats the bind, even at another extender that does not know of it.
    for restarted in [false, true] {
        if restarted {
            bed.cluster.kill_extender().await.expect("killed");
            bed.cluster.start_extender().await.expect("started");
        }
        assert_eq!(bed.bind("a", &uid, &node).await, "");
        let error = bed.bind("a", &uid, other).await;
        assert_eq!(
            error,
            format!("pod default/a is bound to node {node} already and cannot be bound to node {other}")
        );
    }
    assert_eq!(bed.pod("a")["metadata"]["annotations"], annotations);
    assert_eq!(bed.allocation("a"), allocation);
    bed.end().await;
}

/// The bind keeps its booking until the outcome can be learned.
#[tokio::test]
async fn r09_a_bind_of_unknown_outcome_keeps_its_booking() {
    let bed = Bed::new(&[&[4]]).await;
    bed.settled().await;
    let faults = bed.api().faults();
    faults.add(FaultRule::new(bindings(), Effect::LoseAnswer).times(1));
    let reads = Match::any().verb("get").resource("pods").client("extender");
    faults.add(FaultRule::new(reads, refuse(503)));
    let uid = bed.create_by_hand(&pod("a").gpu_mem(3));
    let error = bed.bind_known("a", &uid, "n1").await;
    assert!(error.contains("it is not known whether the pod is bound"), "{error}");
    assert!(bed.is_bound("a"), "the API server did it");
    let allocation = bed.allocation("a");
    let other = bed.create_by_hand(&pod("b").gpu_mem(3));
    let error = bed.bind_known("b", &other, "n1").await;
    assert!(error.contains("GPU 0 has 1024 of 4096 MiB free"), "{error}");
    bed.api().faults().clear();
    assert_eq!(bed.bind("a", &uid, "n1").await, "");
    assert_eq!(bed.allocation("a"), allocation);
    bed.running("a").await;
    bed.end().await;
}

#[tokio::test]
async fn r10_of_two_binds_in_flight_for_the_last_room_one_succeeds() {
    let bed = Bed::new(&[&[4, 4], &[4]]).await;
    let latency = Effect::Latency(Duration::from_millis(250));
    bed.api().faults().add(FaultRule::new(bindings(), latency));
    let [a, b, c] = ["a", "b", "c"].map(|name| bed.create_by_hand(&pod(name).gpu_mem(3)));
    // Two of three pods fit on n1, one per GPU.
    let answers = tokio::join!(bed.bind("a", &a, "n1"), bed.bind("b", &b, "n1"), bed.bind("c", &c, "n1"));
    let answers = [("a", answers.0), ("b", answers.1), ("c", answers.2)];
    let (bound, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|(_, error)| error.is_empty());
    let [(late, error)] = refused.as_slice() else {
        panic!("one is refused: {bound:?} {refused:?}");
    };
    assert!(
        error.contains(&format!(
            "pod default/{late}: node n1 has no GPU with 3 units (3072 MiB) free"
        )),
        "{error}"
    );
    assert_ne!(bed.gpu_of(bound[0].0), bed.gpu_of(bound[1].0));
    assert!(!bed.is_bound(late));
    for (name, _) in &bound {
        bed.running(name).await;
    }
    // One pod is bound to two nodes at once: one bind wins, and the other reservation is released.
    let uid = if *late == "a" {
        &a
    } else if *late == "b" {
        &b
    } else {
        &c
    };
    bed.delete(bound[0].0);
    bed.gone(bound[0].0).await;
    let answers = tokio::join!(bed.bind(late, uid, "n1"), bed.bind(late, uid, "n2"));
    let (n1, n2) = (answers.0.is_empty(), answers.1.is_empty());
    assert!(n1 != n2, "{answers:?}");
    bed.running(late).await;
    let free = if n1 { "n2" } else { "n1" };
    bed.until("the loser's booking to be let go", async |bed: &Bed| {
        let used = bed.inspect(free).await["usedGPU"].clone();
        let expected = if n1 { 0 } else { 3 };
        if used == expected { Ok(()) } else { Err(used.to_string()) }
    })
    .await;
    bed.end().await;
}

#[tokio::test]
async fn r19_no_clock_is_compared() {
    let skew = Arc::new(AtomicI64::new(0));
    let clock = {
        let skew = skew.clone();
        Clock::new(move || {
            let skew = SignedDuration::from_secs(skew.load(Ordering::Relaxed));
            Timestamp::now().saturating_add(skew).expect("a time")
        })
    };
    // The two other pods arrive while the first is admitted; the kubelet then sorts them by creation time.
    let bed = Bed::at(&[&[4, 4]], clock, |spec| spec.timings.allocate = Duration::from_millis(500)).await;
    let (day, years) = (86_400, 86_400 * 3650);
    bed.create(&pod("first").gpu_mem(1));
    bed.bound("first").await;
    let mut uids = Vec::new();
    for (name, seconds, assumed) in [("future", years, "1"), ("past", -day, "9223372036854775807")] {
        skew.store(seconds, Ordering::Relaxed);
        // An annotation that a user writes before the bind is ignored.
        let forged = pod(name)
            .gpu_mem(3)
            .annotation(names::ALIYUN_ASSUME_TIME, assumed)
            .annotation(names::ALIYUN_ASSIGNED, "true")
            .annotation(names::ALIYUN_IDX, "7");
        uids.push(bed.create(&forged));
        bed.bound(name).await;
        assert_ne!(bed.pod(name)["metadata"]["annotations"][names::ALIYUN_ASSUME_TIME], assumed);
        // An annotation that is written after the bind is ignored as well.
        let patch = json!({"metadata": {"annotations": {names::ALIYUN_ASSUME_TIME: assumed}}});
        let patched = bed.api().patch("pods", "default", name, PatchKind::Merge, &patch);
        patched.expect("nothing forbids it here");
    }
    for name in ["first", "future", "past"] {
        bed.running(name).await;
    }
    assert_ne!(bed.gpu_of("future"), bed.gpu_of("past"));
    // The pod with the older creation time was admitted first although it was bound last, so the kubelet's ids are on the other pod's GPU.
    let gpu = bed.allocation("past").expect("an allocation").gpus[0].uuid.clone();
    let ids = bed.ids("n1", &uids[1]);
    assert!(ids["main"].iter().all(|id| !id.starts_with(&gpu)), "{ids:?}");
    // With a deletion time a day ago or in ten years, the pod is gone when its container has ended.
    bed.delete("past");
    skew.store(years, Ordering::Relaxed);
    bed.delete("future");
    bed.end().await;
}
