//! The GPUs of a Tegra, through the driver's CUDA library. A Tegra's NVML describes too little, or does not exist.

#![allow(unsafe_code, reason = "raw CUDA calls; each block says why it is sound")]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint};

use divvy_model::{MiB, Vendor};
use libloading::Library;

use super::{NvidiaOptions, library, text_of};
use crate::backend::DriverCalls;
use crate::facts::MAX_GPUS;
use crate::{DriverVersions, Failure, FailureCode, GpuFacts, SNAPSHOT_VERSION, Snapshot};

/// The library's name, which is the same for every driver version.
const SONAME: &str = "libcuda.so.1";
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `…_MINOR` (cuda.h).
const COMPUTE_CAPABILITY: [c_int; 2] = [75, 76];
/// `CUDA_ERROR_NO_DEVICE` (cuda.h).
const NO_DEVICE: c_int = 100;

/// The functions, with their types from cuda.h. `CUresult`, `CUdevice`, and `CUdevice_attribute` are of the type `int`.
struct CudaFunctions {
    init: unsafe extern "C" fn(c_uint) -> c_int,
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    count: unsafe extern "C" fn(*mut c_int) -> c_int,
    device: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
    attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    memory: unsafe extern "C" fn(*mut usize, c_int) -> c_int,
}

/// Describe the GPUs with what CUDA knows: names, memory, and compute capability.
pub(crate) fn snapshot(options: &NvidiaOptions, calls: &DriverCalls) -> Result<Snapshot, Failure> {
    let cuda = open(options, calls)?;
    let _call = calls.enter_init("initializing CUDA");
    // SAFETY: the function has this type, and 0 is the only allowed flag.
    check("cuInit", unsafe { (cuda.init)(0) })?;
    let version = number("cuDriverGetVersion", |to| {
        // SAFETY: `to` is valid for writes.
        unsafe { (cuda.version)(to) }
    })?;
    let count = number("cuDeviceGetCount", |to| {
        // SAFETY: `to` is valid for writes.
        unsafe { (cuda.count)(to) }
    })?;
    let count = u32::try_from(count).unwrap_or(0).min(MAX_GPUS as u32);
    let driver = DriverVersions {
        version: String::new(),
        cuda: format!("{}.{}", version / 1000, version % 1000 / 10),
    };
    Ok(Snapshot {
        v: SNAPSHOT_VERSION,
        drivers: BTreeMap::from([(Vendor::Nvidia, driver)]),
        gpus: (0..count).map(|index| gpu(&cuda, index)).collect::<Result<_, _>>()?,
        unreadable: Vec::new(),
    })
}

fn gpu(cuda: &CudaFunctions, index: u32) -> Result<GpuFacts, Failure> {
    let device = number("cuDeviceGet", |to| {
        // SAFETY: `to` is valid for writes. The index is less than the number of devices.
        unsafe { (cuda.device)(to, index.cast_signed()) }
    })?;
    let mut name = [0_u8; 96];
    // SAFETY: the buffer has 96 bytes, and CUDA has just returned the device.
    check("cuDeviceGetName", unsafe {
        (cuda.name)(name.as_mut_ptr().cast(), 96, device)
    })?;
    let mut memory = 0;
    // SAFETY: `memory` is valid for writes, and CUDA has just returned the device.
    check("cuDeviceTotalMem", unsafe { (cuda.memory)(&raw mut memory, device) })?;
    let [major, minor] = COMPUTE_CAPABILITY.map(|attribute| {
        number("cuDeviceGetAttribute", |to| {
            // SAFETY: `to` is valid for writes, and CUDA has just returned the device.
            unsafe { (cuda.attribute)(to, attribute, device) }
        })
    });
    Ok(GpuFacts {
        vendor: Vendor::Nvidia,
        // CUDA's UUID of an integrated GPU is not known to any other program.
        uuid: format!("tegra-{index}"),
        index,
        model: CStr::from_bytes_until_nul(&name).map_or_else(|_| String::new(), |name| name.to_string_lossy().into_owned()),
        cc: format!("{}.{}", major?, minor?),
        total: MiB::from_bytes(memory as u64),
        ..GpuFacts::default()
    })
}

/// Load the library. It is never unloaded: its threads may still run.
fn open(options: &NvidiaOptions, calls: &DriverCalls) -> Result<CudaFunctions, Failure> {
    let mut not_loaded = Vec::new();
    for candidate in library::cuda_candidates(options, SONAME) {
        let _call = calls.enter_init(format!("loading {}", candidate.display()));
        // SAFETY: the driver's library may be loaded at any time, from any thread.
        match unsafe { Library::new(&candidate) } {
            Ok(library) => {
                return functions(Box::leak(Box::new(library))).map_err(|error| {
                    let text = format!(
                        "{} is not a complete CUDA driver library: {error}; reinstall the driver",
                        candidate.display()
                    );
                    Failure::new(FailureCode::LibraryNotFound, text)
                });
            }
            Err(error) => not_loaded.push(text_of(candidate.as_os_str(), &error)),
        }
    }
    Err(Failure::new(
        FailureCode::LibraryNotFound,
        format!(
            "CUDA's driver library could not be loaded: {}. Without it a Tegra's GPU cannot be described; use NVIDIA's container runtime \
             for this container (runtimeClassName: nvidia), which adds the library",
            not_loaded.join("; ")
        ),
    ))
}

fn functions(library: &'static Library) -> Result<CudaFunctions, libloading::Error> {
    // SAFETY: the symbols have these types in cuda.h since CUDA 3.2. The library stays loaded.
    unsafe {
        Ok(CudaFunctions {
            init: *library.get(b"cuInit\0")?,
            version: *library.get(b"cuDriverGetVersion\0")?,
            count: *library.get(b"cuDeviceGetCount\0")?,
            device: *library.get(b"cuDeviceGet\0")?,
            name: *library.get(b"cuDeviceGetName\0")?,
            attribute: *library.get(b"cuDeviceGetAttribute\0")?,
            memory: *library.get(b"cuDeviceTotalMem_v2\0")?,
        })
    }
}

/// Return the number that a call writes.
fn number(name: &str, call: impl FnOnce(*mut c_int) -> c_int) -> Result<c_int, Failure> {
    let mut number = 0;
    check(name, call(&raw mut number))?;
    Ok(number)
}

fn check(name: &str, status: c_int) -> Result<(), Failure> {
    match status {
        0 => Ok(()),
        NO_DEVICE => Err(Failure::new(
            FailureCode::DriverNotLoaded,
            format!(
                "{name} found no GPU; check that this container has the GPU's device nodes, which NVIDIA's container runtime adds \
                 (runtimeClassName: nvidia)"
            ),
        )),
        other => Err(Failure::new(
            FailureCode::Unknown,
            format!(
                "{name} failed with CUDA's error {other}; run deviceQuery of CUDA's samples to see whether the driver works at all"
            ),
        )),
    }
}
