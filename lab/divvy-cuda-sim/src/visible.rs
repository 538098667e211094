//! Which GPUs and MIG devices of the machine a process can use.

use crate::card::CudaCard;

/// A GPU: itself, or its MIG devices if it is in MIG mode.
#[derive(Debug)]
pub(crate) struct VisibleGpu {
    pub(crate) uuid: String,
    pub(crate) is_divided: bool,
    pub(crate) cards: Vec<CudaCard>,
}

/// Return what the process sees. `wanted` is the variable `CUDA_VISIBLE_DEVICES`: what it names up to the first entry that is wrong (CUDA C++ Programming
/// Guide, "CUDA Environment Variables"). A process that could use a MIG device sees it, and nothing else (MIG User Guide, "CUDA Device Enumeration").
pub(crate) fn visible(gpus: &[VisibleGpu], wanted: Option<&str>) -> Vec<CudaCard> {
    let chosen = match wanted {
        None => gpus
            .iter()
            .flat_map(|gpu| gpu.cards.iter().map(move |card| (gpu, card)))
            .collect(),
        Some(list) => named(gpus, list),
    };
    let mut parts = chosen.iter().filter(|(gpu, _)| gpu.is_divided);
    match parts.next() {
        Some((_, part)) => vec![(*part).clone()],
        None => chosen.into_iter().map(|(_, card)| card.clone()).collect(),
    }
}

fn named<'g>(gpus: &'g [VisibleGpu], list: &str) -> Vec<(&'g VisibleGpu, &'g CudaCard)> {
    let mut chosen: Vec<(&VisibleGpu, &CudaCard)> = Vec::new();
    for entry in list.split(',') {
        match one(gpus, entry.trim()) {
            Some((gpu, card)) if !chosen.iter().any(|(_, known)| known.uuid == card.uuid) => chosen.push((gpu, card)),
            _ => break,
        }
    }
    chosen
}

/// Return what an entry names: an index, the UUID of a GPU or the beginning of one, or the UUID of a MIG device. A GPU in MIG mode stands for its first
/// MIG device.
fn one<'g>(gpus: &'g [VisibleGpu], entry: &str) -> Option<(&'g VisibleGpu, &'g CudaCard)> {
    if entry.starts_with("MIG-") {
        let mut all = gpus.iter().flat_map(|gpu| gpu.cards.iter().map(move |card| (gpu, card)));
        return all.find(|(_, card)| card.uuid == entry);
    }
    let gpu = match entry.parse::<usize>() {
        Ok(index) => gpus.get(index)?,
        Err(_) => {
            let mut matching = gpus
                .iter()
                .filter(|gpu| entry.starts_with("GPU-") && gpu.uuid.starts_with(entry));
            let found = matching.next()?;
            matching.next().is_none().then_some(found)?
        }
    };
    Some((gpu, gpu.cards.first()?))
}
