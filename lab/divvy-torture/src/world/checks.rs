//! The invariants of a world: after every step, and when nothing is in progress.

use std::collections::BTreeMap;

use divvy_model::{Gpu, Health, MiB, Pod};

use super::World;
use crate::Violation;
use crate::api::{GIB, booked, offered, reserved};
use crate::extender::{fits_beside, wanted_gpus};
use crate::node::SimNode;
use crate::story::ensure;
use crate::whole::{is_by_ids, unnamed};

impl World {
    /// Check what must hold after every step.
    pub fn check(&mut self) -> Result<(), Violation> {
        self.check_all()?;
        for node in std::mem::take(&mut self.touched) {
            let node = &mut self.nodes[node];
            node.check_rebuilt(&self.api)
                .map_err(|text| format!("invariant 6, node {}: {text}", node.name))?;
        }
        Ok(())
    }

    /// Check the invariants that concern the whole world, and not only the nodes that the step changed.
    pub fn check_all(&mut self) -> Result<(), Violation> {
        for node in &self.nodes {
            node.check().map_err(|text| format!("node {}: {text}", node.name))?;
        }
        self.check_ledger()?;
        self.check_recount()
    }

    /// Check invariant 1 for allocated memory: after every change of pods, the memory allocated on a GPU is at most the largest
    /// amount that was ever reported as shareable. This holds only with a single writer. With two writers, only the agents'
    /// arbiters protect the memory.
    fn check_ledger(&mut self) -> Result<(), Violation> {
        if self.checked == self.api.pod_log.len() || self.api.two_writers || self.api.misled {
            return Ok(());
        }
        self.checked = self.api.pod_log.len();
        for (uuid, most) in &self.api.most {
            let sum = self.api.promised(uuid);
            ensure!(
                sum <= *most,
                "invariant 1: {sum} of GPU {uuid} are allocated, which has {most} to share"
            );
        }
        Ok(())
    }

    /// Check that each extender's ledger equals a simple count of what the extender has received and reserved.
    fn check_recount(&self) -> Result<(), Violation> {
        for extender in &self.extenders {
            let ledger = extender.core.index().ledger();
            for view in ledger.nodes() {
                let Some(state) = view.state() else { continue };
                let all = extender.nodes.get(view.name()).map(offered).unwrap_or_default();
                let seen = extender
                    .pods
                    .view
                    .values()
                    .filter(|pod| pod.node.as_deref() == Some(view.name()));
                // A pod that the API server has reported as gone does not count, even while the watch has not shown its deletion
                // yet. The same is true of a pod that was reported as gone by mistake, until the extender has checked it again.
                let is_gone = |pod: &Pod| self.api.pod(&pod.uid).is_none() || self.api.misled && ledger.is_buried(&pod.uid);
                let gone = |pod: &&Pod| ledger.pod(&pod.uid).is_none() && is_gone(pod);
                let seen: Vec<&Pod> = seen.filter(|pod| !gone(pod)).collect();
                for (position, gpu) in state.gpus.iter().enumerate() {
                    let uuid = gpu.uuid.as_deref().unwrap_or_default();
                    let bound = seen
                        .iter()
                        .map(|pod| booked(pod, uuid, &all))
                        .fold(MiB::ZERO, MiB::saturating_add);
                    let promised = ledger.reservations().filter(|(_, node, _)| *node == view.name());
                    let promised = promised
                        .flat_map(|(_, _, reservation)| reservation.possible())
                        .filter_map(|held| reserved(held, uuid, &all))
                        .fold(MiB::ZERO, MiB::saturating_add);
                    ensure!(
                        view.used(position) == bound.saturating_add(promised),
                        "the extender counts {} on GPU {uuid}; {bound} are bound, {promised} reserved",
                        view.used(position)
                    );
                }
            }
        }
        Ok(())
    }

    /// Check what must hold when nothing is in progress: the extenders' knowledge matches the world.
    pub(super) fn check_calm(&self) -> Result<(), Violation> {
        for replica in 0..self.extenders.len() {
            self.check_known(replica)?;
        }
        Ok(())
    }

    fn check_known(&self, replica: usize) -> Result<(), Violation> {
        let ledger = self.extenders[replica].core.index().ledger();
        let rebuilt = self.extenders[replica].rebuilt();
        let rebuilt = rebuilt.index().ledger();
        for node in &self.nodes {
            let view = ledger.node(&node.name).ok_or("the extender has forgotten a node")?;
            let again = rebuilt.node(&node.name).ok_or("a new extender does not know a node")?;
            let state = view.state().ok_or("the extender does not know a node")?;
            ensure!(
                again.state() == Some(state),
                "a new extender would read node {} as {:?}, not as {state:?}",
                node.name,
                again.state()
            );
            ensure!(
                state.source == divvy_placement::GpuSource::Inventory,
                "node {} is read by {:?} at rest",
                node.name,
                state.source
            );
            for (position, gpu) in state.gpus.iter().enumerate() {
                let uuid = gpu.uuid.as_deref().unwrap_or_default();
                let (ours, naive) = (view.used(position), self.api.ledger(uuid));
                ensure!(
                    ours == naive && again.used(position) == naive,
                    "GPU {uuid}: the extender counts {ours}, a new one {}, the pods hold {naive}",
                    again.used(position)
                );
                let ghosts = self.ghosts(node, uuid);
                ensure!(
                    gpu.held == ghosts || node.no_pod_cgroups,
                    "GPU {uuid}: {} are published as held, containers of pods that are gone hold {ghosts}",
                    gpu.held
                );
                let says = (gpu.held > MiB::ZERO).then(|| self.is_had_by_ids(node, uuid));
                ensure!(
                    gpu.held_by_pod == says || node.no_pod_cgroups,
                    "GPU {uuid}: published as held by a pod: {:?}, and not {says:?}",
                    gpu.held_by_pod
                );
                let real = node.gpus.iter().find(|real| real.uuid == uuid).ok_or("an unknown GPU")?;
                ensure!(
                    gpu.health == real.health,
                    "GPU {uuid} is {:?}, the extender considers it {:?}",
                    real.health,
                    gpu.health
                );
            }
        }
        for pod in self.pending() {
            let passed = self.filter(replica, &pod)?;
            let naive: Vec<usize> = (0..self.nodes.len()).filter(|node| self.fits(&pod, *node)).collect();
            // Room may be kept for a nominated pod.
            let kept = self.is_outranked(&pod);
            ensure!(
                passed == naive || (kept || self.nodes[0].no_pod_cgroups) && passed.iter().all(|node| naive.contains(node)),
                "{} fits on {naive:?}, filter says {passed:?}",
                pod.uid
            );
        }
        Ok(())
    }

    /// Report whether another waiting pod of equal or higher priority is nominated to a node.
    pub fn is_outranked(&self, pod: &Pod) -> bool {
        let mut others = self.api.nominated().filter(|other| other.uid != pod.uid);
        others.any(|other| other.priority >= pod.priority)
    }

    /// Return how much memory of a GPU is held by pods whose annotation does not say so: pods with a grant and running processes,
    /// whose object is gone or has ended, and pods that got whole GPUs by their ids.
    pub fn ghosts(&self, node: &SimNode, uuid: &str) -> MiB {
        let mut granted: BTreeMap<&String, MiB> = BTreeMap::new();
        let mut by_ids = MiB::ZERO;
        for record in node.disk.records.values() {
            let Some(share) = record.gpus.iter().find(|share| share.uuid == uuid) else {
                continue;
            };
            let offers = || node.agent.as_ref().map_or(share.memory, |agent| agent.capacity(uuid));
            let memory = if share.whole { offers() } else { share.memory };
            match self.api.pod(&record.uid).filter(|pod| !pod.ended()) {
                None if node.populated.contains(&record.uid) => drop(granted.insert(&record.uid, memory)),
                Some(pod) if is_by_ids(pod) => by_ids = by_ids.max(memory),
                _ => {}
            }
        }
        granted.into_values().fold(by_ids, MiB::saturating_add)
    }

    /// Report whether a pod that got its GPUs by their ids has this one.
    fn is_had_by_ids(&self, node: &SimNode, uuid: &str) -> bool {
        let mut records = node.disk.records.values();
        records.any(|record| {
            let pod = self.api.pod(&record.uid).filter(|pod| !pod.ended());
            record.gpus.iter().any(|share| share.uuid == uuid) && pod.is_some_and(is_by_ids)
        })
    }

    /// Report, by a simple count, whether the node has enough healthy GPUs with room for the pod. Any GPU that is free may belong to
    /// a pod that gets its GPUs by their ids and has not started yet, so as many stay free.
    pub fn fits(&self, pod: &Pod, node: usize) -> bool {
        let node = &self.nodes[node];
        let taken = |uuid: &str| self.api.ledger(uuid).saturating_add(self.ghosts(node, uuid));
        let offered = |gpu: &Gpu| MiB(gpu.total.saturating_sub(node.reserve).0 / GIB * GIB);
        let good = || node.gpus.iter().filter(|gpu| gpu.health == Health::Ok);
        let with_room = good().filter(|gpu| fits_beside(pod, taken(&gpu.uuid), offered(gpu)));
        let (free, shared): (Vec<&Gpu>, Vec<&Gpu>) = with_room.partition(|gpu| taken(&gpu.uuid) == MiB::ZERO);
        let all_free = good().filter(|gpu| taken(&gpu.uuid) == MiB::ZERO).count();
        let spare = free.len().min(all_free.saturating_sub(self.unlocated(node)));
        shared.len() + spare >= wanted_gpus(pod)
    }

    /// Return how many whole GPUs of the node belong to pods without anything that shows which GPUs these are.
    fn unlocated(&self, node: &SimNode) -> usize {
        let here = |pod: &&Pod| pod.node.as_deref() == Some(&*node.name) && !pod.ended();
        let loose: u64 = self.api.pods.values().filter(here).map(unnamed).sum();
        let shown = |gpu: &&Gpu| self.api.ledger(&gpu.uuid) == MiB::ZERO && self.is_had_by_ids(node, &gpu.uuid);
        usize::try_from(loose)
            .unwrap()
            .saturating_sub(node.gpus.iter().filter(shown).count())
    }
}
