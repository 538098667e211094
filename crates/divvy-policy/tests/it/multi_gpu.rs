//! Tests of pods that request memory on several GPUs of one node.

use divvy_model::{Allocation, GpuLink, GpuRules, Health, Held, LinkKind, Node, Phase, Pod, PodRequest};
use divvy_placement::{Ask, Ledger, NodeRefusal};
use divvy_policy::{CacheLimits, Fleet, Policy};

use crate::fixture::*;

fn asking(name: &str, containers: &[u64], gpus: u32) -> Pod {
    let rules = GpuRules {
        gpus: Some(gpus),
        ..GpuRules::default()
    };
    Pod {
        request: PodRequest::new(request(containers).containers, Some(Ok(rules))),
        ..pending(name, 0)
    }
}

/// A node with four GPUs of 16 units. GPUs 0 and 2 are connected by NVLinks, and so are 1 and 3.
fn linked(name: &str) -> Node {
    let mut node = divvy_node(name, &[16, 16, 16, 16]);
    for (a, b) in [(0, 2), (1, 3)] {
        let link = GpuLink {
            peer: uuid(name, b),
            kind: LinkKind::NvLink,
            count: 4,
        };
        edit_gpu(&mut node, a, |gpu| gpu.links.push(link));
    }
    (node.cpu_milli, node.memory_bytes, node.pods) = (96_000, 256 << 30, 110);
    node
}

/// A running pod that has this many units on each of two GPUs.
fn on_two(name: &str, node: &str, gpus: [usize; 2], units: u64) -> Pod {
    let mut pod = divvy_pod(name, node, gpus[0], units);
    if let (Held::Allocation(held), Held::Allocation(other)) = (&mut pod.held, divvy_pod(name, node, gpus[1], units).held) {
        held.gpus.extend(other.gpus);
    }
    pod
}

fn chosen(ledger: &Ledger, node: &str, pod: &Pod) -> Result<Vec<u32>, NodeRefusal> {
    let ask = Ask::of(&pod.request, GIB);
    let found = ledger
        .choose(node, &ask)
        .map(|choice| choice.gpus.iter().map(|gpu| gpu.index).collect());
    assert_eq!(
        ledger.fits(node, &ask, &pod.uid).err(),
        found.as_ref().err().cloned(),
        "{ask} on {node}"
    );
    assert_eq!(ledger.explain(node, &ask).verdict, found, "{ask} on {node}");
    let mut fleet = Fleet::new(Policy::Divvy, CacheLimits::SMALL);
    fleet.follow(ledger);
    let by_policy = fleet.choose(pod, &ask, node, ledger);
    let by_policy = by_policy.map(|choice| choice.gpus.iter().map(|gpu| gpu.index).collect::<Vec<u32>>());
    assert_eq!(by_policy, found.clone().ok(), "{ask} on {node}");
    found
}

#[test]
fn the_best_connected_gpus_with_room_are_chosen() {
    let two = |units: u64| asking("p", &[2 * units], 2);
    let empty = ledger(&[linked("n")], &[]);
    assert_eq!(chosen(&empty, "n", &two(3)), Ok(vec![0, 2]));
    // The fuller pair.
    let used = ledger(&[linked("n")], &[divvy_pod("a", "n", 3, 4)]);
    assert_eq!(chosen(&used, "n", &two(3)), Ok(vec![1, 3]));
    assert_eq!(chosen(&used, "n", &two(13)), Ok(vec![0, 2]));
    // No connected pair has room: the GPUs with room are not connected.
    let pods = [divvy_pod("a", "n", 3, 4), divvy_pod("b", "n", 0, 4)];
    let used = ledger(&[linked("n")], &pods);
    assert_eq!(chosen(&used, "n", &two(13)), Ok(vec![1, 2]));
    assert_eq!(chosen(&used, "n", &asking("p", &[9], 3)), Ok(vec![0, 1, 3]));
    let mut failed = linked("n");
    edit_gpu(&mut failed, 2, |gpu| gpu.health = Health::Failed);
    assert_eq!(chosen(&ledger(&[failed], &[]), "n", &two(3)), Ok(vec![1, 3]));
}

/// GPUs that are preferred come before both.
#[test]
fn one_product_comes_before_the_best_connections() {
    let mut node = linked("n");
    let product = |node: &mut Node, index: usize, model: &str, cc: &str| {
        edit_gpu(node, index, |gpu| {
            gpu.model = model.to_owned();
            gpu.cc = cc.to_owned();
        });
    };
    product(&mut node, 0, "Tesla T4", "7.5");
    product(&mut node, 1, "Tesla T4", "7.5");
    product(&mut node, 2, "NVIDIA A30", "8.0");
    product(&mut node, 3, "NVIDIA A30", "8.0");
    let mixed = ledger(std::slice::from_ref(&node), &[]);
    let found = chosen(&mixed, "n", &asking("p", &[4], 2)).expect("room");
    assert!(found == [0, 1] || found == [2, 3], "{found:?}");
    let mut fast = asking("p", &[4], 2);
    let rules = GpuRules {
        gpus: Some(2),
        prefer: Some(divvy_model::Prefer::Fastest),
        ..GpuRules::default()
    };
    fast.request.rules = Some(std::sync::Arc::new(Ok(rules)));
    assert_eq!(chosen(&mixed, "n", &fast), Ok(vec![2, 3]));
    // Three GPUs are available only with two products. No policy ranks such a set, but the node is still the best.
    let three = asking("p", &[6], 3);
    let ask = Ask::of(&three.request, GIB);
    assert_eq!(chosen(&mixed, "n", &three).map(|found| found.len()), Ok(3));
    let mut fleet = Fleet::new(Policy::Divvy, CacheLimits::SMALL);
    fleet.follow(&mixed);
    assert_eq!(fleet.rank(&three, &ask, ["nx", "n"], &mixed).best, Some(1));
}

#[test]
fn each_gpu_gets_as_much_of_the_pod_and_of_each_container() {
    let ledger = ledger(&[linked("n")], &[]);
    let pod = asking("p", &[4, 0, 2], 2);
    let ask = Ask::of(&pod.request, GIB);
    let Held::Allocation(held) = ledger.choose("n", &ask).expect("room").held(&pod.request, GIB) else {
        panic!("the node has an inventory");
    };
    assert_eq!(
        held.to_json(),
        r#"{"v":1,"gpus":[{"uuid":"GPU-n-0","memMiB":3072,"cores":0,"whole":false},{"uuid":"GPU-n-2","memMiB":3072,"cores":0,"whole":false}],"containers":{"c0":[{"uuid":"GPU-n-0","memMiB":2048,"cores":0},{"uuid":"GPU-n-2","memMiB":2048,"cores":0}],"c2":[{"uuid":"GPU-n-0","memMiB":1024,"cores":0},{"uuid":"GPU-n-2","memMiB":1024,"cores":0}]}}"#
    );
    assert_eq!(Allocation::parse(&held.to_json()).expect("our own form"), held);
}

#[test]
fn a_refusal_says_how_many_have_room_and_how_many_are_needed() {
    let pods = [
        divvy_pod("a", "n", 1, 10),
        divvy_pod("b", "n", 2, 14),
        divvy_pod("c", "n", 3, 15),
        on_two("two", "full", [0, 1], 10),
        divvy_pod("one", "full", 0, 3),
        divvy_pod("small", "full", 2, 12),
        divvy_pod("one-more", "full", 3, 12),
    ];
    let ledger = ledger(&[linked("n"), linked("full"), gpushare_node("old", 64, 4)], &pods);
    let said = |units: u64, gpus: u32, node: &str| {
        let pod = asking("p", &[units * u64::from(gpus)], gpus);
        let ask = Ask::of(&pod.request, GIB);
        let refusal = ledger.fits(node, &ask, "p").expect_err("refused");
        let report = ledger.explain(node, &ask);
        let room = ledger.room(node, &ask);
        format!(
            "{}\n{report}\n  {} free on as many, {} in all",
            refusal.filter_text(node),
            room.free,
            room.sum
        )
    };
    let texts = [
        said(4, 3, "n"),
        said(8, 3, "n"),
        said(17, 2, "n"),
        said(1, 5, "n"),
        said(10, 2, "full"),
        said(1, 2, "old"),
    ];
    insta::assert_snapshot!(texts.join("\n"));
}

#[test]
fn victims_make_room_on_as_many_gpus_as_are_asked_for() {
    let urgent = |units: u64, gpus: u32| Pod {
        priority: 1000,
        ..asking("urgent", &[units * u64::from(gpus)], gpus)
    };
    let names = |ledger: &Ledger, pod: &Pod| {
        let found = ledger.in_the_way("n", pod)?;
        let pods: Vec<&str> = found.pods.iter().map(|pod| pod.name.as_str()).collect();
        Some((found.indices, pods.join(" ")))
    };
    // A victim with two GPUs frees both; two victims with one GPU each are more.
    let pods = [
        on_two("ab", "n", [0, 1], 16),
        divvy_pod("c", "n", 2, 16),
        divvy_pod("d", "n", 3, 16),
    ];
    let full = ledger(&[linked("n")], &pods);
    assert_eq!(names(&full, &urgent(16, 2)), Some((vec![0, 1], "ab".to_owned())));
    let (indices, found) = names(&full, &urgent(16, 3)).expect("there are four");
    assert_eq!((indices.len(), found.contains("ab")), (3, true));
    assert_eq!(
        names(&full, &urgent(16, 4)).map(|(_, found)| found.len()),
        Some("ab c d".len())
    );
    assert_eq!(names(&full, &urgent(17, 2)), None);
    // One GPU has room already, so one victim is enough.
    let some = ledger(&[linked("n")], &[pods[0].clone(), divvy_pod("c", "n", 2, 10)]);
    assert_eq!(names(&some, &urgent(16, 2)), Some((vec![2, 3], "c".to_owned())));
    let proposed = ["u-c".to_owned()];
    assert_eq!(some.victims("n", &urgent(16, 2), &proposed), Some(proposed.to_vec()));
}

#[test]
fn a_pod_on_several_gpus_holds_all_of_them_until_it_ends() {
    let mut ledger = ledger(&[linked("n")], &[]);
    let pod = asking("p", &[20], 2);
    let ask = Ask::of(&pod.request, GIB);
    let held = ledger.choose("n", &ask).expect("room").held(&pod.request, GIB);
    let running = Pod {
        node: Some("n".to_owned()),
        phase: Phase::Running,
        held,
        ..pod.clone()
    };
    ledger.apply_pod(running.clone());
    let free = |ledger: &Ledger| {
        (0..4)
            .map(|at| ledger.node("n").expect("known").free(at).0 / 1024)
            .collect::<Vec<_>>()
    };
    assert_eq!(free(&ledger), [6, 16, 6, 16]);
    ledger.apply_pod(Pod {
        phase: Phase::Succeeded,
        ..running
    });
    assert_eq!(free(&ledger), [16, 16, 16, 16]);
}
