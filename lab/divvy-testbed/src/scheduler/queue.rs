//! The scheduling queue as a value: active, back-off, and unschedulable pods. Times are milliseconds of one clock.

use std::collections::{BTreeMap, BTreeSet};

use crate::node::BackoffRange;

/// A pod's position in the queue: higher priority first, then creation time, then UID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// The negated priority, so that a higher priority comes first.
    pub priority: i64,
    /// The creation time in nanoseconds since the epoch.
    pub created: i128,
    /// The pod's UID.
    pub uid: String,
}

#[derive(Debug, Clone)]
struct QueuedPod {
    rank: Rank,
    attempts: u32,
    place: QueuePlace,
    /// Whether the last refusal depended on the labels of pods on nodes.
    minds_pods: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueuePlace {
    Active,
    /// The pod is being scheduled. `moves` is the value that the queue's counter `moves` had when that began.
    InFlight {
        moves: u64,
    },
    Backoff,
    Unschedulable {
        since_ms: u64,
    },
}

/// The scheduling queue.
#[derive(Debug)]
pub struct Queue {
    backoff: BackoffRange,
    flush_ms: u64,
    pods: BTreeMap<String, QueuedPod>,
    active: BTreeSet<Rank>,
    /// The end of a pod's back-off, for pods that failed before.
    ready_ms: BTreeMap<String, u64>,
    moves: u64,
}

impl Queue {
    /// Create an empty queue.
    pub fn new(backoff: BackoffRange, flush_ms: u64) -> Queue {
        Queue {
            backoff,
            flush_ms,
            pods: BTreeMap::new(),
            active: BTreeSet::new(),
            ready_ms: BTreeMap::new(),
            moves: 0,
        }
    }

    /// Add a new pod. Do nothing if it is known.
    pub fn add(&mut self, rank: Rank) {
        if self.pods.contains_key(&rank.uid) {
            return;
        }
        self.active.insert(rank.clone());
        let waiting = QueuedPod {
            rank: rank.clone(),
            attempts: 0,
            place: QueuePlace::Active,
            minds_pods: false,
        };
        self.pods.insert(rank.uid, waiting);
    }

    /// Remove a pod that is gone or bound.
    pub fn remove(&mut self, uid: &str) {
        if let Some(waiting) = self.pods.remove(uid) {
            self.active.remove(&waiting.rank);
        }
        self.ready_ms.remove(uid);
    }

    /// Return the next pod to schedule, which is then in flight.
    pub fn pop(&mut self, now_ms: u64) -> Option<String> {
        self.flush(now_ms);
        let rank = self.active.pop_first()?;
        let moves = self.moves;
        let waiting = self.pods.get_mut(&rank.uid)?;
        waiting.attempts = waiting.attempts.saturating_add(1);
        waiting.place = QueuePlace::InFlight { moves };
        waiting.minds_pods = false;
        Some(rank.uid)
    }

    /// Note that a pod did not fit or that a call failed. With `wait_for_event`, the pod waits for an event of the cluster,
    /// because only an event can change the result. Otherwise, or if the cluster has changed since the attempt began, the pod
    /// waits only for its back-off.
    pub fn failed(&mut self, uid: &str, now_ms: u64, wait_for_event: bool) {
        let Some(waiting) = self.pods.get_mut(uid) else {
            return;
        };
        let moved = matches!(waiting.place, QueuePlace::InFlight { moves } if moves != self.moves);
        let delay = self.backoff.delay(waiting.attempts.saturating_sub(1));
        let delay = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        self.ready_ms.insert(uid.to_owned(), now_ms.saturating_add(delay));
        waiting.place = if wait_for_event && !moved {
            QueuePlace::Unschedulable { since_ms: now_ms }
        } else {
            QueuePlace::Backoff
        };
    }

    /// Note a change in the cluster: unschedulable pods may fit now.
    pub fn wake_all(&mut self) {
        self.moves += 1;
        for waiting in self.pods.values_mut() {
            if matches!(waiting.place, QueuePlace::Unschedulable { .. }) {
                waiting.place = QueuePlace::Backoff;
            }
        }
    }

    /// Note that a pod's refusal depends on other pods. Until the pod is tried again, [`wake_minding`](Queue::wake_minding) wakes
    /// it.
    pub fn minds_pods(&mut self, uid: &str) {
        if let Some(waiting) = self.pods.get_mut(uid) {
            waiting.minds_pods = true;
        }
    }

    /// Note that a pod was added to a node, or that labels by which pods on nodes are counted have changed. Pods that were
    /// refused because of other pods may fit now.
    pub fn wake_minding(&mut self) {
        for waiting in self.pods.values_mut().filter(|waiting| waiting.minds_pods) {
            if matches!(waiting.place, QueuePlace::Unschedulable { .. }) {
                waiting.place = QueuePlace::Backoff;
            }
        }
    }

    /// Note that the pod itself changed.
    pub fn wake(&mut self, uid: &str) {
        if let Some(waiting) = self.pods.get_mut(uid)
            && matches!(waiting.place, QueuePlace::Unschedulable { .. })
        {
            waiting.place = QueuePlace::Backoff;
        }
    }

    fn flush(&mut self, now_ms: u64) {
        for (uid, waiting) in &mut self.pods {
            if let QueuePlace::Unschedulable { since_ms } = waiting.place
                && now_ms.saturating_sub(since_ms) >= self.flush_ms
            {
                waiting.place = QueuePlace::Backoff;
            }
            if waiting.place == QueuePlace::Backoff && self.ready_ms.get(uid).is_none_or(|ready| *ready <= now_ms) {
                waiting.place = QueuePlace::Active;
                self.active.insert(waiting.rank.clone());
            }
        }
    }

    /// Return when a pod becomes active without an event.
    pub fn next_ms(&self) -> Option<u64> {
        let times = self.pods.iter().filter_map(|(uid, waiting)| match waiting.place {
            QueuePlace::Active => Some(0),
            QueuePlace::InFlight { .. } => None,
            QueuePlace::Backoff => Some(self.ready_ms.get(uid).copied().unwrap_or(0)),
            QueuePlace::Unschedulable { since_ms } => Some(since_ms.saturating_add(self.flush_ms)),
        });
        times.min()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn queue() -> Queue {
        let backoff = BackoffRange {
            first: Duration::from_millis(100),
            max: Duration::from_millis(1000),
        };
        Queue::new(backoff, 300_000)
    }

    fn rank(uid: &str, created: i128, priority: i64) -> Rank {
        Rank {
            priority: -priority,
            created,
            uid: uid.to_owned(),
        }
    }

    #[test]
    fn pods_come_in_the_order_of_priority_and_creation() {
        let mut queue = queue();
        for (uid, created, priority) in [("c", 3, 0), ("a", 1, 0), ("b", 2, 0), ("z", 9, 5)] {
            queue.add(rank(uid, created, priority));
        }
        let order: Vec<String> = std::iter::from_fn(|| queue.pop(0)).collect();
        assert_eq!(order, ["z", "a", "b", "c"]);
    }

    #[test]
    fn an_unschedulable_pod_waits_for_an_event_and_for_its_back_off() {
        let mut queue = queue();
        queue.add(rank("a", 1, 0));
        assert_eq!(queue.pop(0).as_deref(), Some("a"));
        queue.failed("a", 0, true);
        assert_eq!(queue.pop(10_000), None);
        queue.wake_all();
        assert_eq!(queue.pop(10_000).as_deref(), Some("a"));
        // The second wait is twice as long as the first.
        queue.failed("a", 10_000, true);
        queue.wake_all();
        assert_eq!(queue.pop(10_199), None);
        assert_eq!(queue.next_ms(), Some(10_200));
        assert_eq!(queue.pop(10_200).as_deref(), Some("a"));
    }

    #[test]
    fn a_placed_pod_wakes_only_who_minds_pods() {
        let mut queue = queue();
        for (uid, created) in [("a", 1), ("b", 2)] {
            queue.add(rank(uid, created, 0));
            assert_eq!(queue.pop(0).as_deref(), Some(uid));
            queue.failed(uid, 0, true);
        }
        queue.minds_pods("b");
        queue.wake_minding();
        assert_eq!(queue.pop(100).as_deref(), Some("b"));
        assert_eq!(queue.pop(100), None);
        // Only the reason of the last refusal counts.
        queue.failed("b", 100, true);
        queue.wake_minding();
        assert_eq!(queue.pop(10_000), None);
    }

    #[test]
    fn an_event_during_the_decision_is_not_lost() {
        let mut queue = queue();
        queue.add(rank("a", 1, 0));
        assert!(queue.pop(0).is_some());
        queue.wake_all();
        queue.failed("a", 0, true);
        assert_eq!(queue.pop(100).as_deref(), Some("a"));
    }

    /// A pod that failed for another reason returns to the queue after five minutes.
    #[test]
    fn an_error_is_tried_again_without_an_event() {
        let mut queue = queue();
        queue.add(rank("a", 1, 0));
        assert!(queue.pop(0).is_some());
        queue.failed("a", 0, false);
        assert_eq!(queue.pop(100).as_deref(), Some("a"));
        queue.failed("a", 100, true);
        assert_eq!(queue.pop(300_099), None);
        assert_eq!(queue.pop(300_100).as_deref(), Some("a"));
    }
}
