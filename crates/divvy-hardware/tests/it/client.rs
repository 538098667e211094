//! The client that starts a probe and keeps it running.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use divvy_cdi::SpecFormat;
use divvy_cdi::driver_spec::{Basis, NvmlGpu};
use divvy_hardware::client::{ProbeClient, ProbeSource, ProbeTiming, Update};
use divvy_hardware::protocol::{DriverQuestion, Kill};
use divvy_hardware::{FailureCode, Fault, GpuFacts, SamplesSince, Snapshot};
use divvy_model::{MiB, Vendor};
use rustix::process::Signal;
use serde_json::json;

use crate::support::{GPU0, GPU1, Machine, TWO, eventually, fast, kill, processes_with, snapshot, unavailable, wait_for};

async fn fault(client: &mut ProbeClient) -> Fault {
    let found = |update| match update {
        Update::Fault(event) => Some(event.fault),
        _ => None,
    };
    wait_for(client, "fault", found).await
}

/// The fault that an XID of a GPU becomes.
fn xid(uuid: &str, number: u64, fatal: bool) -> Fault {
    Fault {
        vendor: Vendor::Nvidia,
        uuid: Some(uuid.to_owned()),
        code: number,
        fatal,
        name: format!("XID {number}"),
        partition: None,
    }
}

fn any(_: &Snapshot) -> bool {
    true
}

/// The client's own probe.
fn child(machine: &Machine) -> u32 {
    let listen = format!("unix:{}", machine.path("private/probe.sock").display());
    let found = processes_with(&listen);
    assert_eq!(found.len(), 1, "one probe: {found:?}");
    found[0]
}

#[tokio::test]
async fn the_first_update_is_what_the_machine_description_says() {
    let machine = Machine::new(TWO);
    let mut client = machine.client(fast());
    let Some(Update::Snapshot(snapshot)) = client.next().await else {
        panic!("a snapshot comes first");
    };
    let gpus: Vec<_> = snapshot
        .gpus
        .iter()
        .map(|gpu| (gpu.uuid.as_str(), gpu.total, gpu.minor))
        .collect();
    assert_eq!(gpus, [(GPU0, MiB(40960), Some(0)), (GPU1, MiB(15360), Some(5))]);
    let processes = client.handle().processes().await.expect("processes");
    assert_eq!((processes[0].uuid.as_str(), processes[0].processes.len()), (GPU0, 2));
}

#[tokio::test]
async fn the_probe_finds_and_describes_the_driver_below_the_root() {
    let machine = Machine::new(TWO);
    for container in [false, true] {
        let root = machine.path(if container { "root/run/nvidia/driver" } else { "root" });
        let libraries = root.join("usr/lib/x86_64-linux-gnu");
        std::fs::create_dir_all(&libraries).expect("made");
        for name in ["libcuda.so", "libnvidia-ml.so"] {
            std::fs::write(libraries.join(format!("{name}.550.54.15")), "").expect("written");
            std::os::unix::fs::symlink(format!("{name}.550.54.15"), libraries.join(format!("{name}.1"))).expect("linked");
        }
        std::fs::create_dir_all(machine.path("root/dev")).expect("made");
        for node in ["nvidiactl", "nvidia0", "nvidia5", "nvidia-uvm"] {
            std::fs::write(machine.path("root/dev").join(node), "").expect("written");
        }
        let mut spawn = machine.spawn(Duration::from_secs(5));
        spawn.driver_root = Some(machine.path("root"));
        let mut client = ProbeClient::start(ProbeSource::Spawn(spawn), fast());
        let snapshot = snapshot(&mut client, "snapshot", any).await;
        let place = |gpu: &GpuFacts| NvmlGpu {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            minor: gpu.minor.expect("a minor number"),
            pci: gpu.pci.clone(),
            mig: None,
        };
        let question = DriverQuestion {
            version: snapshot.driver(Vendor::Nvidia).to_owned(),
            gpus: snapshot.gpus.iter().map(place).collect(),
            paths: vec!["/dev/nvidia0".to_owned(), "/dev/nvidia7".to_owned()],
        };
        let found = client.handle().driver(question).await.expect("an answer");
        assert_eq!(found.missing, ["/dev/nvidia7"]);
        let basis = found.basis.expect("a driver");
        let named = if container { "/run/nvidia/driver" } else { "/" };
        assert_eq!((basis.driver.as_str(), basis.driver_root.as_str()), ("550.54.15", named));
        assert!(basis.root.is_some());
        let made = client.handle().driver_spec(basis.clone()).await.expect("a spec");
        let text = made.spec.print(SpecFormat::Json);
        let library = format!(
            "{}/usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15",
            named.trim_end_matches('/')
        );
        assert!(
            text.contains(&library) && text.contains(GPU0) && text.contains(GPU1),
            "{text}"
        );
        // The libraries belong to a driver whose module is not loaded yet.
        let newer = Basis {
            driver: "560.35.03".to_owned(),
            ..basis
        };
        let failure = client.handle().driver_spec(newer).await.expect_err("no such libraries");
        assert_eq!(failure.code, FailureCode::DriverFiles, "{failure}");
        assert!(failure.text.contains("reboot"), "{failure}");
        // The next time, the libraries are those of the driver container.
        let _ = std::fs::remove_dir_all(machine.path("root/usr"));
    }
}

#[tokio::test]
async fn a_process_belongs_to_its_cgroups_pod_and_container() {
    let machine = Machine::new(TWO);
    let proc = machine.path("root/proc/7");
    std::fs::create_dir_all(&proc).expect("directory");
    std::fs::write(proc.join("cgroup"), "0::/kubepods/burstable/podaaaa-1/01ab\n").expect("cgroup");
    std::fs::write(proc.join("status"), "Name:\tpython3\nNSpid:\t7\t33\nThreads:\t1\n").expect("status");
    let mut client = machine.client(fast());
    snapshot(&mut client, "snapshot", any).await;
    let all = client.handle().processes().await.expect("processes");
    let pods: Vec<_> = all[0]
        .processes
        .iter()
        .map(|p| (p.pid, p.used, p.pod.as_deref(), p.container.as_deref(), p.own_pid))
        .collect();
    assert_eq!(
        pods,
        [
            (1, MiB(10), None, None, None),
            (7, MiB(500), Some("aaaa-1"), Some("01ab"), Some(33))
        ]
    );
}

#[tokio::test]
async fn only_a_process_of_the_pod_is_killed() {
    let machine = Machine::new(TWO);
    let mut client = machine.client(fast());
    snapshot(&mut client, "snapshot", any).await;
    let mut program = Command::new("sleep").arg("600").spawn().expect("sleep");
    let proc = machine.path(&format!("root/proc/{}", program.id()));
    std::fs::create_dir_all(&proc).expect("directory");
    std::fs::write(proc.join("cgroup"), "0::/kubepods/burstable/podaaaa-1/01ab\n").expect("cgroup");
    let pid = program.id();
    let of = |pod: &str| Kill {
        pid,
        pod: pod.to_owned(),
    };
    let (other, own) = (of("aaaa-2"), of("aaaa-1"));
    let refusal = client.handle().kill(other).await.expect_err("another pod").to_string();
    assert!(refusal.contains("does not belong to pod aaaa-2"), "{refusal}");
    assert_eq!(program.try_wait().expect("known"), None);
    client.handle().kill(own.clone()).await.expect("killed");
    assert_eq!(program.wait().expect("ended").signal(), Some(9));
    client.handle().kill(own).await.expect("it has ended already");
    let no_process = Kill {
        pid: u32::MAX,
        pod: "aaaa-1".to_owned(),
    };
    client.handle().kill(no_process).await.expect_err("no PID");
}

/// The sample is one of utilization; the cgroup of its process names the pod and the container.
#[tokio::test]
async fn a_sample_belongs_to_the_container_of_its_process() {
    let machine = Machine::new(&TWO.replace("pid = 7,", "pid = 7, utilization = 30,"));
    let proc = machine.path("root/proc/7");
    std::fs::create_dir_all(&proc).expect("directory");
    std::fs::write(proc.join("cgroup"), "0::/kubepods/burstable/podaaaa-1/01ab\n").expect("cgroup");
    let mut client = machine.client(fast());
    snapshot(&mut client, "snapshot", any).await;
    let ask = |uuid: &str| SamplesSince {
        uuid: uuid.to_owned(),
        since: 0,
    };
    let all = client
        .handle()
        .utilization(vec![ask(GPU1), ask(GPU0)])
        .await
        .expect("samples");
    let found: Vec<_> = all
        .iter()
        .map(|gpu| {
            (
                gpu.uuid.as_str(),
                gpu.samples
                    .iter()
                    .map(|of| (of.pod.as_deref(), of.container.as_deref(), of.percent))
                    .collect(),
            )
        })
        .collect();
    assert_eq!(found, [(GPU1, vec![]), (GPU0, vec![(Some("aaaa-1"), Some("01ab"), 30)])]);
}

/// The XID arrives within a second.
#[tokio::test]
async fn a_snapshot_follows_an_xid_at_once() {
    let machine = Machine::new(TWO);
    let timing = ProbeTiming {
        poll: Duration::from_secs(3600),
        ..fast()
    };
    let mut client = machine.client(timing);
    snapshot(&mut client, "snapshot", any).await;
    for (number, fatal) in [(79, true), (31, false), (119, true)] {
        let before = Instant::now();
        machine.xid(0, number);
        assert_eq!(fault(&mut client).await, xid(GPU0, number, fatal));
        snapshot(&mut client, "snapshot after the XID", any).await;
        assert!(before.elapsed() < Duration::from_secs(1), "{:?}", before.elapsed());
    }
}

/// The other GPU of the machine keeps working meanwhile.
#[tokio::test]
async fn a_lost_gpu_keeps_its_name_and_comes_back() {
    let machine = Machine::new(TWO);
    let mut client = machine.client(fast());
    snapshot(&mut client, "snapshot", any).await;
    machine.xid(0, 79);
    machine.change(json!({"op": "lost", "gpu": 0, "lost": true})).await;
    assert_eq!(fault(&mut client).await.code, 79);
    let seen = snapshot(&mut client, "loss", |seen| seen.gpus.iter().any(|gpu| gpu.lost)).await;
    let gpus: Vec<_> = seen.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu.lost, gpu.total)).collect();
    assert_eq!(gpus, [(GPU0, true, MiB(40960)), (GPU1, false, MiB(15360))]);
    assert!(
        seen.gpus[0]
            .error
            .as_ref()
            .is_some_and(|text| text.contains("fell off the bus")),
        "{:?}",
        seen.gpus[0]
    );
    assert_eq!((seen.gpus[1].error.as_ref(), seen.gpus[1].links.len()), (None, 2));
    machine.change(json!({"op": "lost", "gpu": 0, "lost": false})).await;
    let back = snapshot(&mut client, "return", |seen| seen.gpus.iter().all(|gpu| !gpu.lost)).await;
    assert_eq!((back.gpus[0].error.as_ref(), back.gpus[0].used), (None, MiB(510)));
}

#[tokio::test]
async fn an_uninitialized_driver_is_reported_and_found_later() {
    let machine = Machine::new(TWO);
    std::fs::write(machine.path("control.state"), "{\"initError\":9}").expect("state");
    let mut client = machine.client(fast());
    assert_eq!(unavailable(&mut client).await.code, FailureCode::DriverNotLoaded);
    assert_eq!(
        client.handle().processes().await.expect_err("no driver").code,
        FailureCode::DriverNotLoaded
    );
    machine.change(json!({"op": "init", "error": 0})).await;
    snapshot(&mut client, "snapshot", any).await;
}

/// The probe ended itself because the driver hung.
#[tokio::test]
async fn a_probe_that_ended_itself_is_restarted() {
    let machine = Machine::new(TWO);
    let mut client = ProbeClient::start(ProbeSource::Spawn(machine.spawn(Duration::from_millis(300))), fast());
    snapshot(&mut client, "snapshot", any).await;
    let first = child(&machine);
    machine.change(json!({"op": "hang", "seconds": 60})).await;
    let failure = unavailable(&mut client).await;
    assert_eq!(failure.code, FailureCode::Timeout, "{failure}");
    assert!(failure.text.contains("ended itself"), "{failure}");
    machine.change(json!({"op": "hang", "seconds": 0})).await;
    snapshot(&mut client, "snapshot", any).await;
    assert_ne!(child(&machine), first);
}

#[tokio::test]
async fn a_probe_that_hangs_is_killed_and_started_again() {
    let machine = Machine::new(TWO);
    let timing = ProbeTiming {
        answer: Duration::from_millis(300),
        first_answer: Duration::from_secs(2),
        ..fast()
    };
    let mut client = ProbeClient::start(ProbeSource::Spawn(machine.spawn(Duration::from_secs(600))), timing);
    snapshot(&mut client, "snapshot", any).await;
    let first = child(&machine);
    // A stopped probe neither answers nor notices anything, and its watchdog is stopped as well.
    kill(first, Signal::STOP);
    let failure = unavailable(&mut client).await;
    assert_eq!(failure.code, FailureCode::Timeout, "{failure}");
    snapshot(&mut client, "snapshot", any).await;
    assert_ne!(child(&machine), first);
}

/// The driver is reported as slow.
#[tokio::test]
async fn a_driver_slow_to_start_is_waited_for() {
    let mut machine = Machine::new(TWO);
    machine.extra.push(("DIVVY_NVML_SIM_HANG".to_owned(), "1".into()));
    let timing = ProbeTiming {
        answer: Duration::from_millis(100),
        ..fast()
    };
    let mut client = machine.client(timing);
    let failure = unavailable(&mut client).await;
    assert_eq!(failure.code, FailureCode::Timeout);
    assert!(failure.text.contains("not answered yet"), "{failure}");
    let first = child(&machine);
    snapshot(&mut client, "snapshot", any).await;
    assert_eq!(child(&machine), first, "the same probe");
}

#[tokio::test]
async fn a_lost_gpu_stays_lost_when_the_probe_is_restarted() {
    let machine = Machine::new(TWO);
    let mut client = machine.client(fast());
    snapshot(&mut client, "snapshot", any).await;
    machine.change(json!({"op": "lost", "gpu": 1, "lost": true})).await;
    snapshot(&mut client, "loss", |seen| seen.gpus.iter().any(|gpu| gpu.lost)).await;
    kill(child(&machine), Signal::KILL);
    let failure = unavailable(&mut client).await;
    assert_eq!(failure.code, FailureCode::ProbeUnreachable, "{failure}");
    assert!(failure.text.contains("signal: 9"), "{failure}");
    // This probe never saw the GPU, so it knows that there is one but not which.
    let seen = snapshot(&mut client, "snapshot", any).await;
    assert_eq!(seen.gpus.len(), 1);
    assert_eq!((seen.unreadable[0].index, seen.unreadable[0].lost), (1, true));
}

/// The XID comes while the agent is away.
#[tokio::test]
async fn an_xid_is_told_when_the_agent_is_back() {
    let machine = Machine::new(TWO);
    let _probe = machine.listening("s", &[]);
    let probe = ProbeSource::Socket(machine.path("s"));
    let mut client = ProbeClient::start(probe.clone(), fast());
    snapshot(&mut client, "snapshot", any).await;
    drop(client);
    machine.xid(1, 48);
    let mut client = ProbeClient::start(probe, fast());
    assert_eq!(fault(&mut client).await, xid(GPU1, 48, true));
}

#[tokio::test]
async fn dropping_the_client_leaves_no_process_and_no_socket() {
    let machine = Machine::new(TWO);
    let mut client = machine.client(fast());
    snapshot(&mut client, "snapshot", any).await;
    child(&machine);
    drop(client);
    // Let the runtime drop the task.
    tokio::time::sleep(Duration::from_millis(1)).await;
    let listen = format!("unix:{}", machine.path("private/probe.sock").display());
    eventually("no process is left", || processes_with(&listen).is_empty());
    assert!(!machine.path("private/probe.sock").exists());
}

#[tokio::test]
async fn a_probe_that_cannot_be_started_or_reached_is_tried_for_ever() {
    let machine = Machine::new(TWO);
    let mut spawn = machine.spawn(Duration::from_secs(5));
    spawn.program = machine.path("no-such-program");
    let mut client = ProbeClient::start(ProbeSource::Spawn(spawn), fast());
    let is_emulated = divvy_skip::emulated("under the emulator, a program that does not exist starts and ends with status 127");
    for _ in 0..3 {
        let failure = unavailable(&mut client).await;
        assert_eq!(failure.code, FailureCode::ProbeUnreachable);
        assert!(is_emulated || failure.text.contains("cannot start"), "{failure}");
    }
    let mut client = ProbeClient::start(ProbeSource::Socket(machine.path("s")), fast());
    for _ in 0..3 {
        assert_eq!(unavailable(&mut client).await.code, FailureCode::ProbeUnreachable);
    }
    let _probe = machine.listening("s", &[]);
    snapshot(&mut client, "snapshot", any).await;
}
