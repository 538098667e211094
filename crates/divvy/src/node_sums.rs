//! The GPU memory that kube-scheduler itself counts, as sums over whole nodes, before it calls the extender.

use std::collections::BTreeMap;

use divvy_model::{Node, Phase, Pod};

/// The number of units of `aliyun.com/gpu-mem` on a node, as kube-scheduler counts them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeSum {
    /// The node's capacity (`status.capacity`).
    pub capacity: u64,
    /// The number of units that the kubelet offers now (`status.allocatable`). The units of failed GPUs are not included. It is 0
    /// while the agent is not running.
    pub offered: u64,
    /// The sum of the requests of the pods on the node.
    pub requested: u64,
}

impl NodeSum {
    /// Return the number of units that kube-scheduler considers free.
    pub fn free(&self) -> u64 {
        self.offered.saturating_sub(self.requested)
    }
}

/// Compute the sums of each node, by node name. As in kube-scheduler's plugin `NodeResourcesFit`, a pod counts until its phase is
/// Succeeded or Failed, even while it is being deleted.
pub fn sums(nodes: &[Node], pods: &[Pod]) -> BTreeMap<String, NodeSum> {
    let of = |node: &Node| NodeSum {
        capacity: node.capacity_units,
        offered: node.allocatable_units,
        requested: 0,
    };
    let mut sums: BTreeMap<String, NodeSum> = nodes.iter().map(|node| (node.name.clone(), of(node))).collect();
    for pod in pods
        .iter()
        .filter(|pod| !matches!(pod.phase, Phase::Succeeded | Phase::Failed))
    {
        if let Some(sum) = pod.node.as_ref().and_then(|node| sums.get_mut(node)) {
            let units = pod.request.effective_units().unwrap_or(u64::MAX);
            sum.requested = sum.requested.saturating_add(units);
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use divvy_model::{ContainerKind, ContainerRequest, PodRequest};

    use super::*;

    fn node(name: &str, offered: u64) -> Node {
        Node {
            name: name.to_owned(),
            capacity_units: 8,
            allocatable_units: offered,
            ..Node::default()
        }
    }

    fn pod(node: Option<&str>, units: u64) -> Pod {
        let container = ContainerRequest {
            name: "main".to_owned(),
            kind: ContainerKind::App,
            units,
            gpu_count: 0,
        };
        Pod {
            node: node.map(str::to_owned),
            request: PodRequest {
                containers: vec![container],
                ..PodRequest::default()
            },
            ..Pod::default()
        }
    }

    /// The kubelet offers the units, and pods ask for them.
    #[test]
    fn a_nodes_free_units_are_offers_less_requests() {
        let over = |phase| Pod {
            phase,
            // kube-scheduler uses the phase, while the ledger uses the containers.
            container_running: true,
            ..pod(Some("n1"), 4)
        };
        let going = Pod {
            deleting: true,
            ..pod(Some("n1"), 3)
        };
        let check = |offered: u64, pods: &[Pod], expected: u64| {
            let sums = sums(&[node("n1", offered), node("n2", 5)], pods);
            assert_eq!((sums["n1"].free(), sums["n2"].free()), (expected, 5), "{offered} {pods:?}");
            assert_eq!(sums["n1"].capacity, 8);
        };
        check(0, &[], 0);
        check(4, &[], 4);
        check(4, &[pod(Some("n1"), 3)], 1);
        check(4, &[pod(Some("n1"), 3), pod(Some("n1"), 1)], 0);
        check(4, &[pod(None, 4), pod(Some("elsewhere"), 4)], 4);
        check(4, &[going], 1);
        check(4, &[over(Phase::Succeeded), over(Phase::Failed)], 4);
        // A GPU with pods failed, so the pods request more than the node offers.
        check(2, &[pod(Some("n1"), 3)], 0);
        check(4, &[pod(Some("n1"), u64::MAX), pod(Some("n1"), u64::MAX)], 0);
    }
}
