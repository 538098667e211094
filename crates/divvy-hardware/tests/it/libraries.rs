//! Libraries that are not a complete, new NVML: those of older drivers, and simulated ones.

use std::path::Path;
use std::process::Output;

use divvy_hardware::{Fabric, Snapshot};
use divvy_model::MiB;
use serde_json::json;

use crate::support::{GPU0, GPU1, Library, Lines, Machine, TWO, connect, listen, sim_library};

fn once(machine: &Machine, library: &Path) -> Output {
    let mut command = std::process::Command::new(crate::support::PROBE);
    command.envs(machine.env()).arg("--once").arg("--nvml-library").arg(library);
    command.arg("--sys-root").arg(machine.path("root"));
    command.output().expect("the probe runs")
}

/// GPU 0 is divided and GPU 1 is not.
fn divided() -> String {
    let mig = "mig = [{ gpu_instance = 1, compute_instance = 0, profile = 0, uuid = \"MIG-1\" }]";
    TWO.replacen("memory_mib = 40960", &format!("memory_mib = 40960\n{mig}"), 1)
}

/// If one of these functions is missing, the probe fails, or cannot read any GPU.
const NEEDED: [&str; 5] = [
    "nvmlInit_v2",
    "nvmlShutdown",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
];

/// In each case, the driver library lacks another one of its functions.
#[test]
fn a_probe_answers_or_names_the_missing_function() {
    let machine = Machine::new(&divided());
    let library = Library::new(&machine);
    assert!(library.names.len() > 50, "{:?}", library.names);
    for name in library.names.keys() {
        library.hide(name, true);
        let output = once(&machine, &library.path);
        library.hide(name, false);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!said.contains("panicked"), "without {name}: {said}");
        match output.status.code() {
            Some(0) => {
                let snapshot: Snapshot = serde_json::from_slice(&output.stdout).expect("a snapshot");
                snapshot.validate().expect("valid");
                let gpus: Vec<_> = snapshot.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu.total)).collect();
                if NEEDED.contains(&name.as_str()) {
                    assert_eq!(snapshot.gpus.len() + snapshot.unreadable.len(), 2, "without {name}")
                } else {
                    assert_eq!(gpus, [(GPU0, MiB(40960)), (GPU1, MiB(15360))], "without {name}")
                }
                // What cannot be read about the division of GPU 0 must not make it look like a whole GPU.
                let whole = snapshot
                    .gpus
                    .iter()
                    .filter(|gpu| gpu.unfit().is_none() && gpu.error.is_none());
                let is_whole = whole.clone().any(|gpu| gpu.uuid == GPU0);
                assert!(!is_whole || name == "nvmlDeviceGetMigMode", "without {name}: {snapshot:?}");
            }
            Some(1) => {
                assert!(NEEDED.contains(&name.as_str()), "without {name}: {said}");
                let missing = format!("undefined symbol: {name}");
                assert!(
                    said.contains(&missing) && said.contains("(driver_files)"),
                    "without {name}: {said}"
                );
            }
            other => panic!("without {name}: {other:?} {said}"),
        }
    }
}

/// If the driver has a function only under its older name, that is enough.
#[test]
fn what_an_older_driver_does_not_count_is_absent() {
    let health = "health = { ecc_errors = [0, 1], remapped_rows = {}, retired_pages_pending = true, clocks_event_reasons = 8 }";
    let machine = Machine::new(&TWO.replacen("processes = ", &format!("{health}\nprocesses = "), 1));
    let library = Library::new(&machine);
    let read = || {
        let output = once(&machine, &library.path);
        let snapshot: Snapshot = serde_json::from_slice(&output.stdout).expect("a snapshot");
        let gpu = &snapshot.gpus[0];
        assert_eq!((gpu.error.as_deref(), gpu.lost), (None, false));
        (
            gpu.uncorrected_ecc_errors,
            gpu.remapped_rows.is_some(),
            gpu.retired_pages_pending,
            gpu.clocks_event_reasons,
        )
    };
    assert_eq!(read(), (Some(1), true, None, Some(8)));
    for (name, expected) in [
        ("nvmlDeviceGetCurrentClocksEventReasons", (Some(1), true, None, Some(8))),
        ("nvmlDeviceGetRemappedRows", (Some(1), false, Some(true), Some(8))),
        ("nvmlDeviceGetRetiredPagesPendingStatus", (Some(1), false, None, Some(8))),
        ("nvmlDeviceGetTotalEccErrors", (None, false, None, Some(8))),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", (None, false, None, None)),
    ] {
        library.hide(name, true);
        assert_eq!(read(), expected, "without {name}");
    }
}

#[test]
fn the_first_versions_of_calls_are_enough() {
    let machine = Machine::new(&divided());
    let library = Library::new(&machine);
    let complete = once(&machine, &library.path);
    let newer = [
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetAttributes_v2",
        "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlDeviceGetMemoryInfo_v2",
    ];
    newer.iter().for_each(|name| library.hide(name, true));
    let old = once(&machine, &library.path);
    assert_eq!(
        String::from_utf8_lossy(&old.stdout),
        String::from_utf8_lossy(&complete.stdout),
        "{}",
        String::from_utf8_lossy(&old.stderr)
    );
}

#[test]
fn a_library_without_mig_gives_xids_without_instances() {
    let machine = Machine::new(TWO);
    let library = Library::new(&machine);
    library.hide("nvmlEventSetWait_v2", true);
    let _probe = listen(&machine, &library.path);
    let mut client = Lines::new(connect(&machine.path("s")));
    client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
    client.send(b"{\"v\":1,\"id\":2,\"op\":\"events\"}\n");
    machine.xid(1, 79);
    let fault = loop {
        let line = client.next().expect("a line");
        let text = line.to_string();
        if text.contains("XID 79") {
            break line;
        }
    };
    assert!(fault["partition"].is_null(), "{fault}");
}

/// The driver refuses the second version.
#[test]
fn memory_falls_back_to_the_first_version_of_the_call() {
    for (errors, total, is_fit) in [
        (json!({"2": 3}), 40960, true),
        (json!({"2": 25}), 40960, true),
        (json!({"2": 2}), 40960, true),
        // Like the GPU of a DGX Spark, which has no own memory.
        (json!({"1": 3, "2": 3}), 0, false),
    ] {
        let machine = Machine::new(TWO);
        let state = json!({"gpus": {"0": {"memory_errors": errors}}});
        std::fs::write(machine.path("control.state"), state.to_string()).expect("written");
        let output = once(&machine, sim_library());
        let snapshot: Snapshot = serde_json::from_slice(&output.stdout).expect("a snapshot");
        let gpu = &snapshot.gpus[0];
        assert_eq!(
            (gpu.total, gpu.unfit().is_none(), &gpu.error),
            (MiB(total), is_fit, &None),
            "{state}"
        );
    }
}

#[test]
fn a_gpu_whose_mig_mode_was_never_read_is_not_offered() {
    let machine = Machine::new(&TWO.replacen("memory_mib = 40960", "memory_mib = 40960\nmig_capable = true", 1));
    let state = json!({"gpus": {"0": {"mig_mode_error": 999}}});
    std::fs::write(machine.path("control.state"), state.to_string()).expect("written");
    let _probe = machine.listening("s", &[]);
    let mut client = Lines::new(connect(&machine.path("s")));
    let mut error = || client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}")["ok"]["gpus"][0]["error"].clone();
    for _ in 0..2 {
        let error = error();
        assert!(error.as_str().is_some_and(|text| text.starts_with("MIG: ")), "{error}");
    }
    machine.control(&json!({"op": "mig_mode", "gpu": 0, "error": 0}));
    assert!(error().is_null());
    // What was once read stays true.
    machine.control(&json!({"op": "mig_mode", "gpu": 0, "error": 999}));
    assert!(error().is_null());
}

#[test]
fn a_fabric_without_a_cluster_is_none() {
    let fabric = |cluster: &str| format!("memory_mib = 40960\nfabric = {{ cluster = \"{cluster}\", clique = 0 }}");
    let fabric_of = |cluster: &str| -> Option<Fabric> {
        let machine = Machine::new(&TWO.replacen("memory_mib = 40960", &fabric(cluster), 1));
        let output = once(&machine, sim_library());
        let snapshot: Snapshot = serde_json::from_slice(&output.stdout).expect("a snapshot");
        snapshot.gpus[0].fabric.clone()
    };
    assert_eq!(fabric_of("00000000-0000-0000-0000-000000000000"), None);
    assert!(fabric_of("00000000-0000-0000-0000-000000000001").is_some());
}

/// The lists of processes have three versions, and one of them two layouts.
#[test]
fn a_driver_of_any_branch_lists_the_processes_of_its_gpus() {
    for version in [
        "418.226.00",
        "450.248.02",
        "470.256.02",
        "525.147.05",
        "535.54.03",
        "535.261.03",
        "550.163.01",
    ] {
        let machine = Machine::new(&TWO.replace("550.54.15", version));
        let graphics =
            json!({"gpus": {"0": {"processes": {"21": 300, "22": 40, "23": 5}, "graphics": {"22": false}, "mps": [23]}}});
        std::fs::write(machine.path("control.state"), graphics.to_string()).expect("written");
        let _probe = machine.listening("s", &[]);
        let answer = Lines::new(connect(&machine.path("s"))).ask("{\"v\":1,\"id\":1,\"op\":\"processes\"}");
        let gpu = &answer["ok"][0];
        let found: Vec<_> = gpu["processes"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|of| (&of["pid"], &of["usedMiB"], &of["kind"]))
            .collect();
        let expected = json!([
            [1, 10, "compute"],
            [7, 500, "compute"],
            [21, 300, "compute"],
            [22, 40, "graphics"],
            [23, 5, "mps-client"]
        ]);
        assert_eq!((json!(found), gpu.get("error")), (expected, None), "{version}");
    }
}
