//! The extender's scores and their weight in kube-scheduler.
//!
//! The score of an extender is between 0 and 10. kube-scheduler multiplies it by 10 and by the extender's `weight`, and adds the
//! product to the scores of its own plugins.

/// The score of the best node, which is the highest score that an extender can give. Only one node gets it, because
/// kube-scheduler picks randomly among nodes with equal scores.
pub const BEST: u8 = 10;
/// The highest score of any node other than the best one.
pub const OTHERS: u8 = 5;
/// The extender's `weight` in the scheduler configuration that Divvy prints. With this weight, kube-scheduler's own scores cannot
/// outweigh the best node's lead.
pub const WEIGHT: i64 = 25;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_node_beats_kube_schedulers_own_scores() {
        // Weights of the plugins of kube-scheduler 1.36, each of which scores 0 to 100: TaintToleration, NodeAffinity,
        // PodTopologySpread, InterPodAffinity, NodeResourcesFit, NodeResourcesBalancedAllocation, ImageLocality.
        let own: i64 = [3, 2, 2, 2, 1, 1, 1].iter().map(|weight| 100 * weight).sum();
        assert_eq!(own, 1_200);
        assert!(i64::from(BEST - OTHERS) * 10 * WEIGHT > own);
        assert!(
            i64::from(BEST - OTHERS) * 10 * (WEIGHT - 1) <= own,
            "the weight is higher than necessary"
        );
    }
}
