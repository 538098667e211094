//! The program as a whole, on the simulated driver, from a directory like that of `cargo xtask gpu pack`.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::OnceLock;

use divvy_shadow_testkit::{hide, shadow, target};
use serde_json::Value;

/// Make the directory with the programs.
fn pack() -> &'static Path {
    static PACK: OnceLock<tempfile::TempDir> = OnceLock::new();
    let made = PACK.get_or_init(|| {
        let directory = tempfile::tempdir().expect("a directory");
        for name in [
            "divvy-agent",
            "divvy-probe",
            "divvy-cuda-program",
            "divvy-smoke",
            "libdivvy_cuda_sim.so",
            "libdivvy_nvml_sim.so",
        ] {
            let built = target().join("debug").join(name);
            assert!(
                built.exists(),
                "{name}: `cargo xtask test`, or `cargo build --workspace` before `cargo test`"
            );
            symlink(built, directory.path().join(name)).expect("linked");
        }
        for (package, name) in [
            ("divvy-guard", "libdivvy-guard.so"),
            ("divvy-guard-nvml", "libdivvy-guard-nvml.so"),
        ] {
            fs::write(directory.path().join(name), shadow(package)).expect("written");
        }
        // Not a link: the programs are looked for next to what it leads to.
        fs::copy(
            env!("CARGO_BIN_EXE_divvy-gpu-check"),
            directory.path().join("divvy-gpu-check"),
        )
        .expect("copied");
        directory
    });
    made.path()
}

fn run(report: &Path, arguments: &[&str]) -> Output {
    let output = Command::new(pack().join("divvy-gpu-check"))
        .arg("--report")
        .arg(report)
        .args(arguments)
        .output();
    output.expect("it runs")
}

fn report(directory: &Path) -> Value {
    let text = fs::read_to_string(directory.join("report.json")).expect("a report");
    serde_json::from_str(&text).expect("JSON")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The report contains the measured values.
#[test]
fn the_checks_hold_on_the_simulated_driver() {
    let directory = tempfile::tempdir().expect("a directory");
    let checks = [
        "facts",
        "inventory",
        "memory",
        "sizes",
        "kinds",
        "smoke",
        "overhead",
        "programs",
        "escapes",
    ];
    let named: Vec<&str> = checks.iter().flat_map(|check| ["--check", check]).collect();
    let output = run(directory.path(), &[&["--simulated"], &named[..]].concat());
    let text = fs::read_to_string(directory.path().join("report.md")).expect("a report");
    assert!(output.status.success(), "{}{text}", errors(&output));
    let report = report(directory.path());
    assert_eq!(report["complete"], true);
    let of = |name: &str| {
        let all = report["checks"].as_array().expect("a list");
        all.iter().find(|check| check["name"] == name).expect(name).clone()
    };
    for check in checks {
        // A machine without python3 has no program to compare.
        if check != "programs" {
            assert_eq!(of(check)["status"], "PASS", "{check}: {text}");
        }
    }
    let row = |check: &str, what: &str| {
        let rows = of(check)["rows"].as_array().expect("rows").clone();
        let row = rows
            .into_iter()
            .find(|row| row["what"].as_str().is_some_and(|of| of.contains(what)));
        row.unwrap_or_else(|| panic!("{check} has no {what}: {text}"))
    };
    // 31 GiB are two fifths of the simulated GPU: the pod gets no more. A context takes 500 MiB there, and is charged with 512 before the agent has measured the pod.
    let filled = row("memory", "16 at once")["with_guard"].to_string();
    let given = 31744 - 16 * (512 - 500);
    assert!(filled.contains(&format!("the GPU has given {given} MiB")), "{filled}");
    let refused = row("kinds", "vmm: more than the share");
    assert_eq!(refused["without_guard"], "success");
    assert!(
        refused["with_guard"].to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"),
        "{refused}"
    );
    for (what, parts) in [
        ("dlsym: S03 memory", ["PASS 6 MiB written and compared 4 times", " ms"]),
        (
            "an empty CUDA_VISIBLE_DEVICES",
            ["cuInit returned 100", "CUDA_VISIBLE_DEVICES is empty"],
        ),
        (
            "without libnvidia-ptxjitcompiler",
            ["cuModuleLoadDataEx returned 221", "JIT_COMPILER_NOT_FOUND"],
        ),
        ("kill -9", ["its memory was free", " ms later"]),
        (
            "in a share of 4 GiB, getprocaddress: S07 share",
            ["PASS the driver shows the share, 4096 MiB", "more were refused"],
        ),
        (
            "in a share of 4 GiB, dlsym: S09 accounting",
            ["PASS two processes held", "of 4096 MiB at once"],
        ),
    ] {
        let value = row("smoke", what)["value"].to_string();
        assert!(parts.iter().all(|part| value.contains(part)), "{what}: {value}");
    }
    let killed = row("escapes", "--on-escape kill")["value"].to_string();
    assert!(killed.contains("SIGKILL"), "{killed}");
}

/// This finding fails the check, and the other checks continue.
#[test]
fn a_guard_that_fails_to_hold_is_found() {
    // Without its own function, programs get the driver's.
    let mut library = shadow("divvy-guard").to_vec();
    hide(&mut library, &["cuMemCreate"]);
    let broken = pack_with("libdivvy-guard.so", &library);
    let directory = tempfile::tempdir().expect("a directory");
    let output = Command::new(broken.path().join("divvy-gpu-check"))
        .args(["--simulated", "--check", "kinds", "--check", "inventory", "--report"])
        .arg(directory.path())
        .output();
    let output = output.expect("it runs");
    assert_eq!(output.status.code(), Some(1), "{}", errors(&output));
    let report = report(directory.path());
    let status = |index: usize| report["checks"][index]["status"].clone();
    assert_eq!((status(0), status(1)), ("FAIL".into(), "PASS".into()), "{report}");
    let failures = report["checks"][0]["failures"].to_string();
    assert!(failures.contains("vmm, with a share of 4 GiB: success"), "{failures}");
}

#[test]
fn a_too_generous_guard_fails_divvy_smoke() {
    let mut library = shadow("divvy-guard").to_vec();
    hide(&mut library, &["cuMemAlloc_v2"]);
    let broken = pack_with("libdivvy-guard.so", &library);
    let directory = tempfile::tempdir().expect("a directory");
    let output = Command::new(broken.path().join("divvy-gpu-check"))
        .args(["--simulated", "--check", "smoke", "--report"])
        .arg(directory.path())
        .output();
    let output = output.expect("it runs");
    assert_eq!(output.status.code(), Some(1), "{}", errors(&output));
    let failures = report(directory.path())["checks"][0]["failures"].to_string();
    assert!(
        failures.contains("in a share of 4 GiB, --via dlsym") && failures.contains("FAIL S07 share"),
        "{failures}"
    );
}

/// The tensor cores reach less than a tenth of PyTorch's rate.
#[test]
fn too_slow_tensor_cores_fail_the_check() {
    for (theirs, expected, part) in [
        ("0.001", 0, "GFlop/s beside 0 GFlop/s"),
        ("1e12", 1, "less than a tenth of PyTorch's"),
    ] {
        let directory = tempfile::tempdir().expect("a directory");
        let script = format!("#!/bin/sh\necho '{{\"gflops\": {theirs}}}'\n");
        let python = directory.path().join("python3");
        fs::write(&python, script).expect("written");
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).expect("executable");
        let path = format!("{}:{}", directory.path().display(), std::env::var("PATH").expect("a PATH"));
        let output = Command::new(pack().join("divvy-gpu-check"))
            .args(["--simulated", "--check", "smoke", "--report"])
            .arg(directory.path())
            .env("PATH", path)
            .output()
            .expect("it runs");
        let text = fs::read_to_string(directory.path().join("report.md")).expect("a report");
        assert_eq!(output.status.code(), Some(expected), "{}{text}", errors(&output));
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn bad_input_is_refused_with_what_was_found_and_what_to_do() {
    let (directory, empty, broken) = (
        tempfile::tempdir().expect("a directory"),
        tempfile::tempdir().expect("a directory"),
        tempfile::tempdir().expect("a directory"),
    );
    for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        fs::write(broken.path().join(name), "no library").expect("written");
    }
    let path = |directory: &tempfile::TempDir| directory.path().display().to_string();
    let cases: [(&[&str], &str); 4] = [
        (&["--driver", &path(&empty)], "libcuda.so.1 is not there"),
        (&["--driver", &path(&broken)], "NVML in"),
        (&["--check", "bogus"], "the checks are facts, inventory"),
        (&["--simulated", "--report", "/proc/none"], "--report /proc/none"),
    ];
    for (arguments, part) in cases {
        let output = run(directory.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(errors(&output).contains(part), "{arguments:?}: {}", errors(&output));
    }
}

/// A copy of the directory of programs, with another program under one of the names.
fn pack_with(name: &str, content: &[u8]) -> tempfile::TempDir {
    let other = tempfile::tempdir().expect("a directory");
    for entry in fs::read_dir(pack()).expect("there") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), other.path().join(entry.file_name())).expect("copied");
    }
    fs::write(other.path().join(name), content).expect("written");
    other
}

/// All other results are reported.
#[test]
fn a_hanging_check_is_stopped_with_its_programs() {
    let directory = tempfile::tempdir().expect("a directory");
    let pid = directory.path().join("pid");
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && exit\necho $$ > {}\nexec sleep 1000\n",
        pid.display()
    );
    let other = pack_with("divvy-probe", script.as_bytes());
    let output = Command::new(other.path().join("divvy-gpu-check"))
        .args([
            "--simulated",
            "--time",
            "2",
            "--check",
            "inventory",
            "--check",
            "facts",
            "--report",
        ])
        .arg(directory.path())
        .output();
    let output = output.expect("it runs");
    assert_eq!(output.status.code(), Some(1), "{}", errors(&output));
    let report = report(directory.path());
    let found = |index: usize, what: &str| report["checks"][index][what].to_string();
    assert!(found(0, "failures").contains("was stopped"), "{report}");
    assert!(
        found(1, "status").contains("SKIPPED") && found(1, "skipped").contains("no time left"),
        "{report}"
    );
    let pid = fs::read_to_string(pid).expect("it ran");
    let command = fs::read_to_string(format!("/proc/{}/cmdline", pid.trim())).unwrap_or_default();
    assert!(!command.contains("sleep"), "{command}");
}
