//! The extender's decisions, without any I/O: the host carries out the [`ExtenderAction`]s and reports their outcomes back.
//!
//! A bind goes through these stages. From "looking the pod up" on, no other bind works on the same pod UID:
//!
//! ```text
//! waiting for the pod ─► looking the pod up ─► waiting for the node ─► posting ─► (2xx) done
//!                        (only if not cached)         │    ▲             │
//!                                                     ▼    │             └─► resolving by GET ─► done
//!                                       looking the pod up (just after a list; or if the GPU of an earlier try is unhealthy)
//! ```
//!
//! Only one bind at a time posts for a node. If a POST gets no answer, the next bind may post, and the memory of the first one
//! stays reserved. The time is an argument of each call; nothing here draws a random number or depends on the order of a hash
//! map. `docs/design/allocation.md` describes the whole protocol.
//!
//! # The settle second
//!
//! After a complete list of pods, the core binds nothing for [`CoreTiming::settle_ns`] (one second). The extender keeps no state of its own,
//! so a Binding that an earlier extender sent just before it was killed may not be in the list yet. Within this second the API server
//! carries such a Binding out, and the watch shows it. Only then is the ledger complete enough to allocate memory.

pub mod answer;
mod bind;
mod binding;
mod error;
mod evict;
mod filter;
mod overcommit;
mod preempt;
mod prioritize;
mod sweep;
mod waiting;

use std::collections::{BTreeMap, BTreeSet};

use divvy_kube::convert::ReadPod;
use divvy_kube::convert::UnhealthyGpus;

use crate::index::Index;
use divvy_kube::watch::WatchChange;
use divvy_model::{Held, MemoryUnit, Node, Pod, PodKey};
use divvy_policy::{CacheLimits, Fleet, Policy};

pub use binding::BindingRequest;
pub use error::{BindError, FilterError, NotSynced};
pub use evict::eviction;
pub use filter::{FilterAnswer, SCHEDULER_CHECK, check_refusal};
pub use preempt::{EVICTIONS_AT_ONCE, Eviction};
pub use waiting::{WAITS_S, Waits};

/// The time of one call, by two clocks, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// The time by a clock that never goes back. All durations are measured with it.
    pub monotonic_ns: u64,
    /// Unix time, only for gpushare's assume-time annotation and for the metric of how long pods waited. No decision depends on it (R19 in
    /// `docs/compatibility/races.md`).
    pub unix_ns: u64,
}

/// Time limits of the core, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoreTiming {
    /// A bind is answered within this time of its request. It must be less than kube-scheduler's `httpTimeout` (5 s by default);
    /// otherwise the answer is lost.
    pub answer_within_ns: u64,
    /// The pause before the second read of a pod whose bind got no answer. It doubles with each further read.
    pub first_pause_ns: u64,
    /// How long the API server may still carry out a POST that got no answer: its request timeout (60 s) plus a margin.
    pub doubt_ns: u64,
    /// How long after a bind the extender waits for the pod's watch event before it reads the pod.
    pub unseen_ns: u64,
    /// The settle second: nothing is allocated for this long after a complete list of pods. In this time, the API server carries
    /// out the Bindings that an earlier extender sent before it was killed or lost the lease, and the watch shows them. If a
    /// Binding takes longer, [`ExtenderCore::promised_twice`] finds it afterwards.
    pub settle_ns: u64,
    /// How long the memory of a departed pod stays reserved. A pod is departed if its object vanished (a forced deletion) while
    /// one of its containers was last seen running. The hold ends sooner if the agent's inventory reports what is still held: a
    /// kubelet kills such containers within 3 s, and the agent reports this within milliseconds, or within seconds if it is just
    /// starting. After `departed_ns`, the ledger frees the memory in any case.
    pub departed_ns: u64,
}

impl Default for CoreTiming {
    fn default() -> CoreTiming {
        const MS: u64 = 1_000_000;
        CoreTiming {
            answer_within_ns: 4_500 * MS,
            first_pause_ns: 50 * MS,
            doubt_ns: 65_000 * MS,
            unseen_ns: 10_000 * MS,
            settle_ns: 1_000 * MS,
            departed_ns: 10_000 * MS,
        }
    }
}

/// The component that chooses among the nodes that fit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum DecideIn {
    /// kube-scheduler, from the extender's prioritize scores and its own scores.
    #[default]
    Prioritize,
    /// The extender: filter lets only the best node pass.
    Filter,
}

/// The rules by which the extender chooses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PlacementRules {
    /// The policy that ranks nodes and GPUs.
    pub policy: Policy,
    /// The component that chooses the node.
    pub decide_in: DecideIn,
}

/// kube-scheduler's `ExtenderBindingArgs`.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct BindArgs {
    /// Name of the pod.
    pub pod_name: String,
    /// Namespace of the pod.
    pub pod_namespace: String,
    /// UID of the pod that kube-scheduler scheduled.
    pub pod_uid: String,
    /// Name of the node that kube-scheduler chose.
    pub node: String,
}

impl BindArgs {
    fn key(&self) -> PodKey {
        PodKey {
            namespace: self.pod_namespace.clone(),
            name: self.pod_name.clone(),
        }
    }
}

/// The ticket of a caller that waits for the answer to a bind. Equal binds share one operation, and all their callers get the
/// same answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// The id of one bind under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// A task for the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExtenderAction {
    /// Answer a caller.
    Answer {
        /// The ticket of the caller's request.
        ticket: Ticket,
        /// Success, or an error for the user.
        result: Result<(), BindError>,
    },
    /// Send a Binding once, then call [`ExtenderCore::posted`].
    Post {
        /// The bind that the outcome belongs to.
        op: OpId,
        /// The Binding to send.
        binding: BindingRequest,
    },
    /// Wait for a pause, read a pod from the API server, then call [`ExtenderCore::got`].
    Get {
        /// The bind that the outcome belongs to.
        op: OpId,
        /// The pod to read.
        pod: PodKey,
        /// The pause before the read, in nanoseconds.
        after_ns: u64,
    },
    /// Publish a warning event about a pod. No bind depends on the event.
    Warn {
        /// The pod that the event is about.
        pod: PodKey,
        /// The pod's UID.
        uid: String,
        /// What the extender was doing, one word in CamelCase.
        action: &'static str,
        /// The event's reason, one word in CamelCase.
        reason: &'static str,
        /// The event's text.
        text: String,
    },
    /// Read a pod from the API server, then call [`ExtenderCore::checked`].
    Check {
        /// UID of a pod that has a reservation, or that the API server reported as gone.
        uid: String,
        /// The reservation's node; empty for a pod that was reported as gone.
        node: String,
        /// The pod to read.
        pod: PodKey,
    },
    /// Ask the API server to evict a pod, then call [`ExtenderCore::evicted`].
    Evict {
        /// The pod's UID.
        uid: String,
        /// The pod.
        pod: PodKey,
    },
}

/// The API server's answer to a Binding, or to an eviction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Posted {
    /// 2xx: the pod is bound, or is being deleted.
    Created,
    /// 409: the pod is already bound, is being deleted, or has another UID.
    Conflict(String),
    /// 404: the pod is gone.
    NotFound(String),
    /// Any other 4xx: the API server will never carry the Binding out.
    Refused(String),
    /// The host did not send the Binding; the text says why.
    NotSent(String),
    /// No answer, or 5xx: the API server may have carried the Binding out, or may still do so.
    Unknown(String),
}

/// The API server's answer to the read of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Got {
    /// The pod's present state.
    Found(Box<Pod>),
    /// 404: the pod is gone.
    NotFound,
    /// The pod exists, but its request cannot be read.
    Unreadable(String),
    /// No usable answer.
    Failed(String),
}

/// Counters for the metrics, since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExtenderCounts {
    /// Binds that were carried out.
    pub bound: u64,
    /// Binds whose pod was already bound to the requested node.
    pub already_bound: u64,
    /// Binds that were refused: no room, wrong UID, bound to another node, or refused by the API server.
    pub refused: u64,
    /// Binds whose outcome is unknown.
    pub unknown: u64,
    /// Pods whose allocated memory was found to be allocated to another pod as well.
    pub promised_twice: u64,
    /// Evictions that the API server accepted.
    pub evicted: u64,
    /// Evictions that the API server refused.
    pub evictions_refused: u64,
    /// Evictions whose outcome is unknown.
    pub evictions_unknown: u64,
    /// Departed pods: their objects vanished while a container was last seen running, so their memory was held for a while.
    pub departed: u64,
}

/// Whether this replica is the leader. Only the leader binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lead {
    /// Another replica leads, or none does.
    Follows,
    /// This replica has been elected and is about to list the pods.
    Elected,
    /// This replica has been elected and is listing the pods.
    Lists,
    /// This replica leads and binds.
    Leads,
}

/// The extender's state: the ledger of the cluster, and the binds under way.
#[derive(Debug)]
pub struct ExtenderCore {
    index: Index,
    /// The ledger's nodes, prepared for the policy. It catches up with the ledger before each use and after each watch event.
    fleet: Fleet,
    decide_in: DecideIn,
    timing: CoreTiming,
    ops: BTreeMap<OpId, BindOp>,
    waiting: BTreeSet<OpId>,
    /// Pod UID → the bind that is working on the pod.
    pods_taken: BTreeMap<String, OpId>,
    /// Node → the bind whose POST to the node is under way.
    nodes_taken: BTreeMap<String, OpId>,
    /// When the pod of each reservation was last read, by (UID, node).
    looked: BTreeMap<(String, String), u64>,
    /// Pods that the API server reported as gone although the watch showed them: by UID, in the state that the watch showed last.
    /// Each pod is read again until the API server says whether it exists.
    resurfaced: BTreeMap<String, Pod>,
    /// When a watch last resumed after an interruption, and what it watches.
    resumed: Option<(u64, &'static str)>,
    /// The end of the settle second. Nothing is allocated before it.
    settled_ns: u64,
    lead: Lead,
    /// UIDs of the pods for which a warning event says that their memory was allocated twice.
    told: BTreeSet<String>,
    evictions: evict::Evictions,
    /// The ledger's version when its GPUs were last searched for memory that was allocated twice.
    looked_at: u64,
    next: u64,
    counts: ExtenderCounts,
    waits: Waits,
    /// UID of the last waiting pod that a sweep has looked at.
    guessed: String,
}

fn check_resurfaced(uid: &str, pod: PodKey) -> ExtenderAction {
    ExtenderAction::Check {
        uid: uid.to_owned(),
        node: String::new(),
        pod,
    }
}

#[derive(Debug)]
struct BindOp {
    args: BindArgs,
    tickets: Vec<Ticket>,
    /// No read of the pod starts after this time.
    deadline_ns: u64,
    stage: Stage,
    /// The pod, in the state on which the decision is based.
    pod: Option<Pod>,
    /// The allocations that were sent for the pod: first that of this bind, then those of earlier binds that may still be carried out.
    /// Empty for a pod that requests no memory.
    sent: Vec<Held>,
    /// Whether an earlier POST with the same content may still be carried out.
    doubted: bool,
    /// Whether this bind has read the pod from the API server.
    read: bool,
    /// How many more times the pod is read before the bind is refused for lack of room.
    looks: u8,
    pause_ns: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    WaitingForPod,
    LookingUp,
    WaitingForNode,
    Posting,
    /// Reading the pod after a 409 (`refused`) or no answer; the text is the API server's.
    Resolving {
        refused: bool,
        text: String,
    },
}

impl Stage {
    fn has_sent_nothing(&self) -> bool {
        matches!(self, Stage::WaitingForPod | Stage::LookingUp | Stage::WaitingForNode)
    }
}

impl ExtenderCore {
    /// Make a core that knows no pods or nodes yet, is the only replica, and uses the default policy. It refuses every call until the pods
    /// and nodes have been listed.
    pub fn new(unit: MemoryUnit, timing: CoreTiming) -> ExtenderCore {
        ExtenderCore::choosing(unit, timing, PlacementRules::default())
    }

    /// Make a core as [`ExtenderCore::new`] does, with the given placement.
    pub fn choosing(unit: MemoryUnit, timing: CoreTiming, placement: PlacementRules) -> ExtenderCore {
        ExtenderCore {
            index: Index::new(unit),
            fleet: Fleet::new(placement.policy, CacheLimits::SMALL),
            decide_in: placement.decide_in,
            timing,
            ops: BTreeMap::new(),
            waiting: BTreeSet::new(),
            pods_taken: BTreeMap::new(),
            nodes_taken: BTreeMap::new(),
            looked: BTreeMap::new(),
            resurfaced: BTreeMap::new(),
            resumed: None,
            settled_ns: 0,
            lead: Lead::Leads,
            told: BTreeSet::new(),
            evictions: evict::Evictions::default(),
            looked_at: 0,
            next: 0,
            counts: ExtenderCounts::default(),
            waits: Waits::default(),
            guessed: String::new(),
        }
    }

    /// Return the index of the cluster's pods and nodes.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Return the index for changes that bypass the watches (simulations and tests).
    pub fn index_mut(&mut self) -> &mut Index {
        &mut self.index
    }

    /// Apply a change of pods, and return the actions that follow from it: checks and warnings.
    pub fn pod_change(&mut self, change: WatchChange<ReadPod>, now: Now) -> Vec<ExtenderAction> {
        // Drop the rules of a pod that has its GPUs: they are no longer needed, and a replacement pod has its own.
        let change = change.map(ReadPod::as_kept);
        let listed = matches!(change, WatchChange::Reset(_));
        if matches!(change, WatchChange::Resumed) {
            self.resumed = Some((now.monotonic_ns, "pods"));
        }
        let first = listed && self.index.pods().lists == 0;
        let newcomers = if first { Vec::new() } else { self.newcomers(&change) };
        let resurfaced = self.resurfaced(&change);
        self.index.read_pod_change(change);
        self.age_departed(now);
        self.learn(first, &newcomers);
        let mut actions = if listed { self.pods_listed(now) } else { Vec::new() };
        actions.extend(resurfaced);
        actions.extend(self.promised_twice());
        actions
    }

    /// Return checks for pods that the watch shows although the API server reported them as gone. Either the watch is late or the answer
    /// was wrong; only the API server can tell which.
    fn resurfaced(&mut self, change: &WatchChange<ReadPod>) -> Vec<ExtenderAction> {
        let (pods, before) = match change {
            WatchChange::Apply(read) => (std::slice::from_ref(read), BTreeMap::new()),
            // A pod that is not in the new list is gone.
            WatchChange::Reset(all) => (all.as_slice(), std::mem::take(&mut self.resurfaced)),
            WatchChange::Delete(read) => {
                // A read of the pod that is still under way is older than this event.
                self.resurfaced.remove(&read.pod().uid);
                return Vec::new();
            }
            WatchChange::Interrupted(_) | WatchChange::Resumed => return Vec::new(),
        };
        let ledger = self.index.ledger();
        let mut actions = Vec::new();
        for pod in pods.iter().map(ReadPod::pod).filter(|pod| ledger.is_buried(&pod.uid)) {
            let known = self.resurfaced.insert(pod.uid.clone(), pod.clone()).is_some();
            if !known && !before.contains_key(&pod.uid) {
                actions.push(check_resurfaced(&pod.uid, pod.key()));
            }
        }
        actions
    }

    /// Apply a change of nodes.
    pub fn node_change(&mut self, change: WatchChange<Node>, now: Now) -> Vec<ExtenderAction> {
        if matches!(change, WatchChange::Resumed) {
            self.resumed = Some((now.monotonic_ns, "nodes"));
        }
        self.evictions.node_change(&change);
        self.index.read_node_change(change);
        self.age_departed(now);
        self.fleet.follow(self.index.ledger());
        let mut actions = self.promised_twice();
        actions.extend(self.evictions(now));
        actions
    }

    /// Apply a change of gpushare's ConfigMaps that name unhealthy GPUs. Readiness does not wait for them: a GPU's health comes
    /// from the inventory, and the ConfigMaps only name further unhealthy GPUs.
    pub fn unhealthy_change(&mut self, change: WatchChange<UnhealthyGpus>) {
        self.index.unhealthy_change(change);
        self.fleet.follow(self.index.ledger());
    }

    /// Return the UIDs of the pods in a change that the ledger does not know yet.
    fn newcomers(&self, change: &WatchChange<ReadPod>) -> Vec<String> {
        let pods = match change {
            WatchChange::Apply(read) => std::slice::from_ref(read),
            WatchChange::Reset(all) => all.as_slice(),
            WatchChange::Delete(_) | WatchChange::Interrupted(_) | WatchChange::Resumed => &[],
        };
        let uids = pods.iter().map(|read| &read.pod().uid);
        uids.filter(|uid| self.index.ledger().pod(uid).is_none()).cloned().collect()
    }

    /// Let the policy learn the requests of new pods. Each pod counts once, when its UID is seen for the first time.
    fn learn(&mut self, first: bool, newcomers: &[String]) {
        let ledger = self.index.ledger();
        if first {
            self.fleet.learn(ledger);
        }
        for pod in newcomers.iter().filter_map(|uid| ledger.pod(uid)) {
            self.fleet.arrived(pod, ledger);
        }
        self.fleet.follow(ledger);
    }

    /// Record that all pods were listed, at the start or because a watch could not be resumed. Begin the settle second. Return
    /// checks for all reservations whose pod the watch has not shown: a pod that was created and deleted while the watch was
    /// broken has no events anymore.
    pub fn pods_listed(&mut self, now: Now) -> Vec<ExtenderAction> {
        if self.lead == Lead::Lists {
            self.lead = Lead::Leads;
        }
        self.settled_ns = now.monotonic_ns.saturating_add(self.timing.settle_ns);
        self.sweep_after_list(now)
    }

    /// Stop binding, because another replica may lead. Refuse the binds that have sent nothing yet; the others go on until their outcome
    /// is known.
    pub fn stand_by(&mut self) -> Vec<ExtenderAction> {
        self.lead = Lead::Follows;
        let unsent: Vec<OpId> = self
            .ops
            .iter()
            .filter(|(_, op)| op.stage.has_sent_nothing())
            .map(|(id, _)| *id)
            .collect();
        let mut actions = Vec::new();
        for id in unsent {
            actions.extend(self.refuse(id, BindError::NotLeading));
        }
        actions
    }

    /// Record that this replica was elected. It binds only after it has listed the pods again ([`ExtenderCore::await_list`]). Return
    /// false if it already leads or is about to lead.
    pub fn elected(&mut self) -> bool {
        let follows = self.lead == Lead::Follows;
        if follows {
            self.lead = Lead::Elected;
        }
        follows
    }

    /// Record that a list of pods has begun after the election. Once this list is complete, the replica binds.
    pub fn await_list(&mut self) {
        if self.lead == Lead::Elected {
            self.lead = Lead::Lists;
        }
    }

    /// Report whether a Binding that was sent may still be carried out.
    pub fn in_doubt(&self) -> bool {
        let mut reservations = self.index.ledger().reservations();
        !self.ops.is_empty() || reservations.any(|(_, _, reservation)| reservation.standing == divvy_placement::Standing::Doubt)
    }

    /// Check that this replica may bind pods now.
    fn may_bind(&self) -> Result<(), BindError> {
        self.synced()?;
        match self.lead {
            Lead::Leads => Ok(()),
            Lead::Follows => Err(BindError::NotLeading),
            Lead::Elected | Lead::Lists => Err(BindError::JustElected),
        }
    }

    /// Return what is left of the settle second, in nanoseconds; `None` if it is over.
    fn settling(&self, now: Now) -> Option<u64> {
        self.settled_ns.checked_sub(now.monotonic_ns).filter(|rest| *rest > 0)
    }

    /// Start the time limit for pods that have just departed, and release departed pods whose time is over.
    fn age_departed(&mut self, now: Now) {
        let limit_ns = self.timing.departed_ns;
        self.counts.departed += self.index.ledger_mut().age_departed(now.monotonic_ns, limit_ns);
    }

    /// Return the counters.
    pub fn counts(&self) -> ExtenderCounts {
        self.counts
    }

    /// Return the number of binds under way.
    pub fn under_way(&self) -> usize {
        self.ops.len()
    }

    /// Check that pods and nodes have been listed.
    fn synced(&self) -> Result<(), NotSynced> {
        if self.index.synced() {
            return Ok(());
        }
        let missing = match (self.index.pods().lists, self.index.nodes().lists) {
            (0, 0) => "pods and nodes",
            (0, _) => "pods",
            _ => "nodes",
        };
        Err(NotSynced { missing })
    }
}
