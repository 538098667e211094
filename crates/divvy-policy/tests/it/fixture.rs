//! Fixtures that several tests share.

use divvy_placement::{Ask, Ledger};
pub(crate) use divvy_testkit::nodes::*;

/// A ledger with four nodes, written here as units/GPUs: n1 (32/2) with pods a (10 units on GPU 0) and b (4 units on GPU 1), n2
/// (16/1) filled by pod c, n3 without GPUs, and n4 (64/4), which is empty.
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
