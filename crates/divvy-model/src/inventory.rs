mod wire;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::limits::{
    DEVICE_TEXT_BYTES, DRIVER_TROUBLE_BYTES, GPU_LINKS, GPU_NODES, INVENTORY_BYTES, NODE_EVICTIONS, NODE_GPUS, NODE_PRODUCTS,
    OTHER_UNITS, REASON_BYTES, SHORT_TEXT_BYTES, quoted,
};
use crate::{Error, MemoryUnit, MiB, TestRun, Vendor, WholeKind};

use wire::Wire;

/// The agent's description of a node's GPUs, in the node annotation [`crate::names::INVENTORY`].
///
/// gpushare's two extended resources only give the sum of all GPUs. The inventory adds the size, model, and health of each GPU,
/// and the node's unit. The GPUs are grouped by vendor in the order of [`Vendor::ALL`]. Within a vendor, they are in the order of
/// the vendor's driver (by PCI address).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// Version of the agent that wrote the inventory.
    pub agent: String,
    /// Versions of the drivers that the agent found, such as `550.54.15`.
    pub drivers: BTreeMap<Vendor, String>,
    /// The node's unit: the number of MiB in one unit of `aliyun.com/gpu-mem`.
    pub unit: MemoryUnit,
    /// Units other than `unit` in which running containers were granted memory, because `--memory-unit` changed while they ran.
    /// The requests of their pods are in these units.
    pub other_units: BTreeSet<MemoryUnit>,
    /// Whether no more pods may be bound to this node for now: the kubelet does not know the agent's devices yet, or is about to
    /// lose them, and would permanently refuse each new pod.
    pub unschedulable: bool,
    /// The reason why containers get no driver libraries, or wrong ones, and what to type on the node. `None` if there is no such
    /// problem.
    pub driver_trouble: Option<String>,
    /// The UIDs of pods that the extender is to evict from the node, because their programs do not keep to the pods' shares. The extender evicts only
    /// pods with GPUs of this node.
    pub evict: BTreeSet<String>,
    /// The GPUs, including failed and lost ones.
    pub gpus: Vec<Gpu>,
}

/// One GPU of an [`Inventory`], or one partition of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// The GPU's vendor, whose driver reports the GPU.
    pub vendor: Vendor,
    /// The only identifier that survives reboots and renumbering: `GPU-…` (NVIDIA), `0x…` or `pci-…` (AMD), or the PCI address and
    /// the device id, such as `0000-4d-00-0-0x56c0` (Intel).
    pub uuid: String,
    /// The GPU's position among the vendor's GPUs by PCI address, starting at 0.
    pub index: u32,
    /// The GPU's own device nodes below `/dev`: `nvidia0`, or `dri/card1` and `dri/renderD128`.
    pub nodes: Vec<String>,
    /// The GPU of which this is a partition. `None` for a GPU that is not divided.
    pub partition: Option<Partition>,
    /// PCI address, such as `0000:81:00.0`; empty if unknown.
    pub pci: String,
    /// Product name, such as `NVIDIA A100-SXM4-40GB`; empty if unknown.
    pub model: String,
    /// The target for which programs must be compiled: the CUDA compute capability, such as `8.0`, or AMD's architecture, such as
    /// `gfx90a`. Empty if unknown.
    pub cc: String,
    /// Number of streaming multiprocessors (NVIDIA) or compute units (AMD); 0 if unknown.
    pub sms: u32,
    /// Highest clock of the multiprocessors in MHz; 0 if unknown.
    pub clock_mhz: u32,
    /// Memory bandwidth in GB/s (10⁹ bytes per second); 0 if unknown.
    pub bandwidth_gbs: u32,
    /// Total memory in MiB.
    pub total: MiB,
    /// Memory in MiB that is excluded from sharing (`--reserve-memory`).
    pub reserve: MiB,
    /// The number of units that the GPU offers: `(total − reserve) / unit`, rounded down. 0 for a GPU that is offered only as a whole.
    pub units: u64,
    /// The resource through which the GPU is offered as a whole ([`WholeKind::resource`]). `None` if it is not offered as a whole. A GPU that is
    /// shared as well ([`Gpu::is_shared`]) is then offered in both ways: a pod that has the whole GPU holds all its units, and a GPU with a
    /// share on it is not free as a whole.
    pub whole: Option<WholeKind>,
    /// Memory in MiB that is held without an allocation of a pod that names the GPU. It must not be allocated again yet.
    pub held: MiB,
    /// Whether a pod of the node has the GPU as a whole without such an allocation. If `false`, the memory is held only by containers whose pods are gone
    /// or have ended. `None` if no memory is held, and if the agent does not report it.
    pub held_by_pod: Option<bool>,
    /// NUMA node; `None` if the platform does not report it.
    pub numa: Option<u32>,
    /// Whether pods may be placed on the GPU.
    pub health: Health,
    /// The reason why `health` is not `ok`, such as `XID 79`.
    pub reason: Option<String>,
    /// The run whose pod may use the GPU while `health` is `testing`.
    pub test: Option<TestRun>,
    /// Connections to the node's other GPUs.
    pub links: Vec<GpuLink>,
    /// What holds a pod to its share of the GPU. `None` if nothing does: the share counts only when pods are placed.
    pub enforcement: Option<Enforcement>,
}

/// What holds a pod to its share of a GPU: one mechanism, or several together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Enforcement {
    cgroup: bool,
    guard: bool,
    mps: bool,
}

impl Enforcement {
    /// The driver limits the memory that the processes of the pod's cgroup can allocate (NVIDIA from R615 on, AMD and Intel from Linux 6.14 on).
    pub const CGROUP: Enforcement = Enforcement::of(true, false, false);
    /// A library that has the name of CUDA's driver library in the pod's containers refuses allocations above the share. A program can avoid it.
    pub const GUARD: Enforcement = Enforcement::of(false, true, false);
    /// CUDA's Multi-Process Service limits the part of the GPU's threads that each process of the pod can use. It limits no memory here.
    pub const MPS: Enforcement = Enforcement::of(false, false, true);

    /// All combinations.
    pub const ALL: [Enforcement; 7] = [
        Enforcement::CGROUP,
        Enforcement::GUARD,
        Enforcement::MPS,
        Enforcement::CGROUP.and(Enforcement::GUARD),
        Enforcement::CGROUP.and(Enforcement::MPS),
        Enforcement::GUARD.and(Enforcement::MPS),
        Enforcement::CGROUP.and(Enforcement::GUARD).and(Enforcement::MPS),
    ];

    const fn of(cgroup: bool, guard: bool, mps: bool) -> Enforcement {
        Enforcement { cgroup, guard, mps }
    }

    /// Return the mechanisms of both.
    #[must_use]
    pub const fn and(self, other: Enforcement) -> Enforcement {
        Enforcement::of(self.cgroup || other.cgroup, self.guard || other.guard, self.mps || other.mps)
    }

    /// Return these mechanisms together. `None` if there are none.
    pub fn all_of(mechanisms: impl IntoIterator<Item = Enforcement>) -> Option<Enforcement> {
        mechanisms.into_iter().reduce(Enforcement::and)
    }

    /// Return the name in the inventory: the names of the mechanisms, joined by `+`.
    pub fn name(self) -> &'static str {
        match (self.cgroup, self.guard, self.mps) {
            (true, false, false) => "cgroup",
            (false, true, false) => "guard",
            (false, false, true) => "mps",
            (true, true, false) => "cgroup+guard",
            (true, false, true) => "cgroup+mps",
            (false, true, true) => "guard+mps",
            (true, true, true) => "cgroup+guard+mps",
            // No constructor makes this value.
            (false, false, false) => "none",
        }
    }

    /// Return the names of the mechanisms.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        self.name().split('+')
    }

    /// Return the combination with this name. `None` for one of a newer agent.
    pub fn of_name(name: &str) -> Option<Enforcement> {
        Enforcement::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Report whether the driver limits the memory, which no program can avoid.
    pub fn has_cgroup(self) -> bool {
        self.cgroup
    }

    /// Report whether the pod's containers get the guard.
    pub fn has_guard(self) -> bool {
        self.guard
    }

    /// Report whether the pod's processes use the GPU through the Multi-Process Service.
    pub fn has_mps(self) -> bool {
        self.mps
    }

    /// Report whether something holds the pod to its share of the GPU's memory.
    pub fn limits_memory(self) -> bool {
        self.cgroup || self.guard
    }

    /// Report whether something holds the pod to its share of the GPU's compute time. The driver's own limit is only on memory.
    pub fn limits_compute(self) -> bool {
        self.guard || self.mps
    }
}

/// The GPU to which a partition belongs, and the size of the partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// The name of the divided GPU, which is the same text for all its partitions: the UUID for NVIDIA, and the PCI address for
    /// AMD.
    pub parent: String,
    /// The vendor's name for a partition of this size, such as `cpx_nps1`. Empty if unknown.
    #[serde(default)]
    pub profile: String,
}

/// Whether pods may be placed on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// Usable for new pods.
    #[default]
    Ok,
    /// Present but broken, for example after XID 79.
    Failed,
    /// Listed in an earlier inventory, but no longer present.
    Lost,
    /// Out of service, and being tested: usable only for the pod of the test ([`Gpu::test`]).
    Testing,
}

impl Health {
    /// All values.
    pub const ALL: [Health; 4] = [Health::Ok, Health::Failed, Health::Lost, Health::Testing];

    /// Return the word in the inventory, in tables, and in metrics.
    pub fn word(self) -> &'static str {
        match self {
            Health::Ok => "ok",
            Health::Failed => "failed",
            Health::Lost => "lost",
            Health::Testing => "testing",
        }
    }
}

/// A connection to another GPU, in JSON as in `["GPU-…","nvlink",12]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "wire::Link", into = "wire::Link")]
pub struct GpuLink {
    /// The UUID of the other GPU.
    pub peer: String,
    /// How the two are connected.
    pub kind: LinkKind,
    /// The number of direct connections; 0 for a place on the PCI bus.
    pub count: u32,
}

/// How two GPUs are connected: directly, or by the nearest common ancestor on the PCI bus.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub enum LinkKind {
    /// NVIDIA's direct connection.
    NvLink,
    /// AMD's direct connection.
    Xgmi,
    /// Both are on one board, or are partitions of one GPU.
    SameBoard,
    /// They share one PCI switch.
    SingleSwitch,
    /// They share several PCI switches.
    MultiSwitch,
    /// They share a PCI host bridge.
    HostBridge,
    /// They share a NUMA node.
    Node,
    /// They share only the machine.
    System,
    /// A kind that this release does not know.
    Other(String),
}

impl LinkKind {
    const KNOWN: [LinkKind; 8] = [
        LinkKind::NvLink,
        LinkKind::Xgmi,
        LinkKind::SameBoard,
        LinkKind::SingleSwitch,
        LinkKind::MultiSwitch,
        LinkKind::HostBridge,
        LinkKind::Node,
        LinkKind::System,
    ];

    /// Return the text in the inventory.
    pub fn as_str(&self) -> &str {
        match self {
            LinkKind::NvLink => "nvlink",
            LinkKind::Xgmi => "xgmi",
            LinkKind::SameBoard => "same-board",
            LinkKind::SingleSwitch => "single-switch",
            LinkKind::MultiSwitch => "multi-switch",
            LinkKind::HostBridge => "host-bridge",
            LinkKind::Node => "node",
            LinkKind::System => "system",
            LinkKind::Other(text) => text,
        }
    }
}

impl From<String> for LinkKind {
    fn from(text: String) -> LinkKind {
        let known = LinkKind::KNOWN.into_iter().find(|kind| kind.as_str() == text);
        known.unwrap_or(LinkKind::Other(text))
    }
}

/// What errors call an inventory.
const WHAT: &str = "inventory (node annotation divvy.dev/inventory)";

impl Inventory {
    /// Parse the annotation.
    ///
    /// # Errors
    /// Fails if the text is not an inventory of version 1 or 2 or exceeds [`crate::limits`], if two GPUs have the same UUID, or if a
    /// GPU offers more units than its memory holds. The last two mistakes would let the extender allocate the same memory twice.
    pub fn parse(text: &str) -> Result<Inventory, Error> {
        let wire: Wire = crate::parse_versions(WHAT, text, INVENTORY_BYTES, 2)?;
        let inventory = wire.into_inventory(WHAT)?;
        inventory.check_limits()?;
        for (i, gpu) in inventory.gpus.iter().enumerate() {
            if inventory.gpus[..i].iter().any(|other| other.uuid == gpu.uuid) {
                return Err(Error::invalid(WHAT, format!("GPU {} is listed twice", quoted(&gpu.uuid))));
            }
            match inventory.unit.memory(gpu.units) {
                Some(offered) if offered <= gpu.total => {}
                _ => {
                    return Err(Error::invalid(
                        WHAT,
                        format!(
                            "GPU {} offers {} units of {} but has only {} of memory",
                            quoted(&gpu.uuid),
                            gpu.units,
                            inventory.unit,
                            gpu.total
                        ),
                    ));
                }
            }
        }
        Ok(inventory)
    }

    fn check_limits(&self) -> Result<(), Error> {
        let most = |what: &str, found: usize, most: usize| {
            if found > most {
                Err(Error::invalid(
                    WHAT,
                    format!("it has {found} {what}; at most {most} are read"),
                ))
            } else {
                Ok(())
            }
        };
        most("GPUs", self.gpus.len(), NODE_GPUS)?;
        let products: BTreeSet<&str> = self.gpus.iter().map(|gpu| gpu.model.as_str()).collect();
        most("other units", self.other_units.len(), OTHER_UNITS)?;
        most("pods in evict", self.evict.len(), NODE_EVICTIONS)?;
        for uid in &self.evict {
            most("bytes in a UID in evict", uid.len(), SHORT_TEXT_BYTES)?;
        }
        most("different products", products.len(), NODE_PRODUCTS)?;
        most("bytes in agent", self.agent.len(), SHORT_TEXT_BYTES)?;
        for driver in self.drivers.values() {
            most("bytes in driver", driver.len(), SHORT_TEXT_BYTES)?;
        }
        let trouble = self.driver_trouble.as_deref().unwrap_or_default();
        most("bytes in driverTrouble", trouble.len(), DRIVER_TROUBLE_BYTES)?;
        for gpu in &self.gpus {
            let text = |name: &str, text: &str, bytes: usize| {
                if text.len() > bytes {
                    Err(Error::invalid(
                        WHAT,
                        format!(
                            "{name} of GPU {} has {} bytes; at most {bytes} are read",
                            quoted(&gpu.uuid),
                            text.len()
                        ),
                    ))
                } else {
                    Ok(())
                }
            };
            text("uuid", &gpu.uuid, DEVICE_TEXT_BYTES)?;
            text("model", &gpu.model, DEVICE_TEXT_BYTES)?;
            if let Some(Partition { parent, profile }) = &gpu.partition {
                text("parent", parent, DEVICE_TEXT_BYTES)?;
                text("profile", profile, SHORT_TEXT_BYTES)?;
            }
            if gpu.nodes.len() > GPU_NODES {
                return Err(Error::invalid(
                    WHAT,
                    format!(
                        "GPU {} has {} device nodes; at most {GPU_NODES} are read",
                        quoted(&gpu.uuid),
                        gpu.nodes.len()
                    ),
                ));
            }
            for node in &gpu.nodes {
                text("a device node", node, SHORT_TEXT_BYTES)?;
            }
            text("reason", gpu.reason.as_deref().unwrap_or_default(), REASON_BYTES)?;
            for (name, value) in [("pci", &gpu.pci), ("cc", &gpu.cc)] {
                text(name, value, SHORT_TEXT_BYTES)?;
            }
            if gpu.links.len() > GPU_LINKS {
                return Err(Error::invalid(
                    WHAT,
                    format!(
                        "GPU {} has {} links; at most {GPU_LINKS} are read",
                        quoted(&gpu.uuid),
                        gpu.links.len()
                    ),
                ));
            }
            for GpuLink { peer, kind, .. } in &gpu.links {
                text("a link's peer", peer, DEVICE_TEXT_BYTES)?;
                text("a link's kind", kind.as_str(), SHORT_TEXT_BYTES)?;
            }
        }
        Ok(())
    }

    /// Return the text of the annotation, which is one line of JSON. It has version 1 if all GPUs are shared NVIDIA GPUs, and
    /// version 2 otherwise. If it would be too large for its readers, long reasons are cut, and then links are left out.
    pub fn to_json(&self) -> String {
        wire::json(self)
    }

    /// Return the version of a vendor's driver. Empty if it is not known.
    pub fn driver(&self, vendor: Vendor) -> &str {
        self.drivers.get(&vendor).map_or("", String::as_str)
    }

    /// Return the sum of the units of all GPUs, including failed and lost ones. The inventory is valid only if the node's
    /// capacity of `aliyun.com/gpu-mem` equals this sum.
    pub fn total_units(&self) -> u64 {
        self.gpus.iter().fold(0, |sum, gpu| sum.saturating_add(gpu.units))
    }

    /// Return the node's unit, then the other units in which pods on this node may have made their requests.
    pub fn units(&self) -> impl Iterator<Item = MemoryUnit> {
        std::iter::once(self.unit).chain(self.other_units.iter().copied())
    }

    /// Return how much memory of a GPU all pods together may hold. If the node has no other units, this is the memory that the
    /// GPU offers. A pod that was bound in a smaller unit may hold part of the remainder that is lost when the GPU's memory is
    /// rounded down to the current unit. A GPU that is offered only as a whole offers all its memory.
    pub fn capacity(&self, gpu: &Gpu) -> MiB {
        if !gpu.is_shared() {
            return gpu.whole_capacity();
        }
        let others = self.other_units.iter().map(|unit| unit.memory(gpu.units_of(*unit)));
        let most = others.chain([self.unit.memory(gpu.units)]).flatten().max();
        gpu.at_least_whole(most.unwrap_or(MiB::ZERO))
    }

    /// Return the GPU with this UUID.
    pub fn gpu(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid)
    }
}

impl Gpu {
    /// Report whether the GPU's memory is shared, as `aliyun.com/gpu-mem`. A GPU can be offered as a whole as well.
    pub fn is_shared(&self) -> bool {
        self.whole.is_none() || self.units > 0 || self.vendor.is_shared_by_default()
    }

    /// Return how much memory of the GPU pods can hold. This is `units`, the memory of the GPU's units. If that is zero and the
    /// GPU is offered as a whole, it is [`Gpu::whole_capacity`], which only one pod can hold.
    pub fn at_least_whole(&self, units: MiB) -> MiB {
        if self.whole.is_some() && units == MiB::ZERO {
            self.whole_capacity()
        } else {
            units
        }
    }

    /// Return the memory that counts as used if a pod has a GPU that is offered only as a whole: all its memory. The amount is not
    /// zero even if the GPU's memory is unknown, so that no second pod fits.
    pub fn whole_capacity(&self) -> MiB {
        self.total.max(MiB(1))
    }

    /// Return the number of units that the GPU would offer if the unit were `unit`.
    pub fn units_of(&self, unit: MemoryUnit) -> u64 {
        if !self.is_shared() {
            return 0;
        }
        unit.units_in(self.total.saturating_sub(self.reserve))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"v":1,"agent":"0.1.0","driver":"550.54.15","unitMiB":1024,"gpus":[{"uuid":"GPU-1","index":0,"minor":0,"pci":"0000:81:00.0","model":"NVIDIA A100-SXM4-40GB","cc":"8.0","sms":108,"clockMHz":1410,"totalMiB":40960,"reserveMiB":0,"units":40,"heldMiB":0,"numa":0,"health":"ok","reason":null,"links":[["GPU-2","nvlink",12]]}]}"#;

    #[test]
    fn the_documented_form_is_read_and_written_to_the_byte() {
        let inventory = Inventory::parse(TEXT).expect("documented form");
        assert_eq!(inventory.to_json(), TEXT);
        assert_eq!(inventory.total_units(), 40);
    }

    const SECOND: &str = r#"{"v":2,"agent":"0.2.0","drivers":{"amd":"6.10.5"},"unitMiB":1024,"gpus":[{"vendor":"amd","uuid":"0x18f3a9c2b7d4e610","index":0,"nodes":["dri/card1","dri/renderD128"],"partition":{"parent":"0000:19:00.0","profile":"cpx_nps1"},"pci":"0000:19:00.0","model":"AMD Instinct MI210","cc":"gfx90a","sms":104,"clockMHz":0,"totalMiB":65520,"reserveMiB":0,"units":0,"whole":true,"heldMiB":0,"numa":0,"health":"ok","reason":null,"links":[["0x2","xgmi",1]]}]}"#;

    #[test]
    fn a_whole_mig_device_has_its_profiles_resource() {
        let text = TEXT.replacen("\"v\":1", "\"v\":2", 1).replacen(
            "\"driver\":\"550.54.15\"",
            "\"drivers\":{\"nvidia\":\"550.54.15\"}",
            1,
        );
        let text = text.replacen("\"minor\":0", "\"nodes\":[\"nvidia0\"]", 1).replacen(
            "{\"uuid\"",
            "{\"vendor\":\"nvidia\",\"uuid\"",
            1,
        );
        let whole = |profile: &str, field: &str| {
            let part = format!("\"nodes\":[\"nvidia0\"],\"partition\":{{\"parent\":\"GPU-0\",\"profile\":\"{profile}\"}}");
            let text = text.replacen("\"nodes\":[\"nvidia0\"]", &part, 1);
            let text = text.replacen("\"units\":40", &format!("\"units\":40{field}"), 1);
            let inventory = Inventory::parse(&text).expect("an inventory");
            let gpu = &inventory.gpus[0];
            assert!(gpu.is_shared(), "a share fits on it as well");
            let other = Inventory::parse(&inventory.to_json()).expect("what was written");
            assert_eq!(other, inventory);
            (gpu.whole, inventory.to_json() == text)
        };
        let mig = WholeKind::Mig("2g.10gb".parse().expect("a profile"));
        assert_eq!(whole("2g.10gb", ",\"wholeByProfile\":true"), (Some(mig), true));
        assert_eq!(
            whole("2g.10gb", ",\"whole\":true"),
            (Some(WholeKind::Gpu(Vendor::Nvidia)), true)
        );
        assert_eq!(whole("2g.10gb", ""), (None, true));
        assert_eq!(
            whole("odd", ",\"wholeByProfile\":true"),
            (None, false),
            "what a later release may offer"
        );
    }

    #[test]
    fn whole_gpus_of_another_vendor_need_version_2() {
        let inventory = Inventory::parse(SECOND).expect("documented form");
        assert_eq!(inventory.to_json(), SECOND);
        let gpu = &inventory.gpus[0];
        assert_eq!(
            (inventory.total_units(), inventory.capacity(gpu), gpu.vendor),
            (0, MiB(65520), Vendor::Amd)
        );
        assert!(!gpu.is_shared());
        let both = SECOND.replacen("\"units\":0", "\"units\":63", 1);
        for vendor in Vendor::ALL {
            let both = both.replacen("\"vendor\":\"amd\"", &format!("\"vendor\":\"{}\"", vendor.name()), 1);
            let inventory = Inventory::parse(&both).expect("offered in both ways");
            let gpu = &inventory.gpus[0];
            assert_eq!(
                (inventory.to_json(), inventory.total_units(), inventory.capacity(gpu)),
                (both, 63, MiB(63 * 1024))
            );
            assert!(gpu.is_shared(), "{vendor}");
        }
    }

    /// An extender of an older release can read what an agent of this release writes about NVIDIA's GPUs.
    #[test]
    fn an_inventory_keeps_version_1_while_it_suffices() {
        let first = Inventory::parse(TEXT).expect("documented form");
        let version = |edit: &dyn Fn(&mut Inventory)| {
            let mut inventory = first.clone();
            edit(&mut inventory);
            let text = inventory.to_json();
            assert_eq!(Inventory::parse(&text).as_ref(), Ok(&inventory), "{text}");
            text[..6].to_owned()
        };
        assert_eq!(version(&|_| ()), "{\"v\":1");
        assert_eq!(version(&|inventory| inventory.gpus.clear()), "{\"v\":1");
        assert_eq!(
            version(&|inventory| inventory.gpus[0].nodes = vec!["nvidia255".to_owned()]),
            "{\"v\":1"
        );
        let part = || {
            Some(Partition {
                parent: "GPU-1".to_owned(),
                profile: "1g.5gb".to_owned(),
            })
        };
        let second: [&dyn Fn(&mut Inventory); 5] = [
            &|inventory| inventory.drivers = BTreeMap::from([(Vendor::Amd, "6.10.5".to_owned())]),
            &|inventory| inventory.gpus[0].vendor = Vendor::Amd,
            &|inventory| (inventory.gpus[0].whole, inventory.gpus[0].units) = (Some(WholeKind::Gpu(Vendor::Nvidia)), 0),
            &|inventory| inventory.gpus[0].partition = part(),
            &|inventory| inventory.gpus[0].nodes = vec!["nvidia007".to_owned()],
        ];
        for edit in second {
            assert_eq!(version(edit), "{\"v\":2");
        }
    }

    /// The fields that the reader of the first release requires in an inventory. That reader refuses every version except 1.
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct FirstRelease {
        v: u32,
        #[expect(dead_code, reason = "only its presence matters")]
        agent: String,
        driver: String,
        #[serde(rename = "unitMiB")]
        unit: MemoryUnit,
        gpus: Vec<FirstReleaseGpu>,
    }

    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct FirstReleaseGpu {
        uuid: String,
        #[expect(dead_code, reason = "only its presence matters")]
        index: u32,
        minor: u32,
        #[serde(rename = "totalMiB")]
        total: MiB,
        units: u64,
        #[expect(dead_code, reason = "only its presence matters")]
        health: Health,
    }

    /// The case in which the agents are upgraded before the extender.
    /// The first release refuses any other node as a whole.
    #[test]
    fn the_first_release_reads_only_nvidia_nodes() {
        let mut inventory = Inventory::parse(TEXT).expect("documented form");
        inventory.gpus[0].nodes = vec![crate::nvidia::node(3)];
        let first: FirstRelease = serde_json::from_str(&inventory.to_json()).expect("the fields of version 1");
        let gpu = &first.gpus[0];
        assert_eq!(
            (first.v, first.driver.as_str(), first.unit),
            (1, "550.54.15", MemoryUnit::GIB)
        );
        assert_eq!(
            (gpu.uuid.as_str(), gpu.minor, gpu.total, gpu.units),
            ("GPU-1", 3, MiB(40960), 40)
        );
        // It checks the version before anything else, so it never takes a whole GPU for one that it may share.
        #[derive(Deserialize)]
        struct Version {
            v: u32,
        }
        let amd = Inventory::parse(SECOND).expect("documented form").gpus;
        inventory.gpus.extend(amd);
        let second: Version = serde_json::from_str(&inventory.to_json()).expect("it has a version");
        assert_eq!(second.v, 2);
    }

    /// The case in which the extender is upgraded before the agents. An agent of the first release writes the kind of each GPU
    /// into its inventory, which can still be read.
    #[test]
    fn an_inventory_of_the_first_release_is_read() {
        let older = TEXT.replacen("\"index\":0", "\"kind\":\"gpu\",\"parent\":null,\"index\":0", 1);
        assert_eq!(Inventory::parse(&older), Inventory::parse(TEXT));
        for field in ["\"minor\":0,", "\"driver\":\"550.54.15\","] {
            let error = Inventory::parse(&TEXT.replacen(field, "", 1)).expect_err(field).to_string();
            assert!(error.contains("is missing"), "{error}");
        }
    }

    #[test]
    fn a_gpu_of_a_vendor_that_a_newer_agent_knows_is_left_out() {
        let newer = SECOND.replacen("{\"vendor\":\"amd\"", "{\"vendor\":\"future\"", 1);
        assert_eq!(Inventory::parse(&newer).expect("the rest is read").gpus, []);
    }

    #[test]
    fn an_inventory_of_an_older_agent_has_no_memory_bandwidth() {
        let older = Inventory::parse(TEXT).expect("documented form");
        assert_eq!(older.gpus[0].bandwidth_gbs, 0);
        let text = TEXT.replacen("\"clockMHz\":1410,", "\"clockMHz\":1410,\"bandwidthGBs\":1555,", 1);
        let newer = Inventory::parse(&text).expect("with bandwidth");
        assert_eq!((newer.gpus[0].bandwidth_gbs, newer.to_json()), (1555, text));
    }

    /// The capacity of a GPU is rounded down to the finest of the units.
    #[test]
    fn other_units_are_written_only_if_they_exist() {
        let text = TEXT.replacen("\"unitMiB\":1024,", "\"unitMiB\":1024,\"otherUnitsMiB\":[256,1000],", 1);
        let text = text.replacen(
            "\"totalMiB\":40960,\"reserveMiB\":0,\"units\":40",
            "\"totalMiB\":15109,\"reserveMiB\":0,\"units\":14",
            1,
        );
        let inventory = Inventory::parse(&text).expect("with other units");
        assert_eq!(inventory.to_json(), text);
        assert_eq!(inventory.units().map(MemoryUnit::mib).collect::<Vec<_>>(), [1024, 256, 1000]);
        assert_eq!(inventory.capacity(&inventory.gpus[0]), MiB(59 * 256));
        let alone = Inventory {
            other_units: BTreeSet::new(),
            ..inventory
        };
        assert_eq!(alone.capacity(&alone.gpus[0]), MiB(14 * 1024));
    }

    #[test]
    fn unknown_fields_are_ignored_and_an_unknown_version_is_refused() {
        let newer = TEXT.replacen("\"driver\"", "\"future\":{\"a\":[1]},\"driver\"", 1);
        assert!(Inventory::parse(&newer).is_ok());
        let error = Inventory::parse(&TEXT.replacen("\"v\":1", "\"v\":3", 1))
            .expect_err("version 3")
            .to_string();
        assert_eq!(
            error,
            "inventory (node annotation divvy.dev/inventory) has version 3; this Divvy reads versions 1 to 2 (is another component newer?)"
        );
    }

    #[test]
    fn a_link_is_written_as_it_was_read_whatever_its_kind() {
        let known = "nvlink xgmi same-board single-switch multi-switch host-bridge node system".split(' ');
        for (kind, is_known) in known
            .map(|kind| (kind, true))
            .chain([("telepathy", false), ("NVLink", false), ("", false)])
        {
            let text = format!(r#"["GPU-1","{kind}",12]"#);
            let link: GpuLink = serde_json::from_str(&text).expect("a link");
            assert_eq!(link.kind == LinkKind::Other(kind.to_owned()), !is_known, "{text}");
            assert_eq!((link.peer.as_str(), link.count), ("GPU-1", 12));
            assert_eq!(serde_json::to_string(&link).expect("a text"), text);
        }
        let short = serde_json::from_str::<GpuLink>(r#"["GPU-1","nvlink"]"#)
            .expect_err("no number")
            .to_string();
        assert!(short.contains("tuple struct Link with 3 elements"), "{short}");
    }

    fn of(gpus: usize, links: usize) -> Inventory {
        let one = Inventory::parse(TEXT).expect("documented form");
        let uuid = |gpu: usize| format!("GPU-{gpu:036}");
        let link = |peer| GpuLink {
            peer: uuid(peer),
            kind: LinkKind::NvLink,
            count: 18,
        };
        let gpu = |number: usize| {
            let peers = (0..gpus).filter(|peer| *peer != number).cycle().take(links);
            Gpu {
                uuid: uuid(number),
                index: u32::try_from(number).expect("few"),
                links: peers.map(link).collect(),
                ..one.gpus[0].clone()
            }
        };
        Inventory {
            gpus: (0..gpus).map(gpu).collect(),
            ..one
        }
    }

    /// The machines are: 16 GPUs, each with an NVLink and a PCI entry for every other GPU; 8 GPUs, each of which was replaced
    /// seven times; and 16 GPUs, each of which MIG divides into 7 parts.
    #[test]
    fn the_largest_machines_are_read() {
        let mut divided = of(112, 0);
        for (gpu, number) in divided.gpus.iter_mut().zip(0_u32..) {
            gpu.uuid = format!("MIG-{number:036}");
            gpu.nodes = ["nvidia15", "nvidia-caps/nvidia-cap2047", "nvidia-caps/nvidia-cap2048"]
                .map(str::to_owned)
                .into();
            gpu.partition = Some(Partition {
                parent: format!("GPU-{:036}", number / 7),
                profile: "1g.10gb+me".to_owned(),
            });
            gpu.model = "NVIDIA H100 80GB HBM3 MIG 1g.10gb+me".to_owned();
        }
        for inventory in [of(16, 30), of(64, 0), of(8, 14), divided] {
            let text = inventory.to_json();
            assert_eq!(Inventory::parse(&text), Ok(inventory), "{} bytes", text.len());
        }
    }

    /// The message does not repeat the inventory.
    #[test]
    fn an_impossible_inventory_is_refused_in_words() {
        let with = |edit: &dyn Fn(&mut Gpu)| {
            let mut inventory = of(2, 0);
            edit(&mut inventory.gpus[1]);
            inventory
        };
        let long = || "a".repeat(50_000);
        let part_of = |parent, profile| Partition { parent, profile };
        let link = |peer, kind: String| GpuLink {
            peer,
            kind: kind.into(),
            count: 1,
        };
        let many = |gpu: &mut Gpu| gpu.links = vec![link(String::new(), String::new()); GPU_LINKS + 1];
        let mut products = of(17, 0);
        for (number, gpu) in products.gpus.iter_mut().enumerate() {
            gpu.model = format!("T{number}");
        }
        for (inventory, part) in [
            (of(129, 0), "it has 129 GPUs; at most 128 are read"),
            (of(3_300, 0), "at most 65536 are read"),
            (with(&many), "has 129 links; at most 128 are read"),
            (with(&|gpu| gpu.uuid = long()), "uuid of GPU \"aaa"),
            (with(&|gpu| gpu.model = long()), "model of GPU \"GPU-0"),
            (
                with(&|gpu| gpu.reason = Some(long())),
                "has 50000 bytes; at most 256 are read",
            ),
            (
                with(&|gpu| gpu.partition = Some(part_of(long(), String::new()))),
                "parent of GPU",
            ),
            (
                with(&|gpu| gpu.partition = Some(part_of(String::new(), long()))),
                "profile of GPU",
            ),
            (with(&|gpu| gpu.nodes = vec![long()]), "a device node of GPU"),
            (
                with(&|gpu| gpu.nodes = vec![String::new(); 9]),
                "has 9 device nodes; at most 8 are read",
            ),
            (with(&|gpu| gpu.pci = long()), "pci of GPU"),
            (with(&|gpu| gpu.cc = long()), "cc of GPU"),
            (with(&|gpu| gpu.links = vec![link(long(), String::new())]), "a link's peer"),
            (with(&|gpu| gpu.links = vec![link(String::new(), long())]), "a link's kind"),
            (
                Inventory {
                    drivers: BTreeMap::from([(Vendor::Nvidia, long())]),
                    ..of(1, 0)
                },
                "bytes in driver",
            ),
            (
                Inventory {
                    agent: long(),
                    ..of(1, 0)
                },
                "bytes in agent",
            ),
            (
                Inventory {
                    driver_trouble: Some(long()),
                    ..of(1, 0)
                },
                "bytes in driverTrouble",
            ),
            (
                Inventory {
                    other_units: (1..=9).filter_map(MemoryUnit::new).collect(),
                    ..of(1, 0)
                },
                "it has 9 other units; at most 8 are read",
            ),
            (
                Inventory {
                    evict: (0..33).map(|number| number.to_string()).collect(),
                    ..of(1, 0)
                },
                "it has 33 pods in evict; at most 32 are read",
            ),
            (
                Inventory {
                    evict: [long()].into(),
                    ..of(1, 0)
                },
                "bytes in a UID in evict",
            ),
            (products, "it has 17 different products; at most 16 are read"),
        ] {
            let error = Inventory::parse(&inventory.to_json()).expect_err(part).to_string();
            assert!(error.contains(part) && error.len() < 800, "{error}");
        }
        // serde_json's error repeats an unexpected string in full.
        let text = TEXT.replacen("\"ok\"", &format!("\"{}\"", long()), 1);
        let error = Inventory::parse(&text).expect_err("no health").to_string();
        assert!(error.len() < 800, "{} bytes", error.len());
    }

    #[test]
    fn memory_that_is_not_there_is_not_believed() {
        for (from, to) in [
            ("\"units\":40", "\"units\":41"),
            ("\"units\":40", "\"units\":18446744073709551615"),
        ] {
            assert!(Inventory::parse(&TEXT.replacen(from, to, 1)).is_err(), "{to}");
        }
        assert!(Inventory::parse(&TEXT.replacen("\"unitMiB\":1024", "\"unitMiB\":0", 1)).is_err());
        assert!(Inventory::parse("").is_err());
        assert!(Inventory::parse("null").is_err());
    }
}
