//! Limits of memory that the driver enforces.

use std::path::Path;

use serde_json::{Value, json};

use super::once;
use crate::support::{GPU0, GPU1, Lines, Machine, TWO, connect};

/// A driver that limits the memory of cgroups, with a GPU that is divided.
const LIMITING: &str = r#"
v = 1
[[node]]
name = "n"
driver = "615.71.09"
[[node.gpu]]
model = "NVIDIA H100"
uuid = "GPU-00000000-0000-4000-8000-000000000000"
memory_mib = 81559
[[node.gpu]]
model = "NVIDIA H100"
uuid = "GPU-00000000-0000-4000-8000-000000000001"
memory_mib = 81559
mig = [{ gpu_instance = 1, compute_instance = 0 }]
"#;

const POD: &str = "kubepods/besteffort/pod6b8e5a3c-0000-4000-8000-000000000001";

/// The limit is set on the pod's cgroup, and what the driver refuses is reported.
#[test]
fn a_pods_limit_is_set_and_read_back() {
    let machine = Machine::new(LIMITING);
    let root = machine.path("root/sys/fs/cgroup");
    std::fs::create_dir_all(root.join(POD)).expect("created");
    let _probe = machine.listening("probe.sock", &[]);
    let mut lines = Lines::new(connect(&machine.path("probe.sock")));
    let snapshot = lines.ask(r#"{"v":1,"id":1,"op":"snapshot"}"#);
    let can = |gpu: usize| snapshot["ok"]["gpus"][gpu]["memoryLimit"].clone();
    assert_eq!((can(0), can(1)), (json!(true), Value::Null), "{snapshot}");
    let mut limit = |uuid: &str, cgroup: &str, hard: u64| {
        let request = json!({"v": 1, "id": 2, "op": "limit", "uuid": uuid, "cgroup": cgroup, "hardMiB": hard});
        lines.ask(&request.to_string())
    };
    let limits = || machine.control(&json!({"op": "state"}))["state"]["changes"]["gpus"]["0"]["limits"].clone();
    assert_eq!(limit(GPU0, POD, 3072)["ok"], json!({"usedMiB": 0}));
    let path = root.join(POD).display().to_string();
    assert_eq!(limits(), json!({ path: {"soft": 0, "hard": 3072_u64 << 20} }));
    for (change, gpu, cgroup, code, part) in [
        (
            json!({"op": "state"}),
            GPU1,
            POD,
            "not_supported",
            "the driver does not limit",
        ),
        (
            json!({"op": "state"}),
            "GPU-x",
            POD,
            "not_supported",
            "no driver has listed a GPU GPU-x",
        ),
        (
            json!({"op": "state"}),
            GPU0,
            "system.slice",
            "protocol",
            "is not the cgroup of a pod or of a container",
        ),
        (json!({"op": "state"}), GPU0, "kubepods/pod-gone", "unknown", "No such file"),
        (
            json!({"op": "limit", "gpu": 0, "error": 4}),
            GPU0,
            POD,
            "no_permission",
            "the driver does not limit",
        ),
        (json!({"op": "limit", "gpu": 0, "error": 0}), GPU0, POD, "", ""),
        // The kernel has the controller, but the kubelet has not enabled it, and neither can the probe.
        (
            json!({"op": "limit_mode", "mode": "dmem"}),
            GPU0,
            POD,
            "not_supported",
            "the driver does not limit",
        ),
        (
            json!({"op": "limit_mode", "mode": "forgotten"}),
            GPU0,
            POD,
            "not_supported",
            "says afterwards that it is",
        ),
        (
            json!({"op": "limit_mode", "mode": "off"}),
            GPU0,
            POD,
            "not_supported",
            "the driver does not limit",
        ),
    ] {
        machine.control(&change);
        let answer = limit(gpu, cgroup, 3072);
        let text = answer["err"]["text"].as_str().unwrap_or_default();
        assert!(
            answer["err"]["code"].as_str().unwrap_or_default() == code && text.contains(part),
            "{change}: {answer}"
        );
    }
    // On a kernel with the controller, the pod's cgroup has these files once the cgroups above pass the controller on.
    machine.control(&json!({"op": "limit_mode", "mode": "dmem"}));
    std::fs::write(root.join(POD).join("dmem.max"), "").expect("written");
    assert_eq!(limit(GPU0, POD, 4096)["ok"], json!({"usedMiB": 0}));
}

/// What the driver says about a container's cgroup: it limits it, or says why not.
fn outcome(answer: &Value) -> String {
    let (ok, err) = (&answer["ok"], &answer["err"]["text"]);
    match (ok["leftOut"].as_bool(), err.as_str()) {
        (_, Some(text)) => text.to_owned(),
        (Some(true), _) => "left out".to_owned(),
        _ if ok["usedMiB"] == 0 => "set".to_owned(),
        _ => answer.to_string(),
    }
}

#[test]
fn a_containers_limit_needs_a_pod_limit_that_holds_the_sum() {
    let pod_limit = 3072;
    // (the driver's mode, what the pod's `dmem.max` is before, the pod's limit or none, whether the container is alone, what happens)
    for (mode, file, pod, alone, expected) in [
        ("misc", None, Some(pod_limit), true, "set"),
        ("misc", None, Some(pod_limit), false, "left out"),
        // The kernel has the controller, but an option of the driver's module has it use its own list.
        ("misc", Some(""), Some(pod_limit), false, "left out"),
        (
            "misc",
            Some("nvidia/00000000:01:00.0/vidmem max\n"),
            Some(pod_limit),
            false,
            "left out",
        ),
        ("misc", None, None, true, "does not limit the memory"),
        ("misc", None, Some(4096), true, "is 4096 MiB and not 3072 MiB, so"),
        ("dmem", Some(""), Some(pod_limit), false, "set"),
        (
            "dmem",
            Some("nvidia/00000000:ff:00.0/vidmem max\n"),
            Some(pod_limit),
            true,
            "set",
        ),
        ("dmem", Some(""), None, false, "is unlimited and not 3072 MiB, so"),
        ("dmem", Some(""), Some(4096), false, "is 4096 MiB and not 3072 MiB, so"),
        ("off", None, None, true, "does not limit the memory"),
    ] {
        let case = format!("{mode} {file:?} {pod:?} {alone}");
        let machine = Machine::new(LIMITING);
        let root = machine.path("root/sys/fs/cgroup");
        let container = format!("{POD}/{}", "0f".repeat(32));
        let directory = root.join(&container);
        std::fs::create_dir_all(directory.join("nested")).expect("created");
        for directory in [&root.join(POD), &directory] {
            if let Some(text) = file {
                std::fs::write(directory.join("dmem.max"), text).expect("written");
            }
        }
        let _probe = machine.listening("probe.sock", &[]);
        let mut lines = Lines::new(connect(&machine.path("probe.sock")));
        lines.ask(r#"{"v":1,"id":1,"op":"snapshot"}"#);
        machine.control(&json!({"op": "limit_mode", "mode": mode}));
        let mut limit = |cgroup: &str, hard: u64, alone: bool| {
            let request =
                json!({"v": 1, "id": 2, "op": "limit", "uuid": GPU0, "cgroup": cgroup, "hardMiB": hard, "alone": alone});
            outcome(&lines.ask(&request.to_string()))
        };
        if let Some(hard) = pod {
            assert_eq!(limit(POD, hard, false), "set", "{case}");
        }
        let found = limit(&container, pod_limit, alone);
        assert!(found.contains(expected), "{case}: {found}");
        let nested = limit(&format!("{container}/nested"), pod_limit, alone);
        assert!(
            nested.contains("is not the cgroup of a pod or of a container"),
            "{case}: {nested}"
        );
        let limits = machine.control(&json!({"op": "state"}))["state"]["changes"]["gpus"]["0"]["limits"].clone();
        let has = |directory: &Path| limits[directory.display().to_string()]["hard"].as_u64();
        let set = (expected == "set").then_some(pod_limit << 20);
        assert_eq!(
            (has(&root.join(POD)), has(&directory), has(&directory.join("nested"))),
            (pod.map(|hard| hard << 20), set, None),
            "{case}"
        );
        if mode == "dmem" && expected == "set" {
            let text = std::fs::read_to_string(directory.join("dmem.max")).expect("read");
            assert!(text.contains("/vidmem 3221225472\n"), "{case}: {text}");
        }
    }
}

/// The process sees this limit as the total, and not the limit of its pod.
#[test]
fn a_process_sees_its_own_cgroups_limit() {
    let mut machine = Machine::new(LIMITING);
    let container = format!("{POD}/{}", "0f".repeat(32));
    let directory = machine.path("root/sys/fs/cgroup").join(&container);
    std::fs::create_dir_all(directory.join("nested")).expect("created");
    let _probe = machine.listening("probe.sock", &[]);
    let mut lines = Lines::new(connect(&machine.path("probe.sock")));
    lines.ask(r#"{"v":1,"id":1,"op":"snapshot"}"#);
    let mut limit = |cgroup: &str| {
        let request = json!({"v": 1, "id": 2, "op": "limit", "uuid": GPU0, "cgroup": cgroup, "hardMiB": 3072, "alone": true});
        assert_eq!(outcome(&lines.ask(&request.to_string())), "set", "{cgroup}");
    };
    let mut total = |cgroup: &Path| {
        machine.extra = vec![("DIVVY_NVML_SIM_CGROUP".to_owned(), cgroup.into())];
        let output = once(&machine, &[]);
        let snapshot: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        snapshot["gpus"][0]["totalMiB"].as_u64()
    };
    limit(POD);
    assert_eq!(total(&directory), Some(81559), "the pod's limit is not shown");
    limit(&container);
    assert_eq!(total(&directory), Some(3072));
    assert_eq!(total(&directory.join("nested")), Some(81559));
    assert_eq!(total(directory.parent().expect("a pod")), Some(3072));
}

#[test]
fn an_older_driver_says_from_which_version_on_memory_is_limited() {
    let machine = Machine::new(TWO);
    std::fs::create_dir_all(machine.path("root/sys/fs/cgroup").join(POD)).expect("created");
    let _probe = machine.listening("probe.sock", &[]);
    let mut lines = Lines::new(connect(&machine.path("probe.sock")));
    let snapshot = lines.ask(r#"{"v":1,"id":1,"op":"snapshot"}"#);
    assert_eq!(snapshot["ok"]["gpus"][0]["memoryLimit"], Value::Null);
    let request = json!({"v": 1, "id": 2, "op": "limit", "uuid": GPU0, "cgroup": POD, "hardMiB": 3072});
    let answer = lines.ask(&request.to_string());
    assert_eq!(answer["err"]["code"], "not_supported", "{answer}");
}
