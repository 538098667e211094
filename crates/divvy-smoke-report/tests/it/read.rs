//! Tests of reading what a tenant may have written.

use divvy_smoke_report::{MOST_BYTES, MOST_TEXT, ReportError, SmokeOutcome, SmokeReport, SmokeStep, StepId};
use proptest::prelude::*;

use crate::{failed, passed, report};

#[test]
fn a_report_is_read_as_it_was_written() {
    let mut written = report(vec![passed(), failed(), SmokeStep::skip(StepId::S05, "no")]);
    written.node = Some("gpu-node-1".to_owned());
    assert_eq!(SmokeReport::read(&written.json()), Ok(written));
}

#[test]
fn json_has_the_documented_keys() {
    insta::assert_snapshot!(report(vec![passed(), failed()]).json());
}

#[test]
fn a_report_that_is_not_one_of_this_version_is_refused() {
    let good = report(vec![passed()]).json();
    let table = [
        ("x".repeat(MOST_BYTES + 1), "at most 65536 are read"),
        (String::new(), "not a report"),
        ("{}".to_owned(), "not a report"),
        ("[]".to_owned(), "not a report"),
        (good.replace("\"S02\"", "\"S10\""), "not a report"),
        (good.replace("\"ms\":12", "\"ms\":-1"), "not a report"),
        (good.replace("\"result\"", "\"other\""), "not a report"),
        (
            good.replace(
                &format!("\"version\":\"{}\"", divvy_smoke_report::VERSION),
                "\"version\":\"9.9.9\"",
            ),
            "from divvy-smoke 9.9.9",
        ),
        (
            good.replace("50000 elements", &"x".repeat(MOST_TEXT + 1)),
            "more than 4096 bytes",
        ),
        (report(vec![passed(), passed()]).json(), "the step S02 twice"),
        (
            good.replace("\"bytes\":200000", "\"bytes\":200000,\"gpuAtFault\":true"),
            "the step S02 says that the GPU is at fault, and has not failed",
        ),
        (
            good.replace("\"bytes\":200000", "\"bytes\":0"),
            "says PASS, and its steps say FAIL",
        ),
        (
            report(vec![failed()])
                .json()
                .replace("\"result\":\"FAIL\"", "\"result\":\"PASS\""),
            "says PASS, and its steps say FAIL",
        ),
    ];
    for (text, part) in table {
        let error = SmokeReport::read(&text).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn steps_that_were_left_out_cannot_improve_the_result() {
    let mut cut = report(vec![failed()]);
    cut.cut = 1;
    cut.result = SmokeOutcome::Pass;
    let expected = ReportError::Contradiction {
        said: SmokeOutcome::Pass,
        steps: SmokeOutcome::Fail,
    };
    assert_eq!(SmokeReport::read(&cut.json()), Err(expected));
}

proptest! {
    #[test]
    fn a_changed_byte_never_makes_a_failed_run_pass(at in 0_usize..900, byte in 32_u8..127) {
        let mut text = report(vec![passed(), failed()]).json().into_bytes();
        let at = at % text.len();
        text[at] = byte;
        if let Ok(read) = SmokeReport::read(&String::from_utf8(text).expect("ASCII")) {
            prop_assert_eq!(read.result, SmokeOutcome::Fail);
        }
    }
}
