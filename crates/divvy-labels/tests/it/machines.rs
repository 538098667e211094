use divvy_labels::{Fabric, Gpu, Labels, Machine, NodeFeature, PciDevice, labels, node_feature};
use divvy_model::{MiB, MigDevice, MigParts};
use proptest::collection::vec;
use proptest::option::of;
use proptest::prelude::*;

use crate::build::{config, machine};

fn gpus() -> impl Strategy<Value = Vec<Gpu>> {
    let models = prop_oneof![Just("NVIDIA A100".to_owned()), Just("Tesla T4".to_owned()), ".{0,120}"];
    let parts = (0..20u32, 0..8u32, 0..8u32, any::<u64>()).prop_map(|(profile, gi_slices, ci_slices, memory)| MigParts {
        gi_profile: Some(profile),
        gi_slices,
        ci_slices,
        memory,
        ..MigParts::default()
    });
    let device = of(parts).prop_map(|parts| MigDevice {
        capabilities: None,
        parts,
        ..MigDevice::default()
    });
    let fabric = (0..2u32).prop_map(|clique| Fabric {
        cluster: "c".to_owned(),
        clique,
    });
    let gpu = (
        models,
        0..100_000u64,
        of((0..20u32, 0..10u32)),
        of(any::<u32>()),
        of(any::<bool>()),
        vec(device, 0..4),
        of(fabric),
    );
    let gpu = gpu.prop_map(|(model, memory, cc, pci_class, mig, mig_devices, fabric)| Gpu {
        model,
        memory: MiB(memory),
        cc,
        pci_class,
        mig,
        mig_devices,
        fabric,
    });
    vec(gpu, 0..17)
}

/// Check the rules of k8s.io/apimachinery: at most 63 characters, with a letter or a digit at the beginning and at the end.
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
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_label_is_one_that_kubernetes_accepts_whatever_the_order_of_the_gpus(
        found in gpus(),
        machine_type in of(".{0,100}"),
        config_space in vec(any::<u8>(), 0..300),
        strategy in prop_oneof![Just("none"), Just("single"), Just("mixed")],
    ) {
        let machine = Machine {
            gpus: found,
            machine_type,
            pci: vec![PciDevice { config: config_space }],
            ..machine(0)
        };
        let config = config(&[&format!("--mig-strategy={strategy}")], "");
        let Labels { labels: found, .. } = labels(&machine, &config).expect("labels");
        for (key, value) in &found {
            prop_assert!(key.strip_prefix("nvidia.com/").is_some_and(is_label_part), "{key}");
            prop_assert!(value.is_empty() || is_label_part(value), "{key}={value}");
        }
        let mut turned = machine.clone();
        turned.gpus.reverse();
        let again = labels(&turned, &config).expect("labels").labels;
        let stable = |key: &&String| ["nvidia.com/gpu.product", "nvidia.com/gpu.count", "nvidia.com/gpu.memory"].contains(&key.as_str());
        for key in found.keys().filter(stable) {
            prop_assert_eq!(found.get(key), again.get(key), "{}", key);
        }
    }
}

#[test]
fn a_fabric_is_a_label_only_if_all_its_gpus_agree() {
    let with = |cliques: &[u32]| {
        let mut machine = machine(cliques.len());
        for (gpu, clique) in machine.gpus.iter_mut().zip(cliques) {
            gpu.fabric = Some(Fabric {
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
