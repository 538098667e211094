//! The guard's files on the node: the libraries, and for each pod and GPU what the pod may use and what its processes use.
//!
//! | file in the state directory | content |
//! |---|---|
//! | `guard/<digest>/libcuda.so.1`, `libnvidia-ml.so.1`, `libdivvy-guard-audit.so` | the libraries. Another version has another directory, so the files of a running container never change |
//! | `shares/<pod's UID>/<GPU's UUID>/limits` | the pod's share ([`divvy_share::limits`]), which only the agent writes |
//! | `shares/<pod's UID>/<GPU's UUID>/usage` | what the processes use ([`divvy_share::usage`]), which the pod writes |
//!
//! Containers have the files mounted. Therefore the agent changes them in place, and never replaces them. It changes the size of `usage` only back to
//! what it was.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use divvy_agent_core::{Guard, Guarded, Reaction};
use divvy_model::{ALL_CORES, MiB};
use divvy_shadow::sys::wake;
use divvy_share::compute::Meter;
use divvy_share::limits::Limits;
use divvy_share::{LIMITS, USAGE, claim, limits, usage};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fs::OFlags;
use sha2::{Digest as _, Sha256};
use tracing::{debug, warn};

use crate::args::GuardMode;
use crate::files::{self, FileError};
use crate::metrics::GuardCounts;

mod compute;
mod escapes;

pub(crate) use escapes::{escaped, processes_of};

/// The libraries as they come with the agent, and the names under which containers know them.
const LIBRARIES: [(&str, &str); 2] = [
    ("libdivvy-guard.so", "libcuda.so.1"),
    ("libdivvy-guard-nvml.so", "libnvidia-ml.so.1"),
];
/// The library for [`GuardMode::Both`], which has one name.
const AUDIT: &str = "libdivvy-guard-audit.so";
/// A library that is larger is not the guard.
const LIBRARY_LIMIT: u64 = 1024 * 1024;

/// Copy the libraries for a mode from a directory to the state directory, where containers can have them mounted. Return the paths of the guard's files.
///
/// # Errors
/// A library cannot be read, or a copy cannot be written.
pub(crate) fn install(state: &Path, from: &Path, mode: GuardMode) -> Result<Guard, FileError> {
    let mut contents = Vec::new();
    let mut digest = Sha256::new();
    let has_audit = mode == GuardMode::Both;
    for (file, name) in LIBRARIES.into_iter().chain(has_audit.then_some((AUDIT, AUDIT))) {
        let content = read_library(&from.join(file))?;
        digest.update(&content);
        contents.push((name, content));
    }
    let mut directory = state.join("guard");
    let mut version = String::new();
    for byte in &digest.finalize()[..8] {
        // Writing to a String cannot fail.
        let _ = write!(version, "{byte:02x}");
    }
    directory.push(version);
    files::make_directory(&directory, 0o755)?;
    for (name, content) in &contents {
        if std::fs::read(directory.join(name)).is_ok_and(|present| present == *content) {
            continue;
        }
        files::write_atomic(&directory, name, content, 0o755)?;
    }
    let [cuda, nvml] = LIBRARIES.map(|(_, name)| directory.join(name).display().to_string());
    Ok(Guard {
        cuda,
        nvml,
        audit: has_audit.then(|| directory.join(AUDIT).display().to_string()),
        shares: shares(state).display().to_string(),
        reaction: Reaction::Event,
    })
}

fn read_library(path: &Path) -> Result<Vec<u8>, FileError> {
    let failed = |action, source| FileError {
        action,
        path: path.to_owned(),
        source,
    };
    let mut content = Vec::new();
    let file = File::open(path).map_err(|source| failed("read", source))?;
    let read = file.take(LIBRARY_LIMIT + 1).read_to_end(&mut content);
    if read.map_err(|source| failed("read", source))? as u64 > LIBRARY_LIMIT {
        let text = format!("it is larger than {LIBRARY_LIMIT} bytes, so it is not Divvy's guard");
        return Err(failed("use", io::Error::new(io::ErrorKind::InvalidData, text)));
    }
    Ok(content)
}

/// Return the directory of the pods' files.
fn shares(state: &Path) -> PathBuf {
    state.join("shares")
}

/// A pod's UID and a GPU's UUID.
type Share = (String, String);

/// The pods' files.
#[derive(Debug)]
pub(crate) struct Shares {
    root: PathBuf,
    /// Whether pods may be stopped, so that their processes must look before they launch.
    may_stop: bool,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// The shares that have files, and the last estimate of the overhead in bytes.
    shares: BTreeMap<Share, Option<u64>>,
    /// What one context takes on each GPU, in bytes: the least that was seen of one process. A process is charged with it when it makes a context, so
    /// that it cannot allocate the whole share before the agent has measured the context. See [`context_of`] for what a pod is charged with.
    contexts: BTreeMap<String, u64>,
    /// What was logged last about a share. A pod can damage its file for as long as it wants, so the log has it once.
    told: BTreeMap<Share, String>,
    /// The compute time of the shares that have a limit of it.
    meters: BTreeMap<Share, Meter>,
    /// What the guards of the pods have counted.
    counted: BTreeMap<Share, Counted>,
    /// Signs that programs avoid the guard.
    signs: escapes::Signs,
}

/// What the guards of a pod have counted on a GPU so far.
///
/// The pod can write any numbers into the file, so the sums here only grow: a number that goes back begins again at 0, as the count of a new owner of a slot
/// and those of a file that was restored do. A pod that writes wrong numbers changes only what is shown about itself.
#[derive(Debug, Default)]
struct Counted {
    denied: u64,
    /// What each slot said last, up to the last one in which an allocation was refused. It begins at 0 with each owner of the slot.
    last: Vec<u64>,
    denied_bytes: Option<Sum>,
    throttled_ns: Option<Sum>,
    /// When the file was read last, in nanoseconds of the monotonic clock. It is 0 at first: the time since the machine started.
    at: u64,
}

/// A sum of what a counter said.
#[derive(Debug, Default)]
struct Sum {
    total: u64,
    last: u64,
}

impl Sum {
    /// Add what the counter has grown by, and at most `most`.
    fn add(&mut self, says: u64, most: u64) {
        self.total = self.total.saturating_add(growth(self.last, says).min(most));
        self.last = says;
    }
}

fn growth(last: u64, says: u64) -> u64 {
    if says < last { says } else { says - last }
}

impl Counted {
    fn add(&mut self, slots: &[usage::Seen; usage::SLOTS], totals: usage::Totals, now: u64) {
        let with_refusals = slots.iter().rposition(|slot| slot.denied > 0).map_or(0, |last| last + 1);
        if self.last.len() < with_refusals {
            self.last.resize(with_refusals, 0);
        }
        for (last, slot) in self.last.iter_mut().zip(slots) {
            self.denied = self.denied.saturating_add(growth(*last, slot.denied));
            *last = slot.denied;
        }
        if let Some(bytes) = totals.denied_bytes {
            self.denied_bytes.get_or_insert_default().add(bytes, u64::MAX);
        }
        if let Some(ns) = totals.throttled_ns {
            // In each process, one launch at a time counts its waiting.
            let most = now.saturating_sub(self.at).saturating_mul(usage::SLOTS as u64);
            self.throttled_ns.get_or_insert_default().add(ns, most);
        }
        self.at = now;
    }
}

/// What the processes of each pod say they have of each GPU.
pub(crate) type Said = BTreeMap<Share, InSlots>;

/// What the slots of a file say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct InSlots {
    /// The sum.
    bytes: u64,
    /// The number of processes that have memory.
    processes: usize,
    /// The number of processes that have a slot.
    owners: usize,
    /// The PIDs of all processes that have a slot, as they see them themselves.
    pids: BTreeSet<u64>,
    /// Whether processes were refused because there was no free slot.
    is_crowded: bool,
}

/// Why a file of usage cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum Damage {
    /// It is not what the agent made: a program in the pod changed it.
    #[error("{0}")]
    Changed(String),
    /// The agent is older than the file, or cannot read it for another reason.
    #[error("{0}")]
    Other(String),
}

impl Shares {
    /// Find the files of an earlier agent.
    ///
    /// # Errors
    /// The directories cannot be listed.
    pub(crate) fn open(state: &Path, may_stop: bool) -> Result<Shares, FileError> {
        let root = shares(state);
        let mut known = Known::default();
        for uid in files::names(&root)? {
            for uuid in files::names(&root.join(&uid))? {
                let present = limits_in(&root.join(&uid).join(&uuid));
                if let Some(limits) = present.filter(|limits| limits.context > 0) {
                    // A pod with a small share is charged with less than a context.
                    let most = known.contexts.entry(uuid.clone()).or_default();
                    *most = limits.context.max(*most);
                }
                known.shares.insert((uid.clone(), uuid), None);
            }
        }
        Ok(Shares {
            root,
            may_stop,
            known: Mutex::new(known),
        })
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.known().shares.is_empty()
    }

    /// Return the UIDs of the pods that have files.
    pub(crate) fn pods(&self) -> BTreeSet<String> {
        self.known().shares.keys().map(|(uid, _)| uid.clone()).collect()
    }

    fn directory(&self, (uid, uuid): &Share) -> PathBuf {
        self.root.join(uid).join(uuid)
    }

    /// Make a pod's files, or write its share into the files that it has. Memory in use above a smaller share stays; the next allocation fails.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(crate) fn hold(&self, uid: &str, gpus: &[Guarded]) -> Result<(), FileError> {
        for Guarded { uuid, memory, cores } in gpus {
            let share = (uid.to_owned(), uuid.clone());
            let directory = self.directory(&share);
            files::make_directory(&directory, 0o755)?;
            make_usage(&directory)?;
            let found = in_slots(&directory.join(USAGE));
            if matches!(found, Err(Damage::Changed(_))) {
                // What the pod's other processes have is lost already.
                restore(&directory.join(USAGE))?;
            }
            self.known().signs.starts(&share);
            // What processes were charged with stays in the file while they run, so that the agent can tell it from what it measures.
            let has_processes = found.is_ok_and(|found| found.processes > 0);
            let mut known = self.known();
            let context = known.contexts.get(uuid).copied().unwrap_or_default();
            write_limits(&directory, |limits| {
                limits.bytes = in_bytes(*memory);
                limits.rate = rate_of(*cores);
                limits.may_stop = self.may_stop;
                if !has_processes {
                    limits.context = context_of(context, limits.bytes);
                }
            })?;
            known.shares.entry(share).or_default();
        }
        Ok(())
    }

    /// Stop the launches of these pods on all their GPUs, and of no other pods. By their UIDs.
    pub(crate) fn stop(&self, pods: &BTreeSet<String>) {
        let known = self.known();
        for share in known.shares.keys() {
            let (uid, uuid) = share;
            let is_stopped = self.may_stop && pods.contains(uid);
            if let Err(error) = write_limits(&self.directory(share), |limits| limits.is_stopped = is_stopped) {
                warn!(uid, gpu = uuid, "{error}");
            }
        }
    }

    /// Remove the files of pods that are gone.
    pub(crate) fn clear(&self, gone: &BTreeSet<String>) {
        for uid in gone {
            match std::fs::remove_dir_all(self.root.join(uid)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    // The next reconciliation tries again.
                    warn!(uid, %error, "the guard's files of a pod that is gone cannot be removed");
                }
                _ => {
                    let mut known = self.known();
                    known.shares.retain(|(of, _), _| of != uid);
                    known.told.retain(|(of, _), _| of != uid);
                    known.meters.retain(|(of, _), _| of != uid);
                    known.counted.retain(|(of, _), _| of != uid);
                    known.signs.forget(uid);
                }
            }
        }
    }

    /// Read what the processes say that they have. A file that a pod has damaged says nothing, and gets its size back.
    pub(crate) fn said(&self) -> Said {
        let mut known = self.known();
        let Known { shares, told, signs, .. } = &mut *known;
        let said = shares.keys().filter_map(|share| {
            let path = self.directory(share).join(USAGE);
            let read = in_slots(&path);
            if read.is_err() {
                repair(&path);
            }
            let damage = read.as_ref().err();
            tell(told, share, damage.map(Damage::to_string));
            signs.changed(share, damage);
            Some((share.clone(), read.ok()?))
        });
        said.collect()
    }

    /// Add what the guards have counted since the last time. `now` is in nanoseconds of the monotonic clock. A file that a pod has damaged says nothing.
    pub(crate) fn count(&self, now: u64) {
        let mut known = self.known();
        let Known { shares, counted, .. } = &mut *known;
        for share in shares.keys() {
            if let Ok((_, slots, totals)) = read_slots(&self.directory(share).join(USAGE)) {
                counted.entry(share.clone()).or_default().add(&slots, totals, now);
            }
        }
    }

    /// Return what the guards have counted, as far as it was read.
    pub(crate) fn counted(&self) -> BTreeMap<Share, GuardCounts> {
        let known = self.known();
        let shares = known.counted.iter().map(|(share, counted)| {
            let counts = GuardCounts {
                denied: counted.denied,
                denied_bytes: counted.denied_bytes.as_ref().map(|sum| sum.total),
                throttled_ns: counted.throttled_ns.as_ref().map(|sum| sum.total),
            };
            (share.clone(), counts)
        });
        shares.collect()
    }

    /// Write how much memory the driver reports for each pod in addition to what its processes say: contexts and code, which no allocation
    /// accounts for. `before` and `after` were read before and after the driver was asked.
    ///
    /// A process may allocate or free memory between these moments. Therefore an estimate counts only as far as the one before it agrees, so that a
    /// process is not refused memory that it has just freed.
    pub(crate) fn measured(&self, in_use: &BTreeMap<String, BTreeMap<String, MiB>>, before: &Said, after: &Said) {
        let mut known = self.known();
        let Known { shares, contexts, .. } = &mut *known;
        let mut learned = Vec::new();
        for (share, last) in shares {
            let (Some(before), Some(after)) = (before.get(share), after.get(share)) else {
                continue;
            };
            let (uid, uuid) = share;
            let reported = in_use.get(uuid).and_then(|pods| pods.get(uid));
            let reported = reported.map_or(0, |memory| in_bytes(*memory));
            let in_slots = before.bytes.max(after.bytes);
            let estimate = reported.saturating_sub(in_slots);
            let overhead = last.map_or(0, |last| last.min(estimate));
            // Two equal estimates of one process: it makes no context and loads no code at the moment. It may have allocated nothing.
            let is_settled = *last == Some(estimate) && before == after && after.owners == 1;
            *last = Some(estimate);
            let context = contexts.get(uuid).copied();
            let written = write_limits(&self.directory(share), |limits| {
                // The process may have been charged with more than its context takes.
                let seen = reported.saturating_add(limits.context).saturating_sub(in_slots);
                if is_settled && seen > 0 {
                    learned.push((uuid.clone(), seen));
                }
                limits.overhead = overhead;
                if let Some(context) = context
                    && before.processes == 0
                    && after.processes == 0
                {
                    limits.context = context_of(context, limits.bytes);
                }
            });
            if let Err(error) = written {
                warn!(uid, gpu = uuid, "{error}");
            }
        }
        for (uuid, context) in learned {
            known.learn(&uuid, context);
        }
    }
}

/// Log an error about a share, unless it is the same as the last one.
fn tell(told: &mut BTreeMap<Share, String>, share: &Share, error: Option<String>) {
    match error {
        None => drop(told.remove(share)),
        Some(text) if told.get(share) == Some(&text) => {}
        Some(text) => {
            let (pod, gpu) = share;
            warn!(
                pod,
                gpu,
                "the agent cannot read what the pod uses, so it does not measure the memory that no allocation accounts for: {text}"
            );
            told.insert(share.clone(), text);
        }
    }
}

impl Known {
    fn learn(&mut self, uuid: &str, context: u64) {
        let least = self.contexts.entry(uuid.to_owned()).or_insert(context);
        *least = context.min(*least);
    }
}

/// Return what a process of a pod with this share is charged with when it makes a context, if a context takes `seen`. It is only a part of the share, because
/// another pod can make the agent see too much: by allocating memory without the guard. The programs of this pod must start nevertheless, and then
/// show what a context really takes.
fn context_of(seen: u64, share: u64) -> u64 {
    seen.min(share / 4)
}

/// Return the GPU time in nanoseconds per second of a share in percent. 0 stays 0: no limit.
fn rate_of(cores: u32) -> u64 {
    u64::from(cores).saturating_mul(limits::WHOLE / u64::from(ALL_CORES))
}

fn in_bytes(memory: MiB) -> u64 {
    memory.0.saturating_mul(1 << 20)
}

fn make_usage(directory: &Path) -> Result<(), FileError> {
    let path = directory.join(USAGE);
    if path.exists() {
        return Ok(());
    }
    files::write_atomic(directory, USAGE, &usage::file(), 0o666)?;
    // The umask has taken bits away. The processes of a container may have any user, and no one else reaches the directory.
    std::fs::set_permissions(&path, Permissions::from_mode(0o666)).map_err(|source| FileError {
        action: "open to the pod",
        path,
        source,
    })
}

/// Change the limits in a directory, in place. A file that cannot be used is written again.
fn write_limits(directory: &Path, change: impl FnOnce(&mut Limits)) -> Result<(), FileError> {
    let path = directory.join(LIMITS);
    let failed = |action| {
        let path = path.clone();
        move |source| FileError { action, path, source }
    };
    if !path.exists() {
        let mut limits = Limits::default();
        change(&mut limits);
        return files::write_atomic(directory, LIMITS, &limits.file(), 0o644);
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(failed("open"))?;
    let mut present = [0; limits::SIZE];
    let read = file.read_exact_at(&mut present, 0).map(|()| Limits::from_bytes(&present));
    match read {
        Ok(Ok((generation, before))) => {
            let mut limits = before;
            change(&mut limits);
            if limits == before {
                return Ok(());
            }
            let next = generation.wrapping_add(1);
            let (at, copy) = limits.copy(next);
            file.write_all_at(&copy, at).map_err(failed("write"))?;
            if before.limits_compute() || before.is_stopped {
                ring(&path, next);
            }
            Ok(())
        }
        Ok(Err(_)) | Err(_) => {
            let mut limits = Limits::default();
            change(&mut limits);
            file.write_all_at(&limits.file(), 0).map_err(failed("write"))
        }
    }
}

/// Wake the guards that wait until the copy of this generation is in the file of limits.
fn ring(path: &Path, generation: u64) {
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else {
        // The file was just opened, so its path has no zero byte.
        return;
    };
    if let Err(number) = wake(&name, limits::SIZE, limits::bell(generation)) {
        // They look again after a tenth of a second at most.
        let error = io::Error::from_raw_os_error(number.cast_signed());
        debug!(path = %path.display(), %error, "the processes that wait for new limits are not woken");
    }
}

/// Read the limits in a directory. `None` if they cannot be read; they are written again when a container of the pod starts.
fn limits_in(directory: &Path) -> Option<Limits> {
    let bytes = std::fs::read(directory.join(LIMITS)).ok()?;
    Limits::from_bytes(&bytes).ok().map(|(_, limits)| limits)
}

/// Read a file of usage: its slots, and what its head says.
fn read_slots(path: &Path) -> Result<(File, [usage::Seen; usage::SLOTS], usage::Totals), Damage> {
    let unreadable = |error| Damage::Other(format!("the file cannot be read: {error}"));
    let file = files::open(path).map_err(unreadable)?;
    let mut bytes = Vec::with_capacity(usage::SIZE);
    // One byte more, so that a file of another size is noticed.
    let read = (&file).take(usage::SIZE as u64 + 1).read_to_end(&mut bytes);
    read.map_err(unreadable)?;
    match usage::parse(&bytes) {
        Ok((slots, totals)) => Ok((file, slots, totals)),
        Err(error @ usage::Unusable::Newer(_)) => Err(Damage::Other(error.to_string())),
        Err(error @ (usage::Unusable::Size(_) | usage::Unusable::Foreign)) => Err(Damage::Changed(error.to_string())),
    }
}

/// Read the slots that have an owner.
fn in_slots(path: &Path) -> Result<InSlots, Damage> {
    let (file, slots, totals) = read_slots(path)?;
    let mut sum = InSlots {
        is_crowded: totals.crowded > 0,
        ..InSlots::default()
    };
    for (index, slot) in slots.iter().enumerate().filter(|(_, slot)| slot.used > 0 || slot.pid > 0) {
        if has_owner(&file, index).map_err(|error| Damage::Other(format!("a lock cannot be read: {error}")))? {
            sum.bytes = sum.bytes.saturating_add(slot.used);
            sum.processes += usize::from(slot.used > 0);
            sum.owners += 1;
            sum.pids.insert(slot.pid);
        }
    }
    Ok(sum)
}

/// Write a file of usage again, in place, because containers have it mounted.
fn restore(path: &Path) -> Result<(), FileError> {
    let failed = |action| {
        let path = path.to_owned();
        move |source| FileError { action, path, source }
    };
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    let file = options.open(path).map_err(failed("open"))?;
    file.set_len(usage::SIZE as u64).map_err(failed("write"))?;
    file.write_all_at(&usage::file(), 0).map_err(failed("write"))
}

/// Give a file of usage its size back. A pod could otherwise fill the node's disk through it. A file of a later version is left as it is.
fn repair(path: &Path) {
    let repaired = || -> io::Result<()> {
        let mut head = files::open(path)?.take(usage::SIZE as u64);
        let mut bytes = Vec::with_capacity(usage::SIZE);
        head.read_to_end(&mut bytes)?;
        bytes.resize(usage::SIZE, 0);
        if matches!(usage::parse(&bytes), Err(usage::Unusable::Newer(_))) {
            return Ok(());
        }
        let mut options = OpenOptions::new();
        let file = options
            .write(true)
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
            .open(path)?;
        file.set_len(usage::SIZE as u64)
    };
    if let Err(error) = repaired() {
        debug!(path = %path.display(), %error, "a file of usage does not get its size back");
    }
}

/// Report whether a process holds the slot's lock. The question takes no lock, so it disturbs no process.
fn has_owner(file: &File, slot: usize) -> nix::Result<bool> {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: claim::owner(slot).cast_signed(),
        l_len: 1,
        // The kernel requires 0.
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const GPU: &str = "GPU-1";
    const MEBIBYTE: u64 = 1 << 20;

    /// A share of so many MiB, without a limit of compute time.
    pub(super) fn share_of(memory: u64) -> [Guarded; 1] {
        [Guarded {
            uuid: GPU.to_owned(),
            memory: MiB(memory),
            cores: 0,
        }]
    }

    pub(super) struct Bed {
        state: tempfile::TempDir,
        pub(super) shares: Shares,
    }

    impl Bed {
        /// One pod with a share of 1,000 MiB.
        pub(super) fn new() -> Bed {
            let state = tempfile::tempdir().expect("temp dir");
            let shares = Shares::open(state.path(), false).expect("opened");
            shares.hold("a", &share_of(1000)).expect("made");
            Bed { state, shares }
        }

        pub(super) fn path(&self, name: &str) -> PathBuf {
            self.state.path().join("shares/a").join(GPU).join(name)
        }

        fn limits(&self) -> Limits {
            let bytes = std::fs::read(self.path(LIMITS)).expect("read");
            Limits::from_bytes(&bytes).expect("readable").1
        }

        /// Claim a slot as a process of the pod does, and say what it has. The slot has an owner as long as the file is open.
        pub(super) fn process(&self, slot: usize, mib: u64) -> File {
            self.process_of("a", slot, mib)
        }

        fn process_of(&self, pod: &str, slot: usize, mib: u64) -> File {
            let path = self.state.path().join("shares").join(pod).join(GPU).join(USAGE);
            let file = OpenOptions::new().read(true).write(true).open(path).expect("open");
            let lock = libc::flock {
                l_type: libc::F_WRLCK as libc::c_short,
                l_whence: libc::SEEK_SET as libc::c_short,
                l_start: claim::owner(slot).cast_signed(),
                l_len: 1,
                l_pid: 0,
            };
            fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)).expect("locked");
            file.write_all_at(&(mib * MEBIBYTE).to_ne_bytes(), 64 + slot as u64 * 64)
                .expect("written");
            file
        }

        /// Compare with what the driver reports, as the agent does every second.
        fn measure(&self, reported: u64) -> u64 {
            let in_use = BTreeMap::from([(GPU.to_owned(), BTreeMap::from([("a".to_owned(), MiB(reported))]))]);
            let said = self.shares.said();
            self.shares.measured(&in_use, &said, &said);
            self.limits().overhead / MEBIBYTE
        }
    }

    #[test]
    fn refused_allocations_are_counted_over_all_owners_of_a_slot() {
        let bed = Bed::new();
        let share = ("a".to_owned(), GPU.to_owned());
        let file = OpenOptions::new().write(true).open(bed.path(USAGE)).expect("open");
        for (slot, says, denied) in [(0_u64, 3_u64, 3), (1, 2, 5), (0, 4, 6), (0, 1, 7), (1, u64::MAX, u64::MAX)] {
            file.write_all_at(&says.to_ne_bytes(), 64 + slot * 64 + 4 * 8)
                .expect("written");
            bed.shares.count(1);
            bed.shares.count(2);
            let counts = GuardCounts {
                denied,
                ..GuardCounts::default()
            };
            assert_eq!(
                bed.shares.counted(),
                BTreeMap::from([(share.clone(), counts)]),
                "slot {slot} says {says}"
            );
        }
        // A damaged file says nothing, and what was counted stays until the pod is gone.
        std::fs::write(bed.path(USAGE), [7; 100]).expect("damaged");
        bed.shares.count(3);
        assert_eq!(bed.shares.counted()[&share].denied, u64::MAX);
        bed.shares.clear(&["a".to_owned()].into());
        assert_eq!(bed.shares.counted(), BTreeMap::new());
    }

    #[test]
    fn what_guards_count_only_grows_and_no_pod_waits_for_longer_than_its_processes_can() {
        const SECOND: u64 = 1_000_000_000;
        let bed = Bed::new();
        let file = OpenOptions::new().write(true).open(bed.path(USAGE)).expect("open");
        let mut now = 1000 * SECOND;
        let mut says = |counts: u64, bytes: u64, ns: u64| {
            for (index, word) in [counts, bytes, ns].into_iter().enumerate() {
                file.write_all_at(&word.to_ne_bytes(), 32 + index as u64 * 8)
                    .expect("written");
            }
            now += SECOND;
            bed.shares.count(now);
            let counted = bed.shares.counted().into_values().next().expect("a share");
            (counted.denied_bytes, counted.throttled_ns)
        };
        assert_eq!(says(0, 5, 5), (None, None), "a guard of an earlier version counts nothing");
        assert_eq!(says(1, 0, 0), (Some(0), Some(0)));
        assert_eq!(says(1, 10, 7), (Some(10), Some(7)));
        assert_eq!(says(1, 15, 9), (Some(15), Some(9)));
        // The pod, or an agent that restores a damaged file, sets them back.
        assert_eq!(says(1, 4, 3), (Some(19), Some(12)));
        assert_eq!(says(0, 0, 0), (Some(19), Some(12)), "what was counted stays");
        assert_eq!(says(1, 0, 0), (Some(19), Some(12)));
        let most = 12 + 256 * SECOND;
        assert_eq!(says(1, u64::MAX, u64::MAX), (Some(u64::MAX), Some(most)));
        assert_eq!(says(1, 0, 0), (Some(u64::MAX), Some(most)));
        assert_eq!(says(1, 1, 1), (Some(u64::MAX), Some(most + 1)));
        // Another agent continues with what is in the file.
        assert_eq!(says(1, 30, 40 * SECOND).1, Some(most + 40 * SECOND));
        let later = Shares::open(bed.state.path(), false).expect("opened");
        later.count(2000 * SECOND);
        let counted = later.counted().into_values().next().expect("a share");
        assert_eq!((counted.denied_bytes, counted.throttled_ns), (Some(30), Some(40 * SECOND)));
    }

    #[test]
    fn the_libraries_are_copied_to_a_directory_of_their_version_and_earlier_copies_stay() {
        let state = tempfile::tempdir().expect("temp dir");
        let libraries = tempfile::tempdir().expect("temp dir");
        let write = |name: &str, content: &[u8]| std::fs::write(libraries.path().join(name), content).expect("written");
        write("libdivvy-guard-nvml.so", b"nvml");
        let mut copies = Vec::new();
        for content in ["one", "two", "two"] {
            write("libdivvy-guard.so", content.as_bytes());
            let guard = install(state.path(), libraries.path(), GuardMode::Shadow).expect("installed");
            assert_eq!(guard.audit, None);
            assert_eq!(std::fs::read_to_string(&guard.cuda).expect("read"), content);
            assert_eq!(std::fs::read_to_string(&guard.nvml).expect("read"), "nvml");
            assert!(guard.cuda.ends_with("/libcuda.so.1") && guard.nvml.ends_with("/libnvidia-ml.so.1"));
            copies.push(guard.cuda);
        }
        assert_eq!(std::fs::read_to_string(&copies[0]).expect("still there"), "one");
        assert_eq!(copies[1], copies[2]);
        let both = || install(state.path(), libraries.path(), GuardMode::Both);
        let text = both().expect_err("one is missing").to_string();
        assert!(text.contains("libdivvy-guard-audit.so"), "{text}");
        write("libdivvy-guard-audit.so", b"audit");
        let guard = both().expect("installed");
        let audit = guard.audit.expect("it has one");
        assert_eq!(std::fs::read_to_string(&audit).expect("read"), "audit");
        assert!(
            guard.cuda != copies[2] && audit.ends_with("/libdivvy-guard-audit.so"),
            "{audit}"
        );
        write("libdivvy-guard.so", &vec![0; 2 << 20]);
        let text = install(state.path(), libraries.path(), GuardMode::Shadow)
            .expect_err("too large")
            .to_string();
        assert!(
            text.contains("libdivvy-guard.so") && text.contains("not Divvy's guard"),
            "{text}"
        );
    }

    #[test]
    fn a_share_that_changes_is_written_into_the_file_that_containers_have() {
        let bed = Bed::new();
        assert_eq!((bed.limits().bytes, bed.limits().rate), (1000 * MEBIBYTE, 0));
        let mounted = File::open(bed.path(LIMITS)).expect("open");
        bed.process(0, 300);
        bed.shares.hold("a", &share_of(500)).expect("changed");
        let mut bytes = [0; limits::SIZE];
        mounted.read_exact_at(&mut bytes, 0).expect("read");
        assert_eq!(Limits::from_bytes(&bytes).expect("readable").1.bytes, 500 * MEBIBYTE);
        let [with_cores] = share_of(500);
        bed.shares.hold("a", &[Guarded { cores: 30, ..with_cores }]).expect("changed");
        assert_eq!(bed.limits().rate, 300_000_000, "nanoseconds per second");
        let mode = |name| std::fs::metadata(bed.path(name)).expect("there").permissions().mode() & 0o777;
        // The agent has no capability to write a file that is read-only for its owner.
        assert_eq!((mode(LIMITS), mode(USAGE)), (0o644, 0o666));
        // A damaged file is written again.
        std::fs::write(bed.path(LIMITS), [7; limits::SIZE]).expect("damaged");
        bed.shares.hold("a", &share_of(500)).expect("written again");
        assert_eq!(bed.limits().bytes, 500 * MEBIBYTE);
    }

    #[test]
    fn a_pod_is_stopped_on_all_its_gpus_until_it_is_not_named_any_more_and_only_if_the_agent_stops_pods() {
        for may_stop in [true, false] {
            let state = tempfile::tempdir().expect("temp dir");
            let shares = Shares::open(state.path(), may_stop).expect("opened");
            let [share] = share_of(1000);
            let second = Guarded {
                uuid: "GPU-2".to_owned(),
                ..share.clone()
            };
            shares.hold("a", &[share.clone(), second]).expect("made");
            shares.hold("b", &[share]).expect("made");
            let stopped = || {
                let files = [("a", GPU), ("a", "GPU-2"), ("b", GPU)];
                files.map(|(pod, gpu)| {
                    let limits = limits_in(&state.path().join("shares").join(pod).join(gpu)).expect("readable");
                    assert_eq!(limits.may_stop, may_stop);
                    limits.is_stopped
                })
            };
            shares.stop(&["a".to_owned()].into());
            assert_eq!(stopped(), [may_stop, may_stop, false]);
            // An agent that does not stop pods lets it go on.
            let later = Shares::open(state.path(), false).expect("opened");
            later.stop(&["a".to_owned()].into());
            assert_eq!(stopped(), [false; 3]);
            shares.stop(&["a".to_owned()].into());
            shares.stop(&BTreeSet::new());
            assert_eq!(stopped(), [false; 3]);
        }
    }

    #[test]
    fn memory_that_no_process_accounts_for_is_overhead_once_two_measurements_agree() {
        let bed = Bed::new();
        let first = bed.process(0, 100);
        let second = bed.process(3, 200);
        assert_eq!(bed.measure(420), 0);
        assert_eq!(bed.measure(420), 120);
        // A process frees 100 MiB after the driver was asked. The difference of one moment is not overhead.
        drop(first);
        assert_eq!(bed.measure(420), 120);
        assert_eq!(bed.measure(320), 120);
        // A slot without an owner does not count, although its number is still there.
        drop(second);
        assert_eq!(bed.measure(0), 0);
        let said = bed.shares.said();
        assert_eq!(said.get(&("a".to_owned(), GPU.to_owned())), Some(&InSlots::default()));
    }

    #[test]
    fn what_a_context_takes_is_learned_from_one_process_and_known_to_the_next_pod() {
        let bed = Bed::new();
        let context = |shares: &Shares| {
            shares.hold("b", &share_of(1000)).expect("made");
            let path = bed.state.path().join("shares/b").join(GPU).join(LIMITS);
            let (_, limits) = Limits::from_bytes(&std::fs::read(path).expect("read")).expect("readable");
            limits.context / MEBIBYTE
        };
        let first = bed.process(0, 100);
        let second = bed.process(1, 100);
        bed.measure(700);
        bed.measure(700);
        assert_eq!(context(&bed.shares), 0, "no one knows which of the two has how much");
        drop(second);
        bed.measure(350);
        bed.measure(350);
        assert_eq!(context(&bed.shares), 250);
        // It loads code, which is not part of a context.
        bed.measure(400);
        bed.measure(400);
        assert_eq!(context(&bed.shares), 250);
        // A process that starts now is charged with its context, and its context takes less.
        drop(first);
        bed.measure(0);
        let _third = bed.process(0, 350);
        bed.measure(340);
        bed.measure(340);
        assert_eq!(context(&bed.shares), 240);
        assert_eq!(
            context(&Shares::open(bed.state.path(), false).expect("opened")),
            250,
            "another agent"
        );
    }

    #[test]
    fn what_a_context_takes_is_learned_before_its_process_allocates_anything() {
        let bed = Bed::new();
        let process = bed.process(0, 0);
        process.write_all_at(&7_u64.to_ne_bytes(), 64 + 16).expect("its PID");
        bed.measure(250);
        bed.measure(250);
        drop(process);
        bed.measure(0);
        assert_eq!(bed.limits().context, 250 * MEBIBYTE);
    }

    #[test]
    fn a_file_that_a_pod_made_larger_or_smaller_has_its_size_again_at_the_next_measurement() {
        let bed = Bed::new();
        let _process = bed.process(0, 100);
        for size in [1 << 40, 0, 100] {
            let file = OpenOptions::new().write(true).open(bed.path(USAGE)).expect("open");
            file.set_len(size).expect("changed");
            bed.measure(150);
            assert_eq!(file.metadata().expect("there").len(), usage::SIZE as u64, "{size}");
        }
        // An agent of a later version made it.
        let mut later = usage::file().to_vec();
        later[8] = 9;
        later.resize(3 * usage::SIZE, 0);
        std::fs::write(bed.path(USAGE), &later).expect("written");
        bed.measure(150);
        assert_eq!(std::fs::read(bed.path(USAGE)).expect("read"), later);
    }

    #[test]
    fn a_pod_that_avoids_the_guard_does_not_keep_the_programs_of_others_from_starting() {
        let bed = Bed::new();
        let limits = |pod: &str| {
            let path = bed.state.path().join("shares").join(pod).join(GPU).join(LIMITS);
            Limits::from_bytes(&std::fs::read(path).expect("read")).expect("readable").1
        };
        // It says that it has 1 MiB, and has 9,000.
        let hostile = bed.process(0, 1);
        bed.measure(9000);
        bed.measure(9000);
        bed.shares.hold("b", &share_of(800)).expect("made");
        assert_eq!(limits("b").context, 200 * MEBIBYTE);
        // A process of the pod is charged with 200 MiB for its context, which takes 150, and allocates 100.
        drop(hostile);
        let process = bed.process_of("b", 0, 300);
        for _ in 0..9 {
            let in_use = BTreeMap::from([(GPU.to_owned(), BTreeMap::from([("b".to_owned(), MiB(250))]))]);
            let said = bed.shares.said();
            bed.shares.measured(&in_use, &said, &said);
            // Another container of the pod starts.
            bed.shares.hold("b", &share_of(800)).expect("written");
        }
        bed.shares.hold("c", &share_of(4000)).expect("made");
        assert_eq!(limits("c").context, 150 * MEBIBYTE);
        assert_eq!(limits("b").context, 200 * MEBIBYTE, "the process is charged with it");
        drop(process);
        bed.measure(0);
        assert_eq!(limits("b").context, 150 * MEBIBYTE);
    }

    #[test]
    fn a_file_that_a_pod_has_damaged_changes_nothing() {
        let bed = Bed::new();
        let _process = bed.process(0, 100);
        bed.measure(150);
        assert_eq!(bed.measure(150), 50);
        std::fs::write(bed.path(USAGE), [0xff; 100]).expect("damaged");
        assert_eq!(bed.measure(900), 50);
        let told = || bed.shares.known().told.values().cloned().collect::<Vec<_>>();
        assert!(
            matches!(told().as_slice(), [text] if text.contains("has 100 bytes")),
            "{:?}",
            told()
        );
        std::fs::remove_file(bed.path(USAGE)).expect("removed");
        std::os::unix::fs::symlink("/etc/passwd", bed.path(USAGE)).expect("linked");
        assert_eq!(bed.measure(900), 50);
        bed.shares.clear(&bed.shares.pods());
        assert_eq!(told(), [""; 0]);
    }

    #[test]
    fn the_files_of_a_pod_that_is_gone_are_removed_and_an_agent_that_starts_finds_the_others() {
        let bed = Bed::new();
        bed.shares.hold("b", &share_of(10)).expect("made");
        let shares = Shares::open(bed.state.path(), false).expect("opened");
        assert_eq!(shares.pods().len(), 2);
        shares.clear(&["a".to_owned()].into());
        assert_eq!(shares.pods(), ["b".to_owned()].into());
        assert_eq!(files::names(&bed.state.path().join("shares")).expect("listed"), ["b"]);
    }
}
