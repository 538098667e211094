//! GetPreferredAllocation: which of the free ids the kubelet should hand out.
//!
//! The call does not name a pod, so the answer is a guess. A wrong guess affects only the podresources API and its readers, which then show
//! ids of another GPU than the one that the container has.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::DeviceId;

use super::{Core, Key};

impl Core {
    /// Return exactly `size` ids, or fewer if not enough are available. They include all of `must_include`, and as many as possible lie on one
    /// GPU: the GPU of `must_include`, else the GPU of the pod that the call is probably for, else the fullest GPU that has room. For a pod with
    /// several GPUs, the same number lies on each. Every input gets a valid answer, because the kubelet rejects the pod permanently after an error.
    pub fn preferred(&mut self, available: &[String], must_include: &[String], size: usize) -> Vec<String> {
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
            let (gpu, slot) = match id.parse::<DeviceId>() {
                Ok(DeviceId::Memory { uuid, slot }) => (uuid, slot),
                Ok(DeviceId::Count { uuid }) => (uuid, 0),
                Err(_) => (String::new(), 0),
            };
            free.entry(gpu).or_default().insert((slot, id));
        }
        let guess = self.likely_container(size, must_include);
        let included = must_include
            .iter()
            .find_map(|id| id.parse::<DeviceId>().ok().map(|id| id.uuid().to_owned()));
        let wanted: &[String] = guess.as_ref().map_or(&[], |(_, uuids)| uuids);
        if let (Some(each), [_, _, ..]) = (size.checked_div(wanted.len()), wanted) {
            for uuid in wanted {
                let here = |id: &&String| id.parse::<DeviceId>().is_ok_and(|id| id.uuid() == uuid);
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

    /// Return the container that the kubelet is probably admitting, and its GPUs. Its pod is bound here, is not being deleted, and has an
    /// allocation; the container is the pod's first one without a handout and requests this many units. Among several, the pod seen first wins.
    fn likely_container(&self, size: usize, must_include: &[String]) -> Option<(Key, Vec<String>)> {
        let size = u64::try_from(size).ok().filter(|size| *size > 0)?;
        let mut candidates: Vec<_> = self
            .pods
            .values()
            .filter(|known| !known.pod.deleting && !known.pod.ended())
            .filter_map(|known| {
                let pod = &known.pod;
                let taken = |container: &str| {
                    let is = |key: &Key| key.uid == pod.uid && key.container == container;
                    self.memory_handouts(&self.handouts).any(|handout| is(&handout.key))
                        || self
                            .in_flight
                            .iter()
                            .any(|in_flight| in_flight.guess.as_ref().is_some_and(is))
                        || self.records.keys().any(is)
                };
                let next = pod.request.memory_containers().find(|container| !taken(&container.name))?;
                // Ids that are included again come from an earlier container of the same pod.
                let reused = must_include.is_empty()
                    || self
                        .memory_handouts(&self.handouts)
                        .any(|handout| handout.key.uid == pod.uid && must_include.iter().all(|id| handout.ids.contains(id)));
                (next.units == size && reused).then_some((known.seq, known, &next.name))
            })
            .collect();
        candidates.sort_by_key(|(seq, _, _)| *seq);
        candidates.into_iter().find_map(|(_, known, container)| {
            let uuids: Vec<String> = match &known.pin {
                divvy_model::Held::Allocation(allocation) => {
                    let shares = allocation.containers.get(container)?;
                    shares.iter().map(|share| share.uuid.clone()).collect()
                }
                held => self.shares(held).into_iter().take(1).map(|share| share.uuid).collect(),
            };
            if uuids.is_empty() {
                return None;
            }
            let key = Key {
                uid: known.pod.uid.clone(),
                container: container.clone(),
            };
            Some((key, uuids))
        })
    }
}
