//! Measures `divvy web`: the first page, a page later, and the memory that the program keeps.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use divvy_bench::ask::HttpConnection;

use crate::process::RunningProgram;
use crate::report::{BenchRow, CostBudget};

/// The time limit for the first page.
const PATIENCE: Duration = Duration::from_secs(300);
const FIRST: CostBudget = CostBudget {
    seconds: None,
    mib: Some(150.0),
};
/// The page's first paint may take 100 ms.
const LATER: CostBudget = CostBudget {
    seconds: Some(0.1),
    mib: None,
};

/// Run the command until its page has this text, and measure it.
pub(crate) fn measure(command: Command, text: &str) -> Vec<BenchRow> {
    let mut rows = Vec::new();
    if let Err(error) = measured(command, text, &mut rows) {
        rows.push(BenchRow::failed("web", format!("{error:#}")));
    }
    rows
}

fn measured(mut command: Command, wanted: &str, rows: &mut Vec<BenchRow>) -> anyhow::Result<()> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let began = Instant::now();
    let mut running = RunningProgram(command.spawn().context("could not run it")?);
    let mut line = String::new();
    BufReader::new(running.0.stdout.take().context("it has no output")?).read_line(&mut line)?;
    let (address, token) = parts(&line).with_context(|| format!("it printed no address but {line:?}"))?;
    let mut connection = HttpConnection::open(address)?.bearing(address, token);
    loop {
        let (status, text) = connection.get("/")?;
        if status == 200 && text.contains(wanted) {
            break;
        }
        ensure!(status == 200 || status == 503, "the page has status {status}");
        ensure!(began.elapsed() < PATIENCE, "it had no page after {} s", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(5));
    }
    let seconds = began.elapsed().as_secs_f64();
    let (now, peak) = running.memory()?;
    let note = format!("first page; peak until then, {now:.0} MiB now");
    rows.push(BenchRow::new("web", Some(seconds), Some(peak), FIRST).with_note(note));
    let began = Instant::now();
    let (status, text) = connection.get("/")?;
    ensure!(status == 200, "the page has status {status}");
    let note = format!("{} KB, not compressed", text.len() / 1000);
    rows.push(BenchRow::new("web: a page", Some(began.elapsed().as_secs_f64()), None, LATER).with_note(note));
    Ok(())
}

/// Return the address and the token in what the program printed: `http://127.0.0.1:40001/?token=0123`.
fn parts(line: &str) -> Option<(&str, &str)> {
    line.trim().strip_prefix("http://")?.split_once("/?token=")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_port_and_a_token() {
        assert_eq!(
            parts("http://127.0.0.1:40001/?token=0123\n"),
            Some(("127.0.0.1:40001", "0123"))
        );
        assert_eq!(parts("error: no cluster"), None);
    }
}
