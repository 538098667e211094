//! Limits of a cgroup's GPU memory, which Linux keeps in its controller `dmem` from 6.14 on (kernel documentation, `admin-guide/cgroup-v2.rst`, "DMEM").
//!
//! Each memory of a GPU is a region: `drm/<PCI address>/` and the name that the GPU's driver gives the memory. Limits nest, and an allocation above one
//! fails. Programs are shown the whole GPU all the same. What a process has in the system's memory (GTT) belongs to no region, and some of what does not
//! fit is moved there.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

use divvy_host::Tree;
use divvy_model::MiB;

use crate::backend::Cgroup;
use crate::protocol::LimitAnswer;
use crate::sysfs::{SysfsDirectory, natural};
use crate::{Failure, FailureCode};

/// The root of the cgroups.
const ROOT: &str = "/sys/fs/cgroup";
/// The file of the root with the region and the size in bytes of all memories, one a line.
const CAPACITY: &str = "/dmem.capacity";
/// The file of a cgroup with its limits: lines of a region and a number of bytes, or `max`.
const MAX: &str = "dmem.max";
/// The file of a cgroup with what its processes use: lines of a region and a number of bytes.
const CURRENT: &str = "dmem.current";

/// The kernel's lines about all memories of the machine. A text is empty if the kernel has no such controller.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    capacity: String,
    current: String,
}

impl Regions {
    /// Read the sizes of all memories, and what all processes use of them.
    pub(crate) fn read(tree: &dyn Tree) -> Regions {
        let root = SysfsDirectory::open(tree, ROOT);
        // A text that was cut off would show a GPU with fewer regions than it has.
        let text = |file: &str| root.as_ref()?.text(file).filter(|text| text.ends_with('\n'));
        Regions {
            capacity: text(CAPACITY).unwrap_or_default(),
            current: text(&format!("/{CURRENT}")).unwrap_or_default(),
        }
    }

    /// Return the regions of the GPU at this PCI address whose names are `vram` and a number.
    pub(crate) fn numbered(&self, pci: &str) -> Vram {
        let prefix = format!("drm/{pci}/vram");
        let is_own = |region: &&str| region.strip_prefix(&prefix).and_then(natural).is_some();
        let regions: BTreeSet<&str> = lines(&self.capacity).map(|(region, _)| region).filter(is_own).collect();
        let sum = |text: &str| {
            let bytes = regions.iter().map(|region| value(text, region)?.parse().ok());
            let add = |sum: u64, bytes: Option<u64>| sum.checked_add(bytes?);
            bytes.into_iter().try_fold(0, add).filter(|_| !regions.is_empty())
        };
        Vram {
            total: sum(&self.capacity),
            used: sum(&self.current),
            regions: regions.into_iter().map(str::to_owned).collect(),
        }
    }
}

/// The memory of a GPU, which may have several regions. A sum is `None` if a number of it cannot be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Vram {
    pub(crate) regions: Vec<String>,
    /// The sum of the sizes in bytes.
    pub(crate) total: Option<u64>,
    /// What all processes use in bytes.
    pub(crate) used: Option<u64>,
}

/// Return the regions and the values of one of the kernel's files.
fn lines(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let lines = text.lines().filter_map(|line| line.trim().split_once([' ', '\t']));
    lines.map(|(region, value)| (region, value.trim()))
}

/// Return the value of a region in one of the kernel's files.
fn value<'t>(text: &'t str, region: &str) -> Option<&'t str> {
    lines(text).find_map(|(of, value)| (of == region).then_some(value))
}

/// Report whether the kernel can limit the memory of this region.
pub(crate) fn can_limit(tree: &dyn Tree, region: &str) -> bool {
    let text = SysfsDirectory::open(tree, ROOT).and_then(|root| root.text(CAPACITY));
    text.is_some_and(|text| value(&text, region).is_some())
}

/// Limit what a pod's processes can allocate of a region, which is the memory of the GPU `uuid`.
///
/// # Errors
/// Fails with [`FailureCode::NotSupported`] if the kernel has no such region, refuses the limit, or does not have it afterwards.
pub(crate) fn limit(tree: &dyn Tree, uuid: &str, region: &str, cgroup: &Cgroup, hard: MiB) -> Result<LimitAnswer, Failure> {
    if !can_limit(tree, region) {
        let why = format!(
            "dmem.capacity does not list it; the region {region} needs Linux 6.14 or later with CONFIG_CGROUP_DMEM, and cgroups of version 2"
        );
        return Err(refusal(uuid, cgroup, &why));
    }
    // Programs are shown the whole GPU whatever the limit of their container's cgroup is, and the pod's limit holds for the container.
    let left_out = cgroup.pod.is_some();
    if !left_out {
        let bytes = hard.0.saturating_mul(1 << 20);
        let path = cgroup.directory.join(MAX);
        set(&path, region, bytes).map_err(|why| refusal(uuid, cgroup, &format!("{}: {why}", path.display())))?;
    }
    Ok(LimitAnswer {
        used: MiB::from_bytes(used(&cgroup.directory, region)),
        left_out,
    })
}

/// Return the failure to limit a GPU's memory.
pub(crate) fn refusal(uuid: &str, cgroup: &Cgroup, why: &str) -> Failure {
    let text = format!(
        "the kernel does not limit the memory of GPU {uuid} for {}: {why}",
        cgroup.directory.display()
    );
    Failure::new(FailureCode::NotSupported, text)
}

/// Why the kernel does not have a limit.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotSet {
    #[error("{0}")]
    File(#[from] io::Error),
    #[error("the kernel accepted {wanted} bytes, and says afterwards {found:.20}")]
    Other { wanted: u64, found: String },
    #[error("the kernel accepted a limit, and does not list it")]
    Unlisted,
}

/// Set the limit in a cgroup's file in bytes, and check that the kernel has it: it keeps the old one if the cgroup uses more than the new one.
fn set(path: &Path, region: &str, bytes: u64) -> Result<(), NotSet> {
    let line = format!("{region} {bytes}\n");
    // A file that is not there must not be made: the controller is not enabled for the cgroup.
    let mut file = OpenOptions::new().write(true).truncate(true).open(path)?;
    // The kernel reads each write on its own.
    file.write_all(line.as_bytes())?;
    check(&fs::read_to_string(path)?, region, bytes)
}

/// Check that the kernel's file has this limit.
pub(crate) fn check(text: &str, region: &str, wanted: u64) -> Result<(), NotSet> {
    match value(text, region) {
        Some(found) if found.parse() == Ok(wanted) => Ok(()),
        Some(found) => Err(NotSet::Other {
            wanted,
            found: found.to_owned(),
        }),
        None => Err(NotSet::Unlisted),
    }
}

/// Return what the processes of a cgroup use in bytes; 0 if the kernel does not say it.
fn used(cgroup: &Path, region: &str) -> u64 {
    let text = fs::read_to_string(cgroup.join(CURRENT)).unwrap_or_default();
    value(&text, region).and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}
