//! Tests of mode `jit-cdi`, with the real probe, a simulated driver, and a driver root that the test creates.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;

use rustix::fs::{FileType, Mode, makedev, mknodat};
use serde_json::{Value, json};

use super::bed::{Bed, asking, built, nvidia};

const MACHINE: &str = "v = 1\n[[node]]\nname = \"n\"\naddress = \"10.0.0.1\"\ndriver = \"550.54.15\"\n\
    [[node.gpu]]\nmodel = \"NVIDIA T4\"\nmemory_mib = 15360\nuuid = \"GPU-a\"\nminor = 1\n\
    [[node.gpu]]\nmodel = \"NVIDIA T4\"\nmemory_mib = 15360\nuuid = \"GPU-b\"\nminor = 0\n";

/// Create a driver's root with libraries and device nodes. If device nodes cannot be created, record a skip and return `None`.
pub(crate) fn driver(bed: &Bed) -> Option<PathBuf> {
    let root = bed.path("driver");
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    fs::create_dir_all(&libraries).expect("made");
    for name in ["libcuda.so.550.54.15", "libnvidia-ml.so.550.54.15"] {
        fs::write(libraries.join(name), format!("this is {name}\n")).expect("written");
    }
    symlink("libcuda.so.550.54.15", libraries.join("libcuda.so.1")).expect("linked");
    fs::create_dir_all(root.join("usr/bin")).expect("made");
    fs::create_dir_all(root.join("dev")).expect("made");
    fs::write(root.join("usr/bin/nvidia-smi"), "#!/bin/sh\n").expect("written");
    // The numbers of /dev/null and similar devices, because the container must be able to open them.
    fs::create_dir_all(root.join("dev/nvidia-caps-imex-channels")).expect("made");
    for (name, minor) in [
        ("nvidiactl", 3),
        ("nvidia-uvm", 5),
        ("nvidia0", 7),
        ("nvidia1", 8),
        ("gdrdrv", 9),
        ("nvidia-caps-imex-channels/channel3", 11),
    ] {
        let path = root.join("dev").join(name);
        let made = mknodat(
            rustix::fs::CWD,
            &path,
            FileType::CharacterDevice,
            Mode::from_raw_mode(0o666),
            makedev(1, minor),
        );
        if let Err(error) = made {
            divvy_skip::skipped(format_args!("no device node can be made: that takes root ({error})"));
            return None;
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("its mode");
    }
    Some(root)
}

/// Write settings for that driver root, with a probe that records its environment.
pub(crate) fn settings(bed: &Bed, mode: &str, low_level: &std::path::Path) {
    let (probe, library) = (
        built("divvy-hardware", "divvy-probe"),
        built("divvy-nvml-sim", "libdivvy_nvml_sim.so"),
    );
    fs::write(bed.path("machine.toml"), MACHINE).expect("written");
    let (machine, seen) = (bed.path("machine.toml"), bed.path("probe-env"));
    let wrapper = bed.path("probe");
    let script = format!("#!/bin/sh\n/usr/bin/env > {seen:?}\nDIVVY_NVML_SIM={machine:?} exec {probe:?} \"$@\"\n");
    fs::write(&wrapper, script).expect("written");
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).expect("its mode");
    let more = format!(
        "[nvidia-container-runtime.modes.jit-cdi]\nprobe = {wrapper:?}\nnvml-library = {library:?}\n[nvidia-container-cli]\nroot = {:?}\n",
        bed.path("driver")
    );
    bed.settings_and(mode, low_level, &more);
}

fn nodes(config: &Value) -> Vec<&str> {
    let devices = config["linux"]["devices"].as_array().expect("devices");
    devices.iter().filter_map(|device| device["path"].as_str()).collect()
}

#[test]
fn a_container_has_the_gpus_that_the_driver_has_now() {
    for mode in ["auto", "jit-cdi"] {
        let bed = Bed::new(&asking("0"));
        if driver(&bed).is_none() {
            return;
        }
        settings(&bed, mode, &bed.path("low-level"));
        for (device, node) in [
            ("0", "nvidia1"),
            ("GPU-b", "nvidia0"),
            ("runtime.nvidia.com/gpu=1", "nvidia0"),
        ] {
            fs::write(bed.config(), asking(device)).expect("written");
            let config = bed.create().unwrap_or_else(|refusal| panic!("{mode} {device}: {refusal:?}"));
            assert_eq!(
                nodes(&config),
                ["/dev/nvidia-uvm", "/dev/nvidiactl", &format!("/dev/{node}")],
                "{mode} {device}"
            );
            let cuda = config["mounts"]
                .as_array()
                .expect("mounts")
                .iter()
                .find(|mount| mount["destination"] == "/usr/lib/x86_64-linux-gnu/libcuda.so.1");
            let source = bed.path("driver/usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15");
            assert_eq!(cuda.expect("a mount")["source"], json!(source), "{mode} {device}");
            assert_eq!(config["newField"], 1);
        }
        fs::write(bed.config(), asking("all")).expect("written");
        let config = bed.create().expect("created");
        assert_eq!(config["linux"]["devices"].as_array().map(Vec::len), Some(4), "{mode}");
        let seen = fs::read_to_string(bed.path("probe-env")).expect("it ran");
        let names: Vec<&str> = seen.lines().filter_map(|line| line.split('=').next()).collect();
        // The shell sets these variables itself.
        assert!(
            names.iter().all(|name| ["PWD", "SHLVL", "_", "OLDPWD"].contains(name)),
            "the engine's environment is not for the probe: {seen}"
        );
    }
}

#[test]
fn what_a_container_asks_for_beside_a_gpu_it_has_beside_a_gpu() {
    let bed = Bed::new(&asking("0"));
    if driver(&bed).is_none() {
        return;
    }
    settings(&bed, "jit-cdi", &bed.path("low-level"));
    let mut config: Value = serde_json::from_str(&asking("0")).expect("JSON");
    let env = config["process"]["env"].as_array_mut().expect("variables");
    env.extend(["NVIDIA_GDRCOPY=enabled", "NVIDIA_IMEX_CHANNELS=3"].map(Value::from));
    fs::write(bed.config(), config.to_string()).expect("written");
    let config = bed.create().expect("created");
    let expected = [
        "/dev/gdrdrv",
        "/dev/nvidia-caps-imex-channels/channel3",
        "/dev/nvidia-uvm",
        "/dev/nvidiactl",
        "/dev/nvidia1",
    ];
    assert_eq!(nodes(&config), expected);
}

/// A container that requests no GPU does not wait for the driver.
#[test]
fn case_18_b_no_gpu_means_no_question_to_the_driver() {
    for device in ["void", "", "nvidia.com/gpu=0"] {
        let bed = Bed::new(&asking(device));
        settings(&bed, "auto", &bed.path("low-level"));
        bed.create().expect("created");
        assert!(!bed.path("probe-env").exists(), "{device}");
    }
}

#[test]
fn what_drivers_cannot_give_is_told_and_logged() {
    let config = asking("7");
    let bed = Bed::new(&config);
    let check = |parts: &[&str]| {
        let log = bed.path("log.json");
        let _ = fs::remove_file(&log);
        let output = bed.run(&["--log", log.to_str().expect("text"), "--log-format", "json", "create", "c1"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        let lines = fs::read_to_string(&log).expect("a log");
        let last: Value = serde_json::from_str(lines.lines().last().expect("a line")).expect("JSON");
        assert_eq!(
            (last["level"].as_str(), last["msg"].as_str()),
            (Some("error"), Some(said.trim_end()))
        );
        assert_eq!(bed.text(), config, "the file stays as it was");
    };
    if driver(&bed).is_some() {
        settings(&bed, "auto", &bed.path("low-level"));
        check(&["unresolvable CDI devices runtime.nvidia.com/gpu=7; this machine's GPUs are runtime.nvidia.com/gpu=0, "]);
    }
    let script = |text: &str| {
        let path = bed.path("bad-probe");
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its mode");
        let more = format!("[nvidia-container-runtime.modes.jit-cdi]\nprobe = {path:?}\n");
        bed.settings_and("jit-cdi", &bed.path("low-level"), &more);
    };
    script("#!/bin/sh\necho 'divvy-probe: no driver: modprobe nvidia' >&2\nexit 1\n");
    check(&[
        "bad-probe: no driver: modprobe nvidia. Devices in CDI specs",
        "mode = \"cdi\"",
    ]);
    script("#!/bin/sh\nexit 70\n");
    check(&["bad-probe: ended with exit status: 70"]);
    script("#!/bin/sh\necho '{}'\n");
    check(&["not a list of GPUs: missing field"]);
    script("#!/nowhere\n");
    check(&["could not be run: No such file"]);
}

/// A spec in a file does not use the requested channels, so an invalid channel must not prevent the container's start.
#[test]
fn an_invalid_channel_does_not_stop_a_container() {
    let mut config: Value = serde_json::from_str(&asking("nvidia.com/gpu=0")).expect("JSON");
    let env = config["process"]["env"].as_array_mut().expect("variables");
    env.push("NVIDIA_IMEX_CHANNELS=x".into());
    let bed = Bed::new(&config.to_string());
    bed.settings("cdi", &bed.path("low-level"));
    bed.spec("nvidia.json", &nvidia());
    bed.create().expect("created");
}
