//! Tests of the texts and of the exit status.

use divvy_smoke_report::{SmokeOutcome, SmokeReport, SmokeStep, StepId};

use crate::{failed, passed, report};

/// A finding has three lines.
#[test]
fn a_report_has_a_line_for_each_step() {
    let warned = SmokeStep::warn(StepId::S06, "H2D 2 GB/s", "it is slow", "reseat the card");
    let skipped = SmokeStep::skip(StepId::S05, "the GPU is shared; --tensor runs it nevertheless");
    insta::assert_snapshot!(report(vec![passed(), failed(), skipped, warned]).text());
}

#[test]
fn the_exit_status_is_that_of_the_worst_step() {
    let skipped = || SmokeStep::skip(StepId::S05, "no tensor cores");
    let warned = || SmokeStep::warn(StepId::S06, "slow", "why", "fix");
    let table: [(Vec<SmokeStep>, SmokeOutcome, u8); 7] = [
        (vec![], SmokeOutcome::Skip, 3),
        (vec![skipped()], SmokeOutcome::Skip, 3),
        (vec![passed()], SmokeOutcome::Pass, 0),
        (vec![passed(), skipped()], SmokeOutcome::Pass, 0),
        (vec![passed(), warned()], SmokeOutcome::Warn, 1),
        (vec![warned(), failed(), passed()], SmokeOutcome::Fail, 2),
        (vec![failed()], SmokeOutcome::Fail, 2),
    ];
    for (steps, outcome, status) in table {
        let report = SmokeReport::new(None, steps);
        assert_eq!((report.result, report.result.exit_status()), (outcome, status), "{report:?}");
        assert!(
            report.text().ends_with(&report.summary()) && report.summary().starts_with(&format!("Result = {}", outcome.word()))
        );
    }
}

#[test]
fn a_step_that_compared_nothing_makes_no_run_pass() {
    for id in StepId::ALL {
        let outcome = SmokeOutcome::of(&[SmokeStep::pass(id, "", 0)]);
        let expected = if id.compares() {
            SmokeOutcome::Fail
        } else {
            SmokeOutcome::Pass
        };
        assert_eq!(outcome, expected, "{id:?}");
    }
}

#[test]
fn what_a_tenant_writes_moves_no_cursor_and_looks_like_no_line() {
    let mut report = report(vec![SmokeStep::fail(
        StepId::S02,
        "a\nPASS S03\u{1b}[2J",
        "b\r\n",
        "\u{202e}c",
    )]);
    if let Some(gpu) = &mut report.gpu {
        gpu.name = "x\nResult = PASS".to_owned();
    }
    let text = report.text();
    assert!(
        !text.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'),
        "{text:?}"
    );
    assert_eq!(text.lines().count(), 6, "{text}");
}

#[test]
fn a_step_is_found_by_its_id_and_by_its_title() {
    for id in StepId::ALL {
        assert_eq!((StepId::parse(id.word()), StepId::parse(id.title())), (Some(id), Some(id)));
        assert_eq!(format!("{id:?}"), id.word());
    }
    assert_eq!(StepId::parse("s03"), Some(StepId::S03));
    assert_eq!(StepId::parse("S10"), None);
}
