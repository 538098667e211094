use divvy_nvidia_config::{DeviceReference, NvidiaMigStrategy, ReplicatedDevices, SharingStrategy};
use divvy_nvidia_plugin::{Error, PluginMachine, offer};

use crate::build::{GPU, config, divided, gpu, ids, machine, mig, pattern, replicated, resource, resources, share, u};

/// The name, socket, and number of devices of each resource.
fn summary(config: &divvy_nvidia_config::NvidiaConfig, machine: &PluginMachine) -> Vec<(String, String, usize)> {
    let all = resources(config, machine);
    let one = |resource: &divvy_nvidia_plugin::OfferedResource| {
        (resource.name().to_owned(), resource.socket(), resource.devices().count())
    };
    all.iter().map(one).collect()
}

fn named(all: &[(&str, &str, usize)]) -> Vec<(String, String, usize)> {
    let owned = |(name, socket, count): &(&str, &str, usize)| ((*name).to_owned(), (*socket).to_owned(), *count);
    all.iter().map(owned).collect()
}

#[test]
fn t1_every_gpu_is_a_healthy_device_with_its_uuid() {
    let resource = resource(&config(), &machine(4));
    assert_eq!((resource.name(), resource.socket().as_str()), (GPU, "nvidia-gpu.sock"));
    assert_eq!(ids(&resource), [u(0), u(1), u(2), u(3)]);
    assert!(resource.devices().all(|device| device.healthy && device.numa.is_none()));
}

#[test]
fn a_lost_gpu_is_unhealthy_and_the_others_are_served() {
    let mut machine = machine(3);
    machine.gpus[1] = PluginMachine::unreadable(1);
    machine.gpus[2].healthy = false;
    let resource = resource(&config(), &machine);
    let healthy: Vec<bool> = resource.devices().map(|device| device.healthy).collect();
    assert_eq!(healthy, [true, false, false]);
    assert_eq!(ids(&resource)[1], "GPU-unreadable-1");
}

/// All devices of a GPU share its health.
#[test]
fn t16_each_gpu_has_one_device_per_replica() {
    let mut machine = machine(2);
    machine.gpus[1].healthy = false;
    machine.gpus[1].numa = Some(1);
    let resource = resource(&share(SharingStrategy::TimeSlicing, 3), &machine);
    let expected: Vec<String> = (0..2)
        .flat_map(|gpu| (0..3).map(move |n| format!("{}::{n}", u(gpu))))
        .collect();
    assert_eq!(ids(&resource), expected);
    let of_1: Vec<_> = resource
        .devices()
        .skip(3)
        .map(|device| (device.healthy, device.numa))
        .collect();
    assert_eq!(of_1, [(false, Some(1)); 3]);
}

#[test]
fn t18_shared_devices_can_have_another_name() {
    let mut config = share(SharingStrategy::TimeSlicing, 2);
    config.sharing.resources[0].rename = Some("nvidia.com/gpu.shared".to_owned());
    assert_eq!(
        summary(&config, &machine(2)),
        named(&[("nvidia.com/gpu.shared", "nvidia-gpu.shared.sock", 4)])
    );
}

#[test]
fn some_gpus_can_be_shared_and_the_others_stay_whole() {
    let uuid = |text: String| DeviceReference::Uuid(text);
    for (devices, shared) in [
        (ReplicatedDevices::Count(1), vec![0]),
        (ReplicatedDevices::Count(4), vec![0, 1, 2, 3]),
        (ReplicatedDevices::List(vec![DeviceReference::Gpu(2), uuid(u(0))]), vec![0, 2]),
    ] {
        let mut config = share(SharingStrategy::TimeSlicing, 2);
        config.sharing.resources[0].devices = devices;
        let one = resource(&config, &machine(4));
        let is_shared = |gpu: u32| ids(&one).contains(&format!("{}::1", u(gpu))) && !ids(&one).contains(&u(gpu));
        assert_eq!((0..4).filter(|gpu| is_shared(*gpu)).collect::<Vec<_>>(), shared);
        assert_eq!(ids(&one).len(), 4 + shared.len());
        config.sharing.resources[0].rename = Some("nvidia.com/part".to_owned());
        let whole = 4 - shared.len();
        let mut expected = vec![("nvidia.com/part", "nvidia-part.sock", 2 * shared.len())];
        if whole > 0 {
            expected.insert(0, (GPU, "nvidia-gpu.sock", whole));
        }
        assert_eq!(summary(&config, &machine(4)), named(&expected));
    }
}

#[test]
fn gpus_get_names_by_their_models_and_the_first_pattern_wins() {
    let mut machine = machine(3);
    machine.gpus[1].model = "Tesla T4".to_owned();
    machine.gpus[2].model = "NVIDIA DGX Display".to_owned();
    let mut config = config();
    config.resources.gpus = vec![pattern("*A100*", "nvidia.com/a100"), pattern("*", "example.com/gpu")];
    let expected = named(&[
        ("example.com/gpu", "nvidia-example.com-gpu.sock", 1),
        ("nvidia.com/a100", "nvidia-a100.sock", 1),
    ]);
    assert_eq!(summary(&config, &machine), expected);
    config.resources.gpus.pop();
    let found = offer(&config, &machine).expect("an offer");
    let counts: Vec<_> = found
        .resources
        .iter()
        .map(|one| (one.name(), one.devices().count()))
        .collect();
    assert_eq!(counts, [("nvidia.com/a100", 1)], "the other GPUs are offered");
    let [warning] = &found.warnings[..] else {
        panic!("{:?}", found.warnings)
    };
    assert!(warning.contains("GPU 1 (\"Tesla T4\")"), "{warning}");
}

/// If their resource is unknown, they are left out with a warning.
#[test]
fn unreadable_gpus_of_a_known_resource_are_unhealthy() {
    let mut machine = machine(3);
    machine.gpus[1] = PluginMachine::unreadable(1);
    let mut config = config();
    let counts = |config: &divvy_nvidia_config::NvidiaConfig| {
        let found = offer(config, &machine).expect("an offer");
        let counted =
            |one: &divvy_nvidia_plugin::OfferedResource| (one.devices().filter(|d| d.healthy).count(), one.devices().count());
        (found.resources.iter().map(counted).collect::<Vec<_>>(), found.warnings)
    };
    config.resources.gpus = vec![pattern("*A100*", "nvidia.com/a100")];
    assert_eq!(counts(&config), (vec![(2, 3)], Vec::new()));
    config.resources.gpus.push(pattern("*H100*", "nvidia.com/a100"));
    assert_eq!(counts(&config), (vec![(2, 3)], Vec::new()));
    config.resources.gpus.push(pattern("*", "nvidia.com/gpu"));
    let (found, warnings) = counts(&config);
    assert_eq!(found, [(2, 2)]);
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].starts_with("GPU 1 cannot be read"), "{warnings:?}");
}

/// The other devices are shared.
#[test]
fn a_missing_device_to_share_is_reported() {
    let complete = machine(3);
    let mut lossy = machine(3);
    lossy.gpus[1] = PluginMachine::unreadable(1);
    for (devices, expected, part) in [
        (
            ReplicatedDevices::List(vec![DeviceReference::Uuid("GPU-old".to_owned()), DeviceReference::Gpu(0)]),
            [2, 1, 1],
            "the device \"GPU-old\" of nvidia.com/gpu, which does not exist on this node",
        ),
        (
            ReplicatedDevices::List(vec![DeviceReference::Mig(1, 0)]),
            [1, 1, 1],
            "the device \"1:0\" of nvidia.com/gpu, which does not exist on this node",
        ),
        (
            ReplicatedDevices::Count(4),
            [2, 2, 2],
            "requested 4 devices to be replicated, but only 3 devices available",
        ),
    ] {
        let mut config = share(SharingStrategy::TimeSlicing, 2);
        config.sharing.resources[0].devices = devices;
        for (machine, maybe) in [(&complete, false), (&lossy, true)] {
            let found = offer(&config, machine).expect("an offer");
            let of = |index: usize| {
                let uuid = &machine.gpus[index].uuid;
                found.resources[0]
                    .devices()
                    .filter(|device| device.id.starts_with(uuid.as_str()))
                    .count()
            };
            assert_eq!([of(0), of(1), of(2)], expected);
            let [warning] = &found.warnings[..] else {
                panic!("{:?}", found.warnings)
            };
            assert!(warning.contains(part), "{warning}");
            assert_eq!(warning.ends_with("it may be GPU 1, which cannot be read"), maybe, "{warning}");
        }
    }
}

#[test]
fn t26_mixed_has_a_resource_for_each_profile() {
    let machine = divided(3, "0=0,0,1,7;1=2,2");
    let expected = named(&[
        (GPU, "nvidia-gpu.sock", 1),
        ("nvidia.com/mig-1g.5gb", "nvidia-mig-1g.5gb.sock", 2),
        ("nvidia.com/mig-1g.5gb.me", "nvidia-mig-1g.5gb.me.sock", 1),
        ("nvidia.com/mig-2g.10gb", "nvidia-mig-2g.10gb.sock", 1),
        ("nvidia.com/mig-3g.20gb", "nvidia-mig-3g.20gb.sock", 2),
    ]);
    assert_eq!(summary(&mig(NvidiaMigStrategy::Mixed), &machine), expected);
}

/// A GPU without MIG devices is a warning.
#[test]
fn mig_profiles_newer_than_this_program_are_offered() {
    let all = offer(&mig(NvidiaMigStrategy::Mixed), &divided(2, "0=17;1=")).expect("an offer");
    assert_eq!(all.resources.len(), 1);
    assert_eq!(all.resources[0].name(), "nvidia.com/mig-1g.5gb");
    assert_eq!(all.warnings, ["GPU 1 is in MIG mode and has no MIG devices"]);
}

#[test]
fn mig_devices_can_be_shared_under_their_own_resource() {
    let mut config = mig(NvidiaMigStrategy::Mixed);
    config.sharing = share(SharingStrategy::TimeSlicing, 2).sharing;
    config.sharing.resources = vec![replicated("nvidia.com/mig-3g.20gb", 4), replicated("nvidia.com/mig-7g", 2)];
    let machine = divided(2, "0=0,0;1=2,2");
    let offer = offer(&config, &machine).expect("an offer");
    let counts: Vec<_> = offer
        .resources
        .iter()
        .map(|one| (one.name(), one.devices().count()))
        .collect();
    assert_eq!(counts, [("nvidia.com/mig-1g.5gb", 2), ("nvidia.com/mig-3g.20gb", 8)]);
    assert_eq!(
        offer.warnings,
        ["the configuration shares nvidia.com/mig-7g, but this node has no such device"]
    );
    let mut one = config.clone();
    one.sharing.resources = vec![replicated("nvidia.com/mig-1g.5gb", 2)];
    for device in [
        DeviceReference::Mig(0, 1),
        DeviceReference::Uuid("MIG-00000000-0000-4000-8000-000000020000".to_owned()),
        DeviceReference::Uuid(format!("MIG-{}/2/0", u(0))),
    ] {
        one.sharing.resources[0].devices = ReplicatedDevices::List(vec![device]);
        let small = &resources(&one, &machine)[0];
        assert_eq!(small.devices().count(), 3, "one plain device and two replicas");
    }
}

#[test]
fn t27_single_offers_mig_devices_as_gpus() {
    let resource = resource(&mig(NvidiaMigStrategy::Single), &divided(2, "0=0,0;1=0"));
    assert_eq!((resource.name(), resource.devices().count()), (GPU, 3));
    assert!(ids(&resource).iter().all(|id| id.starts_with("MIG-")));
}

#[test]
fn t28_single_needs_the_same_mig_devices_on_all_gpus() {
    for (gpus, text, expected) in [
        (2, "0=0,0,1,7;1=2,2", Error::SeveralMigTypes),
        (2, "0=0,7", Error::MigOnSomeGpus),
        (2, "0=0,0,0", Error::MigOnSomeGpus),
        (2, "0=0;1=", Error::NoMigDevices(1)),
        (1, "0=0,7", Error::SeveralMigTypes),
    ] {
        assert_eq!(
            offer(&mig(NvidiaMigStrategy::Single), &divided(gpus, text)),
            Err(expected),
            "{text}"
        );
    }
    // Without MIG, it is the same as the strategy `none`. A lost GPU is neither in MIG mode nor not.
    assert_eq!(ids(&resource(&mig(NvidiaMigStrategy::Single), &machine(2))), [u(0), u(1)]);
    let mut lost = divided(2, "0=0,0");
    lost.gpus[1] = PluginMachine::unreadable(1);
    assert_eq!(ids(&resource(&mig(NvidiaMigStrategy::Single), &lost)).len(), 3);
}

#[test]
fn without_a_mig_strategy_a_divided_gpu_is_not_usable() {
    let all = offer(&config(), &divided(2, "0=0,0")).expect("an offer");
    let healthy: Vec<bool> = all.resources[0].devices().map(|device| device.healthy).collect();
    assert_eq!(healthy, [false, true]);
    assert!(
        all.warnings[0].starts_with("GPU 0 (NVIDIA A100-SXM4-40GB) is in MIG mode"),
        "{:?}",
        all.warnings
    );
}

#[test]
fn a_faulty_mig_device_leaves_the_others_healthy() {
    let mut machine = divided(2, "0=0,0;1=0");
    let failed = machine.gpus[0].mig_devices[1].uuid.clone();
    machine.gpus[0].failed_mig_devices.insert(failed);
    let health = |machine: &PluginMachine| -> Vec<bool> {
        let all = resource(&mig(NvidiaMigStrategy::Single), machine);
        all.devices().map(|device| device.healthy).collect()
    };
    assert_eq!(health(&machine), [true, false, true]);
    machine.gpus[0].healthy = false;
    assert_eq!(health(&machine), [false, false, true]);
}

#[test]
fn t31_a_configuration_unfit_for_the_machine_is_refused() {
    let mut mps_mig = mig(NvidiaMigStrategy::Single);
    mps_mig.sharing = share(SharingStrategy::Mps, 2).sharing;
    let mut imex = config();
    imex.imex.channel_ids = vec![0];
    imex.imex.required = true;
    let mut pascal = machine(1);
    pascal.gpus[0].cc = Some((6, 1));
    let mut volta = machine(1);
    volta.gpus[0].cc = Some((7, 0));
    for (config, machine, expected) in [
        (
            &mps_mig,
            &divided(1, "0=0,0"),
            "sharing using MPS is not supported for MIG devices",
        ),
        (
            &share(SharingStrategy::Mps, 49),
            &volta,
            "invalid device maximum allowed replicas exceeded: 49 > 48",
        ),
        (
            &share(SharingStrategy::Mps, 17),
            &pascal,
            "invalid device maximum allowed replicas exceeded: 17 > 16",
        ),
        (
            &imex,
            &machine(1),
            "error querying IMEX channels: requested IMEX channel channel0 does not exist",
        ),
    ] {
        assert_eq!(offer(config, machine).expect_err(expected).to_string(), expected);
    }
    assert!(offer(&share(SharingStrategy::Mps, 48), &volta).is_ok());
    assert!(offer(&share(SharingStrategy::Mps, 16), &pascal).is_ok());
    imex.imex.required = false;
    let warned = offer(&imex, &machine(1)).expect("an offer").warnings;
    assert_eq!(warned, ["the IMEX channel 0 does not exist, so containers start without it"]);
}

#[test]
fn a_machine_without_gpus_offers_nothing() {
    assert!(resources(&config(), &machine(0)).is_empty());
    let displays = PluginMachine {
        gpus: vec![divvy_nvidia_plugin::PluginGpu {
            model: "DGX Display".to_owned(),
            ..gpu(0)
        }],
        ..PluginMachine::default()
    };
    assert!(resources(&config(), &displays).is_empty());
}
