//! The thread that owns the drivers and makes all driver calls, one after the other.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use divvy_model::Vendor;
use serde_json::{Map, Value};

use super::drivers::{Drivers, Open, Publish, ReopenPace};
use super::hub::ProbeHub;
use super::{limit, log, pods};
use crate::protocol::{Kill, LimitAnswer, LimitRequest};
use crate::{Error, Failure, FailureCode, GpuSamples, SamplesSince};

/// The number of requests that may wait for the driver.
const QUEUE: usize = 32;

/// A request that only the driver can answer.
#[derive(Debug, Clone)]
pub(super) enum OwnerQuestion {
    /// Read all GPUs.
    Snapshot,
    /// Read the processes on all GPUs.
    Processes,
    /// Read how busy processes keep these GPUs.
    Utilization(Vec<SamplesSince>),
    /// Read what the drivers measure and count of all GPUs.
    Metrics,
    /// Limit the GPU memory of a pod or of a container.
    Limit(LimitRequest),
    /// End a process of a pod.
    Kill(Kill),
}

/// A request for the driver, and where to send the answer.
#[derive(Debug)]
pub(super) struct DriverJob {
    question: OwnerQuestion,
    answer: SyncSender<Result<Value, Failure>>,
}

/// Send a request to the owner and wait for the answer. The watchdog handles a driver that hangs.
pub(super) fn ask(jobs: &SyncSender<DriverJob>, question: OwnerQuestion) -> Result<Value, Failure> {
    let gone = || Failure::new(FailureCode::Unknown, "the probe's driver thread has ended");
    let (answer, answered) = sync_channel(1);
    jobs.send(DriverJob { question, answer }).map_err(|_| gone())?;
    answered.recv().map_err(|_| gone())?
}

struct DriverOwner {
    drivers: Drivers,
    /// The directory that contains the host's `/proc` and `/sys`.
    sys_root: PathBuf,
    /// The failure that was logged last, unless an answer followed.
    logged: Option<Failure>,
}

/// Start the thread. It opens the drivers immediately.
pub(super) fn start(
    hub: Arc<ProbeHub>,
    pace: ReopenPace,
    sys_root: PathBuf,
    vendors: Vec<(Vendor, Open)>,
) -> Result<SyncSender<DriverJob>, Error> {
    let (sender, jobs) = sync_channel(QUEUE);
    let publish: Publish = Arc::new(move |fault| hub.publish(fault));
    let mut owner = DriverOwner {
        drivers: Drivers::new(vendors, pace, Some(publish)),
        sys_root,
        logged: None,
    };
    // This thread has the default stack size, because the driver's library runs on it.
    let thread = thread::Builder::new().name("owner".to_owned());
    let spawned = thread.spawn(move || owner.run(&jobs)).map(drop);
    spawned.map_err(|source| Error::io("cannot start the thread", "owner", source))?;
    Ok(sender)
}

impl DriverOwner {
    fn run(&mut self, jobs: &Receiver<DriverJob>) {
        let opened = self.drivers.open();
        self.log(opened.err());
        for job in jobs {
            let answer = self.perform(job.question);
            // The client may be gone by now.
            let _ = job.answer.send(answer);
        }
    }

    fn perform(&mut self, question: OwnerQuestion) -> Result<Value, Failure> {
        // These come often, and the snapshots between them report a driver that fails.
        let is_logged = !matches!(question, OwnerQuestion::Utilization(_) | OwnerQuestion::Metrics);
        let answer = match question {
            OwnerQuestion::Snapshot => self.drivers.snapshot().map(serde_json::to_value),
            OwnerQuestion::Processes => self.drivers.processes().map(|mut processes| {
                pods::name(&self.sys_root.join("proc"), &mut processes);
                serde_json::to_value(processes)
            }),
            OwnerQuestion::Utilization(asked) => self.utilization(&asked).map(serde_json::to_value),
            OwnerQuestion::Metrics => self.drivers.gauges().map(serde_json::to_value),
            OwnerQuestion::Limit(wanted) => self.limit(&wanted).map(serde_json::to_value),
            OwnerQuestion::Kill(wanted) => {
                pods::kill(&self.sys_root.join("proc"), &wanted).map(|()| Ok(Value::Object(Map::new())))
            }
        };
        if is_logged {
            self.log(answer.as_ref().err().cloned());
        }
        answer?.map_err(|error| Failure::new(FailureCode::Unknown, format!("the answer cannot be written as JSON: {error}")))
    }

    fn utilization(&mut self, asked: &[SamplesSince]) -> Result<Vec<GpuSamples>, Failure> {
        SamplesSince::validate(asked)?;
        let mut gpus = self.drivers.utilization(asked);
        pods::name_sampled(&self.sys_root.join("proc"), &mut gpus);
        Ok(gpus)
    }

    fn limit(&mut self, wanted: &LimitRequest) -> Result<LimitAnswer, Failure> {
        let root = self.sys_root.join("sys/fs/cgroup");
        let cgroup = limit::cgroup(&root, wanted)?;
        limit::enable(&root, &cgroup.directory);
        self.drivers.limit(&wanted.uuid, &cgroup, wanted.hard)
    }

    /// Log a failure, unless it is the same as before.
    fn log(&mut self, failure: Option<Failure>) {
        if let Some(failure) = &failure
            && self.logged.as_ref() != Some(failure)
        {
            log(format_args!("{failure}"));
        }
        self.logged = failure;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::backend::{Backend, Cgroup, DriverEvent, EventSink};
    use crate::{
        DriverVersions, Fault, Gauges, GpuFacts, GpuGauges, GpuProcesses, SNAPSHOT_VERSION, Snapshot, UtilizationSample,
    };

    /// What a scripted driver does next: it cannot be opened, or it answers.
    type Answers = Arc<Mutex<Vec<Result<Snapshot, Failure>>>>;

    /// A driver with scripted answers.
    struct Scripted {
        vendor: Vendor,
        answers: Answers,
        events: Option<EventSink>,
    }

    impl Backend for Scripted {
        fn snapshot(&mut self) -> Result<Snapshot, Failure> {
            let answer = self.answers.lock().expect("lock").remove(0);
            if let (Ok(snapshot), Some(events)) = (&answer, &self.events) {
                for gpu in snapshot.gpus.iter().filter(|gpu| gpu.lost) {
                    let fault = Fault {
                        vendor: self.vendor,
                        uuid: Some(gpu.uuid.clone()),
                        code: 1,
                        fatal: true,
                        name: "gone".to_owned(),
                        partition: None,
                    };
                    events.send(DriverEvent::Fault(fault));
                }
            }
            answer
        }

        fn processes(&mut self) -> Result<Vec<GpuProcesses>, Failure> {
            Ok(vec![GpuProcesses {
                uuid: uuid(self.vendor),
                processes: Vec::new(),
                error: None,
            }])
        }

        fn gauges(&mut self) -> Result<Vec<GpuGauges>, Failure> {
            Ok(vec![GpuGauges {
                uuid: uuid(self.vendor),
                values: Gauges {
                    gpu_percent: Some(101),
                    temperature_celsius: Some(35),
                    ..Gauges::default()
                },
                parts: Vec::new(),
                failed: Default::default(),
                error: None,
            }])
        }

        fn utilization(&mut self, uuid: &str, since: u64) -> Result<Vec<UtilizationSample>, Failure> {
            match self.vendor {
                Vendor::Nvidia => Ok(vec![UtilizationSample {
                    pid: 7,
                    pod: None,
                    container: None,
                    at: since + 1,
                    percent: 30,
                }]),
                Vendor::Amd | Vendor::Intel => Err(Failure::new(FailureCode::NotSupported, format!("not of {uuid}"))),
            }
        }

        fn limit(&mut self, uuid: &str, _: &Cgroup, hard: divvy_model::MiB) -> Result<LimitAnswer, Failure> {
            if uuid == self::uuid(self.vendor) {
                Ok(LimitAnswer {
                    used: hard,
                    left_out: false,
                })
            } else {
                Err(Failure::new(FailureCode::Unknown, format!("{} has no {uuid}", self.vendor)))
            }
        }

        fn events(&mut self, sink: EventSink) {
            self.events = Some(sink);
        }

        fn keeps_lost(&self) -> bool {
            self.vendor == Vendor::Nvidia
        }
    }

    /// A vendor with a scripted driver. If `closed` is set, opening the driver fails with it. `opened` counts how often the
    /// driver was opened.
    struct Script {
        vendor: Vendor,
        answers: Answers,
        closed: Arc<Mutex<Option<Failure>>>,
        opened: Arc<Mutex<u32>>,
    }

    impl Script {
        fn new(vendor: Vendor, answers: Vec<Result<Snapshot, Failure>>) -> Script {
            Script {
                vendor,
                answers: Arc::new(Mutex::new(answers)),
                closed: Arc::default(),
                opened: Arc::default(),
            }
        }

        fn absent(vendor: Vendor) -> Script {
            let script = Script::new(vendor, Vec::new());
            script.close(Some(absence(vendor)));
            script
        }

        fn close(&self, failure: Option<Failure>) {
            *self.closed.lock().expect("lock") = failure;
        }

        fn then(&self, answer: Result<Snapshot, Failure>) {
            self.answers.lock().expect("lock").push(answer);
        }

        fn opened(&self) -> u32 {
            *self.opened.lock().expect("lock")
        }

        fn open(&self) -> (Vendor, Open) {
            let (vendor, answers) = (self.vendor, self.answers.clone());
            let (closed, opened) = (self.closed.clone(), self.opened.clone());
            let open = move || {
                if let Some(failure) = closed.lock().expect("lock").clone() {
                    return Err(failure);
                }
                *opened.lock().expect("lock") += 1;
                Ok(Box::new(Scripted {
                    vendor,
                    answers: answers.clone(),
                    events: None,
                }) as Box<dyn Backend>)
            };
            (vendor, Box::new(open))
        }
    }

    fn absence(vendor: Vendor) -> Failure {
        match vendor {
            Vendor::Nvidia => Failure::new(FailureCode::LibraryNotFound, "no library"),
            Vendor::Amd => Failure::new(FailureCode::DriverNotLoaded, "no amdgpu"),
            Vendor::Intel => Failure::new(FailureCode::DriverNotLoaded, "no xe"),
        }
    }

    fn uuid(vendor: Vendor) -> String {
        format!("{}-0", vendor.name())
    }

    /// Start an owner of these drivers.
    fn owner(pace: ReopenPace, scripts: &[&Script]) -> SyncSender<DriverJob> {
        let vendors = scripts.iter().map(|script| script.open()).collect();
        start(Arc::new(ProbeHub::new()), pace, "/".into(), vendors).expect("thread")
    }

    /// A pace without pauses: every request reopens a driver that is broken or keeps a GPU lost.
    const AT_ONCE: ReopenPace = ReopenPace {
        reopen: Duration::ZERO,
        reopen_for_lost: Duration::ZERO,
    };

    fn of(vendor: Vendor, lost: bool) -> Snapshot {
        let gpu = GpuFacts {
            vendor,
            uuid: uuid(vendor),
            lost,
            ..GpuFacts::default()
        };
        let driver = DriverVersions {
            version: format!("{vendor} 1"),
            cuda: String::new(),
        };
        Snapshot {
            v: SNAPSHOT_VERSION,
            drivers: BTreeMap::from([(vendor, driver)]),
            gpus: vec![gpu],
            unreadable: Vec::new(),
        }
    }

    fn without_gpus(vendor: Vendor) -> Snapshot {
        Snapshot {
            gpus: Vec::new(),
            ..of(vendor, false)
        }
    }

    /// Take a snapshot and return the UUIDs.
    fn uuids(jobs: &SyncSender<DriverJob>) -> Result<Vec<String>, Failure> {
        let answer = ask(jobs, OwnerQuestion::Snapshot)?;
        let snapshot: Snapshot = serde_json::from_value(answer).expect("a snapshot");
        snapshot.validate().expect("valid");
        Ok(snapshot.gpus.into_iter().map(|gpu| gpu.uuid).collect())
    }

    #[test]
    fn a_failed_driver_is_reopened_only_after_a_pause() {
        let pace = ReopenPace {
            reopen: Duration::from_millis(200),
            ..ReopenPace::default()
        };
        let failure = Failure::new(FailureCode::DriverNotLoaded, "gone");
        let seen = || Ok(of(Vendor::Nvidia, false));
        let script = Script::new(Vendor::Nvidia, vec![seen(), Err(failure.clone()), seen()]);
        let started = Instant::now();
        let jobs = owner(pace, &[&script]);
        assert!(ask(&jobs, OwnerQuestion::Snapshot).is_ok());
        assert_eq!(ask(&jobs, OwnerQuestion::Snapshot), Err(failure));
        while ask(&jobs, OwnerQuestion::Snapshot).is_err() {
            assert!(started.elapsed() < Duration::from_secs(10));
            thread::sleep(Duration::from_millis(5));
        }
        assert!(started.elapsed() >= pace.reopen);
        assert_eq!(script.opened(), 2);
    }

    #[test]
    fn an_unprintable_name_is_made_printable_and_hides_no_gpu() {
        let mut nvidia = of(Vendor::Nvidia, false);
        let gpu = nvidia.gpus.remove(0);
        for (index, model, error) in [
            (0, "T4\u{7}\n".to_owned(), None),
            (1, "Ü".repeat(96), Some("\0".repeat(2000))),
        ] {
            nvidia.gpus.push(GpuFacts {
                uuid: format!("GPU-{index}"),
                index,
                model,
                error,
                ..gpu.clone()
            });
        }
        nvidia.drivers.entry(Vendor::Nvidia).or_default().version = "550\u{1b}[2J".to_owned();
        let amd = Script::new(Vendor::Amd, vec![Ok(of(Vendor::Amd, false))]);
        let jobs = owner(AT_ONCE, &[&Script::new(Vendor::Nvidia, vec![Ok(nvidia)]), &amd]);
        let answer = ask(&jobs, OwnerQuestion::Snapshot).expect("a snapshot");
        let snapshot: Snapshot = serde_json::from_value(answer).expect("a snapshot");
        assert_eq!(snapshot.validate().map_err(|error| error.to_string()), Ok(()));
        let models: Vec<&str> = snapshot.gpus.iter().map(|gpu| gpu.model.as_str()).collect();
        assert_eq!(models, ["T4??", &"Ü".repeat(48), ""]);
        assert_eq!(snapshot.driver(Vendor::Nvidia), "550?[2J");
        assert_eq!(snapshot.gpus[1].error, Some("?".repeat(1024)));
    }

    #[test]
    fn a_driver_is_reopened_only_while_a_gpu_is_lost() {
        // Only a driver that keeps GPUs lost is opened again.
        for (vendor, lost, wait, opens) in [
            (Vendor::Nvidia, true, 0, 4),
            (Vendor::Nvidia, true, 3600, 1),
            (Vendor::Nvidia, false, 0, 1),
            (Vendor::Amd, true, 0, 1),
        ] {
            let pace = ReopenPace {
                reopen: Duration::ZERO,
                reopen_for_lost: Duration::from_secs(wait),
            };
            let script = Script::new(vendor, vec![Ok(of(vendor, lost)); 3]);
            let jobs = owner(pace, &[&script]);
            for _ in 0..3 {
                assert_eq!(
                    ask(&jobs, OwnerQuestion::Snapshot).expect("snapshot")["gpus"][0]["lost"],
                    lost
                );
            }
            assert_eq!(script.opened(), opens, "{vendor} lost: {lost}, wait: {wait}");
        }
    }

    /// Only the driver of the lost GPU's vendor is opened again.
    #[test]
    fn all_vendors_gpus_and_processes_are_one_answer() {
        let nvidia = Script::new(Vendor::Nvidia, vec![Ok(of(Vendor::Nvidia, true)); 2]);
        let amd = Script::new(Vendor::Amd, vec![Ok(of(Vendor::Amd, true)); 2]);
        let jobs = owner(AT_ONCE, &[&nvidia, &amd]);
        for _ in 0..2 {
            assert_eq!(uuids(&jobs).expect("both"), ["nvidia-0", "amd-0"]);
        }
        let processes = ask(&jobs, OwnerQuestion::Processes).expect("processes");
        let names = processes.as_array().expect("a list").iter().map(|gpu| gpu["uuid"].clone());
        assert_eq!(names.collect::<Vec<_>>(), ["nvidia-0", "amd-0"]);
        assert_eq!((nvidia.opened(), amd.opened()), (3, 1));
    }

    #[test]
    fn samples_come_from_the_driver_that_has_the_gpu() {
        let nvidia = Script::new(Vendor::Nvidia, vec![Ok(of(Vendor::Nvidia, false))]);
        let amd = Script::new(Vendor::Amd, vec![Ok(of(Vendor::Amd, false))]);
        let jobs = owner(AT_ONCE, &[&nvidia, &amd]);
        ask(&jobs, OwnerQuestion::Snapshot).expect("snapshot");
        let asked = ["amd-0", "nvidia-0"].map(|uuid| SamplesSince {
            uuid: uuid.to_owned(),
            since: 41,
        });
        let answer = ask(&jobs, OwnerQuestion::Utilization(asked.into())).expect("samples");
        let refused = serde_json::json!({"code": "not_supported", "text": "not of amd-0"});
        let sample = serde_json::json!({"pid": 7, "atUs": 42, "percent": 30});
        assert_eq!((&answer[0]["uuid"], &answer[0]["err"]), (&"amd-0".into(), &refused));
        assert_eq!((&answer[1]["uuid"], &answer[1]["samples"][0]), (&"nvidia-0".into(), &sample));
    }

    #[test]
    fn all_vendors_measurements_are_one_answer_of_possible_values() {
        let nvidia = Script::new(Vendor::Nvidia, Vec::new());
        let jobs = owner(AT_ONCE, &[&nvidia, &Script::new(Vendor::Amd, Vec::new())]);
        let answer = ask(&jobs, OwnerQuestion::Metrics).expect("measurements");
        let of = |uuid: &str| serde_json::json!({"uuid": uuid, "values": {"temperatureCelsius": 35}});
        assert_eq!(answer, serde_json::json!([of("nvidia-0"), of("amd-0")]));
    }

    #[test]
    fn faults_of_all_vendors_reach_the_clients() {
        let scripts = Vendor::ALL.map(|vendor| Script::new(vendor, vec![Ok(of(vendor, true))]));
        let hub = Arc::new(ProbeHub::new());
        let vendors = scripts.iter().map(Script::open).collect();
        let jobs = start(hub.clone(), ReopenPace::default(), "/".into(), vendors).expect("thread");
        ask(&jobs, OwnerQuestion::Snapshot).expect("snapshot");
        let started = Instant::now();
        while hub.hello().recent.len() < 2 {
            assert!(started.elapsed() < Duration::from_secs(10), "no fault arrives");
            thread::sleep(Duration::from_millis(5));
        }
        let mut of: Vec<Vendor> = hub.hello().recent.iter().map(|past| past.event.fault.vendor).collect();
        of.sort_unstable();
        assert_eq!(of, Vendor::ALL);
    }

    /// An absent vendor is ignored while another vendor has GPUs.
    #[test]
    fn an_absent_vendor_is_ignored_until_its_driver_appears() {
        for (there, away) in [(Vendor::Nvidia, Vendor::Amd), (Vendor::Amd, Vendor::Nvidia)] {
            let present = Script::new(there, vec![Ok(of(there, false)); 4]);
            let late = Script::absent(away);
            let mut scripts = [&present, &late];
            scripts.sort_by_key(|script| script.vendor);
            let jobs = owner(AT_ONCE, &scripts);
            assert_eq!(uuids(&jobs).expect("the other vendor"), [uuid(there)]);
            ask(&jobs, OwnerQuestion::Processes).expect("processes of the other vendor");
            late.then(Ok(of(away, false)));
            late.close(None);
            assert_eq!(uuids(&jobs).expect("both"), ["nvidia-0", "amd-0"]);
            // From now on its absence is a failure, because its GPUs would count as lost.
            late.then(Err(absence(away)));
            late.close(Some(absence(away)));
            assert_eq!(uuids(&jobs), Err(absence(away)));
            assert_eq!(uuids(&jobs), Err(absence(away)), "while it cannot be opened");
        }
    }

    #[test]
    fn a_vendor_that_is_there_but_cannot_be_used_is_not_ignored() {
        let failure = Failure::new(FailureCode::NoPermission, "not privileged");
        let nvidia = Script::new(Vendor::Nvidia, Vec::new());
        nvidia.close(Some(failure.clone()));
        let amd = Script::new(Vendor::Amd, vec![Ok(of(Vendor::Amd, false))]);
        assert_eq!(uuids(&owner(AT_ONCE, &[&nvidia, &amd])), Err(failure));
    }

    #[test]
    fn a_machine_without_gpus_is_told_why_the_first_vendor_has_none() {
        let missing = |code| Failure::new(code, "x");
        let with = |code: Option<FailureCode>, amd: Script| {
            let nvidia = Script::new(Vendor::Nvidia, vec![Ok(without_gpus(Vendor::Nvidia))]);
            nvidia.close(code.map(missing));
            uuids(&owner(AT_ONCE, &[&nvidia, &amd])).map_err(|failure| failure.text)
        };
        let absent = || Script::absent(Vendor::Amd);
        let empty = || Script::new(Vendor::Amd, vec![Ok(without_gpus(Vendor::Amd))]);
        for (code, amd, expected) in [
            (
                Some(FailureCode::LibraryNotFound),
                absent(),
                Err("x; for AMD GPUs: no amdgpu"),
            ),
            (
                Some(FailureCode::LibraryNotFound),
                empty(),
                Err("x; for AMD GPUs: the driver is loaded but finds no GPU"),
            ),
            (Some(FailureCode::DriverNotLoaded), absent(), Err("x")),
            (Some(FailureCode::DriverNotLoaded), empty(), Err("x")),
            (None, absent(), Ok(Vec::new())),
            (None, empty(), Ok(Vec::new())),
        ] {
            assert_eq!(with(code, amd), expected.map_err(str::to_owned), "{code:?}");
        }
    }
}
