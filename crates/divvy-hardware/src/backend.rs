//! The seam between a driver and the probe.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::{Failure, GpuProcesses, Snapshot};

/// A driver. Calls may block; the probe makes them all on one thread and times them ([`Calls`]).
pub trait Backend: Send {
    /// Reads all GPUs. A GPU that cannot be read is part of the answer, not a failure.
    fn snapshot(&mut self) -> Result<Snapshot, Failure>;

    /// Reads the processes on all GPUs.
    fn processes(&mut self) -> Result<Vec<GpuProcesses>, Failure>;

    /// Starts to listen for errors that the driver reports by itself. What happens after this call returned is
    /// received; the thread behind it ends with the backend.
    fn events(&mut self) -> Receiver<Event>;
}

/// What a driver reports by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A critical error.
    Xid {
        /// Of this GPU; of all when the driver does not say.
        uuid: Option<String>,
        /// NVIDIA's number.
        xid: u64,
        /// GPU instance (MIG).
        gi: Option<u32>,
        /// Compute instance (MIG).
        ci: Option<u32>,
    },
    /// Events cannot be received, all or those of one GPU, for this reason. Polling still finds lost GPUs.
    Degraded(String),
}

/// The driver calls in flight, for the watchdog: nothing can interrupt a call that hangs in a driver, so the process
/// has to end.
#[derive(Debug, Clone)]
pub struct Calls {
    limit: Duration,
    running: Arc<Mutex<Running>>,
}

#[derive(Debug, Default)]
struct Running {
    last: u64,
    calls: BTreeMap<u64, (Cow<'static, str>, Instant, Duration)>,
}

/// Initialisation starts each GPU when nothing else keeps the driver loaded, seconds for each: 10 s for a call are
/// 60 s for it.
const INITIALISING: u32 = 6;

impl Calls {
    /// No call may take longer than `limit`, and no initialisation longer than six times that.
    pub fn new(limit: Duration) -> Calls {
        Calls {
            limit,
            running: Arc::default(),
        }
    }

    /// Notes a call as running until the answer is dropped.
    #[must_use = "the call counts as over when this is dropped"]
    pub fn enter(&self, what: impl Into<Cow<'static, str>>) -> Call<'_> {
        self.enter_for(what.into(), self.limit)
    }

    /// The same for loading and initialising a driver.
    #[must_use = "the call counts as over when this is dropped"]
    pub fn enter_init(&self, what: impl Into<Cow<'static, str>>) -> Call<'_> {
        self.enter_for(what.into(), self.limit.saturating_mul(INITIALISING))
    }

    /// The same for a call that was told to wait for `wait`.
    #[must_use = "the call counts as over when this is dropped"]
    pub fn enter_wait(&self, what: impl Into<Cow<'static, str>>, wait: Duration) -> Call<'_> {
        self.enter_for(what.into(), self.limit.saturating_add(wait))
    }

    fn enter_for(&self, what: Cow<'static, str>, limit: Duration) -> Call<'_> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.last += 1;
        let id = running.last;
        running.calls.insert(id, (what, Instant::now(), limit));
        Call { calls: self, id }
    }

    /// A call that runs for longer than it may at `now`, and for how long.
    pub fn overdue(&self, now: Instant) -> Option<(String, Duration)> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.calls.values().find_map(|(what, since, limit)| {
            let lasted = now.saturating_duration_since(*since);
            (lasted > *limit).then(|| (what.to_string(), lasted))
        })
    }
}

/// A call in flight.
#[derive(Debug)]
pub struct Call<'c> {
    calls: &'c Calls,
    id: u64,
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let mut running = self.calls.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.calls.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_overdue_only_while_it_runs_and_after_its_limit() {
        let calls = Calls::new(Duration::from_secs(10));
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let call = calls.enter("reading GPU 0");
        assert_eq!(calls.overdue(after(9)), None);
        let (what, lasted) = calls.overdue(after(11)).expect("overdue");
        assert_eq!(what, "reading GPU 0");
        assert!(lasted >= Duration::from_secs(10));
        drop(call);
        assert_eq!(calls.overdue(after(11)), None);
        let wait = calls.enter_wait("nvmlEventSetWait", Duration::from_secs(5));
        assert_eq!(calls.overdue(after(14)), None);
        assert!(calls.overdue(after(16)).is_some());
        drop(wait);
        let _init = calls.enter_init("nvmlInit");
        assert_eq!(calls.overdue(after(59)), None);
        assert!(calls.overdue(after(62)).is_some());
    }
}
