use std::collections::BTreeSet;

use divvy_model::{Pod, PodKey};
use divvy_placement::{Ask, KeptFor, NodeReport, Refusal};

use super::{Core, DecideIn, Now};

/// A watch that goes on after an interruption sends at once what was missed. By this time it has been read.
const CATCHES_UP_NS: u64 = 1_000_000_000;

/// kube-scheduler's `ExtenderFilterResult`, without the form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FilterAnswer {
    /// Positions of the nodes that fit, in the order of the question.
    pub passed: Vec<usize>,
    /// Why the others do not, in the order of the question.
    pub failed: Vec<(usize, Refusal)>,
}

pub use divvy_model::names::SCHEDULER_CHECK;

/// What filter answers to a pod with [`SCHEDULER_CHECK`], whatever the nodes: an error of the whole call, so that no pod is
/// pushed out for it. `None`: the word is none of ours, and the pod is one like any other.
pub fn check_refusal(word: &str) -> Option<String> {
    let legal = (8..=64).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_alphanumeric());
    legal.then(|| format!("the scheduler asked Divvy's extender: check {word}; this pod is placed nowhere, delete it"))
}

impl Core {
    /// Which of these nodes have a GPU with room for the pod. Advisory: bind decides, nothing is reserved.
    pub fn filter<'a>(&self, pod: &Pod, nodes: impl IntoIterator<Item = &'a str>) -> Result<FilterAnswer, String> {
        if let Some(why) = self.not_synced() {
            return Err(why);
        }
        let ledger = self.index.ledger();
        let ask = Ask::of_pod(pod, ledger.unit());
        let question = ledger.question(&ask, &pod.uid);
        let mut answer = FilterAnswer::default();
        for (position, node) in nodes.into_iter().enumerate() {
            match question.fits(node) {
                Ok(()) => answer.passed.push(position),
                Err(refusal) => answer.failed.push((position, refusal)),
            }
        }
        Ok(answer)
    }

    /// As [`Core::filter`], but two kinds of refusal are errors. After a refusal kube-scheduler waits for an event before it tries the pod
    /// again; after an error it tries again when its back-off ends. While a watch is broken, the event that frees the memory may be one
    /// that kube-scheduler has seen and the extender has not. And memory that is only kept for a pod that departed becomes free without
    /// any event.
    pub fn filter_at<'a, I>(&mut self, pod: &Pod, nodes: I, now: Now) -> Result<FilterAnswer, String>
    where
        I: IntoIterator<Item = &'a str> + Clone,
    {
        self.age_departed(now);
        let mut answer = self.filter(pod, nodes.clone())?;
        if self.decide_in == DecideIn::Filter && answer.passed.len() > 1 {
            self.keep_the_best(pod, nodes.clone(), &mut answer);
        }
        let Some((position, refusal)) = answer.failed.first().filter(|_| answer.passed.is_empty()) else {
            return Ok(answer);
        };
        let node = nodes.clone().into_iter().nth(*position).unwrap_or_default();
        if let Some((what, why)) = self.out_of_date(now) {
            return Err(format!(
                "as far as the extender knows, no node has room (node {node}: {}); but its watch of {what} was interrupted ({why}), so this \
                 may be out of date; kube-scheduler will try again",
                refusal.filter_text(node)
            ));
        }
        match self.kept(pod, nodes) {
            None => Ok(answer),
            Some((node, kept)) => Err(format!(
                "no node has room yet: node {node} keeps {} of GPU {} for pod {} (deleted, container was running) until its agent says that the \
                 container has ended, or for {} s at most; it is tried again",
                kept.memory,
                kept.index,
                kept.pod,
                self.timing.departed_ns / 1_000_000_000
            )),
        }
    }

    /// Nodes that fit and are not chosen are in neither list: they did not fail, and kube-scheduler's text says nothing of them.
    fn keep_the_best<'a, I>(&mut self, pod: &Pod, nodes: I, answer: &mut FilterAnswer)
    where
        I: IntoIterator<Item = &'a str>,
    {
        let mut passed = answer.passed.iter().peekable();
        let fitting = nodes
            .into_iter()
            .enumerate()
            .filter(|(position, _)| passed.next_if(|next| *next == position).is_some());
        let names: Vec<&str> = fitting.map(|(_, name)| name).collect();
        // Without an opinion the first by name: the order of the question is kube-scheduler's, and any.
        let best = self.ranking(pod, names.iter().copied()).best;
        let best = best.or_else(|| (0..names.len()).min_by_key(|position| names.get(*position)));
        answer.passed = best.and_then(|best| answer.passed.get(best)).copied().into_iter().collect();
    }

    /// Where there would be room if nothing were kept for pods that departed.
    fn kept<'a>(&self, pod: &Pod, nodes: impl IntoIterator<Item = &'a str>) -> Option<(&'a str, KeptFor)> {
        let ledger = self.index.ledger();
        let left: BTreeSet<&str> = ledger.departed().map(|(_, departed)| departed.node.as_str()).collect();
        if left.is_empty() {
            return None;
        }
        let ask = Ask::of_pod(pod, ledger.unit());
        let mut nodes = nodes.into_iter().filter(|node| left.contains(node));
        nodes.find_map(|node| Some((node, ledger.kept_from(node, &ask)?)))
    }

    /// The watch that is broken, or that resumed less than [`CATCHES_UP_NS`] ago, and the reason.
    fn out_of_date(&self, now: Now) -> Option<(&'static str, &str)> {
        let (pods, nodes) = (self.index.pods(), self.index.nodes());
        let broken = [("pods", pods), ("nodes", nodes)].into_iter();
        let mut broken = broken.filter_map(|(what, feed)| Some((what, feed.trouble.as_deref()?)));
        let resumed = self
            .resumed
            .filter(|(at, _)| now.monotonic_ns.saturating_sub(*at) < CATCHES_UP_NS);
        broken.next().or(resumed.map(|(_, what)| (what, "and has only just resumed")))
    }

    /// What a node says to a pod, in full.
    pub fn explain(&self, pod: &PodKey, node: &str) -> Option<NodeReport> {
        let ledger = self.index.ledger();
        let pod = ledger.pod_named(pod)?;
        Some(ledger.explain(node, &Ask::of_pod(pod, ledger.unit())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plain_word_makes_a_pod_a_check() {
        let check = |word: &str, expected: bool| {
            let answer = check_refusal(word);
            assert_eq!(answer.is_some(), expected, "{word:?}");
            assert!(answer.is_none_or(|text| text.contains(word)));
        };
        check("0f1e2d3c4b5a6978", true);
        check("", false);
        check("short", false);
        check("0f1e2d3c 4b5a6978", false);
        check("0f1e2d3c\n4b5a6978", false);
        check(&"a".repeat(65), false);
    }
}
