//! S08: the program with the probe in its directory.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use divvy_smoke_report::{SmokeReport, SmokeStep, StepId, StepStatus};

use crate::rig::{Rig, UUID, probe, with};

/// Where a probe's script finds its programs.
const PATH: (&str, &str) = ("PATH", "/usr/bin:/bin");

/// A GPU that supports everything, and is healthy.
const HEALTHY: &str = "health = { ecc_errors = [5, 0], remapped_rows = {}, clocks_event_reasons = 1 }";

/// Make a script the probe of a rig.
fn scripted(rig: &Rig, script: &str) {
    rig.install(format!("#!/bin/sh\n{script}\n").as_bytes(), "divvy-probe");
}

/// A rig with the real probe. Between the state before the run and the one after it, the simulated driver's state becomes this one.
fn probed(health: &str, missing: &[&str], after: Option<&str>) -> Rig {
    let rig = Rig::new(12).copied().with_nvml(health, missing);
    let change = match after {
        Some(after) => {
            std::fs::write(rig.path("after"), after).expect("written");
            format!(
                "mv '{}' '{}'",
                rig.path("after").display(),
                rig.path("control.state").display()
            )
        }
        None => ":".to_owned(),
    };
    // The probe's standard input is closed after the change.
    scripted(&rig, &format!("(cat; {change}) | '{}' \"$@\"", probe().display()));
    rig
}

fn report(rig: &Rig, steps: &str) -> SmokeReport {
    let ran = rig.run(&format!("here -o json --steps {steps}"), &[PATH]);
    let report = SmokeReport::read(&ran.out()).unwrap_or_else(|error| panic!("{error}: {ran:?}"));
    assert_eq!(ran.status(), i32::from(report.result.exit_status()), "{ran:?}");
    report
}

fn health(report: &SmokeReport) -> &SmokeStep {
    report.step(StepId::S08).expect("S08")
}

#[test]
fn a_probe_beside_the_program_says_whether_the_gpu_is_healthy() {
    let rig = Rig::new(12).copied();
    let state = |facts: &str| format!("echo '{{\"snapshot\":{{\"gpus\":[{{\"uuid\":\"{UUID}\",{facts}}}]}}}}'");
    let (good, lost) = (state("\"temperature\":41"), state("\"lost\":true"));
    for (script, status, part, at_fault) in [
        (
            format!("{good}; cat; {good}"),
            StepStatus::Pass,
            "during the run, 41 °C",
            false,
        ),
        (
            format!("{good}; cat; {lost}"),
            StepStatus::Fail,
            "the GPU was lost during the run",
            true,
        ),
        (
            "echo 'divvy-probe: no driver' >&2; exit 1".to_owned(),
            StepStatus::Skip,
            "divvy-probe finds nothing here: no driver",
            false,
        ),
        (
            format!("{good}; cat; echo 'divvy-probe: gone (driver_not_loaded)' >&2; exit 1"),
            StepStatus::Fail,
            "the driver answered before the run, and after it: gone (driver_not_loaded)",
            false,
        ),
        (
            format!("{good}; cat; echo 'divvy-probe: gone (gpu_lost)' >&2; exit 1"),
            StepStatus::Fail,
            "and after it: gone (gpu_lost)",
            true,
        ),
        (
            format!("{good}; cat; echo 'divvy-probe: a call has not returned' >&2; exit 70"),
            StepStatus::Fail,
            "divvy-probe has ended: a call has not returned",
            true,
        ),
        (
            format!("{good}; kill -9 $$"),
            StepStatus::Skip,
            "divvy-probe was ended: signal: 9",
            false,
        ),
        (
            "echo x; cat".to_owned(),
            StepStatus::Skip,
            "divvy-probe gave no snapshot",
            false,
        ),
        ("exec sleep 60".to_owned(), StepStatus::Fail, "did not answer in time", true),
        (
            format!("{good}; exec sleep 60"),
            StepStatus::Fail,
            "did not answer in time",
            true,
        ),
    ] {
        scripted(&rig, &script);
        let ran = rig.run("here -o json --steps S08 --timeout 4s", &[PATH]);
        let report = SmokeReport::read(&ran.out()).expect("a report");
        let step = health(&report);
        assert_eq!((step.status, step.gpu_at_fault), (status, at_fault), "{script}: {step:?}");
        assert!(step.found.contains(part), "{script}: {}", step.found);
    }
}

/// The run ends in its time, and the probe is not left behind.
#[test]
fn a_hanging_probe_prolongs_no_run() {
    let rig = Rig::new(12).copied();
    scripted(&rig, &format!("echo $$ > '{}'; exec sleep 600", rig.path("pid").display()));
    let began = Instant::now();
    let ran = rig.run(
        "here -o json --steps S02,S08 --timeout 3s",
        &[PATH, ("DIVVY_CUDA_SIM_HANG", "vector_add:1")],
    );
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let report = SmokeReport::read(&ran.out()).expect("a report");
    assert_eq!(with(&report, StepStatus::Fail), [StepId::S02], "{}", report.text());
    assert_eq!(health(&report).found, "no time was left");
    let pid = std::fs::read_to_string(rig.path("pid")).expect("the PID");
    let is_alive = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
    };
    while is_alive() {
        assert!(began.elapsed() < Duration::from_secs(30), "the probe lives");
        std::thread::yield_now();
    }
}

#[test]
fn a_healthy_gpu_passes_with_its_numbers() {
    let report = report(&probed(HEALTHY, &[], None), "S02,S08");
    let expected = "the driver answers, and reported no error during the run, 0 uncorrected ECC errors, 0 remapped rows, 35 °C, no slowdown by the hardware";
    assert_eq!(
        (health(&report).status, health(&report).found.as_str()),
        (StepStatus::Pass, expected)
    );
}

#[test]
fn the_drivers_states_before_and_after_are_compared() {
    let state = |health: &str| format!("{{\"gpus\":{{\"0\":{{\"health\":{health}}}}}}}");
    for (before, after, status, part) in [
        (
            HEALTHY,
            Some(state("{\"ecc_errors\":[5,1]}")),
            StepStatus::Fail,
            "the number of uncorrected ECC errors rose from 0 to 1 during the run",
        ),
        (
            HEALTHY,
            Some("{\"gpus\":{\"0\":{\"lost\":true}}}".to_owned()),
            StepStatus::Fail,
            "the GPU was lost during the run",
        ),
        (
            HEALTHY,
            Some(state("{\"remapped_rows\":{\"failure\":true}}")),
            StepStatus::Fail,
            "a row of the GPU's memory could not be replaced by a spare one",
        ),
        (
            HEALTHY,
            Some(state("{\"clocks_event_reasons\":72}")),
            StepStatus::Warn,
            "the GPU is slowed down: hardware slowdown, hardware thermal slowdown; the driver answers",
        ),
        (
            "health = { ecc_errors = [0, 2] }",
            None,
            StepStatus::Warn,
            "the GPU has had 2 uncorrected ECC errors since the driver was loaded; the driver answers",
        ),
        (
            "health = { remapped_rows = { uncorrectable = 1, pending = true } }",
            None,
            StepStatus::Warn,
            "rows of the GPU's memory are to be replaced at the next reset; the driver answers, 1 remapped row",
        ),
        (
            "health = { retired_pages_pending = true }",
            None,
            StepStatus::Warn,
            "pages of the GPU's memory are to be replaced at the next reset",
        ),
    ] {
        let report = report(&probed(before, &[], after.as_deref()), "S08");
        let step = health(&report);
        assert_eq!(
            (step.status, step.gpu_at_fault),
            (status, status == StepStatus::Fail),
            "{step:?}"
        );
        assert!(step.found.starts_with(part), "{}", step.found);
    }
}

#[test]
fn an_old_driver_without_these_functions_is_no_finding() {
    let names = [
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ];
    let sick = "health = { ecc_errors = [0, 2], remapped_rows = { pending = true }, retired_pages_pending = true, clocks_event_reasons = 8 }";
    for (missing, status, found) in [
        (
            &names[..],
            StepStatus::Pass,
            "the driver answers, and reported no error during the run, 35 °C",
        ),
        // The older name is enough.
        (
            &names[..4],
            StepStatus::Warn,
            "the GPU is slowed down: hardware slowdown; the driver answers, 35 °C",
        ),
    ] {
        let report = report(&probed(sick, missing, None), "S08");
        assert_eq!((health(&report).status, health(&report).found.as_str()), (status, found));
    }
}

#[test]
fn an_xid_fails_a_run_despite_hanging_calls() {
    let rig = probed(HEALTHY, &[], None);
    let variables = [PATH, ("DIVVY_CUDA_SIM_HANG", "vector_add:1")];
    let mut command = rig.command("here -o json --steps S02,S08 --timeout 4s", &variables);
    let child = command.stdout(Stdio::piped()).spawn().expect("started");
    let started = Instant::now();
    // The probe's library listens, and the probe registers for events before it reads the state.
    let xid = || {
        let mut control = UnixStream::connect(rig.path("control")).ok()?;
        writeln!(control, "{{\"op\":\"xid\",\"gpu\":0,\"xid\":79}}").ok()?;
        let mut answer = String::new();
        BufReader::new(control).read_line(&mut answer).ok()?;
        answer.contains("\"delivered\":1").then_some(())
    };
    while xid().is_none() {
        assert!(started.elapsed() < Duration::from_secs(20), "the probe does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().expect("ended");
    let report = SmokeReport::read(&String::from_utf8_lossy(&output.stdout)).expect("a report");
    let step = health(&report);
    assert_eq!(
        (step.status, step.gpu_at_fault),
        (StepStatus::Fail, true),
        "{}",
        report.text()
    );
    assert_eq!(step.found, "the driver reported XID 79 during the run");
}
