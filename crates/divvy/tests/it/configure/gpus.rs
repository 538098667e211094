//! `docker run --gpus` with a dockerd that finds our program under the name of NVIDIA's hook.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Output};

use super::real::{Docker, built, divvy_runtime};
use super::went_well;
use crate::cli::{divvy, stderr, stdout};

/// The machine description. GPU 0 has the minor number 1.
const MACHINE: &str = "v = 1\n[[node]]\nname = \"n\"\naddress = \"10.0.0.1\"\ndriver = \"550.54.15\"\n\
    [[node.gpu]]\nmodel = \"NVIDIA T4\"\nmemory_mib = 15360\nuuid = \"GPU-a\"\nminor = 1\n\
    [[node.gpu]]\nmodel = \"NVIDIA T4\"\nmemory_mib = 15360\nuuid = \"GPU-b\"\nminor = 0\n";

/// Make the root directory of a simulated driver, its probe, settings that contain only these paths, and the directory that is
/// first in dockerd's `PATH`. Return false if device nodes cannot be created.
fn machine(directory: &Path) -> bool {
    let at = |name: &str| directory.join(name).display().to_string();
    let write = |name: &str, text: &str, mode: u32| {
        std::fs::write(at(name), text).expect("written");
        std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(mode)).expect("its mode");
    };
    for name in ["path", "driver/dev", "driver/usr/lib/x86_64-linux-gnu"] {
        std::fs::create_dir_all(at(name)).expect("made");
    }
    for name in ["libcuda.so.550.54.15", "libnvidia-ml.so.550.54.15"] {
        write(&format!("driver/usr/lib/x86_64-linux-gnu/{name}"), "", 0o644);
    }
    for (name, minor) in [("nvidiactl", "3"), ("nvidia-uvm", "5"), ("nvidia0", "7"), ("nvidia1", "8")] {
        let made = Command::new("mknod")
            .args(["-m", "666", &at(&format!("driver/dev/{name}")), "c", "1", minor])
            .status();
        if !made.is_ok_and(|status| status.success()) {
            return false;
        }
    }
    let (probe, library) = (
        built("divvy-hardware", "divvy-probe"),
        built("divvy-nvml-sim", "libdivvy_nvml_sim.so"),
    );
    write("machine.toml", MACHINE, 0o644);
    let script = format!("#!/bin/sh\nDIVVY_NVML_SIM={:?} exec {probe:?} \"$@\"\n", at("machine.toml"));
    write("probe", &script, 0o755);
    let settings = format!(
        "[nvidia-container-cli]\nroot = {:?}\nldconfig = \"@/sbin/ldconfig\"\n[nvidia-container-runtime.modes.jit-cdi]\nprobe = {:?}\nnvml-library = {library:?}\n",
        at("driver"),
        at("probe")
    );
    write("config.toml", &settings, 0o644);
    symlink(divvy_runtime(), at("path/nvidia-container-runtime-hook")).expect("linked");
    let cli = format!(
        "#!/bin/sh\nfor word in \"$@\"; do echo \"$word\"; done > {:?}\n",
        at("called")
    );
    write("path/nvidia-container-cli", &cli, 0o755);
    true
}

#[test]
fn docker_run_gpus_gives_only_the_requested_gpus() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name).display().to_string();
    if !machine(directory.path()) {
        return divvy_skip::skipped("no device node can be made: that takes root");
    }
    std::fs::write(at("daemon.json"), "{}").expect("written");
    let runtime = divvy_runtime().display().to_string();
    let config = at("daemon.json");
    let words = [
        "configure",
        "docker",
        "--config",
        &config,
        "--set-default",
        "--runtime-path",
        &runtime,
    ];
    went_well(&divvy(&words, &[]));
    let path = format!("{}:{}", at("path"), std::env::var("PATH").unwrap_or_default());
    let variables = [("PATH", path.as_str()), ("NVIDIA_CTK_CONFIG_FILE_PATH", &at("config.toml"))];
    let Some(docker) = Docker::start(directory.path(), &variables) else {
        return;
    };
    if !docker.image() {
        return;
    }
    let gpus = |output: &Output| {
        went_well(output);
        let text = stdout(output);
        let mut found: Vec<String> = text
            .lines()
            .filter(|line| line.starts_with("nvidia"))
            .map(str::to_owned)
            .collect();
        found.sort();
        found
    };
    for (flags, expected) in [
        (&["--gpus", "all"][..], &["nvidia-uvm", "nvidia0", "nvidia1", "nvidiactl"][..]),
        (&["--gpus", "1"], &["nvidia-uvm", "nvidia1", "nvidiactl"]),
        (&["--gpus", "\"device=1\""], &["nvidia-uvm", "nvidia0", "nvidiactl"]),
        // The image's own environment variable is ignored, with the flag and without.
        (
            &["--gpus", "\"device=GPU-b\"", "--env", "NVIDIA_VISIBLE_DEVICES=all"],
            &["nvidia-uvm", "nvidia0", "nvidiactl"],
        ),
        (&["--env", "NVIDIA_VISIBLE_DEVICES=all"], &[]),
        (&[], &[]),
    ] {
        assert_eq!(gpus(&docker.run(flags, "ls /dev")), expected, "{flags:?}");
    }
    assert!(!Path::new(&at("called")).exists(), "nothing of NVIDIA's was needed");
    let wrong = docker.run(&["--gpus", "\"device=7\""], "true");
    assert!(!wrong.status.success());
    assert!(stderr(&wrong).contains("this machine's GPUs are"), "{}", stderr(&wrong));

    // With plain runc, the hook calls NVIDIA's program.
    let output = docker.run(
        &["--runtime", "runc", "--gpus", "\"device=0,1\",\"capabilities=utility\""],
        "true",
    );
    went_well(&output);
    let called = std::fs::read_to_string(at("called")).expect("it was called");
    let words: Vec<&str> = called.lines().collect();
    let root = format!("--root={}", at("driver"));
    let fixed = [
        "--load-kmods",
        "configure",
        "--cuda-compat-mode=ldconfig",
        "--ldconfig=@/sbin/ldconfig",
        "--device=0,1",
        "--utility",
    ];
    assert_eq!(words[0], root);
    assert_eq!(words[1..7], fixed);
    assert!(words[7].starts_with("--pid=") && words[8].starts_with('/'), "{called}");
    std::fs::remove_file(at("path/nvidia-container-cli")).expect("removed");
    let output = docker.run(&["--runtime", "runc", "--gpus", "all"], "true");
    assert!(!output.status.success());
    assert!(
        stderr(&output).contains("divvy configure docker --set-default --restart"),
        "{}",
        stderr(&output)
    );
}
