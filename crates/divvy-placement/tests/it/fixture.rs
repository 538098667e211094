//! Ledgers that several tests start from.

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

/// Return filter's answer for an unknown pod: "" if the pod fits.
pub(crate) fn filter(ledger: &Ledger, node: &str, units: u64) -> String {
    match ledger.fits(node, &ask(units), "u-nobody") {
        Ok(()) => String::new(),
        Err(refusal) => refusal.filter_message(node),
    }
}

/// Return the free units of a node's GPUs.
pub(crate) fn free(ledger: &Ledger, node: &str) -> Vec<u64> {
    let view = ledger.node(node).expect("known");
    let gpus = view.state().map_or(0, |state| state.gpus.len());
    (0..gpus).map(|position| GIB.units_in(view.free(position))).collect()
}
