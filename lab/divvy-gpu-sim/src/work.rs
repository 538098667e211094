//! When each process kept a GPU busy.
//!
//! A GPU has one file, `<directory>/<UUID>.work`. A process has the same slot in it as in the ledger, and the ledger's lock makes its changes one step.
//! A slot has the latest [`SPANS`] spans of time in which work of the process ran, or will run: the GPU runs all work in the order of the launches, so
//! the time of each launch is known when it is made. A span is three numbers of 8 bytes: its start, its end, and the GPU time in it, in nanoseconds of the
//! monotonic clock. Work that begins within [`GRAIN`] after the start of a span is added to this span, because the launches of some seconds would
//! otherwise be too many.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The time within which launches share a span.
const GRAIN: u64 = 5_000_000;
/// The spans of one process: at least [`GRAIN`] times this number, 5 s.
const SPANS: usize = 1024;
/// Bytes of a span.
const SPAN: usize = 24;

/// A time in which work of one process ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Span {
    start: u64,
    end: u64,
    busy: u64,
}

impl Span {
    /// Return the GPU time between two moments. Within a span, the work counts as evenly distributed.
    fn between(&self, from: u64, to: u64) -> u64 {
        let length = self.end.saturating_sub(self.start);
        let part = self.end.min(to).saturating_sub(self.start.max(from));
        let busy = u128::from(self.busy.min(length)) * u128::from(part);
        busy.checked_div(u128::from(length)).map_or(0, |busy| busy as u64)
    }
}

/// The time in which one process kept a GPU busy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Work {
    /// The process.
    pub pid: u32,
    spans: Vec<Span>,
}

impl Work {
    /// Return for how long the GPU was busy with this process between two moments of the monotonic clock, all in nanoseconds.
    pub fn between(&self, from: u64, to: u64) -> u64 {
        self.spans.iter().map(|span| span.between(from, to)).sum()
    }
}

/// Return the path of the file that belongs to a ledger.
fn path_of(ledger: &Path) -> PathBuf {
    let mut path = ledger.as_os_str().to_owned();
    path.push(".work");
    path.into()
}

fn open(ledger: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path_of(ledger))
}

/// The place of a slot in the file.
fn at(slot: u64) -> u64 {
    slot * (SPANS * SPAN) as u64
}

/// Read the work of a slot's process.
pub(crate) fn read(ledger: &Path, slot: u64, pid: u32) -> io::Result<Work> {
    let mut bytes = vec![0; SPANS * SPAN];
    open(ledger)?.read_exact_at(&mut bytes, at(slot))?;
    let (numbers, _) = bytes.as_chunks::<8>();
    let numbers: Vec<u64> = numbers.iter().map(|number| u64::from_ne_bytes(*number)).collect();
    let (spans, _) = numbers.as_chunks::<3>();
    let spans = spans.iter().map(|&[start, end, busy]| Span { start, end, busy });
    Ok(Work {
        pid,
        spans: spans.filter(|span| span.busy > 0).collect(),
    })
}

/// Writes the work of this process.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    slot: u64,
    /// The number of the latest span, and the span.
    number: usize,
    span: Span,
}

impl Journal {
    /// Begin without work. An earlier owner of the slot may have left some.
    pub(crate) fn begin(ledger: &Path, slot: u64) -> io::Result<Journal> {
        let file = open(ledger)?;
        file.write_all_at(&vec![0; SPANS * SPAN], at(slot))?;
        Ok(Journal {
            file,
            slot,
            number: 0,
            span: Span::default(),
        })
    }

    /// Add work between two moments. It lies behind all earlier work.
    pub(crate) fn add(&mut self, start: u64, end: u64) -> io::Result<()> {
        let busy = end.saturating_sub(start);
        if start < self.span.start.saturating_add(GRAIN) && self.span.busy > 0 {
            (self.span.end, self.span.busy) = (end, self.span.busy.saturating_add(busy));
        } else {
            self.number = (self.number + 1) % SPANS;
            self.span = Span { start, end, busy };
        }
        let Span { start, end, busy } = self.span;
        let bytes = [start, end, busy].map(u64::to_ne_bytes).concat();
        self.file.write_all_at(&bytes, at(self.slot) + (self.number * SPAN) as u64)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn journal(directory: &tempfile::TempDir) -> (Journal, PathBuf) {
        let ledger = directory.path().join("GPU-1");
        (Journal::begin(&ledger, 3).expect("begun"), ledger)
    }

    #[test]
    fn long_work_counts_in_each_interval_it_covers() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut journal, ledger) = journal(&dir);
        const MS: u64 = 1_000_000;
        journal.add(50 * MS, 450 * MS).expect("written");
        journal.add(460 * MS, 3_600_000 * MS).expect("written");
        let work = read(&ledger, 3, 7).expect("read");
        let busy = (0..6).map(|n| work.between(n * 100 * MS, (n + 1) * 100 * MS) / MS);
        assert_eq!(busy.collect::<Vec<_>>(), [50, 100, 100, 100, 90, 100]);
        assert_eq!(work.between(3_599_000 * MS, 3_601_000 * MS), 1000 * MS, "in an hour");
        Journal::begin(&ledger, 3).expect("the next owner");
        assert_eq!(read(&ledger, 3, 8).expect("read").between(0, u64::MAX), 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// Each step is a pause and a launch.
        #[test]
        fn no_work_is_lost_or_moved_by_more_than_the_grain(
            steps in prop::collection::vec((0..20_000_000u64, prop_oneof![1..10_000u64, 1..50_000_000u64]), 1..300),
            cut in 0..1_000_000_000u64,
        ) {
            let dir = tempfile::tempdir().expect("a directory");
            let (mut journal, ledger) = journal(&dir);
            let mut now = 1000;
            let mut exact = Vec::new();
            for (pause, length) in steps {
                let start = now + pause;
                now = start + length;
                journal.add(start, now).expect("written");
                exact.push(Span { start, end: now, busy: length });
            }
            let work = read(&ledger, 3, 7).expect("read");
            let all: u64 = exact.iter().map(|span| span.busy).sum();
            let difference = |from, to| {
                let exact: u64 = exact.iter().map(|span| span.between(from, to)).sum();
                work.between(from, to).abs_diff(exact)
            };
            prop_assert_eq!(work.between(0, now), all);
            // A sum of rounded parts: one less for each span.
            prop_assert!(difference(0, cut) <= GRAIN + 300, "{}", difference(0, cut));
        }
    }
}
