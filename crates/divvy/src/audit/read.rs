//! Reads watch logs, kubectl's output, and containers' reports, and merges them by time into the facts of an audit.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};

use crate::audit::history::{Document, Reader};
use anyhow::Context as _;
use divvy_audit::{Audit, Fact, GpuName, Moment, Report, What};
use serde::Deserialize;
use serde_json::de::IoRead;

/// The longest accepted line in bytes: ten times the largest object that an API server accepts.
const LONGEST: u64 = 16 << 20;

/// One line of `--reports`.
#[derive(Debug, Deserialize)]
struct ReportLine {
    at: f64,
    node: String,
    pod_uid: String,
    container: String,
    id: String,
    running: bool,
    gpus: Option<Vec<Gpu>>,
    #[serde(default)]
    env: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Gpu {
    Minor(u32),
    Uuid(String),
}

/// The progress of a replay.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// The number of bytes read so far.
    pub read: u64,
    /// The total size of the files in bytes; standard input counts as 0.
    pub of: u64,
    /// The number of facts read so far.
    pub facts: u64,
    /// The time of the last fact, in Unix milliseconds. `None` if it is not known.
    pub at_ms: Option<i64>,
}

/// The reports of several files, in chronological order.
struct Reports {
    files: Vec<ReportFile>,
}

struct ReportFile {
    name: String,
    lines: Lines,
    next: Option<(i64, Report)>,
}

/// The numbered lines of a file, with a limit on their length.
struct Lines {
    input: Box<dyn BufRead>,
    buffer: Vec<u8>,
    number: u64,
    bytes: u64,
}

/// The kind of the line in the buffer.
enum Line {
    /// A line with text. `whole` is false for a last line without a newline.
    Text {
        whole: bool,
    },
    TooLong,
    End,
}

impl Lines {
    fn new(input: Box<dyn BufRead>) -> Lines {
        Lines {
            input,
            buffer: Vec::new(),
            number: 0,
            bytes: 0,
        }
    }

    fn next(&mut self) -> io::Result<Line> {
        self.buffer.clear();
        let read = (&mut self.input).take(LONGEST).read_until(b'\n', &mut self.buffer)?;
        self.bytes += read as u64;
        self.number += 1;
        if read == 0 {
            return Ok(Line::End);
        }
        let whole = self.buffer.last() == Some(&b'\n');
        if !whole && read as u64 == LONGEST {
            // Skip the rest of the line.
            loop {
                self.buffer.clear();
                let read = (&mut self.input).take(LONGEST).read_until(b'\n', &mut self.buffer)?;
                self.bytes += read as u64;
                if read == 0 || self.buffer.last() == Some(&b'\n') {
                    return Ok(Line::TooLong);
                }
            }
        }
        Ok(Line::Text { whole })
    }
}

fn open(path: &Path) -> anyhow::Result<(Box<dyn BufRead>, u64)> {
    if path == Path::new("-") {
        return Ok((Box::new(BufReader::new(io::stdin())), 0));
    }
    let file = File::open(path).with_context(|| format!("{} cannot be read", path.display()))?;
    let length = file.metadata().map_or(0, |metadata| metadata.len());
    Ok((Box::new(BufReader::with_capacity(1 << 20, file)), length))
}

type Documents = serde_json::StreamDeserializer<'static, IoRead<Box<dyn BufRead>>, Document>;

/// An open input file of the format that its first line indicates.
struct Source {
    name: String,
    length: u64,
    content: Content,
}

enum Content {
    /// A watch log, and the time when its recording started.
    Log { started: String, input: Box<dyn BufRead> },
    /// kubectl's output: a sequence of JSON values, independent of line breaks. `nodes` says whether the first value is about
    /// nodes.
    Stream {
        nodes: bool,
        first: Option<Box<serde_json::Result<Document>>>,
        rest: Documents,
    },
}

impl Source {
    fn open(path: &Path) -> anyhow::Result<Source> {
        let name = path.display().to_string();
        let (mut rest, length) = open(path)?;
        let mut first = Vec::new();
        (&mut rest).take(LONGEST).read_until(b'\n', &mut first)?;
        let document = serde_json::from_slice::<Document>(&first).ok();
        let started = document.as_ref().and_then(Reader::started).map(str::to_owned);
        let input: Box<dyn BufRead> = Box::new(Cursor::new(first).chain(rest));
        let content = match started {
            Some(started) => Content::Log { started, input },
            None => {
                let mut rest = serde_json::Deserializer::from_reader(input).into_iter();
                let first = rest.next().map(Box::new);
                let nodes = matches!(first.as_deref(), Some(Ok(document)) if Reader::is_of_nodes(document));
                Content::Stream { nodes, first, rest }
            }
        };
        Ok(Source { name, length, content })
    }

    /// Return the sort key: watch logs by time, then kubectl's output, with nodes before pods.
    fn order(&self) -> (bool, &str, bool) {
        match &self.content {
            Content::Log { started, .. } => (false, started, false),
            Content::Stream { nodes, .. } => (true, "", !nodes),
        }
    }
}

/// Feed all files to the audit, in chronological order. `progress` is called after every 4096 facts.
pub fn replay(
    files: &[PathBuf],
    reports: &[PathBuf],
    audit: &mut Audit,
    mut progress: impl FnMut(&Audit, Progress),
) -> anyhow::Result<()> {
    let mut sources = files.iter().map(|path| Source::open(path)).collect::<Result<Vec<_>, _>>()?;
    sources.sort_by(|a, b| a.order().cmp(&b.order()));
    let mut merge = Merge {
        audit,
        reports: Reports::open(reports)?,
        progress: Progress {
            of: sources.iter().map(|source| source.length).sum(),
            ..Progress::default()
        },
        told: &mut progress,
        last_ms: None,
    };
    let mut reader = Reader::default();
    for source in sources {
        reader.next_file();
        let (name, begun) = (source.name, merge.progress.read);
        match source.content {
            Content::Log { input, .. } => merge.log(&mut reader, &name, input)?,
            Content::Stream { first, rest, .. } => merge
                .stream(&mut reader, &name, first.map(|first| *first).into_iter().chain(rest))
                .with_context(|| format!("{name} cannot be used"))?,
        }
        merge.progress.read = begun + source.length;
    }
    merge.reports_until(None)
}

struct Merge<'a> {
    audit: &'a mut Audit,
    reports: Reports,
    progress: Progress,
    told: &'a mut dyn FnMut(&Audit, Progress),
    last_ms: Option<i64>,
}

impl Merge<'_> {
    /// Read a watch log. A killed recorder may leave an incomplete line, and then only that line is lost.
    fn log(&mut self, reader: &mut Reader, name: &str, input: Box<dyn BufRead>) -> anyhow::Result<()> {
        let begun = self.progress.read;
        let mut lines = Lines::new(input);
        let mut facts = Vec::new();
        let mut torn: Option<(u64, String)> = None;
        let before = self.last_ms;
        loop {
            let whole = match lines.next().with_context(|| format!("{name} cannot be read"))? {
                Line::End => break,
                Line::TooLong => {
                    self.not_read(name, lines.number, "a line of more than 16 MiB");
                    continue;
                }
                Line::Text { whole } => whole,
            };
            self.progress.read = begun + lines.bytes;
            if lines.buffer.trim_ascii().is_empty() {
                continue;
            }
            match serde_json::from_slice::<Document>(&lines.buffer) {
                Ok(document) => {
                    let header = Reader::started(&document).is_some();
                    match torn.take() {
                        // The recorder was killed, and another one continued the file.
                        Some((number, _)) if header => {
                            tracing::info!(
                                "{name} line {number} is incomplete and left out: its recorder was killed while writing"
                            );
                        }
                        Some((number, error)) => self.not_read(name, number, &error),
                        None => {}
                    }
                    reader
                        .read(document, &mut facts)
                        .with_context(|| format!("{name} line {}", lines.number))?;
                    if let (Some(before), Some(now)) = (before, reader.at_ms()) {
                        anyhow::ensure!(
                            before <= now,
                            "{name} was recorded at the same time as another of these logs; audit each log separately"
                        );
                    }
                    self.take(&mut facts)?;
                }
                Err(_) if !whole => {
                    tracing::info!(
                        "the last line of {name} is incomplete and left out: its recorder was killed, or is still writing it"
                    );
                }
                Err(error) => {
                    if let Some((number, error)) = torn.replace((lines.number, error.to_string())) {
                        self.not_read(name, number, &error);
                    }
                }
            }
        }
        if let Some((number, error)) = torn {
            self.not_read(name, number, &error);
        }
        self.last_ms = reader.at_ms();
        Ok(())
    }

    fn not_read(&mut self, name: &str, number: u64, error: &str) {
        let text = format!("{name} line {number} cannot be read: {error}");
        self.audit.note(Moment::default(), What::NotRead { text });
    }

    fn stream(
        &mut self,
        reader: &mut Reader,
        name: &str,
        documents: impl Iterator<Item = serde_json::Result<Document>>,
    ) -> anyhow::Result<()> {
        let mut facts = Vec::new();
        let mut any = false;
        for document in documents {
            match document {
                Ok(document) => reader.read(document, &mut facts)?,
                // `kubectl get -w` was stopped in the middle of an object.
                Err(error) if any && error.is_eof() => {
                    tracing::info!("the end of {name} is incomplete and left out (line {})", error.line());
                    break;
                }
                Err(error) => return Err(error.into()),
            }
            any = true;
            self.take(&mut facts)?;
        }
        anyhow::ensure!(any, "it is empty");
        Ok(())
    }

    fn take(&mut self, facts: &mut Vec<(Moment, Result<Fact, What>)>) -> anyhow::Result<()> {
        for (at, fact) in facts.drain(..) {
            if let Some(now) = at.at_ms {
                self.reports_until(Some(now))?;
            }
            match fact {
                Ok(fact) => self.audit.take(at, fact),
                Err(what) => self.audit.note(at, what),
            }
            self.progress.facts += 1;
            self.progress.at_ms = at.at_ms.or(self.progress.at_ms);
            (self.told)(self.audit, self.progress);
        }
        Ok(())
    }

    fn reports_until(&mut self, now_ms: Option<i64>) -> anyhow::Result<()> {
        while let Some((at_ms, report)) = self.reports.next_until(now_ms)? {
            let at = Moment {
                revision: None,
                at_ms: Some(at_ms),
            };
            self.audit.take(at, Fact::Report(report));
        }
        Ok(())
    }
}

impl Reports {
    fn open(paths: &[PathBuf]) -> anyhow::Result<Reports> {
        let mut files = Vec::new();
        for path in paths {
            let (input, _) = open(path)?;
            let mut file = ReportFile {
                name: path.display().to_string(),
                lines: Lines::new(input),
                next: None,
            };
            file.advance()?;
            files.push(file);
        }
        Ok(Reports { files })
    }

    /// Return the next report that is not later than `now_ms`. With `None`, return the next report of any time.
    fn next_until(&mut self, now_ms: Option<i64>) -> anyhow::Result<Option<(i64, Report)>> {
        let due = |file: &&mut ReportFile| match (&file.next, now_ms) {
            (Some((at_ms, _)), Some(now)) => *at_ms <= now,
            (next, _) => next.is_some(),
        };
        let first = self
            .files
            .iter_mut()
            .filter(due)
            .min_by_key(|file| file.next.as_ref().map(|(at_ms, _)| *at_ms));
        match first {
            None => Ok(None),
            Some(file) => {
                let next = file.next.take();
                file.advance()?;
                Ok(next)
            }
        }
    }
}

impl ReportFile {
    fn advance(&mut self) -> anyhow::Result<()> {
        loop {
            let whole = match self.lines.next()? {
                Line::End => return Ok(()),
                Line::TooLong => anyhow::bail!("{} line {}: more than 16 MiB", self.name, self.lines.number),
                Line::Text { whole } => whole,
            };
            let text = self.lines.buffer.trim_ascii();
            if text.is_empty() {
                continue;
            }
            let line: ReportLine = match serde_json::from_slice(text) {
                Ok(line) => line,
                Err(_) if !whole => {
                    tracing::info!("the last line of {} is incomplete and left out", self.name);
                    return Ok(());
                }
                Err(error) => anyhow::bail!(
                    "{} line {} is not a report of a container: {error}; see divvy audit --help for the format",
                    self.name,
                    self.lines.number
                ),
            };
            let gpus = line.gpus.map(|gpus| {
                let name = |gpu| match gpu {
                    Gpu::Minor(minor) => GpuName::Minor(minor),
                    Gpu::Uuid(uuid) => GpuName::Uuid(uuid),
                };
                gpus.into_iter().map(name).collect()
            });
            let report = Report {
                node: line.node,
                pod_uid: line.pod_uid,
                container: line.container,
                id: line.id,
                running: line.running,
                gpus,
                env: line.env,
            };
            // The conversion saturates, so that a nonsensical time is very early or late, and does not panic.
            self.next = Some(((line.at * 1000.0).round() as i64, report));
            return Ok(());
        }
    }
}
