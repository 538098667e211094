//! What programs see of the memory: the pod's share.

use crate::charge::held;
use crate::cuda::{CuDevice, CuResult, SUCCESS};
use crate::current;

/// A number that the driver has written for the program: 32 bits in the functions of CUDA before 3.2.
pub(crate) trait DriverNumber: Copy {
    fn lower(self, most: u64) -> Self;
}

impl DriverNumber for usize {
    fn lower(self, most: u64) -> Self {
        self.min(Self::try_from(most).unwrap_or(Self::MAX))
    }
}

impl DriverNumber for u32 {
    fn lower(self, most: u64) -> Self {
        self.min(Self::try_from(most).unwrap_or(Self::MAX))
    }
}

/// # Safety
///
/// `number` is null, or the driver has just written to it.
unsafe fn lower<T: DriverNumber>(number: *mut T, most: u64) {
    if !number.is_null() {
        // SAFETY: the caller's promise. The program chose the pointer, so nothing is assumed about its alignment.
        unsafe { number.write_unaligned(number.read_unaligned().lower(most)) };
    }
}

/// `cuMemGetInfo`: either pointer may be null. If a pod uses more than its share, the call succeeds and reports 0 bytes free.
///
/// # Safety
///
/// The pointers are those that `call` gives to the driver.
pub(crate) unsafe fn memory<T: DriverNumber>(free: *mut T, total: *mut T, code: CuResult) -> CuResult {
    if code != SUCCESS {
        return code;
    }
    let Some(device) = current::device() else { return code };
    let (bytes, left) = match held(device) {
        Ok(held) => (held.allowed.bytes, held.allowed.charges.saturating_sub(held.gpu.charged())),
        Err(Some(_)) => (0, 0),
        Err(None) => return code,
    };
    // SAFETY: the driver succeeded, so it has written to each pointer that is not null.
    unsafe {
        lower(free, left);
        lower(total, bytes);
    }
    code
}

/// `cuDeviceTotalMem`.
///
/// # Safety
///
/// The pointer is the one that `call` gives to the driver.
pub(crate) unsafe fn total<T: DriverNumber>(total: *mut T, device: CuDevice, code: CuResult) -> CuResult {
    if code != SUCCESS {
        return code;
    }
    let bytes = match held(device) {
        Ok(held) => held.allowed.bytes,
        Err(Some(_)) => 0,
        Err(None) => return code,
    };
    // SAFETY: the driver succeeded, so it has written to the pointer if it is not null.
    unsafe { lower(total, bytes) };
    code
}
