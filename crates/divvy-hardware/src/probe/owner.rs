//! The thread that owns the driver. It opens the driver, makes all driver calls, and reopens the driver when that may help.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::hub::Hub;
use super::{log, pods, spawn};
use crate::backend::{Backend, Event};
use crate::{Code, Error, Failure, Known};

/// The intervals at which the driver is reopened.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// The minimum time between two attempts after the driver could not be opened or used.
    reopen: Duration,
    /// The interval while a GPU is lost. The driver's library considers a GPU lost until the library is initialized again.
    reopen_for_lost: Duration,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            reopen: Duration::from_secs(1),
            reopen_for_lost: Duration::from_secs(30),
        }
    }
}

/// The number of requests that may wait for the driver.
const QUEUE: usize = 32;

/// A request that only the driver can answer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Question {
    /// Read all GPUs.
    Snapshot,
    /// Read the processes on all GPUs.
    Processes,
}

/// A request for the driver, and where to send the answer.
#[derive(Debug)]
pub(super) struct Job {
    question: Question,
    answer: SyncSender<Result<Value, Failure>>,
}

/// Send a request to the owner and wait for the answer. The watchdog handles a driver that hangs.
pub(super) fn ask(jobs: &SyncSender<Job>, question: Question) -> Result<Value, Failure> {
    let gone = || Failure::new(Code::Unknown, "the probe's driver thread has ended");
    let (answer, answered) = sync_channel(1);
    jobs.send(Job { question, answer }).map_err(|_| gone())?;
    answered.recv().map_err(|_| gone())?
}

struct Owner<O> {
    open: O,
    pace: Pace,
    hub: Arc<Hub>,
    backend: Option<Box<dyn Backend>>,
    opened_at: Option<Instant>,
    /// Why there is no backend.
    failure: Failure,
    /// The last known GPUs. They outlive the backend, because a lost GPU no longer reports its UUID.
    known: Known,
    /// The host's `/proc`.
    proc_root: PathBuf,
}

/// Start the thread. It opens the driver immediately.
pub(super) fn start<O>(hub: Arc<Hub>, pace: Pace, proc_root: PathBuf, open: O) -> Result<SyncSender<Job>, Error>
where
    O: FnMut() -> Result<Box<dyn Backend>, Failure> + Send + 'static,
{
    let (sender, jobs) = sync_channel(QUEUE);
    let mut owner = Owner {
        open,
        pace,
        hub,
        backend: None,
        opened_at: None,
        failure: Failure::new(Code::Unknown, "the driver was not opened yet"),
        known: Known::default(),
        proc_root,
    };
    // This thread has the default stack size, because the driver's library runs on it.
    let thread = thread::Builder::new().name("owner".to_owned());
    let spawned = thread.spawn(move || owner.run(&jobs)).map(drop);
    spawned.map_err(|source| Error::io("cannot start the thread", "owner", source))?;
    Ok(sender)
}

impl<O: FnMut() -> Result<Box<dyn Backend>, Failure>> Owner<O> {
    fn run(&mut self, jobs: &Receiver<Job>) {
        self.ensure_open();
        for job in jobs {
            let answer = self.perform(job.question);
            // The client may be gone by now.
            let _ = job.answer.send(answer);
        }
    }

    fn ensure_open(&mut self) {
        if self.backend.is_some() || self.opened_at.is_some_and(|at| at.elapsed() < self.pace.reopen) {
            return;
        }
        let opened = (self.open)();
        self.opened_at = Some(Instant::now());
        match opened {
            Ok(mut backend) => {
                forward(backend.events(), self.hub.clone());
                self.backend = Some(backend);
            }
            Err(failure) => {
                if failure != self.failure {
                    log(format_args!("{failure}"));
                }
                self.failure = failure;
            }
        }
    }

    fn perform(&mut self, question: Question) -> Result<Value, Failure> {
        self.ensure_open();
        let Some(backend) = &mut self.backend else {
            return Err(self.failure.clone());
        };
        let mut lost = false;
        let answer = match question {
            Question::Snapshot => backend.snapshot().map(|snapshot| {
                let snapshot = self.known.complete(snapshot);
                lost = !snapshot.unreadable.is_empty() || snapshot.gpus.iter().any(|gpu| gpu.lost);
                serde_json::to_value(snapshot)
            }),
            Question::Processes => backend.processes().map(|mut processes| {
                pods::name(&self.proc_root, &mut processes);
                serde_json::to_value(processes)
            }),
        };
        let expired = self.opened_at.is_none_or(|at| at.elapsed() >= self.pace.reopen_for_lost);
        if answer.is_err() {
            self.backend = None;
        }
        if lost && expired {
            self.backend = None;
            // Reopen immediately: without a backend, XIDs of the other GPUs are lost.
            self.ensure_open();
        }
        if let Err(failure) = &answer {
            log(format_args!("{failure}"));
            self.failure = failure.clone();
        }
        answer?.map_err(|error| Failure::new(Code::Unknown, format!("the answer cannot be written as JSON: {error}")))
    }
}

/// Pass on a backend's events until the backend is dropped.
fn forward(events: Receiver<Event>, hub: Arc<Hub>) {
    let forwarding = spawn("forward", move || {
        let mut last = String::new();
        for event in events {
            match event {
                Event::Xid { uuid, xid, gi, ci } => {
                    log(format_args!("XID {xid} on {}", uuid.as_deref().unwrap_or("an unnamed GPU")));
                    hub.publish(uuid, xid, gi, ci);
                }
                // Log repeated failures with the same text only once.
                Event::Degraded(text) if text == last => {}
                Event::Degraded(text) => {
                    log(format_args!("{text}"));
                    last = text;
                }
            }
        }
    });
    if let Err(error) = forwarding {
        log(format_args!("XIDs are not reported: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Sender, channel};

    use super::*;
    use crate::{GpuFacts, GpuProcesses, Snapshot};

    /// A driver with scripted answers.
    struct Scripted {
        answers: Arc<Mutex<Vec<Result<Snapshot, Failure>>>>,
        events: Option<Sender<Event>>,
    }

    impl Backend for Scripted {
        fn snapshot(&mut self) -> Result<Snapshot, Failure> {
            self.answers.lock().expect("lock").remove(0)
        }
        fn processes(&mut self) -> Result<Vec<GpuProcesses>, Failure> {
            Ok(Vec::new())
        }
        fn events(&mut self) -> Receiver<Event> {
            let (sender, receiver) = channel();
            self.events = Some(sender);
            receiver
        }
    }

    /// Start an owner of a driver with these answers. Also return how often the owner opened the driver.
    fn scripted(pace: Pace, answers: Vec<Result<Snapshot, Failure>>) -> (SyncSender<Job>, Arc<Mutex<u32>>) {
        let (answers, opened) = (Arc::new(Mutex::new(answers)), Arc::new(Mutex::new(0)));
        let open = {
            let opened = opened.clone();
            move || {
                *opened.lock().expect("lock") += 1;
                let answers = answers.clone();
                Ok(Box::new(Scripted { answers, events: None }) as Box<dyn Backend>)
            }
        };
        (
            start(Arc::new(Hub::new()), pace, "/proc".into(), open).expect("thread"),
            opened,
        )
    }

    fn snapshot(lost: bool) -> Snapshot {
        let gpu = GpuFacts {
            uuid: "GPU-a".to_owned(),
            lost,
            ..GpuFacts::default()
        };
        Snapshot {
            v: 1,
            driver: "1".to_owned(),
            cuda: String::new(),
            gpus: vec![gpu],
            unreadable: Vec::new(),
        }
    }

    #[test]
    fn a_driver_that_fails_is_opened_again_but_not_at_every_question() {
        let pace = Pace {
            reopen: Duration::from_millis(200),
            ..Pace::default()
        };
        let failure = Failure::new(Code::DriverNotLoaded, "gone");
        let (jobs, opened) = scripted(pace, vec![Ok(snapshot(false)), Err(failure.clone()), Ok(snapshot(false))]);
        let started = Instant::now();
        assert!(ask(&jobs, Question::Snapshot).is_ok());
        assert_eq!(ask(&jobs, Question::Snapshot), Err(failure));
        while ask(&jobs, Question::Snapshot).is_err() {
            assert!(started.elapsed() < Duration::from_secs(10));
            thread::sleep(Duration::from_millis(5));
        }
        assert!(started.elapsed() >= pace.reopen);
        assert_eq!(*opened.lock().expect("lock"), 2);
    }

    #[test]
    fn a_driver_is_opened_anew_while_a_gpu_is_lost_and_left_alone_otherwise() {
        for (lost, wait, opens) in [(true, 0, 4), (true, 3600, 1), (false, 0, 1)] {
            let pace = Pace {
                reopen: Duration::ZERO,
                reopen_for_lost: Duration::from_secs(wait),
            };
            let (jobs, opened) = scripted(pace, vec![Ok(snapshot(lost)); 3]);
            for _ in 0..3 {
                assert_eq!(ask(&jobs, Question::Snapshot).expect("snapshot")["gpus"][0]["lost"], lost);
            }
            // The owner reopens the driver after its answer, so wait with one more request.
            ask(&jobs, Question::Processes).expect("processes");
            assert_eq!(*opened.lock().expect("lock"), opens, "lost: {lost}, wait: {wait}");
        }
    }
}
