//! The shares of guarded pods: what the agent writes into their files of limits, and which pods are not held to their shares.
//!
//! Everything here is a function of values. The agent reads the files and asks the driver, and passes the results to [`GuardedShares`]. [`GuardedShares::unwritten`]
//! returns what the agent must write.
//!
//! **Invariant: noninterference.** What is decided about a share depends on the files of this share, on the driver's numbers for this pod, and on the settings
//! of the operator; never on what another pod writes, allocates, or locks. Each share has a separate state. The agent also learns the size of a context for each
//! share separately: otherwise, a pod that lies about its memory would change what other pods are charged.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{ALL_CORES, MiB};
use divvy_share::compute::Meter;
use divvy_share::limits::{self, ComputeAccount, ShareLimits, UnreadableLimits};
use divvy_share::usage;

use crate::Escape;

mod reading;

pub use reading::{FileChange, FileStatus, InSlots, Readings, ShareId, USAGE_MODE, UsageCounts, UsageReading};

/// A sign in the driver's numbers counts if so many measurements in a row show it. A process that starts or ends can look like one that avoids the guard.
const LASTING: u8 = 3;
/// What a context is charged with before the pod has shown what one takes, in bytes. It is more than contexts take on most GPUs, so that processes which allocate
/// all that they get right at their start do not exceed the share. Two measurements later, the charge is what contexts of this pod take.
const CONTEXT: u64 = 512 << 20;
/// A charge is a multiple of this: the driver's own pages.
const PAGE: u64 = 2 << 20;
/// What a context takes at most, in bytes: 550 MiB on an H100, and some more. A pod that shows more has other memory.
const LARGEST_CONTEXT: u64 = 640 << 20;

/// A process of a pod on a GPU, as the driver lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodProcess {
    /// The pod and the GPU. The pod may have no share of the GPU.
    pub share: ShareId,
    /// The PID on the host.
    pub pid: u32,
    /// The PID that the process sees itself. `None` if it could not be read.
    pub own_pid: Option<u32>,
    /// The memory that the process uses. 0 if the driver does not report it.
    pub used: MiB,
}

/// What the driver says about processes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriverReport {
    /// The GPUs whose processes the driver has listed.
    pub gpus: BTreeSet<String>,
    /// The processes of pods on them.
    pub processes: Vec<PodProcess>,
}

/// What is in the files of a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareFound {
    /// What the file of limits says.
    pub limits: Result<ShareLimits, UnreadableLimits>,
    /// What the file of usage says.
    pub usage: UsageReading,
}

/// A later version of the agent made the files of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a later version of Divvy made the files with the pod's share (layout version {0}), and the guard of this version cannot use them. Delete the pod, so that \
     its replacement gets files of this version"
)]
pub struct MadeLater(pub u64);

/// What the guards of a pod have counted on a GPU so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuardCounts {
    /// How many allocations they have refused.
    pub denied: u64,
    /// The bytes of these. `None` if no guard that counts them has used the GPU.
    pub denied_bytes: Option<u64>,
    /// For how many nanoseconds launches have waited, as the sum of the times of the pod's processes. `None` as above.
    pub throttled_ns: Option<u64>,
}

/// The shares that have files.
#[derive(Debug, Default)]
pub struct GuardedShares {
    /// Whether pods may be stopped, so that their processes must look before they launch.
    may_stop: bool,
    shares: BTreeMap<ShareId, GuardedShare>,
    /// Processes of pods with shares on GPUs of which they have none, by PID on the host: in how many measurements.
    ungranted: BTreeMap<(ShareId, u32), u8>,
    /// GPUs whose driver does not report the busy time of processes, and what it says.
    untimed: BTreeMap<String, String>,
    /// The number of the next [`LimitsToWrite`].
    next: u64,
}

/// What a file of limits is to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitsToWrite {
    /// The content.
    pub limits: ShareLimits,
    /// What has a higher number is newer, and is not to be replaced by this.
    pub number: u64,
}

#[derive(Debug, Default)]
struct GuardedShare {
    /// What the file of limits is to say. `None` if an agent of a later version wrote it, or if it could not be read: then it is written when a container of
    /// the pod starts.
    wanted: Option<ShareLimits>,
    /// What it says. `None` if this is not known.
    written: Option<ShareLimits>,
    /// The last measurement of the memory that no allocation accounts for.
    outside: Option<Outside>,
    /// The least that a context of the pod was seen to take, in bytes.
    context: Option<u64>,
    /// Whether the file of usage is read only after the driver was asked, and not before it as well.
    is_read_once: bool,
    counted: CountedByGuards,
    meter: Option<Meter>,
    signs: ShareSigns,
}

/// Memory that the driver reports for a pod and that its processes have not allocated: contexts and code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Outside {
    bytes: u64,
    contexts: u64,
}

/// What measurements have shown of a share.
#[derive(Debug, Default)]
struct ShareSigns {
    /// Processes without a slot, by PID on the host: in how many measurements.
    unguarded: BTreeMap<u32, u8>,
    /// In how many measurements the pod had too much, and how much it had, in bytes.
    exceeded: (u8, u64),
    /// How a program changed the file. It counts at once, and until a container of the pod starts: when the file looks right again, its numbers may be wrong.
    changed: Option<FileChange>,
    /// Whether processes got no slot.
    is_crowded: bool,
    /// In how many measurements the file could not be read in time.
    late: u8,
}

impl GuardedShares {
    /// No shares. `may_stop`: whether pods may be stopped.
    #[must_use]
    pub fn new(may_stop: bool) -> Self {
        Self {
            may_stop,
            ..Self::default()
        }
    }

    /// Report whether no pod has files.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.shares.is_empty()
    }

    /// Return the shares that have files.
    pub fn ids(&self) -> impl Iterator<Item = &ShareId> {
        self.shares.keys()
    }

    /// Return the shares whose files are to be read before the driver is asked. The files of all shares are to be read afterwards.
    pub fn read_twice(&self) -> impl Iterator<Item = &ShareId> {
        let read_twice = self.shares.iter().filter(|(_, share)| !share.is_read_once);
        read_twice.map(|(id, _)| id)
    }

    /// Return the UIDs of the pods that have files.
    #[must_use]
    pub fn pods(&self) -> BTreeSet<String> {
        self.shares.keys().map(|id| id.pod().to_owned()).collect()
    }

    /// Take over the files of an earlier agent. `now` is in nanoseconds of the monotonic clock.
    pub fn adopt(&mut self, id: ShareId, found: &ShareFound, now: u64) {
        let share = self.shares.entry(id).or_default();
        share.written = found.limits.ok();
        share.wanted = share.written.map(|limits| of_this_boot(limits, now));
        share.signs.note(&found.usage);
    }

    /// Give a pod its share when one of its containers starts, and return what its file of limits must say. Memory in use above a smaller share stays; the next
    /// allocation fails.
    ///
    /// # Errors
    /// A later version made the files.
    pub fn hold(
        &mut self,
        id: ShareId,
        memory: MiB,
        cores: u32,
        found: &ShareFound,
        now: u64,
    ) -> Result<LimitsToWrite, MadeLater> {
        let known = self.shares.get(&id).and_then(|share| share.wanted);
        let before = match (known, found.limits) {
            (Some(limits), _) => limits,
            (None, Ok(limits)) => of_this_boot(limits, now),
            (None, Err(UnreadableLimits::Newer(version))) => return Err(MadeLater(version)),
            (None, Err(UnreadableLimits::Foreign | UnreadableLimits::Torn)) => ShareLimits::default(),
        };
        let share = self.shares.entry(id).or_default();
        // A file that was repaired is a new one. What cannot be repaired is still a sign.
        share.signs.changed.clone_from(&found.usage.change);
        let bytes = in_bytes(memory);
        let limits = ShareLimits {
            bytes,
            context: share.context_of(bytes),
            rate: rate_of(cores),
            may_stop: self.may_stop,
            ..before
        };
        share.wanted = Some(limits);
        share.written = found.limits.ok();
        if share.timed().is_none() {
            share.meter = None;
        }
        Ok(self.numbered(limits))
    }

    fn numbered(&mut self, limits: ShareLimits) -> LimitsToWrite {
        let number = self.next;
        self.next += 1;
        LimitsToWrite { limits, number }
    }

    /// Stop the launches of these pods on all their GPUs, and of no other pods. By their UIDs.
    pub fn stop(&mut self, pods: &BTreeSet<String>) {
        let may_stop = self.may_stop;
        for (id, share) in &mut self.shares {
            if let Some(limits) = &mut share.wanted {
                limits.is_stopped = may_stop && pods.contains(id.pod());
            }
        }
    }

    /// Forget a pod.
    pub fn forget(&mut self, pod: &str) {
        self.shares.retain(|id, _| id.pod() != pod);
        self.ungranted.retain(|(id, _), _| id.pod() != pod);
    }

    /// Return the shares whose files of limits are to be written, with the content.
    pub fn unwritten(&mut self) -> Vec<(ShareId, LimitsToWrite)> {
        let shares = self.shares.iter();
        let unwritten: Vec<(ShareId, ShareLimits)> = shares
            .filter_map(|(id, share)| Some((id.clone(), share.wanted.filter(|_| share.wanted != share.written)?)))
            .collect();
        unwritten
            .into_iter()
            .map(|(id, limits)| (id, self.numbered(limits)))
            .collect()
    }

    /// Take that a file of limits was written.
    pub fn wrote(&mut self, id: &ShareId, limits: ShareLimits) {
        if let Some(share) = self.shares.get_mut(id) {
            share.written = Some(limits);
        }
    }

    /// Take a measurement: what the driver says, and the files as they were read before ([`GuardedShares::read_twice`]) and after it was asked. `now` is in
    /// nanoseconds of the monotonic clock.
    ///
    /// A process may allocate or free memory between these moments. Therefore an estimate of the overhead (contexts and code, which no allocation accounts for)
    /// counts only as far as the one before it agrees, so that a process is not refused memory that it has just freed. The reading before the driver was asked
    /// can only lower the estimate, so it is not needed while the other one alone shows nothing new.
    pub fn measured(&mut self, report: &DriverReport, before: &Readings, after: &Readings, now: u64) {
        let mut of_share: BTreeMap<&ShareId, Vec<&PodProcess>> = BTreeMap::new();
        for process in &report.processes {
            of_share.entry(&process.share).or_default().push(process);
        }
        let mut ungranted = BTreeMap::new();
        for (id, processes) in &of_share {
            if !self.shares.contains_key(*id) && self.shares.keys().any(|share| share.pod() == id.pod()) {
                for process in processes.iter().filter(|process| is_seen(process)) {
                    let key = ((*id).clone(), process.pid);
                    let times = self.ungranted.get(&key).copied().unwrap_or(0).saturating_add(1);
                    ungranted.insert(key, times);
                }
            }
        }
        self.ungranted = ungranted;
        for (id, share) in &mut self.shares {
            let after = after.get(id);
            let before = before.get(id);
            for reading in [before, after].into_iter().flatten() {
                share.signs.note(reading);
            }
            share.signs.late = if after.is_some() {
                0
            } else {
                share.signs.late.saturating_add(1)
            };
            if let Some(counts) = after.and_then(|reading| reading.counts.as_ref()) {
                share.counted.add(counts, now);
            }
            // Without the driver's numbers nothing is known.
            if report.gpus.contains(id.gpu()) {
                let processes = of_share.get(id).map(Vec::as_slice).unwrap_or_default();
                let have_slots = share.watch(processes, before, after);
                share.is_read_once = share.measure(processes, before, after) && have_slots;
            } else {
                share.is_read_once = true;
            }
        }
    }

    /// Return the UUIDs of the GPUs on which the compute time of a pod is limited.
    #[must_use]
    pub fn timed_gpus(&self) -> BTreeSet<String> {
        let timed = self.shares.iter().filter(|(_, share)| share.timed().is_some());
        timed.map(|(id, _)| id.gpu().to_owned()).collect()
    }

    /// Return the shares of these GPUs that have a limit of compute time.
    #[must_use]
    pub fn timed_shares(&self, gpus: &BTreeSet<String>) -> Vec<ShareId> {
        let timed = self
            .shares
            .iter()
            .filter(|(id, share)| gpus.contains(id.gpu()) && share.timed().is_some());
        timed.map(|(id, _)| id.clone()).collect()
    }

    /// Take for how many nanoseconds the pods kept a GPU busy, by their UIDs. `now` is in nanoseconds of the monotonic clock.
    pub fn kept_busy(&mut self, gpu: &str, busy: &BTreeMap<String, u64>, readings: &Readings, now: u64) {
        for (id, share) in self.shares.iter_mut().filter(|(id, _)| id.gpu() == gpu) {
            let Some(ShareLimits { rate, account, .. }) = share.timed() else {
                continue;
            };
            // A pod that has damaged its file keeps the time of a launch that was measured before.
            let counts = readings.get(id).and_then(|reading| reading.counts.as_ref());
            let launches = counts.map_or(account.launches, |counts| counts.launches);
            let meter = share.meter.get_or_insert_with(|| match account.at {
                // Nothing was measured yet.
                0 => Meter::new(now, launches),
                // By an earlier agent.
                _ => Meter::resume(account),
            });
            let account = meter.measure(rate, now, busy.get(id.pod()).copied().unwrap_or(0), launches);
            if let Some(limits) = &mut share.wanted {
                limits.account = account;
            }
        }
    }

    /// Take whether the driver reports the busy time of processes on a GPU; if not, what it says.
    pub fn timed(&mut self, gpu: &str, refusal: Option<String>) {
        match refusal {
            Some(text) => drop(self.untimed.insert(gpu.to_owned(), text)),
            None => drop(self.untimed.remove(gpu)),
        }
    }

    /// Return what the guards have counted, as far as it was read.
    #[must_use]
    pub fn counted(&self) -> BTreeMap<ShareId, GuardCounts> {
        let counted = self.shares.iter().filter(|(_, share)| share.counted.at > 0);
        counted.map(|(id, share)| (id.clone(), share.counted.counts())).collect()
    }

    /// Return the signs that pods are not held to their shares, by pod UID.
    #[must_use]
    pub fn escapes(&self) -> BTreeMap<String, Vec<Escape>> {
        let mut by_pod: BTreeMap<String, Vec<Escape>> = BTreeMap::new();
        for (id, share) in &self.shares {
            let untimed = self.untimed.get(id.gpu()).filter(|_| share.timed().is_some());
            let untimed = untimed.map(|text| Escape::Untimed {
                uuid: id.gpu().to_owned(),
                text: text.clone(),
            });
            let all: Vec<Escape> = share.escapes(id.gpu()).into_iter().chain(untimed).collect();
            if !all.is_empty() {
                by_pod.entry(id.pod().to_owned()).or_default().extend(all);
            }
        }
        for ((id, pid), _) in self.ungranted.iter().filter(|(_, times)| **times >= LASTING) {
            by_pod.entry(id.pod().to_owned()).or_default().push(Escape::NotGranted {
                uuid: id.gpu().to_owned(),
                pid: *pid,
            });
        }
        by_pod
    }
}

impl GuardedShare {
    /// Return the limits if they limit the compute time.
    fn timed(&self) -> Option<ShareLimits> {
        self.wanted.filter(ShareLimits::limits_compute)
    }

    /// Return what each context of this pod is charged with. It is only a part of the share: a program must start, and then shows what a context takes.
    fn context_of(&self, bytes: u64) -> u64 {
        self.context.unwrap_or(CONTEXT).min(bytes / 4).next_multiple_of(PAGE)
    }

    /// Compare the driver's processes with the slots. Return whether each process has a slot.
    fn watch(&mut self, processes: &[&PodProcess], before: Option<&UsageReading>, after: Option<&UsageReading>) -> bool {
        let readings = [before, after].into_iter().flatten();
        let slots = || readings.clone().filter_map(|reading| reading.slots.as_ref());
        let has_slot = |own_pid: u32| slots().any(|slots| slots.pids.binary_search(&u64::from(own_pid)).is_ok());
        let without = |process: &&&PodProcess| is_seen(process) && !process.own_pid.is_some_and(has_slot);
        let mut unguarded = processes.iter().filter(without).peekable();
        let have_slots = unguarded.peek().is_none();
        // Without the other reading, a process has perhaps freed its slot after the driver was asked.
        if after.is_some() && (before.is_some() || have_slots) {
            let unguarded = unguarded.map(|process| {
                let times = self.signs.unguarded.get(&process.pid).copied().unwrap_or(0);
                (process.pid, times.saturating_add(1))
            });
            self.signs.unguarded = unguarded.collect();
        }
        let Some(limits) = self.wanted else { return have_slots };
        // Contexts are counted by the driver's processes, because a pod can make any number of slots. What a context takes beyond its charge was not refused.
        let contexts = processes.iter().filter(|process| process.used > MiB::ZERO).count() as u64;
        let context = self.context.unwrap_or(LARGEST_CONTEXT);
        let not_charged = context.saturating_sub(limits.context).saturating_mul(contexts);
        let most = limits.bytes.saturating_add(limits.bytes / 20).saturating_add(not_charged);
        let used = reported(processes);
        let (times, last) = &mut self.signs.exceeded;
        *times = if used > most { times.saturating_add(1) } else { 0 };
        *last = used;
        have_slots
    }

    /// Measure the memory that the driver reports for the pod in addition to its allocations. Return whether nothing has changed.
    fn measure(&mut self, processes: &[&PodProcess], before: Option<&UsageReading>, after: Option<&UsageReading>) -> bool {
        let [before, after] = [before, after].map(|reading| reading.and_then(|reading| reading.slots.as_ref()));
        let (Some(after), Some(mut limits)) = (after, self.wanted) else {
            return false;
        };
        let earlier = before.unwrap_or(after);
        let outside = Outside {
            bytes: reported(processes).saturating_sub(earlier.bytes.max(after.bytes)),
            contexts: earlier.contexts.max(after.contexts),
        };
        if before.is_none() && self.outside.is_none_or(|last| last.bytes < outside.bytes) {
            // A process has perhaps freed memory after the driver was asked.
            return false;
        }
        let last = self.outside.replace(outside);
        // Two equal measurements: no process makes a context or loads code at the moment.
        let is_still = last == Some(outside) && earlier == after;
        if is_still
            && before.is_some()
            && let Some(each @ 1..) = outside.bytes.checked_div(outside.contexts)
        {
            let least = self.context.get_or_insert(LARGEST_CONTEXT);
            *least = each.min(*least);
        }
        limits.context = self.context_of(limits.bytes);
        let overhead = |of: Outside| of.bytes.saturating_sub(limits.contexts(of.contexts));
        limits.overhead = last.map_or(0, |last| overhead(last).min(overhead(outside)));
        self.wanted = Some(limits);
        is_still
    }

    fn escapes(&self, gpu: &str) -> Vec<Escape> {
        let signs = &self.signs;
        let uuid = || gpu.to_owned();
        let lasting = signs.unguarded.iter().filter(|(_, times)| **times >= LASTING);
        let mut all: Vec<Escape> = lasting
            .map(|(pid, _)| Escape::Unguarded { uuid: uuid(), pid: *pid })
            .collect();
        if let (times, used) = signs.exceeded
            && times >= LASTING
            && let Some(limits) = self.wanted
        {
            let [used, share] = [used, limits.bytes].map(|bytes| MiB(bytes >> 20));
            all.push(Escape::Exceeded {
                uuid: uuid(),
                used,
                share,
            });
        }
        if let Some(change) = &signs.changed {
            all.push(Escape::Tampered {
                uuid: uuid(),
                change: change.clone(),
            });
        }
        if signs.is_crowded {
            all.push(Escape::Crowded { uuid: uuid() });
        }
        if signs.late >= LASTING {
            all.push(Escape::Busy { uuid: uuid() });
        }
        all
    }
}

impl ShareSigns {
    fn note(&mut self, reading: &UsageReading) {
        if let Some(change) = &reading.change {
            self.changed = Some(change.clone());
        }
        if let Some(counts) = &reading.counts {
            self.is_crowded = counts.totals.crowded > 0;
        }
    }
}

/// Report whether it is known that a process has memory, and who it is.
fn is_seen(process: &PodProcess) -> bool {
    process.used > MiB::ZERO && process.own_pid.is_some()
}

fn reported(processes: &[&PodProcess]) -> u64 {
    let used = processes.iter().map(|process| in_bytes(process.used));
    used.fold(0, u64::saturating_add)
}

/// Return limits without a balance that an earlier boot of the machine left: the clock by which balances grow starts again with each boot.
fn of_this_boot(mut limits: ShareLimits, now: u64) -> ShareLimits {
    if limits.account.at > now {
        limits.account = ComputeAccount {
            launches: limits.account.launches,
            ..ComputeAccount::default()
        };
    }
    limits
}

/// Return the GPU time in nanoseconds per second of a share in percent. 0 stays 0: no limit.
fn rate_of(cores: u32) -> u64 {
    u64::from(cores).saturating_mul(limits::WHOLE / u64::from(ALL_CORES))
}

fn in_bytes(memory: MiB) -> u64 {
    memory.0.saturating_mul(1 << 20)
}

/// What the guards of a pod have counted on a GPU so far.
///
/// The pod can write any numbers into the file, so the sums here only grow: a number that goes back begins again at 0, as the count of a new owner of a slot
/// and those of a file that was restored do. A pod that writes wrong numbers changes only what is shown about itself.
#[derive(Debug, Default)]
struct CountedByGuards {
    denied: u64,
    /// What each slot said last, up to the last one in which an allocation was refused. It begins at 0 with each owner of the slot.
    last: Vec<u64>,
    denied_bytes: Option<CounterSum>,
    throttled_ns: Option<CounterSum>,
    /// When the file was read last, in nanoseconds of the monotonic clock. It is 0 at first: the time since the machine started.
    at: u64,
}

/// A sum of what a counter said.
#[derive(Debug, Default)]
struct CounterSum {
    total: u64,
    last: u64,
}

impl CounterSum {
    /// Add what the counter has grown by, and at most `most`.
    fn add(&mut self, says: u64, most: u64) {
        self.total = self.total.saturating_add(growth(self.last, says).min(most));
        self.last = says;
    }
}

fn growth(last: u64, says: u64) -> u64 {
    if says < last { says } else { says - last }
}

impl CountedByGuards {
    fn add(&mut self, counts: &UsageCounts, now: u64) {
        if self.last.len() < counts.denied.len() {
            self.last.resize(counts.denied.len(), 0);
        }
        // Slots behind the last one with refusals say 0.
        let says = counts.denied.iter().copied().chain(std::iter::repeat(0));
        for (last, says) in self.last.iter_mut().zip(says) {
            self.denied = self.denied.saturating_add(growth(*last, says));
            *last = says;
        }
        if let Some(bytes) = counts.totals.denied_bytes {
            self.denied_bytes.get_or_insert_default().add(bytes, u64::MAX);
        }
        if let Some(ns) = counts.totals.throttled_ns {
            // In each process, one launch at a time counts its waiting.
            let most = now.saturating_sub(self.at).saturating_mul(usage::SLOTS as u64);
            self.throttled_ns.get_or_insert_default().add(ns, most);
        }
        self.at = now;
    }

    fn counts(&self) -> GuardCounts {
        GuardCounts {
            denied: self.denied,
            denied_bytes: self.denied_bytes.as_ref().map(|sum| sum.total),
            throttled_ns: self.throttled_ns.as_ref().map(|sum| sum.total),
        }
    }
}
