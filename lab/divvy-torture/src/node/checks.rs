//! The invariants that hold on a node after each step.

use std::collections::BTreeSet;

use divvy_model::{Gpu, MiB};

use super::SimNode;
use crate::Violation;
use crate::agent::Sight;
use crate::api::ApiModel;
use crate::story::ensure;

impl SimNode {
    /// Return the UIDs of pods with a container on this GPU.
    pub fn on_gpu(&self, uuid: &str) -> BTreeSet<&String> {
        self.cgroups
            .iter()
            .filter(|(_, cgroup)| cgroup.running.values().any(|gpus| gpus.contains(uuid)))
            .map(|(uid, _)| uid)
            .collect()
    }

    /// Report whether another pod that has not ended has exactly the same ids. If so, this pod may have to wait.
    pub fn shares_its_ids(&self, uid: &str) -> bool {
        let names = self.kubelet.handouts.iter().map(|handout| (&handout.key.uid, &handout.grant));
        let recorded = self.disk.records.values().map(|record| (&record.uid, &record.cdi));
        let ours: BTreeSet<_> = names.clone().filter(|(of, _)| *of == uid).map(|(_, name)| name).collect();
        let live = |of: &String| self.populated.contains(of) || self.kubelet.pods.get(of).is_some_and(|local| !local.finished);
        names
            .chain(recorded)
            .any(|(of, name)| of != uid && ours.contains(name) && live(of))
    }

    /// Check the invariants that must hold on a node after every step.
    pub fn check(&self) -> Result<(), Violation> {
        for gpu in &self.gpus {
            let live = self.on_gpu(&gpu.uuid);
            let held = |uid: &&&String| self.holds.get(&((**uid).clone(), gpu.uuid.clone())).copied();
            let sum = live.iter().filter_map(|uid| held(&uid)).fold(MiB::ZERO, MiB::saturating_add);
            let under = |uid: &&&String| self.granted_under.get(&((**uid).clone(), gpu.uuid.clone())).copied();
            let capacity = live.iter().filter_map(|uid| under(&uid)).max().unwrap_or(MiB::ZERO);
            ensure!(
                sum <= capacity,
                "invariant 1: pods {live:?} have {sum} of GPU {}, which has {capacity} to share",
                gpu.uuid
            );
            ensure!(
                live.len() <= 1 || !live.iter().any(|uid| self.is_whole(uid)),
                "invariant 1: pods {live:?} are on GPU {}, which one of them has as a whole",
                gpu.uuid
            );
        }
        for (uid, cgroup) in &self.cgroups {
            let on = |gpu: &Gpu| cgroup.running.values().filter(|gpus| gpus.contains(&gpu.uuid)).count();
            let twice = self.gpus.iter().find(|gpu| self.is_whole(uid) && on(gpu) > 1);
            ensure!(
                twice.is_none(),
                "invariant 1: two containers of {uid} have one whole GPU: {cgroup:?}"
            );
            for (container, _) in cgroup.running.iter().filter(|(_, gpus)| !gpus.is_empty()) {
                let recorded = self.disk.records.values().any(|record| record.uid == *uid);
                ensure!(recorded, "invariant 4: {uid}/{container} runs, but its grant was ended");
            }
        }
        Ok(())
    }

    /// Check invariant 6: a restarted agent knows the same as the running one.
    pub fn check_rebuilt(&mut self, api: &ApiModel) -> Result<(), Violation> {
        if let Some(agent) = &mut self.agent {
            let sight = Sight {
                gpus: &self.gpus,
                handouts: &self.kubelet.handouts,
                populated: (!self.no_pod_cgroups).then_some(&self.populated),
            };
            agent.check_rebuilt(api, &self.disk, sight)?;
        }
        Ok(())
    }
}
