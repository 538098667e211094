//! Reads Intel GPUs from the files that the kernel module xe provides in `/sys`, and their processes from `/proc`. No library is needed.
//!
//! GPUs without dedicated memory are left out, because they have nothing to share and nothing to count. The module i915 is not read: the kernel cannot
//! limit the memory of its GPUs. Intel's own device plugin serves both.

mod devices;
mod gauges;
mod processes;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_host::{Files, Tree};
use divvy_model::{MiB, Vendor};

use self::devices::IntelDevice;
use crate::backend::{Backend, Cgroup, DriverCalls, DriverEvent, EventSink, report};
use crate::dmem::{self, Regions};
use crate::facts::MAX_GPUS;
use crate::protocol::LimitAnswer;
use crate::sysfs::{SysfsDirectory, bounded};
use crate::{
    Failure, FailureCode, GpuFacts, GpuGauges, GpuProcesses, Snapshot, UnreadableDevice, UtilizationSample, kernel_files,
};

/// The driver for Intel GPUs.
#[derive(Debug)]
pub struct IntelBackend {
    sys_root: PathBuf,
    calls: DriverCalls,
    memory: RememberedFacts,
    events: Option<EventSink>,
}

/// The last facts of each GPU, by its name in `/sys`, for a GPU that cannot be read just now.
type RememberedFacts = BTreeMap<String, GpuFacts>;

type FoundIntelDevice<'t> = crate::kernel_files::Found<IntelDevice<'t>>;

impl IntelBackend {
    /// Open the driver of the machine whose root is mounted at `sys_root`. Fails with [`FailureCode::DriverNotLoaded`] if xe is not loaded.
    pub fn open(sys_root: &Path, calls: &DriverCalls) -> Result<IntelBackend, Failure> {
        let intel = IntelBackend {
            sys_root: sys_root.to_owned(),
            calls: calls.clone(),
            memory: RememberedFacts::default(),
            events: None,
        };
        intel.module(&intel.files())?;
        Ok(intel)
    }

    fn files(&self) -> Files {
        Files::below(&self.sys_root)
    }

    fn module<'t>(&self, tree: &'t dyn Tree) -> Result<SysfsDirectory<'t>, Failure> {
        devices::MODULE.open(tree, &self.sys_root, &self.calls)
    }
}

impl Backend for IntelBackend {
    fn snapshot(&mut self) -> Result<Snapshot, Failure> {
        let files = self.files();
        let module = self.module(&files)?;
        let found = find(&files, &self.calls, &self.memory);
        report(self.events.as_ref(), Vendor::Intel, &files);
        kernel_files::remember(&mut self.memory, &found, |device| &device.name);
        Ok(kernel_files::assemble(Vendor::Intel, &module, found))
    }

    fn processes(&mut self) -> Result<Vec<GpuProcesses>, Failure> {
        let files = self.files();
        self.module(&files)?;
        let found = find(&files, &self.calls, &self.memory);
        let (lists, is_cut_off) = {
            let _call = self.calls.enter("reading the processes of Intel GPUs");
            lists(&files, &found)
        };
        report(self.events.as_ref(), Vendor::Intel, &files);
        if let (Some(events), true) = (&self.events, is_cut_off) {
            // An error means that the backend is being dropped.
            events.send(DriverEvent::Degraded(
                "the processes of Intel GPUs are not all listed, because processes of this machine have too many open files"
                    .to_owned(),
            ));
        }
        Ok(lists)
    }

    fn gauges(&mut self) -> Result<Vec<GpuGauges>, Failure> {
        let files = self.files();
        self.module(&files)?;
        let found = find(&files, &self.calls, &self.memory);
        Ok(kernel_files::measured(
            &self.calls,
            &found,
            |device| &device.name,
            gauges::read,
        ))
    }

    fn utilization(&mut self, _: &str, _: u64) -> Result<Vec<UtilizationSample>, Failure> {
        Err(Failure::new(
            FailureCode::NotSupported,
            "Divvy does not measure the compute time of Intel GPUs",
        ))
    }

    fn limit(&mut self, uuid: &str, cgroup: &Cgroup, hard: MiB) -> Result<LimitAnswer, Failure> {
        let files = self.files();
        self.module(&files)?;
        let found = find(&files, &self.calls, &self.memory);
        let Some((device, _)) = kernel_files::gpus(&found).find(|(_, gpu)| gpu.uuid == uuid) else {
            return Err(Failure::new(
                FailureCode::GpuLost,
                format!("there is no GPU {uuid} any longer"),
            ));
        };
        let _call = self.calls.enter(format!("limiting the memory of GPU {uuid} for a pod"));
        match device.vram.regions.as_slice() {
            [region] => dmem::limit(&files, uuid, region, cgroup, hard),
            [] => dmem::limit(&files, uuid, &format!("drm/{}/vram0", device.name), cgroup, hard),
            regions => {
                let why = format!(
                    "the kernel limits each of its {} tiles separately, so it cannot limit a share of the whole GPU",
                    regions.len()
                );
                Err(dmem::refusal(uuid, cgroup, &why))
            }
        }
    }

    fn events(&mut self, sink: EventSink) {
        self.events = Some(sink);
    }

    fn keeps_lost(&self) -> bool {
        // Each snapshot reads the files again.
        false
    }
}

/// Read the GPUs of the machine whose files are `tree`, without remembered facts of an earlier read. Return `None` if xe is not
/// loaded there.
pub fn snapshot(tree: &dyn Tree) -> Option<Snapshot> {
    let module = SysfsDirectory::open(tree, devices::MODULE.path)?;
    // Nothing watches these calls: a value does not hang.
    let calls = DriverCalls::new(Duration::MAX);
    Some(kernel_files::assemble(
        Vendor::Intel,
        &module,
        find(tree, &calls, &RememberedFacts::default()),
    ))
}

/// Read the processes on the GPUs of the machine whose files are `tree`.
pub fn processes(tree: &dyn Tree) -> Vec<GpuProcesses> {
    lists(
        tree,
        &find(tree, &DriverCalls::new(Duration::MAX), &RememberedFacts::default()),
    )
    .0
}

/// Read the processes of each GPU, and whether the machine has more processes or open files than are looked at.
fn lists(tree: &dyn Tree, found: &[FoundIntelDevice<'_>]) -> (Vec<GpuProcesses>, bool) {
    let gpus: Vec<_> = kernel_files::gpus(found).collect();
    if gpus.is_empty() {
        return (Vec::new(), false);
    }
    let used = processes::used(tree);
    let lists = gpus.into_iter().map(|(device, facts)| {
        let processes = used.by_gpu.get(&device.name).into_iter().flatten();
        GpuProcesses {
            uuid: facts.uuid.clone(),
            processes: kernel_files::processes(processes),
            error: facts.error.clone().filter(|_| facts.lost).or_else(|| used.error.clone()),
        }
    });
    (lists.collect(), used.is_cut_off)
}

/// Read all GPUs that have dedicated memory.
fn find<'t>(tree: &'t dyn Tree, calls: &DriverCalls, memory: &RememberedFacts) -> Vec<FoundIntelDevice<'t>> {
    let regions = {
        let _call = calls.enter("reading the kernel's regions of GPU memory");
        Regions::read(tree)
    };
    let mut found: Vec<FoundIntelDevice<'t>> = Vec::new();
    for device in devices::devices(tree, calls, &regions) {
        // No machine has so many GPUs that this fails.
        let index = u32::try_from(found.len()).unwrap_or(u32::MAX);
        let before = memory.get(&device.name);
        let named = device
            .id
            .map(|id| format!("{}-{id:#06x}", device.name.replace([':', '.'], "-")));
        // A device whose id cannot be read just now is the one that it was before.
        let uuid = named.or_else(|| Some(before?.uuid.clone()));
        let before = before.filter(|before| Some(&before.uuid) == uuid.as_ref());
        let error = |text: &str| format!("{}: {text}", device.name);
        let facts = match (uuid, &device.trouble, before) {
            (Some(uuid), None, before) => {
                if device.has_memory() || before.is_some() {
                    Ok(read(&device, index, uuid, before))
                } else {
                    continue;
                }
            }
            (Some(uuid), Some(trouble), Some(before)) => Ok(GpuFacts {
                uuid,
                index,
                used: MiB::ZERO,
                lost: device.lost,
                error: Some(error(trouble)),
                ..before.clone()
            }),
            (_, trouble, _) => Err(UnreadableDevice {
                vendor: Vendor::Intel,
                index,
                lost: false,
                error: error(trouble.as_deref().unwrap_or("its PCI device id cannot be read")),
            }),
        };
        found.push(FoundIntelDevice { device, facts });
    }
    found.truncate(MAX_GPUS);
    found
}

/// Read the facts of a device that has a render node.
fn read(device: &IntelDevice<'_>, index: u32, uuid: String, before: Option<&GpuFacts>) -> GpuFacts {
    let cards = device.card.map(|minor| format!("dri/card{minor}"));
    let renders = device.render.map(|minor| format!("dri/renderD{minor}"));
    let mut facts = GpuFacts {
        vendor: Vendor::Intel,
        uuid,
        index,
        nodes: cards.into_iter().chain(renders).collect(),
        pci: device.name.clone(),
        // No file has the product's name.
        model: match (device.id, before) {
            (Some(id), _) => format!("Intel GPU {id:#06x}"),
            (None, before) => before.map(|before| before.model.clone()).unwrap_or_default(),
        },
        // −1 is none.
        numa: device.function.number("/numa_node"),
        used: device.vram.used.and_then(bounded).unwrap_or(MiB::ZERO),
        memory_limit: device.vram.regions.len() == 1,
        ..GpuFacts::default()
    };
    match device.total().and_then(bounded).filter(|total| *total > MiB::ZERO) {
        Some(total) => facts.total = total,
        None => {
            facts.total = before.map(|before| before.total).unwrap_or_default();
            facts.error = Some("memory: neither dmem.capacity nor physical_vram_size_bytes say its size".to_owned());
        }
    }
    if device.card.is_none() {
        facts
            .error
            .get_or_insert_with(|| "it has no card node in /sys, which containers need; reload xe or reboot".to_owned());
    }
    facts
}

#[cfg(test)]
mod tests;
