//! The processes that use memory of GPUs (kernel documentation, `gpu/drm-usage-stats.rst`): of each open DRM node, the kernel says in
//! `/proc/<pid>/fdinfo/<fd>` how much memory of the GPU the node's client has.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use divvy_host::Tree;

use crate::sysfs::{PROCESSES, SysfsDirectory, natural, pod_of};

/// The driver's name in a client's file.
const DRIVER: &str = "xe";
/// The directory of the nodes.
const NODES: &str = "/dev/dri/";

/// The maximum number of processes that are looked at.
const MOST_PROCESSES: usize = 1 << 16;
/// The maximum number of open files of a process that are looked at, and the maximum in all. To look at one takes some microseconds.
const MOST_FILES_OF_PROCESS: usize = 1 << 13;
const MOST_FILES: usize = 1 << 18;
/// The maximum number of clients of a process that are read, and the maximum in all.
const MOST_CLIENTS_OF_PROCESS: usize = 1 << 8;
const MOST_CLIENTS: usize = 1 << 13;
/// How many open files of a pod are looked at before it is another pod's turn, and how many files a client counts as.
const TURN: usize = 1 << 10;
const FILES_PER_CLIENT: usize = MOST_FILES / MOST_CLIENTS;

/// What processes use.
#[derive(Debug, Default)]
pub(super) struct UsedByProcesses {
    /// The bytes that each process uses, by the GPU's PCI address, then by PID.
    pub(super) by_gpu: BTreeMap<String, BTreeMap<u32, u64>>,
    /// Whether the machine has more processes or open files than are looked at.
    pub(super) is_cut_off: bool,
    /// Why nothing is known.
    pub(super) error: Option<String>,
}

/// Return what each process uses of each GPU. A process that ends meanwhile is left out.
pub(super) fn used(tree: &dyn Tree) -> UsedByProcesses {
    used_within(tree, MOST_FILES, MOST_CLIENTS)
}

/// The same with other limits for the open files that are looked at, and for the clients that are read.
pub(super) fn used_within(tree: &dyn Tree, most_files: usize, most_clients: usize) -> UsedByProcesses {
    let mut used = UsedByProcesses::default();
    let Some(machine) = SysfsDirectory::open(tree, PROCESSES) else {
        used.error = Some("there is no /proc, so the processes are not known".to_owned());
        return used;
    };
    let names = machine.first_names(MOST_PROCESSES + 1);
    used.is_cut_off = names.len() > MOST_PROCESSES;
    let mut pids: Vec<u32> = names.iter().filter_map(|name| natural(name)).collect();
    // A client that a process has inherited belongs to the parent, whose PID is lower as a rule.
    pids.sort_unstable();
    let mut pods: BTreeMap<Option<String>, VecDeque<u32>> = BTreeMap::new();
    for pid in pids {
        pods.entry(pod_of(&machine, pid)).or_default().push_back(pid);
    }
    // It is always the turn of the pod of which the least was looked at. So what a pod has open is known whatever other pods open, up to an equal part of
    // what is looked at in all. The processes of no pod count as one.
    let mut turns: BinaryHeap<_> = (0..pods.len()).map(|index| Reverse((0, index))).collect();
    let mut pods: Vec<PodScan> = pods.into_values().map(PodScan::new).collect();
    let mut walk = Walk {
        machine,
        most_files,
        most_clients,
        files: 0,
        clients: 0,
        seen: BTreeSet::new(),
    };
    while let Some(Reverse((cost, index))) = turns.pop() {
        if walk.is_over() {
            used.is_cut_off = true;
            break;
        }
        if let Some(more) = walk.turn(&mut pods[index], &mut used.by_gpu) {
            turns.push(Reverse((cost + more, index)));
        }
    }
    used
}

/// What is still to be looked at of a pod's processes.
struct PodScan {
    pids: VecDeque<u32>,
    /// What was looked at of the first process: open files and clients.
    files: usize,
    clients: usize,
}

impl PodScan {
    fn new(pids: VecDeque<u32>) -> PodScan {
        PodScan {
            pids,
            files: 0,
            clients: 0,
        }
    }
}

struct Walk<'t> {
    machine: SysfsDirectory<'t>,
    most_files: usize,
    most_clients: usize,
    files: usize,
    clients: usize,
    /// The clients that were read, by GPU.
    seen: BTreeSet<(String, u64)>,
}

impl Walk<'_> {
    fn is_over(&self) -> bool {
        self.files > self.most_files || self.clients >= self.most_clients
    }

    /// Look at the next open files of a pod's processes. Return how many they count as, or `None` if there are no more.
    fn turn(&mut self, pod: &mut PodScan, by_gpu: &mut BTreeMap<String, BTreeMap<u32, u64>>) -> Option<usize> {
        let mut cost = 0;
        while cost < TURN {
            let pid = *pod.pids.front()?;
            // To open a directory takes as long as to look at a file.
            cost += 1;
            let open = self.machine.below(&format!("/{pid}/fd"));
            let until = MOST_FILES_OF_PROCESS.min(pod.files + TURN);
            let names = open.as_ref().map(|open| open.first_names(until)).unwrap_or_default();
            let has_more = names.len() == until && until < MOST_FILES_OF_PROCESS;
            for file in names.iter().skip(pod.files) {
                self.files += 1;
                cost += 1;
                // Most processes have no GPU, so only the names of what they have opened are read.
                let target = open.as_ref().and_then(|open| open.link(file));
                let is_node = target.is_some_and(|target| target.starts_with(NODES));
                if is_node && pod.clients < MOST_CLIENTS_OF_PROCESS && !self.is_over() {
                    pod.clients += 1;
                    self.clients += 1;
                    cost += FILES_PER_CLIENT;
                    self.client(pid, file, by_gpu);
                }
            }
            pod.files = until;
            if !has_more {
                pod.pids.pop_front();
                (pod.files, pod.clients) = (0, 0);
            }
        }
        Some(cost)
    }

    /// Add what the client of an open file has.
    fn client(&mut self, pid: u32, file: &str, by_gpu: &mut BTreeMap<String, BTreeMap<u32, u64>>) {
        let text = self.machine.text(&format!("/{pid}/fdinfo/{file}"));
        if let Some(DrmClient { gpu, id, bytes }) = text.as_deref().and_then(DrmClient::parse)
            && bytes > 0
            && self.seen.insert((gpu.to_owned(), id))
        {
            let sum = by_gpu.entry(gpu.to_owned()).or_default().entry(pid).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
}

/// A client of a GPU, which the kernel makes when a program opens a node. Several open files, also of several processes, can belong to one client.
#[derive(Debug, PartialEq, Eq)]
struct DrmClient<'t> {
    /// The GPU's PCI address.
    gpu: &'t str,
    /// The client's number, which is unique for the GPU.
    id: u64,
    /// The memory of the GPU that the client has. `u64::MAX` if the kernel's number is none.
    bytes: u64,
}

impl<'t> DrmClient<'t> {
    fn parse(text: &'t str) -> Option<DrmClient<'t>> {
        let lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        let fields: BTreeMap<&str, &str> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(key, value)| (key, value.trim()))
            .collect();
        if fields.get("drm-driver") != Some(&DRIVER) {
            return None;
        }
        // The memory that the client has, or, in older kernels, what of it is in the GPU just now.
        let sum = |prefix: &str| {
            let regions = fields
                .iter()
                .filter(|(key, _)| key.strip_prefix(prefix).and_then(natural).is_some());
            let sizes = regions.map(|(_, value)| size(value).unwrap_or(u64::MAX));
            sizes.reduce(u64::saturating_add)
        };
        Some(DrmClient {
            gpu: fields.get("drm-pdev")?,
            id: fields.get("drm-client-id")?.parse().ok()?,
            bytes: sum("drm-total-vram").or_else(|| sum("drm-resident-vram")).unwrap_or(0),
        })
    }
}

/// Read a size such as `12 MiB`. Without a unit, it is in bytes.
fn size(text: &str) -> Option<u64> {
    let (number, unit) = text.split_once(' ').unwrap_or((text, ""));
    let unit = match unit.trim() {
        "" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}
