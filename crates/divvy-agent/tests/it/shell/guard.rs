//! A node whose containers get the guard in the place of CUDA's driver library.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use divvy_agent::{GuardMode, OnEscape};
use divvy_share::limits::{ComputeAccount, ShareLimits, WHOLE};

use super::*;

/// A node with a driver, and with an agent that has a library for `--guard shadow`.
async fn bed() -> Bed {
    bed_with(OnEscape::Event).await
}

async fn bed_with(on_escape: OnEscape) -> Bed {
    let mut bed = Bed::with(&[16384], |spec| install_driver(&spec.paths().sys_root, None, "550.54.15")).await;
    bed.stop_agent().await;
    for name in ["libdivvy-guard.so", "libdivvy-guard-nvml.so"] {
        fs::write(bed.config.kubelet_dir.join(name), name).expect("written");
    }
    bed.config.guard = GuardMode::Shadow;
    bed.config.on_escape = on_escape;
    bed.config.guard_dir = Some(bed.config.kubelet_dir.clone());
    bed.start_agent();
    bed.inventory(|inventory| inventory.gpus.iter().all(|gpu| gpu.enforcement == Some(Enforcement::GUARD)))
        .await;
    bed.kubelet_has(16).await;
    bed
}

fn limits_of(path: &Path) -> Option<ShareLimits> {
    ShareLimits::from_bytes(&fs::read(path).ok()?).ok().map(|(_, limits)| limits)
}

fn limits(path: &Path) -> Option<u64> {
    limits_of(path).map(|limits| limits.bytes >> 20)
}

/// Guard and share end with the pod.
#[tokio::test]
async fn guard_and_share_come_with_a_container() {
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

    // With the library for the loaders of containers, only what starts from now on has it.
    assert!(!container.env.contains_key("LD_AUDIT"), "{:?}", container.env);
    bed.stop_agent().await;
    fs::write(bed.config.kubelet_dir.join("libdivvy-guard-audit.so"), "audit").expect("written");
    bed.config.guard = GuardMode::Both;
    bed.start_agent();
    bed.ready_is(200, "").await;
    bed.create_with("b", Some(0), 3, &[]);
    let other = bed.running("b").await;
    let path = other.env.get("LD_AUDIT").expect("the variable");
    let file = other.mounts.iter().find(|mount| mount.container == *path).expect("mounted");
    assert_eq!(
        (file.read_only, fs::read_to_string(&file.host).expect("there").as_str()),
        (true, "audit")
    );

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

/// An event names the process, and the agent's flag chooses the consequence.
#[tokio::test]
async fn avoiding_the_guard_has_the_chosen_consequence() {
    for (on_escape, consequence) in [
        (OnEscape::Event, ""),
        (OnEscape::Throttle, "--on-escape throttle"),
        (OnEscape::Evict, "--on-escape evict"),
        (OnEscape::Kill, "--on-escape kill"),
    ] {
        let mut bed = bed_with(on_escape).await;
        let uid = bed.create_with("a", Some(0), 3, &[(names::ISOLATION, "soft")]);
        bed.running("a").await;
        let file = bed.config.state_dir().join("shares").join(&uid).join("GPU-0/limits");
        let is_stopped = || limits_of(&file).is_some_and(|limits| limits.is_stopped);
        let killed = bed.machine.borrow().killed.clone();
        let killed = || killed.lock().expect("no panic").clone();
        bed.machine.send_modify(|machine| machine.process_of = Some(uid.clone()));
        let told = || {
            let events = bed.api.list("events", "default").ok()?;
            events.into_iter().find(|event| event["reason"] == "GuardAvoided")
        };
        let event = bed.eventually("an event", told).await;
        let text = event["message"].as_str().expect("text");
        assert!(text.contains("process 4711") && text.contains("GPU 0"), "{text}");
        assert_eq!(text.contains("--on-escape"), !consequence.is_empty(), "{text}");
        assert!(text.contains(consequence), "{text}");
        match on_escape {
            OnEscape::Event => {}
            OnEscape::Throttle => {
                bed.eventually("the pod is stopped", || is_stopped().then_some(())).await;
                bed.machine.send_modify(|machine| machine.process_of = None);
                bed.eventually("the pod goes on", || (!is_stopped()).then_some(())).await;
            }
            OnEscape::Evict => drop(bed.inventory(|inventory| inventory.evict.contains(&uid)).await),
            OnEscape::Kill => {
                bed.eventually("a request to kill", || (!killed().is_empty()).then_some(()))
                    .await;
                assert_eq!((&killed()[0]["pid"], &killed()[0]["pod"]), (&4711.into(), &uid.into()));
            }
        }
        assert_eq!(killed().is_empty(), on_escape != OnEscape::Kill, "{on_escape:?}");
        assert!(!is_stopped());
        bed.stop_agent().await;
    }
}

#[tokio::test]
async fn a_guarded_pods_peak_is_seen_without_metrics_readers() {
    let mut bed = bed().await;
    let uid = bed.create_with("a", Some(0), 3, &[(names::ISOLATION, "soft")]);
    bed.running("a").await;
    bed.machine.send_modify(|machine| machine.process_of = Some(uid));
    // The agent asks for samples every two seconds, and brings the accounts up to date every five.
    let sampled = bed.machine.borrow().sampled.clone();
    let sampled = || *sampled.lock().expect("no panic");
    let before = sampled();
    bed.eventually("a period of the accounts", || (sampled() > before + 4).then_some(()))
        .await;
    bed.machine.send_modify(|machine| machine.process_of = None);
    let (_, usage) = bed.get("/v1/usage").await.expect("served");
    let usage: Value = serde_json::from_str(&usage).expect("JSON");
    let container = &usage["containers"][0];
    assert_eq!(
        (&container["usedBytes"], &container["peakBytes"]),
        (&json!(0), &json!(300 << 20)),
        "{usage}"
    );
    bed.stop_agent().await;
}

/// Change a file of limits in place, as the agent does.
fn change(path: &Path, change: impl FnOnce(&mut ShareLimits)) {
    let (generation, mut limits) = ShareLimits::from_bytes(&fs::read(path).expect("read")).expect("readable");
    change(&mut limits);
    let (at, copy) = limits.copy(generation + 1);
    let file = fs::File::options().write(true).open(path).expect("open");
    file.write_all_at(&copy, at).expect("written");
}

fn account(path: &Path) -> ComputeAccount {
    limits_of(path).expect("readable").account
}

#[tokio::test]
async fn a_pod_with_a_rate_owes_its_busy_time() {
    let mut bed = bed().await;
    let uid = bed.create_with("a", Some(0), 3, &[(names::ISOLATION, "soft")]);
    bed.running("a").await;
    let file = bed.config.state_dir().join("shares").join(&uid).join("GPU-0/limits");
    let sampled = bed.machine.borrow().sampled.clone();
    let sampled = || *sampled.lock().expect("no panic");
    bed.machine.send_modify(|machine| machine.busy = Some((uid, 80)));
    bed.eventually("samples for the metrics", || (sampled() > 2).then_some(()))
        .await;
    bed.stop_agent().await;
    assert_eq!(account(&file), ComputeAccount::default(), "no pod has a rate");
    change(&file, |limits| limits.rate = 3 * WHOLE / 10);
    bed.start_agent();
    // It may use 30 % of the time, and uses 80.
    let debt = || (account(&file).balance < -200_000_000).then(|| account(&file));
    let first = bed.eventually("a debt", debt).await;
    // Another agent continues with it.
    bed.stop_agent().await;
    let before = account(&file);
    assert!(before.balance <= first.balance && before.at >= first.at);
    bed.machine.send_modify(|machine| machine.busy = None);
    bed.start_agent();
    let after = || (account(&file).at > before.at).then(|| account(&file));
    let after = bed.eventually("another measurement", after).await;
    // The balance has grown by 30 % of the time at most, and by what rounding gives.
    let grown = (after.at - before.at) as i64 * 3 / 10 + 1000;
    assert!(
        after.balance > before.balance && after.balance <= before.balance + grown,
        "{before:?} {after:?}"
    );

    // A driver that does not measure changes nothing.
    bed.machine
        .send_modify(|machine| machine.refuses_samples = Some("not on this GPU".to_owned()));
    let asked = sampled();
    bed.eventually("a refusal", || (sampled() > asked + 1).then_some(())).await;
    let refused = account(&file);
    bed.eventually("another refusal", || (sampled() > asked + 2).then_some(()))
        .await;
    assert_eq!(account(&file), refused);
    bed.machine.send_modify(|machine| machine.refuses_samples = None);
    bed.eventually("a measurement", || (account(&file).at > refused.at).then_some(()))
        .await;
    bed.stop_agent().await;
}

/// The counts are also absent before a guard has counted.
#[tokio::test]
async fn guard_counts_are_shown_and_absent_without_the_guard() {
    let mut bed = bed().await;
    let uid = bed.create_with("a", Some(0), 3, &[(names::ISOLATION, "soft")]);
    bed.running("a").await;
    let names = ["denied_allocations", "denied_bytes", "throttled_seconds"];
    let values = |text: &str| {
        names.map(|name| {
            let series =
                format!("divvy_container_gpu_{name}_total{{namespace=\"default\",pod=\"a\",container=\"main\",uuid=\"GPU-0\"}} ");
            let found = text.lines().find_map(|line| line.strip_prefix(&series));
            found.map(|value| value.parse::<f64>().expect("a number"))
        })
    };
    let until = async |bed: &Bed, expected: [Option<f64>; 3]| {
        let ask = async {
            loop {
                // An agent that is just starting serves nothing yet.
                let text = bed.get("/metrics").await.map(|(_, text)| text);
                if text.is_some_and(|text| values(&text) == expected) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let in_time = tokio::time::timeout(LIMIT, ask).await;
        in_time.unwrap_or_else(|_| panic!("never {expected:?}"));
    };
    // A guard of an earlier version would leave it so.
    until(&bed, [Some(0.0), None, None]).await;
    let file = bed.config.state_dir().join("shares").join(&uid).join("GPU-0/usage");
    let write = |words: [u64; 3]| {
        let file = fs::File::options().write(true).open(&file).expect("open");
        for (index, word) in words.into_iter().enumerate() {
            file.write_all_at(&word.to_ne_bytes(), 32 + index as u64 * 8)
                .expect("written");
        }
    };
    write([1, 0, 0]);
    until(&bed, [Some(0.0), Some(0.0), Some(0.0)]).await;
    write([1, 3 << 20, 1_500_000_000]);
    until(&bed, [Some(0.0), Some(3_145_728.0), Some(1.5)]).await;
    let (_, usage) = bed.get("/v1/usage").await.expect("served");
    let usage: Value = serde_json::from_str(&usage).expect("JSON");
    let container = &usage["containers"][0];
    assert_eq!(
        (&container["deniedBytes"], &container["throttledNs"]),
        (&json!(3 << 20), &json!(1_500_000_000)),
        "{usage}"
    );
    // Another agent continues with what is in the file.
    bed.stop_agent().await;
    bed.start_agent();
    until(&bed, [Some(0.0), Some(3_145_728.0), Some(1.5)]).await;
    bed.stop_agent().await;
}

/// The driver limits the pod's memory, and the guard its compute time.
#[tokio::test]
async fn driver_and_guard_limit_the_same_pod() {
    let mut bed = bed().await;
    bed.machine.send_modify(|machine| machine.has_limits = true);
    bed.inventory(|inventory| inventory.gpus[0].enforcement == Some(Enforcement::CGROUP.and(Enforcement::GUARD)))
        .await;
    bed.kubelet_has(16).await;
    let uid = bed.create_with("a", Some(0), 3, &[(names::ISOLATION, "hard")]);
    let container = bed.running("a").await;
    let limited = bed.pod_limits();
    assert_eq!((limited.len(), &limited[0]["hardMiB"]), (1, &3072.into()));
    let file = bed.config.state_dir().join("shares").join(&uid).join("GPU-0/limits");
    assert_eq!(limits(&file), Some(3072));
    let has_guard = container
        .mounts
        .iter()
        .any(|mount| mount.container == "/run/divvy/share/GPU-0/limits");
    assert!(has_guard, "{:?}", container.mounts);
    bed.stop_agent().await;
}

#[tokio::test]
async fn a_missing_guard_library_is_named_with_advice() {
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
