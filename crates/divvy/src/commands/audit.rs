//! `divvy audit` and `divvy audit record`: audit a cluster or a recorded history, and record a history.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read as _, Seek as _, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::audit::history::{self, Recorder};
use anyhow::Context as _;
use divvy_audit::{Audit, Fact, Kind, Limits, Moment};
use divvy_kube::convert::ReadPod;
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_kube::watch::{self, Seen};
use divvy_kube::{client, convert, list};
use futures::StreamExt as _;
use jiff::Timestamp;
use kube::api::ObjectMeta;

use super::inspect::{choice, warn_left_out};
use super::progress::{Arrived, Bar};
use crate::audit::read::{self, Progress};
use crate::audit::text::{self, Scope, Verdict};
use crate::cli::{AuditArgs, AuditCommand, AuditOutput, AuditRecordArgs};
use crate::printer;
use divvy_program::{Unclear, until_stopped};

/// Run `divvy audit` or `divvy audit record`. Return whether the audit has no findings.
pub async fn run(args: AuditArgs) -> anyhow::Result<bool> {
    if let Some(AuditCommand::Record(args)) = args.command {
        return record(args).await.map(|()| true);
    }
    let live = args.files.is_empty();
    let mut audit = Audit::new(Limits {
        leak_ms: i64::try_from(args.leak_after.as_millis()).unwrap_or(i64::MAX),
        remember_ms: if args.reports.is_empty() {
            0
        } else {
            Limits::default().remember_ms
        },
        reports: !args.reports.is_empty(),
        unit: args.memory_unit,
        ..Limits::default()
    });
    let mut now_ms = None;
    if live {
        anyhow::ensure!(
            args.reports.is_empty(),
            "--reports needs a recorded history; also give the watch log of the same time: divvy audit FILE --reports FILE"
        );
        now_ms = Some(audit_once(&args, &mut audit).await?);
    } else {
        let bar = Bar::new();
        read::replay(&args.files, &args.reports, &mut audit, |_, progress| {
            if progress.facts.is_multiple_of(4096) {
                bar.show(|| how_far(progress));
            }
        })?;
        bar.clear();
    }
    let outcome = audit.finish(now_ms);
    let scope = Scope {
        live,
        reports: !args.reports.is_empty(),
    };
    match args.output {
        Some(AuditOutput::Json) => printer::json(&text::answer(&outcome))?,
        None if printer::coloured() => printer::print(&text::coloured(&text::text(&outcome, scope)))?,
        None => printer::print(&text::text(&outcome, scope))?,
    }
    match text::unclear(&outcome, scope) {
        Some(why) => Err(Unclear(why).into()),
        None => Ok(text::verdict(&outcome) == Verdict::Sound),
    }
}

fn how_far(progress: Progress) -> String {
    let percent = match progress.of {
        0 => String::new(),
        of => format!("{:3} %, ", (progress.read.saturating_mul(100) / of).min(100)),
    };
    format!("{percent}{} changes", progress.facts)
}

/// Pass the current state of the cluster to the audit. Return the time of that state in Unix milliseconds.
async fn audit_once(args: &AuditArgs, audit: &mut Audit) -> anyhow::Result<i64> {
    let connection = client::connect(&choice(&args.cluster)).await?;
    let client = &connection.client;
    let arrived = Arrived::default();
    let now_ms = || Some(Timestamp::now().as_millisecond());
    let begins = |kind| Fact::ListBegins { kind, why: None };
    let at_ms = now_ms();
    let when = Moment { revision: None, at_ms };
    audit.take(when, begins(Kind::Nodes));
    let node = |object: NodeObject| (revision(&object.metadata), convert::node(&object));
    let all = list::each_node(client, node, |(revision, node)| {
        arrived.node();
        let at_ms = now_ms();
        audit.take(Moment { revision, at_ms }, Fact::Node(node));
    });
    let left_out = arrived.shown(all).await?;
    warn_left_out("node", &left_out);
    let at_ms = now_ms();
    let when = Moment { revision: None, at_ms };
    audit.take(when, Fact::ListEnds { kind: Kind::Nodes });
    audit.take(when, begins(Kind::Pods));
    let pod = |object: PodObject| {
        let delete_by = object.metadata.deletion_timestamp.as_ref();
        let delete_by_ms = delete_by.map(|time| time.0.as_millisecond());
        Ok((revision(&object.metadata), delete_by_ms, ReadPod::from(object).into_parts()))
    };
    let all = list::each_pod(client, None, pod, |(revision, delete_by_ms, (pod, trouble))| {
        arrived.pod();
        if let Some(error) = trouble {
            tracing::warn!("the request of pod {} is left out: {error}", pod.key());
        }
        audit.take(Moment { revision, at_ms }, Fact::Pod { pod, delete_by_ms });
    });
    let left_out = arrived.shown(all).await?;
    warn_left_out("pod", &left_out);
    audit.take(when, Fact::ListEnds { kind: Kind::Pods });
    Ok(Timestamp::now().as_millisecond())
}

fn revision(meta: &ObjectMeta) -> Option<u64> {
    meta.resource_version.as_ref()?.parse().ok()
}

/// Record the changes in the cluster until SIGTERM, SIGINT, or the end of `--for`.
async fn record(args: AuditRecordArgs) -> anyhow::Result<()> {
    let connection = client::connect(&choice(&args.cluster)).await?;
    // Report missing permissions and wrong addresses now, before anything depends on the recording.
    list::can_list(&connection.client).await?;
    let stop = until_stopped(false)?;
    let started = Instant::now();
    let mut log = Log::open(&args.file)?;
    let now = Timestamp::now();
    log.write(&history::header(
        env!("CARGO_PKG_VERSION"),
        &connection.address,
        &now.to_string(),
    ))?;
    let to_stdout = args.file == Path::new("-");
    let place = if to_stdout {
        "standard output".to_owned()
    } else {
        args.file.display().to_string()
    };
    tracing::info!(
        "recording pods and nodes of {} to {place}; press Ctrl-C to stop",
        connection.address
    );

    let mut recorder = Recorder::default();
    let mut nodes = Box::pin(watch::nodes_as_they_come(connection.client.clone()));
    let mut pods = Box::pin(watch::pods_as_they_come(connection.client));
    // The audit needs the nodes to interpret the pods, so the first list of nodes precedes the pods.
    let mut nodes_listed = false;
    let limit = async {
        match args.r#for {
            Some(time) => tokio::time::sleep(time).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(limit);
    let mut flush = tokio::time::interval(Duration::from_millis(200));
    flush.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let line = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = &mut limit => break,
            _ = flush.tick() => {
                log.flush()?;
                continue;
            }
            seen = nodes.next() => {
                let seen = seen.context("the watch of nodes ended unexpectedly; the log is complete up to now")?;
                nodes_listed |= matches!(seen, Seen::ListEnds);
                recorder.node(Timestamp::now().as_millisecond(), seen)
            }
            seen = pods.next(), if nodes_listed => {
                let seen = seen.context("the watch of pods ended unexpectedly; the log is complete up to now")?;
                recorder.pod(Timestamp::now().as_millisecond(), seen)
            }
        };
        if let Some(line) = line {
            log.write(&line)?;
        }
    }
    log.write(&history::stopped(Timestamp::now().as_millisecond()))?;
    log.flush()?;
    tracing::info!(
        "recorded {} lines, {} KiB, in {}; next: {}",
        log.lines,
        log.bytes / 1024,
        divvy_audit::span(i64::try_from(started.elapsed().as_millis()).unwrap_or(i64::MAX)),
        match to_stdout {
            true => "divvy audit FILE with the recorded output (- reads standard input)".to_owned(),
            false => format!("divvy audit {place}"),
        }
    );
    Ok(())
}

/// The log file of a recorder, locked against other recorders.
struct Log {
    name: String,
    output: BufWriter<Box<dyn Write>>,
    lines: u64,
    bytes: u64,
}

impl Log {
    fn open(path: &Path) -> anyhow::Result<Log> {
        let name = path.display().to_string();
        let output: Box<dyn Write> = if path == Path::new("-") {
            Box::new(io::stdout())
        } else {
            Box::new(append(path).with_context(|| format!("{name} cannot be written"))?)
        };
        Ok(Log {
            name,
            output: BufWriter::with_capacity(1 << 16, output),
            lines: 0,
            bytes: 0,
        })
    }

    fn write(&mut self, line: &str) -> anyhow::Result<()> {
        self.lines += 1;
        self.bytes += line.len() as u64;
        let written = self.output.write_all(line.as_bytes());
        written.with_context(|| format!("the log {} could not be written", self.name))
    }

    fn flush(&mut self) -> anyhow::Result<()> {
        self.output
            .flush()
            .with_context(|| format!("the log {} could not be written", self.name))
    }
}

/// Open a new or existing log for appending. If a killed recorder left an incomplete last line, end that line, so that only it is lost.
fn append(path: &Path) -> anyhow::Result<File> {
    let mut file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| anyhow::anyhow!("another recorder writes to this file; choose another file"))?;
    // Only a regular file has a last byte to check, not a pipe or a device.
    if file.metadata()?.is_file() && file.seek(SeekFrom::End(0))? > 0 {
        let mut last = [0];
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            file.write_all(b"\n")?;
        }
    }
    Ok(file)
}
