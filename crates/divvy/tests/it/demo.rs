//! `divvy demo` as a new user runs it, and interrupted at any moment.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::cluster::programs;

fn demo(base: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(programs().divvy);
    command
        .arg("demo")
        .arg("--fast")
        .args(args)
        .env("TMPDIR", base)
        .stdin(Stdio::null());
    command
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Return the command lines of running processes that contain this directory, which all child processes of a cluster do.
fn processes_of(base: &Path) -> Vec<String> {
    let needle = base.display().to_string();
    let processes = std::fs::read_dir("/proc").expect("/proc").filter_map(Result::ok);
    processes
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .map(|bytes| String::from_utf8_lossy(&bytes).replace('\0', " "))
        .filter(|line| line.contains(&needle))
        .collect()
}

fn files_of(base: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(base).expect("the directory").filter_map(Result::ok);
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn signal(child: &Child, signal: Signal) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a PID");
    kill_process(pid, signal).expect("it runs");
}

#[test]
fn the_tour_comes_out_as_it_says_and_leaves_nothing_behind() {
    let base = tempfile::tempdir().expect("a directory");
    let output = demo(base.path(), &["-o", "json"]).output().expect("it runs");
    assert!(output.status.success(), "{}", text(&output));
    let mut checks = 0;
    let lines = String::from_utf8(output.stdout).expect("text");
    for line in lines.lines() {
        let told: serde_json::Value = serde_json::from_str(line).expect("every line is JSON");
        if told["kind"] == "check" {
            assert_eq!(told["ok"], true, "{line}");
            checks += 1;
        }
    }
    assert!(checks >= 19, "only {checks} checks were made");
    assert_eq!(processes_of(base.path()), Vec::<String>::new());
    assert_eq!(files_of(base.path()), Vec::<String>::new());
}

/// Put the guard's libraries next to the programs, as `cargo xtask demo --scenario isolation` does. Tests run at the same time, so only the first one does it.
fn put_guard(directory: &Path) {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        for (package, name) in [
            ("divvy-guard", "libdivvy-guard.so"),
            ("divvy-guard-nvml", "libdivvy-guard-nvml.so"),
        ] {
            let next = directory.join(format!("{name}.test"));
            std::fs::write(&next, divvy_shadow_testkit::shadow(package)).expect("written");
            std::fs::rename(next, directory.join(name)).expect("renamed");
        }
    });
}

/// Return whether this machine allows the mount namespaces in which programs find the guard. If it does, the guard is there.
pub(crate) fn has_guard() -> bool {
    let directory = programs().divvy.parent().expect("a directory").to_owned();
    put_guard(&directory);
    let check = Command::new(directory.join("divvy-contain")).arg("--check").output();
    let check = check.expect("`cargo xtask test`, or `cargo build --workspace` before `cargo test`");
    if !check.status.success() {
        divvy_skip::skipped(text(&check));
    }
    check.status.success()
}

/// A program that avoids the guard is reported.
#[test]
fn two_demos_at_once_hold_programs_to_shares() {
    if !has_guard() {
        return;
    }
    let base = tempfile::tempdir().expect("a directory");
    let start = || {
        let mut command = demo(base.path(), &["--scenario", "isolation"]);
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts")
    };
    for child in [start(), start()] {
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}", text(&output));
        for part in [
            "greedy is refused with CUDA_ERROR_OUT_OF_MEMORY",
            "the driver has given neighbor exactly its share, 5120 MiB",
            "GpuMemoryExceeded: the pod's processes use 3372 MiB of GPU 0, but 2048 MiB were granted",
            "GuardAvoided: process",
            "All 18 checks hold",
        ] {
            assert!(text(&output).contains(part), "{part}: {}", text(&output));
        }
    }
    assert_eq!(processes_of(base.path()), Vec::<String>::new());
    assert_eq!(files_of(base.path()), Vec::<String>::new());
}

/// There is no GPU here, so the simulated libraries are in the place of the driver's. What the demo does with them is what it does with a driver.
/// Without a driver, the error says what to type.
#[test]
fn the_guard_is_shown_on_the_gpus_of_this_machine() {
    let base = tempfile::tempdir().expect("a directory");
    let none = base.path().join("none");
    let real = |directory: &Path, scenario: &str| {
        let directory = directory.display().to_string();
        demo(
            base.path(),
            &["--scenario", scenario, "--gpus", "real", "--driver", &directory],
        )
    };
    let is_refused = |scenario: &str, part: &str| {
        let output = real(&none, scenario).output().expect("it runs");
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        assert!(text(&output).contains(part), "{part}: {}", text(&output));
    };
    is_refused("tutorial", "--gpus real is for --scenario isolation");
    if !has_guard() {
        return;
    }
    is_refused("isolation", "libcuda.so.1 is not there");
    let (driver, machine) = (base.path().join("driver"), base.path().join("machine.toml"));
    std::fs::create_dir(&driver).expect("made");
    let built = programs().divvy.parent().expect("a directory").to_owned();
    for (library, name) in [
        ("libdivvy_cuda_sim.so", "libcuda.so.1"),
        ("libdivvy_nvml_sim.so", "libnvidia-ml.so.1"),
    ] {
        std::os::unix::fs::symlink(built.join(library), driver.join(name)).expect("linked");
    }
    let description =
        "v = 1\n[[node]]\nname = \"n\"\ndriver = \"580.159.03\"\n[[node.gpu]]\nmodel = \"NVIDIA H100\"\nmemory_mib = 81559\n";
    std::fs::write(&machine, description).expect("written");
    let output = real(&driver, "isolation")
        .env("DIVVY_NVML_SIM", &machine)
        .output()
        .expect("it runs");
    for part in [
        "to node this-machine, GPU 0 (NVIDIA H100): 3072 MiB of 81559 MiB",
        "the driver has given neighbor its share, within 4 MiB, 5120 MiB",
        "All 18 checks hold",
    ] {
        assert!(text(&output).contains(part), "{part}: {}", text(&output));
    }
}

/// The programs in containers are started by another process than the cluster's other programs, and know nothing of its directory.
#[test]
fn an_interrupted_demo_also_ends_the_programs_in_containers() {
    if !has_guard() {
        return;
    }
    for end in [Signal::INT, Signal::KILL] {
        let base = tempfile::tempdir().expect("a directory");
        let mut child = demo(base.path(), &["--scenario", "isolation"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let parent = format!("PPid:\t{}\n", child.id());
        let programs = || -> Vec<PathBuf> {
            let processes = std::fs::read_dir("/proc").expect("/proc").filter_map(Result::ok);
            let read = |process: &Path, file: &str| {
                let bytes = std::fs::read(process.join(file)).unwrap_or_default();
                String::from_utf8_lossy(&bytes).into_owned()
            };
            let is_program = |process: &PathBuf| {
                read(process, "status").contains(&parent) && read(process, "cmdline").contains("divvy-cuda-program")
            };
            processes.map(|entry| entry.path()).filter(is_program).collect()
        };
        wait_until("a program runs in a container", || !programs().is_empty());
        let running = programs();
        signal(&child, end);
        child.wait().expect("it ends");
        wait_until("its programs end with it", || running.iter().all(|process| !process.exists()));
    }
}

#[test]
fn a_step_that_does_not_come_out_makes_the_status_non_zero() {
    let base = tempfile::tempdir().expect("a directory");
    let nodes = base.path().join("nodes.toml");
    let other = divvy_testbed::scenario::BUILT_IN.replace("memory_mib = 16384\n", "memory_mib = 16384\nminor = 3\n");
    std::fs::write(&nodes, other).expect("written");
    let output = demo(
        base.path(),
        &["--scenario", "tutorial", "--nodes", &nodes.display().to_string()],
    )
    .output()
    .expect("it runs");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(
        text(&output).contains("FAILED  binpack-0 sees only its own GPU (/dev/nvidia0)"),
        "{}",
        text(&output)
    );
}

#[test]
fn other_machines_come_up_as_their_file_says() {
    let base = tempfile::tempdir().expect("a directory");
    let nodes = base.path().join("nodes.toml");
    let description = "v = 1\n[[node]]\nname = \"dgx\"\naddress = \"10.1.2.3\"\n".to_owned()
        + &"[[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-80GB\"\nmemory_mib = 81920\n".repeat(8);
    std::fs::write(&nodes, description).expect("written");
    // Variables of the agent in the caller's environment are not for the demo's agents.
    let output = demo(base.path(), &["--nodes", &nodes.display().to_string()])
        .env("DIVVY_GUARD", "")
        .env("DIVVY_MEMORY_UNIT", "none")
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("0/640 (0%)"), "{}", text(&output));
    assert!(!text(&output).contains("checks"), "nothing was checked: {}", text(&output));
}

/// Nodes register some time after their start, and the more nodes there are, the longer it takes.
#[test]
fn the_table_comes_when_every_node_of_the_file_offers_its_gpus() {
    let base = tempfile::tempdir().expect("a directory");
    let nodes = base.path().join("nodes.toml");
    let node =
        |number: usize| format!("[[node]]\nname = \"n{number}\"\n[[node.gpu]]\nmodel = \"Tesla T4\"\nmemory_mib = 15360\n");
    let description: String = (0..24).map(node).collect();
    std::fs::write(&nodes, format!("v = 1\n{description}[[node]]\nname = \"cpu\"\n")).expect("written");
    let output = demo(base.path(), &["--nodes", &nodes.display().to_string()])
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("0/360 (0%)"), "{}", text(&output));
}

#[test]
fn wrong_arguments_are_refused_before_anything_starts() {
    let base = tempfile::tempdir().expect("a directory");
    let nodes = base.path().join("nodes.toml");
    std::fs::write(&nodes, "v = 1\n[[node]]\nname = \"a\"\nmemory = 3\n").expect("written");
    let nodes = nodes.display().to_string();
    for (args, part) in [
        (vec!["--scenario", "nope"], "there is no scenario \"nope\""),
        (vec!["--nodes", "/nowhere.toml"], "/nowhere.toml"),
        (vec!["--nodes", nodes.as_str()], "unknown field `memory`"),
    ] {
        let output = demo(base.path(), &args).output().expect("it runs");
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(text(&output).contains(part), "{args:?}: {}", text(&output));
        assert_eq!(files_of(base.path()), ["nodes.toml"]);
    }
}

#[test]
fn an_interrupt_at_any_moment_leaves_no_process_and_no_file() {
    for after in [5, 60, 150, 300, 500, 800, 1500] {
        let base = tempfile::tempdir().expect("a directory");
        let mut child = demo(base.path(), &[])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        std::thread::sleep(Duration::from_millis(after));
        signal(&child, Signal::INT);
        child.wait().expect("it ends");
        wait_until("its children end with it", || processes_of(base.path()).is_empty());
        assert_eq!(files_of(base.path()), Vec::<String>::new(), "after {after} ms");
    }
}

#[test]
fn after_a_kill_the_children_end_and_the_next_start_cleans_up() {
    let base = tempfile::tempdir().expect("a directory");
    for after in [150, 400, 1200] {
        let mut child = demo(base.path(), &[])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        std::thread::sleep(Duration::from_millis(after));
        child.kill().expect("killed");
        child.wait().expect("dead");
        wait_until("the children end by themselves", || processes_of(base.path()).is_empty());
    }
    assert!(
        !files_of(base.path()).is_empty(),
        "a kill -9 lets nothing be tidied; the last check would be empty"
    );
    let output = demo(base.path(), &["--scenario", "tutorial"]).output().expect("it runs");
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(files_of(base.path()), Vec::<String>::new());
}

#[test]
fn an_agent_that_ends_ends_the_demo_at_once_with_its_last_words() {
    let base = tempfile::tempdir().expect("a directory");
    let at = |name: &str| base.path().join(name);
    let beside = programs().divvy.parent().expect("a directory").to_owned();
    for name in ["divvy", "divvy-probe", "libdivvy_nvml_sim.so"] {
        let linked = std::fs::hard_link(beside.join(name), at(name));
        linked
            .or_else(|_| std::fs::copy(beside.join(name), at(name)).map(|_| ()))
            .expect("there");
    }
    std::fs::write(at("divvy-agent"), "#!/bin/sh\necho the agent cannot start\nexit 2\n").expect("written");
    std::fs::set_permissions(at("divvy-agent"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("set");
    let began = std::time::Instant::now();
    let output = Command::new(at("divvy"))
        .args(["demo", "--fast"])
        .env("TMPDIR", base.path())
        .output()
        .expect("it runs");
    assert!(!output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("the agent cannot start"), "{}", text(&output));
    assert!(
        began.elapsed() < std::time::Duration::from_secs(45),
        "it waited {:?}",
        began.elapsed()
    );
}
