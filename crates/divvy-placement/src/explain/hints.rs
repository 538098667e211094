//! What would make room, as far as one change does, or a smaller request.

use std::collections::BTreeMap;
use std::fmt;

use divvy_model::{Health, MemoryUnit, MiB, PodKey};

use super::{GpuReport, Holder, HolderKind, unwell};
use crate::Ask;

/// What would make room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hint {
    /// A pod that is being deleted makes room when its containers have ended.
    Ending {
        /// GPU index.
        index: u32,
        /// The pod.
        pod: PodKey,
        /// Its share.
        memory: MiB,
    },
    /// Containers of pods that are gone make room when they have ended.
    Leftover {
        /// GPU index.
        index: u32,
        /// What they hold.
        memory: MiB,
    },
    /// A GPU that is not offered now has room.
    Recovery {
        /// GPU index.
        index: u32,
        /// Failed or lost.
        health: Health,
        /// Why, `XID 79`.
        reason: Option<String>,
        /// What it has left.
        free: MiB,
    },
    /// The end of this one pod would make room; the one with the least memory is named.
    Holder {
        /// GPU index.
        index: u32,
        /// The pod.
        pod: PodKey,
        /// Its share.
        memory: MiB,
    },
    /// The end of this one pod would make room on as many GPUs as are missing; the one with the least memory there is named.
    HolderOfSeveral {
        /// The pod.
        pod: PodKey,
        /// What it has on the node's GPUs.
        memory: MiB,
        /// It is being deleted.
        deleting: bool,
    },
    /// This many units would fit now.
    AskLess {
        /// Units.
        units: u64,
        /// The same in MiB.
        memory: MiB,
    },
    /// Not as many GPUs of the node are that large, even empty.
    TooFew {
        /// So many are.
        gpus: usize,
        /// So many are asked for.
        needed: usize,
    },
    /// No GPU of the node is that large, even empty.
    TooLarge {
        /// Units of the node's largest GPU.
        units: u64,
        /// The same in MiB.
        memory: MiB,
    },
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Hint::Ending { index, pod, memory } => write!(
                f,
                "pod {pod} is being deleted and still holds {memory} of GPU {index}: there is room when its containers have ended"
            ),
            Hint::Leftover { index, memory } => write!(
                f,
                "containers of deleted pods still hold {memory} of GPU {index}: there is room when they have ended"
            ),
            Hint::Recovery {
                index,
                health,
                reason,
                free,
            } => write!(
                f,
                "GPU {index} {}, with {free} free: there is room when it is back",
                unwell(*health, reason.as_deref())
            ),
            Hint::Holder { index, pod, memory } => {
                write!(f, "GPU {index} has room when pod {pod} ({memory}) ends or is deleted")
            }
            Hint::HolderOfSeveral {
                pod,
                memory,
                deleting: true,
            } => write!(
                f,
                "pod {pod} is being deleted and still holds {memory}: there is room when its containers have ended"
            ),
            Hint::HolderOfSeveral { pod, memory, .. } => write!(f, "there is room when pod {pod} ({memory}) ends or is deleted"),
            Hint::AskLess { units, memory } => write!(f, "a request of at most {units} ({memory}) fits now"),
            Hint::TooFew { gpus: 0, .. } => f.write_str("none of the node's GPUs is that large, even empty"),
            Hint::TooFew { gpus, needed } => write!(
                f,
                "{gpus} of the node's GPUs are that large, even empty, and {needed} are asked for"
            ),
            Hint::TooLarge { units, memory } => write!(
                f,
                "no GPU of this node is that large, even empty: the largest has {units} units ({memory})"
            ),
        }
    }
}

/// The most helpful first.
pub(super) fn hints(gpus: &[GpuReport], ask: &Ask, unit: MemoryUnit) -> Vec<Hint> {
    let Some(memory) = ask.memory else {
        return Vec::new();
    };
    let mut hints = Vec::new();
    let gpus = || gpus.iter().filter(|gpu| gpu.taken);
    let well = || gpus().filter(|gpu| gpu.health == Health::Ok);
    let missing = ask.gpus.saturating_sub(well().filter(|gpu| gpu.fits).count());
    // What one change brings about.
    if missing == 1 {
        hints_of_one(&gpus().filter(|gpu| !gpu.fits).collect::<Vec<_>>(), memory, &mut hints);
    }
    if missing > 1 {
        hints.extend(holder_of_several(&well().collect::<Vec<_>>(), ask.gpus, memory));
    }
    let nth = |mut amounts: Vec<MiB>| {
        amounts.sort_unstable_by(|a, b| b.cmp(a));
        amounts.get(ask.gpus - 1).copied().unwrap_or(MiB::ZERO)
    };
    let in_all = |units: u64| units.saturating_mul(ask.gpus as u64);
    let largest = nth(gpus().map(|gpu| gpu.capacity).collect());
    if largest < memory && ask.gpus == 1 {
        hints.push(Hint::TooLarge {
            units: unit.units_in(largest),
            memory: largest,
        });
    } else if largest < memory {
        hints.push(Hint::TooFew {
            gpus: gpus().filter(|gpu| gpu.capacity >= memory).count(),
            needed: ask.gpus,
        });
    }
    let free = nth(well().map(|gpu| gpu.free).collect());
    if unit.units_in(free) > 0 {
        let units = in_all(unit.units_in(free));
        hints.push(Hint::AskLess {
            units,
            memory: if ask.gpus == 1 {
                free
            } else {
                unit.memory(units).unwrap_or(free)
            },
        });
    }
    hints
}

/// Without whom so many GPUs have room.
fn holder_of_several(gpus: &[&GpuReport], count: usize, memory: MiB) -> Option<Hint> {
    let mut shares: BTreeMap<&str, (MiB, &Holder)> = BTreeMap::new();
    for holder in gpus.iter().flat_map(|gpu| &gpu.holders) {
        let (sum, _) = shares.entry(&holder.uid).or_insert((MiB::ZERO, holder));
        *sum = sum.saturating_add(holder.memory);
    }
    let makes_room = |(_, holder): &&(MiB, &Holder)| {
        let room = |gpu: &&&GpuReport| gpu.fits || gpu.room_without(holder) >= memory;
        holder.kind != HolderKind::Reserved && gpus.iter().filter(room).count() >= count
    };
    let least = shares.values().filter(makes_room);
    let (sum, holder) = least.min_by_key(|(sum, holder)| (holder.kind != HolderKind::Deleting, *sum, &holder.pod))?;
    Some(Hint::HolderOfSeveral {
        pod: holder.pod.clone(),
        memory: *sum,
        deleting: holder.kind == HolderKind::Deleting,
    })
}

/// The GPUs that would have room by one change, and what that is.
fn hints_of_one(gpus: &[&GpuReport], memory: MiB, hints: &mut Vec<Hint>) {
    let gpus = || gpus.iter().copied();
    let well = || gpus().filter(|gpu| gpu.health == Health::Ok);
    for gpu in well() {
        if let Some(holder) = gpu
            .holders
            .iter()
            .filter(|holder| holder.kind == HolderKind::Deleting && gpu.room_without(holder) >= memory)
            .min_by_key(|holder| holder.memory)
        {
            hints.push(Hint::Ending {
                index: gpu.index,
                pod: holder.pod.clone(),
                memory: holder.memory,
            });
        }
        let gone = gpu.of_the_gone();
        if gone > MiB::ZERO && gpu.free.saturating_add(gone) >= memory {
            hints.push(Hint::Leftover {
                index: gpu.index,
                memory: gone,
            });
        }
    }
    for gpu in gpus().filter(|gpu| gpu.health != Health::Ok && gpu.free >= memory) {
        hints.push(Hint::Recovery {
            index: gpu.index,
            health: gpu.health,
            reason: gpu.reason.clone(),
            free: gpu.free,
        });
    }
    let smallest = well()
        .flat_map(|gpu| gpu.holders.iter().map(move |holder| (gpu, holder)))
        .filter(|(gpu, holder)| holder.kind == HolderKind::Bound && gpu.room_without(holder) >= memory)
        .min_by_key(|(gpu, holder)| (holder.memory, gpu.index));
    if let Some((gpu, holder)) = smallest {
        hints.push(Hint::Holder {
            index: gpu.index,
            pod: holder.pod.clone(),
            memory: holder.memory,
        });
    }
}
