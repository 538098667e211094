//! The tables of functions that NVML has for NVIDIA's own programs. They are undocumented. nvidia-smi from 340 to 555 refuses a library without them ("Mismatch in versions
//! between nvidia-smi and NVML"), and prints what else it can read if all their functions return NVML_ERROR_NOT_SUPPORTED.

use std::ffi::c_void;
use std::sync::LazyLock;

use nvml_wrapper_sys::bindings as ffi;

use super::{INVALID_ARGUMENT, NOT_SUPPORTED};

/// More functions than the tables of these drivers have.
const FUNCTIONS: usize = 300;

/// A table: its size in bytes, then the functions.
#[repr(C)]
struct ExportTable {
    size: usize,
    functions: [extern "C" fn() -> ffi::nvmlReturn_t; FUNCTIONS],
}

extern "C" fn not_supported() -> ffi::nvmlReturn_t {
    NOT_SUPPORTED
}

static TABLE: LazyLock<ExportTable> = LazyLock::new(|| ExportTable {
    size: size_of::<ExportTable>(),
    functions: [not_supported; FUNCTIONS],
});

/// Return the same table for each UUID.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlInternalGetExportTable(table: *mut *const c_void, _uuid: *const c_void) -> ffi::nvmlReturn_t {
    if table.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: not null, and the caller's out parameter.
    unsafe { table.write((&raw const *TABLE).cast()) };
    ffi::nvmlReturn_enum_NVML_SUCCESS
}
