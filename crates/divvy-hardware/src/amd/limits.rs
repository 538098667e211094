//! Limits of a cgroup's GPU memory, which Linux keeps in its controller `dmem` from 6.14 on (kernel documentation, `admin-guide/cgroup-v2.rst`, "DMEM").
//!
//! amdgpu has one region for the memory of each GPU. Limits nest, and an allocation above one fails. Programs are shown the whole GPU all the same. What
//! a process has in the system's memory (GTT) belongs to no region, and pools of memory (`hipMallocAsync`) can grow into it.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use divvy_host::Tree;

use super::sysfs::Directory;

/// The root of the cgroups. Its `dmem.capacity` has the region and the size in bytes of all GPUs, one a line.
const ROOT: &str = "/sys/fs/cgroup";
/// The file of a cgroup with its limits: lines of a region and a number of bytes, or `max`.
const MAX: &str = "dmem.max";
/// The file of a cgroup with what its processes use: lines of a region and a number of bytes.
const CURRENT: &str = "dmem.current";

/// Return the name of the region of the GPU at this PCI address.
fn region(pci: &str) -> String {
    format!("drm/{pci}/vram")
}

/// Return the value of a region in one of the kernel's files.
fn value<'t>(text: &'t str, region: &str) -> Option<&'t str> {
    let mut lines = text.lines().filter_map(|line| line.trim().split_once([' ', '\t']));
    lines.find(|(of, _)| *of == region).map(|(_, value)| value.trim())
}

/// Report whether the kernel can limit the memory of the GPU at this PCI address.
pub(super) fn can_limit(tree: &dyn Tree, pci: &str) -> bool {
    let text = Directory::open(tree, ROOT).and_then(|root| root.text("/dmem.capacity"));
    text.is_some_and(|text| value(&text, &region(pci)).is_some())
}

/// Set the limit of a cgroup in bytes, and check that the kernel has it.
///
/// # Errors
/// The kernel refuses the limit, or does not have it afterwards: it keeps the old one if the cgroup uses more than the new one. The text has the kernel's
/// words.
pub(super) fn set(cgroup: &Path, pci: &str, bytes: u64) -> Result<(), String> {
    let path = cgroup.join(MAX);
    let line = format!("{} {bytes}\n", region(pci));
    // A file that is not there must not be made: the controller is not enabled for the cgroup.
    let file = OpenOptions::new().write(true).truncate(true).open(&path);
    // The kernel reads each write on its own.
    let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
    written.map_err(|error| format!("{}: {error}", path.display()))?;
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    check(&text, pci, bytes).map_err(|why| format!("{}: {why}", path.display()))
}

/// Check that the kernel's file has this limit.
pub(super) fn check(text: &str, pci: &str, bytes: u64) -> Result<(), String> {
    match value(text, &region(pci)) {
        Some(found) if found.parse() == Ok(bytes) => Ok(()),
        Some(found) => Err(format!("the kernel accepted {bytes} bytes, and says afterwards {found:.20}")),
        None => Err("the kernel accepted a limit, and does not list it".to_owned()),
    }
}

/// Return what the processes of a cgroup use in bytes; 0 if the kernel does not say it.
pub(super) fn used(cgroup: &Path, pci: &str) -> u64 {
    let text = fs::read_to_string(cgroup.join(CURRENT)).unwrap_or_default();
    value(&text, &region(pci)).and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}
