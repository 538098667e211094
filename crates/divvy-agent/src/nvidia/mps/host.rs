//! Performs the steps of a daemon's start and end.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_nvidia_plugin::mps::{Action, Daemon, PROBE_COMMAND, QUIT_COMMAND, ReadBack};
use rustix::fs::XattrFlags;
use rustix::process::{Signal, kill_process};
use tracing::{debug, warn};

use super::tools::{Tools, process};
use crate::files;

/// The label of files that containers may use.
const LABEL: &[u8] = b"system_u:object_r:container_file_t:s0";
/// The time between two looks at a process that should end.
const LOOK: Duration = Duration::from_millis(50);
/// How long to wait for the end of a process that has not accepted the message, or that was killed.
const HOPELESS: Duration = Duration::from_secs(1);

/// The machine on which the daemons run.
#[derive(Debug, Clone)]
pub(super) struct Host {
    pub(super) tools: Tools,
    /// The root directory that contains `/sys`.
    pub(super) root: PathBuf,
}

impl Host {
    /// Start a daemon with its limits. If that fails, nothing of it remains in service.
    pub(super) async fn start(&self, daemon: &Daemon) -> Result<(), String> {
        for action in daemon.start() {
            if let Err(error) = self.perform(daemon, &action).await {
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

    /// End a daemon that is no longer wanted, and log the steps that fail. If GPUs could not be opened, the list of exclusive GPUs keeps
    /// them, and the next run of the program tries again.
    pub(super) async fn end(&self, daemon: &Daemon) {
        let mut closed = Vec::new();
        for action in daemon.end() {
            let action = daemon.unless_closed(action, &closed);
            let Err(error) = self.perform(daemon, &action).await else {
                continue;
            };
            warn!(resource = daemon.resource, "{error}");
            if let Action::SetComputeMode { gpu, .. } = action {
                closed.push(gpu);
            }
        }
    }

    async fn all(&self, daemon: &Daemon, actions: Vec<Action>) {
        for action in actions {
            if let Err(error) = self.perform(daemon, &action).await {
                warn!(resource = daemon.resource, "{error}");
            }
        }
    }

    /// Report whether the control daemon answers.
    pub(super) async fn answers(&self, daemon: &Daemon) -> Result<(), String> {
        self.tools.ask(daemon, PROBE_COMMAND).await.map(|_| ())
    }

    async fn perform(&self, daemon: &Daemon, action: &Action) -> Result<(), String> {
        match action {
            Action::SetComputeMode { gpu, mode } => self.tools.set_compute_mode(gpu, *mode).await,
            Action::MakeDirectory(path) => files::make_directory(path, 0o755).map_err(|error| error.to_string()),
            Action::LabelDirectory(path) => self
                .label(path)
                .map_err(|error| format!("error setting SELinux context: {}: {error}", path.display())),
            Action::RemoveDirectory(path) => match std::fs::remove_dir_all(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    Err(format!("cannot remove {}: {error}", path.display()))
                }
                _ => Ok(()),
            },
            Action::WriteFile(path, text) => with_name(path, |directory, name| {
                files::write_atomic(directory, name, text.as_bytes(), 0o644)
            }),
            Action::RemoveFile(path) => with_name(path, files::remove),
            Action::Start => self.tools.start_control(daemon).await,
            Action::Command(command) => {
                let answer = self.tools.ask(daemon, command).await;
                answer.map(|_| ()).map_err(|error| format!("{}: {error}", what(command)))
            }
            Action::Check { command, limit } => {
                let answer = self.tools.ask(daemon, command).await?;
                match limit.read_back(&answer) {
                    ReadBack::Same => Ok(()),
                    ReadBack::Different => Err(format!(
                        "{command} answers {:?}, and {limit:?} was set; without the limit, one container could take the whole GPU",
                        answer.trim()
                    )),
                    ReadBack::Unclear => {
                        warn!(
                            resource = daemon.resource,
                            "{command} answers {:?}, which cannot be compared with {limit:?}; the daemon has accepted the limit",
                            answer.trim()
                        );
                        Ok(())
                    }
                }
            }
            Action::Quit => self.quit(daemon).await,
        }
    }

    /// End the control daemon, if there is one. A daemon that does not end is killed.
    async fn quit(&self, daemon: &Daemon) -> Result<(), String> {
        let pipe = daemon.pipe_directory();
        // Without files of a daemon there, there is none.
        if files::names(&pipe).is_ok_and(|names| names.is_empty()) {
            return Ok(());
        }
        let answer = self.tools.ask(daemon, QUIT_COMMAND).await;
        let patience = if answer.is_ok() { self.tools.deadline } else { HOPELESS };
        self.ended(&pipe, patience).await;
        let Some(process_id) = process(&pipe) else {
            // What an ended daemon has left behind does not answer.
            if let Err(error) = answer {
                debug!(resource = daemon.resource, "error sending quit message: {error}");
            }
            return Ok(());
        };
        let reason = answer.err().unwrap_or_else(|| "it has accepted the message".to_owned());
        warn!(
            resource = daemon.resource,
            "the MPS control daemon does not quit ({reason}), so it is killed"
        );
        kill_process(process_id, Signal::KILL).map_err(|error| format!("cannot kill the MPS control daemon: {error}"))?;
        match self.ended(&pipe, HOPELESS).await {
            true => Ok(()),
            false => Err(format!(
                "error sending quit message: {reason}, and the killed process does not end"
            )),
        }
    }

    /// Wait until the control daemon's process has ended. Report whether it has.
    async fn ended(&self, pipe: &Path, patience: Duration) -> bool {
        let wait = async {
            while process(pipe).is_some() {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::time::timeout(patience, wait).await.is_ok()
    }

    /// Let containers use a directory and what is in it, on a node with SELinux.
    fn label(&self, directory: &Path) -> io::Result<()> {
        if !self.root.join("sys/fs/selinux").try_exists()? {
            return Ok(());
        }
        let set = |path: &Path| rustix::fs::lsetxattr(path, "security.selinux", LABEL, XattrFlags::empty());
        set(directory)?;
        for entry in std::fs::read_dir(directory)? {
            set(&entry?.path())?;
        }
        Ok(())
    }
}

/// Call a function of [`files`] with the directory and the name of a path.
fn with_name(path: &Path, act: impl Fn(&Path, &str) -> Result<(), files::FileError>) -> Result<(), String> {
    match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (Some(directory), Some(name)) => act(directory, name).map_err(|error| error.to_string()),
        _ => Err(format!("{} is not the path of a file", path.display())),
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
