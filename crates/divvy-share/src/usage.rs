//! The file `usage`: a head, and a slot for each process of the pod that uses the GPU.
//!
//! Every container of the pod can write the whole file, so its content is not trusted. A pod that writes wrong numbers gets less than its share, or more, which
//! the agent sees in the driver's own numbers. It affects no other pod, because each pod has its own file.

use core::sync::atomic::{AtomicU64, Ordering};

const MAGIC: u64 = u64::from_le_bytes(*b"DIVVYUSE");
/// The version of the layout. A later version keeps the first two words.
pub const VERSION: u64 = 1;
/// The number of processes that can use the GPU at the same time.
pub const SLOTS: usize = 256;
/// What one refused allocation counts for at most. No GPU has as much, but a program can ask for any amount.
const MOST_DENIED: u64 = 1 << 40;
/// Bytes of the head.
pub const HEAD: usize = 64;
/// Bytes of a slot.
pub const SLOT: usize = 64;
/// The word of the head that is [`UsageFile::bound`].
const BOUND: usize = 3;
/// Bytes of the file.
pub const SIZE: usize = HEAD + SLOTS * SLOT;

/// The file as processes map it. Any part of it can change at any moment, and any bytes are a valid value.
#[repr(C)]
#[derive(Debug)]
pub struct UsageFile {
    magic: AtomicU64,
    version: AtomicU64,
    /// The number of processes that were refused because there was no free slot.
    pub crowded: AtomicU64,
    /// Slots from this one on have never had an owner, so processes need not read them.
    pub(crate) bound: AtomicU64,
    /// Not 0 once a guard that counts the next two words has used the file: an earlier guard leaves zeros.
    pub counts: AtomicU64,
    /// The bytes of the allocations that were refused because of the limit, of all processes so far.
    pub denied_bytes: AtomicU64,
    /// For how many nanoseconds launches have waited, of all processes so far.
    pub throttled_ns: AtomicU64,
    _rest: [AtomicU64; 1],
    /// The slots. The owner of a slot has locked the byte of the file at the slot's index.
    pub slots: [UsageSlot; SLOTS],
}

/// What one process uses. Only its owner writes it.
#[repr(C)]
#[derive(Debug, Default)]
pub struct UsageSlot {
    /// Bytes that the process has allocated from the driver, without its contexts.
    pub used: AtomicU64,
    /// Bytes that the process requests, or has reserved but not received from the driver yet.
    pub pending: AtomicU64,
    /// The process's id, as its container sees it. It is only shown to people. See [`UsageSlot::root`].
    pub pid: AtomicU64,
    /// The most that the process was charged with so far, with its contexts.
    pub peak: AtomicU64,
    /// The number of allocations that were refused because of the limit.
    pub denied: AtomicU64,
    /// The number of launches that the slot's owners were allowed, where compute time is limited. It is not cleared for a new owner, because only its growth
    /// counts.
    pub launches: AtomicU64,
    /// The number of contexts that the process has. Each is charged with [`crate::limits::ShareLimits::context`]. A guard of an earlier version leaves 0, and has the charge in
    /// `used`.
    pub contexts: AtomicU64,
    /// Which directory is the process's root directory, as `divvy_shadow::sys::directory` numbers it. 0 if it is not known. It identifies the
    /// container: processes in different containers of a pod can have the same `pid`, because containers usually have separate PID namespaces.
    pub root: AtomicU64,
}

const _: () = assert!(size_of::<UsageSlot>() == SLOT && size_of::<UsageFile>() == SIZE);

/// A slot's content. Other processes may change it while it is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotUsage {
    /// [`UsageSlot::used`].
    pub used: u64,
    /// [`UsageSlot::pending`].
    pub pending: u64,
    /// [`UsageSlot::pid`].
    pub pid: u64,
    /// [`UsageSlot::peak`].
    pub peak: u64,
    /// [`UsageSlot::denied`].
    pub denied: u64,
    /// [`UsageSlot::launches`].
    pub launches: u64,
    /// [`UsageSlot::contexts`].
    pub contexts: u64,
}

/// What the head says about all processes of the pod, also those that have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageTotals {
    /// [`UsageFile::crowded`].
    pub crowded: u64,
    /// The bytes of the allocations that were refused. `None` if no guard that counts them has used the file.
    pub denied_bytes: Option<u64>,
    /// For how many nanoseconds launches have waited, as the sum of the times of the processes. `None` as above.
    pub throttled_ns: Option<u64>,
}

/// Why a file cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnusableFile {
    /// The file has another size.
    #[error("the file has {0} bytes, and a file of usage has {SIZE}: a program in the pod changed it")]
    Size(usize),
    /// The file has another content.
    #[error("the file does not start as a file of usage does: a program in the pod changed it")]
    Foreign,
    /// An agent of a later version made the file.
    #[error(
        "the file has layout version {0}, which this version of Divvy does not know; restart the pod to get the matching guard"
    )]
    Newer(u64),
}

impl Default for UsageFile {
    fn default() -> Self {
        Self {
            magic: AtomicU64::new(MAGIC),
            version: AtomicU64::new(VERSION),
            crowded: AtomicU64::default(),
            bound: AtomicU64::default(),
            counts: AtomicU64::default(),
            denied_bytes: AtomicU64::default(),
            throttled_ns: AtomicU64::default(),
            _rest: Default::default(),
            slots: core::array::from_fn(|_| UsageSlot::default()),
        }
    }
}

impl UsageFile {
    /// Return how many slots, counted from the first, can have an owner.
    #[must_use]
    pub fn bound(&self) -> usize {
        usize::try_from(self.bound.load(Ordering::Acquire)).map_or(SLOTS, |bound| bound.min(SLOTS))
    }

    /// Note that refused allocations and waiting launches are counted from now on.
    pub fn count(&self) {
        self.counts.store(1, Ordering::Relaxed);
    }

    /// Count an allocation of so many bytes that was refused because of the limit, in the slot of its process.
    pub fn deny(&self, slot: usize, bytes: u64) {
        if let Some(slot) = self.slots.get(slot) {
            slot.denied.fetch_add(1, Ordering::Relaxed);
        }
        self.denied_bytes.fetch_add(bytes.min(MOST_DENIED), Ordering::Relaxed);
    }

    /// Count the time for which a launch has waited, in nanoseconds.
    pub fn throttle(&self, time: u64) {
        self.throttled_ns.fetch_add(time, Ordering::Relaxed);
    }

    /// Check that the mapped file is a file of usage of this version.
    ///
    /// # Errors
    ///
    /// Fails if it is not.
    pub fn check(&self) -> Result<(), UnusableFile> {
        check(self.magic.load(Ordering::Relaxed), self.version.load(Ordering::Relaxed))
    }
}

/// Return a new file.
#[must_use]
pub fn file() -> [u8; SIZE] {
    let mut file = [0; SIZE];
    file[..8].copy_from_slice(&MAGIC.to_ne_bytes());
    file[8..16].copy_from_slice(&VERSION.to_ne_bytes());
    file
}

/// A file's content.
#[derive(Clone, Copy, Debug)]
pub struct Content<'a> {
    /// What the head says about all processes.
    pub totals: UsageTotals,
    /// How many slots have had an owner, as the file says. A pod can write any number there.
    pub bound: u64,
    slots: &'a [u8],
}

impl<'a> Content<'a> {
    /// Return the slots that have had an owner, from the first one. The caller must find out which ones have an owner.
    pub fn slots(self) -> impl Iterator<Item = SlotUsage> + use<'a> {
        let (slots, _) = self.slots.as_chunks::<SLOT>();
        slots.iter().map(|slot| {
            let word = |index| word(slot, index);
            SlotUsage {
                used: word(0),
                pending: word(1),
                pid: word(2),
                peak: word(3),
                denied: word(4),
                launches: word(5),
                contexts: word(6),
            }
        })
    }
}

/// Return how many bytes of a file say something, by its first [`HEAD`] bytes: no slot behind them has had an owner.
#[must_use]
pub fn length(head: &[u8]) -> usize {
    HEAD + usize::try_from(word(head, BOUND)).map_or(SLOTS, |bound| bound.min(SLOTS)) * SLOT
}

/// Read a file's bytes: at least as many as [`length`] says.
///
/// # Errors
///
/// Fails if the bytes are not a file of usage of this version, or too few.
pub fn parse(bytes: &[u8]) -> Result<Content<'_>, UnusableFile> {
    let Some(slots) = bytes.get(HEAD..length(bytes)) else {
        return Err(UnusableFile::Size(bytes.len()));
    };
    check(word(bytes, 0), word(bytes, 1))?;
    let counted = |index| (word(bytes, 4) != 0).then(|| word(bytes, index));
    Ok(Content {
        totals: UsageTotals {
            crowded: word(bytes, 2),
            denied_bytes: counted(5),
            throttled_ns: counted(6),
        },
        bound: word(bytes, BOUND),
        slots,
    })
}

/// Return a word. What is missing is 0.
fn word(bytes: &[u8], index: usize) -> u64 {
    let (words, _) = bytes.as_chunks();
    words.get(index).map_or(0, |word| u64::from_ne_bytes(*word))
}

fn check(magic: u64, version: u64) -> Result<(), UnusableFile> {
    match (magic, version) {
        (MAGIC, VERSION) => Ok(()),
        (MAGIC, newer) if newer > VERSION => Err(UnusableFile::Newer(newer)),
        _ => Err(UnusableFile::Foreign),
    }
}
