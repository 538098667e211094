//! Tests of the audit. Each finding occurs for a crafted history, and does not occur for the same history without the fault. Sums
//! are compared with a naive recount.

use std::collections::BTreeMap;

use divvy_audit::{Audit, AuditLimits, AuditOutcome, ContainerReport, Fact, FindingKind, FindingLevel, Moment, WatchedKind};
use divvy_model::{ContainerKind, ContainerShare, Health, Held, MiB, Node, Phase, Pod, Vendor, names};
use proptest::prelude::*;

use divvy_testkit::nodes::*;

/// A pod as the extender binds it: the allocation names its container.
fn bound(name: &str, node: &str, index: usize, units: u64) -> Pod {
    let mut pod = divvy_pod(name, node, index, units);
    if let Held::Allocation(allocation) = &mut pod.held {
        let share = ContainerShare {
            uuid: uuid(node, index),
            memory: MiB(units * 1024),
            cores: 0,
        };
        allocation.containers.insert("c0".to_owned(), vec![share]);
    }
    pod.phase = Phase::Pending;
    pod
}

fn running(mut pod: Pod) -> Pod {
    (pod.phase, pod.container_running) = (Phase::Running, true);
    pod
}

fn ended(mut pod: Pod) -> Pod {
    (pod.phase, pod.container_running) = (Phase::Succeeded, false);
    pod
}

fn there(pod: Pod) -> Fact {
    let delete_by_ms = None;
    Fact::Pod { pod, delete_by_ms }
}

fn held(units: u64) -> Node {
    let mut node = divvy_node("n1", &[16, 16]);
    edit_gpu(&mut node, 0, |gpu| gpu.held = MiB(units * 1024));
    node
}

fn failed() -> Node {
    let mut node = divvy_node("n1", &[16, 16]);
    edit_gpu(&mut node, 0, |gpu| {
        (gpu.health, gpu.reason) = (Health::Failed, Some("XID 79".to_owned()))
    });
    node
}

/// The correct report of a container of a pod on GPU 0 of n1.
fn report(name: &str, units: u64) -> ContainerReport {
    let units = units.to_string();
    let env = [
        (names::ALIYUN_IDX, "0"),
        (names::ALIYUN_POD, units.as_str()),
        (names::ALIYUN_CONTAINER, units.as_str()),
        (names::ALIYUN_DEV, "16"),
        (names::VISIBLE_DEVICES, "void"),
    ];
    ContainerReport {
        node: "n1".to_owned(),
        pod_uid: format!("u-{name}"),
        container: "c0".to_owned(),
        id: format!("id-{name}"),
        running: true,
        gpus: vec![0],
        env: env.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
    }
}

fn with(mut report: ContainerReport, edit: impl FnOnce(&mut ContainerReport)) -> Fact {
    edit(&mut report);
    Fact::Report(report)
}

/// Run an audit. The number before each fact is the time since the previous fact in seconds. Revisions count up.
fn audit(facts: Vec<(i64, Fact)>) -> AuditOutcome {
    let mut audit = Audit::new(AuditLimits::default());
    let mut at = Moment {
        revision: Some(100),
        at_ms: Some(1_000_000),
    };
    for (seconds, fact) in facts {
        at = Moment {
            revision: at.revision.map(|revision| revision + 1),
            at_ms: at.at_ms.map(|ms| ms + seconds * 1000),
        };
        audit.take(at, fact);
    }
    audit.finish(None)
}

fn ids(outcome: &AuditOutcome) -> Vec<&'static str> {
    outcome.findings.iter().map(|finding| finding.what.id()).collect()
}

fn check(name: &str, facts: Vec<(i64, Fact)>, expected: &[&str]) -> AuditOutcome {
    let mut all = vec![(0, Fact::Node(divvy_node("n1", &[16, 16])))];
    all.extend(facts);
    let outcome = audit(all);
    assert_eq!(ids(&outcome), expected, "{name}: {:#?}", outcome.findings);
    outcome
}

#[test]
fn a_sound_history_has_no_findings() {
    let deleting = Fact::Pod {
        pod: running(bound("a", "n1", 0, 10)),
        delete_by_ms: Some(1_004_000),
    };
    let outcome = check(
        "sound",
        vec![
            (1, there(pending("a", 10))),
            (1, there(bound("a", "n1", 0, 10))),
            (1, there(running(bound("a", "n1", 0, 10)))),
            (0, Fact::Report(report("a", 10))),
            (1, there(pending("b", 6))),
            (1, there(running(bound("b", "n1", 0, 6)))),
            (0, Fact::Report(report("b", 6))),
            (1, deleting),
            (1, with(report("a", 10), |report| report.running = false)),
            (1, there(ended(bound("a", "n1", 0, 10)))),
            (1, there(running(bound("c", "n1", 0, 10)))),
            (1, Fact::PodGone(ended(bound("a", "n1", 0, 10)))),
            (0, Fact::Report(report("c", 10))),
            // A pod with the same name again is another pod.
            (
                1,
                there(Pod {
                    uid: "u-a2".to_owned(),
                    ..running(bound("a", "n1", 1, 16))
                }),
            ),
        ],
        &[],
    );
    assert_eq!(outcome.worst(), None);
    let summary = outcome.summary;
    assert_eq!((summary.pods, summary.allocations, summary.gpus, summary.nodes), (4, 4, 2, 1));
    assert_eq!((summary.containers, summary.most), (3, MiB(32 * 1024)));
}

/// The finding says whether containers of the pods ran at the same time.
#[test]
fn a_gpu_given_twice_is_found() {
    let on_paper = check(
        "on paper",
        vec![
            (1, there(running(bound("a", "n1", 0, 10)))),
            (1, there(bound("b", "n1", 0, 7))),
            (1, Fact::PodGone(bound("b", "n1", 0, 7))),
            (1, there(bound("c", "n1", 0, 6))),
        ],
        &["gpu-promised-twice"],
    );
    let finding = &on_paper.findings[0];
    assert_eq!(
        (finding.at.revision, finding.until.and_then(|until| until.revision)),
        (Some(103), Some(104))
    );
    assert_eq!(
        finding.what.to_string(),
        "GPU 0 of node n1 offers 16384 MiB, and 17408 MiB were allocated: default/a 10240 MiB, default/b 7168 MiB; not all of their containers ran at once"
    );
    let ran = check(
        "ran",
        vec![
            (1, there(running(bound("a", "n1", 0, 10)))),
            (1, there(bound("b", "n1", 0, 7))),
            (1, there(running(bound("b", "n1", 0, 7)))),
        ],
        &["gpu-overcommitted"],
    );
    assert_eq!(ran.findings[0].until, None);
    assert_eq!(ran.worst(), Some(FindingLevel::Fault));
    // With gpushare's annotations, on a node of gpushare's device plugin.
    let old = audit(vec![
        (0, Fact::Node(gpushare_node("n9", 32, 2))),
        (1, there(gpushare_pod("a", "n9", 1, 10))),
        (1, there(gpushare_pod("b", "n9", 1, 7))),
        (1, there(gpushare_pod("c", "n9", 0, 16))),
    ]);
    assert_eq!(ids(&old), ["gpu-promised-twice"]);
}

#[test]
fn each_fault_of_an_allocation_is_found() {
    let other = |mut pod: Pod| {
        pod.request = request(&[5]);
        pod
    };
    let unbound = Pod {
        node: None,
        ..bound("a", "n1", 0, 4)
    };
    let unreadable = Pod {
        held: Held::from_annotations(&BTreeMap::from([(names::ALLOCATION.to_owned(), "x".to_owned())])),
        ..bound("a", "n1", 0, 4)
    };
    let nothing = Pod {
        held: Held::Nothing,
        ..bound("a", "n1", 0, 4)
    };
    let unasked = Pod {
        request: request(&[0]),
        ..bound("a", "n1", 0, 4)
    };
    for (name, facts, expected) in [
        (
            "changed",
            vec![
                (1, there(bound("a", "n1", 0, 4))),
                (1, there(bound("a", "n1", 1, 4))),
                (1, there(running(bound("a", "n1", 1, 4)))),
            ],
            &["allocation-changed"][..],
        ),
        (
            "taken away",
            vec![(1, there(bound("a", "n1", 0, 4))), (1, there(nothing.clone()))],
            &["allocation-changed"],
        ),
        (
            "forged",
            vec![(1, there(unbound.clone())), (1, there(unbound))],
            &["allocated-unbound"],
        ),
        ("unreadable", vec![(1, there(unreadable))], &["allocation-unreadable"]),
        (
            "past the extender",
            vec![(1, there(nothing.clone())), (1, there(nothing))],
            &["bound-without-allocation"],
        ),
        ("never listed", vec![(1, there(bound("a", "n1", 7, 4)))], &["gpu-not-on-node"]),
        (
            "too little",
            vec![(1, there(other(bound("a", "n1", 0, 4))))],
            &["allocation-not-as-asked", "allocation-not-as-asked"],
        ),
        (
            "not asked for",
            vec![(1, there(unasked))],
            &["allocation-not-as-asked", "allocation-not-as-asked"],
        ),
        (
            "failed long ago",
            vec![
                (1, Fact::Node(failed())),
                (1, there(pending("a", 4))),
                (5, there(bound("a", "n1", 0, 4))),
            ],
            &["bound-to-failed-gpu"],
        ),
        (
            "failed long ago, and said again",
            vec![
                (1, Fact::Node(failed())),
                (1, there(pending("a", 4))),
                (4, Fact::Node(failed())),
                (1, there(bound("a", "n1", 0, 4))),
            ],
            &["bound-to-failed-gpu"],
        ),
        (
            "failed right now",
            vec![
                (1, Fact::Node(failed())),
                (1, there(pending("a", 4))),
                (4, there(bound("a", "n1", 0, 4))),
            ],
            &[],
        ),
    ] {
        check(name, facts, expected);
    }
}

/// The pod counts with the memory that it was bound with and with the memory that the allocation now says.
#[test]
fn a_changed_allocation_still_holds_its_bound_memory() {
    check(
        "shrunk by hand, and given again",
        vec![
            (1, there(running(bound("a", "n1", 0, 10)))),
            (1, there(running(bound("a", "n1", 0, 2)))),
            (1, there(running(bound("b", "n1", 0, 14)))),
        ],
        &["allocation-changed", "gpu-overcommitted"],
    );
}

#[test]
fn each_fault_of_a_container_is_found() {
    let begin = || {
        vec![
            (1, there(running(bound("a", "n1", 0, 10)))),
            (1, there(running(pending_on("z")))),
        ]
    };
    fn pending_on(name: &str) -> Pod {
        Pod {
            node: Some("n1".to_owned()),
            request: request(&[0]),
            ..pending(name, 0)
        }
    }
    type Edit = fn(&mut ContainerReport);
    let table: [(&str, Edit, &[&str]); 8] = [
        ("sound", |_| (), &[]),
        ("another GPU", |report| report.gpus = vec![1], &["ran-elsewhere"]),
        ("two GPUs", |report| report.gpus = vec![0, 1], &["ran-elsewhere"]),
        ("no GPU", |report| report.gpus = vec![], &["ran-elsewhere"]),
        (
            "another size",
            |report| drop(report.env.insert(names::ALIYUN_CONTAINER.to_owned(), "11".to_owned())),
            &["told-wrong"],
        ),
        (
            "another index",
            |report| drop(report.env.insert(names::ALIYUN_IDX.to_owned(), "1".to_owned())),
            &["told-wrong"],
        ),
        (
            "all",
            |report| drop(report.env.insert(names::VISIBLE_DEVICES.to_owned(), "all".to_owned())),
            &["not-void"],
        ),
        (
            "asked for nothing",
            |report| (report.pod_uid, report.id) = ("u-z".to_owned(), "id-z".to_owned()),
            &["ran-without-allocation"],
        ),
    ];
    for (name, edit, expected) in table {
        let mut facts = begin();
        facts.push((1, with(report("a", 10), edit)));
        facts.push((1, with(report("a", 10), edit)));
        check(name, facts, expected);
    }
    let mut facts = begin();
    facts.push((1, with(report("a", 10), |report| report.node = "n2".to_owned())));
    check("another node", facts, &["ran-elsewhere"]);
}

/// The container must also run on the GPU of its allocation.
#[test]
fn a_whole_gpu_container_has_no_share_variables() {
    let placed = |uuid: String| {
        let mut pod = running(bound("a", "n1", 0, 16));
        pod.request = whole_request(Vendor::Nvidia, &[(ContainerKind::App, 1)]);
        if let Held::Allocation(allocation) = &mut pod.held {
            allocation.gpus[0].whole = true;
            allocation.gpus[0].uuid.clone_from(&uuid);
            allocation
                .containers
                .values_mut()
                .for_each(|shares| shares[0].uuid.clone_from(&uuid));
        }
        pod
    };
    let silent = |gpus: &[u32], visible: &str| {
        with(report("a", 16), |report| {
            report.env.retain(|name, _| name == names::VISIBLE_DEVICES);
            report.env.insert(names::VISIBLE_DEVICES.to_owned(), visible.to_owned());
            report.gpus = gpus.to_vec();
        })
    };
    let unnamed = Pod {
        held: Held::Nothing,
        ..placed(uuid("n1", 0))
    };
    for (name, pod, fact, expected) in [
        ("sound", placed(uuid("n1", 0)), silent(&[0], "void"), &[][..]),
        ("another GPU", placed(uuid("n1", 0)), silent(&[1], "void"), &["ran-elsewhere"]),
        ("all", placed(uuid("n1", 0)), silent(&[0], "all"), &["not-void"]),
        ("the kubelet's choice", unnamed, silent(&[1], "void"), &[]),
    ] {
        check(name, vec![(1, there(pod)), (1, fact)], expected);
    }
}

#[test]
fn containers_beyond_a_gpu_are_found_by_their_own_reports_alone() {
    // On paper, b was bound after a was gone. But a's container still ran.
    let facts = |end: i64| {
        vec![
            (1, there(running(bound("a", "n1", 0, 10)))),
            (1, Fact::Report(report("a", 10))),
            (1, Fact::PodGone(ended(bound("a", "n1", 0, 10)))),
            (1, there(pending("b", 10))),
            (1, there(bound("b", "n1", 0, 10))),
            (end, with(report("a", 10), |report| report.running = false)),
            (2 - end, Fact::Report(report("b", 10))),
        ]
    };
    check("in time", facts(2), &[]);
    let mut late = facts(2);
    late.swap(5, 6);
    let outcome = check("too late", late, &["gpu-overcommitted-by-reports"]);
    assert!(outcome.findings[0].until.is_some());
    assert!(
        outcome.findings[0]
            .what
            .to_string()
            .contains("containers with 20480 MiB ran on it at once")
    );
}

#[test]
fn an_early_report_waits_for_its_binding() {
    check(
        "early",
        vec![
            (1, there(pending("a", 10))),
            (1, Fact::Report(report("a", 10))),
            (1, there(running(bound("a", "n1", 0, 10)))),
        ],
        &[],
    );
    check(
        "early, and elsewhere",
        vec![
            (1, Fact::Report(report("a", 10))),
            (1, there(running(bound("a", "n1", 1, 10)))),
        ],
        &["ran-elsewhere", "told-wrong"],
    );
    check("never", vec![(1, Fact::Report(report("a", 10)))], &["reports-unmatched"]);
    check(
        "late",
        vec![
            (1, there(running(bound("a", "n1", 0, 10)))),
            (1, Fact::PodGone(ended(bound("a", "n1", 0, 10)))),
            (50, with(report("a", 10), |report| report.gpus = vec![1])),
        ],
        &["ran-elsewhere"],
    );
}

/// The memory of a pod that vanished while it ran stays in doubt until the end of the pod is seen.
#[test]
fn a_vanished_pods_memory_stays_in_doubt() {
    let vanish = |then: Vec<(i64, Fact)>| {
        let mut facts = vec![
            (1, there(running(bound("a", "n1", 0, 10)))),
            (1, there(pending("b", 10))),
            (1, Fact::PodGone(running(bound("a", "n1", 0, 10)))),
        ];
        facts.extend(then);
        facts
    };
    check(
        "at once",
        vanish(vec![(1, there(bound("b", "n1", 0, 10)))]),
        &["given-before-its-end-was-seen"],
    );
    check("another GPU", vanish(vec![(1, there(bound("b", "n1", 1, 10)))]), &[]);
    check(
        "as long as the extender waits",
        vanish(vec![(10, there(bound("b", "n1", 0, 10)))]),
        &[],
    );
    check(
        "while the agent says that it is held",
        vanish(vec![(1, Fact::Node(held(10))), (12, there(bound("b", "n1", 0, 10)))]),
        &["given-before-its-end-was-seen", "memory-held-now"],
    );
    check(
        "when the agent says that it is free",
        vanish(vec![
            (1, Fact::Node(held(10))),
            (1, Fact::Node(held(0))),
            (1, there(bound("b", "n1", 0, 10))),
        ]),
        &[],
    );
    let outcome = check(
        "reports decide",
        vanish(vec![(0, Fact::Report(report("a", 10))), (1, there(bound("b", "n1", 0, 10)))]),
        &[],
    );
    assert_eq!(outcome.worst(), None);
}

#[test]
fn what_two_watches_wrote_down_out_of_order_is_no_finding() {
    let at = |revision, ms| Moment {
        revision: Some(revision),
        at_ms: Some(ms),
    };
    let facts = |node_revision| {
        let mut audit = Audit::new(AuditLimits::default());
        audit.take(at(1, 0), Fact::Node(held(10)));
        audit.take(at(5, 10), there(pending("b", 10)));
        audit.take(at(9, 20), there(bound("b", "n1", 0, 10)));
        audit.take(at(node_revision, 21), Fact::Node(held(0)));
        audit.take(at(node_revision + 10, 22), Fact::Node(held(0)));
        ids(&audit.finish(None))
    };
    assert_eq!(facts(8), <[&str; 0]>::default(), "free before it was given");
    assert_eq!(facts(10), ["given-before-its-end-was-seen"]);
    let mut audit = Audit::new(AuditLimits::default());
    audit.take(at(1, 0), Fact::Node(divvy_node("n1", &[16])));
    audit.take(at(9, 20), there(bound("a", "n1", 1, 10)));
    audit.take(at(8, 21), Fact::Node(divvy_node("n1", &[16, 16])));
    assert_eq!(
        ids(&audit.finish(None)),
        <[&str; 0]>::default(),
        "a GPU that was added before"
    );
}

#[test]
fn what_is_left_behind_is_found() {
    let deleting = |delete_by_ms| Fact::Pod {
        pod: running(bound("a", "n1", 0, 10)),
        delete_by_ms: Some(delete_by_ms),
    };
    let gone = || {
        vec![
            (1, there(running(bound("a", "n1", 0, 10)))),
            (1, Fact::Report(report("a", 10))),
            (1, Fact::PodGone(ended(bound("a", "n1", 0, 10)))),
        ]
    };
    let mut outlived = gone();
    outlived.push((61, there(pending("b", 1))));
    let mut outlived_and_ended = gone();
    outlived_and_ended.push((61, with(report("a", 10), |report| report.running = false)));
    let mut in_time = gone();
    in_time.push((60, with(report("a", 10), |report| report.running = false)));
    for (name, facts, expected) in [
        (
            "held for a minute",
            vec![(1, Fact::Node(held(3))), (61, there(pending("b", 1)))],
            &["memory-held-long"][..],
        ),
        (
            "held until it was not",
            vec![(1, Fact::Node(held(3))), (61, Fact::Node(held(0)))],
            &["memory-held-long"],
        ),
        ("held shortly", vec![(1, Fact::Node(held(3))), (59, Fact::Node(held(0)))], &[]),
        (
            "held at the end",
            vec![(1, Fact::Node(held(3))), (59, there(pending("b", 1)))],
            &["memory-held-now"],
        ),
        (
            "one after the other",
            vec![
                (1, Fact::Node(held(3))),
                (40, Fact::Node(held(5))),
                (1, Fact::Node(held(2))),
                (1, Fact::Node(held(0))),
                (1, Fact::Node(held(2))),
                (40, Fact::Node(held(0))),
            ],
            &[],
        ),
        (
            "deleted and there",
            vec![(1, deleting(1_000_000)), (60, there(pending("b", 1)))],
            &["stuck-deleting"],
        ),
        (
            "deleted just now",
            vec![(1, deleting(1_002_000)), (60, there(pending("b", 1)))],
            &[],
        ),
        ("outlived its pod", outlived, &["container-outlived-pod"]),
        ("outlived its pod, and ended", outlived_and_ended, &["container-outlived-pod"]),
        ("ended in time", in_time, &[]),
    ] {
        check(name, facts, expected);
    }
}

#[test]
fn a_gap_is_said_and_what_vanished_in_it_is_gone() {
    let list = |why: Option<&str>| Fact::ListBegins {
        kind: WatchedKind::Pods,
        why: why.map(str::to_owned),
    };
    let end = || Fact::ListEnds { kind: WatchedKind::Pods };
    let outcome = check(
        "gap",
        vec![
            (1, list(None)),
            (1, there(running(bound("a", "n1", 0, 10)))),
            (1, end()),
            (1, there(running(bound("b", "n1", 0, 6)))),
            (5, list(Some("too old"))),
            // Between these two facts, both would be counted.
            (1, there(running(bound("c", "n1", 0, 10)))),
            (1, there(running(bound("b", "n1", 0, 6)))),
            (1, end()),
            (1, there(running(bound("d", "n1", 0, 1)))),
        ],
        &["history-gap", "gpu-overcommitted"],
    );
    let gap = &outcome.findings[0];
    assert_eq!(
        (gap.at.revision, gap.until.and_then(|until| until.revision)),
        (Some(105), Some(109))
    );
    // Counted too early, a, b, and c together would exceed the GPU before that.
    assert_eq!(outcome.findings[1].at.revision, Some(110));
    assert_eq!(gap.what.to_string(), "changes of pods were not recorded for a while: too old");
    check(
        "no end",
        vec![(1, list(None)), (1, there(bound("a", "n1", 0, 10)))],
        &["list-unfinished"],
    );
    let unknown = audit(vec![
        (1, there(bound("a", "n1", 0, 10))),
        (1, there(running(bound("a", "n1", 0, 10)))),
    ]);
    assert_eq!(ids(&unknown), ["node-unknown"]);
    assert_eq!(unknown.worst(), Some(FindingLevel::Doubt));
    assert_eq!(
        unknown.findings[0].what.to_string(),
        "1 pod was allocated GPUs of node n1, about which the history says nothing"
    );
    let too_late = audit(vec![
        (1, there(bound("a", "n1", 0, 10))),
        (1, Fact::PodGone(bound("a", "n1", 0, 10))),
        (1, Fact::Node(divvy_node("n1", &[16]))),
    ]);
    assert_eq!(ids(&too_late), ["node-unknown"]);
}

#[test]
fn where_all_nodes_were_listed_an_unknown_node_does_not_exist() {
    let nodes = |what: fn(WatchedKind) -> Fact| (1, what(WatchedKind::Nodes));
    let begins = |kind| Fact::ListBegins { kind, why: None };
    let gone = audit(vec![
        nodes(begins),
        (1, Fact::Node(divvy_node("n2", &[16]))),
        nodes(|kind| Fact::ListEnds { kind }),
        (1, there(bound("a", "n1", 0, 10))),
        (1, there(bound("b", "n1", 0, 6))),
    ]);
    assert_eq!(ids(&gone), ["node-unknown"]);
    let what = &gone.findings[0].what;
    assert_eq!(
        (what.to_string(), what.advice().map(|(_, next)| next)),
        (
            "2 pods were allocated GPUs of node n1, which does not exist, or no longer exists".to_owned(),
            Some("Kubernetes deletes the pods of a deleted node; list those that are left: kubectl get pods -A --field-selector spec.nodeName=n1".to_owned())
        )
    );
}

#[test]
fn only_a_history_without_gpu_memory_is_empty() {
    let cpu = || Node {
        inventory: None,
        capacity_units: 0,
        capacity_gpus: 0,
        ..divvy_node("cpu", &[])
    };
    let pod = || Pod {
        node: Some("cpu".to_owned()),
        ..pending("web", 0)
    };
    for (facts, expected) in [
        (vec![], true),
        (vec![Fact::Node(cpu())], true),
        (vec![Fact::Node(cpu()), there(pod())], true),
        (vec![there(pending("a", 10))], true),
        (vec![Fact::Node(divvy_node("n1", &[16]))], false),
        (
            vec![Fact::Node(divvy_node("n1", &[16])), Fact::NodeGone("n1".to_owned())],
            false,
        ),
        (vec![there(bound("a", "n1", 0, 10))], false),
    ] {
        let outcome = audit(facts.into_iter().map(|fact| (1, fact)).collect());
        assert_eq!(outcome.is_empty(), expected, "{outcome:?}");
    }
    let two = audit(vec![(1, Fact::Node(cpu())), (1, Fact::Node(divvy_node("n1", &[16])))]);
    assert_eq!((two.summary.nodes_seen, two.summary.nodes), (2, 1));
}

#[test]
fn findings_beyond_what_anybody_reads_are_counted() {
    let mut facts = vec![(0, Fact::Node(divvy_node("n1", &[16, 16])))];
    for i in 0..Audit::MOST_FINDINGS + 7 {
        let pod = Pod {
            node: None,
            ..bound(&format!("p{i}"), "n1", 0, 1)
        };
        facts.push((0, there(pod)));
    }
    let outcome = audit(facts);
    assert_eq!(outcome.findings.len(), Audit::MOST_FINDINGS);
    assert_eq!(outcome.omitted, BTreeMap::from([("allocated-unbound", 7)]));
}

/// An event that can happen to one of a few pods.
#[derive(Debug, Clone)]
enum Step {
    State {
        pod: usize,
        running: bool,
        ended: bool,
    },
    Gone {
        pod: usize,
    },
    Capacity {
        sizes: [u64; 2],
    },
    /// A gap in the history, during which this pod vanished.
    Relist {
        gone: usize,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..12usize, any::<bool>(), any::<bool>()).prop_map(|(pod, running, ended)| Step::State { pod, running, ended }),
        3 => (0..12usize).prop_map(|pod| Step::Gone { pod }),
        1 => [1..20u64, 1..20u64].prop_map(|sizes| Step::Capacity { sizes }),
        1 => (0..12usize).prop_map(|gone| Step::Relist { gone }),
    ];
    prop::collection::vec(step, 0..120)
}

proptest! {
    /// The naive recount: after each fact, for each GPU, sum over all existing pods that have not ended.
    #[test]
    fn overcommitment_is_what_a_naive_recount_says(sizes in prop::collection::vec((0..2usize, 0..9u64), 12), steps in steps()) {
        let pod_of = |pod: usize| bound(&format!("p{pod}"), "n1", sizes[pod].0, sizes[pod].1);
        let mut pods: BTreeMap<usize, (bool, bool)> = BTreeMap::new();
        let mut capacity = [16, 16];
        // Per GPU, whether it is overcommitted now; and all episodes as (first revision, end, peak, ran).
        let mut over: [Option<usize>; 2] = [None, None];
        let mut episodes: Vec<(u64, Option<u64>, u64, bool)> = Vec::new();
        let mut audit = Audit::new(AuditLimits::default());
        let mut revision = 1;
        let moment = |revision: u64| Moment { revision: Some(revision), at_ms: None };
        audit.take(moment(revision), Fact::Node(divvy_node("n1", &capacity)));
        for step in steps {
            revision += 1;
            match step {
                Step::State { pod, running, ended } => {
                    let mut state = pod_of(pod);
                    state.phase = if ended { Phase::Failed } else { Phase::Running };
                    state.container_running = running;
                    pods.insert(pod, (running, ended && !running));
                    audit.take(moment(revision), there(state));
                }
                Step::Gone { pod } => {
                    pods.remove(&pod);
                    audit.take(moment(revision), Fact::PodGone(pod_of(pod)));
                }
                Step::Capacity { sizes } => {
                    capacity = sizes;
                    audit.take(moment(revision), Fact::Node(divvy_node("n1", &capacity)));
                }
                Step::Relist { gone } => {
                    pods.remove(&gone);
                    let kind = WatchedKind::Pods;
                    audit.take(moment(revision), Fact::ListBegins { kind, why: None });
                    for (pod, (running, ended)) in &pods {
                        let mut state = pod_of(*pod);
                        state.phase = if *ended { Phase::Failed } else { Phase::Running };
                        state.container_running = *running;
                        revision += 1;
                        audit.take(moment(revision), there(state));
                    }
                    revision += 1;
                    audit.take(moment(revision), Fact::ListEnds { kind });
                }
            }
            for gpu in 0..2 {
                let live = pods.iter().filter(|(pod, (_, ended))| sizes[**pod].0 == gpu && !ended);
                let sum: u64 = live.clone().map(|(pod, _)| sizes[*pod].1).sum();
                let running: u64 = live.filter(|(_, (running, _))| *running).map(|(pod, _)| sizes[*pod].1).sum();
                match over[gpu] {
                    None if sum > capacity[gpu] => {
                        over[gpu] = Some(episodes.len());
                        episodes.push((revision, None, sum, running > capacity[gpu]));
                    }
                    Some(number) if sum > capacity[gpu] => {
                        let (_, _, peak, ran) = &mut episodes[number];
                        let now = (running > capacity[gpu], sum);
                        if now > (*ran, *peak) {
                            (*ran, *peak) = now;
                        }
                    }
                    Some(number) => {
                        episodes[number].1 = Some(revision);
                        over[gpu] = None;
                    }
                    None => {}
                }
            }
        }
        let found: Vec<_> = audit.finish(None).findings.into_iter().filter_map(|finding| match finding.what {
            FindingKind::Overcommitted { booked, ran, .. } => Some((finding.at.revision?, finding.until.and_then(|until| until.revision), booked.0 / 1024, ran)),
            _ => None,
        }).collect();
        episodes.sort();
        let mut found = found;
        found.sort();
        prop_assert_eq!(found, episodes);
    }
}

/// The findings about a history of pods on a node with one shared GPU and two whole AMD GPUs.
fn on_whole_gpus(pods: &[Pod]) -> Vec<&'static str> {
    let mut node = divvy_node("n1", &[16]);
    add_amd(&mut node, 2);
    let mut audit = Audit::new(AuditLimits::default());
    let facts = [Fact::Node(node)].into_iter().chain(pods.iter().cloned().map(there));
    for (at, fact) in facts.enumerate() {
        let at_ms = Some(1_000_000 + at as i64 * 1000);
        let revision = Some(100 + at as u64);
        audit.take(Moment { revision, at_ms }, fact);
    }
    audit.finish(None).findings.iter().map(|finding| finding.what.id()).collect()
}

/// GPUs that the kubelet chose are not a finding.
#[test]
fn a_whole_gpu_has_one_pod() {
    let unnamed = Pod {
        node: Some("n1".to_owned()),
        ..amd_pending("unnamed", 1)
    };
    let share = running(bound("share", "n1", 0, 16));
    let [a, b] = ["a", "b"].map(|name| running(amd_pod(name, "n1", &[1])));
    let fine: [&[Pod]; 4] = [
        &[a.clone(), share.clone()],
        &[unnamed],
        &[gpushare_pod("old", "n1", 0, 4), a.clone()],
        &[ended(a.clone()), b.clone()],
    ];
    for pods in fine {
        assert_eq!(on_whole_gpus(pods), Vec::<&str>::new(), "{pods:?}");
    }
    let twice = on_whole_gpus(&[a.clone(), b]);
    assert_eq!(twice.len(), 1, "{twice:?}");
    // A GPU that the node never had, and gpushare's index of a GPU that is not shared.
    let elsewhere = running(amd_pod("x", "n1", &[7]));
    assert_eq!(on_whole_gpus(&[elsewhere]).len(), 1);
    assert_eq!(on_whole_gpus(&[gpushare_pod("old", "n1", 1, 4)]).len(), 1);
}
