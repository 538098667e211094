//! The end of every history: pods are placed where possible, everything ends, nothing is left behind, and every GPU can be used
//! again.

use divvy_model::{ContainerKind, Health, MiB, Phase, Pod};

use crate::Violation;
use crate::kubelet::ContainerStage;
use crate::ops::ContainerEnding;
use crate::story::ensure;
use crate::world::{World, request};

impl World {
    /// Deliver everything in progress, place and start the waiting pods, end everything, and use every GPU as a whole once more.
    pub fn quiet(&mut self) -> Result<(), Violation> {
        self.story.tell(|| "at quiet: everything in progress arrives".to_owned());
        self.calm()?;
        self.check()?;
        for node in &mut self.nodes {
            node.no_pod_cgroups = false;
        }
        self.calm()?;
        self.preempt_all()?;
        self.story.tell(|| "at quiet: waiting pods are placed".to_owned());
        let mut pending = self.pending();
        pending.sort_by_key(|pod| std::cmp::Reverse(pod.priority));
        for pod in pending {
            self.place(&pod.key())?;
        }
        self.run_all()?;
        self.check_started()?;
        self.story.tell(|| "at quiet: everything ends".to_owned());
        self.end_all()?;
        self.nothing_is_left()?;
        self.story
            .tell(|| "at quiet: every GPU recovers and is used as a whole".to_owned());
        for node in &mut self.nodes {
            let lost = node.gpus.iter().any(|gpu| gpu.health == Health::Lost);
            node.forget_lost();
            for gpu in 0..node.gpus.len() {
                node.set_health(gpu, Health::Ok);
            }
            if node.reserve != MiB::ZERO || lost {
                node.start_agent(&mut self.api, MiB::ZERO, true, &mut self.story)?;
            }
        }
        self.calm()?;
        let sizes: Vec<u64> = self
            .nodes
            .iter()
            .flat_map(|node| node.gpus.iter().map(|gpu| gpu.total.0 / crate::api::GIB))
            .collect();
        let mut sizes = sizes;
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        for (n, size) in sizes.iter().enumerate() {
            let name = format!("whole{n}");
            let units = request(&[("m", ContainerKind::App, *size)]);
            self.api.create(&name, units, 0);
            self.see_all()?;
            let placed = self.place(&crate::api::key(&name))?;
            ensure!(placed, "{size} units fit nowhere, although no pod is left");
        }
        self.run_all()?;
        for pod in self.api.pods.values() {
            ensure!(
                pod.phase == Phase::Running,
                "{} has a whole GPU and does not run: {pod:?}",
                pod.uid
            );
        }
        self.end_all()?;
        self.nothing_is_left()
    }

    /// Schedule each waiting pod with a priority above 0, in the order of priority, until it is bound or no pod is left that
    /// could be evicted for it. Replacements of evicted pods are also scheduled in between. Because all events have been
    /// delivered and no GPU fails, one round of evictions per pod must suffice.
    fn preempt_all(&mut self) -> Result<(), Violation> {
        self.story.tell(|| "at quiet: the important pods evict others".to_owned());
        let mut waiting: Vec<Pod> = self.pending().into_iter().filter(|pod| pod.priority > 0).collect();
        waiting.sort_by_key(|pod| std::cmp::Reverse(pod.priority));
        for pod in waiting {
            let before = self.rounds(&pod);
            let in_vain = self.frees_nothing(&pod);
            for _ in 0..3 {
                let leader = self.leader().ok_or("no replica leads")?;
                let waits = |world: &World| world.api.pod(&pod.uid).is_some_and(|pod| pod.node.is_none());
                if !waits(self) {
                    break;
                }
                self.schedule(leader, &pod, 0)?;
                self.answer_all()?;
                self.end_deleted()?;
                self.calm()?;
                let lower: Vec<Pod> = self
                    .pending()
                    .into_iter()
                    .filter(|other| other.priority < pod.priority)
                    .collect();
                for other in lower {
                    let leader = self.leader().ok_or("no replica leads")?;
                    self.schedule(leader, &other, 0)?;
                    self.answer_all()?;
                    self.see_all()?;
                }
            }
            let rounds = self.rounds(&pod) - before;
            ensure!(
                rounds <= 1 || in_vain,
                "pods were evicted {rounds} times for {}, but other pods took the room",
                pod.uid
            );
        }
        self.replace_nobody();
        self.calm()
    }

    /// Report whether a pod of lower priority is on an unhealthy GPU. The ids of this GPU that the pod holds count as healthy
    /// while the pod is there, and disappear with it. According to the sums, its eviction would make room, but in fact it does
    /// not.
    fn frees_nothing(&self, pod: &Pod) -> bool {
        let mut lower = self.api.pods.values().filter(|other| other.priority < pod.priority);
        lower.any(|other| {
            self.nodes.iter().any(|node| {
                let here = other.node.as_deref() == Some(&*node.name);
                let mut unwell = node.gpus.iter().filter(|gpu| gpu.health != Health::Ok);
                here && unwell.any(|gpu| crate::api::booked(other, &gpu.uuid, self.api.gpus(&node.name)) > MiB::ZERO)
            })
        })
    }

    fn rounds(&self, pod: &Pod) -> u32 {
        self.scheduler.rounds.get(&pod.uid).copied().unwrap_or(0)
    }

    /// End the pods that are being deleted.
    fn end_deleted(&mut self) -> Result<(), Violation> {
        for node in &mut self.nodes {
            node.kubelet_sees(&mut self.api, usize::MAX, 1, &mut self.story)?;
            for _ in 0..8 {
                for uid in node.endable() {
                    if node.kubelet.pods.get(&uid).is_some_and(|local| local.terminating) {
                        node.end(&mut self.api, &uid, 0, ContainerEnding::Well, &mut self.story);
                    }
                }
            }
        }
        Ok(())
    }

    /// Let kubelets start all pods that can start. Init containers succeed.
    fn run_all(&mut self) -> Result<(), Violation> {
        for node in &mut self.nodes {
            let (api, story) = (&mut self.api, &mut self.story);
            node.kubelet_sees(api, usize::MAX, 1, story)?;
            let uids: Vec<String> = node.kubelet.pods.keys().cloned().collect();
            for uid in uids {
                for _ in 0..12 {
                    let before = (node.cgroups.get(&uid).cloned(), node.creating.len());
                    node.work(api, &uid, 1, story)?;
                    node.answer_starts(api, story)?;
                    if before == (node.cgroups.get(&uid).cloned(), node.creating.len()) {
                        break;
                    }
                    let init = node.kubelet.pods.get(&uid).and_then(|local| {
                        let mut containers = local.pod.request.containers.iter();
                        let init = containers.find(|c| c.kind == ContainerKind::Init)?;
                        (local.state(&init.name) == ContainerStage::Running).then(|| init.name.clone())
                    });
                    let position = |name: String| node.cgroups.get(&uid)?.running.keys().position(|other| *other == name);
                    if let Some(position) = init.and_then(position) {
                        node.end(api, &uid, position, ContainerEnding::Well, story);
                    }
                }
            }
        }
        self.check_all()?;
        self.calm()
    }

    /// Check that every admitted pod runs, unless its GPU failed, or its memory or ids are still held by other pods.
    fn check_started(&self) -> Result<(), Violation> {
        for node in &self.nodes {
            for (uid, local) in node.kubelet.pods.iter().filter(|(_, local)| local.is_live()) {
                let waits = local.startable();
                // A pod with its owner's annotations may be refused or not.
                let Some(allocation) = self.api.bound[uid].allocation() else {
                    continue;
                };
                let excused = node.shares_its_ids(uid)
                    || allocation.gpus.iter().any(|share| {
                        let gpu = node.gpus.iter().find(|gpu| gpu.uuid == share.uuid);
                        let failed = gpu.is_none_or(|gpu| gpu.health != Health::Ok);
                        let promised = self.api.ledger(&share.uuid).saturating_add(self.ghosts(node, &share.uuid));
                        let offered = node.agent.as_ref().map_or(MiB::ZERO, |agent| agent.capacity(&share.uuid));
                        failed || promised > offered
                    });
                ensure!(
                    excused || waits.is_empty(),
                    "{uid} could run but does not: containers {waits:?} are not started"
                );
            }
        }
        Ok(())
    }

    /// Delete every pod and end every container.
    fn end_all(&mut self) -> Result<(), Violation> {
        let uids: Vec<String> = self.api.pods.values().map(|pod| pod.uid.clone()).collect();
        for uid in uids {
            self.api.delete(&uid);
        }
        for node in &mut self.nodes {
            node.kubelet_sees(&mut self.api, usize::MAX, 1, &mut self.story)?;
            for _ in 0..8 {
                for uid in node.endable() {
                    node.end(&mut self.api, &uid, 0, ContainerEnding::Well, &mut self.story);
                }
            }
        }
        self.check_all()?;
        self.calm()
    }

    /// Check invariant 3: nothing is left behind.
    fn nothing_is_left(&self) -> Result<(), Violation> {
        ensure!(self.api.pods.is_empty(), "pods are not removed: {:?}", self.api.pods);
        for extender in &self.extenders {
            extender.check_at_rest()?;
        }
        for node in &self.nodes {
            let (records, specs) = (&node.disk.records, &node.disk.specs);
            ensure!(
                records.is_empty(),
                "invariant 3: records are left on {}: {records:?}",
                node.name
            );
            ensure!(specs.is_empty(), "invariant 3: specs are left on {}: {specs:?}", node.name);
            ensure!(node.cgroups.is_empty(), "containers do not end: {:?}", node.cgroups);
            let held = node
                .agent
                .iter()
                .flat_map(|agent| agent.core.inventory().gpus)
                .find(|gpu| gpu.held != MiB::ZERO);
            ensure!(held.is_none(), "invariant 3: memory is held without a holder: {held:?}");
            for extender in &self.extenders {
                let view = extender.core.index().ledger().node(&node.name);
                let view = view.ok_or("the extender has forgotten a node")?;
                for position in 0..node.gpus.len() {
                    let used = view.used(position);
                    ensure!(
                        used == MiB::ZERO,
                        "invariant 3: the extender counts {used} on GPU {position} of {}",
                        node.name
                    );
                }
            }
        }
        Ok(())
    }
}
