//! Ledgers that several tests start from.

use divvy_placement::{Ask, Ledger};
pub(crate) use divvy_testkit::nodes::*;

/// The fixture of `docs/compatibility/gpushare.md`: n1 has 32 units on 2 GPUs, with a (10 on GPU 0) and b (4 on GPU 1); n2 has 16
/// units on 1 GPU, full with c; n3 has no GPUs; n4 has 64 units on 4 GPUs, empty.
pub(crate) fn fixture() -> Ledger {
    let mut ledger = Ledger::new(GIB);
    for (name, units, gpus) in [("n1", 32, 2), ("n2", 16, 1), ("n3", 0, 0), ("n4", 64, 4)] {
        ledger.apply_node(&gpushare_node(name, units, gpus));
    }
    for pod in [
        gpushare_pod("a", "n1", 0, 10),
        gpushare_pod("b", "n1", 1, 4),
        gpushare_pod("c", "n2", 0, 16),
    ] {
        ledger.apply_pod(pod);
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
