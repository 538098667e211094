//! A probe that runs as a child process.

use std::fs::{DirBuilder, File};
use std::io::{self, Read as _};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::{Child as Process, ChildStdin, Command};
use tokio::time::timeout;

use super::Spawn;
use crate::probe::EXIT_HUNG;
use crate::{Error, Failure, FailureCode};

/// How long a killed process may take to end. A process that hangs in the kernel's driver code never ends.
const KILL_LIMIT: Duration = Duration::from_secs(1);

/// How much of a log is read. A probe writes a few lines before it ends.
const LOG_BYTES: u64 = 1 << 20;

/// A running probe. Dropping it kills the process and removes its socket. If the agent itself is killed, the probe's standard input closes
/// and the probe ends.
#[derive(Debug)]
pub(super) struct ProbeChild {
    process: Process,
    socket: ProbeSocket,
    log: Option<PathBuf>,
    /// Kept open because the probe ends when it closes. (`Process::wait` would close it.)
    _stdin: Option<ChildStdin>,
}

/// The path of the socket, which a killed probe leaves behind.
#[derive(Debug)]
struct ProbeSocket(PathBuf);

impl Drop for ProbeSocket {
    fn drop(&mut self) {
        match std::fs::remove_file(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove {}: {error}", self.0.display());
            }
            _ => {}
        }
    }
}

impl ProbeChild {
    pub(super) async fn start(spawn: &Spawn) -> Result<ProbeChild, Error> {
        let make = DirBuilder::new().recursive(true).mode(0o700).create(&spawn.dir);
        make.map_err(|source| Error::io("cannot create the directory", &spawn.dir, source))?;
        let socket = spawn.dir.join("probe.sock");
        let mut listen = std::ffi::OsString::from("unix:");
        listen.push(&socket);
        let mut command = spawn.command();
        command.arg("--listen").arg(listen).arg("--exit-with-stdin");
        // Without a file, the probe shares the agent's standard error, so its log lines appear in the agent's log.
        if let Some(log) = &spawn.log {
            command.stderr(File::create(log).map_err(|source| Error::io("cannot create", log, source))?);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::null()).kill_on_drop(true);
        let mut process = command
            .spawn()
            .map_err(|source| Error::io("cannot start", &spawn.program, source))?;
        Ok(ProbeChild {
            _stdin: process.stdin.take(),
            process,
            socket: ProbeSocket(socket),
            log: spawn.log.clone(),
        })
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket.0
    }

    /// Wait until the process ends, and return how it ended.
    pub(super) async fn ended(&mut self) -> Failure {
        match self.process.wait().await {
            Ok(status) => describe(status, self.said()),
            Err(error) => Failure::new(
                FailureCode::ProbeUnreachable,
                format!("cannot wait for the probe to end: {error}"),
            ),
        }
    }

    /// Return how the process ended, if it has just ended, because this is usually the reason for a broken connection. Otherwise
    /// return `failure`.
    pub(super) async fn explain(&mut self, failure: Failure) -> Failure {
        match timeout(Duration::from_millis(100), self.process.wait()).await {
            Ok(Ok(status)) => describe(status, self.said()),
            _ => failure,
        }
    }

    /// Return the last line of the probe's log. `None` if the probe writes to this process's standard error.
    fn said(&self) -> Option<String> {
        let log = self.log.as_ref()?;
        let mut text = Vec::new();
        let read = File::open(log).and_then(|file| file.take(LOG_BYTES).read_to_end(&mut text));
        Some(match read {
            Ok(_) => last_line(&text).unwrap_or_else(|| "it wrote no error message".to_owned()),
            Err(error) => format!("{} cannot be read: {error}", log.display()),
        })
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
            ("--share-files", &self.share_files),
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

/// Return the last line that a probe wrote to its standard error, without the program's name. `None` if it wrote none.
pub(super) fn last_line(text: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(text);
    let line = text.lines().last()?.trim_start_matches("divvy-probe: ");
    Some(line.chars().take(2048).collect()).filter(|line: &String| !line.is_empty())
}

fn describe(status: ExitStatus, said: Option<String>) -> Failure {
    let (code, what, log) = match status.code() {
        Some(EXIT_HUNG) => (
            FailureCode::Timeout,
            "a driver call hung and the probe ended itself (exit status 70)".to_owned(),
            "see the probe's log for the call",
        ),
        _ => (
            FailureCode::ProbeUnreachable,
            format!("the probe ended ({status})"),
            "see its log for the reason",
        ),
    };
    Failure::new(
        code,
        match said {
            Some(said) => format!("{what}: {said}"),
            None => format!("{what}; {log}"),
        },
    )
}
