//! The program never says PASS where something was not computed.

use divvy_smoke::StepFinding;
use divvy_smoke::steps::StepProblem;
use divvy_smoke::steps::accounting::HeldMemory;
use divvy_smoke_report::{SmokeOutcome, StepId};

use crate::fake::{Case, MIB, Machine};

/// Every code that the driver's documentation names for these calls, and one that it does not name.
const CODES: [i32; 35] = [
    1, 2, 3, 4, 34, 46, 100, 101, 200, 201, 209, 214, 218, 220, 221, 222, 304, 400, 500, 600, 700, 702, 715, 716, 719, 800, 801,
    802, 803, 804, 805, 808, 810, 999, 12_345,
];

#[test]
fn without_a_fault_every_step_passes() {
    let ran = Case::isolated().run();
    assert_eq!(ran.report().result, SmokeOutcome::Pass, "{}", ran.report().text());
    assert_eq!(ran.steps.len(), 8);
    assert!(
        ran.steps
            .iter()
            .all(|step| step.status == divvy_smoke_report::StepStatus::Pass)
    );
}

#[test]
fn an_error_at_any_call_is_a_failure_of_its_step() {
    let whole = Case::isolated().run().calls;
    assert!(whole.len() > 150, "{} calls", whole.len());
    // The allocations beyond the limit must be refused, with code 2.
    let beyond = |number: usize, code: i32| {
        let (id, call) = whole[number - 1];
        let last = whole.iter().rposition(|(of, call)| *of == id && *call == "cuMemAlloc_v2");
        id == StepId::S07 && call == "cuMemAlloc_v2" && last == Some(number - 1) && code == 2
    };
    for number in 1..=whole.len() {
        for code in CODES.into_iter().filter(|code| !beyond(number, *code)) {
            let ran = Case {
                fault: Some((number, code)),
                ..Case::isolated()
            }
            .run();
            let (id, call) = whole[number - 1];
            assert_eq!(ran.failed(), [id], "{code} at call {number}, {call}\n{}", ran.report().text());
            assert_eq!(ran.report().result.exit_status(), 2);
            let step = ran.steps.iter().find(|step| step.id == id).expect("the step");
            assert!(
                step.found.contains(&code.to_string()) && step.found.contains(call),
                "{call}: {}",
                step.found
            );
            let at_fault = [214, 220, 700, 702, 715, 716, 719].contains(&code) && !matches!(id, StepId::S07 | StepId::S09);
            assert_eq!(step.gpu_at_fault, at_fault, "{code} at {call} in {id:?}");
        }
    }
}

#[test]
fn a_failing_allocation_never_passes() {
    for isolation in [false, true] {
        let case = || if isolation { Case::isolated() } else { Case::default() };
        let calls = case().run().calls;
        let is_allocation = |call: &str| call.starts_with("cuMemAlloc");
        let allocations: Vec<usize> = (1..=calls.len())
            .filter(|number| is_allocation(calls[number - 1].1))
            .collect();
        assert!(allocations.len() >= 16, "{}", allocations.len());
        // But for the one that must fail.
        let beyond = allocations
            .iter()
            .rfind(|number| isolation && calls[**number - 1].0 == StepId::S07);
        for number in allocations.iter().filter(|number| Some(*number) != beyond) {
            let ran = Case {
                fault: Some((*number, 2)),
                ..case()
            }
            .run();
            assert_eq!(
                ran.report().result,
                SmokeOutcome::Fail,
                "call {number}\n{}",
                ran.report().text()
            );
        }
    }
}

#[test]
fn a_call_that_silently_does_nothing_is_noticed() {
    let works = ["cuLaunchKernel", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemcpyDtoDAsync_v2"];
    let calls = Case::default().run().calls;
    let numbers: Vec<usize> = (1..=calls.len())
        .filter(|number| works.contains(&calls[number - 1].1))
        .collect();
    assert!(numbers.len() > 35, "{}", numbers.len());
    for number in numbers {
        let machine = Machine {
            silent: Some(number),
            ..Machine::default()
        };
        let ran = Case::of(machine).run();
        let (id, call) = calls[number - 1];
        assert_eq!(ran.failed(), [id], "call {number}, {call}\n{}", ran.report().text());
    }
}

#[test]
fn a_copy_that_does_only_its_second_half_is_noticed_and_named() {
    let calls = Case::default().run().calls;
    let copies = ["cuMemcpyDtoH_v2", "cuMemcpyDtoDAsync_v2", "cuMemcpyHtoD_v2"];
    let of = |id, name: &str| {
        (1..=calls.len())
            .find(|number| calls[number - 1] == (id, name))
            .expect("a copy")
    };
    let downloads: Vec<usize> = (1..=calls.len()).filter(|number| calls[number - 1].1 == copies[0]).collect();
    let (last, others) = downloads.split_last().expect("downloads");
    let mut named: Vec<(usize, &str)> = others.iter().map(|number| (*number, "")).collect();
    named.push((*last, "from the GPU: the word at byte 0 is wrong"));
    named.push((
        of(StepId::S06, copies[1]),
        "within the GPU: 256 of 512 words are wrong, the first at byte 0",
    ));
    named.push((
        of(StepId::S06, copies[2]),
        "to the GPU: 512 of 1024 words are wrong, the first at byte 0",
    ));
    for (number, part) in named {
        let machine = Machine {
            half: Some(number),
            ..Machine::default()
        };
        let ran = Case::of(machine).run();
        let id = calls[number - 1].0;
        assert_eq!(ran.failed(), [id], "call {number}\n{}", ran.report().text());
        let step = ran.report().step(id).cloned().expect("the step");
        assert!(step.found.contains(part), "call {number}: {}", step.found);
    }
}

#[test]
fn a_single_wrong_bit_in_memory_is_found_at_its_place() {
    // The launches of S03 come after the one of S02: fill and check, four times. A bit that changes after a fill is found by the check.
    for launch in [2, 4, 6, 8] {
        let machine = Machine {
            flip: Some(launch),
            ..Machine::default()
        };
        let ran = Case::of(machine).run();
        assert_eq!(ran.failed(), [StepId::S03], "{launch}");
        let step = ran.report().step(StepId::S03).cloned().expect("S03");
        assert!(
            step.found.contains("1 of 1024 words is wrong, the first at byte 2048"),
            "{}",
            step.found
        );
    }
}

#[test]
fn a_single_wrong_bit_in_a_result_is_found() {
    let launches = Case::default()
        .run()
        .calls
        .iter()
        .filter(|(_, call)| *call == "cuLaunchKernel")
        .count();
    // S02, the products of S04 and S05.
    for (launch, id) in [(1, StepId::S02), (10, StepId::S04), (11, StepId::S04), (12, StepId::S05)] {
        assert!(launch <= launches);
        let machine = Machine {
            flip: Some(launch),
            ..Machine::default()
        };
        let ran = Case::of(machine).run();
        assert_eq!(ran.failed(), [id], "{launch}");
        assert!(ran.report().step(id).is_some_and(|step| step.gpu_at_fault));
    }
}

#[test]
fn a_share_that_is_not_enforced_is_a_failure() {
    let unlimited = Case {
        machine: Machine {
            unlimited: true,
            ..Machine::default()
        },
        ..Case::isolated()
    };
    let ran = unlimited.run();
    assert_eq!(ran.failed(), [StepId::S07]);
    assert!(ran.steps.iter().all(|step| !step.gpu_at_fault));
    let mut without_guard = Case::isolated();
    without_guard.limit = Ok(None);
    for id in [StepId::S07, StepId::S09] {
        without_guard.steps = vec![StepId::S01, id];
        let ran = without_guard.run();
        assert_eq!(ran.failed(), [id], "a shared GPU without a limit is not filled");
        assert!(!ran.calls.iter().any(|(_, call)| *call == "cuMemAlloc_v2"), "{id:?}");
    }
}

#[test]
fn a_second_process_that_is_not_counted_is_a_failure() {
    let held = |mib: u64, refused| HeldMemory {
        bytes: mib * MIB,
        refused,
    };
    let broken = StepProblem::Finding(StepFinding::new(
        "the second process: it ended without an answer",
        "why",
        "fix",
    ));
    for (second, is_seen, part) in [
        (None, false, "two processes hold"),
        (Some(Ok(held(10_000, Some(2)))), true, "were allocated, and the driver shows"),
        (Some(Ok(held(100, None))), true, "64 MiB were allocated beyond the limit"),
        (Some(Ok(held(100, Some(700)))), true, "cuMemAlloc_v2 returned 700"),
        (Some(Err(broken)), true, "it ended without an answer"),
    ] {
        let case = Case {
            second,
            second_is_seen: is_seen,
            ..Case::isolated()
        };
        let ran = case.run();
        assert_eq!(ran.failed(), [StepId::S09], "{part}");
        let step = ran.report().step(StepId::S09).cloned().expect("S09");
        assert!(step.found.contains(part), "{}", step.found);
    }
}
