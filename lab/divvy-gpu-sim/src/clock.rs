//! The clock of the ledgers.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Return the time of the monotonic clock. All processes have the same.
pub fn monotonic() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}
