//! Memory that other interfaces and other processes have allocated.
//!
//! What is imported from another interface (`cuImportExternalMemory`) was allocated there without the guard, so it is charged here, once.
//!
//! Memory of another process (`cuIpcOpenMemHandle`, `cuMemPoolImportPointer`) is charged to its maker, but the maker may have ended or freed it: the memory lives as
//! long as a process has it open. No process knows that of the others, so it is charged to each process that has it open, and to its maker as long as it has it. To
//! open it is never refused, because that takes no more memory of the GPU: what is charged then only leaves less for what the pod allocates. If a context ends before
//! what it has open was closed, that stays charged until the process ends.

use core::sync::atomic::Ordering;

use crate::charge::{self, gpu_of, held};
use crate::cuda::{CuResult, DriverCall, ExternalMemory, OUT_OF_MEMORY, OutPointer, SUCCESS};
use crate::current;
use crate::driver;
use crate::gpu::pages;
use crate::ledger::{HandleEntry, HandleKind};
use crate::process::{GuardedProcess, process};

/// `cuImportExternalMemory`.
///
/// # Safety
///
/// `description` is null or valid, as the driver demands it.
pub(crate) unsafe fn import(description: *const ExternalMemory, call: &DriverCall, memory: OutPointer) -> CuResult {
    // SAFETY: the caller's promise.
    match (unsafe { description.as_ref() }, current::context()) {
        (Some(description), Some((device, _))) => {
            charge::allocate(device, HandleKind::External, 0, description.bytes, call, memory)
        }
        // The driver says what is wrong.
        _ => call.run(),
    }
}

/// `cuDestroyExternalMemory`.
pub(crate) fn destroy(memory: u64, call: &DriverCall) -> CuResult {
    charge::free(HandleKind::External, memory, call)
}

/// `cuIpcOpenMemHandle`, `cuMemPoolImportPointer`. `close` undoes it if the process has no slot in which it could be charged.
#[inline(never)]
pub(crate) fn open(code: CuResult, pointer: OutPointer, close: fn(u64) -> CuResult) -> CuResult {
    if code != SUCCESS || opened(pointer.get()) {
        return code;
    }
    close(pointer.get());
    OUT_OF_MEMORY
}

fn opened(pointer: u64) -> bool {
    let device = match current::only_gpu() {
        Some(_) => Some(0),
        None => driver::device_of_pointer(pointer),
    };
    let held = match device.map(held) {
        Some(Ok(held)) => held,
        // A GPU that is not limited, or one of which the pod has nothing.
        Some(Err(code)) => return code.is_none(),
        None => return false,
    };
    let size = driver::bytes_at(pointer).map_or(0, pages);
    if !held.gpu.has_slot() {
        return false;
    }
    held.process.opened.store(1, Ordering::Release);
    // Memory that is opened once more has the same address.
    let is_new = held.process.ledger.enter(HandleEntry::new(
        HandleKind::Opened,
        pointer,
        held.device.unsigned_abs(),
        size,
        1,
    ));
    if matches!(is_new, Ok(true)) {
        held.gpu.adjust(0, size);
    }
    is_new.is_ok()
}

/// `cuIpcCloseMemHandle`, and the functions that free what a pool has: they close memory of another process, too.
#[inline(never)]
pub(crate) fn close(pointer: u64, call: &DriverCall) -> CuResult {
    match opened_at(pointer) {
        Some((process, mut entry)) => {
            // Removed before the driver is called, because another thread can get the same address right afterwards.
            let was_last = process.ledger.leave(HandleKind::Opened, pointer);
            let code = call.run();
            entry.of = 1;
            // Without room for a record, it stays charged until the process ends.
            let is_new = code != SUCCESS && !matches!(process.ledger.enter(entry), Ok(false));
            let count = |charged: bool| if charged { entry.size } else { 0 };
            if let Some(gpu) = gpu_of(process, &entry) {
                gpu.adjust(count(was_last), count(is_new));
            }
            code
        }
        None => call.run(),
    }
}

/// The memory of another process that was opened at an address.
#[inline(never)]
pub(crate) fn opened_at(pointer: u64) -> Option<(&'static GuardedProcess, HandleEntry)> {
    let process = process()?;
    let is_any = process.opened.load(Ordering::Acquire) != 0;
    let entry = is_any.then(|| process.ledger.get(HandleKind::Opened, pointer));
    entry.flatten().map(|entry| (process, entry))
}
