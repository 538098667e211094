//! The victims of a preemption, chosen as kube-scheduler's DefaultPreemption does (`pkg/scheduler/framework/preemption`,
//! `plugins/defaultpreemption`): node by node, only with the filters, and with the victims removed from the sums, the ports, and the label
//! counts.
//!
//! Simplifications: there are no PodDisruptionBudgets and no start times (pods of one priority are ordered by UID), every node is
//! considered, and the room is not kept free for the nominated pod. A victim that is already being deleted is in no count of
//! PodTopologySpread and is therefore not subtracted; kube-scheduler subtracts it.

use std::collections::BTreeMap;

use super::filters::Cycle;
use super::view::{NodeView, PodView, Taken};

/// A pod on a node, as preemption sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Running<'a> {
    /// The pod's UID.
    pub uid: &'a str,
    /// `spec.priority`
    pub priority: i32,
    /// The pod as the filters see it.
    pub pod: &'a PodView,
}

/// A pod that is being placed, in the cluster with all its pods, and its `spec.priority`.
pub type Preemptor<'a, 'c> = (&'c Cycle<'a>, i32);

/// Return the UIDs of the pods of lower priority that must leave a node, or `None` if their eviction does not help or is not needed.
/// `running` are all pods on the node and on their way to it.
pub fn victims<'a>((cycle, priority): Preemptor<'a, '_>, node: &'a NodeView, running: &[Running<'a>]) -> Option<Vec<String>> {
    let taken = |pods: &[Running<'_>]| Taken::by(pods.iter().map(|other| other.pod));
    let (mut lower, mut stay): (Vec<Running<'a>>, Vec<Running<'a>>) = running.iter().partition(|other| other.priority < priority);
    let hopeless = || {
        cycle
            .refusal(node, &taken(running))
            .is_some_and(|refusal| !refusal.resolvable)
    };
    if lower.is_empty() || hopeless() {
        return None;
    }
    let mut cycle = cycle.clone();
    for other in &lower {
        cycle.count(node, other.pod, -1);
    }
    if cycle.refusal(node, &taken(&stay)).is_some() {
        return None;
    }
    // The pods of the highest priority are spared first.
    lower.sort_by_key(|other| (std::cmp::Reverse(other.priority), other.uid));
    let mut victims = Vec::new();
    for other in lower {
        stay.push(other);
        cycle.count(node, other.pod, 1);
        if cycle.refusal(node, &taken(&stay)).is_some() {
            stay.pop();
            cycle.count(node, other.pod, -1);
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
    use serde_json::{Value, json};

    use super::super::cases;
    use super::super::view::Cluster;
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

    /// A pod on a node: UID, node, priority, and the filters' view of the pod.
    type Placed<'a> = (&'a str, &'a str, i32, PodView);

    /// Return the pods that a node would lose to a pod of priority 50.
    fn lost(pod: &PodView, nodes: &BTreeMap<String, NodeView>, name: &str, placed: &[Placed<'_>]) -> Option<Vec<String>> {
        let namespaces = BTreeMap::new();
        let cluster = Cluster {
            nodes,
            pods: placed.iter().map(|(_, node, _, pod)| (*node, pod)).collect(),
            namespaces: &namespaces,
        };
        let here = placed.iter().filter(|(_, node, ..)| *node == name);
        let running = here.map(|(uid, _, priority, pod)| Running {
            uid,
            priority: *priority,
            pod,
        });
        victims((&Cycle::new(pod, &cluster), 50), &nodes[name], &running.collect::<Vec<_>>())
    }

    /// Do the same as [`lost`] for a node with this many units, and pods given as UID, units, and priority.
    fn lost_units(units: u64, of: u64, pods: &[(&str, u64, i32)]) -> Option<Vec<String>> {
        let view = |units| PodView {
            requests: requests(units),
            ..PodView::default()
        };
        let pods: Vec<Placed<'_>> = pods
            .iter()
            .map(|(uid, units, priority)| (*uid, "n", *priority, view(*units)))
            .collect();
        lost(&view(units), &BTreeMap::from([("n".to_owned(), node(of))]), "n", &pods)
    }

    #[test]
    fn as_few_go_as_the_sums_need_and_the_least_important_of_them() {
        let pods = [("a", 8, 5), ("b", 8, 1), ("c", 4, 1), ("rock", 4, 100)];
        let check = |units: u64, expected: Option<&[&str]>| {
            let found = lost_units(units, 24, &pods);
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
        assert_eq!(lost_units(8, 32, &[("a", 12, 0), ("b", 12, 0)]), None);
    }

    /// Return nodes, each with its own value of the label `node`.
    fn labelled(names: &[&str]) -> BTreeMap<String, NodeView> {
        let one = |name: &&str| {
            let labels = cases::labels(&format!("node={name}"));
            let node = NodeView { labels, ..node(0) };
            ((*name).to_owned(), node)
        };
        names.iter().map(one).collect()
    }

    fn view(labels: &str, spec: Value) -> PodView {
        PodView::of(&cases::pod("p", labels, spec))
    }

    fn terms(kind: &str, app: &str) -> Value {
        let terms = json!([{"topologyKey": "node", "labelSelector": {"matchLabels": {"app": app}}}]);
        json!({"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution": terms}}})
    }

    #[test]
    fn victims_count_no_more_for_ports_spread_and_anti_affinity() {
        let port = json!({"containers": [{"name": "c", "image": "i", "ports": [{"hostPort": 80, "containerPort": 80}]}]});
        let spread = json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "node", "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "web"}}}]});
        let plain = || view("app=web", json!({}));
        for (case, pod, other, expected) in [
            ("ports", view("", port.clone()), view("", port), Some("b")),
            ("anti-affinity", view("", terms("podAntiAffinity", "web")), plain(), Some("b")),
            (
                "others' anti-affinity",
                plain(),
                view("", terms("podAntiAffinity", "web")),
                Some("b"),
            ),
            ("spread", view("app=web", spread.clone()), plain(), Some("b")),
            ("nothing", plain(), plain(), None),
        ] {
            // n2 is empty; "a" is on n1 as well and prevents nothing.
            let placed = [("a", "n1", 1, view("", json!({}))), ("b", "n1", 2, other)];
            let found = lost(&pod, &labelled(&["n1", "n2"]), "n1", &placed);
            assert_eq!(found, expected.map(|uid| vec![uid.to_owned()]), "{case}");
        }
        // If one more pod may stay, the more important one does.
        let placed = [("a", "n1", 1, plain()), ("b", "n1", 2, plain()), ("c", "n2", 1, plain())];
        assert_eq!(
            lost(&view("app=web", spread), &labelled(&["n1", "n2"]), "n1", &placed),
            Some(vec!["a".to_owned()])
        );
    }

    /// kube-scheduler calls such nodes UnschedulableAndUnresolvable and does not consider their pods.
    #[test]
    fn nobody_goes_for_a_pod_whose_affinity_or_node_affinity_is_in_the_way() {
        let nodes = labelled(&["n1", "n2"]);
        let placed = [
            ("web", "n2", 1, view("app=web", json!({}))),
            ("a", "n1", 1, view("", json!({}))),
        ];
        let together = view("app=web", terms("podAffinity", "web"));
        assert_eq!(lost(&together, &nodes, "n1", &placed), None);
        let elsewhere = view("", json!({"nodeSelector": {"node": "n2"}}));
        assert_eq!(lost(&elsewhere, &nodes, "n1", &placed), None);
    }

    #[test]
    fn a_pod_that_the_preemptor_wants_to_be_near_does_not_go() {
        let full = |units| NodeView {
            labels: cases::labels("node=n1"),
            ..node(units)
        };
        let with = |mut view: PodView, units| {
            view.requests = requests(units);
            view
        };
        let nodes = BTreeMap::from([("n1".to_owned(), full(8))]);
        let friend = with(view("app=web", json!({})), 4);
        let near = with(view("", terms("podAffinity", "web")), 4);
        // Without the only pod that its affinity matches, the pod may not be there at all.
        let alone = [
            ("friend", "n1", 1, friend.clone()),
            ("rock", "n1", 100, with(view("", json!({})), 4)),
        ];
        assert_eq!(lost(&near, &nodes, "n1", &alone), None);
        let lasting = [("friend", "n1", 100, friend), ("a", "n1", 1, with(view("", json!({})), 4))];
        assert_eq!(lost(&near, &nodes, "n1", &lasting), Some(vec!["a".to_owned()]));
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
