//! One probe for the GPUs of several vendors.

use std::process::Stdio;

use divvy_hardware::client::Update;
use divvy_hardware::protocol::LimitRequest;
use divvy_hardware::{Fault, Snapshot};
use divvy_model::machine::MachineIntel;
use divvy_model::{MiB, Vendor};
use divvy_testkit::amd::{self, RecordedMachine};
use serde_json::json;

use crate::support::{GPU0, GPU1, Machine, TWO, fast, snapshot, wait_for};

const AMD0: &str = "0xc34ec50444dd0a6c";
const AMD1: &str = "0xc34ec50444dd0a6d";
const INTEL: &str = "0000-4d-00-0-0xe20b";

/// A machine with two GPUs of NVIDIA and two of AMD.
fn both() -> Machine {
    let machine = Machine::new(TWO);
    amd::write(&machine.path("root"), RecordedMachine::Vega10).expect("written");
    machine
}

/// The same machine with an Intel GPU, too.
fn all_three() -> Machine {
    let machine = both();
    let gpu = MachineIntel {
        device: "0xe20b".to_owned(),
        memory_mib: 12_216,
        tiles: 1,
        numa: None,
    };
    divvy_intel_sim::install(&machine.path("root"), &[gpu]).expect("written");
    machine
}

fn uuids(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect()
}

#[test]
fn once_prints_the_gpus_of_all_vendors() {
    let output = all_three()
        .command()
        .arg("--once")
        .stdin(Stdio::null())
        .output()
        .expect("probe");
    let snapshot: Snapshot = serde_json::from_slice(&output.stdout).expect("a snapshot");
    snapshot.validate().expect("valid");
    assert_eq!(uuids(&snapshot), [GPU0, GPU1, AMD0, AMD1, INTEL]);
    assert_eq!(
        Vendor::ALL.map(|vendor| snapshot.driver(vendor).to_owned()),
        ["550.54.15", amd::DRIVER, ""]
    );
}

/// NVIDIA's GPUs are served when their driver comes.
#[tokio::test]
async fn amd_gpus_are_served_without_nvidias_driver() {
    let machine = both();
    std::fs::write(machine.path("control.state"), "{\"initError\":9}").expect("state");
    let mut client = machine.client(fast());
    let seen = snapshot(&mut client, "AMD's GPUs", |_| true).await;
    assert_eq!(uuids(&seen), [AMD0, AMD1]);
    machine.change(json!({"op": "init", "error": 0})).await;
    let seen = snapshot(&mut client, "all GPUs", |seen| seen.gpus.len() > 2).await;
    assert_eq!(uuids(&seen), [GPU0, GPU1, AMD0, AMD1]);
}

#[tokio::test]
async fn a_memory_error_and_the_pods_of_processes_reach_the_client() {
    let machine = both();
    let root = machine.path("root");
    amd::set_process(&root, 7, amd::gpu_id(2), 300 << 20).expect("written");
    std::fs::create_dir_all(root.join("proc/7")).expect("made");
    std::fs::write(root.join("proc/7/cgroup"), "0::/kubepods/burstable/podaaaa-1/01ab\n").expect("written");
    let mut client = machine.client(fast());
    snapshot(&mut client, "snapshot", |_| true).await;
    let all = client.handle().processes().await.expect("processes");
    let of_amd = all.iter().filter(|gpu| gpu.uuid.starts_with("0x"));
    let found: Vec<_> = of_amd
        .flat_map(|gpu| {
            gpu.processes
                .iter()
                .map(|process| (gpu.uuid.as_str(), process.used, process.pod.as_deref()))
        })
        .collect();
    assert_eq!(found, [(AMD1, MiB(300), Some("aaaa-1"))]);
    amd::set_memory_errors(&root, "0000:19:00.0", 2).expect("written");
    let heard = wait_for(&mut client, "fault", |update| match update {
        Update::Fault(event) => Some(event.fault),
        _ => None,
    });
    let expected = Fault {
        vendor: Vendor::Amd,
        uuid: Some(AMD0.to_owned()),
        code: 2,
        fatal: true,
        name: "uncorrectable memory error".to_owned(),
        partition: None,
    };
    assert_eq!(heard.await, expected);
}

#[tokio::test]
async fn one_socket_serves_three_vendors_pods_and_limits() {
    let machine = all_three();
    let root = machine.path("root");
    amd::set_process(&root, 7, amd::gpu_id(2), 300 << 20).expect("written");
    divvy_intel_sim::set_client(&root, 8, 3, 0, 1, 5 << 10).expect("written");
    for (pid, pod) in [(7, "aaaa-1"), (8, "bbbb-2")] {
        std::fs::create_dir_all(root.join(format!("proc/{pid}"))).expect("made");
        let text = format!("0::/kubepods/burstable/pod{pod}/01ab\n");
        std::fs::write(root.join(format!("proc/{pid}/cgroup")), text).expect("written");
    }
    let region = divvy_intel_sim::region(0, 0);
    let cgroup = "kubepods/burstable/podbbbb-2";
    let directory = root.join("sys/fs/cgroup").join(cgroup);
    std::fs::create_dir_all(&directory).expect("made");
    std::fs::write(directory.join("dmem.max"), format!("{region} max\n")).expect("written");
    let mut client = machine.client(fast());
    let seen = snapshot(&mut client, "all GPUs", |_| true).await;
    assert_eq!(uuids(&seen), [GPU0, GPU1, AMD0, AMD1, INTEL]);
    let all = client.handle().processes().await.expect("processes");
    let of_files = all.iter().filter(|gpu| !gpu.uuid.starts_with("GPU"));
    let found: Vec<_> = of_files
        .flat_map(|gpu| {
            let processes = gpu.processes.iter();
            processes.map(|process| (gpu.uuid.as_str(), process.used, process.pod.as_deref()))
        })
        .collect();
    assert_eq!(found, [(AMD1, MiB(300), Some("aaaa-1")), (INTEL, MiB(5), Some("bbbb-2"))]);
    let limit = LimitRequest {
        uuid: INTEL.to_owned(),
        cgroup: cgroup.to_owned(),
        hard: MiB(1024),
        alone: true,
    };
    client.handle().limit(limit).await.expect("limited");
    let text = std::fs::read_to_string(directory.join("dmem.max")).expect("read");
    assert_eq!(text, format!("{region} {}\n", 1 << 30));
    // A driver that is loaded late, or goes, changes nothing about the others' GPUs.
    std::fs::remove_dir_all(root.join(divvy_intel_sim::FUNCTIONS).join(divvy_intel_sim::address(0))).expect("unbound");
    let seen = snapshot(&mut client, "the others' GPUs", |seen| seen.gpus.len() == 4).await;
    assert_eq!(uuids(&seen), [GPU0, GPU1, AMD0, AMD1]);
}
