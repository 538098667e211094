//! The bind: choose a GPU for one pod on one node, reserve its memory, and send one write, `POST pods/NAME/binding`.
//!
//! # Binds in doubt
//!
//! A POST may end without an answer: a timeout, a broken connection, or a 5xx. Then the extender does not know whether the API
//! server has carried the Binding out, and the API server may still do so until its own request timeout (60 s) has passed. Such
//! a bind is *in doubt* ([`Standing::Doubt`]):
//!
//! - The reservation stays in the ledger, so no other pod can be allocated the same memory.
//! - The extender reads the pod (`Stage::Resolving`). If the pod has the requested node, the bind has succeeded. If it has
//!   another node, the reservation is released. If the pod is not bound yet or cannot be read, kube-scheduler gets an error and
//!   tries again.
//! - The next try sends the same allocation again, so that it does not matter which of the two POSTs the API server carries
//!   out. If the reserved GPU has failed in the meantime, the next try chooses another one, and the earlier allocation also
//!   stays reserved (`Reservation::earlier`).
//! - [`ExtenderCore::sweep`] reads the pod every few seconds. If the pod is still not bound after
//!   [`CoreTiming::doubt_ns`](super::Timing::doubt_ns), the sweep releases the reservation.

use std::collections::BTreeMap;

use divvy_model::{Held, Pod};
use divvy_placement::{Ask, Reservation, Standing};

use super::binding::{BindingRequest, annotations};
use super::{BindArgs, BindError, BindOp, ExtenderAction, ExtenderCore, Got, Now, OpId, Posted, Stage, Ticket};

/// How many times a nominated pod is read again before its bind is refused for lack of room.
///
/// kube-scheduler binds a nominated pod as soon as its watch shows that the victims have ended. The extender's own watch may show
/// the same event a few milliseconds later. If the bind failed in between, kube-scheduler would withdraw the nomination
/// (`handleBindingCycleError` in its `schedule_one.go`), and the replacement of a victim would take the GPU. So such a bind is
/// not refused at once.
const LOOKS: u8 = 4;
/// The pause before each of the reads that [`LOOKS`] counts.
const LOOK_AGAIN_NS: u64 = 25_000_000;

impl ExtenderCore {
    /// Start a bind that a caller requests. The answer comes as an [`ExtenderAction::Answer`] for the returned ticket, now or later.
    pub fn begin_bind(&mut self, args: BindArgs, now: Now) -> (Ticket, Vec<ExtenderAction>) {
        let ticket = Ticket(self.next);
        self.next += 1;
        if let Err(error) = self.may_bind() {
            self.counts.refused += 1;
            let result = Err(error);
            return (ticket, vec![ExtenderAction::Answer { ticket, result }]);
        }
        // kube-scheduler repeats a bind if it got no answer: join the equal bind that is under way.
        if let Some(op) = self.ops.values_mut().find(|op| op.args == args) {
            op.tickets.push(ticket);
            return (ticket, Vec::new());
        }
        let id = OpId(self.next);
        self.next += 1;
        self.ops.insert(
            id,
            BindOp {
                args,
                tickets: vec![ticket],
                deadline_ns: now.monotonic_ns.saturating_add(self.timing.answer_within_ns),
                stage: Stage::WaitingForPod,
                pod: None,
                sent: Vec::new(),
                doubted: false,
                read: false,
                looks: LOOKS,
                pause_ns: self.timing.first_pause_ns,
            },
        );
        self.waiting.insert(id);
        (ticket, self.advance(now))
    }

    /// Handle the API server's answer to an [`ExtenderAction::Post`], or the lack of an answer.
    pub fn posted(&mut self, id: OpId, outcome: Posted, now: Now) -> Vec<ExtenderAction> {
        let Some(op) = self.ops.get_mut(&id).filter(|op| op.stage == Stage::Posting) else {
            return Vec::new();
        };
        let args = op.args.clone();
        let (pod, node) = (args.key(), args.node.clone());
        self.nodes_taken.remove(&node);
        let mut actions = match outcome {
            Posted::Created => {
                let written = self.ops.get(&id).and_then(|op| op.sent.first().cloned());
                self.found_bound(&args.pod_uid, &args.node, &written.unwrap_or_default(), now);
                self.counts.bound += 1;
                self.has_waited(id, now);
                let warning = self.ops.get(&id).and_then(|op| gpu_count_warning(op.pod.as_ref()?));
                let mut actions = self.finish(id, Ok(()));
                actions.extend(warning);
                actions
            }
            Posted::Conflict(text) => self.resolve(id, true, text, 0),
            Posted::Unknown(text) => {
                let ledger = self.index.ledger_mut();
                ledger.set_standing(&args.pod_uid, &args.node, Standing::Doubt, now.monotonic_ns);
                self.resolve(id, false, text, 0)
            }
            Posted::NotFound(text) => {
                self.bury(&args.pod_uid);
                self.refuse(id, BindError::Gone { pod, answer: text })
            }
            Posted::NotSent(text) => {
                self.give_up(id, now);
                self.refuse(id, BindError::NotSent { pod, why: text })
            }
            Posted::Refused(answer) => {
                self.give_up(id, now);
                self.refuse(id, BindError::Refused { pod, node, answer })
            }
        };
        actions.extend(self.advance(now));
        actions
    }

    /// Handle the API server's answer to an [`ExtenderAction::Get`], or the lack of an answer.
    pub fn got(&mut self, id: OpId, outcome: Got, now: Now) -> Vec<ExtenderAction> {
        let Some(op) = self.ops.get(&id) else {
            return Vec::new();
        };
        let mut actions = match op.stage.clone() {
            Stage::LookingUp => self.looked_up(id, outcome, now),
            Stage::Resolving { refused, text } => self.resolved(id, outcome, refused, text, now),
            _ => return Vec::new(),
        };
        actions.extend(self.advance(now));
        actions
    }

    /// Start the binds that can start, in the order in which they were requested.
    fn advance(&mut self, now: Now) -> Vec<ExtenderAction> {
        self.age_departed(now);
        let mut actions = Vec::new();
        // A bind that ends at once frees its pod for the next bind, so repeat until no bind can start.
        while let Some((id, stage)) = self.next_to_start() {
            self.waiting.remove(&id);
            actions.extend(match stage {
                Stage::WaitingForPod => self.look_up(id),
                _ => self.place(id, now),
            });
        }
        actions
    }

    /// Return the first waiting bind whose pod or node (depending on its stage) no other bind is working on.
    fn next_to_start(&self) -> Option<(OpId, Stage)> {
        self.waiting.iter().find_map(|id| {
            let op = self.ops.get(id)?;
            let taken = match op.stage {
                Stage::WaitingForPod => self.pods_taken.contains_key(&op.args.pod_uid),
                _ => self.nodes_taken.contains_key(&op.args.node),
            };
            (!taken).then(|| (*id, op.stage.clone()))
        })
    }

    fn look_up(&mut self, id: OpId) -> Vec<ExtenderAction> {
        let Some(op) = self.ops.get_mut(&id) else {
            return Vec::new();
        };
        self.pods_taken.insert(op.args.pod_uid.clone(), id);
        let key = op.args.key();
        match self.index.ledger().pod_named(&key) {
            Some(pod) if pod.uid == op.args.pod_uid => {
                let pod = pod.clone();
                self.decide(id, pod)
            }
            // The pod is not in the ledger yet, or another pod has its name: only the API server knows.
            _ => self.read_pod(id, 0),
        }
    }

    /// Read the pod from the API server before the bind goes on.
    fn read_pod(&mut self, id: OpId, after_ns: u64) -> Vec<ExtenderAction> {
        let Some(op) = self.ops.get_mut(&id) else {
            return Vec::new();
        };
        op.stage = Stage::LookingUp;
        vec![ExtenderAction::Get {
            op: id,
            pod: op.args.key(),
            after_ns,
        }]
    }

    fn looked_up(&mut self, id: OpId, outcome: Got, now: Now) -> Vec<ExtenderAction> {
        let Some(op) = self.ops.get_mut(&id) else {
            return Vec::new();
        };
        op.read = true;
        let (args, known) = (op.args.clone(), op.pod.is_some());
        match outcome {
            Got::Found(pod) if pod.uid == args.pod_uid => {
                self.is_there(&pod.uid);
                if let Some(node) = &pod.node {
                    self.found_bound(&pod.uid, node, &pod.held, now);
                }
                self.decide(id, *pod)
            }
            Got::Found(pod) => {
                self.bury(&args.pod_uid);
                self.refuse(id, other_uid(&args, &pod.uid))
            }
            Got::NotFound => {
                self.bury(&args.pod_uid);
                let answer = "it was deleted before it was bound".to_owned();
                self.refuse(id, BindError::Gone { pod: args.key(), answer })
            }
            Got::Unreadable(why) => self.refuse(id, BindError::Unreadable { pod: args.key(), why }),
            Got::Failed(answer) => {
                let pod = args.key();
                // A known pod had to be read before a Binding is sent: either this extender has sent one that may still be carried out, or
                // it has only just listed the pods, and an earlier extender may have sent one.
                let error = match self.index.ledger().reservation(&args.pod_uid, &args.node) {
                    _ if !known => BindError::Unknown { pod, answer },
                    Some(_) => BindError::MayBeBound { pod, answer },
                    None => BindError::MayBeBoundByOther { pod, answer },
                };
                self.refuse(id, error)
            }
        }
    }

    /// Answer the bind if the pod alone decides the outcome. Otherwise wait until no other bind posts for the node.
    fn decide(&mut self, id: OpId, pod: Pod) -> Vec<ExtenderAction> {
        let Some(args) = self.ops.get(&id).map(|op| op.args.clone()) else {
            return Vec::new();
        };
        let bound = pod
            .node
            .clone()
            .or_else(|| self.index.ledger().bound_to(&args.pod_uid).map(str::to_owned));
        if let Some(actions) = self.bound_already(id, &args, bound.as_deref()) {
            return actions;
        }
        if pod.deleting {
            return self.refuse(id, BindError::Deleting(pod.key()));
        }
        if let Some(op) = self.ops.get_mut(&id) {
            op.pod = Some(pod);
            op.stage = Stage::WaitingForNode;
            self.waiting.insert(id);
        }
        Vec::new()
    }

    fn bound_already(&mut self, id: OpId, args: &BindArgs, bound: Option<&str>) -> Option<Vec<ExtenderAction>> {
        match bound {
            None => None,
            Some(node) if node == args.node => {
                self.counts.already_bound += 1;
                Some(self.finish(id, Ok(())))
            }
            Some(node) => Some(self.refuse(id, bound_elsewhere(args, node))),
        }
    }

    /// Choose GPU memory that is free now, reserve it, and send the Binding. This is called when no other bind posts for the
    /// node.
    fn place(&mut self, id: OpId, now: Now) -> Vec<ExtenderAction> {
        let Some((args, pod)) = self.ops.get(&id).and_then(|op| Some((op.args.clone(), op.pod.clone()?))) else {
            return Vec::new();
        };
        if now.monotonic_ns >= self.ops.get(&id).map_or(0, |op| op.deadline_ns) {
            let error = BindError::Late {
                pod: args.key(),
                node: args.node,
            };
            return self.refuse(id, error);
        }
        // The pod may have been bound while this bind waited.
        let bound = self.index.ledger().bound_to(&args.pod_uid).map(str::to_owned);
        if let Some(actions) = self.bound_already(id, &args, bound.as_deref()) {
            return actions;
        }
        if let Some(rest_ns) = self.settling(now) {
            return self.read_pod(id, rest_ns);
        }
        let unit = self.index.ledger().unit();
        let ask = Ask::of_pod(&pod, unit);
        let Some(state) = self.index.ledger().node(&args.node).and_then(|view| view.state()).cloned() else {
            let error = BindError::UnknownNode {
                pod: args.key(),
                node: args.node,
            };
            return self.refuse(id, error);
        };
        let mut written = BTreeMap::new();
        let mut sent = Vec::new();
        let mut doubted = false;
        if !ask.is_nothing() && !ask.is_left_to_another_plugin(&state) {
            let text_of = |held: &Held| annotations(held, &state, ask.units, now.unix_ns);
            let ledger = self.index.ledger();
            let earlier = ledger.reservation(&args.pod_uid, &args.node);
            let mut possible: Vec<Held> = earlier.into_iter().flat_map(|r| r.possible()).cloned().collect();
            // An earlier POST without an answer may still be carried out. Send the same allocation again, so that it does not matter which
            // of the two is carried out.
            let again = ledger
                .reserved_and_good(&args.pod_uid, &args.node)
                .and_then(|held| Some((held.clone(), text_of(held)?)));
            doubted = again.is_some();
            // The GPU of the reserved allocation may have failed, shrunk, or disappeared since. If the same allocation were sent
            // again, the pod would wait for that GPU. It is safe to send another allocation even though the first may still be
            // carried out, for three reasons. The API server carries out at most one of the two: it refuses a Binding for a pod
            // that has a node (409) or another UID. Both allocations stay reserved all the time (`Reservation::earlier`), so no
            // other pod was allocated their memory. And either allocation is a success, because the pod holds what its
            // annotations say. One case cannot be prevented: if the first allocation is carried out, the pod is bound to the bad
            // GPU, as if the GPU had failed just after the bind. Reading the pod first makes this less likely.
            if again.is_none() && !possible.is_empty() && self.ops.get(&id).is_some_and(|op| !op.read) {
                return self.read_pod(id, 0);
            }
            let chosen = again.or_else(|| {
                let held = self.choose(&pod, &args.node, &ask)?.held(&pod.request, unit);
                let text = text_of(&held)?;
                Some((held, text))
            });
            let Some((held, text)) = chosen else {
                let is_nominated = pod.nominated.as_deref() == Some(args.node.as_str());
                if let Some(op) = self.ops.get_mut(&id).filter(|op| is_nominated && op.looks > 0) {
                    op.looks -= 1;
                    return self.read_pod(id, LOOK_AGAIN_NS);
                }
                let report = self.index.ledger().explain(&args.node, &ask);
                let error = BindError::DoesNotFit {
                    pod: args.key(),
                    report: Box::new(report),
                };
                return self.refuse(id, error);
            };
            possible.retain(|other| *other != held);
            sent.push(held.clone());
            sent.extend(possible.iter().cloned());
            possible.reverse();
            self.index.ledger_mut().reserve(
                &args.pod_uid,
                &args.node,
                Reservation {
                    pod: args.key(),
                    held,
                    earlier: possible,
                    standing: Standing::InFlight,
                    since_ns: now.monotonic_ns,
                },
            );
            written = text;
        }
        if let Some(op) = self.ops.get_mut(&id) {
            op.stage = Stage::Posting;
            op.sent = sent;
            op.doubted = doubted;
        }
        self.nodes_taken.insert(args.node.clone(), id);
        vec![ExtenderAction::Post {
            op: id,
            binding: BindingRequest {
                namespace: args.pod_namespace,
                name: args.pod_name,
                uid: args.pod_uid,
                node: args.node,
                annotations: written,
            },
        }]
    }

    fn resolve(&mut self, id: OpId, refused: bool, text: String, after_ns: u64) -> Vec<ExtenderAction> {
        let Some(op) = self.ops.get_mut(&id) else {
            return Vec::new();
        };
        op.stage = Stage::Resolving { refused, text };
        vec![ExtenderAction::Get {
            op: id,
            pod: op.args.key(),
            after_ns,
        }]
    }

    fn resolved(&mut self, id: OpId, outcome: Got, refused: bool, text: String, now: Now) -> Vec<ExtenderAction> {
        let Some((args, sent)) = self.ops.get(&id).map(|op| (op.args.clone(), op.sent.clone())) else {
            return Vec::new();
        };
        match outcome {
            Got::Found(pod) if pod.uid != args.pod_uid => {
                self.bury(&args.pod_uid);
                self.refuse(id, other_uid(&args, &pod.uid))
            }
            Got::Found(pod) => match pod.node.as_deref() {
                Some(node) if node == args.node => {
                    if sent.is_empty() || sent.contains(&pod.held) {
                        self.found_bound(&args.pod_uid, node, &pod.held, now);
                        self.counts.already_bound += 1;
                        self.has_waited(id, now);
                        return self.finish(id, Ok(()));
                    }
                    self.index.ledger_mut().release(&args.pod_uid, &args.node);
                    let (pod, node) = (args.key(), args.node);
                    self.refuse(id, BindError::OtherAllocation { pod, node })
                }
                Some(node) => {
                    self.index.ledger_mut().release(&args.pod_uid, &args.node);
                    self.refuse(id, bound_elsewhere(&args, node))
                }
                None if refused => {
                    self.give_up(id, now);
                    let (pod, node, answer) = (args.key(), args.node, text);
                    self.refuse(id, BindError::Refused { pod, node, answer })
                }
                None => {
                    let (pod, node, answer) = (args.key(), args.node, text);
                    self.unknown(id, BindError::UnboundSoFar { pod, node, answer })
                }
            },
            Got::NotFound => {
                self.bury(&args.pod_uid);
                self.refuse(id, BindError::Deleted(args.key()))
            }
            Got::Unreadable(_) | Got::Failed(_) => {
                let pause = self.ops.get(&id).map_or(0, |op| op.pause_ns);
                let deadline = self.ops.get(&id).map_or(0, |op| op.deadline_ns);
                if now.monotonic_ns.saturating_add(pause) < deadline {
                    if let Some(op) = self.ops.get_mut(&id) {
                        op.pause_ns = pause.saturating_mul(2);
                    }
                    return self.resolve(id, refused, text, pause);
                }
                let ledger = self.index.ledger_mut();
                ledger.set_standing(&args.pod_uid, &args.node, Standing::Doubt, now.monotonic_ns);
                let (pod, node, answer) = (args.key(), args.node, text);
                self.unknown(id, BindError::InDoubt { pod, node, answer })
            }
        }
    }

    fn unknown(&mut self, id: OpId, error: BindError) -> Vec<ExtenderAction> {
        self.counts.unknown += 1;
        self.finish(id, Err(error))
    }

    /// Release what this bind reserved, because its POST will not be carried out. If an earlier POST of the same content may still be
    /// carried out, mark the reservation as in doubt instead.
    fn give_up(&mut self, id: OpId, now: Now) {
        let Some((args, doubted)) = self.ops.get(&id).map(|op| (op.args.clone(), op.doubted)) else {
            return;
        };
        let ledger = self.index.ledger_mut();
        if doubted {
            ledger.set_standing(&args.pod_uid, &args.node, Standing::Doubt, now.monotonic_ns);
        } else {
            ledger.withdraw(&args.pod_uid, &args.node, now.monotonic_ns);
        }
    }

    /// Record that the pod is bound to a node, and what it holds. All its other reservations are released, because a Binding is
    /// final.
    pub(super) fn found_bound(&mut self, uid: &str, bound: &str, held: &Held, now: Now) {
        let ledger = self.index.ledger_mut();
        let reserved: Vec<(String, bool)> = ledger
            .reservations()
            .filter(|(reserved, _, _)| *reserved == uid)
            .map(|(_, node, reservation)| (node.to_owned(), node == bound && reservation.possible().any(|it| it == held)))
            .collect();
        for (node, ours) in reserved {
            if ours {
                ledger.confirm(uid, &node, held, now.monotonic_ns);
            } else {
                ledger.release(uid, &node);
            }
        }
    }

    pub(super) fn refuse(&mut self, id: OpId, error: BindError) -> Vec<ExtenderAction> {
        self.counts.refused += 1;
        self.finish(id, Err(error))
    }

    fn finish(&mut self, id: OpId, result: Result<(), BindError>) -> Vec<ExtenderAction> {
        self.waiting.remove(&id);
        let Some(op) = self.ops.remove(&id) else {
            return Vec::new();
        };
        self.pods_taken.retain(|_, taken| *taken != id);
        op.tickets
            .into_iter()
            .map(|ticket| ExtenderAction::Answer {
                ticket,
                result: result.clone(),
            })
            .collect()
    }

    /// Report whether a bind is working on this pod.
    pub(super) fn busy_with(&self, uid: &str) -> bool {
        self.pods_taken.contains_key(uid)
    }
}

/// Return a warning for a pod that requests gpu-count. Users of gpushare expect that gpu-count sets the number of GPUs, but it
/// never had an effect.
fn gpu_count_warning(pod: &Pod) -> Option<ExtenderAction> {
    if pod.request.containers.iter().all(|container| container.gpu_count == 0) {
        return None;
    }
    Some(ExtenderAction::Warn {
        pod: pod.key(),
        uid: pod.uid.clone(),
        action: "Binding",
        reason: "GpuCountHasNoEffect",
        text: format!(
            "the limit {} has no effect on which GPUs a pod gets; request memory with {}: N, or whole GPUs with nvidia.com/gpu: K",
            divvy_model::names::GPU_COUNT,
            divvy_model::names::GPU_MEM
        ),
    })
}

fn bound_elsewhere(args: &BindArgs, bound: &str) -> BindError {
    BindError::BoundElsewhere {
        pod: args.key(),
        bound: bound.to_owned(),
        node: args.node.clone(),
    }
}

fn other_uid(args: &BindArgs, found: &str) -> BindError {
    BindError::OtherUid {
        pod: args.key(),
        found: found.to_owned(),
        expected: args.pod_uid.clone(),
    }
}
