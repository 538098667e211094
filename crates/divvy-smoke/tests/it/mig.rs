//! The program on a MIG device.

use divvy_smoke_report::{SmokeOutcome, SmokeReport, StepId, StepStatus};

use crate::rig::{Rig, UUID, with};

const FIRST: &str = "MIG-00000000-0000-4000-8000-00000000000a";
const SECOND: &str = "MIG-00000000-0000-4000-8000-00000000000b";

/// A machine with a GPU of this many MiB in MIG mode. Each MIG device has the profile 1g, an eighth of the memory.
fn divided(mib: u64, uuids: &[&str]) -> Rig {
    let rig = Rig::new(mib);
    let part = |(at, uuid)| format!("{{ gpu_instance = {at}, compute_instance = 0, profile = 0, uuid = \"{uuid}\" }}");
    let parts: Vec<String> = uuids.iter().enumerate().map(part).collect();
    let text = std::fs::read_to_string(rig.path("machine.toml")).expect("the description");
    let text = text.replace("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB");
    std::fs::write(rig.path("machine.toml"), format!("{text}mig = [{}]\n", parts.join(", "))).expect("the description");
    rig
}

#[test]
fn every_step_passes_on_a_mig_device_and_the_report_names_it() {
    for via in ["dlsym", "getprocaddress"] {
        let variables = [("CUDA_VISIBLE_DEVICES", SECOND), ("NVIDIA_VISIBLE_DEVICES", SECOND)];
        let ran = divided(102, &[FIRST, SECOND]).run(&format!("here -o json --via {via}"), &variables);
        let report = SmokeReport::read(&ran.out()).unwrap_or_else(|error| panic!("{error}: {ran:?}"));
        assert_eq!((ran.status(), report.result), (0, SmokeOutcome::Pass), "{}", report.text());
        assert_eq!(with(&report, StepStatus::Skip), [StepId::S07, StepId::S08, StepId::S09]);
        let gpu = report.gpu.expect("a GPU");
        assert_eq!((gpu.uuid.as_str(), gpu.memory), (SECOND, 12 << 20));
    }
    // The real size of the profile.
    let gpu = divided(40960, &[FIRST]).report("S02", &[]).gpu.expect("a GPU");
    assert_eq!(
        (gpu.name.as_str(), gpu.uuid.as_str(), gpu.memory),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", FIRST, 4864 << 20)
    );
}

/// A MIG device is named by its UUID.
#[test]
fn another_mig_device_than_given_is_a_failure() {
    let rig = divided(102, &[FIRST, SECOND]);
    let cases = [
        (format!("--gpu {FIRST}"), "all", 0, String::new()),
        ("--gpu MIG-0000".to_owned(), FIRST, 0, String::new()),
        ("--gpu 0".to_owned(), "", 0, String::new()),
        (
            format!("--gpu {SECOND}"),
            "all",
            2,
            format!("the GPU {SECOND} is not here; the GPUs here: 0 ({FIRST})"),
        ),
        (
            format!("--gpu {UUID}"),
            "all",
            2,
            format!("the GPU {UUID} is not here; the GPUs here: 0 ({FIRST})"),
        ),
        (
            "--gpu 1".to_owned(),
            "all",
            3,
            format!("there is no GPU 1; the GPUs here: 0 ({FIRST})"),
        ),
        (
            String::new(),
            SECOND,
            2,
            format!("the GPU is {FIRST}, and the container was given {SECOND}"),
        ),
    ];
    for (arguments, given, status, part) in cases {
        let ran = rig.run(&format!("here --steps S02 {arguments}"), &[("NVIDIA_VISIBLE_DEVICES", given)]);
        assert_eq!(ran.status(), status, "{arguments} {given}: {ran:?}");
        assert!(ran.out().contains(&part), "{arguments} {given}: {}", ran.out());
    }
}

/// The failure says what to look for.
#[test]
fn a_mig_gpu_without_instances_is_a_failure() {
    let report = divided(40960, &[]).report("S02", &[]);
    assert_eq!(with(&report, StepStatus::Fail), [StepId::S01]);
    let step = report.step(StepId::S01).expect("S01");
    assert!(step.found.contains("returned 100, CUDA_ERROR_NO_DEVICE"), "{}", step.found);
    let fix = step.fix.as_deref().unwrap_or_default();
    assert!(fix.contains("a GPU in MIG mode without instances"), "{fix}");
}
