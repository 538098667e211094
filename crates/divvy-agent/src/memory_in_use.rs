//! What the driver reports about processes, summed up by pod.

use std::collections::BTreeMap;

use divvy_hardware::GpuProcesses;
use divvy_model::MiB;

/// Sum up the memory that each pod's processes use on each GPU: by GPU UUID, then by pod UID.
pub(crate) fn memory_in_use(gpus: &[GpuProcesses]) -> BTreeMap<String, BTreeMap<String, MiB>> {
    let mut in_use: BTreeMap<String, BTreeMap<String, MiB>> = BTreeMap::new();
    for gpu in gpus {
        let pods = in_use.entry(gpu.uuid.clone()).or_default();
        for process in &gpu.processes {
            // --reserve-memory accounts for the host's own processes.
            if let Some(uid) = &process.pod {
                let used = pods.entry(uid.clone()).or_default();
                *used = used.saturating_add(process.used);
            }
        }
    }
    in_use
}
