//! The state of a machine's GPUs at one moment.

use std::collections::BTreeMap;

use divvy_model::{Link, MiB, MigDevice};
use serde::{Deserialize, Serialize};

use crate::Error;

/// The driver's description of all GPUs, read at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// Format version: 1.
    pub v: u32,
    /// Driver version, such as `550.54.15`.
    pub driver: String,
    /// The newest CUDA version that the driver supports, such as `12.4`. Empty if unknown.
    #[serde(default)]
    pub cuda: String,
    /// The GPUs whose UUID is known, ordered by index.
    pub gpus: Vec<GpuFacts>,
    /// Devices whose UUID cannot be read and that were not seen before. A GPU that the reader knows and that is not among `gpus` may be one
    /// of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<Unreadable>,
}

/// A GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuFacts {
    /// NVML's UUID, such as `GPU-…`.
    pub uuid: String,
    /// NVML index: the position in PCI order.
    pub index: u32,
    /// Minor number, as in `/dev/nvidia<minor>`.
    pub minor: u32,
    /// PCI bus id, such as `0000:81:00.0`.
    #[serde(default)]
    pub pci: String,
    /// Product name.
    #[serde(default)]
    pub model: String,
    /// Brand as written in `NVIDIA_REQUIRE_*`, such as `tesla` or `geforcertx`. `None` if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub brand: Option<String>,
    /// CUDA compute capability, such as `8.0`. Empty if unknown.
    #[serde(default)]
    pub cc: String,
    /// Number of streaming multiprocessors, 0 if unknown.
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
    /// Connections to the other GPUs by UUID: NVLinks, and the nearest common ancestor on the PCI bus.
    #[serde(default)]
    pub links: Vec<Link>,
    /// `default`, `exclusive-process`, `exclusive-thread`, or `prohibited`, from the probe's first read. `None` if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<String>,
    /// Persistence mode: the driver stays initialized without clients. From the probe's first read; `None` if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistence: Option<bool>,
    /// Whether MIG mode is on, and whether it will be on after a reset. `None` if the GPU does not support MIG.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<(bool, bool)>,
    /// The GPU's MIG devices in NVML's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_devices: Vec<MigDevice>,
    /// The driver reports "GPU is lost". The other fields hold earlier values.
    #[serde(default)]
    pub lost: bool,
    /// Why a value could not be read.
    #[serde(default)]
    pub error: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// A device without a known UUID.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unreadable {
    /// NVML index.
    pub index: u32,
    /// The driver reports "GPU is lost".
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
    pub processes: Vec<Process>,
    /// Why the processes could not be read. The list has no meaning then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// PID on the host (the probe runs with hostPID).
    pub pid: u32,
    /// Memory in MiB that the process uses, 0 if the driver does not report it.
    #[serde(rename = "usedMiB")]
    pub used: MiB,
    /// UID of the process's pod, from its cgroup. `None` for a process of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

/// A bound for input from outside the process. No machine has as many GPUs.
const MAX_GPUS: usize = 256;

impl Snapshot {
    /// Refuse a snapshot that a driver cannot have produced: duplicate or unprintable names, or sizes that could overflow later arithmetic.
    pub fn validate(&self) -> Result<(), Error> {
        let refuse = |text: String| Err(Error::Protocol(format!("a snapshot was refused: {text}")));
        if self.v != 1 {
            return refuse(format!("it has version {}, but only version 1 is supported", self.v));
        }
        if self.gpus.len() + self.unreadable.len() > MAX_GPUS {
            return refuse(format!("it has more than {MAX_GPUS} GPUs"));
        }
        if !is_text(&self.driver, 96) || !is_text(&self.cuda, 96) {
            return refuse("a version is not printable text".to_owned());
        }
        for (i, gpu) in self.gpus.iter().enumerate() {
            if !is_uuid(&gpu.uuid) {
                return refuse(format!("GPU {i} has the malformed UUID {:?}", shorten(&gpu.uuid)));
            }
            if self.gpus[..i].iter().any(|other| other.uuid == gpu.uuid) {
                return refuse(format!("GPU {} appears twice", gpu.uuid));
            }
            if self.gpus[..i].iter().any(|other| other.index == gpu.index) {
                return refuse(format!("two GPUs have the index {}", gpu.index));
            }
            let texts = [&gpu.pci, &gpu.model, &gpu.cc];
            if texts.iter().any(|text| !is_text(text, 96)) || gpu.error.as_ref().is_some_and(|text| !is_text(text, 1024)) {
                return refuse(format!("GPU {} has a field that is not printable text", gpu.uuid));
            }
            if gpu.total.0.max(gpu.used.0) >= 1 << 40 {
                return refuse(format!("GPU {} claims a memory of {}", gpu.uuid, gpu.total));
            }
            if gpu.links.len() > 2 * MAX_GPUS || gpu.links.iter().any(|link| !is_uuid(&link.0) || !is_text(&link.1, 32)) {
                return refuse(format!("GPU {} has malformed links", gpu.uuid));
            }
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
            if gpu.error.as_ref().is_some_and(|text| !is_text(text, 1024)) {
                return refuse(format!("the error of GPU {} is not printable text", gpu.uuid));
            }
            for process in &gpu.processes {
                if process.used.0 >= 1 << 40 {
                    return refuse(format!(
                        "process {} on GPU {} claims to use {}",
                        process.pid, gpu.uuid, process.used
                    ));
                }
                // The UUID check also accepts every valid pod UID.
                if process.pod.as_ref().is_some_and(|uid| !is_uuid(uid)) {
                    return refuse(format!("process {} on GPU {} has a malformed pod UID", process.pid, gpu.uuid));
                }
            }
        }
        Ok(())
    }
}

/// Report whether a UUID may become part of a file name, a device id, or a message.
pub(crate) fn is_uuid(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    (1..=96).contains(&text.len()) && text.chars().all(allowed)
}

fn is_text(text: &str, most: usize) -> bool {
    text.len() <= most && !text.chars().any(char::is_control)
}

fn shorten(text: &str) -> String {
    text.chars().take(64).collect()
}

/// The last known state of each GPU. A lost GPU no longer reports anything, not even its UUID.
#[derive(Debug, Clone, Default)]
pub struct Known {
    by_index: BTreeMap<u32, GpuFacts>,
}

impl Known {
    /// Fill in the values that a GPU no longer reports from its last known state, and remember the values of the others.
    ///
    /// A device without a UUID counts as the GPU that last had its index, unless that GPU has another index now.
    pub fn complete(&mut self, mut snapshot: Snapshot) -> Snapshot {
        for gpu in &mut snapshot.gpus {
            let before = self.by_index.values().find(|known| known.uuid == gpu.uuid);
            if let (Some(_), Some(before)) = (&gpu.error, before) {
                fill_in(gpu, before);
            }
        }
        for device in std::mem::take(&mut snapshot.unreadable) {
            let known = self.by_index.get(&device.index);
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
        snapshot.gpus.sort_by_key(|gpu| gpu.index);
        for gpu in &snapshot.gpus {
            self.by_index
                .retain(|index, known| known.uuid != gpu.uuid || *index == gpu.index);
            self.by_index.insert(gpu.index, gpu.clone());
        }
        snapshot
    }

    /// Return the last known state of the GPU at this index.
    pub fn at(&self, index: u32) -> Option<&GpuFacts> {
        self.by_index.get(&index)
    }

    /// Return the last known state of this GPU.
    pub fn gpu(&self, uuid: &str) -> Option<&GpuFacts> {
        self.by_index.values().find(|known| known.uuid == uuid)
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
    use super::*;

    fn gpu(index: u32, uuid: &str) -> GpuFacts {
        GpuFacts {
            uuid: uuid.to_owned(),
            index,
            minor: index,
            model: "NVIDIA T4".to_owned(),
            total: MiB(15360),
            ..GpuFacts::default()
        }
    }

    fn snapshot(gpus: Vec<GpuFacts>) -> Snapshot {
        Snapshot {
            v: 1,
            driver: "550.54.15".to_owned(),
            cuda: "12.4".to_owned(),
            gpus,
            unreadable: Vec::new(),
        }
    }

    fn lost(index: u32) -> Unreadable {
        let error = "device fell off the bus".to_owned();
        Unreadable {
            index,
            lost: true,
            error,
        }
    }

    #[test]
    fn a_gpu_that_was_seen_before_keeps_its_name_when_it_is_lost() {
        let mut known = Known::default();
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
        let mut known = Known::default();
        known.complete(snapshot(vec![gpu(0, "GPU-a"), gpu(1, "GPU-b")]));
        let mut next = snapshot(vec![gpu(0, "GPU-b")]);
        next.unreadable = vec![lost(1)];
        let seen = known.complete(next);
        assert_eq!(seen.gpus.len(), 1);
        assert_eq!(seen.unreadable, [lost(1)]);
    }

    #[test]
    fn what_cannot_be_read_any_more_is_taken_from_before() {
        let mut known = Known::default();
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
        let cases: [(Edit, &str); 8] = [
            (|s| s.v = 2, "version 2"),
            (|s| s.gpus[1].uuid = "GPU-a".to_owned(), "twice"),
            (|s| s.gpus[1].index = 0, "index 0"),
            (|s| s.gpus[0].uuid = "../../etc".to_owned(), "UUID"),
            (|s| s.gpus[0].model = "a\nb".to_owned(), "printable"),
            (|s| s.gpus[0].total = MiB(u64::MAX), "a memory of 18446744073709551615 MiB"),
            (
                |s| s.gpus[0].links = vec![Link(String::new(), "nvlink".to_owned(), 1)],
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
    fn a_list_of_processes_that_no_driver_gives_is_refused() {
        let gpu = |uuid: &str, used: u64, pod: Option<&str>| GpuProcesses {
            uuid: uuid.to_owned(),
            processes: vec![Process {
                pid: 7,
                used: MiB(used),
                pod: pod.map(str::to_owned),
            }],
            error: None,
        };
        GpuProcesses::validate(&[gpu("GPU-a", 10, None), gpu("GPU-b", 0, Some("0a-1b"))]).expect("ordinary");
        for (name, all) in [
            ("the same GPU twice", vec![gpu("GPU-a", 1, None), gpu("GPU-a", 1, None)]),
            ("a path for a GPU", vec![gpu("../x", 1, None)]),
            ("a path for a pod", vec![gpu("GPU-a", 1, Some("../x"))]),
            ("a pod without a UID", vec![gpu("GPU-a", 1, Some(""))]),
            ("more memory than exists", vec![gpu("GPU-a", u64::MAX, None)]),
            ("too many GPUs", (0..300).map(|i| gpu(&format!("GPU-{i}"), 1, None)).collect()),
        ] {
            let error = GpuProcesses::validate(&all).expect_err(name).to_string();
            assert!(error.contains("a list of processes was refused"), "{name}: {error}");
        }
    }
}
