//! Pods that wait for GPUs: what is in their way, and how long they waited until they were bound. Both are only shown in metrics.

use divvy_model::Pod;
use divvy_placement::{Ask, WaitReason};

use super::{ExtenderCore, FilterAnswer, Now, OpId};

/// The number of different requests whose reason a sweep looks for. Each of them costs a look at every node.
const GUESSES: usize = 4;
/// The number of waiting pods that a sweep looks at.
const LOOKED_AT: usize = 1000;

/// The upper ends of the classes of [`Waits`], in seconds.
pub const WAITS_S: [u16; 12] = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600];

/// How long pods waited from their creation to their bind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waits {
    /// The number of pods for each class of [`WAITS_S`], and for those that waited longer. No pod is in two classes.
    pub pods: [u64; WAITS_S.len() + 1],
    /// The sum of all times, in milliseconds.
    pub sum_ms: u64,
}

impl Waits {
    fn add(&mut self, ms: u64) {
        let class = WAITS_S.partition_point(|end_s| u64::from(*end_s) * 1000 < ms);
        self.pods[class] += 1;
        self.sum_ms = self.sum_ms.saturating_add(ms);
    }
}

impl ExtenderCore {
    /// Return how long the pods waited that this replica has bound.
    pub fn waits(&self) -> Waits {
        self.waits
    }

    /// Record that a pod was bound by this bind. API servers write a pod's creation in whole seconds, and their clock may differ from this one.
    pub(super) fn has_waited(&mut self, id: OpId, now: Now) {
        let pod = self.ops.get(&id).and_then(|op| op.pod.as_ref());
        let created_s = pod.filter(|pod| pod.request.wants_gpus()).and_then(|pod| pod.created_s);
        if let Some(created_s) = created_s {
            let created_ms = u64::from(created_s.get()).saturating_mul(1000);
            self.waits.add((now.unix_ns / 1_000_000).saturating_sub(created_ms));
        }
    }

    /// Remember what was in a pod's way when kube-scheduler asked about these nodes.
    pub(super) fn answered<'a>(&mut self, pod: &Pod, nodes: impl IntoIterator<Item = &'a str>, answer: &FilterAnswer) {
        let mut nearest = WaitReason::Other;
        if answer.passed.is_empty() {
            let ledger = self.index.ledger();
            let ask = Ask::of_pod(pod, ledger.unit());
            let question = ledger.question(&ask, &pod.uid);
            let mut failed = answer.failed.iter().peekable();
            for (position, node) in nodes.into_iter().enumerate() {
                if let Some((_, refusal)) = failed.next_if(|(refused, _)| *refused == position) {
                    nearest = nearest.min(question.wait_reason_on(node, refusal));
                }
                if nearest == WaitReason::NoRoom {
                    break;
                }
            }
        }
        self.index.ledger_mut().answer_wait_reason(&pod.uid, nearest);
    }

    /// Find out what is in the way of some of the pods about which kube-scheduler has not asked this replica. It asks another replica, or it has found
    /// by its own count that no node has enough memory.
    pub(super) fn guess_reasons(&mut self) {
        if !self.index.synced() {
            return;
        }
        let ledger = self.index.ledger();
        let mut guesses: Vec<(Ask, i32, WaitReason)> = Vec::new();
        let mut found = Vec::new();
        let mut last = "";
        for (pod, is_answered) in ledger.waiting_after(&self.guessed).take(LOOKED_AT) {
            if !is_answered {
                let ask = Ask::of(&pod.request, ledger.unit());
                let same = guesses
                    .iter()
                    .find(|(of, priority, _)| (of, *priority) == (&ask, pod.priority));
                let reason = match same {
                    Some((.., reason)) => *reason,
                    None if guesses.len() == GUESSES => break,
                    None => ledger.wait_reason(pod),
                };
                if same.is_none() {
                    guesses.push((ask, pod.priority, reason));
                }
                found.push((pod.uid.clone(), reason));
            }
            last = &pod.uid;
        }
        // If no pod is left, the next sweep begins with the first one again.
        self.guessed = last.to_owned();
        for (uid, reason) in found {
            self.index.ledger_mut().guess_wait_reason(&uid, reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_at_the_end_of_a_class_is_in_it() {
        let mut waits = Waits::default();
        for ms in [0, 1000, 1001, 3_600_000, 3_600_001, u64::MAX] {
            waits.add(ms);
        }
        assert_eq!(waits.pods, [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!(waits.sum_ms, u64::MAX);
    }
}
