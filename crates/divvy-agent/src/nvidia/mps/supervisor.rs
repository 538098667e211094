//! Keeps one daemon running.

use std::collections::BTreeMap;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use divvy_host::plain_line;
use divvy_nvidia_plugin::mps::{Daemon, DaemonReport, DaemonStep, Intervals, Supervision, excerpt};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::host::MpsHost;
use super::process::processes;
use crate::files;

/// The daemons that serve with their limits, as they were started, by resource.
pub(super) type Serving = watch::Sender<BTreeMap<String, Daemon>>;

/// The maximum number of bytes of a daemon's log that are read at a time.
const BYTES: u64 = 64 * 1024;
/// The size from which on a daemon's log is emptied. The daemon appends to it for as long as it runs, and on most nodes the log is in memory.
const FULL: u64 = 1 << 20;

/// Keep a daemon running until `stop` is cancelled, and end it then. `description` is the daemon as its next start must make it.
pub(super) async fn supervise(
    host: MpsHost,
    intervals: Intervals,
    description: watch::Receiver<Daemon>,
    serving: Serving,
    stop: CancellationToken,
) {
    let daemon = description.borrow().clone();
    let mut supervisor = Supervisor {
        daemon,
        host,
        description,
        serving,
        log: DaemonLog::default(),
        socket: None,
    };
    let mut life = Supervision::new(intervals);
    let mut next = DaemonStep::Start(0);
    loop {
        let report = tokio::select! {
            () = stop.cancelled() => break,
            report = supervisor.step(next) => report,
        };
        next = life.next(report);
        if let (DaemonReport::NotStarted, DaemonStep::Start(pause)) = (report, next) {
            info!("Failed to start one or more MPS deamons. Retrying in {}s...", pause / 1000);
        }
    }
    supervisor.withdrawn();
    supervisor.host.end(&supervisor.daemon).await;
    supervisor.log.pass_on(&supervisor.daemon);
    info!(resource = supervisor.daemon.resource, "Stopped MPS control daemon");
}

struct Supervisor {
    host: MpsHost,
    /// The daemon as it was started last.
    daemon: Daemon,
    description: watch::Receiver<Daemon>,
    serving: Serving,
    log: DaemonLog,
    /// The socket of the daemon that was started last.
    socket: Option<u64>,
}

/// Return the inode of the socket on which a daemon listens. Clients can write to its directory, so they can replace it.
fn socket(daemon: &Daemon) -> Option<u64> {
    let metadata = std::fs::symlink_metadata(daemon.pipe_directory().join("control"));
    metadata.ok().map(|metadata| metadata.ino())
}

impl Supervisor {
    async fn step(&mut self, next: DaemonStep) -> DaemonReport {
        match next {
            DaemonStep::Look(pause) => {
                sleep(Duration::from_millis(pause)).await;
                self.log.pass_on(&self.daemon);
                if self.runs() && socket(&self.daemon) == self.socket {
                    DaemonReport::Lives
                } else {
                    // The answer, or its absence, says whether clients still reach the daemon.
                    self.ask().await
                }
            }
            DaemonStep::Ask(pause) => {
                sleep(Duration::from_millis(pause)).await;
                self.log.pass_on(&self.daemon);
                self.ask().await
            }
            DaemonStep::Start(pause) => {
                if self.withdrawn() {
                    self.host.withdraw(&self.daemon).await;
                }
                sleep(Duration::from_millis(pause)).await;
                self.start().await
            }
        }
    }

    /// Report whether a process of the daemon exists.
    fn runs(&self) -> bool {
        processes(&self.daemon.pipe_directory()).is_ok_and(|found| !found.is_empty())
    }

    async fn ask(&mut self) -> DaemonReport {
        let Err(error) = self.host.answers(&self.daemon).await else {
            return DaemonReport::Lives;
        };
        let is_running = self.runs();
        warn!(
            resource = self.daemon.resource,
            is_running, "error checking MPS daemon health: {error}"
        );
        DaemonReport::Silent { is_running }
    }

    async fn start(&mut self) -> DaemonReport {
        self.daemon = self.description.borrow_and_update().clone();
        info!(resource = self.daemon.resource, "Starting MPS daemon");
        self.log = DaemonLog::default();
        match self.host.start(&self.daemon).await {
            Ok(()) => {
                info!(resource = self.daemon.resource, "MPS daemon is healthy");
                self.socket = socket(&self.daemon);
                self.serving.send_modify(|serving| {
                    serving.insert(self.daemon.resource.clone(), self.daemon.clone());
                });
                DaemonReport::Started
            }
            Err(error) => {
                self.log.pass_on(&self.daemon);
                error!(resource = self.daemon.resource, "Failed to start MPS daemon: {error}");
                DaemonReport::NotStarted
            }
        }
    }

    /// Note that the daemon does not serve. Report whether it did.
    fn withdrawn(&self) -> bool {
        self.serving
            .send_if_modified(|serving| serving.remove(&self.daemon.resource).is_some())
    }
}

/// How much of a daemon's log has been passed on.
#[derive(Debug, Default)]
struct DaemonLog {
    position: u64,
}

impl DaemonLog {
    /// Pass on what the daemon has written since the last time. The amount is limited, so that a daemon cannot fill this
    /// program's log.
    fn pass_on(&mut self, daemon: &Daemon) {
        let (lines, left_out) = match self.read(&daemon.log()) {
            Ok(text) => excerpt(&text),
            Err(error) => {
                if error.kind() != std::io::ErrorKind::NotFound {
                    warn!("cannot read {}: {error}", daemon.log().display());
                }
                return;
            }
        };
        for line in lines {
            info!(resource = daemon.resource, "control.log: {}", plain_line(line.chars()));
        }
        if left_out > 0 {
            info!(resource = daemon.resource, "control.log: {left_out} more lines are left out");
        }
    }

    fn read(&mut self, path: &Path) -> std::io::Result<String> {
        let mut file = files::open(path)?;
        let length = file.metadata()?.len();
        if length < self.position {
            // It is another file now.
            self.position = 0;
        }
        // What does not fit is skipped: the latest lines say why a daemon ended.
        self.position = self.position.max(length.saturating_sub(BYTES));
        file.seek(SeekFrom::Start(self.position))?;
        let mut bytes = Vec::new();
        file.take(BYTES).read_to_end(&mut bytes)?;
        if length > FULL {
            files::empty(path)?;
            self.position = 0;
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        }
        // A line that is not complete is read the next time.
        if let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') {
            bytes.truncate(end + 1);
            self.position = self.position.saturating_add(bytes.len() as u64);
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        }
        Ok(String::new())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// The log reveals nothing and costs little.
    #[test]
    fn a_link_a_fifo_or_a_huge_log_is_harmless() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("secret"), "secret\n").expect("written");
        symlink(path("secret"), path("link")).expect("linked");
        mknodat(CWD, path("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("made");
        for name in ["link", "fifo", "."] {
            assert!(DaemonLog::default().read(&path(name)).is_err(), "{name}");
        }
        let huge = std::fs::File::create(path("huge")).expect("created");
        huge.set_len(1 << 40).expect("a sparse file");
        assert!(DaemonLog::default().read(&path("huge")).expect("read").len() <= 64 * 1024);
        assert_eq!(
            huge.metadata().expect("metadata").len(),
            0,
            "it would grow for as long as the daemon runs"
        );
        assert_eq!(DaemonLog::default().read(&path("secret")).expect("read"), "secret\n");
    }
}
