//! Containers that use a GPU through CUDA's Multi-Process Service (`--mps`).

use divvy_agent_core::{Mps, NOT_LIMITED, PreStart, Reason};
use divvy_model::{Enforcement, Isolation, Partition};

use crate::calls::{edits, guarding_node, with_cores};
use crate::node::{Limits, Node, simple};

/// Return a node whose GPUs the MPS control daemon serves. Each has 4 units and the guard.
fn served() -> Node {
    let mut node = guarding_node();
    node.change_settings(|settings| {
        settings.mps = Some(Mps {
            pipe: "/run/mps/pipe".to_owned(),
            shm: "/run/mps/shm".to_owned(),
        });
    });
    for index in 0..2 {
        node.set_enforcement(index, Some(Enforcement::GUARD.and(Enforcement::MPS)));
    }
    node.node_files.mps_serves = true;
    node
}

fn variables(node: &Node) -> Vec<String> {
    let env = edits(node).env;
    env.into_iter().filter(|variable| variable.starts_with("CUDA_")).collect()
}

/// The directories are those of the daemon, and the client gets a part of the threads of its GPU.
#[test]
fn an_mps_client_gets_directories_gpu_and_threads() {
    for (isolation, percentage) in [
        (None, Some(30)),
        (Some(Isolation::Soft), Some(30)),
        (Some(Isolation::None), None),
    ] {
        let mut node = served();
        node.see(with_cores(isolation));
        node.admit("a").expect("admitted");
        node.start("a", "main").expect("started");
        let mut expected = vec![
            "CUDA_MPS_PIPE_DIRECTORY=/mps/divvy.dev/shares/pipe".to_owned(),
            "CUDA_VISIBLE_DEVICES=GPU-0".to_owned(),
        ];
        expected.extend(percentage.map(|percent: u32| format!("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percent}")));
        assert_eq!(variables(&node), expected, "{isolation:?}");
        let mounts = edits(&node).mounts;
        for (host, container) in [("/run/mps/pipe", "/mps/divvy.dev/shares/pipe"), ("/run/mps/shm", "/dev/shm")] {
            let mut found = mounts.iter().filter(|mount| mount.container_path == container);
            let mount = found.next().expect(container);
            assert_eq!(mount.host_path, host);
            assert!(mount.options.contains(&"rw".to_owned()), "{mount:?}");
        }
    }
}

#[test]
fn a_restart_keeps_the_spec_which_loses_mps_with_the_flag() {
    let mut node = served();
    node.see(with_cores(None));
    node.admit("a").expect("admitted");
    node.start("a", "main").expect("started");
    let before = node.specs.clone();
    node.restart_agent();
    node.reconcile();
    assert_eq!(node.specs, before);
    // The GPU is open to all processes then.
    node.change_settings(|settings| settings.mps = None);
    node.reconcile();
    assert_eq!(variables(&node), [] as [&str; 0]);
}

#[test]
fn the_limit_survives_the_loss_of_the_agents_files() {
    let mut node = served();
    node.see(with_cores(None));
    node.admit("a").expect("admitted");
    node.start("a", "main").expect("started");
    node.records.clear();
    node.specs.clear();
    node.restart_agent();
    node.reconcile();
    assert!(variables(&node).iter().any(|variable| variable.ends_with("PERCENTAGE=30")));
}

/// MPS alone is not enough for a share of the memory.
#[test]
fn mps_alone_is_enough_only_for_compute_time() {
    for (isolation, starts) in [(None, true), (Some(Isolation::Soft), false), (Some(Isolation::Hard), false)] {
        let mut node = served();
        node.set_enforcement(0, Some(Enforcement::MPS));
        node.see(with_cores(isolation));
        node.admit("a").expect("admitted");
        let answer = node.pre_start("a", "main");
        assert_eq!(
            matches!(answer, PreStart::Granted { .. }),
            starts,
            "{isolation:?}: {answer:?}"
        );
    }
}

#[test]
fn what_mps_limits_the_guard_does_not_limit_a_second_time() {
    for (mps, cores) in [(true, 0), (false, 30)] {
        let mut node = if mps { served() } else { guarding_node() };
        node.see(with_cores(None));
        node.admit("a").expect("admitted");
        let PreStart::Granted { actions, .. } = node.pre_start("a", "main") else {
            panic!("granted");
        };
        let guarded: Vec<(u64, u32)> = Limits::of(&actions)
            .guarded
            .iter()
            .map(|of| (of.memory.0, of.cores))
            .collect();
        assert_eq!(guarded, [(3072, cores)], "with MPS: {mps}");
    }
}

#[test]
fn without_cuda_in_the_specs_mps_still_limits_compute_time() {
    let mut node = served();
    node.node_files.specs[0].container_edits.mounts.clear();
    node.see(with_cores(None));
    node.admit("a").expect("admitted");
    node.start("a", "main")
        .expect("the guard is missing, and it would limit only the memory");
    assert!(variables(&node).iter().any(|variable| variable.ends_with("PERCENTAGE=30")));
    let events = node.events.iter().filter(|(_, reason, _)| *reason == NOT_LIMITED).count();
    assert_eq!(events, 1, "{:?}", node.events);
}

/// A container that uses a GPU without the daemon does not wait.
#[test]
fn a_container_waits_for_the_daemon_that_it_needs() {
    let mut node = served();
    node.node_files.mps_serves = false;
    node.see(simple("a", 0, 1));
    node.admit("a").expect("admitted");
    let PreStart::Wait(reason, text) = node.pre_start("a", "main") else {
        panic!("waits");
    };
    assert_eq!((reason, reason.label()), (Reason::MpsAbsent, "mps-absent"));
    assert!(text.contains("MPS control daemon") && text.contains("kubectl logs"), "{text}");
    node.node_files.mps_serves = true;
    node.start("a", "main").expect("the daemon serves");

    // MPS is not available for MIG devices.
    let mut node = served();
    node.node_files.mps_serves = false;
    node.change_gpu(0, |gpu| {
        gpu.partition = Some(Partition {
            parent: "GPU-9".to_owned(),
            profile: "1g.5gb".to_owned(),
        });
    });
    node.see(simple("a", 0, 1));
    node.admit("a").expect("admitted");
    node.start("a", "main").expect("it needs no daemon");
    assert_eq!(variables(&node), [] as [&str; 0]);
}
