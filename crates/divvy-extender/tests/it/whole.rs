//! Pods that request whole GPUs (`amd.com/gpu`), and nodes of two releases in one ledger.

use std::collections::BTreeMap;

use divvy_extender::core::{CoreTiming, DecideIn, Eviction, ExtenderCore, PlacementRules, Posted};
use divvy_model::{ContainerKind, Inventory, MemoryUnit, MiB, Node, Pod};
use divvy_policy::Policy;
use divvy_testkit::nodes::{AMD_MEMORY, add_amd, amd_node, amd_pending, amd_pod, amd_request, amd_uuid, divvy_node};
use serde::Deserialize;

use crate::values::*;

fn mixed_node(name: &str) -> Node {
    let mut node = divvy_node(name, &[16]);
    add_amd(&mut node, 2);
    node
}

fn passed(core: &ExtenderCore, pod: &Pod, nodes: &[&str]) -> (Vec<usize>, Vec<String>) {
    let answer = core.filter(pod, nodes.iter().copied()).expect("synced");
    let texts = answer.failed.iter().map(|(at, refusal)| refusal.filter_message(nodes[*at]));
    (answer.passed, texts.collect())
}

/// The Binding has none of gpushare's annotations.
#[test]
fn a_binding_names_the_gpus_of_each_container() {
    let mut pod = amd_pending("train", 0);
    pod.request = amd_request(&[(ContainerKind::Init, 2), (ContainerKind::App, 1)]);
    let nodes = [
        amd_node("a", 2),
        mixed_node("m"),
        node("n", &[16]),
        gpushare_node("old", 16, 1),
    ];
    let mut core = synced(&nodes, std::slice::from_ref(&pod));
    let names = ["a", "m", "n", "old"];
    let none = "no AMD GPUs that Divvy offers".to_owned();
    assert_eq!(passed(&core, &pod, &names), (vec![0, 1], vec![none.clone(), none]));
    let (op, binding) = one_post(core.begin_bind(args(&pod, "m"), at(0)).1);
    let (first, second, memory) = (amd_uuid("m", 0), amd_uuid("m", 1), AMD_MEMORY.0);
    let share = |uuid: &str| format!(r#"{{"uuid":"{uuid}","memMiB":{memory},"cores":0}}"#);
    let whole = |uuid: &str| format!(r#"{{"uuid":"{uuid}","memMiB":{memory},"cores":0,"whole":true}}"#);
    let allocation = format!(
        r#"{{"v":1,"gpus":[{},{}],"containers":{{"c0":[{},{}],"c1":[{}]}}}}"#,
        whole(&first),
        whole(&second),
        share(&first),
        share(&second),
        share(&first)
    );
    let expected = BTreeMap::from([("divvy.dev/allocation".to_owned(), allocation)]);
    assert_eq!(binding.annotations, expected);
    // Reserved from the moment of the write, and counted once afterwards.
    let other = amd_pending("other", 1);
    let full = (vec![0], vec!["no free AMD GPU".to_owned()]);
    assert_eq!(passed(&core, &other, &["a", "m"]), full);
    assert_eq!(one_answer(core.posted(op, Posted::Created, at(1))), Ok(()));
    core.index_mut().apply_pod(bound(&pod, &binding));
    assert_eq!(passed(&core, &other, &["a", "m"]), full);
    assert_eq!(core.index().ledger().reservations().count(), 0);
    // Shares of the same node do not notice.
    assert_eq!(passed(&core, &crate::values::pod("share", 16), &["m"]).0, [0]);
}

#[test]
fn a_bind_without_an_answer_is_sent_again_with_the_same_gpus() {
    let pod = amd_pending("p", 1);
    let mut core = synced(&[amd_node("a", 2)], std::slice::from_ref(&pod));
    let (op, first) = one_post(core.begin_bind(args(&pod, "a"), at(0)).1);
    let (get, ..) = one_get(core.posted(op, lost(), at(1)));
    assert!(one_answer(core.got(get, found(&pod), at(2))).is_err());
    let (_, second) = one_post(core.begin_bind(args(&pod, "a"), at(3)).1);
    assert_eq!(first.annotations, second.annotations);
}

/// The default scheduler binds one pod without the extender, after the extender's filter has passed another pod.
#[test]
fn a_bypassing_pods_gpus_are_not_promised_again() {
    let pod = amd_pending("p", 2);
    let mut core = synced(&[amd_node("a", 2)], std::slice::from_ref(&pod));
    assert_eq!(passed(&core, &pod, &["a"]).0, [0]);
    let bypass = Pod {
        node: Some("a".to_owned()),
        ..amd_pending("bypass", 1)
    };
    core.index_mut().apply_pod(bypass);
    let refusal = one_refusal(core.begin_bind(args(&pod, "a"), at(0)).1);
    assert_eq!(
        refusal,
        "pod default/p: node a: 2 of 2 AMD GPUs are not allocated, but pods without an allocation use 1 of them; 2 are needed: GPU 0 is \
         not allocated, GPU 1 is not allocated"
    );
    assert_eq!(passed(&core, &amd_pending("q", 1), &["a"]).0, [0]);
    assert_eq!(core.index().ledger().anomalies(), []);
}

#[test]
fn every_policy_takes_the_node_with_the_fewest_free_gpus() {
    let nodes = [amd_node("empty", 4), amd_node("used", 4), mixed_node("full")];
    let pods = [amd_pod("x", "used", &[0, 1]), amd_pod("y", "full", &[0, 1])];
    let names = ["empty", "used", "full"];
    for policy in Policy::FOR_SCHEDULING {
        let placement = PlacementRules {
            policy,
            decide_in: DecideIn::Filter,
        };
        let mut core = ExtenderCore::choosing(MemoryUnit::GIB, CoreTiming::default(), placement);
        core.index_mut().reset_nodes(&nodes);
        core.index_mut().reset_pods(pods.to_vec());
        let pod = amd_pending("p", 2);
        assert_eq!(core.prioritize(&pod, names), Ok(vec![0, 10, 0]), "{policy}");
        let answer = core.filter_at(&pod, names, at(0)).expect("synced");
        assert_eq!(answer.passed, [1], "{policy}");
        let large = amd_pending("large", 3);
        assert_eq!(core.prioritize(&large, names), Ok(vec![10, 0, 0]), "{policy}");
    }
}

#[test]
fn evictions_are_corrected_by_gpus() {
    let pods = [amd_pod("x", "a", &[0]), amd_pod("y", "a", &[1])];
    let core = synced(&[amd_node("a", 2), amd_node("b", 1)], &pods);
    let urgent = Pod {
        priority: 10,
        ..amd_pending("urgent", 2)
    };
    let proposed = |node: &str, victims: &[&str]| Eviction {
        node: node.to_owned(),
        victims: victims.iter().map(|name| format!("u-{name}")).collect(),
        pdb_violations: 0,
    };
    let evictions = vec![proposed("a", &["x"]), proposed("b", &["z"])];
    assert_eq!(core.preempt(&urgent, evictions), Ok(vec![proposed("a", &["x", "y"])]));
}

/// The fields that Divvy 0.1.0 requires in an inventory. It refuses an inventory that lacks one of them or has another
/// format version.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
#[expect(dead_code, reason = "read for their presence and type")]
struct FirstInventory {
    v: u32,
    agent: String,
    driver: String,
    #[serde(rename = "unitMiB")]
    unit: u64,
    gpus: Vec<FirstGpu>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
#[expect(dead_code, reason = "read for their presence and type")]
struct FirstGpu {
    uuid: String,
    index: u32,
    minor: u32,
    #[serde(rename = "totalMiB")]
    total: u64,
    units: u64,
    health: String,
}

/// If agents are upgraded first, an older extender still reads nodes that have only NVIDIA GPUs.
#[test]
fn the_first_releases_extender_reads_upgraded_nodes() {
    let Some(Ok(inventory)) = divvy_node("n", &[16, 24]).inventory else {
        panic!("it has one")
    };
    let text = inventory.to_json();
    let read: FirstInventory = serde_json::from_str(&text).expect("the fields of version 1");
    let minors: Vec<u32> = read.gpus.iter().map(|gpu| gpu.minor).collect();
    assert_eq!((read.v, read.driver.as_str(), minors), (1, "550.54.15", vec![0, 1]));
    // An older extender must not take a GPU that is offered as a whole for one whose memory it may share.
    let Some(Ok(inventory)) = mixed_node("m").inventory else {
        panic!("it has one")
    };
    assert!(inventory.to_json().starts_with("{\"v\":2,"));
}

/// If the extender is upgraded first, it reads what agents of both releases wrote, in one ledger.
#[test]
fn an_extender_of_this_release_reads_nodes_of_both_releases() {
    let first = r#"{"v":1,"agent":"0.1.0","driver":"550.54.15","unitMiB":1024,"gpus":[{"uuid":"GPU-1","kind":"gpu","parent":null,"index":0,"minor":0,"pci":"0000:81:00.0","model":"NVIDIA A100-SXM4-40GB","cc":"8.0","sms":108,"clockMHz":1410,"totalMiB":40960,"reserveMiB":0,"units":40,"heldMiB":0,"numa":0,"health":"ok","reason":null,"links":[]}]}"#;
    let old = Node {
        inventory: Some(Inventory::parse(first)),
        ..gpushare_node("old", 40, 1)
    };
    let mut new = mixed_node("new");
    if let Some(Ok(inventory)) = &mut new.inventory {
        *inventory = Inventory::parse(&inventory.to_json()).expect("version 2");
    }
    let (share, whole) = (pod("share", 16), amd_pending("whole", 2));
    let mut core = synced(&[old, new], &[share.clone(), whole.clone()]);
    assert_eq!(passed(&core, &share, &["old", "new"]).0, [0, 1]);
    assert_eq!(passed(&core, &whole, &["old", "new"]).0, [1]);
    for (pod, node) in [(&share, "old"), (&whole, "new")] {
        let (op, binding) = one_post(core.begin_bind(args(pod, node), at(0)).1);
        assert_eq!(one_answer(core.posted(op, Posted::Created, at(1))), Ok(()));
        core.index_mut().apply_pod(bound(pod, &binding));
    }
    let view = core.index().ledger().node("new").expect("known");
    let used: Vec<MiB> = (0..3).map(|position| view.used(position)).collect();
    assert_eq!(used, [MiB::ZERO, AMD_MEMORY, AMD_MEMORY]);
    assert_eq!(free(&core, "old"), [24]);
}
