//! Memory imported from another interface (`cuImportExternalMemory`). That interface allocated it without the guard, so it is charged here, once.

use crate::charge;
use crate::cuda::{Code, ExternalMemory};
use crate::current;
use crate::ledger::Kind;

/// `cuImportExternalMemory`.
///
/// # Safety
///
/// `description` is null or valid, as the driver demands it.
pub(crate) unsafe fn import(
    description: *const ExternalMemory,
    call: impl FnOnce() -> Code,
    memory: impl FnOnce() -> u64,
) -> Code {
    // SAFETY: the caller's promise.
    match (unsafe { description.as_ref() }, current::context()) {
        (Some(description), Some((device, _))) => charge::allocate(device, Kind::External, 0, description.bytes, call, memory),
        // The driver says what is wrong.
        _ => call(),
    }
}

/// `cuDestroyExternalMemory`.
pub(crate) fn destroy(memory: u64, call: impl FnOnce() -> Code) -> Code {
    charge::free(Kind::External, memory, call)
}
