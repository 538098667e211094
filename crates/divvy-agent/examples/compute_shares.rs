//! The shares of a GPU's time that pods get, with every part of the way between a program and the driver: programs with the guard, the simulated CUDA and
//! NVML, the probe, and the agent in an embedded cluster. It needs seconds of real time, so it is not a test.
//!
//! ```text
//! cargo run -p divvy-agent --example compute_shares -- SECONDS PERCENT:KERNEL:AT_ONCE[:PROCESSES]...
//! cargo run -p divvy-agent --example compute_shares -- 10 25:x_1000000ns:8 75:x_1000000ns:8
//! ```
//!
//! Each process of a pod launches the kernel so often, waits for all of them, and begins again. 0 percent: the pod has no limit.

#![allow(clippy::print_stdout, reason = "results")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use divvy_agent::{Config, GuardMode, Probe};
use divvy_gpu_sim::Ledger;
use divvy_model::{Allocation, ContainerShare, GpuShare, MiB, names};
use divvy_shadow_testkit::{build, replace, shadow, target};
use divvy_share::limits::{Account, Limits};
use divvy_testbed::api::{ApiServer, Options};
use divvy_testbed::builders;
use divvy_testbed::node::{Node, NodeSpec};
use tokio_util::sync::CancellationToken;

const GPU: &str = "GPU-00010203-0405-4607-8809-0a0b0c0d0e0f";
const DRIVER: &str = "575.51.03";
const LIMIT: Duration = Duration::from_secs(20);
/// The time after which shares count.
const WARM_UP: Duration = Duration::from_secs(2);

/// What a pod does.
struct Work {
    percent: u32,
    kernel: String,
    at_once: u64,
    processes: usize,
}

impl Work {
    fn parse(text: &str) -> Option<Work> {
        let mut parts = text.split(':');
        Some(Work {
            percent: parts.next()?.parse().ok()?,
            kernel: parts.next()?.to_owned(),
            at_once: parts.next()?.parse().ok()?,
            processes: parts.next().map_or(Some(1), |number| number.parse().ok())?,
        })
    }
}

/// The files of the machine.
struct Machine {
    directory: tempfile::TempDir,
    sys_root: PathBuf,
}

impl Machine {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Start a program that finds the simulated driver.
    fn command(&self, program: PathBuf) -> Command {
        let mut command = Command::new(program);
        command
            .env("DIVVY_NVML_SIM", self.path("machine.toml"))
            .env("DIVVY_NVML_SIM_LEDGER", self.path("ledger"));
        command
    }

    /// Return the GPU time of each process.
    fn busy(&self) -> Vec<(u32, u64)> {
        let usage = Ledger::open(&self.path("ledger"), GPU).and_then(|mut ledger| ledger.usage());
        let usage = usage.expect("the ledger").into_iter();
        usage.map(|of| (of.pid, of.busy_ns)).collect()
    }
}

/// A process of a pod. It is killed at the end.
struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Start the program with the library in a directory.
    fn start(machine: &Machine, directory: &Path, uid: &str) -> Process {
        let mut command = machine.command(target().join("debug/examples/program"));
        command
            .arg(directory.join("libcuda.so.1"))
            .arg(directory.join("libcuda.so.real"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("a program");
        let (input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        // The probe finds the pod of a process by its cgroup.
        let proc = machine.sys_root.join(format!("proc/{}", child.id()));
        std::fs::create_dir_all(&proc).expect("made");
        std::fs::write(proc.join("cgroup"), format!("0::/kubepods/burstable/pod{uid}/0123abcd\n")).expect("written");
        let output = BufReader::new(output);
        Process { child, input, output }
    }

    fn send(&mut self, call: &str) {
        writeln!(self.input, "{call}").expect("it reads");
    }

    fn ok(&mut self, call: &str) -> u64 {
        self.send(call);
        let mut line = String::new();
        self.output.read_line(&mut line).expect("it answers");
        let numbers: Vec<u64> = line.split_whitespace().flat_map(str::parse).collect();
        assert_eq!(numbers.first(), Some(&0), "{call}: {line}");
        numbers.get(1).copied().unwrap_or(0)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Make a directory that has what a container has: the guard, the driver's library, and the pod's share. The paths in this copy of the guard lead to the
/// directory.
fn container(shares: &Path, uid: &str) -> tempfile::TempDir {
    let root = divvy_share::DIRECTORY;
    let mut builder = tempfile::Builder::new();
    let directory = builder
        .prefix("g")
        .rand_bytes(root.len() - 6)
        .tempdir_in("/tmp")
        .expect("made");
    let mut library = shadow("divvy-guard");
    let path = directory.path().to_str().expect("UTF-8");
    for text in [root, "/run/divvy/guard"] {
        assert_eq!(replace(&mut library, text, path), 1, "{text}");
    }
    std::fs::write(directory.path().join("libcuda.so.1"), library).expect("written");
    symlink(
        target().join("debug/libdivvy_cuda_sim.so"),
        directory.path().join("libcuda.so.real"),
    )
    .expect("linked");
    symlink(shares.join(uid).join(GPU), directory.path().join(GPU)).expect("linked");
    directory
}

/// Install a driver, so that the agent makes its CDI spec.
fn install_driver(root: &Path) {
    for (path, text) in [
        ("sys/module/nvidia/version".to_owned(), format!("{DRIVER}\n")),
        ("usr/bin/nvidia-smi".to_owned(), "smi".to_owned()),
        ("etc/ld.so.cache".to_owned(), String::new()),
        (format!("usr/lib64/libcuda.so.{DRIVER}"), "a library".to_owned()),
        (format!("usr/lib64/libnvidia-ml.so.{DRIVER}"), "a library".to_owned()),
    ] {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().expect("has one")).expect("made");
        std::fs::write(path, text).expect("written");
    }
}

async fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < LIMIT, "not in {LIMIT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn pod(name: &str, cores: u32) -> serde_json::Value {
    let (uuid, memory) = (GPU.to_owned(), MiB(4096));
    let allocation = Allocation {
        v: 1,
        gpus: vec![GpuShare {
            uuid: uuid.clone(),
            memory,
            cores,
            whole: false,
            enforcement: None,
        }],
        containers: [("main".to_owned(), vec![ContainerShare { uuid, memory, cores }])].into(),
    };
    let mut pod = builders::pod(name).gpu_mem(4).build();
    pod["spec"]["nodeName"] = "n1".into();
    pod["metadata"]["annotations"][names::ALLOCATION] = allocation.to_json().into();
    pod["metadata"]["annotations"][names::ISOLATION] = "soft".into();
    pod
}

fn limits(file: &Path) -> (u64, Limits) {
    Limits::from_bytes(&std::fs::read(file).expect("read")).expect("readable")
}

fn account(file: &Path) -> Account {
    limits(file).1.account
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds: u64 = arguments
        .next()
        .and_then(|text| text.parse().ok())
        .expect("a number of seconds");
    let work: Vec<Work> = arguments
        .map(|text| Work::parse(&text).expect("PERCENT:KERNEL:AT_ONCE"))
        .collect();
    build(&["-p", "divvy-cuda-sim", "-p", "divvy-nvml-sim"]);
    build(&["-p", "divvy-hardware", "--bin", "divvy-probe"]);
    build(&["-p", "divvy-guard", "--example", "program"]);

    let api = ApiServer::new(Options::default());
    let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("listening");
    let directory = tempfile::tempdir().expect("made");
    let kubeconfig = directory.path().join("kubeconfig");
    std::fs::write(&kubeconfig, api.kubeconfig_for(listening.addr(), "agent")).expect("written");
    let mut spec = NodeSpec::new("n1", directory.path());
    spec.gpu_minors = vec![0];
    let paths = spec.paths();
    install_driver(&paths.sys_root);
    let node = Node::start(api.client(), spec).await.expect("a node");

    let machine = Machine {
        directory,
        sys_root: paths.sys_root.clone(),
    };
    let description = format!(
        "v = 1\n[[node]]\nname = \"n\"\ndriver = \"{DRIVER}\"\n[[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-40GB\"\nuuid = \"{GPU}\"\nmemory_mib = 40960\n"
    );
    let period = std::env::var("SAMPLE_MS").map_or_else(|_| String::new(), |ms| format!("sample_ms = {ms}\n"));
    std::fs::write(machine.path("machine.toml"), description + &period).expect("written");
    std::fs::create_dir(machine.path("ledger")).expect("made");
    let socket = machine.path("probe.sock");
    let mut probe = machine.command(target().join("debug/divvy-probe"));
    probe.arg("--listen").arg(format!("unix:{}", socket.display()));
    probe.arg("--nvml-library").arg(target().join("debug/libdivvy_nvml_sim.so"));
    probe.arg("--sys-root").arg(&paths.sys_root);
    let _probe = Ended(probe.spawn().expect("the probe"));

    for name in ["libdivvy-guard.so", "libdivvy-guard-nvml.so"] {
        std::fs::write(paths.kubelet_dir.join(name), name).expect("written");
    }
    let config = Config {
        kubeconfig: Some(kubeconfig),
        kubelet_dir: paths.kubelet_dir.clone(),
        cdi_dir: paths.cdi_dir,
        sys_root: paths.sys_root,
        probe: Some(Probe::Socket(socket)),
        guard: GuardMode::Shadow,
        guard_dir: Some(paths.kubelet_dir),
        ..Config::new("n1")
    };
    let stop = CancellationToken::new();
    let agent = tokio::spawn(divvy_agent::run(config.clone(), stop.clone()));
    let has_units = || (node.device_manager().resources.get(names::GPU_MEM)?.1 > 0).then_some(());
    eventually("the node offers the GPU", has_units).await;
    let shares = config.state_dir().join("shares");
    let (mut uids, mut files) = (Vec::new(), Vec::new());
    for (index, of) in work.iter().enumerate() {
        let pod = api.create("pods", pod(&format!("p{index}"), of.percent)).expect("created");
        let uid = pod["metadata"]["uid"].as_str().expect("has one").to_owned();
        let file = shares.join(&uid).join(GPU).join("limits");
        eventually("the files of the pod", || file.exists().then_some(())).await;
        uids.push(uid);
        files.push(file);
    }
    let timed = files.iter().zip(&work).filter(|(_, of)| (1..100).contains(&of.percent));
    let is_measured = || timed.clone().all(|(file, _)| account(file).at > 0).then_some(());
    eventually("the first measurement", is_measured).await;

    let mut pods = Vec::new();
    let mut containers = Vec::new();
    for (uid, of) in uids.iter().zip(&work) {
        let directory = container(&shares, uid);
        let processes = std::iter::repeat_with(|| {
            let mut process = Process::start(&machine, directory.path(), uid);
            process.ok("init");
            process.ok("retain 0");
            let function = process.ok(&format!("kernel {}", of.kernel));
            process.send(&format!("work {function} {}", of.at_once));
            process
        });
        pods.push(processes.take(of.processes).collect::<Vec<_>>());
        containers.push(directory);
    }
    let total = |processes: &[Process]| {
        let busy = machine.busy().into_iter();
        let own = busy.filter(|(pid, _)| processes.iter().any(|of| of.child.id() == *pid));
        own.map(|(_, ns)| ns).sum::<u64>()
    };
    // Until the first measurement, a pod may have more than its rate, and pays for it afterwards.
    tokio::time::sleep(WARM_UP).await;
    let begin = Instant::now();
    let (mut before, mut last) = (pods.iter().map(|of| total(of)).collect::<Vec<_>>(), begin);
    let first = before.clone();
    let share = |had: u64, time: Duration| had as f64 * 100.0 / time.as_nanos() as f64;
    for second in 1..=seconds {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (now, time) = (pods.iter().map(|of| total(of)).collect::<Vec<_>>(), Instant::now());
        let shares = now.iter().zip(&before).map(|(now, before)| share(now - before, time - last));
        let text: Vec<String> = shares.map(|share| format!("{share:6.1}")).collect();
        println!("second {second:2}: {}", text.join(" "));
        (before, last) = (now, time);
    }
    for (index, Work { percent, kernel, .. }) in work.iter().enumerate() {
        let had = share(before[index] - first[index], last - begin);
        // A pod that has much left was not held by its limit: its processes did not keep the simulated GPU busy.
        let left = account(&files[index]).balance / 1_000_000;
        println!("{percent} % of {kernel}: {had:.1} %, {left} ms left");
    }
    drop(pods);
    stop.cancel();
    agent.await.expect("no panic").expect("it stops");
}
