//! How the GPUs of a node are connected, and which of them work best together.
//!
//! The scale is that of NVIDIA's device plugin (the best-effort policy of github.com/NVIDIA/go-gpuallocator): a pair of GPUs is
//! worth 100 for each NVLink or xGMI link between them, plus 10 to 60 for how close they are on the PCI bus. A set is worth the sum of its
//! pairs.

mod division;
mod exact;
mod greedy;

use std::collections::BTreeMap;

use divvy_model::{GpuLink, LinkKind, MiB};

/// What each pair of a node's GPUs is worth, by their positions in [`crate::NodeState::gpus`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    gpus: usize,
    /// The worth of each pair, row by row; empty if nothing is known about any pair.
    pairs: Vec<u32>,
}

/// A GPU that could be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuCandidate {
    /// The GPU's position in [`crate::NodeState::gpus`].
    pub position: usize,
    /// The memory that is free on the GPU.
    pub free: MiB,
    /// Whether the GPU must be among the chosen ones.
    pub must: bool,
}

/// The maximum number of direct links of a pair that counts; more than any machine has. The number comes from an annotation.
const MOST_DIRECT: u32 = 1000;

/// Return what one connection of a pair is worth; 0 if its kind is not known.
fn worth(link: &GpuLink) -> u32 {
    match link.kind {
        LinkKind::NvLink | LinkKind::Xgmi => 100 * link.count.min(MOST_DIRECT),
        LinkKind::SameBoard => 60,
        LinkKind::SingleSwitch => 50,
        LinkKind::MultiSwitch => 40,
        LinkKind::HostBridge => 30,
        LinkKind::Node => 20,
        LinkKind::System => 10,
        LinkKind::Other(_) => 0,
    }
}

impl Topology {
    /// Build the table from the UUID and the links of each GPU. It is enough if one GPU of a pair names the other.
    pub fn new(gpus: &[(&str, &[GpuLink])]) -> Topology {
        let mut topology = Topology::default();
        if gpus.iter().all(|(_, links)| links.is_empty()) {
            return topology;
        }
        topology.gpus = gpus.len();
        // Per pair: the worth of the direct links, and of the closest shared place on the PCI bus, as reported by either GPU. Each
        // link is read once, because a node may write thousands.
        let mut said = vec![(0, 0); gpus.len() * gpus.len()];
        let positions: BTreeMap<&str, usize> = gpus.iter().enumerate().map(|(at, (uuid, _))| (*uuid, at)).collect();
        for (a, (_, links)) in gpus.iter().enumerate() {
            for link in *links {
                let Some(b) = positions.get(link.peer.as_str()).copied().filter(|b| *b != a) else {
                    continue;
                };
                for at in [a * gpus.len() + b, b * gpus.len() + a] {
                    let (direct, bus) = &mut said[at];
                    let is_direct = matches!(link.kind, LinkKind::NvLink | LinkKind::Xgmi);
                    let known = if is_direct { direct } else { bus };
                    *known = worth(link).max(*known);
                }
            }
        }
        topology.pairs = said.into_iter().map(|(direct, bus)| direct + bus).collect();
        topology
    }

    /// Return what a pair is worth; 0 if nothing is known about it.
    pub fn pair(&self, a: usize, b: usize) -> u32 {
        if a < self.gpus && b < self.gpus {
            self.pairs.get(a * self.gpus + b).copied().unwrap_or(0)
        } else {
            0
        }
    }

    /// Return what these GPUs are worth together: the sum over their pairs.
    pub fn worth(&self, gpus: &[usize]) -> u32 {
        let pairs = gpus
            .iter()
            .enumerate()
            .flat_map(|(at, a)| gpus[..at].iter().map(move |b| (*a, *b)));
        pairs.fold(0, |sum, (a, b)| sum.saturating_add(self.pair(a, b)))
    }

    /// Choose `count` of the candidates, in ascending order of position; `None` if there are too few, or if more than `count`
    /// must be chosen.
    ///
    /// The chosen set is worth the most. On a tie, the best set is the one that leaves the best remaining candidates: those
    /// that are worth the most when they are divided into sets of this size (one of them smaller, if they do not divide
    /// evenly). On a further tie, the set with the least free memory is best, then the set with the lowest positions.
    ///
    /// The result is exact for up to 16 candidates. With more, it is a good set that cannot be improved by exchanging one GPU.
    /// The first rule for ties is then a different one: the set with the weakest connections to the remaining candidates is best.
    pub fn choose(&self, candidates: &[GpuCandidate], count: usize) -> Option<Vec<usize>> {
        let mut candidates = candidates.to_vec();
        candidates.sort_unstable_by_key(|candidate| candidate.position);
        let musts = candidates.iter().filter(|candidate| candidate.must).count();
        if count == 0 || candidates.len() < count || musts > count {
            return None;
        }
        let chosen = match candidates.len() {
            _ if count == 1 || self.is_even(&candidates) => least_left(&candidates, count),
            ..=exact::MOST => exact::choose(self, &candidates, count),
            _ => greedy::choose(self, &candidates, count),
        };
        Some(chosen.into_iter().map(|at| candidates[at].position).collect())
    }

    /// Choose `count` of the GPUs at these positions as NVIDIA's device plugin does: divide the GPUs into sets of this size so
    /// that the sets together are worth the most, and take the best set. The result includes all of `must` and is in ascending
    /// order. Return `None` if there are too few GPUs, if `must` names more than `count` GPUs, or if it names a GPU at another
    /// position.
    ///
    /// With more than 16 GPUs, the choice is that of [`Topology::choose`].
    pub fn choose_divided(&self, positions: &[usize], must: &[usize], count: usize) -> Option<Vec<usize>> {
        let mut positions = positions.to_vec();
        positions.sort_unstable();
        positions.dedup();
        if positions.len() <= division::MOST {
            return division::choose(self, &positions, must, count);
        }
        if !must.iter().all(|position| positions.contains(position)) {
            return None;
        }
        let candidate = |position: &usize| GpuCandidate {
            position: *position,
            free: MiB::ZERO,
            must: must.contains(position),
        };
        let candidates: Vec<GpuCandidate> = positions.iter().map(candidate).collect();
        self.choose(&candidates, count)
    }

    /// Report whether all pairs of the candidates are worth the same.
    fn is_even(&self, candidates: &[GpuCandidate]) -> bool {
        if self.pairs.is_empty() {
            return true;
        }
        let mut positions = candidates.iter().map(|candidate| candidate.position);
        let (Some(a), Some(b)) = (positions.next(), positions.next()) else {
            return true;
        };
        let first = self.pair(a, b);
        let pairs = candidates
            .iter()
            .enumerate()
            .flat_map(|(at, a)| candidates[..at].iter().map(|b| self.pair(a.position, b.position)));
        pairs.into_iter().all(|pair| pair == first)
    }
}

/// Choose the GPUs with the least free memory. Return indices into the list of candidates, in ascending order.
fn least_left(candidates: &[GpuCandidate], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.sort_unstable_by_key(|at| (!candidates[*at].must, candidates[*at].free, *at));
    order.truncate(count);
    order.sort_unstable();
    order
}
