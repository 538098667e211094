//! FGD's measure of fragmentation: the idle GPU capacity of a node that the pods of a mix cannot use (`NodeGpuShareFragAmount` in
//! `pkg/utils/frag.go` of github.com/hkust-adsl/kubernetes-scheduler-simulator).
//!
//! For one class of pods, all idle capacity of a node is a fragment if no pod of the class fits there, because of CPU, product,
//! or GPUs. Otherwise the fragments are the idle capacity of those GPUs that have less free than such a pod takes. The measure is
//! the mean over the mix.
//!
//! A loop over all classes would be slow. But whether a pod that takes at most one GPU can use a given GPU depends only on
//! the node's free CPU and on the free amount of that GPU. So a table (`content`) holds, for each pair of a CPU and an
//! amount, the number of pods for which both suffice. The measure then costs one lookup per GPU.

use super::{Demand, Mix, NodeShape, PolicyNodeState};

/// The fragments of nodes with one kind of GPU. The result is exact: a sum of counts times amounts.
#[derive(Debug, Clone)]
pub(crate) struct Fragments {
    /// The number of pods in the mix.
    pods: i64,
    /// The distinct CPU requests of pods that take one GPU or a part of one, in ascending order.
    cpus: Vec<u32>,
    /// The distinct amounts that these pods take of a GPU, in ascending order.
    amounts: Vec<u32>,
    /// The table of pod counts. A row stands for the number of entries of `cpus` that the node can meet, a column for the number
    /// of entries of `amounts` that the GPU can meet. The value is the number of pods that can use the GPU.
    content: Vec<i64>,
    /// The classes with several GPUs: the demand, the amount of each GPU, and the number of pods.
    several: Vec<(Demand, u32, i64)>,
}

impl Fragments {
    /// Build the table for nodes whose GPUs have this shape's product and size.
    pub(crate) fn of(mix: &Mix, shape: &NodeShape) -> Fragments {
        let allowed = |(demand, count): (&Demand, u64)| {
            let amount = demand.amount(shape).filter(|_| demand.gpus > 0)?;
            Some((*demand, amount, i64::try_from(count).unwrap_or(i64::MAX)))
        };
        let (single, several): (Vec<_>, Vec<_>) = mix.classes().filter_map(allowed).partition(|(demand, ..)| demand.gpus == 1);
        let mut cpus: Vec<u32> = single.iter().map(|(demand, ..)| demand.cpu_milli).collect();
        let mut amounts: Vec<u32> = single.iter().map(|(_, amount, _)| *amount).collect();
        cpus.sort_unstable();
        cpus.dedup();
        amounts.sort_unstable();
        amounts.dedup();
        let width = amounts.len() + 1;
        let mut content = vec![0; (cpus.len() + 1) * width];
        for (demand, amount, count) in &single {
            let met_cpus = cpus.partition_point(|cpu| cpu <= &demand.cpu_milli);
            let met_amounts = amounts.partition_point(|other| other <= amount);
            content[met_cpus * width + met_amounts] += count;
        }
        for at in (0..content.len()).filter(|at| at % width > 0) {
            content[at] += content[at - 1];
        }
        for at in width..content.len() {
            content[at] += content[at - width];
        }
        Fragments {
            pods: i64::try_from(mix.total()).unwrap_or(i64::MAX),
            cpus,
            amounts,
            content,
            several,
        }
    }

    /// Return the number of pods in the mix, by which an amount must be divided.
    pub(crate) fn pods(&self) -> i64 {
        self.pods
    }

    /// Return the idle capacity that a pod cannot use, summed over the pods of the mix, in the unit of [`NodeShape::gpu_size`].
    pub(crate) fn amount(&self, state: &PolicyNodeState) -> i64 {
        let mut useful = 0;
        if !self.amounts.is_empty() {
            let met = self.cpus.partition_point(|cpu| *cpu <= state.cpu_milli);
            let row = &self.content[met * (self.amounts.len() + 1)..][..=self.amounts.len()];
            for left in state.left.iter().filter(|left| **left > 0) {
                useful += i64::from(*left) * row[self.amounts.partition_point(|amount| amount <= left)];
            }
        }
        for (demand, amount, count) in &self.several {
            if state.fits(demand, *amount) {
                let usable = state.left.iter().filter(|left| *left >= amount);
                useful += count * usable.map(|left| i64::from(*left)).sum::<i64>();
            }
        }
        i64::try_from(state.total()).unwrap_or(i64::MAX) * self.pods - useful
    }
}
