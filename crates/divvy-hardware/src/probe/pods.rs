//! Maps processes to pods: the driver returns PIDs, and the processes' cgroups name the pods and the containers.

use std::path::Path;

use divvy_model::cgroup::{Owner, owner_of_process};

use crate::{GpuProcesses, GpuSamples};

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
        sample.pod = owner(proc_root, sample.pid).map(|owner| owner.pod);
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
