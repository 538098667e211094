//! Maps processes to pods: the driver returns PIDs, and the processes' cgroups name the pods and the containers.

use std::path::Path;

use divvy_model::cgroup;

use crate::GpuProcesses;

/// Fill in the pods and the containers. A process that has ended, or whose files cannot be read, gets neither.
pub(super) fn name(proc_root: &Path, gpus: &mut [GpuProcesses]) {
    for process in gpus.iter_mut().flat_map(|gpu| &mut gpu.processes) {
        let text = std::fs::read_to_string(proc_root.join(process.pid.to_string()).join("cgroup"));
        let owner = text.ok().as_deref().and_then(cgroup::owner_of_process);
        (process.pod, process.container) = owner.map_or((None, None), |owner| (Some(owner.pod), owner.container));
    }
}
