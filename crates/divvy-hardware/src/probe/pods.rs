//! Maps processes to pods: the driver returns PIDs, and the processes' cgroups name the pods and the containers.

use std::path::Path;

use divvy_model::cgroup::{Owner, owner_of_process};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::protocol::Kill;
use crate::{Code, Failure, GpuProcesses, GpuSamples};

/// Fill in the pods, the containers, and the PIDs that processes see themselves. A process that has ended, or whose files cannot be read, gets none of
/// them.
pub(super) fn name(proc_root: &Path, gpus: &mut [GpuProcesses]) {
    for process in gpus.iter_mut().flat_map(|gpu| &mut gpu.processes) {
        let owner = owner(proc_root, process.pid);
        (process.pod, process.container) = owner.map_or((None, None), |owner| (Some(owner.pod), owner.container));
        process.own_pid = own_pid(proc_root, process.pid);
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
    let failed = |error: Errno| Failure::new(Code::Unknown, format!("process {pid} of pod {pod} cannot be ended: {error}"));
    let id = i32::try_from(*pid).ok().and_then(Pid::from_raw);
    let id = id.ok_or_else(|| Failure::new(Code::Protocol, format!("{pid} is not a PID")))?;
    let process = match pidfd_open(id, PidfdFlags::empty()) {
        Ok(process) => process,
        // It has ended already.
        Err(Errno::SRCH) => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if owner(proc_root, *pid).is_none_or(|owner| owner.pod != *pod) {
        return Err(Failure::new(
            Code::Protocol,
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

fn owner(proc_root: &Path, pid: u32) -> Option<Owner> {
    let text = std::fs::read_to_string(proc_root.join(pid.to_string()).join("cgroup")).ok()?;
    owner_of_process(&text)
}
