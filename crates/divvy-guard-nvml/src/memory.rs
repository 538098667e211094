//! How much memory there is: the share, and what the pod uses of it.
//!
//! | field | value |
//! |---|---|
//! | `total` | the share, or what the driver has, if that is less |
//! | `free` | what neither the pod's processes nor the overhead take, or what the driver has free, if that is less: it agrees with `cuMemGetInfo` |
//! | `used` of version 1 | the rest, because the header says that `total` is the sum of `free` and `used` |
//! | `used` of version 2 | what the pod's processes and the overhead take, at most `total` |
//! | `reserved` of version 2 | the rest |
//!
//! What the driver says of `reserved` is not taken over, because the memory that it reserves counts against no pod. So `reserved` is 0, unless the GPU has
//! less free than the share promises. With a share of the whole GPU, which includes the reserved memory, the numbers are the driver's.

use divvy_share::usage::UsageFile;

use crate::nvml::{MEMORY_2, Memory2, NvmlDevice, NvmlMemory, NvmlReturn, SUCCESS};
use crate::share::OwnShare;

/// What a pod sees of a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MemoryView {
    total: u64,
    free: u64,
    used: u64,
}

/// Combine the driver's total and free memory with the share and with what the pod takes of it.
fn view(total: u64, free: u64, share: u64, taken: u64) -> MemoryView {
    let total = total.min(share);
    let used = total.min(taken);
    MemoryView {
        total,
        free: total.saturating_sub(used).min(free),
        used,
    }
}

fn of(device: NvmlDevice, total: u64, free: u64) -> Option<MemoryView> {
    let share = OwnShare::of(device)?;
    // What cannot be read counts as nothing, as in `cuMemGetInfo`.
    let charged = share.users(&mut UsageFile::default()).map_or(0, |users| users.charged());
    let taken = charged.saturating_add(share.limits.overhead);
    Some(view(total, free, share.limits.bytes, taken))
}

/// `nvmlDeviceGetMemoryInfo`.
///
/// # Safety
///
/// The pointer is the one that `call` gives to the driver.
pub(crate) unsafe fn first(device: NvmlDevice, memory: *mut NvmlMemory, call: impl FnOnce() -> NvmlReturn) -> NvmlReturn {
    let code = call();
    if code != SUCCESS || memory.is_null() {
        return code;
    }
    // SAFETY: the driver succeeded, so it has written to the pointer. A program may have given an unaligned one.
    let theirs = unsafe { memory.read_unaligned() };
    if let Some(view) = of(device, theirs.total, theirs.free) {
        let ours = NvmlMemory {
            total: view.total,
            free: view.free,
            used: view.total.saturating_sub(view.free),
        };
        // SAFETY: as above.
        unsafe { memory.write_unaligned(ours) };
    }
    code
}

/// `nvmlDeviceGetMemoryInfo_v2`. A later version of the structure is left as the driver has written it.
///
/// # Safety
///
/// The pointer is the one that `call` gives to the driver.
pub(crate) unsafe fn second(device: NvmlDevice, memory: *mut Memory2, call: impl FnOnce() -> NvmlReturn) -> NvmlReturn {
    let code = call();
    if code != SUCCESS || memory.is_null() {
        return code;
    }
    // SAFETY: the driver succeeded, so the structure has a version, which is its first field.
    let version = unsafe { (&raw const (*memory).version).read_unaligned() };
    if version != MEMORY_2 {
        return code;
    }
    // SAFETY: the driver succeeded, so it has written a structure of this version. A program may have given an unaligned pointer.
    let theirs = unsafe { memory.read_unaligned() };
    if let Some(view) = of(device, theirs.total, theirs.free) {
        let ours = Memory2 {
            version,
            total: view.total,
            reserved: view.total.saturating_sub(view.used).saturating_sub(view.free),
            free: view.free,
            used: view.used,
        };
        // SAFETY: as above.
        unsafe { memory.write_unaligned(ours) };
    }
    code
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn whatever_the_files_say_the_parts_are_within_the_total(
            total in any::<u64>(), free in any::<u64>(), share in any::<u64>(), taken in any::<u64>(),
        ) {
            let view = view(total, free, share, taken);
            prop_assert!(view.total <= total && view.total <= share);
            prop_assert!(view.free <= free);
            prop_assert!(view.used.checked_add(view.free).is_some_and(|sum| sum <= view.total));
            prop_assert!(view.used <= taken);
        }
    }
}
