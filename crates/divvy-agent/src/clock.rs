//! The monotonic clock.

use std::sync::LazyLock;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The time on the clock that the guards read, too.
pub(crate) fn monotonic() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

/// Return the next moment after `now` that is a whole number of periods after this program has begun. What is done at the same pace is then done at the same
/// moments: the processor sleeps in between.
pub(crate) fn next_tick(now: Instant, period: Duration) -> Instant {
    let since = nanos(now.saturating_duration_since(*BEGAN)) % nanos(period).max(1);
    now + (period - Duration::from_nanos(since))
}

pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
