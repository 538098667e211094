//! Scenarios of GPUs that are shared through MPS, and of the MPS control daemon.

use crate::scenario::{
    ComparedProgram, FOR_OTHERS, GPU, MPS_OF_2, PluginScenario, ScenarioMachine, ScenarioStep, divided, machine, replica,
    scenario,
};

pub(super) fn mps() -> Vec<PluginScenario> {
    let daemon = |name: &'static str, machine: ScenarioMachine, config: &'static str| PluginScenario {
        program: ComparedProgram::MpsControlDaemon,
        ..scenario(name, machine).config(config)
    };
    let ready = ScenarioMachine {
        has_control_daemon: true,
        ..machine(2)
    };
    let plugin = |name: &'static str, machine: ScenarioMachine| {
        scenario(name, machine).config(MPS_OF_2).args(&["--mps-root=/run/nvidia/mps"])
    };
    vec![
        plugin("T29 MPS with a daemon that is ready", ready.clone())
            .step(ScenarioStep::Allocate(GPU, vec![vec![replica(0, 1)]]))
            .step(ScenarioStep::Allocate(GPU, vec![vec![replica(0, 0), replica(1, 0)]])),
        plugin("T29 the MPS daemon goes away and returns", ready)
            .step(ScenarioStep::ControlDaemon(false))
            .step(ScenarioStep::ControlDaemon(true)),
        plugin("T29 the MPS daemon starts later", machine(2))
            .resources(0)
            .step(ScenarioStep::ControlDaemon(true)),
        daemon(
            "MPS daemon, 4 replicas",
            machine(2),
            "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
        ),
        daemon(
            "MPS daemon, 7 replicas",
            machine(1),
            "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 7}]}}\n",
        ),
        daemon(
            "MPS daemon, renamed",
            machine(1),
            "version: v1\nsharing: {mps: {renameByDefault: true, resources: [{name: gpu, replicas: 2}]}}\n",
        ),
        daemon(
            "MPS daemon, 49 replicas",
            machine(1),
            "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 49}]}}\n",
        )
        .resources(0),
        daemon("MPS daemon, MIG single", divided(1, "0=0,0"), MPS_OF_2)
            .args(&["--mig-strategy=single"])
            .resources(0),
        daemon("MPS daemon, MIG mixed", divided(2, "0=0,0"), MPS_OF_2)
            .args(&["--mig-strategy=mixed"])
            .resources(0),
        daemon("MPS daemon, nothing is shared", machine(1), "version: v1\n"),
        daemon("MPS daemon, wrong values for other programs", machine(1), FOR_OTHERS),
    ]
}
