//! The program as it is started: by the loader, on the simulated driver, with the real kernels.

use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use divvy_smoke_report::{SmokeOutcome, SmokeReport, StepId, StepStatus};
use rustix::process::{Pid, Signal, kill_process};

use crate::rig::{Rig, UUID, program, with};

/// The steps that need neither a share nor the probe.
const COMPUTING: [StepId; 6] = [StepId::S01, StepId::S02, StepId::S03, StepId::S04, StepId::S05, StepId::S06];

#[test]
fn every_step_passes_with_the_real_kernels() {
    for via in ["dlsym", "getprocaddress"] {
        let ran = Rig::new(12).run(
            &format!("here -o json --via {via}"),
            &[("NODE_NAME", "n1"), ("POD_NAME", "p1")],
        );
        let report = SmokeReport::read(&ran.out()).expect("a report");
        assert_eq!(
            (ran.status(), report.result),
            (0, SmokeOutcome::Pass),
            "{via}: {}",
            report.text()
        );
        assert_eq!(with(&report, StepStatus::Pass), COMPUTING);
        assert_eq!(with(&report, StepStatus::Skip), [StepId::S07, StepId::S08, StepId::S09]);
        assert_eq!((report.node.as_deref(), report.pod.as_deref()), (Some("n1"), Some("p1")));
        assert!(
            report
                .gpu
                .is_some_and(|gpu| gpu.uuid == UUID && gpu.cuda == "13.0" && gpu.memory == 12 << 20)
        );
        // Four patterns in 6 MiB, every element of both products, and what was copied.
        let bytes = |id| report.steps.iter().find(|step| step.id == id).map(|step| step.bytes);
        assert_eq!(bytes(StepId::S02), Some(200_000));
        assert_eq!(bytes(StepId::S03), Some((4 * 6) << 20));
        assert_eq!(bytes(StepId::S04), Some(4 * 256 * 256 + 8 * 64 * 64));
        assert_eq!(bytes(StepId::S06), Some(15 << 20));
    }
}

/// A run takes at most half of the GPU's memory.
#[test]
fn a_run_leaves_nothing_on_the_gpu() {
    let rig = Rig::new(12);
    let log = rig.path("log");
    let report = rig.report("S02,S03,S06", &[("DIVVY_CUDA_SIM_LOG", log.to_str().expect("UTF-8"))]);
    assert_eq!(report.result, SmokeOutcome::Pass);
    let calls = fs::read_to_string(log).expect("the log");
    for (made, ended) in [
        ("cuMemAlloc_v2", "cuMemFree_v2"),
        ("cuMemAllocHost_v2", "cuMemFreeHost"),
        ("cuModuleLoadDataEx", "cuModuleUnload"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"),
    ] {
        let number = |symbol: &str| {
            calls
                .lines()
                .filter(|line| line.split_whitespace().any(|word| word == symbol))
                .count()
        };
        assert!(number(made) > 0 && number(made) == number(ended), "{made}: {calls}");
    }
}

#[test]
fn one_or_two_processes_fill_exactly_the_share() {
    let rig = Rig::new(512);
    let ran = rig.run("here --isolation --steps S07,S09", &[]);
    assert_eq!(ran.status(), 0, "{ran:?}");
    for part in [
        "PASS S07 share the whole GPU; 448 MiB could be allocated, and 64 MiB more were refused\n",
        "PASS S09 accounting two processes held 127 and 320 MiB of 512 MiB at once, and more was refused",
    ] {
        assert!(ran.out().contains(part), "{}", ran.out());
    }
}

/// Less memory is tested if the driver refuses to allocate that much.
#[test]
fn all_free_memory_is_tested_on_request() {
    let rig = Rig::new(36);
    let found = |line: &str, variables: &[(&str, &str)]| {
        let ran = rig.run(line, variables);
        let report = SmokeReport::read(ran.out().trim()).expect("a report");
        let step = report.step(StepId::S03).expect("S03");
        assert_eq!(step.status, StepStatus::Pass, "{}", report.text());
        (
            step.found.split(" written").next().unwrap_or_default().to_owned(),
            step.bytes >> 20,
        )
    };
    let log = rig.path("log");
    let logged = [("DIVVY_CUDA_SIM_LOG", log.to_str().expect("UTF-8"))];
    let all = "here -o json --steps S03 --all-memory";
    assert_eq!(found("here -o json --steps S03", &[]), ("18 MiB".to_owned(), 72));
    assert_eq!(found(all, &logged), ("24 MiB, all that was free,".to_owned(), 96));
    let calls = fs::read_to_string(&log).expect("the log");
    let first = calls.lines().filter(|line| line.contains("cuMemAlloc_v2")).count() - 1;
    let refused = format!("cuMemAlloc_v2:{first}=2");
    assert_eq!(
        found(all, &[("DIVVY_CUDA_SIM_FAIL", &refused)]),
        ("22 MiB, all that was free,".to_owned(), 88)
    );
}

#[test]
fn an_error_at_any_call_is_a_failure() {
    let rig = Rig::new(12);
    let log = rig.path("log");
    assert_eq!(
        rig.report("S02", &[("DIVVY_CUDA_SIM_LOG", log.to_str().expect("UTF-8"))])
            .result,
        SmokeOutcome::Pass
    );
    let calls = fs::read_to_string(&log).expect("the log");
    let calls: Vec<&str> = calls.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert!(calls.len() > 30, "{calls:?}");
    let mut numbers = std::collections::BTreeMap::new();
    for call in calls {
        let number = numbers.entry(call).or_insert(0);
        *number += 1;
        let fault = format!("{call}:{number}=719");
        let report = rig.report("S02", &[("DIVVY_CUDA_SIM_FAIL", &fault)]);
        let failed = with(&report, StepStatus::Fail);
        assert_eq!(failed.len(), 1, "{fault}: {}", report.text());
        let found = report.step(failed[0]).map_or("", |step| step.found.as_str());
        assert!(
            found.contains(&format!("{call} returned 719, CUDA_ERROR_LAUNCH_FAILED")),
            "{fault}: {found}"
        );
    }
}

#[test]
fn a_wrong_byte_after_any_kernel_or_copy_is_found_in_its_step() {
    let rig = Rig::new(12);
    for (wrong, id) in [
        ("vector_add:1=2+4", StepId::S02),
        ("fill:1=0+99", StepId::S03),
        ("fill:3=0+6291455", StepId::S03),
        ("fill:4=0+0", StepId::S03),
        ("matmul_f32:1=2+262143", StepId::S04),
        ("matmul_f64:1=2+8", StepId::S04),
        ("tensor:1=2+16", StepId::S05),
        ("cuMemcpyDtoDAsync:10=0+5", StepId::S06),
        ("check:1=4+0", StepId::S03),
        ("check:2=4+16", StepId::S03),
    ] {
        let report = rig.report(id.word(), &[("DIVVY_CUDA_SIM_WRONG", wrong)]);
        assert_eq!(with(&report, StepStatus::Fail), [id], "{wrong}: {}", report.text());
        assert!(report.step(id).is_some_and(|step| step.gpu_at_fault), "{wrong}");
    }
}

/// A kernel that ends the context fails its step.
#[test]
fn after_the_context_ends_no_step_runs() {
    let report = Rig::new(12).report("S02,S03,S06", &[("DIVVY_CUDA_SIM_FAIL", "check:2=700")]);
    assert_eq!(with(&report, StepStatus::Fail), [StepId::S03], "{}", report.text());
    assert_eq!(with(&report, StepStatus::Skip), [StepId::S06]);
}

#[test]
fn a_call_or_a_kernel_that_never_ends_is_reported_in_time() {
    let rig = Rig::new(12);
    for (hang, id, part) in [
        ("cuInit:1", StepId::S01, "cuInit had not returned after 300 ms"),
        (
            "cuModuleLoadDataEx:1",
            StepId::S02,
            "cuModuleLoadDataEx had not returned after 300 ms",
        ),
        ("vector_add:1", StepId::S02, "had not returned after 300 ms"),
        (
            "cuDevicePrimaryCtxRelease_v2:1",
            StepId::S02,
            "cuDevicePrimaryCtxRelease_v2 had not returned after 300 ms",
        ),
    ] {
        let began = Instant::now();
        let ran = rig.run("here -o json --steps S02 --timeout 300ms", &[("DIVVY_CUDA_SIM_HANG", hang)]);
        assert!(began.elapsed() < Duration::from_millis(2300), "{hang}: {:?}", began.elapsed());
        let report = SmokeReport::read(&ran.out()).expect("a report");
        assert_eq!((ran.status(), with(&report, StepStatus::Fail)), (2, vec![id]), "{hang}");
        let step = report.step(id).expect("the step");
        assert!(step.found.contains(part) && step.gpu_at_fault, "{hang}: {}", step.found);
    }
    let ran = rig.run("vector-add --timeout 300ms", &[("DIVVY_CUDA_SIM_HANG", "vector_add:1")]);
    assert_eq!(ran.status(), 1);
    assert!(
        !ran.out().contains("PASSED") && ran.err().contains("had not returned after 300 ms"),
        "{ran:?}"
    );
}

#[test]
fn a_parent_that_is_killed_or_asked_to_end_leaves_no_child() {
    for (signal, code) in [(Signal::KILL, None), (Signal::TERM, Some(143)), (Signal::INT, Some(130))] {
        let rig = Rig::new(12).copied();
        rig.install(b"#!/bin/sh\necho '{\"snapshot\":{\"gpus\":[]}}'\nexec cat\n", "divvy-probe");
        let mut parent = rig.start("here", &[("DIVVY_CUDA_SIM_HANG", "cuInit:1"), ("PATH", "/usr/bin:/bin")]);
        let children = format!("/proc/{0}/task/{0}/children", parent.id());
        let started = Instant::now();
        let children: Vec<String> = loop {
            // Each thread has its own children, and the first thread starts both.
            let text = fs::read_to_string(&children).expect("the children");
            let children: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
            // Before it loads the library, it asks to end with its parent.
            let is_worker = |pid: &String| {
                fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains("libdivvy_cuda_sim"))
            };
            if children.len() == 2 && children.iter().any(is_worker) {
                break children;
            } else {
                assert!(started.elapsed() < Duration::from_secs(20), "no child")
            }
            std::thread::yield_now();
        };
        kill_process(Pid::from_child(&parent), signal).expect("killed");
        assert_eq!(parent.wait().expect("gone").code(), code, "{signal:?}");
        let is_alive = |child: &String| {
            let stat = fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
            // A zombie has ended, too.
            stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
        };
        while children.iter().any(is_alive) {
            assert!(started.elapsed() < Duration::from_secs(30), "a child lives");
            std::thread::yield_now();
        }
    }
}

#[test]
fn vector_add_prints_six_lines_and_nothing_else() {
    let ran = Rig::new(12).run("vector-add", &[]);
    let lines = "[Vector addition of 50000 elements]\nCopy input data from the host memory to the CUDA device\n\
                 CUDA kernel launch with 196 blocks of 256 threads\nCopy output data from the CUDA device to the host memory\nTest PASSED\nDone\n";
    assert_eq!((ran.status(), ran.out().as_str(), ran.err().as_str()), (0, lines, ""));
    let ran = Rig::new(12).run("vector-add", &[("DIVVY_CUDA_SIM_FAIL", "cuMemAlloc_v2:2=2")]);
    assert_eq!(
        (ran.status(), ran.out().as_str()),
        (1, "[Vector addition of 50000 elements]\n")
    );
    assert!(
        ran.err()
            .starts_with("Failed to allocate device vector B (error code CUDA_ERROR_OUT_OF_MEMORY)!\n"),
        "{}",
        ran.err()
    );
}

#[test]
fn a_library_that_cannot_be_used_is_a_failure_with_the_reason() {
    let cases = [
        (Rig::new(12).without(&["cuEventElapsedTime"]), "it has no cuEventElapsedTime"),
        (Rig::new(12), "cannot be used"),
    ];
    // The right kind of file, and nothing in it.
    let head = fs::read(program()).expect("the program")[..64].to_vec();
    let broken = cases[1].0.path("lib/libcuda.so.1");
    fs::remove_file(&broken).expect("removed");
    fs::write(&broken, head).expect("written");
    for (rig, part) in cases {
        let report = rig.report("S02", &[]);
        assert_eq!(
            (with(&report, StepStatus::Fail), with(&report, StepStatus::Skip)),
            (vec![StepId::S01], vec![StepId::S02])
        );
        assert!(
            report.step(StepId::S01).is_some_and(|step| step.found.contains(part)),
            "{}",
            report.text()
        );
    }
    let report = Rig::new(12).run(
        "here -o json --steps S02 --via getprocaddress",
        &[("DIVVY_CUDA_SIM_MISSING", "cuEventElapsedTime")],
    );
    assert!(report.out().contains("it has no cuEventElapsedTime"), "{}", report.out());
}

#[test]
fn older_functions_take_the_place_of_newer_ones() {
    let rig = Rig::new(12).without(&["cuDeviceGetUuid_v2", "cuDevicePrimaryCtxRelease_v2"]);
    assert_eq!(rig.report("S02", &[]).result, SmokeOutcome::Pass);
}

/// If the driver is too old, a message says why the kernels do not run.
#[test]
fn an_old_driver_runs_the_kernels() {
    let rig = Rig::new(12);
    for (version, result, part) in [
        (
            "9.2",
            SmokeOutcome::Pass,
            "the driver is for CUDA 9.2, and the kernel needs 11.0",
        ),
        ("11.0", SmokeOutcome::Pass, "bf16"),
        (
            "8.0",
            SmokeOutcome::Fail,
            "it has no cuDeviceGetUuid_v2: divvy-smoke needs CUDA 9.2 or newer",
        ),
    ] {
        let report = rig.report("S01,S02,S05", &[("DIVVY_CUDA_SIM_VERSION", version)]);
        assert_eq!(report.result, result, "{version}: {}", report.text());
        assert!(report.text().contains(part), "{version}: {}", report.text());
    }
    for (capability, expected) in [("3.5", vec![StepId::S05]), ("8.0", vec![]), ("12.1", vec![])] {
        let report = Rig::with(12, capability).report("S02,S05", &[]);
        assert_eq!(
            (report.result, with(&report, StepStatus::Skip)),
            (SmokeOutcome::Pass, expected),
            "{capability}"
        );
    }
}

/// If a GPU was given, its absence is a failure.
#[test]
fn without_a_gpu_nothing_is_tried() {
    let rig = Rig::new(12);
    let nothing = [("LD_LIBRARY_PATH", "")];
    for (arguments, variables, status) in [
        ("here", &nothing[..], 3),
        ("vector-add", &nothing[..], 1),
        ("here", &[("LD_LIBRARY_PATH", ""), ("NVIDIA_VISIBLE_DEVICES", "all")], 2),
        ("here", &[("LD_LIBRARY_PATH", ""), ("NVIDIA_VISIBLE_DEVICES", "void")], 3),
        ("here --gpu 7", &[], 3),
        ("here --gpu GPU-77777777-0000-4000-8000-000000000000", &[], 2),
        ("here --step S01", &[], 3),
        ("", &[], 3),
        ("here --help", &[], 0),
        ("--version", &[], 0),
        ("worker {}", &[], 3),
    ] {
        let ran = rig.run(arguments, variables);
        assert_eq!(ran.status(), status, "{arguments} {variables:?}: {ran:?}");
    }
}

#[test]
fn no_file_is_written_and_no_shared_memory_is_needed() {
    let rig = Rig::new(12);
    let own = rig.path("").display().to_string();
    // The simulated driver writes into the rig's directory.
    let read_only =
        "mount --bind /tmp /tmp && mount --bind $0 $0 && mount -o remount,bind,ro /tmp && mount -t tmpfs -o ro none /dev/shm";
    let may = Command::new("unshare").args(["-m", "sh", "-c", read_only, &own]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        divvy_skip::skipped("no mount namespace can be made: that takes root");
        return;
    }
    let plain = rig.command("here --steps S01,S02", &[]);
    let mut command = Command::new("unshare");
    command.env_clear().stdin(Stdio::null());
    command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.args([
        "-m",
        "sh",
        "-c",
        &format!("{read_only} && ! touch /tmp/x 2> /dev/null && exec \"$@\""),
        &own,
    ]);
    let output = command
        .arg(plain.get_program())
        .args(plain.get_args())
        .output()
        .expect("started");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("Result = PASS"), "{output:?}");
}

#[test]
fn the_result_does_not_depend_on_who_reads_it() {
    let rig = Rig::new(12);
    let full = || Stdio::from(File::options().write(true).open("/dev/full").expect("/dev/full"));
    for (fault, status) in [("", 0), ("cuMemAlloc_v2:1=2", 2)] {
        let variables = [("DIVVY_CUDA_SIM_FAIL", fault)];
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let closed = rig
            .command("here --steps S02", &variables)
            .stdout(writer)
            .output()
            .expect("started");
        assert_eq!((closed.status.code(), closed.stderr), (Some(status), vec![]));
        let ran = rig
            .command("here --steps S02", &variables)
            .stdout(full())
            .output()
            .expect("started");
        assert_eq!(ran.status.code(), Some(status));
        assert!(String::from_utf8_lossy(&ran.stderr).contains("standard output cannot be written"));
    }
}

#[test]
fn the_termination_message_is_the_report() {
    let rig = Rig::new(12);
    let file = rig.path("termination-log");
    let ran = rig.run(&format!("here --steps S02 --termination-message {}", file.display()), &[]);
    assert!(ran.out().ends_with("Result = PASS: 2 passed\n"), "{}", ran.out());
    let message = fs::read_to_string(&file).expect("the message");
    assert_eq!(SmokeReport::read(&message).expect("a report").result, SmokeOutcome::Pass);
    let ran = rig.run("here --steps S02 --termination-message /nonexistent/x", &[]);
    assert_eq!(ran.status(), 0);
    assert!(ran.err().starts_with("/nonexistent/x cannot be written: "), "{}", ran.err());
}

#[test]
fn a_loader_that_starts_the_program_is_no_obstacle() {
    let rig = Rig::new(12);
    let loader = if cfg!(target_arch = "aarch64") {
        "/lib/ld-linux-aarch64.so.1"
    } else {
        "/lib64/ld-linux-x86-64.so.2"
    };
    let mut command = std::process::Command::new(loader);
    command.env_clear().envs(
        rig.command("", &[])
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    let output = command
        .arg(program())
        .args(["here", "--steps", "S02"])
        .output()
        .expect("started");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}
