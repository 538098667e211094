//! Builders of configurations and machines.

use divvy_model::{GpuLink, LinkKind, MiB, MigDevice, MigParts};
use divvy_nvidia_config::{
    DeviceIdStrategy, DeviceListStrategy, DevicePlugin, Discovery, FeatureDiscovery, Imex, NvidiaConfig, NvidiaMigStrategy,
    ReplicatedDevices, ReplicatedResource, ResourcePattern, Resources, SharedDevicesPolicy, Sharing, SharingStrategy,
    SleepInterval,
};
use divvy_nvidia_plugin::{OfferedResource, PluginGpu, PluginMachine, offer};

pub(crate) const GPU: &str = "nvidia.com/gpu";

/// The defaults of NVIDIA's plugin.
pub(crate) fn config() -> NvidiaConfig {
    NvidiaConfig {
        mig_strategy: NvidiaMigStrategy::None,
        fail_on_init_error: true,
        driver_root: "/".to_owned(),
        dev_root: "/".to_owned(),
        gdrcopy: false,
        gds: false,
        mofed: false,
        discovery: Discovery::Auto,
        mps_root: String::new(),
        plugin: DevicePlugin {
            pass_device_specs: false,
            device_list_strategies: vec![DeviceListStrategy::Envvar],
            device_id_strategy: DeviceIdStrategy::Uuid,
            cdi_annotation_prefix: "cdi.k8s.io/".to_owned(),
            nvidia_ctk_path: "/usr/bin/nvidia-ctk".to_owned(),
            container_driver_root: "/driver-root".to_owned(),
            shared_devices_policy: SharedDevicesPolicy::Distributed,
            kubelet_socket: "/var/lib/kubelet/device-plugins/kubelet.sock".to_owned(),
            disabled_health_checks: String::new(),
            enabled_health_checks: String::new(),
            cdi_feature_flags: Vec::new(),
            cdi_disabled_hooks: Vec::new(),
        },
        feature_discovery: FeatureDiscovery {
            oneshot: false,
            no_timestamp: false,
            sleep_interval: SleepInterval::Infinite,
            output_file: String::new(),
            machine_type_file: String::new(),
            use_node_feature_api: false,
        },
        resources: Resources {
            gpus: vec![pattern("*", GPU)],
            mig: Vec::new(),
        },
        sharing: Sharing::default(),
        imex: Imex::default(),
    }
}

/// The defaults with a MIG strategy and the patterns that belong to it.
pub(crate) fn mig(strategy: NvidiaMigStrategy) -> NvidiaConfig {
    let mut config = config();
    config.mig_strategy = strategy;
    if strategy == NvidiaMigStrategy::Single {
        config.resources.mig = vec![pattern("*", GPU)];
    }
    config
}

pub(crate) fn pattern(pattern: &str, name: &str) -> ResourcePattern {
    ResourcePattern {
        pattern: pattern.to_owned(),
        name: name.to_owned(),
    }
}

pub(crate) fn share(strategy: SharingStrategy, replicas: u32) -> NvidiaConfig {
    let mut config = config();
    config.mps_root = "/run/nvidia/mps".to_owned();
    config.sharing = Sharing {
        strategy,
        rename_by_default: false,
        fail_requests_greater_than_one: strategy == SharingStrategy::Mps,
        resources: vec![replicated(GPU, replicas)],
    };
    config
}

pub(crate) fn replicated(name: &str, replicas: u32) -> ReplicatedResource {
    ReplicatedResource {
        name: name.to_owned(),
        rename: None,
        devices: ReplicatedDevices::All,
        replicas,
    }
}

/// The UUID of a GPU.
pub(crate) fn u(index: u32) -> String {
    format!("GPU-{index:08x}-0000-4000-8000-000000000000")
}

pub(crate) fn machine(gpus: u32) -> PluginMachine {
    PluginMachine {
        gpus: (0..gpus).map(gpu).collect(),
        ..PluginMachine::default()
    }
}

pub(crate) fn gpu(index: u32) -> PluginGpu {
    PluginGpu {
        uuid: u(index),
        index,
        minor: Some(index),
        model: "NVIDIA A100-SXM4-40GB".to_owned(),
        memory: MiB(40960),
        cc: Some((8, 0)),
        mig: Some(false),
        healthy: true,
        ..PluginGpu::default()
    }
}

/// Divide GPUs into MIG devices. For example, `"0=0,0,1,7;1=2,2"` gives GPU 0 instances of the profiles 0, 0, 1, and 7, and GPU 1
/// two instances of profile 2.
pub(crate) fn divided(gpus: u32, text: &str) -> PluginMachine {
    let mut machine = machine(gpus);
    let mut cap = 3;
    for part in text.split(';') {
        let (index, profiles) = part.split_once('=').expect("gpu=profiles");
        let index: u32 = index.parse().expect("a number");
        let gpu = &mut machine.gpus[index as usize];
        gpu.mig = Some(true);
        let profiles = profiles.split(',').filter(|profile| !profile.is_empty());
        for (position, profile) in (0u32..).zip(profiles) {
            gpu.mig_devices.push(MigDevice {
                capabilities: Some((cap, cap + 1)),
                ..mig_device(index, position, profile.parse().expect("a number"))
            });
            cap += 2;
        }
    }
    machine
}

fn mig_device(gpu: u32, index: u32, profile: u32) -> MigDevice {
    let (slices, memory) = match profile {
        1 => (2, 9856),
        2 => (3, 19968),
        _ => (1, 4864),
    };
    let gi = index + 1;
    MigDevice {
        capabilities: None,
        index,
        uuid: format!("MIG-{gpu:08x}-0000-4000-8000-{gi:08x}0000"),
        gi,
        ci: 0,
        parts: Some(MigParts {
            gi_profile: Some(profile),
            gi_slices: slices,
            ci_slices: slices,
            memory,
            multiprocessors: 14 * slices,
            jpeg: u32::from(profile == 7),
            ..MigParts::default()
        }),
    }
}

/// Connect each pair of GPUs by this many NVLinks.
pub(crate) fn linked(machine: &mut PluginMachine, pairs: &[(usize, usize, u32)]) {
    for (a, b, count) in pairs {
        let peer = machine.gpus[*b].uuid.clone();
        machine.gpus[*a].links.push(GpuLink {
            peer,
            kind: LinkKind::NvLink,
            count: *count,
        });
    }
}

pub(crate) fn resources(config: &NvidiaConfig, machine: &PluginMachine) -> Vec<OfferedResource> {
    offer(config, machine).expect("an offer").resources
}

/// The machine's only resource.
pub(crate) fn resource(config: &NvidiaConfig, machine: &PluginMachine) -> OfferedResource {
    let mut all = resources(config, machine);
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

pub(crate) fn ids(resource: &OfferedResource) -> Vec<String> {
    resource.devices().map(|device| device.id).collect()
}
