//! What a hostile program does to the files of its share ([`divvy_share`]), for the scene `attacks`.
//!
//! It has what root in a container has that drops all capabilities: the files belong to its user, and nothing else is special.

#![allow(unsafe_code, reason = "fcntl(2) has no safe form for leases")]

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, IoSlice};
use std::mem::offset_of;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use divvy_share::limits::ShareLimits;
use divvy_share::usage::{self, SLOTS, UsageFile, UsageSlot};
use divvy_share::{DIRECTORY, LIMITS, USAGE, claim};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::sys::signal::{SigSet, Signal};
use rustix::mount::{UnmountFlags, unmount};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs};
use serde_json::{Value, json};

/// The longest time of an attack, should nobody end it.
const MOST: Duration = Duration::from_secs(120);
/// What `writers` writes at once in each thread, and in how many threads.
const LARGE: usize = 512 << 20;
const WRITERS: usize = 16;
/// The most that `grow` writes: it must not fill the disk of the machine where it succeeds.
const MOST_GROWTH: u64 = 256 << 20;
const BLOCK: usize = 1 << 20;
/// How many locks `locks` takes.
const LOCKS: u64 = 20_000;
/// Another user and group than the file's.
const NOBODY: u32 = 65534;
/// `version` of the head of [`UsageFile`], and the number of slots that have had an owner.
const VERSION_AT: u64 = 8;
const BOUND_AT: u64 = 24;

/// An attack, in a thread of its own.
type Act = fn(&Field);

/// The attacks by their names.
const ATTACKS: [(&str, Act); 14] = [
    ("lease-limits", |field| lease(field, LIMITS)),
    ("lease-usage", |field| lease(field, USAGE)),
    ("locks", locks),
    ("writers", writers),
    ("grow", grow),
    ("truncate", truncate),
    ("chmod", chmod),
    ("chown", change_owner),
    ("forged-version", forged_version),
    ("forged-slots", forged_slots),
    ("forged-context", forged_context),
    ("replaced-neighbor", replaced_neighbor),
    ("replaced-files", replaced_files),
    // The memory that it takes is not the matter of this module.
    ("full-memory", |_| {}),
];

/// Where the attack happens, and what came of it.
#[derive(Debug, Clone)]
struct Field {
    /// The directory of the first GPU.
    directory: PathBuf,
    /// What the request named.
    number: u64,
    until: Instant,
    is_over: Arc<AtomicBool>,
    /// Whether everything was tried that needs no second try.
    is_begun: Arc<AtomicBool>,
    /// What was tried and what succeeded, in calls.
    tried: Arc<AtomicU64>,
    done: Arc<AtomicU64>,
    /// The most bytes that the file had on the disk.
    on_disk: Arc<AtomicU64>,
}

/// An attack that goes on.
#[derive(Debug)]
pub(crate) struct RunningAttack {
    name: String,
    field: Field,
    thread: JoinHandle<()>,
}

impl RunningAttack {
    /// Begin an attack, and return what this process may do. It goes on until [`RunningAttack::end`]. The process keeps no capability and gets none.
    pub(crate) fn begin(name: &str, number: u64) -> Result<(RunningAttack, Value)> {
        let known = ATTACKS.iter().find(|(of, _)| *of == name);
        let (_, attack) = known.with_context(|| format!("there is no attack {name:?}"))?;
        confine()?;
        let field = Field {
            directory: share()?,
            number,
            until: Instant::now() + MOST,
            is_over: Arc::default(),
            is_begun: Arc::default(),
            tried: Arc::default(),
            done: Arc::default(),
            on_disk: Arc::default(),
        };
        let own = field.clone();
        let thread = std::thread::spawn(move || attack(&own));
        while !field.is_begun.load(Ordering::Relaxed) && !thread.is_finished() {
            sleep(Duration::from_millis(1));
        }
        let attack = RunningAttack {
            name: name.to_owned(),
            field,
            thread,
        };
        Ok((attack, standing()?))
    }

    /// End it, and return what came of it.
    pub(crate) fn end(self) -> Result<Value> {
        self.field.is_over.store(true, Ordering::Relaxed);
        if self.thread.join().is_err() {
            bail!("the attack {} panicked", self.name);
        }
        let [tried, done, on_disk] =
            [&self.field.tried, &self.field.done, &self.field.on_disk].map(|of| of.load(Ordering::Relaxed));
        let says = format!(
            "{}: {done} of {tried} calls succeeded; at most {on_disk} bytes on the disk",
            self.name
        );
        Ok(json!({"says": says, "tried": tried, "done": done, "on_disk": on_disk}))
    }
}

/// Return what the file of limits says.
pub(crate) fn limits() -> Result<Value> {
    let path = share()?.join(LIMITS);
    let bytes = fs::read(&path).with_context(|| format!("{} cannot be read", path.display()))?;
    let (_, limits) = ShareLimits::from_bytes(&bytes)?;
    Ok(json!({"bytes": limits.bytes, "rate": limits.rate, "context": limits.context, "is_stopped": limits.is_stopped}))
}

impl Field {
    fn goes_on(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed) && Instant::now() < self.until
    }

    /// Do this again and again, with so much time between.
    fn again(&self, pause: Duration, mut act: impl FnMut()) {
        while self.goes_on() {
            act();
            self.is_begun.store(true, Ordering::Relaxed);
            sleep(pause);
        }
    }

    /// Count what was tried. Return what succeeded.
    fn count<T, E>(&self, result: Result<T, E>) -> Option<T> {
        self.tried.fetch_add(1, Ordering::Relaxed);
        let result = result.ok();
        self.done.fetch_add(u64::from(result.is_some()), Ordering::Relaxed);
        result
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Open `usage` for reading and writing, as each process of the pod may.
    fn usage(&self) -> Option<File> {
        OpenOptions::new().read(true).write(true).open(self.path(USAGE)).ok()
    }

    fn note_size(&self, file: &File) {
        let bytes = file.metadata().map_or(0, |of| of.blocks() * 512);
        self.on_disk.fetch_max(bytes, Ordering::Relaxed);
    }
}

/// Keep no capability, as in a container that drops all, and ignore the signal of a lease that another process breaks.
fn confine() -> Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGIO);
    // The threads that begin now inherit all of it.
    signals.thread_block().context("SIGIO cannot be blocked")?;
    set_no_new_privs(true).context("no_new_privs cannot be set")?;
    let none = CapabilitySet::empty();
    let none = CapabilitySets {
        effective: none,
        permitted: none,
        inheritable: none,
    };
    set_capabilities(None, none).context("the capabilities cannot be dropped")
}

/// Return the directory of the first GPU's share.
fn share() -> Result<PathBuf> {
    let entries = fs::read_dir(DIRECTORY).with_context(|| format!("{DIRECTORY} cannot be listed"))?;
    let first = entries.flatten().next();
    Ok(first.with_context(|| format!("{DIRECTORY} is empty"))?.path())
}

/// Return what this thread may do, as the kernel says it.
fn standing() -> Result<Value> {
    let text = fs::read_to_string("/proc/thread-self/status").context("/proc/thread-self/status cannot be read")?;
    let of = |key: &str| {
        let mut lines = text.lines();
        let words = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        words
            .unwrap_or_default()
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    let (user, capabilities, seccomp) = (of("Uid"), of("CapEff"), of("Seccomp"));
    let says = format!("it is user {user}, with the capabilities {capabilities}; seccomp: {seccomp}");
    Ok(json!({"says": says, "user": user, "capabilities": capabilities, "seccomp": seccomp}))
}

/// Take a lease on the file, so that processes that open it in another way wait until it is given back, and take the next one when it was broken.
fn lease(field: &Field, name: &str) {
    let Ok(file) = File::open(field.path(name)) else { return };
    let mut is_held = false;
    let pause = Duration::from_millis(1);
    field.again(pause, || {
        if is_held && get_lease(&file) != libc::F_UNLCK {
            return;
        }
        // A lease for writing stops readers as well.
        is_held = [libc::F_WRLCK, libc::F_RDLCK]
            .into_iter()
            .any(|kind| field.count(set_lease(&file, kind)).is_some());
    });
    // It is given back when the file is closed.
}

fn set_lease(file: &File, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the command takes a number.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn get_lease(file: &File) -> libc::c_int {
    // SAFETY: the descriptor is open, and the command takes nothing.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLEASE) }
}

/// Lock many single bytes behind those of the slots.
fn locks(field: &Field) {
    let Some(file) = field.usage() else { return };
    let first = claim::cleaner(SLOTS);
    // This takes seconds.
    field.is_begun.store(true, Ordering::Relaxed);
    for index in 0..LOCKS {
        if !field.goes_on() {
            return;
        }
        // Locks of bytes that touch would be one lock.
        field.count(lock(&file, first + 2 * index));
    }
    field.again(Duration::from_millis(50), || {});
}

fn lock(file: &File, byte: u64) -> nix::Result<libc::c_int> {
    let lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte.cast_signed(),
        l_len: 1,
        // The kernel requires 0.
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock))
}

/// Hold the lock of the file's inode with large writes.
fn writers(field: &Field) {
    let block = vec![0; BLOCK];
    field.is_begun.store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        for _ in 0..WRITERS {
            scope.spawn(|| {
                let Some(file) = field.usage() else { return };
                let blocks = vec![IoSlice::new(&block); LARGE / BLOCK];
                while field.goes_on() {
                    field.count(rustix::io::pwritev(&file, &blocks, 0));
                    field.note_size(&file);
                }
            });
        }
    });
}

/// Let the file be large: without blocks, with a block far away, and with as many blocks as there are.
fn grow(field: &Field) {
    let Some(file) = field.usage() else { return };
    let block = vec![1; BLOCK];
    field.again(Duration::from_millis(100), || {
        field.count(file.set_len(1 << 40));
        field.count(file.write_all_at(&[1], 1 << 39));
        let mut at = usage::SIZE as u64;
        while at < MOST_GROWTH && field.goes_on() && field.count(file.write_all_at(&block, at)).is_some() {
            at += BLOCK as u64;
            field.note_size(&file);
        }
    });
}

fn truncate(field: &Field) {
    let Some(file) = field.usage() else { return };
    field.again(Duration::from_millis(20), || {
        field.count(file.set_len(0));
    });
}

fn chmod(field: &Field) {
    let path = field.path(USAGE);
    field.again(Duration::from_millis(100), || {
        field.count(fs::set_permissions(&path, Permissions::from_mode(0o000)));
    });
}

/// Give the file to every user and group that this process may give it to, other than its own ones.
fn change_owner(field: &Field) {
    let path = field.path(USAGE);
    let Ok(own) = fs::metadata(&path) else { return };
    let groups = rustix::process::getgroups().unwrap_or_default();
    let groups: Vec<u32> = groups.iter().map(|group| group.as_raw()).chain([NOBODY]).collect();
    field.again(Duration::from_millis(100), || {
        field.count(chown(&path, Some(NOBODY), None));
        for group in groups.iter().filter(|group| **group != own.gid()) {
            field.count(chown(&path, None, Some(*group)));
        }
    });
}

/// Say that a later version of Divvy made the file, so that guards that start now do not use it.
fn forged_version(field: &Field) {
    let Some(file) = field.usage() else { return };
    field.again(Duration::from_millis(50), || {
        field.count(file.write_all_at(&9_u64.to_ne_bytes(), VERSION_AT));
    });
}

/// Say in a slot that this process has so many bytes.
fn claim_slot(file: &File, slot: usize, bytes: u64) -> io::Result<()> {
    let at = offset_of!(UsageFile, slots) + slot * size_of::<UsageSlot>();
    let write = |field: usize, word: u64| file.write_all_at(&word.to_ne_bytes(), (at + field) as u64);
    lock(file, claim::owner(slot))?;
    write(offset_of!(UsageSlot, pid), u64::from(std::process::id()))?;
    write(offset_of!(UsageSlot, used), bytes)?;
    file.write_all_at(&(SLOTS as u64).to_ne_bytes(), BOUND_AT)
}

/// Say that this process is in all slots and has next to nothing: each slot stands for a process with a context.
fn forged_slots(field: &Field) {
    let Some(file) = field.usage() else { return };
    field.again(Duration::from_millis(100), || {
        for slot in 0..SLOTS {
            field.count(claim_slot(&file, slot, 1));
        }
    });
}

/// Say that this process has allocated what the driver says that it has, and what the agent charges it with for its context, all but one byte: then its
/// context seems to take that byte.
fn forged_context(field: &Field) {
    let Some(file) = field.usage() else { return };
    let limits = fs::read(field.path(LIMITS))
        .ok()
        .and_then(|bytes| ShareLimits::from_bytes(&bytes).ok());
    let charged = limits.map_or(0, |(_, limits)| limits.context);
    let bytes = (field.number + charged).saturating_sub(1);
    field.again(Duration::from_millis(100), || {
        field.count(claim_slot(&file, 0, bytes));
    });
}

/// Reach for the limits, and from the own files for those of other pods.
fn replaced_neighbor(field: &Field) {
    let (limits, usage) = (field.path(LIMITS), field.path(USAGE));
    let [own, link] = ["own", "link"].map(|name| field.path(name));
    // Making files in the directory is no attack: it is the container's own.
    let is_made = fs::write(&own, ShareLimits::default().file()).is_ok();
    // The directories of the GPU, of the pod, and of all pods.
    let of_machine = of_machine(&usage).unwrap_or_default();
    let above: Vec<&Path> = of_machine
        .ancestors()
        .skip(1)
        .take(3)
        .filter(|path| path.components().count() > 1)
        .collect();
    field.again(Duration::from_millis(100), || {
        for path in [&limits, &usage] {
            if is_made {
                field.count(fs::rename(&own, path));
            }
            field.count(fs::rename(path, &link));
            field.count(fs::hard_link(path, &link));
            field.count(fs::remove_file(path));
            field.count(unmount(path, UnmountFlags::DETACH));
        }
        field.count(OpenOptions::new().write(true).open(&limits));
        field.count(fs::set_permissions(&limits, Permissions::from_mode(0o666)));
        for path in &above {
            field.count(fs::read_dir(path));
        }
    });
    // The directory is left as it was.
    let _ = fs::remove_file(own);
}

/// Return where the machine has a mounted file, which everybody in the container can read.
fn of_machine(path: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mut words = text.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    words.find_map(|words| (words.get(4)? == &path.to_str()?).then(|| PathBuf::from(words[3])))
}

/// Let a guard that starts now find another directory of shares, with a share as large as the program wants.
fn replaced_files(field: &Field) {
    let directory = Path::new(DIRECTORY);
    if field.count(fs::rename(directory, directory.with_extension("old"))).is_none() {
        return;
    }
    let share = ShareLimits {
        bytes: 1 << 40,
        ..ShareLimits::default()
    };
    field.count(fs::create_dir_all(&field.directory));
    field.count(fs::write(field.path(LIMITS), share.file()));
    field.count(fs::write(field.path(USAGE), usage::file()));
    field.again(Duration::from_millis(50), || {});
}
