//! FGD's measure of fragmentation: the idle GPU of a node that the pods of a mix cannot use (research/fgd.md section 1), in the
//! form that costs one look-up per GPU (section 4 there).

use super::{Demand, Mix, Shape, State};

/// Weighted idle GPU that a mix cannot use, for nodes with one kind of GPU. Exact: sums of counts times amounts.
#[derive(Debug, Clone)]
pub(crate) struct Fragments {
    /// All pods of the mix.
    pods: i64,
    /// CPU demands of pods with one GPU or a part of one, ascending.
    cpus: Vec<u32>,
    /// Their amounts, ascending.
    amounts: Vec<u32>,
    /// By number of CPU demands that are met, then of amounts that are: how many pods are content with both.
    content: Vec<i64>,
    /// Pods with several GPUs: the demand, the amount, how many.
    several: Vec<(Demand, u32, i64)>,
}

impl Fragments {
    /// For nodes whose GPUs are of this shape's product and size.
    pub(crate) fn of(mix: &Mix, shape: &Shape) -> Fragments {
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

    /// All pods of the mix: what a fragmentation is to be divided by.
    pub(crate) fn pods(&self) -> i64 {
        self.pods
    }

    /// Sum over the mix of idle GPU that the pod cannot use, in what the GPUs count.
    pub(crate) fn amount(&self, state: &State) -> i64 {
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
