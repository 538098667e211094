//! A node in memory: a kubelet's device manager, cgroups, the agent's files, and the core under test.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_agent_core::{
    AgentAction, AgentCore, AllocateError, ContainerKey, CoreSettings, DecisionFacts, Escape, GpuOffer, Guarded, Handout,
    LimitStep, MigStrategy, NodeFiles, NodeKey, Otherwise, PreStart, Reason, Reconciled, ResourceSpec, SpecOnNode,
};
use divvy_cdi as cdi;
use divvy_cdi::{CdiSpecDevice, Spec};
use divvy_model::{
    Allocation, ContainerKind, ContainerRequest, ContainerShare, Enforcement, Gpu, GpuShare, GrantRecord, Health, Held,
    MemoryUnit, MiB, Phase, Pod, PodRequest,
};
use divvy_testkit::nodes::t4;

pub(crate) const GIB: u64 = 1024;

/// Why the kubelet does not admit a pod.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotAdmitted {
    #[error("requested number of devices unavailable")]
    Unavailable,
    #[error(transparent)]
    Allocate(#[from] AllocateError),
}

pub(crate) fn settings() -> CoreSettings {
    CoreSettings {
        unit: MemoryUnit::GIB,
        reserve: MiB::ZERO,
        whole: false,
        also_shared: BTreeSet::new(),
        mig: MigStrategy::None,
        node_key: NodeKey([7; 32]),
        agent_version: "test".to_owned(),
        boot_id: "boot-1".to_owned(),
        guard: None,
        mps: None,
    }
}

/// What holds a pod to its shares, according to the steps among some actions.
#[derive(Debug, Default)]
pub(crate) struct Limits {
    pub(crate) gpus: Vec<(String, MiB)>,
    pub(crate) guarded: Vec<Guarded>,
    pub(crate) are_required: bool,
}

impl Limits {
    pub(crate) fn of(actions: &[AgentAction]) -> Limits {
        let mut limits = Limits::default();
        for action in actions {
            match action {
                AgentAction::Limit(LimitStep::Files { shares, .. }) => limits.guarded.clone_from(shares),
                AgentAction::Limit(LimitStep::Driver { gpus, otherwise, .. }) => {
                    limits.gpus.clone_from(gpus);
                    limits.are_required = *otherwise == Otherwise::Refuse;
                }
                _ => {}
            }
        }
        limits
    }
}

pub(crate) fn gpu(index: u32, mib: u64) -> Gpu {
    Gpu {
        numa: Some(index % 2),
        ..t4(format!("GPU-{index}"), index, mib)
    }
}

/// Complete these GPUs with the part that the agent offers of each.
pub(crate) fn offered(settings: &CoreSettings, gpus: &[Gpu]) -> Vec<Gpu> {
    let gpus = gpus.iter().cloned();
    gpus.map(|gpu| {
        let GpuOffer { reserve, units, whole } = settings.offer(gpu.vendor, gpu.total, gpu.partition.as_ref());
        Gpu {
            reserve,
            units,
            whole,
            ..gpu
        }
    })
    .collect()
}

fn set_hardware(core: &mut AgentCore, gpus: &[Gpu]) {
    let gpus = offered(core.settings(), gpus);
    let drivers = gpus.iter().map(|gpu| (gpu.vendor, "550.54.15".to_owned()));
    core.set_hardware(drivers.collect(), gpus).expect("few ids");
    core.knows_service();
}

/// Return a pod that is bound to this node with an allocation on one GPU.
pub(crate) fn pod(uid: &str, gpu: u32, containers: &[(&str, ContainerKind, u64)]) -> Pod {
    let request = PodRequest {
        containers: containers
            .iter()
            .map(|(name, kind, units)| ContainerRequest {
                name: (*name).to_owned(),
                kind: *kind,
                units: *units,
                gpu_count: 0,
            })
            .collect(),
        ..PodRequest::default()
    };
    let uuid = format!("GPU-{gpu}");
    let allocation = Allocation {
        v: 1,
        gpus: vec![GpuShare {
            uuid: uuid.clone(),
            memory: MiB(request.effective_units().expect("small") * GIB),
            cores: 0,
            whole: false,
            enforcement: None,
        }],
        containers: request
            .memory_containers()
            .map(|container| {
                let share = ContainerShare {
                    uuid: uuid.clone(),
                    memory: MiB(container.units * GIB),
                    cores: 0,
                };
                (container.name.clone(), vec![share])
            })
            .collect(),
    };
    Pod {
        uid: uid.to_owned(),
        namespace: "default".to_owned(),
        name: format!("pod-{uid}"),
        node: Some("n1".to_owned()),
        request,
        held: Held::Allocation(allocation),
        ..Pod::default()
    }
}

pub(crate) fn simple(uid: &str, gpu: u32, units: u64) -> Pod {
    pod(uid, gpu, &[("main", ContainerKind::App, units)])
}

/// Return the pod with an allocation of these whole GPUs, which its container `main` has.
pub(crate) fn holding(pod: Pod, uuids: &[String], memory: MiB) -> Pod {
    let share = |uuid: &String| GpuShare {
        uuid: uuid.clone(),
        memory,
        cores: 0,
        whole: true,
        enforcement: None,
    };
    let of_container = |uuid: &String| ContainerShare {
        uuid: uuid.clone(),
        memory,
        cores: 0,
    };
    let allocation = Allocation {
        v: 1,
        gpus: uuids.iter().map(share).collect(),
        containers: BTreeMap::from([("main".to_owned(), uuids.iter().map(of_container).collect())]),
    };
    Pod {
        held: Held::Allocation(allocation),
        ..pod
    }
}

/// Return the GPUs that the agent granted to a container.
pub(crate) fn gpus_of(node: &Node, uid: &str, container: &str) -> Vec<String> {
    let record = &node.records[&key(uid, container)];
    record.container_gpus.iter().map(|share| share.uuid.clone()).collect()
}

pub(crate) fn key(uid: &str, container: &str) -> ContainerKey {
    ContainerKey {
        uid: uid.to_owned(),
        container: container.to_owned(),
    }
}

/// What a running container has, from the spec that its container runtime resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Running {
    pub(crate) env: Vec<String>,
    pub(crate) devices: Vec<String>,
    pub(crate) groups: Vec<u32>,
}

pub(crate) struct Node {
    pub(crate) core: AgentCore,
    settings: CoreSettings,
    gpus: Vec<Gpu>,
    // The agent's files on disk.
    pub(crate) records: BTreeMap<ContainerKey, GrantRecord>,
    pub(crate) specs: BTreeMap<String, String>,
    // The kubelet.
    pub(crate) handouts: Vec<Handout>,
    // The node.
    pub(crate) populated: BTreeSet<String>,
    pub(crate) node_files: NodeFiles,
    pub(crate) memory_in_use: Option<BTreeMap<String, BTreeMap<String, MiB>>>,
    pub(crate) escapes: BTreeMap<String, Vec<Escape>>,
    // The API server.
    pub(crate) pods: BTreeMap<String, Pod>,
    pub(crate) synced: bool,
    pub(crate) events: Vec<(String, &'static str, String)>,
}

/// Return a CDI spec that names the GPUs and lists no files.
fn spec_of(gpus: &[Gpu]) -> Spec {
    let devices = gpus.iter().map(|gpu| CdiSpecDevice {
        name: gpu.uuid.clone(),
        ..CdiSpecDevice::default()
    });
    Spec {
        kind: "nvidia.com/gpu".to_owned(),
        devices: devices.collect(),
        ..Spec::default()
    }
}

impl Node {
    pub(crate) fn new(mib: &[u64]) -> Node {
        let gpus: Vec<Gpu> = (0..).zip(mib).map(|(index, mib)| gpu(index, *mib)).collect();
        Node::with(settings(), gpus)
    }

    pub(crate) fn with(settings: CoreSettings, gpus: Vec<Gpu>) -> Node {
        let mut core = AgentCore::new(settings.clone());
        set_hardware(&mut core, &gpus);
        Node {
            core,
            settings,
            gpus: gpus.clone(),
            records: BTreeMap::new(),
            specs: BTreeMap::new(),
            handouts: Vec::new(),
            populated: BTreeSet::new(),
            // The driver's spec exists, as if an agent had made it.
            node_files: NodeFiles {
                specs: vec![spec_of(&gpus)],
                ..NodeFiles::default()
            },
            memory_in_use: None,
            escapes: BTreeMap::new(),
            pods: BTreeMap::new(),
            synced: true,
            events: Vec::new(),
        }
    }

    pub(crate) fn set_enforcement(&mut self, index: usize, enforcement: Option<Enforcement>) {
        self.gpus[index].enforcement = enforcement;
        set_hardware(&mut self.core, &self.gpus);
    }

    pub(crate) fn change_gpu(&mut self, index: usize, change: impl FnOnce(&mut Gpu)) {
        change(&mut self.gpus[index]);
        set_hardware(&mut self.core, &self.gpus);
    }

    pub(crate) fn set_health(&mut self, index: usize, health: Health, reason: Option<&str>) {
        self.gpus[index].health = health;
        self.gpus[index].reason = reason.map(str::to_owned);
        set_hardware(&mut self.core, &self.gpus);
    }

    /// Create this pod on the API server, and let the agent see it.
    pub(crate) fn see(&mut self, pod: Pod) {
        self.pods.insert(pod.uid.clone(), pod.clone());
        let actions = self.core.apply_pod(pod);
        self.perform(&actions);
    }

    pub(crate) fn change(&mut self, uid: &str, change: impl FnOnce(&mut Pod)) {
        let mut pod = self.pods[uid].clone();
        change(&mut pod);
        self.see(pod);
    }

    /// Delete the pod's object, regardless of its containers.
    pub(crate) fn object_gone(&mut self, uid: &str) {
        self.pods.remove(uid);
        self.core.delete_pod(uid);
    }

    pub(crate) fn facts(&self) -> DecisionFacts {
        DecisionFacts {
            handouts: Some(self.handouts.clone()),
            populated: self.populated.clone(),
            synced: self.synced,
            fresh: false,
            node: self.node_files.clone(),
            specs: self
                .specs
                .iter()
                .map(|(name, text)| (name.clone(), Arc::new(SpecOnNode::of(text))))
                .collect(),
            memory_in_use: self.memory_in_use.clone(),
            escapes: self.escapes.clone(),
        }
    }

    /// Set the driver's list of processes: pod, GPU, MiB.
    pub(crate) fn processes(&mut self, of: &[(&str, usize, u64)]) {
        let mut in_use: BTreeMap<String, BTreeMap<String, MiB>> = BTreeMap::new();
        for (uid, index, mib) in of {
            let gpu = in_use.entry(self.gpus[*index].uuid.clone()).or_default();
            gpu.insert((*uid).to_owned(), MiB(*mib));
        }
        self.memory_in_use = Some(in_use);
    }

    pub(crate) fn perform(&mut self, actions: &[AgentAction]) {
        for action in actions {
            match action {
                AgentAction::WriteRecord(record) => {
                    self.records.insert(ContainerKey::of(record), record.clone());
                }
                AgentAction::RemoveRecord(key) => {
                    self.records.remove(key);
                }
                AgentAction::WriteSpec { name, text } => {
                    self.specs.insert(name.clone(), text.clone());
                }
                AgentAction::RemoveSpec { name, owner } => {
                    if self
                        .specs
                        .get(name)
                        .is_some_and(|text| SpecOnNode::of(text).owner() == owner.as_deref())
                    {
                        self.specs.remove(name);
                    }
                }
                AgentAction::Limit(_) => {}
                AgentAction::Event { uid, reason, text, .. } => self.events.push((uid.clone(), reason, text.clone())),
            }
            self.core.commit(action);
        }
    }

    /// Return all ids that are free in the kubelet's view.
    pub(crate) fn free_ids(&self) -> Vec<String> {
        let taken: BTreeSet<&String> = self.handouts.iter().flat_map(|handout| &handout.ids).collect();
        let devices = self.core.devices(ResourceSpec::MEMORY);
        devices
            .iter()
            .filter(|device| device.healthy)
            .map(|device| device.id.to_string())
            .filter(|id| !taken.contains(id))
            .collect()
    }

    /// Admit a pod as the kubelet's device manager does: containers in order, with the ids of init containers reused
    /// (`pkg/kubelet/cm/devicemanager/manager.go`).
    pub(crate) fn admit(&mut self, uid: &str) -> Result<(), NotAdmitted> {
        let pod = self.pods[uid].clone();
        let mut reuse: Vec<String> = Vec::new();
        for container in pod.request.memory_containers() {
            let want = usize::try_from(container.units).expect("small");
            let must: Vec<String> = reuse.iter().take(want).cloned().collect();
            let ids = if must.len() == want {
                must
            } else {
                let free = self.free_ids();
                let available: Vec<String> = free.into_iter().chain(reuse.clone()).collect();
                let ids = self.core.preferred(ResourceSpec::MEMORY, &available, &must, want);
                if ids.len() < want {
                    return Err(NotAdmitted::Unavailable);
                }
                assert!(must.iter().all(|id| ids.contains(id)), "must_include is included");
                assert!(ids.iter().all(|id| available.contains(id)), "only available ids");
                ids
            };
            self.allocate_as(uid, &container.name, &ids)?;
            match container.kind {
                ContainerKind::Init => reuse.extend(ids.into_iter().filter(|id| !reuse.contains(id)).collect::<Vec<_>>()),
                ContainerKind::Sidecar | ContainerKind::App => reuse.retain(|id| !ids.contains(id)),
            }
        }
        Ok(())
    }

    /// Call Allocate for exactly these ids, and add the checkpoint's entry.
    pub(crate) fn allocate_as(&mut self, uid: &str, container: &str, ids: &[String]) -> Result<(), AllocateError> {
        self.allocate_of(ResourceSpec::MEMORY, uid, container, ids)
    }

    /// Call Allocate of this resource for exactly these ids, and add the checkpoint's entry.
    pub(crate) fn allocate_of(
        &mut self,
        spec: ResourceSpec,
        uid: &str,
        container: &str,
        ids: &[String],
    ) -> Result<(), AllocateError> {
        let names = self.core.allocate(spec, ids)?;
        self.handouts.push(Handout {
            key: key(uid, container),
            resource: spec.name().into_owned(),
            ids: ids.iter().cloned().collect(),
            grant: names.first().and_then(|name| cdi::grant_name(name)).map(str::to_owned),
        });
        self.core.set_handouts(self.handouts.clone());
        Ok(())
    }

    pub(crate) fn ids_of(&self, uid: &str, container: &str) -> Vec<String> {
        let handout = self.handouts.iter().find(|handout| handout.key == key(uid, container));
        handout.expect("handed out").ids.iter().cloned().collect()
    }

    /// Call PreStartContainer while the pod's sandbox is running.
    pub(crate) fn pre_start(&mut self, uid: &str, container: &str) -> PreStart {
        self.populated.insert(uid.to_owned());
        let ids = self.ids_of(uid, container);
        let handout = self.handouts.iter().find(|handout| handout.key == key(uid, container));
        let name = handout.expect("handed out").resource.clone();
        let spec = ResourceSpec::named(&name);
        self.pre_start_of(spec.expect("the agent's own"), &ids)
    }

    pub(crate) fn pre_start_ids(&mut self, ids: &[String]) -> PreStart {
        self.pre_start_of(ResourceSpec::MEMORY, ids)
    }

    fn pre_start_of(&mut self, spec: ResourceSpec, ids: &[String]) -> PreStart {
        let mut answer = self.core.pre_start(spec, ids, &self.facts());
        if matches!(answer, PreStart::Wait(..)) {
            // Like the agent: list the pods, then call again.
            if self.synced {
                let listing = self.core.begin_list();
                let actions = self.core.listed(listing, self.pods.values().cloned().collect());
                self.perform(&actions.expect("no watch began again"));
                let fresh = DecisionFacts {
                    fresh: true,
                    ..self.facts()
                };
                answer = self.core.pre_start(spec, ids, &fresh);
            }
        }
        match &answer {
            PreStart::Granted { actions, .. } | PreStart::Refused { actions, .. } => self.perform(actions),
            PreStart::Wait(..) => {}
        }
        answer
    }

    /// Start a container: call PreStart, then let the container runtime resolve the CDI name that the kubelet recorded.
    pub(crate) fn start(&mut self, uid: &str, container: &str) -> Result<Running, (Reason, String)> {
        match self.pre_start(uid, container) {
            PreStart::Granted { .. } => {
                if let Some(pod) = self.pods.get(uid)
                    && !pod.ended()
                {
                    self.change(uid, |pod| {
                        pod.phase = Phase::Running;
                        pod.container_running = true;
                    });
                }
                Ok(self.resolve(uid, container).expect("the spec is there after PreStart"))
            }
            PreStart::Wait(reason, text) | PreStart::Refused { reason, text, .. } => Err((reason, text)),
        }
    }

    /// Return what the container runtime finds under the name that the kubelet recorded.
    pub(crate) fn resolve(&self, uid: &str, container: &str) -> Option<Running> {
        let handout = self.handouts.iter().find(|handout| handout.key == key(uid, container))?;
        let spec = cdi::Spec::parse(self.specs.get(handout.grant.as_ref()?)?).expect("own text");
        let edits = &spec.devices[0].container_edits;
        Some(Running {
            env: edits.env.clone(),
            devices: edits.device_nodes.iter().map(|node| node.path.clone()).collect(),
            groups: edits.additional_gids.clone(),
        })
    }

    /// Remove a pod from the kubelet's own records.
    pub(crate) fn kubelet_forgets(&mut self, uid: &str) {
        self.handouts.retain(|handout| handout.key.uid != uid);
        self.core.set_handouts(self.handouts.clone());
    }

    pub(crate) fn processes_end(&mut self, uid: &str) {
        self.populated.remove(uid);
        if self.pods.contains_key(uid) {
            self.change(uid, |pod| pod.container_running = false);
        }
    }

    pub(crate) fn reconcile(&mut self) -> Reconciled {
        let facts = self.facts();
        if let Some(handouts) = facts.handouts.clone() {
            self.core.set_handouts(handouts);
        }
        let found = self.core.reconcile(&facts);
        self.perform(&found.actions);
        found
    }

    /// Replace the GPU with this index by another one.
    pub(crate) fn replace_card(&mut self, index: usize, uuid: &str) {
        uuid.clone_into(&mut self.gpus[index].uuid);
        set_hardware(&mut self.core, &self.gpus);
    }

    /// Restart the agent with another `--memory-unit`.
    pub(crate) fn change_unit(&mut self, unit: divvy_model::MemoryUnit) {
        self.settings.unit = unit;
        self.restart_agent();
    }

    /// Restart the agent with other settings.
    pub(crate) fn change_settings(&mut self, change: impl FnOnce(&mut CoreSettings)) {
        change(&mut self.settings);
        self.restart_agent();
    }

    /// Start a new agent process. Its knowledge comes from disk, from the checkpoint, and from the API server.
    pub(crate) fn restart_agent(&mut self) {
        let mut core = AgentCore::new(self.settings.clone());
        core.load_records(self.records.values().cloned().collect());
        set_hardware(&mut core, &self.gpus);
        core.set_handouts(self.handouts.clone());
        self.core = core;
        let actions = self.core.reset_pods(self.pods.values().cloned().collect());
        self.perform(&actions);
    }
}
