//! The part of nvml.h that the library needs. The names are NVIDIA's.

use core::ffi::{c_int, c_uint, c_void};

/// `nvmlReturn_t`.
pub(crate) type NvmlReturn = c_int;

pub(crate) const SUCCESS: NvmlReturn = 0;
pub(crate) const INVALID_ARGUMENT: NvmlReturn = 2;
pub(crate) const INSUFFICIENT_SIZE: NvmlReturn = 7;
pub(crate) const FUNCTION_NOT_FOUND: NvmlReturn = 13;

/// `nvmlDevice_t`.
pub(crate) type NvmlDevice = *mut c_void;
/// `unsigned int`.
pub(crate) type NvmlUint = c_uint;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct NvmlMemory {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Memory2 {
    pub(crate) version: NvmlUint,
    pub(crate) total: u64,
    pub(crate) reserved: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// `nvmlMemory_v2`: the size of the structure, and its version.
pub(crate) const MEMORY_2: NvmlUint = 40 | 2 << 24;

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct NvmlProcess {
    pub(crate) pid: NvmlUint,
    pub(crate) used: u64,
}

/// `nvmlProcessInfo_v2_t`, which `…_v3` of the functions has as well.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Process2 {
    pub(crate) process: NvmlProcess,
    pub(crate) gpu_instance: NvmlUint,
    pub(crate) compute_instance: NvmlUint,
}

/// What `…_v3` of the functions has in drivers from 535.43 to 535.86.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Process3 {
    pub(crate) process: Process2,
    pub(crate) protected: u64,
}

/// A GPU or compute instance, if there is none.
pub(crate) const NO_INSTANCE: NvmlUint = NvmlUint::MAX;

// As the C compiler lays them out.
const _: () = assert!(size_of::<NvmlMemory>() == 24 && size_of::<Memory2>() == 40);
const _: () = assert!(size_of::<NvmlProcess>() == 16 && size_of::<Process2>() == 24 && size_of::<Process3>() == 32);

#[cfg(test)]
mod tests {
    use core::mem::{align_of, offset_of, size_of};

    use nvml_wrapper_sys::bindings as header;

    use super::*;

    /// The bindings are generated from NVIDIA's header.
    #[test]
    fn the_structures_are_those_of_the_header() {
        macro_rules! same {
            ($($ours:ident $theirs:ident { $($field:ident $($inner:ident)* => $other:ident),* })*) => {$(
                assert_eq!(size_of::<$ours>(), size_of::<header::$theirs>());
                assert_eq!(align_of::<$ours>(), align_of::<header::$theirs>());
                $(assert_eq!(offset_of!($ours, $field $(.$inner)*), offset_of!(header::$theirs, $other));)*
            )*};
        }
        same! {
            NvmlMemory nvmlMemory_t { total => total, free => free, used => used }
            Memory2 nvmlMemory_v2_t { version => version, total => total, reserved => reserved, free => free, used => used }
            NvmlProcess nvmlProcessInfo_v1_t { pid => pid, used => usedGpuMemory }
            Process2 nvmlProcessInfo_v2_t {
                process pid => pid, process used => usedGpuMemory, gpu_instance => gpuInstanceId, compute_instance => computeInstanceId
            }
            Process3 nvmlProcessDetail_v1_t { process process pid => pid, protected => usedGpuCcProtectedMemory }
        }
        assert_eq!(MEMORY_2 as usize, size_of::<header::nvmlMemory_v2_t>() | 2 << 24);
        let codes = [
            header::nvmlReturn_enum_NVML_SUCCESS,
            header::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT,
            header::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE,
            header::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND,
        ];
        assert_eq!(
            codes.map(|code| code as NvmlReturn),
            [SUCCESS, INVALID_ARGUMENT, INSUFFICIENT_SIZE, FUNCTION_NOT_FOUND]
        );
    }
}
