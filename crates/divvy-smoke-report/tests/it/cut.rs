//! Tests of the termination message.

use divvy_smoke_report::{SmokeReport, SmokeStep, StepId, StepStatus, TERMINATION_MESSAGE};
use proptest::prelude::*;

use crate::report;

fn step() -> impl Strategy<Value = SmokeStep> {
    let status = prop_oneof![
        Just(StepStatus::Pass),
        Just(StepStatus::Skip),
        Just(StepStatus::Warn),
        Just(StepStatus::Fail)
    ];
    (status, "[a-zé\"\\\\\n]{0,900}", 0_u64..u64::MAX).prop_map(|(status, text, number)| SmokeStep {
        status,
        gpu_at_fault: status == StepStatus::Fail && number % 2 == 0,
        why: Some(text.clone()),
        fix: Some("fix".to_owned()),
        ms: number,
        ..SmokeStep::pass(StepId::S01, text, number)
    })
}

proptest! {
    #[test]
    fn a_termination_message_is_short_valid_and_has_the_result(steps in prop::collection::vec(step(), 0..=9), limit in 300_usize..5000) {
        let steps: Vec<SmokeStep> = steps.into_iter().zip(StepId::ALL).map(|(step, id)| SmokeStep { id, ..step }).collect();
        let whole = report(steps);
        let message = whole.termination_message(limit);
        prop_assert!(message.len() <= limit, "{} bytes", message.len());
        let read = SmokeReport::read(&message).expect("valid");
        prop_assert_eq!(read.result, whole.result);
        prop_assert_eq!(read.steps.len() as u64 + read.cut, whole.steps.len() as u64);
        if let Some(first) = read.steps.first() {
            prop_assert!(whole.step(first.id).is_some_and(|step| step.status == first.status));
        }
        let at_fault = |report: &SmokeReport| report.steps.iter().any(|step| step.gpu_at_fault);
        prop_assert_eq!(at_fault(&read), at_fault(&whole));
    }
}

#[test]
fn the_failure_stays_when_other_steps_are_left_out() {
    let pass = |id| SmokeStep::pass(id, "x".repeat(900), 1);
    let mut steps: Vec<SmokeStep> = StepId::ALL.into_iter().map(pass).collect();
    steps[8] = SmokeStep::fail(StepId::S09, "y".repeat(900), "why", "fix");
    let whole = report(steps);
    let read = SmokeReport::read(&whole.termination_message(TERMINATION_MESSAGE)).expect("valid");
    let ids: Vec<&str> = read.steps.iter().map(|step| step.id.word()).collect();
    assert_eq!((ids, read.cut), (vec!["S01", "S02", "S03", "S09"], 5));
}

#[test]
fn failures_that_blame_the_gpu_are_cut_last() {
    let long = |id| SmokeStep::fail(id, "\u{1}".repeat(3000), "why", "fix");
    let blames = SmokeStep {
        gpu_at_fault: true,
        ..long(StepId::S08)
    };
    let mut whole = report(vec![long(StepId::S01), blames, SmokeStep::pass(StepId::S09, "", 0)]);
    whole.pod = Some("\u{1}".repeat(3000));
    for limit in [TERMINATION_MESSAGE, 300] {
        let message = whole.termination_message(limit);
        assert!(message.len() <= limit, "{} bytes", message.len());
        let read = SmokeReport::read(&message).expect("valid");
        let steps: Vec<_> = read.steps.iter().map(|step| (step.id, step.gpu_at_fault)).collect();
        assert_eq!((steps, read.cut), (vec![(StepId::S08, true)], 2), "{limit}");
    }
}

#[test]
fn a_short_report_is_not_cut() {
    let whole = report(vec![SmokeStep::skip(StepId::S01, "no GPU")]);
    assert_eq!(whole.termination_message(TERMINATION_MESSAGE), whole.json());
}
