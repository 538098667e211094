//! Receives XIDs on a thread of its own.
//!
//! NVML drops events while no event set exists, so a new set is registered before the old one is freed. What does not work is tried again, and is
//! recorded in [`Reception`]. A GPU or driver that has no events at all is only a warning, as in NVIDIA's device plugin (internal/rm/health.go).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::Reception;
use super::ffi::{self, NvmlEventSet, RawEvent};
use crate::backend::{DriverCalls, DriverEvent, EventSink};

/// nvmlEventTypeXidCriticalError. ECC event types are not needed: relevant ECC errors arrive as XIDs 48, 63, 64, 94, and 95.
const XID: u64 = 8;
/// The duration of one wait, and therefore the delay until a stop takes effect.
const WAIT: Duration = Duration::from_secs(1);
/// The pause after a failed wait, so that a broken event set does not cause a busy loop.
const PAUSE: Duration = Duration::from_millis(500);
/// The interval at which GPUs that could not be registered are tried again.
const RETRY: Duration = Duration::from_secs(10);

/// The running thread. It ends when this value is dropped.
#[derive(Debug)]
pub(super) struct EventListener {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for EventListener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // NVML must not be shut down while the thread uses it. The watchdog handles a wait that hangs.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The GPUs of an event set.
struct RegisteredGpus {
    set: NvmlEventSet,
    /// UUIDs by device handle, because a lost GPU no longer reports its own UUID.
    names: BTreeMap<usize, String>,
    /// True if a GPU could not be registered for a reason that may pass.
    incomplete: bool,
}

/// Register all GPUs, then wait for events in a new thread. The sink gets every event that happens after this call has returned.
pub(super) fn listen(nvml: Arc<Nvml>, calls: DriverCalls, reception: Reception, sink: EventSink) -> EventListener {
    let stop = Arc::new(AtomicBool::new(false));
    let events = EventThreadState {
        nvml,
        calls,
        sink,
        reception,
    };
    let first = events.register();
    let (sink, reception) = (events.sink.clone(), events.reception.clone());
    let spawned = thread::Builder::new().name("nvml-events".to_owned()).spawn({
        let stop = stop.clone();
        move || events.run(&stop, first)
    });
    let thread = spawned
        .inspect_err(|error| {
            let text = format!("cannot start the thread for events: {error}");
            reception.fails(Instant::now(), text.clone());
            sink.send(DriverEvent::Degraded(text));
        })
        .ok();
    EventListener { stop, thread }
}

/// What the thread works with.
struct EventThreadState {
    nvml: Arc<Nvml>,
    calls: DriverCalls,
    sink: EventSink,
    reception: Reception,
}

/// Report whether an error means that the driver has no events, now and later.
fn is_unsupported(error: &NvmlError) -> bool {
    matches!(
        error,
        NvmlError::NotSupported | NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_)
    )
}

impl EventThreadState {
    fn run(&self, stop: &AtomicBool, mut now: Option<RegisteredGpus>) {
        let mut registered_at = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let broken = match &mut now {
                Some(registered) => self.wait(registered),
                None => true,
            };
            if broken {
                thread::sleep(PAUSE);
            }
            let retry = broken || now.as_ref().is_some_and(|registered| registered.incomplete);
            if retry && registered_at.elapsed() >= if broken { PAUSE } else { RETRY } {
                let next = self.register();
                // This frees the old set only after the new one exists.
                now = next.or(now);
                registered_at = Instant::now();
            }
        }
    }

    /// Wait once. Return whether a new event set is needed.
    fn wait(&self, registered: &mut RegisteredGpus) -> bool {
        let begin = Instant::now();
        let answer = {
            let _call = self.calls.enter_wait("nvmlEventSetWait", WAIT);
            registered.set.wait(WAIT)
        };
        match answer {
            Ok(event) => {
                self.reception.works();
                if let Some(event) = xid(&registered.names, event) {
                    self.sink.send(event);
                }
                false
            }
            Err(NvmlError::Timeout) => {
                self.reception.works();
                thread::sleep(rest(begin.elapsed()));
                false
            }
            Err(error) => {
                self.fails("waiting for events failed", &error);
                true
            }
        }
    }

    /// Record and log that no event of any GPU arrives.
    fn fails(&self, doing: &str, error: &NvmlError) {
        if is_unsupported(error) {
            self.degraded(format!("{doing}: {error}; GPUs are only polled"));
            return;
        }
        self.reception.fails(Instant::now(), format!("{doing}: {error}"));
        self.degraded(format!("{doing}: {error}; trying again"));
    }

    fn degraded(&self, text: String) {
        self.sink.send(DriverEvent::Degraded(text));
    }

    fn register(&self) -> Option<RegisteredGpus> {
        let _call = self.calls.enter("registering for events");
        let count = ffi::count(&self.nvml).map_err(|error| ("cannot count the GPUs that report errors", error));
        let set = NvmlEventSet::create(self.nvml.clone()).map_err(|error| ("cannot create an event set", error));
        let (mut set, count) = match set.and_then(|set| Ok((set, count?))) {
            Ok(made) => made,
            Err((doing, error)) => {
                self.fails(doing, &error);
                return None;
            }
        };
        let (mut names, mut failed) = (BTreeMap::new(), BTreeMap::new());
        let mut incomplete = false;
        for index in 0..count {
            let found = ffi::by_index(&self.nvml, index).and_then(|device| Ok((device.uuid()?, device)));
            let registering = found.map(|(uuid, device)| (register_gpu(&mut set, &device), uuid));
            let error = match registering {
                Ok((Ok(key), uuid)) => {
                    names.insert(key, uuid);
                    continue;
                }
                Ok((Err(error), _)) if is_unsupported(&error) => {
                    self.degraded(format!("GPU {index} does not report errors on its own; it is only polled"));
                    continue;
                }
                Ok((Err(error), uuid)) => {
                    failed.insert(uuid, format!("it cannot be registered for events: {error}"));
                    error
                }
                Err(error) => error,
            };
            incomplete = true;
            self.degraded(format!("GPU {index} cannot be registered for events: {error}; trying again"));
        }
        self.reception.registered(Instant::now(), failed);
        Some(RegisteredGpus { set, names, incomplete })
    }
}

/// Add a GPU to the event set. Return its [`ffi::device_key`].
fn register_gpu(set: &mut NvmlEventSet, device: &Device<'_>) -> Result<usize, NvmlError> {
    if ffi::supported_event_types(device)? & XID == 0 {
        return Err(NvmlError::NotSupported);
    }
    set.register(device, XID)?;
    Ok(ffi::device_key(device))
}

/// Return the pause after a wait in which no event happened. A library that does not wait at all, as some simulated ones, must not cause a busy loop.
fn rest(waited: Duration) -> Duration {
    if waited < WAIT / 2 { PAUSE } else { Duration::ZERO }
}

/// Convert an XID. If the handle is unknown, the fault concerns every GPU, because for some errors the driver names no GPU.
fn xid(names: &BTreeMap<usize, String>, event: RawEvent) -> Option<DriverEvent> {
    let uuid = names.get(&event.device).cloned();
    (event.kind & XID != 0).then(|| DriverEvent::Fault(super::fault(uuid, event.data, event.gi.zip(event.ci))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_does_not_wait_causes_no_busy_loop() {
        assert!(rest(Duration::ZERO) > Duration::ZERO);
        assert_eq!((rest(WAIT), rest(WAIT * 3)), (Duration::ZERO, Duration::ZERO));
    }

    /// Other events are dropped.
    #[test]
    fn an_xid_of_an_unknown_device_is_for_every_gpu() {
        let names = BTreeMap::from([(1, "GPU-a".to_owned())]);
        let event = |device, kind| RawEvent {
            device,
            kind,
            data: 79,
            gi: Some(1),
            ci: Some(0),
        };
        let found = |device, kind| match xid(&names, event(device, kind)) {
            Some(DriverEvent::Fault(fault)) => {
                assert_eq!((fault.name.as_str(), fault.code, fault.fatal), ("XID 79", 79, true));
                assert_eq!(fault.partition, Some((1, 0)));
                Some(fault.uuid)
            }
            _ => None,
        };
        assert_eq!(found(1, 8), Some(Some("GPU-a".to_owned())));
        assert_eq!(found(0, 8), Some(None));
        assert_eq!(found(1, 2), None);
    }
}
