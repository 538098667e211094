//! Which GPU memory a container may get: the pod's annotation as first seen, checked against the records of its containers and the
//! device ids from the kubelet.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{
    Allocation, ContainerKind, ContainerShare, Gpu, GpuShare, GrantRecord, Health, Held, MemoryUnit, MiB, Pod, Vendor, WholeKind,
    names,
};

use super::reason::Reason;
use super::{AgentCore, ContainerKey, DecisionFacts, GrantSource, Handout, Ids, ResourceSpec};

/// The GPU memory that a container would be granted, before the arbiter checks it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Booking {
    /// The pod's effective total on each GPU.
    pub(super) gpus: Vec<GpuShare>,
    /// The container's own part of each GPU.
    pub(super) container: Vec<ContainerShare>,
}

impl AgentCore {
    /// Return the allocation that counts for a pod that this process sees for the first time, and whether the pod's annotation
    /// differs from it. If the pod has grant records, they decide its GPUs: they are older than anything that this process saw.
    pub(super) fn pin_of(&self, pod: &Pod) -> (Held, bool) {
        let mut records = self.records_of(&pod.uid).peekable();
        let Some(first) = records.peek() else {
            return (pod.held.clone(), false);
        };
        // It never had an allocation: its containers get GPUs by their ids, and those that have started keep theirs (see `by_ids`).
        if matches!(pod.held, Held::Nothing | Held::Legacy(_)) && pod.request.whole.is_some() {
            return (pod.held.clone(), false);
        }
        let gpus = first.gpus.clone();
        // The result is the same as for an agent that never restarted: the amount comes from gpushare's annotation, and the GPU
        // from the first grant (see `booking`). If the granted GPU is gone and another one has its index, the annotation counts
        // as unchanged.
        if let (Held::Legacy(legacy), [_]) = (&pod.held, gpus.as_slice()) {
            let mut cards = gpus.iter().filter_map(|share| self.gpu(&share.uuid));
            let differs = cards.any(|card| !legacy.gpus.contains_key(&card.index));
            return (pod.held.clone(), differs);
        }
        let mut containers: BTreeMap<String, Vec<ContainerShare>> = BTreeMap::new();
        let mut differs = true;
        if let Held::Allocation(allocation) = &pod.held {
            differs = allocation.gpus != gpus;
            if !differs {
                containers.clone_from(&allocation.containers);
            }
        }
        for record in records {
            let before = containers.insert(record.container.clone(), record.container_gpus.clone());
            differs |= before.is_some_and(|before| before != record.container_gpus);
        }
        (Held::Allocation(Allocation { v: 1, gpus, containers }), differs)
    }

    /// Return the pod's total on each GPU. The list is empty if there is no readable allocation, or if no GPU has the index that
    /// gpushare's annotation names.
    pub(super) fn shares(&self, held: &Held) -> Vec<GpuShare> {
        match held {
            Held::Allocation(allocation) => allocation.gpus.clone(),
            Held::Legacy(legacy) => legacy
                .gpus
                .iter()
                .filter_map(|(index, units)| {
                    Some(GpuShare {
                        uuid: self.shared_gpu(*index)?.uuid.clone(),
                        memory: self.settings.unit.memory(*units)?,
                        cores: 0,
                        whole: false,
                        enforcement: None,
                    })
                })
                .collect(),
            Held::Nothing | Held::Unreadable(_) => Vec::new(),
        }
    }

    /// Return the shared GPU with this index, which is how gpushare names a GPU of the default vendor. After a card was replaced, two GPUs have the same index; then
    /// return the one that is present, as the ledger does.
    fn shared_gpu(&self, index: u32) -> Option<&Gpu> {
        let is_named = |gpu: &&Gpu| gpu.is_shared() && gpu.vendor == Vendor::default() && gpu.index == index;
        let of_index = self.gpus.iter().filter(is_named);
        of_index.min_by_key(|gpu| gpu.health == Health::Lost)
    }

    /// Return what the container is to be granted. For a known pod, the source is its allocation. While the pod's object is not
    /// known (the API server is unreachable, and the container only restarts), the source is the container's own record.
    pub(super) fn booking(
        &self,
        spec: ResourceSpec,
        handout: &Handout,
        facts: &DecisionFacts,
    ) -> Result<Booking, (Reason, String)> {
        let key = &handout.key;
        let Some(known) = self.pods.get(&key.uid) else {
            return match self.records.get(key) {
                Some(record) => Ok(Booking {
                    gpus: record.gpus.clone(),
                    container: record.container_gpus.clone(),
                }),
                None => Err((
                    Reason::UnknownPod,
                    format!(
                        "pod {} is not known to this agent yet: the API server has not delivered its object; the kubelet will try again",
                        key.uid
                    ),
                )),
            };
        };
        let pod = &known.pod;
        if AgentCore::is_of_another_plugin(spec, handout) {
            return self.as_answered(spec, handout, pod);
        }
        match &known.pin {
            Held::Nothing | Held::Legacy(_) if spec.grant == GrantSource::AllocationOrIds => {
                self.by_ids(spec, handout, pod, facts)
            }
            Held::Nothing => Err((
                Reason::NoAllocation,
                format!(
                    "pod {} was bound to this node without an allocation (it has no annotation {}), so no GPU memory is reserved for it: it \
                     bypassed the Divvy extender. Check that its scheduler (spec.schedulerName) lists the extender in \
                     its configuration, with {} in managedResources and without ignorable: true, and that the pod does not set \
                     spec.nodeName itself; then delete the pod",
                    pod.key(),
                    names::ALLOCATION,
                    spec.name(),
                ),
            )),
            Held::Unreadable(error) => Err((
                Reason::NoAllocation,
                format!(
                    "the allocation of pod {} cannot be read, so nothing is reserved for it: {error}. Delete the pod. If the same happens to its \
                     replacement, the extender and the agent have different versions, or another client writes the annotation",
                    pod.key()
                ),
            )),
            Held::Allocation(allocation) => {
                let container = allocation.containers.get(&key.container).ok_or_else(|| {
                    (
                        Reason::NoAllocation,
                        format!(
                            "the allocation of pod {} has no share for container {}, which requests {}; delete the pod so that its replacement is \
                             placed again",
                            pod.key(),
                            key.container,
                            spec.name()
                        ),
                    )
                })?;
                let booking = Booking {
                    gpus: allocation.gpus.clone(),
                    container: container.clone(),
                };
                // A restarted container keeps its GPUs. The settings may have changed since its first start, so another resource may offer them now.
                if !self.records.contains_key(key) {
                    self.is_of_the_resource(spec, pod, &booking)?;
                }
                match spec.ids {
                    Ids::Whole(_) => {
                        self.has_a_gpu_for_each_id(handout, pod, &booking)?;
                        self.has_whole_gpus(pod, &booking)?;
                    }
                    Ids::Units | Ids::Count => {
                        self.is_worth_its_ids(handout, pod, &booking)?;
                        self.adds_up(pod, allocation)?;
                    }
                }
                Ok(booking)
            }
            held @ Held::Legacy(legacy) => {
                let gpus = self.shares(held);
                if legacy.gpus.len() != 1 {
                    return Err((
                        Reason::NoAllocation,
                        format!(
                            "gpushare's annotations of pod {} name several GPUs but do not say which container uses which GPU",
                            pod.key()
                        ),
                    ));
                }
                let [share] = gpus.as_slice() else {
                    return Err((
                        Reason::GpuUnavailable,
                        format!(
                            "gpushare's annotations allocate pod {} to the GPU with index {:?}, which this node does not have",
                            pod.key(),
                            legacy.gpus.keys().collect::<Vec<_>>()
                        ),
                    ));
                };
                // gpushare names a GPU by its index, which another GPU may have by now. A pod stays on the GPU of its first grant.
                let granted = self.records_of(&key.uid).next().and_then(|record| record.gpus.first());
                let share = &GpuShare {
                    uuid: granted.unwrap_or(share).uuid.clone(),
                    ..share.clone()
                };
                let unit = self.unit_of(&key.uid);
                // gpushare adds up the app containers only. Kubernetes' formula includes init containers and may require more, which is booked.
                let apps = pod
                    .request
                    .containers
                    .iter()
                    .filter(|container| container.kind == ContainerKind::App);
                let apps = apps.fold(0_u64, |sum, container| sum.saturating_add(container.units));
                let least = unit.memory(apps).unwrap_or(MiB(u64::MAX));
                if share.memory < least {
                    let text = format!(
                        "gpushare's annotations of pod {} give it {} of GPU {}, but its containers request {least}",
                        pod.key(),
                        share.memory,
                        share.uuid
                    );
                    return Err((Reason::NoAllocation, not_the_extenders(text)));
                }
                let asked = pod.request.effective_units().and_then(|units| unit.memory(units));
                let booked = share.memory.max(asked.unwrap_or(MiB(u64::MAX)));
                // As in gpushare's device plugin: a container has as many units as device ids.
                let units = u64::try_from(handout.ids.len()).unwrap_or(u64::MAX);
                let memory = unit.memory(units).unwrap_or(MiB(u64::MAX)).min(booked);
                let share = GpuShare {
                    memory: booked,
                    ..share.clone()
                };
                Ok(Booking {
                    container: vec![ContainerShare {
                        uuid: share.uuid.clone(),
                        memory,
                        cores: 0,
                    }],
                    gpus: vec![share],
                })
            }
        }
    }

    /// Return the GPUs for a container whose pod has no allocation: the GPUs that its ids name. A GPU that another pod holds is
    /// replaced by a free one. Together, the pods on this node hold as many GPUs as the kubelet handed out ids, but not always
    /// the same GPUs: a pod with an allocation has the GPUs of its allocation, even if its ids name others.
    fn by_ids(
        &self,
        spec: ResourceSpec,
        handout: &Handout,
        pod: &Pod,
        facts: &DecisionFacts,
    ) -> Result<Booking, (Reason, String)> {
        let key = &handout.key;
        // Containers of the pod with the same ids run one after the other under the same grant name, and a call does not say which of them starts. So they have the
        // same GPUs, even if another pod claims one meanwhile.
        let has_the_same_ids = |record: &&GrantRecord| record.cdi.is_some() && record.cdi == handout.grant;
        let before = self
            .records
            .get(key)
            .or_else(|| self.records_of(&key.uid).find(has_the_same_ids));
        if let Some(record) = before {
            return Ok(Booking {
                gpus: record.gpus.clone(),
                container: record.container_gpus.clone(),
            });
        }
        let taken = self.taken_from(spec, handout, facts);
        let named = handout
            .ids
            .iter()
            .filter_map(|id| self.gpu_of_id(spec, id))
            .map(|(gpu, _)| gpu);
        let others = self.gpus.iter().filter(|gpu| spec.covers(gpu));
        let mut chosen: Vec<&Gpu> = Vec::new();
        for gpu in named.chain(others) {
            let new = chosen.iter().all(|other| other.uuid != gpu.uuid);
            if chosen.len() < handout.ids.len() && new && gpu.health == Health::Ok && !taken.contains(gpu.uuid.as_str()) {
                chosen.push(gpu);
            }
        }
        if chosen.len() < handout.ids.len() {
            return Err((
                Reason::MemoryHeld,
                format!(
                    "the kubelet gave container {} of pod {} {} devices of {}, but only {} of this node's {} are healthy and not in use by another \
                     pod. The container starts automatically when one becomes free",
                    key.container,
                    pod.key(),
                    handout.ids.len(),
                    spec.name(),
                    chosen.len(),
                    match spec.ids {
                        Ids::Whole(kind @ WholeKind::Mig(_)) => kind.plural(),
                        _ => "GPUs".to_owned(),
                    }
                ),
            ));
        }
        Ok(self.whole_booking(key, &chosen))
    }

    /// Return the UUIDs of the GPUs that this container may not get: GPUs of other pods that may run, GPUs that allocations
    /// or another plugin's answers promise to other pods, and GPUs of the pod's other containers. The GPUs of another container are allowed if the two have
    /// an id in common, because they then run one after the other.
    fn taken_from(&self, spec: ResourceSpec, handout: &Handout, facts: &DecisionFacts) -> BTreeSet<String> {
        let key = &handout.key;
        let handouts = facts.handouts.as_deref().unwrap_or_default();
        let shares_an_id = |other: &ContainerKey| {
            let mut theirs = handouts.iter().filter(|of| of.key == *other && of.resource == spec.name());
            theirs.any(|of| !of.ids.is_disjoint(&handout.ids))
        };
        let mut taken = BTreeSet::new();
        for (other, record) in &self.records {
            let shares = match other.uid == key.uid {
                true if !shares_an_id(other) => record.container_gpus.iter().map(|share| share.uuid.clone()).collect(),
                false if self.may_run(&other.uid, facts) => record.gpus.iter().map(|share| share.uuid.clone()).collect(),
                _ => Vec::new(),
            };
            taken.extend(shares);
        }
        for (uid, known) in &self.pods {
            if *uid != key.uid && !known.pod.ended() {
                taken.extend(self.shares(&known.pin).into_iter().map(|share| share.uuid));
            }
        }
        let theirs = self.promised_by_another_plugin(handouts, facts);
        taken.extend(
            theirs
                .filter(|(other, _)| other.uid != key.uid)
                .map(|(_, gpu)| gpu.uuid.clone()),
        );
        taken
    }

    /// Check that the allocation names only GPUs that the resource offers. Otherwise a pod could get a share of a GPU that is
    /// offered as a whole, or a whole GPU for a few units, and the same GPU would be promised to further pods. A GPU that the
    /// node does not have is refused later.
    fn is_of_the_resource(&self, spec: ResourceSpec, pod: &Pod, booking: &Booking) -> Result<(), (Reason, String)> {
        let mut known = booking.gpus.iter().filter_map(|share| self.gpu(&share.uuid));
        let Some(gpu) = known.find(|gpu| !spec.covers(gpu)) else {
            return Ok(());
        };
        let text = format!(
            "the allocation of pod {} names GPU {}, which is not offered as {}: --whole-gpus, --mig-strategy, or MIG was changed after the pod was \
             bound, or a client other than Divvy's extender wrote the allocation (check that Divvy's admission policies are installed). Delete the \
             pod; its replacement is placed again",
            pod.key(),
            gpu.uuid,
            spec.name()
        );
        Err((Reason::NoAllocation, text))
    }

    /// Check that the allocation gives the container as many whole GPUs as the kubelet gave it devices.
    fn has_a_gpu_for_each_id(&self, handout: &Handout, pod: &Pod, booking: &Booking) -> Result<(), (Reason, String)> {
        let distinct: BTreeSet<&str> = booking.container.iter().map(|share| share.uuid.as_str()).collect();
        if distinct.len() >= handout.ids.len() {
            return Ok(());
        }
        let text = format!(
            "the allocation of pod {} gives container {} {} GPUs, but the kubelet gave it {} devices",
            pod.key(),
            handout.key.container,
            distinct.len(),
            handout.ids.len()
        );
        Err((Reason::NoAllocation, not_the_extenders(text)))
    }

    /// Check that the allocation books whole GPUs. A share of a GPU would leave the rest of its memory to other pods.
    fn has_whole_gpus(&self, pod: &Pod, booking: &Booking) -> Result<(), (Reason, String)> {
        let is_part = |share: &&GpuShare| !share.whole && self.gpu(&share.uuid).is_some_and(Gpu::is_shared);
        let Some(share) = booking.gpus.iter().find(is_part) else {
            return Ok(());
        };
        let text = format!(
            "the allocation of pod {} gives it only {} of GPU {}, but the pod requests whole GPUs",
            pod.key(),
            share.memory,
            share.uuid
        );
        Err((Reason::NoAllocation, not_the_extenders(text)))
    }

    /// Return the unit in which this pod's request is counted, and in which the kubelet counted its devices. An operator may have
    /// changed `--memory-unit`, so the unit of the pod's first grant counts. A pod that was bound before the change and starts
    /// after it has no grant yet: if its allocation matches its request in the unit of another grant on this node, but not in the
    /// present unit, that other unit counts. A unit smaller than the present one is not accepted, because the pod would then book
    /// less memory than its devices stand for.
    pub(super) fn unit_of(&self, uid: &str) -> MemoryUnit {
        if let Some(record) = self.records_of(uid).next() {
            return record.unit;
        }
        let now = self.settings.unit;
        let bound_in = |unit: MemoryUnit| {
            self.pods.get(uid).is_some_and(|known| match &known.pin {
                Held::Allocation(allocation) => allocation.is_in(unit, &known.pod.request),
                _ => false,
            })
        };
        let before = self.other_units().find(|unit| *unit > now && bound_in(*unit));
        before.filter(|_| !bound_in(now)).unwrap_or(now)
    }

    /// Return the memory that a share of a GPU stands for: all of the GPU's memory if the pod has the whole GPU.
    fn worth(&self, booking: &Booking, share: &ContainerShare) -> MiB {
        let whole = booking.gpus.iter().any(|gpu| gpu.uuid == share.uuid && gpu.whole);
        match self.gpu(&share.uuid).filter(|_| whole) {
            Some(gpu) => self.capacity(gpu).max(share.memory),
            None => share.memory,
        }
    }

    /// Check that the allocation covers the devices that the kubelet gave the container and that kube-scheduler counted. Otherwise the
    /// container would use more memory than its allocation books, and the GPU could be promised to further pods.
    fn is_worth_its_ids(&self, handout: &Handout, pod: &Pod, booking: &Booking) -> Result<(), (Reason, String)> {
        let ids = u64::try_from(handout.ids.len()).unwrap_or(u64::MAX);
        let unit = self.unit_of(&handout.key.uid);
        let least = unit.memory(ids).unwrap_or(MiB(u64::MAX));
        let shares = booking.container.iter().map(|share| self.worth(booking, share));
        let has = shares.fold(MiB::ZERO, MiB::saturating_add);
        if has >= least {
            return Ok(());
        }
        let text = format!(
            "the allocation of pod {} gives container {} {has}, but the kubelet gave it {ids} devices of {} each, which is {least}",
            pod.key(),
            handout.key.container,
            unit.memory(1).unwrap_or(MiB(u64::MAX))
        );
        Err((Reason::NoAllocation, not_the_extenders(text)))
    }

    /// Check two sums. On each GPU the pod must book what its containers use there together, by Kubernetes' formula for init containers and
    /// sidecars. On all GPUs together it must book what it requests.
    fn adds_up(&self, pod: &Pod, allocation: &Allocation) -> Result<(), (Reason, String)> {
        let wrong = |text: String| Err((Reason::NoAllocation, not_the_extenders(text)));
        for gpu in allocation.gpus.iter().filter(|gpu| !gpu.whole) {
            let of_container = |name: &str| {
                let shares = allocation.containers.get(name).into_iter().flatten();
                let here = shares.filter(|share| share.uuid == gpu.uuid);
                here.fold(0_u64, |sum, share| sum.saturating_add(share.memory.0))
            };
            let together = pod.request.effective(|container| of_container(&container.name));
            let together = MiB(together.unwrap_or(u64::MAX));
            if gpu.memory < together {
                return wrong(format!(
                    "the allocation of pod {} books {} of GPU {}, but its containers may use {together} of this GPU together",
                    pod.key(),
                    gpu.memory,
                    gpu.uuid
                ));
            }
        }
        let asked = pod
            .request
            .effective_units()
            .and_then(|units| self.unit_of(&pod.uid).memory(units));
        let asked = asked.unwrap_or(MiB(u64::MAX));
        let booked = allocation
            .gpus
            .iter()
            .fold(MiB::ZERO, |sum, gpu| sum.saturating_add(gpu.memory));
        if booked < asked && allocation.gpus.iter().all(|gpu| !gpu.whole) {
            return wrong(format!(
                "the allocation of pod {} books {booked}, but the pod requests {asked}",
                pod.key()
            ));
        }
        Ok(())
    }
}

fn not_the_extenders(text: String) -> String {
    format!(
        "{text}. Divvy's extender does not write such an allocation: either another client wrote it (check that Divvy's admission policies are \
         installed), or --memory-unit was changed after the pod was bound. Delete the pod; its replacement is placed again"
    )
}
