//! Reads the GPUs.

use std::collections::BTreeMap;
use std::path::Path;

use divvy_model::{GpuLink, LinkKind, MiB, MigDevice, Vendor};
use nvml_wrapper::enum_wrappers::device::{Brand, Clock, ComputeMode, TemperatureSensor, TopologyLevel};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::ffi::ProcessList;
use super::{failure, ffi};
use crate::backend::DriverCalls;
use crate::{
    DriverVersions, Failure, GpuFacts, GpuProcess, GpuProcesses, LastKnownGpus, ProcessKind, SNAPSHOT_VERSION, Snapshot,
    UnreadableDevice,
};

/// An upper bound on the NVLinks of a GPU. A GPU has fewer, and the driver reports when there are no more.
const MAX_NVLINKS: u32 = 36;

pub(super) fn snapshot(nvml: &Nvml, calls: &DriverCalls, known: &LastKnownGpus) -> Result<Snapshot, Failure> {
    let (driver, cuda, count) = {
        let _call = calls.enter("reading versions and the number of GPUs");
        (nvml.sys_driver_version(), ffi::cuda_version(nvml), ffi::count(nvml))
    };
    let count = count.map_err(|error| failure(&error, "counting GPUs"))?;
    let driver = DriverVersions {
        // A Tegra's driver has no version. The GPUs work without one.
        version: driver.unwrap_or_default(),
        cuda: cuda.map_or_else(
            |_| String::new(),
            |version| format!("{}.{}", version / 1000, version % 1000 / 10),
        ),
    };
    let mut snapshot = Snapshot {
        v: SNAPSHOT_VERSION,
        drivers: BTreeMap::from([(Vendor::Nvidia, driver)]),
        gpus: Vec::new(),
        unreadable: Vec::new(),
    };
    let mut devices = BTreeMap::new();
    for index in 0..count {
        let _call = calls.enter(format!("reading GPU {index}"));
        match identify(nvml, index) {
            // Containers get a GPU by its UUID, so only one GPU of a UUID can be offered.
            Ok((_, uuid)) if devices.contains_key(&uuid) => snapshot.unreadable.push(UnreadableDevice {
                vendor: Vendor::Nvidia,
                index,
                lost: false,
                error: format!("another GPU has the same UUID {uuid}"),
            }),
            Ok((device, uuid)) => {
                snapshot.gpus.push(gpu(&device, index, &uuid, known.gpu(&uuid)));
                devices.insert(uuid, device);
            }
            Err(error) => snapshot.unreadable.push(UnreadableDevice {
                vendor: Vendor::Nvidia,
                index,
                lost: is_lost(&error),
                error: error.to_string(),
            }),
        }
    }
    connect(&mut snapshot, &devices, calls, known);
    Ok(snapshot)
}

pub(super) fn identify(nvml: &Nvml, index: u32) -> Result<(Device<'_>, String), NvmlError> {
    let device = ffi::by_index(nvml, index)?;
    let uuid = device.uuid()?;
    Ok((device, uuid))
}

fn is_lost(error: &NvmlError) -> bool {
    matches!(error, NvmlError::GpuLost)
}

/// Reads the values of one GPU. A value that cannot be read does not prevent reading the others.
struct FactReader<'f> {
    facts: &'f mut GpuFacts,
}

impl FactReader<'_> {
    fn read<T: Default>(&mut self, what: &str, answer: Result<T, NvmlError>) -> T {
        match answer {
            Ok(value) => value,
            // A value that this GPU or this driver does not support is not an error.
            Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => T::default(),
            Err(error) => {
                self.facts.lost |= is_lost(&error);
                self.facts.error.get_or_insert_with(|| format!("{what}: {error}"));
                T::default()
            }
        }
    }
}

fn gpu(device: &Device<'_>, index: u32, uuid: &str, before: Option<&GpuFacts>) -> GpuFacts {
    // A GPU that was read completely before is the same GPU, so read only the values that change.
    let whole = before.filter(|before| before.error.is_none() && before.index == index);
    let mut facts = whole.cloned().unwrap_or_default();
    facts.vendor = Vendor::Nvidia;
    facts.uuid = uuid.to_owned();
    facts.index = index;
    let mut reader = FactReader { facts: &mut facts };
    if whole.is_none() {
        reader.facts.minor = reader.read("minor number", device.minor_number().map(Some));
        reader.facts.nodes = reader.facts.minor.iter().map(|minor| format!("nvidia{minor}")).collect();
        reader.facts.pci = reader.read("PCI bus id", device.pci_info().map(|pci| bus_id(&pci.bus_id)));
        reader.facts.model = reader.read("product name", ffi::name(device));
        let cc = device.cuda_compute_capability();
        let cc = reader.read("compute capability", cc.map(|cc| Some((cc.major, cc.minor))));
        let cores = reader.read("number of cores", device.num_cores());
        if let Some((major, minor)) = cc {
            reader.facts.cc = format!("{major}.{minor}");
            reader.facts.sms = cores / lanes(major, minor);
        }
        reader.facts.clock_mhz = reader.read("highest clock", device.max_clock_info(Clock::SM));
        let clock = reader.read("highest memory clock", device.max_clock_info(Clock::Memory));
        let bits = reader.read("width of the memory bus", device.memory_bus_width());
        reader.facts.bandwidth_gbs = bandwidth_gbs(clock, bits);
        reader.facts.brand = device.brand().ok().map(|brand| words_of(&brand).to_owned());
        reader.facts.compute_mode = device.compute_mode().ok().map(|mode| compute_mode(&mode).to_owned());
        reader.facts.persistence = device.is_in_persistent_mode().ok();
        reader.facts.numa = numa(&reader.facts.pci, device);
    }
    // The fabric manager may set up the fabric after the driver is loaded.
    if facts.fabric.is_none() {
        facts.fabric = ffi::fabric(device).ok().flatten();
    }
    // The MIG devices of a GPU can change at any time, and from Hopper on MIG mode can be switched without a reset.
    let known: &[MigDevice] = before.map_or(&[], |before| &before.mig_devices);
    let mode = mig_mode(device);
    let devices = match mode {
        Ok(Some((true, _))) => mig_devices(device, known),
        Ok(_) => Ok(Vec::new()),
        Err(_) => Ok(known.to_vec()),
    };
    // A divided GPU must not look like a whole one, or like one without MIG devices, because of one failed call.
    let (mode, mode_error) = match mode {
        Ok(mode) => (mode, None),
        Err(error) => (before.and_then(|before| before.mig), Some(error)),
    };
    let (devices, devices_error) = match devices {
        Ok(devices) => (devices, None),
        Err(error) => (known.to_vec(), Some(error)),
    };
    // A GPU that was not in MIG mode before works as it did.
    let was_off = whole.is_some_and(|before| !before.mig.is_some_and(|(is_on, _)| is_on));
    if let Some(error) = mode_error.filter(|_| !was_off).or(devices_error) {
        facts.lost |= is_lost(&error);
        facts.error.get_or_insert_with(|| format!("MIG: {error}"));
    }
    (facts.mig, facts.mig_devices) = (mode, devices);
    let mut reader = FactReader { facts: &mut facts };
    let memory = match device.memory_info() {
        Ok(memory) => Ok((memory.total, memory.used)),
        Err(error) if is_lost(&error) => Err(error),
        // The driver does not know the second version: the symbol is missing, or it refuses the call.
        Err(_) => ffi::memory_info_v1(device).map(|memory| (memory.total, memory.used)),
    };
    let (total, used) = reader.read("memory", memory);
    if total > 0 {
        reader.facts.total = MiB::from_bytes(total);
    }
    reader.facts.used = MiB::from_bytes(used);
    reader.facts.temperature = reader.read("temperature", device.temperature(TemperatureSensor::Gpu).map(Some));
    let rates = device.utilization_rates();
    reader.facts.utilization = reader.read("utilization", rates.map(|rates| Some(rates.gpu)));
    facts
}

/// Return whether MIG mode is on, and whether it will be on after a reset. Return `None` if the GPU or the driver has no MIG mode.
fn mig_mode(device: &Device<'_>) -> Result<Option<(bool, bool)>, NvmlError> {
    match device.mig_mode() {
        Ok(mode) => Ok(Some((mode.current == 1, mode.pending == 1))),
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Return the MIG devices. NVML counts the slots for MIG devices, and not every slot is used. `known` are those that were read before. A
/// device keeps its parts, but after the GPU was divided again, a UUID can belong to another device: the UUIDs of MIG devices have version 5, so
/// they are computed from names.
fn mig_devices(device: &Device<'_>, known: &[MigDevice]) -> Result<Vec<MigDevice>, NvmlError> {
    let mut found = Vec::new();
    for index in 0..device.mig_device_count()? {
        let mig = match device.mig_device_by_index(index) {
            Ok(mig) => mig,
            Err(NvmlError::NotFound | NvmlError::InvalidArg) => continue,
            Err(error) => return Err(error),
        };
        let (gi, ci, uuid) = match ffi::mig_instances(&mig).and_then(|(gi, ci)| Ok((gi, ci, mig.uuid()?))) {
            Ok(found) => found,
            // It was destroyed a moment ago.
            Err(NvmlError::NotFound | NvmlError::InvalidArg) => continue,
            Err(error) => return Err(error),
        };
        let known = known.iter().find(|known| known.uuid == uuid).and_then(|known| known.parts);
        found.push(MigDevice {
            index,
            uuid,
            gi,
            ci,
            capabilities: None,
            parts: ffi::mig_parts(device, &mig, gi, known).ok().or(known),
        });
    }
    Ok(found)
}

/// Return a brand as images write it in `NVIDIA_REQUIRE_CUDA`. libnvidia-container ignores the difference between upper and lower
/// case.
fn words_of(brand: &Brand) -> &'static str {
    match brand {
        Brand::Unknown => "unknown",
        Brand::Quadro => "quadro",
        Brand::Tesla => "tesla",
        Brand::NVS => "nvs",
        Brand::GRID => "grid",
        Brand::GeForce => "geforce",
        Brand::Titan => "titan",
        Brand::VApps => "vapps",
        Brand::VPC => "vpc",
        Brand::VCS => "vcs",
        Brand::VWS => "vws",
        Brand::CloudGaming | Brand::VGaming => "cloudgaming",
        Brand::QuadroRTX => "quadrortx",
        Brand::NvidiaRTX => "nvidiartx",
        Brand::Nvidia => "nvidia",
        Brand::GeForceRTX => "geforcertx",
        Brand::TitanRTX => "titanrtx",
    }
}

fn compute_mode(mode: &ComputeMode) -> &'static str {
    match mode {
        ComputeMode::Default => "default",
        ComputeMode::ExclusiveThread => "exclusive-thread",
        ComputeMode::Prohibited => "prohibited",
        ComputeMode::ExclusiveProcess => "exclusive-process",
    }
}

/// Convert NVML's `00000000:81:00.0` to the kernel's form `0000:81:00.0`: at least four digits of domain, lower case.
fn bus_id(nvml: &str) -> String {
    let lower = nvml.to_ascii_lowercase();
    let domain = lower
        .split_once(':')
        .and_then(|(domain, rest)| Some((u32::from_str_radix(domain, 16).ok()?, rest)));
    match domain {
        Some((domain, rest)) => format!("{domain:04x}:{rest}"),
        None => lower,
    }
}

/// FP32 lanes per SM (CUDA C Programming Guide, "Arithmetic Instructions"). NVML counts lanes, not SMs.
fn lanes(major: i32, minor: i32) -> u32 {
    match (major, minor) {
        (2, 0) => 32,
        (2, _) => 48,
        (3, _) => 192,
        (6, 0) | (7, _) | (8, 0) => 64,
        _ => 128,
    }
}

/// Memory bandwidth in GB/s. Memory transfers data twice per clock cycle, and the driver scales the clock so that this holds for every kind
/// of memory (CUDA C++ Best Practices Guide, "Theoretical Bandwidth Calculation").
fn bandwidth_gbs(clock_mhz: u32, bus_bits: u32) -> u32 {
    let mega_bytes = u64::from(clock_mhz).saturating_mul(2 * u64::from(bus_bits)) / 8;
    u32::try_from(mega_bytes / 1000).unwrap_or(u32::MAX)
}

/// Return the NUMA node of a GPU from the kernel, where −1 means none. NVML is only queried if the kernel does not know the device (WSL,
/// simulation), because NVML reports node 0 even on machines without NUMA.
fn numa(pci: &str, device: &Device<'_>) -> Option<u32> {
    let file = Path::new("/sys/bus/pci/devices").join(pci).join("numa_node");
    if !pci.is_empty()
        && let Ok(text) = std::fs::read_to_string(file)
    {
        return text.trim().parse().ok();
    }
    // Scope 0 is the memory of the node. 16 words are 1,024 nodes, the kernel's maximum.
    let words = device.memory_affinity(16, 0).ok()?;
    let mut nodes = (0u32..).zip(words).filter(|(_, word)| *word != 0);
    let (index, word) = nodes.next()?;
    (nodes.next().is_none() && word.is_power_of_two()).then(|| index * u64::BITS + word.trailing_zeros())
}

/// Read how the GPUs are connected, unless this is already known for all present GPUs. Connections to a lost GPU are kept, because it may
/// come back.
fn connect(snapshot: &mut Snapshot, devices: &BTreeMap<String, Device<'_>>, calls: &DriverCalls, known: &LastKnownGpus) {
    let knows = |gpu: &GpuFacts, peer: &str| gpu.uuid == peer || gpu.links.iter().any(|link| link.peer == peer);
    let places: Vec<(String, String)> = snapshot.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.pci.clone())).collect();
    for gpu in &mut snapshot.gpus {
        let Some(device) = devices.get(&gpu.uuid) else { continue };
        if gpu.error.is_some() || places.iter().all(|(peer, _)| knows(gpu, peer)) {
            continue;
        }
        let _call = calls.enter(format!("reading the connections of GPU {}", gpu.index));
        let nvlinks = nvlinks(device);
        gpu.links
            .retain(|link| !devices.contains_key(&link.peer) && known.gpu(&link.peer).is_some());
        for (uuid, pci) in places.iter().filter(|(uuid, _)| *uuid != gpu.uuid) {
            let direct = nvlinks.get(pci).map(|count| (LinkKind::NvLink, *count));
            let level = devices.get(uuid).and_then(|other| common_ancestor(device, other));
            for (kind, count) in direct.into_iter().chain(level.map(|kind| (kind, 0))) {
                let peer = uuid.clone();
                gpu.links.push(GpuLink { peer, kind, count });
            }
        }
    }
}

/// Return the number of active NVLinks by the PCI bus id at the other end.
fn nvlinks(device: &Device<'_>) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    for number in 0..MAX_NVLINKS {
        let link = device.link_wrapper_for(number);
        match link.is_active() {
            Ok(true) => {
                // A link to an NVSwitch does not name a GPU and does not count here.
                if let Ok(remote) = link.remote_pci_info() {
                    *counts.entry(bus_id(&remote.bus_id)).or_insert(0) += 1;
                }
            }
            Ok(false) => {}
            // No more links, or none at all.
            Err(_) => break,
        }
    }
    counts
}

fn common_ancestor(a: &Device<'_>, b: &Device<'_>) -> Option<LinkKind> {
    let level = TopologyLevel::try_from(ffi::common_ancestor(a, b).ok()?).ok()?;
    Some(match level {
        TopologyLevel::Internal => LinkKind::SameBoard,
        TopologyLevel::Single => LinkKind::SingleSwitch,
        TopologyLevel::Multiple => LinkKind::MultiSwitch,
        TopologyLevel::HostBridge => LinkKind::HostBridge,
        TopologyLevel::Node => LinkKind::Node,
        TopologyLevel::System => LinkKind::System,
    })
}

pub(super) fn processes(nvml: &Nvml, calls: &DriverCalls, known: &LastKnownGpus) -> Result<Vec<GpuProcesses>, Failure> {
    let count = {
        let _call = calls.enter("counting GPUs");
        ffi::count(nvml).map_err(|error| failure(&error, "counting GPUs"))?
    };
    let mut all = Vec::new();
    for index in 0..count {
        let _call = calls.enter(format!("reading the processes of GPU {index}"));
        match identify(nvml, index) {
            Ok((device, uuid)) if device.mig_mode().is_ok_and(|mode| mode.current == 1) => {
                all.extend(processes_of_parts(&device, uuid));
            }
            Ok((device, uuid)) => all.push(processes_of(&device, uuid)),
            // A device without a UUID is only reported under its last known UUID.
            Err(error) => all.extend(known.at(Vendor::Nvidia, index).map(|gpu| GpuProcesses {
                uuid: gpu.uuid.clone(),
                processes: Vec::new(),
                error: Some(error.to_string()),
            })),
        }
    }
    Ok(all)
}

/// Return the processes on each MIG device. NVML lists the processes of a GPU in MIG mode without the MIG devices that they use.
fn processes_of_parts(device: &Device<'_>, uuid: String) -> Vec<GpuProcesses> {
    let count = match device.mig_device_count() {
        Ok(count) => count,
        Err(error) => {
            return vec![GpuProcesses {
                uuid,
                processes: Vec::new(),
                error: Some(error.to_string()),
            }];
        }
    };
    let parts = (0..count).filter_map(|index| device.mig_device_by_index(index).ok());
    parts
        .filter_map(|part| {
            let uuid = part.uuid().ok()?;
            Some(processes_of(&part, uuid))
        })
        .collect()
}

fn processes_of(device: &Device<'_>, uuid: String) -> GpuProcesses {
    let mut used: BTreeMap<u32, (u64, ProcessKind)> = BTreeMap::new();
    let lists = [
        (ProcessKind::Compute, ProcessList::Compute),
        (ProcessKind::Graphics, ProcessList::Graphics),
        (ProcessKind::MpsClient, ProcessList::MpsClients),
    ];
    let mut error = None;
    for (kind, list) in lists {
        match ffi::processes(device, list) {
            Ok(processes) => {
                for (pid, bytes) in processes {
                    // A process can be in several lists, with the same amount: one that computes and renders, or a client of MPS.
                    let (before, kind_before) = used.entry(pid).or_insert((bytes, kind));
                    *before = bytes.max(*before);
                    *kind_before = both(*kind_before, kind);
                }
            }
            // Drivers before R390 do not list the clients of MPS.
            Err(NvmlError::FailedToLoadSymbol(_)) if list == ProcessList::MpsClients => {}
            Err(NvmlError::NotSupported) => {}
            Err(found) => error = Some(found.to_string()),
        }
    }
    let processes = used.into_iter().map(|(pid, (bytes, kind))| GpuProcess {
        pid,
        used: MiB::from_bytes(bytes),
        pod: None,
        container: None,
        own_pid: None,
        kind: Some(kind),
        program: None,
    });
    GpuProcesses {
        uuid,
        processes: processes.collect(),
        error,
    }
}

/// Return what a process in two lists uses the GPU for. The driver may also list the clients of MPS as compute processes.
fn both(first: ProcessKind, second: ProcessKind) -> ProcessKind {
    match (first, second) {
        (ProcessKind::Compute, ProcessKind::Graphics) => ProcessKind::ComputeAndGraphics,
        _ => second,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_bandwidth_is_that_of_the_data_sheets() {
        for (clock_mhz, bus_bits, gbs) in [
            (1215, 5120, 1555), // A100-SXM4-40GB, HBM2
            (2619, 5120, 3352), // H100 80GB HBM3
            (5001, 256, 320),   // T4, GDDR6
            (9751, 384, 936),   // RTX 3090, GDDR6X
            (14001, 512, 1792), // RTX 5090, GDDR7
            (1215, 0, 0),
            (0, 5120, 0),
            (u32::MAX, u32::MAX, u32::MAX),
        ] {
            assert_eq!(bandwidth_gbs(clock_mhz, bus_bits), gbs);
        }
    }

    #[test]
    fn bus_ids_are_written_as_the_kernel_does() {
        for (nvml, kernel) in [
            ("00000000:81:00.0", "0000:81:00.0"),
            ("00000000:AF:00.0", "0000:af:00.0"),
            ("0000:81:00.0", "0000:81:00.0"),
            ("00010000:3B:00.0", "10000:3b:00.0"),
        ] {
            assert_eq!(bus_id(nvml), kernel);
        }
    }
}
