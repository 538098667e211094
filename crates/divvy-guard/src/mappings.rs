//! Physical memory and its mappings (`cuMemCreate`, `cuMemMap`).
//!
//! Physical memory lives until its last handle and its last mapping are gone: programs release the handle as soon as they have mapped the memory.

use crate::charge::{self, give_back, note};
use crate::cuda::{AllocationProp, Code, DEVICE, SUCCESS};
use crate::ledger::{Entry, Kind, Table};
use crate::process::{Process, process};

/// In `Entry::of` of physical memory: one handle, and one mapping.
const HANDLE: u64 = 1;
const MAPPING: u64 = 1 << 32;

/// `cuMemCreate`.
///
/// # Safety
///
/// `prop` is null or valid, as the driver demands it.
pub(crate) unsafe fn create(
    bytes: u64,
    prop: *const AllocationProp,
    call: impl FnOnce() -> Code,
    handle: impl FnOnce() -> u64,
) -> Code {
    // SAFETY: the caller's promise.
    match unsafe { prop.as_ref() } {
        Some(prop) if prop.location_type == DEVICE => {
            charge::allocate(prop.location_id, Kind::Physical, HANDLE, bytes, call, handle)
        }
        // Memory of the host; or the driver says what is wrong.
        _ => call(),
    }
}

/// Count one handle or mapping less, ask the driver, and give the memory back when it was the last one.
fn drop_one(handle: u64, what: u64, call: impl FnOnce() -> Code) -> Code {
    let Some(process) = process() else { return call() };
    let Some(entry) = uncount(process, handle, what) else {
        return call();
    };
    let code = call();
    dropped(process, handle, what, entry, code);
    code
}

/// Count one handle or mapping less. Return the record, which is removed if this was the last one. `None`: the memory was not charged.
#[inline(never)]
fn uncount(process: &Process, handle: u64, what: u64) -> Option<Entry> {
    let mut had = false;
    let entry = process.ledger.change(Kind::Physical, handle, |entry| {
        let count = if what == HANDLE {
            entry.of & (MAPPING - 1)
        } else {
            entry.of >> 32
        };
        had = count > 0;
        if had {
            entry.of = entry.of.wrapping_sub(what);
        }
        had && entry.of == 0
    });
    entry.filter(|_| had)
}

/// Give back what the driver has freed, or count it again if the driver has refused.
#[inline(never)]
fn dropped(process: &Process, handle: u64, what: u64, mut entry: Entry, code: Code) {
    match (code, entry.of) {
        (SUCCESS, 0) => give_back(process, &entry),
        (SUCCESS, _) => {}
        (_, 0) => {
            entry.of = what;
            note(process, entry);
        }
        _ => {
            count(handle, what);
        }
    }
}

/// Count one handle or mapping more. `false`: the memory was not charged.
fn count(handle: u64, what: u64) -> bool {
    let add = |entry: &mut Entry| {
        entry.of = entry.of.wrapping_add(what);
        false
    };
    process()
        .and_then(|process| process.ledger.change(Kind::Physical, handle, add))
        .is_some()
}

/// `cuMemRelease`.
pub(crate) fn release(handle: u64, call: impl FnOnce() -> Code) -> Code {
    drop_one(handle, HANDLE, call)
}

/// `cuMemRetainAllocationHandle`: the same handle once more.
pub(crate) fn retain(call: impl FnOnce() -> Code, handle: impl FnOnce() -> u64) -> Code {
    let code = call();
    if code == SUCCESS {
        // What was not charged is not counted.
        count(handle(), HANDLE);
    }
    code
}

/// `cuMemMap`.
pub(crate) fn map(pointer: u64, size: u64, handle: u64, call: impl FnOnce() -> Code) -> Code {
    let Some(process) = process() else { return call() };
    if !count(handle, MAPPING) {
        return call();
    }
    let code = call();
    if code == SUCCESS {
        note(process, Entry::new(Kind::Mapping, pointer, 0, size, handle));
    } else {
        drop_one(handle, MAPPING, || SUCCESS);
    }
    code
}

/// `cuMemUnmap`: the range may have several mappings, one after the other.
pub(crate) fn unmap(pointer: u64, size: u64, call: impl FnOnce() -> Code) -> Code {
    let Some(process) = process() else { return call() };
    // Forgotten before the driver is asked: after that, another thread can map something there.
    let first = process.ledger.take(Kind::Mapping, pointer);
    let code = call();
    match first {
        Some(mapping) if code == SUCCESS => {
            drop_one(mapping.of, MAPPING, || SUCCESS);
            if mapping.size < size {
                unmap_rest(process, pointer, size);
            }
        }
        Some(mapping) => note(process, mapping),
        None if code == SUCCESS => unmap_rest(process, pointer, size),
        None => {}
    }
    code
}

fn unmap_rest(process: &Process, pointer: u64, size: u64) {
    let inside = |entry: &Entry, _: &Table<'_>| entry.is(Kind::Mapping) && entry.key.wrapping_sub(pointer) < size;
    let mut place = 0;
    while let Some((next, mapping)) = process.ledger.take_from(place, inside) {
        place = next;
        drop_one(mapping.of, MAPPING, || SUCCESS);
    }
}
