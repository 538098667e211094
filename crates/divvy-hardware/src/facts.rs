//! The state of a machine's GPUs at one moment.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{GpuLink, MiB, MigDevice, Partition, Vendor};
use serde::{Deserialize, Serialize};

use crate::Error;

/// The version of a [`Snapshot`]'s format.
pub const SNAPSHOT_VERSION: u32 = 2;

/// The drivers' description of all GPUs, read at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// Format version: [`SNAPSHOT_VERSION`].
    pub v: u32,
    /// The driver of each vendor whose driver answers. A snapshot of format version 1 lacks this field. It is parsed
    /// nevertheless, and then refused because of its `v`.
    #[serde(default)]
    pub drivers: BTreeMap<Vendor, DriverVersions>,
    /// The GPUs whose UUID is known, ordered by vendor and index.
    pub gpus: Vec<GpuFacts>,
    /// Devices whose UUID cannot be read and that were not seen before. If a GPU that the reader knows is not among `gpus`, it
    /// may be one of these devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<UnreadableDevice>,
}

/// A vendor's driver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DriverVersions {
    /// The version, such as `550.54.15`. Empty if the driver has no version number, such as the amdgpu driver that is part of
    /// Linux.
    pub version: String,
    /// The newest CUDA version that the driver supports, such as `12.4`. Empty if unknown, and for vendors other than NVIDIA.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cuda: String,
}

/// A GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuFacts {
    /// The vendor.
    #[serde(default)]
    pub vendor: Vendor,
    /// NVML's UUID (`GPU-…`), AMD's unique id (`0x…`), or the PCI address and the device id of an Intel GPU (`0000-4d-00-0-0xe20b`).
    pub uuid: String,
    /// The position among the vendor's GPUs in PCI order; for NVIDIA the NVML index.
    pub index: u32,
    /// NVIDIA's minor number, as in `/dev/nvidia<minor>`. `None` for other vendors, and if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// The device nodes of this GPU alone, as paths below `/dev`, such as `nvidia0` or `dri/card1` and `dri/renderD128`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// The GPU to which this partition belongs, if this is a partition that is listed as a separate GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<Partition>,
    /// PCI bus id, such as `0000:81:00.0`.
    #[serde(default)]
    pub pci: String,
    /// Product name.
    #[serde(default)]
    pub model: String,
    /// Brand as written in `NVIDIA_REQUIRE_*`, such as `tesla` or `geforcertx`. `None` if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub brand: Option<String>,
    /// Compute capability (NVIDIA), such as `8.0`, or architecture (AMD), such as `gfx90a`. Empty if unknown.
    #[serde(default)]
    pub cc: String,
    /// Number of streaming multiprocessors (NVIDIA) or compute units (AMD), 0 if unknown.
    #[serde(default)]
    pub sms: u32,
    /// Highest SM clock in MHz, 0 if unknown.
    #[serde(default, rename = "clockMHz")]
    pub clock_mhz: u32,
    /// Memory bandwidth in GB/s (10⁹ bytes), 0 if unknown.
    #[serde(default, rename = "bandwidthGBs", skip_serializing_if = "is_zero")]
    pub bandwidth_gbs: u32,
    /// Total memory in MiB.
    #[serde(rename = "totalMiB")]
    pub total: MiB,
    /// Memory in MiB that all processes use.
    #[serde(default, rename = "usedMiB")]
    pub used: MiB,
    /// NUMA node, or `None` if the platform does not report it.
    #[serde(default)]
    pub numa: Option<u32>,
    /// Temperature in °C.
    #[serde(default)]
    pub temperature: Option<u32>,
    /// Percentage of the last sample period in which a kernel was running.
    #[serde(default)]
    pub utilization: Option<u32>,
    /// Connections to the other GPUs of the vendor by UUID: NVLinks or XGMI, and the nearest common ancestor on the PCI bus.
    #[serde(default)]
    pub links: Vec<GpuLink>,
    /// `default`, `exclusive-process`, `exclusive-thread`, or `prohibited`, as of the probe's first read. `None` if the driver
    /// does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<String>,
    /// Persistence mode: whether the driver stays initialized without clients, as of the probe's first read. `None` if the driver
    /// does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistence: Option<bool>,
    /// Whether MIG mode is on, and whether it will be on after a reset. `None` if the GPU does not support MIG.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<(bool, bool)>,
    /// The GPU's MIG devices in NVML's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_devices: Vec<MigDevice>,
    /// The part of an NVLink fabric to which the GPU belongs. `None` if the GPU is in no fabric, or has not joined its fabric
    /// yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
    /// Whether the driver has functions that limit how much of the GPU's memory a pod can allocate. Whether they work is known when a limit is set.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub memory_limit: bool,
    /// Why the driver's events about the GPU do not arrive. `None` if they do, and if the driver has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_events: Option<NoEvents>,
    /// Errors of the memory that ECC found and could not correct, since the driver was loaded. This and the next three values are only in what
    /// `divvy-probe --once` and `--watch` print: they change at any time and take further calls, so a polled snapshot does not have them. `None` if
    /// the driver does not return the value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncorrected_ecc_errors: Option<u64>,
    /// The rows of the memory that were replaced by spare ones. `None` for GPUs before Ampere, and while the GPU has MIG devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remapped_rows: Option<RemappedRows>,
    /// Whether pages of the memory are retired at the next reset, for a GPU that does not remap rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retired_pages_pending: Option<bool>,
    /// Why the clocks are lower than possible, as bits (nvml.h, `nvmlClocksEventReason…`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clocks_event_reasons: Option<u64>,
    /// Whether the driver reports "GPU is lost". If so, the other fields hold earlier values.
    #[serde(default)]
    pub lost: bool,
    /// Why a value could not be read.
    #[serde(default)]
    pub error: Option<String>,
}

/// Rows of a GPU's memory that were replaced by spare ones (nvml.h, `nvmlDeviceGetRemappedRows`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemappedRows {
    /// How many were replaced because of errors that were corrected.
    pub correctable: u32,
    /// How many were replaced because of errors that could not be corrected.
    pub uncorrectable: u32,
    /// Whether rows are replaced at the next reset.
    pub pending: bool,
    /// Whether a row could ever not be replaced.
    pub failure: bool,
}

/// A GPU's errors, which the driver reports as events, cannot be received.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NoEvents {
    /// The last error.
    pub error: String,
    /// The time in ms since the first error. The probe tries again and again during that time.
    pub ms: u64,
}

/// A part of an NVLink fabric, in which the GPUs of several nodes are connected (nvml.h, `nvmlGpuFabricInfo_t`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fabric {
    /// The UUID of the cluster: 32 hexadecimal digits in the usual groups.
    pub cluster: String,
    /// The id of the clique: the GPUs that can reach each other's memory.
    pub clique: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// A device without a known UUID.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnreadableDevice {
    /// The vendor.
    #[serde(default)]
    pub vendor: Vendor,
    /// The position among the vendor's GPUs, as in [`GpuFacts::index`].
    pub index: u32,
    /// Whether the driver reports "GPU is lost".
    pub lost: bool,
    /// The driver's error.
    pub error: String,
}

/// The processes on one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcesses {
    /// The GPU's UUID.
    pub uuid: String,
    /// Compute and graphics processes, ordered by PID.
    pub processes: Vec<GpuProcess>,
    /// Why the processes could not be read. The list has no meaning then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// PID on the host (the probe runs with hostPID).
    pub pid: u32,
    /// Memory in MiB that the process uses, 0 if the driver does not report it.
    #[serde(rename = "usedMiB")]
    pub used: MiB,
    /// UID of the process's pod, from its cgroup. `None` for a process of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The container runtime's ID of the process's container, from its cgroup. `None` for a process of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The process's PID as it sees it itself, in the innermost PID namespace (`NSpid` in proc_pid_status(5)). `None` if it could not be read.
    #[serde(default, rename = "ownPid", skip_serializing_if = "Option::is_none")]
    pub own_pid: Option<u32>,
    /// What the process uses the GPU for. `None` if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<ProcessKind>,
    /// The first word of the process's command line, which the process itself can change, or the end of it. `None` if it could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

/// What a process uses a GPU for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProcessKind {
    /// Computing.
    Compute,
    /// Rendering.
    Graphics,
    /// Computing and rendering.
    ComputeAndGraphics,
    /// Computing as a client of CUDA's Multi-Process Service (MPS).
    MpsClient,
}

/// The maximum number of GPUs in input from outside the process. No machine has so many GPUs.
pub(crate) const MAX_GPUS: usize = 256;
/// The maximum number of MIG devices of a GPU. NVIDIA's GPUs have at most 7 GPU instances with 7 compute instances each.
pub(crate) const MAX_MIG_DEVICES: usize = 64;
/// The maximum number of device nodes of a GPU. A GPU has one or two of its own.
const MAX_NODES: usize = 8;
/// The maximum size in bytes of a name, and of an error.
const NAME_BYTES: usize = divvy_model::limits::DEVICE_TEXT_BYTES;
pub(crate) const ERROR_BYTES: usize = 1024;
/// The maximum size in bytes of a process's name. nvidia-smi shows fewer.
pub(crate) const PROGRAM_BYTES: usize = 256;

impl Snapshot {
    /// Return the version of a vendor's driver; empty if it is unknown, or if the driver does not answer.
    pub fn driver(&self, vendor: Vendor) -> &str {
        self.drivers.get(&vendor).map_or("", |driver| &driver.version)
    }

    /// Return the snapshot without the GPUs and the drivers of other vendors.
    pub fn only(mut self, vendor: Vendor) -> Snapshot {
        self.drivers.retain(|of, _| *of == vendor);
        self.gpus.retain(|gpu| gpu.vendor == vendor);
        self.unreadable.retain(|gpu| gpu.vendor == vendor);
        self
    }

    /// Return the snapshot with texts that [`validate`](Self::validate) accepts: cut, and with `?` in place of each control character. A
    /// driver's name for one GPU must not cost the reader all GPUs.
    pub(crate) fn printable(mut self) -> Snapshot {
        for driver in self.drivers.values_mut() {
            make_text(&mut driver.version, NAME_BYTES);
            make_text(&mut driver.cuda, NAME_BYTES);
        }
        for gpu in &mut self.gpus {
            for text in [&mut gpu.pci, &mut gpu.model, &mut gpu.cc] {
                make_text(text, NAME_BYTES);
            }
            let errors = [
                gpu.error.as_mut(),
                gpu.no_events.as_mut().map(|no_events| &mut no_events.error),
            ];
            for error in errors.into_iter().flatten() {
                make_text(error, ERROR_BYTES);
            }
        }
        self
    }

    /// Refuse a snapshot that a driver cannot have produced: duplicate or unprintable names, or sizes that could overflow later arithmetic.
    pub fn validate(&self) -> Result<(), Error> {
        let refuse = |text: String| Err(Error::Protocol(format!("a snapshot was refused: {text}")));
        if self.v != SNAPSHOT_VERSION {
            return refuse(format!(
                "it has version {}, but only version {SNAPSHOT_VERSION} is supported; use the probe of the same release",
                self.v
            ));
        }
        if self.gpus.len() + self.unreadable.len() > MAX_GPUS {
            return refuse(format!("it has more than {MAX_GPUS} GPUs"));
        }
        for driver in self.drivers.values() {
            if !is_text(&driver.version, NAME_BYTES) || !is_text(&driver.cuda, NAME_BYTES) {
                return refuse("a version is not printable text".to_owned());
            }
        }
        for (i, gpu) in self.gpus.iter().enumerate() {
            if !is_uuid(&gpu.uuid) {
                return refuse(format!("GPU {i} has the malformed UUID {:?}", shorten(&gpu.uuid)));
            }
            if self.gpus[..i].iter().any(|other| other.uuid == gpu.uuid) {
                return refuse(format!("GPU {} appears twice", gpu.uuid));
            }
            if self.gpus[..i].iter().any(|other| place(other) == place(gpu)) {
                return refuse(format!("two {} GPUs have the index {}", gpu.vendor, gpu.index));
            }
            if gpu.nodes.len() > MAX_NODES || !gpu.nodes.iter().all(|node| is_node(node)) {
                return refuse(format!("GPU {} has device nodes that are not paths below /dev", gpu.uuid));
            }
            let is_possible = |device: &MigDevice| {
                let memory = device.parts.map_or(0, |parts| parts.memory);
                is_text(&device.uuid, NAME_BYTES) && memory < 1 << 40
            };
            if gpu.mig_devices.len() > MAX_MIG_DEVICES || !gpu.mig_devices.iter().all(is_possible) {
                return refuse(format!("GPU {} has malformed MIG devices", gpu.uuid));
            }
            let texts = [&gpu.pci, &gpu.model, &gpu.cc];
            let errors = [gpu.error.as_ref(), gpu.no_events.as_ref().map(|no_events| &no_events.error)];
            if texts.iter().any(|text| !is_text(text, NAME_BYTES))
                || errors.into_iter().flatten().any(|text| !is_text(text, ERROR_BYTES))
            {
                return refuse(format!("GPU {} has a field that is not printable text", gpu.uuid));
            }
            if gpu.total.0.max(gpu.used.0) >= 1 << 40 {
                return refuse(format!("GPU {} claims a memory of {}", gpu.uuid, gpu.total));
            }
            let is_link = |link: &GpuLink| is_uuid(&link.peer) && is_text(link.kind.as_str(), 32);
            if gpu.links.len() > 2 * MAX_GPUS || !gpu.links.iter().all(is_link) {
                return refuse(format!("GPU {} has malformed links", gpu.uuid));
            }
        }
        let mut names: BTreeSet<&str> = self.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        let mut devices = self.gpus.iter().flat_map(|gpu| &gpu.mig_devices);
        if let Some(twice) = devices.find(|device| !names.insert(&device.uuid)) {
            return refuse(format!("MIG device {} appears twice", twice.uuid));
        }
        Ok(())
    }
}

impl GpuProcesses {
    /// Refuse lists that a driver cannot have produced: malformed UUIDs, or sizes that could overflow later arithmetic.
    pub fn validate(all: &[GpuProcesses]) -> Result<(), Error> {
        let refuse = |text: String| Err(Error::Protocol(format!("a list of processes was refused: {text}")));
        if all.len() > MAX_GPUS {
            return refuse(format!("it has more than {MAX_GPUS} GPUs"));
        }
        for (i, gpu) in all.iter().enumerate() {
            if !is_uuid(&gpu.uuid) || all[..i].iter().any(|other| other.uuid == gpu.uuid) {
                return refuse(format!(
                    "GPU {i} has the UUID {:?}, which is malformed or appears twice",
                    shorten(&gpu.uuid)
                ));
            }
            if gpu.error.as_ref().is_some_and(|text| !is_text(text, ERROR_BYTES)) {
                return refuse(format!("the error of GPU {} is not printable text", gpu.uuid));
            }
            for process in &gpu.processes {
                if process.used.0 >= 1 << 40 {
                    return refuse(format!(
                        "process {} on GPU {} claims to use {}",
                        process.pid, gpu.uuid, process.used
                    ));
                }
                if process.program.as_ref().is_some_and(|text| !is_text(text, PROGRAM_BYTES)) {
                    return refuse(format!(
                        "the program of process {} on GPU {} is not printable text",
                        process.pid, gpu.uuid
                    ));
                }
                // The UUID check also accepts every valid pod UID and container ID.
                if process.pod.as_ref().is_some_and(|uid| !is_uuid(uid)) {
                    return refuse(format!("process {} on GPU {} has a malformed pod UID", process.pid, gpu.uuid));
                }
                if process.container.as_ref().is_some_and(|id| !is_uuid(id)) {
                    return refuse(format!(
                        "process {} on GPU {} has a malformed container ID",
                        process.pid, gpu.uuid
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Report whether a UUID may become part of a file name, a device id, or a message.
pub(crate) fn is_uuid(text: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'_';
    (1..=96).contains(&text.len()) && text.bytes().all(allowed)
}

/// Report whether a text is a path below `/dev` that cannot leave it.
fn is_node(path: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_name = |part: &str| !matches!(part, "" | "." | "..") && part.chars().all(allowed);
    path.len() <= 64 && path.split('/').all(is_name)
}

/// Return what identifies a GPU's place on the machine.
fn place(gpu: &GpuFacts) -> (Vendor, u32) {
    (gpu.vendor, gpu.index)
}

pub(crate) fn is_text(text: &str, most: usize) -> bool {
    text.len() <= most && !text.chars().any(char::is_control)
}

pub(crate) fn make_text(text: &mut String, most: usize) {
    if !is_text(text, most) {
        *text = text.replace(char::is_control, "?");
        text.truncate(text.floor_char_boundary(most));
    }
}

fn shorten(text: &str) -> String {
    text.chars().take(64).collect()
}

/// The last known state of each GPU. A lost GPU no longer reports anything, not even its UUID.
#[derive(Debug, Clone, Default)]
pub struct LastKnownGpus {
    by_place: BTreeMap<(Vendor, u32), GpuFacts>,
}

impl LastKnownGpus {
    /// Fill in the values that a GPU no longer reports from its last known state, and remember the values that the other GPUs
    /// report.
    ///
    /// A device without a UUID counts as the GPU of its vendor that last had its index, unless that GPU has another index now.
    pub fn complete(&mut self, mut snapshot: Snapshot) -> Snapshot {
        for gpu in &mut snapshot.gpus {
            let before = self.by_place.values().find(|known| known.uuid == gpu.uuid);
            if let (Some(_), Some(before)) = (&gpu.error, before) {
                fill_in(gpu, before);
            }
        }
        for device in std::mem::take(&mut snapshot.unreadable) {
            let known = self.by_place.get(&(device.vendor, device.index));
            match known.filter(|known| snapshot.gpus.iter().all(|gpu| gpu.uuid != known.uuid)) {
                Some(known) => snapshot.gpus.push(GpuFacts {
                    used: MiB::ZERO,
                    temperature: None,
                    utilization: None,
                    lost: device.lost,
                    error: Some(device.error),
                    ..known.clone()
                }),
                None => snapshot.unreadable.push(device),
            }
        }
        snapshot.gpus.sort_by_key(place);
        for gpu in &snapshot.gpus {
            self.by_place.retain(|at, known| known.uuid != gpu.uuid || *at == place(gpu));
            self.by_place.insert(place(gpu), gpu.clone());
        }
        snapshot
    }

    /// Return the last known state of the vendor's GPU at this index.
    pub fn at(&self, vendor: Vendor, index: u32) -> Option<&GpuFacts> {
        self.by_place.get(&(vendor, index))
    }

    /// Return the last known state of this GPU.
    pub fn gpu(&self, uuid: &str) -> Option<&GpuFacts> {
        self.by_place.values().find(|known| known.uuid == uuid)
    }
}

/// Copy constant values from the earlier state if they are missing now.
fn fill_in(gpu: &mut GpuFacts, before: &GpuFacts) {
    fn take<T: Default + PartialEq + Clone>(to: &mut T, from: &T) {
        if *to == T::default() {
            to.clone_from(from);
        }
    }
    take(&mut gpu.minor, &before.minor);
    take(&mut gpu.nodes, &before.nodes);
    take(&mut gpu.pci, &before.pci);
    take(&mut gpu.model, &before.model);
    take(&mut gpu.cc, &before.cc);
    take(&mut gpu.sms, &before.sms);
    take(&mut gpu.clock_mhz, &before.clock_mhz);
    take(&mut gpu.bandwidth_gbs, &before.bandwidth_gbs);
    take(&mut gpu.total, &before.total);
    take(&mut gpu.numa, &before.numa);
    take(&mut gpu.links, &before.links);
}

#[cfg(test)]
mod tests {
    use divvy_model::LinkKind;

    use super::*;

    fn gpu(index: u32, uuid: &str) -> GpuFacts {
        GpuFacts {
            uuid: uuid.to_owned(),
            index,
            minor: Some(index),
            model: "NVIDIA T4".to_owned(),
            total: MiB(15360),
            ..GpuFacts::default()
        }
    }

    fn snapshot(gpus: Vec<GpuFacts>) -> Snapshot {
        Snapshot {
            v: SNAPSHOT_VERSION,
            drivers: BTreeMap::from([(
                Vendor::Nvidia,
                DriverVersions {
                    version: "550.54.15".to_owned(),
                    cuda: "12.4".to_owned(),
                },
            )]),
            gpus,
            unreadable: Vec::new(),
        }
    }

    fn lost(index: u32) -> UnreadableDevice {
        let error = "device fell off the bus".to_owned();
        UnreadableDevice {
            vendor: Vendor::Nvidia,
            index,
            lost: true,
            error,
        }
    }

    #[test]
    fn a_gpu_that_was_seen_before_keeps_its_name_when_it_is_lost() {
        let mut known = LastKnownGpus::default();
        known.complete(snapshot(vec![gpu(0, "GPU-a"), gpu(1, "GPU-b")]));
        let mut next = snapshot(vec![gpu(1, "GPU-b")]);
        next.unreadable = vec![lost(0), lost(2)];
        let seen = known.complete(next);
        let names: Vec<_> = seen
            .gpus
            .iter()
            .map(|gpu| (gpu.uuid.as_str(), gpu.lost, gpu.total.0))
            .collect();
        assert_eq!(names, [("GPU-a", true, 15360), ("GPU-b", false, 15360)]);
        assert_eq!(seen.unreadable, [lost(2)], "never seen: it has no name");
    }

    #[test]
    fn a_gpu_that_moved_is_not_also_reported_lost_at_its_old_place() {
        let mut known = LastKnownGpus::default();
        known.complete(snapshot(vec![gpu(0, "GPU-a"), gpu(1, "GPU-b")]));
        let mut next = snapshot(vec![gpu(0, "GPU-b")]);
        next.unreadable = vec![lost(1)];
        let seen = known.complete(next);
        assert_eq!(seen.gpus.len(), 1);
        assert_eq!(seen.unreadable, [lost(1)]);
    }

    #[test]
    fn what_cannot_be_read_any_more_is_taken_from_before() {
        let mut known = LastKnownGpus::default();
        known.complete(snapshot(vec![gpu(0, "GPU-a")]));
        let partial = GpuFacts {
            uuid: "GPU-a".to_owned(),
            lost: true,
            error: Some("lost".to_owned()),
            ..GpuFacts::default()
        };
        let seen = known.complete(snapshot(vec![partial]));
        assert_eq!(
            (seen.gpus[0].model.as_str(), seen.gpus[0].total, seen.gpus[0].lost),
            ("NVIDIA T4", MiB(15360), true)
        );
    }

    #[test]
    fn a_snapshot_that_no_driver_gives_is_refused() {
        let with = |edit: fn(&mut Snapshot)| {
            let mut snapshot = snapshot(vec![gpu(0, "GPU-a"), gpu(1, "GPU-b")]);
            edit(&mut snapshot);
            snapshot.validate().map_err(|error| error.to_string())
        };
        assert_eq!(with(|_| {}), Ok(()));
        type Edit = fn(&mut Snapshot);
        let cases: [(Edit, &str); 15] = [
            (|s| s.gpus[0].mig_devices = vec![MigDevice::default(); 65], "malformed MIG"),
            (
                |s| {
                    s.gpus[0].mig_devices = vec![MigDevice {
                        uuid: "MIG-\n".to_owned(),
                        ..MigDevice::default()
                    }];
                },
                "malformed MIG",
            ),
            (
                |s| {
                    s.gpus[0].mig_devices = vec![MigDevice {
                        uuid: "GPU-b".to_owned(),
                        ..MigDevice::default()
                    }];
                },
                "MIG device GPU-b appears twice",
            ),
            (|s| s.v = 1, "version 1"),
            (|s| s.gpus[0].nodes = vec!["../sda".to_owned()], "device nodes"),
            (|s| s.gpus[0].nodes = vec!["dri//card0".to_owned()], "device nodes"),
            (|s| s.gpus[0].nodes = vec!["nvidia0".to_owned(); 9], "device nodes"),
            (
                |s| s.drivers.entry(Vendor::Amd).or_default().version = "6\n".to_owned(),
                "version",
            ),
            (|s| s.gpus[1].uuid = "GPU-a".to_owned(), "twice"),
            (|s| s.gpus[1].index = 0, "two NVIDIA GPUs have the index 0"),
            (|s| s.gpus[0].uuid = "../../etc".to_owned(), "UUID"),
            (|s| s.gpus[0].model = "a\nb".to_owned(), "printable"),
            (|s| s.gpus[0].total = MiB(u64::MAX), "a memory of 18446744073709551615 MiB"),
            (
                |s| {
                    s.gpus[0].links = vec![GpuLink {
                        peer: String::new(),
                        kind: LinkKind::NvLink,
                        count: 1,
                    }];
                },
                "links",
            ),
            (|s| s.unreadable = vec![lost(3); 300], "more than 256"),
        ];
        for (edit, part) in cases {
            let error = with(edit).expect_err(part);
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn gpus_are_told_apart_by_vendor_and_index() {
        let amd = |index: u32, uuid: &str| GpuFacts {
            vendor: Vendor::Amd,
            minor: None,
            nodes: vec![format!("dri/card{index}"), format!("dri/renderD{}", 128 + index)],
            ..gpu(index, uuid)
        };
        let mut known = LastKnownGpus::default();
        let seen = known.complete(snapshot(vec![amd(1, "0x2"), amd(0, "0x1"), gpu(0, "GPU-a")]));
        let names: Vec<&str> = seen.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        assert_eq!(names, ["GPU-a", "0x1", "0x2"], "in the order of vendors, then of indices");
        seen.validate().map_err(|error| error.to_string()).expect("both have a GPU 0");
        let mut next = snapshot(vec![gpu(0, "GPU-a"), amd(1, "0x2")]);
        next.unreadable = vec![UnreadableDevice {
            vendor: Vendor::Amd,
            ..lost(0)
        }];
        let seen = known.complete(next);
        let lost: Vec<&str> = seen.gpus.iter().filter(|gpu| gpu.lost).map(|gpu| gpu.uuid.as_str()).collect();
        assert_eq!(lost, ["0x1"]);
        let only: Vec<String> = seen.only(Vendor::Nvidia).gpus.into_iter().map(|gpu| gpu.uuid).collect();
        assert_eq!(only, ["GPU-a"]);
    }

    #[test]
    fn a_snapshot_of_the_older_format_is_refused_with_its_version() {
        let text = r#"{"v":1,"driver":"550.54.15","cuda":"12.4","gpus":[{"uuid":"GPU-a","index":0,"minor":0,"totalMiB":1}]}"#;
        let older: Snapshot = serde_json::from_str(text).expect("it is read so far");
        let error = older.validate().expect_err("an older format").to_string();
        assert!(error.contains("version 1, but only version 2 is supported"), "{error}");
    }

    #[test]
    fn a_list_of_processes_that_no_driver_gives_is_refused() {
        let gpu = |uuid: &str, used: u64, pod: Option<&str>| GpuProcesses {
            uuid: uuid.to_owned(),
            processes: vec![GpuProcess {
                pid: 7,
                used: MiB(used),
                pod: pod.map(str::to_owned),
                container: None,
                own_pid: None,
                kind: None,
                program: None,
            }],
            error: None,
        };
        let in_container = |id: &str| {
            let mut gpu = gpu("GPU-a", 1, Some("0a-1b"));
            gpu.processes[0].container = Some(id.to_owned());
            gpu
        };
        let named = |name: &str| {
            let mut gpu = gpu("GPU-a", 1, None);
            gpu.processes[0].program = Some(name.to_owned());
            gpu
        };
        GpuProcesses::validate(&[named("python3")]).expect("ordinary");
        GpuProcesses::validate(&[in_container("0123abcd")]).expect("ordinary");
        GpuProcesses::validate(&[gpu("GPU-a", 10, None), gpu("GPU-b", 0, Some("0a-1b"))]).expect("ordinary");
        for (name, all) in [
            ("the same GPU twice", vec![gpu("GPU-a", 1, None), gpu("GPU-a", 1, None)]),
            ("a path for a GPU", vec![gpu("../x", 1, None)]),
            ("a path for a pod", vec![gpu("GPU-a", 1, Some("../x"))]),
            ("a pod without a UID", vec![gpu("GPU-a", 1, Some(""))]),
            ("a path for a container", vec![in_container("../x")]),
            ("a program of two lines", vec![named("a\nb")]),
            ("a long program", vec![named(&"a".repeat(PROGRAM_BYTES + 1))]),
            ("more memory than exists", vec![gpu("GPU-a", u64::MAX, None)]),
            ("too many GPUs", (0..300).map(|i| gpu(&format!("GPU-{i}"), 1, None)).collect()),
        ] {
            let error = GpuProcesses::validate(&all).expect_err(name).to_string();
            assert!(error.contains("a list of processes was refused"), "{name}: {error}");
        }
    }
}
