//! What is printed, and the exit status.

use std::fmt::Write as _;

use divvy_smoke::steps::open::{AskedGpu, NoLimits};
use divvy_smoke::steps::share::{GivenShare, GuardLimit};
use divvy_smoke_report::StepId;

use crate::fake::{Case, MIB, Machine};

#[test]
fn a_run_prints_a_line_for_each_step() {
    let case = Case {
        sizes: None,
        machine: Machine {
            total: 64 * MIB,
            context: 32 * MIB,
            ..Machine::default()
        },
        steps: vec![
            StepId::S01,
            StepId::S02,
            StepId::S03,
            StepId::S05,
            StepId::S06,
            StepId::S07,
            StepId::S09,
        ],
        ..Case::default()
    };
    insta::assert_snapshot!(case.run().report().text());
    insta::assert_snapshot!(Case::isolated().run().report().text());
}

/// The lines of CUDA's sample vectorAdd, as tutorials show and search for them.
const SAMPLE: &str = "[Vector addition of 50000 elements]
Copy input data from the host memory to the CUDA device
CUDA kernel launch with 196 blocks of 256 threads
Copy output data from the CUDA device to the host memory
Test PASSED
Done
";

fn sample() -> Case {
    Case {
        steps: vec![StepId::S01, StepId::S02],
        sample: true,
        sizes: None,
        ..Case::default()
    }
}

#[test]
fn vector_add_prints_the_samples_six_lines_byte_for_byte() {
    let ran = sample().run();
    assert_eq!(ran.lines.join("\n") + "\n", SAMPLE);
}

/// The program prints the same text as the CUDA sample.
#[test]
fn vector_add_never_prints_passed_after_an_error() {
    let calls = sample().run().calls;
    let mut text = String::new();
    for number in 1..=calls.len() {
        let ran = Case {
            fault: Some((number, 2)),
            ..sample()
        }
        .run();
        assert!(
            !ran.lines.iter().any(|line| line.contains("PASSED") || line == "Done"),
            "{number}: {:?}",
            ran.lines
        );
        let said: Vec<&str> = ran.lines.iter().filter_map(|line| line.strip_prefix("stderr: ")).collect();
        writeln!(text, "{}: {}", calls[number - 1].1, said.join("; ")).expect("text");
    }
    insta::assert_snapshot!(text);
    // The copy of the result does nothing.
    let download = 1 + calls
        .iter()
        .position(|(_, call)| *call == "cuMemcpyDtoH_v2")
        .expect("a download");
    let machine = Machine {
        silent: Some(download),
        ..Machine::default()
    };
    let ran = Case { machine, ..sample() }.run();
    assert_eq!(
        ran.lines.last().map(String::as_str),
        Some("stderr: Result verification failed at element 0!")
    );
}

#[test]
fn each_bad_input_has_its_message() {
    let gpu = |gpu: &str| AskedGpu {
        gpu: Some(gpu.to_owned()),
        ..AskedGpu::default()
    };
    let visible = |visible: &str| AskedGpu {
        visible: Some(visible.to_owned()),
        ..AskedGpu::default()
    };
    let uuids = |uuid: &str| AskedGpu {
        grant: GivenShare {
            uuids: vec![uuid.to_owned()],
            units: None,
        },
        ..AskedGpu::default()
    };
    let machine = |change: &dyn Fn(&mut Machine)| {
        let mut machine = Machine::default();
        change(&mut machine);
        Case {
            sizes: None,
            ..Case::of(machine)
        }
    };
    let asked = |asked: AskedGpu| Case {
        asked,
        ..Case::default()
    };
    let cases = [
        ("a share that is smaller than a context", machine(&|m| m.total = 100 * MIB)),
        (
            "the same, where the guard knows what a context takes",
            Case {
                limit: Ok(Some(GuardLimit {
                    bytes: 100 * MIB,
                    context: 520 * MIB,
                })),
                ..machine(&|m| m.total = 100 * MIB)
            },
        ),
        ("a share that is hardly larger", machine(&|m| m.total = 514 * MIB)),
        (
            "a GPU that others have filled",
            machine(&|m| (m.total, m.context) = (80_000 * MIB, 79_998 * MIB)),
        ),
        (
            "limits that cannot be read",
            Case {
                limit: Err(NoLimits {
                    path: "/run/divvy/share/GPU-1/limits".to_owned(),
                    why: "neither copy in the file is complete".to_owned(),
                }),
                ..Case::default()
            },
        ),
        ("no GPU", machine(&|m| m.count = 0)),
        (
            "17 GPUs",
            Case {
                sizes: Some(crate::fake::SMALL),
                ..machine(&|m| m.count = 17)
            },
        ),
        ("an unknown index", asked(gpu("7"))),
        ("an unknown prefix", asked(gpu("GPU-77"))),
        ("an unknown UUID", asked(gpu("GPU-77777777-0405-0607-0809-0a0b0c0d0e0f"))),
        (
            "a prefix of two GPUs",
            Case {
                asked: gpu("GPU-0"),
                ..machine(&|m| m.count = 2)
            },
        ),
        (
            "another GPU than was given",
            asked(uuids("GPU-77777777-0405-0607-0809-0a0b0c0d0e0f")),
        ),
        ("a wrong entry", asked(visible("0,first"))),
        (
            "a wrong entry and no GPU",
            Case {
                asked: visible("first"),
                ..machine(&|m| m.count = 0)
            },
        ),
        ("an old GPU", machine(&|m| m.capability = [2, 1])),
        (
            "a GPU without tensor cores for bf16",
            Case {
                sizes: Some(crate::fake::SMALL),
                ..machine(&|m| m.capability = [7, 5])
            },
        ),
        (
            "an old driver",
            Case {
                sizes: Some(crate::fake::SMALL),
                ..machine(&|m| m.cuda = 10_020)
            },
        ),
        ("a prohibited GPU", machine(&|m| m.mode = 2)),
        (
            "a MIG device",
            Case {
                sizes: Some(crate::fake::SMALL),
                ..machine(&|m| m.name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
            },
        ),
    ];
    let mut text = String::new();
    for (what, case) in cases {
        let report = case.run().report();
        writeln!(
            text,
            "# {what}: exit status {}\n{}",
            report.result.exit_status(),
            report.text()
        )
        .expect("text");
    }
    insta::assert_snapshot!(text);
}
