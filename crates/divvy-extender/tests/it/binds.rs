//! Binds, step by step. Case numbers are those of `docs/compatibility/gpushare.md`, and R numbers those of `docs/compatibility/races.md`.
//! F numbers are faults. F02: the answer to a POST comes after the client's timeout. F08: kube-scheduler sends the same bind many times at once.

use divvy_extender::core::{BindError, CoreTiming, ExtenderAction, ExtenderCore, Got, Posted};
use divvy_kube::convert::ReadPod;
use divvy_kube::objects::PodObject;
use divvy_kube::watch::WatchChange;
use divvy_model::{ContainerKind, ContainerRequest, GpuLink, GpuRules, Health, Held, LinkKind, MemoryUnit, Pod, PodRequest};
use proptest::prelude::*;

use crate::values::*;

/// [`gpushare_cluster`] and more pods.
fn fixture(more: &[divvy_model::Pod]) -> ExtenderCore {
    let (nodes, pods) = gpushare_cluster();
    synced(&nodes, &[&pods[..], more].concat())
}

#[test]
fn a_bind_is_one_binding_that_carries_the_allocation() {
    // Case 13, in one write instead of two.
    let q = pod("q", 8);
    let mut core = fixture(std::slice::from_ref(&q));
    let (_, actions) = core.begin_bind(args(&q, "n1"), at(0));
    let (op, binding) = one_post(actions);
    assert_eq!(free(&core, "n1"), [6, 4], "reserved before the write");
    assert_eq!(
        binding.to_json(),
        serde_json::json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": {"name": "q", "namespace": "default", "uid": "u-q", "annotations": {
                "ALIYUN_COM_GPU_MEM_ASSIGNED": "false", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1692105746106628538",
                "ALIYUN_COM_GPU_MEM_DEV": "16", "ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "8"}},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "n1"},
        }),
        "a node without an inventory knows its GPUs by index only"
    );
    assert_eq!(one_answer(core.posted(op, Posted::Created, at(1))), Ok(()));
    assert_eq!(free(&core, "n1"), [6, 4]);
    core.index_mut().apply_pod(bound(&q, &binding));
    assert_eq!(free(&core, "n1"), [6, 4], "counted once");
    assert_eq!(core.index().ledger().reservations().count(), 0);
    assert_eq!(core.under_way(), 0);
}

#[test]
fn a_node_with_an_inventory_gets_both_forms_of_the_allocation() {
    let mut q = pod("q", 3);
    q.request.containers.insert(
        0,
        ContainerRequest {
            name: "warm-up".to_owned(),
            kind: ContainerKind::Init,
            units: 5,
            gpu_count: 0,
        },
    );
    let mut core = synced(&[node("n", &[40, 14])], std::slice::from_ref(&q));
    let (_, binding) = one_post(core.begin_bind(args(&q, "n"), at(0)).1);
    let text = |key: &str| binding.annotations[key].as_str();
    assert_eq!(
        text("divvy.dev/allocation"),
        r#"{"v":1,"gpus":[{"uuid":"GPU-n-1","memMiB":5120,"cores":0,"whole":false}],"containers":{"c0":[{"uuid":"GPU-n-1","memMiB":3072,"cores":0}],"warm-up":[{"uuid":"GPU-n-1","memMiB":5120,"cores":0}]}}"#
    );
    assert_eq!(
        ["IDX", "DEV", "POD", "ASSIGNED"].map(|name| text(&format!("ALIYUN_COM_GPU_MEM_{name}"))),
        ["1", "14", "5", "false"]
    );
    assert_eq!(text("ALIYUN_COM_GPU_MEM_ASSUME_TIME").len(), 19);
    assert_eq!(binding.annotations.len(), 6);
}

/// The Binding also has the form that inspect reads.
#[test]
fn several_gpus_come_in_one_binding() {
    let mut q = pod("q", 12);
    let rules = GpuRules {
        gpus: Some(2),
        ..GpuRules::default()
    };
    q.request = PodRequest::new(q.request.containers, Some(Ok(rules)));
    let mut linked = node("n", &[16, 16, 16]);
    if let Some(Ok(inventory)) = &mut linked.inventory {
        inventory.gpus[2].links = vec![GpuLink {
            peer: "GPU-n-1".to_owned(),
            kind: LinkKind::NvLink,
            count: 12,
        }];
    }
    let mut core = synced(&[linked, gpushare_node("old", 32, 2)], std::slice::from_ref(&q));
    let answer = core.filter(&q, ["n", "old"]).expect("synced");
    assert_eq!((answer.passed.as_slice(), answer.failed.len()), (&[0][..], 1));
    let (op, binding) = one_post(core.begin_bind(args(&q, "n"), at(0)).1);
    let text = |key: &str| binding.annotations[key].as_str();
    assert_eq!(
        text("divvy.dev/allocation"),
        r#"{"v":1,"gpus":[{"uuid":"GPU-n-1","memMiB":6144,"cores":0,"whole":false},{"uuid":"GPU-n-2","memMiB":6144,"cores":0,"whole":false}],"containers":{"c0":[{"uuid":"GPU-n-1","memMiB":6144,"cores":0},{"uuid":"GPU-n-2","memMiB":6144,"cores":0}]}}"#
    );
    assert_eq!(text("scheduler.framework.gpushare.allocation"), r#"{"0":{"1":6,"2":6}}"#);
    assert_eq!((text("ALIYUN_COM_GPU_MEM_IDX"), text("ALIYUN_COM_GPU_MEM_POD")), ("1", "12"));
    assert_eq!(free(&core, "n"), [16, 10, 10]);
    assert_eq!(one_answer(core.posted(op, Posted::Created, at(1))), Ok(()));
    core.index_mut().apply_pod(bound(&q, &binding));
    assert_eq!(free(&core, "n"), [16, 10, 10], "counted once");
}

/// The bind is sent again with the same GPUs while all of them are healthy.
#[test]
fn an_unanswered_bind_repeats_its_several_gpus() {
    let mut q = pod("q", 12);
    let rules = GpuRules {
        gpus: Some(2),
        ..GpuRules::default()
    };
    q.request = PodRequest::new(q.request.containers, Some(Ok(rules)));
    let mut core = synced(&[node("n", &[16, 16, 16])], std::slice::from_ref(&q));
    let (op, first) = one_post(core.begin_bind(args(&q, "n"), at(0)).1);
    core.posted(op, Posted::Unknown("timeout".to_owned()), at(1));
    core.got(op, Got::Found(Box::new(q.clone())), at(2));
    let (op, second) = one_post(core.begin_bind(args(&q, "n"), at(3)).1);
    assert_eq!(
        first.annotations["divvy.dev/allocation"],
        second.annotations["divvy.dev/allocation"]
    );
    core.posted(op, Posted::Unknown("timeout".to_owned()), at(4));
    core.got(op, Got::Found(Box::new(q.clone())), at(5));
    // One of the two GPUs fails: another one is chosen, and the allocation that may still be carried out stays reserved.
    let mut failed = node("n", &[16, 16, 16]);
    if let Some(Ok(inventory)) = &mut failed.inventory {
        inventory.gpus[0].health = Health::Failed;
    }
    core.index_mut().apply_node(&failed);
    let (op, ..) = one_get(core.begin_bind(args(&q, "n"), at(6)).1);
    let (_, third) = one_post(core.got(op, Got::Found(Box::new(q.clone())), at(7)));
    let text = &third.annotations["scheduler.framework.gpushare.allocation"];
    assert_eq!(text, r#"{"0":{"1":6,"2":6}}"#);
    assert_eq!(free(&core, "n"), [10, 4, 10]);
}

#[test]
fn a_refused_bind_says_what_was_asked_and_what_is_free() {
    let q = pod("q", 13);
    let mut core = fixture(std::slice::from_ref(&q));
    for (node, text) in [
        (
            "n1",
            "pod default/q: node n1 has no GPU with 13 units (13312 MiB) free: GPU 0 has 6144 of 16384 MiB free, GPU 1 has 12288 of 16384 MiB free",
        ),
        (
            "n3",
            "pod default/q: node n3 is not offered: it offers no aliyun.com/gpu-mem (does the Divvy agent run there?)",
        ),
        ("nx", "pod default/q: the extender does not know node nx"),
    ] {
        assert_eq!(one_refusal(core.begin_bind(args(&q, node), at(0)).1), text);
    }
    assert_eq!(core.index().ledger().reservations().count(), 0);
    assert_eq!(core.counts().refused, 3);
}

#[test]
fn another_uid_is_refused_in_gpushares_words() {
    // R7: a new pod has the name; the cache may know either pod.
    let q = pod("q", 8);
    let mut core = fixture(std::slice::from_ref(&q));
    let mut old = args(&q, "n1");
    old.pod_uid = "u-before".to_owned();
    let (op, asked, pause) = one_get(core.begin_bind(old.clone(), at(0)).1);
    assert_eq!((asked, pause), (key(&q), 0), "only the API server knows");
    assert_eq!(
        one_refusal(core.got(op, found(&q), at(1))),
        "The pod q in ns default's uid is u-q, and it's not equal with expected u-before"
    );
    let (op, ..) = one_get(core.begin_bind(old, at(2)).1);
    let error = one_refusal(core.got(op, Got::NotFound, at(3)));
    assert_eq!(error, "pod default/q is gone: it was deleted before it was bound");
}

#[test]
fn a_pod_that_is_not_cached_yet_is_looked_up() {
    let q = pod("q", 8);
    let mut core = fixture(&[]);
    let (op, ..) = one_get(core.begin_bind(args(&q, "n1"), at(0)).1);
    let (op, _) = one_post(core.got(op, found(&q), at(1)));
    assert_eq!(one_answer(core.posted(op, Posted::Created, at(2))), Ok(()));
    assert_eq!(free(&core, "n1"), [6, 4]);
    let (op, ..) = one_get(core.begin_bind(args(&pod("r", 1), "n1"), at(3)).1);
    let error = one_refusal(core.got(op, Got::Failed("no answer".to_owned()), at(4)));
    assert_eq!(error, "pod default/r is not known yet and could not be read: no answer");
}

#[test]
fn a_repeated_bind_is_answered_without_a_write() {
    // R9, before and after the pod's own event.
    let q = pod("q", 8);
    let mut core = fixture(std::slice::from_ref(&q));
    let (op, binding) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    core.posted(op, Posted::Created, at(1));
    assert_eq!(one_answer(core.begin_bind(args(&q, "n1"), at(2)).1), Ok(()));
    let elsewhere = "pod default/q is bound to node n1 already and cannot be bound to node n2";
    assert_eq!(one_refusal(core.begin_bind(args(&q, "n2"), at(2)).1), elsewhere);
    core.index_mut().apply_pod(bound(&q, &binding));
    assert_eq!(one_answer(core.begin_bind(args(&q, "n1"), at(3)).1), Ok(()));
    assert_eq!(one_refusal(core.begin_bind(args(&q, "n2"), at(3)).1), elsewhere);
    assert_eq!(free(&core, "n1"), [6, 4]);
    assert_eq!(core.counts().bound, 1);
}

#[test]
fn equal_binds_at_once_are_one_write_and_equal_answers() {
    // F08
    for outcome in [Posted::Created, Posted::Refused("not allowed".to_owned())] {
        let q = pod("q", 8);
        let mut core = fixture(std::slice::from_ref(&q));
        let (first, actions) = core.begin_bind(args(&q, "n1"), at(0));
        let (op, _) = one_post(actions);
        let mut tickets = vec![first];
        for _ in 1..50 {
            let (ticket, actions) = core.begin_bind(args(&q, "n1"), at(0));
            assert_eq!(actions, [], "joined");
            tickets.push(ticket);
        }
        let given = answers(core.posted(op, outcome, at(1)));
        assert_eq!(given.keys().copied().collect::<Vec<_>>(), tickets);
        assert!(
            given.values().all(|answer| Some(answer) == given.values().next()),
            "{given:?}"
        );
    }
}

/// The next bind sees the outcome of the previous bind.
#[test]
fn binds_of_one_node_write_in_turn() {
    // R10
    let (q, r, s) = (pod("q", 16), pod("r", 16), pod("s", 2));
    let nodes = [node("n1", &[16]), node("n2", &[16])];
    let mut core = synced(&nodes, &[q.clone(), r.clone(), s.clone()]);
    let (first, _) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    assert_eq!(core.begin_bind(args(&r, "n1"), at(0)).1, [], "waits for the node");
    one_post(core.begin_bind(args(&s, "n2"), at(0)).1);
    let actions = core.posted(first, Posted::Created, at(1));
    let answers: Vec<_> = answers(actions).into_values().collect();
    let [Ok(()), Err(refusal)] = answers.as_slice() else {
        panic!("{answers:?}");
    };
    assert!(refusal.message().contains("GPU 0 has 0 of 16384 MiB free"), "{refusal}");

    // The same, but the first bind fails: its reserved memory goes to the second.
    let mut core = synced(&nodes, &[q.clone(), r.clone()]);
    let (first, _) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    core.begin_bind(args(&r, "n1"), at(0));
    let actions = core.posted(first, Posted::NotFound("pods \"q\" not found".to_owned()), at(1));
    assert!(
        matches!(&actions[..], [ExtenderAction::Answer { result: Err(_), .. }, ExtenderAction::Post { binding, .. }] if binding.name == "r"),
        "{actions:?}"
    );
}

/// The pod as a watch shows it, bound to n1 with 8 units of GPU 0.
fn seen(uid: &str) -> ReadPod {
    let allocation =
        r#"{"v":1,"gpus":[{"uuid":"GPU-n1-0","memMiB":8192}],"containers":{"main":[{"uuid":"GPU-n1-0","memMiB":8192}]}}"#;
    let object = serde_json::json!({
        "metadata": {"namespace": "default", "name": "q", "uid": uid, "annotations": {"divvy.dev/allocation": allocation}},
        "spec": {"nodeName": "n1", "containers": [{"name": "main", "resources": {"limits": {"aliyun.com/gpu-mem": "8"}}}]},
        "status": {"phase": "Running"},
    });
    ReadPod::from(serde_json::from_value::<PodObject>(object).expect("a pod"))
}

#[test]
fn a_pod_called_gone_counts_when_shown_again() {
    let q = pod("q", 8);
    let buried = || {
        let mut core = synced(&[node("n1", &[16])], std::slice::from_ref(&q));
        let (op, _) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
        core.posted(op, Posted::NotFound("pods \"q\" not found".to_owned()), at(1));
        assert_eq!(free(&core, "n1"), [16]);
        core
    };
    let check = |actions: Vec<ExtenderAction>| matches!(&actions[..], [ExtenderAction::Check { uid, .. }] if *uid == q.uid);
    let shown = Got::Found(Box::new(seen(&q.uid).pod().clone()));
    for change in [WatchChange::Apply(seen(&q.uid)), WatchChange::Reset(vec![seen(&q.uid)])] {
        // A late event of a pod that is really gone changes nothing.
        let mut core = buried();
        assert!(check(core.pod_change(change.clone(), at(2))));
        core.checked(&q.uid, "", Got::NotFound, at(3));
        assert_eq!((free(&core, "n1"), core.sweep(at(4))), (vec![16], Vec::new()));

        // A pod that the API server has is counted. Until the API server answers, it is queried again.
        let mut core = buried();
        assert!(check(core.pod_change(change.clone(), at(2))));
        core.checked(&q.uid, "", Got::Failed("down".to_owned()), at(3));
        assert_eq!(free(&core, "n1"), [16]);
        assert!(check(core.sweep(at(4))));
        core.checked(&q.uid, "", shown.clone(), at(5));
        assert_eq!((free(&core, "n1"), core.sweep(at(6))), (vec![8], Vec::new()));
        core.pod_change(WatchChange::Delete(seen(&q.uid)), at(7));
        assert_eq!(free(&core, "n1"), [16]);

        // An answer that arrives after the pod's deletion does not bring the pod back.
        for gone in [WatchChange::Delete(seen(&q.uid)), WatchChange::Reset(Vec::new())] {
            let mut core = buried();
            assert!(check(core.pod_change(change.clone(), at(2))));
            core.pod_change(gone, at(3));
            core.checked(&q.uid, "", shown.clone(), at(4));
            assert_eq!(free(&core, "n1"), [16]);
        }
    }
}

#[test]
fn a_bound_pod_called_gone_is_looked_up() {
    let q = pod("q", 8);
    let shown = || seen(&q.uid).pod().clone();
    let called_gone = || {
        let mut core = synced(&[node("n1", &[16])], std::slice::from_ref(&q));
        let (op, _) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
        // The bind was carried out, and its event arrives before an answer that is not the API server's.
        core.pod_change(WatchChange::Apply(seen(&q.uid)), at(1));
        core.posted(op, Posted::NotFound("pods \"q\" not found".to_owned()), at(2));
        assert!(matches!(&core.sweep(at(3))[..], [ExtenderAction::Check { uid, .. }] if *uid == q.uid));
        core
    };
    let mut core = called_gone();
    core.checked(&q.uid, "", Got::Found(Box::new(shown())), at(4));
    assert_eq!((free(&core, "n1"), core.sweep(at(5))), (vec![8], Vec::new()));
    // The answer was the API server's.
    let mut core = called_gone();
    core.checked(&q.uid, "", Got::NotFound, at(4));
    assert_eq!((free(&core, "n1"), core.sweep(at(5))), (vec![16], Vec::new()));
}

/// The answer says that the pod is gone, but it is older than what the watch showed of the pod.
#[test]
fn an_outdated_answer_takes_no_binding_back() {
    let q = pod("q", 8);
    let mut core = synced(&[node("n1", &[16]), node("n2", &[16])], std::slice::from_ref(&q));
    // The API server carries the Binding out, but a proxy answers that there is no such pod.
    let (op, _) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    core.posted(op, Posted::NotFound("pods \"q\" not found".to_owned()), at(1));
    let (op, ..) = one_get(core.begin_bind(args(&q, "n2"), at(2)).1);
    let looked_up = core.pod_change(WatchChange::Apply(ReadPod::from(q.clone())), at(3));
    assert!(matches!(&looked_up[..], [ExtenderAction::Check { .. }]), "{looked_up:?}");
    assert_eq!(
        core.pod_change(WatchChange::Apply(seen(&q.uid)), at(3)),
        Vec::new(),
        "one look is enough"
    );
    assert_eq!(
        one_refusal(core.got(op, Got::Found(Box::new(q.clone())), at(4))),
        "pod default/q is bound to node n1 already and cannot be bound to node n2"
    );
    assert_eq!((free(&core, "n1"), free(&core, "n2")), (vec![8], vec![16]));
    assert_eq!(core.sweep(at(5)), Vec::new(), "it is known that the pod is there");
}

/// The extender handles this pod like any other pod.
#[test]
fn a_rebound_pod_called_gone_is_no_exception() {
    let q = pod("q", 8);
    let unbound = || Got::Found(Box::new(q.clone()));
    let mut core = synced(&[node("n1", &[16])], std::slice::from_ref(&q));
    let (op, _) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    core.posted(op, Posted::NotFound("pods \"q\" not found".to_owned()), at(1));
    // The second bind reads the pod, and its Binding gets no answer.
    let (op, ..) = one_get(core.begin_bind(args(&q, "n1"), at(2)).1);
    let (op, _) = one_post(core.got(op, unbound(), at(3)));
    let (op, ..) = one_get(core.posted(op, Posted::Unknown("no answer".to_owned()), at(4)));
    one_answer(core.got(op, unbound(), at(5))).expect_err("not bound so far");
    assert_eq!(free(&core, "n1"), [8]);
    let late = at(3_600_000);
    let actions = core.sweep(late);
    assert!(matches!(&actions[..], [ExtenderAction::Check { uid, node, .. }] if *uid == q.uid && node == "n1"));
    core.checked(&q.uid, "n1", unbound(), late);
    assert_eq!(free(&core, "n1"), [16], "the reservation is given up");
}

#[test]
fn a_bind_that_waited_too_long_for_its_node_is_not_begun() {
    let (q, r) = (pod("q", 1), pod("r", 1));
    let mut core = synced(&[node("n1", &[16])], &[q.clone(), r.clone()]);
    let (first, _) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    core.begin_bind(args(&r, "n1"), at(0));
    let answers = answers(core.posted(first, Posted::Created, at(5_000)));
    let error = answers.into_values().find_map(Result::err).expect("the second is refused");
    assert!(
        error.message().contains("pod default/r could not be bound in time"),
        "{error}"
    );
}

#[test]
fn a_lost_answer_is_found_out_by_looking() {
    // F02: every possible outcome of a POST without an answer.
    let q = pod("q", 8);
    let begin = |outcome: Posted| {
        let mut core = synced(&[node("n1", &[16]), node("n2", &[16])], std::slice::from_ref(&q));
        let (op, binding) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
        let (op, asked, _) = one_get(core.posted(op, outcome, at(10)));
        assert_eq!(asked, key(&q));
        assert_eq!(free(&core, "n1"), [8], "kept while it is not known");
        (core, op, binding)
    };
    for outcome in [lost(), conflict()] {
        let (mut core, op, binding) = begin(outcome.clone());
        assert_eq!(one_answer(core.got(op, found(&bound(&q, &binding)), at(20))), Ok(()));
        assert_eq!(free(&core, "n1"), [8]);

        let (mut core, op, mut binding) = begin(outcome.clone());
        binding.node = "n2".to_owned();
        let error = one_refusal(core.got(op, found(&bound(&q, &binding)), at(20)));
        assert_eq!(
            error,
            "pod default/q is bound to node n2 already and cannot be bound to node n1"
        );
        assert_eq!(free(&core, "n1"), [16]);

        let (mut core, op, _) = begin(outcome.clone());
        let other = gpushare_pod("q", "n1", 0, 3);
        let error = one_refusal(core.got(op, found(&other), at(20)));
        assert!(error.contains("with a different allocation"), "{error}");
        assert_eq!(free(&core, "n1"), [16]);

        let (mut core, op, _) = begin(outcome.clone());
        assert!(one_answer(core.got(op, Got::NotFound, at(20))).is_err());
        assert_eq!(free(&core, "n1"), [16]);

        let (mut core, op, _) = begin(outcome);
        let mut again = q.clone();
        again.uid = "u-again".to_owned();
        let error = one_refusal(core.got(op, found(&again), at(20)));
        assert!(error.contains("uid is u-again"), "{error}");
        assert_eq!(free(&core, "n1"), [16]);
    }
    // Not bound after a 409: refused. Not bound after no answer: the Binding may still be carried out.
    let (mut core, op, _) = begin(conflict());
    let error = one_refusal(core.got(op, found(&q), at(20)));
    assert!(error.contains("Operation cannot be fulfilled"), "{error}");
    assert_eq!(free(&core, "n1"), [16]);
    let (mut core, op, _) = begin(lost());
    let error = one_refusal(core.got(op, found(&q), at(20)));
    assert!(error.contains("connection reset"), "{error}");
    assert_eq!(free(&core, "n1"), [8]);
}

/// The extender checks the bind until the scheduler stops waiting.
#[test]
fn an_unanswered_bind_is_checked_for_a_while() {
    let q = pod("q", 8);
    let mut core = synced(&[node("n1", &[16])], std::slice::from_ref(&q));
    let (op, _) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    let (op, _, mut pause) = one_get(core.posted(op, lost(), at(100)));
    let mut now = 100;
    let mut looks = 1;
    let error = loop {
        now += pause / MS + 10;
        let actions = core.got(op, Got::Failed("down".to_owned()), at(now));
        match &actions[..] {
            [ExtenderAction::Get { after_ns, .. }] => pause = *after_ns,
            _ => break one_refusal(actions),
        }
        looks += 1;
    };
    assert!(error.contains("it is not known whether the pod is bound"), "{error}");
    assert!(now <= CoreTiming::default().answer_within_ns / MS, "answered at {now} ms");
    assert!((4..12).contains(&looks), "backs off: {looks} looks");
    assert_eq!(free(&core, "n1"), [8], "kept");
    assert_eq!(core.counts().unknown, 1);
    // The node was free for others all the time.
    assert_eq!(core.under_way(), 0);
}

#[test]
fn a_retried_unanswered_bind_repeats_its_allocation() {
    // The first may be carried out late: then it does not matter which of the two was.
    let (q, r) = (pod("q", 8), pod("r", 1));
    let mut core = synced(&[node("n1", &[16, 8])], &[q.clone(), r.clone()]);
    let (op, first) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    assert_eq!(first.annotations["ALIYUN_COM_GPU_MEM_IDX"], "1");
    let (op, ..) = one_get(core.posted(op, lost(), at(10)));
    one_answer(core.got(op, found(&q), at(20))).expect_err("not bound so far");
    assert!(
        core.filter(&q, ["n1"]).expect("synced").failed.is_empty(),
        "its own reservation is not in its way"
    );
    let (op, second) = one_post(core.begin_bind(args(&q, "n1"), at(1_000)).1);
    assert_eq!(
        first.annotations["divvy.dev/allocation"],
        second.annotations["divvy.dev/allocation"]
    );
    // The first one wins the race.
    let (op, ..) = one_get(core.posted(op, conflict(), at(1_010)));
    assert_eq!(one_answer(core.got(op, found(&bound(&q, &first)), at(1_020))), Ok(()));
    assert_eq!(free(&core, "n1"), [16, 0]);
}

#[test]
fn a_successful_bind_elsewhere_frees_the_first_node() {
    let q = pod("q", 8);
    let mut core = synced(&[node("n1", &[16]), node("n2", &[16])], std::slice::from_ref(&q));
    let (op, _) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    let (op, ..) = one_get(core.posted(op, lost(), at(10)));
    one_answer(core.got(op, found(&q), at(20))).expect_err("not bound so far");
    let (op, _) = one_post(core.begin_bind(args(&q, "n2"), at(1_000)).1);
    assert_eq!(
        (free(&core, "n1"), free(&core, "n2")),
        (vec![8], vec![8]),
        "either may come through"
    );
    assert_eq!(one_answer(core.posted(op, Posted::Created, at(1_010))), Ok(()));
    assert_eq!((free(&core, "n1"), free(&core, "n2")), (vec![16], vec![8]));
}

#[test]
fn a_pod_deleted_in_the_middle_leaves_nothing_behind() {
    // R4, R14: the pod's deletion may be seen before, or instead of, the answer.
    let q = pod("q", 8);
    for (seen, outcome) in [(true, Posted::Created), (true, lost()), (false, Posted::Created)] {
        let mut core = synced(&[node("n1", &[16])], std::slice::from_ref(&q));
        let (op, _) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
        if seen {
            core.index_mut().delete_pod(&q.uid);
        }
        for action in core.posted(op, outcome, at(10)) {
            if let ExtenderAction::Get { op, .. } = action {
                one_answer(core.got(op, Got::NotFound, at(20))).expect_err("gone");
            }
        }
        if !seen {
            // Created, bound and deleted while the watch was cut: no list ever shows it.
            let mut forgetful = synced(&[node("n1", &[16])], &[]);
            let (op, ..) = one_get(forgetful.begin_bind(args(&q, "n1"), at(0)).1);
            let (op, _) = one_post(forgetful.got(op, found(&q), at(1)));
            forgetful.posted(op, Posted::Created, at(2));
            forgetful.index_mut().reset_pods(Vec::new());
            assert_eq!(free(&forgetful, "n1"), [8], "may be younger than the list");
            assert_eq!(forgetful.sweep(at(1_000)), [], "not yet");
            let due = forgetful.sweep(at(20_000));
            assert!(
                matches!(&due[..], [ExtenderAction::Check { uid, .. }] if *uid == q.uid),
                "{due:?}"
            );
            forgetful.checked(&q.uid, "n1", Got::NotFound, at(20_010));
            assert_eq!(free(&forgetful, "n1"), [16]);
            continue;
        }
        assert_eq!(free(&core, "n1"), [16]);
        assert_eq!(core.index().ledger().reservations().count(), 0);
    }
}

/// The doubt ends with the pod's event, or when the API server can no longer carry the Binding out.
#[test]
fn a_doubt_about_a_binding_ends() {
    let q = pod("q", 8);
    let doubtful = || {
        let mut core = synced(&[node("n1", &[16])], std::slice::from_ref(&q));
        let (op, binding) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
        let (op, ..) = one_get(core.posted(op, lost(), at(10)));
        one_answer(core.got(op, found(&q), at(20))).expect_err("unknown");
        (core, binding)
    };
    let (mut core, binding) = doubtful();
    core.index_mut().apply_pod(bound(&q, &binding));
    assert_eq!(core.index().ledger().reservations().count(), 0);
    assert_eq!(free(&core, "n1"), [8]);

    let (mut core, _) = doubtful();
    assert_eq!(core.sweep(at(5_000)).len(), 1);
    core.checked(&q.uid, "n1", found(&q), at(5_010));
    assert_eq!(free(&core, "n1"), [8], "it may come yet");
    core.checked(&q.uid, "n1", Got::Failed("down".to_owned()), at(70_000));
    assert_eq!(free(&core, "n1"), [8]);
    core.checked(&q.uid, "n1", found(&q), at(70_010));
    assert_eq!(free(&core, "n1"), [16]);

    let (mut core, binding) = doubtful();
    core.checked(&q.uid, "n1", found(&bound(&q, &binding)), at(70_000));
    assert_eq!(free(&core, "n1"), [8], "it came; the event is on its way");
    assert_eq!(one_answer(core.begin_bind(args(&q, "n1"), at(70_010)).1), Ok(()));
}

#[test]
fn binds_of_one_pod_to_two_nodes_come_one_after_the_other() {
    let q = pod("q", 8);
    let mut core = synced(&[node("n1", &[16]), node("n2", &[16])], std::slice::from_ref(&q));
    let (op, _) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    assert_eq!(core.begin_bind(args(&q, "n2"), at(0)).1, []);
    let given: Vec<_> = answers(core.posted(op, Posted::Created, at(1))).into_values().collect();
    assert_eq!(
        given,
        [
            Ok(()),
            Err(BindError::BoundElsewhere {
                pod: q.key(),
                bound: "n1".to_owned(),
                node: "n2".to_owned()
            })
        ]
    );
}

#[test]
fn a_pod_being_deleted_is_not_bound() {
    let mut q = pod("q", 8);
    q.deleting = true;
    let mut core = fixture(std::slice::from_ref(&q));
    assert_eq!(
        one_refusal(core.begin_bind(args(&q, "n1"), at(0)).1),
        "pod default/q is being deleted"
    );
}

#[test]
fn a_pod_that_asks_for_no_memory_is_bound_without_an_allocation() {
    // A request for only gpu-count also makes kube-scheduler call the extender, which then binds the pod.
    let mut q = pod("q", 0);
    q.request.containers[0].gpu_count = 1;
    let mut core = fixture(std::slice::from_ref(&q));
    assert_eq!(core.filter(&q, ["n3", "n1"]).expect("synced").passed, [0, 1]);
    let (op, binding) = one_post(core.begin_bind(args(&q, "n3"), at(0)).1);
    assert!(binding.annotations.is_empty());
    assert!(binding.to_json()["metadata"].get("annotations").is_none());
    let (op, ..) = one_get(core.posted(op, lost(), at(1)));
    let mut there = bound(&q, &binding);
    there.held = Held::Nothing;
    assert_eq!(one_answer(core.got(op, found(&there), at(2))), Ok(()));
}

#[test]
fn a_pod_that_asks_for_gpu_count_is_bound_and_warned() {
    let mut q = pod("q", 8);
    q.request.containers[0].gpu_count = 2;
    let mut core = fixture(std::slice::from_ref(&q));
    let (op, _) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    let actions = core.posted(op, Posted::Created, at(1));
    assert!(
        matches!(&actions[..], [ExtenderAction::Answer { result: Ok(()), .. }, ExtenderAction::Warn { reason: "GpuCountHasNoEffect", text, .. }]
            if text.starts_with("the limit aliyun.com/gpu-count has no effect")),
        "{actions:?}"
    );
}

#[test]
fn nothing_is_answered_before_the_cluster_was_listed() {
    let q = pod("q", 8);
    let mut core = ExtenderCore::new(MemoryUnit::GIB, CoreTiming::default());
    core.index_mut().reset_nodes(&[node("n1", &[16])]);
    let text = "the extender is starting: it has not listed the cluster's pods yet, so it does not know which GPU memory is free";
    assert_eq!(core.filter(&q, ["n1"]).expect_err("not listed").to_string(), text);
    assert_eq!(one_refusal(core.begin_bind(args(&q, "n1"), at(0)).1), text);
    core.index_mut().reset_pods(vec![q.clone()]);
    one_post(core.begin_bind(args(&q, "n1"), at(1)).1);
}

#[test]
fn outcomes_that_nobody_waits_for_change_nothing() {
    let q = pod("q", 8);
    let mut core = fixture(std::slice::from_ref(&q));
    let (op, _) = one_post(core.begin_bind(args(&q, "n1"), at(0)).1);
    assert_eq!(core.got(op, found(&q), at(1)), [], "not asked");
    one_answer(core.posted(op, Posted::Created, at(1))).expect("bound");
    assert_eq!(core.posted(op, Posted::NotFound(String::new()), at(2)), []);
    core.checked("u-nobody", "n1", Got::NotFound, at(3));
    assert_eq!(free(&core, "n1"), [6, 4]);
}

proptest! {
    #[test]
    fn any_pod_is_answered_and_never_given_more_than_a_gpu_has(units in any::<u64>(), sizes in proptest::collection::vec(1..100u64, 0..5)) {
        let q = pod("q", units);
        let mut core = synced(&[node("n", &sizes)], std::slice::from_ref(&q));
        let fits = core.filter(&q, ["n"]).expect("synced").failed.is_empty();
        let actions = core.begin_bind(args(&q, "n"), at(0)).1;
        prop_assert_eq!(fits, matches!(&actions[..], [ExtenderAction::Post { .. }]));
        prop_assert_eq!(fits, units == 0 || sizes.iter().any(|size| *size >= units));
    }
}

/// kube-scheduler binds a pod whose victim has ended, before the extender has seen that the victim has ended.
#[test]
fn a_victims_unseen_end_refuses_no_preemptor() {
    let urgent = Pod {
        priority: 1000,
        nominated: Some("n1".into()),
        ..pod("urgent", 12)
    };
    let victim = Pod {
        deleting: true,
        ..gpushare_pod("victim", "n1", 0, 16)
    };
    let begin = || {
        let mut core = synced(&[node("n1", &[16])], &[urgent.clone(), victim.clone()]);
        let (op, _, pause) = one_get(core.begin_bind(args(&urgent, "n1"), at(0)).1);
        assert_eq!(pause, 25 * MS);
        (core, op)
    };
    let (mut core, op) = begin();
    core.index_mut().delete_pod(&victim.uid);
    let (_, binding) = one_post(core.got(op, found(&urgent), at(30)));
    assert_eq!(binding.node, "n1");
    // No such event arrives.
    let (mut core, mut op) = begin();
    for look in 1..4 {
        let (next, _, pause) = one_get(core.got(op, found(&urgent), at(30 * look)));
        assert_eq!(pause, 25 * MS);
        op = next;
    }
    let error = one_refusal(core.got(op, found(&urgent), at(120)));
    assert!(error.contains("has no GPU with 12 units"), "{error}");
    // A pod for which no other pod was preempted is refused at once.
    let other = pod("other", 12);
    let mut core = synced(&[node("n1", &[16])], &[other.clone(), victim]);
    one_answer(core.begin_bind(args(&other, "n1"), at(0)).1).expect_err("no room");
}
