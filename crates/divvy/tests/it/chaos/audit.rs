//! Checks the invariants on ground truth: every commit of the API server, and every container that ran. Nothing here queries
//! Divvy.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use divvy_model::machine::Machines;
use divvy_model::{Allocation, names};
use divvy_testbed::api::{ApiServer, EventKind};
use divvy_testbed::node::{ContainerView, Node, NodeEvent};
use serde_json::Value;
use tokio::sync::broadcast::error::RecvError;

/// The size of a unit in MiB, in every cluster here.
const UNIT: u64 = 1024;

/// A GPU of the machine description.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    pub(crate) node: String,
    pub(crate) index: usize,
    minor: u32,
    pub(crate) units: u64,
}

/// A pod, from its latest object.
#[derive(Debug, Clone, Default)]
struct PodFacts {
    name: String,
    node: Option<String>,
    /// The allocation annotation in the commit that bound the pod.
    text: Option<String>,
    allocation: Option<Allocation>,
    /// The number of units that each container requests.
    containers: BTreeMap<String, u64>,
    /// Whether the object exists and its containers have not all ended.
    live: bool,
}

/// A container's lifetime, and its GPU.
#[derive(Debug, Clone)]
struct Run {
    view: ContainerView,
    gpu: String,
    /// The effective number of units of the container's pod.
    units: u64,
}

#[derive(Debug)]
pub(crate) struct Audit {
    api: ApiServer,
    gpus: BTreeMap<String, Gpu>,
    seen: u64,
    pods: BTreeMap<String, PodFacts>,
    /// The containers, by node and container id.
    runs: BTreeMap<(String, String), Run>,
    pub(crate) violations: Vec<String>,
    pub(crate) started: u64,
    /// The messages of refused PreStartContainer calls, and of permanently refused pods.
    pub(crate) refusals: Vec<String>,
}

/// The state that is shared by the tasks that follow the nodes.
pub(crate) type Shared = Arc<Mutex<Audit>>;

pub(crate) fn lock(audit: &Shared) -> MutexGuard<'_, Audit> {
    audit.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Follow the events of a node until the node is gone.
pub(crate) fn follow(audit: &Shared, node: &Node) {
    let (audit, name, mut events) = (audit.clone(), node.name().to_owned(), node.events());
    tokio::spawn(async move {
        loop {
            match events.recv().await {
                Ok(event) => lock(&audit).node_event(&name, event),
                Err(RecvError::Lagged(lost)) => lock(&audit).complain(format!("the audit of {name} lost {lost} events")),
                Err(RecvError::Closed) => return,
            }
        }
    });
}

/// Return a pod's effective number of units: the largest sum over containers that can run at the same time. It is computed as the
/// Kubernetes documentation describes it, and not with our formula.
pub(crate) fn effective_units(pod: &Value) -> u64 {
    let units = |container: &Value| -> u64 {
        let amount = &container["resources"]["limits"][names::GPU_MEM];
        amount
            .as_str()
            .and_then(|text| text.parse().ok())
            .or(amount.as_u64())
            .unwrap_or(0)
    };
    let empty = Vec::new();
    let list = |key: &str| pod["spec"][key].as_array().unwrap_or(&empty).clone();
    let (mut beside, mut peak) = (0, 0);
    for container in list("initContainers") {
        let here = beside + units(&container);
        peak = peak.max(here);
        if container["restartPolicy"] == "Always" {
            beside = here;
        }
    }
    peak.max(beside + list("containers").iter().map(units).sum::<u64>())
}

/// Report whether all containers of a pod have ended permanently, according to its object.
pub(crate) fn ended(pod: &Value) -> bool {
    let status = &pod["status"];
    let running = ["initContainerStatuses", "containerStatuses"].iter().any(|key| {
        let statuses = status[*key].as_array();
        statuses.is_some_and(|all| all.iter().any(|one| !one["state"]["running"].is_null()))
    });
    matches!(status["phase"].as_str(), Some("Succeeded" | "Failed")) && !running
}

fn is_gpu_device(path: &str) -> bool {
    let number = path.strip_prefix("/dev/nvidia").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

impl Audit {
    pub(crate) fn new(api: ApiServer, machines: &Machines) -> Shared {
        let mut gpus = BTreeMap::new();
        for node in &machines.nodes {
            for (index, gpu) in node.gpus.iter().enumerate() {
                let facts = Gpu {
                    node: node.name.clone(),
                    index,
                    minor: node.gpu_minor(index),
                    units: gpu.memory_mib / UNIT,
                };
                gpus.insert(node.gpu_uuid(index), facts);
            }
        }
        Arc::new(Mutex::new(Audit {
            api,
            gpus,
            seen: 0,
            pods: BTreeMap::new(),
            runs: BTreeMap::new(),
            violations: Vec::new(),
            started: 0,
            refusals: Vec::new(),
        }))
    }

    pub(crate) fn gpus(&self) -> &BTreeMap<String, Gpu> {
        &self.gpus
    }

    fn complain(&mut self, what: String) {
        if !self.violations.contains(&what) {
            self.violations.push(what);
        }
    }

    /// Process the commits since the last call. Check after each commit that the allocations fit on their GPUs.
    pub(crate) fn catch_up(&mut self) {
        if self.api.revision() == self.seen {
            return;
        }
        let history = self.api.history();
        let first = history.partition_point(|event| event.revision <= self.seen);
        for event in &history[first..] {
            self.seen = event.revision;
            if &*event.resource == "pods" {
                self.pod_commit(event.revision, event.kind, &event.object);
            }
        }
    }

    fn pod_commit(&mut self, revision: u64, kind: EventKind, object: &Value) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let uid = text(&object["metadata"]["uid"]);
        let mut pod = self.pods.remove(&uid).unwrap_or_default();
        pod.name = text(&object["metadata"]["name"]);
        let node = object["spec"]["nodeName"].as_str().filter(|node| !node.is_empty());
        let annotation = object["metadata"]["annotations"][names::ALLOCATION].as_str();
        let units = effective_units(object);
        match (&pod.node, node) {
            (None, None) if annotation.is_some() => {
                self.complain(format!("revision {revision}: pod {} has an allocation and no node", pod.name));
            }
            (None, Some(node)) => {
                pod.node = Some(node.to_owned());
                pod.text = annotation.map(str::to_owned);
                match annotation.map(Allocation::parse) {
                    Some(Ok(allocation)) => pod.allocation = Some(allocation),
                    Some(Err(error)) => self.complain(format!("revision {revision}: allocation of {}: {error}", pod.name)),
                    None if units == 0 => {}
                    None => self.complain(format!("revision {revision}: {} was bound without an allocation", pod.name)),
                }
                self.check_allocation(revision, &pod, units);
            }
            (Some(before), now) if now != Some(before) => {
                self.complain(format!("revision {revision}: {} moved from {before} to {now:?}", pod.name));
            }
            (Some(_), _) if annotation != pod.text.as_deref() => {
                self.complain(format!(
                    "revision {revision}: the allocation of {} changed after its binding: {annotation:?}",
                    pod.name
                ));
            }
            _ => {}
        }
        for list in ["initContainers", "containers"] {
            for container in object["spec"][list].as_array().into_iter().flatten() {
                let asked = container["resources"]["limits"][names::GPU_MEM]
                    .as_str()
                    .and_then(|text| text.parse().ok());
                pod.containers.insert(text(&container["name"]), asked.unwrap_or(0));
            }
        }
        pod.live = kind != EventKind::Deleted && !ended(object);
        self.pods.insert(uid, pod);
        for (uuid, taken) in self.allocated() {
            let capacity = self.gpus.get(&uuid).map_or(0, |gpu| gpu.units * UNIT);
            if taken > capacity {
                let gpu = self.gpus.get(&uuid).cloned();
                self.complain(format!("revision {revision}: {taken} MiB are allocated on {gpu:?}"));
            }
        }
    }

    /// Check that a new allocation matches the requests of the pod and of each container, on one GPU of its node.
    fn check_allocation(&mut self, revision: u64, pod: &PodFacts, units: u64) {
        let Some(allocation) = &pod.allocation else { return };
        let good = match allocation.gpus.as_slice() {
            [share] => {
                share.memory.0 == units * UNIT
                    && self
                        .gpus
                        .get(&share.uuid)
                        .is_some_and(|gpu| Some(&gpu.node) == pod.node.as_ref())
            }
            _ => false,
        };
        if !good {
            let text = format!(
                "revision {revision}: {} asks for {units} units and was allocated {allocation:?}",
                pod.name
            );
            self.complain(text);
        }
    }

    /// Return the memory in MiB of bound pods that have not ended, by GPU.
    pub(crate) fn allocated(&self) -> BTreeMap<String, u64> {
        let mut sums: BTreeMap<String, u64> = BTreeMap::new();
        for pod in self.pods.values().filter(|pod| pod.live) {
            for share in pod.allocation.iter().flat_map(|allocation| &allocation.gpus) {
                *sums.entry(share.uuid.clone()).or_default() += share.memory.0;
            }
        }
        sums
    }

    fn node_event(&mut self, node: &str, event: NodeEvent) {
        match event {
            NodeEvent::ContainerStarted(view) => {
                // The pod's binding precedes the container's start.
                self.catch_up();
                self.container_started(node, view);
            }
            NodeEvent::ContainerEnded(view) => {
                if let Some(run) = self.runs.get_mut(&(node.to_owned(), view.id.clone())) {
                    run.view = view;
                }
            }
            NodeEvent::PreStartRefused {
                pod, container, message, ..
            } => self.refusals.push(format!("{pod}/{container}: {message}")),
            NodeEvent::AdmissionRefused {
                pod, reason, message, ..
            } => self.refusals.push(format!("{pod}: {reason}: {message}")),
        }
    }

    /// Check that a container has exactly the allocation of its pod.
    fn container_started(&mut self, node: &str, view: ContainerView) {
        self.started += 1;
        let who = format!("container {}/{} on {node}", view.pod, view.container);
        let devices: Vec<&String> = view.devices.iter().filter(|path| is_gpu_device(path)).collect();
        let Some(pod) = self.pods.get(&view.pod_uid).cloned() else {
            return self.complain(format!("{who}: no commit has its pod {}", view.pod_uid));
        };
        let asked = pod.containers.get(&view.container).copied().unwrap_or(0);
        if asked == 0 {
            if !devices.is_empty() {
                self.complain(format!("{who} asked for nothing and has {devices:?}"));
            }
            return;
        }
        let shares = pod
            .allocation
            .as_ref()
            .and_then(|allocation| allocation.containers.get(&view.container));
        let Some([share]) = shares.map(Vec::as_slice) else {
            return self.complain(format!("{who} runs without a share: {:?}", pod.allocation));
        };
        let Some(gpu) = self.gpus.get(&share.uuid).cloned() else {
            return self.complain(format!("{who} was allocated {}, a GPU that no node has", share.uuid));
        };
        let expected = [
            (names::ALIYUN_IDX, gpu.index.to_string()),
            (names::ALIYUN_POD, asked.to_string()),
            (names::ALIYUN_CONTAINER, asked.to_string()),
            (names::ALIYUN_DEV, gpu.units.to_string()),
            (names::VISIBLE_DEVICES, names::VISIBLE_NONE.to_owned()),
        ];
        for (key, value) in expected {
            let found = view.env.get(key);
            if found != Some(&value) {
                self.complain(format!(
                    "{who} has {key}={found:?}, and was allocated GPU {} of {}: {value}",
                    gpu.index, gpu.node
                ));
            }
        }
        let device = format!("/dev/nvidia{}", gpu.minor);
        if gpu.node != node || devices != [&device] {
            self.complain(format!("{who} has {devices:?}, and was allocated {device} of {}", gpu.node));
        }
        let units = pod
            .allocation
            .iter()
            .flat_map(|allocation| &allocation.gpus)
            .map(|share| share.memory.0 / UNIT)
            .sum();
        let (id, gpu) = ((node.to_owned(), view.id.clone()), share.uuid.clone());
        self.runs.insert(id, Run { view, gpu, units });
    }

    /// Check the containers that run on a node now, according to its runtime. The allocations of their pods must together fit on
    /// each GPU.
    pub(crate) fn check_running(&mut self, containers: &[ContainerView]) {
        let mut by_gpu: BTreeMap<String, BTreeMap<String, u64>> = BTreeMap::new();
        for view in containers.iter().filter(|view| view.is_running()) {
            let Some(allocation) = self.pods.get(&view.pod_uid).and_then(|pod| pod.allocation.as_ref()) else {
                continue;
            };
            for share in &allocation.gpus {
                by_gpu
                    .entry(share.uuid.clone())
                    .or_default()
                    .insert(view.pod.clone() + " " + &view.pod_uid, share.memory.0 / UNIT);
            }
        }
        for (uuid, pods) in by_gpu {
            let capacity = self.gpus.get(&uuid).map_or(0, |gpu| gpu.units);
            if pods.values().sum::<u64>() > capacity {
                self.complain(format!("on GPU {uuid} of {capacity} units run {pods:?} at the same time"));
            }
        }
    }

    /// Check all containers that ever ran: at each start, the pods with a running container on the GPU must have fitted on it
    /// together.
    pub(crate) fn check_lives(&mut self) {
        let mut found = Vec::new();
        for run in self.runs.values() {
            let at = run.view.started_at;
            let together: BTreeMap<(&String, &String), u64> = self
                .runs
                .values()
                .filter(|other| other.gpu == run.gpu && other.view.started_at <= at)
                .filter(|other| other.view.finished_at.is_none_or(|end| end > at))
                .map(|other| ((&other.view.pod, &other.view.pod_uid), other.units))
                .collect();
            let capacity = self.gpus.get(&run.gpu).map_or(0, |gpu| gpu.units);
            if together.values().sum::<u64>() > capacity {
                found.push(format!(
                    "when {}/{} started at {at}, these pods had containers on its GPU of {capacity} units: {together:?}",
                    run.view.pod, run.view.container
                ));
            }
        }
        found.into_iter().for_each(|text| self.complain(text));
    }
}

#[cfg(test)]
mod tests {
    use super::effective_units;
    use divvy_testbed::builders::pod;

    #[test]
    fn the_audits_own_formula_counts_what_runs_at_the_same_time() {
        for (manifest, expected) in [
            (pod("a").gpu_mem(3), 3),
            (pod("a").gpu_mem(3).container("b", 2), 5),
            (pod("a").gpu_mem(3).init("i", 4), 4),
            (pod("a").gpu_mem(3).sidecar("s", 2).init("i", 4), 6),
            (pod("a").gpu_mem(3).init("i", 4).sidecar("s", 2), 5),
            (pod("a"), 0),
        ] {
            assert_eq!(effective_units(&manifest.build()), expected);
        }
    }
}
