//! What a file of usage says, and whether a program in the pod has changed it in a way in which no guard changes it.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use divvy_share::usage::{self, Content, SLOTS, SlotUsage, UnusableFile, UsageTotals};

use crate::project::digest;

/// The permissions of a file of usage: the processes of a container may have any user.
pub const USAGE_MODE: u32 = 0o666;
/// The largest PID that Linux gives (`PID_MAX_LIMIT` in include/linux/threads.h).
const LARGEST_PID: u64 = 1 << 22;

/// Identifies a pod's share of a GPU. Each measurement copies and compares ids many times, so copies share their text, and a comparison starts with a digest.
#[derive(Clone, PartialEq, Eq)]
pub struct ShareId {
    digest: u64,
    /// The pod's UID, and the UUID of the GPU or of the MIG device.
    text: Arc<str>,
    /// Where the UUID begins.
    at: usize,
}

impl ShareId {
    /// Return the id of a share: of the pod with this UID, of the GPU or the MIG device with this UUID.
    #[must_use]
    pub fn new(pod: &str, gpu: &str) -> ShareId {
        ShareId {
            digest: digest((pod, gpu)),
            text: [pod, gpu].concat().into(),
            at: pod.len(),
        }
    }

    /// Return the pod's UID.
    #[must_use]
    pub fn pod(&self) -> &str {
        &self.text[..self.at]
    }

    /// Return the UUID of the GPU or of the MIG device.
    #[must_use]
    pub fn gpu(&self) -> &str {
        &self.text[self.at..]
    }
}

impl Ord for ShareId {
    fn cmp(&self, other: &ShareId) -> Ordering {
        self.digest.cmp(&other.digest).then_with(|| {
            if Arc::ptr_eq(&self.text, &other.text) {
                // Copies are of the same pod and GPU.
                Ordering::Equal
            } else {
                (self.pod(), self.gpu()).cmp(&(other.pod(), other.gpu()))
            }
        })
    }
}

impl PartialOrd for ShareId {
    fn partial_cmp(&self, other: &ShareId) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for ShareId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ShareId").field(&self.pod()).field(&self.gpu()).finish()
    }
}

/// What was read from the files of usage. A share is missing if its file could not be read in time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Readings {
    /// In the order of the ids.
    all: Vec<(ShareId, UsageReading)>,
}

impl Readings {
    /// Return what was read of a share.
    #[must_use]
    pub fn get(&self, id: &ShareId) -> Option<&UsageReading> {
        let at = self.all.binary_search_by(|(of, _)| of.cmp(id)).ok()?;
        self.all.get(at).map(|(_, reading)| reading)
    }
}

/// Each share is to be there once.
impl FromIterator<(ShareId, UsageReading)> for Readings {
    fn from_iter<I: IntoIterator<Item = (ShareId, UsageReading)>>(readings: I) -> Self {
        let mut all: Vec<_> = readings.into_iter().collect();
        all.sort_by(|(one, _), (other, _)| one.cmp(other));
        Self { all }
    }
}

/// The status of a file of usage (`fstat(2)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStatus {
    /// Bytes.
    pub size: u64,
    /// The permissions.
    pub mode: u32,
    /// The owner's user id and group id.
    pub owner: (u32, u32),
}

/// A state of a file of usage that neither an agent nor a guard can have produced.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum FileChange {
    /// The size.
    #[error("the file has {0} bytes instead of {size}", size = usage::SIZE)]
    Size(u64),
    /// The first bytes.
    #[error("the file does not start as Divvy's files do")]
    Head,
    /// The version of the layout, which the agent writes.
    #[error("the file says that it has layout version {0}, and Divvy made it with version {version}", version = usage::VERSION)]
    Version(u64),
    /// The permissions.
    #[error("the file has the permissions {0:o} instead of {USAGE_MODE:o}")]
    Mode(u32),
    /// The owner.
    #[error("the file belongs to user {0} and group {1}")]
    Owner(u32, u32),
    /// A number that no guard writes.
    #[error("the file says {0} where a guard writes at most {1}")]
    Number(u64, u64),
    /// The number of slots that have had an owner has become smaller.
    #[error("the file says that fewer of its slots have been used than it said before")]
    FewerSlots,
    /// A lease (`F_SETLEASE` in fcntl(2)).
    #[error("a process holds a lease on the file, so the agent cannot open it")]
    Leased,
    /// The permissions or the owner keep the agent from opening the file.
    #[error("the agent may not open the file")]
    Forbidden,
    /// A lock where guards lock nothing.
    #[error("a process has locked a part of the file that no guard locks")]
    ForeignLock,
    /// Very many locks.
    #[error("so many ranges of the file are locked that the agent does not look for the owners of slots")]
    Locks,
}

/// What a file of usage says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsageReading {
    /// How the file was changed.
    pub change: Option<FileChange>,
    /// What the processes say that they have. `None` if the file cannot be read as one of usage.
    pub slots: Option<InSlots>,
    /// What the guards have counted. `None` as above.
    pub counts: Option<UsageCounts>,
}

/// What the slots with an owner say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InSlots {
    /// The memory that all processes have allocated, in bytes, without their contexts.
    pub bytes: u64,
    /// The number of their contexts.
    pub contexts: u64,
    /// The PIDs of all processes whose slots have memory or a context, as they see them themselves, in order. A process that the driver lists has a context, so
    /// a slot that says nothing is not its slot.
    pub pids: Vec<u64>,
}

/// What the guards of a pod count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsageCounts {
    /// The refused allocations of each slot, up to the last slot that has some.
    pub denied: Vec<u64>,
    /// The launches of all slots.
    pub launches: u64,
    /// The counts of all processes.
    pub totals: UsageTotals,
}

impl UsageReading {
    /// A file that could not be opened or read for this reason.
    #[must_use]
    pub fn unreadable(change: FileChange) -> Self {
        Self {
            change: Some(change),
            ..Self::default()
        }
    }

    /// Read a file of usage. `bytes` are as many as [`usage::length`] says, or more. `owner` is the user and the group that made the file. `keep_owned` gets the
    /// slots that say something, and removes those that no process has locked.
    pub fn of(
        status: FileStatus,
        bytes: &[u8],
        owner: (u32, u32),
        keep_owned: impl FnOnce(&mut Vec<usize>) -> Result<(), FileChange>,
    ) -> Self {
        let (user, group) = status.owner;
        let status = if status.size != usage::SIZE as u64 {
            Some(FileChange::Size(status.size))
        } else if status.owner != owner {
            Some(FileChange::Owner(user, group))
        } else {
            (status.mode != USAGE_MODE).then_some(FileChange::Mode(status.mode))
        };
        let content = match usage::parse(bytes) {
            Ok(content) => content,
            Err(error) => {
                return Self::unreadable(status.unwrap_or(match error {
                    UnusableFile::Size(size) => FileChange::Size(size as u64),
                    UnusableFile::Foreign => FileChange::Head,
                    UnusableFile::Newer(version) => FileChange::Version(version),
                }));
            }
        };
        let counts = Some(UsageCounts::of(content));
        let says_something = |slot: &SlotUsage| slot.used > 0 || slot.contexts > 0 || slot.pid > 0;
        let used = content.slots().enumerate().filter(|(_, slot)| says_something(slot));
        let mut owned: Vec<usize> = used.map(|(index, _)| index).collect();
        if let Err(change) = keep_owned(&mut owned) {
            return Self {
                change: Some(change),
                slots: None,
                counts,
            };
        }
        let owned = content
            .slots()
            .enumerate()
            .filter(|(index, _)| owned.binary_search(index).is_ok());
        let mut sum = InSlots::default();
        let mut change = status.or(too_large(content.bound, SLOTS as u64));
        for (_, SlotUsage { used, pid, contexts, .. }) in owned {
            sum.bytes = sum.bytes.saturating_add(used);
            sum.contexts = sum.contexts.saturating_add(contexts);
            if used > 0 || contexts > 0 {
                sum.pids.push(pid);
            }
            change = change.or(too_large(pid, LARGEST_PID));
        }
        sum.pids.sort_unstable();
        Self {
            change,
            slots: Some(sum),
            counts,
        }
    }
}

fn too_large(says: u64, most: u64) -> Option<FileChange> {
    (says > most).then_some(FileChange::Number(says, most))
}

impl UsageCounts {
    fn of(content: Content<'_>) -> Self {
        let mut denied = Vec::new();
        for (index, slot) in content.slots().enumerate().filter(|(_, slot)| slot.denied > 0) {
            denied.resize(index, 0);
            denied.push(slot.denied);
        }
        Self {
            denied,
            launches: divvy_share::compute::total(content.slots().map(|slot| slot.launches)),
            totals: content.totals,
        }
    }
}
