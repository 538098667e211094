//! `cargo xtask bench`: the time and memory that Divvy's programs need to read a large cluster.

#![forbid(unsafe_code)]

mod extender;
mod page;
mod process;
mod report;
mod screen;
mod tools;

use std::io::Read as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, bail, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use divvy_bench::api::RenderedApi;
use divvy_bench::cluster::{ClusterSize, Form, PODS_PER_GPU};

use report::BenchReport;

/// Measure the time and memory that Divvy's programs need to read a large cluster
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench", version)]
struct Cli {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    Cluster(BenchClusterArgs),
    /// Serve the API of a measurement
    #[command(hide = true)]
    Serve(BenchSize),
    /// Download these URLs and discard the bodies, for machines without curl
    #[command(hide = true)]
    Download {
        urls: Vec<String>,
    },
}

/// Generate and serve a large cluster, and measure the programs that read it: time, memory, budgets
///
/// A separate process serves the cluster on the loopback address, like an API server with a watch cache: each list is one response that ignores
/// limit, in chunks and uncompressed. A pod has about 3.9 KB of JSON, a node 8 KB. The yardstick is the time in which curl downloads both lists.
#[derive(Debug, Args)]
#[command(after_help = "\
Budgets:
  inspect, why, audit, doctor, simulate-k   peak memory 150 MiB, 3 times the time of curl
  simulate                                  peak memory 150 MiB
  top                                       first screen within 1.5 s; until then peak memory 60 MiB
  web                                       until the first page peak memory 150 MiB; a later page within 0.1 s
  extender                                  ready within 3 s; peak memory 200 MiB, before and after 1000 filter, 1000 prioritize and 500 bind calls

Examples:
  cargo xtask bench cluster                                   both forms, all programs; takes some minutes
  cargo xtask bench cluster --nodes 500 --pods 5000 --form gpushare --only inspect,why
  cargo xtask bench cluster --other 'go-inspect=./kubectl-inspect-gpushare' --only inspect,go-inspect
  cargo xtask bench cluster --only extender,old --other 'old=./old/divvy extender --listen 127.0.0.1:$PORT'
  cargo xtask bench cluster -o json | jq '.rows[] | select(.over != [])'

A command of --other runs in a shell, with KUBECONFIG for the generated cluster. A command that contains $PORT is an extender. It is started, called
at 127.0.0.1:$PORT/gpushare-scheduler/ as by kube-scheduler, and ended. It is ready when a filter call accepts a node. Any other command is a tool,
which must end with status 0.

Memory is the peak resident memory that the kernel counts for a process (VmHWM, ru_maxrss).

Exit status: 0 if all budgets are kept; 1 if a budget is exceeded or a program failed.")]
struct BenchClusterArgs {
    #[command(flatten)]
    size: Numbers,
    /// Annotations of nodes and pods [default: both forms, one after the other]
    #[arg(long, value_name = "FORM")]
    form: Option<Form>,
    /// Measure only these: extender, inspect, inspect-d, why, audit, doctor, simulate, simulate-k, top, web, or a name of --other
    ///
    /// simulate-k is simulate with --keep-bound: it reads the lists and leaves the bound pods where they are.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Measure another extender or tool as well
    #[arg(long, value_name = "NAME=COMMAND", value_parser = other)]
    other: Vec<Other>,
    /// The divvy to measure [default: the one next to this program]
    #[arg(long, value_name = "FILE", hide = true)]
    divvy: Option<PathBuf>,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: BenchOutput,
}

#[derive(Debug, Clone, Copy, Args)]
struct Numbers {
    /// Number of nodes
    #[arg(long, default_value_t = 5_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=50_000))]
    nodes: u32,
    /// Number of GPUs of each node
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    gpus: u32,
    /// Number of bound pods, each with a part of a GPU
    #[arg(long, default_value_t = 50_000, value_name = "N")]
    pods: u32,
}

#[derive(Debug, Clone, Copy, Args)]
struct BenchSize {
    #[command(flatten)]
    numbers: Numbers,
    #[arg(long)]
    waiting: u32,
    #[arg(long)]
    form: Form,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BenchOutput {
    /// One line per measurement
    Table,
    /// JSON
    Json,
}

/// A program given by --other.
#[derive(Debug, Clone)]
struct Other {
    name: String,
    command: String,
}

impl Other {
    fn is_extender(&self) -> bool {
        self.command.contains("$PORT") || self.command.contains("${PORT}")
    }
}

fn other(text: &str) -> anyhow::Result<Other> {
    match text.split_once('=') {
        Some((name, command)) if !name.is_empty() && !command.trim().is_empty() && !tools::OURS.contains(&name) => Ok(Other {
            name: name.to_owned(),
            command: command.to_owned(),
        }),
        _ => bail!("{text:?} is not NAME=COMMAND with a new name, such as go-inspect=./kubectl-inspect-gpushare"),
    }
}

impl BenchSize {
    fn cluster(self) -> ClusterSize {
        let Numbers { nodes, gpus, pods } = self.numbers;
        ClusterSize {
            nodes: nodes as usize,
            gpus: gpus as usize,
            pods: pods as usize,
            waiting: self.waiting as usize,
            form: self.form,
        }
    }
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        BenchCommand::Cluster(args) => cluster(&args),
        BenchCommand::Serve(size) => serve(size.cluster()),
        BenchCommand::Download { urls } => tools::download(&urls),
    };
    outcome.unwrap_or_else(|error| {
        say(&format!("error: {error:#}"));
        ExitCode::FAILURE
    })
}

/// Render and serve a cluster until standard input ends. Print the server's address and the sizes of the lists.
fn serve(cluster: ClusterSize) -> anyhow::Result<ExitCode> {
    let api = RenderedApi::new(cluster);
    let (nodes, pods) = api.sizes();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        print(&format!("{} {nodes} {pods}\n", listener.local_addr()?));
        // The parent process keeps standard input open as long as it lives.
        let over = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
        tokio::select! {
            served = api.serve(listener) => served?,
            _ = over => {}
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn cluster(args: &BenchClusterArgs) -> anyhow::Result<ExitCode> {
    let Numbers { nodes, gpus, pods } = args.size;
    let most = nodes as usize * gpus as usize * PODS_PER_GPU;
    ensure!(
        pods as usize <= most,
        "{pods} pods do not fit: on {nodes} nodes with {gpus} GPUs, and {PODS_PER_GPU} pods on each GPU, there is room for {most}; use more --nodes"
    );
    let known = || {
        tools::OURS
            .into_iter()
            .chain(args.other.iter().map(|other| other.name.as_str()))
    };
    for name in &args.only {
        ensure!(
            known().any(|known| known == name),
            "--only {name}: unknown measurement; choose from {}",
            known().collect::<Vec<_>>().join(", ")
        );
    }
    let divvy = match &args.divvy {
        Some(file) => file.clone(),
        None => std::env::current_exe()?.with_file_name("divvy"),
    };
    ensure!(
        divvy.exists(),
        "{} does not exist; run cargo xtask bench, which builds it, or: cargo build --release -p divvy",
        divvy.display()
    );
    let wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|only| only == name);
    let forms = args.form.map_or(vec![Form::Gpushare, Form::Divvy], |form| vec![form]);
    let mut report = BenchReport::new(nodes, gpus, pods);
    for form in forms {
        let others: Vec<&Other> = args.other.iter().filter(|other| wanted(&other.name)).collect();
        let extenders = others.iter().filter(|other| other.is_extender()).count() + usize::from(wanted("extender"));
        let size = BenchSize {
            numbers: args.size,
            // Each extender binds its own pods; `why` is run for a pod that is never bound.
            waiting: u32::try_from(extenders * extender::BINDS + 1)?,
            form,
        };
        say(&format!(
            "generating {nodes} nodes with {gpus} GPUs and {pods} pods, form {}",
            form.name()
        ));
        let bench =
            tools::ServedCluster::start(size, divvy.clone()).context("could not start the API server of the measurement")?;
        bench.run(&wanted, &others, &mut report)?;
    }
    match args.output {
        BenchOutput::Json => print(&format!("{}\n", serde_json::to_string_pretty(&report)?)),
        BenchOutput::Table => print(&report.table()?),
    }
    Ok(if report.is_good() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

#[expect(clippy::print_stdout, reason = "what was measured is data")]
fn print(text: &str) {
    print!("{text}");
}

/// Print progress on standard error.
#[expect(clippy::print_stderr, reason = "progress is for people")]
fn say(text: &str) {
    eprintln!("{text}");
}
