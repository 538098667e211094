//! Lists of the node's pods that a start requests alongside the watch. Each list may show an older state than the watch has reported.

use std::collections::BTreeMap;

use divvy_agent_core::{AgentCore, Listing};
use divvy_model::{Phase, Pod};
use proptest::prelude::*;

use crate::node::{Node, settings, simple};

#[test]
fn a_list_behind_the_watch_revives_no_ended_pod() {
    let mut node = Node::new(&[16384]);
    node.see(simple("q", 0, 12));
    node.admit("q").expect("admitted");
    node.start("q", "main").expect("started");
    let listing = node.core.begin_list();
    let snapshot: Vec<Pod> = node.pods.values().cloned().collect();
    node.change("q", |pod| (pod.phase, pod.container_running) = (Phase::Succeeded, false));
    node.core.listed(listing, snapshot);
    assert!(node.core.pod("q").expect("known").ended());
    // The pod's sandbox ends a moment later, and its memory is free.
    node.populated.remove("q");
    node.kubelet_forgets("q");
    node.see(simple("r", 0, 12));
    node.admit("r").expect("admitted");
    node.start("r", "main").expect("started");
}

#[test]
fn a_list_that_began_before_a_pod_came_does_not_forget_it() {
    let mut node = Node::new(&[16384]);
    node.see(simple("old", 0, 1));
    let listing = node.core.begin_list();
    let snapshot: Vec<Pod> = node.pods.values().cloned().collect();
    node.see(simple("p", 0, 12));
    node.admit("p").expect("admitted");
    node.start("p", "main").expect("started");
    node.core.listed(listing, snapshot);
    assert!(node.core.pod("p").is_some() && node.core.pod("old").is_some());
    let found = node.reconcile();
    assert_eq!(found.held.len(), 0, "{:?}", found.held);
}

#[test]
fn a_list_counts_for_pods_that_the_watch_left_out() {
    let mut core = AgentCore::new(settings());
    core.reset_pods(vec![simple("stays", 0, 1), simple("gone", 0, 1), simple("ends", 0, 1)]);
    let listing = core.begin_list();
    let mut ends = simple("ends", 0, 1);
    ends.phase = Phase::Failed;
    core.listed(listing, vec![simple("stays", 0, 1), ends, simple("comes", 0, 1)]);
    assert!(core.pod("stays").is_some() && core.pod("comes").is_some());
    assert!(core.pod("gone").is_none() && core.pod("ends").is_some_and(Pod::ended));
    // A list that failed is forgotten and changes nothing.
    let listing = core.begin_list();
    core.list_failed(listing);
    assert!(core.pod("stays").is_some());
}

/// One step of a random run.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// A change on the API server.
    Create,
    End(u8),
    Remove(u8),
    /// The watch reports this many of the changes that it has not reported yet.
    Watch(u8),
    /// The watch breaks and restarts with a list.
    Relist,
    /// The agent requests a list.
    Ask,
    /// The API server reads the state for its answer.
    Read,
    /// The answer with this number arrives.
    Arrive(u8),
    /// A call is abandoned.
    GiveUp,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Create),
        3 => any::<u8>().prop_map(Step::End),
        3 => any::<u8>().prop_map(Step::Remove),
        4 => (1..4u8).prop_map(Step::Watch),
        1 => Just(Step::Relist),
        3 => Just(Step::Ask),
        3 => Just(Step::Read),
        3 => any::<u8>().prop_map(Step::Arrive),
        1 => Just(Step::GiveUp),
    ]
}

proptest! {
    /// Once the watch has reported everything and no list is in progress, the agent knows exactly what the API server has,
    /// even if lists were outdated.
    #[test]
    fn the_watch_has_the_last_word_whatever_lists_arrive_when(steps in proptest::collection::vec(step(), 1..60)) {
        let mut core = AgentCore::new(settings());
        core.reset_pods(Vec::new());
        let mut server: BTreeMap<String, Pod> = BTreeMap::new();
        // UIDs, and the pods unless they are gone.
        let mut feed: Vec<(String, Option<Pod>)> = Vec::new();
        let mut told = 0;
        let mut lists: Vec<(Listing, Option<Vec<Pod>>)> = Vec::new();
        let mut created = 0;
        let pick = |server: &BTreeMap<String, Pod>, n: u8| server.keys().nth(usize::from(n) % server.len().max(1)).cloned();
        for step in steps {
            match step {
                Step::Create => {
                    created += 1;
                    let pod = simple(&format!("p{created}"), 0, 1);
                    server.insert(pod.uid.clone(), pod.clone());
                    feed.push((pod.uid.clone(), Some(pod)));
                }
                Step::End(n) => {
                    if let Some(pod) = pick(&server, n).and_then(|uid| server.get_mut(&uid)) {
                        pod.phase = Phase::Succeeded;
                        feed.push((pod.uid.clone(), Some(pod.clone())));
                    }
                }
                Step::Remove(n) => {
                    if let Some(uid) = pick(&server, n) {
                        server.remove(&uid);
                        feed.push((uid, None));
                    }
                }
                Step::Watch(n) => {
                    for (uid, pod) in feed.iter().skip(told).take(usize::from(n)) {
                        match pod {
                            Some(pod) => drop(core.apply_pod(pod.clone())),
                            None => core.delete_pod(uid),
                        }
                    }
                    told = feed.len().min(told + usize::from(n));
                }
                Step::Relist => {
                    core.reset_pods(server.values().cloned().collect());
                    told = feed.len();
                }
                Step::Ask => lists.push((core.begin_list(), None)),
                Step::Read => {
                    if let Some((_, answer)) = lists.iter_mut().find(|(_, answer)| answer.is_none()) {
                        *answer = Some(server.values().cloned().collect());
                    }
                }
                Step::Arrive(n) => {
                    let arrived = lists.iter().enumerate().filter(|(_, (_, answer))| answer.is_some());
                    let arrived: Vec<usize> = arrived.map(|(at, _)| at).collect();
                    if !arrived.is_empty() {
                        let (listing, answer) = lists.remove(arrived[usize::from(n) % arrived.len()]);
                        core.listed(listing, answer.unwrap_or_default());
                    }
                }
                Step::GiveUp => {
                    if let Some((listing, _)) = lists.pop() {
                        core.list_failed(listing);
                    }
                }
            }
        }
        for (listing, answer) in lists {
            match answer {
                Some(pods) => drop(core.listed(listing, pods)),
                None => core.list_failed(listing),
            }
        }
        for (uid, pod) in feed.iter().skip(told) {
            match pod {
                Some(pod) => drop(core.apply_pod(pod.clone())),
                None => core.delete_pod(uid),
            }
        }
        for n in 1..=created {
            let uid = format!("p{n}");
            prop_assert_eq!(core.pod(&uid), server.get(&uid));
        }
    }
}
