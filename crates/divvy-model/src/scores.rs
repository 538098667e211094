//! What the extender's scores are worth in kube-scheduler: they are 0 to 10, and count 10 times their weight beside kube-scheduler's own.

/// What the best node gets: the highest score of an extender. It is alone with it, since kube-scheduler draws lots among equals.
pub const BEST: u8 = 10;
/// What the other nodes get at most.
pub const OTHERS: u8 = 5;
/// `weight` of the extender in the configuration that Divvy prints: with it the best node stays the best whatever kube-scheduler's own scores are.
pub const WEIGHT: i64 = 25;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_node_is_the_best_whatever_kube_schedulers_own_scores_are() {
        // Weights of kube-scheduler 1.36's plugins, each of which gives 0 to 100: TaintToleration, NodeAffinity, PodTopologySpread,
        // InterPodAffinity, NodeResourcesFit, NodeResourcesBalancedAllocation, ImageLocality.
        let own: i64 = [3, 2, 2, 2, 1, 1, 1].iter().map(|weight| 100 * weight).sum();
        assert_eq!(own, 1_200);
        assert!(i64::from(BEST - OTHERS) * 10 * WEIGHT > own);
        assert!(
            i64::from(BEST - OTHERS) * 10 * (WEIGHT - 1) <= own,
            "and not heavier than it must be"
        );
    }
}
