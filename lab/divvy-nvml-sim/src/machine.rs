//! The described machine in NVML's terms.

use std::path::Path;

use divvy_gpu_sim::description::{self, BadGpu, DescriptionError};
use divvy_model::LinkKind;
use divvy_model::machine::{MachineFabric, MachineGpu, MachineMig, MachineNode};

use crate::changes::{Division, Instance, MachineChanges};

/// One node of the description.
#[derive(Debug)]
pub(crate) struct NvmlMachine {
    pub(crate) name: String,
    /// The driver's version, such as `550.54.15`.
    pub(crate) driver: String,
    pub(crate) cards: Vec<NvmlCard>,
}

/// One GPU.
#[derive(Debug)]
pub(crate) struct NvmlCard {
    pub(crate) uuid: String,
    pub(crate) minor: u32,
    pub(crate) pci: Pci,
    /// The compute capability, as major and minor number.
    pub(crate) cc: (u32, u32),
    pub(crate) described: MachineGpu,
    /// For each NVLink, the index of the GPU at the other end.
    pub(crate) nvlinks: Vec<usize>,
    pub(crate) mig: Vec<SimMigDevice>,
    pub(crate) fabric: Option<CardFabric>,
}

/// The place of a GPU in an NVLink fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CardFabric {
    pub(crate) cluster: [u8; 16],
    pub(crate) clique: u32,
    /// `NVML_GPU_FABRIC_STATE_…`.
    pub(crate) state: u8,
}

/// A MIG device.
#[derive(Debug)]
pub(crate) struct SimMigDevice {
    pub(crate) uuid: String,
    pub(crate) gpu_instance: u32,
    pub(crate) compute_instance: u32,
    /// The profile of the GPU instance, if the description names it.
    pub(crate) profile: Option<u32>,
}

/// An address on the PCI bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pci {
    pub(crate) domain: u32,
    pub(crate) bus: u32,
    pub(crate) device: u32,
}

impl Pci {
    /// Parse an address such as `0000:81:00.0`. The domain may have four or eight digits, or be missing.
    pub(crate) fn parse(text: &str) -> Option<Pci> {
        let text = text.strip_suffix(".0").unwrap_or(text);
        let parts: Vec<u32> = text
            .split(':')
            .map(|part| u32::from_str_radix(part, 16))
            .collect::<Result<_, _>>()
            .ok()?;
        match parts[..] {
            [domain, bus, device] if bus < 256 && device < 32 => Some(Pci { domain, bus, device }),
            [bus, device] if bus < 256 && device < 32 => Some(Pci { domain: 0, bus, device }),
            _ => None,
        }
    }
}

impl NvmlMachine {
    /// Read the machine description, select a node (the one with this name, or the first), and divide its GPUs as `changes` says.
    pub(crate) fn load(path: &Path, node: Option<&str>, changes: &MachineChanges) -> Result<NvmlMachine, DescriptionError> {
        let mut node = description::read(path, node)?;
        for (index, changed) in &changes.gpus {
            if let (Some(gpu), Some(Division(devices))) = (node.gpus.get_mut(*index as usize), &changed.mig) {
                let device = |of: &Instance| MachineMig {
                    gpu_instance: of.gpu_instance,
                    compute_instance: of.compute_instance,
                    profile: Some(of.profile),
                    uuid: None,
                };
                gpu.mig = devices.as_ref().map(|devices| devices.iter().map(device).collect());
            }
        }
        NvmlMachine::of(&node)
    }

    fn of(node: &MachineNode) -> Result<NvmlMachine, DescriptionError> {
        let mut cards = Vec::with_capacity(node.gpus.len());
        for (index, described) in node.gpus.iter().enumerate() {
            let wrong = |what| DescriptionError::Gpu {
                node: node.name.clone(),
                index,
                what,
            };
            let pci = node.gpu_pci(index);
            let cc = described
                .cc
                .split_once('.')
                .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
            cards.push(NvmlCard {
                uuid: node.gpu_uuid(index),
                minor: node.gpu_minor(index),
                pci: Pci::parse(&pci).ok_or_else(|| wrong(BadGpu::Pci(pci)))?,
                cc: cc.ok_or_else(|| wrong(BadGpu::ComputeCapability(described.cc.clone())))?,
                described: described.clone(),
                nvlinks: Vec::new(),
                mig: described
                    .mig
                    .iter()
                    .flatten()
                    .enumerate()
                    .map(|(mig, of)| SimMigDevice {
                        uuid: node.mig_uuid(index, mig),
                        gpu_instance: of.gpu_instance,
                        compute_instance: of.compute_instance,
                        profile: of.profile,
                    })
                    .collect(),
                fabric: described
                    .fabric
                    .as_ref()
                    .map(|of| fabric(of).ok_or_else(|| wrong(BadGpu::Cluster(of.cluster.clone()))))
                    .transpose()?,
            });
        }
        let mut machine = NvmlMachine {
            name: node.name.clone(),
            driver: node.driver.clone(),
            cards,
        };
        for index in 0..machine.cards.len() {
            machine.cards[index].nvlinks = machine.nvlinks_of(index);
        }
        Ok(machine)
    }

    /// Return the kinds and counts of the links between two GPUs. It is enough if one of the two GPUs describes a link.
    fn links(&self, a: usize, b: usize) -> impl Iterator<Item = (&LinkKind, u32)> {
        let of = |from: usize, to: usize| {
            let links = &self.cards[from].described.links;
            links
                .iter()
                .filter(move |(other, ..)| *other as usize == to)
                .map(|(_, kind, count)| (kind, *count))
        };
        let own: Vec<_> = of(a, b).collect();
        let theirs: Vec<_> = of(b, a)
            .filter(|(kind, _)| !own.iter().any(|(known, _)| known == kind))
            .collect();
        own.into_iter().chain(theirs)
    }

    fn nvlinks_of(&self, index: usize) -> Vec<usize> {
        let peers = (0..self.cards.len()).filter(|peer| *peer != index);
        peers
            .flat_map(|peer| {
                let count = self
                    .links(index, peer)
                    .find(|(kind, _)| **kind == LinkKind::NvLink)
                    .map_or(0, |(_, count)| count);
                std::iter::repeat_n(peer, count as usize)
            })
            .collect()
    }

    /// Return the `nvmlGpuTopologyLevel_t` of the nearest common ancestor. For a pair without a described link it follows from the NUMA nodes:
    /// level `node` on the same NUMA node, level `system` otherwise.
    pub(crate) fn common_ancestor(&self, a: usize, b: usize) -> u32 {
        let level = |kind: &LinkKind| match kind {
            LinkKind::SameBoard => Some(0),
            LinkKind::SingleSwitch => Some(10),
            LinkKind::MultiSwitch => Some(20),
            LinkKind::HostBridge => Some(30),
            LinkKind::Node => Some(40),
            LinkKind::System => Some(50),
            LinkKind::NvLink | LinkKind::Xgmi | LinkKind::Other(_) => None,
        };
        if a == b {
            return 0;
        }
        let described = self.links(a, b).find_map(|(kind, _)| level(kind));
        let same_node = self.cards[a].described.numa == self.cards[b].described.numa;
        described.unwrap_or(if same_node { 40 } else { 50 })
    }

    /// Return the CUDA version of the driver as NVML encodes it: 12040 for 12.4 (NVIDIA's compatibility table).
    pub(crate) fn cuda_version(&self) -> i32 {
        divvy_gpu_sim::cuda_version(&self.driver)
    }
}

/// Return what NVML says about a fabric; `None` if its cluster is not a UUID.
fn fabric(described: &MachineFabric) -> Option<CardFabric> {
    let digits: String = described.cluster.chars().filter(|c| *c != '-').collect();
    let cluster = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
    Some(CardFabric {
        cluster: cluster.to_be_bytes(),
        clique: described.clique,
        state: described.state,
    })
}

impl NvmlCard {
    pub(crate) fn is_mig_capable(&self) -> bool {
        self.described.mig_capable || self.described.mig.is_some()
    }

    /// Return the number of FP32 lanes: SMs times lanes of one SM (CUDA C Programming Guide, "Arithmetic Instructions").
    pub(crate) fn cores(&self) -> u32 {
        let lanes = match self.cc {
            (3, _) => 192,
            (5, _) | (6, 1..) | (8, 1..) | (9.., _) => 128,
            (2, 0) => 32,
            (2, _) => 48,
            _ => 64,
        };
        self.described.sms.saturating_mul(lanes)
    }

    /// Return the `nvmlDeviceArchitecture_t` for the compute capability.
    pub(crate) fn architecture(&self) -> u32 {
        match self.cc {
            (3, _) => 2,
            (5, _) => 3,
            (6, _) => 4,
            (7, 5) => 6,
            (7, _) => 5,
            (8, 9) => 8,
            (8, _) => 7,
            (9, _) => 9,
            (10.., _) => 10,
            _ => u32::MAX,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(text: &str) -> Result<NvmlMachine, DescriptionError> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("m.toml");
        std::fs::write(&path, text).expect("file");
        NvmlMachine::load(&path, None, &MachineChanges::default())
    }

    #[test]
    fn bus_ids_are_read_in_all_their_forms() {
        let pci = Some(Pci {
            domain: 0,
            bus: 0x81,
            device: 2,
        });
        for text in ["0000:81:02.0", "00000000:81:02.0", "81:02.0"] {
            assert_eq!(Pci::parse(text), pci, "{text}");
        }
        for text in ["", "81", "0000:181:00.0", "0000:81:20.0", "x:81:00.0"] {
            assert_eq!(Pci::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_link_that_one_gpu_describes_is_seen_from_both_ends() {
        let gpu = "[[node.gpu]]\nmodel = \"m\"\nmemory_mib = 1\n";
        let links = "links = [[1, \"nvlink\", 2], [2, \"host-bridge\", 0]]\n";
        let machine = machine(&format!("v = 1\n[[node]]\nname = \"n\"\n{gpu}{links}{gpu}{gpu}numa = 1\n")).expect("machine");
        let nvlinks: Vec<_> = machine.cards.iter().map(|card| card.nvlinks.clone()).collect();
        assert_eq!(nvlinks, [vec![1, 1], vec![0, 0], vec![]]);
        let levels = [(0, 0), (0, 1), (0, 2), (2, 0), (1, 2)].map(|(a, b)| machine.common_ancestor(a, b));
        assert_eq!(levels, [0, 40, 30, 30, 50], "pairs that are not described: by NUMA node");
    }

    #[test]
    fn what_nvml_cannot_say_is_refused_when_the_description_is_read() {
        for (field, part) in [
            ("pci = \"here\"", "PCI bus id"),
            ("cc = \"new\"", "like \"8.0\""),
            ("fabric = { cluster = \"12-34\" }", "not a UUID"),
            (
                "fabric = { cluster = \"0000000g-0000-4000-8000-000000000000\" }",
                "not a UUID",
            ),
        ] {
            let text = format!("v = 1\n[[node]]\nname = \"n\"\n[[node.gpu]]\nmodel = \"m\"\nmemory_mib = 1\n{field}\n");
            let error = machine(&text).expect_err(field).to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(machine("v = 1").is_err_and(|error| matches!(error, DescriptionError::NoNode { .. })));
    }
}
