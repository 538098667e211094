//! Finds and ends the processes of the control daemons.
//!
//! The daemon's pid file cannot be trusted, because clients mount its directory and can write to it. A process is accepted only if it runs in
//! the mount namespace of this program. A client runs in another container, and cannot enter this namespace.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use super::tools::CONTROL;

/// The maximum number of bytes that are read of a process's command line and environment.
const BYTES: u64 = 64 * 1024;

/// A process of a control daemon.
#[derive(Debug)]
pub(super) struct DaemonProcess {
    id: Pid,
    /// It keeps standing for this process when another one gets its number. `None` on a kernel older than 5.3.
    handle: Option<OwnedFd>,
    pipe_directory: PathBuf,
}

impl DaemonProcess {
    /// Return the process with this number if it is a control daemon.
    fn of(id: Pid, pipe_directory: &Path) -> Option<DaemonProcess> {
        // First the handle, then the look: what is seen is then the handle's process.
        let handle = match pidfd_open(id, PidfdFlags::empty()) {
            Ok(handle) => Some(handle),
            Err(Errno::NOSYS) => None,
            Err(_) => return None,
        };
        is_control_daemon(id, pipe_directory).then(|| DaemonProcess {
            id,
            handle,
            pipe_directory: pipe_directory.to_owned(),
        })
    }

    /// Report whether the process has not ended.
    pub(super) fn exists(&self) -> bool {
        is_control_daemon(self.id, &self.pipe_directory)
    }

    /// Kill the process. It may have ended already.
    pub(super) fn kill(&self) -> io::Result<()> {
        let sent = match &self.handle {
            Some(handle) => pidfd_send_signal(handle, Signal::KILL),
            None => kill_process(self.id, Signal::KILL),
        };
        match sent {
            Err(Errno::SRCH) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Return the processes of this container that are control daemons with this directory for their connections. There is at most one,
/// except while one starts or answers a command.
pub(super) fn processes(pipe_directory: &Path) -> io::Result<Vec<DaemonProcess>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let number = entry?.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(id) = number.and_then(Pid::from_raw).filter(|id| has_its_name(*id)) {
            found.extend(DaemonProcess::of(id, pipe_directory));
        }
    }
    Ok(found)
}

/// Report whether a process runs in this container, under the control daemon's name, and was started with this directory. What cannot be
/// read is another user's process, or one that has ended: that has no command line.
fn is_control_daemon(id: Pid, pipe_directory: &Path) -> bool {
    let namespace = |id: &str| std::fs::read_link(format!("/proc/{id}/ns/mnt")).ok();
    let is_here = || namespace(&id.to_string()).is_some_and(|theirs| namespace("self") == Some(theirs));
    let variable = [b"CUDA_MPS_PIPE_DIRECTORY=", pipe_directory.as_os_str().as_bytes()].concat();
    let environment = || bytes(id, "environ").unwrap_or_default();
    has_its_name(id) && is_here() && environment().split(|byte| *byte == 0).any(|found| found == variable)
}

fn has_its_name(id: Pid) -> bool {
    let line = bytes(id, "cmdline").unwrap_or_default();
    line.windows(CONTROL.len()).any(|part| part == CONTROL.as_bytes())
}

fn bytes(id: Pid, name: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(format!("/proc/{id}/{name}"))?
        .take(BYTES)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}
