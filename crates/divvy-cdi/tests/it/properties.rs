//! Properties of all specs.

use divvy_cdi::generate::{GenerateOptions, amd, intel, nvidia, proc, wsl};
use divvy_cdi::{CdiMount, CdiSpecDevice, CdiVersion, DeviceNode, Edits, Hook, IntelRdt, NetDevice, Spec, SpecFormat};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;

use divvy_testkit::machine::kinds;

/// Strings that YAML could parse as another type.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-zA-Z0-9/=:._ -]{1,12}",
        Just("0".to_owned()),
        Just("0666".to_owned()),
        Just("true".to_owned()),
        Just("null".to_owned()),
        Just("~".to_owned()),
        Just("- a".to_owned()),
        Just("a: b".to_owned()),
        Just("#x".to_owned()),
        Just("1e3".to_owned()),
        Just(" a ".to_owned()),
        Just("a\nb".to_owned()),
        Just("---".to_owned()),
        Just("\u{e9}'\"\\\t".to_owned()),
    ]
}

fn node() -> impl Strategy<Value = DeviceNode> {
    let numbers = (option::of(any::<i64>()), option::of(any::<i64>()), option::of(any::<u32>()));
    (
        text(),
        option::of(text()),
        option::of("[bcup]"),
        numbers,
        option::of("[rwm]{1,3}"),
        option::of(any::<u32>()),
    )
        .prop_map(
            |(path, host_path, kind, (major, minor, file_mode), permissions, uid)| DeviceNode {
                path,
                host_path,
                kind,
                major,
                minor,
                file_mode,
                permissions,
                uid,
                gid: uid,
                ..DeviceNode::default()
            },
        )
}

fn edits() -> impl Strategy<Value = Edits> {
    let mounts =
        (text(), text(), vec(text(), 0..3), option::of(text())).prop_map(|(host_path, container_path, options, kind)| CdiMount {
            host_path,
            container_path,
            options,
            kind,
            ..CdiMount::default()
        });
    let hooks = (text(), text(), vec(text(), 0..2), option::of(any::<i64>())).prop_map(|(hook_name, path, args, timeout)| Hook {
        hook_name,
        path,
        env: args.clone(),
        args,
        timeout,
        ..Hook::default()
    });
    let interfaces = (text(), text()).prop_map(|(host_interface_name, name)| NetDevice {
        host_interface_name,
        name,
        ..NetDevice::default()
    });
    let rdt = (option::of(text()), option::of(vec(text(), 0..2)), option::of(any::<bool>())).prop_map(
        |(clos_id, schemata, monitoring)| IntelRdt {
            clos_id,
            schemata,
            enable_monitoring: monitoring,
            ..IntelRdt::default()
        },
    );
    let lists = (
        vec(text(), 0..3),
        vec(node(), 0..3),
        vec(mounts, 0..3),
        vec(hooks, 0..2),
        vec(interfaces, 0..2),
    );
    (
        lists,
        option::of(rdt),
        vec(any::<u32>(), 0..2),
        btree_map("x-[a-z]{3}", text(), 0..2),
    )
        .prop_map(
            |((env, device_nodes, mounts, hooks, net_devices), intel_rdt, additional_gids, other)| Edits {
                env,
                device_nodes,
                net_devices,
                hooks,
                mounts,
                intel_rdt,
                additional_gids,
                other: other.into_iter().map(|(key, value)| (key, value.into())).collect(),
            },
        )
}

fn spec() -> impl Strategy<Value = Spec> {
    let annotations = || btree_map(text(), text(), 0..2);
    let devices = (text(), annotations(), edits()).prop_map(|(name, annotations, container_edits)| CdiSpecDevice {
        name,
        annotations,
        container_edits,
        ..CdiSpecDevice::default()
    });
    (text(), text(), annotations(), vec(devices, 0..3), edits()).prop_map(
        |(cdi_version, kind, annotations, devices, container_edits)| Spec {
            cdi_version,
            kind,
            annotations,
            devices,
            container_edits,
            ..Spec::default()
        },
    )
}

proptest! {
    #[test]
    fn what_is_printed_is_what_is_read(spec in spec()) {
        for format in [SpecFormat::Json, SpecFormat::Yaml] {
            let text = spec.print(format);
            let again = Spec::parse(&text);
            prop_assert!(again.as_ref().is_ok_and(|again| *again == spec), "{text}\n{again:?}");
        }
    }

    #[test]
    fn the_least_version_is_enough_and_no_older_one_is(mut spec in spec()) {
        let least = CdiVersion::least_for(&spec);
        for version in CdiVersion::ALL {
            spec.cdi_version = version.to_string();
            let complains = spec.problems().iter().any(|problem| problem.field == "cdiVersion");
            prop_assert_eq!(complains, version < least, "{} of at least {}", version, least);
        }
    }

    /// Whatever the files contain, a generator does not panic and writes no invalid spec.
    #[test]
    fn no_machine_file_breaks_a_generator(
        content in vec(any::<u8>(), 0..200),
        text in "[a-zA-Z0-9 :./\n?-]{0,80}",
        which in any::<prop::sample::Index>(),
    ) {
        let files = [
            "/etc/ld.so.cache",
            "/sys/module/nvidia/version",
            "/proc/driver/nvidia/gpus/0000:06:00.0/information",
            "/proc/driver/nvidia-caps/mig-minors",
            "/sys/class/kfd/kfd/topology/nodes/1/properties",
            "/sys/devices/pci0000:00/0000:4d:00.0/device",
            "/sys/module/firmware_class/parameters/path",
            "/usr/lib64/libcuda.so.550.54.15",
        ];
        let path = files[which.index(files.len())];
        for content in [content.as_slice(), text.as_bytes()] {
            let mut machines = [kinds::mig(), kinds::mi300(), kinds::intel(), kinds::wsl()];
            for machine in &mut machines {
                machine.file(path, content);
            }
            let options = GenerateOptions::new("v.com");
            let [mig, mi300, flex, windows] = machines;
            for generated in [
                nvidia::generate(&mig, &proc::gpus(&mig), None, &options),
                amd::generate(&mi300, &options),
                intel::generate(&flex, &options),
                wsl::generate(&windows, None, &options),
            ].into_iter().flatten() {
                prop_assert!(generated.spec.is_valid(), "{:?}", generated.spec.problems());
            }
        }
    }
}
