//! Builders of machines and configurations.

use divvy_labels::{LabeledGpu, LabeledMachine};
use divvy_model::{MiB, MigDevice, MigParts};
use divvy_nvidia_config::{Environment, Invocation, NvidiaConfig, NvidiaProgram};

/// Return a configuration without a timestamp.
pub(crate) fn config(arguments: &[&str], file: &str) -> NvidiaConfig {
    let arguments = arguments.iter().chain(&["--no-timestamp"]).map(|word| (*word).to_owned());
    let arguments: Vec<String> = arguments.collect();
    let invocation = Invocation::parse(NvidiaProgram::FeatureDiscovery, "1", &arguments, &Environment::new()).expect("arguments");
    invocation.config(Some(file)).expect("a configuration").0
}

pub(crate) fn machine(gpus: usize) -> LabeledMachine {
    LabeledMachine {
        driver: "550.54.15".to_owned(),
        cuda: Some((12, 4)),
        machine_type: Some("DGX-A100-fake-model\n".to_owned()),
        gpus: vec![gpu(); gpus],
        ..LabeledMachine::default()
    }
}

pub(crate) fn gpu() -> LabeledGpu {
    LabeledGpu {
        model: "NVIDIA A100-SXM4-40GB".to_owned(),
        memory: MiB(40960),
        cc: Some((8, 0)),
        mig: Some(false),
        ..LabeledGpu::default()
    }
}

/// Divide GPUs into MIG devices. For example, `"0=0,0,1,7;1=2,2"` gives GPU 0 instances of the profiles 0, 0, 1, and 7, and GPU 1
/// two instances of profile 2.
pub(crate) fn divided(gpus: usize, text: &str) -> LabeledMachine {
    let mut machine = machine(gpus);
    for (gpu, profiles) in text.split(';').filter_map(|part| part.split_once('=')) {
        let gpu = &mut machine.gpus[gpu.parse::<usize>().expect("a number")];
        gpu.mig = Some(true);
        let profiles = profiles.split(',').filter(|profile| !profile.is_empty());
        gpu.mig_devices = (0..).zip(profiles).map(|(index, profile)| device(index, profile)).collect();
    }
    machine
}

fn device(index: u32, profile: &str) -> MigDevice {
    let (slices, memory, decoders, media) = match profile {
        "1" => (2, 9856, 1, 0),
        "2" => (3, 19968, 2, 0),
        "7" => (1, 4864, 1, 1),
        _ => (1, 4864, 0, 0),
    };
    MigDevice {
        capabilities: None,
        index,
        uuid: format!("MIG-{index}"),
        gi: index + 1,
        ci: 0,
        parts: Some(MigParts {
            gi_profile: profile.parse().ok(),
            gi_slices: slices,
            ci_slices: slices,
            memory,
            multiprocessors: 14 * slices,
            copy_engines: slices,
            decoders,
            encoders: 0,
            jpeg: media,
            ofa: media,
        }),
    }
}
