//! Performs the steps of a daemon's start and end.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use divvy_nvidia_plugin::mps::{Daemon, MpsAction, MpsLimit, PROBE_COMMAND, QUIT_COMMAND};
use futures::future::join_all;
use rustix::fs::XattrFlags;
use tracing::{debug, warn};

use super::process::{DaemonProcess, processes};
use super::tools::{KILL_LIMIT, ToolError, Tools};
use crate::files::{self, FileError};

/// The label of files that containers may use.
const LABEL: &[u8] = b"system_u:object_r:container_file_t:s0";
/// The time between two looks at a process that should end.
const LOOK: Duration = Duration::from_millis(50);
/// The part of the time for a daemon's end that the daemon gets to quit. The rest is for its GPUs.
const QUIT_SHARE: f64 = 0.4;
/// The maximum number of files of a daemon that are labelled. A daemon has a handful; clients could create more.
const MOST_FILES: usize = 100;
/// How long to wait for the end of a process that has not accepted the message, or that was killed.
const HOPELESS: Duration = Duration::from_secs(1);

/// Why a step of a daemon's start or end failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{path} is not the path of a file", path = .0.display())]
    NotAFile(PathBuf),
    #[error("error setting SELinux context: {path}: {1}", path = .0.display())]
    Label(PathBuf, #[source] io::Error),
    #[error("cannot remove {path}: {1}", path = .0.display())]
    Remove(PathBuf, #[source] io::Error),
    #[error("{what}: {error}")]
    Command {
        what: String,
        #[source]
        error: ToolError,
    },
    #[error("{limit} was set, and the control daemon answers {answer:?} to {command}; {}", why_not_set(.answer))]
    NotSet {
        limit: MpsLimit,
        answer: String,
        command: String,
    },
    #[error("cannot list the processes in /proc: {0}")]
    List(#[source] io::Error),
    #[error("cannot kill the MPS control daemon: {0}")]
    Kill(#[source] io::Error),
    #[error("error sending quit message: {0}, and the killed process does not end")]
    Hangs(String),
}

/// The machine on which the daemons run.
#[derive(Debug, Clone)]
pub(super) struct MpsHost {
    pub(super) tools: Tools,
    /// The root directory that contains `/sys`.
    pub(super) root: PathBuf,
    /// The time in which a daemon must end and its GPUs must be open again.
    pub(super) end_limit: Duration,
}

impl MpsHost {
    /// Start a daemon with its limits. If that fails, nothing of it remains in service.
    pub(super) async fn start(&self, daemon: &Daemon) -> Result<(), StepError> {
        for action in daemon.start() {
            if let Err(error) = self.perform(daemon, &action, self.usual(&action)).await {
                self.withdraw(daemon).await;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Withdraw a daemon from service, and log the steps that fail.
    pub(super) async fn withdraw(&self, daemon: &Daemon) {
        self.all(daemon, daemon.withdraw()).await;
    }

    /// End a daemon, and log the steps that fail. If a GPU could not be set to compute mode DEFAULT, it stays in the list of exclusive GPUs.
    /// The next run of the program then tries again.
    pub(super) async fn end(&self, daemon: &Daemon) {
        let start = Instant::now();
        let mut closed = Vec::new();
        // Each GPU may have to wake up, so all are opened at the same time.
        for steps in daemon
            .end()
            .chunk_by(|one, other| opens(one).is_some() && opens(other).is_some())
        {
            let rest = self.end_limit.saturating_sub(start.elapsed()).saturating_sub(KILL_LIMIT);
            let steps = steps.iter().map(async |step| {
                let action = daemon.unless_closed(step.clone(), &closed);
                let limit = match action {
                    MpsAction::Quit => rest.mul_f64(QUIT_SHARE),
                    _ => rest,
                };
                // However late it is, each step is tried.
                let limit = self.usual(&action).min(limit.max(HOPELESS));
                self.perform(daemon, &action, limit).await.map_err(|error| (action, error))
            });
            let failed: Vec<_> = join_all(steps).await.into_iter().filter_map(Result::err).collect();
            for (action, error) in failed {
                warn!(resource = daemon.resource, "{error}");
                closed.extend(opens(&action).map(str::to_owned));
            }
        }
    }

    async fn all(&self, daemon: &Daemon, actions: Vec<MpsAction>) {
        for action in actions {
            if let Err(error) = self.perform(daemon, &action, self.usual(&action)).await {
                warn!(resource = daemon.resource, "{error}");
            }
        }
    }

    /// Report whether the control daemon answers.
    pub(super) async fn answers(&self, daemon: &Daemon) -> Result<(), ToolError> {
        self.tools.ask(daemon, PROBE_COMMAND, self.tools.deadline).await.map(|_| ())
    }

    /// Return the time that a step usually gets. `nvidia-smi` gets more, because it may have to wake up GPUs.
    fn usual(&self, action: &MpsAction) -> Duration {
        let factor = match action {
            MpsAction::SetComputeMode { .. } => 3,
            MpsAction::Quit => 2,
            _ => 1,
        };
        self.tools.deadline.saturating_mul(factor)
    }

    /// Do a step; one that waits for a program gets this time.
    async fn perform(&self, daemon: &Daemon, action: &MpsAction, time: Duration) -> Result<(), StepError> {
        match action {
            MpsAction::SetComputeMode { gpu, mode } => Ok(self.tools.set_compute_mode(gpu, *mode, time).await?),
            MpsAction::MakeDirectory(path) => Ok(files::make_directory(path, 0o755)?),
            MpsAction::LabelDirectory(path) => self.label(path).map_err(|error| StepError::Label(path.clone(), error)),
            MpsAction::RemoveDirectory(path) => match std::fs::remove_dir_all(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StepError::Remove(path.clone(), error)),
                _ => Ok(()),
            },
            MpsAction::WriteFile(path, text) => with_name(path, |directory, name| {
                files::write_atomic(directory, name, text.as_bytes(), 0o644)
            }),
            MpsAction::RemoveFile(path) => with_name(path, files::remove),
            MpsAction::Start => Ok(self.tools.start_control(daemon).await?),
            MpsAction::Command(command) => {
                let answer = self.tools.ask(daemon, command, time).await;
                answer.map(drop).map_err(|error| StepError::Command {
                    what: what(command),
                    error,
                })
            }
            MpsAction::Check { command, limit } => {
                let answer = self.tools.ask(daemon, command, time).await?;
                if limit.is(&answer) {
                    Ok(())
                } else {
                    Err(StepError::NotSet {
                        limit: *limit,
                        answer: answer.trim().to_owned(),
                        command: command.clone(),
                    })
                }
            }
            MpsAction::Quit => self.quit(daemon, time).await,
        }
    }

    /// End the control daemon, if there is one. A daemon that does not end within `limit` is killed.
    async fn quit(&self, daemon: &Daemon, limit: Duration) -> Result<(), StepError> {
        let pipe = daemon.pipe_directory();
        let found = || processes(&pipe).map_err(StepError::List);
        // Without a process and files of a daemon there is none.
        if found()?.is_empty() && is_empty(&pipe) {
            return Ok(());
        }
        let answer = self.tools.ask(daemon, QUIT_COMMAND, limit / 2).await;
        let running = found()?;
        let patience = if answer.is_ok() { limit / 2 } else { HOPELESS };
        if ended(&running, patience).await {
            // What an ended daemon has left behind does not answer.
            if let Err(error) = answer {
                debug!(resource = daemon.resource, "error sending quit message: {error}");
            }
            return Ok(());
        }
        let reason = match answer {
            Ok(_) => "it has accepted the message".to_owned(),
            Err(error) => error.to_string(),
        };
        warn!(
            resource = daemon.resource,
            "the MPS control daemon does not quit ({reason}), so it is killed"
        );
        for process in &running {
            process.kill().map_err(StepError::Kill)?;
        }
        if ended(&running, HOPELESS).await {
            Ok(())
        } else {
            Err(StepError::Hangs(reason))
        }
    }

    /// Let containers use a directory and what is in it, on a node with SELinux.
    fn label(&self, directory: &Path) -> io::Result<()> {
        if !self.root.join("sys/fs/selinux").try_exists()? {
            return Ok(());
        }
        let set = |path: &Path| rustix::fs::lsetxattr(path, "security.selinux", LABEL, XattrFlags::empty());
        set(directory)?;
        for entry in std::fs::read_dir(directory)?.take(MOST_FILES) {
            set(&entry?.path())?;
        }
        Ok(())
    }
}

/// Return the GPU that a step opens to all processes.
fn opens(action: &MpsAction) -> Option<&str> {
    match action {
        MpsAction::SetComputeMode { gpu, .. } => Some(gpu),
        _ => None,
    }
}

/// Report whether nothing is in a directory, or whether it does not exist.
fn is_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory).map_or_else(
        |error| error.kind() == io::ErrorKind::NotFound,
        |mut names| names.next().is_none(),
    )
}

/// Wait until the processes have ended. Report whether they have.
async fn ended(running: &[DaemonProcess], patience: Duration) -> bool {
    let wait = async {
        while running.iter().any(DaemonProcess::exists) {
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::time::timeout(patience, wait).await.is_ok()
}

/// Call a function of [`files`] with the directory and the name of a path.
fn with_name(path: &Path, act: impl Fn(&Path, &str) -> Result<(), FileError>) -> Result<(), StepError> {
    match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (Some(directory), Some(name)) => Ok(act(directory, name)?),
        _ => Err(StepError::NotAFile(path.to_owned())),
    }
}

/// Say why a limit that the control daemon answers like this is a problem.
fn why_not_set(answer: &str) -> &'static str {
    if answer.starts_with("Unknown command") {
        // It came with CUDA 11.5 (NVIDIA's documentation of MPS, "set_default_device_pinned_mem_limit").
        "limits of memory need a driver from 495 on"
    } else {
        "without the limit, one container could take the whole GPU"
    }
}

/// Return what could not be done, in the words of NVIDIA's program.
fn what(command: &str) -> String {
    let mut words = command.split(' ');
    match (words.next(), words.next()) {
        (Some("set_default_device_pinned_mem_limit"), Some(gpu)) => {
            format!("error setting pinned memory limit for device {gpu}")
        }
        _ => "error setting active thread percentage".to_owned(),
    }
}
