//! The two versions of the inventory's JSON (`docs/design/formats.md`).
//!
//! Version 1 describes NVIDIA GPUs, all of which are shared. Version 2 adds the vendor, partitions, and GPUs that are offered
//! only as a whole. A reader of version 1 would take a GPU that is offered only as a whole for a shared one, so it must refuse
//! the whole inventory.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Gpu, Health, Inventory, Link, Partition};
use crate::{Error, MemoryUnit, MiB, Vendor, WholeKind, nvidia};

/// The fields of both versions. `None` and default values are omitted from the JSON.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Wire {
    v: u32,
    agent: String,
    /// Only in version 1: the version of NVIDIA's driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    driver: Option<String>,
    /// Only in version 2: driver versions by vendor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    drivers: Option<BTreeMap<String, String>>,
    #[serde(rename = "unitMiB")]
    unit: MemoryUnit,
    #[serde(default, rename = "otherUnitsMiB", skip_serializing_if = "BTreeSet::is_empty")]
    other_units: BTreeSet<MemoryUnit>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    unschedulable: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    driver_trouble: Option<String>,
    gpus: Vec<WireGpu>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireGpu {
    /// Only in version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vendor: Option<String>,
    uuid: String,
    index: u32,
    /// Only in version 1: the minor number of `/dev/nvidia<minor>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    minor: Option<u32>,
    /// Only in version 2.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    nodes: Vec<String>,
    /// Only in version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    partition: Option<Partition>,
    #[serde(default)]
    pci: String,
    #[serde(default)]
    model: String,
    #[serde(default)]
    cc: String,
    #[serde(default)]
    sms: u32,
    #[serde(default, rename = "clockMHz")]
    clock_mhz: u32,
    #[serde(default, rename = "bandwidthGBs", skip_serializing_if = "is_zero")]
    bandwidth_gbs: u32,
    #[serde(rename = "totalMiB")]
    total: MiB,
    #[serde(default, rename = "reserveMiB")]
    reserve: MiB,
    units: u64,
    /// Whether the GPU is offered through its vendor's resource for whole GPUs. Only in version 2.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    whole: bool,
    /// The other resource through which the GPU is offered as a whole, such as `nvidia.com/mig-1g.5gb`. Only in version 2. Releases that do
    /// not know this field take the GPU for one that is only shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    whole_resource: Option<String>,
    #[serde(default, rename = "heldMiB")]
    held: MiB,
    #[serde(default)]
    numa: Option<u32>,
    health: Health,
    #[serde(default)]
    reason: Option<String>,
    #[serde(default)]
    links: Vec<Link>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Wire {
    /// Choose the version and fill in its fields. Version 1 is used whenever it can describe the node, so that an extender of an
    /// older release can still read the nodes whose agents were upgraded first.
    pub(super) fn of(inventory: &Inventory) -> Wire {
        let first = first_version(inventory);
        let drivers = inventory.drivers.iter();
        Wire {
            v: if first.is_some() { 1 } else { 2 },
            agent: inventory.agent.clone(),
            driver: first.is_some().then(|| inventory.driver(ONLY).to_owned()),
            drivers: first.is_none().then(|| {
                drivers
                    .map(|(vendor, version)| (vendor.name().to_owned(), version.clone()))
                    .collect()
            }),
            unit: inventory.unit,
            other_units: inventory.other_units.clone(),
            unschedulable: inventory.unschedulable,
            driver_trouble: inventory.driver_trouble.clone(),
            gpus: match first {
                Some(minors) => inventory
                    .gpus
                    .iter()
                    .zip(minors)
                    .map(|(gpu, minor)| WireGpu {
                        minor: Some(minor),
                        vendor: None,
                        nodes: Vec::new(),
                        ..WireGpu::of(gpu)
                    })
                    .collect(),
                None => inventory.gpus.iter().map(WireGpu::of).collect(),
            },
        }
    }

    /// Convert a text of either version to an inventory. GPUs of a vendor that this release does not know are omitted, because
    /// nothing can be placed on them.
    pub(super) fn into_inventory(self, what: &'static str) -> Result<Inventory, Error> {
        let missing = |field: &str| Error::invalid(what, format!("the field {field} is missing"));
        let drivers = match (self.v, self.driver, self.drivers) {
            (1, Some(driver), _) => BTreeMap::from([(ONLY, driver)]),
            (1, None, _) => return Err(missing("driver")),
            (_, _, Some(drivers)) => {
                let known = drivers.into_iter();
                known
                    .filter_map(|(name, version)| Some((Vendor::of_name(&name)?, version)))
                    .collect()
            }
            (_, _, None) => return Err(missing("drivers")),
        };
        let mut gpus = Vec::with_capacity(self.gpus.len());
        for gpu in self.gpus {
            let (vendor, nodes) = match (self.v, gpu.vendor.as_deref(), gpu.minor) {
                (1, _, Some(minor)) => (Some(ONLY), vec![nvidia::node(minor)]),
                (1, _, None) => return Err(missing("minor")),
                (_, Some(name), _) => (Vendor::of_name(name), gpu.nodes),
                (_, None, _) => return Err(missing("vendor")),
            };
            let Some(vendor) = vendor else { continue };
            gpus.push(Gpu {
                vendor,
                uuid: gpu.uuid,
                index: gpu.index,
                nodes,
                partition: gpu.partition.filter(|_| self.v > 1),
                pci: gpu.pci,
                model: gpu.model,
                cc: gpu.cc,
                sms: gpu.sms,
                clock_mhz: gpu.clock_mhz,
                bandwidth_gbs: gpu.bandwidth_gbs,
                total: gpu.total,
                reserve: gpu.reserve,
                units: gpu.units,
                whole: match (gpu.whole, gpu.whole_resource) {
                    _ if self.v == 1 => None,
                    (true, _) => Some(WholeKind::Gpu(vendor)),
                    (false, other) => other.and_then(|name| WholeKind::of_resource(&name)),
                },
                held: gpu.held,
                numa: gpu.numa,
                health: gpu.health,
                reason: gpu.reason,
                links: gpu.links,
            });
        }
        Ok(Inventory {
            agent: self.agent,
            drivers,
            unit: self.unit,
            other_units: self.other_units,
            unschedulable: self.unschedulable,
            driver_trouble: self.driver_trouble,
            gpus,
        })
    }
}

impl WireGpu {
    fn of(gpu: &Gpu) -> WireGpu {
        WireGpu {
            vendor: Some(gpu.vendor.name().to_owned()),
            uuid: gpu.uuid.clone(),
            index: gpu.index,
            minor: None,
            nodes: gpu.nodes.clone(),
            partition: gpu.partition.clone(),
            pci: gpu.pci.clone(),
            model: gpu.model.clone(),
            cc: gpu.cc.clone(),
            sms: gpu.sms,
            clock_mhz: gpu.clock_mhz,
            bandwidth_gbs: gpu.bandwidth_gbs,
            total: gpu.total,
            reserve: gpu.reserve,
            units: gpu.units,
            whole: gpu.whole == Some(WholeKind::Gpu(gpu.vendor)),
            whole_resource: gpu
                .whole
                .filter(|kind| *kind != WholeKind::Gpu(gpu.vendor))
                .map(|kind| kind.resource().into_owned()),
            held: gpu.held,
            numa: gpu.numa,
            health: gpu.health,
            reason: gpu.reason.clone(),
            links: gpu.links.clone(),
        }
    }
}

/// Return the minor number of each GPU if version 1 can describe all GPUs, else `None`.
fn first_version(inventory: &Inventory) -> Option<Vec<u32>> {
    if inventory.drivers.keys().any(|vendor| *vendor != ONLY) {
        return None;
    }
    let plain = |gpu: &Gpu| gpu.whole.is_none() && gpu.partition.is_none() && gpu.vendor == ONLY;
    inventory
        .gpus
        .iter()
        .map(|gpu| nvidia::minor(&gpu.nodes).filter(|_| plain(gpu)))
        .collect()
}

/// The only vendor whose GPUs version 1 can describe.
const ONLY: Vendor = Vendor::Nvidia;
