use divvy_model::MiB;

use super::finding::{FindingKind, Moment, PodMemory};
use super::{Audit, who};

impl Audit {
    /// Check the sum of the allocations on a GPU, and begin, update, or end the finding about it.
    pub(super) fn settle(&mut self, at: Moment, node: &str, position: usize, by_node: bool) {
        if !self.listing.is_empty() {
            self.dirty.insert((node.to_owned(), position));
            return;
        }
        let departed_ms = self.limits.departed_ms;
        let Some(gpu) = self.sites.get_mut(node).and_then(|site| site.gpus.get_mut(position)) else {
            return;
        };
        gpu.age(at, departed_ms);
        let (sum, running, capacity, over) = (gpu.sum(), gpu.running(), gpu.capacity, gpu.over);
        if sum <= capacity {
            if let Some(number) = gpu.over.take()
                && let Some(finding) = self.findings.get_mut(number)
            {
                finding.until = Some(at);
            }
            return;
        }
        let card = gpu.card.clone();
        let mut by: Vec<PodMemory> = gpu
            .booked
            .iter()
            .filter_map(|(uid, booking)| {
                let pod = self.pods.get(uid)?.pod.key();
                Some(PodMemory {
                    pod,
                    uid: uid.to_string(),
                    memory: booking.memory,
                })
            })
            .collect();
        by.sort_by(|a, b| (b.memory, &a.pod, &a.uid).cmp(&(a.memory, &b.pod, &b.uid)));
        let known = over.and_then(|number| self.findings.get(number)).map(|finding| &finding.what);
        let (most, before, shrunk) = match known {
            Some(FindingKind::Overcommitted { booked, ran, shrunk, .. }) => (*booked, *ran, *shrunk),
            _ => (MiB::ZERO, false, by_node),
        };
        let ran = running > capacity;
        let now = FindingKind::Overcommitted {
            card,
            capacity,
            booked: sum,
            by,
            ran: ran || before,
            shrunk,
        };
        let number = match over {
            None => self.found(at, now),
            Some(number) => {
                // The finding shows the worst moment, and what ran outweighs what was only promised.
                if (ran, sum) > (before, most)
                    && let Some(finding) = self.findings.get_mut(number)
                {
                    finding.what = now;
                }
                Some(number)
            }
        };
        if let Some(gpu) = self.sites.get_mut(node).and_then(|site| site.gpus.get_mut(position)) {
            gpu.over = number;
        }
    }

    pub(super) fn finish_pods(&mut self, end: Moment) {
        let mut late = Vec::new();
        for tracked in self.pods.values() {
            let (Some(delete_by), Some(now), Some(node)) = (tracked.delete_by_ms, end.at_ms, &tracked.pod.node) else {
                continue;
            };
            let for_ms = now.saturating_sub(delete_by);
            let held = tracked
                .parts
                .iter()
                .fold(MiB::ZERO, |sum, (_, memory)| sum.saturating_add(*memory));
            if for_ms > self.limits.leak_ms && held > MiB::ZERO {
                late.push(FindingKind::StuckDeleting {
                    who: who(&tracked.pod),
                    node: node.clone(),
                    held,
                    for_ms,
                });
            }
        }
        late.sort_by_key(ToString::to_string);
        for what in late {
            self.found(end, what);
        }
    }

    pub(super) fn finish_sites(&mut self, end: Moment) {
        let leak_ms = self.limits.leak_ms;
        let mut found = Vec::new();
        for (name, site) in &mut self.sites {
            let pods = if site.known { site.missed } else { site.allocated };
            if pods > 0 {
                let (node, gone) = (name.clone(), !site.known && self.nodes_listed);
                found.push((end, FindingKind::NodeUnknown { node, pods, gone }));
            }
            for suspect in std::mem::take(&mut site.suspects) {
                if !(site.reports && matches!(suspect.what, FindingKind::GivenEarly { .. })) {
                    found.push((suspect.at, suspect.what));
                }
            }
            for gpu in &site.gpus {
                let long = gpu.levels.now().iter().rev().find_map(|(held, since)| {
                    let for_ms = end.at_ms?.saturating_sub(since.at_ms?);
                    (for_ms > leak_ms).then_some((*held, *since, for_ms))
                });
                let (card, held) = (gpu.card.clone(), gpu.held);
                match long {
                    Some((held, since, for_ms)) => found.push((since, FindingKind::HeldLong { card, held, for_ms })),
                    None if held > MiB::ZERO => found.push((end, FindingKind::HeldNow { card, held })),
                    None => {}
                }
            }
        }
        for (at, what) in found {
            let what = self.complete(what);
            self.found(at, what);
        }
    }

    /// For a finding that a node does not list a GPU, add the name of another node that does.
    pub(super) fn complete(&self, mut what: FindingKind) -> FindingKind {
        if let FindingKind::NotOnNode { gpu, elsewhere, .. } = &mut what {
            let mut sites = self.sites.iter();
            *elsewhere = sites
                .find(|(_, site)| site.position_of(gpu).is_some())
                .map(|(name, _)| name.clone());
        }
        what
    }
}
