//! Tests of the probe through its socket and its command line.

use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use divvy_hardware::{Fabric, Snapshot};
use divvy_model::{MiB, MigDevice};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::{GPU0, GPU1, Lines, Machine, PROBE, Running, TWO, connect, eventually, kill, sim_library};

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
fn a_divided_gpu_has_mig_devices_with_uuid_and_instances() {
    let machine = Machine::new(
        "v = 1\n[[node]]\nname = \"n\"\n[[node.gpu]]\nmodel = \"A100\"\nmemory_mib = 40960\n\
         mig = [{ gpu_instance = 1, compute_instance = 0 }, { gpu_instance = 2, compute_instance = 0 }]\n\
         [[node.gpu]]\nmodel = \"A100\"\nmemory_mib = 40960\nmig_capable = true\n\
         [[node.gpu]]\nmodel = \"T4\"\nmemory_mib = 15360\n",
    );
    let snapshot: Snapshot = printed(&machine, &[]);
    let [divided, whole, other] = &snapshot.gpus[..] else {
        panic!("three GPUs: {snapshot:?}")
    };
    let modes = (divided.mig, whole.mig, other.mig);
    assert_eq!(modes, (Some((true, true)), Some((false, false)), None));
    let found: Vec<(u32, u32, u32)> = divided.mig_devices.iter().map(|mig| (mig.index, mig.gi, mig.ci)).collect();
    assert_eq!(found, [(0, 1, 0), (1, 2, 0)]);
    let uuids: Vec<&str> = divided.mig_devices.iter().map(|mig| mig.uuid.as_str()).collect();
    assert!(
        uuids.iter().all(|uuid| uuid.starts_with("MIG-")) && uuids[0] != uuids[1],
        "{uuids:?}"
    );
    assert!(whole.mig_devices.is_empty());
    let parts: Vec<_> = divided.mig_devices.iter().map(|mig| mig.profile(divided.total)).collect();
    assert_eq!(parts, [Some("1g.5gb".to_owned()), Some("1g.5gb".to_owned())]);
}

const DIVIDED: &str = "v = 1\n[[node]]\nname = \"n\"\n[[node.gpu]]\nmodel = \"A100\"\nmemory_mib = 40960\n\
    mig = [{ gpu_instance = 1, compute_instance = 0, uuid = \"MIG-1\" }, { gpu_instance = 2, compute_instance = 0, uuid = \"MIG-2\" }]\n";

#[test]
fn mig_devices_have_the_nodes_the_kernel_module_lists() {
    let machine = Machine::new(DIVIDED);
    let directory = machine.path("host/proc/driver/nvidia-caps");
    std::fs::create_dir_all(&directory).expect("made");
    std::fs::write(
        directory.join("mig-minors"),
        "config 1\ngpu0/gi1/access 3\ngpu0/gi1/ci0/access 4\ngpu0/gi2/access 5\n",
    )
    .expect("written");
    let host = machine.path("host");
    let snapshot: Snapshot = printed(&machine, &["--sys-root", &host.to_string_lossy()]);
    let found: Vec<_> = snapshot.gpus[0]
        .mig_devices
        .iter()
        .map(|device| device.capabilities)
        .collect();
    assert_eq!(found, [Some((3, 4)), None]);
}

#[test]
fn a_divided_gpu_stays_so_while_mig_mode_is_unreadable() {
    let (machine, _probe, mut client) = served(DIVIDED);
    let mut gpu = || client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}")["ok"]["gpus"][0].clone();
    let before = gpu();
    for _ in 0..2 {
        machine.control(&json!({"op": "mig_mode", "gpu": 0, "error": 999}));
        let now = gpu();
        assert_eq!(
            (&now["mig"], &now["migDevices"]),
            (&json!([true, true]), &before["migDevices"])
        );
        assert!(now["error"].as_str().is_some_and(|text| text.starts_with("MIG: ")), "{now}");
    }
    machine.control(&json!({"op": "mig_mode", "gpu": 0, "error": 0}));
    let after = gpu();
    assert_eq!(
        (&after["migDevices"], &after["error"]),
        (&before["migDevices"], &before["error"])
    );
}

/// The simulated driver gives the first MIG device of a GPU the same UUID in each division, as a driver may.
#[test]
fn a_reused_uuid_shows_the_present_mig_device() {
    let (machine, _probe, mut client) = served(DIVIDED);
    let mut divide = |profiles: &[u32]| {
        let device = |(gi, profile): (u32, &u32)| json!({"gpu_instance": gi, "compute_instance": 0, "profile": profile});
        let devices: Vec<_> = (1..).zip(profiles).map(device).collect();
        machine.control(&json!({"op": "mig", "gpu": 0, "devices": devices}));
        let gpu = client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}")["ok"]["gpus"][0].clone();
        let devices: Vec<MigDevice> = serde_json::from_value(gpu["migDevices"].clone()).expect("MIG devices");
        (devices[0].uuid.clone(), devices[0].profile(MiB(40960)))
    };
    let ((large_uuid, large), (tiny_uuid, tiny)) = (divide(&[2]), divide(&[0]));
    assert_eq!(large_uuid, tiny_uuid);
    assert_eq!((large.as_deref(), tiny.as_deref()), (Some("3g.20gb"), Some("1g.5gb")));
    assert_eq!(divide(&[0]).1, tiny, "after another look as well");
}

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

/// An XID reaches clients within a second, and one that was away finds it in hello.
#[test]
fn an_xid_reaches_every_client_or_waits_in_hello() {
    let machine = Machine::new(TWO);
    let _probe = machine.listening("s", &[]);
    let mut clients = [(); 2].map(|()| Lines::new(connect(&machine.path("s"))));
    for client in &mut clients {
        client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
    }
    let before = Instant::now();
    machine.xid(1, 79);
    for client in &mut clients {
        let event = json!({
            "event": "fault", "seq": 1, "vendor": "nvidia", "uuid": GPU1, "code": 79, "fatal": true, "name": "XID 79", "partition": null,
        });
        assert_eq!(client.next(), Some(event));
    }
    assert!(before.elapsed() < Duration::from_secs(1), "{:?}", before.elapsed());
    let hello = Lines::new(connect(&machine.path("s"))).ask("{\"v\":1,\"id\":1,\"op\":\"hello\"}");
    assert_eq!(
        (&hello["ok"]["seq"], &hello["ok"]["recent"][0]["name"]),
        (&json!(1), &json!("XID 79"))
    );
}

#[test]
fn an_xid_of_a_mig_device_names_its_instances() {
    let (machine, _probe, mut client) = served(TWO);
    client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
    for instances in [json!([2, 0]), Value::Null] {
        machine.control(&json!({"op": "xid", "gpu": 1, "xid": 79, "instances": instances}));
        let fault = client.next().expect("a fault");
        assert_eq!((&fault["uuid"], &fault["partition"]), (&json!(GPU1), &instances), "{fault}");
    }
}

#[test]
fn xids_arrive_again_after_event_sets_failed() {
    let machine = Machine::new(TWO);
    std::fs::write(machine.path("control.state"), "{\"events\":{\"create\":999}}").expect("state");
    let _probe = machine.listening("s", &[]);
    let ask = |op: &str| Lines::new(connect(&machine.path("s"))).ask(&json!({"v": 1, "id": 1, "op": op}).to_string());
    let gpus = ask("snapshot")["ok"]["gpus"].clone();
    assert_eq!(gpus.as_array().map(Vec::len), Some(2), "GPUs are read without events");
    let faults = || {
        let mut lines = Lines::new(connect(&machine.path("s")));
        lines.send(b"{\"v\":1,\"id\":1,\"op\":\"hello\"}\n");
        // A fault may arrive before the answer.
        let mut lines = std::iter::from_fn(|| lines.next());
        lines.find_map(|line| line["ok"]["seq"].as_u64()).expect("an answer")
    };
    let xid = || machine.control(&json!({"op": "xid", "gpu": 1, "xid": 79}))["delivered"].clone();
    assert_eq!(xid(), 0);
    for failing in [json!({"op": "events", "create": 999}), json!({"op": "events", "wait": 999})] {
        machine.control(&failing);
        eventually("every GPU says that its events do not arrive", || {
            let gpus = ask("snapshot")["ok"]["gpus"].clone();
            let texts = gpus
                .as_array()
                .into_iter()
                .flatten()
                .map(|gpu| gpu["noEvents"]["error"].clone());
            let texts: Vec<String> = texts.filter_map(|text| Some(text.as_str()?.to_owned())).collect();
            texts.len() == 2 && texts.iter().all(|text| text.contains("event"))
        });
        let before = faults();
        machine.control(&json!({"op": "events"}));
        eventually("events arrive", || {
            let gpus = ask("snapshot")["ok"]["gpus"].clone();
            gpus.as_array().into_iter().flatten().all(|gpu| gpu["noEvents"].is_null())
        });
        // An XID may be lost with the old set.
        eventually("an XID arrives", || xid() != 0 && faults() > before);
    }
}

/// A GPU that has no events does not say so.
#[test]
fn a_gpu_that_cannot_be_registered_says_so() {
    let machine = Machine::new(TWO);
    let state = "{\"gpus\":{\"0\":{\"register\":999},\"1\":{\"register\":3}}}";
    std::fs::write(machine.path("control.state"), state).expect("state");
    let _probe = machine.listening("s", &[]);
    let gpus = || {
        let answer = Lines::new(connect(&machine.path("s"))).ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
        answer["ok"]["gpus"].clone()
    };
    eventually("the time without events grows", || {
        gpus()[0]["noEvents"]["ms"].as_u64() > Some(0)
    });
    let gpus = gpus();
    let text = gpus[0]["noEvents"]["error"].as_str().unwrap_or_default();
    assert!(text.starts_with("it cannot be registered for events: "), "{gpus}");
    assert!(gpus[1]["noEvents"].is_null(), "{gpus}");
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

/// A second probe does not take the socket.
#[test]
fn the_socket_is_for_its_owner_alone() {
    let machine = Machine::new(TWO);
    let mut first = machine.listening("s", &[]);
    let socket = machine.path("s");
    let mode = std::fs::metadata(&socket).expect("socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let second = |path: &str| {
        let listen = format!("unix:{}", machine.path(path).display());
        let output = machine
            .command()
            .stdin(Stdio::null())
            .arg("--listen")
            .arg(listen)
            .output()
            .expect("probe");
        (output.status.code(), text(&output.stderr))
    };
    let (status, error) = second("s");
    assert_eq!(status, Some(1));
    assert!(error.contains("another probe listens there"), "{error}");
    let (_, error) = second("machine.toml");
    assert!(error.contains("it is not a socket"), "{error}");
    let (_, error) = second("nowhere/s");
    assert!(error.contains("does the directory exist"), "{error}");
    // A socket that a killed probe left behind is replaced.
    first.0.kill().expect("kill");
    first.ended();
    assert!(socket.exists());
    let _third = machine.listening("s", &[]);
}

/// The socket is removed, and the exit status is 0.
#[test]
fn sigterm_ends_the_probe_even_if_the_driver_hangs() {
    for hangs in [false, true] {
        let machine = Machine::new(TWO);
        if hangs {
            std::fs::write(machine.path("control.state"), "{\"hangUntilMs\":99999999999999}").expect("state");
        }
        let mut probe = machine.listening("s", &[]);
        kill(probe.0.id(), Signal::TERM);
        assert_eq!(probe.ended(), 0);
        assert!(!machine.path("s").exists());
    }
}

#[test]
fn a_probe_whose_parent_is_killed_ends_and_removes_its_socket() {
    let machine = Machine::new(TWO);
    // The shell holds the writing end of the probe's standard input, as an agent does, and is killed.
    let script = "mkfifo in; \"$PROBE\" --nvml-library \"$LIB\" --listen unix:s --exit-with-stdin <in & exec 9>in; echo $!; wait";
    let mut shell = Command::new("sh");
    shell
        .current_dir(machine.dir.path())
        .envs(machine.env())
        .env("PROBE", PROBE)
        .env("LIB", sim_library());
    let mut shell = Running(shell.args(["-c", script]).stdout(Stdio::piped()).spawn().expect("sh"));
    drop(connect(&machine.path("s")));
    let mut pid = String::new();
    let mut out = shell.0.stdout.take().expect("stdout");
    let mut byte = [0];
    while out.read(&mut byte).expect("read") == 1 && byte[0] != b'\n' {
        pid.push(byte[0].into());
    }
    shell.0.kill().expect("kill -9");
    let process = format!("/proc/{}", pid.trim());
    eventually("the probe ends", || {
        match std::fs::read_to_string(format!("{process}/stat")) {
            // A zombie counts as ended, because a container may have no process that reaps it.
            Ok(stat) => stat.contains(") Z "),
            Err(_) => true,
        }
    });
    assert!(!machine.path("s").exists());
}

#[test]
fn a_hanging_driver_call_ends_the_probe_with_70() {
    let machine = Machine::new(TWO);
    let mut probe = machine.listening("s", &["--watchdog", "0.3"]);
    let mut client = Lines::new(connect(&machine.path("s")));
    client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
    machine.control(&json!({"op": "hang", "seconds": 60}));
    client.send(b"{\"v\":1,\"id\":2,\"op\":\"snapshot\"}\n");
    assert_eq!(probe.ended(), 70);
    assert!(!machine.path("s").exists());
}

#[test]
fn a_probe_with_eight_gpus_is_small() {
    let mut description = String::from("v = 1\n[[node]]\nname = \"eight\"\n");
    for i in 0..8 {
        let links: Vec<String> = (0..8).filter(|j| *j != i).map(|j| format!("[{j}, \"nvlink\", 2]")).collect();
        description.push_str(&format!(
            "[[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-40GB\"\nmemory_mib = 40960\nlinks = [{}]\n",
            links.join(", ")
        ));
    }
    let machine = Machine::new(&description);
    let probe = machine.listening("s", &[]);
    let mut client = Lines::new(connect(&machine.path("s")));
    for id in 0..100 {
        let answer = client.ask(&json!({"v": 1, "id": id, "op": "snapshot"}).to_string());
        assert_eq!(answer["ok"]["gpus"].as_array().map(Vec::len), Some(8));
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", probe.0.id())).expect("status");
    let kib = |field: &str| {
        let line = status.lines().find(|line| line.starts_with(field)).expect(field);
        line.split_whitespace()
            .nth(1)
            .and_then(|value| value.parse::<u64>().ok())
            .expect("KiB")
    };
    // Pages of files count with their size on disk, which a debug build inflates. The probe's own allocations do not.
    if !divvy_skip::emulated("the memory of the probe is the emulator's") {
        assert!(kib("RssAnon") <= 4096, "{status}");
    }
}

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
