//! Symbols that find GPUs and read their properties.

use std::ffi::{c_char, c_int, c_uint, c_ulong};
use std::mem::size_of;

use nvml_wrapper_sys::bindings as ffi;

use super::{
    INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, answer, device_call, field, get_text, handle_of, instance,
    machine_call, mig, put, put_text,
};
use crate::machine::Pci;
use crate::sim::sim;

const MIB: u64 = 1 << 20;
const VERSION_MISMATCH: ffi::nvmlReturn_t = ffi::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH;

/// Lost GPUs count as well, as in a real driver until it is reloaded.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        machine_call(|machine| {
            // SAFETY: the caller's out parameter.
            unsafe { put(count, machine.cards.len() as c_uint) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount(count: *mut c_uint) -> ffi::nvmlReturn_t {
    // SAFETY: the same contract.
    unsafe { nvmlDeviceGetCount_v2(count) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut ffi::nvmlDevice_t) -> ffi::nvmlReturn_t {
    answer(|| {
        sim().call(|inner, machine| {
            inner.present(machine, index as usize)?;
            // SAFETY: the caller's out parameter.
            unsafe { put(device, handle_of(index as usize)) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex(index: c_uint, device: *mut ffi::nvmlDevice_t) -> ffi::nvmlReturn_t {
    // SAFETY: the same contract.
    unsafe { nvmlDeviceGetHandleByIndex_v2(index, device) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut ffi::nvmlDevice_t) -> ffi::nvmlReturn_t {
    answer(|| {
        // SAFETY: the caller's string.
        let uuid = unsafe { get_text(uuid) }?;
        sim().call(|inner, machine| {
            let found = machine
                .cards
                .iter()
                .position(|card| card.uuid == uuid)
                .map(|index| (index, handle_of(index)));
            let (index, handle) = found.or_else(|| mig::by_uuid(machine, uuid)).ok_or(NOT_FOUND)?;
            inner.present(machine, index)?;
            // SAFETY: the caller's out parameter.
            unsafe { put(device, handle) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(
    bus_id: *const c_char,
    device: *mut ffi::nvmlDevice_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        // SAFETY: the caller's string.
        let pci = Pci::parse(unsafe { get_text(bus_id) }?).ok_or(INVALID_ARGUMENT)?;
        sim().call(|inner, machine| {
            let index = machine.cards.iter().position(|card| card.pci == pci).ok_or(NOT_FOUND)?;
            inner.present(machine, index)?;
            // SAFETY: the caller's out parameter.
            unsafe { put(device, handle_of(index)) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId(bus_id: *const c_char, device: *mut ffi::nvmlDevice_t) -> ffi::nvmlReturn_t {
    // SAFETY: the same contract.
    unsafe { nvmlDeviceGetHandleByPciBusId_v2(bus_id, device) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetName(device: ffi::nvmlDevice_t, name: *mut c_char, length: c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| {
            // SAFETY: the caller's buffer has `length` bytes.
            unsafe { put_text(name, length, &card.described.model) }
        })
    })
}

/// Return the brand that the product name contains, as in Tesla V100, GeForce RTX 4090, and RTX A6000. New data center GPUs have the brand
/// NVIDIA.
fn brand_of(model: &str) -> ffi::nvmlBrandType_t {
    let brands = [
        ("GeForce", ffi::nvmlBrandType_enum_NVML_BRAND_GEFORCE),
        ("TITAN", ffi::nvmlBrandType_enum_NVML_BRAND_TITAN),
        ("Tesla", ffi::nvmlBrandType_enum_NVML_BRAND_TESLA),
        ("Quadro RTX", ffi::nvmlBrandType_enum_NVML_BRAND_QUADRO_RTX),
        ("Quadro", ffi::nvmlBrandType_enum_NVML_BRAND_QUADRO),
        ("RTX", ffi::nvmlBrandType_enum_NVML_BRAND_NVIDIA_RTX),
    ];
    let found = brands.iter().find(|(word, _)| model.contains(word));
    found.map_or(ffi::nvmlBrandType_enum_NVML_BRAND_NVIDIA, |(_, brand)| *brand)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetBrand(device: ffi::nvmlDevice_t, brand: *mut ffi::nvmlBrandType_t) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| {
            // SAFETY: the caller's out parameter.
            unsafe { put(brand, brand_of(&card.described.model)) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(device: ffi::nvmlDevice_t, uuid: *mut c_char, length: c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        if mig::is(device) {
            return mig::call(device, |mig| {
                // SAFETY: the caller's buffer has `length` bytes.
                unsafe { put_text(uuid, length, &mig.uuid) }
            });
        }
        device_call(device, |_, card, _| {
            // SAFETY: the caller's buffer has `length` bytes.
            unsafe { put_text(uuid, length, &card.uuid) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetIndex(device: ffi::nvmlDevice_t, index: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        if let Some(own) = mig::index_of(device) {
            return mig::call(device, |_| {
                // SAFETY: the caller's out parameter.
                unsafe { put(index, own as c_uint) }
            });
        }
        device_call(device, |_, _, own| {
            // SAFETY: the caller's out parameter.
            unsafe { put(index, own as c_uint) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMinorNumber(device: ffi::nvmlDevice_t, minor: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| {
            // SAFETY: the caller's out parameter.
            unsafe { put(minor, card.minor) }
        })
    })
}

/// Return the PCI address in NVML's two forms: the legacy field has a domain of four digits, the other field one of eight.
pub(super) fn pci_info(pci: Pci) -> ffi::nvmlPciInfo_t {
    let place = format!("{:02X}:{:02X}.0", pci.bus, pci.device);
    ffi::nvmlPciInfo_t {
        busIdLegacy: field(&format!("{:04X}:{place}", pci.domain)),
        domain: pci.domain,
        bus: pci.bus,
        device: pci.device,
        // The device id (upper half) is made up; the vendor id (lower half) is NVIDIA's.
        pciDeviceId: 0x2000_10DE,
        pciSubSystemId: 0x2000_10DE,
        busId: field(&format!("{:08X}:{place}", pci.domain)),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: ffi::nvmlDevice_t, pci: *mut ffi::nvmlPciInfo_t) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| {
            // SAFETY: the caller's out parameter.
            unsafe { put(pci, pci_info(card.pci)) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: ffi::nvmlDevice_t, memory: *mut ffi::nvmlMemory_t) -> ffi::nvmlReturn_t {
    answer(|| {
        mig::call_with_part(device, |inner, card, index, part| {
            inner.memory_is_readable(index, 1)?;
            let used: u64 = inner.processes(card, index, part)?.values().sum();
            let (total, used) = match part {
                Some(part) => (instance::memory_of(card, &card.mig[part])?, used),
                None => (card.described.memory_mib, used.saturating_add(inner.reserved(index))),
            };
            let (total, used) = (total.saturating_mul(MIB), used.saturating_mul(MIB));
            let free = total.saturating_sub(used);
            // SAFETY: the caller's out parameter.
            unsafe { put(memory, ffi::nvmlMemory_t { total, free, used }) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(
    device: ffi::nvmlDevice_t,
    memory: *mut ffi::nvmlMemory_v2_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        if memory.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // NVML_STRUCT_VERSION(Memory, 2): the struct's size, with the version in the upper byte.
        let expected = size_of::<ffi::nvmlMemory_v2_t>() as c_uint | 2 << 24;
        // SAFETY: not null, and the API requires the caller to set the version.
        let version = unsafe { (*memory).version };
        if version != expected {
            return Err(VERSION_MISMATCH);
        }
        mig::call_with_part(device, |inner, card, index, part| {
            inner.memory_is_readable(index, 2)?;
            let bytes = |mib: u64| mib.saturating_mul(MIB);
            let processes = |part| inner.processes(card, index, part).map(|used| used.values().sum::<u64>());
            let own = if part.is_none() {
                super::limits::own(inner, card, index)?
            } else {
                None
            };
            let (total, used, reserved) = match (part, own) {
                (Some(at), _) => (bytes(instance::memory_of(card, &card.mig[at])?), bytes(processes(part)?), 0),
                (None, Some((total, used))) => (total, used, 0),
                (None, None) => {
                    let used = processes(None)?;
                    (bytes(card.described.memory_mib), bytes(used), bytes(inner.reserved(index)))
                }
            };
            let info = ffi::nvmlMemory_v2_t {
                version,
                total,
                reserved,
                free: total.saturating_sub(used).saturating_sub(reserved),
                used,
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(memory, info) }
        })
    })
}

/// The memory that is mapped into the PCI address space is as large as the GPU's or the MIG device's memory, rounded up to a power of two, and none of
/// it is used.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetBAR1MemoryInfo(
    device: ffi::nvmlDevice_t,
    memory: *mut ffi::nvmlBAR1Memory_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        mig::call_with_part(device, |_, card, _, part| {
            let mib = match part {
                Some(part) => instance::memory_of(card, &card.mig[part])?,
                None => card.described.memory_mib,
            };
            let total = mib.checked_next_power_of_two().ok_or(INVALID_ARGUMENT)?.saturating_mul(MIB);
            let info = ffi::nvmlBAR1Memory_t {
                bar1Total: total,
                bar1Free: total,
                bar1Used: 0,
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(memory, info) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: ffi::nvmlDevice_t,
    major: *mut c_int,
    minor: *mut c_int,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| {
            // SAFETY: the caller's out parameters.
            unsafe {
                put(major, card.cc.0 as c_int)?;
                put(minor, card.cc.1 as c_int)
            }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNumGpuCores(device: ffi::nvmlDevice_t, cores: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| {
            // SAFETY: the caller's out parameter.
            unsafe { put(cores, card.cores()) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetArchitecture(device: ffi::nvmlDevice_t, architecture: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| {
            // SAFETY: the caller's out parameter.
            unsafe { put(architecture, card.architecture()) }
        })
    })
}

/// Every clock except the memory clock (type 2) is the clock of the SMs.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMaxClockInfo(
    device: ffi::nvmlDevice_t,
    kind: ffi::nvmlClockType_t,
    clock: *mut c_uint,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| match kind {
            // SAFETY: the caller's out parameter.
            0 | 1 | 3 => unsafe { put(clock, card.described.clock_mhz) },
            2 => {
                let memory = card.described.memory_clock_mhz.ok_or(NOT_SUPPORTED)?;
                // SAFETY: the caller's out parameter.
                unsafe { put(clock, memory) }
            }
            _ => Err(INVALID_ARGUMENT),
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryBusWidth(device: ffi::nvmlDevice_t, bits: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| {
            let described = card.described.memory_bus_bits.ok_or(NOT_SUPPORTED)?;
            // SAFETY: the caller's out parameter.
            unsafe { put(bits, described) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTemperature(
    device: ffi::nvmlDevice_t,
    sensor: ffi::nvmlTemperatureSensors_t,
    celsius: *mut c_uint,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |inner, card, index| match sensor {
            // SAFETY: the caller's out parameter.
            0 => unsafe { put(celsius, inner.temperature(card, index)) },
            _ => Err(INVALID_ARGUMENT),
        })
    })
}

/// The memory utilization is 0 if it is not set, because the description does not contain it. "On MIG-enabled GPUs, querying device utilization rates is
/// not currently supported" (nvml.h).
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUtilizationRates(
    device: ffi::nvmlDevice_t,
    rates: *mut ffi::nvmlUtilization_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |inner, card, index| {
            if card.described.mig.is_some() {
                return Err(NOT_SUPPORTED);
            }
            let gpu = inner.utilization(card, index);
            let memory = inner
                .gpu(index)
                .and_then(|changes| changes.gauges.memory_percent)
                .unwrap_or(0);
            // SAFETY: the caller's out parameter.
            unsafe { put(rates, ffi::nvmlUtilization_t { gpu, memory }) }
        })
    })
}

/// Only GPUs that are NUMA nodes themselves (Grace) support this. For the NUMA node to which a GPU is attached see
/// [`nvmlDeviceGetMemoryAffinity`].
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNumaNodeId(device: ffi::nvmlDevice_t, _node: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| device_call(device, |_, _, _| Err(NOT_SUPPORTED)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryAffinity(
    device: ffi::nvmlDevice_t,
    size: c_uint,
    nodes: *mut c_ulong,
    _scope: ffi::nvmlAffinityScope_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| {
            let node = card.described.numa.ok_or(NOT_SUPPORTED)?;
            let word = (node / c_ulong::BITS) as usize;
            if nodes.is_null() {
                return Err(INVALID_ARGUMENT);
            }
            if word >= size as usize {
                return Err(INSUFFICIENT_SIZE);
            }
            for i in 0..size as usize {
                let bits = if i == word { 1 << (node % c_ulong::BITS) } else { 0 };
                // SAFETY: the caller's array has `size` words.
                unsafe { nodes.add(i).write(bits) };
            }
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetAddressingMode(
    device: ffi::nvmlDevice_t,
    _mode: *mut ffi::nvmlDeviceAddressingMode_t,
) -> ffi::nvmlReturn_t {
    answer(|| device_call(device, |_, _, _| Err(NOT_SUPPORTED)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuFabricInfo(
    device: ffi::nvmlDevice_t,
    info: *mut ffi::nvmlGpuFabricInfo_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| {
            let fabric = card.fabric.ok_or(NOT_SUPPORTED)?;
            let found = ffi::nvmlGpuFabricInfo_t {
                clusterUuid: fabric.cluster,
                status: ffi::nvmlReturn_enum_NVML_SUCCESS,
                cliqueId: fabric.clique,
                state: fabric.state,
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(info, found) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuFabricInfoV(
    device: ffi::nvmlDevice_t,
    info: *mut ffi::nvmlGpuFabricInfoV_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        if info.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and each version of the caller's structure begins with its version.
        let version = unsafe { info.cast::<c_uint>().read() };
        device_call(device, |_, card, _| {
            let fabric = card.fabric.ok_or(NOT_SUPPORTED)?;
            let second = ffi::nvmlGpuFabricInfo_v2_t {
                version,
                clusterUuid: fabric.cluster,
                status: ffi::nvmlReturn_enum_NVML_SUCCESS,
                cliqueId: fabric.clique,
                state: fabric.state,
                healthMask: 0,
            };
            if version == version_of::<ffi::nvmlGpuFabricInfo_v2_t>(2) {
                // SAFETY: the caller's out parameter, which has this layout by its version.
                return unsafe { put(info.cast(), second) };
            }
            if version != version_of::<ffi::nvmlGpuFabricInfo_v3_t>(3) {
                return Err(VERSION_MISMATCH);
            }
            let third = ffi::nvmlGpuFabricInfo_v3_t {
                version,
                clusterUuid: second.clusterUuid,
                status: second.status,
                cliqueId: second.cliqueId,
                state: second.state,
                healthMask: second.healthMask,
                healthSummary: 0,
            };
            // SAFETY: the caller's out parameter, which has this layout by its version.
            unsafe { put(info, third) }
        })
    })
}

/// Return the version field of a structure (nvml.h, `NVML_STRUCT_VERSION`).
fn version_of<T>(number: c_uint) -> c_uint {
    size_of::<T>() as c_uint | number << 24
}
