//! The history in a file of `divvy audit record`, as the page shows it.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use divvy_audit::{Audit, Level, Limits};
use divvy_model::MiB;
use divvy_page::{Recorded, RecordedPoint};
use tokio::sync::watch;

use crate::audit::{read, text};

/// The most points that are kept; then every second one is dropped.
const POINTS: usize = 480;
/// The shortest time between two points, in milliseconds.
const APART_MS: i64 = 1000;
/// The most findings that are shown.
const FINDINGS: usize = 100;
/// How often to look whether the file has grown, and the shortest pause after reading it, as a multiple of the time that this took.
const LOOK: Duration = Duration::from_secs(10);
const REST: u32 = 20;

/// A file, and what was read from it.
pub(super) struct Followed {
    file: PathBuf,
    recorded: Recorded,
    state: Option<State>,
}

/// What changes when something is written to the file.
type State = (u64, SystemTime);

impl Followed {
    /// Read the file.
    ///
    /// # Errors
    /// It does not exist, or is not a recorded history.
    pub(super) async fn read(file: PathBuf) -> anyhow::Result<Followed> {
        let (state, recorded) = read_again(&file).await?;
        Ok(Followed { file, recorded, state })
    }

    /// Report what was read, and read the file again when it has grown.
    pub(super) async fn follow(mut self, history: watch::Sender<Option<Recorded>>) {
        let mut pause = LOOK;
        loop {
            if history.send(Some(self.recorded.clone())).is_err() {
                return;
            }
            loop {
                tokio::time::sleep(pause).await;
                pause = LOOK;
                if state(&self.file) == self.state {
                    continue;
                }
                let begun = tokio::time::Instant::now();
                match read_again(&self.file).await {
                    Ok((state, recorded)) => {
                        pause = LOOK.max(begun.elapsed().saturating_mul(REST));
                        (self.state, self.recorded) = (state, recorded);
                        break;
                    }
                    Err(error) => tracing::warn!("the history on the page is what it was before: {error:#}"),
                }
            }
        }
    }
}

fn state(file: &Path) -> Option<State> {
    let metadata = std::fs::metadata(file).ok()?;
    Some((metadata.len(), metadata.modified().ok()?))
}

async fn read_again(file: &Path) -> anyhow::Result<(Option<State>, Recorded)> {
    let file = file.to_owned();
    // A long history takes seconds, in which pages are served.
    let read = tokio::task::spawn_blocking(move || Ok((state(&file), recorded(&file)?)));
    read.await.context("the history could not be read")?
}

/// Read a file, and audit what it says.
fn recorded(file: &Path) -> anyhow::Result<Recorded> {
    let mut audit = Audit::new(Limits {
        reports: false,
        remember_ms: 0,
        ..Limits::default()
    });
    let mut points = Points::default();
    read::replay(&[file.to_owned()], &[], &mut audit, |audit, progress| {
        if let Some(at_ms) = progress.at_ms {
            points.see(at_ms, || audit.totals());
        }
    })?;
    let last = audit.totals();
    points.end(last);
    let outcome = audit.finish(None);
    let bad = outcome.findings.iter().filter(|finding| finding.what.level() == Level::Fault);
    let findings = bad.take(FINDINGS).map(text::line).collect();
    Ok(Recorded {
        points: points.points,
        findings,
        file: file.display().to_string(),
    })
}

/// Takes points of a history of any length.
#[derive(Debug)]
struct Points {
    points: Vec<RecordedPoint>,
    apart_ms: i64,
    /// The time of the last fact, if there is no point for it.
    pending: Option<i64>,
}

impl Default for Points {
    fn default() -> Points {
        Points {
            points: Vec::new(),
            apart_ms: APART_MS,
            pending: None,
        }
    }
}

impl Points {
    /// Take a point if the last one is old enough. `totals` returns what was allocated after the facts of this time so far, and the memory of all GPUs.
    fn see(&mut self, at_ms: i64, totals: impl FnOnce() -> (MiB, MiB)) {
        let at_s = |ms: i64| u64::try_from(ms / 1000).unwrap_or(0);
        let is_new = self
            .points
            .last()
            .is_none_or(|last| at_s(at_ms.saturating_sub(self.apart_ms)) >= last.at);
        if !is_new {
            self.pending = Some(at_ms);
            return;
        }
        self.pending = None;
        self.push(at_s(at_ms), totals());
        if self.points.len() > POINTS {
            let mut position = 0;
            self.points.retain(|_| {
                position += 1;
                position % 2 == 1
            });
            self.apart_ms = self.apart_ms.saturating_mul(2);
        }
    }

    /// Take the last point.
    fn end(&mut self, totals: (MiB, MiB)) {
        if let Some(at_ms) = self.pending.take() {
            self.push(u64::try_from(at_ms / 1000).unwrap_or(0), totals);
        }
    }

    fn push(&mut self, at: u64, (allocated, total): (MiB, MiB)) {
        let bytes = |memory: MiB| memory.0.saturating_mul(1 << 20);
        self.points.push(RecordedPoint {
            at,
            allocated: bytes(allocated),
            total: bytes(total),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_history_has_few_points_with_its_first_and_its_last() {
        for facts in [1_i64, 3, POINTS as i64, 100_000] {
            let mut points = Points::default();
            for fact in 0..facts {
                points.see(fact * 700, || (MiB(fact as u64), MiB(1)));
            }
            points.end((MiB(facts as u64 - 1), MiB(1)));
            let all = points.points;
            assert!(
                all.len() <= POINTS + 1 && all.is_sorted_by_key(|point| point.at),
                "{}",
                all.len()
            );
            assert_eq!(all.first().expect("a point").at, 0);
            let last = all.last().expect("a point");
            assert_eq!(
                (last.at, last.allocated >> 20),
                ((facts - 1) as u64 * 7 / 10, (facts - 1) as u64)
            );
        }
    }
}
