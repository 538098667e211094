//! Measures the explainer in a large simulated cluster, and prints the results next to their budgets:
//!
//! ```text
//! cargo bench -p divvy-bench --bench explainer
//! cargo bench -p divvy-bench --bench explainer -- 1000 10000     nodes and pods
//! ```
//!
//! There are three processes, so that each is measured separately: this process sends questions, the second is the API server,
//! and the third is the explainer in the form in which it runs in production.

#![allow(clippy::print_stdout, reason = "a measurement is there to be printed")]

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use divvy_bench::api::RenderedApi;
use divvy_bench::cluster::{ClusterSize, Form, NAMESPACE, pod_name};
use divvy_explainer::service_proxy::{CERTIFICATE, CONFIG_MAP, CONFIG_MAP_NAMESPACE, SERVER_NAME};
use divvy_explainer::{ExplainerSettings, run_with};
use divvy_model::MemoryUnit;
use http::{Request, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::ConfigMap;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = divvy_bench::arguments().collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["serve", nodes, pods] => runtime.block_on(serve(nodes.parse()?, pods.parse()?)),
        ["explain", api] => runtime.block_on(explain(api)),
        [] => runtime.block_on(measure("5000", "50000")),
        [nodes, pods] => runtime.block_on(measure(nodes, pods)),
        other => Err(format!("{other:?} is not understood; give the numbers of nodes and pods, or nothing").into()),
    }
}

async fn serve(nodes: usize, pods: usize) -> Outcome<()> {
    let cluster = ClusterSize {
        nodes,
        gpus: 8,
        form: Form::Divvy,
        pods,
        waiting: 1,
    };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let api = RenderedApi::new(cluster);
    println!("{address}");
    Ok(api.serve(listener).await?)
}

async fn explain(api: &str) -> Outcome<()> {
    let client = kube::Client::try_from(kube::Config::new(api.parse()?))?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let settings = ExplainerSettings {
        memory_unit: MemoryUnit::GIB,
        configmap: (CONFIG_MAP_NAMESPACE.to_owned(), CONFIG_MAP.to_owned()),
    };
    Ok(run_with(listener, client, settings, CancellationToken::new()).await?)
}

/// Another process of this program. It prints its address when it starts.
struct Role {
    child: Child,
    address: String,
}

impl Role {
    fn start(arguments: &[&str]) -> Outcome<Role> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        let out = child.stdout.take().ok_or("no standard output")?;
        BufReader::new(out).read_line(&mut line)?;
        Ok(Role {
            child,
            address: line.trim().to_owned(),
        })
    }

    /// Return the current and the peak resident memory in MiB.
    fn memory(&self) -> Outcome<(u64, u64)> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let field = |name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib >> 10)
        };
        Ok((field("VmRSS:").ok_or("no VmRSS")?, field("VmHWM:").ok_or("no VmHWM")?))
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn connect(address: &str, certificate: &str) -> Outcome<SendRequest<Empty<Bytes>>> {
    let mut outer = TcpStream::connect(address).await?;
    outer
        .write_all(b"GET /why HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: divvy-why\r\n\r\n")
        .await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(outer.read_u8().await?);
    }
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(certificate.as_bytes())?)?;
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let inner = TlsConnector::from(Arc::new(config))
        .connect(ServerName::try_from(SERVER_NAME)?, outer)
        .await?;
    let (sender, connection) = http1::handshake(TokioIo::new(inner)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

async fn measure(nodes: &str, pods: &str) -> Outcome<()> {
    let api = Role::start(&["serve", nodes, pods])?;
    let url = format!("http://{}", api.address);
    let explainer = Role::start(&["explain", &url])?;
    let client = kube::Client::try_from(kube::Config::new(url.parse()?))?;
    let maps: kube::Api<ConfigMap> = kube::Api::namespaced(client, CONFIG_MAP_NAMESPACE);
    let certificate = loop {
        let map = maps.get_opt(CONFIG_MAP).await?;
        if let Some(text) = map.and_then(|map| map.data).and_then(|mut data| data.remove(CERTIFICATE)) {
            break text;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let pod = pod_name(pods.parse()?);
    println!("{nodes} nodes with 8 GPUs each, {pods} pods; the question is about {pod}\n");
    let (idle, _) = explainer.memory()?;
    println!("{:<48} {idle:>9} MiB", "resident memory before the first question");
    for (what, query) in [
        ("the first question: the cluster is read", ""),
        ("the next question", ""),
        ("the next question", ""),
        ("about all nodes", "?allNodes=true"),
    ] {
        let mut sender = connect(&explainer.address, &certificate).await?;
        let request = Request::get(format!("/why/{NAMESPACE}/{pod}{query}"))
            .header(header::HOST, SERVER_NAME)
            .header(header::AUTHORIZATION, "Bearer a-token")
            .body(Empty::new())?;
        let began = Instant::now();
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        let took = began.elapsed();
        if status != 200 {
            return Err(format!("{status}: {}", String::from_utf8_lossy(&body)).into());
        }
        println!("{what:<48} {:>9} ms    {} KiB back", took.as_millis(), body.len() >> 10);
    }
    let (_, most) = explainer.memory()?;
    println!(
        "{:<48} {most:>9} MiB   (limit of the chart: 512 MiB)",
        "the most resident memory"
    );
    tokio::time::sleep(Duration::from_secs(40)).await;
    let (later, _) = explainer.memory()?;
    println!("{:<48} {later:>9} MiB", "resident memory 40 s after the last question");
    Ok(())
}
