//! Measures the resources for which there are budgets on a node with 8 GPUs, and prints the values next to the budgets:
//!
//! ```text
//! cargo build --release --workspace && cargo bench -p divvy-bench --bench node
//! ```
//!
//! If a directory is given as an argument, the programs in that directory are measured: static `divvy` and `divvy-agent` as in an
//! image, with `divvy-probe` and `libdivvy_nvml_sim.so` next to them.

#![allow(clippy::print_stdout, reason = "a measurement is there to be printed")]

use std::net::SocketAddr;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use divvy_testbed::builders::pod;
use divvy_testbed::embedded::{Embedded, EmbeddedSettings};
use divvy_testbed::programs::Programs;
use divvy_testbed::scenario::Cluster as _;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, PostParams};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

const ROUNDS: usize = 10;
/// As many pods as a kubelet runs by default.
const PODS: usize = 110;
/// How long the agent of guarded pods is measured.
const GUARDED: Duration = Duration::from_secs(20);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let own = std::env::current_exe()?;
    let directory = own
        .parent()
        .and_then(Path::parent)
        .context("this program is not in a target directory of cargo")?;
    let given = divvy_bench::arguments().next().map(std::path::PathBuf::from);
    let programs = Programs::beside(&given.as_deref().unwrap_or(directory).join("divvy"))?;
    for (name, path) in [
        ("divvy", &programs.divvy),
        ("divvy-agent", &programs.agent),
        ("divvy-probe", &programs.probe),
    ] {
        println!("{name:<44} {:>8.1} MiB", std::fs::metadata(path)?.len() as f64 / 1048576.0);
    }
    let gpus = "[[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-80GB\"\nmemory_mib = 81920\n".repeat(8);
    let settings = EmbeddedSettings::new(format!("v = 1\n[[node]]\nname = \"dgx\"\n{gpus}"), programs.clone());

    let began = Instant::now();
    let mut cluster = Embedded::start(settings).await?;
    println!(
        "{:<44} {:>8} ms",
        "API server, extender and scheduler up",
        began.elapsed().as_millis()
    );
    let began = Instant::now();
    cluster.join("dgx").await?;
    offered(&cluster, 640).await?;
    println!(
        "{:<44} {:>8} ms",
        "node joined until its units are in its status",
        began.elapsed().as_millis()
    );

    let mut starts = Vec::new();
    for _ in 0..ROUNDS {
        cluster.kill_agent("dgx").await?;
        until("the plugin to be gone", || resources(&cluster).is_ok_and(|units| units == 0)).await?;
        let began = Instant::now();
        cluster.start_agent("dgx").await?;
        until("the plugin to be back", || {
            resources(&cluster).is_ok_and(|units| units == 640)
        })
        .await?;
        starts.push(began.elapsed());
    }
    report("agent and probe: start until registered", "50 ms", &mut starts);

    let mut again = Vec::new();
    for _ in 0..ROUNDS {
        let began = Instant::now();
        cluster.restart_kubelet("dgx").await?;
        until("the plugin to be back", || {
            resources(&cluster).is_ok_and(|units| units == 640)
        })
        .await?;
        again.push(began.elapsed());
    }
    report("kubelet restarted until registered again", "1 s", &mut again);

    offered(&cluster, 640).await?;
    tokio::time::sleep(Duration::from_secs(5)).await;
    print_memory(&cluster, "idle", 12)?;
    scrape(&cluster).await?;
    cluster.shutdown().await;
    guarded(&gpus, programs).await
}

/// Measure what an agent does in a second with a full node of guarded pods, of which each has a process with a slot, and how long its answers wait meanwhile.
async fn guarded(gpus: &str, programs: Programs) -> Result<()> {
    let libraries = tempfile::tempdir()?;
    for name in ["libdivvy-guard.so", "libdivvy-guard-nvml.so"] {
        std::fs::write(libraries.path().join(name), name)?;
    }
    let mut settings = EmbeddedSettings::new(format!("v = 1\n[[node]]\nname = \"dgx\"\n{gpus}"), programs);
    settings.drivers = true;
    let directory = libraries.path().display();
    // With the intervals that an agent has by default.
    settings.agent_flags = vec!["--guard=shadow".to_owned(), format!("--guard-dir={directory}")];
    let mut cluster = Embedded::start(settings).await?;
    cluster.join("dgx").await?;
    offered(&cluster, 640).await?;
    let address = full(&cluster).await?;
    let kubelet = cluster.node("dgx")?.paths().kubelet_dir.clone();
    let shares = kubelet.parent().context("a directory of the node")?.join("state/shares");
    let mut processes = Vec::new();
    let node = cluster.node("dgx")?;
    for container in node.running()() {
        let program = Command::new("sleep").arg("infinity").kill_on_drop(true).spawn()?;
        let pid = program.id().context("sleep runs")?;
        node.attach(&container.id, pid)?;
        let share = std::fs::read_dir(shares.join(&container.pod_uid))?.next();
        let share = share.context("a share of the pod")??.path();
        let gpu = container
            .env
            .get("ALIYUN_COM_GPU_MEM_IDX")
            .context("a GPU of the container")?;
        processes.push(Process {
            slot: slot(&share.join(divvy_share::USAGE), pid)?,
            gpu: gpu.parse()?,
            pid,
            _program: program,
        });
    }
    ensure!(
        processes.len() == PODS,
        "{} pods are guarded, and not {PODS}",
        processes.len()
    );
    let agent = cluster.agent_pid("dgx").context("the agent runs")?;
    let mut times = Vec::new();
    for round in 0..=GUARDED.as_secs() {
        allocate(&cluster, &processes, round).await?;
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(1) {
            let asked = Instant::now();
            get(address, "/healthz").await?;
            times.push(asked.elapsed());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    report("/healthz of an agent with guarded pods", "5 ms, the longest", &mut times);
    for allocates in [true, false] {
        if !allocates {
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        let (began, before) = (Instant::now(), processor_time(agent)?);
        for round in 0..GUARDED.as_secs() {
            if allocates {
                allocate(&cluster, &processes, round).await?;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let used = (processor_time(agent)? - before).as_secs_f64() / began.elapsed().as_secs_f64();
        let what = if allocates { "allocate" } else { "keep what they have" };
        println!(
            "{:<44} {:>8.2} ms  (budget 2 ms)",
            format!("agent's second, {PODS} pods that {what}"),
            used * 1000.0
        );
    }
    cluster.shutdown().await;
    Ok(())
}

/// A process of a pod.
struct Process {
    /// The file of usage, of which it has the first slot as long as the file is open.
    slot: std::fs::File,
    gpu: u32,
    pid: u32,
    _program: Child,
}

/// Take the first slot of a file of usage as a process with a context does.
fn slot(path: &Path, pid: u32) -> Result<std::fs::File> {
    let file = std::fs::File::options().read(true).write(true).open(path)?;
    let lock = nix::libc::flock {
        l_type: nix::libc::F_WRLCK as nix::libc::c_short,
        l_whence: nix::libc::SEEK_SET as nix::libc::c_short,
        l_start: 0,
        l_len: 1,
        l_pid: 0,
    };
    nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_OFD_SETLK(&lock))?;
    for (at, word) in [(24, 1), (64 + 16, u64::from(pid)), (64 + 48, 1)] {
        file.write_all_at(&word.to_ne_bytes(), at)?;
    }
    Ok(file)
}

/// Have each process have 1 GiB in even rounds, 2 GiB in the others, and a context of 300 MiB. A guard counts memory before it is allocated, and until it is freed.
async fn allocate(cluster: &Embedded, processes: &[Process], round: u64) -> Result<()> {
    for Process { slot, gpu, pid, .. } in processes {
        let allocated = 1 + round % 2;
        let count = || slot.write_all_at(&(allocated << 30).to_ne_bytes(), 64);
        if allocated == 2 {
            count()?;
        }
        let memory = json!({"op": "memory", "gpu": gpu, "pid": pid, "used_mib": 1024 * allocated + 300});
        cluster.driver("dgx", memory).await?;
        count()?;
    }
    Ok(())
}

/// Return the processor time of all threads of a process, without those that have ended.
fn processor_time(pid: u32) -> Result<Duration> {
    let mut sum = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        let first = text.split_whitespace().next().context("the time on a processor")?;
        sum += first.parse::<u64>()?;
    }
    Ok(Duration::from_nanos(sum))
}

/// Print the resident memory of agent and probe next to its budget in MiB.
fn print_memory(cluster: &Embedded, state: &str, budget: u32) -> Result<()> {
    let agent = cluster.agent_pid("dgx").context("the agent runs")?;
    let (agent_kib, _) = resident(agent)?;
    let (probe_kib, driver_kib) = resident(child_of(agent)?)?;
    let probe_kib = probe_kib - driver_kib;
    let mib = |kib: u64| kib as f64 / 1024.0;
    println!("{:<44} {:>8.1} MiB", format!("agent, {state}, resident"), mib(agent_kib));
    println!(
        "{:<44} {:>8.1} MiB  (less the driver's library)",
        format!("probe, {state}, resident"),
        mib(probe_kib)
    );
    println!(
        "{:<44} {:>8.1} MiB  (budget {budget} MiB)",
        "both",
        mib(agent_kib + probe_kib)
    );
    Ok(())
}

/// Have as many pods run as a node can have. Return the address of its agent.
async fn full(cluster: &Embedded) -> Result<SocketAddr> {
    let pods: Api<Pod> = Api::namespaced(cluster.client(), "default");
    for number in 0..PODS {
        let manifest = pod(&format!("worker-{number}")).gpu_mem(5).build();
        pods.create(&PostParams::default(), &serde_json::from_value(manifest)?)
            .await?;
    }
    let (_, address) = cluster.metrics().next().context("the agent serves metrics")?;
    let limit = Instant::now() + Duration::from_secs(120);
    while !get(address, "/metrics")
        .await?
        .contains(&format!("\ndivvy_agent_grants {PODS}\n"))
    {
        ensure!(Instant::now() < limit, "waited 120 s for {PODS} pods");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(address)
}

/// Measure what it costs to read the metrics of a full node. In between the agent may measure again, as it does for Prometheus.
async fn scrape(cluster: &Embedded) -> Result<()> {
    let address = full(cluster).await?;
    for path in ["/metrics", "/metrics/dcgm"] {
        let (mut times, mut bytes) = (Vec::new(), 0);
        for _ in 0..ROUNDS {
            tokio::time::sleep(Duration::from_millis(1100)).await;
            let began = Instant::now();
            bytes = get(address, path).await?.len();
            times.push(began.elapsed());
        }
        report(&format!("{path}, 8 GPUs and {PODS} pods"), "5 ms and NVML", &mut times);
        println!("{:<44} {:>8.1} KB  (budget 200 KB)", "its text", bytes as f64 / 1000.0);
    }
    print_memory(cluster, "scraped", 13)
}

async fn get(address: SocketAddr, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    Ok(text)
}

fn report(what: &str, budget: &str, times: &mut [Duration]) {
    times.sort();
    let ms = |time: Duration| time.as_secs_f64() * 1000.0;
    let (min, median, max) = (times[0], times[times.len() / 2], times[times.len() - 1]);
    println!(
        "{what:<44} {:>8.1} ms  (min {:.1}, max {:.1}; budget {budget})",
        ms(median),
        ms(min),
        ms(max)
    );
}

/// Return the number of devices that the kubelet's device manager considers healthy.
fn resources(cluster: &Embedded) -> Result<usize> {
    let view = cluster.node("dgx")?.device_manager();
    Ok(view
        .resources
        .get(divvy_model::names::GPU_MEM)
        .map_or(0, |(_, allocatable)| *allocatable))
}

async fn until(what: &str, holds: impl Fn() -> bool) -> Result<()> {
    let limit = Instant::now() + Duration::from_secs(20);
    while !holds() {
        ensure!(Instant::now() < limit, "waited 20 s for {what}");
        tokio::time::sleep(Duration::from_micros(500)).await;
    }
    Ok(())
}

async fn offered(cluster: &Embedded, units: u64) -> Result<()> {
    let limit = Instant::now() + Duration::from_secs(20);
    while divvy_kube::list::node(&cluster.client(), "dgx").await?.allocatable_units != units {
        ensure!(Instant::now() < limit, "waited 20 s for {units} units");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

/// Return the PID of the only child process of a process. For the agent, this is the probe.
fn child_of(pid: u32) -> Result<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    let first = children.split_whitespace().next().context("the agent has no child")?;
    Ok(first.parse()?)
}

/// Return two amounts of resident memory in KiB: the total, and the part in the mappings of the (simulated) driver's library.
fn resident(pid: u32) -> Result<(u64, u64)> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let (mut all, mut driver, mut in_driver) = (0, 0, false);
    for line in maps.lines() {
        if let Some(rest) = line.strip_prefix("Rss:") {
            let kib: u64 = rest.trim().trim_end_matches(" kB").parse()?;
            all += kib;
            driver += if in_driver { kib } else { 0 };
        } else if line
            .split_whitespace()
            .next()
            .is_some_and(|range| range.contains('-') && !range.ends_with(':'))
        {
            in_driver = line.contains("nvml");
        }
    }
    Ok((all, driver))
}
