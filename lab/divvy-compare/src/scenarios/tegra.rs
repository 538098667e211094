//! Scenarios on a Tegra.

use crate::scenario::{ComparedProgram, GPU, MPS_OF_2, PluginScenario, ScenarioMachine, ScenarioStep, machine, scenario};

pub(super) fn tegra() -> Vec<PluginScenario> {
    let old = ScenarioMachine {
        is_old_tegra: true,
        ..machine(0)
    };
    let orin = ScenarioMachine {
        models: vec![(0, "Orin (nvgpu)")],
        memory: Some(3072),
        ..machine(1)
    };
    let flag = "--device-discovery-strategy=tegra";
    let ids = |ids: &[&str]| -> Vec<String> { ids.iter().map(|id| (*id).to_owned()).collect() };
    let allocate = |wanted: &[&str]| ScenarioStep::Allocate(GPU, vec![ids(wanted)]);
    let slices = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}\n";
    let print = |name: &'static str, machine: ScenarioMachine, more: &[&str]| {
        let fixed = [
            "--oneshot",
            "--no-timestamp",
            "--use-node-feature-api=false",
            "--output-file=",
        ];
        let printed = PluginScenario {
            program: ComparedProgram::FeatureDiscovery,
            ..scenario(name, machine)
        };
        printed.args(&[&fixed[..], more].concat())
    };
    vec![
        scenario("T36 Tegra by a flag", machine(2))
            .args(&[flag, "--pass-device-specs"])
            .step(ScenarioStep::Options)
            .step(allocate(&["tegra"]))
            .step(allocate(&[]))
            .step(allocate(&["nope"]))
            .step(ScenarioStep::Preferred {
                available: ids(&["tegra"]),
                must: Vec::new(),
                size: 1,
            }),
        scenario("T36 Tegra without NVML", old.clone()).step(allocate(&["tegra"])),
        scenario("T36 Tegra with NVML", orin.clone())
            .args(&["--device-id-strategy=index", "--device-list-strategy=volume-mounts"])
            .step(allocate(&["tegra"])),
        scenario("T36 Tegra, a flag for NVML", orin.clone()).args(&["--device-discovery-strategy=nvml"]),
        scenario("T36 Tegra, MIG mixed", machine(1)).args(&[flag, "--mig-strategy=mixed"]),
        scenario("T36 Tegra, time-slicing", old.clone())
            .config(slices)
            .step(allocate(&["tegra::1"]))
            .step(allocate(&["tegra::0", "tegra::2"]))
            .step(ScenarioStep::Preferred {
                available: ids(&["tegra::0", "tegra::1", "tegra::2"]),
                must: ids(&["tegra::1"]),
                size: 2,
            }),
        scenario("T36 Tegra, CDI without NVML", old)
            .args(&["--device-list-strategy=cdi-cri"])
            .resources(0),
        scenario("T36 Tegra, CDI with NVML", orin.clone())
            .args(&["--device-list-strategy=cdi-cri"])
            .resources(0),
        scenario("T36 Tegra, MPS", machine(1))
            .config(MPS_OF_2)
            .args(&[flag, "--mps-root=/run/nvidia/mps"])
            .resources(0),
        print("T36 labels of a Tegra by a flag", orin.clone(), &[flag]),
        print("T36 labels of a Tegra", orin.clone(), &[]),
        print(
            "T36 labels of a Tegra with MIG mixed and time-slicing",
            orin,
            &["--mig-strategy=mixed"],
        )
        .config(slices),
    ]
}
