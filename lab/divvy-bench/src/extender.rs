//! Measures an extender under the calls that kube-scheduler makes.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use divvy_bench::ask::HttpConnection;
use divvy_bench::cluster::{self, ClusterSize};
use serde_json::{Value, json};

use crate::process::RunningProgram;
use crate::report::{BenchRow, CostBudget};
use crate::say;

/// The number of filter calls, and also of prioritize calls.
const CALLS: usize = 1_000;
/// The number of binds per extender.
pub(crate) const BINDS: usize = 500;
/// The time limit for an extender to become ready.
const PATIENCE: Duration = Duration::from_secs(300);

const READY: CostBudget = CostBudget {
    seconds: Some(3.0),
    mib: Some(200.0),
};
const MEMORY: CostBudget = CostBudget {
    seconds: None,
    mib: Some(200.0),
};

/// Return a port of the loopback address that is probably free: it was free a moment ago.
pub(crate) fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// An extender to measure.
#[derive(Debug)]
pub(crate) struct MeasuredExtender<'a> {
    pub(crate) name: &'a str,
    pub(crate) command: Command,
    pub(crate) port: u16,
    /// Whether Divvy's budgets apply.
    pub(crate) ours: bool,
    /// The position of the first waiting pod that this extender binds.
    pub(crate) first: usize,
}

impl MeasuredExtender<'_> {
    /// Start the extender, call it, and stop it. If something fails, the results that were measured before are kept.
    pub(crate) fn measure(mut self, cluster: &ClusterSize, directory: &Path, rows: &mut Vec<BenchRow>) {
        if let Err(error) = self.try_to_measure(cluster, directory, rows) {
            let said = std::fs::read_to_string(directory.join("stderr")).unwrap_or_default();
            let last = said.lines().last().map_or_else(String::new, |line| format!(" ({line})"));
            rows.push(BenchRow::failed(self.name, format!("{error:#}{last}")));
        }
    }

    fn try_to_measure(&mut self, cluster: &ClusterSize, directory: &Path, rows: &mut Vec<BenchRow>) -> anyhow::Result<()> {
        let name = self.name;
        let budget = |budget: CostBudget| if self.ours { budget } else { CostBudget::default() };
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port)).to_string();
        let began = Instant::now();
        self.command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(directory.join("stderr"))?);
        let mut running = RunningProgram(self.command.spawn().context("could not run it")?);
        let asks = cluster.asks();
        ensure!(
            asks.everywhere > 0,
            "the nodes of this cluster are full, so no pod can be placed; use fewer --pods"
        );
        let body =
            |names: &[String]| json!({"Pod": cluster::asking(asks.everywhere), "Nodes": null, "NodeNames": names}).to_string();
        let one = body(&[ClusterSize::name(0)]);
        let mut connection = loop {
            if let Ok(mut connection) = HttpConnection::open(&address)
                && let Ok((200, text)) = connection.post(FILTER, &one)
                && passed(&text) == 1
            {
                break connection;
            }
            if let Some(status) = running.0.try_wait()? {
                bail!("it ended before it was ready, with {status}");
            }
            ensure!(began.elapsed() < PATIENCE, "it was not ready after {} s", PATIENCE.as_secs());
            std::thread::sleep(Duration::from_millis(5));
        };
        let ready = began.elapsed().as_secs_f64();
        let (now, peak) = running.memory()?;
        rows.push(
            BenchRow::new(format!("{name}: start"), Some(ready), Some(peak), budget(READY))
                .with_note("peak until ready".to_owned()),
        );
        rows.push(BenchRow::new(format!("{name}: ready"), None, Some(now), budget(MEMORY)));

        let all = body(&cluster.shuffled_names());
        let times = times(CALLS, |_| {
            let (status, text) = connection.post(FILTER, &all)?;
            ensure!(
                status == 200 && passed(&text) == cluster.nodes,
                "filter: status {status}, {} nodes",
                passed(&text)
            );
            Ok(())
        })?;
        rows.push(calls(&format!("{name}: filter"), times));
        match connection.post(PRIORITIZE, &all)?.0 {
            404 => say(&format!("{name} has no prioritize")),
            _ => {
                let times = self::times(CALLS, |_| {
                    let (status, text) = connection.post(PRIORITIZE, &all)?;
                    let scores: Vec<Value> = serde_json::from_str(&text).unwrap_or_default();
                    ensure!(
                        status == 200 && scores.len() == cluster.nodes,
                        "prioritize: status {status}, {} scores",
                        scores.len()
                    );
                    Ok(())
                })?;
                rows.push(calls(&format!("{name}: prioritize"), times));
            }
        }
        let first = self.first;
        let times = self::times(BINDS, |i| {
            let (status, text) = connection.post(BIND, &cluster.bind(first + i))?;
            let error = serde_json::from_str::<Value>(&text).unwrap_or_default()["Error"].take();
            let error = error.as_str().unwrap_or_default().to_owned();
            ensure!(status == 200 && error.is_empty(), "bind: status {status}, {error}");
            Ok(())
        })?;
        rows.push(calls(&format!("{name}: bind"), times));
        let (now, peak) = running.memory()?;
        let note = format!("peak after {CALLS} + {CALLS} + {BINDS} calls; {now:.0} MiB now");
        rows.push(BenchRow::new(format!("{name}: end"), None, Some(peak), budget(MEMORY)).with_note(note));
        Ok(())
    }
}

const FILTER: &str = "/gpushare-scheduler/filter";
const PRIORITIZE: &str = "/gpushare-scheduler/prioritize";
const BIND: &str = "/gpushare-scheduler/bind";

/// Return the number of nodes that an extender accepts in a filter response.
fn passed(answer: &str) -> usize {
    let answer: Value = serde_json::from_str(answer).unwrap_or_default();
    let names = ["NodeNames", "nodenames"].map(|key| answer[key].as_array().map_or(0, Vec::len));
    names[0].max(names[1])
}

fn times(count: usize, mut call: impl FnMut(usize) -> anyhow::Result<()>) -> anyhow::Result<Vec<f64>> {
    let mut times = Vec::with_capacity(count);
    for i in 0..count {
        let began = Instant::now();
        call(i)?;
        times.push(began.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

fn calls(name: &str, times: Vec<f64>) -> BenchRow {
    let at = |hundredths: usize| times.get((times.len().saturating_sub(1)) * hundredths / 100).copied();
    let note = format!("median of {}; 99 %: {:.2} ms", times.len(), at(99).unwrap_or(0.0) * 1_000.0);
    BenchRow::new(name, at(50), None, CostBudget::default()).with_note(note)
}
