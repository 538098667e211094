use divvy_model::Pod;
use divvy_model::scores::{BEST, OTHERS};
use divvy_placement::{Ask, Choice};
use divvy_policy::{Cost, Ranking};

use super::{ExtenderCore, NotSynced};

impl ExtenderCore {
    /// Return scores for these nodes, in their order: [`BEST`] for the best node and at most [`OTHERS`] for the others. The higher a node's
    /// cost, the lower its score.
    ///
    /// # Errors
    /// Fails until pods and nodes have been listed.
    pub fn prioritize<'n, I>(&mut self, pod: &Pod, nodes: I) -> Result<Vec<u8>, NotSynced>
    where
        I: IntoIterator<Item = &'n str> + Clone,
    {
        self.synced()?;
        Ok(scores(&self.ranking(pod, nodes)))
    }

    /// Rank these nodes by the cost of the pod on each. A node on which the pod already has a reservation comes first: the memory
    /// is already counted as used, and the Binding may even have been carried out.
    pub(super) fn ranking<'n, I>(&mut self, pod: &Pod, nodes: I) -> Ranking
    where
        I: IntoIterator<Item = &'n str> + Clone,
    {
        let ledger = self.index.ledger();
        self.fleet.follow(ledger);
        let ask = Ask::of_pod(pod, ledger.unit());
        let mut ranking = self.fleet.rank(pod, &ask, nodes.clone(), ledger);
        let promised = |node: &str| ledger.bound_to(&pod.uid) == Some(node) || ledger.reserved_and_good(&pod.uid, node).is_some();
        if ledger.is_promised(&pod.uid)
            && let Some(position) = nodes.into_iter().position(promised)
        {
            ranking.best = Some(position);
        }
        ranking
    }

    /// Choose the GPUs for a pod on a node; `None` if the pod does not fit.
    pub(super) fn choose(&mut self, pod: &Pod, node: &str, ask: &Ask) -> Option<Choice> {
        let ledger = self.index.ledger();
        self.fleet.follow(ledger);
        self.fleet.choose(pod, ask, node, ledger)
    }
}

fn scores(ranking: &Ranking) -> Vec<u8> {
    let amounts = || ranking.costs.iter().flatten().map(|cost| cost.amount);
    let (least, most) = (amounts().min().unwrap_or(0), amounts().max().unwrap_or(0));
    let range = most.abs_diff(least);
    let score = |cost: &Option<Cost>| {
        let Some(cost) = cost else { return 0 };
        let better = most.abs_diff(cost.amount);
        let part = match better.checked_mul(u64::from(OTHERS)) {
            // All nodes cost the same: give each the highest score.
            _ if range == 0 => return OTHERS,
            Some(product) => product / range,
            None => better / (range / u64::from(OTHERS)),
        };
        u8::try_from(part).map_or(OTHERS, |part| part.min(OTHERS))
    };
    let mut scores: Vec<u8> = ranking.costs.iter().map(score).collect();
    if let Some(best) = ranking.best.and_then(|best| scores.get_mut(best)) {
        *best = BEST;
    }
    scores
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(costs: &[Option<i64>], best: Option<usize>, expected: &[u8]) {
        let cost = |cost: &Option<i64>| cost.map(|amount| Cost { amount, exact: true });
        let costs = costs.iter().map(cost).collect();
        assert_eq!(scores(&Ranking { costs, best }), expected);
    }

    /// The other nodes score five or less, by their cost.
    #[test]
    fn only_the_best_node_scores_ten() {
        check(&[], None, &[]);
        check(&[Some(7)], Some(0), &[10]);
        check(&[Some(7), Some(7), Some(7)], Some(1), &[5, 10, 5]);
        check(&[Some(0), Some(100), Some(50), Some(19)], Some(0), &[10, 0, 2, 4]);
        check(&[Some(-3), None, Some(-1)], Some(0), &[10, 0, 0]);
        // A node with a reservation is the best at any cost. An estimated cost may be lower than the cost of the best node.
        check(&[Some(0), Some(10), Some(5)], Some(1), &[5, 10, 2]);
        check(&[None, None], Some(1), &[0, 10]);
        check(&[Some(i64::MIN), Some(i64::MAX), Some(0)], Some(0), &[10, 0, 2]);
    }
}
