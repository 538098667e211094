//! How a process reserves memory: it announces an amount, sums all slots, and keeps or withdraws the amount.
//!
//! A process first adds the amount to `pending` of its slot, and then sums `pending` and `used` of all slots that have an owner. If the sum is within the
//! limit, the process has reserved the memory: it calls the driver, and then moves the bytes to `used`.
//!
//! **Never more than allowed.** Each process has a sequentially consistent fence between its announcement and its sum. Of any set of processes that hold a
//! reservation, consider the one whose fence came last. It saw the announcements of all others, so its sum was at least what they hold together. For this,
//! a reader reads `pending` before `used` and the contexts, and bytes are added there before they are removed from `pending`. So they may be counted twice for a
//! moment, but are always counted.
//!
//! **One process always makes progress.** Processes that announce at the same moment can block each other. Then all of them except the one with the lowest slot
//! withdraw their announcement, and try again.
//!
//! **A refusal is right.** A sum is not taken at one moment: memory that one process frees and another one gets can be counted twice. So a process is
//! refused only if two sums in a row saw the same values.

use core::sync::atomic::{AtomicU64, Ordering, compiler_fence, fence};

/// A word of a slot. Any number of processes read it; the threads of the slot's owner write it.
pub trait Word {
    /// Read the word, and everything that was written before what is read was written.
    fn load(&self) -> u64;
    /// Add, and stop at the largest value.
    fn add(&self, bytes: u64);
    /// Subtract, and stop at 0.
    fn sub(&self, bytes: u64);
}

/// The slots of all processes of the pod.
pub trait SlotTable {
    /// The type of a slot's words.
    type Word: Word;
    /// How many slots there are to look at. It may grow, before the owner of a new one announces anything.
    fn slots(&self) -> usize;
    /// The bytes that the owner of a slot requests, or has reserved but not received yet.
    fn pending(&self, slot: usize) -> &Self::Word;
    /// The bytes that the owner of a slot has.
    fn used(&self, slot: usize) -> &Self::Word;
    /// The bytes with which the contexts of the owner of a slot are charged in addition.
    fn contexts(&self, _slot: usize) -> u64 {
        0
    }
    /// Report whether a slot has an owner. The values of a slot without an owner do not count.
    fn held(&mut self, slot: usize) -> bool;
    /// A sequentially consistent fence.
    fn fence(&self);
    /// Let other processes continue. Return false if this reservation has waited long enough.
    fn pause(&mut self) -> bool;
}

/// Why memory was not reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveRefusal {
    /// The request exceeds what is left of the share.
    #[error("the pod's share of the GPU has not that much memory left")]
    Full,
    /// Reservations of other processes blocked the request the whole time.
    #[error("other processes of the pod were reserving memory the whole time")]
    Contended,
}

/// Reserve memory for the owner of a slot. At most one thread of the owner may do this at a time; the others may [`commit`] and [`free`] meanwhile.
///
/// # Errors
///
/// If the processes of the pod would have more than allowed, or if other reservations stood in the way until [`SlotTable::pause`] gave up.
pub fn reserve<T: SlotTable>(table: &mut T, own: usize, bytes: u64, allowed: u64) -> Result<(), ReserveRefusal> {
    let mut full: Option<u64> = None;
    table.pending(own).add(bytes);
    table.fence();
    loop {
        // This sum includes the values of slots without an owner, because finding the owners takes system calls. Most allocations end here.
        if raw(table) <= allowed {
            return Ok(());
        }
        match judge(table, own, bytes, allowed) {
            ReserveVerdict::Fits => return Ok(()),
            ReserveVerdict::Full(seen) if full == Some(seen) => {
                table.pending(own).sub(bytes);
                return Err(ReserveRefusal::Full);
            }
            ReserveVerdict::Full(seen) => {
                let first = full.is_none();
                full = Some(seen);
                if first {
                    continue;
                }
            }
            ReserveVerdict::Stay => full = None,
            ReserveVerdict::Yield => {
                full = None;
                table.pending(own).sub(bytes);
                // Wait until the process with the lower slot has decided, or the two could block each other again and again.
                while {
                    if !table.pause() {
                        return Err(ReserveRefusal::Contended);
                    }
                    lower(table, own)
                } {}
                table.pending(own).add(bytes);
                table.fence();
                continue;
            }
        }
        if !table.pause() {
            table.pending(own).sub(bytes);
            return Err(if full.is_some() {
                ReserveRefusal::Full
            } else {
                ReserveRefusal::Contended
            });
        }
    }
}

/// The driver has allocated the reserved bytes.
pub fn commit<T: SlotTable>(table: &T, own: usize, bytes: u64) {
    table.used(own).add(bytes);
    table.pending(own).sub(bytes);
}

/// The driver has refused the reserved bytes.
pub fn cancel<T: SlotTable>(table: &T, own: usize, bytes: u64) {
    table.pending(own).sub(bytes);
}

/// The bytes were freed.
pub fn free<T: SlotTable>(table: &T, own: usize, bytes: u64) {
    table.used(own).sub(bytes);
}

/// Return the bytes that the processes of the pod have or have reserved.
pub fn charged<T: SlotTable>(table: &mut T) -> u64 {
    (0..table.slots()).fold(0, |sum, slot| {
        let bytes = both(table, slot);
        let counts = bytes != 0 && table.held(slot);
        sum.saturating_add(if counts { bytes } else { 0 })
    })
}

fn both<T: SlotTable>(table: &T, slot: usize) -> u64 {
    let pending = table.pending(slot).load();
    pending.saturating_add(has(table, slot))
}

fn has<T: SlotTable>(table: &T, slot: usize) -> u64 {
    table.used(slot).load().saturating_add(table.contexts(slot))
}

fn raw<T: SlotTable>(table: &T) -> u64 {
    (0..table.slots()).fold(0, |sum, slot| sum.saturating_add(both(table, slot)))
}

/// Report whether a process with a lower slot requests memory or has reserved some.
fn lower<T: SlotTable>(table: &mut T, own: usize) -> bool {
    (0..own).any(|slot| table.pending(slot).load() != 0 && table.held(slot))
}

enum ReserveVerdict {
    Fits,
    /// The memory that processes have already leaves too little for this request. The value identifies what was seen.
    Full(u64),
    /// Only processes with higher slots block the request.
    Stay,
    /// A process with a lower slot blocks the request.
    Yield,
}

fn judge<T: SlotTable>(table: &mut T, own: usize, bytes: u64, allowed: u64) -> ReserveVerdict {
    let (mut sum, mut used_sum, mut seen, mut yields) = (0_u64, bytes, 0_u64, false);
    for slot in 0..table.slots() {
        let pending = table.pending(slot).load();
        let used = has(table, slot);
        if (pending | used) == 0 || (slot != own && !table.held(slot)) {
            continue;
        }
        sum = sum.saturating_add(pending).saturating_add(used);
        used_sum = used_sum.saturating_add(used);
        seen = (seen ^ used ^ slot as u64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(31);
        yields |= slot < own && pending != 0;
    }
    if sum <= allowed {
        ReserveVerdict::Fits
    } else if used_sum > allowed {
        ReserveVerdict::Full(seen)
    } else if yields {
        ReserveVerdict::Yield
    } else {
        ReserveVerdict::Stay
    }
}

impl Word for AtomicU64 {
    fn load(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn add(&self, bytes: u64) {
        // This cannot fail, because the function always returns a value.
        let _ = self.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |old| Some(old.saturating_add(bytes)));
    }

    fn sub(&self, bytes: u64) {
        // This cannot fail, because the function always returns a value.
        let _ = self.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |old| Some(old.saturating_sub(bytes)));
    }
}

/// The fence for words in memory ([`SlotTable::fence`]), right after [`Word::add`].
///
/// On x86-64, [`Word::add`] is an instruction with the prefix `lock`, which no earlier store and no later load passes (Intel's manual, volume 3: "Loads and Stores
/// Are Not Reordered with Locked Instructions"; therefore the kernel's `smp_mb__after_atomic` is empty there). So only the compiler must keep the order. Of a
/// real fence it would make an instruction that takes longer than all other steps of a reservation.
pub fn full_fence() {
    if cfg!(target_arch = "x86_64") {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}
