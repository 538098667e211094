//! A container's share of a GPU, with the guard as it ships.

use std::fs;
use std::os::unix::fs::symlink;

use divvy_shadow_testkit::{replace, shadow};
use divvy_share::limits::ShareLimits;
use divvy_share::usage;
use divvy_smoke_report::{SmokeOutcome, SmokeReport, StepId, StepStatus};

use crate::rig::{Rig, UUID, with};

const MIB: u64 = 1 << 20;

/// A GPU of 1024 MiB, of which the container has a share.
fn guarded(share: u64) -> Rig {
    let directory = divvy_share::DIRECTORY;
    // As long as the path that it replaces.
    let rig = Rig::at(tempfile::Builder::new().prefix("s").rand_bytes(directory.len() - 6), 1024).copied();
    let root = rig.path("");
    let root = root.to_str().expect("UTF-8").trim_end_matches('/');
    let mut library = shadow("divvy-guard").to_vec();
    for path in [directory, "/run/divvy/guard"] {
        assert_eq!(replace(&mut library, path, root), 1, "{path}");
    }
    let driver = rig.path("lib/libcuda.so.1");
    symlink(fs::canonicalize(&driver).expect("the simulator"), rig.path("libcuda.so.real")).expect("linked");
    fs::remove_file(&driver).expect("removed");
    fs::write(driver, library).expect("written");
    let mut program = fs::read(rig.path("divvy-smoke")).expect("the program");
    assert!(
        replace(&mut program, directory, root) > 0,
        "the program knows where limits are"
    );
    rig.install(&program, "divvy-smoke");
    let limits = ShareLimits {
        bytes: share,
        context: 4 * MIB,
        ..ShareLimits::default()
    };
    fs::create_dir(rig.path(UUID)).expect("a directory");
    fs::write(rig.path(UUID).join(divvy_share::LIMITS), limits.file()).expect("written");
    fs::write(rig.path(UUID).join(divvy_share::USAGE), usage::file()).expect("written");
    rig
}

#[test]
fn the_guard_holds_one_process_and_two_to_the_share() {
    let rig = guarded(256 * MIB);
    for via in ["dlsym", "getprocaddress"] {
        let ran = rig.run(&format!("here -o json --isolation --steps S02,S05,S07,S09 --via {via}"), &[]);
        let report = SmokeReport::read(&ran.out()).unwrap_or_else(|error| panic!("{error}: {ran:?}"));
        assert_eq!(report.result, SmokeOutcome::Pass, "{via}: {}", report.text());
        assert_eq!(report.gpu.as_ref().map(|gpu| gpu.memory), Some(256 * MIB));
        // The GPU is shared, so its tensor cores are left to others.
        assert_eq!(with(&report, StepStatus::Skip), [StepId::S05]);
        for part in [
            "the driver shows the share, 256 MiB; 192 MiB could be allocated",
            "two processes held 63 and ",
        ] {
            assert!(report.text().contains(part), "{}", report.text());
        }
    }
}

/// The share is smaller than a context.
#[test]
fn a_too_small_share_says_what_to_request() {
    let report = guarded(2 * MIB).report("S02", &[]);
    assert_eq!(with(&report, StepStatus::Fail), [StepId::S01]);
    let step = report.step(StepId::S01).expect("S01");
    assert!(
        step.found
            .contains("a context alone takes about 4 MiB, and the GPU or the share has 2 MiB"),
        "{}",
        step.found
    );
    assert_eq!(step.fix.as_deref(), Some("request at least 68 MiB for the container"));
}

#[test]
fn a_shared_gpu_without_the_guard_is_not_filled() {
    let rig = Rig::new(512);
    let units = [("ALIYUN_COM_GPU_MEM_CONTAINER", "2"), ("ALIYUN_COM_GPU_MEM_DEV", "80")];
    let text = rig.run("here --steps S07", &units).out();
    assert!(
        text.contains("SKIP S07 share: the share is 2 of 80 units, and nothing limits this container to it"),
        "{text}"
    );
    let log = rig.path("log");
    let variables = [units[0], units[1], ("DIVVY_CUDA_SIM_LOG", log.to_str().expect("UTF-8"))];
    let ran = rig.run("here --steps S07,S09 --isolation", &variables);
    assert_eq!(ran.status(), 2, "{ran:?}");
    assert!(!fs::read_to_string(&log).expect("the log").contains("cuMemAlloc"));
}
