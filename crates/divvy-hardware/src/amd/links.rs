//! How the GPUs are connected.

use std::collections::BTreeMap;

use divvy_host::Tree;
use divvy_model::{GpuLink, LinkKind};

use super::FoundAmdDevice;
use super::kfd::{self, Neighbours};
use crate::backend::DriverCalls;
use crate::sysfs::SysfsDirectory;

/// If there are more GPUs than this, only partitions of the same GPU are connected. A machine has so many GPUs only if they are
/// divided, and then all of them are in one XGMI hive, so no other connection would distinguish them. All connections together
/// would fit neither a line of the protocol nor the node's inventory.
const MOST_CONNECTED: usize = 16;

/// The links as they were last read. They do not change while the same GPUs are there.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// The GPUs for which the links were read.
    of: Vec<KfdIdentity>,
    neighbours: Option<BTreeMap<u32, Neighbours>>,
}

/// The number of a GPU's node in KFD's topology, and the GPU's own number.
type KfdIdentity = (u32, Option<u32>);

impl Links {
    /// Connect the GPUs.
    pub(super) fn connect(&mut self, tree: &dyn Tree, calls: &DriverCalls, found: &mut [FoundAmdDevice<'_>]) {
        let neighbours = self.read(tree, calls, found);
        // Of each GPU: its position, UUID, card, node in KFD, and NUMA node.
        let ends: Vec<_> = found
            .iter()
            .enumerate()
            .filter_map(|(at, found)| {
                let (node, facts) = (found.device.node.as_ref()?, found.facts.as_ref().ok()?);
                Some((at, facts.uuid.clone(), found.device.place.0, node.number, facts.numa))
            })
            .collect();
        for (at, _, card, node, numa) in &ends {
            let Some(Ok(facts)) = found.get_mut(*at).map(|found| found.facts.as_mut()) else {
                continue;
            };
            for (_, peer, peer_card, peer_node, peer_numa) in ends.iter().filter(|end| end.0 != *at) {
                let mut link = |kind, count| {
                    let peer = peer.clone();
                    facts.links.push(GpuLink { peer, kind, count });
                };
                if card == peer_card {
                    link(LinkKind::SameBoard, 0);
                }
                let Some(neighbours) = &neighbours else { continue };
                let of = |node| neighbours.get(node);
                let names = |from, to| of(from).is_some_and(|from| from.xgmi.contains(to));
                if names(node, peer_node) || names(peer_node, node) {
                    link(LinkKind::Xgmi, 1);
                }
                if card == peer_card {
                    continue;
                }
                // The processors that the GPUs are attached to, or the NUMA nodes.
                let processors = of(node).zip(of(peer_node)).map(|(a, b)| (&a.pcie, &b.pcie));
                let near = match processors {
                    Some((a, b)) if !a.is_empty() && !b.is_empty() => Some(a.iter().any(|node| b.contains(node))),
                    _ => numa.zip(*peer_numa).map(|(a, b)| a == b),
                };
                match near {
                    Some(true) => link(LinkKind::Node, 0),
                    Some(false) => link(LinkKind::System, 0),
                    None => {}
                }
            }
        }
    }

    /// Return what each node is connected to. Return `None` if the machine has too many GPUs, or if KFD's topology cannot be
    /// opened.
    fn read(&mut self, tree: &dyn Tree, calls: &DriverCalls, found: &[FoundAmdDevice<'_>]) -> Option<BTreeMap<u32, Neighbours>> {
        if found.len() > MOST_CONNECTED {
            return None;
        }
        let nodes = found.iter().filter_map(|found| found.device.node.as_ref());
        let now: Vec<KfdIdentity> = nodes.map(|node| (node.number, node.gpu_id)).collect();
        if self.of == now && self.neighbours.is_some() {
            return self.neighbours.clone();
        }
        let _call = calls.enter("reading the links between AMD GPUs");
        let topology = SysfsDirectory::open(tree, kfd::TOPOLOGY)?;
        let read = |node: u32| Some((node, kfd::neighbours(&topology, node)?));
        let neighbours: BTreeMap<u32, Neighbours> = now.iter().filter_map(|(node, _)| read(*node)).collect();
        // What could not be read is tried again.
        self.neighbours = (neighbours.len() == now.len()).then(|| neighbours.clone());
        self.of = now;
        Some(neighbours)
    }
}
