//! Linear and managed memory.

use crate::charge;
use crate::cuda::{Code, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS};
use crate::current;
use crate::driver;
use crate::ledger::Kind;

/// `cuMemAlloc`.
pub(crate) fn allocate(bytes: u64, call: impl FnOnce() -> Code, pointer: impl FnOnce() -> u64) -> Code {
    match current::context() {
        Some((device, context)) => charge::allocate(device, Kind::Linear, context, bytes, call, pointer),
        // The driver reports that there is no context.
        None => call(),
    }
}

/// Rows start at multiples of this on all GPUs so far.
const PITCH: u64 = 512;

/// `cuMemAllocPitch`: the driver decides the distance between rows. If it is larger than expected, the memory is freed, and allocated again with the real size
/// charged.
pub(crate) fn allocate_rows(
    width: u64,
    height: u64,
    call: impl Fn() -> Code,
    pointer: impl Fn() -> u64,
    pitch: impl Fn() -> u64,
) -> Code {
    let row = width.checked_next_multiple_of(PITCH).unwrap_or(u64::MAX);
    let mut bytes = row.saturating_mul(height);
    for _ in 0..2 {
        let code = allocate(bytes, &call, &pointer);
        if code != SUCCESS {
            return code;
        }
        let real = pitch().saturating_mul(height);
        if real <= bytes {
            return code;
        }
        bytes = real;
        let unwanted = pointer();
        free(unwanted, || driver::free(unwanted));
    }
    OUT_OF_MEMORY
}

/// `cuMemFree`.
pub(crate) fn free(pointer: u64, call: impl FnOnce() -> Code) -> Code {
    charge::free(Kind::Linear, pointer, call)
}

/// `cuMemAllocManaged`: charged as if all of it were on the GPU.
pub(crate) fn allocate_managed(bytes: u64, call: impl FnOnce() -> Code, pointer: impl FnOnce() -> u64) -> Code {
    let Some((device, context)) = current::context() else {
        return call();
    };
    match charge::held(device) {
        Ok(held) if held.allowed.refuse_managed => NOT_SUPPORTED,
        Ok(held) => held.allocate(Kind::Linear, context, bytes, call, pointer),
        Err(Some(code)) => code,
        Err(None) => call(),
    }
}
