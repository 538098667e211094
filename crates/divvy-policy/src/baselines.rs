//! The baseline policies with which FGD's authors compare FGD, rounded as in their program
//! (github.com/hkust-adsl/kubernetes-scheduler-simulator). Scores are integers from 0 to 100. A pod that takes a part of a GPU
//! gets it by best fit: from the GPU with the least free capacity that still suffices.

use super::rule::{CostRule, KeptStates, RulePlace};
use super::state::StateView;

/// The CPU of the largest node of the published cluster, in thousandths of a core.
const MOST_CPU: i64 = 128_000;
/// The GPU capacity of the largest node of the published cluster, in thousandths of a GPU.
const MOST_GPU: i64 = 8_000;

/// Prefers the node with the least free CPU and GPU capacity, in equal parts.
#[derive(Debug)]
pub(crate) struct BestFit;

impl CostRule for BestFit {
    fn cost(&mut self, place: &RulePlace<'_>, _kept: &mut KeptStates) -> i64 {
        let cpu = i64::from(place.state.cpu_milli) - i64::from(place.demand.cpu_milli);
        let gpu = left(place) - asked(place);
        let scale = MOST_CPU / MOST_GPU;
        -(100 * (2 * MOST_CPU - cpu - scale * gpu)).div_euclid(2 * MOST_CPU)
    }
}

/// Prefers the node with the smallest dot product of the request and the free amounts.
#[derive(Debug)]
pub(crate) struct DotProduct;

impl CostRule for DotProduct {
    fn cost(&mut self, place: &RulePlace<'_>, _kept: &mut KeptStates) -> i64 {
        let scale = MOST_CPU / MOST_GPU;
        let cpu = i64::from(place.state.cpu_milli) * i64::from(place.demand.cpu_milli);
        let gpu = scale * left(place) * scale * asked(place);
        let all = 2 * MOST_CPU * MOST_CPU;
        -(100 * (all - cpu - gpu)).div_euclid(all)
    }
}

/// Prefers GPUs in use, then free GPUs of nodes in use, then free nodes.
#[derive(Debug)]
pub(crate) struct GpuPacking;

impl CostRule for GpuPacking {
    fn cost(&mut self, place: &RulePlace<'_>, _kept: &mut KeptStates) -> i64 {
        if place.demand.gpus == 0 {
            return 0;
        }
        let free = i64::from(place.state.whole(place.shape));
        if free == i64::from(place.shape.gpus) {
            return -(33 - free).max(free);
        }
        let after = place.state.after(place.demand, place.amount, None);
        let opened = free - i64::from(after.whole(place.shape));
        if opened > 0 {
            return -(50 - opened).max(33);
        }
        let size = i64::from(place.shape.gpu_size.max(1));
        let taken = place.state.left.iter().zip(&after.left);
        let taken = taken.filter(|(before, after)| before != after);
        let left: i64 = taken.map(|(before, _)| i64::from(*before) * 100 / size).sum();
        -(100 - left / 10).max(50)
    }
}

/// Prefers nodes that already run pods of the same size.
#[derive(Debug)]
pub(crate) struct GpuClustering;

impl CostRule for GpuClustering {
    fn view(&self) -> StateView {
        StateView {
            positions: false,
            kinds: true,
        }
    }

    fn cost(&mut self, place: &RulePlace<'_>, _kept: &mut KeptStates) -> i64 {
        let Some(kind) = place.demand.kind(place.shape, place.amount) else {
            return 0;
        };
        let kinds = place.state.kinds;
        let company = match (kinds >> kind & 1 == 1, kinds.count_ones()) {
            (true, 1) => 75,
            (true, _) => 50,
            (false, 0) => 25,
            (false, _) => 0,
        };
        -(25 * (MOST_GPU - left(place)) / MOST_GPU + company)
    }
}

/// Return the free capacity of the node's GPUs, in thousandths of a GPU.
fn left(place: &RulePlace<'_>) -> i64 {
    let total = place.state.total() * 1000 / u64::from(place.shape.gpu_size.max(1));
    i64::try_from(total).unwrap_or(i64::MAX)
}

/// Return the GPU capacity that the pod takes, in thousandths of a GPU.
fn asked(place: &RulePlace<'_>) -> i64 {
    i64::try_from(place.demand.milli(place.shape)).unwrap_or(i64::MAX)
}
