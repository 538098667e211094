//! The integrated GPU of a Tegra (a Jetson).

use std::collections::BTreeSet;

use divvy_nvidia_config::{
    DeviceIdStrategy, DeviceListStrategy, Discovery, NvidiaMigStrategy, SharedDevicesPolicy, SharingStrategy,
};
use divvy_nvidia_plugin::{Error, Nvml, Platform, PluginMachine, check_tegra, is_tegra_family, offer, platform};

use crate::build::{GPU, config, machine, mig, pattern, resource, share};

fn tegra() -> PluginMachine {
    PluginMachine::default().into_tegra()
}

fn id() -> Vec<String> {
    vec!["tegra".to_owned()]
}

#[test]
fn the_platform_is_detected_as_nvidia_does() {
    let orin = || Nvml::Gpus(vec!["Orin (nvgpu)"]);
    let a100 = || Nvml::Gpus(vec!["NVIDIA A100-SXM4-40GB"]);
    for (discovery, has_tegra_files, nvml, expected) in [
        (Discovery::Auto, true, Nvml::Missing, Platform::Tegra),
        (Discovery::Auto, false, Nvml::Missing, Platform::Nvml),
        (Discovery::Auto, true, Nvml::Silent, Platform::Nvml),
        (Discovery::Auto, false, Nvml::Silent, Platform::Nvml),
        (Discovery::Auto, false, orin(), Platform::Tegra),
        (Discovery::Auto, true, orin(), Platform::Tegra),
        (Discovery::Auto, false, Nvml::Gpus(vec!["NVIDIA Thor"]), Platform::Tegra),
        // One integrated GPU is enough.
        (
            Discovery::Auto,
            false,
            Nvml::Gpus(vec!["NVIDIA L4", "NVIDIA Thor"]),
            Platform::Tegra,
        ),
        // A Tegra with an NVML whose GPUs are all discrete, such as a Clara AGX.
        (Discovery::Auto, true, a100(), Platform::Nvml),
        (Discovery::Auto, true, Nvml::Gpus(Vec::new()), Platform::Nvml),
        (Discovery::Auto, false, a100(), Platform::Nvml),
        // What the user says is not checked.
        (Discovery::Tegra, false, a100(), Platform::Tegra),
        (Discovery::Tegra, false, Nvml::Silent, Platform::Tegra),
        (Discovery::Nvml, true, Nvml::Missing, Platform::Nvml),
        (Discovery::Nvml, true, orin(), Platform::Nvml),
        (Discovery::Vfio, true, Nvml::Missing, Platform::Nvml),
    ] {
        let found = platform(discovery, has_tegra_files, &nvml);
        assert_eq!(found, expected, "{discovery:?} {has_tegra_files} {nvml:?}");
    }
}

#[test]
fn a_family_is_a_tegra_if_its_name_begins_so_in_any_case() {
    for (text, expected) in [
        ("Tegra\n", true),
        ("tegra234", true),
        ("TEGRA", true),
        ("Snapdragon", false),
        ("NVIDIA Tegra", false),
        ("Tegr", false),
        ("Tegré", false),
        ("", false),
    ] {
        assert_eq!(is_tegra_family(text), expected, "{text:?}");
    }
}

#[test]
fn a_tegra_always_has_one_healthy_device() {
    for strategy in [NvidiaMigStrategy::None, NvidiaMigStrategy::Single, NvidiaMigStrategy::Mixed] {
        let found = offer(&mig(strategy), &machine(2).into_tegra()).expect("an offer");
        assert!(found.warnings.is_empty(), "{:?}", found.warnings);
        let [resource] = &found.resources[..] else {
            panic!("{:?}", found.resources);
        };
        assert_eq!(resource.name(), GPU);
        let devices: Vec<_> = resource.devices().collect();
        assert_eq!(devices.len(), 1);
        assert_eq!(
            (devices[0].id.as_str(), devices[0].healthy, devices[0].numa),
            ("tegra", true, None)
        );
    }
}

#[test]
fn a_container_gets_the_name_of_the_device_and_no_device_node() {
    let mut machine = PluginMachine {
        device_nodes: BTreeSet::from(["/dev/nvidiactl", "/dev/nvidia-caps-imex-channels/channel0"].map(str::to_owned)),
        ..PluginMachine::default()
    }
    .into_tegra();
    let mut config = config();
    config.plugin.pass_device_specs = true;
    let access = resource(&config, &machine)
        .allocate(&config, &machine, &id(), "")
        .expect("access");
    assert_eq!(
        access.envs.into_iter().collect::<Vec<_>>(),
        [("NVIDIA_VISIBLE_DEVICES".to_owned(), "tegra".to_owned())]
    );
    assert!(access.devices.is_empty() && access.mounts.is_empty(), "{:?}", access.devices);

    // An IMEX channel does not belong to the GPU.
    config.imex.channel_ids = vec![0];
    let nodes = resource(&config, &machine)
        .allocate(&config, &machine, &id(), "")
        .expect("access")
        .devices;
    assert_eq!(nodes.len(), 1, "{nodes:?}");
    machine.device_nodes.clear();

    let mut config = crate::build::config();
    config.plugin.device_list_strategies = vec![DeviceListStrategy::VolumeMounts];
    config.plugin.device_id_strategy = DeviceIdStrategy::Index;
    let access = resource(&config, &machine)
        .allocate(&config, &machine, &id(), "")
        .expect("access");
    let mounts: Vec<String> = access.mounts.into_iter().map(|mount| mount.container_path).collect();
    assert_eq!(mounts, ["/var/run/nvidia-container-devices/0"]);
}

#[test]
fn a_tegra_is_shared_through_time_slicing() {
    let config = share(SharingStrategy::TimeSlicing, 3);
    let (machine, resource) = (tegra(), resource(&config, &tegra()));
    let all: Vec<String> = resource.devices().map(|device| device.id).collect();
    assert_eq!(all, ["tegra::0", "tegra::1", "tegra::2"]);
    let preferred = resource.preferred(SharedDevicesPolicy::Distributed, &all[1..], &[], 1);
    assert_eq!(preferred, ["tegra::1"]);
    let access = resource.allocate(&config, &machine, &all[..2], "").expect("access");
    assert_eq!(access.envs["NVIDIA_VISIBLE_DEVICES"], "tegra");
    let error = resource.allocate(&config, &machine, &id(), "").expect_err("no such device");
    assert!(error.to_string().contains("unknown device: tegra"), "{error}");
}

#[test]
fn the_first_pattern_that_matches_tegra_names_the_resource() {
    let mut config = config();
    config.resources.gpus = vec![
        pattern("Orin*", "nvidia.com/orin"),
        pattern("tegra", "nvidia.com/igpu"),
        pattern("*", GPU),
    ];
    let names: Vec<String> = offer(&config, &tegra())
        .expect("an offer")
        .resources
        .iter()
        .map(|found| found.name().to_owned())
        .collect();
    assert_eq!(names, ["nvidia.com/igpu"]);
    config.resources.gpus.truncate(1);
    let found = offer(&config, &tegra()).expect("an offer");
    assert!(
        found.resources.is_empty() && found.warnings[0].contains("no resource pattern matches"),
        "{found:?}"
    );
}

#[test]
fn what_a_tegra_cannot_do_is_refused_with_what_to_use_instead() {
    assert_eq!(check_tegra(&config()), Ok(()));
    assert_eq!(check_tegra(&share(SharingStrategy::TimeSlicing, 2)), Ok(()));
    assert_eq!(check_tegra(&share(SharingStrategy::Mps, 2)), Err(Error::MpsOnTegra));
    for strategy in [DeviceListStrategy::CdiCri, DeviceListStrategy::CdiAnnotations] {
        let mut config = config();
        config.plugin.device_list_strategies = vec![DeviceListStrategy::Envvar, strategy];
        assert_eq!(check_tegra(&config), Err(Error::CdiOnTegra));
    }
    assert!(Error::CdiOnTegra.to_string().contains("--device-list-strategy=envvar"));
    assert!(Error::MpsOnTegra.to_string().contains("sharing.timeSlicing"));
}
