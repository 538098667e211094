//! Fixtures that several tests share.

use divvy_model::{Node, Pod};
use divvy_placement::{Ask, Ledger};
pub(crate) use divvy_testkit::nodes::*;

/// Return the ledger of `docs/compatibility/gpushare.md`.
pub(crate) fn fixture() -> Ledger {
    let (nodes, pods) = gpushare_cluster();
    ledger(&nodes, &pods)
}

pub(crate) fn ledger(nodes: &[Node], pods: &[Pod]) -> Ledger {
    let mut ledger = Ledger::new(GIB);
    for node in nodes {
        ledger.apply_node(node);
    }
    for pod in pods {
        ledger.apply_pod(pod.clone());
    }
    ledger
}

pub(crate) fn ask(units: u64) -> Ask {
    Ask::new(units, GIB)
}
