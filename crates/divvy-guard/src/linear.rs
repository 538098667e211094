//! Linear and managed memory.

use crate::charge;
use crate::cuda::{CuResult, DriverCall, NOT_SUPPORTED, OUT_OF_MEMORY, OutPointer, SUCCESS};
use crate::current;
use crate::driver;
use crate::external;
use crate::ledger::HandleKind;

/// `cuMemAlloc`.
#[inline(never)]
pub(crate) fn allocate(bytes: u64, call: &DriverCall, pointer: OutPointer) -> CuResult {
    match current::context() {
        Some((device, context)) => charge::allocate(device, HandleKind::Linear, context, bytes, call, pointer),
        // The driver reports that there is no context.
        None => call.run(),
    }
}

/// Rows start at multiples of this on all GPUs so far.
const PITCH: u64 = 512;

/// `cuMemAllocPitch`: the driver decides the distance between rows. If it is larger than expected, the memory is freed, and allocated again with the real size
/// charged.
#[inline(never)]
pub(crate) fn allocate_rows(width: u64, height: u64, call: &DriverCall, pointer: OutPointer, pitch: OutPointer) -> CuResult {
    let row = width.checked_next_multiple_of(PITCH).unwrap_or(u64::MAX);
    let mut bytes = row.saturating_mul(height);
    for _ in 0..2 {
        let code = allocate(bytes, call, pointer);
        if code != SUCCESS {
            return code;
        }
        let real = pitch.get().saturating_mul(height);
        if real <= bytes {
            return code;
        }
        bytes = real;
        let unwanted = pointer.get();
        charge::free_by(HandleKind::Linear, unwanted, || driver::free(unwanted));
    }
    OUT_OF_MEMORY
}

/// `cuMemFree`.
#[inline(never)]
pub(crate) fn free(pointer: u64, call: &DriverCall) -> CuResult {
    match external::opened_at(pointer) {
        Some(_) => external::close(pointer, call),
        None => charge::free(HandleKind::Linear, pointer, call),
    }
}

/// `cuMemAllocManaged`: charged as if all of it were on the GPU.
pub(crate) fn allocate_managed(bytes: u64, call: &DriverCall, pointer: OutPointer) -> CuResult {
    let Some((device, context)) = current::context() else {
        return call.run();
    };
    match charge::held(device) {
        Ok(held) if held.allowed.refuse_managed => NOT_SUPPORTED,
        Ok(held) => held.allocate(HandleKind::Linear, context, bytes, call, pointer),
        Err(Some(code)) => code,
        Err(None) => call.run(),
    }
}
