//! The two versions of the inventory's JSON (`docs/design/formats.md`).
//!
//! Version 1 describes NVIDIA GPUs, all of which are shared. Version 2 adds the vendor, partitions, and GPUs that are offered
//! only as a whole. A reader of version 1 would take a GPU that is offered only as a whole for a shared one, so it must refuse
//! the whole inventory.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Enforcement, Gpu, Health, Inventory, LinkKind, Partition};
use crate::limits::{INVENTORY_BYTES, shortened};
use crate::{Error, MemoryUnit, MiB, TestRun, Vendor, WholeKind, nvidia};

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
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    evict: BTreeSet<String>,
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
    /// Whether a MIG device is offered through the resource of its profile, such as `nvidia.com/mig-1g.5gb`. Only in version 2. Releases that
    /// do not know this field take the MIG device for one that is only shared.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    whole_by_profile: bool,
    #[serde(default, rename = "heldMiB")]
    held: MiB,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    held_by_pod: Option<bool>,
    #[serde(default)]
    numa: Option<u32>,
    health: Health,
    #[serde(default)]
    reason: Option<String>,
    /// [`TestRun`]. What is none reads as no test.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    test: Option<String>,
    #[serde(default)]
    links: Vec<super::GpuLink>,
    /// [`Enforcement::name`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    enforcement: Option<String>,
}

/// [`super::GpuLink`] in JSON: the peer, the kind, and the count. serde's errors contain this struct's name.
#[derive(Serialize, Deserialize)]
pub(super) struct Link(String, String, u32);

impl From<Link> for super::GpuLink {
    fn from(Link(peer, kind, count): Link) -> super::GpuLink {
        let kind = kind.into();
        super::GpuLink { peer, kind, count }
    }
}

impl From<super::GpuLink> for Link {
    fn from(link: super::GpuLink) -> Link {
        Link(link.peer, link.kind.as_str().to_owned(), link.count)
    }
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
            evict: inventory.evict.clone(),
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
            let partition = gpu.partition.filter(|_| self.v > 1);
            gpus.push(Gpu {
                vendor,
                uuid: gpu.uuid,
                index: gpu.index,
                nodes,
                pci: gpu.pci,
                model: gpu.model,
                cc: gpu.cc,
                sms: gpu.sms,
                clock_mhz: gpu.clock_mhz,
                bandwidth_gbs: gpu.bandwidth_gbs,
                total: gpu.total,
                reserve: gpu.reserve,
                units: gpu.units,
                whole: match (gpu.whole, gpu.whole_by_profile) {
                    _ if self.v == 1 => None,
                    (true, _) => Some(WholeKind::Gpu(vendor)),
                    (false, true) => partition.as_ref().and_then(of_profile),
                    (false, false) => None,
                },
                partition,
                held: gpu.held,
                held_by_pod: gpu.held_by_pod,
                numa: gpu.numa,
                health: gpu.health,
                reason: gpu.reason,
                test: gpu.test.as_deref().and_then(TestRun::parse),
                links: gpu.links,
                enforcement: gpu.enforcement.as_deref().and_then(Enforcement::of_name),
            });
        }
        Ok(Inventory {
            agent: self.agent,
            drivers,
            unit: self.unit,
            other_units: self.other_units,
            unschedulable: self.unschedulable,
            driver_trouble: self.driver_trouble,
            evict: self.evict,
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
            whole_by_profile: matches!(gpu.whole, Some(WholeKind::Mig(_))),
            held: gpu.held,
            held_by_pod: gpu.held_by_pod,
            numa: gpu.numa,
            health: gpu.health,
            reason: gpu.reason.clone(),
            test: gpu.test.as_ref().map(TestRun::to_string),
            links: gpu.links.clone(),
            enforcement: gpu.enforcement.map(|kind| kind.name().to_owned()),
        }
    }
}

/// What is left out of an inventory that would be too large for its readers, one step after the other.
enum Omission {
    /// Reasons have at most this number of bytes. The agent's log has them in full.
    LongReasons(usize),
    /// Links of GPUs on which nothing can be placed.
    LinksOfUnhealthy,
    /// [`Gpu::held_by_pod`]. Readers then decide as they do for an older agent, which does not report it.
    Holders,
    /// Links that are no NVLinks.
    SlowLinks,
    /// All links. GPUs are then chosen as if nothing were known about their connections.
    Links,
    /// Which runs test GPUs: no pod can test them then. It takes more than 100 GPUs that are tested at a time.
    Tests,
}

use Omission::{Holders, Links, LinksOfUnhealthy, LongReasons, SlowLinks, Tests};

/// The omissions in their order. Placement does not depend on the first ones.
const OMISSIONS: [Omission; 9] = [
    LongReasons(128),
    LongReasons(64),
    LinksOfUnhealthy,
    LongReasons(32),
    LongReasons(8),
    Holders,
    SlowLinks,
    Links,
    Tests,
];

/// Return the JSON of an inventory. Readers refuse one with more than [`INVENTORY_BYTES`], so as much as necessary is left out.
pub(super) fn json(inventory: &Inventory) -> String {
    let text = |inventory: &Inventory| {
        serde_json::to_string(&Wire::of(inventory)).expect("an inventory has only string keys and numbers")
    };
    let mut found = text(inventory);
    let mut shorter = Cow::Borrowed(inventory);
    for omission in &OMISSIONS {
        if found.len() <= INVENTORY_BYTES {
            break;
        }
        shorter.to_mut().gpus.iter_mut().for_each(|gpu| omission.apply(gpu));
        found = text(&shorter);
    }
    found
}

impl Omission {
    fn apply(&self, gpu: &mut Gpu) {
        match self {
            LongReasons(most) => gpu.reason = gpu.reason.as_deref().map(|reason| shortened(reason, *most).into_owned()),
            Holders => gpu.held_by_pod = None,
            LinksOfUnhealthy if gpu.health == Health::Ok => {}
            SlowLinks => gpu.links.retain(|link| link.kind == LinkKind::NvLink),
            LinksOfUnhealthy | Links => gpu.links.clear(),
            Tests => gpu.test = None,
        }
    }
}

/// Return as what a MIG device of this profile is offered. `None` for a profile that cannot be named.
fn of_profile(partition: &Partition) -> Option<WholeKind> {
    partition.profile.parse().ok().map(WholeKind::Mig)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{NODE_GPUS, REASON_BYTES, TEST_RUN_BYTES};

    /// 16 fully connected GPUs, of which 14 were divided into 112 parts; all are unhealthy or lost, and none says why in few words.
    fn worst() -> Inventory {
        let device = |number: usize| {
            let is_part = number >= 16;
            let uuid = |number: usize| format!("{}-{number:036}", if number >= 16 { "MIG" } else { "GPU" });
            let parent = (number.saturating_sub(16)) / 8;
            let peers = (0..16).filter(|peer| !is_part && *peer != number);
            let link = |peer, kind| crate::GpuLink {
                peer: uuid(peer),
                kind,
                count: 18,
            };
            let links = peers.flat_map(|peer| [LinkKind::NvLink, LinkKind::SingleSwitch].map(|kind| link(peer, kind)));
            let nodes = ["nvidia15", "nvidia-caps/nvidia-cap2047", "nvidia-caps/nvidia-cap2048"];
            Gpu {
                vendor: Vendor::Nvidia,
                uuid: uuid(number),
                index: u32::try_from(number).expect("few"),
                nodes: nodes
                    .iter()
                    .take(if is_part { 3 } else { 1 })
                    .map(|node| (*node).to_owned())
                    .collect(),
                partition: is_part.then(|| Partition {
                    parent: uuid(parent),
                    profile: "1g.10gb+me".to_owned(),
                }),
                pci: "0000:81:00.0".to_owned(),
                model: "NVIDIA H100 80GB HBM3 MIG 1g.10gb+me".to_owned(),
                cc: "9.0".to_owned(),
                sms: 132,
                clock_mhz: 1980,
                bandwidth_gbs: 3352,
                total: MiB(81559),
                reserve: MiB(1024),
                units: 78,
                whole: is_part.then(|| WholeKind::Mig("1g.10gb+me".parse().expect("a profile"))),
                held: MiB(81559),
                held_by_pod: Some(false),
                numa: Some(1),
                health: if number.is_multiple_of(2) {
                    Health::Failed
                } else {
                    Health::Lost
                },
                // Each of these characters has two bytes, and each quotation mark has two in JSON.
                reason: Some("ä\"".repeat(REASON_BYTES / 3)),
                test: TestRun::parse(&"z".repeat(TEST_RUN_BYTES)),
                links: links.collect(),
                enforcement: (!is_part).then_some(Enforcement::CGROUP),
            }
        };
        Inventory {
            agent: "0.1.0".to_owned(),
            drivers: BTreeMap::from([(Vendor::Nvidia, "550.54.15".to_owned())]),
            unit: MemoryUnit::GIB,
            other_units: BTreeSet::new(),
            unschedulable: false,
            driver_trouble: Some("d".repeat(crate::limits::DRIVER_TROUBLE_BYTES)),
            evict: BTreeSet::new(),
            gpus: (0..NODE_GPUS).map(device).collect(),
        }
    }

    #[test]
    fn the_inventory_of_any_machine_can_be_read() {
        let without_links = |mut inventory: Inventory| {
            inventory.gpus.iter_mut().for_each(|gpu| gpu.links.clear());
            inventory
        };
        let healthy = |mut inventory: Inventory| {
            inventory.gpus.truncate(100);
            for gpu in &mut inventory.gpus {
                (gpu.health, gpu.test) = (Health::Ok, None);
            }
            inventory
        };
        for (inventory, has_links) in [(worst(), false), (without_links(worst()), false), (healthy(worst()), true)] {
            let text = json(&inventory);
            let read = Inventory::parse(&text).expect("readable");
            let plain = |inventory: &Inventory| {
                let mut inventory = inventory.clone();
                for gpu in &mut inventory.gpus {
                    (gpu.reason, gpu.links, gpu.test, gpu.held_by_pod) = (None, Vec::new(), None, None);
                }
                inventory
            };
            assert_eq!(plain(&read), plain(&inventory), "nothing else is left out");
            assert!(
                read.gpus
                    .iter()
                    .all(|gpu| gpu.reason.as_deref().is_some_and(|reason| reason.starts_with("ä\"")))
            );
            assert_eq!(read.gpus.iter().any(|gpu| !gpu.links.is_empty()), has_links);
        }
    }

    /// A text that is not a valid id is read as no id.
    #[test]
    fn a_test_runs_id_is_read_as_written() {
        let mut inventory = worst();
        inventory.gpus.truncate(1);
        let text = json(&inventory);
        assert_eq!(
            Inventory::parse(&text).expect("readable").gpus[0].test,
            inventory.gpus[0].test
        );
        let id = "z".repeat(TEST_RUN_BYTES);
        for wrong in ["", "true", " a", &"z".repeat(TEST_RUN_BYTES + 1)] {
            let read = Inventory::parse(&text.replace(&format!("\"{id}\""), &format!("\"{wrong}\""))).expect("readable");
            assert_eq!(read.gpus[0].test.is_some(), wrong == "true", "{wrong}");
        }
    }

    /// No reason is left out while the inventory is short enough.
    #[test]
    fn the_longest_reasons_are_left_out_first() {
        let mut few = worst();
        few.gpus.truncate(16);
        assert_eq!(Inventory::parse(&json(&few)), Ok(few));
        let mut more = worst();
        more.gpus.truncate(48);
        let read = Inventory::parse(&json(&more)).expect("readable");
        let longest = read.gpus.iter().filter_map(|gpu| gpu.reason.as_ref()).map(String::len).max();
        assert!(
            longest.is_some_and(|longest| (64..REASON_BYTES).contains(&longest)),
            "{longest:?}"
        );
        let links = |inventory: &Inventory| inventory.gpus.iter().map(|gpu| gpu.links.len()).sum::<usize>();
        assert_eq!(links(&read), links(&more));
    }
}
