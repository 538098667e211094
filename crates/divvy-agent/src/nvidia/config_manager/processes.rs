//! Signals to the processes that were started under a name.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use tracing::warn;

use crate::files;

/// Why no process got a signal.
#[derive(Debug, thiserror::Error)]
pub(super) enum SignalError {
    #[error("error finding pid: error getting list of all procs: {0}")]
    List(#[source] io::Error),
    #[error("'{name}' does not handle signal {signal} yet; it is sent a little later")]
    Unready { name: String, signal: i32 },
    #[error(
        "error finding pid: no process found: '{0}' does not run in this pod. The signal is sent as soon as it runs; if it runs in another container, set \
         shareProcessNamespace: true in the pod's spec"
    )]
    Absent(String),
    #[error("{}", .0.iter().map(SignalRefusal::to_string).collect::<Vec<_>>().join("; "))]
    Refused(Vec<SignalRefusal>),
}

/// Why one process did not get a signal.
#[derive(Debug, thiserror::Error)]
#[error("error sending signal: {error} (process {pid} '{name}')")]
pub(super) struct SignalRefusal {
    pid: Pid,
    name: String,
    error: Errno,
}

/// Send a signal to every process whose first argument is exactly `name`. Return their ids. A process that does not handle the signal has
/// probably just started, and the signal would end it. So nothing is sent until it is met again; `unready` has those that were met.
///
/// # Errors
/// Fails if no process got the signal.
pub(super) fn signal(name: &str, signal: Signal, unready: &mut HashSet<Pid>) -> Result<Vec<Pid>, SignalError> {
    let (mut told, mut refusals) = (Vec::new(), Vec::new());
    let listed = fs::read_dir("/proc").map_err(SignalError::List)?;
    let ids = listed.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let ids: Vec<Pid> = ids.filter_map(Pid::from_raw).filter(|pid| has_name(*pid, name)).collect();
    let met = std::mem::replace(unready, ids.iter().copied().filter(|pid| !handles(*pid, signal)).collect());
    if !unready.is_subset(&met) {
        return Err(SignalError::Unready {
            name: name.to_owned(),
            signal: signal.as_raw(),
        });
    }
    for pid in ids {
        match kill_process(pid, signal) {
            Ok(()) => told.push(pid),
            // It has ended in the meantime.
            Err(Errno::SRCH) => {}
            Err(error) => refusals.push(SignalRefusal {
                pid,
                name: name.to_owned(),
                error,
            }),
        }
    }
    match (told.is_empty(), refusals.is_empty()) {
        (true, true) => Err(SignalError::Absent(name.to_owned())),
        (true, false) => Err(SignalError::Refused(refusals)),
        (false, _) => {
            refusals.iter().for_each(|refusal| warn!("{refusal}"));
            Ok(told)
        }
    }
}

/// Report whether the first argument of a process is exactly `name`. A process that ends while it is looked at has no name.
fn has_name(pid: Pid, name: &str) -> bool {
    let mut start = Vec::new();
    let path = Path::new("/proc").join(pid.to_string()).join("cmdline");
    // One byte more shows whether the argument ends here: a NUL byte ends each argument.
    let read = File::open(path).and_then(|file| file.take(name.len() as u64 + 1).read_to_end(&mut start));
    read.is_ok() && start.strip_suffix(b"\0").unwrap_or(&start) == name.as_bytes()
}

/// Report whether a process catches or ignores a signal (proc(5): the masks `SigCgt` and `SigIgn`). One whose state cannot be read counts
/// as handling it.
fn handles(pid: Pid, signal: Signal) -> bool {
    let Ok(status) = files::read_kernel(&Path::new("/proc").join(pid.to_string()).join("status")) else {
        return true;
    };
    let has = |mask: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(mask));
        let bits = line.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
        bits.is_none_or(|bits| u32::try_from(signal.as_raw() - 1).is_ok_and(|bit| bits >> bit & 1 == 1))
    };
    has("SigCgt:") || has("SigIgn:")
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
    use std::process::{Command, Stdio};

    use super::*;

    /// An unready process is one that does not handle the signal.
    #[test]
    fn an_unready_process_gets_the_signal_at_the_second_meeting() {
        for (trap, tries) in [("", 2), ("trap 'exit 7' USR1;", 1)] {
            let name = format!("divvy-unready-{}-{tries}", std::process::id());
            let mut shell = Command::new("/bin/sh");
            let script = format!("{trap} echo ready; while read -r _; do :; done");
            shell
                .arg0(&name)
                .args(["-c", &script])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            let mut child = shell.spawn().expect("a shell");
            let mut line = String::new();
            let stdout = child.stdout.take().expect("a pipe");
            BufReader::new(stdout).read_line(&mut line).expect("it has started");
            let mut unready = HashSet::new();
            for attempt in 1..=tries {
                let told = signal(&name, Signal::USR1, &mut unready).map(|pids| pids.len());
                assert_eq!(told.ok(), (attempt == tries).then_some(1), "{trap} {attempt}");
            }
            let status = child.wait().expect("it ends");
            assert_eq!(
                (status.code(), status.signal().is_some()),
                match trap {
                    "" => (None, true),
                    _ => (Some(7), false),
                }
            );
        }
    }
}
