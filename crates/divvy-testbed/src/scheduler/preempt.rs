//! Who would have to go for a pod, as kube-scheduler's DefaultPreemption finds it (`pkg/scheduler/framework/preemption`,
//! `plugins/defaultpreemption`): node by node, by the filters alone, which know sums.
//!
//! Simpler: no PodDisruptionBudgets, no starting times (pods of one priority go by UID), every node is looked at, and other pods do not wait for
//! the one that was promised the room.

use std::collections::BTreeMap;

use super::fit::{NodeView, PodView, reasons};

/// A pod on a node, as far as preemption goes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Running {
    /// Its UID.
    pub uid: String,
    /// `spec.priority`
    pub priority: i32,
    /// Effective requests.
    pub requests: BTreeMap<String, u64>,
}

/// A pod that is being placed, and its `spec.priority`.
pub type Preemptor<'a> = (&'a PodView, i32);

/// The pods of lower priority that a node must lose; `None` if that does not help, or if none has to go.
pub fn victims((pod, priority): Preemptor<'_>, node: &NodeView, running: &[Running]) -> Option<Vec<String>> {
    let fits = |stay: &[&Running]| {
        let mut used = BTreeMap::new();
        for (resource, amount) in stay.iter().flat_map(|other| &other.requests) {
            *used.entry(resource.clone()).or_insert(0_u64) += amount;
        }
        reasons(pod, node, &used).is_empty()
    };
    let (mut lower, mut stay): (Vec<&Running>, Vec<&Running>) = running.iter().partition(|other| other.priority < priority);
    if lower.is_empty() || !fits(&stay) {
        return None;
    }
    // The most important are let off first.
    lower.sort_by_key(|other| (std::cmp::Reverse(other.priority), other.uid.clone()));
    let mut victims = Vec::new();
    for other in lower {
        stay.push(other);
        if !fits(&stay) {
            stay.pop();
            victims.push(other.uid.clone());
        }
    }
    (!victims.is_empty()).then_some(victims)
}

/// The node whose victims matter least: the lowest priority at the top, then the lowest sum of priorities, then the fewest; of equals the first by name.
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

    fn node(units: u64) -> NodeView {
        NodeView {
            allocatable: BTreeMap::from([(MEM.to_owned(), units), ("pods".to_owned(), 10)]),
            ready: true,
            ..NodeView::default()
        }
    }

    fn running(pods: &[(&str, u64, i32)]) -> Vec<Running> {
        let one = |(uid, units, priority): &(&str, u64, i32)| Running {
            uid: (*uid).to_owned(),
            priority: *priority,
            requests: requests(*units),
        };
        pods.iter().map(one).collect()
    }

    #[test]
    fn as_few_go_as_the_sums_need_and_the_least_important_of_them() {
        let pods = [("a", 8, 5), ("b", 8, 1), ("c", 4, 1), ("rock", 4, 100)];
        let check = |units: u64, expected: Option<&[&str]>| {
            let pod = PodView {
                requests: requests(units),
                ..PodView::default()
            };
            let found = victims((&pod, 50), &node(24), &running(&pods));
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
    fn where_the_sum_is_enough_nobody_is_found_whatever_single_gpus_have() {
        let pod = PodView {
            requests: requests(8),
            ..PodView::default()
        };
        assert_eq!(victims((&pod, 50), &node(32), &running(&[("a", 12, 0), ("b", 12, 0)])), None);
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
