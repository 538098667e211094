//! `divvy doctor` as its user runs it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::cli::{divvy, stderr, stdout};
use crate::machine::{Machine, kinds};

fn copy_of(machine: &Machine) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    machine.write_below(folder.path()).expect("laid out");
    folder
}

fn doctor(root: &Path, args: &[&str]) -> std::process::Output {
    let root = root.display().to_string();
    divvy(&[&["doctor", "--root", &root], args].concat(), &[])
}

#[test]
fn a_copied_machine_is_looked_at_and_its_worst_finding_is_the_exit_status() {
    let mut machine = kinds::debian();
    let folder = copy_of(&machine);
    let well = doctor(folder.path(), &["--only", "D02,D05,d07"]);
    assert_eq!(well.status.code(), Some(0), "{}", stdout(&well));
    assert!(stdout(&well).contains("PASS D05 libraries and kernel module are of one version: both 550.54.15\n"));
    machine.file("/sys/module/nvidia/version", "560.35.03\n");
    let folder = copy_of(&machine);
    let broken = doctor(folder.path(), &["--only", "D05", "-o", "json"]);
    assert_eq!(broken.status.code(), Some(2));
    let report: serde_json::Value = serde_json::from_str(&stdout(&broken)).expect("JSON");
    assert_eq!(report["checks"][0]["status"], "FAIL");
    assert_eq!(report["checks"][0]["found"], "kernel module 560.35.03, libraries 550.54.15");
    let whole = stdout(&doctor(folder.path(), &[]));
    assert!(
        whole.contains("is a copy of a machine: its programs cannot be asked"),
        "{whole}"
    );
    assert!(whole.contains("\nNot asked for: K01 "), "{whole}");
}

#[test]
fn a_machine_without_a_gpu_is_told_so() {
    let folder = copy_of(&kinds::none());
    let output = doctor(folder.path(), &["--only", "D01,D02"]);
    assert_eq!(output.status.code(), Some(2));
    let text = stdout(&output);
    assert!(
        text.contains("FAIL D01") && text.contains("SKIP D02 the kernel's driver is loaded: no GPU here"),
        "{text}"
    );
}

#[test]
fn a_probe_that_hangs_is_a_finding_and_holds_nothing_up() {
    let folder = copy_of(&kinds::debian());
    let probe = folder.path().join("hanging-probe");
    std::fs::write(&probe, "#!/bin/sh\nexec sleep 60\n").expect("written");
    std::fs::set_permissions(&probe, std::fs::Permissions::from_mode(0o755)).expect("executable");
    let (probe, library) = (probe.display().to_string(), folder.path().join("x").display().to_string());
    let began = Instant::now();
    let args = [
        "--only",
        "D11",
        "--timeout",
        "1s",
        "--probe",
        &probe,
        "--nvml-library",
        &library,
    ];
    let output = doctor(folder.path(), &args);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert_eq!(output.status.code(), Some(2));
    assert!(stdout(&output).contains("did not answer within 1 s"), "{}", stdout(&output));
}

#[test]
fn an_api_server_that_is_not_there_is_said_with_every_check_that_needs_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let missing = folder.path().join("none").display().to_string();
    let output = divvy(
        &["doctor", "--cluster", "--kubeconfig", &missing, "--only", "K01,K16,D01"],
        &[],
    );
    let text = stdout(&output);
    assert!(
        text.contains("SKIP K01") && text.contains("SKIP K16") && text.contains(&missing),
        "{text}"
    );
    assert!(text.ends_with("Not asked for: D01.\n"), "{text}");
}

#[test]
fn a_log_is_explained() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    std::fs::write(&log, b"\xff\nFailed to initialize NVML: Driver/library version mismatch\n").expect("written");
    let log = log.display().to_string();
    let output = divvy(&["doctor", "--explain", &log], &[]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stdout(&output).starts_with("D05 line 2\n"), "{}", stdout(&output));
    std::fs::write(&log, "all is well\n").expect("written");
    let output = divvy(&["doctor", "--explain", &log, "-o", "json"], &[]);
    assert_eq!((output.status.code(), stdout(&output).trim()), (Some(1), "[]"));
}

#[test]
fn wrong_questions_are_refused_with_what_to_type() {
    for (args, part) in [
        (&["doctor", "--only", "X01"][..], "there is no such check; there are D01"),
        (
            &["doctor", "--root", "/nowhere"],
            "--root /nowhere: there is no such folder; give the folder that has",
        ),
        (
            &["doctor", "--root", "/tmp", "--fix"],
            "a copy is not put right; run it on the machine itself",
        ),
        (&["doctor", "--timeout", "0s"], "nobody answers in no time"),
        (&["doctor", "--explain", "/nowhere"], "--explain: /nowhere cannot be read"),
    ] {
        let output = divvy(args, &[]);
        assert!(!output.status.success(), "{args:?}");
        assert!(stderr(&output).contains(part), "{args:?}: {}", stderr(&output));
    }
}
