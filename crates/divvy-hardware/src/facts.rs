//! What is known about a machine's GPUs at one moment.

use std::collections::BTreeMap;

use divvy_model::{Link, MiB, MigDevice};
use serde::{Deserialize, Serialize};

use crate::Error;

/// Everything that a driver says about its GPUs, read at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// Format version, 1.
    pub v: u32,
    /// Driver version, `550.54.15`.
    pub driver: String,
    /// CUDA version that the driver supports, `12.4`; empty if unknown.
    #[serde(default)]
    pub cuda: String,
    /// The GPUs whose UUID is known, by index.
    pub gpus: Vec<GpuFacts>,
    /// Devices that do not even tell their UUID and were not seen before. A GPU that the reader knows and that
    /// is not among `gpus` may be one of these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<Unreadable>,
}

/// One GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuFacts {
    /// NVML's UUID, `GPU-…`.
    pub uuid: String,
    /// NVML index: position in PCI order.
    pub index: u32,
    /// Minor number: `/dev/nvidia<minor>`.
    pub minor: u32,
    /// PCI bus id, `0000:81:00.0`.
    #[serde(default)]
    pub pci: String,
    /// Product name.
    #[serde(default)]
    pub model: String,
    /// What it is sold as, in the words of `NVIDIA_REQUIRE_*`: `tesla`, `geforcertx`; none if the driver does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub brand: Option<String>,
    /// CUDA compute capability, `8.0`; empty if unknown.
    #[serde(default)]
    pub cc: String,
    /// Streaming multiprocessors; 0 if unknown.
    #[serde(default)]
    pub sms: u32,
    /// Highest SM clock in MHz; 0 if unknown.
    #[serde(default, rename = "clockMHz")]
    pub clock_mhz: u32,
    /// Memory bandwidth in GB/s (10⁹ bytes); 0 if unknown.
    #[serde(default, rename = "bandwidthGBs", skip_serializing_if = "is_zero")]
    pub bandwidth_gbs: u32,
    /// Memory in all.
    #[serde(rename = "totalMiB")]
    pub total: MiB,
    /// Memory in use by all processes.
    #[serde(default, rename = "usedMiB")]
    pub used: MiB,
    /// NUMA node, if the platform says.
    #[serde(default)]
    pub numa: Option<u32>,
    /// In °C.
    #[serde(default)]
    pub temperature: Option<u32>,
    /// Share of the last sample period in which a kernel ran, in percent.
    #[serde(default)]
    pub utilization: Option<u32>,
    /// Connections to the other GPUs: NVLinks and the nearest common ancestor on the PCI bus, by the other's index.
    #[serde(default)]
    pub links: Vec<Link>,
    /// `default`, `exclusive-process`, `exclusive-thread` or `prohibited`, if the driver says; as it was when the probe first read the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<String>,
    /// Whether the driver stays initialised without clients, if it says; read once, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistence: Option<bool>,
    /// Whether MIG is on, and whether it will be after a reset; none where there is no MIG.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<(bool, bool)>,
    /// The MIG devices into which it is divided, in NVML's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_devices: Vec<MigDevice>,
    /// The driver answers "GPU is lost"; what else is here is from before.
    #[serde(default)]
    pub lost: bool,
    /// Why something could not be read.
    #[serde(default)]
    pub error: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// A device without a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unreadable {
    /// NVML index.
    pub index: u32,
    /// The driver answers "GPU is lost".
    pub lost: bool,
    /// What the driver answers.
    pub error: String,
}

/// The processes on one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcesses {
    /// Of this GPU.
    pub uuid: String,
    /// By process number; those that compute and those that draw.
    pub processes: Vec<Process>,
    /// Why they could not be read; then the list says nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Process number, of the host (the probe runs with hostPID).
    pub pid: u32,
    /// Memory used; 0 if the driver does not say.
    #[serde(rename = "usedMiB")]
    pub used: MiB,
    /// UID of the pod that it belongs to, by its cgroup; `None` for a process of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

/// More GPUs than any machine has; a bound for outside input.
const MAX_GPUS: usize = 256;

impl Snapshot {
    /// Refuses what no driver says: duplicate or unprintable names, and sizes that arithmetic would have to fear.
    pub fn validate(&self) -> Result<(), Error> {
        let refuse = |text: String| Err(Error::Protocol(format!("a snapshot was refused: {text}")));
        if self.v != 1 {
            return refuse(format!("it has version {}, and 1 is understood", self.v));
        }
        if self.gpus.len() + self.unreadable.len() > MAX_GPUS {
            return refuse(format!("it has more than {MAX_GPUS} GPUs"));
        }
        if !is_text(&self.driver, 96) || !is_text(&self.cuda, 96) {
            return refuse("a version is not printable text".to_owned());
        }
        for (i, gpu) in self.gpus.iter().enumerate() {
            if !is_uuid(&gpu.uuid) {
                return refuse(format!("GPU {i} has the UUID {:?}", shorten(&gpu.uuid)));
            }
            if self.gpus[..i].iter().any(|other| other.uuid == gpu.uuid) {
                return refuse(format!("GPU {} is there twice", gpu.uuid));
            }
            if self.gpus[..i].iter().any(|other| other.index == gpu.index) {
                return refuse(format!("two GPUs have the index {}", gpu.index));
            }
            let texts = [&gpu.pci, &gpu.model, &gpu.cc];
            if texts.iter().any(|text| !is_text(text, 96)) || gpu.error.as_ref().is_some_and(|text| !is_text(text, 1024)) {
                return refuse(format!("GPU {} has a field that is not printable text", gpu.uuid));
            }
            if gpu.total.0.max(gpu.used.0) >= 1 << 40 {
                return refuse(format!("GPU {} has {}", gpu.uuid, gpu.total));
            }
            if gpu.links.len() > 2 * MAX_GPUS || gpu.links.iter().any(|link| !is_uuid(&link.0) || !is_text(&link.1, 32)) {
                return refuse(format!("GPU {} has links that make no sense", gpu.uuid));
            }
        }
        Ok(())
    }
}

impl GpuProcesses {
    /// Refuses lists that no driver gives: processes of GPUs without a proper name, sizes that arithmetic would have to fear.
    pub fn validate(all: &[GpuProcesses]) -> Result<(), Error> {
        let refuse = |text: String| Err(Error::Protocol(format!("a list of processes was refused: {text}")));
        if all.len() > MAX_GPUS {
            return refuse(format!("it has more than {MAX_GPUS} GPUs"));
        }
        for (i, gpu) in all.iter().enumerate() {
            if !is_uuid(&gpu.uuid) || all[..i].iter().any(|other| other.uuid == gpu.uuid) {
                return refuse(format!("GPU {i} has the UUID {:?}, or has it twice", shorten(&gpu.uuid)));
            }
            if gpu.error.as_ref().is_some_and(|text| !is_text(text, 1024)) {
                return refuse(format!("the error of GPU {} is not printable text", gpu.uuid));
            }
            for process in &gpu.processes {
                if process.used.0 >= 1 << 40 {
                    return refuse(format!("process {} on GPU {} uses {}", process.pid, gpu.uuid, process.used));
                }
                // The rule of names of UUIDs is wider than that of pods' UIDs.
                if process.pod.as_ref().is_some_and(|uid| !is_uuid(uid)) {
                    return refuse(format!(
                        "process {} on GPU {} belongs to a pod without a proper UID",
                        process.pid, gpu.uuid
                    ));
                }
            }
        }
        Ok(())
    }
}

/// A name that may become part of a file name, a device id or a message.
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

/// What was seen of each GPU before: a lost GPU tells nothing any more, not even its UUID.
#[derive(Debug, Clone, Default)]
pub struct Known {
    by_index: BTreeMap<u32, GpuFacts>,
}

impl Known {
    /// Fills in what a GPU does not tell any more, and learns what the others tell.
    ///
    /// A nameless device is taken for the GPU that last had its index, unless that GPU is elsewhere now.
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

    /// What was last seen at this index.
    pub fn at(&self, index: u32) -> Option<&GpuFacts> {
        self.by_index.get(&index)
    }

    /// What was last seen of this GPU.
    pub fn gpu(&self, uuid: &str) -> Option<&GpuFacts> {
        self.by_index.values().find(|known| known.uuid == uuid)
    }
}

/// Takes what does not change from before where it is missing now.
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
            (|s| s.gpus[0].total = MiB(u64::MAX), "has 18446744073709551615 MiB"),
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
            ("a GPU twice", vec![gpu("GPU-a", 1, None), gpu("GPU-a", 1, None)]),
            ("a path for a GPU", vec![gpu("../x", 1, None)]),
            ("a path for a pod", vec![gpu("GPU-a", 1, Some("../x"))]),
            ("a pod without a UID", vec![gpu("GPU-a", 1, Some(""))]),
            ("more memory than there is", vec![gpu("GPU-a", u64::MAX, None)]),
            ("too many GPUs", (0..300).map(|i| gpu(&format!("GPU-{i}"), 1, None)).collect()),
        ] {
            let error = GpuProcesses::validate(&all).expect_err(name).to_string();
            assert!(error.contains("a list of processes was refused"), "{name}: {error}");
        }
    }
}
