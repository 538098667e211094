//! The extender's shell in the simulation: the real core, with API calls that take time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use divvy_extender::core::{
    BindArgs, BindingRequest, CoreTiming, ExtenderAction, ExtenderCore, Got, Now, OpId, Posted, Ticket, answer,
};
use divvy_extender::election::{Election, ElectionStep, LeaseRecord, Rules};
use divvy_kube::convert::ReadPod;
use divvy_kube::watch::WatchChange;
use divvy_model::{Health, MemoryUnit, MiB, Node, Pod, PodKey};

use crate::Violation;
use crate::api::{
    ApiModel, BindingVerdict, GIB, Late, ListInFlight, PodWatch, WatcherEvent, booked, gpus, offered, reserved, share,
};
use crate::ops::{Fate, LeaseFate, Leftover};
use crate::proxy::{self, Passed, ProxyResponse};
use crate::story::{Story, ensure};

/// The time limit for the response to a write of the Lease, after which the extender stops waiting (`lease.rs`, `ANSWER`).
const LEASE_ANSWER_NS: u64 = 3_000_000_000;

/// An API call in progress.
#[derive(Debug, Clone)]
pub struct PendingCall {
    what: ReplicaCall,
    since_ns: u64,
    /// The earliest time at which the call is sent. It is in the future if the call follows a pause.
    not_before_ns: u64,
    /// The server's response. It exists once the server has carried out the call.
    answer: Option<ReplicaReply>,
}

#[derive(Debug, Clone)]
enum ReplicaCall {
    Post(OpId, BindingRequest),
    Get(OpId, PodKey),
    Check { uid: String, node: String, pod: PodKey },
}

#[derive(Debug, Clone)]
enum ReplicaReply {
    Posted(Posted),
    Got(Got),
}

/// A replica's state in the election.
#[derive(Debug)]
pub struct ReplicaState {
    election: Election,
    held_until_ns: u64,
    /// A write of the Lease that was carried out, but whose response is still on its way: the record, its version, and the time
    /// of sending.
    answer: Option<(LeaseRecord, String, u64)>,
}

/// One run of an extender process, from its start to its end.
#[derive(Debug)]
pub struct ExtenderRun {
    pub core: ExtenderCore,
    pub pods: PodWatch,
    /// A list of pods that is on its way, because the watch was cut or this replica was elected.
    pub listing: Option<ListInFlight>,
    nodes_at: usize,
    pub nodes: BTreeMap<String, Node>,
    pub calls: Vec<PendingCall>,
    /// The reservations that existed before the current call of the core, as pairs of UID and node.
    reserved: BTreeSet<(String, String)>,
    /// The binds that wait for their response.
    waiting: BTreeMap<Ticket, BindArgs>,
    /// The state of the election. `None` if this is the only replica.
    pub member: Option<ReplicaState>,
    /// Whether the process does nothing, because it was stopped or its machine sleeps.
    pub frozen: bool,
    life: u32,
    started_ns: u64,
    /// The number of seconds by which the wall clock of the machine is ahead.
    pub wall_s: i64,
}

impl ExtenderRun {
    /// Start a process that has listed the cluster. If there are several replicas, none is the leader yet.
    pub fn new(api: &mut ApiModel, alone: bool) -> ExtenderRun {
        let life = api.new_life();
        let member = (!alone).then(|| ReplicaState {
            election: Election::new(format!("replica-{life}"), Rules::default()),
            held_until_ns: 0,
            answer: None,
        });
        let mut extender = ExtenderRun {
            core: ExtenderCore::new(MemoryUnit::GIB, CoreTiming::default()),
            pods: PodWatch::new(None),
            listing: None,
            nodes_at: 0,
            nodes: BTreeMap::new(),
            calls: Vec::new(),
            reserved: BTreeSet::new(),
            waiting: BTreeMap::new(),
            member,
            frozen: false,
            life,
            started_ns: api.now_ns,
            wall_s: 0,
        };
        if alone {
            api.writer = life;
        } else {
            extender.core.stand_by();
        }
        let now = extender.now(api);
        let pods = extender.pods.arrive(extender.pods.ask(api));
        // No call is in progress, so there is nothing to do.
        extender
            .core
            .pod_change(WatchChange::Reset(pods.into_iter().map(ReadPod::from).collect()), now);
        extender.list_nodes(api);
        extender
    }

    /// Return the core of a new process that has received the same events.
    pub fn rebuilt(&self) -> ExtenderCore {
        let mut core = ExtenderCore::new(MemoryUnit::GIB, CoreTiming::default());
        core.index_mut().reset_pods(self.pods.view.values().cloned().collect());
        let nodes: Vec<Node> = self.nodes.values().cloned().collect();
        core.index_mut().reset_nodes(&nodes);
        core
    }

    fn now(&self, api: &ApiModel) -> Now {
        Now {
            monotonic_ns: api.now_ns - self.started_ns,
            unix_ns: u64::try_from(self.unix_us(api)).unwrap_or(0) * 1_000,
        }
    }

    fn unix_us(&self, api: &ApiModel) -> i64 {
        i64::try_from(api.now_ns / 1_000).unwrap() + self.wall_s * 1_000_000
    }

    /// Report whether this replica may bind now: it is the only one, or the Lease that it holds has not expired.
    pub fn leads(&self, api: &ApiModel) -> bool {
        self.member.as_ref().is_none_or(|member| api.now_ns < member.held_until_ns)
    }

    /// Return the replica's name in the election.
    pub fn identity(&self) -> String {
        format!("replica-{}", self.life)
    }

    /// Return the replica that this replica believes to be the leader.
    pub fn holder(&self) -> Option<&str> {
        self.member.as_ref()?.election.holder()
    }

    fn list_nodes(&mut self, api: &ApiModel) {
        self.nodes_at = api.node_log.len();
        self.nodes = api.nodes.clone();
        let now = self.now(api);
        let nodes: Vec<Node> = self.nodes.values().cloned().collect();
        self.core.node_change(WatchChange::Reset(nodes), now);
    }

    /// Cut the watch of pods. The API server takes a list, which arrives later. The watch of nodes is cut as well, but continues
    /// immediately.
    pub fn ask(&mut self, api: &ApiModel) {
        let now = self.now(api);
        self.core
            .pod_change(WatchChange::Interrupted("the watch was cut".to_owned()), now);
        self.listing = Some(self.pods.ask(api));
        self.list_nodes(api);
    }

    /// Deliver the list of pods.
    pub fn list_arrives(&mut self, api: &ApiModel, story: &mut Story) -> Result<(), Violation> {
        let Some(listing) = self.listing.take() else {
            return Ok(());
        };
        self.note_reserved();
        let pods = self.pods.arrive(listing).into_iter().map(ReadPod::from).collect();
        let actions = self.core.pod_change(WatchChange::Reset(pods), self.now(api));
        self.perform(api, actions, story)
    }

    /// Deliver up to `pods` events of the watch of pods, and up to `nodes` events of the watch of nodes.
    pub fn watch(&mut self, api: &ApiModel, pods: usize, nodes: usize, story: &mut Story) -> Result<(), Violation> {
        self.note_reserved();
        let now = self.now(api);
        for _ in 0..pods {
            // There is no watch while a list is on its way.
            if self.listing.is_some() {
                break;
            }
            let change = match self.pods.next(api) {
                None => break,
                Some(WatcherEvent::Applied(pod)) => WatchChange::Apply(ReadPod::from(pod)),
                Some(WatcherEvent::Deleted(uid)) => WatchChange::Delete(ReadPod::from(Pod { uid, ..Pod::default() })),
            };
            let actions = self.core.pod_change(change, now);
            self.perform(api, actions, story)?;
        }
        for _ in 0..nodes {
            let Some(node) = api.node_log.get(self.nodes_at) else { break };
            self.nodes_at += 1;
            self.nodes.insert(node.name.clone(), node.clone());
            let actions = self.core.node_change(WatchChange::Apply(node.clone()), now);
            self.perform(api, actions, story)?;
        }
        Ok(())
    }

    /// Deliver the outstanding list and all outstanding events.
    pub fn catch_up(&mut self, api: &ApiModel, story: &mut Story) -> Result<(), Violation> {
        self.list_arrives(api, story)?;
        self.watch(api, usize::MAX, usize::MAX, story)
    }

    /// Receive a bind request from kube-scheduler.
    pub fn bind(&mut self, api: &ApiModel, args: BindArgs, story: &mut Story) -> Result<(), Violation> {
        self.note_reserved();
        let (ticket, actions) = self.core.begin_bind(args.clone(), self.now(api));
        ensure!(
            self.waiting.insert(ticket, args).is_none(),
            "the ticket {ticket:?} was given twice"
        );
        self.perform(api, actions, story)
    }

    /// Read the Lease and act on it, as `lease.rs` does.
    pub fn check_lease(&mut self, api: &mut ApiModel, fate: LeaseFate, story: &mut Story) -> Result<(), Violation> {
        let (now, unix_us, identity) = (api.now_ns, self.unix_us(api), self.identity());
        let Some(member) = &mut self.member else { return Ok(()) };
        if let Some((record, version, sent_ns)) = member.answer.take()
            && now - sent_ns <= LEASE_ANSWER_NS
        {
            story.tell(|| format!("  {identity} learns that it has the lease"));
            member.election.written(record, version, sent_ns);
            self.is_elected(api, story);
        } else if fate != LeaseFate::ReadLost {
            let found = api.lease.clone().map(|(record, version)| (record, version.to_string()));
            let step = member.election.read(found, now, unix_us);
            let write = match step {
                ElectionStep::Wait => None,
                ElectionStep::Create(record) => Some((record, None)),
                ElectionStep::Replace { version, record } => Some((record, Some(version))),
            };
            if let Some((record, version)) = write {
                if member.election.would_take_over() {
                    let actions = self.core.stand_by();
                    self.perform(api, actions, story)?;
                }
                let written = match fate {
                    LeaseFate::WriteLost => None,
                    _ => api.write_lease(&record, version.as_deref()),
                };
                if let (Some(version), Some(member)) = (written, &mut self.member) {
                    match fate {
                        LeaseFate::AnswerLate => member.answer = Some((record, version, now)),
                        LeaseFate::Answered => {
                            member.election.written(record, version, now);
                            self.is_elected(api, story);
                        }
                        LeaseFate::ReadLost | LeaseFate::WriteLost | LeaseFate::AnswerLost => {}
                    }
                }
            }
        }
        if !self.leads(api) {
            let actions = self.core.stand_by();
            self.perform(api, actions, story)?;
        }
        Ok(())
    }

    /// Become the leader. A replica that was not the leader before lists the pods before it binds. Lists that were requested
    /// earlier do not count.
    fn is_elected(&mut self, api: &mut ApiModel, story: &mut Story) {
        let Some(member) = &mut self.member else { return };
        member.held_until_ns = member.election.held_until_ns();
        if self.core.elected() {
            story.tell(|| format!("  replica-{} leads, and lists the pods", self.life));
            self.listing = Some(self.pods.ask(api));
            self.core.await_list();
            api.writer = self.life;
        }
    }

    /// Give the Lease back, so that the process can stop gracefully. Do nothing and return false if a call is in progress or the
    /// outcome of a Binding is unknown.
    pub fn retire(&mut self, api: &mut ApiModel) -> bool {
        let Some(member) = &mut self.member else { return false };
        if self.core.in_doubt() || !self.calls.is_empty() {
            return false;
        }
        if let Some((version, record)) = member.election.release() {
            api.write_lease(&record, Some(&version));
        }
        member.held_until_ns = 0;
        true
    }

    fn note_reserved(&mut self) {
        let reservations = self.core.index().ledger().reservations();
        self.reserved = reservations.map(|(uid, node, _)| (uid.to_owned(), node.to_owned())).collect();
    }

    fn perform(&mut self, api: &ApiModel, actions: Vec<ExtenderAction>, story: &mut Story) -> Result<(), Violation> {
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            let mut pause_ns = 0;
            let what = match action {
                ExtenderAction::Answer { ticket, result } => {
                    let Some(args) = self.waiting.remove(&ticket) else {
                        return Err(Violation(format!("{ticket:?} was answered twice")));
                    };
                    story.tell(|| {
                        let answer = result
                            .as_ref()
                            .map_or_else(|error| format!("Err ({error})"), |()| "Ok".to_owned());
                        format!("  the bind of {} to {} is answered: {answer}", args.pod_uid, args.node)
                    });
                    let bound = api.bound.get(&args.pod_uid).map(|bound| &bound.node);
                    ensure!(
                        result.is_err() || bound == Some(&args.node),
                        "the bind of {} to {} was answered with success, but the pod is bound to {bound:?}",
                        args.pod_uid,
                        args.node
                    );
                    continue;
                }
                // This is the last moment at which the replica can know whether it leads.
                ExtenderAction::Post { op, binding } if !self.leads(api) => {
                    story.tell(|| format!("  no Binding of {} is sent: the lease has expired", binding.uid));
                    let text = "the lease has expired".to_owned();
                    let now = self.now(api);
                    actions.extend(self.core.posted(op, Posted::NotSent(text), now));
                    continue;
                }
                ExtenderAction::Post { op, binding } => {
                    story.tell(|| {
                        let gpus = binding.annotations.get(divvy_model::names::ALLOCATION);
                        format!("  Binding of {} to {} sent: {gpus:?}", binding.uid, binding.node)
                    });
                    self.check_choice(api, &binding)?;
                    let posted =
                        |call: &PendingCall| matches!(&call.what, ReplicaCall::Post(_, other) if other.node == binding.node);
                    ensure!(
                        !self.calls.iter().any(posted),
                        "two Bindings to {} are sent at once",
                        binding.node
                    );
                    ReplicaCall::Post(op, binding)
                }
                // No node of the simulation names pods for eviction.
                ExtenderAction::Evict { uid, .. } => return Err(Violation(format!("{uid} is to be evicted"))),
                ExtenderAction::Warn { pod, reason, .. } => {
                    story.tell(|| format!("  event {reason} about {pod}"));
                    continue;
                }
                ExtenderAction::Get { op, pod, after_ns } => {
                    pause_ns = after_ns;
                    ReplicaCall::Get(op, pod)
                }
                ExtenderAction::Check { uid, node, pod } => ReplicaCall::Check { uid, node, pod },
            };
            self.calls.push(PendingCall {
                what,
                since_ns: api.now_ns,
                not_before_ns: api.now_ns + pause_ns,
                answer: None,
            });
        }
        Ok(())
    }

    /// Check that a new choice is on a GPU that is healthy as far as the extender knows. This is not required of a choice that is
    /// only sent again.
    fn check_choice(&self, api: &ApiModel, binding: &BindingRequest) -> Result<(), Violation> {
        let reservation = self.core.index().ledger().reservation(&binding.uid, &binding.node);
        let Some(reservation) = reservation else {
            return Err(Violation(format!(
                "a Binding of {} is sent, but nothing is reserved",
                binding.uid
            )));
        };
        ensure!(
            reservation.held == divvy_model::Held::from_annotations(&binding.annotations),
            "the Binding of {} differs from its reservation",
            binding.uid
        );
        if self.reserved.contains(&(binding.uid.clone(), binding.node.clone())) {
            return Ok(());
        }
        for gpu in gpus(self.nodes.get(&binding.node)) {
            ensure!(
                share(&reservation.held, &gpu.uuid).is_none() || gpu.health == Health::Ok,
                "{} was placed on GPU {}, although the extender knows that it failed",
                binding.uid,
                gpu.uuid
            );
        }
        if api.misled { Ok(()) } else { self.check_kept(binding) }
    }

    /// Check that the bind leaves room for other pods: each pod of equal or higher priority that is nominated to the node must
    /// still fit there if it fitted without the pod being bound. (This is kube-scheduler's rule for its sums:
    /// `RunFilterPluginsWithNominatedPods`.)
    fn check_kept(&self, binding: &BindingRequest) -> Result<(), Violation> {
        let Some(pod) = self.pods.view.get(&binding.uid) else {
            return Ok(());
        };
        let ledger = self.core.index().ledger();
        let nominated = self
            .pods
            .view
            .values()
            .filter(|other| other.nominated.as_deref() == Some(&*binding.node) && other.uid != pod.uid);
        let before = nominated.filter(|other| other.node.is_none() && !other.deleting && other.priority >= pod.priority);
        for other in before {
            if ledger.reservation(&other.uid, &binding.node).is_some() {
                continue;
            }
            let kept = !self.has_room(other, &binding.node, &pod.uid) || self.has_room(other, &binding.node, "");
            ensure!(
                kept,
                "{} (priority {}) takes the room on {} that was made for {} (priority {})",
                pod.uid,
                pod.priority,
                binding.node,
                other.uid,
                other.priority
            );
        }
        Ok(())
    }

    /// Report, by a simple count, whether a pod fits on a node if the pod `without` is ignored and the victims have ended. The
    /// victims are the pods of lower priority that are being deleted, including those whose containers still run.
    fn has_room(&self, pod: &Pod, node: &str, without: &str) -> bool {
        let all = self.nodes.get(node).map(offered).unwrap_or_default();
        let here = self.pods.view.values().filter(|other| other.node.as_deref() == Some(node));
        let stay: Vec<&Pod> = here
            .filter(|other| other.uid != without && !(other.deleting && other.priority < pod.priority))
            .collect();
        let ledger = self.core.index().ledger();
        let promises: Vec<_> = ledger
            .reservations()
            .filter(|(uid, on, _)| *on == node && *uid != without && *uid != pod.uid)
            .filter(|(uid, ..)| self.pods.view.get(*uid).is_none_or(|other| other.node.is_none()))
            .flat_map(|(_, _, reservation)| reservation.possible())
            .collect();
        let with_room = all.iter().filter(|gpu| gpu.health == Health::Ok).filter(|gpu| {
            let bound = stay.iter().map(|other| booked(other, &gpu.uuid, &all));
            let promised = promises.iter().filter_map(|held| reserved(held, &gpu.uuid, &all));
            let taken = bound.chain(promised).fold(MiB::ZERO, MiB::saturating_add);
            fits_beside(pod, taken, MiB(gpu.units * GIB))
        });
        with_room.count() >= wanted_gpus(pod)
    }

    pub fn describe(&self, call: usize) -> String {
        match &self.calls[call].what {
            ReplicaCall::Post(_, binding) => format!("the Binding of {} to {}", binding.uid, binding.node),
            ReplicaCall::Get(_, pod) => format!("the GET of {}", pod.name),
            ReplicaCall::Check { uid, .. } => format!("the check of {uid}"),
        }
    }

    /// Advance a call in progress.
    pub fn call(&mut self, api: &mut ApiModel, index: usize, fate: Fate, story: &mut Story) -> Result<(), Violation> {
        let life = self.life;
        let call = &mut self.calls[index];
        let pause_ns = call.not_before_ns.saturating_sub(api.now_ns);
        api.tick(pause_ns);
        match fate {
            Fate::Taken => {
                if call.answer.is_none() {
                    call.answer = Some(carry_out(&call.what, life, api, story)?);
                }
                return Ok(());
            }
            Fate::Repeated => call.answer = Some(carry_out(&call.what, life, api, story)?),
            Fate::Answered | Fate::Lost | Fate::Page(_) => {}
        }
        let call = self.calls.remove(index);
        let reply = match (fate, &call.what) {
            (Fate::Lost, ReplicaCall::Post(_, binding)) => {
                if call.answer.is_none() {
                    api.late.push(self.late(binding, call.since_ns));
                }
                ReplicaReply::Posted(Posted::Unknown("no answer".to_owned()))
            }
            (Fate::Lost, _) => ReplicaReply::Got(Got::Failed("no answer".to_owned())),
            (Fate::Page(number), what) => {
                let pod = match what {
                    ReplicaCall::Post(_, binding) => key_of(binding),
                    ReplicaCall::Get(_, pod) | ReplicaCall::Check { pod, .. } => pod.clone(),
                };
                // No one could recover from a wrong answer about a Binding that was carried out, or to the check that is to find out.
                let unsent = matches!(what, ReplicaCall::Post(..)) && call.answer.is_none();
                let page = Some(ProxyResponse::number(number)).filter(|page| unsent || !page.misleads);
                let page = page.unwrap_or(ProxyResponse::number(0));
                api.misled |= page.misleads;
                let body = page.body(&pod);
                story.tell(|| format!("  a proxy answers: {} {body:?}", page.code));
                match what {
                    ReplicaCall::Post(_, binding) => {
                        match page.passed {
                            Passed::Done if call.answer.is_none() => drop(carry_out(what, life, api, story)?),
                            Passed::Late if call.answer.is_none() => api.late.push(self.late(binding, call.since_ns)),
                            _ => {}
                        }
                        ReplicaReply::Posted(answer::posted(page.code, body.as_bytes(), &pod))
                    }
                    ReplicaCall::Get(..) | ReplicaCall::Check { .. } => {
                        ReplicaReply::Got(answer::got(page.code, body.as_bytes(), &pod))
                    }
                }
            }
            (Fate::Repeated, _) => carry_out(&call.what, life, api, story)?,
            _ => match call.answer {
                Some(answer) => answer,
                None => carry_out(&call.what, life, api, story)?,
            },
        };
        let now = self.now(api);
        self.note_reserved();
        let actions = match (call.what, reply) {
            (ReplicaCall::Post(op, _), ReplicaReply::Posted(posted)) => self.core.posted(op, posted, now),
            (ReplicaCall::Get(op, _), ReplicaReply::Got(got)) => self.core.got(op, got, now),
            (ReplicaCall::Check { uid, node, .. }, ReplicaReply::Got(got)) => {
                self.core.checked(&uid, &node, got, now);
                Vec::new()
            }
            (what, reply) => return Err(Violation(format!("{what:?} cannot be answered by {reply:?}"))),
        };
        self.perform(api, actions, story)
    }

    fn late(&self, binding: &BindingRequest, since_ns: u64) -> Late {
        Late {
            binding: binding.clone(),
            since_ns,
            life: self.life,
        }
    }

    pub fn sweep(&mut self, api: &ApiModel, story: &mut Story) -> Result<(), Violation> {
        self.note_reserved();
        let actions = self.core.sweep(self.now(api));
        self.perform(api, actions, story)
    }

    /// Kill the process and start it again, without its memory. `leftover` says what happens to Bindings in progress.
    pub fn restart(&mut self, api: &mut ApiModel, leftover: Leftover, story: &mut Story) -> Result<(), Violation> {
        let calls: Vec<PendingCall> = self.calls.drain(..).filter(|call| call.answer.is_none()).collect();
        for call in calls {
            if let ReplicaCall::Post(_, binding) = call.what {
                api.late.push(self.late(&binding, call.since_ns));
            }
        }
        match leftover {
            Leftover::Late => {}
            Leftover::Dropped => api.late.retain(|late| late.life != self.life),
            Leftover::Done => {
                for late in std::mem::take(&mut api.late) {
                    let verdict = api.bind(&late.binding, late.life)?;
                    story.tell(|| format!("  {} to {}: {verdict:?}", late.binding.uid, late.binding.node));
                }
            }
        }
        let wall_s = self.wall_s;
        *self = ExtenderRun::new(api, self.member.is_none());
        self.wall_s = wall_s;
        Ok(())
    }

    /// Check that nothing is in progress: there is no call, no bind, and no reservation.
    pub fn check_at_rest(&self) -> Result<(), Violation> {
        ensure!(self.calls.is_empty(), "calls are in progress at quiet: {:?}", self.calls);
        ensure!(
            self.core.under_way() == 0 && self.waiting.is_empty(),
            "binds never got an answer: {:?}",
            self.waiting
        );
        let left: Vec<_> = self.core.index().ledger().reservations().collect();
        ensure!(left.is_empty(), "reservations are left at quiet: {left:?}");
        Ok(())
    }
}

/// Return the number of GPUs on which a pod needs room.
pub fn wanted_gpus(pod: &Pod) -> usize {
    let rules = pod.request.rules.as_deref().and_then(|rules| rules.as_ref().ok());
    let spread = u64::from(rules.and_then(|rules| rules.gpus).unwrap_or(1));
    let whole = pod.request.whole.is_some().then(|| crate::whole::gpus(&pod.request));
    usize::try_from(whole.unwrap_or(spread)).unwrap()
}

/// Report whether a pod has room on a GPU of which this much is taken. A whole GPU must be free.
pub fn fits_beside(pod: &Pod, taken: MiB, offered: MiB) -> bool {
    if pod.request.whole.is_some() {
        return taken == MiB::ZERO;
    }
    let each = pod.request.effective_units().unwrap() / wanted_gpus(pod) as u64 * GIB;
    taken.saturating_add(MiB(each)) <= offered
}

fn key_of(binding: &BindingRequest) -> PodKey {
    PodKey {
        namespace: binding.namespace.clone(),
        name: binding.name.clone(),
    }
}

/// Carry out a Binding for whose response no process waits.
pub fn late_write(api: &mut ApiModel, index: usize, story: &mut Story) -> Result<(), Violation> {
    let late = api.late.remove(index);
    let verdict = api.bind(&late.binding, late.life)?;
    story.tell(|| format!("  {} to {}: {verdict:?}", late.binding.uid, late.binding.node));
    Ok(())
}

fn carry_out(what: &ReplicaCall, life: u32, api: &mut ApiModel, story: &mut Story) -> Result<ReplicaReply, Violation> {
    Ok(match what {
        ReplicaCall::Post(_, binding) => {
            let verdict: BindingVerdict = api.bind(binding, life)?;
            story.tell(|| format!("  the API server binds {} to {}: {verdict:?}", binding.uid, binding.node));
            let pod = key_of(binding);
            let (code, body) = proxy::status(&verdict, &pod);
            ReplicaReply::Posted(answer::posted(code, body.as_bytes(), &pod))
        }
        ReplicaCall::Get(_, pod) | ReplicaCall::Check { pod, .. } => {
            let got = match api.pods.get(pod) {
                Some(pod) => Got::Found(Box::new(pod.clone())),
                None => {
                    let (code, body) = proxy::status(&BindingVerdict::NotFound, pod);
                    answer::got(code, body.as_bytes(), pod)
                }
            };
            ReplicaReply::Got(got)
        }
    })
}
