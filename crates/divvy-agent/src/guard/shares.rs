//! The shares of guarded pods: decisions are made by [`GuardedShares`] under a lock that is held for microseconds, and files are used by [`OpenShareFiles`] without a lock.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use divvy_agent_core::{
    DriverReport, Escape, FileChange, GuardCounts, Guarded, GuardedShares, MadeLater, PodProcess, Readings, ShareFound, ShareId,
    UsageReading,
};
use divvy_hardware::GpuProcesses;
use divvy_hardware::client::ProbeHandle;
use divvy_hardware::protocol::{Kill, ShareName};
use divvy_share::limits::UnreadableLimits;
use tokio::time::timeout;
use tracing::{debug, warn};

use super::share_files::{JobOutcome, OpenShareFiles, ShareJob};
use crate::clock::{monotonic, nanos};
use crate::files::FileError;

/// How long to wait until the files of a pod are removed.
const PATIENCE: Duration = Duration::from_secs(2);

/// The shares of guarded pods, and their files.
#[derive(Debug)]
pub(crate) struct Shares {
    files: OpenShareFiles,
    state: Mutex<GuardedShares>,
    /// What was logged last about the files of a share. A pod can damage its file for as long as it wants, so the log has it once.
    told: Mutex<BTreeMap<ShareId, String>>,
}

/// Why a pod did not get its share.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HoldError {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// A later version made the files.
    #[error(transparent)]
    Later(#[from] MadeLater),
    /// The files cannot be used in time.
    #[error(
        "the files with the pod's share of GPU {0} cannot be written in time. A program of the pod that uses them all the time causes this, and so does a slow disk"
    )]
    Late(String),
}

impl Shares {
    /// Find the files of an earlier agent in the directory `root`.
    ///
    /// # Errors
    /// The directories cannot be listed.
    pub(crate) async fn open(root: &Path, may_stop: bool) -> Result<Shares, FileError> {
        let shares = Shares {
            files: OpenShareFiles::new(root.to_owned()),
            state: Mutex::new(GuardedShares::new(may_stop)),
            told: Mutex::default(),
        };
        let present = shares.files.present()?;
        let jobs = present.iter().map(|id| (id.clone(), ShareJob::Open)).collect();
        let mut opened: BTreeMap<_, _> = shares.files.run(jobs).await.into_iter().collect();
        let now = nanos(monotonic());
        for id in present {
            let found = match opened.remove(&id) {
                Some(Ok(JobOutcome::Found(found))) => *found,
                Some(Err(error)) => {
                    shares.tell(&id, Some(error.to_string()));
                    UNREAD
                }
                Some(Ok(_)) | None => UNREAD,
            };
            shares.state().adopt(id, &found, now);
        }
        Ok(shares)
    }

    fn state(&self) -> MutexGuard<'_, GuardedShares> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.state().is_empty()
    }

    /// Return the UIDs of the pods that have files.
    pub(crate) fn pods(&self) -> BTreeSet<String> {
        self.state().pods()
    }

    /// Make a pod's files, or write its share into the files that it has. Memory in use above a smaller share stays; the next allocation fails.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(crate) async fn hold(&self, pod: &str, gpus: &[Guarded]) -> Result<(), HoldError> {
        let ids: Vec<ShareId> = gpus.iter().map(|gpu| ShareId::new(pod, &gpu.uuid)).collect();
        let jobs = ids.iter().map(|id| (id.clone(), ShareJob::Make)).collect();
        let mut made: BTreeMap<_, _> = self.files.run(jobs).await.into_iter().collect();
        let mut writes = Vec::new();
        for (id, gpu) in ids.iter().zip(gpus) {
            let found = match made.remove(id) {
                Some(Ok(JobOutcome::Found(found))) => found,
                Some(Err(error)) => return Err(error.into()),
                Some(Ok(_)) | None => return Err(HoldError::Late(gpu.uuid.clone())),
            };
            let limits = self
                .state()
                .hold(id.clone(), gpu.memory, gpu.cores, &found, nanos(monotonic()))?;
            writes.push((id.clone(), ShareJob::Write(Box::new(limits))));
        }
        let mut outcomes: BTreeMap<_, _> = self.files.run(writes).await.into_iter().collect();
        for (id, gpu) in ids.iter().zip(gpus) {
            match outcomes.remove(id) {
                Some(Ok(JobOutcome::Wrote(limits))) => self.state().wrote(id, limits),
                Some(Err(error)) => return Err(error.into()),
                Some(Ok(_)) | None => return Err(HoldError::Late(gpu.uuid.clone())),
            }
        }
        Ok(())
    }

    /// Stop the launches of these pods on all their GPUs, and of no other pods. By their UIDs.
    pub(crate) async fn stop(&self, pods: &BTreeSet<String>) {
        self.state().stop(pods);
        self.write().await;
    }

    /// Remove the files of pods that are gone. If that fails, the next reconciliation tries again.
    pub(crate) async fn clear(&self, gone: &BTreeSet<String>, probe: Option<&ProbeHandle>) {
        for pod in gone {
            self.files.close(pod);
            let of_pod: Vec<ShareId> = self.state().ids().filter(|id| id.pod() == pod).cloned().collect();
            for id in of_pod {
                let Some(probe) = probe else { continue };
                // A probe that mounts nothing refuses. If something is mounted nevertheless, it cannot be removed.
                let share = ShareName {
                    pod: id.pod().to_owned(),
                    gpu: id.gpu().to_owned(),
                };
                match timeout(PATIENCE, probe.unmount_share(share)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(failure)) => debug!("the file system of a share is not unmounted: {failure}"),
                    Err(_) => debug!(
                        "the file system of a share is not unmounted: the probe did not answer in {} s",
                        PATIENCE.as_secs()
                    ),
                }
            }
            match timeout(PATIENCE, self.files.remove(pod)).await {
                Err(_) => warn!(
                    uid = pod,
                    "the guard's files of a pod that is gone cannot be removed in {} s",
                    PATIENCE.as_secs()
                ),
                Ok(Err(error)) => warn!(
                    uid = pod,
                    "the guard's files of a pod that is gone cannot be removed: {error}"
                ),
                Ok(Ok(())) => {
                    self.state().forget(pod);
                    self.told
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .retain(|id, _| id.pod() != pod);
                }
            }
        }
    }

    /// Read the files of usage that are to be read before the driver is asked.
    pub(crate) async fn read_before(&self) -> Readings {
        let ids: Vec<ShareId> = self.state().read_twice().cloned().collect();
        self.read_files(ids, ShareJob::Read).await
    }

    /// Read the files of usage of all shares.
    pub(crate) async fn read(&self) -> Readings {
        self.read_all(ShareJob::Read).await
    }

    /// Read the files of usage of all shares, look for changes that their content does not show, and restore what a program changed.
    pub(crate) async fn check(&self) -> Readings {
        self.read_all(ShareJob::Check).await
    }

    async fn read_all(&self, job: ShareJob) -> Readings {
        let ids: Vec<ShareId> = self.state().ids().cloned().collect();
        self.read_files(ids, job).await
    }

    async fn read_files(&self, ids: Vec<ShareId>, job: ShareJob) -> Readings {
        let outcomes = self.files.run(ids.into_iter().map(|id| (id, job.clone())).collect()).await;
        let readings = outcomes.into_iter().filter_map(|(id, outcome)| match outcome {
            Ok(JobOutcome::Read(reading)) => {
                let fault = reading.change.as_ref().map(FileChange::to_string);
                if fault.is_some() || job == ShareJob::Check {
                    self.tell(&id, fault);
                }
                Some((id, reading))
            }
            Err(error) => {
                self.tell(&id, Some(error.to_string()));
                None
            }
            Ok(_) => None,
        });
        readings.collect()
    }

    /// Take a measurement: the processes that the driver lists, and the files before and after it was asked. Write what changes.
    pub(crate) async fn measured(&self, gpus: &[GpuProcesses], before: &Readings, after: &Readings) {
        let report = report(gpus);
        self.state().measured(&report, before, after, nanos(monotonic()));
        self.write().await;
    }

    /// Write what the pods have left of their compute time, after they kept these GPUs busy for so many nanoseconds, by their UIDs. `now` is in nanoseconds of
    /// the monotonic clock.
    pub(crate) async fn kept_busy(&self, measured: &BTreeMap<String, BTreeMap<String, u64>>, now: u64) {
        let timed = self.state().timed_shares(&measured.keys().cloned().collect());
        let readings = self.read_files(timed, ShareJob::Read).await;
        {
            let mut state = self.state();
            for (gpu, busy) in measured {
                state.kept_busy(gpu, busy, &readings, now);
            }
        }
        self.write().await;
    }

    /// Write the files of limits that do not say what they are to say.
    async fn write(&self) {
        let unwritten = self.state().unwritten();
        let jobs = unwritten
            .into_iter()
            .map(|(id, limits)| (id, ShareJob::Write(Box::new(limits))))
            .collect();
        for (id, outcome) in self.files.run(jobs).await {
            match outcome {
                Ok(JobOutcome::Wrote(limits)) => self.state().wrote(&id, limits),
                // The next measurement tries again.
                Err(error) => self.tell(&id, Some(error.to_string())),
                Ok(_) => {}
            }
        }
    }

    /// Return the UUIDs of the GPUs on which the compute time of a pod is limited.
    pub(crate) fn timed_gpus(&self) -> BTreeSet<String> {
        self.state().timed_gpus()
    }

    /// Take whether the driver reports the busy time of processes on a GPU; if not, what it says.
    pub(crate) fn timed(&self, gpu: &str, refusal: Option<String>) {
        self.state().timed(gpu, refusal);
    }

    /// Return what the guards have counted, as far as it was read.
    pub(crate) fn counted(&self) -> BTreeMap<(String, String), GuardCounts> {
        let counted = self.state().counted();
        counted
            .into_iter()
            .map(|(id, counts)| ((id.pod().to_owned(), id.gpu().to_owned()), counts))
            .collect()
    }

    /// Return the signs that have lasted, by pod UID.
    pub(crate) fn escapes(&self) -> BTreeMap<String, Vec<Escape>> {
        self.state().escapes()
    }

    /// Log a fault of a share's files, unless it is the same as the last one.
    fn tell(&self, id: &ShareId, fault: Option<String>) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        match fault {
            None => drop(told.remove(id)),
            Some(text) if told.get(id) == Some(&text) => {}
            Some(text) => {
                warn!(
                    pod = id.pod(),
                    gpu = id.gpu(),
                    "the file in which the pod's processes count what they use: {text}"
                );
                told.insert(id.clone(), text);
            }
        }
    }
}

/// Files that could not be read.
const UNREAD: ShareFound = ShareFound {
    limits: Err(UnreadableLimits::Foreign),
    usage: UsageReading {
        change: None,
        slots: None,
        counts: None,
    },
};

fn report(gpus: &[GpuProcesses]) -> DriverReport {
    let mut report = DriverReport::default();
    for gpu in gpus.iter().filter(|gpu| gpu.error.is_none()) {
        report.gpus.insert(gpu.uuid.clone());
        // --reserve-memory accounts for the host's own processes.
        let processes = gpu.processes.iter().filter_map(|process| {
            Some(PodProcess {
                share: ShareId::new(process.pod.as_deref()?, &gpu.uuid),
                pid: process.pid,
                own_pid: process.own_pid,
                used: process.used,
            })
        });
        report.processes.extend(processes);
    }
    report
}

/// Return the pods of which a program uses more than it was granted, or can, by their UIDs.
pub(crate) fn escaped(escapes: &BTreeMap<String, Vec<Escape>>) -> BTreeSet<String> {
    let serious = escapes.iter().filter(|(_, all)| all.iter().any(Escape::is_serious));
    serious.map(|(uid, _)| uid.clone()).collect()
}

/// Return the processes that do this: those without a slot, and on the GPU all processes of a pod that changed its file or has too much memory.
pub(crate) fn processes_of(escapes: &BTreeMap<String, Vec<Escape>>, gpus: &[GpuProcesses]) -> Vec<Kill> {
    let is_meant = |escape: &Escape, pid: u32| match escape {
        Escape::Unguarded { pid: unguarded, .. } | Escape::NotGranted { pid: unguarded, .. } => pid == *unguarded,
        Escape::Tampered { .. } | Escape::Exceeded { .. } => true,
        Escape::Busy { .. } | Escape::Crowded { .. } | Escape::Untimed { .. } => false,
    };
    let mut pids: BTreeSet<(&str, u32)> = BTreeSet::new();
    for (uid, all) in escapes {
        for escape in all {
            let gpus = gpus.iter().filter(|gpu| gpu.uuid == escape.uuid());
            let processes = gpus.flat_map(|gpu| &gpu.processes);
            let own = processes.filter(|process| process.pod.as_ref() == Some(uid) && is_meant(escape, process.pid));
            pids.extend(own.map(|process| (uid.as_str(), process.pid)));
        }
    }
    let kill = |(pod, pid): (&str, u32)| Kill {
        pid,
        pod: pod.to_owned(),
    };
    pids.into_iter().map(kill).collect()
}
