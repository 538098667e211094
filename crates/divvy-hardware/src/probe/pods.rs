//! Maps processes to pods: the driver returns PIDs, and the processes' cgroups name the pods and the containers.

use std::path::Path;

use divvy_model::cgroup::{Owner, owner_of_process};

use crate::{GpuProcesses, GpuSamples};

/// Fill in the pods and the containers. A process that has ended, or whose files cannot be read, gets neither.
pub(super) fn name(proc_root: &Path, gpus: &mut [GpuProcesses]) {
    for process in gpus.iter_mut().flat_map(|gpu| &mut gpu.processes) {
        let owner = owner(proc_root, process.pid);
        (process.pod, process.container) = owner.map_or((None, None), |owner| (Some(owner.pod), owner.container));
    }
}

/// The same for samples.
pub(super) fn name_sampled(proc_root: &Path, gpus: &mut [GpuSamples]) {
    for sample in gpus.iter_mut().flat_map(|gpu| &mut gpu.samples) {
        sample.pod = owner(proc_root, sample.pid).map(|owner| owner.pod);
    }
}

fn owner(proc_root: &Path, pid: u32) -> Option<Owner> {
    let text = std::fs::read_to_string(proc_root.join(pid.to_string()).join("cgroup")).ok()?;
    owner_of_process(&text)
}
