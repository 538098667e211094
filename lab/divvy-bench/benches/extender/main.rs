//! Measures the extender in a large simulated cluster, and prints the results next to their budgets:
//!
//! ```text
//! cargo bench -p divvy-bench --bench extender
//! cargo bench -p divvy-bench --bench extender -- --tls
//! cargo bench -p divvy-bench --bench extender -- --nodes 1000 --pods 10000 --requests 500 --binds 500
//! cargo bench -p divvy-bench --bench extender -- hostile
//! ```
//!
//! There are three processes, so that each is measured separately. This process sends the requests. The second is the API server,
//! whose objects have about the size of real ones. It answers a Binding after 2 ms, and sends the watch event. The third is the
//! extender in the form in which it runs in production. If the machine has other load, only the p50 is meaningful.

#![allow(clippy::print_stdout, reason = "a measurement is there to be printed")]
#![allow(clippy::unwrap_used, reason = "what does not work here ends the measurement")]

mod ask;
mod hostile;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure};
use ask::Door;
use divvy_bench::api::RenderedApi;
use divvy_bench::cluster::{self, ClusterSize, Form};
use divvy_extender::core::{CoreTiming, ExtenderCore, Now};
use divvy_extender::tls::CertificateSource;
use divvy_extender::tls::certificate::{Pair, Roots};
use divvy_extender::tls::make::carry_out;
use divvy_extender::tls::plan::{CertificateLifetimes, SecretData, keys, plan};
use divvy_extender::{ExtenderSettings, ExtenderSurroundings, run_with};
use divvy_kube::convert;
use divvy_kube::convert::ReadPod;
use divvy_kube::objects::PodObject;
use divvy_kube::watch::WatchChange;
use divvy_model::MemoryUnit;
use serde_json::json;
use tokio_util::sync::CancellationToken;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// How long a filter call waits before it refuses a pod on all nodes (`second_look`).
const SECOND_LOOK: Duration = Duration::from_millis(50);

fn main() -> Outcome<()> {
    let arguments: Vec<String> = divvy_bench::arguments().collect();
    let number = |flag: &str, otherwise: usize| -> Outcome<usize> {
        match arguments.iter().position(|argument| argument == flag) {
            None => Ok(otherwise),
            Some(i) => Ok(arguments.get(i + 1).ok_or(format!("{flag} needs a number"))?.parse()?),
        }
    };
    let cluster = ClusterSize {
        nodes: number("--nodes", 5_000)?,
        gpus: 8,
        form: Form::Divvy,
        pods: number("--pods", 50_000)?,
        waiting: number("--binds", 3_000)?,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match arguments.first().map(String::as_str) {
        Some("api") => runtime.block_on(serve(cluster)),
        Some("hostile") => hostile::measure(cluster.nodes, arguments.get(1).map(String::as_str)),
        Some("extender") => runtime.block_on(extend(arguments.last().ok_or("no API server")?, arguments.get(1))),
        _ => measure(&cluster, number("--requests", 1_000)?, &arguments),
    }
}

async fn serve(cluster: ClusterSize) -> Outcome<()> {
    let api = RenderedApi::new(cluster);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    Ok(api.serve(listener).await?)
}

/// Run the extender as in production: on one thread, with a client over TCP.
async fn extend(api: &str, certificates: Option<&String>) -> Outcome<()> {
    let client = kube::Client::try_from(kube::Config::new(api.parse()?))?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let tls = certificates.filter(|directory| *directory != api).map(|directory| {
        let file = |name: &str| Path::new(directory).join(name);
        CertificateSource::Files {
            certificate: file(keys::SERVER),
            key: file(keys::SERVER_KEY),
            client_ca: file(keys::CA),
            server_name: NAME.to_owned(),
        }
    });
    let surroundings = ExtenderSurroundings {
        tls,
        ..ExtenderSurroundings::default()
    };
    let settings = ExtenderSettings::new(MemoryUnit::GIB);
    Ok(run_with(listener, client, settings, surroundings, CancellationToken::new()).await?)
}

/// The name in the extender's certificate.
const NAME: &str = "divvy-extender.divvy-system.svc";

/// Make certificates as the extender does, and write them to files in this directory. Return the TLS configuration of a
/// scheduler.
fn certificates(directory: &Path) -> Outcome<rustls::ClientConfig> {
    let now_s = i64::try_from(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs())?;
    let none = SecretData::new();
    let due = plan(&none, NAME, now_s, CertificateLifetimes::default())?;
    let data = carry_out(&due, &none, NAME, now_s, CertificateLifetimes::default())?;
    for (name, content) in &data {
        std::fs::write(directory.join(name), content)?;
    }
    Ok(Pair::read(&data[keys::CLIENT], &data[keys::CLIENT_KEY])?.client(&Roots::read(&data[keys::CA])?)?)
}

/// Another process of this program. It is killed on drop.
struct Role(Child);

impl Role {
    /// Start the process, and read its address.
    fn start(arguments: &[&str]) -> Outcome<(Role, String)> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()?;
        let mut address = String::new();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut address)?;
        Ok((Role(child), address.trim().to_owned()))
    }

    /// Return the CPU time of the process's only thread, which does not depend on other load of the machine.
    fn worked(&self) -> Outcome<Duration> {
        let text = std::fs::read_to_string(format!("/proc/{}/schedstat", self.0.id()))?;
        Ok(Duration::from_nanos(text.split(' ').next().ok_or("no time")?.parse()?))
    }

    /// Return the current and the peak resident memory in MiB.
    fn resident(&self) -> Outcome<(f64, f64)> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let mib = |key: &str| -> Option<f64> {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            Some(line.trim().trim_end_matches(" kB").parse::<f64>().ok()? / 1024.0)
        };
        Ok((mib("VmRSS:").ok_or("no VmRSS")?, mib("VmHWM:").ok_or("no VmHWM")?))
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn measure(cluster: &ClusterSize, requests: usize, flags: &[String]) -> Outcome<()> {
    println!(
        "{} nodes with 8 GPUs, {} pods on them, {} pods that wait, {}",
        cluster.nodes,
        cluster.pods,
        cluster.waiting,
        if flags.iter().any(|flag| flag == "--tls") {
            "TLS with certificates on both sides"
        } else {
            "plain HTTP"
        }
    );
    let (api, address) = Role::start(&[&["api"], &flags.iter().map(String::as_str).collect::<Vec<_>>()[..]].concat())?;
    let began = Instant::now();
    let kept = tempfile::tempdir()?;
    let tls = flags.iter().any(|flag| flag == "--tls");
    let tls = if tls {
        Some((Arc::new(certificates(kept.path())?), NAME))
    } else {
        None
    };
    let (url, directory) = (format!("http://{address}"), kept.path().display().to_string());
    let with_tls = ["extender", &directory, &url];
    let without = ["extender", &url];
    let (extender, listens) = Role::start(if tls.is_some() { &with_tls } else { &without })?;
    let listens = Door { address: listens, tls };
    let mut connection = listens.open()?;
    while connection.get("/readyz")?.0 != 200 {
        std::thread::sleep(Duration::from_millis(5));
    }
    row("start until it answers", &[began.elapsed()], "3 s");
    let (now, most) = extender.resident()?;
    println!(
        "{:<58} {now:>6.0} MiB now, {most:.0} MiB at most     (budget 200 MiB)",
        "resident memory after the start"
    );

    let asks = cluster.asks();
    let names = cluster.shuffled_names();
    let ask = |units: u64| json!({"Pod": cluster::asking(units), "Nodes": null, "NodeNames": names}).to_string();
    for verb in VERBS {
        let body = ask(asks.everywhere);
        let first = timed(1, || Ok(connection.post(verb.1, &body).map(drop)?))?;
        row(&format!("{} over HTTP, the first after the start", verb.0), &first, "5 ms");
    }
    for (what, units) in [("everywhere", asks.everywhere), ("on half of the nodes", asks.half)] {
        let body = json!({"Pod": cluster::asking(units), "Nodes": null, "NodeNames": names}).to_string();
        let (mut times, mut size) = (Vec::new(), 0);
        let before = extender.worked()?;
        for _ in 0..requests {
            let began = Instant::now();
            size = connection.post("/gpushare-scheduler/filter", &body)?.1.len();
            times.push(began.elapsed());
        }
        row(
            &format!("filter over HTTP, fits {what} ({} KiB back)", size >> 10),
            &times,
            "p50 2 ms, p99 5 ms",
        );
        let each = extender.worked()?.saturating_sub(before) / u32::try_from(requests.max(1))?;
        println!(
            "{:<58} {:>6.2} ms",
            "  of that, the extender on a processor",
            each.as_secs_f64() * 1_000.0
        );
    }
    // Pods of sixteen sizes in turn, and of only one size.
    for (what, sizes) in [("one size", 4..=4), ("16 sizes in turn", 1..=16)] {
        let bodies: Vec<String> = sizes.map(ask).collect();
        let mut turns = bodies.iter().cycle();
        let before = extender.worked()?;
        let times = timed(requests, || {
            let body = turns.next().ok_or("no body")?;
            let (status, text) = connection.post(VERBS[1].1, body)?;
            if status == 200 { Ok(()) } else { Err(text.into()) }
        })?;
        row(&format!("prioritize over HTTP, {what}"), &times, "p99 5 ms");
        let each = extender.worked()?.saturating_sub(before) / u32::try_from(requests.max(1))?;
        let ms = each.as_secs_f64() * 1_000.0;
        println!("{:<58} {ms:>6.2} ms", "  of that, the extender on a processor");
    }
    // Nothing changes, so the second evaluation waits for its whole moment.
    let body = json!({"Pod": cluster::asking(asks.nowhere), "Nodes": null, "NodeNames": names}).to_string();
    let mut times = Vec::new();
    for _ in 0..requests.min(300) {
        let began = Instant::now();
        connection.post("/gpushare-scheduler/filter", &body)?;
        times.push(began.elapsed());
    }
    let (looked, at_once): (Vec<_>, Vec<_>) = times.into_iter().partition(|time| *time >= SECOND_LOOK);
    row(
        "filter over HTTP, fits nowhere, refused at once",
        &at_once,
        "p50 2 ms, p99 5 ms",
    );
    row("filter over HTTP, fits nowhere, after a second look", &looked, "50 ms more");
    let times = timed(requests.min(200), || Ok(connection.get("/metrics").map(drop)?))?;
    row("metrics over HTTP", &times, "");
    decisions(cluster, requests, &names)?;
    binds(cluster, &listens)?;
    for verb in VERBS {
        let body = ask(asks.everywhere);
        let first = timed(1, || Ok(connection.post(verb.1, &body).map(drop)?))?;
        let what = format!("{} over HTTP, the first after {} binds", verb.0, cluster.waiting);
        row(&what, &first, "5 ms");
    }
    let (now, most) = extender.resident()?;
    println!(
        "{:<58} {now:>6.0} MiB now, {most:.0} MiB at most     (budget 200 MiB)",
        "resident memory at the end"
    );
    drop(api);
    Ok(())
}

const VERBS: [(&str, &str); 2] = [
    ("filter", "/gpushare-scheduler/filter"),
    ("prioritize", "/gpushare-scheduler/prioritize"),
];

fn timed(times: usize, mut what: impl FnMut() -> Outcome<()>) -> Outcome<Vec<Duration>> {
    (0..times)
        .map(|_| {
            let began = Instant::now();
            what()?;
            Ok(began.elapsed())
        })
        .collect()
}

/// Measure the decisions alone, without HTTP and JSON, with a core that has received changes from a watch.
fn decisions(cluster: &ClusterSize, requests: usize, names: &[String]) -> Outcome<()> {
    let at = |ms: u64| Now {
        monotonic_ns: ms * 1_000_000,
        unix_ns: 0,
    };
    let mut core = ExtenderCore::new(MemoryUnit::GIB, CoreTiming::default());
    let nodes = (0..cluster.nodes).map(|i| serde_json::from_value(cluster.node(i)));
    let pods = (0..cluster.pods + cluster.waiting).map(|i| serde_json::from_value(cluster.pod(i)));
    let nodes = nodes.map(|object| object.map(|object| convert::node(&object)));
    let pods = pods.map(|object| object.map(|object: PodObject| ReadPod::from(object)));
    let nodes: Vec<_> = nodes.collect::<Result<_, serde_json::Error>>()?;
    let pods: Vec<ReadPod> = pods.collect::<Result<_, serde_json::Error>>()?;
    // Remove every tenth pod, so that most nodes have changed.
    let most = pods.iter().enumerate().filter(|(position, _)| position % 10 != 0);
    let fewer: Vec<ReadPod> = most.map(|(_, pod)| pod.clone()).collect();
    let sized = |units: u64| -> Outcome<_> { Ok(convert::pod(&serde_json::from_value(cluster::asking(units))?)?) };
    let some = sized(4)?;
    for (what, pods) in [
        ("the first lists", pods.clone()),
        ("lists without a change", pods.clone()),
        ("a list without every tenth pod", fewer),
        ("a list with all of them again", pods),
    ] {
        let (nodes, began) = (nodes.clone(), Instant::now());
        core.node_change(WatchChange::Reset(nodes), at(0));
        core.pod_change(WatchChange::Reset(pods), at(0));
        row(&format!("the core is held: {what}"), &[began.elapsed()], "");
        let first = timed(1, || {
            core.prioritize(&some, names.iter().map(String::as_str))?;
            Ok(())
        })?;
        row("  prioritize alone, the first after that", &first, "5 ms");
    }
    let asks = cluster.asks();
    for (what, units) in [
        ("everywhere", asks.everywhere),
        ("on half of the nodes", asks.half),
        ("nowhere", asks.nowhere),
    ] {
        let pod = convert::pod(&serde_json::from_value(cluster::asking(units))?)?;
        let mut fits = 0;
        let times = timed(requests, || {
            fits = core.filter(&pod, names.iter().map(String::as_str))?.passed.len();
            Ok(())
        })?;
        row(&format!("decision alone, fits {what} ({fits} nodes)"), &times, "1 ms");
    }
    Ok(())
}

/// The number of binds that kube-scheduler has in progress at the same time in a burst.
const AT_ONCE: usize = 32;

fn binds(cluster: &ClusterSize, listens: &Door) -> Outcome<()> {
    let began = Instant::now();
    let times = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..AT_ONCE)
            .map(|worker| {
                scope.spawn(move || -> anyhow::Result<Vec<Duration>> {
                    let mut connection = listens.open().map_err(|error| anyhow!("{error}"))?;
                    let mut times = Vec::new();
                    for waiting in (worker..cluster.waiting).step_by(AT_ONCE) {
                        let body = cluster.bind(waiting);
                        let began = Instant::now();
                        let (_, answer) = connection
                            .post("/gpushare-scheduler/bind", &body)
                            .map_err(|error| anyhow!("{error}"))?;
                        times.push(began.elapsed());
                        ensure!(answer == r#"{"Error":""}"#, "{answer}");
                    }
                    Ok(times)
                })
            })
            .collect();
        let times: anyhow::Result<Vec<_>> = workers
            .into_iter()
            .map(|worker| worker.join().map_err(|_| anyhow!("a worker panicked"))?)
            .collect();
        times
    })?
    .concat();
    let took = began.elapsed();
    row(&format!("bind over HTTP, {AT_ONCE} at once, API answers in 2 ms"), &times, "");
    println!(
        "{:<58} {:>6.0} /s     (budget 300 /s)",
        "binds",
        times.len() as f64 / took.as_secs_f64()
    );
    Ok(())
}

fn row(what: &str, times: &[Duration], budget: &str) {
    let mut sorted = times.to_vec();
    sorted.sort();
    let ms = |part: f64| {
        let position = ((sorted.len() as f64 - 1.0) * part).round() as usize;
        sorted.get(position).map_or(0.0, |time| time.as_secs_f64() * 1_000.0)
    };
    let budget = if budget.is_empty() {
        String::new()
    } else {
        format!("     (budget {budget})")
    };
    match sorted.len() {
        0 => println!("{what:<58} never"),
        1 => println!("{what:<58} {:>6.2} ms{budget}", ms(1.0)),
        count => println!(
            "{what:<58} {:>6.2} ms p50, {:.2} ms p99, {:.2} ms at most of {count}{budget}",
            ms(0.5),
            ms(0.99),
            ms(1.0)
        ),
    }
}
