//! Tests of the termination message.

use divvy_smoke_report::{Id, Report, Status, Step, TERMINATION_MESSAGE};
use proptest::prelude::*;

use crate::report;

fn step() -> impl Strategy<Value = Step> {
    let status = prop_oneof![Just(Status::Pass), Just(Status::Skip), Just(Status::Warn), Just(Status::Fail)];
    (status, "[a-zé\"\\\\\n]{0,900}", 0_u64..u64::MAX).prop_map(|(status, text, number)| Step {
        status,
        gpu_at_fault: status == Status::Fail && number % 2 == 0,
        why: Some(text.clone()),
        fix: Some("fix".to_owned()),
        ms: number,
        ..Step::pass(Id::S01, text, number)
    })
}

proptest! {
    #[test]
    fn a_termination_message_is_short_valid_and_has_the_result(steps in prop::collection::vec(step(), 0..=9), limit in 300_usize..5000) {
        let steps: Vec<Step> = steps.into_iter().zip(Id::ALL).map(|(step, id)| Step { id, ..step }).collect();
        let whole = report(steps);
        let message = whole.termination_message(limit);
        prop_assert!(message.len() <= limit, "{} bytes", message.len());
        let read = Report::read(&message).expect("valid");
        prop_assert_eq!(read.result, whole.result);
        prop_assert_eq!(read.steps.len() as u64 + read.cut, whole.steps.len() as u64);
        if let Some(first) = read.steps.first() {
            prop_assert!(whole.step(first.id).is_some_and(|step| step.status == first.status));
        }
        let at_fault = |report: &Report| report.steps.iter().any(|step| step.gpu_at_fault);
        prop_assert_eq!(at_fault(&read), at_fault(&whole));
    }
}

#[test]
fn the_failure_stays_when_other_steps_are_left_out() {
    let pass = |id| Step::pass(id, "x".repeat(900), 1);
    let mut steps: Vec<Step> = Id::ALL.into_iter().map(pass).collect();
    steps[8] = Step::fail(Id::S09, "y".repeat(900), "why", "fix");
    let whole = report(steps);
    let read = Report::read(&whole.termination_message(TERMINATION_MESSAGE)).expect("valid");
    let ids: Vec<&str> = read.steps.iter().map(|step| step.id.word()).collect();
    assert_eq!((ids, read.cut), (vec!["S01", "S02", "S03", "S09"], 5));
}

#[test]
fn failures_that_blame_the_gpu_are_cut_last() {
    let long = |id| Step::fail(id, "\u{1}".repeat(3000), "why", "fix");
    let blames = Step {
        gpu_at_fault: true,
        ..long(Id::S08)
    };
    let mut whole = report(vec![long(Id::S01), blames, Step::pass(Id::S09, "", 0)]);
    whole.pod = Some("\u{1}".repeat(3000));
    for limit in [TERMINATION_MESSAGE, 300] {
        let message = whole.termination_message(limit);
        assert!(message.len() <= limit, "{} bytes", message.len());
        let read = Report::read(&message).expect("valid");
        let steps: Vec<_> = read.steps.iter().map(|step| (step.id, step.gpu_at_fault)).collect();
        assert_eq!((steps, read.cut), (vec![(Id::S08, true)], 2), "{limit}");
    }
}

#[test]
fn a_short_report_is_not_cut() {
    let whole = report(vec![Step::skip(Id::S01, "no GPU")]);
    assert_eq!(whole.termination_message(TERMINATION_MESSAGE), whole.json());
}
