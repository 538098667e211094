//! Signals to the processes that were started under a name.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use tracing::warn;

/// Send a signal to every process whose first argument is exactly `name`. Return their ids.
///
/// # Errors
/// Fails with a text if no process got the signal.
pub(super) fn signal(name: &str, signal: Signal) -> Result<Vec<i32>, String> {
    let (mut told, mut refusals) = (Vec::new(), Vec::new());
    let listed = fs::read_dir("/proc").map_err(|error| format!("error finding pid: error getting list of all procs: {error}"))?;
    let ids = listed.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    for pid in ids.filter_map(Pid::from_raw).filter(|pid| has_name(*pid, name)) {
        match kill_process(pid, signal) {
            Ok(()) => told.push(pid.as_raw_pid()),
            // It has ended in the meantime.
            Err(Errno::SRCH) => {}
            Err(error) => refusals.push(format!("error sending signal: {error} (process {pid} '{name}')")),
        }
    }
    match (told.is_empty(), refusals.is_empty()) {
        (true, true) => Err(format!(
            "error finding pid: no process found: '{name}' does not run in this pod. The signal is sent as soon as it runs; \
             if it runs in another container, set shareProcessNamespace: true in the pod's spec"
        )),
        (true, false) => Err(refusals.join("; ")),
        (false, _) => {
            refusals.iter().for_each(|text| warn!("{text}"));
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
