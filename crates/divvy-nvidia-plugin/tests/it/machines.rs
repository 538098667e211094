//! Properties that hold on any machine with any configuration.

use std::collections::BTreeSet;

use divvy_model::{GpuLink, LinkKind, MiB, MigDevice, MigParts};
use divvy_nvidia_config::{DeviceListStrategy, NvidiaMigStrategy, SharedDevicesPolicy, SharingStrategy};
use divvy_nvidia_plugin::{PluginGpu, PluginMachine, offer};
use proptest::collection::{btree_set, vec};
use proptest::prelude::*;

use crate::build::{config, mig, replicated, share};

fn mig_devices() -> impl Strategy<Value = Vec<MigDevice>> {
    let parts = (0..20u32, 0..8u32, 0..8u32, any::<u64>(), any::<bool>()).prop_map(|(profile, gi, ci, memory, known)| {
        known.then_some(MigParts {
            gi_profile: Some(profile),
            gi_slices: gi,
            ci_slices: ci,
            memory,
            ..MigParts::default()
        })
    });
    vec((parts, 0..20u32, 0..8u32), 0..7).prop_map(|list| {
        let device = |(index, (parts, gi, ci)): (u32, (Option<MigParts>, u32, u32))| MigDevice {
            capabilities: None,
            index,
            uuid: String::new(),
            gi,
            ci,
            parts,
        };
        (0u32..).zip(list).map(device).collect()
    })
}

fn machines() -> impl Strategy<Value = PluginMachine> {
    let values = (
        ".{0,80}",
        prop_oneof![Just(0), Just(40960), any::<u64>()],
        proptest::option::of((0..20u32, 0..20u32)),
        proptest::option::of(0..4u32),
        proptest::option::of(any::<bool>()),
        mig_devices(),
        any::<bool>(),
        any::<bool>(),
    );
    vec(values, 0..17).prop_map(|list| {
        let gpus = (0u32..)
            .zip(list)
            .map(|(index, (model, memory, cc, numa, mig, mut parts, healthy, lost))| {
                if lost {
                    return PluginMachine::unreadable(index);
                }
                for part in &mut parts {
                    part.uuid = format!("MIG-{index}-{}", part.index);
                }
                PluginGpu {
                    uuid: format!("GPU-{index}"),
                    index,
                    minor: (index % 3 != 0).then_some(index),
                    model,
                    memory: MiB(memory),
                    cc,
                    numa,
                    mig,
                    mig_devices: parts,
                    healthy,
                    links: vec![GpuLink {
                        peer: "GPU-0".to_owned(),
                        kind: LinkKind::NvLink,
                        count: index,
                    }],
                    ..PluginGpu::default()
                }
            });
        PluginMachine {
            gpus: gpus.collect(),
            ..PluginMachine::default()
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// No device is healthy on a GPU that cannot be opened.
    #[test]
    fn no_device_is_offered_twice(
        machine in machines(),
        strategy in prop_oneof![Just(NvidiaMigStrategy::None), Just(NvidiaMigStrategy::Single), Just(NvidiaMigStrategy::Mixed)],
        replicas in 2..5u32,
        way in prop_oneof![Just(SharingStrategy::None), Just(SharingStrategy::TimeSlicing), Just(SharingStrategy::Mps)],
        policy in prop_oneof![Just(SharedDevicesPolicy::Distributed), Just(SharedDevicesPolicy::Packed)],
        picks in btree_set(0..200usize, 0..9),
    ) {
        let mut config = mig(strategy);
        if way != SharingStrategy::None {
            config.sharing = share(way, replicas).sharing;
            config.sharing.resources.push(replicated("nvidia.com/mig-1g.5gb", 3));
        }
        config.plugin.pass_device_specs = true;
        config.plugin.device_list_strategies.push(DeviceListStrategy::CdiCri);
        let Ok(found) = offer(&config, &machine) else { return Ok(()) };
        prop_assert_eq!(Ok(found.clone()), offer(&config, &machine));
        let mut known = BTreeSet::new();
        let mut sockets = BTreeSet::new();
        for resource in &found.resources {
            prop_assert!(sockets.insert(resource.socket()));
            let devices: Vec<_> = resource.devices().collect();
            for device in &devices {
                prop_assert!(known.insert(device.id.clone()), "{} twice", device.id);
                let uuid = device.id.split("::").next().unwrap_or_default();
                let gpu = machine.gpus.iter().find(|gpu| gpu.uuid == uuid || gpu.mig_devices.iter().any(|part| part.uuid == uuid));
                let gpu = gpu.expect("the device belongs to a GPU");
                let usable = gpu.healthy && !gpu.unreadable && (gpu.uuid != uuid || !gpu.is_divided());
                prop_assert_eq!(device.healthy, usable);
            }
            let available: Vec<String> = devices.iter().map(|device| device.id.clone()).collect();
            let asked: Vec<String> = picks.iter().filter_map(|at| available.get(*at).cloned()).collect();
            let must = &asked[..asked.len().min(1)];
            let chosen = resource.preferred(policy, &available, must, asked.len());
            prop_assert_eq!(chosen.len(), asked.len());
            prop_assert!(must.iter().all(|id| chosen.contains(id)));
            prop_assert_eq!(chosen.iter().collect::<BTreeSet<_>>().len(), chosen.len());
            prop_assert!(resource.allocate(&config, &machine, &chosen[..chosen.len().min(1)], "x").is_ok());
        }
    }
}

#[test]
fn a_gpu_that_is_lost_keeps_its_place_in_the_capacity() {
    let machine = PluginMachine {
        gpus: vec![PluginMachine::unreadable(0), PluginMachine::unreadable(1)],
        ..PluginMachine::default()
    };
    let found = offer(&config(), &machine).expect("an offer");
    assert_eq!(found.resources[0].devices().count(), 2);
}
