//! A comparison on a machine with GPUs that are divided into MIG devices.

use std::fs;
use std::path::PathBuf;

use divvy_model::machine::Machines;
use serde_json::{Value, json};

use super::{ALL, LIVE, Machine, Refusal, Request, Row, Whose, differences, env, mounted, node, visible};

const FIRST: &str = "GPU-edfee158-11c1-52b8-0517-92f30e7fac88";
const SECOND: &str = "GPU-edfee158-11c1-52b8-0517-92f30e7fac99";
/// The MIG devices of the first GPU, each as (GPU instance, compute instance): two compute instances in one GPU instance, and one
/// in another.
const MIG: [(u32, u32); 3] = [(2, 1), (2, 0), (5, 0)];

/// Divide the first GPU, whose minor number is 1. Return the UUIDs of its MIG devices.
fn divide(machine: &mut Machine) -> Vec<String> {
    let bed = &machine.bed;
    let gpu = |uuid: &str, minor: u32, more: &str| {
        format!("[[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-40GB\"\nmemory_mib = 40960\nuuid = {uuid:?}\nminor = {minor}\n{more}")
    };
    let mig = MIG.map(|(gi, ci)| format!("{{ gpu_instance = {gi}, compute_instance = {ci} }}"));
    let text = format!(
        "v = 1\n[[node]]\nname = \"n\"\ndriver = \"550.54.15\"\n{}{}",
        gpu(FIRST, 1, &format!("mig = [{}]\n", mig.join(", "))),
        gpu(SECOND, 0, "")
    );
    fs::write(bed.path("machine.toml"), &text).expect("written");
    let proc = bed.path("proc");
    let write = |path: &str, text: &str| {
        let path = proc.join(path);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        fs::write(path, text).expect("written");
    };
    let mut minors = String::from("config 1\nmonitor 2\n");
    for (path, minor) in [("gi2", 10), ("gi2/ci0", 11), ("gi2/ci1", 12), ("gi5", 20), ("gi5/ci0", 21)] {
        write(
            &format!("nvidia/capabilities/gpu1/mig/{path}/access"),
            &format!("DeviceFileMinor: {minor}\n"),
        );
        minors.push_str(&format!("gpu1/{path}/access {minor}\n"));
        let at = bed.path(&format!("driver/dev/nvidia-caps/nvidia-cap{minor}"));
        fs::create_dir_all(at.parent().expect("a directory")).expect("made");
        node(&at, 0o444);
    }
    write("nvidia-caps/mig-minors", &minors);
    machine.proc = Some(proc);
    let machines = Machines::parse(&text).expect("a machine");
    let described = machines.node("n").expect("its name");
    (0..MIG.len()).map(|index| described.mig_uuid(0, index)).collect()
}

/// Return the spec that NVIDIA's generator writes for that machine, with all kinds of device names.
fn spec(machine: &Machine, uuids: &[String]) -> Value {
    let dev = |path: &str| json!({"path": format!("/dev/{path}"), "hostPath": machine.bed.path("driver/dev").join(path)});
    let cap = |minor: u32| dev(&format!("nvidia-caps/nvidia-cap{minor}"));
    let mut devices = Vec::new();
    for (index, (uuid, caps)) in uuids.iter().zip([[10, 12], [10, 11], [20, 21]]).enumerate() {
        let nodes = json!({"deviceNodes": [dev("nvidia1"), cap(caps[0]), cap(caps[1])]});
        for name in [format!("0:{index}"), uuid.clone()] {
            devices.push(json!({"name": name, "containerEdits": nodes}));
        }
    }
    devices.push(json!({"name": "1", "containerEdits": {"deviceNodes": [dev("nvidia0")]}}));
    let mut all: Vec<Value> = [10, 11, 12, 20, 21].map(cap).to_vec();
    all.extend([dev("nvidia0"), dev("nvidia1")]);
    devices.push(json!({"name": "all", "containerEdits": {"deviceNodes": all}}));
    json!({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}})
}

const WHOLE: &str = "a divided GPU is not a device: nothing can compute with its node alone, which NVIDIA's adds";
const OF_NOW: &str = "in mode jit-cdi nvidia.com/gpu=0:0 is the driver's current MIG device, so that no stale spec is used";

fn rows(uuids: &[String]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let mut same = |modes, request: Request| rows.push((modes, request, None));
    for value in [
        "all",
        "0:0",
        "0:1",
        "0:2",
        "0:0,0:2",
        "0:1,1",
        "1",
        "0:2,0:1,0:0",
        "0:3",
        "1:0",
        "0:",
        ":0",
        "0:-1",
    ] {
        same(ALL, visible(value));
    }
    for uuid in uuids {
        same(ALL, visible(uuid));
        same(LIVE, visible(&format!("1,{uuid}")));
    }
    same(ALL, visible(&format!("{},0:1", uuids[0])));
    same(ALL, visible(&format!("MIG-{FIRST}/2/1")));
    same(ALL, visible("MIG-b1028956-cfa2-0990-bf4a-5da9abb51763"));
    same(LIVE, visible(SECOND));
    same(LIVE, visible("none"));
    same(ALL, mounted(&["/0:1"]));
    same("cdi auto", mounted(&["/cdi/nvidia.com/gpu/0:1"]));
    same("cdi auto", visible("nvidia.com/gpu=0:0"));
    same("cdi auto", visible(&format!("nvidia.com/gpu={}", uuids[2])));
    same(ALL, visible("runtime.nvidia.com/gpu=0:2"));
    same("cdi auto", env(&[]).annotated("cdi.k8s.io/a", "nvidia.com/gpu=0:1"));
    same(ALL, visible("all").and("NVIDIA_MIG_CONFIG_DEVICES=all").privileged());
    same("cdi", visible("0"));
    let mut apart = |modes, request, why| rows.push((modes, request, Some(why)));
    apart(LIVE, visible("0"), WHOLE);
    apart(LIVE, visible(FIRST), WHOLE);
    apart("jit-cdi", visible("nvidia.com/gpu=0:0"), OF_NOW);
    rows
}

#[test]
fn mig_devices_are_had_as_from_nvidias_runtime() {
    let Some(mut machine) = Machine::new("nvidia-container-runtime") else {
        return;
    };
    let uuids = divide(&mut machine);
    machine.bed.spec("nvidia.json", &spec(&machine, &uuids));
    let mut wrong = Vec::new();
    for (modes, request, why) in rows(&uuids) {
        for mode in modes.split(' ') {
            let theirs = machine.create(Whose::Theirs, mode, &request);
            let ours = machine.create(Whose::Ours, mode, &request);
            let live = |config: &Value| config.to_string().contains("/driver/usr/lib/");
            let found = match (&theirs, &ours) {
                (Ok(theirs), Ok(ours)) => differences(theirs, ours, live(theirs) || live(ours)),
                (Err(_), Err(_)) => Vec::new(),
                (Err(Refusal(said)), Ok(_)) => vec![format!("only theirs refuses: {said}")],
                (Ok(_), Err(Refusal(said))) => vec![format!("only ours refuses: {said}")],
            };
            match why {
                None if !found.is_empty() => wrong.push(format!("{mode} {:?}: {found:#?}", request.env)),
                Some(why) if found.is_empty() => wrong.push(format!("{mode} {:?}: no longer different: {why}", request.env)),
                Some(WHOLE) => {
                    let Refusal(said) = ours.expect_err("a divided GPU is not a device");
                    assert!(said.contains("this machine's GPUs are runtime.nvidia.com/gpu=0:0"), "{said}");
                }
                _ => {}
            }
        }
    }
    // Each MIG device has its own two capabilities, and none of another device.
    let nodes = |value: &str| {
        let config = machine.create(Whose::Ours, "jit-cdi", &visible(value)).expect("created");
        let all = config["linux"]["devices"].as_array().cloned().unwrap_or_default();
        let mut found: Vec<PathBuf> = all
            .iter()
            .map(|node| PathBuf::from(node["path"].as_str().expect("a path")))
            .collect();
        found.retain(|path| path.starts_with("/dev/nvidia-caps"));
        found
    };
    assert_eq!(
        nodes("0:0"),
        ["/dev/nvidia-caps/nvidia-cap10", "/dev/nvidia-caps/nvidia-cap12"].map(PathBuf::from)
    );
    assert_eq!(
        nodes(&uuids[2]),
        ["/dev/nvidia-caps/nvidia-cap20", "/dev/nvidia-caps/nvidia-cap21"].map(PathBuf::from)
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
