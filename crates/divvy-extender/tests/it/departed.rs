//! Pods whose objects vanish while their containers run.

use std::time::Duration;

use divvy_extender::core::{CoreTiming, ExtenderCore, FilterError, Posted};
use divvy_model::{MiB, Node, Pod};
use divvy_testbed::api::{ApiServer, ApiServerOptions, DeleteOptions, PatchKind};
use serde_json::json;

use crate::server::{Cluster, create_node, create_pod};
use crate::values::*;

const LIMIT_MS: u64 = 10_000;

fn running(name: &str, node: &str, units: u64) -> Pod {
    Pod {
        container_running: true,
        ..gpushare_pod(name, node, 0, units)
    }
}

/// A node whose inventory says how much is held on each GPU, in units.
fn holding(sizes: &[u64], held: &[u64]) -> Node {
    let mut node = node("n1", sizes);
    if let Some(Ok(inventory)) = &mut node.inventory {
        for (gpu, units) in inventory.gpus.iter_mut().zip(held) {
            gpu.held = MiB(units * 1024);
        }
    }
    node
}

fn fits(core: &mut ExtenderCore, pod: &Pod, ms: u64) -> Result<bool, FilterError> {
    let answer = core.filter_at(pod, ["n1"], at(ms));
    answer.map(|answer| !answer.passed.is_empty())
}

/// One way in which a pod vanishes, at `ms`.
type Way = fn(&mut ExtenderCore, &Pod, u64);

fn ways() -> [(&'static str, Way); 4] {
    [
        ("deleted", |core, old, ms| {
            core.index_mut().delete_pod(&old.uid);
            core.sweep(at(ms));
        }),
        ("missing from a list", |core, old, ms| {
            let others = core
                .index()
                .ledger()
                .pods()
                .filter(|pod| pod.uid != old.uid)
                .cloned()
                .collect();
            core.index_mut().reset_pods(others);
            core.sweep(at(ms));
        }),
        ("replaced under its name", |core, old, ms| {
            let mut new = pod(&old.name, 1);
            new.uid = "u-second".to_owned();
            core.index_mut().apply_pod(new);
            core.sweep(at(ms));
        }),
        ("said to be gone by the API server", |core, old, ms| {
            core.index_mut().ledger_mut().bury_pod(&old.uid);
            core.sweep(at(ms));
        }),
    ]
}

/// The pod vanished while its container ran. Its memory is given to another pod only after the time limit.
#[test]
fn a_vanished_pods_memory_waits_for_the_limit() {
    assert_eq!(CoreTiming::default().departed_ns, LIMIT_MS * MS);
    for (way, vanish) in ways() {
        for shared in [node("n1", &[8]), gpushare_node("n1", 8, 1)] {
            let (old, q) = (running("old", "n1", 6), pod("q", 4));
            let mut core = synced(&[shared], &[old.clone(), q.clone()]);
            assert_eq!(fits(&mut core, &q, 900), Ok(false), "it is there");
            vanish(&mut core, &old, 1_000);
            assert_eq!(free(&core, "n1"), [2], "{way}");
            for ms in [1_000, 1_000 + LIMIT_MS - 1] {
                assert_eq!(
                    fits(&mut core, &q, ms).map_err(|error| error.to_string()),
                    Err(
                        "no node has room yet: node n1 keeps 6144 MiB of GPU 0 for pod default/old (deleted, container was running) until \
                         its agent reports that the container has ended, or for at most 10 s; kube-scheduler will try again"
                            .to_owned()
                    ),
                    "{way}"
                );
                assert_eq!(
                    one_refusal(core.begin_bind(args(&q, "n1"), at(ms)).1),
                    "pod default/q: node n1 has no GPU with 4 units (4096 MiB) free: GPU 0 has 2048 of 8192 MiB free and still counts \
                     default/old 6144 MiB (deleted, container was running)",
                    "{way}"
                );
            }
            // The other free memory is allocated, and a pod that would not fit anyway is refused as usual.
            assert_eq!(fits(&mut core, &pod("small", 2), 2_000), Ok(true));
            assert_eq!(fits(&mut core, &pod("large", 9), 2_000), Ok(false), "{way}");
            assert_eq!(core.counts().departed, 1);
            assert_eq!(fits(&mut core, &q, 1_000 + LIMIT_MS), Ok(true), "{way}");
            one_post(core.begin_bind(args(&q, "n1"), at(1_000 + LIMIT_MS)).1);
        }
    }
}

#[test]
fn a_bind_alone_sees_that_the_limit_is_over() {
    let (old, q) = (running("old", "n1", 8), pod("q", 4));
    let mut core = synced(&[node("n1", &[8])], &[old.clone(), q.clone()]);
    core.index_mut().delete_pod(&old.uid);
    one_answer(core.begin_bind(args(&q, "n1"), at(0)).1).expect_err("kept");
    let (op, _) = one_post(core.begin_bind(args(&q, "n1"), at(LIMIT_MS)).1);
    assert_eq!(one_answer(core.posted(op, Posted::Created, at(LIMIT_MS + 1))), Ok(()));
}

/// The containers had ended or never ran, and the memory is freed when the pod object is deleted.
#[test]
fn a_pod_without_running_containers_frees_its_memory() {
    let ended = Pod {
        deleting: true,
        ..gpushare_pod("old", "n1", 0, 8)
    };
    let pending = gpushare_pod("old", "n1", 0, 8);
    let nothing = Pod {
        held: divvy_model::Held::Nothing,
        ..running("old", "n1", 8)
    };
    for old in [ended, pending, nothing] {
        for (way, vanish) in ways() {
            let q = pod("q", 8);
            let mut core = synced(&[node("n1", &[8])], &[old.clone(), q.clone()]);
            vanish(&mut core, &old, 1_000);
            assert_eq!(fits(&mut core, &q, 1_000), Ok(true), "{way}");
            assert_eq!(core.counts().departed, 0);
        }
    }
}

/// The agent's report takes precedence, whether it arrives before or after the deletion of the pod.
#[test]
fn what_the_agent_says_is_held_counts_once() {
    let q = pod("q", 8);
    let start = || {
        synced(
            &[node("n1", &[8])],
            &[running("a", "n1", 3), running("b", "n1", 3), q.clone()],
        )
    };
    // After the deletions, one pod after the other.
    let mut core = start();
    for uid in ["u-a", "u-b"] {
        core.index_mut().delete_pod(uid);
    }
    for (held, free_units, departed) in [(0, 2, 2), (3, 2, 2), (6, 2, 0), (3, 5, 0), (0, 8, 0)] {
        core.index_mut().apply_node(&holding(&[8], &[held]));
        assert_eq!(free(&core, "n1"), [free_units], "{held} held");
        assert_eq!(core.index().ledger().departed().count(), departed, "{held} held");
    }
    assert_eq!(fits(&mut core, &q, 0), Ok(true));
    // Before the deletions: the watch of nodes was faster.
    let mut core = start();
    core.index_mut().apply_node(&holding(&[8], &[3]));
    core.index_mut().delete_pod("u-a");
    assert_eq!(free(&core, "n1"), [2], "b's three, and the three that are held");
    assert_eq!(core.index().ledger().departed().count(), 0);
    core.index_mut().apply_node(&holding(&[8], &[0]));
    assert_eq!(free(&core, "n1"), [5]);
}

#[test]
fn nothing_is_kept_of_a_node_that_is_gone_or_is_another_one() {
    for another in [false, true] {
        let (old, q) = (running("old", "n1", 8), pod("q", 8));
        let mut core = synced(&[node("n1", &[8])], &[old.clone(), q.clone()]);
        core.index_mut().delete_pod(&old.uid);
        assert_eq!(free(&core, "n1"), [0]);
        if !another {
            core.index_mut().delete_node("n1");
        }
        let mut new = node("n1", &[8]);
        new.uid = "another".to_owned();
        core.index_mut().apply_node(&new);
        assert_eq!(fits(&mut core, &q, 1_000), Ok(true), "{another}");
    }
}

#[test]
fn a_node_that_frees_nothing_affects_only_itself() {
    let q = pod("q", 8);
    for (held, passed) in [(0, &[0, 1][..]), (8, &[1]), (1 << 40, &[1])] {
        let mut core = synced(&[holding(&[8], &[held]), node("n2", &[8])], std::slice::from_ref(&q));
        let answer = core.filter_at(&q, ["n1", "n2"], at(0)).expect("an answer");
        assert_eq!(answer.passed, passed, "{held}");
    }
}

/// Memory of departed pods causes an error only if no other node has room.
#[test]
fn only_departed_pods_in_the_way_are_errors() {
    let q = pod("q", 8);
    let nodes = [node("n1", &[8]), node("n2", &[8])];
    let mut core = synced(&nodes, &[running("old", "n1", 8), running("other", "n2", 8), q.clone()]);
    core.index_mut().delete_pod("u-old");
    let ask = |core: &mut ExtenderCore, nodes: &[&'static str]| core.filter_at(&q, nodes.iter().copied(), at(0));
    assert_eq!(ask(&mut core, &["n2"]).expect("no room there").passed, [0; 0]);
    let error = ask(&mut core, &["n2", "n1"]).expect_err("n1 has room soon").to_string();
    assert!(
        error.contains("node n1 keeps 8192 MiB of GPU 0 for pod default/old"),
        "{error}"
    );
    core.index_mut().delete_pod("u-other");
    core.index_mut().apply_node(&{
        let mut node = node("n2", &[8]);
        node.uid = "another".to_owned();
        node
    });
    assert_eq!(ask(&mut core, &["n1", "n2"]).expect("n2 has room").passed, [1]);
}

#[test]
fn a_pod_that_is_not_gone_after_all_is_counted_once() {
    let old = running("old", "n1", 6);
    let mut core = synced(&[node("n1", &[8])], std::slice::from_ref(&old));
    core.index_mut().delete_pod(&old.uid);
    core.index_mut().apply_pod(old.clone());
    assert_eq!(free(&core, "n1"), [2]);
    assert_eq!(core.index().ledger().departed().count(), 0);
    // There is no event about a doubly allocated GPU when another pod is on it.
    core.index_mut().delete_pod(&old.uid);
    core.index_mut().apply_pod(gpushare_pod("foreign", "n1", 0, 8));
    assert_eq!(core.promised_twice(), []);
}

#[tokio::test]
async fn a_forced_deletion_is_seen_counted_and_told_to_who_waits() {
    let api = ApiServer::new(ApiServerOptions::default());
    create_node(&api, "n", 8, 1);
    let (old, new) = (create_pod(&api, "old", 8), create_pod(&api, "new", 8));
    let mut settings = crate::server::settings();
    settings.timing.departed_ns = 1_000 * MS;
    let cluster = Cluster::with(api.clone(), settings).await;
    assert_eq!(cluster.bind(&old, "n").await, "");
    let running = json!({"status": {"phase": "Running", "containerStatuses": [{"name": "main", "state": {"running": {}}}]}});
    api.patch("pods/status", "default", "old", PatchKind::Merge, &running)
        .expect("a legal status");
    let forced = DeleteOptions {
        grace_period_s: Some(0),
        ..DeleteOptions::default()
    };
    api.delete("pods", "default", "old", &forced).expect("it was there");
    cluster
        .eventually("/metrics", |_, text| text.contains("divvy_ledger_departed 1"))
        .await;
    assert_eq!(cluster.metric("divvy_extender_departed_total").await, Some(1.0));
    let began = tokio::time::Instant::now();
    let question = json!({"Pod": new, "NodeNames": ["n"]});
    let answer = cluster.json("/gpushare-scheduler/filter", question.clone()).await;
    assert!(
        answer["Error"]
            .as_str()
            .is_some_and(|text| text.contains("for pod default/old (deleted, container was running)")),
        "{answer}"
    );
    cluster.filters(&question, true).await;
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_eq!(cluster.bind(&new, "n").await, "");
    assert_eq!(cluster.metric("divvy_ledger_departed").await, Some(0.0));
    assert_eq!(cluster.metric("divvy_extender_departed_total").await, Some(1.0));
}
