//! Simulated AMD GPUs: the files that Linux's amdgpu driver has in `/sys` and `/dev`, written from a machine description.
//!
//! AMD's driver needs no library: everything that Divvy reads is text in `/sys`. A test changes a GPU's condition by writing to its files,
//! for example to `ras/umc_err_count`, the number of memory errors.

use std::fs;
use std::io;
use std::path::Path;

use divvy_model::machine::MachineAmd;

/// The directory of the PCI functions that belong to the driver.
const FUNCTIONS: &str = "sys/module/amdgpu/drivers/pci:amdgpu";
/// The directory of the compute driver's nodes: CPUs and GPUs.
const NODES: &str = "sys/class/kfd/kfd/topology/nodes";
/// What the kernel's controller of device memory can limit.
const CAPACITY: &str = "sys/fs/cgroup/dmem.capacity";
/// The version of the simulated driver.
const VERSION: &str = "6.10.5";
/// The PCI bus of the first GPU.
const FIRST_BUS: usize = 0x19;
/// The number of the first GPU's card. On most servers, card 0 belongs to the graphics of the mainboard.
const FIRST_CARD: usize = 1;
const FIRST_RENDER: usize = 128;

/// Write the files of these GPUs below `root`, except the device nodes. Do nothing if there are no GPUs.
pub fn describe(root: &Path, gpus: &[MachineAmd]) -> io::Result<()> {
    if gpus.is_empty() {
        return Ok(());
    }
    let file = |path: &str, text: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap_or(root))?;
        fs::write(path, text)
    };
    file("sys/module/amdgpu/version", &format!("{VERSION}\n"))?;
    file(&format!("{NODES}/0/gpu_id"), "0\n")?;
    file(
        &format!("{NODES}/0/properties"),
        "cpu_cores_count 64\nsimd_count 0\ndrm_render_minor 0\n",
    )?;
    for (index, gpu) in gpus.iter().enumerate() {
        let (card, render) = (FIRST_CARD + index, FIRST_RENDER + index);
        let function = format!("{FUNCTIONS}/{}", address(index));
        for (name, text) in [
            (format!("drm/card{card}/dev"), format!("226:{card}\n")),
            (format!("drm/renderD{render}/dev"), format!("226:{render}\n")),
            ("vendor".to_owned(), "0x1002\n".to_owned()),
            ("device".to_owned(), "0x740f\n".to_owned()),
            ("product_name".to_owned(), format!("{}\n", gpu.model)),
            (
                "numa_node".to_owned(),
                gpu.numa.map_or_else(|| "-1\n".to_owned(), |numa| format!("{numa}\n")),
            ),
            ("mem_info_vram_total".to_owned(), format!("{}\n", gpu.memory_mib << 20)),
            ("mem_info_vram_used".to_owned(), "10747904\n".to_owned()),
            ("ras/umc_err_count".to_owned(), "ue: 0\nce: 0\n".to_owned()),
        ] {
            file(&format!("{function}/{name}"), &text)?;
        }
        // Where tools look for the card of a render node.
        file(
            &format!("sys/class/drm/renderD{render}/device/drm/card{card}/dev"),
            &format!("226:{card}\n"),
        )?;
        let node = format!("{NODES}/{}", index + 1);
        let bus = FIRST_BUS + index;
        file(&format!("{node}/gpu_id"), &format!("{}\n", 20_000 + index))?;
        file(
            &format!("{node}/properties"),
            &format!(
                "cpu_cores_count 0\nsimd_count 416\nsimd_per_cu 4\ngfx_target_version 90010\ndevice_id 29711\ndomain 0\nlocation_id {}\n\
                 drm_render_minor {render}\nhive_id {}\nnum_xcc 1\nunique_id {}\n",
                bus << 8,
                gpu.hive,
                unique_id(index)
            ),
        )?;
        let peers = gpus
            .iter()
            .enumerate()
            .filter(|(other, peer)| *other != index && peer.hive == gpu.hive && gpu.hive != 0);
        for (link, (other, _)) in peers.enumerate() {
            let text = format!("type 11\nnode_from {}\nnode_to {}\nweight 15\n", index + 1, other + 1);
            file(&format!("{node}/io_links/{link}/properties"), &text)?;
        }
    }
    Ok(())
}

/// Write the files of these GPUs below `root`, with ordinary files as device nodes, and the list of what the kernel's controller of device memory
/// knows.
pub fn install(root: &Path, gpus: &[MachineAmd]) -> io::Result<()> {
    describe(root, gpus)?;
    if gpus.is_empty() {
        return Ok(());
    }
    let dev = root.join("dev");
    fs::create_dir_all(dev.join("dri"))?;
    fs::write(dev.join("kfd"), "")?;
    for index in 0..gpus.len() {
        fs::write(dev.join(format!("dri/card{}", FIRST_CARD + index)), "")?;
        fs::write(dev.join(format!("dri/renderD{}", FIRST_RENDER + index)), "")?;
    }
    let capacity = root.join(CAPACITY);
    fs::create_dir_all(capacity.parent().unwrap_or(root))?;
    let gpus = gpus.iter().enumerate();
    let lines: String = gpus
        .map(|(index, gpu)| format!("{} {}\n", region(index), gpu.memory_mib << 20))
        .collect();
    fs::write(capacity, lines)
}

/// Return the region of the GPU with this index in the files of the kernel's controller of device memory.
pub fn region(index: usize) -> String {
    format!("drm/{}/vram", address(index))
}

/// Return the path of the file that counts the memory errors of the GPU with this index. The path is that on the machine.
pub fn memory_errors(index: usize) -> String {
    format!("/{FUNCTIONS}/{}/ras/umc_err_count", address(index))
}

fn address(index: usize) -> String {
    format!("0000:{:02x}:00.0", FIRST_BUS + index)
}

fn unique_id(index: usize) -> usize {
    0x18f3_a9c2_b7d4_e610 + index
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gpus_of_one_hive_are_linked() {
        let root = tempfile::tempdir().expect("a directory");
        let gpu = |hive| MachineAmd {
            model: "AMD Instinct MI210".to_owned(),
            memory_mib: 65520,
            hive,
            numa: Some(0),
        };
        install(root.path(), &[gpu(1), gpu(2), gpu(1), gpu(0), gpu(0)]).expect("written");
        let links = |node: usize| {
            let directory = root.path().join(format!("{NODES}/{node}/io_links"));
            fs::read_dir(directory).map_or(0, Iterator::count)
        };
        assert_eq!([1, 2, 3, 4, 5].map(links), [1, 0, 1, 0, 0]);
        assert!(root.path().join("dev/dri/renderD132").exists());
        let capacity = fs::read_to_string(root.path().join(CAPACITY)).expect("read");
        assert_eq!(capacity.lines().next_back(), Some("drm/0000:1d:00.0/vram 68702699520"));
        assert!(root.path().join(memory_errors(4).trim_start_matches('/')).exists());
    }
}
