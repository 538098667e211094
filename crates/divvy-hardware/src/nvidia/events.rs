//! XIDs, on a thread of their own.
//!
//! NVML forgets what happens while no event set exists, so a new set is registered before the old one is freed.

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

/// nvmlEventTypeXidCriticalError. ECC types are not asked for: what matters of them arrives as XIDs 48, 63, 64, 94, 95.
const XID: u64 = 8;
/// How long one wait lasts; also how soon a stop is noticed.
const WAIT: Duration = Duration::from_secs(1);
/// Pause after a failed wait: a broken set must not become a busy loop.
const PAUSE: Duration = Duration::from_millis(500);
/// When GPUs that could not be registered are tried again.
const RETRY: Duration = Duration::from_secs(10);

/// The running thread; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Listener {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // NVML must not be shut down while the thread uses it. A wait that hangs is the watchdog's case.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// GPUs of a set.
struct Registered {
    set: EventSet,
    /// UUIDs by handle: a lost GPU does not tell its own any more.
    names: BTreeMap<usize, String>,
    /// A GPU could not be registered for a reason that may pass.
    incomplete: bool,
}

/// Registers all GPUs, then waits in a new thread. Events after this returned are received.
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
            let _ = sender.send(Event::Degraded(format!("no thread for events: {error}")));
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
            // Only now is the old set freed.
            now = next.or(now);
            registered_at = Instant::now();
        }
    }
}

/// Waits once; whether the set has to be made anew.
fn wait(registered: &mut Registered, calls: &Calls, sender: &Sender<Event>) -> bool {
    let answer = {
        let _call = calls.enter_wait("nvmlEventSetWait", WAIT);
        registered.set.wait(WAIT)
    };
    match answer {
        Ok(event) => {
            if let Some(event) = xid(&registered.names, event) {
                // Nobody listens any more: the backend is being dropped.
                let _ = sender.send(event);
            }
            false
        }
        Err(NvmlError::Timeout) => false,
        Err(error) => {
            let _ = sender.send(Event::Degraded(format!("waiting for events: {error}; trying again")));
            true
        }
    }
}

/// An XID in our terms. A handle that is not known (the driver names none for some errors) stands for every GPU.
fn xid(names: &BTreeMap<usize, String>, event: RawEvent) -> Option<Event> {
    (event.kind & XID != 0).then(|| Event::Xid {
        uuid: names.get(&event.device).cloned(),
        xid: event.data,
        gi: event.gi,
        ci: event.ci,
    })
}

fn register(nvml: &Arc<Nvml>, calls: &Calls, sender: &Sender<Event>) -> Option<Registered> {
    let degraded = |text: String| {
        let _ = sender.send(Event::Degraded(text));
    };
    let _call = calls.enter("registering for events");
    let count = nvml.device_count();
    let (mut set, count) = match EventSet::create(nvml.clone()).and_then(|set| Ok((set, count?))) {
        Ok(made) => made,
        Err(error) => {
            degraded(format!("no event set: {error}; trying again"));
            return None;
        }
    };
    let (mut names, mut incomplete) = (BTreeMap::new(), false);
    for index in 0..count {
        let registering = nvml.device_by_index(index).and_then(|device| {
            let uuid = device.uuid()?;
            if ffi::supported_event_types(&device)? & XID == 0 {
                return Err(NvmlError::NotSupported);
            }
            set.register(&device, XID)?;
            Ok((ffi::device_key(&device), uuid))
        });
        match registering {
            Ok((key, uuid)) => drop(names.insert(key, uuid)),
            Err(NvmlError::NotSupported) => degraded(format!("GPU {index} reports no errors by itself; it is only polled")),
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
    fn an_xid_without_a_known_device_is_for_every_gpu_and_other_events_are_dropped() {
        let names = BTreeMap::from([(1, "GPU-a".to_owned())]);
        let event = |device, kind| RawEvent {
            device,
            kind,
            data: 79,
            gi: None,
            ci: None,
        };
        let found = |device, kind| match xid(&names, event(device, kind)) {
            Some(Event::Xid { uuid, xid: 79, .. }) => Some(uuid),
            _ => None,
        };
        assert_eq!(found(1, 8), Some(Some("GPU-a".to_owned())));
        assert_eq!(found(0, 8), Some(None));
        assert_eq!(found(1, 2), None);
    }
}
