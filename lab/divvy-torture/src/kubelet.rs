//! The state of a kubelet's device manager: which ids it considers free, and which ids each container has
//! (`pkg/kubelet/cm/devicemanager/manager.go`).

use std::collections::{BTreeMap, BTreeSet};

use divvy_agent_core::{AllocateError, ContainerKey, Handout, ResourceSpec};
use divvy_model::{ContainerKind, ContainerRequest, Pod};
use divvy_testkit::dice::Dice;

use crate::agent::AgentRun;
use crate::api::PodWatch;
use crate::whole::{WHOLE, devices, is_of};

/// The state of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerStage {
    /// The container waits to be started.
    Waiting,
    Running,
    /// The container has ended permanently.
    Done,
}

/// A pod as its kubelet sees it.
#[derive(Debug, Clone)]
pub struct Local {
    pub pod: Pod,
    pub admitted: bool,
    /// Whether deletion was requested.
    pub terminating: bool,
    /// Whether the object is gone (forced deletion). The kubelet takes the ids back, and ends the containers later.
    pub removed: bool,
    /// Whether the pod was evicted: its phase is Failed, although its containers may still run.
    pub evicted: bool,
    /// Whether the pod is in a terminal phase and none of its containers runs.
    pub finished: bool,
    pub states: BTreeMap<String, ContainerStage>,
}

impl Local {
    fn new(pod: Pod) -> Local {
        let states = pod
            .request
            .containers
            .iter()
            .map(|c| (c.name.clone(), ContainerStage::Waiting))
            .collect();
        Local {
            terminating: pod.deleting,
            pod,
            admitted: false,
            removed: false,
            evicted: false,
            finished: false,
            states,
        }
    }

    /// Report whether the kubelet would start containers of the pod.
    pub fn is_live(&self) -> bool {
        self.admitted && !(self.terminating || self.removed || self.evicted || self.finished)
    }

    pub fn state(&self, container: &str) -> ContainerStage {
        self.states.get(container).copied().unwrap_or(ContainerStage::Done)
    }

    pub fn set(&mut self, container: &str, state: ContainerStage) {
        if let Some(entry) = self.states.get_mut(container) {
            *entry = state;
        }
    }

    /// Return the containers that may be started now: the init containers one by one, then the app containers in any order.
    pub fn startable(&self) -> Vec<ContainerRequest> {
        let mut startable = Vec::new();
        for container in &self.pod.request.containers {
            let state = self.state(&container.name);
            let waits = state == ContainerStage::Waiting;
            match container.kind {
                ContainerKind::Init if state == ContainerStage::Done => {}
                ContainerKind::Init if !waits => return Vec::new(),
                ContainerKind::Sidecar if !waits => {}
                ContainerKind::Init | ContainerKind::Sidecar => return vec![container.clone()],
                ContainerKind::App if waits => startable.push(container.clone()),
                ContainerKind::App => {}
            }
        }
        startable
    }

    /// Report whether every app container has ended permanently.
    pub fn apps_done(&self) -> bool {
        self.pod
            .request
            .containers
            .iter()
            .filter(|container| container.kind == ContainerKind::App)
            .all(|container| self.state(&container.name) == ContainerStage::Done)
    }
}

/// The state of a kubelet.
#[derive(Debug, Clone)]
pub struct KubeletModel {
    pub watch: PodWatch,
    pub pods: BTreeMap<String, Local>,
    /// The allocations in the checkpoint.
    pub handouts: Vec<Handout>,
    /// The ids that the kubelet considers allocated. Because of bug B1, some ids in the checkpoint may be missing here.
    allocated: BTreeSet<String>,
    /// The ids of all resources in the last ListAndWatch messages. Empty once the streams have ended.
    pub healthy: BTreeSet<String>,
    /// The number of units of memory.
    pub capacity: u64,
    /// The number of whole GPUs.
    pub whole_capacity: u64,
}

/// Why the kubelet does not admit a pod (`UnexpectedAdmissionError`), in its words.
#[derive(Debug, thiserror::Error)]
pub enum NotAdmitted {
    /// Devices that were allocated before the kubelet's restart are not healthy anymore.
    #[error("previously allocated devices are no longer healthy")]
    NoLongerHealthy,
    #[error("no healthy devices present")]
    NoneHealthy,
    #[error("requested number of devices unavailable. Requested: {requested}, Available: {available}")]
    Unavailable { requested: usize, available: usize },
    #[error(transparent)]
    Allocate(AllocateError),
}

impl KubeletModel {
    pub fn new(node: &str) -> KubeletModel {
        KubeletModel {
            watch: PodWatch::new(Some(node)),
            pods: BTreeMap::new(),
            handouts: Vec::new(),
            allocated: BTreeSet::new(),
            healthy: BTreeSet::new(),
            capacity: 0,
            whole_capacity: 0,
        }
    }

    /// Apply a ListAndWatch message of each resource.
    pub fn devices(&mut self, agent: &AgentRun) {
        let (units, whole) = (agent.core.devices(ResourceSpec::MEMORY), agent.core.devices(WHOLE));
        self.capacity = units.len() as u64;
        self.whole_capacity = whole.len() as u64;
        self.healthy = units
            .into_iter()
            .chain(whole)
            .filter(|device| device.healthy)
            .map(|device| device.id.to_string())
            .collect();
    }

    /// Return the healthy ids of a resource.
    pub fn healthy_of(&self, spec: ResourceSpec) -> impl Iterator<Item = &String> {
        self.healthy.iter().filter(move |id| is_of(spec, id))
    }

    /// Note that the stream ended. All ids become unhealthy immediately, but the capacity stays.
    pub fn stream_ended(&mut self) {
        self.healthy.clear();
    }

    /// Start a new process, which only knows the checkpoint.
    pub fn restart(&mut self) {
        self.stream_ended();
        self.allocated = self.handouts.iter().flat_map(|handout| handout.ids.clone()).collect();
    }

    /// Free the ids of pods that are gone or have ended, as `UpdateAllocatedDevices` does.
    fn collect_garbage(&mut self) {
        let pods = &self.pods;
        let active = |uid: &str| pods.get(uid).is_some_and(|local| !local.removed && !local.finished);
        let before = self.handouts.len();
        self.handouts.retain(|handout| active(&handout.key.uid));
        if self.handouts.len() != before {
            self.allocated = self.handouts.iter().flat_map(|handout| handout.ids.clone()).collect();
        }
    }

    /// Note that a pod exists. A pod that only needs to be ended is noted, but not admitted.
    pub fn know(&mut self, pod: &Pod) {
        self.pods.entry(pod.uid.clone()).or_insert_with(|| Local::new(pod.clone()));
    }

    /// Admit a pod. An error is final.
    ///
    /// With `b1`, another pod ends and a client lists the pod resources during the calls, so that the kubelet forgets the ids
    /// that it is currently allocating (kubernetes#137534).
    pub fn admit(&mut self, pod: &Pod, agent: Option<&mut AgentRun>, b1: bool, chance: &mut Dice) -> Result<(), NotAdmitted> {
        self.know(pod);
        let mut agent = agent;
        let mut reuse: BTreeSet<String> = BTreeSet::new();
        for container in &pod.request.containers {
            let Some((spec, amount)) = devices(&pod.request, &container.name) else {
                continue;
            };
            self.collect_garbage();
            let want = usize::try_from(amount).unwrap();
            let ids = match self.handouts.iter().find(|h| h.key == key(pod, container)) {
                Some(handout) if handout.ids.is_subset(&self.healthy) => handout.ids.clone(),
                Some(_) => return Err(NotAdmitted::NoLongerHealthy),
                None => {
                    let agent = agent.as_deref_mut().filter(|_| self.healthy_of(spec).next().is_some());
                    let agent = agent.ok_or(NotAdmitted::NoneHealthy)?;
                    let ids = self.choose(spec, want, &reuse, agent, chance)?;
                    let mut order: Vec<String> = ids.iter().cloned().collect();
                    chance.shuffle(&mut order);
                    let grant = agent.allocate(spec, &order).map_err(NotAdmitted::Allocate)?;
                    self.handouts.push(Handout {
                        key: key(pod, container),
                        resource: spec.name().into_owned(),
                        ids: ids.clone(),
                        grant: Some(grant),
                    });
                    if b1 {
                        self.allocated.retain(|id| !ids.contains(id) || reuse.contains(id));
                    } else {
                        self.allocated.extend(ids.iter().cloned());
                    }
                    ids
                }
            };
            match container.kind {
                ContainerKind::Init => reuse.extend(ids),
                ContainerKind::Sidecar | ContainerKind::App => reuse.retain(|id| !ids.contains(id)),
            }
        }
        if let Some(local) = self.pods.get_mut(&pod.uid) {
            local.admitted = true;
        }
        Ok(())
    }

    /// Choose ids: first the ids of the pod's init containers, then the ids that the plugin prefers. Sometimes other ids are
    /// chosen instead, as any kubelet may do.
    fn choose(
        &self,
        spec: ResourceSpec,
        want: usize,
        reuse: &BTreeSet<String>,
        agent: &mut AgentRun,
        chance: &mut Dice,
    ) -> Result<BTreeSet<String>, NotAdmitted> {
        let prefers_others = chance.one_in(4);
        let mut take = |from: Vec<String>, count: usize| -> Vec<String> {
            let mut from = from;
            chance.shuffle(&mut from);
            from.truncate(count);
            from
        };
        let must = take(reuse.iter().cloned().collect(), want);
        let mut ids: BTreeSet<String> = must.iter().cloned().collect();
        if ids.len() == want {
            return Ok(ids);
        }
        let free = self.healthy_of(spec).filter(|id| !self.allocated.contains(*id));
        let free: Vec<String> = free.cloned().collect();
        if free.len() < want - ids.len() {
            return Err(NotAdmitted::Unavailable {
                requested: want - ids.len(),
                available: free.len(),
            });
        }
        let available: Vec<String> = free.iter().chain(&must).cloned().collect();
        let preferred = agent.preferred(spec, &available, &must, want);
        assert!(
            preferred.len() == want && must.iter().all(|id| preferred.contains(id)),
            "GetPreferredAllocation answered {preferred:?} to {available:?}, {must:?}, {want}"
        );
        // The plugin only states a preference; a kubelet that aligns with NUMA nodes does not always call it.
        if !prefers_others {
            let wished: Vec<String> = preferred.into_iter().filter(|id| free.contains(id)).collect();
            let missing = want - ids.len();
            ids.extend(take(wished, missing));
        }
        let rest: Vec<String> = free.into_iter().filter(|id| !ids.contains(id)).collect();
        let missing = want - ids.len();
        ids.extend(take(rest, missing));
        Ok(ids)
    }

    pub fn handout(&self, uid: &str, container: &str) -> Option<&Handout> {
        self.handouts
            .iter()
            .find(|handout| handout.key.uid == uid && handout.key.container == container)
    }
}

fn key(pod: &Pod, container: &ContainerRequest) -> ContainerKey {
    ContainerKey {
        uid: pod.uid.clone(),
        container: container.name.clone(),
    }
}
