use std::collections::BTreeSet;

use divvy_labels::{Error, LabeledMachine, file, labels};
use divvy_model::MiB;
use divvy_nvidia_config::NvidiaConfig;

use crate::build::{config, divided, machine};

const SLICES: &str = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}";
const RENAMED: &str = "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}";
const MPS: &str = "flags: {mpsRoot: /m}\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}";

/// Compare the labels with a recorded file. Lines that begin with an element of `more` exist only in Divvy.
fn check(name: &str, machine: &LabeledMachine, config: &NvidiaConfig, more: &[&str]) {
    let path = format!("{}/tests/recorded/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    let recorded = std::fs::read_to_string(path).expect("the recorded file");
    let printed = file(&labels(machine, config).expect("labels"));
    let is_more = |line: &&str| more.iter().any(|start| line.starts_with(start));
    let lines = |text: &'_ str| -> BTreeSet<String> { text.lines().filter(|line| !is_more(line)).map(str::to_owned).collect() };
    let (ours, theirs) = (lines(&printed), lines(&recorded));
    let only = |a: &BTreeSet<String>, b: &BTreeSet<String>| -> Vec<String> { a.difference(b).cloned().collect() };
    assert_eq!(
        (only(&ours, &theirs), only(&theirs, &ours)),
        (Vec::new(), Vec::new()),
        "{name}"
    );
    for start in more {
        assert!(printed.lines().any(|line| line.starts_with(start)), "{name}: {start}");
    }
}

#[test]
fn t34_the_labels_are_nvidias() {
    let plain = config(&[], "");
    check("default8", &machine(8), &plain, &[]);
    check("zero", &machine(0), &plain, &[]);
    let mut no_memory = machine(1);
    no_memory.gpus[0].memory = MiB::ZERO;
    check("nomem", &no_memory, &plain, &[]);
    check("ts", &machine(2), &config(&[], SLICES), &[]);
    check("ts_renamed", &machine(2), &config(&[], RENAMED), &[]);
    check("mps", &machine(2), &config(&[], MPS), &[]);
    let mixed = config(&["--mig-strategy=mixed"], "");
    check("mig_mixed", &divided(3, "0=0,0,1,7;1=2,2"), &mixed, &[]);
    check("p17", &divided(2, "0=0"), &mixed, &[]);
    let single = config(&["--mig-strategy=single"], "");
    check("mig_single_uniform", &divided(2, "0=0,0,0;1=0,0"), &single, &[]);
    check("mig_single_nomig", &machine(2), &single, &[]);
}

/// The other GPUs have their labels.
#[test]
fn an_unreadable_gpu_name_makes_no_label() {
    for name in ["", " ", "\u{7}"] {
        let mut all = machine(3);
        all.gpus.iter_mut().for_each(|gpu| name.clone_into(&mut gpu.model));
        let found = labels(&all, &config(&[], "")).expect("labels");
        assert_eq!(found.labels.get("nvidia.com/gpu.product"), None);
        assert_eq!(found.labels.get("nvidia.com/gpu.count").map(String::as_str), Some("3"));
        assert!(
            found.warnings[0].starts_with("the name of 3 GPUs cannot be read"),
            "{:?}",
            found.warnings
        );
        all.gpus[0].model = "Tesla T4".to_owned();
        let found = labels(&all, &config(&[], "")).expect("labels").labels;
        let of_models: Vec<&String> = found.keys().filter(|key| key.contains("/model.")).collect();
        assert_eq!(
            of_models,
            ["nvidia.com/model.Tesla-T4.count", "nvidia.com/model.Tesla-T4.memory"]
        );
        assert!(found.values().all(|value| !value.is_empty()), "{found:?}");
    }
    let mut parts = divided(2, "0=0,0;1=0,0");
    parts.gpus.iter_mut().for_each(|gpu| gpu.model.clear());
    for strategy in ["single", "mixed"] {
        let found = labels(&parts, &config(&[&format!("--mig-strategy={strategy}")], "")).expect("labels");
        let named: Vec<&String> = found.labels.keys().filter(|key| key.ends_with(".product")).collect();
        assert_eq!(named, Vec::<&String>::new(), "{strategy}");
    }
}

#[test]
fn a_node_with_several_models_has_labels_for_each() {
    let mut mixed = machine(4);
    for gpu in &mut mixed.gpus[1..] {
        gpu.model = "Tesla T4".to_owned();
    }
    // The recorded machine has the same memory everywhere, so the number of GPUs decides.
    check("hetero", &mixed, &config(&[], ""), &["nvidia.com/model."]);
    for gpu in &mut mixed.gpus[1..] {
        gpu.memory = MiB(15360);
        gpu.cc = Some((7, 5));
    }
    let found = labels(&mixed, &config(&[], "")).expect("labels");
    let expected = [
        ("gpu.product", "NVIDIA-A100-SXM4-40GB"),
        ("gpu.memory", "40960"),
        ("gpu.count", "1"),
        ("gpu.family", "ampere"),
        ("model.NVIDIA-A100-SXM4-40GB.count", "1"),
        ("model.NVIDIA-A100-SXM4-40GB.memory", "40960"),
        ("model.Tesla-T4.count", "3"),
        ("model.Tesla-T4.memory", "15360"),
    ];
    for (name, value) in expected {
        assert_eq!(
            found.labels.get(&format!("nvidia.com/{name}")).map(String::as_str),
            Some(value),
            "{name}"
        );
    }
    assert_eq!(
        found.warnings,
        ["the node has GPUs of 2 models; the labels that name no model describe NVIDIA-A100-SXM4-40GB"]
    );
}

#[test]
fn t35_a_malformed_driver_version_and_mps_with_mig_are_errors() {
    for (version, expected) in [
        ("550", true),
        ("1.2.3.4", true),
        ("", true),
        ("550.54", false),
        ("550.54.15", false),
    ] {
        let mut machine = machine(1);
        machine.driver = version.to_owned();
        let found = labels(&machine, &config(&[], ""));
        assert_eq!(found == Err(Error::DriverVersion(version.to_owned())), expected, "{version}");
    }
    let error = labels(&divided(1, "0=0"), &config(&["--mig-strategy=single"], MPS));
    assert_eq!(error, Err(Error::MpsWithMig));
}

#[test]
fn t28_an_invalid_single_strategy_is_said_in_the_labels() {
    for text in ["0=0,0,1,7;1=2,2", "0=0,0,0", "0=0;1="] {
        let found = labels(&divided(2, text), &config(&["--mig-strategy=single"], SLICES))
            .expect("labels")
            .labels;
        for (name, value) in [
            ("product", "NVIDIA-A100-SXM4-40GB-MIG-INVALID"),
            ("count", "0"),
            ("replicas", "0"),
            ("memory", "0"),
            ("sharing-strategy", ""),
        ] {
            assert_eq!(
                found.get(&format!("nvidia.com/gpu.{name}")).map(String::as_str),
                Some(value),
                "{text} {name}"
            );
        }
    }
}

#[test]
fn t34_gpus_in_mig_mode_are_not_shared_directly() {
    for strategy in ["none", "mixed"] {
        let strategy = format!("--mig-strategy={strategy}");
        let found = |text| {
            labels(&divided(2, text), &config(&[&strategy], SLICES))
                .expect("labels")
                .labels
        };
        let values = |text| {
            let found = found(text);
            ["product", "replicas", "sharing-strategy"].map(|name| found[&format!("nvidia.com/gpu.{name}")].clone())
        };
        assert_eq!(values("0=0;1=2"), ["NVIDIA-A100-SXM4-40GB", "0", "none"], "{strategy}");
        let shared = ["NVIDIA-A100-SXM4-40GB-SHARED", "4", "time-slicing"];
        assert_eq!(values("0=0"), shared, "one GPU is whole, {strategy}");
    }
}
