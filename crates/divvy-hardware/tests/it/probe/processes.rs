//! What the driver says about the processes on a GPU.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::mig::DIVIDED;
use super::served;
use crate::support::{TWO, eventually};

#[test]
fn processes_are_listed_with_the_mig_device_that_they_use() {
    let (machine, _probe, mut client) = served(DIVIDED);
    client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
    machine.control(&json!({"op": "memory", "gpu": 0, "pid": 7, "used_mib": 100, "mig": 1}));
    machine.control(&json!({"op": "memory", "gpu": 0, "pid": 8, "used_mib": 50, "mig": 0}));
    let processes = json!([
        {"uuid": "MIG-1", "processes": [{"pid": 8, "usedMiB": 50, "kind": "compute"}]},
        {"uuid": "MIG-2", "processes": [{"pid": 7, "usedMiB": 100, "kind": "compute"}]},
    ]);
    let answer = client.ask("{\"v\":1,\"id\":2,\"op\":\"processes\"}");
    assert_eq!(answer["ok"], processes, "{answer}");
}

/// A GPU that two processes use, one in MIG mode, and one that is too old.
const BUSY: &str = "v = 1\n[[node]]\nname = \"n\"\n[[node.gpu]]\nmodel = \"A100\"\nuuid = \"GPU-0\"\nmemory_mib = 40960\n\
    processes = [{ pid = 7, used_mib = 1, utilization = 30 }, { pid = 8, used_mib = 1, utilization = 70 }, { pid = 9, used_mib = 1 }]\n\
    [[node.gpu]]\nmodel = \"A100\"\nuuid = \"GPU-1\"\nmemory_mib = 40960\nmig = []\n\
    [[node.gpu]]\nmodel = \"K80\"\nuuid = \"GPU-2\"\nmemory_mib = 11441\ncc = \"3.7\"\n";

#[test]
fn a_process_has_its_newest_utilization_until_it_is_known() {
    let (_machine, _probe, mut client) = served(BUSY);
    client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
    let mut ask = |uuids: &[&str], since: u64| {
        let gpus: Vec<Value> = uuids.iter().map(|uuid| json!({"uuid": uuid, "since": since})).collect();
        client.ask(&json!({"v": 1, "id": 2, "op": "utilization", "gpus": gpus}).to_string())
    };
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros() as u64;
    let before = now();
    let answer = ask(&["GPU-0"], 0);
    let at = answer["ok"][0]["samples"][0]["atUs"].as_u64().expect("a time");
    assert!(before - 200_000 <= at && at <= now(), "{at}");
    let samples = json!([{"pid": 7, "atUs": at, "percent": 30}, {"pid": 8, "atUs": at, "percent": 70}]);
    assert_eq!(answer["ok"], json!([{"uuid": "GPU-0", "samples": samples}]));
    // In an hour.
    let none = json!([{"uuid": "GPU-0", "samples": []}]);
    assert_eq!(ask(&["GPU-0"], now() + 3_600_000_000)["ok"], none);
    eventually("a newer sample", || ask(&["GPU-0"], at)["ok"] != none);
    let later = ask(&["GPU-0"], at);
    assert!(later["ok"][0]["samples"][0]["atUs"].as_u64() > Some(at), "{later}");
}

#[test]
fn a_gpu_without_samples_says_why_and_the_others_have_theirs() {
    let (machine, _probe, mut client) = served(BUSY);
    client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
    let mut ask = |uuids: &[String]| {
        let gpus: Vec<Value> = uuids.iter().map(|uuid| json!({"uuid": uuid, "since": 0})).collect();
        client.ask(&json!({"v": 1, "id": 2, "op": "utilization", "gpus": gpus}).to_string())
    };
    let four = ["GPU-1", "GPU-2", "GPU-x", "GPU-0"].map(str::to_owned);
    let answer = ask(&four);
    for (index, part) in ["keep GPU GPU-1", "keep GPU GPU-2", "no driver has listed a GPU GPU-x"]
        .into_iter()
        .enumerate()
    {
        let of = &answer["ok"][index];
        assert_eq!(
            (&of["err"]["code"], &of["samples"]),
            (&json!("not_supported"), &json!([])),
            "{of}"
        );
        assert!(of["err"]["text"].as_str().is_some_and(|text| text.contains(part)), "{of}");
    }
    let of = &answer["ok"][3];
    assert_eq!((&of["err"], of["samples"].as_array().map(Vec::len)), (&Value::Null, Some(2)));
    // NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_NO_PERMISSION, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_UNKNOWN.
    for (error, code) in [
        (13, "not_supported"),
        (4, "no_permission"),
        (15, "gpu_lost"),
        (999, "unknown"),
    ] {
        machine.control(&json!({"op": "process_utilization", "gpu": 0, "error": error}));
        let answer = ask(&four);
        assert_eq!(answer["ok"][3]["err"]["code"], code, "{answer}");
    }
    machine.control(&json!({"op": "process_utilization", "gpu": 0, "error": 0}));
    assert_eq!(ask(&four)["ok"][3]["err"], Value::Null);
    for (uuids, part) in [
        (vec!["GPU-0".to_owned(); 257], "more than 256 GPUs"),
        (vec!["../x".to_owned()], "the UUID of GPU 0 is malformed"),
    ] {
        let err = &ask(&uuids)["err"];
        assert_eq!(err["code"], "protocol");
        assert!(err["text"].as_str().is_some_and(|text| text.contains(part)), "{err}");
    }
}

#[test]
fn processes_are_listed_with_what_they_use_the_gpu_for() {
    let (machine, _probe, mut client) = served(TWO);
    client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
    machine.control(&json!({"op": "memory", "gpu": 1, "pid": 7, "used_mib": 100, "mps": true}));
    machine.control(&json!({"op": "memory", "gpu": 1, "pid": 8, "used_mib": 50}));
    machine.control(&json!({"op": "memory", "gpu": 1, "pid": 9, "used_mib": 30, "graphics": false}));
    machine.control(&json!({"op": "memory", "gpu": 1, "pid": 10, "used_mib": 20, "graphics": true}));
    let answer = client.ask("{\"v\":1,\"id\":2,\"op\":\"processes\"}");
    let processes = json!([
        {"pid": 7, "usedMiB": 100, "kind": "mps-client"},
        {"pid": 8, "usedMiB": 50, "kind": "compute"},
        {"pid": 9, "usedMiB": 30, "kind": "graphics"},
        {"pid": 10, "usedMiB": 20, "kind": "compute-and-graphics"},
    ]);
    assert_eq!(answer["ok"][1]["processes"], processes, "{answer}");
}
