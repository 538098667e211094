//! The functions that the library has in place of the driver's. The loader finds all other names in the real library.

use core::ptr::null_mut;

use crate::nvml::{FUNCTION_NOT_FOUND, Memory2, NvmlDevice, NvmlMemory, NvmlProcess, NvmlReturn, NvmlUint, Process2, Process3};
use crate::processes::Which::{Compute, Graphics, Mps};
use crate::{driver, memory, processes};

/// Define the replaced functions: name and arguments as in nvml.h, and what happens. `driver` is the driver's function of the same name; without one, the
/// program gets `NVML_ERROR_FUNCTION_NOT_FOUND`.
macro_rules! replace {
    ($(fn $name:ident($($argument:ident: $type:ty),*): |$driver:ident| $rule:expr;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> NvmlReturn {
            static FUNCTION: divvy_shadow::RealFunction = divvy_shadow::RealFunction::new();
            let Some(found) = FUNCTION.get(divvy_shadow::c_name!($name)) else { return FUNCTION_NOT_FOUND };
            // SAFETY: the driver's function of this name has these arguments, by nvml.h.
            let $driver: unsafe extern "C" fn($($type),*) -> NvmlReturn = unsafe { core::mem::transmute(found) };
            $rule
        }
    )*};
}

/// The rule of a function that lists processes.
macro_rules! list {
    ($which:ident, $device:ident, $count:ident, $list:expr, $driver:ident) => {{
        // SAFETY: the program called this function as if it were the driver's, with arguments that it vouches for. So `list` may use them, too.
        unsafe {
            processes::list(
                $which,
                $device,
                $count,
                $list,
                || $driver($device, $count, $list.cast()),
                |count| $driver($device, count, null_mut()),
            )
        }
    }};
}

/// The same for `…_v3`, whose structure depends on the driver.
macro_rules! list_3 {
    ($which:ident, $device:ident, $count:ident, $list:ident, $driver:ident) => {
        if driver::has_large_processes() {
            list!($which, $device, $count, $list.cast::<Process3>(), $driver)
        } else {
            list!($which, $device, $count, $list, $driver)
        }
    };
}

replace! {
    // SAFETY: the program called this function as if it were the driver's, with arguments that it vouches for.
    fn nvmlDeviceGetMemoryInfo(device: NvmlDevice, memory: *mut NvmlMemory): |driver| unsafe { memory::first(device, memory, || driver(device, memory)) };
    // SAFETY: the same.
    fn nvmlDeviceGetMemoryInfo_v2(device: NvmlDevice, memory: *mut Memory2): |driver| unsafe { memory::second(device, memory, || driver(device, memory)) };

    fn nvmlDeviceGetComputeRunningProcesses(device: NvmlDevice, count: *mut NvmlUint, list: *mut NvmlProcess): |driver| list!(Compute, device, count, list, driver);
    fn nvmlDeviceGetComputeRunningProcesses_v2(device: NvmlDevice, count: *mut NvmlUint, list: *mut Process2): |driver| list!(Compute, device, count, list, driver);
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: NvmlDevice, count: *mut NvmlUint, list: *mut Process2): |driver| list_3!(Compute, device, count, list, driver);
    fn nvmlDeviceGetGraphicsRunningProcesses(device: NvmlDevice, count: *mut NvmlUint, list: *mut NvmlProcess): |driver| list!(Graphics, device, count, list, driver);
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: NvmlDevice, count: *mut NvmlUint, list: *mut Process2): |driver| list!(Graphics, device, count, list, driver);
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: NvmlDevice, count: *mut NvmlUint, list: *mut Process2): |driver| list_3!(Graphics, device, count, list, driver);
    fn nvmlDeviceGetMPSComputeRunningProcesses(device: NvmlDevice, count: *mut NvmlUint, list: *mut NvmlProcess): |driver| list!(Mps, device, count, list, driver);
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: NvmlDevice, count: *mut NvmlUint, list: *mut Process2): |driver| list!(Mps, device, count, list, driver);
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: NvmlDevice, count: *mut NvmlUint, list: *mut Process2): |driver| list_3!(Mps, device, count, list, driver);
}
