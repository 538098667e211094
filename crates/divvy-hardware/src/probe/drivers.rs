//! The drivers of all vendors. Each driver is opened, queried, and reopened independently; their answers are merged into one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use divvy_model::{MiB, Vendor};

use super::log;
use crate::backend::{Backend, Cgroup, DriverEvent, EventSink};
use crate::protocol::LimitAnswer;
use crate::{
    Failure, FailureCode, Fault, GpuGauges, GpuProcesses, GpuSamples, LastKnownGpus, SNAPSHOT_VERSION, SamplesSince, Snapshot,
};

/// The intervals at which a driver is reopened.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReopenPace {
    /// The minimum time between two attempts after the driver could not be opened or used.
    pub(super) reopen: Duration,
    /// The interval while a GPU is lost, for a driver that keeps GPUs lost until it is opened again.
    pub(super) reopen_for_lost: Duration,
}

impl Default for ReopenPace {
    fn default() -> ReopenPace {
        ReopenPace {
            reopen: Duration::from_secs(1),
            reopen_for_lost: Duration::from_secs(30),
        }
    }
}

/// Opens the driver of a vendor.
pub(super) type Open = Box<dyn FnMut() -> Result<Box<dyn Backend>, Failure> + Send>;

/// Passes on a fault, on the thread that learned of it.
pub(super) type Publish = Arc<dyn Fn(Fault) + Send + Sync>;

/// A vendor's driver, which may be open, broken, or absent.
struct DriverSlot {
    vendor: Vendor,
    open: Open,
    backend: Option<Box<dyn Backend>>,
    opened_at: Option<Instant>,
    /// Why the driver could not be opened.
    failure: Failure,
    /// Whether the machine has no driver of this vendor, as far as the probe knows. This is not a failure as long as another
    /// vendor has GPUs.
    absent: bool,
    /// Whether this driver has ever had a GPU. From then on, its absence is a failure: otherwise its GPUs would count as lost.
    delivered: bool,
}

impl DriverSlot {
    fn ensure_open(&mut self, pace: ReopenPace, publish: Option<&Publish>) {
        if self.backend.is_some() || self.opened_at.is_some_and(|at| at.elapsed() < pace.reopen) {
            return;
        }
        let opened = (self.open)();
        self.opened_at = Some(Instant::now());
        match opened {
            Ok(mut backend) => {
                if let Some(publish) = publish {
                    backend.events(sink(publish.clone()));
                }
                self.backend = Some(backend);
                self.absent = false;
            }
            Err(failure) => {
                self.absent =
                    !self.delivered && matches!(failure.code, FailureCode::LibraryNotFound | FailureCode::DriverNotLoaded);
                self.failure = failure;
            }
        }
    }
}

/// The drivers of all vendors.
pub(super) struct Drivers {
    /// In the order of vendors.
    slots: Vec<DriverSlot>,
    pace: ReopenPace,
    /// Where to send faults, or `None` to ignore events.
    publish: Option<Publish>,
    /// The last known GPUs. They outlive the backends, because a lost GPU no longer reports its UUID.
    known: LastKnownGpus,
}

impl Drivers {
    /// Create the set without opening a driver. The first vendor is the one whose failure is reported if there are no GPUs at all.
    pub(super) fn new(vendors: Vec<(Vendor, Open)>, pace: ReopenPace, publish: Option<Publish>) -> Drivers {
        let slots = vendors.into_iter().map(|(vendor, open)| DriverSlot {
            vendor,
            open,
            backend: None,
            opened_at: None,
            failure: Failure::new(FailureCode::Unknown, "the driver was not opened yet"),
            absent: false,
            delivered: false,
        });
        Drivers {
            slots: slots.collect(),
            pace,
            publish,
            known: LastKnownGpus::default(),
        }
    }

    /// Open the drivers. Fail if none can be opened.
    pub(super) fn open(&mut self) -> Result<(), Failure> {
        for slot in &mut self.slots {
            slot.ensure_open(self.pace, self.publish.as_ref());
        }
        if self.slots.iter().any(|slot| slot.backend.is_some()) {
            Ok(())
        } else {
            Err(self.no_driver())
        }
    }

    /// Read all GPUs of all vendors.
    pub(super) fn snapshot(&mut self) -> Result<Snapshot, Failure> {
        let mut all = Snapshot {
            v: SNAPSHOT_VERSION,
            drivers: BTreeMap::new(),
            gpus: Vec::new(),
            unreadable: Vec::new(),
        };
        for (at, part) in self.ask(|backend| backend.snapshot())? {
            self.slots[at].delivered |= !part.gpus.is_empty();
            all.drivers.extend(part.drivers);
            all.gpus.extend(part.gpus);
            all.unreadable.extend(part.unreadable);
        }
        // The kernel also loads the drivers of other vendors for the graphics of a processor. If they have no GPU to offer, report why there is no
        // GPU of the first vendor.
        if all.gpus.is_empty() && all.unreadable.is_empty() && self.slots.first().is_some_and(|slot| slot.absent) {
            return Err(self.no_driver());
        }
        let all = self.known.complete(all.printable());
        self.reopen_for_lost(&all);
        Ok(all)
    }

    /// Read all GPUs of all vendors, with what the drivers count and report about their health.
    pub(super) fn examine(&mut self) -> Result<Snapshot, Failure> {
        let mut all = self.snapshot()?;
        // This comes last, so that it does not become part of what is known of a GPU.
        for gpu in all.gpus.iter_mut().filter(|gpu| !gpu.lost) {
            let slot = self.slots.iter_mut().find(|slot| slot.vendor == gpu.vendor);
            if let Some(backend) = slot.and_then(|slot| slot.backend.as_mut()) {
                backend.examine(gpu);
            }
        }
        Ok(all)
    }

    /// Read the processes on all GPUs of all vendors.
    pub(super) fn processes(&mut self) -> Result<Vec<GpuProcesses>, Failure> {
        let lists = self.ask(|backend| backend.processes())?;
        Ok(lists.into_iter().flat_map(|(_, list)| list).collect())
    }

    /// Read what the drivers measure and count of all GPUs of all vendors.
    pub(super) fn gauges(&mut self) -> Result<Vec<GpuGauges>, Failure> {
        let lists = self.ask(|backend| backend.gauges())?;
        Ok(lists
            .into_iter()
            .flat_map(|(_, list)| list)
            .map(GpuGauges::possible)
            .collect())
    }

    /// Read how busy processes keep these GPUs. The error of one GPU is part of the answer.
    pub(super) fn utilization(&mut self, asked: &[SamplesSince]) -> Vec<GpuSamples> {
        let read = |of: &SamplesSince| {
            let samples = self
                .backend_of(&of.uuid)
                .and_then(|backend| backend.utilization(&of.uuid, of.since));
            let (samples, error) = match samples {
                Ok(samples) => (samples, None),
                Err(failure) => (Vec::new(), Some(failure)),
            };
            GpuSamples {
                uuid: of.uuid.clone(),
                samples,
                error,
            }
        };
        asked.iter().map(read).collect()
    }

    /// Return the driver of a GPU that it has listed.
    fn backend_of(&mut self, uuid: &str) -> Result<&mut Box<dyn Backend>, Failure> {
        let vendor = self.known.gpu(uuid).map(|gpu| gpu.vendor);
        let slot = self.slots.iter_mut().find(|slot| Some(slot.vendor) == vendor);
        let Some(slot) = slot else {
            return Err(Failure::new(
                FailureCode::NotSupported,
                format!("no driver has listed a GPU {uuid}"),
            ));
        };
        slot.ensure_open(self.pace, self.publish.as_ref());
        match &mut slot.backend {
            Some(backend) => Ok(backend),
            None => Err(slot.failure.clone()),
        }
    }

    /// Limit how much memory of a GPU the processes of a cgroup can allocate.
    pub(super) fn limit(&mut self, uuid: &str, cgroup: &Cgroup, hard: MiB) -> Result<LimitAnswer, Failure> {
        self.backend_of(uuid)?.limit(uuid, cgroup, hard)
    }

    /// Ask every driver that exists. Return the answers with the positions in `slots`. If one driver fails, the whole request
    /// fails, because a reader would consider the GPUs that are missing from an answer to be lost.
    fn ask<T>(&mut self, ask: impl Fn(&mut dyn Backend) -> Result<T, Failure>) -> Result<Vec<(usize, T)>, Failure> {
        let mut answers = Vec::new();
        for (at, slot) in self.slots.iter_mut().enumerate() {
            slot.ensure_open(self.pace, self.publish.as_ref());
            match &mut slot.backend {
                Some(backend) => match ask(backend.as_mut()) {
                    Ok(answer) => answers.push((at, answer)),
                    Err(failure) => {
                        slot.backend = None;
                        slot.failure = failure.clone();
                        return Err(failure);
                    }
                },
                None if slot.absent => {}
                None => return Err(slot.failure.clone()),
            }
        }
        if answers.is_empty() {
            Err(self.no_driver())
        } else {
            Ok(answers)
        }
    }

    /// Return the reason why there is no GPU of any vendor.
    fn no_driver(&self) -> Failure {
        let Some((first, others)) = self.slots.split_first() else {
            return Failure::new(FailureCode::Unknown, "the probe was started without drivers");
        };
        let mut failure = first.failure.clone();
        // A kernel module that is not loaded shows which vendor's driver the machine has. A missing library does not.
        if failure.code == FailureCode::LibraryNotFound {
            for slot in others {
                let vendor = slot.vendor;
                failure.text += &match slot.backend {
                    Some(_) => format!("; for {vendor} GPUs: the driver is loaded but finds no GPU"),
                    None => format!("; for {vendor} GPUs: {}", slot.failure.text),
                };
            }
        }
        failure
    }

    fn reopen_for_lost(&mut self, seen: &Snapshot) {
        for slot in &mut self.slots {
            let lost = seen.unreadable.iter().any(|gpu| gpu.vendor == slot.vendor)
                || seen.gpus.iter().any(|gpu| gpu.vendor == slot.vendor && gpu.lost);
            let keeps_lost = slot.backend.as_ref().is_some_and(|backend| backend.keeps_lost());
            let expired = slot.opened_at.is_none_or(|at| at.elapsed() >= self.pace.reopen_for_lost);
            if lost && keeps_lost && expired {
                slot.backend = None;
                // Reopen immediately: without a backend, faults of the other GPUs are missed.
                slot.ensure_open(self.pace, self.publish.as_ref());
            }
        }
    }
}

/// Return what passes a backend's events on.
fn sink(publish: Publish) -> EventSink {
    let last = Mutex::new(String::new());
    EventSink::new(move |event| match event {
        // The clients come first: while a fault is not known, pods are placed on the GPU.
        DriverEvent::Fault(fault) => {
            publish(fault.clone());
            let gpu = fault.uuid.as_deref().unwrap_or("an unnamed GPU");
            log(format_args!("{} on {gpu}", fault.name));
        }
        DriverEvent::Degraded(text) => {
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            // Log repeated failures with the same text only once.
            if *last != text {
                log(format_args!("{text}"));
                *last = text;
            }
        }
    })
}
