//! How a process reserves memory: it announces, it sums, it keeps or takes back.
//!
//! A process first adds what it wants to `pending` of its slot, and then sums `pending` and `used` of all slots that have an owner. If the sum is
//! allowed, the memory is the process's: it calls the driver, and then moves the bytes to `used`.
//!
//! **Never more than allowed.** Between the announcement and the sum each process has a sequentially consistent fence. Of any set of processes that
//! hold a reservation, take the one whose fence is the last. It saw the announcements of all others, so its sum was at least what they hold together.
//! For this a reader reads `pending` before `used`, and bytes are added to `used` before they leave `pending`: so they are counted twice for
//! a moment, and never not at all.
//!
//! **One process always goes on.** Processes that announce at the same moment can stand in each other's way. Then all but the one with the lowest slot take
//! their announcement back, and try again.
//!
//! **A refusal is a fact.** A sum is not taken at one moment: memory that one process frees and another gets can be in it twice. So a process is
//! refused only if two sums, one right after the other, saw the same.

use core::sync::atomic::{AtomicU64, Ordering, fence};

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
pub trait Table {
    /// The type of a slot's words.
    type Word: Word;
    /// How many slots there are to look at. It may grow, before the owner of a new one announces anything.
    fn slots(&self) -> usize;
    /// The bytes that the owner of a slot asks for or is about to get.
    fn pending(&self, slot: usize) -> &Self::Word;
    /// The bytes that the owner of a slot has.
    fn used(&self, slot: usize) -> &Self::Word;
    /// Whether a slot has an owner. What a process without one leaves behind does not count.
    fn held(&mut self, slot: usize) -> bool;
    /// A sequentially consistent fence.
    fn fence(&self);
    /// Let other processes go on. `false`: this reservation has waited long enough.
    fn pause(&mut self) -> bool;
}

/// Why memory was not reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It is more than is left of the share.
    #[error("the pod's share of the GPU has not that much memory left")]
    Full,
    /// Other processes' reservations were in the way, and stayed there.
    #[error("other processes of the pod were reserving memory the whole time")]
    Contended,
}

/// Reserve memory for the owner of a slot. At most one thread of the owner may do this at a time; the others may [`commit`] and [`free`] meanwhile.
///
/// # Errors
///
/// If the processes of the pod would have more than allowed, or if other reservations stood in the way until [`Table::pause`] gave up.
pub fn reserve<T: Table>(table: &mut T, own: usize, bytes: u64, allowed: u64) -> Result<(), Refused> {
    let mut full: Option<u64> = None;
    table.pending(own).add(bytes);
    table.fence();
    loop {
        // What dead processes left behind is counted here, because to find out who owns what takes system calls. Most allocations end here.
        if raw(table) <= allowed {
            return Ok(());
        }
        match judge(table, own, bytes, allowed) {
            Verdict::Fits => return Ok(()),
            Verdict::Full(seen) if full == Some(seen) => {
                table.pending(own).sub(bytes);
                return Err(Refused::Full);
            }
            Verdict::Full(seen) => {
                let first = full.is_none();
                full = Some(seen);
                if first {
                    continue;
                }
            }
            Verdict::Stay => full = None,
            Verdict::Yield => {
                full = None;
                table.pending(own).sub(bytes);
                // Not back before the lower one has decided, or the two could meet again and again.
                while {
                    if !table.pause() {
                        return Err(Refused::Contended);
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
            return Err(if full.is_some() { Refused::Full } else { Refused::Contended });
        }
    }
}

/// Reserved bytes are now the process's.
pub fn commit<T: Table>(table: &T, own: usize, bytes: u64) {
    table.used(own).add(bytes);
    table.pending(own).sub(bytes);
}

/// Reserved bytes were not used: the driver refused.
pub fn cancel<T: Table>(table: &T, own: usize, bytes: u64) {
    table.pending(own).sub(bytes);
}

/// The driver has the bytes back.
pub fn free<T: Table>(table: &T, own: usize, bytes: u64) {
    table.used(own).sub(bytes);
}

/// What the processes of the pod have and are about to get.
pub fn charged<T: Table>(table: &mut T) -> u64 {
    (0..table.slots()).fold(0, |sum, slot| {
        let bytes = both(table, slot);
        let counts = bytes != 0 && table.held(slot);
        sum.saturating_add(if counts { bytes } else { 0 })
    })
}

fn both<T: Table>(table: &T, slot: usize) -> u64 {
    let pending = table.pending(slot).load();
    pending.saturating_add(table.used(slot).load())
}

fn raw<T: Table>(table: &T) -> u64 {
    (0..table.slots()).fold(0, |sum, slot| sum.saturating_add(both(table, slot)))
}

/// Whether a process with a lower slot asks for memory or is about to get it.
fn lower<T: Table>(table: &mut T, own: usize) -> bool {
    (0..own).any(|slot| table.pending(slot).load() != 0 && table.held(slot))
}

enum Verdict {
    Fits,
    /// What processes have already is too much for this request; with what was seen.
    Full(u64),
    /// Only processes with higher slots are in the way.
    Stay,
    /// A process with a lower slot is in the way.
    Yield,
}

fn judge<T: Table>(table: &mut T, own: usize, bytes: u64, allowed: u64) -> Verdict {
    let (mut sum, mut used_sum, mut seen, mut yields) = (0_u64, bytes, 0_u64, false);
    for slot in 0..table.slots() {
        let pending = table.pending(slot).load();
        let used = table.used(slot).load();
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
        Verdict::Fits
    } else if used_sum > allowed {
        Verdict::Full(seen)
    } else if yields {
        Verdict::Yield
    } else {
        Verdict::Stay
    }
}

impl Word for AtomicU64 {
    fn load(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn add(&self, bytes: u64) {
        // Cannot fail: the function has always a new value.
        let _ = self.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |old| Some(old.saturating_add(bytes)));
    }

    fn sub(&self, bytes: u64) {
        // Cannot fail: the function has always a new value.
        let _ = self.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |old| Some(old.saturating_sub(bytes)));
    }
}

/// What [`Table::fence`] is for words in memory.
pub fn full_fence() {
    fence(Ordering::SeqCst);
}
