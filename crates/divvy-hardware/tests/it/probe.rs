//! Tests of the probe through its socket and its command line.

mod faults;
mod lifetime;
mod limits;
mod mig;
mod processes;

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Output, Stdio};

use divvy_hardware::{Fabric, Snapshot};
use divvy_model::MiB;
use serde_json::{Value, json};

use crate::support::{GPU0, GPU1, Lines, Machine, PROBE, Running, TWO, connect, eventually, sim_library};

fn once(machine: &Machine, arguments: &[&str]) -> Output {
    machine
        .command()
        .arg("--once")
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("probe")
}

/// Return what a probe prints that succeeds.
fn printed<T: serde::de::DeserializeOwned>(machine: &Machine, arguments: &[&str]) -> T {
    let output = once(machine, arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Return a machine, a probe that serves it, and a client.
fn served(description: &str) -> (Machine, Running, Lines) {
    let machine = Machine::new(description);
    let probe = machine.listening("s", &[]);
    let client = Lines::new(connect(&machine.path("s")));
    (machine, probe, client)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn once_prints_what_the_machine_description_says() {
    let snapshot: Value = printed(&Machine::new(TWO), &[]);
    let gpus = json!([
        {
            "vendor": "nvidia", "uuid": GPU0, "index": 0, "minor": 0, "nodes": ["nvidia0"], "pci": "0000:80:00.0", "model": "NVIDIA A100-SXM4-40GB", "brand": "nvidia", "cc": "8.0",
            "sms": 108, "clockMHz": 1410, "bandwidthGBs": 1555, "totalMiB": 40960, "usedMiB": 510, "numa": null, "temperature": 35,
            "utilization": 0, "links": [[GPU1, "nvlink", 12], [GPU1, "single-switch", 0]],
            "computeMode": "default", "persistence": true, "lost": false, "error": null,
        },
        {
            "vendor": "nvidia", "uuid": GPU1, "index": 1, "minor": 5, "nodes": ["nvidia5"], "pci": "0000:af:00.0", "model": "Tesla T4", "brand": "tesla", "cc": "7.5",
            "sms": 40, "clockMHz": 1590, "totalMiB": 15360, "usedMiB": 0, "numa": 1, "temperature": 60,
            "utilization": 90, "links": [[GPU0, "nvlink", 12], [GPU0, "single-switch", 0]],
            "computeMode": "default", "persistence": true, "lost": false, "error": null,
        },
    ]);
    assert_eq!(
        snapshot,
        json!({"v": 2, "drivers": {"nvidia": {"version": "550.54.15", "cuda": "12.4"}}, "gpus": gpus})
    );
}

/// The machine with what a driver counts and reports about the health of both GPUs.
fn with_health() -> Machine {
    let rows = "{ correctable = 1, uncorrectable = 2, pending = true, failure = false }";
    let newer = format!(
        "health = {{ ecc_errors = [7, 3], remapped_rows = {rows}, retired_pages_pending = false, clocks_event_reasons = 72 }}"
    );
    let older = format!("health = {{ remapped_rows = {rows}, retired_pages_pending = true, clocks_event_reasons = 0 }}");
    let described = TWO.replacen("processes = ", &format!("{newer}\nprocesses = "), 1);
    Machine::new(&(described + &older + "\n"))
}

/// The values about health of all GPUs.
fn health_of(snapshot: &Value) -> Value {
    let keys = [
        "uncorrectedEccErrors",
        "remappedRows",
        "retiredPagesPending",
        "clocksEventReasons",
    ];
    let gpus = snapshot["gpus"].as_array().expect("GPUs").iter();
    gpus.map(|gpu| {
        keys.map(|key| gpu.get(key).cloned().unwrap_or_else(|| json!("absent")))
            .into()
    })
    .collect::<Vec<Value>>()
    .into()
}

/// The driver's counts are printed once, and no polled snapshot has them.
#[test]
fn health_counts_are_printed_and_never_polled() {
    let machine = with_health();
    let output = once(&machine, &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let snapshot: Snapshot = serde_json::from_slice(&output.stdout).expect("a snapshot");
    snapshot.validate().expect("valid");
    let snapshot: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rows = json!({"correctable": 1, "uncorrectable": 2, "pending": true, "failure": false});
    // Only a GPU that does not remap rows retires pages, and the T4 is older than Ampere.
    let expected = json!([[3, rows, "absent", 72], ["absent", "absent", true, 0]]);
    assert_eq!(health_of(&snapshot), expected);

    let _probe = machine.listening("s", &[]);
    let mut client = Lines::new(connect(&machine.path("s")));
    let polled = client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}")["ok"].clone();
    let nothing = json!(["absent", "absent", "absent", "absent"]);
    assert_eq!(health_of(&polled), json!([nothing, nothing]));
}

/// The probe prints the state again when standard input closes.
#[test]
fn watch_prints_the_state_and_each_fault() {
    let machine = with_health();
    let mut probe = Running(
        machine
            .command()
            .arg("--watch")
            .stdout(Stdio::piped())
            .spawn()
            .expect("probe"),
    );
    let mut lines = BufReader::new(probe.0.stdout.take().expect("output")).lines();
    let mut line = || -> Value { serde_json::from_str(&lines.next().expect("a line").expect("text")).expect("JSON") };
    let before = line();
    assert_eq!(health_of(&before["snapshot"])[0][0], 3);
    machine.xid(0, 79);
    let fault = json!({"vendor": "nvidia", "uuid": GPU0, "code": 79, "fatal": true, "name": "XID 79", "partition": null});
    assert_eq!(line(), json!({ "fault": fault }));
    machine.control(&json!({"op": "ecc", "gpu": 0, "corrected": 7, "uncorrected": 4}));
    machine.control(&json!({"op": "lost", "gpu": 1, "lost": true}));
    drop(probe.0.stdin.take());
    let after = line();
    assert_eq!(
        health_of(&after["snapshot"])[0],
        json!([4, before["snapshot"]["gpus"][0]["remappedRows"], "absent", 72])
    );
    let lost = &after["snapshot"]["gpus"][1];
    assert_eq!((&lost["uuid"], &lost["lost"]), (&json!(GPU1), &json!(true)));
    assert_eq!(probe.ended(), 0);
}

#[test]
fn watch_says_why_there_is_no_driver() {
    let machine = Machine::new(TWO);
    std::fs::write(machine.path("control.state"), "{\"initError\":9}").expect("state");
    let output = machine.command().arg("--watch").stdin(Stdio::null()).output().expect("probe");
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), String::new()));
    assert!(
        text(&output.stderr).contains("(driver_not_loaded)"),
        "{}",
        text(&output.stderr)
    );
}

/// A Jetson, whose driver has no version and whose UUID has no prefix.
const ORIN: &str = r#"
v = 1
[[node]]
name = "n"
driver = ""
[[node.gpu]]
model = "Orin (nvgpu)"
uuid = "54d0709b-558d-5a59-9c65-0c5fc14a21a4"
memory_mib = 0
"#;

#[test]
fn a_tegras_gpu_is_named_although_nvml_knows_little_more() {
    let snapshot: Snapshot = printed(&Machine::new(ORIN), &[]);
    snapshot.validate().expect("valid");
    assert_eq!(snapshot.gpus[0].model, "Orin (nvgpu)");
    assert_eq!(snapshot.driver(snapshot.gpus[0].vendor), "");
}

#[test]
fn cuda_tells_a_tegras_memory_and_compute_capability() {
    let description = ORIN.replace("memory_mib = 0", "memory_mib = 30697\ncc = \"8.7\"");
    let mut machine = Machine::new(&description.replace("driver = \"\"", "driver = \"535.0\""));
    std::fs::create_dir(machine.path("lib")).expect("created");
    std::os::unix::fs::symlink(sim_library(), machine.path("lib/libcuda.so.1")).expect("linked");
    machine.extra = vec![("LD_LIBRARY_PATH".to_owned(), machine.path("lib").into())];
    let snapshot: Snapshot = printed(&machine, &["--cuda"]);
    snapshot.validate().expect("valid");
    let driver = snapshot.drivers.values().next().expect("a driver");
    assert_eq!((driver.version.as_str(), driver.cuda.as_str()), ("", "12.2"));
    let [gpu] = &snapshot.gpus[..] else {
        panic!("{:?}", snapshot.gpus);
    };
    assert_eq!(
        (gpu.model.as_str(), gpu.cc.as_str(), gpu.total),
        ("Orin (nvgpu)", "8.7", MiB(30697))
    );

    machine.extra.push(("DIVVY_NVML_SIM_INIT_ERROR".to_owned(), "9".into()));
    let refused = once(&machine, &["--cuda"]);
    assert_eq!(refused.status.code(), Some(1));
    let said = text(&refused.stderr);
    assert!(
        said.contains("cuInit found no GPU") && said.contains("(driver_not_loaded)"),
        "{said}"
    );
}

#[test]
fn a_missing_or_broken_cuda_library_is_reported_with_what_to_do() {
    let mut machine = Machine::new(ORIN);
    let directory = machine.path("root/usr/lib/aarch64-linux-gnu/tegra");
    std::fs::create_dir_all(&directory).expect("created");
    std::fs::write(directory.join("libcuda.so.1"), "no library").expect("written");
    machine.extra = vec![("LD_LIBRARY_PATH".to_owned(), machine.path("nothing").into())];
    let root = machine.path("root");
    let output = once(&machine, &["--cuda", "--driver-root", root.to_str().expect("a path")]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    for part in ["tegra/libcuda.so.1", "runtimeClassName: nvidia", "(library_not_found)"] {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn a_gpu_is_in_a_fabric_only_after_complete_registration() {
    let cluster = "0a0b0c0d-0102-4304-8506-1718191a1b1c";
    let gpu = |fabric: &str| format!("[[node.gpu]]\nmodel = \"GB200\"\nmemory_mib = 189440\n{fabric}\n");
    let gpus = [
        format!("fabric = {{ cluster = \"{cluster}\", clique = 32766 }}"),
        format!("fabric = {{ cluster = \"{cluster}\", clique = 1, state = 2 }}"),
        String::new(),
    ];
    let machine = Machine::new(&format!(
        "v = 1\n[[node]]\nname = \"n\"\n{}",
        gpus.map(|fabric| gpu(&fabric)).concat()
    ));
    let snapshot: Snapshot = printed(&machine, &[]);
    let found: Vec<_> = snapshot.gpus.iter().map(|gpu| gpu.fabric.clone()).collect();
    let joined = Fabric {
        cluster: cluster.to_owned(),
        clique: 32766,
    };
    assert_eq!(found, [Some(joined), None, None]);
    assert!(snapshot.gpus.iter().all(|gpu| gpu.error.is_none()), "{snapshot:?}");
}

#[test]
fn once_says_why_there_is_no_driver_and_what_to_do() {
    let with = |name: &str, value: &str| {
        let mut machine = Machine::new(TWO);
        machine.extra.push((name.to_owned(), value.into()));
        machine
    };
    for (machine, status, part) in [
        (with("DIVVY_NVML_SIM_INIT_ERROR", "9"), 1, "modprobe nvidia"),
        (with("DIVVY_NVML_SIM_INIT_ERROR", "4"), 1, "must be privileged"),
        (with("DIVVY_NVML_SIM_INIT_ERROR", "18"), 1, "reload the module or reboot"),
        (with("DIVVY_NVML_SIM_NODE", "nobody"), 1, "no node is named nobody"),
        (with("DIVVY_NVML_SIM_HANG", "60"), 70, "the driver hangs"),
    ] {
        let output = once(&machine, &["--watchdog", "0.1"]);
        assert_eq!(output.status.code(), Some(status), "{part}");
        assert!(text(&output.stderr).contains(part), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "");
    }
    let missing = Command::new(PROBE)
        .args(["--once", "--driver-root", "/nowhere", "--sys-root", "/nowhere"])
        .output()
        .expect("probe");
    assert_eq!(missing.status.code(), Some(1));
    assert!(
        text(&missing.stderr).contains("no libnvidia-ml.so.1 below /nowhere"),
        "{}",
        text(&missing.stderr)
    );
    let typo = Command::new(PROBE).args(["--listn", "unix:/x"]).output().expect("probe");
    assert_eq!(typo.status.code(), Some(2));
    assert!(text(&typo.stderr).contains("did you mean --listen"), "{}", text(&typo.stderr));
}

#[test]
fn the_driver_is_found_below_a_driver_root() {
    let machine = Machine::new(TWO);
    let directory = machine.path("root/usr/lib64");
    std::fs::create_dir_all(&directory).expect("directory");
    std::fs::copy(sim_library(), directory.join("libnvidia-ml.so.1")).expect("copied");
    let mut command = Command::new(PROBE);
    command
        .envs(machine.env())
        .arg("--once")
        .arg("--driver-root")
        .arg(machine.path("root"))
        .arg("--sys-root")
        .arg(machine.path("root"));
    let output = command.output().expect("probe");
    let snapshot: Snapshot = serde_json::from_slice(&output.stdout).expect("snapshot");
    assert_eq!(snapshot.gpus.len(), 2);
}

#[test]
fn questions_are_answered_in_their_order_by_number() {
    let (_machine, _probe, mut client) = served(TWO);
    client.send(
        b"{\"v\":1,\"id\":5,\"op\":\"snapshot\"}\n{\"v\":1,\"id\":4,\"op\":\"ping\"}\n{\"v\":1,\"id\":9,\"op\":\"processes\"}\n",
    );
    let snapshot = client.next().expect("snapshot");
    assert_eq!(
        (&snapshot["id"], &snapshot["ok"]["gpus"][1]["uuid"]),
        (&json!(5), &json!(GPU1))
    );
    assert_eq!(client.next(), Some(json!({"id": 4, "ok": {}})));
    let processes = json!([
        {"uuid": GPU0, "processes": [
            {"pid": 1, "usedMiB": 10, "kind": "compute"}, {"pid": 7, "usedMiB": 500, "kind": "compute"}
        ]},
        {"uuid": GPU1, "processes": []},
    ]);
    assert_eq!(client.next(), Some(json!({"id": 9, "ok": processes})));
    let hello = client.ask("{\"v\":1,\"id\":10,\"op\":\"hello\"}");
    assert_eq!((&hello["ok"]["v"], &hello["ok"]["seq"]), (&json!(1), &json!(0)));
}

#[test]
fn what_changes_at_run_time_is_in_the_next_snapshot() {
    let (machine, _probe, mut client) = served(TWO);
    let mut gpu = |field: &str| client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}")["ok"]["gpus"][0][field].clone();
    assert_eq!(gpu("usedMiB"), 510);
    machine.control(&json!({"op": "memory", "gpu": 0, "pid": 7, "used_mib": 0}));
    machine.control(&json!({"op": "memory", "gpu": 0, "pid": 123, "used_mib": 100}));
    assert_eq!(gpu("usedMiB"), 110);
    machine.control(&json!({"op": "temperature", "gpu": 0, "celsius": 91}));
    assert_eq!(gpu("temperature"), 91);
    machine.control(&json!({"op": "utilization", "gpu": 0, "percent": 77}));
    assert_eq!(gpu("utilization"), 77);
    let mut control = Lines::new(connect(&machine.path("control")));
    for (wrong, part) in [
        ("{\"op\":\"lost\",\"gpu\":2,\"lost\":true}", "there is no GPU 2"),
        ("{\"op\":\"explode\"}", "unknown variant"),
        ("{\"op\":\"memory\",\"gpu\":0,\"pid\":1,\"used_mib\":50000}", "has 40960 MiB"),
        ("nonsense", "expected"),
    ] {
        let answer = control.ask(wrong);
        assert!(answer["err"].as_str().is_some_and(|text| text.contains(part)), "{answer}");
    }
}

#[test]
fn a_driver_that_comes_later_is_found_without_a_restart() {
    let machine = Machine::new(TWO);
    std::fs::write(machine.path("control.state"), "{\"initError\":9}").expect("state");
    let _probe = machine.listening("s", &[]);
    let mut client = Lines::new(connect(&machine.path("s")));
    let mut ask = || client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
    assert_eq!(ask()["err"]["code"], "driver_not_loaded");
    machine.control(&json!({"op": "init", "error": 0}));
    eventually("the driver is found", || ask()["ok"]["gpus"][0]["uuid"] == GPU0);
}
