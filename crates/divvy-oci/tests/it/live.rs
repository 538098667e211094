//! Tests of specs that are generated from the probe's output when a container starts.

use divvy_cdi::generate::{Channels, Extras};
use divvy_oci::runtime::bundle::Bundle;
use divvy_oci::runtime::extras::extras;
use divvy_oci::runtime::live::{KIND, Live, LiveSpecError, registry};
use divvy_oci::runtime::require::RequirementFacts;
use divvy_oci::runtime::settings::OciRuntimeSettings;
use serde_json::{Value, json};

use divvy_testkit::machine::{MachineFiles, kinds};

fn snapshot(gpus: &Value) -> String {
    let drivers = json!({"nvidia": {"version": "550.54.15", "cuda": "12.4"}, "amd": {"version": "6.10.5"}});
    json!({"v": 2, "drivers": drivers, "gpus": gpus, "unreadable": [{"index": 9, "lost": true, "error": "gone"}]}).to_string()
}

#[test]
fn the_devices_are_those_that_the_probe_names_by_index_and_uuid() {
    let machine = kinds::debian();
    let gpus = json!([
        {"uuid": "GPU-a", "index": 0, "minor": 1, "totalMiB": 1},
        {"uuid": "GPU-b", "index": 1, "minor": 0, "totalMiB": 1},
        {"uuid": "GPU-c", "index": 2, "minor": 2, "totalMiB": 1, "lost": true},
        {"uuid": "GPU-d", "index": 3, "totalMiB": 1},
        {"vendor": "amd", "uuid": "0x1", "index": 0, "nodes": ["dri/card1", "dri/renderD128"], "totalMiB": 1},
    ]);
    let Live { registry, notes, .. } = registry(&machine, &snapshot(&gpus), "/", Extras::default()).expect("a spec");
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
        "a minor number is not an index: {nodes:?}"
    );
    assert!(
        notes[0].contains("GPU 9 is left out: the driver says \"gone\"")
            && notes[1].contains("GPU 2 (GPU-c) is left out: it is lost")
            && notes[2].contains("GPU 3 (GPU-d) is left out: the driver does not report its minor number"),
        "{notes:?}"
    );
}

#[test]
fn mig_devices_are_named_by_both_indexes() {
    let machine = kinds::mig();
    let gpus = json!([{"uuid": "GPU-a", "index": 0, "minor": 0, "totalMiB": 1}]);
    let Live { registry, .. } = registry(&machine, &snapshot(&gpus), "/", Extras::default()).expect("a spec");
    let names: Vec<String> = registry.devices().iter().map(|device| device.name.clone()).collect();
    assert!(
        names.contains(&format!("{KIND}=0:0")) && !names.contains(&format!("{KIND}=0")),
        "{names:?}"
    );
}

#[test]
fn mig_devices_have_the_uuid_and_the_index_that_the_driver_says() {
    let machine = kinds::mig();
    // NVML's list starts at index 1, and it has one MIG device whose capabilities do not exist.
    let told = json!([{"index": 1, "uuid": "MIG-a", "gi": 2, "ci": 0}, {"index": 2, "uuid": "MIG-b", "gi": 1, "ci": 0},
                      {"index": 3, "uuid": "MIG-c", "gi": 9, "ci": 0}]);
    let gpus = json!([{"uuid": "GPU-a", "index": 0, "minor": 0, "totalMiB": 1, "mig": [true, true], "migDevices": told}]);
    let Live { registry, .. } = registry(&machine, &snapshot(&gpus), "/", Extras::default()).expect("a spec");
    let names: Vec<String> = registry.devices().iter().map(|device| device.name.clone()).collect();
    let expected = ["0:1", "0:2", "MIG-a", "MIG-b", "all"].map(|name| format!("{KIND}={name}"));
    assert_eq!(names, expected);
    let nodes = |name: &str| -> Vec<String> {
        let edits = registry.edits(&[&format!("{KIND}={name}")]).expect("the device");
        let nodes = edits
            .iter()
            .flat_map(|edits| edits.device_nodes.iter().map(|node| node.path.clone()));
        nodes.filter(|path| path.contains("nvidia-cap")).collect()
    };
    assert_eq!(
        nodes("MIG-a"),
        ["/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22"]
    );
    assert_eq!(nodes("0:1"), nodes("MIG-a"));
}

/// NVIDIA's tool does not offer such a GPU either, because CUDA cannot use it.
/// A message says that such a GPU is left out.
#[test]
fn undivided_gpus_in_mig_mode_are_left_out() {
    let gpu = |index: u32, mig: Value| json!({"uuid": format!("GPU-{index}"), "index": index, "minor": index, "mig": mig});
    let gpus = json!([gpu(0, json!([true, true])), gpu(1, json!([false, true]))]);
    let Live { registry, notes, .. } = registry(&kinds::debian(), &snapshot(&gpus), "/", Extras::default()).expect("a spec");
    let names: Vec<String> = registry.devices().iter().map(|device| device.name.clone()).collect();
    assert_eq!(names, ["1", "GPU-1", "all"].map(|name| format!("{KIND}={name}")));
    let said = "GPU 0 is left out: MIG is enabled, but the GPU has no MIG devices";
    assert!(notes.iter().any(|note| note.starts_with(said)), "{notes:?}");
}

#[test]
fn under_wsl_there_is_one_device() {
    let Live { registry, .. } = registry(&kinds::wsl(), &snapshot(&json!([])), "/", Extras::default()).expect("a spec");
    let names: Vec<String> = registry.devices().iter().map(|device| device.name.clone()).collect();
    assert_eq!(names, [format!("{KIND}=all")]);
}

/// Input that is not a snapshot is refused in words, too.
#[test]
fn machines_without_a_driver_are_refused_in_words() {
    let fine = snapshot(&json!([{"uuid": "GPU-a", "index": 0, "minor": 0}]));
    for (probe, root, part) in [
        ("", "/", "not a list of GPUs"),
        ("{\"v\":1,\"driver\":\"x\",\"gpus\":[]}", "/", "its version is 1"),
        (&fine, "/nowhere", "there is no directory /nowhere"),
        (&snapshot(&json!([])), "/", "the driver reports no GPU"),
    ] {
        let error = registry(&kinds::debian(), probe, root, Extras::default())
            .expect_err(part)
            .to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn what_an_image_requires_is_judged_by_what_the_driver_says() {
    let gpu = |index: u32, cc: &str, brand: Value| {
        let uuid = format!("GPU-{index}");
        json!({"uuid": uuid, "index": index, "minor": index, "cc": cc, "brand": brand})
    };
    let (tesla, geforce) = (json!("tesla"), json!("geforce"));
    for (gpus, arch, brand) in [
        (
            json!([gpu(0, "8.0", tesla.clone()), gpu(1, "8.0", tesla.clone())]),
            Some("8.0"),
            Some("tesla"),
        ),
        (
            json!([gpu(0, "8.0", tesla.clone()), gpu(1, "9.0", tesla.clone())]),
            None,
            Some("tesla"),
        ),
        (
            json!([gpu(0, "8.0", tesla.clone()), gpu(1, "8.0", geforce)]),
            Some("8.0"),
            None,
        ),
        (json!([gpu(0, "8.0", tesla), gpu(1, "8.0", Value::Null)]), Some("8.0"), None),
        (json!([gpu(0, "", Value::Null)]), None, None),
    ] {
        let Live { facts, .. } = registry(&kinds::debian(), &snapshot(&gpus), "/", Extras::default()).expect("a spec");
        let expected = RequirementFacts {
            driver: Some("550.54.15".to_owned()),
            cuda: Some("12.4".to_owned()),
            arch: arch.map(str::to_owned),
            brand: brand.map(str::to_owned),
        };
        assert_eq!(facts, expected);
    }
}

#[test]
fn what_is_asked_for_beside_gpus_is_there_or_is_said_not_to_be() {
    let mut machine = kinds::debian();
    for path in [
        "/dev/nvidia-fs",
        "/dev/nvidia-fs0",
        "/dev/nvidia-fs1",
        "/dev/nvidia-fs-other",
        "/dev/infiniband/uverbs0",
        "/dev/infiniband/rdma_cm",
        "/dev/infiniband/issm0",
        "/dev/gdrdrv",
        "/dev/nvidia-nvswitch0",
        "/dev/nvidia-nvswitchctl",
        "/dev/nvidia-caps-imex-channels/channel0",
        "/dev/nvidia-caps-imex-channels/channel3",
    ] {
        machine.node(path);
    }
    machine.file("/etc/cufile.json", "{}");
    machine.file("/run/udev/data/b259:0", "");
    let gpus = snapshot(&json!([{"uuid": "GPU-a", "index": 0, "minor": 0}]));
    let plain = paths(&machine, &gpus, Extras::default()).expect("a spec").0;
    let some = |numbers: &[u32]| Channels::Some(numbers.iter().copied().collect());
    let with = |change: fn(&mut Extras)| {
        let mut extras = Extras::default();
        change(&mut extras);
        extras
    };
    for (extras, expected) in [
        (
            with(|extras| extras.storage = true),
            &[
                "/dev/nvidia-fs",
                "/dev/nvidia-fs0",
                "/dev/nvidia-fs1",
                "/etc/cufile.json",
                "/run/udev",
            ][..],
        ),
        (
            with(|extras| extras.rdma = true),
            &["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"],
        ),
        (with(|extras| extras.gdrcopy = true), &["/dev/gdrdrv"]),
        (
            with(|extras| extras.nvswitch = true),
            &["/dev/nvidia-nvswitch0", "/dev/nvidia-nvswitchctl"],
        ),
        (
            with(|extras| extras.imex = Channels::All),
            &[
                "/dev/nvidia-caps-imex-channels/channel0",
                "/dev/nvidia-caps-imex-channels/channel3",
            ],
        ),
        (
            Extras {
                imex: some(&[3]),
                ..Extras::default()
            },
            &["/dev/nvidia-caps-imex-channels/channel3"],
        ),
    ] {
        let (mut paths, notes) = paths(&machine, &gpus, extras.clone()).expect("a spec");
        paths.retain(|path| !plain.contains(path));
        assert_eq!(
            (paths, notes.len()),
            (expected.iter().map(|path| (*path).to_owned()).collect(), 1),
            "{extras:?}"
        );
    }
    let error = paths(
        &machine,
        &gpus,
        Extras {
            imex: some(&[1]),
            ..Extras::default()
        },
    )
    .expect_err("no channel 1")
    .to_string();
    assert!(
        error.contains("the requested IMEX channel /dev/nvidia-caps-imex-channels/channel1 does not exist"),
        "{error}"
    );
    let (_, notes) = paths(&kinds::debian(), &gpus, with(|extras| extras.gdrcopy = true)).expect("a spec");
    assert!(
        notes[1].contains("GDRCopy is requested, but this machine has no device node for it"),
        "{notes:?}"
    );
}

/// Return the device nodes and files that a container with GPU 0 gets, in sorted order, and the notes.
fn paths(machine: &MachineFiles, gpus: &str, extras: Extras) -> Result<(Vec<String>, Vec<String>), LiveSpecError> {
    let Live { registry, notes, .. } = registry(machine, gpus, "/", extras)?;
    let edits = registry.edits(&[&format!("{KIND}=0")]).expect("GPU 0 is there");
    let mut paths: Vec<String> = Vec::new();
    for edits in edits {
        paths.extend(edits.device_nodes.iter().map(|node| node.path.clone()));
        paths.extend(edits.mounts.iter().map(|mount| mount.container_path.clone()));
    }
    paths.sort();
    Ok((paths, notes))
}

#[test]
fn variables_ask_for_it_as_they_do_for_gpus() {
    let container = |privileged: bool, env: &[&str]| {
        let bounding: &[&str] = if privileged { &["CAP_SYS_ADMIN"] } else { &[] };
        let text = json!({"process": {"env": env, "capabilities": {"bounding": bounding}}}).to_string();
        Bundle::parse(&text)
            .and_then(|bundle| bundle.container())
            .expect("a container")
    };
    let env = [
        "NVIDIA_GDS=enabled",
        "NVIDIA_MOFED=true",
        "NVIDIA_GDRCOPY=",
        "NVIDIA_NVSWITCH=enabled",
    ];
    let wanted = Extras {
        storage: true,
        nvswitch: true,
        ..Extras::default()
    };
    for (privileged, accept, expected) in [(true, false, true), (false, true, true), (false, false, false)] {
        let settings = OciRuntimeSettings {
            accept_environment: Some(accept),
            ..OciRuntimeSettings::default()
        };
        let env = [&env[..], &["NVIDIA_IMEX_CHANNELS=2"]].concat();
        let wanted = Extras {
            imex: Channels::Some([2].into()),
            ..wanted.clone()
        };
        let (found, ignored) = extras(&container(privileged, &env), &settings).expect("fine");
        assert_eq!(found, if expected { wanted } else { Extras::default() });
        assert_eq!(ignored.is_empty(), expected, "{ignored:?}");
    }
    let channels = |list: &str| {
        let env = format!("NVIDIA_IMEX_CHANNELS={list}");
        extras(&container(true, &[&env]), &OciRuntimeSettings::default())
            .map(|(extras, _)| extras.imex)
            .ok()
    };
    assert_eq!(channels("0, 3"), Some(Channels::Some([0, 3].into())));
    assert_eq!(channels("3,all"), Some(Channels::All));
    assert_eq!(channels(""), Some(Channels::default()));
    assert_eq!(channels("1048576"), None);
}
