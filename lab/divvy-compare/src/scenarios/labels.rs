//! Scenarios of GPU feature discovery.

use crate::scenario::{
    ComparedProgram, FOR_THE_PLUGIN, NOT_LOADED, PluginScenario, SLICES, ScenarioMachine, divided, machine, scenario,
};

/// A part of a fabric.
const GROUP: &str = "{ cluster = \"0a0b0c0d-0102-4304-8506-1718191a1b1c\", clique = 7 }";
const OTHER_GROUP: &str = "{ cluster = \"0a0b0c0d-0102-4304-8506-1718191a1b1c\", clique = 8 }";
/// The fabric manager has not registered the GPU yet.
const JOINING: &str = "{ cluster = \"00000000-0000-0000-0000-000000000000\", state = 2 }";

/// Return a machine whose GPUs are in these fabrics.
fn fabric(fabrics: &[&'static str]) -> ScenarioMachine {
    let fabrics: Vec<(u32, &str)> = (0..).zip(fabrics.iter().copied()).collect();
    let gpus = u32::try_from(fabrics.len()).unwrap_or(u32::MAX);
    ScenarioMachine {
        fabrics,
        ..machine(gpus)
    }
}

pub(super) fn labels() -> Vec<PluginScenario> {
    let print = |name: &'static str, machine: ScenarioMachine| PluginScenario {
        program: ComparedProgram::FeatureDiscovery,
        ..scenario(name, machine).args(&[
            "--oneshot",
            "--no-timestamp",
            "--use-node-feature-api=false",
            "--output-file=",
        ])
    };
    let with = |mut scenario: PluginScenario, arg: &str| {
        scenario.args.push(arg.to_owned());
        scenario
    };
    let slices = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n";
    let renamed =
        "version: v1\nsharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n";
    let mps = "version: v1\nflags: {mpsRoot: /m}\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n";
    let mig = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 2}]}}\n";
    let driver = |version| ScenarioMachine {
        driver: Some(version),
        ..machine(2)
    };
    let long = ScenarioMachine {
        models: vec![(
            0,
            "NVIDIA A product whose name is longer than the value of a label may be in Kubernetes",
        )],
        ..machine(1)
    };
    let unnamed = ScenarioMachine {
        models: vec![(0, "")],
        ..machine(1)
    };
    let two = ScenarioMachine {
        models: vec![(1, "Tesla T4"), (2, "Tesla T4"), (3, "Tesla T4")],
        ..machine(4)
    };
    vec![
        print("T34 labels of eight GPUs", machine(8)),
        print("T34 labels of no GPU", machine(0)),
        print("T34 labels with time-slicing", machine(2)).config(slices),
        print("T34 labels of renamed GPUs", machine(2)).config(renamed),
        print("T34 labels with MPS", machine(2)).config(mps),
        print("T34 labels, wrong values for the device plugin", machine(1)).config(FOR_THE_PLUGIN),
        with(
            print("T34 labels with MIG mixed", divided(3, "0=0,0,1;1=2,2")),
            "--mig-strategy=mixed",
        ),
        with(
            print("T34 labels with MIG mixed, media engines", divided(3, "0=0,0,1,7;1=2,2")),
            "--mig-strategy=mixed",
        ),
        with(
            print("T34 labels with MIG mixed and time-slicing", divided(2, "0=0,0;1=2")),
            "--mig-strategy=mixed",
        )
        .config(mig),
        with(
            print("T34 labels with MIG single", divided(2, "0=0,0,0;1=0,0")),
            "--mig-strategy=single",
        ),
        with(
            print("T28 labels with an invalid MIG single", divided(2, "0=0,0,1,7;1=2,2")),
            "--mig-strategy=single",
        ),
        with(
            print("T28 labels with MIG single on one GPU", divided(2, "0=0,0,0")),
            "--mig-strategy=single",
        ),
        with(
            print("T28 labels with MIG single, none created", divided(2, "0=0;1=")),
            "--mig-strategy=single",
        ),
        with(
            print("T34 labels with MIG single, but without MIG", machine(2)),
            "--mig-strategy=single",
        ),
        print("T34 labels of a divided GPU without a strategy", divided(2, "0=0,0")),
        print("T34 labels of divided GPUs with time-slicing", divided(2, "0=0;1=2")).config(SLICES),
        print("T35 labels of the driver 455.06", driver("455.06")),
        print("T35 labels of the driver 550", driver("550")),
        print("T35 labels of the driver 1.2.3.4", driver("1.2.3.4")),
        print("T35 labels with MPS and MIG", divided(1, "0=0")).config(mps),
        with(
            print("T34 labels with a new MIG profile", divided(2, "0=17")),
            "--mig-strategy=mixed",
        ),
        print(
            "T34 labels without memory",
            ScenarioMachine {
                memory: Some(0),
                ..machine(1)
            },
        ),
        print("T34 labels of a fabric", fabric(&[GROUP; 2])),
        print("T34 labels of two cliques", fabric(&[GROUP, OTHER_GROUP])),
        print("T34 labels of a GPU outside the fabric", fabric(&[GROUP, JOINING])),
        print(
            "labels of a driver that is not loaded",
            ScenarioMachine {
                state: Some(NOT_LOADED),
                ..machine(2)
            },
        ),
        with(
            print(
                "labels of a driver that may be missing",
                ScenarioMachine {
                    state: Some(NOT_LOADED),
                    ..machine(2)
                },
            ),
            "--fail-on-init-error=false",
        ),
        with(
            print("T35 labels of GPUs for virtual machines", machine(2)),
            "--device-discovery-strategy=vfio",
        ),
        print("T34 labels of a GPU without a name", unnamed),
        print("T34 labels of a long name", long),
        print("T34 labels of two models", two),
    ]
}
