//! The interface between a driver and the probe.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use divvy_host::Files;
use divvy_model::{MiB, Vendor};

use crate::protocol::LimitAnswer;
use crate::{Failure, Fault, GpuFacts, GpuGauges, GpuProcesses, Snapshot, UtilizationSample};

/// A vendor's driver. Its methods may block; the probe calls them all on one thread and times the driver calls ([`DriverCalls`]).
pub trait Backend: Send {
    /// Read all GPUs of the vendor. A GPU that cannot be read is part of the result and not a failure.
    fn snapshot(&mut self) -> Result<Snapshot, Failure>;

    /// Add to a GPU what the driver counts and reports about its health: [`GpuFacts::uncorrected_ecc_errors`] and the values after it. A driver
    /// that has no such values adds nothing.
    fn examine(&mut self, _gpu: &mut GpuFacts) {}

    /// Read the processes on all GPUs of the vendor.
    fn processes(&mut self) -> Result<Vec<GpuProcesses>, Failure>;

    /// Read what the driver measures and counts of all GPUs of the vendor. A GPU that cannot be read has an error in the result.
    fn gauges(&mut self) -> Result<Vec<GpuGauges>, Failure>;

    /// Return the samples of how busy processes keep a GPU that are newer than a time in microseconds since 1970. They do not name pods.
    ///
    /// # Errors
    /// Fails with [`FailureCode::NotSupported`](crate::FailureCode::NotSupported) if the driver or the GPU does not measure this.
    fn utilization(&mut self, uuid: &str, since: u64) -> Result<Vec<UtilizationSample>, Failure>;

    /// Limit how much memory of a GPU the processes of a cgroup can allocate, and check that the driver has the limit.
    ///
    /// A pod's limit must hold for the sum of its containers. So a container's limit is only set if the pod has the same limit, and if that still
    /// holds afterwards: limits nest, or the container is alone. Otherwise it is left out ([`LimitAnswer::left_out`]).
    ///
    /// # Errors
    /// Fails with [`FailureCode::NotSupported`](crate::FailureCode::NotSupported) if the driver or the GPU cannot do this.
    fn limit(&mut self, uuid: &str, cgroup: &Cgroup, hard: MiB) -> Result<LimitAnswer, Failure>;

    /// Start to listen for errors that the driver reports on its own. `sink` gets every event that happens after this call has returned, until
    /// the backend is dropped.
    fn events(&mut self, sink: EventSink);

    /// Report whether a lost GPU stays lost for this backend until the driver is opened again.
    fn keeps_lost(&self) -> bool;
}

/// The cgroup of a pod or of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    /// Its directory.
    pub directory: PathBuf,
    /// The pod, if this is the cgroup of a container.
    pub pod: Option<PodOf>,
}

/// The pod of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodOf {
    /// The directory of its cgroup.
    pub directory: PathBuf,
    /// Whether no other container of the pod has the GPU.
    pub alone: bool,
}

/// Gets a driver's events, on the thread that receives them.
#[derive(Clone)]
pub struct EventSink(Arc<dyn Fn(DriverEvent) + Send + Sync>);

impl fmt::Debug for EventSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sink")
    }
}

impl EventSink {
    /// Make a sink of a function, which must not block.
    pub fn new(take: impl Fn(DriverEvent) + Send + Sync + 'static) -> EventSink {
        EventSink(Arc::new(take))
    }

    /// Pass on an event.
    pub fn send(&self, event: DriverEvent) {
        (self.0)(event);
    }
}

/// Tell the clients which files of a vendor's GPUs exist but cannot be read.
pub(crate) fn report(events: Option<&EventSink>, vendor: Vendor, files: &Files) {
    let troubles = files.troubles();
    if let (Some(events), false) = (events, troubles.is_empty()) {
        let more = match troubles.len().saturating_sub(MOST_TROUBLES) {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        let named = &troubles[..troubles.len().min(MOST_TROUBLES)];
        events.send(DriverEvent::Degraded(format!(
            "files of {} GPUs cannot be read: {}{more}",
            vendor.title(),
            named.join("; ")
        )));
    }
}

/// The maximum number of unreadable files that one event names.
const MOST_TROUBLES: usize = 8;

/// An event that the driver reports on its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DriverEvent {
    /// An error of a GPU.
    Fault(Fault),
    /// The reason why events of one GPU or of all GPUs cannot be received. Polling still detects lost GPUs.
    Degraded(String),
}

/// The driver calls in flight, for the watchdog. A call that hangs in a driver cannot be interrupted, so the watchdog ends the whole
/// process.
#[derive(Debug, Clone)]
pub struct DriverCalls {
    limit: Duration,
    running: Arc<Mutex<RunningCalls>>,
}

#[derive(Debug, Default)]
struct RunningCalls {
    last: u64,
    calls: BTreeMap<u64, (Cow<'static, str>, Instant, Duration)>,
}

/// The factor by which initialization may take longer than other calls. If no other process keeps the driver loaded, initialization starts
/// each GPU, which takes seconds per GPU. With a limit of 10 s per call, initialization may take 60 s.
const INITIALISING: u32 = 6;

impl DriverCalls {
    /// Create a set whose calls may take `limit`, and six times as long for initialization.
    pub fn new(limit: Duration) -> DriverCalls {
        DriverCalls {
            limit,
            running: Arc::default(),
        }
    }

    /// Count a call as running until the returned value is dropped.
    #[must_use = "dropping this value marks the call as finished"]
    pub fn enter(&self, what: impl Into<Cow<'static, str>>) -> RunningCall<'_> {
        self.enter_for(what.into(), self.limit)
    }

    /// Like [`DriverCalls::enter`], for loading and initializing a driver.
    #[must_use = "dropping this value marks the call as finished"]
    pub fn enter_init(&self, what: impl Into<Cow<'static, str>>) -> RunningCall<'_> {
        self.enter_for(what.into(), self.limit.saturating_mul(INITIALISING))
    }

    /// Like [`DriverCalls::enter`], for a call that itself waits for `wait`.
    #[must_use = "dropping this value marks the call as finished"]
    pub fn enter_wait(&self, what: impl Into<Cow<'static, str>>, wait: Duration) -> RunningCall<'_> {
        self.enter_for(what.into(), self.limit.saturating_add(wait))
    }

    fn enter_for(&self, what: Cow<'static, str>, limit: Duration) -> RunningCall<'_> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.last += 1;
        let id = running.last;
        running.calls.insert(id, (what, Instant::now(), limit));
        RunningCall { calls: self, id }
    }

    /// Return the name of a call that has exceeded its limit at `now`, and how long it has been running.
    pub fn overdue(&self, now: Instant) -> Option<(String, Duration)> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.calls.values().find_map(|(what, since, limit)| {
            let lasted = now.saturating_duration_since(*since);
            (lasted > *limit).then(|| (what.to_string(), lasted))
        })
    }
}

/// A driver call in flight.
#[derive(Debug)]
pub struct RunningCall<'c> {
    calls: &'c DriverCalls,
    id: u64,
}

impl Drop for RunningCall<'_> {
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
        let calls = DriverCalls::new(Duration::from_secs(10));
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
