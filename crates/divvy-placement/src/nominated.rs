//! GPUs that are kept for nominated pods: pods that have preempted others and wait until their victims have ended.
//!
//! kube-scheduler writes the node of such a pod into `status.nominatedNodeName`. For every other pod of equal or lower priority,
//! it counts the nominated pod as if it ran there (`RunFilterPluginsWithNominatedPods` in kube-scheduler's
//! `framework/runtime/framework.go`). kube-scheduler counts sums of a node; here, the same rule holds for each GPU. Otherwise the
//! replacement of a victim would take the GPU that the victim's end made free, and the pod with the higher priority would have to
//! preempt again.
//!
//! The nominated pods of a node are placed in the order of their priority, by best fit. If they do not all have room that
//! way, and they are few (`FEW`), a second way is tried: each pod that takes several GPUs gets the GPUs with the most room.
//! If a pod has no room then either, a third way is tried: among pods of equal priority, those that take the most memory of a
//! GPU come first. The way that serves the more important pods better is used. If no way has room for all pods, nothing is
//! kept for those without room, even if some other choice of GPUs had room for all.

use std::cmp::Reverse;
use std::sync::Arc;

use divvy_model::{Health, MemoryUnit, Pod};

use crate::ask::Ask;
use crate::choose;
use crate::fewest::{PodOnNode, room_to_come, there};
use crate::node_account::{NodeAccount, Nominated};
use crate::taste::Taste;

/// The maximum number of nominated pods of one node that are counted. Pods with a higher priority come first.
const MOST: usize = 64;

/// The maximum number of nominated pods for which the other ways are tried. On a node with hundreds of pods, each takes
/// milliseconds.
const FEW: usize = 16;

/// Choose the GPUs that are kept for the pods nominated to a node, one pod after the other.
pub(crate) fn keep(entry: &mut NodeAccount, mut waiting: Vec<Pod>, unit: MemoryUnit) {
    // Read the node's pods once for all nominated pods: reading takes longer than choosing.
    let pods: Vec<Arc<Pod>> = entry
        .pods
        .keys()
        .filter(|pod| !pod.ended())
        .map(|pod| pod.0.clone())
        .collect();
    let here = there(pods.iter().map(Arc::as_ref), entry.state.as_ref(), unit);
    waiting.sort_by(|a, b| (Reverse(a.priority), &a.uid).cmp(&(Reverse(b.priority), &b.uid)));
    waiting.truncate(MOST);
    let with_ask = |pod: Pod| {
        let ask = Ask::of_pod(&pod, unit);
        (pod, ask)
    };
    let waiting: Vec<(Pod, Ask)> = waiting.into_iter().map(with_ask).collect();
    let mut best = keep_for_each(entry, &here, &waiting, ChoiceWay::BestFit);
    if waiting.len() > FEW {
        return;
    }
    let mut try_another = |best: &mut Vec<NominatedRoom>, way| {
        let kept = entry.nominated_to.clone();
        let found = keep_for_each(entry, &here, &waiting, way);
        // The most important pod that the two ways serve differently decides.
        if found > *best {
            *best = found;
        } else {
            entry.nominated_to = kept;
        }
    };
    if best.iter().any(|room| *room < NominatedRoom::Now) && waiting.iter().any(|(_, ask)| ask.gpus > 1) {
        try_another(&mut best, ChoiceWay::Roomiest);
    }
    if best.contains(&NominatedRoom::Never) {
        try_another(&mut best, ChoiceWay::LargestFirst);
    }
}

/// Choose GPUs for the pods in one way. Return for each pod whether it has room now, later, or never.
fn keep_for_each(entry: &mut NodeAccount, here: &[PodOnNode<'_>], waiting: &[(Pod, Ask)], way: ChoiceWay) -> Vec<NominatedRoom> {
    entry.nominated_to.clear();
    let mut order: Vec<(usize, &(Pod, Ask))> = waiting.iter().enumerate().collect();
    if way == ChoiceWay::LargestFirst {
        order.sort_by_key(|(_, (pod, ask))| (Reverse(pod.priority), Reverse(ask.memory)));
    }
    let mut found = Vec::new();
    for (at, (pod, ask)) in order {
        let (room, positions) = kept_positions(entry, here, pod, ask, way);
        found.push((at, room));
        if let (true, Some(memory)) = (room > NominatedRoom::Never, ask.memory) {
            let gpus = entry.state.as_ref().map(|state| state.gpus.as_slice()).unwrap_or_default();
            let kept = positions.iter().filter_map(|position| gpus.get(*position));
            // Of whole GPUs of different sizes, the largest is enough for each.
            let memory = kept.filter_map(|gpu| ask.needs(gpu)).max().unwrap_or(memory);
            entry.nominated_to.push(Nominated {
                pod: pod.key(),
                uid: pod.uid.clone(),
                priority: pod.priority,
                memory,
                cores: ask.cores,
                positions,
            });
        }
    }
    found.sort_unstable_by_key(|(at, _)| *at);
    found.into_iter().map(|(_, room)| room).collect()
}

/// Return the GPUs on which the pod has room, or else the GPUs on which it will have room when its victims have ended.
fn kept_positions(
    entry: &NodeAccount,
    here: &[PodOnNode<'_>],
    pod: &Pod,
    ask: &Ask,
    way: ChoiceWay,
) -> (NominatedRoom, Vec<usize>) {
    if let Ok(mut positions) = choose::best(entry, &Taste::of(ask)) {
        if way == ChoiceWay::Roomiest && ask.gpus > 1 {
            positions = roomiest(entry, ask);
        }
        return (NominatedRoom::Now, positions);
    }
    match room_to_come(entry, here, pod, ask) {
        Some(positions) => (NominatedRoom::ToCome, positions),
        None => (NominatedRoom::Never, Vec::new()),
    }
}

/// How the GPUs for a nominated pod are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChoiceWay {
    BestFit,
    /// A pod that takes several GPUs gets those with the most room, which leaves more GPUs with some room.
    Roomiest,
    /// By best fit, but of pods with equal priority, those that take the most memory of a GPU come first.
    LargestFirst,
}

/// When a node has room for a nominated pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum NominatedRoom {
    Never,
    /// When the pod's victims have ended.
    ToCome,
    Now,
}

/// Return the GPUs with the most room, as many as the pod requests. The caller has checked that enough GPUs have room.
fn roomiest(entry: &NodeAccount, ask: &Ask) -> Vec<usize> {
    let taste = Taste::of(ask);
    let gpus = entry.state.as_ref().map(|state| state.gpus.as_slice()).unwrap_or_default();
    let well = gpus.iter().enumerate();
    let well = well.filter(|(_, gpu)| gpu.health == Health::Ok && taste.takes(gpu));
    let mut positions: Vec<usize> = well.map(|(position, _)| position).collect();
    positions.sort_by_key(|position| (Reverse(entry.free_for(*position, ask)), *position));
    positions.truncate(ask.gpus);
    positions
}
