use divvy_nvidia_config::{DeviceIdStrategy, DeviceListStrategy, NvidiaConfig, NvidiaMigStrategy, SharingStrategy};
use divvy_nvidia_plugin::{Access, Error, PluginMachine};

use crate::build::{config, divided, ids, machine, mig, resource, share, u};

fn allocate(config: &NvidiaConfig, machine: &PluginMachine, ids: &[String]) -> Result<Access, Error> {
    resource(config, machine).allocate(config, machine, ids, "f00d")
}

fn access(config: &NvidiaConfig, machine: &PluginMachine, ids: &[String]) -> Access {
    allocate(config, machine, ids).expect("access")
}

fn strategies(list: &[DeviceListStrategy]) -> NvidiaConfig {
    let mut config = config();
    config.plugin.device_list_strategies = list.to_vec();
    config
}

fn env(access: &Access) -> Vec<(&str, &str)> {
    access
        .envs
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect()
}

fn mounts(access: &Access) -> Vec<(&str, &str)> {
    let all = access.mounts.iter();
    all.map(|mount| (mount.container_path.as_str(), mount.host_path.as_str()))
        .collect()
}

fn devices(access: &Access) -> Vec<(&str, &str)> {
    let all = access.devices.iter();
    all.map(|node| (node.container_path.as_str(), node.host_path.as_str()))
        .collect()
}

#[test]
fn t2_t5_the_variable_has_the_order_of_the_request() {
    let (config, machine) = (config(), machine(4));
    for (ids, expected) in [
        (vec![u(2), u(0)], format!("{},{}", u(2), u(0))),
        (vec![u(1)], u(1)),
        (vec![], String::new()),
    ] {
        let access = access(&config, &machine, &ids);
        assert_eq!(env(&access), [("NVIDIA_VISIBLE_DEVICES", expected.as_str())]);
        assert_eq!(
            (access.mounts.len(), access.devices.len(), access.cdi_devices.len()),
            (0, 0, 0)
        );
    }
}

#[test]
fn t4_an_unknown_device_is_refused_with_nvidias_text() {
    let error = allocate(&config(), &machine(4), &["nope".to_owned()]).expect_err("unknown");
    assert_eq!(
        error.to_string(),
        "invalid allocation request for \"nvidia.com/gpu\": invalid request: unknown device: nope"
    );
    let shared = share(SharingStrategy::TimeSlicing, 3);
    for id in [
        u(0),
        format!("{}::3", u(0)),
        format!("{}::01", u(0)),
        format!("{}::+1", u(0)),
        format!("{}::", u(0)),
    ] {
        assert!(allocate(&shared, &machine(1), std::slice::from_ref(&id)).is_err(), "{id}");
    }
}

#[test]
fn t6_devices_can_be_named_by_index() {
    let mut by_index = config();
    by_index.plugin.device_id_strategy = DeviceIdStrategy::Index;
    assert_eq!(
        env(&access(&by_index, &machine(4), &[u(2), u(0)])),
        [("NVIDIA_VISIBLE_DEVICES", "2,0")]
    );
    let mut single = mig(NvidiaMigStrategy::Single);
    single.plugin.device_id_strategy = DeviceIdStrategy::Index;
    let machine = divided(2, "0=0,0;1=0");
    let all = ids(&resource(&single, &machine));
    assert_eq!(
        env(&access(&single, &machine, &all)),
        [("NVIDIA_VISIBLE_DEVICES", "0:0,0:1,1:0")]
    );
}

#[test]
fn t7_devices_can_be_named_by_mounts_also_beside_the_variable() {
    for list in [
        &[DeviceListStrategy::VolumeMounts][..],
        &[DeviceListStrategy::Envvar, DeviceListStrategy::VolumeMounts],
    ] {
        let access = access(&strategies(list), &machine(4), &[u(2), u(0)]);
        assert_eq!(
            env(&access),
            [("NVIDIA_VISIBLE_DEVICES", "/var/run/nvidia-container-devices")]
        );
        let at = |gpu| format!("/var/run/nvidia-container-devices/{}", u(gpu));
        assert_eq!(
            mounts(&access),
            [(at(2).as_str(), "/dev/null"), (at(0).as_str(), "/dev/null")]
        );
    }
}

#[test]
fn t8_variables_switch_on_other_devices_in_any_strategy() {
    for list in [DeviceListStrategy::Envvar, DeviceListStrategy::CdiCri] {
        let mut config = strategies(&[list]);
        (config.gds, config.mofed, config.gdrcopy) = (true, true, true);
        let access = access(&config, &machine(1), &[u(0)]);
        for name in ["NVIDIA_GDS", "NVIDIA_MOFED", "NVIDIA_GDRCOPY"] {
            assert_eq!(access.envs.get(name).map(String::as_str), Some("enabled"), "{list:?} {name}");
        }
    }
}

/// The host paths of the device nodes are below the device root.
#[test]
fn t9_device_nodes_come_after_existing_control_nodes() {
    let mut config = config();
    config.plugin.pass_device_specs = true;
    config.dev_root = "/run/nvidia/driver".to_owned();
    let mut machine = machine(2);
    let two = access(&config, &machine, &[u(0), u(1)]);
    assert_eq!(
        devices(&two),
        [
            ("/dev/nvidia0", "/run/nvidia/driver/dev/nvidia0"),
            ("/dev/nvidia1", "/run/nvidia/driver/dev/nvidia1")
        ]
    );
    config.dev_root = "/".to_owned();
    machine.device_nodes = ["/dev/nvidiactl".to_owned(), "/dev/nvidia-uvm".to_owned()].into();
    let one = access(&config, &machine, &[u(1)]);
    let all = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1"];
    assert_eq!(devices(&one), all.map(|node| (node, node)));
    config.plugin.device_list_strategies = vec![DeviceListStrategy::CdiCri];
    assert_eq!(access(&config, &machine, &[u(1)]).devices, []);
}

#[test]
fn t27_a_mig_device_needs_its_gpus_node_and_two_capabilities() {
    let mut config = mig(NvidiaMigStrategy::Single);
    config.plugin.pass_device_specs = true;
    let machine = divided(2, "0=0,0;1=0");
    let second = machine.gpus[0].mig_devices[1].uuid.clone();
    let access = access(&config, &machine, &[second]);
    let expected = ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap5", "/dev/nvidia-caps/nvidia-cap6"];
    assert_eq!(devices(&access), expected.map(|node| (node, node)));
}

#[test]
fn t10_t11_cdi_devices_have_a_field_or_an_annotation() {
    let name = |device: &str| format!("k8s.device-plugin.nvidia.com/gpu={device}");
    let mut config = strategies(&[DeviceListStrategy::CdiCri]);
    let machine = machine(2);
    assert_eq!(
        access(&config, &machine, &[u(1)]),
        Access {
            cdi_devices: vec![name(&u(1))],
            ..Access::default()
        }
    );
    config.plugin.device_id_strategy = DeviceIdStrategy::Index;
    assert_eq!(access(&config, &machine, &[u(1)]).cdi_devices, [name("1")]);
    let mut all = strategies(&[
        DeviceListStrategy::CdiCri,
        DeviceListStrategy::CdiAnnotations,
        DeviceListStrategy::Envvar,
    ]);
    all.plugin.cdi_annotation_prefix = "custom.cdi/".to_owned();
    let access = access(&all, &machine, &[u(1), u(0)]);
    let key = "custom.cdi/nvidia-device-plugin_f00d";
    let value = format!("{},{}", name(&u(1)), name(&u(0)));
    assert_eq!(access.annotations.get(key), Some(&value));
    assert_eq!(access.cdi_devices, [name(&u(1)), name(&u(0))]);
    assert_eq!(
        env(&access),
        [("NVIDIA_VISIBLE_DEVICES", format!("{},{}", u(1), u(0)).as_str())]
    );
}

#[test]
fn t16_replicas_of_a_gpu_name_it_once() {
    let config = share(SharingStrategy::TimeSlicing, 3);
    let ids = [format!("{}::0", u(0)), format!("{}::2", u(0)), format!("{}::1", u(1))];
    let access = access(&config, &machine(2), &ids);
    assert_eq!(
        env(&access),
        [("NVIDIA_VISIBLE_DEVICES", format!("{},{}", u(0), u(1)).as_str())]
    );
}

#[test]
fn t18_more_than_one_shared_device_can_be_forbidden() {
    let mut config = share(SharingStrategy::TimeSlicing, 3);
    config.sharing.fail_requests_greater_than_one = true;
    let two = [format!("{}::0", u(0)), format!("{}::0", u(1))];
    let error = allocate(&config, &machine(2), &two).expect_err("two").to_string();
    assert_eq!(
        error,
        "invalid allocation request for \"nvidia.com/gpu\": invalid request: maximum request size for shared resources is 1; found 2"
    );
    assert!(allocate(&config, &machine(2), &two[..1]).is_ok());
    config.sharing.resources.clear();
    assert!(
        allocate(&config, &machine(2), &[u(0), u(1)]).is_ok(),
        "the rule concerns shared devices only"
    );
}

#[test]
fn t29_a_container_reaches_the_mps_daemon() {
    let access = access(&share(SharingStrategy::Mps, 2), &machine(1), &[format!("{}::1", u(0))]);
    assert_eq!(
        env(&access),
        [
            ("CUDA_MPS_PIPE_DIRECTORY", "/mps/nvidia.com/gpu/pipe"),
            ("NVIDIA_VISIBLE_DEVICES", u(0).as_str())
        ]
    );
    assert_eq!(
        mounts(&access),
        [
            ("/mps/nvidia.com/gpu/pipe", "/run/nvidia/mps/nvidia.com/gpu/pipe"),
            ("/dev/shm", "/run/nvidia/mps/shm")
        ]
    );
}

#[test]
fn t30_imex_channels_are_passed_in_the_form_of_the_strategy() {
    let mut machine = machine(1);
    machine
        .device_nodes
        .insert("/dev/nvidia-caps-imex-channels/channel0".to_owned());
    machine.cdi_classes.insert("imex-channel".to_owned());
    let with = |list| {
        let mut config = strategies(&[list]);
        config.imex.channel_ids = vec![0];
        config.plugin.pass_device_specs = true;
        access(&config, &machine, &[u(0)])
    };
    assert_eq!(
        with(DeviceListStrategy::CdiCri).cdi_devices,
        [
            format!("k8s.device-plugin.nvidia.com/gpu={}", u(0)),
            "k8s.device-plugin.nvidia.com/imex-channel=0".to_owned()
        ]
    );
    let by_variable = with(DeviceListStrategy::Envvar);
    assert_eq!(by_variable.envs.get("NVIDIA_IMEX_CHANNELS").map(String::as_str), Some("0"));
    assert_eq!(
        by_variable.devices.last().map(|node| node.container_path.as_str()),
        Some("/dev/nvidia-caps-imex-channels/channel0")
    );
    let by_mount = with(DeviceListStrategy::VolumeMounts);
    assert_eq!(mounts(&by_mount)[1].0, "/var/run/nvidia-container-devices/imex/0");
}
