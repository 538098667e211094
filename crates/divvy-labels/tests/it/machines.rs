use divvy_labels::{LabeledFabric, LabeledGpu, LabeledMachine, Labels, NodeFeature, PciDevice, labels, node_feature};
use divvy_model::{MiB, MigDevice, MigParts};
use divvy_nvidia_config::NvidiaConfig;
use proptest::collection::vec;
use proptest::option::of;
use proptest::prelude::*;

use crate::build::{config, machine};

/// What a broken driver may say: any bytes, read as text.
fn text() -> impl Strategy<Value = String> {
    let bytes = vec(any::<u8>(), 0..200).prop_map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    prop_oneof![bytes, ".{0,120}", "[-_. a-zA-Z0-9]{0,120}"]
}

fn model() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => Just("NVIDIA A100".to_owned()),
        // The same label as the model above.
        2 => Just(" NVIDIA  A100 ".to_owned()),
        2 => Just("Tesla T4".to_owned()),
        2 => text(),
    ]
}

fn number() -> impl Strategy<Value = u32> {
    prop_oneof![8 => 0..8u32, 1 => any::<u32>()]
}

fn memory() -> impl Strategy<Value = u64> {
    prop_oneof![1 => Just(0), 4 => Just(40960u64), 4 => 1..200_000u64, 1 => any::<u64>()]
}

fn mig_device() -> impl Strategy<Value = MigDevice> {
    let numbers = proptest::array::uniform8(number());
    let parts = (of(0..20u32), memory(), numbers).prop_map(|(gi_profile, memory, numbers)| {
        let [
            gi_slices,
            ci_slices,
            multiprocessors,
            copy_engines,
            decoders,
            encoders,
            jpeg,
            ofa,
        ] = numbers;
        MigParts {
            gi_profile,
            gi_slices,
            ci_slices,
            memory,
            multiprocessors,
            copy_engines,
            decoders,
            encoders,
            jpeg,
            ofa,
        }
    });
    let parts = prop_oneof![4 => Just(Some(MigParts { gi_slices: 1, ci_slices: 1, memory: 4864, ..MigParts::default() })), 1 => of(parts)];
    parts.prop_map(|parts| MigDevice {
        parts,
        ..MigDevice::default()
    })
}

fn gpu() -> impl Strategy<Value = LabeledGpu> {
    let fabric = (prop_oneof![3 => Just("c".to_owned()), 1 => text()], number());
    let facts = (
        model(),
        memory(),
        of((number(), number())),
        prop_oneof![Just(Some(0x03_02_00)), of(any::<u32>())],
        of(any::<bool>()),
        vec(mig_device(), 0..=7),
        of(fabric.prop_map(|(cluster, clique)| LabeledFabric { cluster, clique })),
    );
    facts.prop_map(|(model, memory, cc, pci_class, mig, mig_devices, fabric)| LabeledGpu {
        model,
        memory: MiB(memory),
        cc,
        pci_class,
        mig,
        mig_devices,
        fabric,
    })
}

/// Up to 16 GPUs with up to 112 MIG devices. Some machines have 16 times the same GPU.
fn gpus() -> impl Strategy<Value = Vec<LabeledGpu>> {
    prop_oneof![
        3 => vec(gpu(), 0..=16),
        1 => (gpu(), 1..=16usize).prop_map(|(gpu, count)| vec![gpu; count]),
    ]
}

fn any_machine() -> impl Strategy<Value = LabeledMachine> {
    let version = prop_oneof![
        2 => Just("550.54.15".to_owned()),
        1 => (text(), text()).prop_map(|(major, minor)| format!("{major}.{minor}")),
        1 => text(),
    ];
    let config_space = vec(vec(any::<u8>(), 0..300), 0..3);
    (
        gpus(),
        version,
        of((number(), number())),
        of(text()),
        config_space,
        any::<u64>(),
    )
        .prop_map(|(gpus, driver, cuda, machine_type, pci, timestamp)| LabeledMachine {
            driver,
            cuda,
            machine_type,
            gpus,
            pci: pci.into_iter().map(|config| PciDevice { config }).collect(),
            timestamp,
        })
}

fn any_config() -> impl Strategy<Value = NvidiaConfig> {
    let strategies = prop_oneof![Just("none"), Just("single"), Just("mixed")];
    let files = prop_oneof![
        Just(String::new()),
        Just("sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}, {name: nvidia.com/mig-1g.5gb, replicas: 2}]}}".to_owned()),
        Just("sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}".to_owned()),
    ];
    (strategies, files).prop_map(|(strategy, file)| config(&[&format!("--mig-strategy={strategy}")], &file))
}

/// Check the expressions of k8s.io/apimachinery (`pkg/util/validation`): a part of a key is `([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]`
/// with at most 63 characters. A value is the same, or empty.
fn is_label_part(text: &str) -> bool {
    let alphanumeric = |character: Option<char>| character.is_some_and(|character| character.is_ascii_alphanumeric());
    text.len() <= 63
        && alphanumeric(text.chars().next())
        && alphanumeric(text.chars().last())
        && text
            .chars()
            .all(|character| character.is_ascii_alphanumeric() || "-_.".contains(character))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn kubernetes_accepts_every_label_whatever_the_machine_says(machine in any_machine(), config in any_config()) {
        let found = labels(&machine, &config);
        let Ok(Labels { labels: found, .. }) = found else {
            prop_assert!(!machine.gpus.is_empty() && ![2, 3].contains(&machine.driver.split('.').count()), "{found:?}");
            return Ok(());
        };
        for (key, value) in &found {
            prop_assert!(key.strip_prefix("nvidia.com/").is_some_and(is_label_part), "{key}");
            prop_assert!(value.is_empty() || is_label_part(value), "{key}={value}");
        }
        prop_assert_eq!(found.contains_key("nvidia.com/gpu.count"), !machine.gpus.is_empty());
    }

    #[test]
    fn no_label_depends_on_the_order_of_the_gpus(
        (machine, turned) in any_machine().prop_flat_map(|machine| {
            let turned = Just(machine.gpus.clone()).prop_shuffle();
            (Just(machine), turned)
        }),
        config in any_config(),
    ) {
        let turned = LabeledMachine { gpus: turned, ..machine.clone() };
        prop_assert_eq!(labels(&machine, &config), labels(&turned, &config));
    }

    #[test]
    fn the_memory_is_that_of_the_largest_gpu(found in gpus()) {
        let largest = found.iter().map(|gpu| gpu.memory.0).max().filter(|memory| *memory > 0);
        let machine = LabeledMachine { gpus: found, ..machine(0) };
        let found = labels(&machine, &config(&[], "")).expect("labels").labels;
        prop_assert_eq!(found.get("nvidia.com/gpu.memory").cloned(), largest.map(|memory| memory.to_string()));
    }
}

#[test]
fn a_fabric_is_a_label_only_if_all_its_gpus_agree() {
    let with = |cliques: &[u32]| {
        let mut machine = machine(cliques.len());
        for (gpu, clique) in machine.gpus.iter_mut().zip(cliques) {
            gpu.fabric = Some(LabeledFabric {
                cluster: "7b968a6d-c8aa-45e1-9e07-e1e51be99c31".to_owned(),
                clique: *clique,
            });
        }
        let found = labels(&machine, &config(&[], "")).expect("labels").labels;
        found.get("nvidia.com/gpu.clique").cloned()
    };
    assert_eq!(with(&[1, 1]).as_deref(), Some("7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1"));
    assert_eq!(with(&[1, 2]), None);
}

#[test]
fn the_class_of_the_pci_devices_is_the_mode() {
    let with = |classes: [Option<u32>; 2]| {
        let mut machine = machine(2);
        for (gpu, class) in machine.gpus.iter_mut().zip(classes) {
            gpu.pci_class = class;
        }
        let found = labels(&machine, &config(&[], "")).expect("labels").labels;
        found["nvidia.com/gpu.mode"].clone()
    };
    assert_eq!(with([Some(0x03_02_00); 2]), "compute");
    assert_eq!(with([Some(0x03_00_00); 2]), "graphics");
    assert_eq!(with([Some(0x03_02_00), Some(0x03_00_00)]), "unknown");
    assert_eq!(with([Some(0x03_02_00), None]), "unknown");
}

#[test]
fn a_node_feature_names_its_node() {
    let found = labels(&machine(1), &config(&[], "")).expect("labels");
    let object = node_feature(
        &found,
        &NodeFeature {
            node: "n1".to_owned(),
            namespace: "gpu".to_owned(),
            owners: Vec::new(),
        },
    );
    assert_eq!(object["metadata"]["name"], "nvidia-features-for-n1");
    assert_eq!(object["metadata"]["labels"]["nfd.node.kubernetes.io/node-name"], "n1");
    assert_eq!(object["spec"]["labels"]["nvidia.com/gpu.count"], "1");
}

/// An empty machine type stays empty.
#[test]
fn an_unreadable_machine_type_is_unknown() {
    for (machine_type, expected) in [(None, "unknown"), (Some(""), ""), (Some(" \n"), ""), (Some("A B\n"), "A-B")] {
        let machine = LabeledMachine {
            machine_type: machine_type.map(str::to_owned),
            ..machine(1)
        };
        let found = labels(&machine, &config(&[], "")).expect("labels");
        assert_eq!(found.labels["nvidia.com/gpu.machine"], expected, "{machine_type:?}");
    }
}
