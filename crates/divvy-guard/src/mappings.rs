//! Physical memory and its mappings (`cuMemCreate`, `cuMemMap`).
//!
//! Physical memory lives until its last handle and its last mapping are gone: programs release the handle as soon as they have mapped the memory.
//!
//! It also lives as long as a descriptor of it is open anywhere, or another process has it, and no process knows that of the others. So memory that was exported
//! stays charged until the process ends, and memory that was imported is charged to each process that has mapped it, as far as it is mapped: its maker may have
//! ended. Memory that two processes of a pod have is charged twice. To map it is never refused, because it takes no more memory of the GPU: what is charged then
//! only leaves less for what the pod allocates.

use crate::charge::{self, give_back, note};
use crate::cuda::{AllocationProp, CuResult, DriverCall, OUT_OF_MEMORY, OutPointer, SUCCESS};
use crate::current;
use crate::driver;
use crate::gpu::{GuardedGpu, pages};
use crate::ledger::{HandleEntry, HandleKind, LedgerTable};
use crate::process::{GuardedProcess, process};

/// In `HandleEntry::of` of physical memory: one handle, and one mapping.
const HANDLE: u64 = 1;
const MAPPING: u64 = 1 << 32;
/// In `HandleEntry::of` of physical memory: it was imported, and is charged with the largest size that was mapped. A descriptor does not tell its size.
const IMPORTED: u64 = 1 << 63;

/// `cuMemCreate`.
///
/// # Safety
///
/// `prop` is null or valid, as the driver demands it.
pub(crate) unsafe fn create(bytes: u64, prop: *const AllocationProp, call: &DriverCall, handle: OutPointer) -> CuResult {
    // SAFETY: the caller's promise.
    let prop = unsafe { prop.as_ref() };
    match prop.and_then(|prop| current::device_at(prop.location)) {
        Some(device) => charge::allocate(device, HandleKind::Physical, HANDLE, bytes, call, handle),
        // Memory of the host; or the driver says what is wrong.
        None => call.run(),
    }
}

/// `cuMemExportToShareableHandle`.
pub(crate) fn export(handle: u64, call: &DriverCall) -> CuResult {
    // Counted meanwhile, so that another thread cannot give the memory back after it was exported.
    let is_charged = count(handle, HANDLE);
    let code = call.run();
    if is_charged {
        if code == SUCCESS {
            keep(handle);
        }
        forget(handle, HANDLE);
    }
    code
}

/// Have memory charged until the process ends: nothing is given back with its record.
fn keep(handle: u64) {
    let mut no_more = |entry: &mut HandleEntry| {
        (entry.size, entry.of) = (0, entry.of & !IMPORTED);
        false
    };
    process().and_then(|process| process.ledger.change(HandleKind::Physical, handle, &mut no_more));
}

/// `cuMemImportFromShareableHandle`.
pub(crate) fn import(code: CuResult, handle: OutPointer) -> CuResult {
    if code == SUCCESS {
        imported(handle.get());
    }
    code
}

#[inline(never)]
fn imported(handle: u64) {
    // If the process exported this memory itself, it is charged already. Memory without a location is not GPU memory.
    if count(handle, HANDLE) {
        return;
    }
    if let Some(device) = driver::location_of(handle).and_then(current::device_at)
        && let Ok(held) = charge::held(device)
    {
        let entry = HandleEntry::new(HandleKind::Physical, handle, device.unsigned_abs(), 0, HANDLE | IMPORTED);
        note(held.process, entry);
    }
}

/// Count one handle or mapping less, ask the driver, and give the memory back when it was the last one.
#[inline(never)]
fn drop_one(handle: u64, what: u64, call: &DriverCall) -> CuResult {
    let Some(process) = process() else { return call.run() };
    let Some(entry) = uncount(process, handle, what) else {
        return call.run();
    };
    let code = call.run();
    dropped(process, handle, what, entry, code);
    code
}

/// The same for what the driver has done already, or has not counted.
#[inline(never)]
fn forget(handle: u64, what: u64) {
    if let Some(process) = process()
        && let Some(entry) = uncount(process, handle, what)
    {
        dropped(process, handle, what, entry, SUCCESS);
    }
}

/// Count one handle or mapping less. Return the record, which is removed if this was the last one. `None`: the memory was not charged.
#[inline(never)]
fn uncount(process: &GuardedProcess, handle: u64, what: u64) -> Option<HandleEntry> {
    let mut had = false;
    let entry = process.ledger.change(HandleKind::Physical, handle, &mut |entry| {
        let count = if what == HANDLE {
            entry.of & (MAPPING - 1)
        } else {
            (entry.of & !IMPORTED) >> 32
        };
        had = count > 0;
        if had {
            entry.of = entry.of.wrapping_sub(what);
        }
        had && entry.of & !IMPORTED == 0
    });
    entry.filter(|_| had)
}

/// Give back what the driver has freed, or count it again if the driver has refused.
#[inline(never)]
fn dropped(process: &GuardedProcess, handle: u64, what: u64, mut entry: HandleEntry, code: CuResult) {
    match (code, entry.of & !IMPORTED) {
        (SUCCESS, 0) => give_back(process, &entry),
        (SUCCESS, _) => {}
        (_, 0) => {
            entry.of |= what;
            note(process, entry);
        }
        _ => {
            count(handle, what);
        }
    }
}

/// Count one handle or mapping more. `false`: the memory was not charged.
#[inline(never)]
fn count(handle: u64, what: u64) -> bool {
    let mut add = |entry: &mut HandleEntry| {
        entry.of = entry.of.wrapping_add(what);
        false
    };
    process()
        .and_then(|process| process.ledger.change(HandleKind::Physical, handle, &mut add))
        .is_some()
}

/// `cuMemRelease`.
pub(crate) fn release(handle: u64, call: &DriverCall) -> CuResult {
    drop_one(handle, HANDLE, call)
}

/// `cuMemRetainAllocationHandle`: the same handle once more.
pub(crate) fn retain(code: CuResult, handle: OutPointer) -> CuResult {
    if code == SUCCESS {
        // What was not charged is not counted.
        count(handle.get(), HANDLE);
    }
    code
}

/// `cuMemMap`.
pub(crate) fn map(pointer: u64, size: u64, handle: u64, call: &DriverCall) -> CuResult {
    let Some(process) = process() else { return call.run() };
    if !count(handle, MAPPING) {
        return call.run();
    }
    let code = if has_slot(process, handle) {
        call.run()
    } else {
        OUT_OF_MEMORY
    };
    if code == SUCCESS {
        grow(process, handle, pages(size));
        note(process, HandleEntry::new(HandleKind::Mapping, pointer, 0, size, handle));
    } else {
        forget(handle, MAPPING);
    }
    code
}

/// Whether what is mapped can be charged. What the process has made itself is.
fn has_slot(process: &GuardedProcess, handle: u64) -> bool {
    let entry = process.ledger.get(HandleKind::Physical, handle);
    entry.is_none_or(|entry| entry.of & IMPORTED == 0 || charge::gpu_of(process, &entry).is_some_and(GuardedGpu::has_slot))
}

/// Charge imported memory of which more was mapped than before.
fn grow(process: &GuardedProcess, handle: u64, size: u64) {
    let mut before = 0;
    let entry = process.ledger.change(HandleKind::Physical, handle, &mut |entry| {
        before = entry.size;
        if entry.of & IMPORTED != 0 {
            entry.size = entry.size.max(size);
        }
        false
    });
    if let Some(entry) = entry
        && let Some(gpu) = charge::gpu_of(process, &entry)
    {
        gpu.adjust(before, entry.size);
    }
}

/// `cuMemUnmap`: the range may have several mappings, one after the other.
pub(crate) fn unmap(pointer: u64, size: u64, call: &DriverCall) -> CuResult {
    let Some(process) = process() else { return call.run() };
    // Forgotten before the driver is asked: after that, another thread can map something there.
    let first = process.ledger.take(HandleKind::Mapping, pointer);
    let code = call.run();
    match first {
        Some(mapping) if code == SUCCESS => {
            forget(mapping.of, MAPPING);
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

fn unmap_rest(process: &GuardedProcess, pointer: u64, size: u64) {
    let inside =
        |entry: &HandleEntry, _: &LedgerTable<'_>| entry.is(HandleKind::Mapping) && entry.key.wrapping_sub(pointer) < size;
    let mut place = 0;
    while let Some((next, mapping)) = process.ledger.take_from(place, &inside) {
        place = next;
        forget(mapping.of, MAPPING);
    }
}
