//! How a process gets a slot.
//!
//! A slot whose owner was killed still has the owner's numbers. They must be cleared before the slot has an owner again, or other processes would count
//! memory that no process has. So a process first locks a second byte of the slot, clears the slot while it has no owner, and only then locks the byte that
//! makes it the owner.

use core::sync::atomic::Ordering;

use crate::usage::{SLOTS, UsageFile};

/// Locks on bytes of the file, of one open file description.
pub trait Locks {
    /// Whether another description has locked the byte.
    fn held(&self, byte: u64) -> bool;
    /// Lock the byte. Return false if another description has locked it.
    fn take(&self, byte: u64) -> bool;
    /// Unlock the byte.
    fn release(&self, byte: u64);
}

/// The byte that the owner of a slot has locked.
#[must_use]
pub fn owner(slot: usize) -> u64 {
    slot as u64
}

/// The byte that is locked while a slot is cleared.
#[must_use]
pub fn cleaner(slot: usize) -> u64 {
    (SLOTS + slot) as u64
}

/// Take the first free slot. Return `None` if there is none.
pub fn claim<L: Locks>(locks: &L, usage: &UsageFile, pid: u64) -> Option<usize> {
    let bound = usage.bound();
    usage.slots.iter().enumerate().find_map(|(index, slot)| {
        // The first check only avoids a lock of a slot that has had an owner. The second one decides.
        if (index < bound && locks.held(owner(index))) || !locks.take(cleaner(index)) {
            return None;
        }
        let mine = !locks.held(owner(index)) && {
            for word in [
                &slot.used,
                &slot.pending,
                &slot.pid,
                &slot.peak,
                &slot.denied,
                &slot.contexts,
                &slot.root,
            ] {
                word.store(0, Ordering::Relaxed);
            }
            slot.pid.store(pid, Ordering::Release);
            // Before the owner announces anything, so a process that sees an announcement looks at its slot.
            usage.bound.fetch_max(index as u64 + 1, Ordering::AcqRel);
            locks.take(owner(index))
        };
        locks.release(cleaner(index));
        mine.then_some(index)
    })
}
