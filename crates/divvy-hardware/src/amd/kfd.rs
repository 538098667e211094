//! The topology of the compute driver KFD (Linux, `drivers/gpu/drm/amd/amdkfd/kfd_topology.c`).

use std::collections::BTreeMap;

use crate::address::PciAddress;
use crate::sysfs::{SysfsDirectory, SysfsProperties, natural};

pub(super) const TOPOLOGY: &str = "/sys/class/kfd/kfd/topology/nodes";

/// The link type XGMI (`CRAT_IOLINK_TYPE_XGMI` in kfd_crat.h).
const XGMI: u32 = 11;
/// The link type PCI Express (`CRAT_IOLINK_TYPE_PCIEXPRESS`).
const PCIE: u32 = 2;
/// The types of GPU memory: the memory that the CPU can read, and the memory that it cannot (`HSA_MEM_HEAP_TYPE_FB_PUBLIC`,
/// `_PRIVATE` in kfd_crat.h).
const HEAPS: [u32; 2] = [1, 2];
/// The maximum number of memory banks of a node. GPUs have one or two.
const BANKS: usize = 64;

/// A node of the topology that is a GPU or a partition of one. A value is `None` if it is missing or cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KfdNode {
    /// The node's number in the topology.
    pub(super) number: u32,
    /// The number by which KFD names the GPU elsewhere.
    pub(super) gpu_id: Option<u32>,
    /// The card's own number. Partitions of a card share it; some consumer cards have 0.
    pub(super) unique_id: Option<u64>,
    /// The address on the PCI bus, without the function, because in some kernels the function differs between the partitions of a
    /// card.
    pub(super) card: Option<PciAddress>,
    /// The PCI device id.
    pub(super) device_id: Option<u32>,
    /// The architecture's version, such as 90010.
    pub(super) gfx: Option<u32>,
    /// The number of compute units.
    pub(super) units: Option<u32>,
    /// The highest clock in MHz.
    pub(super) clock_mhz: Option<u32>,
    /// The size of the memory banks in bytes.
    pub(super) memory: Option<u64>,
}

/// Return the GPUs by render minor. A minor that two nodes claim gets no node, because it is not known which of the two is right.
pub(super) fn gpus(topology: &SysfsDirectory<'_>) -> BTreeMap<u32, Option<KfdNode>> {
    let mut found = BTreeMap::new();
    for number in topology.numbered("/", "") {
        let Some(node) = topology.below(&format!("/{number}")) else {
            continue;
        };
        let Some(text) = node.text("/properties") else { continue };
        let properties = SysfsProperties::parse(&text);
        // A processor has no render node: its minor is 0 or −1.
        let Some(render) = properties.get("drm_render_minor").filter(|minor| *minor > 0) else {
            continue;
        };
        let entry = gpu(&node, number, &properties);
        found.entry(render).and_modify(|known| *known = None).or_insert(Some(entry));
    }
    found
}

fn gpu(node: &SysfsDirectory<'_>, number: u32, properties: &SysfsProperties<'_>) -> KfdNode {
    let simds: Option<u32> = properties.get("simd_count");
    let location: Option<u32> = properties.get("location_id");
    KfdNode {
        number,
        gpu_id: node.number("/gpu_id"),
        unique_id: properties.get("unique_id"),
        // Older kernels write no domain, because they support only the first.
        card: location.map(|location| of_location(properties.get("domain").unwrap_or(0), location)),
        device_id: properties.get("device_id"),
        gfx: properties.get("gfx_target_version").filter(|version| *version > 0),
        units: simds
            .zip(properties.get("simd_per_cu"))
            .and_then(|(all, per_unit)| all.checked_div(per_unit)),
        clock_mhz: properties.get("max_engine_clk_fcompute"),
        memory: memory(node),
    }
}

/// Return the address of a card from KFD's `domain` and `location_id`. Some kernels store a partition's number in the bits of
/// the function, others in the bits above the bus.
pub(super) fn of_location(domain: u32, location: u32) -> PciAddress {
    PciAddress::of_card(domain, location >> 8 & 0xff, location >> 3 & 0x1f)
}

/// Return the size of a node's own memory, or `None` if it has none, or if one bank cannot be read.
fn memory(node: &SysfsDirectory<'_>) -> Option<u64> {
    let mut sum = 0_u64;
    for bank in node.numbered("/mem_banks", "").into_iter().take(BANKS) {
        let text = node.text(&format!("/mem_banks/{bank}/properties"))?;
        let properties = SysfsProperties::parse(&text);
        if HEAPS.contains(&properties.get("heap_type")?) {
            sum = sum.checked_add(properties.get("size_in_bytes")?)?;
        }
    }
    Some(sum).filter(|sum| *sum > 0)
}

/// Return how ROCm writes an architecture: the version's last two numbers are hexadecimal, so 90010 is `gfx90a`.
pub(super) fn architecture(version: u32) -> String {
    format!("gfx{}{:x}{:x}", version / 10_000, version / 100 % 100, version % 100)
}

/// What a node is connected to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Neighbours {
    /// The nodes at the other ends of XGMI links.
    pub(super) xgmi: Vec<u32>,
    /// The nodes at the other ends of direct PCI Express links: for a GPU, the processor.
    pub(super) pcie: Vec<u32>,
}

/// Return what a node is connected to, or `None` if a link cannot be read.
pub(super) fn neighbours(topology: &SysfsDirectory<'_>, node: u32) -> Option<Neighbours> {
    let node = topology.below(&format!("/{node}"))?;
    let mut found = Neighbours::default();
    for kind in ["io_links", "p2p_links"] {
        for name in node.names(&format!("/{kind}")) {
            if natural(&name).is_none() {
                continue;
            }
            let text = node.text(&format!("/{kind}/{name}/properties"))?;
            let properties = SysfsProperties::parse(&text);
            let to = properties.get("node_to")?;
            match properties.get("type")? {
                XGMI => found.xgmi.push(to),
                // Indirect links, from a GPU to others across the processors, are p2p_links.
                PCIE if kind == "io_links" => found.pcie.push(to),
                _ => {}
            }
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_have_the_names_that_rocm_gives_them() {
        for (version, name) in [
            (90_010, "gfx90a"),
            (90_402, "gfx942"),
            (90_006, "gfx906"),
            (100_302, "gfx1032"),
            (110_000, "gfx1100"),
            (120_001, "gfx1201"),
        ] {
            assert_eq!(architecture(version), name);
        }
    }
    #[test]
    fn partitions_of_a_card_are_at_its_address_in_all_kernels() {
        // Of an MI308X: 2560, 2561, and with the number in the upper bits.
        for location in [2560, 2561, 2567, 2560 | 3 << 28] {
            assert_eq!(of_location(0, location).to_string(), "0000:0a:00.0");
        }
        assert_eq!(of_location(1, 33_024).to_string(), "0001:81:00.0");
    }
}
