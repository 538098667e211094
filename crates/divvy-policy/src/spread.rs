//! The policy `spread`: the emptiest GPU first. It is for users who want a GPU to themselves rather than a cluster that holds
//! more pods.

use super::rule::{CostRule, KeptStates, RulePlace};

/// Prefers the GPU with the most free capacity; on a tie, the node with the largest free part.
#[derive(Debug)]
pub(crate) struct Spread;

/// The number that stands for a whole when parts are compared.
const WHOLE: u64 = 10_000;

fn part(left: u64, of: u64) -> i64 {
    i64::try_from(left.saturating_mul(WHOLE).checked_div(of).unwrap_or(0)).unwrap_or(i64::MAX)
}

impl CostRule for Spread {
    fn cost(&mut self, place: &RulePlace<'_>, _kept: &mut KeptStates) -> i64 {
        let shape = place.shape;
        let size = u64::from(shape.gpu_size);
        if place.demand.gpus == 0 {
            return -part(u64::from(place.state.cpu_milli), u64::from(shape.cpu_milli));
        }
        let node = part(place.state.total(), size * u64::from(shape.gpus));
        // A pod that asks for several GPUs gets whole ones.
        let gpu = if place.takes_part() {
            part(u64::from(place.state.left.iter().copied().max().unwrap_or(0)), size)
        } else {
            0
        };
        -(gpu * i64::try_from(WHOLE + 1).unwrap_or(1) + node)
    }

    fn level(&mut self, place: &RulePlace<'_>) -> Option<u32> {
        place.state.levels(place.amount).max()
    }
}
