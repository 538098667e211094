//! Reads AMD GPUs from the files that the kernel module amdgpu provides in `/sys`. No library is needed.
//!
//! If a GPU is divided into partitions, each partition counts as a GPU, because it has device nodes and memory of its own. The
//! first partition is the PCI function, the others are platform devices.

mod devices;
mod gauges;
mod kfd;
mod links;
mod ras;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_host::{Files, Tree};
use divvy_model::{MiB, Partition, Vendor};

use self::devices::AmdDevice;
use self::kfd::KfdNode;
use self::links::Links;
use self::ras::Counters;
use crate::address::PciAddress;
use crate::backend::{Backend, Cgroup, DriverCalls, DriverEvent, EventSink, report};
use crate::protocol::LimitAnswer;
use crate::sysfs::{self, SysfsDirectory, bounded, natural, pod_of, printable};
use crate::{
    Failure, FailureCode, Fault, GpuFacts, GpuGauges, GpuProcesses, Snapshot, UnreadableDevice, UtilizationSample, dmem,
    kernel_files,
};

/// The processes that use KFD, by PID. Each process has a file `vram_GPU` for each GPU, where `GPU` is the GPU's number in KFD.
const PROCESSES: &str = "/sys/class/kfd/kfd/proc";
/// The maximum number of processes that are listed, and the maximum whose memory is read.
const MOST_LISTED: usize = 1 << 16;
const MOST_READ: usize = 1 << 12;

/// The name of the fault that the RAS counters report.
const MEMORY_ERROR: &str = "uncorrectable memory error";

/// The driver for AMD GPUs.
#[derive(Debug)]
pub struct AmdBackend {
    sys_root: PathBuf,
    calls: DriverCalls,
    memory: RememberedDevices,
    counters: Counters,
    links: Links,
    events: Option<EventSink>,
}

/// What is remembered of each device, by its name in `/sys`.
#[derive(Debug, Default)]
struct RememberedDevices {
    /// The unique id from which the UUID was made, if the device had one, and the UUID. A device keeps its UUID while its unique
    /// id stays the same, whatever happens to the other devices.
    names: BTreeMap<String, (Option<u64>, String)>,
    /// The last facts, used for a GPU that KFD no longer lists.
    facts: BTreeMap<String, GpuFacts>,
}

type FoundAmdDevice<'t> = crate::kernel_files::Found<AmdDevice<'t>>;

impl AmdBackend {
    /// Open the driver of the machine whose root is mounted at `sys_root`. Fails with [`FailureCode::DriverNotLoaded`] if amdgpu is not loaded.
    pub fn open(sys_root: &Path, calls: &DriverCalls) -> Result<AmdBackend, Failure> {
        let amd = AmdBackend {
            sys_root: sys_root.to_owned(),
            calls: calls.clone(),
            memory: RememberedDevices::default(),
            counters: Counters::default(),
            links: Links::default(),
            events: None,
        };
        amd.module(&amd.files())?;
        Ok(amd)
    }

    fn files(&self) -> Files {
        Files::below(&self.sys_root)
    }

    fn module<'t>(&self, tree: &'t dyn Tree) -> Result<SysfsDirectory<'t>, Failure> {
        devices::MODULE.open(tree, &self.sys_root, &self.calls)
    }

    /// Send a fault for each GPU whose error counters have risen. All partitions of a GPU share its counters.
    fn judge(&mut self, found: &[FoundAmdDevice<'_>]) {
        for card in found.iter().filter(|found| found.device.place.1.is_none()) {
            let Some(function) = &card.device.function else { continue };
            let count = {
                let _call = self
                    .calls
                    .enter(format!("reading the error counters of GPU {}", card.device.name));
                self.counters.read(&card.device.name, function)
            };
            let (Some(count), Some(events)) = (count, &self.events) else {
                continue;
            };
            let of_card = found.iter().filter(|other| other.device.place.0 == card.device.place.0);
            for gpu in of_card.filter_map(|found| found.facts.as_ref().ok()) {
                // An error means that the backend is being dropped.
                events.send(DriverEvent::Fault(Fault {
                    vendor: Vendor::Amd,
                    uuid: Some(gpu.uuid.clone()),
                    code: count,
                    fatal: true,
                    name: MEMORY_ERROR.to_owned(),
                    partition: None,
                }));
            }
        }
    }
}

impl Backend for AmdBackend {
    fn snapshot(&mut self) -> Result<Snapshot, Failure> {
        let files = self.files();
        let module = self.module(&files)?;
        let mut found = find(&files, &self.calls, &mut self.memory);
        self.links.connect(&files, &self.calls, &mut found);
        self.judge(&found);
        report(self.events.as_ref(), Vendor::Amd, &files);
        kernel_files::remember(&mut self.memory.facts, &found, |device| &device.name);
        let mut snapshot = kernel_files::assemble(Vendor::Amd, &module, found);
        for gpu in &mut snapshot.gpus {
            // The kernel has a region for each GPU, and none for a partition of it.
            gpu.memory_limit = gpu.partition.is_none() && dmem::can_limit(&files, &region(&gpu.pci));
        }
        Ok(snapshot)
    }

    fn processes(&mut self) -> Result<Vec<GpuProcesses>, Failure> {
        let files = self.files();
        self.module(&files)?;
        let found = find(&files, &self.calls, &mut self.memory);
        let used = {
            let _call = self.calls.enter("reading the processes of AMD GPUs");
            used(&files, MOST_READ)
        };
        let lists = kernel_files::gpus(&found).map(|(device, facts)| {
            let gpu_id = device.node.as_ref().and_then(|node| node.gpu_id);
            let processes = gpu_id.and_then(|gpu_id| used.get(&gpu_id));
            GpuProcesses {
                uuid: facts.uuid.clone(),
                processes: kernel_files::processes(processes.into_iter().flatten()),
                error: match (gpu_id, &facts.error) {
                    (Some(_), _) => None,
                    (None, Some(error)) => Some(error.clone()),
                    (None, None) => Some("KFD does not say the GPU's number (gpu_id)".to_owned()),
                },
            }
        });
        Ok(lists.collect())
    }

    fn gauges(&mut self) -> Result<Vec<GpuGauges>, Failure> {
        let files = self.files();
        self.module(&files)?;
        let found = find(&files, &self.calls, &mut self.memory);
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
            "Divvy does not measure the compute time of AMD GPUs",
        ))
    }

    fn limit(&mut self, uuid: &str, cgroup: &Cgroup, hard: MiB) -> Result<LimitAnswer, Failure> {
        let files = self.files();
        self.module(&files)?;
        let found = find(&files, &self.calls, &mut self.memory);
        let Some((_, gpu)) = kernel_files::gpus(&found).find(|(_, gpu)| gpu.uuid == uuid) else {
            return Err(Failure::new(
                FailureCode::GpuLost,
                format!("there is no GPU {uuid} any longer"),
            ));
        };
        let _call = self.calls.enter(format!("limiting the memory of GPU {uuid} for a pod"));
        if gpu.partition.is_some() {
            return Err(dmem::refusal(uuid, cgroup, "it is a partition of a GPU"));
        }
        dmem::limit(&files, uuid, &region(&gpu.pci), cgroup, hard)
    }

    fn events(&mut self, sink: EventSink) {
        self.events = Some(sink);
    }

    fn keeps_lost(&self) -> bool {
        // Each snapshot reads the files again.
        false
    }
}

/// Return the kernel's region for the memory of the GPU at this PCI address. What a process has in the system's memory (GTT) belongs to no region, and
/// pools of memory (`hipMallocAsync`) can grow into it.
fn region(pci: &str) -> String {
    format!("drm/{pci}/vram")
}

/// Report whether a text is the name of a fault of AMD GPUs.
pub(crate) fn is_fault_name(text: &str) -> bool {
    text == MEMORY_ERROR
}

/// Read the GPUs of the machine whose files are `tree`, without remembered facts of an earlier read. Return `None` if amdgpu is
/// not loaded there.
pub fn snapshot(tree: &dyn Tree) -> Option<Snapshot> {
    let module = SysfsDirectory::open(tree, devices::MODULE.path)?;
    // Nothing watches these calls: a value does not hang.
    let calls = DriverCalls::new(Duration::MAX);
    let mut found = find(tree, &calls, &mut RememberedDevices::default());
    Links::default().connect(tree, &calls, &mut found);
    Some(kernel_files::assemble(Vendor::Amd, &module, found))
}

/// Read all GPUs.
fn find<'t>(tree: &'t dyn Tree, calls: &DriverCalls, memory: &mut RememberedDevices) -> Vec<FoundAmdDevice<'t>> {
    let devices = devices::devices(tree, calls);
    name(&devices, &mut memory.names);
    let mut taken = BTreeSet::new();
    let numbered = (0..).zip(devices);
    let found = numbered.map(|(index, device)| {
        let unreadable = |error: String| UnreadableDevice {
            vendor: Vendor::Amd,
            index,
            lost: false,
            error,
        };
        let uuid = memory.names.get(&device.name).map(|(_, uuid)| uuid.clone());
        let facts = match (uuid, memory.facts.get(&device.name)) {
            (None, _) => Err(unreadable(trouble(&device))),
            (Some(uuid), _) if !taken.insert(uuid.clone()) => Err(unreadable(format!(
                "another GPU has the same identity {uuid}; reload amdgpu or reboot"
            ))),
            (Some(uuid), before) => Ok(match &device.node {
                Some(node) => {
                    let _call = calls.enter(format!("reading GPU {}", device.name));
                    read(&device, node, index, uuid)
                }
                None => GpuFacts {
                    vendor: Vendor::Amd,
                    uuid,
                    index,
                    used: MiB::ZERO,
                    lost: device.lost,
                    error: Some(trouble(&device)),
                    ..before.cloned().unwrap_or_default()
                },
            }),
        };
        FoundAmdDevice { device, facts }
    });
    found.collect()
}

fn trouble(device: &AmdDevice<'_>) -> String {
    let reason = device.trouble.as_deref().unwrap_or("KFD says nothing about it");
    format!("{}: {reason}", device.name)
}

/// Give a UUID to each device that KFD lists. The UUID consists of the card's unique id, or the PCI address if the card has no
/// unique id of its own, and the partition's number.
fn name(devices: &[AmdDevice<'_>], names: &mut BTreeMap<String, (Option<u64>, String)>) {
    let unique_id = |device: &AmdDevice<'_>| device.node.as_ref()?.unique_id.filter(|id| *id > 0);
    let mut cards: BTreeMap<u64, BTreeSet<PciAddress>> = BTreeMap::new();
    for device in devices {
        if let Some(id) = unique_id(device) {
            cards.entry(id).or_default().insert(device.place.0);
        }
    }
    for device in devices.iter().filter(|device| device.node.is_some()) {
        let id = unique_id(device);
        // A device whose id cannot be read just now is the one that it was before.
        if names
            .get(&device.name)
            .is_some_and(|(before, _)| id.is_none() || *before == id)
        {
            continue;
        }
        // An id that two cards claim names neither of them.
        let own = id.filter(|id| cards.get(id).is_some_and(|cards| cards.len() == 1));
        let card = match own {
            Some(id) => format!("0x{id:016x}"),
            None => format!("pci-{}", device.place.0.to_string().replace([':', '.'], "-")),
        };
        let uuid = match device.place.1 {
            Some(number) => format!("{card}-xcp-{number}"),
            None => card,
        };
        names.insert(device.name.clone(), (id, uuid));
    }
}

/// Return the GPU to which a partition belongs, and the partition's profile. The profile has the name that AMD's plugin gives to
/// its resource, such as `cpx_nps4`.
fn partition(device: &AmdDevice<'_>) -> Partition {
    let mode = |file: &str| {
        let text = device.function.as_ref()?.text(file)?;
        let is_word = !text.is_empty() && text.len() <= 16 && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
        is_word.then(|| text.to_lowercase())
    };
    let (compute, memory) = (mode("/current_compute_partition"), mode("/current_memory_partition"));
    Partition {
        parent: device.place.0.to_string(),
        profile: [compute, memory].into_iter().flatten().collect::<Vec<_>>().join("_"),
    }
}

/// Read the facts of a device.
fn read(device: &AmdDevice<'_>, node: &KfdNode, index: u32, uuid: String) -> GpuFacts {
    let function = device.function.as_ref();
    let cards = device.card.map(|minor| format!("dri/card{minor}"));
    let renders = device.render.map(|minor| format!("dri/renderD{minor}"));
    let mut facts = GpuFacts {
        vendor: Vendor::Amd,
        uuid,
        index,
        nodes: cards.into_iter().chain(renders).collect(),
        partition: device.divided.then(|| partition(device)),
        pci: device.place.0.to_string(),
        cc: node.gfx.map(kfd::architecture).unwrap_or_default(),
        sms: node.units.unwrap_or_default(),
        clock_mhz: node.clock_mhz.unwrap_or_default(),
        // −1 is none.
        numa: function.and_then(|function| function.number("/numa_node")),
        ..GpuFacts::default()
    };
    let product = function
        .and_then(|function| function.text("/product_name"))
        .map(|text| printable(&text));
    facts.model = product.filter(|name| !name.is_empty()).unwrap_or_else(|| {
        let device_id = node.device_id.map(|id| format!("{id:04x}")).unwrap_or_default();
        let parts = ["AMD", &facts.cc, &device_id];
        parts
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join(" ")
    });
    // The PCI function's files are about the whole card.
    let whole = function.filter(|_| !device.divided);
    let of_card = |file| whole.and_then(|function| function.number::<u64>(file));
    let total = of_card("/mem_info_vram_total").filter(|bytes| *bytes > 0).or(node.memory);
    match total.and_then(bounded).filter(|total| *total > MiB::ZERO) {
        Some(total) => facts.total = total,
        None => facts.error = Some("memory: neither mem_info_vram_total nor KFD's memory banks say its size".to_owned()),
    }
    // Nothing says what a partition uses.
    match of_card("/mem_info_vram_used").and_then(bounded) {
        Some(used) => facts.used = used,
        None if whole.is_some() => {
            facts
                .error
                .get_or_insert_with(|| "memory: mem_info_vram_used does not say how much is in use".to_owned());
        }
        None => {}
    }
    if function.is_none() {
        let error = format!("the GPU {} that it is a part of is not bound to amdgpu", device.place.0);
        facts.error.get_or_insert(error);
    }
    if device.card.is_none() {
        facts
            .error
            .get_or_insert_with(|| "it has no card node in /sys, which containers need; reload amdgpu or reboot".to_owned());
    }
    facts
}

/// Return the bytes that each of at most `most` processes uses on each GPU, by the GPU's number in KFD, then by PID.
fn used(tree: &dyn Tree, most: usize) -> BTreeMap<u32, BTreeMap<u32, u64>> {
    let mut used: BTreeMap<u32, BTreeMap<u32, u64>> = BTreeMap::new();
    let Some(processes) = SysfsDirectory::open(tree, PROCESSES) else {
        return used;
    };
    let names = processes.first_names(MOST_LISTED);
    let mut pids: Vec<u32> = names.iter().filter_map(|name| natural(name)).collect();
    pids.sort_unstable();
    let machine = SysfsDirectory::open(tree, sysfs::PROCESSES);
    let mut of_pods: BTreeMap<Option<String>, u32> = BTreeMap::new();
    let mut by_turn: Vec<(u32, u32)> = Vec::new();
    for pid in pids {
        let pod = machine.as_ref().and_then(|machine| pod_of(machine, pid));
        let before = of_pods.entry(pod).or_default();
        by_turn.push((*before, pid));
        *before += 1;
    }
    // The pods take turns, so that no pod's processes use up what is read in all.
    by_turn.sort_unstable();
    for (_, pid) in by_turn.into_iter().take(most) {
        // A process has a file for each GPU of the machine, and uses few of them. The process may have ended by now.
        for gpu in processes.numbered(&format!("/{pid}"), "vram_") {
            if let Some(bytes @ 1..) = processes.number(&format!("/{pid}/vram_{gpu}")) {
                used.entry(gpu).or_default().insert(pid, bytes);
            }
        }
    }
    used
}

#[cfg(test)]
mod tests;
