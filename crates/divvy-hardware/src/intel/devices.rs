//! The PCI functions that xe drives.
//!
//! Intel's device plugin finds them in the same way (intel/intel-device-plugins-for-kubernetes, `cmd/gpu_plugin`): a function that has made virtual
//! functions is not a GPU for containers, and each of its virtual functions that xe drives is one.

use std::collections::BTreeMap;

use divvy_host::Tree;

use crate::address::PciAddress;
use crate::backend::DriverCalls;
use crate::dmem::{Regions, Vram};
use crate::kernel_files::Module;
use crate::sysfs::SysfsDirectory;

pub(super) const MODULE: Module = Module {
    name: "xe",
    path: "/sys/module/xe",
};
const FUNCTIONS: &str = "/sys/module/xe/drivers/pci:xe";
/// The vendor's number on the PCI bus.
const VENDOR: &str = "0x8086";

/// A PCI function that xe drives.
#[derive(Debug)]
pub(super) struct IntelDevice<'t> {
    /// The name in `/sys`, such as `0000:4d:00.0`.
    pub(super) name: String,
    pub(super) address: PciAddress,
    /// Its files.
    pub(super) function: SysfsDirectory<'t>,
    /// The PCI device id.
    pub(super) id: Option<u16>,
    /// The minor numbers of the DRM nodes `card` and `renderD`.
    pub(super) card: Option<u32>,
    pub(super) render: Option<u32>,
    /// The memory that the kernel gives out and limits: a region for each tile.
    pub(super) vram: Vram,
    /// The size in bytes of each tile's memory, of which the driver keeps a part for itself. A size is `None` if it cannot be read.
    tiles: Vec<Option<u64>>,
    /// Why programs cannot use the device.
    pub(super) trouble: Option<String>,
    /// Whether the driver has not started the device.
    pub(super) lost: bool,
}

impl IntelDevice<'_> {
    /// Report whether the driver says that the device has dedicated memory.
    pub(super) fn has_memory(&self) -> bool {
        !self.vram.regions.is_empty() || self.tiles.iter().any(|size| *size != Some(0))
    }

    /// Return the size of the memory in bytes.
    pub(super) fn total(&self) -> Option<u64> {
        let tiles = || self.tiles.iter().try_fold(0, |sum: u64, size| sum.checked_add((*size)?));
        self.vram.total.filter(|bytes| *bytes > 0).or_else(tiles)
    }
}

/// Read all devices in the order of the bus.
pub(super) fn devices<'t>(tree: &'t dyn Tree, calls: &DriverCalls, regions: &Regions) -> Vec<IntelDevice<'t>> {
    let names = SysfsDirectory::open(tree, FUNCTIONS).map(|directory| directory.names("/"));
    let addresses = names
        .into_iter()
        .flatten()
        .filter_map(|name| Some((PciAddress::parse(&name)?, name)));
    let found = addresses.filter_map(|(address, name)| {
        let _call = calls.enter(format!("reading GPU {name}"));
        // The entry is a link to the function's directory.
        let function = SysfsDirectory::open(tree, &format!("{FUNCTIONS}/{name}"))?;
        if function.text("/vendor")?.trim() != VENDOR || function.number("/sriov_numvfs").is_some_and(|count: u32| count > 0) {
            return None;
        }
        let first = |prefix| function.numbered("/drm", prefix).first().copied();
        Some(IntelDevice {
            id: function.text("/device").and_then(|text| device_id(&text)),
            card: first("card"),
            render: first("renderD"),
            vram: regions.numbered(&name),
            tiles: tiles(&function),
            trouble: None,
            lost: false,
            address,
            name,
            function,
        })
    });
    let mut devices: Vec<IntelDevice<'t>> = found.collect();
    devices.sort_by_key(|device| device.address);
    judge(&mut devices);
    devices
}

/// Read a device id such as `0x56c0`.
fn device_id(text: &str) -> Option<u16> {
    let digits = text.strip_suffix('\n')?.trim().strip_prefix("0x")?;
    let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u16::from_str_radix(digits, 16).ok()).flatten()
}

fn tiles(function: &SysfsDirectory<'_>) -> Vec<Option<u64>> {
    let tiles = function.numbered("/", "tile").into_iter();
    let sizes = tiles.filter_map(|tile| {
        let file = format!("/tile{tile}/physical_vram_size_bytes");
        // An integrated GPU's tiles do not have the file.
        function.text(&file)?;
        Some(function.number(&file))
    });
    sizes.collect()
}

/// Say of each device why programs cannot use it, if they cannot.
fn judge(devices: &mut [IntelDevice<'_>]) {
    let mut claims: BTreeMap<u32, usize> = BTreeMap::new();
    for render in devices.iter().filter_map(|device| device.render) {
        *claims.entry(render).or_default() += 1;
    }
    for device in devices {
        device.lost = device.render.is_none();
        device.trouble = match device.render {
            None => Some("it has no render node in /sys; dmesg | grep xe says why the driver did not start it".to_owned()),
            Some(render) if claims.get(&render) != Some(&1) => Some(format!(
                "another device also claims /dev/dri/renderD{render}; reload xe or reboot"
            )),
            Some(_) => None,
        };
    }
}
