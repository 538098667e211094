//! Containers whose GPUs another device plugin chose, before this agent took over the node. Both plugins offer the same resource with the
//! same ids. The kubelet has recorded the other plugin's answer and replays it at each start of the container, so the container always has
//! the GPUs that its ids name.

use divvy_model::{ContainerShare, Gpu, GpuShare, Pod};

use super::booking::Booking;
use super::reason::Reason;
use super::{AgentCore, ContainerKey, DecisionFacts, Handout, Ids, ResourceSpec, vendor};

impl AgentCore {
    /// Report whether another device plugin answered the kubelet's call for these whole GPUs. This agent's answers name a grant.
    pub(super) fn is_of_another_plugin(spec: ResourceSpec, handout: &Handout) -> bool {
        matches!(spec.ids, Ids::Whole(_)) && handout.grant.is_none()
    }

    /// Return the handouts of whole GPUs for which another plugin answered.
    pub(super) fn of_another_plugin<'a>(&self, handouts: &'a [Handout]) -> impl Iterator<Item = &'a Handout> + use<'a> {
        let theirs = self.granting(handouts);
        theirs
            .filter(|(spec, handout)| AgentCore::is_of_another_plugin(*spec, handout))
            .map(|(_, handout)| handout)
    }

    /// Return the containers to which another plugin gave GPUs after this agent had taken over: both plugins run on this node.
    pub(super) fn given_meanwhile<'a>(&'a self, handouts: &'a [Handout]) -> impl Iterator<Item = &'a Handout> {
        let before = |handout: &&Handout| self.inherited.as_ref().is_some_and(|keys| !keys.contains(&handout.key));
        let lives = |handout: &&Handout| self.pods.get(&handout.key.uid).is_some_and(|known| !known.pod.ended());
        self.of_another_plugin(handouts).filter(before).filter(lives)
    }

    /// Return the GPUs that another plugin's ids name, even if this agent offers them through another resource, or not as a whole.
    fn named_by<'a>(&'a self, spec: ResourceSpec, handout: &'a Handout) -> impl Iterator<Item = &'a Gpu> {
        let of_vendor = self
            .gpus
            .iter()
            .filter(move |gpu| matches!(spec.ids, Ids::Whole(kind) if kind.vendor() == gpu.vendor));
        let ids = handout.ids.iter();
        ids.filter_map(move |id| of_vendor.clone().find(|gpu| vendor::of(gpu.vendor).names(gpu, id)))
    }

    /// Return the booking of a container for which another plugin answered: the GPUs that its ids name, whether or not they are
    /// free.
    pub(super) fn as_answered(&self, spec: ResourceSpec, handout: &Handout, pod: &Pod) -> Result<Booking, (Reason, String)> {
        let mut named: Vec<&Gpu> = Vec::new();
        for gpu in self.named_by(spec, handout) {
            if named.iter().all(|other| other.uuid != gpu.uuid) {
                named.push(gpu);
            }
        }
        if named.is_empty() {
            let ids: Vec<&str> = handout.ids.iter().map(String::as_str).collect();
            return Err((
                Reason::GpuUnavailable,
                format!(
                    "another device plugin gave container {} of pod {} the devices {} of {}, which this node does not have now. Delete the pod so \
                     that its replacement gets other GPUs",
                    handout.key.container,
                    pod.key(),
                    ids.join(", "),
                    spec.name()
                ),
            ));
        }
        Ok(self.whole_booking(&handout.key, &named))
    }

    /// Return the booking of a container that has these whole GPUs. The pod's total also includes the GPUs of its other
    /// containers. They may be the same GPUs, if the containers run one after the other.
    pub(super) fn whole_booking(&self, key: &ContainerKey, chosen: &[&Gpu]) -> Booking {
        let container: Vec<ContainerShare> = chosen
            .iter()
            .map(|gpu| ContainerShare {
                uuid: gpu.uuid.clone(),
                memory: self.capacity(gpu),
                cores: 0,
            })
            .collect();
        let mut gpus: Vec<GpuShare> = container
            .iter()
            .map(|share| GpuShare {
                uuid: share.uuid.clone(),
                memory: share.memory,
                cores: 0,
                whole: true,
                enforcement: None,
            })
            .collect();
        for share in self.records_of(&key.uid).flat_map(|record| &record.gpus) {
            if gpus.iter().all(|gpu| gpu.uuid != share.uuid) {
                gpus.push(share.clone());
            }
        }
        Booking { gpus, container }
    }

    /// Return the GPUs that another plugin gave to containers without a record, if the pod may run. Such a container has not
    /// started since this agent took over.
    pub(super) fn promised_by_another_plugin<'a>(
        &'a self,
        handouts: &'a [Handout],
        facts: &'a DecisionFacts,
    ) -> impl Iterator<Item = (&'a ContainerKey, &'a Gpu)> {
        let theirs = self.granting(handouts).filter(|(spec, handout)| {
            AgentCore::is_of_another_plugin(*spec, handout)
                && !self.records.contains_key(&handout.key)
                && self.may_run(&handout.key.uid, facts)
        });
        theirs.flat_map(move |(spec, handout)| self.named_by(spec, handout).map(|gpu| (&handout.key, gpu)))
    }
}
