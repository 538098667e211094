//! Requests that do not fit, but would fit if no memory were kept for departed pods.

use divvy_model::{Health, MiB, PodKey};

use crate::ask::Ask;
use crate::ledger::Ledger;

/// Memory of a GPU that is kept for a [`crate::Departed`] pod, and without which a request would fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptFor {
    /// The GPU's NVML index.
    pub index: u32,
    /// The departed pod with the largest share of the GPU.
    pub pod: PodKey,
    /// The memory kept for this pod.
    pub memory: MiB,
}

impl Ledger {
    /// If a request does not fit on a node, but would fit if nothing were kept for departed pods, return the pod whose memory is
    /// in the way.
    pub fn kept_from(&self, node: &str, ask: &Ask) -> Option<KeptFor> {
        let view = self.node(node)?;
        let state = view.state().filter(|state| state.unusable(ask.whole).is_none())?;
        if ask.is_nothing() || ask.memory.is_none() || ask.is_too_wide_for(state) {
            return None;
        }
        let needed = view.entry.needed_now(ask);
        let gpus = state.gpus.iter().enumerate();
        let well =
            gpus.filter(|(position, gpu)| gpu.health == Health::Ok && ask.takes(gpu) && view.entry.has_cores(*position, ask));
        let (now, rest): (Vec<_>, Vec<_>) = well.partition(|(position, gpu)| Some(view.entry.free(*position)) >= ask.needs(gpu));
        let mut then = rest
            .into_iter()
            .filter(|(position, gpu)| Some(view.entry.free_without_departed(*position)) >= ask.needs(gpu));
        if now.len() >= needed || now.len() + then.clone().count() < needed {
            return None;
        }
        then.find_map(|(position, gpu)| {
            let departed = view.departed(position).into_iter().next();
            departed.map(|(_, pod, memory)| KeptFor {
                index: gpu.index,
                pod,
                memory,
            })
        })
    }
}
