//! Which GPUs and MIG devices of the machine a process can use.

use crate::card::Card;

/// A GPU: itself, or its MIG devices if it is in MIG mode.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) uuid: String,
    pub(crate) is_divided: bool,
    pub(crate) cards: Vec<Card>,
}

/// Return what the process sees. `wanted` is the variable `CUDA_VISIBLE_DEVICES`: what it names up to the first entry that is wrong (CUDA C++ Programming
/// Guide, "CUDA Environment Variables"). A process that could use a MIG device sees it, and nothing else (MIG User Guide, "CUDA Device Enumeration").
pub(crate) fn visible(gpus: &[Gpu], wanted: Option<&str>) -> Vec<Card> {
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

fn named<'g>(gpus: &'g [Gpu], list: &str) -> Vec<(&'g Gpu, &'g Card)> {
    let mut chosen: Vec<(&Gpu, &Card)> = Vec::new();
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
fn one<'g>(gpus: &'g [Gpu], entry: &str) -> Option<(&'g Gpu, &'g Card)> {
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
