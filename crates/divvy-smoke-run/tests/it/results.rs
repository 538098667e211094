//! What the end of a pod means.

use std::time::Duration;

use divvy_smoke_report::{SmokeReport, SmokeStep, StepId};
use divvy_smoke_run::{GpuVerdict, Mark, Planned, RunEvent, RunLimits, SmokeAction, SmokeRun, SmokeSummary, TestPodState, Tried};

use crate::world::{LIMITS, World, ended, passed, planned, planned_with, report, wrong};

fn fail() -> SmokeStep {
    SmokeStep::fail(
        StepId::S03,
        "address 0x1000 has 0xfe instead of 0xff",
        "results on this GPU are wrong",
        "drain the node, and replace the GPU",
    )
}

fn warn() -> SmokeStep {
    SmokeStep::warn(
        StepId::S06,
        "host to GPU: 11 GB/s, half of what the link can do",
        "copies take twice as long",
        "divvy doctor shows the link",
    )
}

fn pass(id: StepId) -> SmokeStep {
    SmokeStep::pass(id, "as it should be", 4096)
}

/// Return the word and the reason for a container that ended like this on the GPU `GPU-0`.
fn judged(seen: TestPodState) -> (&'static str, String) {
    let mut run = SmokeRun::new(&planned(1), LIMITS);
    assert_eq!(run.step(0, RunEvent::Time), [SmokeAction::Create(0)]);
    assert_eq!(run.step(1, RunEvent::Created(0)), []);
    assert_eq!(run.step(2, RunEvent::Seen(0, seen)), [SmokeAction::Delete(0)]);
    let verdict = run.results().next().expect("a result").verdict;
    let reason = match verdict {
        GpuVerdict::Tested(_) => String::new(),
        GpuVerdict::Broken { found, .. } => found.clone(),
        GpuVerdict::Skipped(reason) | GpuVerdict::Untried { reason, .. } => reason.clone(),
    };
    (verdict.word(), reason)
}

#[test]
fn a_result_counts_only_if_nothing_contradicts_it() {
    let good = report("GPU-0", vec![pass(StepId::S02)]);
    let with = |status: Option<i64>, reason: Option<&str>, message: Option<String>| TestPodState::Ended {
        status,
        reason: reason.map(str::to_owned),
        message,
    };
    let other_version = SmokeReport {
        version: "0.0.0".to_owned(),
        ..good.clone()
    };
    let lie = SmokeReport {
        result: divvy_smoke_report::SmokeOutcome::Pass,
        ..report("GPU-0", vec![fail()])
    };
    let of_nothing = |step: SmokeStep| SmokeReport::new(None, vec![step]);
    let table = [
        (ended(&good), "PASS", ""),
        (
            ended(&of_nothing(pass(StepId::S02))),
            "ERROR",
            "ended with status 0, and its result says PASS of no GPU",
        ),
        (
            ended(&of_nothing(warn())),
            "ERROR",
            "ended with status 1, and its result says WARN of no GPU",
        ),
        // Without a driver, the program knows no GPU.
        (ended(&of_nothing(fail())), "FAIL", ""),
        (ended(&report("GPU-0", vec![pass(StepId::S02), fail()])), "FAIL", ""),
        (ended(&report("GPU-0", vec![pass(StepId::S02), warn()])), "WARN", ""),
        (
            ended(&report("GPU-0", vec![SmokeStep::skip(StepId::S01, "no GPU")])),
            "ERROR",
            "",
        ),
        (
            ended(&report("GPU-9", vec![pass(StepId::S02)])),
            "FAIL",
            "the container got GPU GPU-9, and GPU-0 was allocated",
        ),
        (
            ended(&report("MIG-9", vec![pass(StepId::S02)])),
            "FAIL",
            "the container got GPU MIG-9, and GPU-0 was allocated",
        ),
        (
            with(Some(137), Some("OOMKilled"), None),
            "ERROR",
            "the container ended with status 137 (OOMKilled) and left no result",
        ),
        (
            with(Some(0), None, Some(String::new())),
            "ERROR",
            "ended with status 0 and left no result",
        ),
        (
            with(None, Some("UnexpectedAdmissionError: no room"), None),
            "ERROR",
            "the container never ran (UnexpectedAdmissionError: no room)",
        ),
        (
            with(
                Some(128),
                Some("StartError"),
                Some("exec: \"/usr/bin/divvy-smoke\": stat /usr/bin/divvy-smoke: no such file or directory: unknown".to_owned()),
            ),
            "ERROR",
            "could not be started: exec: \"/usr/bin/divvy-smoke\": stat /usr/bin/divvy-smoke: no such file or directory: unknown; if Divvy's agent is not installed, the image must be Divvy's",
        ),
        (
            with(Some(0), None, Some("Test PASSED".to_owned())),
            "ERROR",
            "its result cannot be read: this is not a report of divvy-smoke",
        ),
        (
            with(Some(0), None, Some(other_version.json())),
            "ERROR",
            "the report is from divvy-smoke 0.0.0",
        ),
        (
            with(Some(0), None, Some(lie.json())),
            "ERROR",
            "the report says PASS, and its steps say FAIL",
        ),
        (
            with(Some(2), None, Some(good.json())),
            "ERROR",
            "ended with status 2, and its result says PASS",
        ),
        (with(Some(0), None, Some("x".repeat(100_000))), "ERROR", "has 100000 bytes"),
    ];
    for (seen, word, part) in table {
        let (found, reason) = judged(seen.clone());
        assert!(
            found == word && reason.contains(part),
            "{found} {reason:?}, not {word} {part:?}: {seen:?}"
        );
    }
}

#[test]
fn another_mig_device_is_the_configurations_fault() {
    let mut planned = planned(1);
    planned[0].target.uuid = "MIG-0".to_owned();
    let mut run = SmokeRun::new(&planned, LIMITS);
    run.step(0, RunEvent::Time);
    run.step(1, RunEvent::Created(0));
    run.step(2, RunEvent::Seen(0, passed("MIG-9")));
    let verdict = run.results().next().expect("a result").verdict;
    assert!(
        matches!(verdict, GpuVerdict::Untried { reason, .. } if reason.contains("MIG-9") && reason.contains("divvy scheduler-config --mig-profile")),
        "{verdict:?}"
    );
}

/// A pod that finds a node late is not explained.
#[test]
fn only_a_pod_without_a_node_is_explained() {
    let mut run = SmokeRun::new(&planned(2), LIMITS);
    assert_eq!(run.step(0, RunEvent::Time), [SmokeAction::Create(0), SmokeAction::Create(1)]);
    for number in 0..2 {
        assert_eq!(
            run.step(
                10,
                RunEvent::Seen(number, TestPodState::Unscheduled(Some("0/4 nodes".to_owned())))
            ),
            []
        );
    }
    assert_eq!(run.next_ms(), Some(15_010));
    assert_eq!(run.step(15_009, RunEvent::Time), []);
    assert_eq!(run.step(15_010, RunEvent::Time), [SmokeAction::Explain(vec![0, 1])]);
    // While the cluster is read, one gets a node.
    assert_eq!(run.step(15_500, RunEvent::Seen(1, TestPodState::Starting(None))), []);
    let answers = vec![(0, "Pod a waits.".to_owned()), (1, "Pod b is running.".to_owned())];
    assert_eq!(run.step(16_000, RunEvent::Explained(answers)), [SmokeAction::Delete(0)]);
    assert_eq!(run.progress(), (1, 2));
    let verdict = run.results().next().expect("a result").verdict;
    let expected = GpuVerdict::Untried {
        reason: "no node took the pod: 0/4 nodes".to_owned(),
        explanation: Some("Pod a waits.".to_owned()),
    };
    assert_eq!(verdict, &expected);
    assert_eq!(run.step(17_000, RunEvent::Seen(1, passed("GPU-1"))), [SmokeAction::Delete(1)]);
    assert!(!run.is_over());
    run.step(17_100, RunEvent::Deleted(0));
    run.step(17_100, RunEvent::Gone(1));
    assert!(run.is_over());
}

#[test]
fn a_pod_that_is_created_after_ctrl_c_is_deleted_at_once() {
    let mut run = SmokeRun::new(&planned(2), LIMITS);
    assert_eq!(run.step(0, RunEvent::Time), [SmokeAction::Create(0), SmokeAction::Create(1)]);
    assert_eq!(run.step(1, RunEvent::Stop), []);
    assert_eq!(run.step(2, RunEvent::Created(0)), [SmokeAction::Delete(0)]);
    assert_eq!(
        run.step(2, RunEvent::Unclear(1, "timeout".to_owned())),
        [SmokeAction::Delete(1)]
    );
    assert!(!run.is_over());
    run.step(3, RunEvent::Deleted(0));
    run.step(3, RunEvent::Gone(1));
    assert!(run.is_over());
}

/// A pull that succeeds in the end does not end the try.
#[test]
fn only_a_missing_image_ends_a_try() {
    let stuck = TestPodState::Starting(Some("ErrImagePull: no such host".to_owned()));
    let mut run = SmokeRun::new(&planned(2), LIMITS);
    run.step(0, RunEvent::Time);
    for number in 0..2 {
        run.step(10, RunEvent::Created(number));
        assert_eq!(run.step(20, RunEvent::Seen(number, stuck.clone())), []);
    }
    run.step(5000, RunEvent::Seen(1, TestPodState::Running));
    assert_eq!(run.step(15_020, RunEvent::Time), [SmokeAction::Delete(0)]);
    let verdict = run.results().next().expect("a result").verdict;
    assert_eq!(
        verdict,
        &GpuVerdict::Untried {
            reason: "the container does not start: ErrImagePull: no such host".to_owned(),
            explanation: None
        }
    );
    assert_eq!(run.progress(), (1, 2));
}

#[test]
fn a_test_that_hangs_is_given_up() {
    let world = World {
        endless: [1].into(),
        ..World::default()
    };
    let history = world.play(&planned(3), LIMITS);
    assert_eq!(history.words(), ["PASS", "ERROR", "PASS"]);
    assert!(history.left.is_empty());
    let verdict = history.run.results().nth(1).expect("a result").verdict;
    assert!(matches!(verdict, GpuVerdict::Untried { reason, .. } if reason == "the test did not end within 150 s"));
}

fn tested(report: SmokeReport) -> GpuVerdict {
    GpuVerdict::Tested(Box::new(report))
}

fn tried<'t>(planned: &'t Planned, verdict: &'t GpuVerdict, time: Duration) -> Tried<'t> {
    Tried {
        target: &planned.target,
        verdict,
        time,
        marked: None,
    }
}

/// One GPU of each kind.
fn all_kinds() -> Vec<(Planned, GpuVerdict)> {
    let verdicts = [
        tested(report(
            "GPU-0",
            vec![pass(StepId::S01), pass(StepId::S02), SmokeStep::skip(StepId::S05, "shared")],
        )),
        tested(report(
            "GPU-1",
            vec![pass(StepId::S01), fail(), SmokeStep::skip(StepId::S05, "shared")],
        )),
        tested(report("GPU-2", vec![pass(StepId::S01), warn()])),
        GpuVerdict::Skipped("full: 0 MiB of 16384 MiB are free, and the test requests 1024 MiB".to_owned()),
        GpuVerdict::Broken {
            found: "Divvy's agent does not offer the GPU: XID 79".to_owned(),
            why: "no pod gets it".to_owned(),
            fix: "divvy doctor, on the node, names the cause".to_owned(),
        },
        GpuVerdict::Untried {
            reason: "no node took the pod: 0/2 nodes\u{1b}[31m are available".to_owned(),
            explanation: Some("Pod a waits.\nNo node has room.".to_owned()),
        },
        tested(report("GPU-6", vec![SmokeStep::skip(StepId::S01, "GPU older than sm_30")])),
    ];
    planned(7).into_iter().zip(verdicts).collect()
}

#[test]
fn the_table_shows_each_gpu_and_says_what_is_wrong() {
    let kinds = all_kinds();
    let results = || {
        kinds
            .iter()
            .map(|(planned, verdict)| tried(planned, verdict, Duration::from_millis(3210)))
    };
    insta::assert_snapshot!(SmokeSummary::new(results()).text());
    insta::assert_snapshot!(serde_json::to_string_pretty(&SmokeSummary::new(results().skip(3).take(3))).expect("JSON"));
}

#[test]
fn the_exit_status_is_that_of_the_worst_gpu() {
    let kinds = all_kinds();
    for (which, word, status) in [
        (&[0][..], "PASS", 0),
        (&[0, 3], "PASS", 0),
        (&[0, 2, 3], "WARN", 1),
        (&[0, 2, 5], "ERROR", 3),
        (&[0, 1, 5], "FAIL", 2),
        (&[0, 4], "FAIL", 2),
        (&[0, 6], "ERROR", 3),
        (&[3], "SKIP", 3),
    ] {
        let chosen = which.iter().map(|at| &kinds[*at]);
        let summary = SmokeSummary::new(chosen.map(|(planned, verdict)| tried(planned, verdict, Duration::ZERO)));
        assert_eq!((summary.result, summary.exit_status()), (word, status), "{which:?}");
    }
}

/// A run of one GPU with `--report`, after its pod was created.
fn reporting(is_out: bool) -> SmokeRun {
    let out = if is_out { [0].into() } else { [].into() };
    let mut run = SmokeRun::new(&planned_with(1, &out), RunLimits { report: true, ..LIMITS });
    assert_eq!(run.step(0, RunEvent::Time), [SmokeAction::Create(0)]);
    assert_eq!(run.step(1, RunEvent::Created(0)), []);
    run
}

/// The GPU returns to service only if all steps that matter passed.
#[test]
fn only_its_own_failure_takes_a_gpu_out() {
    let before = || Some(Mark::Failed("S03 memory: wrong".to_owned()));
    let own = |id: StepId| {
        let mut step = SmokeStep::fail(id, "1 of 8 is wrong", "x", "y");
        step.gpu_at_fault = true;
        step
    };
    let all = || vec![pass(StepId::S02), pass(StepId::S03), pass(StepId::S04)];
    let with = |step: SmokeStep| [all(), vec![step]].concat();
    let failed = |id: StepId| Some(Mark::Failed(format!("{} {}: 1 of 8 is wrong", id.word(), id.title())));
    let table = [
        (false, all(), None),
        (false, vec![own(StepId::S03)], failed(StepId::S03)),
        (false, vec![fail()], None),
        (
            false,
            with(SmokeStep::fail(StepId::S07, "more than the share was granted", "x", "y")),
            None,
        ),
        (true, all(), Some(Mark::Passed)),
        (true, with(warn()), Some(Mark::Passed)),
        (true, vec![own(StepId::S04)], failed(StepId::S04)),
        (true, vec![fail()], before()),
        (true, vec![pass(StepId::S02)], before()),
        (
            true,
            vec![
                pass(StepId::S02),
                SmokeStep::skip(StepId::S03, "not asked for"),
                pass(StepId::S04),
            ],
            before(),
        ),
        (true, vec![SmokeStep::skip(StepId::S01, "no GPU")], before()),
    ];
    for (is_out, steps, expected) in table {
        let mut run = reporting(is_out);
        let actions = run.step(2, RunEvent::Seen(0, ended(&report("GPU-0", steps.clone()))));
        let tell = expected.map(|mark| SmokeAction::Mark(0, mark));
        let expected: Vec<SmokeAction> = tell.into_iter().chain([SmokeAction::Delete(0)]).collect();
        assert_eq!(actions, expected, "{is_out} {steps:?}");
    }
    // The step that failed before must have passed, too.
    let mut planned = planned(1);
    planned[0].target.failed_before = Some("S05 tensor cores: wrong".to_owned());
    for (steps, is_in) in [(all(), false), (with(pass(StepId::S05)), true)] {
        let verdict = tested(report("GPU-0", steps));
        assert_eq!(Mark::of(&planned[0].target, &verdict) == Some(Mark::Passed), is_in);
    }
}

#[test]
fn without_report_no_mark_is_written() {
    let mut run = SmokeRun::new(&planned(1), LIMITS);
    run.step(0, RunEvent::Time);
    run.step(1, RunEvent::Created(0));
    assert_eq!(run.step(2, RunEvent::Seen(0, wrong("GPU-0"))), [SmokeAction::Delete(0)]);
}

#[test]
fn a_run_is_not_over_before_the_mark_is_written() {
    let mut run = reporting(false);
    let told = Mark::Failed("S03 memory: 1 of 8 words is wrong".to_owned());
    let actions = run.step(2, RunEvent::Seen(0, wrong("GPU-0")));
    assert_eq!(actions, [SmokeAction::Mark(0, told.clone()), SmokeAction::Delete(0)]);
    run.step(3, RunEvent::Gone(0));
    assert!(!run.is_over());
    run.step(4, RunEvent::Marked(0, None));
    assert!(run.is_over());
    assert_eq!(run.results().next().expect("a result").marked, Some((&told, None)));
}

#[test]
fn a_test_stopped_at_creation_never_stays_open() {
    let mut run = SmokeRun::new(&planned_with(1, &[0].into()), RunLimits { report: true, ..LIMITS });
    assert_eq!(run.step(0, RunEvent::Time), [SmokeAction::Create(0)]);
    // Until the answer arrives, the mark that opens the GPU may be written at any moment.
    assert_eq!(run.step(1, RunEvent::Stop), []);
    let before = Mark::Failed("S03 memory: wrong".to_owned());
    assert_eq!(
        run.step(2, RunEvent::Created(0)),
        [SmokeAction::Mark(0, before), SmokeAction::Delete(0)]
    );
}

#[test]
fn the_text_says_what_became_of_each_gpu() {
    let (failed, passed) = (Mark::Failed("S03 memory: wrong".to_owned()), Mark::Passed);
    let good = || tested(report("GPU-0", vec![pass(StepId::S02), pass(StepId::S03), pass(StepId::S04)]));
    let verdicts = [
        (tested(report("GPU-0", vec![fail()])), &failed, None),
        (good(), &passed, None),
        (tested(report("GPU-0", vec![pass(StepId::S02)])), &failed, None),
        (GpuVerdict::Skipped("full".to_owned()), &failed, None),
        (good(), &passed, Some("nodes \"n0\" is forbidden")),
    ];
    let planned = planned_with(5, &(1..5).collect());
    let results = planned.iter().zip(&verdicts).map(|(planned, (verdict, mark, error))| Tried {
        marked: Some((mark, *error)),
        ..tried(planned, verdict, Duration::from_secs(3))
    });
    insta::assert_snapshot!(SmokeSummary::new(results.clone()).text());
    // A GPU that passed and is still out of service is not done.
    assert_eq!(SmokeSummary::new(results.skip(4)).exit_status(), 3);
}
