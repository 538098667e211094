//! Recorded machines with AMD GPUs as trees of files: what the kernel module amdgpu has in `/sys`, and the device nodes.
//!
//! The tables are in `data/amd`. What the tables lack is made up as the kernel would create it: numbers of card nodes, a
//! directory for each partition that a GPU could have, and links between directories.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use divvy_host::{FileKind, Tree};

use crate::machine::MachineFiles as Files;

/// A recorded machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordedMachine {
    /// Two Vega 10, with an old kernel.
    Vega10,
    /// Eight MI210 in two hives.
    Mi210,
    /// Eight MI308X in four partitions each.
    Mi308Cpx,
    /// Eight MI300X in eight partitions each, one of which is missing.
    Mi300xCpx,
}

/// The version of the driver in the trees.
pub const DRIVER: &str = "6.10.5";

const TOPOLOGY: &str = "sys/devices/virtual/kfd/kfd/topology/nodes";
/// How many render minors the kernel reserves for a GPU that can be divided.
const MINORS: u32 = 8;

/// A row of a table of nodes.
struct KfdNodeRow {
    node: u32,
    fields: Vec<(&'static str, &'static str)>,
}

impl KfdNodeRow {
    fn text(&self, column: &str) -> &'static str {
        let found = self.fields.iter().find(|(name, _)| *name == column);
        found.map_or("", |(_, value)| value)
    }

    fn number(&self, column: &str) -> u64 {
        let text = self.text(column);
        let read = match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => text.parse(),
        };
        // An empty field was not recorded.
        read.unwrap_or(0)
    }

    /// Return the PCI address of the card, without the function.
    fn card(&self) -> String {
        let (domain, location) = (self.number("domain"), self.number("location_id"));
        format!("{domain:04x}:{:02x}:{:02x}", location >> 8 & 0xff, location >> 3 & 0x1f)
    }
}

impl RecordedMachine {
    /// All recorded machines.
    pub const ALL: [RecordedMachine; 4] = [
        RecordedMachine::Vega10,
        RecordedMachine::Mi210,
        RecordedMachine::Mi308Cpx,
        RecordedMachine::Mi300xCpx,
    ];

    fn tables(self) -> (&'static str, &'static str) {
        match self {
            RecordedMachine::Vega10 => (
                include_str!("../data/amd/vega10x2.csv"),
                include_str!("../data/amd/vega10x2-links.csv"),
            ),
            RecordedMachine::Mi210 => (
                include_str!("../data/amd/mi210x8-xgmi-pcie.csv"),
                include_str!("../data/amd/mi210x8-xgmi-pcie-links.csv"),
            ),
            RecordedMachine::Mi308Cpx => (
                include_str!("../data/amd/mi308x8-cpx4.csv"),
                include_str!("../data/amd/mi308x8-cpx4-links.csv"),
            ),
            RecordedMachine::Mi300xCpx => (
                include_str!("../data/amd/mi300x8-cpx8.csv"),
                include_str!("../data/amd/mi300x8-cpx8-links.csv"),
            ),
        }
    }

    /// Return the product's name as the board reports it, or `None` if the board reports no name.
    pub fn product(self) -> Option<&'static str> {
        match self {
            RecordedMachine::Vega10 => None,
            RecordedMachine::Mi210 => Some("AMD Instinct MI210"),
            RecordedMachine::Mi308Cpx => Some("AMD Instinct MI308X"),
            RecordedMachine::Mi300xCpx => Some("AMD Instinct MI300X OAM"),
        }
    }

    /// Return the memory of a GPU or partition in MiB, for nodes where it was not recorded.
    fn memory_mib(self) -> u64 {
        match self {
            RecordedMachine::Vega10 => 16_368,
            RecordedMachine::Mi210 => 65_520,
            RecordedMachine::Mi308Cpx => 49_152,
            RecordedMachine::Mi300xCpx => 24_576,
        }
    }

    /// Return the number of partitions of each GPU.
    fn parts(self) -> u64 {
        match self {
            RecordedMachine::Vega10 | RecordedMachine::Mi210 => 1,
            RecordedMachine::Mi308Cpx => 4,
            RecordedMachine::Mi300xCpx => 8,
        }
    }

    fn is_divided(self) -> bool {
        self.parts() > 1
    }

    fn rows(self) -> Vec<KfdNodeRow> {
        let mut lines = self.tables().0.lines();
        let columns: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
        let rows = lines.map(|line| {
            let fields: Vec<_> = columns.iter().copied().zip(line.split(',')).collect();
            KfdNodeRow {
                node: fields.first().and_then(|(_, node)| node.parse().ok()).unwrap_or_default(),
                fields,
            }
        });
        rows.collect()
    }
}

/// Write the files of a machine below `root`: `sys` and `dev`. Nodes in `dev` are ordinary empty files.
///
/// # Errors
/// A file cannot be written.
pub fn write(root: &Path, machine: RecordedMachine) -> io::Result<()> {
    let tree = tree(machine);
    let mut directories = vec![String::new()];
    while let Some(directory) = directories.pop() {
        for name in tree.names(if directory.is_empty() { "/" } else { &directory }) {
            let path = format!("{directory}/{name}");
            let there = root.join(path.trim_start_matches('/'));
            match tree.stat(&path).map(|entry| entry.kind) {
                Some(FileKind::Directory) => {
                    fs::create_dir_all(there)?;
                    directories.push(path);
                }
                Some(FileKind::Link(target)) => symlink(target, there)?,
                _ => fs::write(there, tree.read(&path, usize::MAX).unwrap_or_default())?,
            }
        }
    }
    Ok(())
}

/// Return the files of a machine.
pub fn tree(machine: RecordedMachine) -> Files {
    let mut files = Files::default();
    files
        .file("/sys/module/amdgpu/version", format!("{DRIVER}\n"))
        .node("/dev/kfd")
        .link("/sys/class/kfd/kfd", "../../devices/virtual/kfd/kfd")
        .link("/sys/module/amdgpu/drivers/pci:amdgpu", "../../../bus/pci/drivers/amdgpu");
    let mut taken = BTreeSet::new();
    let mut partitions = 0;
    for row in &machine.rows() {
        topology(&mut files, machine, row);
        let render = u32::try_from(row.number("drm_render_minor")).unwrap_or_default();
        if render == 0 {
            continue;
        }
        let card = row.card();
        let is_first = taken.insert(card.clone());
        if machine.is_divided() && !is_first {
            // A further partition, whose device was made with its card.
            continue;
        }
        // Two of the recorded GPUs have the same address.
        let address = format!("{card}.{}", u32::from(!is_first));
        function(&mut files, machine, row, &address, render);
        if machine.is_divided() {
            for part in 1..MINORS {
                drm(
                    &mut files,
                    &format!("/sys/devices/platform/amdgpu_xcp_{partitions}"),
                    render + part,
                );
                partitions += 1;
            }
        }
    }
    links(&mut files, machine);
    files
}

/// Add a node of KFD's topology.
fn topology(files: &mut Files, machine: RecordedMachine, row: &KfdNodeRow) {
    let directory = format!("/{TOPOLOGY}/{}", row.node);
    let is_gpu = row.number("drm_render_minor") > 0;
    let mut text = String::new();
    for (key, column) in [
        ("cpu_cores_count", "cpu_cores"),
        ("simd_count", "simd_count"),
        ("simd_per_cu", "simd_per_cu"),
        ("gfx_target_version", "gfx_target_version"),
        ("device_id", "device_id"),
        ("location_id", "location_id"),
        ("domain", "domain"),
        ("drm_render_minor", "drm_render_minor"),
        ("hive_id", "hive_id"),
        ("num_xcc", "num_xcc"),
        ("unique_id", "unique_id"),
    ] {
        // What was not recorded is not in the files of that kernel.
        if !row.text(column).is_empty() {
            text.push_str(&format!("{key} {}\n", row.number(column)));
        }
    }
    let (gpu, heap, bytes) = if is_gpu {
        (gpu_id(row.node), 1, memory(machine, row))
    } else {
        (0, 0, 64 << 30)
    };
    files
        .file(&format!("{directory}/properties"), text)
        .file(&format!("{directory}/gpu_id"), format!("{gpu}\n"))
        .file(
            &format!("{directory}/mem_banks/0/properties"),
            format!("heap_type {heap}\nsize_in_bytes {bytes}\nflags 0\nwidth 4096\nmem_clk_max 1600\n"),
        );
}

fn memory(machine: RecordedMachine, row: &KfdNodeRow) -> u64 {
    match row.number("vram_bytes") {
        0 => machine.memory_mib() << 20,
        recorded => recorded,
    }
}

/// Return the number that KFD gives the GPU of a node. It was not recorded.
pub fn gpu_id(node: u32) -> u32 {
    40_000 + node
}

/// Add the directory of a PCI function, and the links to it.
fn function(files: &mut Files, machine: RecordedMachine, row: &KfdNodeRow, address: &str, render: u32) {
    let bus = address.get(..7).unwrap_or(address);
    let directory = format!("/sys/devices/pci{bus}/{address}");
    let mut file = |name: &str, text: &str| {
        files.file(&format!("{directory}/{name}"), format!("{text}\n"));
    };
    file("vendor", "0x1002");
    file("device", row.text("device_id"));
    file("class", "0x038000");
    // The first half of the buses belongs to the first processor, and the second domain to the second.
    let numa = match machine {
        RecordedMachine::Vega10 => -1,
        _ => i32::from(row.number("domain") > 0 || row.number("location_id") >= 0x8000),
    };
    file("numa_node", &numa.to_string());
    file("mem_info_vram_total", &(machine.parts() * memory(machine, row)).to_string());
    file("mem_info_vram_used", &(10_u64 << 20).to_string());
    if let Some(product) = machine.product() {
        file("product_name", product);
    }
    if machine.is_divided() {
        file("current_compute_partition", "CPX");
        file("current_memory_partition", "NPS1");
    }
    file("ras/umc_err_count", "ue: 0\nce: 0");
    file("ras/gfx_err_count", "ue: 0\nce: 0");
    drm(files, &directory, render);
    files
        .link(
            &format!("/sys/bus/pci/drivers/amdgpu/{address}"),
            &format!("../../../../devices/pci{bus}/{address}"),
        )
        .link(
            &format!("/sys/bus/pci/devices/{address}"),
            &format!("../../../devices/pci{bus}/{address}"),
        );
}

/// Add the DRM nodes of a device.
fn drm(files: &mut Files, directory: &str, render: u32) {
    // Card 0 is that of the board's management controller.
    for name in [format!("card{}", render - 127), format!("renderD{render}")] {
        let below = directory.strip_prefix("/sys/").unwrap_or(directory);
        files
            .link(&format!("{directory}/drm/{name}/device"), "../..")
            .link(&format!("/sys/class/drm/{name}"), &format!("../../{below}/drm/{name}"))
            .node(&format!("/dev/dri/{name}"));
    }
}

/// Add the links between nodes.
fn links(files: &mut Files, machine: RecordedMachine) {
    for (number, line) in machine.tables().1.lines().skip(1).enumerate() {
        let fields: Vec<&str> = line.split(',').collect();
        if let [kind, from, to, class, weight] = fields[..] {
            let kind = if kind == "io" { "io_links" } else { "p2p_links" };
            files.file(
                &format!("/{TOPOLOGY}/{from}/{kind}/{number}/properties"),
                format!("type {class}\nversion_major 0\nversion_minor 0\nnode_from {from}\nnode_to {to}\nweight {weight}\n"),
            );
        }
    }
}

/// Remove the node with this render minor from KFD's topology, as after a fatal error of the GPU.
///
/// # Errors
/// There is no such node, or it cannot be removed.
pub fn remove_kfd_node(root: &Path, render: u32) -> io::Result<()> {
    fs::remove_dir_all(kfd_node(root, render)?)
}

/// Return the directory of the node with this render minor in KFD's topology.
///
/// # Errors
/// There is no such node, or the topology cannot be read.
pub fn kfd_node(root: &Path, render: u32) -> io::Result<PathBuf> {
    let line = format!("drm_render_minor {render}");
    for entry in fs::read_dir(root.join(TOPOLOGY))? {
        let directory = entry?.path();
        if fs::read_to_string(directory.join("properties"))?
            .lines()
            .any(|found| found == line)
        {
            return Ok(directory);
        }
    }
    Err(io::Error::other(format!(
        "no node of KFD's topology has the render minor {render}"
    )))
}

/// Return the directory of a PCI function.
pub fn function_directory(root: &Path, address: &str) -> PathBuf {
    root.join("sys/bus/pci/devices").join(address)
}

/// Set the number of uncorrectable memory errors of the GPU at a PCI address.
///
/// # Errors
/// The file cannot be written.
pub fn set_memory_errors(root: &Path, address: &str, count: u64) -> io::Result<()> {
    let file = function_directory(root, address).join("ras/umc_err_count");
    put(&file, &format!("ue: {count}\nce: 3\n"))
}

/// Let a process use memory of a GPU, which is named by its number in KFD ([`gpu_id`]).
///
/// # Errors
/// The file cannot be written.
pub fn set_process(root: &Path, pid: u32, gpu: u32, bytes: u64) -> io::Result<()> {
    let directory = root.join("sys/devices/virtual/kfd/kfd/proc").join(pid.to_string());
    put(&directory.join(format!("vram_{gpu}")), &format!("{bytes}\n"))
}

fn put(path: &Path, text: &str) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    fs::write(path, text)
}
