//! Limits of a cgroup's GPU memory, which NVIDIA's driver enforces from R615 on (nvml.h of CUDA 13.4; NVIDIA's document "MPS v3 Memory Partitioning").
//!
//! The driver keeps them in the kernel's controller `dmem`, or in its own list on kernels before 6.14. An allocation above the limit fails with
//! `CUDA_ERROR_OUT_OF_MEMORY`. Managed memory is not counted, and a GPU in MIG mode has no limits. `nvml-wrapper` lacks these functions.
//!
//! In `dmem`, limits nest. In the driver's own list, a process has the limit of the nearest cgroup that has one, and no other (same document,
//! "dmem versus misc"). A module option can have the driver use its own list on any kernel, so the presence of the kernel's files decides nothing.

#![allow(unsafe_code, reason = "raw NVML calls; each block says why it is sound")]

use std::ffi::{CStr, c_char};
use std::fs;
use std::path::Path;

use libloading::Library;
use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper_sys::bindings as sys;

/// `nvmlSetMemoryLimits_v1_t`.
#[repr(C)]
struct SetLimits {
    /// The full path of the cgroup's directory.
    name_space: *const c_char,
    /// What the cgroup's processes are guaranteed, in bytes.
    soft: u64,
    /// What the cgroup's processes may allocate, in bytes. `u64::MAX` means that there is no limit.
    hard: u64,
}

/// `nvmlGetMemoryLimits_v1_t`.
#[repr(C)]
struct GetLimits {
    name_space: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

/// Report whether the driver keeps the limit of this cgroup in the kernel's controller, where limits nest. `bus` is the GPU's PCI bus id. The kernel's file
/// `dmem.max` has lines such as `nvidia/00000000:02:00.0/vidmem 3221225472`.
pub(super) fn nest(cgroup: &Path, bus: &str, hard: u64) -> bool {
    // Without the file, the kernel has no such controller, or it is not enabled for this cgroup.
    let text = fs::read_to_string(cgroup.join("dmem.max")).unwrap_or_default();
    text.lines().any(|line| {
        let (region, value) = line.rsplit_once(' ').unwrap_or_default();
        let of = region.strip_prefix("nvidia/").and_then(|region| region.split('/').next());
        of.is_some_and(|of| of.eq_ignore_ascii_case(bus)) && value.parse() == Ok(hard)
    })
}

type SetLimitsFn = unsafe extern "C" fn(sys::nvmlDevice_t, *const SetLimits) -> sys::nvmlReturn_t;
type Get = unsafe extern "C" fn(sys::nvmlDevice_t, *mut GetLimits) -> sys::nvmlReturn_t;

/// The functions of a library that has them.
#[derive(Debug)]
pub(super) struct LimitFunctions {
    set: SetLimitsFn,
    get: Get,
    /// The functions are valid while it is loaded.
    _library: Library,
}

impl LimitFunctions {
    /// Find the functions in a library that is loaded already.
    pub(super) fn find(library: &Path) -> Option<LimitFunctions> {
        // SAFETY: NVML is loaded from this path already, so no initialization runs again.
        let library = unsafe { Library::new(library) }.ok()?;
        // SAFETY: the types are those of nvml.h for these names.
        let (set, get) = unsafe {
            let set = *library.get::<SetLimitsFn>(b"nvmlDeviceSetMemoryLimits_v1\0").ok()?;
            let get = *library.get::<Get>(b"nvmlDeviceGetMemoryLimits_v1\0").ok()?;
            (set, get)
        };
        Some(LimitFunctions {
            set,
            get,
            _library: library,
        })
    }

    /// Set the limit of a cgroup in bytes. The cgroup is not guaranteed anything: a guarantee would be added to the cgroups above, and stay there
    /// when the cgroup is removed.
    pub(super) fn set(&self, device: &Device<'_>, cgroup: &CStr, hard: u64) -> Result<(), NvmlError> {
        let limits = SetLimits {
            name_space: cgroup.as_ptr(),
            soft: 0,
            hard,
        };
        // SAFETY: the handle belongs to an initialized NVML, which `device` borrows; `limits` and the string outlive the call.
        nvml_try(unsafe { (self.set)(device.handle(), &raw const limits) })
    }

    /// Return the limit of a cgroup, and what its processes use, in bytes.
    pub(super) fn get(&self, device: &Device<'_>, cgroup: &CStr) -> Result<(u64, u64), NvmlError> {
        let mut limits = GetLimits {
            name_space: cgroup.as_ptr(),
            soft: 0,
            hard: 0,
            used: 0,
        };
        // SAFETY: as for `set`; `limits` is valid for writes.
        nvml_try(unsafe { (self.get)(device.handle(), &raw mut limits) })?;
        Ok((limits.hard, limits.used))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's file must have the limit of this GPU.
    #[test]
    fn limits_nest_only_if_the_kernel_has_this_limit() {
        let cgroup = tempfile::tempdir().expect("a directory");
        assert!(!nest(cgroup.path(), "00000000:AF:00.0", 3 << 30), "no file");
        for (text, expected) in [
            ("nvidia/00000000:af:00.0/vidmem 3221225472\n", true),
            (
                "drm/0000:03:00.0/vram0 max\nnvidia/00000000:02:00.0/vidmem max\nnvidia/00000000:AF:00.0/vidmem 3221225472\n",
                true,
            ),
            ("", false),
            ("nvidia/00000000:af:00.0/vidmem max\n", false),
            ("nvidia/00000000:af:00.0/vidmem 3221225473\n", false),
            ("nvidia/00000000:02:00.0/vidmem 3221225472\n", false),
            ("nvidia/00000001:af:00.0/vidmem 3221225472\n", false),
            ("drm/00000000:af:00.0/vidmem 3221225472\n", false),
            ("3221225472\n", false),
        ] {
            fs::write(cgroup.path().join("dmem.max"), text).expect("written");
            assert_eq!(nest(cgroup.path(), "00000000:AF:00.0", 3 << 30), expected, "{text}");
        }
    }
}
