//! Containers whose processes together use more than their share of a GPU. MPS limits each process, not the container.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use divvy_model::MiB;

use super::Daemon;

/// A process of a container on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsProcess {
    /// The GPU's UUID.
    pub gpu: String,
    /// The UID of the container's pod.
    pub pod: String,
    /// The container runtime's ID of the container.
    pub container: String,
    /// The memory that the process uses.
    pub used: MiB,
}

/// A container that uses more than its share of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Excess {
    /// The container runtime's ID of the container.
    pub container: String,
    /// The UID of the container's pod.
    pub pod: String,
    /// The extended resource through which the container has the GPU.
    pub resource: String,
    /// NVML's index of the GPU.
    pub index: u32,
    /// The memory that the container's processes use together.
    pub used: MiB,
    /// The memory of one replica of the GPU, which is the limit of each process.
    pub share: MiB,
    /// The number of the container's processes on the GPU: at least 2.
    pub processes: usize,
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "container {} of pod {} uses {} of GPU {} in {} processes, but its share (1 {}) is {}. MPS limits each process, not the container, \
             so other pods may run out of memory. Start fewer processes in the container, or limit each to a part of the share with the \
             variable CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
            self.container, self.pod, self.used, self.index, self.processes, self.resource, self.share
        )
    }
}

/// The containers that used more than their share at the last count.
#[derive(Debug, Clone, Default)]
pub struct SharesAbove {
    /// The container runtime's ID of each, and the GPU's UUID.
    above: BTreeSet<(String, String)>,
}

impl SharesAbove {
    /// Count what each container uses of each GPU of these daemons. Return the containers that have exceeded their share since the last
    /// count.
    ///
    /// A container with one process is left out: MPS keeps it to the share, but the driver counts more than MPS limits, such as the memory of
    /// the context.
    pub fn count(&mut self, daemons: &[Daemon], clients: &[MpsProcess]) -> Vec<Excess> {
        let gpus = daemons
            .iter()
            .flat_map(|daemon| daemon.gpus.iter().map(move |gpu| (&daemon.resource, gpu)));
        let shares: BTreeMap<&String, _> = gpus.map(|(resource, gpu)| (&gpu.uuid, (resource, gpu))).collect();
        let mut found: BTreeMap<(String, String), Excess> = BTreeMap::new();
        for client in clients {
            let Some((resource, gpu)) = shares.get(&client.gpu) else {
                continue;
            };
            let Some(share) = gpu.limit else { continue };
            let sum = found
                .entry((client.container.clone(), client.gpu.clone()))
                .or_insert_with(|| Excess {
                    container: client.container.clone(),
                    pod: client.pod.clone(),
                    resource: (*resource).clone(),
                    index: gpu.index,
                    used: MiB::ZERO,
                    share,
                    processes: 0,
                });
            sum.used = sum.used.saturating_add(client.used);
            sum.processes += 1;
        }
        found.retain(|_, sum| sum.processes > 1 && sum.used > sum.share);
        let before = std::mem::replace(&mut self.above, found.keys().cloned().collect());
        let news = found.into_iter().filter(|(key, _)| !before.contains(key));
        news.map(|(_, excess)| excess).collect()
    }
}
