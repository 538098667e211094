//! `divvy doctor`: collects facts, runs the checks on them, and prints the report.

mod cluster;
mod engine;
mod http;
mod output;
mod programs;
mod repair;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use divvy_doctor::explain::{ExplainedLog, Knowledge};
use divvy_doctor::{Check, CheckFinding, CheckStatus, CheckStop, DoctorReport, Facts, ReportLine, ReportStyle, checks};
use divvy_host::Files;

use super::{say, smoke};
use crate::cli::doctor::{DoctorArgs, DoctorOutput};
use crate::printer;
use divvy_program::Unclear;

use programs::Places;

/// The number of bytes to keep of a log line; every known error text is near the beginning of its line.
const LONGEST_LINE: usize = 64 * 1024;

/// Run the checks, print the report, and return the exit status.
pub async fn run(mut args: DoctorArgs) -> anyhow::Result<u8> {
    if let Some(log) = &args.explain {
        return explain(log, args.output);
    }
    args.node |= !args.cluster;
    if !args.root.is_dir() {
        return Err(Unclear(format!(
            "--root {}: there is no such directory; give the directory with the copied machine's /proc, /sys, /dev, and /etc",
            args.root.display()
        ))
        .into());
    }
    if args.fix && args.root != Path::new("/") {
        return Err(Unclear(
            "--fix with --root: a copy of a machine cannot be repaired; run --fix on the machine itself".to_owned(),
        )
        .into());
    }
    if args.smoke && (args.root != Path::new("/") || args.output == DoctorOutput::Json) {
        return Err(Unclear(
            "--smoke with --root or -o json: a copy of a machine has no GPU, and the results of both commands are two texts; run divvy smoke on its own".to_owned(),
        )
        .into());
    }
    let checks: Vec<Check> = checks::ALL
        .iter()
        .filter(|check| args.only.is_empty() || args.only.contains(&check.id))
        .copied()
        .collect();
    let mut report = examine(&args, &checks).await?;
    if args.fix && repair::all(&report).await? {
        report = examine(&args, &checks).await?;
    }
    match args.output {
        DoctorOutput::Json => printer::json(&report)?,
        DoctorOutput::Text => {
            let style = ReportStyle {
                coloured: printer::coloured(),
                verbose: args.verbose,
                width: printer::terminal_width(),
            };
            printer::print(&report.print(style))?;
            if !args.smoke && args.only.is_empty() && args.root == Path::new("/") {
                printer::print(how_to_prove(&args))?;
            }
        }
    }
    if !args.smoke {
        return Ok(report.exit_status());
    }
    let mut status = report.exit_status();
    for is_cluster in [false, true] {
        if if is_cluster { args.cluster } else { args.node } {
            printer::print("\n")?;
            status = status.max(smoke::after_doctor(is_cluster.then_some(&args.connection)).await?);
        }
    }
    Ok(status)
}

/// Return the last line: which command runs a program on the GPUs. The checks only look at what such a program needs.
fn how_to_prove(args: &DoctorArgs) -> &'static str {
    match (args.node, args.cluster) {
        (true, true) => "To prove that the GPUs compute: divvy smoke --here, and for the cluster divvy smoke --all-nodes.\n",
        (false, true) => "To prove that the GPUs compute: divvy smoke --all-nodes.\n",
        _ => "To prove that a GPU computes: divvy smoke --here.\n",
    }
}

/// Explain the known error texts in a log. The log is read line by line, because it may be long. Return status 1 if the log
/// contains no known error text.
fn explain(path: &Path, output: DoctorOutput) -> anyhow::Result<u8> {
    let unreadable = |error: std::io::Error| {
        Unclear(format!(
            "--explain: {} cannot be read: {error}; give the path of a log, or no path to read standard input",
            path.display()
        ))
    };
    let mut reader: Box<dyn BufRead> = if path == Path::new("-") {
        Box::new(std::io::stdin().lock())
    } else {
        Box::new(BufReader::new(File::open(path).map_err(unreadable)?))
    };
    let knowledge = Knowledge::load()?;
    let mut log = ExplainedLog::new(&knowledge);
    while let Some(line) = next_line(&mut reader).map_err(unreadable)? {
        log.read(&String::from_utf8_lossy(&line));
    }
    match output {
        DoctorOutput::Json => printer::json(&log.found())?,
        DoctorOutput::Text => printer::print(&log.text_within(printer::terminal_width()))?,
    }
    Ok(u8::from(log.found().is_empty()))
}

/// Read the next line, and return its first [`LONGEST_LINE`] bytes. `None` at the end of the input.
fn next_line(reader: &mut impl BufRead) -> std::io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let mut is_there = false;
    loop {
        let part = match reader.fill_buf() {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            part => part?,
        };
        let end = part.iter().position(|byte| *byte == b'\n');
        let read = end.map_or(part.len(), |end| end + 1);
        let text = &part[..end.unwrap_or(part.len())];
        line.extend_from_slice(&text[..text.len().min(LONGEST_LINE - line.len())]);
        reader.consume(read);
        is_there |= read > 0;
        if read == 0 || end.is_some() {
            return Ok(is_there.then_some(line));
        }
    }
}

/// Collect the facts, then run the checks. Reading a file of a hung driver can block a thread indefinitely, and a thread cannot
/// be cancelled. This work therefore runs in threads that may still be blocked when the program exits.
async fn examine(args: &DoctorArgs, checks: &[Check]) -> anyhow::Result<DoctorReport> {
    let files: &'static Files = Box::leak(Box::new(Files::below(&args.root)));
    let limit = args.timeout;
    let begun = tokio::task::spawn_blocking(|| {
        let facts = Facts::of(files)?;
        let places = Places::of(&facts);
        Some((facts, places))
    });
    let (mut facts, places) = match tokio::time::timeout(limit, begun).await {
        Ok(Ok(Some(read))) => read,
        Ok(Ok(None)) => return Err(Unclear(format!("{} cannot be read", args.root.display())).into()),
        Ok(Err(error)) => return Err(error.into()),
        Err(_) => {
            return Err(Unclear(format!(
                "the files of {} could not be read within {} s: a driver, a process, or a disk hangs, and blocks every program that reads from it; use \
                 --timeout to wait longer, or reboot the machine",
                args.root.display(),
                limit.as_secs()
            ))
            .into());
        }
    };
    facts.node = args.node;
    if let Some(root) = &args.driver_root {
        facts.driver_root.clone_from(root);
    }
    programs::ask(args, &mut facts, places).await;
    let (wanted, not_run) = DoctorReport::plan(&facts, checks);
    let wanted: Vec<Check> = wanted.into_iter().copied().collect();
    let todo = wanted.clone();
    let lines = tokio::task::spawn_blocking(move || judged(facts, todo, limit)).await?;
    for trouble in files.troubles() {
        say(&format!("note: not checked: {trouble}"))?;
    }
    Ok(DoctorReport { checks: lines, not_run })
}

/// Run the checks in a separate thread, and wait for each no longer than `limit`.
fn judged(facts: Facts<'static>, checks: Vec<Check>, limit: Duration) -> Vec<ReportLine> {
    let (sender, receiver) = mpsc::channel();
    let todo = checks.clone();
    std::thread::spawn(move || {
        for check in &todo {
            if sender.send(ReportLine::of(check, &facts)).is_err() {
                return;
            }
        }
    });
    let mut lines: Vec<ReportLine> = Vec::new();
    for check in &checks {
        match receiver.recv_timeout(limit) {
            Ok(line) => lines.push(line),
            Err(_) => {
                lines.push(ReportLine::new(check, Err(hangs(limit))));
                break;
            }
        }
    }
    for check in &checks[lines.len()..] {
        let reason = "an earlier check did not end".to_owned();
        lines.push(ReportLine::new(check, Err(CheckStop::Blind(reason))));
    }
    lines
}

fn hangs(limit: Duration) -> CheckStop {
    CheckStop::Problem(CheckFinding {
        found: format!("reading the driver's files did not end within {} s", limit.as_secs()),
        why: "a hung driver blocks every program that reads its files, and containers do not start".to_owned(),
        fix: "dmesg | grep -e NVRM -e amdgpu -e i915 shows the driver's last messages; reboot the machine".to_owned(),
        repairs: Vec::new(),
    })
}

/// Return the failed checks that `--fix` can repair.
fn repairable(report: &DoctorReport) -> impl Iterator<Item = &ReportLine> {
    report
        .checks
        .iter()
        .filter(|line| line.status > CheckStatus::Skip && !line.repairs.is_empty())
}
