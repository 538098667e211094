//! The wall clock, which the caller provides so that tests can control it.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};

/// The source of the server's time (creation timestamps, deletion timestamps, ages).
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl std::fmt::Debug for Clock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Clock({})", self.now())
    }
}

impl Clock {
    /// Return the machine's clock.
    pub fn system() -> Clock {
        Clock(Arc::new(Timestamp::now))
    }

    /// Return a clock that shows `start` now and advances with tokio's time, even if that is paused. Call it inside a runtime.
    pub fn of_tokio(start: Timestamp) -> Clock {
        let origin = tokio::time::Instant::now();
        Clock(Arc::new(move || {
            let passed = SignedDuration::try_from(origin.elapsed()).unwrap_or(SignedDuration::MAX);
            start.saturating_add(passed).unwrap_or(Timestamp::MAX)
        }))
    }

    /// Return a clock that calls `now`.
    pub fn new(now: impl Fn() -> Timestamp + Send + Sync + 'static) -> Clock {
        Clock(Arc::new(now))
    }

    /// Return the current time.
    pub fn now(&self) -> Timestamp {
        (self.0)()
    }

    /// Return the current time in RFC 3339 with whole seconds, as `metav1.Time` is written.
    pub(crate) fn timestamp(&self) -> String {
        self.timestamp_in(0)
    }

    pub(crate) fn timestamp_in(&self, seconds: i64) -> String {
        rfc3339(plus(self.now(), seconds))
    }

    /// Add seconds to a timestamp in RFC 3339. An invalid timestamp counts as the current time.
    pub(crate) fn shifted(&self, timestamp: &str, seconds: i64) -> String {
        rfc3339(plus(timestamp.parse().unwrap_or_else(|_| self.now()), seconds))
    }

    /// Return the seconds since a timestamp in RFC 3339: 0 if it is in the future, `None` if it is invalid.
    pub(crate) fn seconds_since(&self, timestamp: &str) -> Option<u64> {
        let then: Timestamp = timestamp.parse().ok()?;
        Some(u64::try_from(self.now().duration_since(then).as_secs()).unwrap_or(0))
    }
}

fn plus(time: Timestamp, seconds: i64) -> Timestamp {
    time.saturating_add(SignedDuration::from_secs(seconds))
        .unwrap_or(Timestamp::MAX)
}

fn rfc3339(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
