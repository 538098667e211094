//! Symbols for what the simulated GPUs do not have: serial numbers, the traffic on the PCI bus, and the like. Programs that show GPUs ask for them,
//! and must not take the driver for an old one.

use std::ffi::{c_char, c_uint};

use nvml_wrapper_sys::bindings as ffi;

use super::{NOT_SUPPORTED, answer, device_call};

/// Define symbols that check the device and have no answer.
macro_rules! unsupported {
    ($($name:ident($($type:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name(device: ffi::nvmlDevice_t $(, _: $type)*) -> ffi::nvmlReturn_t {
            answer(|| device_call(device, |_, _, _| Err(NOT_SUPPORTED)))
        }
    )*};
}

// By nvml.h.
unsupported! {
    nvmlDeviceGetDisplayMode(*mut ffi::nvmlEnableState_t);
    nvmlDeviceGetDriverModel(*mut ffi::nvmlDriverModel_t, *mut ffi::nvmlDriverModel_t);
    nvmlDeviceGetDriverModel_v2(*mut ffi::nvmlDriverModel_t, *mut ffi::nvmlDriverModel_t);
    nvmlDeviceGetPcieThroughput(ffi::nvmlPcieUtilCounter_t, *mut c_uint);
    nvmlDeviceGetSerial(*mut c_char, c_uint);
}
