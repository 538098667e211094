//! The extender's shell: the real core, and API calls that take their time.

use std::collections::{BTreeMap, BTreeSet};

use divvy_extender::core::{Action, BindArgs, BindingRequest, Core, Got, Now, OpId, Posted, Ticket, Timing};
use divvy_model::{MemoryUnit, Node, PodKey};

use super::api::{Api, PodWatch, Seen, Verdict};
use super::ops::{Fate, Leftover};
use super::story::{Story, ensure};

/// How long an API server may hold a request.
const REQUEST_TIMEOUT_NS: u64 = 60_000_000_000;

/// An API call under way.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    what: What,
    since_ns: u64,
    /// The server's answer, once it has carried the call out.
    answer: Option<Reply>,
}

#[derive(Debug, Clone)]
enum What {
    Post(OpId, BindingRequest),
    Get(OpId, PodKey),
    Check { uid: String, node: String, pod: PodKey },
}

#[derive(Debug, Clone)]
enum Reply {
    Posted(Posted),
    Got(Got),
}

/// A Binding without an answer.
#[derive(Debug, Clone)]
pub(crate) struct Late {
    binding: BindingRequest,
    since_ns: u64,
    /// Of an earlier process.
    orphan: bool,
}

/// One life of the extender process, and what it left under way.
#[derive(Debug)]
pub(crate) struct Extender {
    pub(crate) core: Core,
    pub(crate) pods: PodWatch,
    nodes_at: usize,
    pub(crate) nodes: BTreeMap<String, Node>,
    pub(crate) calls: Vec<Call>,
    /// Bindings that nobody waits for any more and that may still be carried out.
    pub(crate) late: Vec<Late>,
    /// A Binding of an earlier process was carried out beside this one's: the ledger may promise too much for a while.
    pub(crate) two_writers: bool,
    /// (UID, node) of the reservations before the core was asked.
    reserved: BTreeSet<(String, String)>,
    /// Binds that wait for their answer.
    waiting: BTreeMap<Ticket, BindArgs>,
    clock_ns: u64,
}

impl Extender {
    /// A new process that has listed the cluster.
    pub(crate) fn new(api: &Api, clock_ns: u64) -> Extender {
        let mut extender = Extender {
            core: Core::new(MemoryUnit::GIB, Timing::default()),
            pods: PodWatch::new(None),
            nodes_at: 0,
            nodes: BTreeMap::new(),
            calls: Vec::new(),
            late: Vec::new(),
            two_writers: false,
            reserved: BTreeSet::new(),
            waiting: BTreeMap::new(),
            clock_ns,
        };
        extender.list(api);
        extender
    }

    /// What a new process would be that has read the same events.
    pub(crate) fn rebuilt(&self) -> Core {
        let mut core = Core::new(MemoryUnit::GIB, Timing::default());
        core.index_mut().reset_pods(self.pods.view.values().cloned().collect());
        let nodes: Vec<Node> = self.nodes.values().cloned().collect();
        core.index_mut().reset_nodes(&nodes);
        core
    }

    fn now(&self) -> Now {
        Now {
            monotonic_ns: self.clock_ns,
            unix_ns: self.clock_ns,
        }
    }

    /// Time passes; the API server gives up requests that it has had for too long.
    pub(crate) fn tick(&mut self, ns: u64) {
        self.clock_ns += ns;
        let now = self.clock_ns;
        self.late.retain(|late| now - late.since_ns < REQUEST_TIMEOUT_NS);
    }

    /// Pods and nodes as of now.
    pub(crate) fn list(&mut self, api: &Api) {
        let pods = self.pods.list(api);
        self.core.index_mut().reset_pods(pods);
        self.nodes_at = api.node_log.len();
        self.nodes = api.nodes.clone();
        let nodes: Vec<Node> = self.nodes.values().cloned().collect();
        self.core.index_mut().reset_nodes(&nodes);
    }

    /// Up to this many events of each watch.
    pub(crate) fn watch(&mut self, api: &Api, pods: usize, nodes: usize) {
        for _ in 0..pods {
            match self.pods.next(api) {
                None => break,
                Some(Seen::Applied(pod)) => self.core.index_mut().apply_pod(pod),
                Some(Seen::Deleted(uid)) => self.core.index_mut().delete_pod(&uid),
            }
        }
        for _ in 0..nodes {
            let Some(node) = api.node_log.get(self.nodes_at) else { break };
            self.nodes_at += 1;
            self.nodes.insert(node.name.clone(), node.clone());
            self.core.index_mut().apply_node(node);
        }
    }

    /// kube-scheduler asks for a bind.
    pub(crate) fn bind(&mut self, api: &Api, args: BindArgs, story: &mut Story) -> Result<(), String> {
        self.note_reserved();
        let (ticket, actions) = self.core.begin_bind(args.clone(), self.now());
        ensure!(
            self.waiting.insert(ticket, args).is_none(),
            "the ticket {ticket:?} was given twice"
        );
        self.perform(api, actions, story)
    }

    fn note_reserved(&mut self) {
        let reservations = self.core.index().ledger().reservations();
        self.reserved = reservations.map(|(uid, node, _)| (uid.to_owned(), node.to_owned())).collect();
    }

    fn perform(&mut self, api: &Api, actions: Vec<Action>, story: &mut Story) -> Result<(), String> {
        for action in actions {
            let what = match action {
                Action::Answer { ticket, result } => {
                    let Some(args) = self.waiting.remove(&ticket) else {
                        return Err(format!("{ticket:?} was answered twice"));
                    };
                    story.tell(|| format!("  the bind of {} to {} is answered: {result:?}", args.pod_uid, args.node));
                    let bound = api.bound.get(&args.pod_uid).map(|bound| &bound.node);
                    ensure!(
                        result.is_err() || bound == Some(&args.node),
                        "the bind of {} to {} was answered with success, but it is bound to {bound:?}",
                        args.pod_uid,
                        args.node
                    );
                    continue;
                }
                Action::Post { op, binding } => {
                    story.tell(|| {
                        let gpus = binding.annotations.get(divvy_model::names::ALLOCATION);
                        format!("  Binding of {} to {} sent: {gpus:?}", binding.uid, binding.node)
                    });
                    self.check_choice(&binding)?;
                    What::Post(op, binding)
                }
                Action::Warn { .. } => continue,
                Action::Get { op, pod, .. } => What::Get(op, pod),
                Action::Check { uid, node, pod } => What::Check { uid, node, pod },
            };
            self.calls.push(Call {
                what,
                since_ns: self.clock_ns,
                answer: None,
            });
        }
        Ok(())
    }

    /// A fresh choice lies on a GPU that is good as far as the extender knows; one that is sent again may not.
    fn check_choice(&self, binding: &BindingRequest) -> Result<(), String> {
        let reservation = self.core.index().ledger().reservation(&binding.uid, &binding.node);
        let Some(reservation) = reservation else {
            return Err(format!("a Binding of {} is sent and nothing is reserved", binding.uid));
        };
        ensure!(
            reservation.held == divvy_model::Held::from_annotations(&binding.annotations),
            "what is sent for {} is not what is reserved",
            binding.uid
        );
        if self.reserved.contains(&(binding.uid.clone(), binding.node.clone())) {
            return Ok(());
        }
        let held = &reservation.held;
        let node = self
            .nodes
            .get(&binding.node)
            .and_then(|node| node.inventory.as_ref()?.as_ref().ok());
        for gpu in node.map(|inventory| inventory.gpus.as_slice()).unwrap_or_default() {
            ensure!(
                super::api::share(held, &gpu.uuid).is_none() || gpu.health == divvy_model::Health::Ok,
                "{} was placed on GPU {}, which the extender knows to have failed",
                binding.uid,
                gpu.uuid
            );
        }
        Ok(())
    }

    pub(crate) fn describe(&self, call: usize) -> String {
        match &self.calls[call].what {
            What::Post(_, binding) => format!("the Binding of {} to {}", binding.uid, binding.node),
            What::Get(_, pod) => format!("the GET of {}", pod.name),
            What::Check { uid, .. } => format!("the look at {uid}"),
        }
    }

    /// A call under way goes on. Says whether a pod was bound by it.
    pub(crate) fn call(&mut self, api: &mut Api, index: usize, fate: Fate, story: &mut Story) -> Result<(), String> {
        let call = &mut self.calls[index];
        match fate {
            Fate::Taken => {
                if call.answer.is_none() {
                    call.answer = Some(carry_out(&call.what, api, story)?);
                }
                return Ok(());
            }
            Fate::Repeated => call.answer = Some(carry_out(&call.what, api, story)?),
            Fate::Answered | Fate::Lost => {}
        }
        let call = self.calls.remove(index);
        let reply = match (fate, &call.what) {
            (Fate::Lost, What::Post(_, binding)) => {
                if call.answer.is_none() {
                    self.late.push(Late {
                        binding: binding.clone(),
                        since_ns: call.since_ns,
                        orphan: false,
                    });
                }
                Reply::Posted(Posted::Unknown("no answer".to_owned()))
            }
            (Fate::Lost, _) => Reply::Got(Got::Failed("no answer".to_owned())),
            (Fate::Repeated, _) => carry_out(&call.what, api, story)?,
            _ => match call.answer {
                Some(answer) => answer,
                None => carry_out(&call.what, api, story)?,
            },
        };
        let now = self.now();
        self.note_reserved();
        let actions = match (call.what, reply) {
            (What::Post(op, _), Reply::Posted(posted)) => self.core.posted(op, posted, now),
            (What::Get(op, _), Reply::Got(got)) => self.core.got(op, got, now),
            (What::Check { uid, node, .. }, Reply::Got(got)) => {
                self.core.checked(&uid, &node, got, now);
                Vec::new()
            }
            (what, reply) => return Err(format!("{what:?} cannot be answered by {reply:?}")),
        };
        self.perform(api, actions, story)
    }

    /// A Binding that nobody waits for is carried out.
    pub(crate) fn late_write(&mut self, api: &mut Api, index: usize, story: &mut Story) -> Result<(), String> {
        let late = self.late.remove(index);
        let verdict = api.bind(&late.binding)?;
        self.two_writers |= late.orphan && verdict == Verdict::Created;
        story.tell(|| format!("  {} to {}: {verdict:?}", late.binding.uid, late.binding.node));
        Ok(())
    }

    pub(crate) fn sweep(&mut self, api: &Api, story: &mut Story) -> Result<(), String> {
        let actions = self.core.sweep(self.now());
        self.perform(api, actions, story)
    }

    /// Killed and started: what it knew is gone.
    pub(crate) fn restart(&mut self, api: &mut Api, leftover: Leftover, story: &mut Story) -> Result<(), String> {
        let mut late = std::mem::take(&mut self.late);
        for call in self.calls.drain(..).filter(|call| call.answer.is_none()) {
            if let What::Post(_, binding) = call.what {
                let since_ns = call.since_ns;
                late.push(Late {
                    binding,
                    since_ns,
                    orphan: false,
                });
            }
        }
        if leftover == Leftover::Done {
            for Late { binding, .. } in late.drain(..) {
                let verdict = api.bind(&binding)?;
                story.tell(|| format!("  {} to {}: {verdict:?}", binding.uid, binding.node));
            }
        }
        let two_writers = self.two_writers;
        *self = Extender::new(api, self.clock_ns);
        self.two_writers = two_writers;
        if leftover == Leftover::Late {
            self.late = late;
            self.late.iter_mut().for_each(|late| late.orphan = true);
        }
        Ok(())
    }

    /// Nothing is under way: no call, no bind, no reservation.
    pub(crate) fn check_at_rest(&self) -> Result<(), String> {
        ensure!(self.calls.is_empty(), "calls are under way at quiet: {:?}", self.calls);
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

fn carry_out(what: &What, api: &mut Api, story: &mut Story) -> Result<Reply, String> {
    Ok(match what {
        What::Post(_, binding) => {
            let verdict = api.bind(binding)?;
            story.tell(|| format!("  the API server binds {} to {}: {verdict:?}", binding.uid, binding.node));
            Reply::Posted(match verdict {
                Verdict::Created => Posted::Created,
                Verdict::Conflict(text) => Posted::Conflict(text),
                Verdict::NotFound => Posted::NotFound("pods not found".to_owned()),
            })
        }
        What::Get(_, pod) | What::Check { pod, .. } => {
            let got = match api.pods.get(pod) {
                Some(pod) => Got::Found(Box::new(pod.clone())),
                None => Got::NotFound,
            };
            Reply::Got(got)
        }
    })
}
