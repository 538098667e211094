//! Pods on several GPUs.

use std::collections::BTreeMap;

use divvy_agent_core::{PreStart, Reason, ResourceSpec};
use divvy_model::ContainerKind::{App, Init};
use divvy_model::{Health, Held, MiB, Pod};

use crate::node::{Node, pod, simple};

/// Return a pod on GPUs 0 and 2, with half of its memory on each.
fn on_two(uid: &str, containers: &[(&str, divvy_model::ContainerKind, u64)]) -> Pod {
    let mut pod = pod(uid, 0, containers);
    let Held::Allocation(held) = &mut pod.held else {
        panic!("the fixture's pods have an allocation");
    };
    let halved = |memory: &mut MiB| *memory = MiB(memory.0 / 2);
    held.gpus.iter_mut().for_each(|share| halved(&mut share.memory));
    held.gpus.push(held.gpus[0].clone());
    held.gpus[1].uuid = "GPU-2".to_owned();
    for shares in held.containers.values_mut() {
        shares.iter_mut().for_each(|share| halved(&mut share.memory));
        shares.push(shares[0].clone());
        shares[1].uuid = "GPU-2".to_owned();
    }
    pod
}

fn count(ids: &[String]) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for id in ids {
        *counts.entry(id.split("::").next().unwrap_or_default()).or_default() += 1;
    }
    counts
}

#[test]
fn a_container_gets_all_its_gpus_and_is_told_which_they_are() {
    let mut node = Node::new(&[8192, 8192, 16384]);
    node.see(on_two("a", &[("warm-up", Init, 8), ("main", App, 6)]));
    node.admit("a").expect("admitted");
    assert_eq!(
        count(&node.ids_of("a", "warm-up")),
        BTreeMap::from([("GPU-0", 4), ("GPU-2", 4)])
    );
    node.start("a", "warm-up").expect("started");
    let running = node.start("a", "main").expect("started");
    assert_eq!(running.devices, ["/dev/nvidia0", "/dev/nvidia2", "/dev/nvidiactl"]);
    let env = |name: &str| running.env.iter().find_map(|line| line.strip_prefix(&format!("{name}=")));
    assert_eq!(env("ALIYUN_COM_GPU_MEM_IDX"), Some("0,2"));
    assert_eq!(env("ALIYUN_COM_GPU_MEM_CONTAINER"), Some("6"));
    assert_eq!(env("ALIYUN_COM_GPU_MEM_DEV"), Some("8"));
    assert_eq!(env("NVIDIA_VISIBLE_DEVICES"), Some("void"));
    // A pod on two GPUs counts on both.
    let held: Vec<u64> = node
        .records
        .values()
        .flat_map(|record| &record.gpus)
        .map(|share| share.memory.0)
        .collect();
    assert_eq!(held, [4096; 4], "two containers, two GPUs, the pod's total on each");
}

#[test]
fn every_gpu_must_be_well_and_have_room() {
    let mut node = Node::new(&[8192, 8192, 8192]);
    node.see(simple("old", 2, 6));
    node.admit("old").expect("admitted");
    node.start("old", "main").expect("started");
    // The pod's object is deleted but its container is not, and the extender has not noticed.
    node.object_gone("old");
    node.see(on_two("a", &[("main", App, 6)]));
    node.admit("a").expect("admitted");
    let refused = |node: &mut Node| match node.pre_start("a", "main") {
        PreStart::Refused { reason, text, .. } => (reason, text),
        other => panic!("{other:?}"),
    };
    let (reason, text) = refused(&mut node);
    assert_eq!(reason, Reason::MemoryHeld);
    assert!(
        text.contains("needs 3072 MiB of GPU 2, where 2048 MiB of 8192 MiB are free"),
        "{text}"
    );
    node.set_health(0, Health::Failed, Some("XID 79"));
    let (reason, text) = refused(&mut node);
    assert_eq!(reason, Reason::GpuUnavailable);
    assert!(text.contains("GPU GPU-0 (index 0), which has failed (XID 79)"), "{text}");
    assert!(node.records.values().all(|record| record.uid != "a"), "nothing is granted");
}

#[test]
fn ids_are_divided_over_the_gpus_as_far_as_there_are_some() {
    let mut node = Node::new(&[4096, 8192, 4096]);
    node.see(on_two("a", &[("main", App, 6)]));
    let free = node.free_ids();
    let chosen = node.core.preferred(ResourceSpec::MEMORY, &free, &[], 6);
    assert_eq!(count(&chosen), BTreeMap::from([("GPU-0", 3), ("GPU-2", 3)]));
    // The kubelet has given most of GPU 2's ids to other pods, so any free ids must do.
    let few: Vec<String> = free
        .into_iter()
        .filter(|id| !id.starts_with("GPU-2::") || id.ends_with("::m0"))
        .collect();
    let chosen = node.core.preferred(ResourceSpec::MEMORY, &few, &[], 6);
    assert_eq!(chosen.len(), 6);
    assert_eq!(
        (count(&chosen)["GPU-2"], count(&chosen)["GPU-0"] >= 3),
        (1, true),
        "{chosen:?}"
    );
    let must = [few[0].clone(), few[1].clone()];
    let chosen = node.core.preferred(ResourceSpec::MEMORY, &few, &must, 6);
    assert!(chosen.len() == 6 && must.iter().all(|id| chosen.contains(id)), "{chosen:?}");
}
