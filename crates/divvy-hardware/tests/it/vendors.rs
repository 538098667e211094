//! One probe for the GPUs of several vendors.

use std::process::Stdio;

use divvy_hardware::client::Update;
use divvy_hardware::{Fault, Snapshot};
use divvy_model::{MiB, Vendor};
use divvy_testkit::amd::{self, Machine as Recorded};
use serde_json::json;

use crate::support::{GPU0, GPU1, Machine, TWO, fast, snapshot, wait_for};

const AMD0: &str = "0xc34ec50444dd0a6c";
const AMD1: &str = "0xc34ec50444dd0a6d";

/// A machine with two GPUs of NVIDIA and two of AMD.
fn both() -> Machine {
    let machine = Machine::new(TWO);
    amd::write(&machine.path("root"), Recorded::Vega10).expect("written");
    machine
}

fn uuids(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect()
}

#[test]
fn once_prints_the_gpus_of_all_vendors() {
    let output = both().command().arg("--once").stdin(Stdio::null()).output().expect("probe");
    let snapshot: Snapshot = serde_json::from_slice(&output.stdout).expect("a snapshot");
    snapshot.validate().expect("valid");
    assert_eq!(uuids(&snapshot), [GPU0, GPU1, AMD0, AMD1]);
    assert_eq!(
        Vendor::ALL.map(|vendor| snapshot.driver(vendor).to_owned()),
        ["550.54.15", amd::DRIVER, ""]
    );
}

#[tokio::test]
async fn amds_gpus_are_served_without_nvidias_driver_and_nvidias_when_it_comes() {
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
