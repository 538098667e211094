//! GPUs that are passed through to virtual machines. The kernel's driver `vfio-pci` has them, so NVML does not see them.
//!
//! NVIDIA's GPU feature discovery (internal/resource/sysfs-lib.go) takes the sum of the address ranges in bytes for the memory in MiB, and -1 for the
//! compute capability, which no label can have. Here such a GPU has neither.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use divvy_labels::{LabeledGpu, pci_name};

use crate::files;

const NVIDIA: u32 = 0x10de;
/// The PCI classes of GPUs.
const CLASSES: [u32; 2] = [0x03_00_00, 0x03_02_00];
const DRIVER: &str = "vfio-pci";
/// Where distributions install the PCI ID database.
const DATABASES: [&str; 2] = ["usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids"];
/// The maximum size of the database in bytes. It has 1.5 MB in 2026.
const BYTES: u64 = 16 << 20;

/// Return the GPUs that `vfio-pci` has, from the kernel's list below `root`. The database with their names is looked for below `roots`. A GPU that it
/// does not name is called as `lspci` calls it, such as `Device 20b0`.
pub(super) fn gpus(root: &Path, roots: &[&Path]) -> Vec<LabeledGpu> {
    let directory = root.join("sys/bus/pci/devices");
    let names = files::names(&directory).unwrap_or_default().into_iter();
    let found: Vec<(u16, u32)> = names.filter_map(|name| passed_through(&directory.join(name))).collect();
    if found.is_empty() {
        return Vec::new();
    }
    let database = database(roots);
    let gpu = |(device, class)| LabeledGpu {
        model: pci_name(&database, device).map_or_else(|| format!("Device {device:04x}"), str::to_owned),
        pci_class: Some(class),
        ..LabeledGpu::default()
    };
    found.into_iter().map(gpu).collect()
}

/// Return the device number and the class of a GPU that `vfio-pci` has. A virtual function is a part of another GPU.
fn passed_through(device: &Path) -> Option<(u16, u32)> {
    let driver = std::fs::read_link(device.join("driver")).ok()?;
    let is_whole = std::fs::symlink_metadata(device.join("physfn")).is_err();
    let class = number(&device.join("class"))?;
    let is_gpu = number(&device.join("vendor")) == Some(NVIDIA) && CLASSES.contains(&class);
    let is_passed = is_gpu && is_whole && driver.file_name().is_some_and(|name| name == DRIVER);
    let id = u16::try_from(number(&device.join("device"))?).ok()?;
    is_passed.then_some((id, class))
}

/// Read a number such as `0x10de` from a file of the kernel.
fn number(path: &Path) -> Option<u32> {
    let text = files::read_kernel(path).ok()?;
    u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

fn database(roots: &[&Path]) -> String {
    let read = |path: PathBuf| {
        let mut bytes = Vec::new();
        File::open(path).ok()?.take(BYTES).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    };
    let paths = roots.iter().flat_map(|root| DATABASES.iter().map(|path| root.join(path)));
    paths.filter_map(read).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(root: &Path, address: &str, driver: &str, ids: [&str; 3]) {
        let directory = root.join("sys/bus/pci/devices").join(address);
        std::fs::create_dir_all(&directory).expect("created");
        for (file, text) in ["vendor", "class", "device"].into_iter().zip(ids) {
            std::fs::write(directory.join(file), format!("{text}\n")).expect("written");
        }
        std::os::unix::fs::symlink(format!("../../../../bus/pci/drivers/{driver}"), directory.join("driver")).expect("linked");
    }

    #[test]
    fn only_gpus_that_vfio_has_are_found_and_named() {
        let root = tempfile::tempdir().expect("a directory");
        let root = root.path();
        assert_eq!(gpus(root, &[root]), []);
        for (address, driver, ids) in [
            ("0000:81:00.0", "vfio-pci", ["0x10de", "0x030200", "0x20b0"]),
            ("0000:82:00.0", "vfio-pci", ["0x10de", "0x030000", "0x9999"]),
            ("0000:83:00.0", "nvidia", ["0x10de", "0x030200", "0x20b0"]),
            ("0000:84:00.0", "vfio-pci", ["0x8086", "0x030000", "0x20b0"]),
            // The GPU's audio device.
            ("0000:82:00.1", "vfio-pci", ["0x10de", "0x040300", "0x20b1"]),
            ("0000:85:00.4", "vfio-pci", ["0x10de", "0x030200", "0x20b0"]),
        ] {
            device(root, address, driver, ids);
        }
        let part = root.join("sys/bus/pci/devices/0000:85:00.4/physfn");
        std::os::unix::fs::symlink("../0000:85:00.0", part).expect("linked");
        let models = |roots: &[&Path]| -> Vec<String> { gpus(root, roots).into_iter().map(|gpu| gpu.model).collect() };
        assert_eq!(models(&[]), ["Device 20b0", "Device 9999"]);
        let file = root.join("driver/usr/share/hwdata/pci.ids");
        std::fs::create_dir_all(file.parent().expect("a directory")).expect("created");
        std::fs::write(file, "10de  NVIDIA Corporation\n\t20b0  GA100 [A100 SXM4 40GB]\n").expect("written");
        assert_eq!(
            models(&[root, &root.join("driver")]),
            ["GA100 [A100 SXM4 40GB]", "Device 9999"]
        );
        let classes: Vec<_> = gpus(root, &[]).into_iter().map(|gpu| gpu.pci_class).collect();
        assert_eq!(classes, [Some(0x03_02_00), Some(0x03_00_00)]);
    }
}
