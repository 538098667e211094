//! Attacks `divvy extender` and `divvy-agent` in ways that are open to any client that can connect to them. Prints the memory
//! that they use, and the response time of `/healthz` during the attack:
//!
//! ```text
//! cargo build --release -p divvy && cargo bench -p divvy-bench --bench siege
//! cargo bench -p divvy-bench --bench siege -- slow-bodies silent-350    only these
//! cargo bench -p divvy-bench --bench siege -- --programs DIRECTORY      divvy and divvy-agent of another build
//! ```
//!
//! The attackers' connections come from 127.0.0.2, and those of the health probe from 127.0.0.1. Each health probe uses a new
//! connection, as a kubelet does. The exit status is 1 if the memory reached half of the chart's limit, or if a health probe took
//! 100 ms or longer, which may also happen on a busy machine.

#![allow(clippy::print_stdout, reason = "a measurement is there to be printed")]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use divvy_testbed::api::{ApiServer, ApiServerOptions};
use divvy_testbed::programs::ChildProgram;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;

/// How long the attackers keep their connections open.
const HOLD: Duration = Duration::from_secs(12);
/// How long an attacker whose connection was closed waits before it opens another one.
const AGAIN: Duration = Duration::from_secs(1);
const BETWEEN_PROBES: Duration = Duration::from_millis(50);
const BUDGET: Duration = Duration::from_millis(100);
const ATTACKER: [u8; 4] = [127, 0, 0, 2];
const PROBE: [u8; 4] = [127, 0, 0, 1];
const SERVER_NAME: &str = "divvy-extender.divvy-system.svc";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    /// The extender with TLS and the webhook, as the chart installs it for a second scheduler.
    Extender,
    /// The extender with plain HTTP on the loopback address.
    PlainExtender,
    Agent,
}

impl Target {
    /// Return `resources.limits.memory` of the chart, in MiB.
    fn limit_mib(self) -> u64 {
        match self {
            Target::Extender | Target::PlainExtender => 512,
            Target::Agent => 64,
        }
    }
}

#[derive(Debug, Clone)]
enum How {
    /// Opens this number of connections. Each sends this text, and then nothing more.
    Hold { connections: usize, text: Vec<u8> },
    /// Opens this number of connections per second. They send nothing, not even a TLS handshake.
    Silent { each_second: u32 },
    /// Opens this number of connections. Each sends this text again and again.
    Repeat { connections: usize, text: Vec<u8> },
}

struct Attack {
    name: &'static str,
    target: Target,
    how: How,
}

fn attacks() -> Vec<Attack> {
    let post = |path: &str, length: usize, body: &[u8]| {
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
        [head.as_bytes(), body].concat()
    };
    let slow = |path: &str, bytes: usize| How::Hold {
        connections: 130,
        text: post(path, bytes, &vec![b' '; bytes - 1]),
    };
    let half = |connections| How::Hold {
        connections,
        text: b"GET /metrics HTTP/1.1\r\nhost: x\r\n".to_vec(),
    };
    let headers = || How::Hold {
        connections: 160,
        text: format!(
            "GET /metrics HTTP/1.1\r\nhost: x\r\n{}",
            format!("x: {}\r\n", "x".repeat(4_000)).repeat(96)
        )
        .into_bytes(),
    };
    let chunks = [
        b"POST /mutate/divvy-scheduler HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".to_vec(),
        b"1\r\n \r\n".repeat(2 << 20),
    ]
    .concat();
    let review = format!(
        r#"{{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{{"uid":"1","kind":{{"group":"","version":"v1","kind":"Pod"}},"operation":"CREATE","object":{{"spec":{{"containers":[{}{{}}]}}}}}}}}"#,
        r#"{"resources":{"limits":{"a":"1"}}},"#.repeat(80_000)
    );
    let attack = |name, target, how| Attack { name, target, how };
    use Target::{Agent, Extender, PlainExtender};
    vec![
        attack("slow-bodies", Extender, slow("/mutate/divvy-scheduler", 4 << 20)),
        attack("slow-reviews", Extender, slow("/mutate/divvy-scheduler", 3 << 20)),
        attack(
            "tiny-chunks",
            Extender,
            How::Hold {
                connections: 32,
                text: chunks,
            },
        ),
        attack(
            "large-reviews",
            Extender,
            How::Repeat {
                connections: 16,
                text: post("/mutate/divvy-scheduler", review.len(), review.as_bytes()),
            },
        ),
        attack("half-requests", Extender, half(2_000)),
        attack("large-headers", Extender, headers()),
        attack("silent-100", Extender, How::Silent { each_second: 100 }),
        attack("silent-350", Extender, How::Silent { each_second: 350 }),
        attack(
            "plain-slow-bodies",
            PlainExtender,
            slow("/gpushare-scheduler/filter", 4 << 20),
        ),
        attack("plain-half-requests", PlainExtender, half(2_000)),
        attack("agent-large-headers", Agent, headers()),
        attack("agent-half-requests", Agent, half(2_000)),
    ]
}

/// A program under attack.
struct Running {
    program: ChildProgram,
    address: SocketAddr,
    tls: Option<TlsConnector>,
    _api: (ApiServer, divvy_testbed::api::Listening),
    _directory: tempfile::TempDir,
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

async fn tcp(from: [u8; 4], to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((from, 0).into())?;
    socket.connect(to).await
}

async fn connect(from: [u8; 4], to: SocketAddr, tls: Option<&TlsConnector>) -> std::io::Result<Box<dyn Stream>> {
    let stream = tcp(from, to).await?;
    Ok(match tls {
        None => Box::new(stream),
        Some(tls) => {
            let name = ServerName::try_from(SERVER_NAME).map_err(std::io::Error::other)?;
            Box::new(tls.connect(name, stream).await?)
        }
    })
}

async fn healthz(to: SocketAddr, tls: Option<&TlsConnector>) -> std::io::Result<()> {
    let mut stream = connect(PROBE, to, tls).await?;
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    if text.starts_with("HTTP/1.1 200 ") {
        Ok(())
    } else {
        Err(std::io::Error::other(text))
    }
}

async fn start(target: Target, programs: &Path) -> Result<Running> {
    let api = ApiServer::new(ApiServerOptions::default());
    api.create("namespaces", json!({"metadata": {"name": "divvy-system"}}))
        .context("a namespace")?;
    api.create("secrets", json!({"metadata": {"name": "tls", "namespace": "divvy-system"}}))
        .context("a secret")?;
    api.create("nodes", json!({"metadata": {"name": "n1"}})).context("a node")?;
    let listening = api.listen(([127, 0, 0, 1], 0).into()).await?;
    let directory = tempfile::tempdir()?;
    let path = |name: &str| directory.path().join(name).display().to_string();
    std::fs::write(directory.path().join("kubeconfig"), api.kubeconfig(listening.addr()))?;
    // The port is free now, and no other program of this machine is expected to take it.
    let address = TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
    let mut args: Vec<String> = ["--exit-with-stdin", "--kubeconfig", &path("kubeconfig")]
        .map(str::to_owned)
        .to_vec();
    let mut add = |more: &[&str]| args.extend(more.iter().map(|arg| (*arg).to_owned()));
    let program = match target {
        Target::Agent => {
            std::fs::create_dir_all(directory.path().join("kubelet/device-plugins"))?;
            add(&[
                "--node-name",
                "n1",
                "--metrics",
                &address.to_string(),
                "--probe",
                &format!("unix:{}", path("probe.sock")),
            ]);
            add(&[
                "--kubelet-dir",
                &path("kubelet"),
                "--cdi-dir",
                &path("cdi"),
                "--state-dir",
                &path("state"),
            ]);
            "divvy-agent"
        }
        Target::Extender | Target::PlainExtender => {
            add(&["--listen", &address.to_string()]);
            if target == Target::Extender {
                add(&["--tls-secret", "divvy-system/tls"]);
                let help = std::process::Command::new(programs.join("divvy"))
                    .args(["extender", "--help"])
                    .output()?;
                if String::from_utf8_lossy(&help.stdout).contains("--webhook") {
                    add(&["--webhook"]);
                }
            }
            args.insert(0, "extender".to_owned());
            "divvy"
        }
    };
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut program = ChildProgram::start(program, &programs.join(program), &args, &[], &directory.path().join("logs"))?;
    let limit = Instant::now() + Duration::from_secs(30);
    let mut tls = None;
    loop {
        if target == Target::Extender && tls.is_none() {
            tls = authority(&api)?;
        }
        if (target != Target::Extender || tls.is_some()) && healthz(address, tls.as_ref()).await.is_ok() {
            break;
        }
        ensure!(!program.ended()?, "{}", program.last_words());
        ensure!(Instant::now() < limit, "waited 30 s for /healthz: {}", program.last_words());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(Running {
        program,
        address,
        tls,
        _api: (api, listening),
        _directory: directory,
    })
}

/// Return a TLS client without a certificate that trusts the extender's CA. `None` if the CA does not exist yet.
fn authority(api: &ApiServer) -> Result<Option<TlsConnector>> {
    let secret: k8s_openapi::api::core::v1::Secret =
        serde_json::from_value(api.get("secrets", "divvy-system", "tls").context("the Secret")?)?;
    let Some(ca) = secret.data.unwrap_or_default().remove("ca.crt") else {
        return Ok(None);
    };
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&ca.0).context("ca.crt")?)?;
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Some(TlsConnector::from(Arc::new(config))))
}

/// Return the value of a line in `/proc/PID/status`, in KiB.
fn status(pid: u32, key: &str) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key))
        .with_context(|| format!("there is no {key}"))?;
    Ok(line.trim_start_matches(':').trim().trim_end_matches(" kB").parse()?)
}

/// The measurements of an attack.
struct Report {
    before_kib: u64,
    peak_kib: u64,
    probes: Vec<Duration>,
    failed: usize,
    opened: usize,
}

async fn besiege(attack: &Attack, programs: &Path) -> Result<Report> {
    let running = start(attack.target, programs).await?;
    let pid = running.program.pid().context("it runs")?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before_kib = status(pid, "VmRSS")?;
    let (address, tls) = (running.address, running.tls.clone());
    let stop = Arc::new(AtomicBool::new(false));
    // In a separate thread, so that the probe does not wait for the attackers.
    let probing = std::thread::spawn({
        let (stop, tls) = (stop.clone(), tls.clone());
        move || -> std::io::Result<(Vec<Duration>, usize)> {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let (mut probes, mut failed) = (Vec::new(), 0);
            while !stop.load(Ordering::Relaxed) {
                let began = Instant::now();
                let probe = async { tokio::time::timeout(Duration::from_secs(10), healthz(address, tls.as_ref())).await };
                failed += usize::from(!matches!(runtime.block_on(probe), Ok(Ok(()))));
                probes.push(began.elapsed());
                std::thread::sleep(BETWEEN_PROBES);
            }
            Ok((probes, failed))
        }
    });
    let opened = Arc::new(AtomicUsize::new(0));
    let mut attackers = tokio::task::JoinSet::new();
    match &attack.how {
        How::Hold { connections, text } | How::Repeat { connections, text } => {
            let again = matches!(attack.how, How::Repeat { .. });
            let text: Arc<[u8]> = text.clone().into();
            for _ in 0..*connections {
                let (tls, text, opened) = (tls.clone(), text.clone(), opened.clone());
                attackers.spawn(async move {
                    loop {
                        let held = async {
                            let mut stream = connect(ATTACKER, address, tls.as_ref()).await?;
                            opened.fetch_add(1, Ordering::Relaxed);
                            stream.write_all(&text).await?;
                            if again {
                                stream.read(&mut [0; 4096]).await.map(drop)
                            } else {
                                // Until the program under attack closes the connection.
                                stream.read_to_end(&mut Vec::new()).await.map(drop)
                            }
                        };
                        let held: std::io::Result<()> = held.await;
                        if !again || held.is_err() {
                            tokio::time::sleep(AGAIN).await;
                        }
                    }
                });
            }
        }
        How::Silent { each_second } => {
            let (pause, opened) = (Duration::from_secs(1) / *each_second, opened.clone());
            attackers.spawn(async move {
                let mut held = Vec::new();
                let mut ticks = tokio::time::interval(pause);
                loop {
                    ticks.tick().await;
                    if let Ok(stream) = tcp(ATTACKER, address).await {
                        opened.fetch_add(1, Ordering::Relaxed);
                        held.push(stream);
                    }
                }
            });
        }
    }
    tokio::time::sleep(HOLD).await;
    let peak_kib = status(pid, "VmHWM")?;
    stop.store(true, Ordering::Relaxed);
    attackers.abort_all();
    let (probes, failed) = probing.join().map_err(|_| anyhow::anyhow!("the probe panicked"))??;
    Ok(Report {
        before_kib,
        peak_kib,
        probes,
        failed,
        opened: opened.load(Ordering::Relaxed),
    })
}

fn main() -> Result<()> {
    let mut chosen: Vec<String> = divvy_bench::arguments().collect();
    let mut programs = None;
    if let Some(at) = chosen.iter().position(|arg| arg == "--programs") {
        ensure!(
            at + 1 < chosen.len(),
            "--programs needs a directory with divvy and divvy-agent"
        );
        programs = Some(PathBuf::from(chosen.remove(at + 1)));
        chosen.remove(at);
    }
    let programs = match programs {
        Some(programs) => programs,
        None => {
            let own = std::env::current_exe()?;
            let directory = own
                .parent()
                .and_then(Path::parent)
                .context("this program is not in a target directory of cargo")?;
            directory.to_owned()
        }
    };
    let attacks = attacks();
    let names: Vec<&str> = attacks.iter().map(|attack| attack.name).collect();
    if let Some(unknown) = chosen.iter().find(|name| !names.contains(&name.as_str())) {
        bail!("{unknown} is not an attack; there are {}", names.join(", "));
    }
    // Before the first thread, because the threads' sockets count.
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let limit = rustix::process::Rlimit {
        current: most,
        maximum: most,
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    println!("attack                 connections   RSS before     peak   half of the limit   /healthz worst   median   failed");
    let mut held = true;
    for attack in attacks
        .iter()
        .filter(|attack| chosen.is_empty() || chosen.iter().any(|name| name == attack.name))
    {
        let mut report = runtime.block_on(besiege(attack, &programs)).with_context(|| attack.name)?;
        report.probes.sort();
        let worst = report.probes.last().copied().unwrap_or_default();
        let median = report.probes.get(report.probes.len() / 2).copied().unwrap_or_default();
        let half_mib = attack.target.limit_mib() / 2;
        let holds = report.peak_kib < half_mib * 1024 && worst < BUDGET && report.failed == 0;
        held &= holds;
        println!(
            "{:<22} {:>11} {:>8.1} MiB {:>4.0} MiB {:>15} MiB {:>13.1} ms {:>5.1} ms {:>8}  {}",
            attack.name,
            report.opened,
            report.before_kib as f64 / 1024.0,
            report.peak_kib as f64 / 1024.0,
            half_mib,
            worst.as_secs_f64() * 1e3,
            median.as_secs_f64() * 1e3,
            format!("{} of {}", report.failed, report.probes.len()),
            if holds { "" } else { "NOT HELD" }
        );
    }
    ensure!(held, "a budget was not held");
    Ok(())
}
