//! The processes that use memory of GPUs (kernel documentation, `gpu/drm-usage-stats.rst`): of each open DRM node, the kernel says in
//! `/proc/<pid>/fdinfo/<fd>` how much memory of the GPU the node's client has.

use std::collections::{BTreeMap, BTreeSet};

use divvy_host::Tree;

use crate::sysfs::{Directory, natural};

/// The processes of the machine.
const PROCESSES: &str = "/proc";
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

/// What processes use.
#[derive(Debug, Default)]
pub(super) struct Used {
    /// The bytes that each process uses, by the GPU's PCI address, then by PID.
    pub(super) by_gpu: BTreeMap<String, BTreeMap<u32, u64>>,
    /// Whether the machine has more processes or open files than are looked at.
    pub(super) is_cut_off: bool,
    /// Why nothing is known.
    pub(super) error: Option<String>,
}

/// Return what each process uses of each GPU. A process that ends meanwhile is left out.
pub(super) fn used(tree: &dyn Tree) -> Used {
    let mut used = Used::default();
    let Some(machine) = Directory::open(tree, PROCESSES) else {
        used.error = Some("there is no /proc, so the processes are not known".to_owned());
        return used;
    };
    let names = machine.first_names(MOST_PROCESSES + 1);
    used.is_cut_off = names.len() > MOST_PROCESSES;
    let mut pids: Vec<u32> = names.iter().filter_map(|name| natural(name)).collect();
    // A client that a process has inherited belongs to the parent, whose PID is lower as a rule.
    pids.sort_unstable();
    let (mut files, mut clients, mut seen) = (0, 0, BTreeSet::new());
    for pid in pids {
        let Some(open) = machine.below(&format!("/{pid}/fd")) else {
            continue;
        };
        let mut of_process = 0;
        for file in open.first_names(MOST_FILES_OF_PROCESS) {
            files += 1;
            // Most processes have no GPU, so only the names of what they have opened are read.
            let is_node = open.link(&file).is_some_and(|target| target.starts_with(NODES));
            if is_node && of_process < MOST_CLIENTS_OF_PROCESS && files <= MOST_FILES && clients < MOST_CLIENTS {
                of_process += 1;
                clients += 1;
                let text = machine.text(&format!("/{pid}/fdinfo/{file}"));
                if let Some(Client { gpu, id, bytes }) = text.as_deref().and_then(Client::parse)
                    && bytes > 0
                    && seen.insert((gpu.to_owned(), id))
                {
                    let sum = used.by_gpu.entry(gpu.to_owned()).or_default().entry(pid).or_default();
                    *sum = sum.saturating_add(bytes);
                }
            }
        }
        if files > MOST_FILES || clients >= MOST_CLIENTS {
            used.is_cut_off = true;
            break;
        }
    }
    used
}

/// A client of a GPU, which the kernel makes when a program opens a node. Several open files, also of several processes, can belong to one client.
#[derive(Debug, PartialEq, Eq)]
struct Client<'t> {
    /// The GPU's PCI address.
    gpu: &'t str,
    /// The client's number, which is unique for the GPU.
    id: u64,
    /// The memory of the GPU that the client has. `u64::MAX` if the kernel's number is none.
    bytes: u64,
}

impl<'t> Client<'t> {
    fn parse(text: &'t str) -> Option<Client<'t>> {
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
        Some(Client {
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
