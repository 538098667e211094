//! The monotonic clock.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The time on the clock that the guards read, too.
pub(crate) fn monotonic() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
