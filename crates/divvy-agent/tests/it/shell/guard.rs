//! A node whose containers get the guard in the place of CUDA's driver library.

use std::fs;
use std::path::Path;

use divvy_agent::GuardMode;
use divvy_share::limits::Limits;

use super::*;

/// A node with a driver, and with an agent that has a library for `--guard shadow`.
async fn bed() -> Bed {
    let mut bed = Bed::with(&[16384], |spec| install_driver(&spec.paths().sys_root, None, "550.54.15")).await;
    bed.stop_agent().await;
    for name in ["libdivvy-guard.so", "libdivvy-guard-nvml.so"] {
        fs::write(bed.config.kubelet_dir.join(name), name).expect("written");
    }
    bed.config.guard = GuardMode::Shadow;
    bed.config.guard_dir = Some(bed.config.kubelet_dir.clone());
    bed.start_agent();
    bed.inventory(|inventory| inventory.gpus.iter().all(|gpu| gpu.enforcement == Some(Enforcement::Guard)))
        .await;
    bed.kubelet_has(16).await;
    bed
}

fn limits(path: &Path) -> Option<u64> {
    let (_, limits) = Limits::from_bytes(&fs::read(path).ok()?).ok()?;
    Some(limits.bytes >> 20)
}

#[tokio::test]
async fn a_container_starts_with_the_guard_and_its_pods_share_which_end_with_the_pod() {
    let mut bed = bed().await;
    let uid = bed.create_with("a", Some(0), 3, &[(names::ISOLATION, "soft")]);
    let container = bed.running("a").await;
    let mount = |path: &str, read_only: bool| {
        let mount = container.mounts.iter().find(|mount| mount.container == path);
        let mount = mount.unwrap_or_else(|| panic!("{path}: {:?}", container.mounts));
        assert_eq!(mount.read_only, read_only, "{path}");
        fs::canonicalize(&mount.host).expect("there")
    };
    for (path, library) in [
        ("libcuda.so.1", "libdivvy-guard.so"),
        ("libnvidia-ml.so.1", "libdivvy-guard-nvml.so"),
    ] {
        let file = mount(&format!("/usr/lib/x86_64-linux-gnu/{path}"), true);
        assert_eq!(fs::read_to_string(file).expect("read"), library);
    }
    let shares = bed.config.state_dir().join("shares");
    let limits_file = mount("/run/divvy/share/GPU-0/limits", true);
    assert_eq!(limits(&limits_file), Some(3072));
    assert!(limits_file.starts_with(shares.join(&uid).canonicalize().expect("there")));
    assert!(mount("/run/divvy/share/GPU-0/usage", false).is_file());
    let (_, text) = bed.get("/metrics").await.expect("served");
    assert!(text.contains("divvy_agent_guarded_pods 1"), "{text}");

    // Another agent with another version of the guard changes nothing for a pod that runs.
    bed.stop_agent().await;
    fs::write(bed.config.kubelet_dir.join("libdivvy-guard.so"), "a newer guard").expect("written");
    bed.start_agent();
    bed.ready_is(200, "").await;
    assert_eq!(limits(&limits_file), Some(3072));

    // The files of a pod are removed when it ends, also by an agent without the guard.
    bed.stop_agent().await;
    bed.config.guard = GuardMode::Off;
    bed.start_agent();
    bed.ready_is(200, "").await;
    bed.api
        .delete("pods", "default", "a", &DeleteOptions::default())
        .expect("deleted");
    bed.eventually("the files are gone", || (!shares.join(&uid).exists()).then_some(()))
        .await;
    bed.stop_agent().await;
}

#[tokio::test]
async fn an_agent_without_the_library_says_what_is_missing_and_what_to_type() {
    let mut bed = bed().await;
    bed.stop_agent().await;
    let library = bed.config.kubelet_dir.join("libdivvy-guard-nvml.so");
    fs::remove_file(&library).expect("removed");
    bed.start_agent();
    let (agent, _) = bed.agent.take().expect("running");
    let text = agent.await.expect("no panic").expect_err("it cannot start").to_string();
    assert!(
        text.contains(&library.display().to_string()) && text.contains("--guard-dir"),
        "{text}"
    );
}
