use std::collections::BTreeSet;

use divvy_model::{Pod, PodKey};
use divvy_placement::{Ask, KeptFor, NodeRefusal, NodeReport};

use super::{DecideIn, ExtenderCore, FilterError, NotSynced, Now};

/// How long a resumed watch needs to catch up. The API server sends the missed events at once; after this time, the extender has
/// read them.
const CATCHES_UP_NS: u64 = 1_000_000_000;

/// The content of kube-scheduler's `ExtenderFilterResult`, independent of its JSON form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FilterAnswer {
    /// Positions in the request's node list of the nodes that fit, in ascending order.
    pub passed: Vec<usize>,
    /// Positions of the nodes that do not fit, in ascending order, each with the reason.
    pub failed: Vec<(usize, NodeRefusal)>,
}

pub use divvy_model::names::SCHEDULER_CHECK;

/// Return filter's answer to a pod with the annotation [`SCHEDULER_CHECK`]. The answer does not depend on the nodes. It is an
/// error of the whole call, so that kube-scheduler does not preempt other pods for the test pod. `None` means that `divvy
/// scheduler-config` did not write this value, so the pod is an ordinary one.
pub fn check_refusal(word: &str) -> Option<String> {
    let legal = (8..=64).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_alphanumeric());
    legal.then(|| {
        format!("the scheduler called Divvy's extender: check {word}; this pod is only a test and is never placed, delete it")
    })
}

impl ExtenderCore {
    /// Return which of these nodes have GPUs with room for the pod. The answer is advisory and reserves nothing: bind decides.
    ///
    /// # Errors
    /// Fails until pods and nodes have been listed.
    pub fn filter<'a>(&self, pod: &Pod, nodes: impl IntoIterator<Item = &'a str>) -> Result<FilterAnswer, NotSynced> {
        self.synced()?;
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

    /// Filter as [`ExtenderCore::filter`] does, but return an error instead of a refusal in two cases. After a refusal, kube-scheduler
    /// waits for an event before it tries the pod again; after an error, it tries again when its back-off ends.
    ///
    /// - A watch is broken: kube-scheduler may already have seen the event that freed the memory, and would then wait for it in
    ///   vain.
    /// - The memory is only held for a departed pod: it becomes free without any event.
    pub fn filter_at<'a, I>(&mut self, pod: &Pod, nodes: I, now: Now) -> Result<FilterAnswer, FilterError>
    where
        I: IntoIterator<Item = &'a str> + Clone,
    {
        self.age_departed(now);
        let mut answer = self.filter(pod, nodes.clone())?;
        self.answered(pod, nodes.clone(), &answer);
        if self.decide_in == DecideIn::Filter && answer.passed.len() > 1 {
            self.keep_the_best(pod, nodes.clone(), &mut answer);
        }
        let Some((position, refusal)) = answer.failed.first().filter(|_| answer.passed.is_empty()) else {
            return Ok(answer);
        };
        let node = nodes.clone().into_iter().nth(*position).unwrap_or_default();
        if let Some((what, why)) = self.out_of_date(now) {
            return Err(FilterError::OutOfDate {
                node: node.to_owned(),
                refusal: refusal.filter_message(node),
                what,
                why: why.to_owned(),
            });
        }
        match self.kept(pod, nodes) {
            None => Ok(answer),
            Some((node, kept)) => Err(FilterError::Kept {
                node: node.to_owned(),
                kept,
                most_s: self.timing.departed_ns / 1_000_000_000,
            }),
        }
    }

    /// Keep only the best of the nodes that fit. Do not list the others as failed: they do fit, so kube-scheduler's message must
    /// not mention them.
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
        // If the policy has no preference, take the first node by name: kube-scheduler's order is arbitrary.
        let best = self.ranking(pod, names.iter().copied()).best;
        let best = best.or_else(|| (0..names.len()).min_by_key(|position| names.get(*position)));
        answer.passed = best.and_then(|best| answer.passed.get(best)).copied().into_iter().collect();
    }

    /// Return a node that would have room if no memory were held for departed pods, and the hold that is in the way.
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

    /// Return which watch may be behind, and why: it is broken, or it was resumed less than [`CATCHES_UP_NS`] ago.
    fn out_of_date(&self, now: Now) -> Option<(&'static str, &str)> {
        let (pods, nodes) = (self.index.pods(), self.index.nodes());
        let broken = [("pods", pods), ("nodes", nodes)].into_iter();
        let mut broken = broken.filter_map(|(what, feed)| Some((what, feed.trouble.as_deref()?)));
        let resumed = self
            .resumed
            .filter(|(at, _)| now.monotonic_ns.saturating_sub(*at) < CATCHES_UP_NS);
        broken.next().or(resumed.map(|(_, what)| (what, "it has only just resumed")))
    }

    /// Explain in full why a node does or does not fit a pod; `None` if the pod is unknown.
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
