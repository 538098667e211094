//! Scenarios of the device plugin.

use crate::scenario::{
    GPU, NOT_LOADED, PluginScenario, SLICES, ScenarioMachine, ScenarioStep, divided, gpus, machine, replica, scenario,
};

const A100_ONLY: &str = "version: v1\nresources: {gpus: [{pattern: \"*A100*\", name: gpu}]}\n";
const SECOND_SHARED: &str = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, devices: \
                             [GPU-00000001-0000-4000-8000-000000000000], replicas: 2}]}}\n";
const RENAMED: &str = "version: v1\nsharing:\n  timeSlicing:\n    renameByDefault: true\n    failRequestsGreaterThanOne: true\n    resources:\n    - \
                       name: nvidia.com/gpu\n      replicas: 2\n";

fn with_files(gpus: u32) -> ScenarioMachine {
    ScenarioMachine {
        has_files: true,
        ..machine(gpus)
    }
}

/// Return the scenarios of devices, health, sharing, and how a plugin registers.
pub(super) fn plugin() -> Vec<PluginScenario> {
    vec![
        scenario("T1 four GPUs", machine(4))
            .step(ScenarioStep::Options)
            .step(ScenarioStep::PreStart)
            .allocate(&[2, 0])
            .step(ScenarioStep::Allocate(GPU, vec![gpus(&[1]), gpus(&[3])]))
            .step(ScenarioStep::Allocate(GPU, vec![vec!["nope".to_owned()]]))
            .allocate(&[]),
        scenario("a GPU without memory of its own", ScenarioMachine { state: Some(r#"{"gpus":{"0":{"memory_errors":{"1":3,"2":3}}}}"#), ..machine(1) })
            .allocate(&[0]),
        scenario("a newer memory call is refused", ScenarioMachine { state: Some(r#"{"gpus":{"0":{"memory_errors":{"2":25}}}}"#), ..machine(1) }),
        scenario("the kernel module is older than the library", ScenarioMachine { state: Some(r#"{"initError":18}"#), ..machine(1) }).resources(0),
        scenario("T6 devices by index", machine(4))
            .args(&["--device-id-strategy=index"])
            .allocate(&[2, 0]),
        scenario("T7 volume mounts", machine(4))
            .args(&["--device-list-strategy=volume-mounts"])
            .allocate(&[2, 0]),
        scenario("T7 environment and volume mounts", machine(4))
            .args(&["--device-list-strategy=envvar,volume-mounts"])
            .allocate(&[2, 0]),
        scenario("T8 GDS, MOFED, GDRCopy", machine(2))
            .args(&["--gdrcopy-enabled", "--gds-enabled", "--mofed-enabled"])
            .allocate(&[0]),
        scenario("T9 device nodes", machine(2))
            .args(&["--pass-device-specs", "--nvidia-driver-root=/run/nvidia/driver"])
            .allocate(&[0, 1]),
        scenario("T10 CDI by the kubelet's field", with_files(2))
            .args(&["--device-list-strategy=cdi-cri"])
            .allocate(&[1]),
        scenario("T10 CDI by index", with_files(2))
            .args(&["--device-list-strategy=cdi-cri", "--device-id-strategy=index", "--gds-enabled"])
            .allocate(&[1]),
        scenario("T11 CDI by field and annotation, and the environment", with_files(2))
            .args(&[
                "--device-list-strategy=cdi-cri,cdi-annotations,envvar",
                "--cdi-annotation-prefix=custom.cdi/",
            ])
            .allocate(&[1, 0])
            .allocate(&[]),
        scenario("T30 an IMEX channel by CDI", ScenarioMachine { has_channel: true, ..with_files(1) })
            .args(&["--device-list-strategy=cdi-cri", "--imex-channel-ids=0"])
            .allocate(&[0]),
        scenario("T30 an IMEX channel by the environment", ScenarioMachine { has_channel: true, ..with_files(1) })
            .args(&["--imex-channel-ids=0", "--imex-required"])
            .allocate(&[0]),
        scenario("T30 an IMEX channel by mounts", ScenarioMachine { has_channel: true, ..with_files(1) })
            .args(&["--imex-channel-ids=0", "--device-list-strategy=volume-mounts"])
            .allocate(&[0]),
        scenario("T30 no IMEX channel", with_files(1)).args(&["--imex-channel-ids=0"]).allocate(&[0]),
        scenario("T30 a required IMEX channel is missing", with_files(1))
            .args(&["--imex-channel-ids=0", "--imex-required"])
            .resources(0),
        scenario("T16 time-slicing", machine(2))
            .config(SLICES)
            .step(ScenarioStep::Allocate(GPU, vec![vec![replica(0, 0), replica(0, 2), replica(1, 1)]])),
        scenario("T18 renamed", machine(2))
            .config(RENAMED)
            .step(ScenarioStep::Allocate("nvidia.com/gpu.shared", vec![vec![replica(0, 0)]]))
            .step(ScenarioStep::Allocate("nvidia.com/gpu.shared", vec![vec![replica(0, 0), replica(1, 0)]])),
        scenario("T19 XIDs of applications", machine(1))
            .step(ScenarioStep::Xid(0, 13))
            .step(ScenarioStep::Xid(0, 31))
            .step(ScenarioStep::Xid(0, 43))
            .step(ScenarioStep::Xid(0, 45))
            .step(ScenarioStep::Xid(0, 68))
            .step(ScenarioStep::Xid(0, 109)),
        scenario("T20 XIDs", machine(3))
            .step(ScenarioStep::Xid(1, 79))
            .step(ScenarioStep::Xid(2, 94)),
        scenario("T21 an XID of a shared GPU", machine(2)).config(SLICES).step(ScenarioStep::Xid(1, 79)),
        scenario("T22 waiting for events fails", machine(2))
            .step(ScenarioStep::Driver(r#"{"op":"events","wait":999}"#))
            .step(ScenarioStep::Driver(r#"{"op":"events"}"#))
            .step(ScenarioStep::Xid(0, 79)),
        scenario(
            "T22 there is no event set",
            ScenarioMachine { state: Some(r#"{"events":{"create":999}}"#), ..machine(2) },
        )
        .step(ScenarioStep::Driver(r#"{"op":"events"}"#))
        .step(ScenarioStep::Xid(0, 79)),
        scenario(
            "T22 there is no event set for a minute",
            ScenarioMachine { state: Some(r#"{"events":{"create":999}}"#), ..machine(2) },
        )
        .env(&[("DIVVY_HEALTH_RECOVERY", "1s"), ("DIVVY_PROBE_INTERVAL", "1s")])
        .step(ScenarioStep::Wait)
        .step(ScenarioStep::Notice(r#"{"op":"events"}"#)),
        scenario(
            "T22 a GPU cannot be registered for events",
            ScenarioMachine { state: Some(r#"{"gpus":{"1":{"register":999}}}"#), ..machine(2) },
        )
        .step(ScenarioStep::Xid(0, 79)),
        scenario(
            "T22 a GPU does not report events",
            ScenarioMachine { state: Some(r#"{"gpus":{"1":{"register":3}}}"#), ..machine(2) },
        )
        .step(ScenarioStep::Xid(0, 79)),
        scenario("T21 XIDs of MIG devices", divided(3, "0=0;1=0;2=0,0"))
            .args(&["--mig-strategy=mixed"])
            .step(ScenarioStep::XidOfMig(0, 79, (1, 0)))
            .step(ScenarioStep::Xid(1, 79)),
        scenario("T21 an XID of a MIG device that does not exist", divided(1, "0=0"))
            .args(&["--mig-strategy=mixed"])
            .step(ScenarioStep::XidOfMig(0, 79, (2, 0))),
        scenario("T25 another stream after an XID", machine(2))
            .step(ScenarioStep::Xid(1, 79))
            .step(ScenarioStep::Reconnect),
        scenario("T23 health checks by variables", machine(2))
            .env(&[("DP_DISABLE_HEALTHCHECKS", "79,13"), ("DP_ENABLE_HEALTHCHECKS", "13")])
            .step(ScenarioStep::Xid(0, 79))
            .step(ScenarioStep::Xid(1, 13)),
        scenario("T23 all health checks, although one is disabled", machine(2))
            .env(&[("DP_DISABLE_HEALTHCHECKS", "79"), ("DP_ENABLE_HEALTHCHECKS", "all")])
            .step(ScenarioStep::Xid(0, 79))
            .step(ScenarioStep::Xid(1, 13)),
        scenario("T23 no health checks, and a GPU is lost", machine(2))
            .env(&[("DP_DISABLE_HEALTHCHECKS", "all")])
            .step(ScenarioStep::Notice(r#"{"op":"lost","gpu":1,"lost":true}"#)),
        scenario("T23 no health checks", machine(1))
            .env(&[("DP_DISABLE_HEALTHCHECKS", "all")])
            .step(ScenarioStep::Xid(0, 79)),
        scenario("T24 SIGQUIT", machine(2)).step(ScenarioStep::Quit),
        scenario("T24 a configuration that does not suit the node", machine(2))
            .config("version: v1")
            .step(ScenarioStep::Configure("version: v1\nimex: {channelIDs: [0], required: true}\n"))
            .allocate(&[0]),
        scenario("another model is plugged in", machine(2))
            .config(A100_ONLY)
            .step(ScenarioStep::Plug("Tesla T4")),
        scenario("T24 SIGHUP", machine(2)).step(ScenarioStep::Xid(0, 79)).step(ScenarioStep::Hangup),
        scenario("T24 a restarted kubelet", machine(2)).step(ScenarioStep::RestartKubelet),
        scenario("T24 another configuration", machine(2))
            .config("version: v1")
            .step(ScenarioStep::Configure(SLICES)),
        scenario("the configuration file changes", machine(2))
            .config("version: v1")
            .step(ScenarioStep::Rewrite(SLICES)),
        scenario("MIG devices are created and destroyed while the plugin runs", divided(2, "0=0,0"))
            .args(&["--mig-strategy=mixed"])
            .resources(2)
            .step(ScenarioStep::Divide("0=0;1=2,2"))
            .step(ScenarioStep::Divide("")),
        scenario("T26 MIG mixed", divided(3, "0=0,0,1;1=2,2")).args(&["--mig-strategy=mixed"]).resources(4),
        scenario("T26 MIG mixed, media engines", divided(1, "0=7")).args(&["--mig-strategy=mixed"]),
        scenario("T27 MIG single", divided(2, "0=0,0;1=0"))
            .args(&["--mig-strategy=single", "--device-id-strategy=index"])
            .step(ScenarioStep::Allocate(GPU, vec![vec!["MIG-00000001-0000-4000-8000-000000010000".to_owned()]])),
        scenario("T28 MIG single, several profiles", divided(2, "0=0,0,1,7;1=2,2"))
            .args(&["--mig-strategy=single"])
            .resources(0),
        scenario("T28 MIG single, one GPU without MIG", divided(2, "0=0,0,0"))
            .args(&["--mig-strategy=single"])
            .resources(0),
        scenario("T28 MIG single, one GPU without MIG devices", divided(2, "0=0;1="))
            .args(&["--mig-strategy=single"])
            .resources(0),
        scenario("T27 MIG single, device nodes", divided(2, "0=0,0;1=0"))
            .args(&["--mig-strategy=single", "--pass-device-specs"])
            .step(ScenarioStep::Allocate(GPU, vec![vec!["MIG-00000000-0000-4000-8000-000000020000".to_owned()]])),
        scenario("MIG none, one GPU divided", divided(2, "0=0,0")),
        scenario("MIG mixed, a new profile", divided(1, "0=17")).args(&["--mig-strategy=mixed"]),
        scenario("T32 unknown keys", machine(1)).config("version: v1\nnonsense: 1\nflags: {plugin: {nonsense: true}}\n"),
        scenario("T33 a flag wins", machine(1))
            .config("version: v1\nflags:\n  plugin:\n    deviceListStrategy: volume-mounts\n    deviceIDStrategy: index\n")
            .env(&[("DEVICE_LIST_STRATEGY", "envvar,volume-mounts")])
            .args(&["--device-list-strategy=envvar"])
            .allocate(&[0]),
        scenario("T33 a variable wins over the file", machine(1))
            .config("version: v1\nflags:\n  plugin:\n    deviceListStrategy: volume-mounts\n    deviceIDStrategy: index\n")
            .env(&[("DEVICE_LIST_STRATEGY", "envvar")])
            .allocate(&[0]),
        scenario("per-GPU names and sharing", machine(2)).config(
            "version: v1\nresources:\n  gpus:\n  - {pattern: '*A100*', name: a100}\nsharing:\n  timeSlicing:\n    resources:\n    - {name: \
             a100, rename: mygpu, devices: [0], replicas: 2}\n",
        ),
        scenario("the driver is not loaded", ScenarioMachine { state: Some(NOT_LOADED), ..machine(2) }).resources(0),
        scenario("the driver is loaded later", ScenarioMachine { state: Some(NOT_LOADED), ..machine(2) })
            .args(&["--fail-on-init-error=false"])
            .resources(0)
            .step(ScenarioStep::Notice(r#"{"op":"init","error":0}"#)),
        scenario("no GPUs", machine(0)).resources(0),
        scenario("one GPU is lost", ScenarioMachine { state: Some(r#"{"gpus":{"2":{"lost":true}}}"#), ..machine(3) }),
        scenario(
            "one GPU is lost, and GPUs are named by model",
            ScenarioMachine { state: Some(r#"{"gpus":{"1":{"lost":true}}}"#), ..machine(3) },
        )
        .config(A100_ONLY),
        scenario(
            "one GPU is lost that is to be shared",
            ScenarioMachine { state: Some(r#"{"gpus":{"1":{"lost":true}}}"#), ..machine(3) },
        )
        .config(SECOND_SHARED),
        scenario("a GPU is lost while the plugin runs", machine(3))
            .step(ScenarioStep::Notice(r#"{"op":"lost","gpu":2,"lost":true}"#))
            .preferred(&[0, 1], &[], 1),
        scenario("T29 MPS", machine(2))
            .config("version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n")
            .args(&["--mps-root=/run/nvidia/mps"])
            .resources(0),
    ]
}
