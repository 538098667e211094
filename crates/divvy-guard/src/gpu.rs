//! One GPU, as this process may use it: its files, its slot, and what is charged to the slot.

use core::sync::atomic::{AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use divvy_share::claim::{Locks as _, claim, owner};
use divvy_share::compute::{self, Turn};
use divvy_share::limits::{self, LimitsMark, ShareLimits, UnreadableLimits};
use divvy_share::reserve::{self, SlotTable, Word as _};
use divvy_share::usage::{self, UsageFile};
use linux_raw_sys::errno::{EAGAIN, EINTR, EMFILE, ENFILE, ENOENT, ENOMEM};

use crate::cuda::Uuid;
use crate::path::{FixedPath, ROOT};
use crate::sys::{self, Errno, FileLocks, Mutex, RawFile};

/// Of a GPU: its limits were not read yet. Of the process: it has no slot yet.
const UNKNOWN: u32 = 0;
/// The process is not limited.
const FREE: u32 = 1;
/// The pod has no share of this GPU.
const NOTHING: u32 = 2;
/// The GPU has limits, or the process has a slot.
const HELD: u32 = 3;

/// The driver gives memory in pages of this size.
pub(crate) const PAGE: u64 = 2 << 20;

/// Zeros are a GPU about which nothing is known.
#[repr(C)]
pub(crate) struct GuardedGpu {
    /// Held while files are opened and while a reservation is decided.
    lock: Mutex,
    state: AtomicU32,
    seat: AtomicU32,
    slot: AtomicU32,
    limits: AtomicPtr<LimitWords>,
    usage: AtomicPtr<UsageFile>,
    uuid: [AtomicU64; 2],
    /// The limits that were read last, and the mark of the file then.
    mark: [AtomicU64; limits::MARK.len()],
    bytes: AtomicU64,
    allowed: AtomicU64,
    refuse_managed: AtomicU32,
    /// What each context of the pod is charged with.
    context: AtomicU64,
    /// Bytes that threads are about to take from pools.
    pub(crate) coming: AtomicU64,
    /// Held while a launch waits, so that one thread of the process waits for compute time, and the others wait for it.
    queue: Mutex,
    /// How many launches pass before the limits are looked at again.
    pub(crate) credit: Credit,
    pub(crate) primary: AtomicU32,
}

/// How many launches pass without a look at the limits. Zeros are none.
#[repr(transparent)]
pub(crate) struct Credit(AtomicI64);

impl Credit {
    /// Use one of them.
    pub(crate) fn spend(&self) -> bool {
        // The first check keeps the number from falling without a bound.
        self.0.load(Ordering::Relaxed) > 0 && self.0.fetch_sub(1, Ordering::Relaxed) > 0
    }

    fn set(&self, launches: i64) {
        self.0.store(launches, Ordering::Relaxed);
    }

    /// Move launches to another credit, but not more than this.
    pub(crate) fn lend(&self, to: &Self, most: i64) {
        let all = self.0.swap(0, Ordering::Relaxed);
        let lent = all.min(most).max(0);
        to.0.fetch_add(lent, Ordering::Relaxed);
        self.0.fetch_add(all.wrapping_sub(lent), Ordering::Relaxed);
    }
}

/// What the pod may have of a GPU.
pub(crate) struct Allowed {
    /// The share, which programs see as the size of the GPU.
    pub(crate) bytes: u64,
    /// What may be charged.
    pub(crate) charges: u64,
    pub(crate) refuse_managed: bool,
}

/// Whether a GPU is held to a share.
pub(crate) enum ShareHold {
    Free,
    Nothing,
    Held(Allowed),
}

/// The request exceeds the share, or the process has no slot in which it could be counted.
pub(crate) struct ShareExceeded;

/// Return the memory that the driver uses for an allocation with its own pages.
pub(crate) fn pages(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}

impl GuardedGpu {
    /// The share of the pod. `uuid` asks the driver which GPU this is, once.
    pub(crate) fn share(&self, uuid: impl FnOnce() -> Option<Uuid>) -> ShareHold {
        match self.state.load(Ordering::Acquire) {
            FREE => ShareHold::Free,
            NOTHING => ShareHold::Nothing,
            HELD => self.held(),
            _ => {
                // Asked without the lock, because the driver may call back.
                // A driver that cannot answer also refuses the call, and says why.
                let Some(uuid) = uuid() else { return ShareHold::Free };
                let locked = self.lock.lock();
                if self.state.load(Ordering::Acquire) == UNKNOWN {
                    self.open(uuid);
                }
                let state = self.state.load(Ordering::Acquire);
                drop(locked);
                match state {
                    FREE => ShareHold::Free,
                    HELD => self.held(),
                    // Also when the files could not be opened this time.
                    _ => ShareHold::Nothing,
                }
            }
        }
    }

    fn open(&self, uuid: Uuid) {
        let [low, high] = uuid_words(uuid);
        for (word, value) in self.uuid.iter().zip([low, high]) {
            word.store(value, Ordering::Relaxed);
        }
        let state = match sys::open(FixedPath::of(uuid.0, b"/limits").as_c_str(), false, limits::SIZE) {
            Ok(file) => match sys::map::<LimitWords>(&file, false) {
                Ok(words) => {
                    self.limits.store(core::ptr::from_ref(words).cast_mut(), Ordering::Relaxed);
                    match read(words) {
                        Ok(((_, limits), mark)) => {
                            self.note(&limits, mark);
                            HELD
                        }
                        // An upgrade must not end a program. The agent reports a process without a slot.
                        Err(UnreadableLimits::Newer(_) | UnreadableLimits::Foreign | UnreadableLimits::Torn) => FREE,
                    }
                }
                Err(_) => UNKNOWN,
            },
            // The pod has shares, but none of this GPU.
            Err(ENOENT) if sys::exists(FixedPath::from(&[&ROOT.get()]).as_c_str()) => NOTHING,
            // EAGAIN: a program in the pod has a lease on the file, which this attempt breaks.
            Err(EMFILE | ENFILE | ENOMEM | EINTR | EAGAIN) => UNKNOWN,
            Err(_) => FREE,
        };
        self.state.store(state, Ordering::Release);
    }

    /// Remember the limits. The lock must be held, so that a thread that read them earlier does not overwrite them.
    fn note(&self, limits: &ShareLimits, mark: Option<LimitsMark>) {
        self.bytes.store(limits.bytes, Ordering::Relaxed);
        self.allowed.store(limits.allowed(), Ordering::Relaxed);
        self.context.store(limits.contexts(1), Ordering::Relaxed);
        self.refuse_managed.store(u32::from(limits.refuse_managed), Ordering::Relaxed);
        if let Some(mark) = mark {
            for (to, from) in self.mark.iter().zip(mark) {
                to.store(from, Ordering::Release);
            }
        }
    }

    /// Whether the file of limits is still as it was when the limits were read last.
    fn is_noted(&self, words: &LimitWords) -> bool {
        limits::MARK.iter().zip(&self.mark).all(|(at, noted)| {
            let noted = noted.load(Ordering::Acquire);
            words.get(*at).is_some_and(|word| word.load(Ordering::Relaxed) == noted)
        })
    }

    fn held(&self) -> ShareHold {
        if let Some(words) = self.limits().filter(|words| !self.is_noted(words)) {
            let _locked = self.lock.lock();
            match read(words) {
                Ok(((_, limits), mark)) => self.note(&limits, mark),
                Err(UnreadableLimits::Newer(_)) => return ShareHold::Free,
                // The agent is writing, or was killed while writing: the values that were read last apply.
                Err(UnreadableLimits::Foreign | UnreadableLimits::Torn) => {}
            }
        }
        ShareHold::Held(Allowed {
            bytes: self.bytes.load(Ordering::Relaxed),
            charges: self.allowed.load(Ordering::Relaxed),
            refuse_managed: self.refuse_managed.load(Ordering::Relaxed) != 0,
        })
    }

    /// The file of limits, if it was opened.
    fn limits(&self) -> Option<&'static LimitWords> {
        // SAFETY: the pointer was stored before `state` became `HELD`, by `sys::map`, and the mapping is never removed.
        unsafe { self.limits.load(Ordering::Acquire).as_ref() }
    }

    /// Let a launch pass, or wait until it may. Return whether the limits were looked at.
    pub(crate) fn launch(&self, uuid: impl FnOnce() -> Option<Uuid>) -> bool {
        if self.credit.spend() {
            return false;
        }
        self.queue(uuid);
        true
    }

    /// How many launches this GPU would let pass now. A process without a slot has no context here, so it launches nothing here.
    pub(crate) fn would_pass(&self) -> i64 {
        let (Some(words), seat @ Some(_)) = (self.limits(), self.seated()) else {
            return UNLIMITED;
        };
        let now = sys::now();
        match turn(words, seat, now, now).1 {
            Turn::Free => UNLIMITED,
            Turn::Go(more) => more.cast_signed(),
            Turn::Wait(_) => 0,
        }
    }

    #[cold]
    fn queue(&self, uuid: impl FnOnce() -> Option<Uuid>) {
        let is_held = self.state.load(Ordering::Acquire) == HELD || matches!(self.share(uuid), ShareHold::Held(_));
        let Some(words) = self.limits().filter(|_| is_held) else {
            return self.credit.set(UNLIMITED);
        };
        let _queue = self.queue.lock();
        let since = sys::now();
        let mut now = since;
        // Another thread may have looked while this one waited for it.
        while !self.credit.spend() {
            // Read before the limits: if the agent writes in between, the wait ends at once.
            let bells = [0, 1].map(|generation| {
                let word = words.get(limits::bell(generation) / 8);
                word.map_or(0, |word| word.load(Ordering::Acquire) as u32)
            });
            let usage = self.seat();
            let (generation, turn) = turn(words, usage, now, since);
            match turn {
                Turn::Free => return self.credit.set(UNLIMITED),
                Turn::Go(more) => {
                    if let Some(slot) = usage.and_then(|(usage, slot)| usage.slots.get(slot)) {
                        slot.launches.fetch_add(more.saturating_add(1), Ordering::Relaxed);
                    }
                    return self.credit.set(more.cast_signed());
                }
                Turn::Wait(time) => {
                    let next = generation.wrapping_add(1);
                    let [even, odd] = bells;
                    let seen = if next.is_multiple_of(2) { even } else { odd };
                    sys::wait(words, limits::bell(next), seen, time);
                    let before = now;
                    now = sys::now();
                    // After each part of a long wait, so that it is seen while it lasts.
                    if let Some((usage, _)) = usage {
                        usage.throttle(now.saturating_sub(before));
                    }
                }
            }
        }
    }

    /// The slot of this process, which is taken if it has none.
    fn seat(&self) -> Option<(&'static UsageFile, usize)> {
        self.seated().or_else(|| {
            let _locked = self.lock.lock();
            self.sit();
            self.seated()
        })
    }

    /// Whether this process has a slot, which it takes if it has none.
    pub(crate) fn has_slot(&self) -> bool {
        self.seat().is_some()
    }

    /// What one context is charged with.
    pub(crate) fn context(&self) -> u64 {
        self.context.load(Ordering::Relaxed)
    }

    /// Reserve memory, in whole pages, or count that it was refused. After success, the driver may be called, and [`GuardedGpu::commit`] or [`GuardedGpu::cancel`] must
    /// follow.
    pub(crate) fn reserve(&self, charge: u64, allowed: &Allowed) -> Result<(), ShareExceeded> {
        self.request(charge, allowed, true)
    }

    /// Reserve memory for a request that is made once more if it is refused.
    pub(crate) fn try_reserve(&self, charge: u64, allowed: &Allowed) -> Result<(), ShareExceeded> {
        self.request(charge, allowed, false)
    }

    fn request(&self, charge: u64, allowed: &Allowed, counts: bool) -> Result<(), ShareExceeded> {
        let _locked = self.lock.lock();
        self.sit();
        let (usage, slot) = self.seated().ok_or(ShareExceeded)?;
        if charge > 0 && reserve::reserve(&mut ProcessSlots::new(self, usage, slot), slot, charge, allowed.charges).is_err() {
            if counts {
                usage.deny(slot, charge);
            }
            return Err(ShareExceeded);
        }
        Ok(())
    }

    /// The driver has allocated the reserved memory.
    pub(crate) fn commit(&self, charge: u64) {
        let Some((usage, slot)) = self.seated() else { return };
        reserve::commit(&ProcessSlots::new(self, usage, slot), slot, charge);
        self.peak(usage, slot);
    }

    /// The driver has made the context for which so much was reserved.
    pub(crate) fn context_made(&self, charge: u64) {
        if let Some((usage, slot)) = self.seated() {
            if let Some(slot) = usage.slots.get(slot) {
                slot.contexts.add(1);
            }
            self.peak(usage, slot);
        }
        self.cancel(charge);
    }

    /// A context has ended.
    pub(crate) fn context_ended(&self) {
        if let Some(slot) = self.seated().and_then(|(usage, slot)| usage.slots.get(slot)) {
            slot.contexts.sub(1);
        }
    }

    /// The driver has not allocated the reserved memory.
    pub(crate) fn cancel(&self, charge: u64) {
        if let Some((usage, slot)) = self.seated() {
            reserve::cancel(&ProcessSlots::new(self, usage, slot), slot, charge);
        }
    }

    /// Memory was freed.
    pub(crate) fn free(&self, charge: u64) {
        if let Some((usage, slot)) = self.seated() {
            reserve::free(&ProcessSlots::new(self, usage, slot), slot, charge);
        }
    }

    /// A pool has grown or shrunk, which cannot be refused any more. Both are whole pages.
    pub(crate) fn adjust(&self, before: u64, now: u64) {
        let Some((usage, slot)) = self.seated().filter(|_| before != now) else {
            return;
        };
        let table = ProcessSlots::new(self, usage, slot);
        table.used(slot).add(now.saturating_sub(before));
        table.used(slot).sub(before.saturating_sub(now));
        self.peak(usage, slot);
    }

    fn peak(&self, usage: &UsageFile, slot: usize) {
        if let Some(slot) = usage.slots.get(slot) {
            let contexts = slot.contexts.load(Ordering::Relaxed).saturating_mul(self.context());
            let used = slot.used.load(Ordering::Relaxed).saturating_add(contexts);
            if used > slot.peak.load(Ordering::Relaxed) {
                slot.peak.fetch_max(used, Ordering::Relaxed);
            }
        }
    }

    /// What the processes of the pod are charged with together.
    pub(crate) fn charged(&self) -> u64 {
        self.seated()
            .map_or(0, |(usage, slot)| reserve::charged(&mut ProcessSlots::new(self, usage, slot)))
    }

    fn seated(&self) -> Option<(&'static UsageFile, usize)> {
        if self.seat.load(Ordering::Acquire) != HELD {
            return None;
        }
        // SAFETY: the pointer was stored before `seat` became `HELD`, by `sys::map`, and the mapping is never removed.
        let usage = unsafe { self.usage.load(Ordering::Acquire).as_ref() }?;
        Some((usage, self.slot.load(Ordering::Relaxed) as usize))
    }

    /// Take a slot, if this process has none. The lock must be held.
    ///
    /// If the file cannot be used, the process gets no slot, and so no memory. The agent made both files, and the limits are readable, so a program of the pod
    /// has damaged this one. The next request tries again.
    fn sit(&self) {
        if self.seated().is_some() {
            return;
        }
        let Ok(file) = self.usage_file() else { return };
        let Ok(usage) = sys::map::<UsageFile>(&file, true) else {
            return;
        };
        if usage.check().is_err() {
            // As below.
            return sys::unmap(usage);
        }
        let pid = sys::pid();
        let Some(slot) = claim(&FileLocks(&file), usage, pid) else {
            usage.crowded.fetch_add(1, Ordering::Relaxed);
            // The next allocation tries again, and must not leave one mapping more each time.
            return sys::unmap(usage);
        };
        if let Some(slot) = usage.slots.get(slot) {
            slot.root.store(sys::directory(c"/"), Ordering::Relaxed);
        }
        usage.count();
        self.usage.store(core::ptr::from_ref(usage).cast_mut(), Ordering::Relaxed);
        self.slot.store(u32::try_from(slot).unwrap_or(u32::MAX), Ordering::Relaxed);
        self.seat.store(HELD, Ordering::Release);
        // The mapping keeps the description open, and with it the lock: the program may close all its descriptors.
        drop(file);
    }

    fn usage_file(&self) -> Result<RawFile, Errno> {
        let [low, high] = &self.uuid;
        let uuid = uuid_of([low.load(Ordering::Relaxed), high.load(Ordering::Relaxed)]);
        sys::open(FixedPath::of(uuid.0, b"/usage").as_c_str(), true, usage::SIZE)
    }
}

/// Whether launches on a GPU of the pod may have to wait. The driver knows the GPUs only after `cuInit`, and programs ask for functions before it.
pub(crate) fn any_holds_launches() -> bool {
    let root = ROOT.get();
    sys::any_in(FixedPath::from(&[&root]).as_c_str(), |name| {
        let path = FixedPath::from(&[&root, b"/", name, b"/limits"]);
        let file = match sys::open(path.as_c_str(), false, limits::SIZE) {
            Ok(file) => file,
            // A program in the pod has a lease on the file, which this attempt breaks. Whether there is a limit is looked at again before launches.
            Err(error) => return error == EAGAIN,
        };
        let mut words = [0; limits::WORDS];
        // The agent may be writing: of two readings one is complete.
        (0..2).any(|_| {
            // SAFETY: any bytes are numbers.
            let limits = unsafe { sys::read(&file, &mut words) }.map(|()| ShareLimits::parse(&words));
            matches!(limits, Ok(Ok((_, limits))) if limits.holds_launches())
        })
    })
}

/// The file of limits.
type LimitWords = [AtomicU64; limits::WORDS];

/// The number of launches after which the guard checks again whether the GPU has a limit now.
const UNLIMITED: i64 = 1000;

/// The generation and the limits, and the mark of the file ([`ShareLimits::parse_marked`]).
#[inline(always)]
fn read(words: &LimitWords) -> Result<((u64, ShareLimits), Option<LimitsMark>), UnreadableLimits> {
    let mut result = Err(UnreadableLimits::Torn);
    for _ in 0..4 {
        let mut copy = [0; limits::WORDS];
        for (to, from) in copy.iter_mut().zip(words) {
            *to = from.load(Ordering::Relaxed);
        }
        result = ShareLimits::parse_marked(&copy);
        if result != Err(UnreadableLimits::Torn) {
            break;
        }
    }
    result
}

/// Decide about a launch ([`compute::turn`]). Return the generation of the limits, too.
#[inline(always)]
fn turn(words: &LimitWords, seat: Option<(&UsageFile, usize)>, now: u64, since: u64) -> (u64, Turn) {
    // Limits that cannot be read do not stop a program.
    let Ok(((generation, limits), _)) = read(words) else {
        return (0, Turn::Free);
    };
    let launches = seat.map_or(0, |(usage, _)| compute::launches(usage));
    (generation, compute::turn(&limits, launches, now, since))
}

fn uuid_words(uuid: Uuid) -> [u64; 2] {
    let value = u128::from_ne_bytes(uuid.0);
    [value as u64, (value >> 64) as u64]
}

fn uuid_of([low, high]: [u64; 2]) -> Uuid {
    Uuid((u128::from(low) | u128::from(high) << 64).to_ne_bytes())
}

/// The slots of the pod's processes, for one reservation.
struct ProcessSlots<'a> {
    gpu: &'a GuardedGpu,
    usage: &'static UsageFile,
    own: usize,
    /// Opened when it matters which slots have an owner.
    file: Option<Result<RawFile, Errno>>,
    pauses: u32,
}

/// Naps of 100 microseconds: a reservation waits 50 ms for others.
const PAUSES: u32 = 500;

impl<'a> ProcessSlots<'a> {
    fn new(gpu: &'a GuardedGpu, usage: &'static UsageFile, own: usize) -> Self {
        Self {
            gpu,
            usage,
            own,
            file: None,
            pauses: 0,
        }
    }
}

static ZERO: AtomicU64 = AtomicU64::new(0);

impl SlotTable for ProcessSlots<'_> {
    type Word = AtomicU64;

    fn slots(&self) -> usize {
        self.usage.bound()
    }

    fn pending(&self, slot: usize) -> &AtomicU64 {
        self.usage.slots.get(slot).map_or(&ZERO, |slot| &slot.pending)
    }

    fn used(&self, slot: usize) -> &AtomicU64 {
        self.usage.slots.get(slot).map_or(&ZERO, |slot| &slot.used)
    }

    fn contexts(&self, slot: usize) -> u64 {
        let count = self
            .usage
            .slots
            .get(slot)
            .map_or(0, |slot| slot.contexts.load(Ordering::Acquire));
        count.saturating_mul(self.gpu.context())
    }

    fn held(&mut self, slot: usize) -> bool {
        if slot == self.own {
            return true;
        }
        // If the file cannot be opened, the owner is unknown, so the slot counts.
        let file = self.file.get_or_insert_with(|| self.gpu.usage_file());
        file.as_ref().map_or(true, |file| FileLocks(file).held(owner(slot)))
    }

    fn fence(&self) {
        reserve::full_fence();
    }

    fn pause(&mut self) -> bool {
        self.pauses = self.pauses.saturating_add(1);
        sys::nap();
        self.pauses < PAUSES
    }
}
