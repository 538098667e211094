use std::collections::BTreeMap;

use divvy_model::{Pod, PodKey};
use divvy_placement::{Ask, NodeReport};

use super::Core;

/// kube-scheduler's `ExtenderFilterResult`, without the form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FilterAnswer {
    /// Positions of the nodes that fit, in the order of the question.
    pub passed: Vec<usize>,
    /// Why the others do not, by name.
    pub failed: BTreeMap<String, String>,
}

impl Core {
    /// Which of these nodes have a GPU with room for the pod. Advisory: bind decides, nothing is reserved.
    pub fn filter<'a>(&self, pod: &Pod, nodes: impl IntoIterator<Item = &'a str>) -> Result<FilterAnswer, String> {
        if let Some(why) = self.not_synced() {
            return Err(why);
        }
        let ledger = self.index.ledger();
        let ask = Ask::of(&pod.request, ledger.unit());
        let mut answer = FilterAnswer::default();
        for (position, node) in nodes.into_iter().enumerate() {
            match ledger.fits(node, &ask, &pod.uid) {
                Ok(()) => answer.passed.push(position),
                Err(refusal) => {
                    answer.failed.insert(node.to_owned(), refusal.filter_message(node));
                }
            }
        }
        Ok(answer)
    }

    /// What a node says to a pod, in full.
    pub fn explain(&self, pod: &PodKey, node: &str) -> Option<NodeReport> {
        let ledger = self.index.ledger();
        let pod = ledger.pod_named(pod)?;
        Some(ledger.explain(node, &Ask::of(&pod.request, ledger.unit())))
    }
}
