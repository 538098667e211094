//! Bindings that another extender sent before it was killed.

use std::time::Duration;

use divvy_extender::core::{CoreTiming, ExtenderAction, ExtenderCore, Got, Posted};
use divvy_model::{MemoryUnit, Node, Pod};
use divvy_testbed::api::{ApiServer, ApiServerOptions};
use serde_json::{Value, json};

use crate::server::{Cluster, create_node, create_pod, settings};
use crate::values::*;

const SETTLE_MS: u64 = 1_000;

fn listed(nodes: &[Node], pods: &[Pod], ms: u64) -> ExtenderCore {
    let mut core = ExtenderCore::new(MemoryUnit::GIB, CoreTiming::default());
    assert_eq!(CoreTiming::default().settle_ns, SETTLE_MS * MS);
    core.index_mut().reset_nodes(nodes);
    core.index_mut().reset_pods(pods.to_vec());
    assert_eq!(core.pods_listed(at(ms)), []);
    core
}

/// A pod that is bound by another extender's Binding.
fn placed(pod: &Pod, node: &str, index: u32) -> Pod {
    gpushare_pod(&pod.name, node, index, pod.request.effective_units().expect("countable"))
}

fn running(mut pod: Pod) -> Pod {
    pod.container_running = true;
    pod
}

#[test]
fn bindings_on_their_way_are_awaited_before_promises() {
    let (q, r) = (pod("q", 8), pod("r", 8));
    let mut core = listed(&[gpushare_node("n1", 8, 1)], &[q.clone(), r.clone()], 100);
    assert_eq!(core.filter(&r, ["n1"]).expect("answered at once").passed, [0]);
    let (op, asked, pause) = one_get(core.begin_bind(args(&r, "n1"), at(300)).1);
    assert_eq!((asked, pause), (key(&r), 800 * MS), "what is left of the time");
    // The Binding that the dead extender had sent.
    core.index_mut().apply_pod(placed(&q, "n1", 0));
    let error = one_refusal(core.got(op, found(&r), at(1_100)));
    assert!(error.contains("GPU 0 has 0 of 8192 MiB free"), "{error}");

    // It was for this same pod.
    let mut core = listed(&[gpushare_node("n1", 8, 1)], std::slice::from_ref(&q), 100);
    let (op, ..) = one_get(core.begin_bind(args(&q, "n1"), at(300)).1);
    assert_eq!(one_answer(core.got(op, found(&placed(&q, "n1", 0)), at(1_100))), Ok(()));
    assert_eq!(core.counts().already_bound, 1);

    // No Binding was on its way.
    let mut core = listed(&[gpushare_node("n1", 8, 1)], std::slice::from_ref(&q), 100);
    let (op, ..) = one_get(core.begin_bind(args(&q, "n1"), at(300)).1);
    let (op, _) = one_post(core.got(op, found(&q), at(1_100)));
    assert_eq!(one_answer(core.posted(op, Posted::Created, at(1_110))), Ok(()));
}

#[test]
fn a_bind_waits_only_after_a_list_and_is_answered_in_time() {
    let (q, r) = (pod("q", 2), pod("r", 2));
    let mut core = listed(&[gpushare_node("n1", 8, 1)], &[q.clone(), r.clone()], 0);
    let (op, _) = one_post(core.begin_bind(args(&q, "n1"), at(SETTLE_MS)).1);
    one_answer(core.posted(op, Posted::Created, at(SETTLE_MS + 1))).expect("bound");
    // The watch was lost, and the pods were listed again.
    core.pods_listed(at(20_000));
    let (op, _, pause) = one_get(core.begin_bind(args(&r, "n1"), at(20_001)).1);
    assert_eq!(pause, 999 * MS);
    // This repeats, but kube-scheduler still gets its answer.
    let mut actions = Vec::new();
    for second in 21..26 {
        core.pods_listed(at(second * 1_000));
        actions = core.got(op, found(&r), at(second * 1_000 + 1));
        if !matches!(actions[..], [ExtenderAction::Get { .. }]) {
            break;
        }
    }
    let error = one_refusal(actions);
    assert!(error.contains("could not be bound in time"), "{error}");
    // For a pod that is already bound, the answer comes at once.
    let mut core = listed(&[gpushare_node("n1", 8, 1)], &[placed(&q, "n1", 0)], 0);
    assert_eq!(one_answer(core.begin_bind(args(&q, "n1"), at(1)).1), Ok(()));
    // So it does for a pod that is gone.
    let mut core = listed(&[gpushare_node("n1", 8, 1)], std::slice::from_ref(&r), 0);
    let (op, ..) = one_get(core.begin_bind(args(&r, "n1"), at(1)).1);
    one_answer(core.got(op, Got::NotFound, at(1_000))).expect_err("gone");
}

/// The error mentions an earlier bind only if that bind was sent.
#[test]
fn after_a_list_unreadable_pods_are_not_bound() {
    let q = pod("q", 2);
    let mut core = listed(&[gpushare_node("n1", 8, 1)], std::slice::from_ref(&q), 0);
    let (op, ..) = one_get(core.begin_bind(args(&q, "n1"), at(1)).1);
    let error = one_refusal(core.got(op, Got::Failed("down".to_owned()), at(1_000)));
    assert_eq!(
        error,
        "pod default/q could not be read, and the extender, which has just listed the pods, must first check whether another replica has \
         bound it; nothing was sent, and the bind can be tried again: down"
    );
    assert_eq!(core.index().ledger().reservations().count(), 0);
    // An earlier bind of this extender is mentioned, even after a list.
    let (op, _) = one_post(core.begin_bind(args(&q, "n1"), at(1_001)).1);
    let (op, ..) = one_get(core.posted(op, lost(), at(1_010)));
    one_answer(core.got(op, found(&q), at(1_020))).expect_err("in doubt");
    core.pods_listed(at(1_030));
    let (op, ..) = one_get(core.begin_bind(args(&q, "n1"), at(1_040)).1);
    let error = one_refusal(core.got(op, Got::Failed("down".to_owned()), at(2_100)));
    assert_eq!(
        error,
        "pod default/q could not be read, and an earlier bind of it may have been carried out: down"
    );
}

/// Return the pods for which there is a warning event.
fn told(actions: Vec<ExtenderAction>) -> Vec<String> {
    let name = |action| match action {
        ExtenderAction::Warn { pod, reason, text, .. } => {
            assert_eq!(reason, "GpuPromisedTwice");
            assert!(text.len() < 1_000 && text.contains("Delete this pod"), "{text}");
            pod.name
        }
        other => panic!("{other:?}"),
    };
    actions.into_iter().map(name).collect()
}

#[test]
fn a_double_promise_warns_the_last_owner_once() {
    let (a, b) = (placed(&pod("a", 5), "n1", 0), placed(&pod("b", 5), "n1", 0));
    let mut core = synced(&[gpushare_node("n1", 16, 2)], std::slice::from_ref(&a));
    assert_eq!(told(core.promised_twice()), [""; 0]);
    core.index_mut().apply_pod(b.clone());
    let actions = core.promised_twice();
    let Some(ExtenderAction::Warn { text, uid, .. }) = actions.first() else {
        panic!("{actions:?}");
    };
    assert_eq!(uid, "u-b");
    assert!(
        text.starts_with(
            "GPU 0 of node n1 has 8192 MiB to share, but pods were allocated 10240 MiB of it. This pod was bound last"
        ),
        "{text}"
    );
    assert_eq!(told(actions), ["b"]);
    // There is no second event, whatever else happens on the node.
    for event in [running(a.clone()), placed(&pod("c", 2), "n1", 1), b.clone()] {
        core.index_mut().apply_pod(event);
        assert_eq!(told(core.promised_twice()), [""; 0]);
    }
    assert_eq!(core.counts().promised_twice, 1);
    // The owner deleted the pod.
    core.index_mut().delete_pod("u-b");
    assert_eq!(told(core.promised_twice()), [""; 0]);
    assert_eq!(core.index().ledger().totals().overcommitted, 0);
}

#[test]
fn who_is_told_is_who_waits() {
    let three = |pods: [Pod; 3]| {
        let mut core = synced(&[gpushare_node("n1", 8, 1)], &pods);
        told(core.promised_twice())
    };
    let of = |name: &str, units| placed(&pod(name, units), "n1", 0);
    let ended = |mut pod: Pod| {
        pod.phase = divvy_model::Phase::Succeeded;
        pod
    };
    let going = |mut pod: Pod| {
        pod.deleting = true;
        pod
    };
    // In the order in which the pods were seen. A running pod has the memory.
    assert_eq!(three([of("a", 4), of("b", 4), of("c", 4)]), ["c"]);
    assert_eq!(three([of("a", 4), of("b", 4), running(of("c", 4))]), ["b"]);
    assert_eq!(three([of("a", 8), of("b", 8), of("c", 8)]), ["c", "b"]);
    // Enough memory becomes free without a warning, or already has.
    assert_eq!(three([going(of("a", 4)), of("b", 4), of("c", 4)]), [""; 0]);
    assert_eq!(three([ended(of("a", 4)), of("b", 4), of("c", 4)]), [""; 0]);
    // Overcommitted memory of pods that all run causes no warning, because no owner could do anything about it.
    assert_eq!(
        three([running(of("a", 4)), running(of("b", 4)), running(of("c", 4))]),
        [""; 0]
    );
    assert_eq!(three([of("a", 4), of("b", 2), of("c", 2)]), [""; 0]);
}

#[test]
fn when_the_one_who_was_told_starts_the_other_one_is_told() {
    let (a, b) = (placed(&pod("a", 5), "n1", 0), placed(&pod("b", 5), "n1", 0));
    let mut core = synced(&[gpushare_node("n1", 8, 1)], &[a, b.clone()]);
    assert_eq!(told(core.promised_twice()), ["b"]);
    core.index_mut().apply_pod(running(b.clone()));
    assert_eq!(told(core.promised_twice()), ["a"]);

    // Or when the GPU offers even less, so that no other pod fits either.
    let (a, b) = (placed(&pod("a", 5), "n1", 0), b);
    let mut core = synced(&[gpushare_node("n1", 8, 1)], &[a, b]);
    assert_eq!(told(core.promised_twice()), ["b"]);
    core.index_mut().apply_node(&gpushare_node("n1", 4, 1));
    assert_eq!(told(core.promised_twice()), ["a"]);
}

#[test]
fn what_is_only_reserved_or_still_held_by_the_dead_is_not_told() {
    let (a, q) = (placed(&pod("a", 5), "n1", 0), pod("q", 5));
    let mut core = synced(&[gpushare_node("n1", 8, 1)], std::slice::from_ref(&q));
    one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    core.index_mut().apply_pod(a);
    assert_eq!(told(core.promised_twice()), [""; 0], "the API server may refuse it");
    assert_eq!(core.index().ledger().totals().overcommitted, 1);

    let mut held = node("n2", &[8]);
    if let Some(Ok(inventory)) = &mut held.inventory {
        inventory.gpus[0].held = divvy_model::MiB(8 * 1024);
    }
    let mut core = synced(&[held], &[placed(&pod("b", 5), "n2", 0)]);
    assert_eq!(told(core.promised_twice()), [""; 0], "it starts when those have ended");
}

/// Another extender's Binding: all memory of the node's only GPU.
fn foreign_binding(pod: &Value) -> Value {
    let annotations: Value = json!(divvy_model::legacy::bind_annotations(0, 8, 8, 1));
    let meta = &pod["metadata"];
    json!({"metadata": {"name": meta["name"], "namespace": "default", "uid": meta["uid"], "annotations": annotations},
           "target": {"kind": "Node", "name": "n"}})
}

fn one_gpu() -> (ApiServer, Value, Value) {
    let api = ApiServer::new(ApiServerOptions::default());
    create_node(&api, "n", 8, 1);
    let (q, r) = (create_pod(&api, "q", 8), create_pod(&api, "r", 8));
    (api, q, r)
}

#[tokio::test(start_paused = true)]
async fn a_late_bindings_memory_is_not_promised_again() {
    let (api, q, r) = one_gpu();
    let began = tokio::time::Instant::now();
    let mut settings = settings();
    settings.timing = CoreTiming::default();
    let cluster = Cluster::with(api.clone(), settings).await;
    let body = json!({"Pod": r, "NodeNames": ["n"]});
    let answer = cluster.json("/gpushare-scheduler/filter", body).await;
    assert_eq!(answer["NodeNames"], json!(["n"]));
    let settle = Duration::from_nanos(CoreTiming::default().settle_ns);
    assert!(began.elapsed() < settle, "filter does not wait: {:?}", began.elapsed());
    let lands = async {
        tokio::time::sleep(settle / 2).await;
        api.create("pods/binding", foreign_binding(&q)).expect("it was on its way");
    };
    let (error, ()) = tokio::join!(cluster.bind(&r, "n"), lands);
    assert!(error.contains("GPU 0 has 0 of 8192 MiB free"), "{error}");
    assert!(
        began.elapsed() >= settle && began.elapsed() < 3 * settle,
        "{:?}",
        began.elapsed()
    );
}

#[tokio::test]
async fn a_double_promise_makes_one_event() {
    let (api, q, r) = one_gpu();
    let cluster = Cluster::on(api.clone()).await;
    assert_eq!(cluster.bind(&q, "n").await, "");
    api.create("pods/binding", foreign_binding(&r)).expect("it was on its way");
    let events = |api: &ApiServer| -> Vec<Value> {
        let all = api.list("events.events.k8s.io", "default").unwrap_or_default();
        all.into_iter()
            .filter(|event| event["reason"] == "GpuPromisedTwice")
            .collect()
    };
    let found = api.until(Duration::from_secs(10), |api| {
        Some(events(api)).filter(|found| !found.is_empty())
    });
    let event = found.await.expect("an event").remove(0);
    assert_eq!(
        (&event["type"], &event["regarding"]["uid"]),
        (&json!("Warning"), &r["metadata"]["uid"])
    );
    assert!(
        event["note"].as_str().is_some_and(|note| note.contains("Delete this pod")),
        "{event}"
    );
    // More happens on the node, but there is no second event.
    let running = json!({"status": {"phase": "Running", "containerStatuses": [{"name": "main", "state": {"running": {}}}]}});
    api.patch("pods/status", "default", "q", divvy_testbed::api::PatchKind::Merge, &running)
        .expect("a legal status");
    let other = create_pod(&api, "other", 1);
    let known = |text: &str| text.contains("divvy_ledger_pods 3");
    cluster.eventually("/metrics", |_, text| known(text)).await;
    assert!(!cluster.bind(&other, "n").await.is_empty(), "there is no room");
    assert_eq!(cluster.metric("divvy_extender_promised_twice_total").await, Some(1.0));
    assert_eq!(events(&api).len(), 1);
}
