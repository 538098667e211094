//! Specs of this moment's GPUs, from what the probe prints.

use divvy_container::runtime::live::{KIND, Live, registry};
use divvy_container::runtime::require::Facts;
use serde_json::{Value, json};

use crate::machine::kinds;

fn snapshot(gpus: &Value) -> String {
    json!({"v": 1, "driver": "550.54.15", "cuda": "12.4", "gpus": gpus, "unreadable": [{"index": 9, "lost": true, "error": "gone"}]}).to_string()
}

#[test]
fn the_devices_are_those_that_the_probe_names_by_index_and_uuid() {
    let machine = kinds::debian();
    let gpus = json!([
        {"uuid": "GPU-a", "index": 0, "minor": 1, "totalMiB": 1},
        {"uuid": "GPU-b", "index": 1, "minor": 0, "totalMiB": 1},
        {"uuid": "GPU-c", "index": 2, "minor": 2, "totalMiB": 1, "lost": true},
    ]);
    let Live { registry, notes, .. } = registry(&machine, &snapshot(&gpus), "/").expect("a spec");
    let names: Vec<String> = registry.devices().iter().map(|device| device.name.clone()).collect();
    assert_eq!(
        names,
        ["0", "1", "GPU-a", "GPU-b", "all"].map(|name| format!("{KIND}={name}"))
    );
    let edits = registry.edits(&[&format!("{KIND}=0")]).expect("there");
    let nodes: Vec<&str> = edits
        .iter()
        .flat_map(|edits| &edits.device_nodes)
        .map(|node| node.path.as_str())
        .collect();
    assert!(
        nodes.contains(&"/dev/nvidia1") && nodes.contains(&"/dev/nvidiactl") && !nodes.contains(&"/dev/nvidia0"),
        "a minor is no index: {nodes:?}"
    );
    assert!(
        notes[0].contains("GPU 9 is left out: the driver says \"gone\"")
            && notes[1].contains("GPU 2 (GPU-c) is left out: it is lost"),
        "{notes:?}"
    );
}

#[test]
fn mig_devices_are_named_by_both_indexes() {
    let machine = kinds::mig();
    let gpus = json!([{"uuid": "GPU-a", "index": 0, "minor": 0, "totalMiB": 1}]);
    let Live { registry, .. } = registry(&machine, &snapshot(&gpus), "/").expect("a spec");
    let names: Vec<String> = registry.devices().iter().map(|device| device.name.clone()).collect();
    assert!(
        names.contains(&format!("{KIND}=0:0")) && !names.contains(&format!("{KIND}=0")),
        "{names:?}"
    );
}

#[test]
fn under_wsl_there_is_one_device() {
    let Live { registry, .. } = registry(&kinds::wsl(), &snapshot(&json!([])), "/").expect("a spec");
    let names: Vec<String> = registry.devices().iter().map(|device| device.name.clone()).collect();
    assert_eq!(names, [format!("{KIND}=all")]);
}

#[test]
fn what_is_no_snapshot_and_a_machine_without_a_driver_are_refused_in_words() {
    let fine = snapshot(&json!([{"uuid": "GPU-a", "index": 0, "minor": 0}]));
    for (probe, root, part) in [
        ("", "/", "no list of GPUs"),
        ("{\"v\":2,\"driver\":\"x\",\"gpus\":[]}", "/", "its version is 2"),
        (&fine, "/nowhere", "there is no folder /nowhere"),
        (&snapshot(&json!([])), "/", "the driver knows no GPU"),
    ] {
        let error = registry(&kinds::debian(), probe, root).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn what_an_image_requires_is_judged_by_what_the_driver_says() {
    let gpu = |index: u32, cc: &str| json!({"uuid": format!("GPU-{index}"), "index": index, "minor": index, "cc": cc});
    for (gpus, arch) in [
        (json!([gpu(0, "8.0"), gpu(1, "8.0")]), Some("8.0")),
        (json!([gpu(0, "8.0"), gpu(1, "9.0")]), None),
        (json!([gpu(0, "")]), None),
    ] {
        let Live { facts, .. } = registry(&kinds::debian(), &snapshot(&gpus), "/").expect("a spec");
        let expected = Facts {
            driver: Some("550.54.15".to_owned()),
            cuda: Some("12.4".to_owned()),
            arch: arch.map(str::to_owned),
            brand: None,
        };
        assert_eq!(facts, expected);
    }
}
