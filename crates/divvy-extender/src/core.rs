//! What the extender decides, without any I/O: the host carries out the [`Action`]s and brings their outcomes back.
//!
//! A bind (DESIGN.md section 8, "Bind") goes through these states; each holds the pod's UID for itself:
//!
//! ```text
//! waiting for the pod ─► looking the pod up ─► waiting for the node ─► posting ─► (2xx) done
//!                        (only if not cached)         │    ▲             │
//!                                                     ▼    │             └─► resolving by GET ─► done
//!                                       looking the pod up (after a start; when the GPU of an earlier try is not well)
//! ```
//!
//! One bind at a time is posting for a node. A bind that has no answer lets the next one go on: what it reserved
//! stays reserved. Time comes in with every call; nothing here draws a random number or depends on the order of a hash map.

pub mod answer;
mod bind;
mod binding;
mod filter;
mod preempt;
mod prioritize;
mod sweep;
mod twice;

use std::collections::{BTreeMap, BTreeSet};

use divvy_kube::convert::ReadPod;
use divvy_kube::convert::UnhealthyGpus;

use crate::index::Index;
use divvy_kube::watch::Change;
use divvy_model::{Held, MemoryUnit, Node, Pod, PodKey};
use divvy_policy::{Fleet, Limits, Policy};

pub use binding::BindingRequest;
pub use filter::{FilterAnswer, SCHEDULER_CHECK, check_refusal};
pub use preempt::{EVICTIONS_AT_ONCE, Eviction};

/// Points in time of one call, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// By a clock that never goes back: all durations.
    pub monotonic_ns: u64,
    /// Unix time: only for gpushare's assume-time annotation, which nobody of ours compares (R19).
    pub unix_ns: u64,
}

/// How long things may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// A bind is answered within this time of its request: less than kube-scheduler's `httpTimeout` (5 s by default),
    /// else the answer is lost.
    pub answer_within_ns: u64,
    /// Pause before the second look at a pod whose bind got no answer; doubled each time.
    pub first_pause_ns: u64,
    /// How long after a POST without an answer the API server may still carry it out: its request timeout (60 s) and a margin.
    pub doubt_ns: u64,
    /// How long after a bind the pod's own event may take before the pod is looked up.
    pub unseen_ns: u64,
    /// How long after a complete list of pods nothing is promised yet. What another extender sent before it was killed, or before
    /// this one took over, is carried out within this time and seen by the watch, or it is found afterwards
    /// ([`Core::promised_twice`]).
    pub settle_ns: u64,
    /// How long the memory of a pod is kept that vanished while a container was last seen running (a forced deletion), unless its
    /// node's agent says sooner what is held. A kubelet ends such containers within 3 s, and the agent's word comes within milliseconds,
    /// or seconds when it starts just then; after this the memory is free on paper, whatever is heard.
    pub departed_ns: u64,
}

impl Default for Timing {
    fn default() -> Timing {
        const MS: u64 = 1_000_000;
        Timing {
            answer_within_ns: 4_500 * MS,
            first_pause_ns: 50 * MS,
            doubt_ns: 65_000 * MS,
            unseen_ns: 10_000 * MS,
            settle_ns: 1_000 * MS,
            departed_ns: 10_000 * MS,
        }
    }
}

/// Who chooses the node among those that fit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum DecideIn {
    /// kube-scheduler chooses, from the extender's scores and its own
    #[default]
    Prioritize,
    /// The extender chooses: it reports that only one node fits
    Filter,
}

/// By what the extender chooses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Placement {
    /// Which node and which GPU is best.
    pub policy: Policy,
    /// Who has the last word on the node.
    pub decide_in: DecideIn,
}

/// kube-scheduler's `ExtenderBindingArgs`.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct BindArgs {
    /// Name of the pod.
    pub pod_name: String,
    /// Its namespace.
    pub pod_namespace: String,
    /// The UID that the scheduler decided for.
    pub pod_uid: String,
    /// The node that it chose.
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

/// One caller that waits for the answer to a bind. Equal binds share one operation and get equal answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

const NOT_LEADING: &str = "this extender does not lead, or no longer: another replica binds; try again in a moment";

/// One bind under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// What the host is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Answer this caller.
    Answer {
        /// The caller.
        ticket: Ticket,
        /// The error is for the user.
        result: Result<(), String>,
    },
    /// Send this Binding once, then call [`Core::posted`].
    Post {
        /// The bind.
        op: OpId,
        /// What to send.
        binding: BindingRequest,
    },
    /// Read this pod from the API server after a pause, then call [`Core::got`].
    Get {
        /// The bind.
        op: OpId,
        /// The pod.
        pod: PodKey,
        /// Pause before.
        after_ns: u64,
    },
    /// Tell the pod's owner something that the pod does not fail for: a warning event.
    Warn {
        /// The pod.
        pod: PodKey,
        /// Its UID.
        uid: String,
        /// One word in CamelCase.
        reason: &'static str,
        /// In words.
        text: String,
    },
    /// Read this pod from the API server, then call [`Core::checked`].
    Check {
        /// UID of the pod that holds a reservation, or that was taken for gone.
        uid: String,
        /// The node where it holds one; empty for a pod that was taken for gone.
        node: String,
        /// The pod.
        pod: PodKey,
    },
}

/// The API server's answer to a Binding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Posted {
    /// 2xx
    Created,
    /// 409: bound already, being deleted, or another UID.
    Conflict(String),
    /// 404
    NotFound(String),
    /// Any other 4xx: refused for good.
    Refused(String),
    /// The host did not send it; the reason is for the user.
    NotSent(String),
    /// No answer, or 5xx: it may have been carried out, or may be yet.
    Unknown(String),
}

/// The API server's answer to a look at a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Got {
    /// The pod as it is.
    Found(Box<Pod>),
    /// 404
    NotFound,
    /// It is there, but what it asks for cannot be read.
    Unreadable(String),
    /// No answer.
    Failed(String),
}

/// Counts of what happened, for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Binds that were carried out.
    pub bound: u64,
    /// Binds that were found to be done already.
    pub already_bound: u64,
    /// Binds that were refused: no room, wrong pod, bound elsewhere, refused by the API server.
    pub refused: u64,
    /// Binds that ended without knowing.
    pub unknown: u64,
    /// Pods that were found to be promised memory that another pod was promised, too.
    pub promised_twice: u64,
    /// Pods that vanished while a container was last seen running, so that their memory was kept for a while.
    pub departed: u64,
}

/// Which of several replicas binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lead {
    /// Another one, or nobody.
    Follows,
    /// This one is to, and is about to list the pods.
    Elected,
    /// It has begun to list them.
    Lists,
    /// This one.
    Leads,
}

/// The extender's state: what is known of the cluster, and the binds under way.
#[derive(Debug)]
pub struct Core {
    index: Index,
    /// The ledger's nodes under the policy. Behind the ledger until it is asked, or until the watch has told a change.
    fleet: Fleet,
    decide_in: DecideIn,
    timing: Timing,
    ops: BTreeMap<OpId, Op>,
    waiting: BTreeSet<OpId>,
    /// UID → the bind that works on it.
    pods_taken: BTreeMap<String, OpId>,
    /// Node → the bind that is posting for it.
    nodes_taken: BTreeMap<String, OpId>,
    /// When a reservation was last looked up, by (UID, node).
    looked: BTreeMap<(String, String), u64>,
    /// Pods that the API server called gone and that the watch has shown as well, by UID, in the state that the watch showed last. Each is looked up
    /// until the API server says whether it exists.
    resurfaced: BTreeMap<String, Pod>,
    /// When a watch last went on after an interruption, and what it watches.
    resumed: Option<(u64, &'static str)>,
    /// Until when nothing is promised.
    settled_ns: u64,
    lead: Lead,
    /// UIDs of pods whose owners were told that their GPU was promised twice.
    told: BTreeSet<String>,
    /// Up to which version of the ledger such GPUs were looked for.
    looked_at: u64,
    next: u64,
    counts: Counts,
}

fn check_resurfaced(uid: &str, pod: PodKey) -> Action {
    Action::Check {
        uid: uid.to_owned(),
        node: String::new(),
        pod,
    }
}

#[derive(Debug)]
struct Op {
    args: BindArgs,
    tickets: Vec<Ticket>,
    /// No look at the pod starts after this.
    deadline_ns: u64,
    stage: Stage,
    /// The pod as it was decided for.
    pod: Option<Pod>,
    /// What was written on it, first what this bind wrote, then what earlier ones did that may still be carried out. Nothing for a
    /// pod that asks for no memory.
    sent: Vec<Held>,
    /// An earlier POST with the same content may still be carried out.
    doubted: bool,
    /// The pod was read from the API server for this bind.
    read: bool,
    /// How often more the pod is looked at before it is refused for want of room.
    looks: u8,
    pause_ns: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    WaitingForPod,
    LookingUp,
    WaitingForNode,
    Posting,
    /// After a 409 (`refused`) or no answer; the text is the API server's.
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

impl Core {
    /// Knows nothing yet, leads alone, chooses by the default policy, and answers nothing before pods and nodes were listed.
    pub fn new(unit: MemoryUnit, timing: Timing) -> Core {
        Core::choosing(unit, timing, Placement::default())
    }

    /// As [`Core::new`], and chooses in this way.
    pub fn choosing(unit: MemoryUnit, timing: Timing, placement: Placement) -> Core {
        Core {
            index: Index::new(unit),
            fleet: Fleet::new(placement.policy, Limits::SMALL),
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
            looked_at: 0,
            next: 0,
            counts: Counts::default(),
        }
    }

    /// What is known of the cluster.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// To take in objects that are values already.
    pub fn index_mut(&mut self) -> &mut Index {
        &mut self.index
    }

    /// Takes in a change of pods.
    pub fn pod_change(&mut self, change: Change<ReadPod>, now: Now) -> Vec<Action> {
        // Nobody reads the rules of a pod that has its GPUs; a replacement brings its own.
        let change = change.map(ReadPod::as_kept);
        let listed = matches!(change, Change::Reset(_));
        if matches!(change, Change::Resumed) {
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

    /// States of a pod that the API server called gone come late, or the answer was wrong. Only the API server can tell.
    fn resurfaced(&mut self, change: &Change<ReadPod>) -> Vec<Action> {
        let (pods, before) = match change {
            Change::Apply(read) => (std::slice::from_ref(read), BTreeMap::new()),
            // A pod that is not in the list is gone.
            Change::Reset(all) => (all.as_slice(), std::mem::take(&mut self.resurfaced)),
            Change::Delete(read) => {
                // A look at the pod that is under way is older than this.
                self.resurfaced.remove(&read.pod().uid);
                return Vec::new();
            }
            Change::Interrupted(_) | Change::Resumed => return Vec::new(),
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

    /// Takes in a change of nodes.
    pub fn node_change(&mut self, change: Change<Node>, now: Now) -> Vec<Action> {
        if matches!(change, Change::Resumed) {
            self.resumed = Some((now.monotonic_ns, "nodes"));
        }
        self.index.read_node_change(change);
        self.age_departed(now);
        self.fleet.follow(self.index.ledger());
        self.promised_twice()
    }

    /// Takes in a change of the ConfigMaps that name unhealthy GPUs. Readiness does not wait for them: health comes from the
    /// inventory, and they are an addition to it.
    pub fn unhealthy_change(&mut self, change: Change<UnhealthyGpus>) {
        self.index.unhealthy_change(change);
        self.fleet.follow(self.index.ledger());
    }

    /// Pods of a change that were not known before it, by UID.
    fn newcomers(&self, change: &Change<ReadPod>) -> Vec<String> {
        let pods = match change {
            Change::Apply(read) => std::slice::from_ref(read),
            Change::Reset(all) => all.as_slice(),
            Change::Delete(_) | Change::Interrupted(_) | Change::Resumed => &[],
        };
        let uids = pods.iter().map(|read| &read.pod().uid);
        uids.filter(|uid| self.index.ledger().pod(uid).is_none()).cloned().collect()
    }

    /// What pods ask for is learnt from each that comes, once: it comes when its UID is seen for the first time.
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

    /// All pods were listed: at the start, or after a watch that could not be resumed. Nothing is promised for a moment, and
    /// who came and went since the watch broke is looked up, since no event tells it any more.
    pub fn pods_listed(&mut self, now: Now) -> Vec<Action> {
        if self.lead == Lead::Lists {
            self.lead = Lead::Leads;
        }
        self.settled_ns = now.monotonic_ns.saturating_add(self.timing.settle_ns);
        self.sweep_after_list(now)
    }

    /// Binds nothing any more: another replica may. Binds that have sent nothing yet are refused; of the others it is found out what
    /// became of them.
    pub fn stand_by(&mut self) -> Vec<Action> {
        self.lead = Lead::Follows;
        let unsent: Vec<OpId> = self
            .ops
            .iter()
            .filter(|(_, op)| op.stage.has_sent_nothing())
            .map(|(id, _)| *id)
            .collect();
        let mut actions = Vec::new();
        for id in unsent {
            actions.extend(self.refuse(id, NOT_LEADING.to_owned()));
        }
        actions
    }

    /// This replica is the one that binds, once it has listed the pods anew ([`Core::await_list`]). False: it is already.
    pub fn elected(&mut self) -> bool {
        let follows = self.lead == Lead::Follows;
        if follows {
            self.lead = Lead::Elected;
        }
        follows
    }

    /// The pods are being listed, from after the election on: with the next complete list it binds.
    pub fn await_list(&mut self) {
        if self.lead == Lead::Elected {
            self.lead = Lead::Lists;
        }
    }

    /// Whether something that was sent may still be carried out.
    pub fn in_doubt(&self) -> bool {
        let mut reservations = self.index.ledger().reservations();
        !self.ops.is_empty() || reservations.any(|(_, _, reservation)| reservation.standing == divvy_placement::Standing::Doubt)
    }

    fn not_leading(&self) -> Option<&'static str> {
        match self.lead {
            Lead::Leads => None,
            Lead::Follows => Some(NOT_LEADING),
            Lead::Elected | Lead::Lists => Some(
                "this extender has just become the leader and reads first what the one before it has bound; try again in a moment",
            ),
        }
    }

    /// How long nothing is promised yet.
    fn settling(&self, now: Now) -> Option<u64> {
        self.settled_ns.checked_sub(now.monotonic_ns).filter(|rest| *rest > 0)
    }

    /// Begins to count the time of pods that vanished while a container was last seen running, and lets those go whose time is over.
    fn age_departed(&mut self, now: Now) {
        let limit_ns = self.timing.departed_ns;
        self.counts.departed += self.index.ledger_mut().age_departed(now.monotonic_ns, limit_ns);
    }

    /// What happened so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Binds under way.
    pub fn under_way(&self) -> usize {
        self.ops.len()
    }

    fn not_synced(&self) -> Option<String> {
        if self.index.synced() {
            return None;
        }
        let missing = match (self.index.pods().lists, self.index.nodes().lists) {
            (0, 0) => "pods and nodes",
            (0, _) => "pods",
            _ => "nodes",
        };
        Some(format!(
            "the extender is starting: it has not listed the cluster's {missing} yet, so it does not know what is free"
        ))
    }
}
