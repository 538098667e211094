//! The audit of a cluster's history. Was more of a GPU allocated than it has? Did a container run elsewhere than allocated? Was
//! anything left behind? The history holds what the API server reported about pods and nodes, change by change, and what the
//! containers reported about themselves. Tests audit histories; `divvy audit` passes only the present state, as two lists.
//!
//! [`Audit`] reads one [`Fact`] after another and remembers only the present state, so its memory grows with the cluster and not
//! with the history. It keeps its own sums per GPU, because an audit that used the [`divvy_placement::Ledger`] would repeat the
//! ledger's mistakes. Audit and ledger share only three definitions: what a pod holds ([`divvy_model::Held`]), when it has ended
//! ([`divvy_model::Pod::ended`]), and how long a departed pod counts ([`divvy_placement::Departed`]).
//!
//! Facts of one kind must come in the order of their revisions. Pods and nodes may be interleaved slightly out of order, because
//! they come from two watches.

#![forbid(unsafe_code)]

mod finding;
mod gpu;
mod reports;
mod settle;
mod site;
mod words;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use divvy_model::{ContainerShare, Held, MemoryUnit, MiB, Node, Pod};

pub use finding::{AuditedCard, Finding, FindingKind, FindingLevel, Moment, PodMemory, Who};
use gpu::BookedShare;
pub use reports::ContainerReport;
use reports::{ContainerRun, Early};
use site::{AuditedNode, Suspect};

/// How long each condition may last before it becomes a finding, and assumptions about the history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuditLimits {
    /// How long memory may be held for a pod that no longer exists, how late a deletion may be, and how long a container may
    /// outlive its pod.
    pub leak_ms: i64,
    /// How long a departed pod counts if nothing more is reported about it. The extender uses the same time.
    pub departed_ms: i64,
    /// How long the extender may take to learn that a GPU failed.
    pub failed_ms: i64,
    /// How long deleted pods are remembered, for containers that report later.
    pub remember_ms: i64,
    /// Whether the history contains reports of containers. If not, the allocations of single containers are dropped once they
    /// have been checked.
    pub reports: bool,
    /// The unit of gpu-mem on nodes whose agent does not publish one.
    pub unit: MemoryUnit,
}

impl Default for AuditLimits {
    fn default() -> AuditLimits {
        AuditLimits {
            leak_ms: 60_000,
            departed_ms: 10_000,
            failed_ms: 5_000,
            remember_ms: 60_000,
            reports: true,
            unit: MemoryUnit::GIB,
        }
    }
}

/// The kind of objects in a list or a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WatchedKind {
    Pods,
    Nodes,
}

impl WatchedKind {
    /// Return the name of the kind: `pods` or `nodes`.
    pub fn name(self) -> &'static str {
        match self {
            WatchedKind::Pods => "pods",
            WatchedKind::Nodes => "nodes",
        }
    }
}

/// One fact of a history.
#[derive(Debug, Clone)]
pub enum Fact {
    /// A pod exists, and this is its state.
    Pod {
        /// The state of the pod.
        pod: Pod,
        /// When the grace period of the pod's deletion ends, in Unix milliseconds; `None` if the pod is not being deleted.
        delete_by_ms: Option<i64>,
    },
    /// A pod no longer exists; this was its last state.
    PodGone(Pod),
    /// A node exists, and this is its state.
    Node(Node),
    /// The node with this name no longer exists.
    NodeGone(String),
    /// The following facts list all objects of a kind, up to [`Fact::ListEnds`]. If the history contained facts of this kind
    /// before, there is a gap here.
    ListBegins {
        /// The kind of the listed objects.
        kind: WatchedKind,
        /// Why the objects were listed again; `None` if that is not known.
        why: Option<String>,
    },
    /// The list is complete. Objects that it did not contain no longer exist.
    ListEnds {
        /// The kind of the listed objects.
        kind: WatchedKind,
    },
    /// A container reported about itself.
    Report(ContainerReport),
}

/// The result of an audit.
#[derive(Debug, Clone)]
pub struct AuditOutcome {
    /// The first [`Audit::MOST_FINDINGS`] findings, in order of time.
    pub findings: Vec<Finding>,
    /// The number of omitted findings, by identifier.
    pub omitted: BTreeMap<&'static str, u64>,
    /// What was examined.
    pub summary: Summary,
}

impl AuditOutcome {
    /// Report whether there was nothing to examine: no GPU memory was offered, and none was allocated.
    pub fn is_empty(&self) -> bool {
        self.findings.is_empty() && self.summary.gpus == 0 && self.summary.allocations == 0
    }

    /// Return the worst level among the findings.
    pub fn worst(&self) -> Option<FindingLevel> {
        self.findings.iter().map(|finding| finding.what.level()).min()
    }
}

/// What an audit examined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// The first moment of the history.
    pub first: Option<Moment>,
    /// The last moment of the history.
    pub last: Option<Moment>,
    /// The number of changes of pods and nodes, not counting objects in lists.
    pub changes: u64,
    /// The number of pods that were seen.
    pub pods: u64,
    /// The number of pods that were bound with an allocation.
    pub allocations: u64,
    /// The number of nodes that were seen.
    pub nodes_seen: u64,
    /// The number of nodes with GPUs.
    pub nodes: u64,
    /// The number of GPUs.
    pub gpus: u64,
    /// The number of containers that reported.
    pub containers: u64,
    /// The largest sum of all allocations at one moment.
    pub most: MiB,
    /// The memory that all GPUs offer, at the end of the history.
    pub capacity: MiB,
}

#[derive(Debug)]
struct FollowedPod {
    pod: Pod,
    /// What the pod was bound with, if that differs from what it holds now. It still counts as allocated after later changes to
    /// the pod.
    bound_with: Option<Held>,
    /// A digest of what each container was granted. The rest of the allocation is compared directly.
    containers: u64,
    revision: Option<u64>,
    generation: u64,
    delete_by_ms: Option<i64>,
    /// The positions of the pod's GPUs in its site, and the memory on each.
    parts: Vec<(usize, MiB)>,
    told_unbound: bool,
    checked: bool,
}

impl FollowedPod {
    fn bound_with(&self) -> &Held {
        self.bound_with.as_ref().unwrap_or(&self.pod.held)
    }

    /// Report whether a pod holds the same in two of its states.
    fn holds_as(&self, other: &FollowedPod) -> bool {
        match (&self.pod.held, &other.pod.held) {
            (Held::Allocation(one), Held::Allocation(two)) => {
                (one.v, &one.gpus, self.containers) == (two.v, &two.gpus, other.containers)
            }
            (one, two) => one == two,
        }
    }
}

/// Return a digest of what the containers were granted.
fn digest(held: &Held) -> u64 {
    let mut hasher = DefaultHasher::new();
    if let Held::Allocation(allocation) = held {
        for (container, shares) in &allocation.containers {
            container.hash(&mut hasher);
            for ContainerShare { uuid, memory, cores } in shares {
                (uuid, memory.0, cores).hash(&mut hasher);
            }
            shares.len().hash(&mut hasher);
        }
    }
    hasher.finish()
}

/// The audit's state machine.
#[derive(Debug)]
pub struct Audit {
    limits: AuditLimits,
    pods: HashMap<Arc<str>, Box<FollowedPod>>,
    sites: BTreeMap<String, AuditedNode>,
    findings: Vec<Finding>,
    omitted: BTreeMap<&'static str, u64>,
    summary: Summary,
    generation: u64,
    /// Whether all nodes were listed at least once.
    nodes_listed: bool,
    /// The lists that have begun and not ended, each with its generation and the index of the finding about the gap.
    listing: BTreeMap<WatchedKind, (u64, Option<usize>)>,
    last_of: BTreeMap<WatchedKind, Moment>,
    /// The GPUs that must be examined when the list is complete.
    dirty: BTreeSet<(String, usize)>,
    booked: MiB,
    /// Deleted pods, kept for containers that report late.
    gone: HashMap<String, Pod>,
    gone_order: VecDeque<(i64, String)>,
    runs: BTreeMap<(String, String), ContainerRun>,
    /// The keys of `runs` by pod UID.
    runs_of: HashMap<String, BTreeSet<(String, String)>>,
    /// Reports of containers whose pods are not known yet, by pod UID.
    early: BTreeMap<String, Vec<Early>>,
}

impl Audit {
    /// The maximum number of findings that are kept, which is more than anyone reads. Further findings are only counted.
    pub const MOST_FINDINGS: usize = 1000;

    /// Create an audit that has read no facts yet.
    pub fn new(limits: AuditLimits) -> Audit {
        Audit {
            limits,
            pods: HashMap::new(),
            sites: BTreeMap::new(),
            findings: Vec::new(),
            omitted: BTreeMap::new(),
            summary: Summary::default(),
            generation: 0,
            nodes_listed: false,
            listing: BTreeMap::new(),
            last_of: BTreeMap::new(),
            dirty: BTreeSet::new(),
            booked: MiB::ZERO,
            gone: HashMap::new(),
            gone_order: VecDeque::new(),
            runs: BTreeMap::new(),
            runs_of: HashMap::new(),
            early: BTreeMap::new(),
        }
    }

    /// Process the next fact of the history.
    pub fn take(&mut self, at: Moment, fact: Fact) {
        self.summary.first.get_or_insert(at);
        let last = self.summary.last.unwrap_or_default();
        let at_ms = at.at_ms.max(last.at_ms);
        let revision = at.revision.max(last.revision);
        self.summary.last = Some(Moment { revision, at_ms });
        self.forget_gone(at_ms);
        let kind = match &fact {
            Fact::Pod { .. } | Fact::PodGone(_) => Some(WatchedKind::Pods),
            Fact::Node(_) | Fact::NodeGone(_) => Some(WatchedKind::Nodes),
            Fact::ListBegins { .. } | Fact::ListEnds { .. } | Fact::Report(_) => None,
        };
        match fact {
            Fact::Pod { pod, delete_by_ms } => self.pod(at, pod, delete_by_ms),
            Fact::PodGone(pod) => self.pod_gone(at, &pod),
            Fact::Node(node) => self.node(at, &node),
            Fact::NodeGone(name) => self.node_gone(&name),
            Fact::ListBegins { kind, why } => self.list_begins(at, kind, why),
            Fact::ListEnds { kind } => self.list_ends(at, kind),
            Fact::Report(report) => self.report(at, report),
        }
        if let Some(kind) = kind {
            if !self.listing.contains_key(&kind) {
                self.summary.changes += 1;
            }
            self.last_of.insert(kind, at);
        }
    }

    /// End the history and return the result. `now_ms` is the current time if the audit examines a live cluster. With `None`, the
    /// time of the last fact is used.
    pub fn finish(mut self, now_ms: Option<i64>) -> AuditOutcome {
        let last = self.summary.last.unwrap_or_default();
        let end = Moment {
            at_ms: now_ms.or(last.at_ms),
            ..last
        };
        for kind in self.listing.keys().copied().collect::<Vec<_>>() {
            self.found(end, FindingKind::ListUnfinished { of: kind.name() });
        }
        self.finish_pods(end);
        self.finish_sites(end);
        self.finish_reports(end);
        for site in self.sites.values().filter(|site| site.known) {
            self.summary.nodes_seen += 1;
            self.summary.nodes += u64::from(!site.gpus.is_empty());
            self.summary.gpus += site.gpus.len() as u64;
            for gpu in &site.gpus {
                self.summary.capacity = self.summary.capacity.saturating_add(gpu.capacity);
            }
        }
        self.findings.sort_by_key(|finding| (finding.at.at_ms, finding.at.revision));
        AuditOutcome {
            findings: self.findings,
            omitted: self.omitted,
            summary: self.summary,
        }
    }

    /// Add a finding and return its index. The result is `None` if there are too many findings.
    fn found(&mut self, at: Moment, what: FindingKind) -> Option<usize> {
        if self.findings.len() >= Self::MOST_FINDINGS {
            *self.omitted.entry(what.id()).or_default() += 1;
            return None;
        }
        self.findings.push(Finding { at, until: None, what });
        Some(self.findings.len() - 1)
    }

    fn list_begins(&mut self, at: Moment, kind: WatchedKind, why: Option<String>) {
        self.generation += 1;
        let before = self.last_of.get(&kind).copied();
        let gap = before.and_then(|before| self.found(before, FindingKind::Gap { of: kind.name(), why }));
        if let Some((_, Some(earlier))) = self.listing.insert(kind, (self.generation, gap))
            && let Some(finding) = self.findings.get_mut(earlier)
        {
            finding.until = Some(at);
        }
    }

    fn list_ends(&mut self, at: Moment, kind: WatchedKind) {
        let Some((generation, gap)) = self.listing.remove(&kind) else {
            return;
        };
        if let Some(finding) = gap.and_then(|gap| self.findings.get_mut(gap)) {
            finding.until = Some(at);
        }
        match kind {
            WatchedKind::Pods => {
                let pods = self.pods.iter().filter(|(_, pod)| pod.generation < generation);
                let absent: Vec<Arc<str>> = pods.map(|(uid, _)| uid.clone()).collect();
                for uid in absent {
                    // When the pod's containers ended is not known, so nothing is reported about that.
                    self.forget(at, &uid);
                }
            }
            WatchedKind::Nodes => {
                self.nodes_listed = true;
                let sites = self
                    .sites
                    .iter()
                    .filter(|(_, site)| site.known && site.generation < generation);
                let absent: Vec<String> = sites.map(|(name, _)| name.clone()).collect();
                for name in absent {
                    self.node_gone(&name);
                }
            }
        }
        self.last_of.insert(kind, at);
        if self.listing.is_empty() {
            self.summary.most = self.summary.most.max(self.booked);
            for (node, position) in std::mem::take(&mut self.dirty) {
                self.settle(at, &node, position, false);
            }
        }
    }

    fn pod(&mut self, at: Moment, pod: Pod, delete_by_ms: Option<i64>) {
        if pod.uid.is_empty() {
            return;
        }
        let generation = self.generation;
        let before = match self.pods.get_mut(pod.uid.as_str()) {
            Some(known) if known.revision.is_some() && at.revision.is_some() && at.revision <= known.revision => {
                known.generation = generation;
                return;
            }
            _ => self.pods.remove(pod.uid.as_str()),
        };
        if before.is_none() {
            self.summary.pods += 1;
        }
        let mut tracked = FollowedPod {
            bound_with: None,
            containers: digest(&pod.held),
            revision: at.revision,
            generation,
            delete_by_ms,
            parts: Vec::new(),
            told_unbound: before.as_ref().is_some_and(|before| before.told_unbound),
            checked: before.as_ref().is_some_and(|before| before.checked),
            pod,
        };
        let watched = before.is_some() && self.listing.is_empty();
        let was_bound = before.as_ref().is_some_and(|before| before.pod.node.is_some());
        match (&tracked.pod.node, &before) {
            (None, _) => {
                if matches!(tracked.pod.held, Held::Allocation(_)) && !tracked.told_unbound {
                    tracked.told_unbound = true;
                    self.found(at, FindingKind::AllocatedUnbound { who: who(&tracked.pod) });
                }
            }
            (Some(_), Some(before)) if was_bound => {
                let same = before.holds_as(&tracked);
                tracked.bound_with = before.bound_with.clone();
                if !same {
                    tracked.bound_with.get_or_insert_with(|| before.pod.held.clone());
                    let what = FindingKind::AllocationChanged {
                        who: who(&tracked.pod),
                        before: in_words(&before.pod.held),
                        after: in_words(&tracked.pod.held),
                    };
                    self.found(at, what);
                }
            }
            (Some(node), _) => {
                let node = node.clone();
                self.bound(at, &tracked.pod, &node);
            }
        }
        let newly = watched && !was_bound && tracked.pod.node.is_some();
        let had = before.map(|before| self.unbook(&before)).unwrap_or_default();
        let node = tracked.pod.node.clone().unwrap_or_default();
        self.book(at, Box::new(tracked), newly);
        for position in had {
            self.settle(at, &node, position, false);
        }
    }

    /// Check everything about a binding that can be checked without the node's object.
    fn bound(&mut self, at: Moment, pod: &Pod, node: &str) {
        let who = who(pod);
        match &pod.held {
            Held::Nothing if pod.request.wants_memory() => {
                let units = pod.request.effective_units().unwrap_or(u64::MAX);
                let node = node.to_owned();
                self.found(at, FindingKind::BoundWithoutAllocation { who, node, units });
            }
            Held::Unreadable(error) => {
                let (node, error) = (node.to_owned(), error.clone());
                self.found(at, FindingKind::Unreadable { who, node, error });
            }
            Held::Nothing => {}
            Held::Allocation(_) | Held::Legacy(_) => {
                self.summary.allocations += 1;
                let unit = self.limits.unit;
                let site = self.sites.entry(node.to_owned()).or_insert_with(|| AuditedNode::new(unit));
                site.allocated += u64::from(!site.known);
            }
        }
    }

    /// Store a pod among the existing ones, and count the memory that it has on its GPUs.
    fn book(&mut self, at: Moment, mut tracked: Box<FollowedPod>, newly: bool) {
        let uid: Arc<str> = Arc::from(tracked.pod.uid.as_str());
        let Some(node) = tracked.pod.node.clone() else {
            self.pods.insert(uid, tracked);
            return;
        };
        let unit = self.limits.unit;
        let site = self.sites.entry(node.clone()).or_insert_with(|| AuditedNode::new(unit));
        site.pods.insert(uid.clone());
        if site.known && !tracked.checked {
            tracked.checked = true;
            for what in site.check(&node, &tracked.pod, at, newly, &self.limits) {
                match what {
                    Ok(what) => drop(self.found(at, what)),
                    Err(suspect) => drop(self.sites.get_mut(&node).map(|site| site.suspects.push(suspect))),
                }
            }
        }
        let Some(site) = self.sites.get_mut(&node) else {
            return;
        };
        if tracked.checked && !self.limits.reports {
            for held in [Some(&mut tracked.pod.held), tracked.bound_with.as_mut()]
                .into_iter()
                .flatten()
            {
                if let Held::Allocation(allocation) = held {
                    allocation.containers.clear();
                }
            }
        }
        if !tracked.pod.ended() {
            tracked.parts = site.parts(tracked.bound_with());
            for (position, memory) in site.parts(&tracked.pod.held) {
                match tracked.parts.iter_mut().find(|(known, _)| *known == position) {
                    Some((_, known)) => *known = memory.max(*known),
                    None => tracked.parts.push((position, memory)),
                }
            }
            tracked.parts.shrink_to_fit();
        }
        let parts = tracked.parts.clone();
        for (position, memory) in &parts {
            self.booked = self.booked.saturating_add(*memory);
            if let Some(gpu) = site.gpus.get_mut(*position) {
                let booking = BookedShare {
                    memory: *memory,
                    running: tracked.pod.container_running,
                };
                gpu.age(at, self.limits.departed_ms);
                gpu.departed.remove(&*uid);
                gpu.booked.insert(&uid, booking);
                let (sum, held) = (gpu.sum(), gpu.held.max(gpu.sum_departed()));
                if newly && sum <= gpu.capacity && sum.saturating_add(held) > gpu.capacity {
                    let what = FindingKind::GivenEarly {
                        card: gpu.card.clone(),
                        capacity: gpu.capacity,
                        booked: sum,
                        held,
                        newcomer: who(&tracked.pod),
                    };
                    let position = Some(*position);
                    site.suspects.push(Suspect { at, what, position });
                }
            }
        }
        if self.listing.is_empty() {
            self.summary.most = self.summary.most.max(self.booked);
        }
        self.pods.insert(uid.clone(), tracked);
        for (position, _) in parts {
            self.settle(at, &node, position, false);
        }
        self.late(at, &uid);
    }

    /// Remove a pod's memory from its GPUs, and return the positions of these GPUs. The caller must call `settle` for each of
    /// them.
    fn unbook(&mut self, tracked: &FollowedPod) -> Vec<usize> {
        let site = tracked.pod.node.as_ref().and_then(|node| self.sites.get_mut(node));
        let Some(site) = site else {
            return Vec::new();
        };
        site.pods.remove(tracked.pod.uid.as_str());
        for (position, memory) in &tracked.parts {
            self.booked = self.booked.saturating_sub(*memory);
            if let Some(gpu) = site.gpus.get_mut(*position) {
                gpu.booked.remove(&tracked.pod.uid);
            }
        }
        tracked.parts.iter().map(|(position, _)| *position).collect()
    }

    fn pod_gone(&mut self, at: Moment, last: &Pod) {
        let parts = self
            .pods
            .get(last.uid.as_str())
            .map(|tracked| tracked.parts.clone())
            .unwrap_or_default();
        self.forget(at, &last.uid);
        let Some(node) = last.node.as_ref().filter(|_| last.container_running && !last.ended()) else {
            return;
        };
        for (position, memory) in parts {
            if let Some(gpu) = self.sites.get_mut(node).and_then(|site| site.gpus.get_mut(position)) {
                gpu.departed.insert(last.uid.clone(), (memory, at));
            }
        }
    }

    /// Remove a pod that no longer exists.
    fn forget(&mut self, at: Moment, uid: &str) {
        let Some(tracked) = self.pods.remove(uid) else {
            return;
        };
        let node = tracked.pod.node.clone().unwrap_or_default();
        if let Some(site) = self.sites.get_mut(&node).filter(|site| !site.known) {
            site.missed += u64::from(matches!(tracked.bound_with(), Held::Allocation(_) | Held::Legacy(_)));
        }
        for position in self.unbook(&tracked) {
            self.settle(at, &node, position, false);
        }
        self.remember_gone(at, tracked.pod);
    }

    fn node(&mut self, at: Moment, node: &Node) {
        let (unit, generation, limits) = (self.limits.unit, self.generation, self.limits);
        let site = self.sites.entry(node.name.clone()).or_insert_with(|| AuditedNode::new(unit));
        site.generation = generation;
        if site.revision.is_some() && at.revision.is_some() && at.revision <= site.revision {
            return;
        }
        let (news, long) = site.update(at, node, &limits);
        for (since, until, what) in long {
            if let Some(finding) = self.found(since, what).and_then(|number| self.findings.get_mut(number)) {
                finding.until = Some(until);
            }
        }
        for suspect in self
            .sites
            .get_mut(&node.name)
            .map(|site| site.resolve(at))
            .unwrap_or_default()
        {
            self.found(suspect.at, suspect.what);
        }
        if news {
            // Count again the pods whose GPUs were not known, or whose checks had to wait.
            let uids = self.sites.get(&node.name).map(|site| site.pods.clone()).unwrap_or_default();
            for uid in uids {
                if let Some(tracked) = self.pods.remove(&uid) {
                    // The whole node is settled below.
                    self.unbook(&tracked);
                    self.book(at, tracked, false);
                }
            }
        }
        let count = self.sites.get(&node.name).map_or(0, |site| site.gpus.len());
        for position in 0..count {
            self.settle(at, &node.name, position, true);
        }
    }

    fn node_gone(&mut self, name: &str) {
        if let Some(site) = self.sites.get_mut(name) {
            for gpu in &mut site.gpus {
                gpu.departed.clear();
                gpu.held = MiB::ZERO;
                gpu.levels = gpu::Levels::default();
            }
        }
    }
}

fn who(pod: &Pod) -> Who {
    Who {
        pod: pod.key(),
        uid: pod.uid.clone(),
    }
}

fn in_words(held: &Held) -> String {
    match held {
        Held::Nothing => "nothing".to_owned(),
        Held::Unreadable(_) => "something that cannot be read".to_owned(),
        Held::Allocation(allocation) => {
            let gpus: Vec<String> = allocation
                .gpus
                .iter()
                .map(|share| format!("{} of {}", share.memory, share.uuid))
                .collect();
            let text = gpus.join(" and ");
            if text.is_empty() { "nothing".to_owned() } else { text }
        }
        Held::Legacy(legacy) => {
            let gpus = legacy
                .gpus
                .iter()
                .map(|(index, units)| format!("{units} units of GPU {index}"));
            gpus.collect::<Vec<_>>().join(" and ")
        }
    }
}
