//! Receives XIDs on a thread of its own.
//!
//! NVML drops events while no event set exists, so a new set is registered before the old one is freed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::ffi::{self, EventSet, RawEvent};
use crate::backend::{Calls, Event};

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
pub(super) struct Listener {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // NVML must not be shut down while the thread uses it. The watchdog handles a wait that hangs.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The GPUs of an event set.
struct Registered {
    set: EventSet,
    /// UUIDs by device handle, because a lost GPU no longer reports its own UUID.
    names: BTreeMap<usize, String>,
    /// True if a GPU could not be registered for a reason that may pass.
    incomplete: bool,
}

/// Register all GPUs, then wait for events in a new thread. The receiver gets every event that happens after this call has returned.
pub(super) fn listen(nvml: Arc<Nvml>, calls: Calls) -> (Listener, Receiver<Event>) {
    let (sender, receiver) = channel();
    let stop = Arc::new(AtomicBool::new(false));
    let first = register(&nvml, &calls, &sender);
    let spawned = thread::Builder::new().name("nvml-events".to_owned()).spawn({
        let (stop, sender) = (stop.clone(), sender.clone());
        move || run(&nvml, &calls, &stop, &sender, first)
    });
    let thread = spawned
        .inspect_err(|error| {
            let _ = sender.send(Event::Degraded(format!("cannot start the thread for events: {error}")));
        })
        .ok();
    (Listener { stop, thread }, receiver)
}

fn run(nvml: &Arc<Nvml>, calls: &Calls, stop: &AtomicBool, sender: &Sender<Event>, mut now: Option<Registered>) {
    let mut registered_at = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let broken = match &mut now {
            Some(registered) => wait(registered, calls, sender),
            None => true,
        };
        if broken {
            thread::sleep(PAUSE);
        }
        let retry = broken || now.as_ref().is_some_and(|registered| registered.incomplete);
        if retry && registered_at.elapsed() >= if broken { PAUSE } else { RETRY } {
            let next = register(nvml, calls, sender);
            // This frees the old set only after the new one exists.
            now = next.or(now);
            registered_at = Instant::now();
        }
    }
}

/// Wait once. Return whether a new event set is needed.
fn wait(registered: &mut Registered, calls: &Calls, sender: &Sender<Event>) -> bool {
    let begin = Instant::now();
    let answer = {
        let _call = calls.enter_wait("nvmlEventSetWait", WAIT);
        registered.set.wait(WAIT)
    };
    match answer {
        Ok(event) => {
            if let Some(event) = xid(&registered.names, event) {
                // An error means that the backend is being dropped.
                let _ = sender.send(event);
            }
            false
        }
        Err(NvmlError::Timeout) => {
            thread::sleep(rest(begin.elapsed()));
            false
        }
        Err(error) => {
            let _ = sender.send(Event::Degraded(format!("waiting for events failed: {error}; trying again")));
            true
        }
    }
}

/// Return the pause after a wait in which no event happened. A library that does not wait at all, as some simulated ones, must not cause a busy loop.
fn rest(waited: Duration) -> Duration {
    if waited < WAIT / 2 { PAUSE } else { Duration::ZERO }
}

/// Convert an XID. If the handle is unknown, the fault concerns every GPU, because for some errors the driver names no GPU.
fn xid(names: &BTreeMap<usize, String>, event: RawEvent) -> Option<Event> {
    let uuid = names.get(&event.device).cloned();
    (event.kind & XID != 0).then(|| Event::Fault(super::fault(uuid, event.data, event.gi.zip(event.ci))))
}

fn register(nvml: &Arc<Nvml>, calls: &Calls, sender: &Sender<Event>) -> Option<Registered> {
    let degraded = |text: String| {
        let _ = sender.send(Event::Degraded(text));
    };
    let _call = calls.enter("registering for events");
    let count = ffi::count(nvml);
    let count = count.map_err(|error| format!("cannot count the GPUs that report errors: {error}; trying again"));
    let set = EventSet::create(nvml.clone()).map_err(|error| format!("cannot create an event set: {error}; trying again"));
    let (mut set, count) = match set.and_then(|set| Ok((set, count?))) {
        Ok(made) => made,
        Err(text) => {
            degraded(text);
            return None;
        }
    };
    let (mut names, mut incomplete) = (BTreeMap::new(), false);
    for index in 0..count {
        let registering = ffi::by_index(nvml, index).and_then(|device| {
            let uuid = device.uuid()?;
            if ffi::supported_event_types(&device)? & XID == 0 {
                return Err(NvmlError::NotSupported);
            }
            set.register(&device, XID)?;
            Ok((ffi::device_key(&device), uuid))
        });
        match registering {
            Ok((key, uuid)) => drop(names.insert(key, uuid)),
            Err(NvmlError::NotSupported) => degraded(format!("GPU {index} does not report errors on its own; it is only polled")),
            Err(error) => {
                incomplete = true;
                degraded(format!("GPU {index} cannot be registered for events: {error}; trying again"));
            }
        }
    }
    Some(Registered { set, names, incomplete })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_does_not_wait_causes_no_busy_loop() {
        assert!(rest(Duration::ZERO) > Duration::ZERO);
        assert_eq!((rest(WAIT), rest(WAIT * 3)), (Duration::ZERO, Duration::ZERO));
    }

    #[test]
    fn an_xid_without_a_known_device_is_for_every_gpu_and_other_events_are_dropped() {
        let names = BTreeMap::from([(1, "GPU-a".to_owned())]);
        let event = |device, kind| RawEvent {
            device,
            kind,
            data: 79,
            gi: Some(1),
            ci: Some(0),
        };
        let found = |device, kind| match xid(&names, event(device, kind)) {
            Some(Event::Fault(fault)) => {
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
