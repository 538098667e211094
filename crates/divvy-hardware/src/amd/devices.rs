//! The GPUs that amdgpu drives, and the partitions of GPUs, each joined with its node in KFD's topology by the DRM render minor.
//!
//! ROCm/k8s-device-plugin (`internal/pkg/amdgpu/amdgpu.go`) joins the same files. Unlike in that plugin, no value is carried over
//! from one device to the next: a device that lacks a file never gets the values of the device before it.

use std::collections::BTreeMap;

use divvy_host::Tree;

use super::kfd::{self, KfdNode};
use crate::address::PciAddress;
use crate::backend::DriverCalls;
use crate::facts::MAX_GPUS;
use crate::kernel_files::Module;
use crate::sysfs::{SysfsDirectory, natural};

pub(super) const MODULE: Module = Module {
    name: "amdgpu",
    path: "/sys/module/amdgpu",
};
const FUNCTIONS: &str = "/sys/module/amdgpu/drivers/pci:amdgpu";
const PLATFORM: &str = "/sys/devices/platform";
/// The prefixes of partitions' names. The number follows an underscore or, if the kernel numbers the devices itself, a dot.
const PARTITIONS: [&str; 2] = ["amdgpu_xcp_", "amdgpu_xcp."];

/// A GPU, or a partition of one. The first partition of a GPU is the PCI function itself; the others are platform devices.
#[derive(Debug)]
pub(super) struct AmdDevice<'t> {
    /// The name in `/sys`, such as `0000:19:00.0` or `amdgpu_xcp_3`.
    pub(super) name: String,
    /// The PCI function, and the partition's number if this is not the first partition.
    pub(super) place: (PciAddress, Option<u32>),
    /// The files of the PCI function, if it exists.
    pub(super) function: Option<SysfsDirectory<'t>>,
    /// The minor numbers of the DRM nodes `card` and `renderD`.
    pub(super) card: Option<u32>,
    pub(super) render: Option<u32>,
    /// What KFD says about the device.
    pub(super) node: Option<KfdNode>,
    /// Why there is no `node`.
    pub(super) trouble: Option<String>,
    /// Whether the kernel has the device but KFD does not know it.
    pub(super) lost: bool,
    /// Whether the GPU is divided. If so, what its PCI function reports about memory is not about this device alone.
    pub(super) divided: bool,
}

/// Read all devices, ordered by place: a GPU, its partitions, the next GPU.
pub(super) fn devices<'t>(tree: &'t dyn Tree, calls: &DriverCalls) -> Vec<AmdDevice<'t>> {
    let (is_there, nodes) = {
        let _call = calls.enter("reading KFD's topology");
        match SysfsDirectory::open(tree, kfd::TOPOLOGY) {
            Some(topology) => (true, kfd::gpus(&topology)),
            None => (false, BTreeMap::new()),
        }
    };
    let mut devices = functions(tree, calls);
    let partitions = partitions(tree, calls, &nodes, &devices);
    devices.extend(partitions);
    devices.sort_by_key(|device| device.place);
    devices.truncate(MAX_GPUS);
    join(&mut devices, nodes, is_there);
    let divided: Vec<PciAddress> = devices
        .iter()
        .filter(|device| device.place.1.is_some())
        .map(|device| device.place.0)
        .collect();
    for device in &mut devices {
        device.divided = divided.contains(&device.place.0);
    }
    devices
}

fn functions<'t>(tree: &'t dyn Tree, calls: &DriverCalls) -> Vec<AmdDevice<'t>> {
    let names = SysfsDirectory::open(tree, FUNCTIONS).map(|directory| directory.names("/"));
    let addresses = names
        .into_iter()
        .flatten()
        .filter_map(|name| Some((PciAddress::parse(&name)?, name)));
    let found = addresses.filter_map(|(address, name)| {
        let _call = calls.enter(format!("reading GPU {name}"));
        // The entry is a link to the function's directory.
        let directory = SysfsDirectory::open(tree, &format!("{FUNCTIONS}/{name}"))?;
        Some(AmdDevice::new(name, (address, None), &directory, Some(directory.clone())))
    });
    found.collect()
}

/// Return the partitions that KFD knows. The kernel makes a device for each partition that a GPU could be divided into, even if
/// the GPU is not divided.
fn partitions<'t>(
    tree: &'t dyn Tree,
    calls: &DriverCalls,
    nodes: &BTreeMap<u32, Option<KfdNode>>,
    functions: &[AmdDevice<'t>],
) -> Vec<AmdDevice<'t>> {
    let names = SysfsDirectory::open(tree, PLATFORM).map(|directory| directory.names("/"));
    let numbers = names.into_iter().flatten().filter_map(|name| {
        let number = PARTITIONS.iter().find_map(|prefix| natural(name.strip_prefix(prefix)?))?;
        Some((number, name))
    });
    let found = numbers.filter_map(|(number, name)| {
        let _call = calls.enter(format!("reading GPU partition {name}"));
        let directory = SysfsDirectory::open(tree, &format!("{PLATFORM}/{name}"))?;
        let device = AmdDevice::new(name, (kfd::of_location(0, 0), Some(number)), &directory, None);
        let card = nodes.get(&device.render?)?.as_ref()?.card?;
        let parent = functions
            .iter()
            .filter(|function| function.place.0.card() == card)
            .min_by_key(|function| function.place);
        Some(AmdDevice {
            place: (parent.map_or(card, |parent| parent.place.0), Some(number)),
            function: parent.and_then(|parent| parent.function.clone()),
            ..device
        })
    });
    found.collect()
}

impl<'t> AmdDevice<'t> {
    fn new(
        name: String,
        place: (PciAddress, Option<u32>),
        directory: &SysfsDirectory<'t>,
        function: Option<SysfsDirectory<'t>>,
    ) -> AmdDevice<'t> {
        let first = |prefix| directory.numbered("/drm", prefix).first().copied();
        AmdDevice {
            name,
            place,
            function,
            card: first("card"),
            render: first("renderD"),
            node: None,
            trouble: None,
            lost: false,
            divided: false,
        }
    }
}

/// Give each device its KFD node, or the reason why it has none.
fn join(devices: &mut [AmdDevice<'_>], mut nodes: BTreeMap<u32, Option<KfdNode>>, is_there: bool) {
    let mut claims: BTreeMap<u32, usize> = BTreeMap::new();
    for render in devices.iter().filter_map(|device| device.render) {
        *claims.entry(render).or_default() += 1;
    }
    for device in devices {
        let Some(render) = device.render else {
            device.lost = true;
            device.trouble =
                Some("it has no render node in /sys; dmesg | grep amdgpu says why the driver did not start it".to_owned());
            continue;
        };
        if claims.get(&render) != Some(&1) {
            device.trouble = Some(format!(
                "another device also claims /dev/dri/renderD{render}; reload amdgpu or reboot"
            ));
            continue;
        }
        match nodes.remove(&render) {
            Some(Some(node)) => device.node = Some(node),
            Some(None) => {
                device.trouble = Some(format!("KFD lists renderD{render} twice; reload amdgpu or reboot"));
            }
            None if is_there => {
                device.lost = true;
                device.trouble = Some(format!(
                    "KFD does not list renderD{render}, so programs cannot use it; dmesg | grep -e amdgpu -e kfd says why"
                ));
            }
            None => {
                device.lost = true;
                device.trouble = Some(
                    "there is no /sys/class/kfd, so programs cannot use it: the kernel's amdgpu was built without compute; install amdgpu-dkms"
                        .to_owned(),
                );
            }
        }
    }
}
