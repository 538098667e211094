//! Symbols that find GPUs and read their properties.

use std::ffi::{c_char, c_int, c_uint};

use super::pointer::{Out, TextPointer};
use super::symbols::symbols;
use crate::card::THREADS_PER_SM;
use crate::codes::{CuCode, INVALID_DEVICE, INVALID_VALUE};
use crate::device::SimulatedDevice;
use crate::driver::SimulatedDriver;
use crate::machine::uuid_bytes;

symbols! {
    call cuDeviceGetCount(count: Out<c_int>) |driver| count.put(driver.devices.len() as c_int);

    call cuDeviceGet(device: Out<c_int>, ordinal: c_int) |driver| {
        driver.device(ordinal)?;
        device.put(ordinal)
    };

    call cuDeviceGetName(name: Out<c_char>, length: c_int, device: c_int) |driver| {
        let index = driver.device(device)?;
        name.put_text(length, &driver.devices[index].card.described.model)
    };

    // The symbol of CUDA 9.2, which knows no MIG devices: it tells the UUID of the GPU. cuda.h says only of the newer one that it tells that of a MIG device.
    call cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: c_int) |driver| {
        let index = driver.device(device)?;
        uuid.put(uuid_bytes(&driver.devices[index].card.gpu_uuid))
    };

    call cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) |driver| {
        let index = driver.device(device)?;
        uuid.put(uuid_bytes(&driver.devices[index].card.uuid))
    };

    call cuDeviceTotalMem_v2(bytes: Out<u64>, device: c_int) |driver| bytes.put(total(driver, device)?);

    // The symbol of CUDA 3.1 and before, which counts in 32 bits.
    call cuDeviceTotalMem(bytes: Out<c_uint>, device: c_int) |driver| {
        bytes.put(c_uint::try_from(total(driver, device)?).unwrap_or(c_uint::MAX))
    };

    call cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: c_int) |driver| {
        value.present()?;
        let index = driver.device(device)?;
        let known = attribute_of(&driver.devices[index], attribute)?;
        value.put(set_attribute(attribute).unwrap_or(known))
    };

    call cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: c_int) |driver| {
        let index = driver.device(device)?;
        let (first, second) = capability(&driver.devices[index]);
        major.put(first)?;
        minor.put(second)
    };

    call cuDeviceGetPCIBusId(text: Out<c_char>, length: c_int, device: c_int) |driver| {
        let index = driver.device(device)?;
        text.put_text(length, &driver.devices[index].card.pci.to_uppercase())
    };

    call cuDeviceGetByPCIBusId(device: Out<c_int>, text: TextPointer) |driver| {
        device.present()?;
        let text = text.get()?;
        let found = driver.devices.iter().position(|device| device.card.pci.eq_ignore_ascii_case(text));
        device.put(found.ok_or(INVALID_DEVICE)? as c_int)
    };

    call cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) |driver| {
        let different = driver.device(device)? != driver.device(peer)?;
        can.put(c_int::from(different))
    };

    // No affinity is ever supported.
    call cuDeviceGetExecAffinitySupport(supported: Out<c_int>, _kind: c_int, device: c_int) |driver| {
        driver.device(device)?;
        supported.put(0)
    };
}

fn total(driver: &SimulatedDriver, device: c_int) -> Result<u64, CuCode> {
    let index = driver.device(device)?;
    Ok(driver.devices[index].card.described.memory_mib << 20)
}

fn capability(device: &SimulatedDevice) -> (c_int, c_int) {
    let (major, minor) = device.card.described.cc.split_once('.').unwrap_or_default();
    (major.parse().unwrap_or(0), minor.parse().unwrap_or(0))
}

/// Return the domain, the bus, and the device of a PCI bus id such as `0000:81:00.0`.
fn pci(device: &SimulatedDevice) -> [c_int; 3] {
    let text = device.card.pci.trim_end_matches(".0");
    let mut numbers = text.rsplit(':').map(|part| c_int::from_str_radix(part, 16).unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    let (device, bus) = (next(), next());
    [next(), bus, device]
}

/// Return what DIVVY_CUDA_SIM_ATTRIBUTES says of an attribute, such as `20=2,32=1`.
fn set_attribute(attribute: c_int) -> Option<c_int> {
    let text = std::env::var("DIVVY_CUDA_SIM_ATTRIBUTES").ok()?;
    text.split(',').find_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        (name.parse() == Ok(attribute)).then(|| value.parse().ok())?
    })
}

/// `CU_DEVICE_ATTRIBUTE_MAX` of CUDA 13.4.
const MAX: c_int = 162;

/// Return an attribute (`CUdevice_attribute` in cuda.h). The ones of which the description says nothing, and which do not concern memory, are 0.
fn attribute_of(device: &SimulatedDevice, attribute: c_int) -> Result<c_int, CuCode> {
    let card = &device.card.described;
    Ok(match attribute {
        // MAX_THREADS_PER_BLOCK
        1 => 1024,
        // WARP_SIZE
        10 => 32,
        // CLOCK_RATE, in kHz
        13 => c_int::try_from(card.clock_mhz.saturating_mul(1000)).unwrap_or(c_int::MAX),
        // MULTIPROCESSOR_COUNT
        16 => c_int::try_from(card.sms).unwrap_or(c_int::MAX),
        // PCI_BUS_ID, PCI_DEVICE_ID, PCI_DOMAIN_ID
        33 => pci(device)[1],
        34 => pci(device)[2],
        50 => pci(device)[0],
        // MEMORY_CLOCK_RATE, in kHz
        36 => c_int::try_from(card.memory_clock_mhz.unwrap_or(0).saturating_mul(1000)).unwrap_or(c_int::MAX),
        // GLOBAL_MEMORY_BUS_WIDTH
        37 => c_int::try_from(card.memory_bus_bits.unwrap_or(0)).unwrap_or(c_int::MAX),
        // MAX_THREADS_PER_MULTIPROCESSOR
        39 => THREADS_PER_SM as c_int,
        // UNIFIED_ADDRESSING, COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR, MANAGED_MEMORY
        41 => 1,
        75 => capability(device).0,
        76 => capability(device).1,
        83 => 1,
        // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, MEMORY_POOLS_SUPPORTED
        102 | 103 | 115 => 1,
        // MEMPOOL_SUPPORTED_HANDLE_TYPES: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        119 => 1,
        other if (1..MAX).contains(&other) => 0,
        _ => return Err(INVALID_VALUE),
    })
}
