//! Simulated Intel GPUs: the files that Linux's xe driver has in `/sys` and `/dev`, and those of the processes that use it, written from a machine
//! description.
//!
//! Intel's driver needs no library: everything that Divvy reads is text in `/sys` and `/proc`. A test changes a GPU's condition by writing to its files.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use divvy_model::machine::MachineIntel;

/// The directory of the PCI functions that belong to the driver.
pub const FUNCTIONS: &str = "sys/module/xe/drivers/pci:xe";
/// What the kernel's controller of device memory can limit, and what all processes use of it.
const CAPACITY: &str = "sys/fs/cgroup/dmem.capacity";
const CURRENT: &str = "sys/fs/cgroup/dmem.current";
/// The PCI bus of the first GPU. Simulated GPUs of other vendors are on other buses.
const FIRST_BUS: usize = 0x4d;
/// The numbers of the first GPU's nodes. Simulated GPUs of other vendors have lower ones.
const FIRST_CARD: usize = 33;
const FIRST_RENDER: usize = 160;
/// The part of a tile's memory in bytes that the driver keeps for itself.
const RESERVED: u64 = 64 << 20;

/// Write the files of these GPUs below `root`, except the device nodes. Do nothing if there are no GPUs.
pub fn describe(root: &Path, gpus: &[MachineIntel]) -> io::Result<()> {
    for (index, gpu) in gpus.iter().enumerate() {
        let function = root.join(FUNCTIONS).join(address(index));
        let file = |name: &str, text: &str| {
            let path = function.join(name);
            fs::create_dir_all(path.parent().unwrap_or(root))?;
            fs::write(path, text)
        };
        let (card, render) = (FIRST_CARD + index, FIRST_RENDER + index);
        file(&format!("drm/card{card}/dev"), &format!("226:{card}\n"))?;
        file(&format!("drm/renderD{render}/dev"), &format!("226:{render}\n"))?;
        file("vendor", "0x8086\n")?;
        file("device", &format!("{}\n", gpu.device))?;
        file("class", "0x030000\n")?;
        file("sriov_numvfs", "0\n")?;
        file(
            "numa_node",
            &gpu.numa.map_or_else(|| "-1\n".to_owned(), |numa| format!("{numa}\n")),
        )?;
        for tile in 0..gpu.tiles {
            let size = tile_bytes(gpu) + RESERVED;
            file(&format!("tile{tile}/physical_vram_size_bytes"), &format!("{size}\n"))?;
        }
        file("hwmon/hwmon3/name", "xe\n")?;
        file("hwmon/hwmon3/energy1_input", "1234567000\n")?;
        file("hwmon/hwmon3/temp2_input", "41000\n")?;
        file("hwmon/hwmon3/temp3_input", "48000\n")?;
    }
    Ok(())
}

/// Write the files of these GPUs below `root`, with ordinary files as device nodes, and the list of what the kernel's controller of device memory
/// knows. Lines of other GPUs stay in that list.
pub fn install(root: &Path, gpus: &[MachineIntel]) -> io::Result<()> {
    describe(root, gpus)?;
    if gpus.is_empty() {
        return Ok(());
    }
    fs::create_dir_all(root.join("dev/dri"))?;
    let (mut capacity, mut current) = (String::new(), String::new());
    for (index, gpu) in gpus.iter().enumerate() {
        for node in nodes(index) {
            fs::write(root.join("dev").join(node), "")?;
        }
        for tile in 0..gpu.tiles {
            let region = region(index, tile);
            capacity.push_str(&format!("{region} {}\n", tile_bytes(gpu)));
            current.push_str(&format!("{region} 0\n"));
        }
    }
    add_lines(&root.join(CAPACITY), &capacity)?;
    add_lines(&root.join(CURRENT), &current)
}

/// Add lines of regions to a file in place of the file's lines of the same regions.
fn add_lines(path: &Path, lines: &str) -> io::Result<()> {
    let before = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error),
    };
    let region = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
    let is_other = |line: &&str| lines.lines().all(|new| region(new) != region(line));
    let mut text: String = before.lines().filter(is_other).map(|line| format!("{line}\n")).collect();
    text.push_str(lines);
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    fs::write(path, text)
}

/// Write the files of a process that has opened the GPU with this index as its file `fd`, and has this much memory of the GPU's first tile.
pub fn set_client(root: &Path, pid: u32, fd: u32, index: usize, client: u64, kib: u64) -> io::Result<()> {
    let text = format!(
        "pos:\t0\nflags:\t02100002\nmnt_id:\t26\nino:\t423\ndrm-driver:\txe\ndrm-client-id:\t{client}\ndrm-pdev:\t{}\n\
         drm-total-system:\t0\ndrm-total-vram0:\t{kib} KiB\ndrm-resident-vram0:\t{kib} KiB\n",
        address(index)
    );
    set_open_file(root, pid, fd, &format!("/dev/dri/renderD{}", FIRST_RENDER + index), &text)
}

/// Write the files of a process that has opened `target` as its file `fd`, about which the kernel says `text`.
pub fn set_open_file(root: &Path, pid: u32, fd: u32, target: &str, text: &str) -> io::Result<()> {
    let process = root.join(format!("proc/{pid}"));
    for directory in ["fd", "fdinfo"] {
        fs::create_dir_all(process.join(directory))?;
    }
    symlink(target, process.join(format!("fd/{fd}")))?;
    fs::write(process.join(format!("fdinfo/{fd}")), text)
}

/// Return the PCI address of the GPU with this index.
pub fn address(index: usize) -> String {
    format!("0000:{:02x}:00.0", FIRST_BUS + index)
}

/// Return the device nodes of the GPU with this index, as paths below `/dev`.
pub fn nodes(index: usize) -> [String; 2] {
    [
        format!("dri/card{}", FIRST_CARD + index),
        format!("dri/renderD{}", FIRST_RENDER + index),
    ]
}

/// Return the region of a tile in the files of the kernel's controller of device memory.
pub fn region(index: usize, tile: u32) -> String {
    format!("drm/{}/vram{tile}", address(index))
}

fn tile_bytes(gpu: &MachineIntel) -> u64 {
    (gpu.memory_mib << 20) / u64::from(gpu.tiles.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The list keeps the entries of other GPUs.
    #[test]
    fn the_list_of_regions_has_each_tile_once() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join(CAPACITY);
        let other = "drm/0000:19:00.0/vram 68702699520\n";
        fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        fs::write(&path, other).expect("written");
        let gpu = |tiles| MachineIntel {
            device: "0xe20b".to_owned(),
            memory_mib: 12_216,
            tiles,
            numa: None,
        };
        for _ in 0..2 {
            install(root.path(), &[gpu(1), gpu(2)]).expect("written");
            let text = fs::read_to_string(&path).expect("read");
            let own =
                "drm/0000:4d:00.0/vram0 12809404416\ndrm/0000:4e:00.0/vram0 6404702208\ndrm/0000:4e:00.0/vram1 6404702208\n";
            assert_eq!(text, format!("{other}{own}"));
        }
        assert!(root.path().join("dev/dri/renderD161").exists());
    }
}
