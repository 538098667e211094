//! Amounts of memory, and how busy a GPU is, from the cluster's view and from what the agents measured.

use divvy_model::usage::{ContainerUsage, Usage};
use divvy_model::{MemoryUnit, MiB};

use crate::{GpuView, NodeView, PodView};

/// The memory of a row in bytes, and for which part of the time its GPU is busy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amounts {
    /// What the row's GPUs offer.
    pub total: u64,
    /// What is allocated to pods.
    pub allocated: u64,
    /// What containers of deleted pods hold of the rest. 0 for a pod.
    pub held: u64,
    /// What can still be allocated ([`GpuView::free`]). 0 for a pod. Unless a GPU is overbooked, or it is not known which GPU a pod has,
    /// `allocated`, `held`, and `free` of a GPU add up to `total`.
    pub free: u64,
    /// What is in use. `None` if it was not measured.
    pub used: Option<u64>,
    /// Of what is allocated: what its pods use.
    pub within: u64,
    /// What pods use in addition to their shares.
    pub over: u64,
    /// Percent of the time in which the GPU was busy. `None` if it was not measured.
    pub busy: Option<u32>,
}

impl Amounts {
    /// Add memory.
    fn add(&mut self, more: &Amounts) {
        self.total = self.total.saturating_add(more.total);
        self.allocated = self.allocated.saturating_add(more.allocated);
        self.held = self.held.saturating_add(more.held);
        self.free = self.free.saturating_add(more.free);
        self.within = self.within.saturating_add(more.within);
        self.over = self.over.saturating_add(more.over);
        if let Some(used) = more.used {
            self.used = Some(self.used.unwrap_or(0).saturating_add(used));
        }
    }

    /// Return what is allocated and not used. `None` if it was not measured.
    pub fn waste(&self) -> Option<u64> {
        self.used.map(|_| self.allocated.saturating_sub(self.within))
    }
}

/// Return the memory of units in bytes.
fn bytes(units: u64, unit: MemoryUnit) -> u64 {
    bytes_of(unit.memory(units).unwrap_or(MiB(u64::MAX)))
}

fn bytes_of(memory: MiB) -> u64 {
    memory.0.saturating_mul(1 << 20)
}

/// Return the entries of a pod on a GPU.
pub fn entries<'u>(usage: Option<&'u Usage>, pod: &'u PodView, gpu: Option<&'u str>) -> impl Iterator<Item = &'u ContainerUsage> {
    let all = usage.map(|usage| usage.containers.iter()).into_iter().flatten();
    all.filter(move |of| of.uid == pod.uid && Some(of.gpu.as_str()) == gpu)
}

/// Return the amounts of a pod on one GPU.
pub fn of_pod(node: &NodeView, gpu: &GpuView, pod: &PodView, usage: Option<&Usage>) -> Amounts {
    let uuid = gpu.uuid.as_deref();
    // A GPU that is only offered as a whole has no units.
    let allocated = if pod.whole {
        bytes(gpu.total, node.unit)
    } else {
        bytes_of(pod.memory)
    };
    let measured = entries(usage, pod, uuid).filter_map(|of| of.used_bytes);
    let mut used = measured.reduce(u64::saturating_add);
    let busy = entries(usage, pod, uuid).filter_map(|of| of.busy_percent);
    let mut busy = busy.reduce(u32::saturating_add).map(|percent| percent.min(100));
    // No other pod is on the GPU of a pod that has it as a whole.
    if let Some(measured) = of_gpu_itself(gpu, usage).filter(|_| pod.whole) {
        used = used.or(measured.used_bytes);
        busy = busy.or(measured.busy_percent);
    }
    // Without its limit, a pod that has the whole GPU also has what Divvy does not offer of it.
    let over = if pod.whole {
        0
    } else {
        used.unwrap_or(0).saturating_sub(allocated)
    };
    Amounts {
        total: bytes(gpu.total, node.unit),
        allocated,
        held: 0,
        free: 0,
        used,
        within: used.unwrap_or(0).min(allocated),
        over,
        busy,
    }
}

/// Return the memory that is allocated to a pod on several GPUs of a node.
pub fn of_pod_on<'g>(node: &NodeView, on: impl IntoIterator<Item = (&'g GpuView, &'g PodView)>) -> u64 {
    let each = on.into_iter().map(|(gpu, pod)| of_pod(node, gpu, pod, None).allocated);
    each.fold(0, u64::saturating_add)
}

fn of_gpu_itself<'u>(gpu: &GpuView, usage: Option<&'u Usage>) -> Option<&'u divvy_model::usage::GpuUsage> {
    usage?.gpu(gpu.uuid.as_deref()?)
}

/// Return the amounts of a GPU.
pub fn of_gpu(node: &NodeView, gpu: &GpuView, usage: Option<&Usage>) -> Amounts {
    let measured = of_gpu_itself(gpu, usage);
    let mut sum = Amounts {
        total: bytes(gpu.total, node.unit),
        used: measured.and_then(|of| of.used_bytes),
        busy: measured.and_then(|of| of.busy_percent),
        ..Amounts::default()
    };
    for pod in &gpu.pods {
        let pod = of_pod(node, gpu, pod, usage);
        sum.allocated = sum.allocated.saturating_add(pod.allocated);
        sum.within = sum.within.saturating_add(pod.within);
        sum.over = sum.over.saturating_add(pod.over);
    }
    let rest = sum.total.saturating_sub(sum.allocated);
    sum.free = bytes_of(gpu.free).min(rest);
    sum.held = bytes_of(MiB(gpu.held_mib)).min(rest - sum.free);
    sum
}

/// Return the sum of a node's GPUs, and of its pods that have none yet. No more is free than kube-scheduler counts as free, which includes these pods. How
/// busy the node is, is the mean of the GPUs for which it was measured.
pub fn of_node(node: &NodeView, usage: Option<&Usage>) -> Amounts {
    let sum = of_gpus(node, &node.gpus, usage);
    let pending = node.pending.iter().map(|pod| bytes_of(pod.memory));
    let allocated = pending.fold(sum.allocated, u64::saturating_add);
    let total = bytes(node.total, node.unit);
    let rest = total.saturating_sub(allocated);
    let free = sum.free.min(rest);
    Amounts {
        total,
        allocated,
        free,
        held: sum.held.min(rest - free),
        ..sum
    }
}

/// Return the sum of some of a node's GPUs. How busy they are, is the mean of those for which it was measured.
pub fn of_gpus<'g>(node: &NodeView, gpus: impl IntoIterator<Item = &'g GpuView>, usage: Option<&Usage>) -> Amounts {
    let mut sum = Amounts::default();
    let (mut percent, mut measured) = (0_u32, 0_u32);
    for gpu in gpus {
        let gpu = of_gpu(node, gpu, usage);
        sum.add(&gpu);
        if let Some(busy) = gpu.busy {
            percent = percent.saturating_add(busy);
            measured += 1;
        }
    }
    sum.busy = percent.checked_div(measured);
    sum
}

/// Return the sum of nodes, without how busy they are.
pub fn of_nodes<'n>(nodes: impl IntoIterator<Item = (&'n NodeView, Option<&'n Usage>)>) -> Amounts {
    let mut sum = Amounts::default();
    for (node, usage) in nodes {
        sum.add(&of_node(node, usage));
    }
    sum
}

/// Format an amount of memory in 9 columns or less: `4.2 GiB`, `300 MiB`.
pub fn memory(bytes: u64) -> String {
    let tenths = |shift: u32| {
        let unit = 1_u64 << shift;
        (bytes >> shift, u128::from(bytes % unit) * 10 / u128::from(unit))
    };
    match bytes >> 20 {
        0..1024 => format!("{} MiB", bytes >> 20),
        1024..1_024_000 => {
            let (whole, rest) = tenths(30);
            format!("{whole}.{rest} GiB")
        }
        _ => {
            let (whole, rest) = tenths(40);
            format!("{whole}.{rest} TiB")
        }
    }
}
