//! Pods that wait: what is in their way, and how long they waited.

use std::num::NonZeroU32;

use divvy_exposition::MetricsFormat;
use divvy_extender::core::{ExtenderCore, Got, Posted, WAITS_S};
use divvy_extender::metrics::{ExtenderMetrics, Scrape};
use divvy_model::{GpuRules, MemoryUnit, Pod};

use crate::values::*;

/// Return the reasons that have pods, each with the number of pods.
fn waiting(core: &ExtenderCore) -> Vec<(String, u64)> {
    let text = ExtenderMetrics::default().text(&Scrape::of(core, None, true), MetricsFormat::Text);
    let samples: Vec<(String, u64)> = text
        .lines()
        .filter_map(|line| line.strip_prefix("divvy_pods_waiting{reason=\"")?.split_once("\"} "))
        .map(|(reason, count)| (reason.to_owned(), count.parse().expect("a number")))
        .collect();
    assert_eq!(samples.len(), 6, "every reason has a sample: {text}");
    samples.into_iter().filter(|(_, count)| *count > 0).collect()
}

fn one(reason: &str) -> Vec<(String, u64)> {
    vec![(reason.to_owned(), 1)]
}

fn with_model(mut pod: Pod, model: &str) -> Pod {
    let rules = GpuRules::from_annotations(&[("divvy.dev/gpu-model".to_owned(), model.to_owned())].into());
    pod.request.rules = rules.expect("readable").map(|rules| std::sync::Arc::new(Ok(rules)));
    pod
}

#[test]
fn a_pod_waits_for_what_may_change_soonest_on_any_node() {
    let mut away = node("away", &[32]);
    let mut other_unit = node("other-unit", &[32]);
    if let (Some(Ok(away)), Some(Ok(other))) = (&mut away.inventory, &mut other_unit.inventory) {
        away.unschedulable = true;
        other.unit = "256MiB".parse::<MemoryUnit>().expect("a unit");
    }
    let nodes = [
        node("small", &[4, 4]),
        node("full", &[16]),
        away,
        other_unit,
        gpushare_node("cpu", 0, 0),
    ];
    let full = gpushare_pod("c", "full", 0, 16);
    let q = pod("q", 8);
    let cases: [(&[&str], &Pod, &str); 9] = [
        (&["small", "full", "away"], &q, "no_room"),
        (&["cpu", "small", "away"], &q, "node_not_ready"),
        (&["small", "nowhere"], &q, "node_not_ready"),
        (&["small", "other-unit"], &q, "unit"),
        (&["small", "cpu"], &q, "no_gpu_fits"),
        (&["full"], &pod("q", 17), "no_gpu_fits"),
        (&["small", "cpu"], &with_model(pod("q", 1), "A100*"), "model"),
        (&["full", "small"], &pod("q", 3), "other"),
        (&[], &q, "other"),
    ];
    for (asked, pod, reason) in cases {
        let mut core = synced(&nodes, &[full.clone(), pod.clone()]);
        assert_eq!(waiting(&core), one("other"), "not known yet");
        let answer = core.filter_at(pod, asked.iter().copied(), at(0));
        assert_eq!(waiting(&core), one(reason), "{asked:?} {answer:?}");
        // A sweep looks at all nodes, but kube-scheduler knows on which of them the pod may be.
        core.sweep(at(1));
        assert_eq!(waiting(&core), one(reason), "{asked:?}");
    }
}

/// A replica that the scheduler does not ask finds out on its own why pods wait.
#[test]
fn an_unasked_replica_checks_some_requests_per_sweep() {
    // Two pods for each request.
    let pods: Vec<Pod> = (0..20).map(|number| pod(&format!("p{number:02}"), number / 2 + 1)).collect();
    let mut core = synced(&[node("full", &[16])], &pods);
    core.index_mut().apply_pod(gpushare_pod("c", "full", 0, 16));
    let mut known = Vec::new();
    for sweep in 0..4 {
        core.sweep(at(sweep));
        known.push(
            waiting(&core)
                .iter()
                .find(|(reason, _)| reason == "no_room")
                .map_or(0, |(_, count)| *count),
        );
    }
    assert_eq!(known, [8, 16, 20, 20]);
    // What has changed since is seen when their turn comes again.
    core.index_mut().delete_pod("u-c");
    for sweep in 4..8 {
        core.sweep(at(sweep));
    }
    assert_eq!(waiting(&core), [("other".to_owned(), 20)]);
}

#[test]
fn a_pod_does_not_wait_once_it_is_bound_deleted_or_gone() {
    let ended: [fn(&mut ExtenderCore); 4] = [
        |core| core.index_mut().apply_pod(gpushare_pod("q", "n", 0, 8)),
        |core| core.index_mut().delete_pod("u-q"),
        |core| core.index_mut().reset_pods(vec![]),
        |core| {
            core.index_mut().apply_pod(Pod {
                deleting: true,
                ..pod("q", 8)
            })
        },
    ];
    for end in ended {
        let mut core = synced(&[node("n", &[4])], &[pod("q", 8), pod("web", 0)]);
        core.filter_at(&pod("q", 8), ["n"], at(0)).expect("synced");
        assert_eq!(waiting(&core), one("no_gpu_fits"));
        end(&mut core);
        assert_eq!(waiting(&core), []);
        // An answer that comes late changes nothing.
        core.filter_at(&pod("q", 8), ["n"], at(0)).expect("synced");
        assert_eq!(waiting(&core), []);
    }
}

/// The time begins with the creation of the pod.
#[test]
fn each_pods_time_to_bind_counts_once() {
    let created = |name: &str, units: u64, seconds_ago: u64| Pod {
        created_s: u32::try_from(at(0).unix_ns / 1_000_000_000 - seconds_ago)
            .ok()
            .and_then(NonZeroU32::new),
        ..pod(name, units)
    };
    let pods = [
        created("a", 1, 0),
        created("b", 1, 90),
        created("c", 1, 7200),
        created("web", 0, 90),
        pod("unknown", 1),
        Pod {
            created_s: Some(NonZeroU32::MAX),
            ..pod("future", 1)
        },
        Pod {
            created_s: Some(NonZeroU32::MIN),
            ..pod("past", 1)
        },
    ];
    let mut core = synced(&[node("n", &[16])], &pods);
    for pod in &pods {
        let (op, binding) = one_post(core.begin_bind(args(pod, "n"), at(0)).1);
        if pod.name == "b" {
            // The answer is lost, but the Binding was carried out.
            let (op, ..) = one_get(core.posted(op, lost(), at(0)));
            assert_eq!(
                one_answer(core.got(op, Got::Found(Box::new(bound(pod, &binding))), at(0))),
                Ok(())
            );
        } else {
            assert_eq!(one_answer(core.posted(op, Posted::Created, at(0))), Ok(()));
        }
        core.index_mut().apply_pod(bound(pod, &binding));
        // The same bind again.
        assert_eq!(one_answer(core.begin_bind(args(pod, "n"), at(0)).1), Ok(()));
    }
    let waits = core.waits();
    let ends: Vec<(u16, u64)> = WAITS_S.into_iter().zip(waits.pods).filter(|(_, pods)| *pods > 0).collect();
    assert_eq!(ends, [(1, 2), (120, 1)], "a and the one from the future, and b");
    assert_eq!(waits.pods[WAITS_S.len()], 2, "c and the one from 1970");
    let text = ExtenderMetrics::default().text(&Scrape::of(&core, None, true), MetricsFormat::Text);
    for line in [
        "divvy_pod_wait_seconds_count 5",
        "divvy_pod_wait_seconds_bucket{le=\"1.0\"} 2",
        "divvy_pod_wait_seconds_bucket{le=\"60.0\"} 2",
        "divvy_pod_wait_seconds_bucket{le=\"120.0\"} 3",
        "divvy_pod_wait_seconds_bucket{le=\"3600.0\"} 3",
        "divvy_pod_wait_seconds_bucket{le=\"+Inf\"} 5",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}

#[test]
fn fragments_are_the_free_memory_that_is_in_too_small_pieces() {
    let ratio = |core: &ExtenderCore| {
        let text = ExtenderMetrics::default().text(&Scrape::of(core, None, true), MetricsFormat::Text);
        let line = text.lines().find_map(|line| line.strip_prefix("divvy_fragmentation_ratio "));
        line.expect("always there").to_owned()
    };
    // Free: 6 and 12 units.
    let mut core = synced(
        &[node("n", &[16, 16])],
        &[gpushare_pod("a", "n", 0, 10), gpushare_pod("b", "n", 1, 4)],
    );
    assert_eq!(ratio(&core), "0.166666", "6 is too little for a: 6 / (2 * 18)");
    core.index_mut().apply_pod(pod("q", 8));
    assert_eq!(ratio(&core), "0.222222", "(6 + 0 + 6) / (3 * 18)");
    core.index_mut().delete_pod("u-q");
    core.index_mut().delete_pod("u-a");
    core.index_mut().delete_pod("u-b");
    assert_eq!(ratio(&core), "0.0", "no pod asks");
    core.index_mut().apply_pod(pod("q", 17));
    assert_eq!(ratio(&core), "1.0");
    core.index_mut().delete_node("n");
    assert_eq!(ratio(&core), "0.0", "nothing is free");
}
