//! A probe that runs as a child process.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::{Child as Process, ChildStdin, Command};
use tokio::time::timeout;

use super::Spawn;
use crate::probe::EXIT_HUNG;
use crate::{Code, Error, Failure};

/// How long a killed process may take to end. A process that hangs in the kernel's driver code never ends.
const KILL_LIMIT: Duration = Duration::from_secs(1);

/// A running probe. Dropping it kills the process and removes its socket. If the agent itself is killed, the probe's standard input closes
/// and the probe ends.
#[derive(Debug)]
pub(super) struct Child {
    process: Process,
    socket: Socket,
    /// Kept open because the probe ends when it closes. (`Process::wait` would close it.)
    _stdin: Option<ChildStdin>,
}

/// The path of the socket, which a killed probe leaves behind.
#[derive(Debug)]
struct Socket(PathBuf);

impl Drop for Socket {
    fn drop(&mut self) {
        match std::fs::remove_file(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove {}: {error}", self.0.display());
            }
            _ => {}
        }
    }
}

impl Child {
    pub(super) async fn start(spawn: &Spawn) -> Result<Child, Error> {
        let make = DirBuilder::new().recursive(true).mode(0o700).create(&spawn.dir);
        make.map_err(|source| Error::io("cannot create the directory", &spawn.dir, source))?;
        let socket = spawn.dir.join("probe.sock");
        let mut listen = std::ffi::OsString::from("unix:");
        listen.push(&socket);
        let mut command = spawn.command();
        command.arg("--listen").arg(listen).arg("--exit-with-stdin");
        // The probe shares the agent's standard error, so its log lines appear in the agent's log.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).kill_on_drop(true);
        let mut process = command
            .spawn()
            .map_err(|source| Error::io("cannot start", &spawn.program, source))?;
        Ok(Child {
            _stdin: process.stdin.take(),
            process,
            socket: Socket(socket),
        })
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket.0
    }

    /// Wait until the process ends, and return how it ended.
    pub(super) async fn ended(&mut self) -> Failure {
        match self.process.wait().await {
            Ok(status) => describe(status),
            Err(error) => Failure::new(Code::ProbeUnreachable, format!("cannot wait for the probe to end: {error}")),
        }
    }

    /// Return how the process ended, if it has just ended, because this is usually the reason for a broken connection. Otherwise
    /// return `failure`.
    pub(super) async fn explain(&mut self, failure: Failure) -> Failure {
        match timeout(Duration::from_millis(100), self.process.wait()).await {
            Ok(Ok(status)) => describe(status),
            _ => failure,
        }
    }

    /// Kill the process. The socket is removed even if the process does not end.
    pub(super) async fn kill(mut self) {
        if let Err(error) = self.process.start_kill() {
            tracing::debug!("cannot kill the probe: {error}");
        }
        if timeout(KILL_LIMIT, self.process.wait()).await.is_err() {
            tracing::warn!("the probe was killed but does not end; it hangs in the driver's kernel module");
        }
    }
}

impl Spawn {
    /// Return the command with the arguments that a listening probe and a probe for a single snapshot share.
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        for (flag, value) in [
            ("--nvml-library", &self.nvml_library),
            ("--driver-root", &self.driver_root),
            ("--sys-root", &self.sys_root),
        ] {
            if let Some(value) = value {
                command.arg(flag).arg(value);
            }
        }
        if let Some(watchdog) = self.watchdog {
            command.arg("--watchdog").arg(watchdog.as_secs_f64().to_string());
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }
}

fn describe(status: ExitStatus) -> Failure {
    if status.code() == Some(EXIT_HUNG) {
        let text = "a driver call hung and the probe ended itself (exit status 70); see the probe's log for the call";
        return Failure::new(Code::Timeout, text);
    }
    let text = format!("the probe ended ({status}); see its log for the reason");
    Failure::new(Code::ProbeUnreachable, text)
}
