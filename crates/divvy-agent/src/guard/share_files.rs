//! The files of guarded pods, which the pods' processes have mounted too.
//!
//! A pod can slow down each operation on its files. So no operation is made on the runtime's thread, and none while a lock is held: this module has the open
//! files, all its functions that use one are private, and they have nothing but the files and a [`ShareJob`]. All that the agent can do is [`OpenShareFiles::run`], which is
//! to be awaited. A share whose job does not end in [`PATIENCE`] is left out, and the jobs of the others go on in another thread.
//!
//! The agent holds both files open for reading and writing from before the pod's first process until the share is gone. So no process gets a lease on them
//! (`F_SETLEASE` in fcntl(2)), for which an `open` of the agent would wait for 45 seconds.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use divvy_agent_core::{FileChange, FileStatus, LimitsToWrite, ShareFound, ShareId, USAGE_MODE, UsageReading};
use divvy_shadow::sys::wake;
use divvy_share::limits::{ShareLimits, UnreadableLimits};
use divvy_share::{LIMITS, USAGE, claim, limits, usage};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fs::OFlags;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Notify;
use tokio::time::timeout;
use tracing::debug;

use crate::files::{self, FileError};

/// How long a job may take before the jobs of other shares go on without it.
const PATIENCE: Duration = Duration::from_millis(50);
/// How often a run of jobs is patient, if none of them has begun because the machine is busy.
const ROUNDS: u32 = 40;
/// The pause before a thread looks again for a share that another run of jobs has at the moment.
const PAUSE: Duration = Duration::from_millis(1);
/// How long the agent looks for the owners of slots: for this time, and then for as much processor time. A pod can make the kernel's list of a file's locks very
/// long.
///
/// For 256 processes, as many as have slots, it takes about 1 ms.
const SEARCH: Duration = Duration::from_millis(5);
/// After such a search, the agent makes none for so many times as long.
const REST: u32 = 1000;
/// Bytes of the head of a file of usage that never change.
const FIXED: usize = 16;
/// How much of a file of usage is read at first: as much as most pods use.
const FIRST: usize = usage::HEAD + 15 * usage::SLOT;

/// What to do with the files of a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ShareJob {
    /// Open the files that an earlier agent made, and read them. The outcome is [`JobOutcome::Found`].
    Open,
    /// Make the files if they are not there, repair the file of usage if it was changed, and read them. The outcome is [`JobOutcome::Found`].
    Make,
    /// Read the file of usage. The outcome is [`JobOutcome::Read`].
    Read,
    /// Read the file of usage, look for changes that its content does not show, and restore its size, its permissions, and its head if a program changed them.
    /// The outcome is [`JobOutcome::Read`].
    Check,
    /// Write the file of limits, unless something newer was written, and wake the processes that wait for it. The outcome is [`JobOutcome::Wrote`].
    Write(Box<LimitsToWrite>),
}

/// What became of a [`ShareJob`].
#[derive(Debug)]
pub(crate) enum JobOutcome {
    /// What is in the files.
    Found(Box<ShareFound>),
    /// What the file of usage says.
    Read(UsageReading),
    /// What the file of limits says now.
    Wrote(ShareLimits),
}

/// The outcomes of jobs, each share's once. A share is missing if its job did not end in time.
pub(crate) type Outcomes = Vec<(ShareId, Result<JobOutcome, FileError>)>;

/// The open files of all shares.
#[derive(Debug)]
pub(crate) struct OpenShareFiles {
    root: PathBuf,
    seats: Arc<Seats>,
    /// [`SEARCH`].
    search: Duration,
}

/// Where the files of each share are at the moment. The lock is held to take and to return files, never while they are used: who uses files owns them.
#[derive(Debug, Default)]
struct Seats(Mutex<BTreeMap<ShareId, Seat>>);

#[derive(Debug)]
enum Seat {
    Free(OpenFiles),
    /// A thread has the files. `is_late`: for longer than [`PATIENCE`].
    Taken {
        is_late: bool,
    },
}

impl Seats {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ShareId, Seat>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Take the files of the first share that has its files here.
    fn take(&self, root: &Path, jobs: &mut VecDeque<(ShareId, ShareJob)>) -> Option<(ShareId, OpenFiles, ShareJob)> {
        let mut seats = self.lock();
        let take = |(at, (id, _)): (usize, &(ShareId, ShareJob))| {
            let taken = Seat::Taken { is_late: false };
            let files = match seats.get_mut(id) {
                Some(Seat::Taken { .. }) => return None,
                Some(seat) => match std::mem::replace(seat, taken) {
                    Seat::Free(files) => Some(files),
                    Seat::Taken { .. } => None,
                },
                None => {
                    seats.insert(id.clone(), taken);
                    None
                }
            };
            Some((at, files))
        };
        let (at, files) = jobs.iter().enumerate().find_map(take)?;
        let (id, job) = jobs.remove(at)?;
        let files = files.unwrap_or_else(|| OpenFiles::new(root.join(id.pod()).join(id.gpu())));
        Some((id, files, job))
    }

    /// Return the files, unless the share was forgotten meanwhile.
    fn put(&self, id: &ShareId, files: OpenFiles) {
        if let Some(seat) = self.lock().get_mut(id) {
            *seat = Seat::Free(files);
        }
    }

    /// Return the shares of which a job is late.
    fn late(&self) -> BTreeSet<ShareId> {
        let seats = self.lock();
        let late = seats.iter().filter(|(_, seat)| matches!(seat, Seat::Taken { is_late: true }));
        late.map(|(id, _)| id.clone()).collect()
    }
}

/// One run of jobs.
#[derive(Debug)]
struct JobQueue {
    root: PathBuf,
    seats: Arc<Seats>,
    search: Duration,
    todo: Mutex<Todo>,
    /// A thread has no more to do. The run is not woken for each job: for 110 shares, that would take longer than the jobs.
    ended: Notify,
}

#[derive(Debug, Default)]
struct Todo {
    jobs: VecDeque<(ShareId, ShareJob)>,
    /// The shares whose jobs have begun and have not ended: one for each thread.
    begun: Vec<ShareId>,
    done: Outcomes,
}

impl JobQueue {
    fn todo(&self) -> MutexGuard<'_, Todo> {
        self.todo.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<(ShareId, OpenFiles, ShareJob)> {
        let mut todo = self.todo();
        let next = self.seats.take(&self.root, &mut todo.jobs)?;
        todo.begun.push(next.0.clone());
        Some(next)
    }

    fn has_jobs(&self) -> bool {
        !self.todo().jobs.is_empty()
    }

    /// Do jobs until none is left. A share that another run has is waited for.
    fn work(&self) {
        let started = Instant::now();
        loop {
            match self.next() {
                Some((id, mut files, job)) => {
                    let outcome = files.perform(job, self.search);
                    self.seats.put(&id, files);
                    let mut todo = self.todo();
                    todo.begun.retain(|begun| *begun != id);
                    todo.done.push((id, outcome));
                }
                None if self.has_jobs() && started.elapsed() < PATIENCE => std::thread::sleep(PAUSE),
                None => break,
            }
        }
        self.ended.notify_one();
    }

    /// Note that what has begun is late, and drop the jobs of late shares. Return whether jobs are left, and whether some have begun.
    fn give_up(&self) -> (bool, bool) {
        let mut todo = self.todo();
        let mut seats = self.seats.lock();
        for id in &todo.begun {
            if let Some(Seat::Taken { is_late }) = seats.get_mut(id) {
                *is_late = true;
            }
        }
        drop(seats);
        let has_begun = !todo.begun.is_empty();
        let late = self.seats.late();
        todo.jobs.retain(|(id, _)| !late.contains(id));
        (!todo.jobs.is_empty(), has_begun)
    }
}

impl OpenShareFiles {
    /// `root` is the directory of all shares.
    pub(crate) fn new(root: PathBuf) -> OpenShareFiles {
        Self::searching(root, SEARCH)
    }

    /// The same, with another limit for the search of the owners of slots.
    pub(super) fn searching(root: PathBuf, search: Duration) -> OpenShareFiles {
        OpenShareFiles {
            root,
            seats: Arc::default(),
            search,
        }
    }

    /// Return the shares that have directories.
    ///
    /// # Errors
    /// The directories cannot be listed. Only root can change them.
    pub(crate) fn present(&self) -> Result<Vec<ShareId>, FileError> {
        let mut present = Vec::new();
        for pod in files::names(&self.root)? {
            let gpus = files::names(&self.root.join(&pod))?;
            present.extend(gpus.iter().map(|gpu| ShareId::new(&pod, gpu)));
        }
        Ok(present)
    }

    /// Perform jobs, one for each share, and wait until all have ended that end in time.
    pub(crate) async fn run(&self, mut jobs: Vec<(ShareId, ShareJob)>) -> Outcomes {
        let late = self.seats.late();
        jobs.retain(|(id, _)| !late.contains(id));
        let expected = jobs.len();
        if expected == 0 {
            return Outcomes::new();
        }
        let queue = Arc::new(self.queue(jobs));
        let start = || {
            let queue = queue.clone();
            tokio::task::spawn_blocking(move || queue.work());
        };
        start();
        let (mut rounds, mut seen) = (0, 0);
        loop {
            let ended = timeout(PATIENCE, queue.ended.notified()).await.is_ok();
            let (done, is_busy) = {
                let todo = queue.todo();
                (todo.done.len(), !todo.begun.is_empty())
            };
            if done == expected {
                break;
            }
            // One thread has ended and another goes on, or a job has ended within the time for one.
            if (ended && is_busy) || std::mem::replace(&mut seen, done) < done {
                continue;
            }
            rounds += 1;
            match queue.give_up() {
                // The thread has not begun yet, or another run has the shares.
                (true, false) if rounds < ROUNDS && Arc::strong_count(&queue) > 1 => {}
                (true, _) if rounds < ROUNDS => start(),
                _ => break,
            }
        }
        std::mem::take(&mut queue.todo().done)
    }

    fn queue(&self, jobs: Vec<(ShareId, ShareJob)>) -> JobQueue {
        JobQueue {
            root: self.root.clone(),
            seats: self.seats.clone(),
            search: self.search,
            todo: Mutex::new(Todo {
                done: Outcomes::with_capacity(jobs.len()),
                jobs: jobs.into(),
                begun: Vec::new(),
            }),
            ended: Notify::new(),
        }
    }

    /// Have a job of a share be late, as if an operation on its files did not end.
    #[cfg(test)]
    pub(super) fn hang(&self, id: &ShareId) {
        let queue = self.queue(vec![(id.clone(), ShareJob::Check)]);
        drop(queue.next());
        queue.give_up();
    }

    /// Have the files of a share in use forever, as if an operation on them did not end.
    #[cfg(test)]
    pub(super) fn occupy(&self, id: &ShareId) {
        self.seats.lock().insert(id.clone(), Seat::Taken { is_late: false });
    }

    /// Close the files of a pod. A thread that has some of them at the moment closes them afterwards.
    pub(crate) fn close(&self, pod: &str) {
        self.seats.lock().retain(|id, _| id.pod() != pod);
    }

    /// Remove the files of a pod.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub(crate) async fn remove(&self, pod: &str) -> Result<(), FileError> {
        let path = self.root.join(pod);
        let failed = |source| FileError {
            action: "remove",
            path: self.root.join(pod),
            source,
        };
        let removed = tokio::task::spawn_blocking(move || std::fs::remove_dir_all(path)).await;
        match removed.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
            _ => Ok(()),
        }
    }
}

/// The files of one share.
#[derive(Debug)]
struct OpenFiles {
    directory: PathBuf,
    usage: Option<File>,
    limits: Option<File>,
    /// The user and the group of this program, which owns the files that it makes.
    owner: (u32, u32),
    /// What this agent, or the one before, wrote into the file of limits, and its generation.
    written: Option<(u64, ShareLimits)>,
    /// The number of what was written last.
    number: Option<u64>,
    /// How many bytes of the file of usage said something when it was read last. They do not become fewer.
    length: usize,
    /// Until when no owners of slots are searched.
    rests: Option<Instant>,
    /// Whether an agent of a later version made the files: its file of limits, which no pod can write, says so. Then the file of usage is its business.
    is_made_later: bool,
}

impl OpenFiles {
    fn new(directory: PathBuf) -> OpenFiles {
        OpenFiles {
            directory,
            usage: None,
            limits: None,
            owner: (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
            written: None,
            number: None,
            length: 0,
            rests: None,
            is_made_later: false,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn perform(&mut self, job: ShareJob, search: Duration) -> Result<JobOutcome, FileError> {
        match job {
            ShareJob::Open => self.found(search),
            ShareJob::Make => self.make(search),
            ShareJob::Read => Ok(JobOutcome::Read(self.read(search, false)?)),
            ShareJob::Check => Ok(JobOutcome::Read(self.read(search, true)?)),
            ShareJob::Write(limits) => self.write(&limits),
        }
    }

    fn make(&mut self, search: Duration) -> Result<JobOutcome, FileError> {
        files::make_directory(&self.directory, 0o755)?;
        let empty = ShareLimits::default().file();
        for (name, content, mode) in [(USAGE, &usage::file()[..], USAGE_MODE), (LIMITS, &empty[..], 0o644)] {
            let path = self.path(name);
            if path.symlink_metadata().is_err() {
                files::write_atomic(&self.directory, name, content, mode)?;
                // The umask has taken bits away. No one else reaches the directory.
                std::fs::set_permissions(&path, Permissions::from_mode(mode)).map_err(self.failed("open to the pod", name))?;
            }
        }
        let before = self.read(search, true)?;
        if before.change.is_some() && self.has_no_owner(search) {
            // No process loses anything.
            if let Some(file) = &self.usage {
                file.write_all_at(&usage::file(), 0).map_err(self.failed("write", USAGE))?;
            }
            self.length = 0;
        }
        self.found(search)
    }

    fn found(&mut self, search: Duration) -> Result<JobOutcome, FileError> {
        let usage = self.read(search, true)?;
        let limits = self.limits()?;
        self.written = limits.ok();
        let limits = limits.map(|(_, limits)| limits);
        Ok(JobOutcome::Found(Box::new(ShareFound { limits, usage })))
    }

    /// Read the file of limits: the generation, and the limits.
    fn limits(&self) -> Result<Result<(u64, ShareLimits), UnreadableLimits>, FileError> {
        let Some(file) = &self.limits else {
            return Ok(Err(UnreadableLimits::Foreign));
        };
        let mut bytes = [0; limits::SIZE];
        let length = read_at(file, &mut bytes).map_err(self.failed("read", LIMITS))?;
        Ok(ShareLimits::from_bytes(&bytes[..length]))
    }

    /// Open the files that are not open. Return why one cannot be opened, if a program in the pod causes that.
    fn open(&mut self) -> Result<Option<FileChange>, FileError> {
        if self.usage.is_none() {
            match open_for_both(&self.path(USAGE)) {
                Ok(file) => self.usage = Some(file),
                Err(error) => return self.refused(USAGE, error),
            }
        }
        if self.limits.is_none() {
            match open_for_both(&self.path(LIMITS)) {
                Ok(file) => self.limits = Some(file),
                Err(error) => return self.refused(LIMITS, error),
            }
            self.is_made_later = matches!(self.limits()?, Err(UnreadableLimits::Newer(_)));
        }
        Ok(None)
    }

    fn refused(&self, name: &'static str, error: io::Error) -> Result<Option<FileChange>, FileError> {
        match error.raw_os_error() {
            Some(libc::EWOULDBLOCK) => Ok(Some(FileChange::Leased)),
            Some(libc::EACCES) => {
                // The permissions can be restored if the file still belongs to the agent. The next job opens it then.
                let path = self.path(name);
                let restored =
                    std::fs::set_permissions(&path, Permissions::from_mode(if name == USAGE { USAGE_MODE } else { 0o644 }));
                debug!(path = %path.display(), ?restored, "the agent may not open a file of a pod");
                Ok(Some(FileChange::Forbidden))
            }
            Some(libc::EPERM) => Ok(Some(FileChange::Forbidden)),
            _ => Err(self.failed("open", name)(error)),
        }
    }

    fn failed(&self, action: &'static str, name: &'static str) -> impl FnOnce(io::Error) -> FileError {
        move |source| FileError {
            action,
            path: self.path(name),
            source,
        }
    }

    /// `checks`: also look for changes that the content does not show, and restore the file.
    fn read(&mut self, search: Duration, checks: bool) -> Result<UsageReading, FileError> {
        if let Some(change) = self.open()? {
            return Ok(UsageReading::unreadable(change));
        }
        let Some(file) = self.usage.as_ref().filter(|_| !self.is_made_later) else {
            return Ok(UsageReading::default());
        };
        let failed = || self.failed("read", USAGE);
        let mut status = FileStatus {
            size: usage::SIZE as u64,
            mode: USAGE_MODE,
            owner: self.owner,
        };
        if checks {
            let metadata = file.metadata().map_err(failed())?;
            status = FileStatus {
                size: metadata.len(),
                mode: metadata.mode() & 0o7777,
                owner: (metadata.uid(), metadata.gid()),
            };
        }
        let mut first = [0; FIRST];
        let read = read_at(file, &mut first).map_err(failed())?;
        let mut all = Vec::new();
        let bytes = match first.get(..read).filter(|first| usage::length(first) <= FIRST) {
            Some(first) => first,
            None => {
                all.resize(usage::SIZE, 0);
                let read = read_at(file, &mut all).map_err(failed())?;
                &all[..read]
            }
        };
        let mut rests = self.rests.filter(|until| Instant::now() < *until);
        let mut reading = UsageReading::of(status, bytes, self.owner, |slots| {
            if rests.is_some() {
                return Err(FileChange::Locks);
            }
            let began = Instant::now();
            let found = keep_owned(file, slots, search);
            if found.is_err() {
                rests = Instant::now().checked_add(began.elapsed().saturating_mul(REST));
            }
            found
        });
        if reading.change.is_none() && usage::length(bytes) < self.length {
            reading.change = Some(FileChange::FewerSlots);
        }
        self.length = self.length.max(usage::length(bytes));
        // Guards lock the bytes of owners and of cleaners only. A pod that makes the list of locks long needs others.
        if checks && reading.change.is_none() && lock_in(file, claim::cleaner(usage::SLOTS)..i64::MAX.unsigned_abs()).is_some() {
            reading.change = Some(FileChange::ForeignLock);
        }
        if checks
            && reading.change.is_some()
            && let Err(error) = restore(file, status, bytes, self.owner)
        {
            debug!(directory = %self.directory.display(), %error, "a file of usage is not restored");
        }
        self.rests = rests;
        Ok(reading)
    }

    /// Report whether no process has a slot, also if the file does not say which slots are used.
    fn has_no_owner(&self, search: Duration) -> bool {
        let mut slots: Vec<usize> = (0..usage::SLOTS).collect();
        let found = self.usage.as_ref().map(|file| keep_owned(file, &mut slots, search));
        matches!(found, Some(Ok(()))) && slots.is_empty()
    }

    fn write(&mut self, LimitsToWrite { limits, number }: &LimitsToWrite) -> Result<JobOutcome, FileError> {
        if let Some((_, newer)) = self.written.filter(|_| self.number > Some(*number)) {
            return Ok(JobOutcome::Wrote(newer));
        }
        if self.limits.is_none() {
            self.open()?;
        }
        let Some(file) = &self.limits else {
            return Err(self.failed("open", LIMITS)(io::Error::from_raw_os_error(libc::EWOULDBLOCK)));
        };
        let generation = match self.written {
            Some((generation, before)) => {
                let next = generation.wrapping_add(1);
                let (at, copy) = limits.copy(next);
                file.write_all_at(&copy, at).map_err(self.failed("write", LIMITS))?;
                // The guards that wait until the copy of this generation is in the file.
                if (before.limits_compute() || before.is_stopped)
                    && let Err(number) = wake(file.as_raw_fd(), limits::SIZE, limits::bell(next))
                {
                    // They look again after a tenth of a second at most.
                    let error = io::Error::from_raw_os_error(number.cast_signed());
                    debug!(directory = %self.directory.display(), %error, "the processes that wait for new limits are not woken");
                }
                next
            }
            None => {
                file.write_all_at(&limits.file(), 0).map_err(self.failed("write", LIMITS))?;
                1
            }
        };
        self.written = Some((generation, *limits));
        self.number = Some(*number);
        Ok(JobOutcome::Wrote(*limits))
    }
}

/// Open a regular file for reading and writing, at once or not at all.
fn open_for_both(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file"))
    }
}

/// Read from the start of a file until the buffer is full or the file ends.
fn read_at(file: &File, bytes: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < bytes.len() {
        match file.read_at(&mut bytes[length..], length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

/// Give a file of usage its size, its permissions, its owner, and its head back, as far as a program has changed them.
fn restore(file: &File, status: FileStatus, bytes: &[u8], owner: (u32, u32)) -> io::Result<()> {
    if status.size != usage::SIZE as u64 {
        file.set_len(usage::SIZE as u64)?;
    }
    let new = usage::file();
    if bytes.get(..FIXED) != new.get(..FIXED) {
        file.write_all_at(&new[..FIXED], 0)?;
    }
    if status.owner != owner {
        fchown(file, Some(owner.0), Some(owner.1))?;
    }
    if status.mode != USAGE_MODE {
        file.set_permissions(Permissions::from_mode(USAGE_MODE))?;
    }
    Ok(())
}

fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// Keep those of these slots that have an owner: a process that holds the slot's lock. The questions take no lock, so they disturb no process.
///
/// # Errors
/// The search does not end within this time and as much processor time after it. Each question takes as long as the kernel's list of the file's locks is, and a
/// pod can lock any number of ranges.
fn keep_owned(file: &File, slots: &mut Vec<usize>, limit: Duration) -> Result<(), FileChange> {
    let (Some(first), Some(last)) = (slots.first(), slots.last()) else {
        return Ok(());
    };
    let (began, mut used_then) = (Instant::now(), None);
    let mut owned = [false; usage::SLOTS];
    // Most files have one lock, for which no list is needed.
    let mut range = Some(claim::owner(*first)..claim::owner(last + 1));
    let mut ranges = Vec::new();
    while let Some(range) = range.take().or_else(|| ranges.pop()) {
        // An answer is any lock in the range, not the first one, so both sides of it are asked for.
        let Some(locked) = lock_in(file, range.clone()) else {
            continue;
        };
        for slot in slots.iter().filter(|slot| locked.contains(&claim::owner(**slot))) {
            owned[*slot] = true;
        }
        ranges.extend(
            [range.start..locked.start, locked.end..range.end]
                .into_iter()
                .filter(|rest| !rest.is_empty()),
        );
        // On a busy machine much time can pass. To ask for the processor time is a system call, which nearly no search needs.
        if began.elapsed() >= limit {
            let used = processor_time();
            if used.saturating_sub(*used_then.get_or_insert(used)) >= limit {
                return Err(FileChange::Locks);
            }
        }
    }
    slots.retain(|slot| owned[*slot]);
    Ok(())
}

/// Return a locked part of a range of bytes. If the kernel does not answer, all of it counts as locked, so that the memory of its owners counts.
fn lock_in(file: &File, range: std::ops::Range<u64>) -> Option<std::ops::Range<u64>> {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: range.start.cast_signed(),
        l_len: (range.end - range.start).cast_signed(),
        // The kernel requires 0.
        l_pid: 0,
    };
    if fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock)).is_err() {
        return Some(range);
    }
    if lock.l_type == libc::F_UNLCK as libc::c_short {
        return None;
    }
    let start = u64::try_from(lock.l_start).unwrap_or(0);
    let end = match u64::try_from(lock.l_len) {
        // To the end of the file.
        Ok(0) | Err(_) => u64::MAX,
        Ok(length) => start.saturating_add(length),
    };
    Some(start.clamp(range.start, range.end)..end.clamp(range.start, range.end))
}
