//! The victims of a preemption, chosen as kube-scheduler's DefaultPreemption does (`pkg/scheduler/framework/preemption`,
//! `plugins/defaultpreemption`): node by node, and only by the sums of requests.
//!
//! Simplifications: pods are evicted for resources only, and not for ports, spread, or anti-affinity. There are no PodDisruptionBudgets and no
//! start times (pods of one priority are ordered by UID), every node is considered, and the room is not kept free for the nominated pod.

use std::collections::BTreeMap;

use super::fit;
use super::view::{SchedulerNode, SchedulerPod, Taken};

/// A pod on a node, as preemption sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunningPod<'a> {
    /// The pod's UID.
    pub uid: &'a str,
    /// `spec.priority`
    pub priority: i32,
    /// The pod as the filters see it.
    pub pod: &'a SchedulerPod,
}

/// Return the UIDs of the pods of lower priority that must leave a node for a pod, or `None` if their eviction does not help or is not needed.
/// `running` are all pods on the node and on their way to it.
pub fn victims(pod: &SchedulerPod, priority: i32, node: &SchedulerNode, running: &[RunningPod<'_>]) -> Option<Vec<String>> {
    let fits_beside = |pods: &[RunningPod<'_>]| {
        let taken = Taken::by(pods.iter().map(|other| other.pod));
        fit::insufficient(pod, node, &taken.requests).is_empty()
    };
    let (mut lower, mut stay): (Vec<RunningPod<'_>>, Vec<RunningPod<'_>>) =
        running.iter().partition(|other| other.priority < priority);
    if !fits_beside(&stay) {
        return None;
    }
    // The pods of the highest priority are spared first.
    lower.sort_by_key(|other| (std::cmp::Reverse(other.priority), other.uid));
    let mut victims = Vec::new();
    for other in lower {
        stay.push(other);
        if !fits_beside(&stay) {
            stay.pop();
            victims.push(other.uid.to_owned());
        }
    }
    (!victims.is_empty()).then_some(victims)
}

/// Return the node with the least important victims. Nodes are compared by the highest priority among their victims, then by the
/// sum of the priorities, then by the number of victims; the lower value wins. On a tie, return the first by name.
pub fn pick(candidates: &BTreeMap<String, Vec<String>>, priority: impl Fn(&str) -> i32) -> Option<&String> {
    let price = |victims: &Vec<String>| {
        let priorities = || victims.iter().map(|uid| i64::from(priority(uid)));
        (priorities().max(), priorities().sum::<i64>(), victims.len())
    };
    candidates
        .iter()
        .min_by_key(|(_, victims)| price(victims))
        .map(|(node, _)| node)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEM: &str = "aliyun.com/gpu-mem";

    fn requests(units: u64) -> BTreeMap<String, u64> {
        BTreeMap::from([(MEM.to_owned(), units), ("pods".to_owned(), 1)])
    }

    /// Return the pods that a node with this many units would lose to a pod of priority 50. Pods are given as UID, units, and priority.
    fn lost(units: u64, of: u64, pods: &[(&str, u64, i32)]) -> Option<Vec<String>> {
        let view = |units| SchedulerPod {
            requests: requests(units),
            ..SchedulerPod::default()
        };
        let node = SchedulerNode {
            allocatable: BTreeMap::from([(MEM.to_owned(), of), ("pods".to_owned(), 10)]),
            ..SchedulerNode::default()
        };
        let views: Vec<SchedulerPod> = pods.iter().map(|(_, units, _)| view(*units)).collect();
        let running = pods.iter().zip(&views).map(|((uid, _, priority), pod)| RunningPod {
            uid,
            priority: *priority,
            pod,
        });
        victims(&view(units), 50, &node, &running.collect::<Vec<_>>())
    }

    #[test]
    fn as_few_go_as_the_sums_need_and_the_least_important_of_them() {
        let pods = [("a", 8, 5), ("b", 8, 1), ("c", 4, 1), ("rock", 4, 100)];
        let check = |units: u64, expected: Option<&[&str]>| {
            let found = lost(units, 24, &pods);
            assert_eq!(
                found,
                expected.map(|uids| uids.iter().map(|uid| (*uid).to_owned()).collect()),
                "{units}"
            );
        };
        check(4, Some(&["c"]));
        check(8, Some(&["b"]));
        check(12, Some(&["b", "c"]));
        check(20, Some(&["a", "b", "c"]));
        check(21, None);
    }

    #[test]
    fn a_sufficient_sum_finds_no_victims() {
        assert_eq!(lost(8, 32, &[("a", 12, 0), ("b", 12, 0)]), None);
    }

    #[test]
    fn the_node_with_the_least_important_victims_is_picked() {
        let list = |uids: &[&str]| uids.iter().map(|uid| (*uid).to_owned()).collect::<Vec<_>>();
        let candidates = BTreeMap::from([
            ("n1".to_owned(), list(&["five"])),
            ("n2".to_owned(), list(&["one", "uno"])),
            ("n3".to_owned(), list(&["one"])),
        ]);
        let priority = |uid: &str| if uid == "five" { 5 } else { 1 };
        assert_eq!(pick(&candidates, priority).map(String::as_str), Some("n3"));
    }
}
