//! Starts the API server for a measurement. Measures the yardstick, which is a download of the lists with curl, and the tools.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, ensure};
use divvy_bench::cluster::{ClusterSize, NAMESPACE, pod_name};
use tempfile::TempDir;

use crate::extender::{self, MeasuredExtender};
use crate::process::{self, EndedProgram, RunningProgram};
use crate::report::{BenchReport, BenchRow, CostBudget, FormReport};
use crate::{BenchSize, Other, page, say, screen};

/// The names of Divvy's measurements.
pub(crate) const OURS: [&str; 10] = [
    "inspect",
    "inspect-d",
    "why",
    "audit",
    "doctor",
    "simulate-k",
    "simulate",
    "top",
    "web",
    "extender",
];
/// The number of downloads with curl. Their median is the yardstick for the tools' times.
const YARDSTICK: usize = 3;
const TOOL_MIB: f64 = 150.0;
const TIMES_CURL: f64 = 3.0;

/// A tool of Divvy.
struct Tool {
    name: &'static str,
    arguments: Vec<String>,
    /// The allowed exit statuses.
    statuses: &'static [i32],
    /// A text that the tool prints if it has read the cluster.
    proof: String,
    /// Whether the tool spends most of its time on computation after reading the lists. Such a tool has no time budget.
    computes: bool,
}

fn tools(cluster: &ClusterSize) -> Vec<Tool> {
    let words = |text: &str| text.split(' ').map(str::to_owned).collect();
    let last = ClusterSize::name(cluster.nodes.saturating_sub(1));
    let waits = pod_name(cluster.pods + cluster.waiting.saturating_sub(1));
    vec![
        Tool {
            name: "inspect",
            arguments: words("inspect gpushare"),
            statuses: &[0],
            proof: last.clone(),
            computes: false,
        },
        Tool {
            name: "inspect-d",
            arguments: words("inspect gpushare -d"),
            statuses: &[0],
            proof: pod_name(0),
            computes: false,
        },
        Tool {
            name: "why",
            arguments: words(&format!("why -n {NAMESPACE} {waits}")),
            statuses: &[0],
            proof: waits,
            computes: false,
        },
        Tool {
            name: "audit",
            arguments: words("audit"),
            statuses: &[0],
            proof: format!("{} allocations on ", grouped(cluster.pods)),
            computes: false,
        },
        // The doctor reports many things that this cluster lacks, such as the agents' DaemonSet.
        Tool {
            name: "doctor",
            arguments: words("doctor --cluster"),
            statuses: &[0, 1, 2],
            proof: format!("{} pods checked", cluster.pods + cluster.waiting),
            computes: false,
        },
        // The pods stay where they are and only the waiting ones are placed, so that the reading of the lists is measured.
        Tool {
            name: "simulate-k",
            arguments: words("simulate --cluster --keep-bound"),
            statuses: &[0],
            proof: format!(" of {}", cluster.nodes * cluster.gpus),
            computes: false,
        },
        Tool {
            name: "simulate",
            arguments: words("simulate --cluster"),
            statuses: &[0],
            proof: format!(" of {}", cluster.nodes * cluster.gpus),
            computes: true,
        },
    ]
}

/// Format a number as `divvy audit` does: `50,000`.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .filter_map(|group| std::str::from_utf8(group).ok())
        .collect();
    groups.join(",")
}

/// A cluster that is being served.
pub(crate) struct ServedCluster {
    cluster: ClusterSize,
    divvy: PathBuf,
    address: String,
    directory: TempDir,
    part: FormReport,
    // The server ends when this is dropped.
    _server: RunningProgram,
}

impl ServedCluster {
    pub(crate) fn start(size: BenchSize, divvy: PathBuf) -> anyhow::Result<ServedCluster> {
        let numbers = size.numbers;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("serve");
        for (flag, value) in [
            ("--nodes", numbers.nodes),
            ("--gpus", numbers.gpus),
            ("--pods", numbers.pods),
            ("--waiting", size.waiting),
        ] {
            command.arg(flag).arg(value.to_string());
        }
        command
            .args(["--form", size.form.name()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut server = RunningProgram(command.spawn()?);
        let mut line = String::new();
        BufReader::new(server.0.stdout.take().context("it has no output")?).read_line(&mut line)?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let [address, nodes, pods] = words.as_slice() else {
            anyhow::bail!("it ended before it served anything");
        };
        let directory = tempfile::tempdir()?;
        std::fs::write(directory.path().join("kubeconfig"), kubeconfig(address))?;
        Ok(ServedCluster {
            cluster: size.cluster(),
            divvy,
            address: (*address).to_owned(),
            directory,
            part: FormReport {
                form: size.form,
                nodes_bytes: nodes.parse()?,
                pods_bytes: pods.parse()?,
                rows: Vec::new(),
            },
            _server: server,
        })
    }

    /// Measure the programs, one after the other.
    pub(crate) fn run(
        mut self,
        wanted: &dyn Fn(&str) -> bool,
        others: &[&Other],
        report: &mut BenchReport,
    ) -> anyhow::Result<()> {
        say("curl");
        let yardstick = self.yardstick()?;
        let budget = CostBudget {
            seconds: Some(yardstick * TIMES_CURL),
            mib: Some(TOOL_MIB),
        };
        for tool in tools(&self.cluster).into_iter().filter(|tool| wanted(tool.name)) {
            say(tool.name);
            let mut command = self.command(&self.divvy);
            let ended = process::run(command.args(&tool.arguments), self.directory.path());
            let budget = CostBudget {
                seconds: budget.seconds.filter(|_| !tool.computes),
                ..budget
            };
            let row = judged(tool.name, ended, tool.statuses, &tool.proof, budget);
            self.part.rows.push(if tool.computes {
                row.with_note("places every pod again".to_owned())
            } else {
                row
            });
        }
        if wanted("top") {
            say("top");
            let mut command = self.command(&self.divvy);
            command.arg("top");
            self.part
                .rows
                .push(screen::first("top", command, &["gpu-node-00000", "quit"]));
        }
        if wanted("web") {
            say("web");
            let mut command = self.command(&self.divvy);
            command.arg("web");
            self.part.rows.extend(page::measure(command, "gpu-node-00000"));
        }
        for other in others.iter().filter(|other| !other.is_extender()) {
            say(&other.name);
            let ended = process::run(&mut self.shell(&other.command), self.directory.path());
            self.part
                .rows
                .push(judged(&other.name, ended, &[0], "", CostBudget::default()));
        }
        let mut first = 0;
        if wanted("extender") {
            say("extender");
            let port = extender::free_port()?;
            let mut command = self.command(&self.divvy);
            command.args(["extender", "--listen", &format!("127.0.0.1:{port}")]);
            self.extender("extender", command, port, true, first);
            first += extender::BINDS;
        }
        for other in others.iter().filter(|other| other.is_extender()) {
            say(&other.name);
            let port = extender::free_port()?;
            let mut command = self.shell(&other.command);
            command.env("PORT", port.to_string());
            self.extender(&other.name, command, port, false, first);
            first += extender::BINDS;
        }
        report.forms.push(self.part);
        Ok(())
    }

    fn extender(&mut self, name: &str, command: Command, port: u16, ours: bool, first: usize) {
        let extender = MeasuredExtender {
            name,
            command,
            port,
            ours,
            first,
        };
        extender.measure(&self.cluster, self.directory.path(), &mut self.part.rows);
    }

    /// Measure the time that the download of both lists takes.
    fn yardstick(&mut self) -> anyhow::Result<f64> {
        let urls = ["nodes", "pods"].map(|plural| format!("http://{}/api/v1/{plural}", self.address));
        let has_curl = Command::new("curl").arg("--version").stdout(Stdio::null()).status().is_ok();
        let mut runs = Vec::new();
        for _ in 0..YARDSTICK {
            let mut command = if has_curl {
                let mut command = Command::new("curl");
                command.args(["--silent", "--show-error", "--fail", "--noproxy", "*"]);
                for url in &urls {
                    command.args(["--output", "/dev/null", url]);
                }
                command
            } else {
                let mut command = Command::new(std::env::current_exe()?);
                command.arg("download").args(&urls);
                command
            };
            let ended = process::run(&mut command, self.directory.path())?;
            ensure!(ended.status.success(), "could not download the lists: {}", ended.last_words());
            runs.push(ended);
        }
        runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let run = &runs[YARDSTICK / 2];
        let name = if has_curl { "curl" } else { "download" };
        let note = format!("downloads both lists; median of {YARDSTICK}");
        self.part
            .rows
            .push(BenchRow::new(name, Some(run.seconds), Some(run.mib), CostBudget::default()).with_note(note));
        Ok(run.seconds)
    }

    /// Return a command that uses this cluster, and gets none of the caller's environment variables that could affect it.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("DIVVY_") {
                command.env_remove(name);
            }
        }
        command
            .env("KUBECONFIG", self.directory.path().join("kubeconfig"))
            .env("NO_PROXY", "127.0.0.1");
        command
    }

    fn shell(&self, text: &str) -> Command {
        let mut command = self.command(Path::new("sh"));
        command.args(["-c", text]);
        command
    }
}

fn kubeconfig(address: &str) -> String {
    format!(
        "apiVersion: v1
kind: Config
clusters:
- name: bench
  cluster: {{server: 'http://{address}'}}
users:
- name: bench
  user: {{}}
contexts:
- name: bench
  context: {{cluster: bench, user: bench}}
current-context: bench
"
    )
}

/// Judge a run. A tool that fails early looks fast. A run therefore counts only if its exit status is allowed and its output
/// shows that it has read the cluster.
fn judged(name: &str, ended: anyhow::Result<EndedProgram>, statuses: &[i32], proof: &str, budget: CostBudget) -> BenchRow {
    let ended = match ended {
        Ok(ended) => ended,
        Err(error) => return BenchRow::failed(name, format!("{error:#}")),
    };
    let row = BenchRow::new(name, Some(ended.seconds), Some(ended.mib), budget);
    if !ended.status.code().is_some_and(|code| statuses.contains(&code)) {
        let failed = Some(format!("{}: {}", ended.status, ended.last_words()));
        return BenchRow { failed, ..row };
    }
    if !proof.is_empty() && !ended.printed(proof) {
        let failed = Some(format!("its output does not contain {proof:?}: {}", ended.last_words()));
        return BenchRow { failed, ..row };
    }
    row
}

/// Download the URLs as curl would, for machines without curl.
pub(crate) fn download(urls: &[String]) -> anyhow::Result<ExitCode> {
    let mut buffer = vec![0; 256 << 10];
    for url in urls {
        let (address, path) = url
            .strip_prefix("http://")
            .and_then(|rest| rest.split_once('/'))
            .with_context(|| format!("{url} is not an http:// address"))?;
        let mut stream = TcpStream::connect(address)?;
        write!(stream, "GET /{path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
        let first = stream.read(&mut buffer)?;
        ensure!(
            buffer[..first].starts_with(b"HTTP/1.1 200 "),
            "the response for {url} does not have status 200"
        );
        while stream.read(&mut buffer)? > 0 {}
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_as_audit_groups_them() {
        for (number, expected) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1,000"),
            (50_000, "50,000"),
            (1_234_567, "1,234,567"),
        ] {
            assert_eq!(grouped(number), expected);
        }
    }
}
