//! GetPreferredAllocation: which of the free ids the kubelet should hand out.
//!
//! The call does not name a pod, so the answer is a guess. After a wrong guess, the container has its GPU, but the kubelet's ids name another
//! one. The podresources API shows these ids, and a device plugin that is installed in Divvy's place gives the container's GPU away again.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{Gpu, Held};

use super::{AgentCore, ContainerKey, Ids, PodInCore, ResourceSpec};

impl AgentCore {
    /// Return exactly `size` ids, or fewer if not enough are available. The ids include all of `must_include`, and as many as
    /// possible lie on one GPU: the GPU of `must_include`, else the GPU of the pod that the call is probably for, else the GPU
    /// with the fewest free ids that still suffice. For a pod with several GPUs, each GPU contributes the same number. Every
    /// input gets a valid answer, because the kubelet rejects the pod permanently after an error.
    ///
    /// For whole GPUs, if no pod can be guessed, the best-connected GPUs are chosen.
    pub fn preferred(&mut self, spec: ResourceSpec, available: &[String], must_include: &[String], size: usize) -> Vec<String> {
        self.guess = None;
        let mut seen = BTreeSet::new();
        let mut chosen: Vec<String> = must_include
            .iter()
            .filter(|id| seen.insert(id.as_str()))
            .take(size)
            .cloned()
            .collect();
        let mut free: BTreeMap<String, BTreeSet<(u32, &str)>> = BTreeMap::new();
        for id in available {
            if !seen.insert(id) {
                continue;
            }
            let (gpu, slot) = match self.gpu_of_id(spec, id) {
                Some((gpu, slot)) => (gpu.uuid.clone(), slot),
                None => (String::new(), 0),
            };
            free.entry(gpu).or_default().insert((slot, id));
        }
        let guess = self.likely_container(spec, size, must_include);
        if guess.is_none() && matches!(spec.ids, Ids::Whole(_)) {
            return self.connected(spec, chosen, &free, size);
        }
        let on = |id: &str| self.gpu_of_id(spec, id).map(|(gpu, _)| gpu.uuid.clone());
        let included = must_include.iter().find_map(|id| on(id));
        let wanted: &[String] = guess.as_ref().map_or(&[], |(_, uuids)| uuids);
        if let (Some(each), [_, _, ..]) = (size.checked_div(wanted.len()), wanted) {
            for uuid in wanted {
                let here = |id: &&String| on(id).as_ref() == Some(uuid);
                let missing = each
                    .saturating_sub(chosen.iter().filter(here).count())
                    .min(size - chosen.len());
                let Some(ids) = free.get_mut(uuid) else { continue };
                chosen.extend((0..missing).filter_map(|_| ids.pop_first()).map(|(_, id)| id.to_owned()));
            }
        }
        let first = included.or_else(|| wanted.first().cloned());
        let missing = |chosen: &Vec<String>| size.saturating_sub(chosen.len());
        let mut order: Vec<&String> = free.keys().collect();
        // After the preferred GPU: GPUs that can hold all remaining ids, the fullest first. Then the others, the emptiest first.
        order.sort_by_key(|uuid| {
            let room = free.get(*uuid).map_or(0, BTreeSet::len);
            let known = self.gpu(uuid).is_some();
            let first = first.as_ref() == Some(*uuid);
            let fits = room >= missing(&chosen);
            (!first, !known, !fits, if fits { room } else { usize::MAX - room })
        });
        for uuid in order {
            let ids = free.get(uuid).into_iter().flatten();
            chosen.extend(ids.take(missing(&chosen)).map(|(_, id)| (*id).to_owned()));
        }
        if let Some((key, _)) = guess {
            self.guess = Some((chosen.iter().cloned().collect(), key));
        }
        chosen
    }

    /// Complete a choice of whole GPUs: add the GPU with the most links to the GPUs chosen so far, until there are enough. Among
    /// GPUs with equally many, add the one with the most links to GPUs that are still free, because the next GPUs are chosen
    /// among those. GPUs on which pods have shares come last.
    fn connected(
        &self,
        spec: ResourceSpec,
        mut chosen: Vec<String>,
        free: &BTreeMap<String, BTreeSet<(u32, &str)>>,
        size: usize,
    ) -> Vec<String> {
        let links = |gpu: &Gpu, to: &dyn Fn(&str) -> bool| -> u64 {
            let counted = gpu.links.iter().filter(|link| to(&link.peer));
            counted.fold(0, |sum, link| sum.saturating_add(u64::from(link.count)))
        };
        let mut with: BTreeSet<String> = chosen
            .iter()
            .filter_map(|id| self.gpu_of_id(spec, id))
            .map(|(gpu, _)| gpu.uuid.clone())
            .collect();
        let mut left = free.clone();
        while chosen.len() < size {
            let known = self.gpus.iter().filter(|gpu| left.contains_key(&gpu.uuid));
            let next = known.min_by_key(|gpu| {
                let near = links(gpu, &|peer| with.contains(peer));
                let ahead = links(gpu, &|peer| left.contains_key(peer));
                (self.has_pod(gpu, |_| true), std::cmp::Reverse((near, ahead)))
            });
            let uuid = next.map(|gpu| gpu.uuid.clone()).or_else(|| left.keys().next().cloned());
            let Some((uuid, ids)) = uuid.and_then(|uuid| left.remove_entry(&uuid)) else {
                break;
            };
            with.insert(uuid);
            chosen.extend(ids.iter().map(|(_, id)| (*id).to_owned()).take(size - chosen.len()));
        }
        chosen
    }

    /// Whether a known pod has a container for which the kubelet may ask for this many ids now. If not, the kubelet is ahead of the
    /// agent's watch: it admits a pod that the agent does not know yet.
    pub fn is_expected(&self, spec: ResourceSpec, must_include: &[String], size: usize) -> bool {
        self.candidates(spec, size, must_include).next().is_some()
    }

    /// Return the container that the kubelet is probably admitting, and its GPUs. It has an allocation. Among several, the pod seen first
    /// wins.
    fn likely_container(&self, spec: ResourceSpec, size: usize, must_include: &[String]) -> Option<(ContainerKey, Vec<String>)> {
        let mut candidates: Vec<_> = self.candidates(spec, size, must_include).collect();
        candidates.sort_by_key(|(known, _)| known.seq);
        candidates.into_iter().find_map(|(known, container)| {
            let uuids: Vec<String> = match &known.pin {
                Held::Allocation(allocation) => {
                    let shares = allocation.containers.get(container)?;
                    shares.iter().map(|share| share.uuid.clone()).collect()
                }
                held => self.shares(held).into_iter().take(1).map(|share| share.uuid).collect(),
            };
            if uuids.is_empty() {
                return None;
            }
            let key = ContainerKey {
                uid: known.pod.uid.clone(),
                container: container.to_owned(),
            };
            Some((key, uuids))
        })
    }

    /// Return the containers for which the kubelet may ask for this many ids now, with their pods. The pod is bound here, and is not being
    /// deleted; the container is the pod's first one without a handout.
    fn candidates(&self, spec: ResourceSpec, size: usize, must_include: &[String]) -> impl Iterator<Item = (&PodInCore, &str)> {
        let size = u64::try_from(size).ok().filter(|size| *size > 0);
        let handouts = move || {
            self.granting(&self.handouts)
                .filter(move |(of, _)| *of == spec)
                .map(|(_, handout)| handout)
        };
        let living = self.pods.values().filter(|known| !known.pod.deleting && !known.pod.ended());
        living.filter_map(move |known| {
            let pod = &known.pod;
            let taken = |container: &str| {
                let is = |key: &ContainerKey| key.uid == pod.uid && key.container == container;
                handouts().any(|handout| is(&handout.key))
                    || self
                        .in_flight
                        .iter()
                        .any(|in_flight| in_flight.guess.as_ref().is_some_and(is))
                    || self.records.keys().any(is)
            };
            let (next, amount) = spec.requests(&pod.request).find(|(container, _)| !taken(container))?;
            // Ids that are included again come from an earlier container of the same pod.
            let reused = must_include.is_empty()
                || handouts().any(|handout| handout.key.uid == pod.uid && must_include.iter().all(|id| handout.ids.contains(id)));
            (Some(amount) == size && reused).then_some((known, next))
        })
    }
}
