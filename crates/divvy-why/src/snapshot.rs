use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use divvy_model::MemoryUnit;
use divvy_placement::Ledger;
use k8s_openapi::api::core::v1::{PodAffinityTerm, Taint};

/// Labels: name → value.
pub type LabelMap = BTreeMap<String, String>;

/// A node without its GPUs: what kube-scheduler's filters read about it.
#[derive(Debug, Clone, Default)]
pub struct NodeSite {
    /// `metadata.name`
    pub name: String,
    /// `metadata.labels`
    pub labels: LabelMap,
    /// `spec.taints`
    pub taints: Vec<Taint>,
    /// Why containers on the node get no driver libraries, or wrong ones, as the inventory reports.
    pub driver_trouble: Option<String>,
    /// `spec.unschedulable`
    pub cordoned: bool,
    /// Whether the node is ready; false only if its condition Ready says otherwise.
    pub ready: bool,
    /// `status.capacity` of gpu-mem, in units.
    pub capacity_units: u64,
    /// The number of `nvidia.com/gpu` that another device plugin offers on the node; 0 if Divvy offers this resource.
    pub whole_gpus: u64,
    /// Whether the node has an inventory annotation, readable or not.
    pub has_inventory: bool,
    /// `status.nodeInfo.containerRuntimeVersion`
    pub runtime: Option<String>,
    /// `status.allocatable`: CPU in thousandths of a core, other resources in whole units.
    pub allocatable: BTreeMap<String, u64>,
    /// What the pods on the node request, in the same units. [`ClusterSnapshot::new`] computes it and ignores previous contents.
    pub used: BTreeMap<String, u64>,
}

impl NodeSite {
    /// Return the amount of a resource that kube-scheduler counts as free; 0 if pods request more than the node has.
    pub fn free(&self, resource: &str) -> u64 {
        let of = |amounts: &BTreeMap<String, u64>| amounts.get(resource).copied().unwrap_or(0);
        of(&self.allocatable).saturating_sub(of(&self.used))
    }
}

/// A pod's controller, which replaces the pod when it is deleted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct PodController {
    /// The kind: `ReplicaSet`, `Job`, …
    pub kind: String,
    /// The controller's name.
    pub name: String,
}

impl PodController {
    /// Report whether the controller replaces its pods for as long as it exists, so that only scaling it down ends a pod.
    pub(crate) fn runs_for_ever(&self) -> bool {
        ["Deployment", "ReplicaSet", "StatefulSet", "ReplicationController"].contains(&self.kind.as_str())
    }
}

impl fmt::Display for PodController {
    /// Format the controller as `ReplicaSet train-6d5`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

/// A host port that a container uses.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPort {
    /// `hostPort`
    pub port: u16,
    /// `TCP`, `UDP` or `SCTP`
    pub protocol: Cow<'static, str>,
    /// `hostIP`; empty and `0.0.0.0` mean all addresses.
    pub address: String,
}

impl HostPort {
    /// Report whether both ports cannot be used on one node (`HostPortInfo.CheckConflict` in Kubernetes'
    /// `pkg/scheduler/framework`).
    pub(crate) fn clashes(&self, other: &HostPort) -> bool {
        let any = |address: &str| matches!(address, "" | "0.0.0.0");
        let same_address = any(&self.address) || any(&other.address) || self.address == other.address;
        (self.port, &self.protocol) == (other.port, &other.protocol) && same_address
    }
}

/// Resources with the requested amount of each: CPU in thousandths of a core, other resources in whole units.
pub type Requests = [(Cow<'static, str>, u64)];

/// A pod that has a node and has not ended (its phase is neither Succeeded nor Failed).
#[derive(Debug, Clone, Default)]
pub struct Tenant {
    /// `metadata.uid`
    pub uid: Box<str>,
    /// `metadata.namespace`
    pub namespace: Arc<str>,
    /// `metadata.name`
    pub name: Box<str>,
    /// `spec.nodeName`
    pub node: Arc<str>,
    /// `metadata.labels`
    pub labels: Arc<LabelMap>,
    /// Whether the pod is being deleted.
    pub deleting: bool,
    /// The pod's effective requests by Kubernetes' formula, including `pods: 1`: CPU in thousandths of a core, other resources in
    /// whole units.
    pub requests: Arc<Requests>,
    /// The host ports that the pod uses.
    pub ports: Box<[HostPort]>,
    /// The pod's required anti-affinity.
    pub avoids: Box<[PodAffinityTerm]>,
    /// The pod's controller; `None` if it has none.
    pub owner: Option<Arc<PodController>>,
}

impl Tenant {
    /// Estimate the size in bytes of the pod's labels, anti-affinity, and host ports.
    pub fn rules_bytes(&self) -> usize {
        let labels: usize = self.labels.iter().map(|(key, value)| key.len() + value.len()).sum();
        let avoids = if self.avoids.is_empty() {
            0
        } else {
            serde_json::to_string(&self.avoids).map_or(usize::MAX, |text| text.len())
        };
        labels
            .saturating_add(avoids)
            .saturating_add(self.ports.len() * size_of::<HostPort>())
    }
}

/// The cluster at one moment.
#[derive(Debug)]
pub struct ClusterSnapshot {
    /// The GPUs, and the pods that hold their memory.
    pub ledger: Ledger,
    /// The nodes, ordered by name.
    pub(crate) sites: Vec<NodeSite>,
    pub(crate) tenants: Vec<Tenant>,
    by_name: HashMap<String, usize>,
    /// By tenant: the position of its site.
    pub(crate) at: Vec<usize>,
    /// By site: the positions of its tenants.
    pub(crate) on: Vec<Vec<usize>>,
    /// The positions of tenants with an anti-affinity to other pods.
    pub(crate) avoiders: Vec<usize>,
    /// The labels of the namespaces, for namespace selectors; `None` if they could not be read.
    pub namespaces: Option<BTreeMap<String, LabelMap>>,
    /// The labels by which the agent's DaemonSet selects its nodes; `None` if they could not be read.
    pub agent_selector: Option<LabelMap>,
    /// What could not be listed, `nodes` or `pods`. If this is not empty, the snapshot has no nodes.
    pub unseen: Vec<&'static str>,
    /// The number of pods whose labels, rules about other pods, and host ports are omitted because they are too large.
    pub simplified: u64,
}

impl ClusterSnapshot {
    /// Create a snapshot of these nodes and of the pods that are on one of them.
    pub fn new(ledger: Ledger, mut sites: Vec<NodeSite>, tenants: Tenants) -> ClusterSnapshot {
        sites.sort_by(|a, b| a.name.cmp(&b.name));
        sites.dedup_by(|a, b| a.name == b.name);
        for site in &mut sites {
            site.used.clear();
        }
        let by_name = sites
            .iter()
            .enumerate()
            .map(|(position, site)| (site.name.clone(), position))
            .collect();
        let mut snapshot = ClusterSnapshot {
            ledger,
            on: vec![Vec::new(); sites.len()],
            sites,
            tenants: Vec::new(),
            by_name,
            at: Vec::new(),
            avoiders: Vec::new(),
            namespaces: None,
            agent_selector: None,
            unseen: Vec::new(),
            simplified: 0,
        };
        for tenant in tenants.tenants {
            snapshot.add(tenant);
        }
        snapshot
    }

    /// Create a snapshot of a cluster in which the user may not list everything. It contains no nodes, so an answer depends only
    /// on the pods themselves.
    pub fn unseen(unit: MemoryUnit, unseen: Vec<&'static str>) -> ClusterSnapshot {
        ClusterSnapshot {
            unseen,
            ..ClusterSnapshot::new(Ledger::new(unit), Vec::new(), Tenants::default())
        }
    }

    fn add(&mut self, tenant: Tenant) {
        let Some(&site) = self.by_name.get(&*tenant.node) else {
            return;
        };
        let position = self.tenants.len();
        for (resource, amount) in tenant.requests.iter() {
            let used = &mut self.sites[site].used;
            match used.get_mut(&**resource) {
                Some(sum) => *sum = sum.saturating_add(*amount),
                None => {
                    used.insert(resource.clone().into_owned(), *amount);
                }
            }
        }
        if !tenant.avoids.is_empty() {
            self.avoiders.push(position);
        }
        self.on[site].push(position);
        self.at.push(site);
        self.tenants.push(tenant);
    }

    /// Return the nodes, ordered by name.
    pub fn sites(&self) -> &[NodeSite] {
        &self.sites
    }

    /// Return the node with this name.
    pub fn site(&self, name: &str) -> Option<&NodeSite> {
        self.by_name.get(name).map(|position| &self.sites[*position])
    }

    /// Return the position of the pod with this UID on a node of the snapshot.
    pub(crate) fn tenant(&self, node: usize, uid: &str) -> Option<usize> {
        self.on[node]
            .iter()
            .copied()
            .find(|position| &*self.tenants[*position].uid == uid)
    }
}

/// Pods that have nodes. There may be tens of thousands, so a value that many pods have in common is stored only once, from
/// the moment at which the pods are added.
#[derive(Debug, Default)]
pub struct Tenants {
    tenants: Vec<Tenant>,
    texts: HashSet<Arc<str>>,
    labels: HashSet<Arc<LabelMap>>,
    requests: HashSet<Arc<Requests>>,
    owners: HashSet<Arc<PodController>>,
}

impl Extend<Tenant> for Tenants {
    fn extend<T: IntoIterator<Item = Tenant>>(&mut self, tenants: T) {
        for mut tenant in tenants {
            tenant.namespace = shared(&mut self.texts, tenant.namespace);
            tenant.node = shared(&mut self.texts, tenant.node);
            tenant.labels = shared(&mut self.labels, tenant.labels);
            tenant.requests = shared(&mut self.requests, tenant.requests);
            tenant.owner = tenant.owner.map(|owner| shared(&mut self.owners, owner));
            self.tenants.push(tenant);
        }
    }
}

impl FromIterator<Tenant> for Tenants {
    fn from_iter<T: IntoIterator<Item = Tenant>>(tenants: T) -> Tenants {
        let mut all = Tenants::default();
        all.extend(tenants);
        all
    }
}

fn shared<T: ?Sized + std::hash::Hash + Eq>(known: &mut HashSet<Arc<T>>, value: Arc<T>) -> Arc<T> {
    match known.get(&value) {
        Some(known) => known.clone(),
        None => {
            known.insert(value.clone());
            value
        }
    }
}
