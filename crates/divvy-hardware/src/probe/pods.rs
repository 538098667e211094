//! Maps processes to pods: the driver returns PIDs, and the processes' cgroups name the pods and the containers.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use divvy_model::cgroup::{CgroupOwner, owner_of_process};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::facts::PROGRAM_BYTES;
use crate::protocol::Kill;
use crate::{Failure, FailureCode, GpuProcesses, GpuSamples};

/// A limit for what is read of a command line.
const COMMAND_LINE_BYTES: u64 = 4096;

/// Fill in the pods, the containers, the PIDs that processes see themselves, and their programs. A process that has ended, or whose files cannot be read, gets none of
/// them.
pub(super) fn name(proc_root: &Path, gpus: &mut [GpuProcesses]) {
    for process in gpus.iter_mut().flat_map(|gpu| &mut gpu.processes) {
        let owner = owner(proc_root, process.pid);
        (process.pod, process.container) = owner.map_or((None, None), |owner| (Some(owner.pod), owner.container));
        process.own_pid = own_pid(proc_root, process.pid);
        process.program = program(proc_root, process.pid);
    }
}

/// The same for samples.
pub(super) fn name_sampled(proc_root: &Path, gpus: &mut [GpuSamples]) {
    for sample in gpus.iter_mut().flat_map(|gpu| &mut gpu.samples) {
        let owner = owner(proc_root, sample.pid);
        (sample.pod, sample.container) = owner.map_or((None, None), |owner| (Some(owner.pod), owner.container));
    }
}

/// End a process with SIGKILL, if it belongs to the pod.
///
/// The process's pod is read after the process was opened. So if the PID is given to another process meanwhile, that one is not ended.
///
/// # Errors
/// The process belongs to another pod or to none, or the kernel refuses the signal.
pub(super) fn kill(proc_root: &Path, wanted: &Kill) -> Result<(), Failure> {
    let Kill { pid, pod } = wanted;
    let failed = |error: Errno| {
        Failure::new(
            FailureCode::Unknown,
            format!("process {pid} of pod {pod} cannot be ended: {error}"),
        )
    };
    let id = i32::try_from(*pid).ok().and_then(Pid::from_raw);
    let id = id.ok_or_else(|| Failure::new(FailureCode::Protocol, format!("{pid} is not a PID")))?;
    let process = match pidfd_open(id, PidfdFlags::empty()) {
        Ok(process) => process,
        // It has ended already.
        Err(Errno::SRCH) => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if owner(proc_root, *pid).is_none_or(|owner| owner.pod != *pod) {
        return Err(Failure::new(
            FailureCode::Protocol,
            format!("process {pid} is not ended, because it does not belong to pod {pod}"),
        ));
    }
    match pidfd_send_signal(process, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

fn own_pid(proc_root: &Path, pid: u32) -> Option<u32> {
    let text = std::fs::read_to_string(proc_root.join(pid.to_string()).join("status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    // From the outermost namespace to the innermost.
    line.split_whitespace().next_back()?.parse().ok()
}

/// Return the first word of the process's command line, as text without control characters. Of a long word, the end tells more.
fn program(proc_root: &Path, pid: u32) -> Option<String> {
    let mut bytes = Vec::new();
    let file = File::open(proc_root.join(pid.to_string()).join("cmdline")).ok()?;
    file.take(COMMAND_LINE_BYTES).read_to_end(&mut bytes).ok()?;
    let word = bytes.split(|byte| *byte == 0).next().filter(|word| !word.is_empty())?;
    let text = String::from_utf8_lossy(word).replace(char::is_control, "?");
    let from = text.ceil_char_boundary(text.len().saturating_sub(PROGRAM_BYTES));
    Some(text[from..].to_owned())
}

fn owner(proc_root: &Path, pid: u32) -> Option<CgroupOwner> {
    let text = std::fs::read_to_string(proc_root.join(pid.to_string()).join("cgroup")).ok()?;
    owner_of_process(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The word may contain any bytes.
    #[test]
    fn a_program_is_the_end_of_the_first_word() {
        let root = tempfile::tempdir().expect("a directory");
        let dir = root.path().join("7");
        std::fs::create_dir(&dir).expect("created");
        let long = format!("/{}/python3", "\u{e4}".repeat(200));
        for (bytes, expected) in [
            (
                b"/usr/bin/python3\0train.py\0".as_slice(),
                Some("/usr/bin/python3".to_owned()),
            ),
            (b"a\n\x1b[31m\xff".as_slice(), Some("a??[31m\u{fffd}".to_owned())),
            (b"\0\0".as_slice(), None),
            (b"".as_slice(), None),
            (long.as_bytes(), Some(format!("{}/python3", "\u{e4}".repeat(124)))),
        ] {
            std::fs::write(dir.join("cmdline"), bytes).expect("written");
            assert_eq!(program(root.path(), 7), expected, "{bytes:?}");
        }
        assert_eq!(program(root.path(), 8), None, "no such process");
    }
}
