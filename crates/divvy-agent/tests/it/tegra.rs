//! The device plugin and GPU feature discovery on a Tegra, with the real probe on a simulated driver, and an emulated kubelet.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use divvy_agent::Error;
use divvy_agent::nvidia::device_plugin;
use divvy_nvidia_config::NvidiaProgram;
use divvy_testbed::simulated_driver::ask;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::mps::{Bed, LIMIT, PluginBed, built, stop};

const ORIN: &str = "Orin (nvgpu)";
const FLAG: &str = "--device-discovery-strategy=tegra";

/// Return a node with a configuration, and with GPUs of these models.
fn bed(models: &[&str], config: &str) -> Bed {
    let bed = Bed::new(models);
    bed.configure(config);
    bed
}

/// Give the node a Tegra's release file, and take NVML from it.
fn without_nvml(bed: &Bed) {
    std::fs::create_dir(bed.at("root/etc")).expect("created");
    std::fs::write(bed.at("root/etc/nv_tegra_release"), "# R35").expect("written");
    let script = std::fs::read_to_string(bed.at("probe")).expect("read");
    std::fs::write(bed.at("probe"), script.replace("libdivvy_nvml_sim.so", "no_such_library.so")).expect("written");
}

#[tokio::test]
async fn a_tegra_that_the_flag_names_is_offered_without_the_probe() {
    let bed = bed(&["NVIDIA A100-SXM4-40GB"; 2], "version: v1\n");
    std::fs::write(bed.at("probe"), format!("#!/bin/sh\n: > {:?}\nexit 1\n", bed.at("started"))).expect("written");
    let plugin = PluginBed::new(&bed, &[FLAG]).await;
    plugin.has("allocatable", Some("1")).await;
    stop(plugin.running).await;
    assert!(!bed.at("started").exists(), "the probe was started");
}

#[tokio::test]
async fn a_tegra_without_nvml_is_found_by_its_files_and_shared() {
    let bed = bed(
        &[],
        "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}\n",
    );
    without_nvml(&bed);
    let plugin = PluginBed::new(&bed, &[]).await;
    plugin.has("allocatable", Some("3")).await;
    stop(plugin.running).await;
}

#[tokio::test]
async fn a_tegra_is_found_when_its_nvml_answers_later() {
    let bed = bed(&[ORIN, "NVIDIA L4"], "version: v1\n");
    std::fs::write(bed.at("control.state"), r#"{"initError":9}"#).expect("written");
    let plugin = PluginBed::new(&bed, &["--fail-on-init-error=false"]).await;
    let control = bed.at("control");
    let start = std::time::Instant::now();
    while ask(&control, &json!({"op": "init", "error": 0})).await.is_err() {
        assert!(start.elapsed() < LIMIT, "the simulated driver does not listen");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    // Two GPUs, but one Tegra.
    plugin.has("allocatable", Some("1")).await;
    stop(plugin.running).await;
}

/// The error says what to use instead.
#[tokio::test]
async fn what_a_tegra_cannot_do_ends_the_plugin_with_advice() {
    let mps = "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n";
    for (config, arguments, part) in [
        (
            "version: v1\n",
            &["--device-list-strategy=cdi-cri"][..],
            "use --device-list-strategy=envvar or volume-mounts",
        ),
        (mps, &["--mps-root=/m"], "share the GPU through sharing.timeSlicing"),
    ] {
        let bed = bed(&[ORIN], config);
        let source = bed.source(NvidiaProgram::DevicePlugin, arguments);
        let ended = tokio::time::timeout(
            LIMIT,
            device_plugin(source, bed.surroundings.clone(), CancellationToken::new()),
        );
        let Err(Error::Plugin(text)) = ended.await.expect("ends") else {
            panic!("no error");
        };
        assert!(
            text.starts_with("unable to validate flags: ") && text.contains(part),
            "{text}"
        );
    }
}

/// Let GPU feature discovery print the labels.
fn labels(bed: &Bed, libraries: &Path, arguments: &[&str]) -> Output {
    // The probe is next to the program.
    built("divvy-hardware", "divvy-probe");
    let mut command = Command::new(env!("CARGO_BIN_EXE_divvy-agent"));
    command.arg0("gpu-feature-discovery").args([
        "--oneshot",
        "--no-timestamp",
        "--use-node-feature-api=false",
        "--output-file=",
        "--machine-type-file=/nonexistent",
    ]);
    command.args(arguments).env("LD_LIBRARY_PATH", libraries);
    command.env("DIVVY_NVML_SIM", bed.at("machine.toml")).stdin(Stdio::null());
    command.output().expect("the program")
}

#[test]
fn the_labels_of_a_tegra_are_those_that_cuda_knows() {
    let bed = bed(&[ORIN], "version: v1\n");
    let simulator = built("divvy-nvml-sim", "libdivvy_nvml_sim.so");
    let (nvml, cuda) = (bed.at("nvml"), bed.at("cuda"));
    for (directory, names) in [
        (&nvml, &["libnvidia-ml.so.1"][..]),
        (&cuda, &["libnvidia-ml.so.1", "libcuda.so.1"]),
    ] {
        std::fs::create_dir(directory).expect("created");
        for name in names {
            std::os::unix::fs::symlink(&simulator, directory.join(name)).expect("linked");
        }
    }
    for arguments in [&[][..], &[FLAG]] {
        let output = labels(&bed, &cuda, arguments);
        let printed = String::from_utf8_lossy(&output.stdout);
        for line in [
            "nvidia.com/gpu.product=Orin-nvgpu",
            "nvidia.com/gpu.memory=40960",
            "nvidia.com/gpu.compute.major=8",
            "nvidia.com/gpu.mode=unknown",
            "nvidia.com/cuda.driver-version.full=unknown.unknown.unknown",
            "nvidia.com/mig.capable=false",
        ] {
            assert!(printed.lines().any(|printed| printed == line), "{line} is not in\n{printed}");
        }
    }
    let output = labels(&bed, &nvml, &[]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("this node is a Tegra") && said.contains("runtimeClassName: nvidia"),
        "{said}"
    );
    let output = labels(&bed, &nvml, &["--fail-on-init-error=false"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "nvidia.com/vgpu.present=false\n");
}
