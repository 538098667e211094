//! The steps of a history.
//!
//! The numbers in a step select among the objects that exist at that moment (modulo their count). Every step is therefore valid
//! in every world, and a sequence from which steps were removed is still valid. `luck` decides what Kubernetes leaves to chance.
//! It is combined with the pod's UID, and not with earlier events, so that removing a step does not change all later random
//! choices.

use crate::chance;
use crate::proxy::ProxyResponse;

/// The result of an API call for the extender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The server carries out the call; its response is still on its way.
    Taken,
    /// The server's response arrives. If the call was not carried out yet, it is carried out first.
    Answered,
    /// No response arrives. A Binding that was not carried out yet may be carried out later.
    Lost,
    /// The client repeats the Binding automatically, and the second response arrives.
    Repeated,
    /// A proxy answers instead of the API server ([`crate::proxy::ProxyResponse::number`]).
    Page(u8),
}

/// The result of reading the Lease, and of the write that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseFate {
    Answered,
    /// The read fails.
    ReadLost,
    /// The write is not carried out.
    WriteLost,
    /// The write is carried out, but the response is lost.
    AnswerLost,
    /// The write is carried out, and the response arrives at the next check of the Lease.
    AnswerLate,
}

/// The annotations that the owner of a pod forged together with `spec.nodeName`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forgery {
    /// `memMiB: 0`
    Zero,
    /// The pod's share is correct, but a container's share is 0.
    ZeroContainer,
    /// Less memory than the pod requests.
    Less,
    /// The memory that the pod requests, on a GPU whose free memory was not checked.
    Exact,
    /// gpushare's annotations with `ALIYUN_COM_GPU_MEM_POD: 0`.
    LegacyZero,
    /// gpushare's annotations with less memory than the pod requests.
    LegacyLess,
    /// gpushare's annotations with the memory that the pod requests.
    LegacyExact,
    /// No annotations.
    Nothing,
    /// Unreadable annotations.
    Garbage,
}

impl Forgery {
    pub const ALL: [Forgery; 9] = [
        Forgery::Zero,
        Forgery::ZeroContainer,
        Forgery::Less,
        Forgery::Exact,
        Forgery::LegacyZero,
        Forgery::LegacyLess,
        Forgery::LegacyExact,
        Forgery::Nothing,
        Forgery::Garbage,
    ];
}

/// What happens to Bindings in progress when the extender is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftover {
    /// They are carried out before the next process lists the pods.
    Done,
    /// They are never carried out.
    Dropped,
    /// They may be carried out after the next process has listed the pods, so that there are two writers for a while.
    Late,
}

/// The way in which a container ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerEnding {
    /// The container ends permanently.
    Well,
    /// The container will be started again.
    Crash,
}

/// A step of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HistoryOp {
    /// A pod of this shape and priority is created under this name, unless the name is taken.
    Create { name: u8, shape: u8, priority: u8 },
    /// A pod is created for which the owner wrote `spec.nodeName` and annotations, as if the pod were on this GPU of the node.
    Forge {
        name: u8,
        shape: u8,
        node: u8,
        gpu: u8,
        how: Forgery,
    },
    /// The graceful deletion of a pod is requested.
    Delete { pod: u8 },
    /// A pod's object is removed immediately, even while its containers run.
    ForceDelete { pod: u8 },
    /// A pod is force-deleted, and created again under the same name (as in a StatefulSet).
    Recreate { pod: u8 },
    /// The kubelet fails a pod while its containers still run.
    Evict { pod: u8 },
    /// kube-scheduler calls this replica to filter. It then binds to one of the nodes that passed, or preempts. The Binding may
    /// be lost immediately.
    Schedule { pod: u8, node: u8, lost: bool, replica: u8 },
    /// kube-scheduler binds without a filter call: it repeats a bind, or carries out a decision that was made long ago.
    Bind { pod: u8, node: u8, replica: u8 },
    /// An API call of the extender makes progress.
    Call { call: u8, fate: Fate },
    /// A Binding that received no response is carried out after all.
    LateWrite { call: u8 },
    /// The extender checks its reservations.
    Sweep { replica: u8 },
    /// Time passes.
    Tick { seconds: u8 },
    /// Events reach the extender.
    ToExtender { replica: u8, pods: u8, nodes: u8 },
    /// Events reach an agent.
    ToAgent { node: u8, events: u8 },
    /// Events reach a kubelet, which admits new pods.
    ToKubelet { node: u8, events: u8, luck: u8 },
    /// The extender's watch is cut, so it lists again. The API server takes the list now, and the list arrives later.
    RelistExtender { replica: u8 },
    /// The extender's list arrives.
    ListArrives { replica: u8 },
    /// The agent's watch is cut, so it lists again.
    RelistAgent { node: u8 },
    /// The list of the agent's watch arrives.
    AgentListArrives { node: u8 },
    /// A pod worker takes its next step: sandbox, PreStartContainer, or the runtime's create.
    Work { pod: u8, luck: u8 },
    /// A container ends, or what is left of an ended pod is removed.
    End { pod: u8, container: u8, how: ContainerEnding },
    /// The kubelet writes the pods' status.
    Report { node: u8 },
    /// The kubelet writes the node's status.
    Heartbeat { node: u8 },
    /// The agent reconciles, because its interval of ten seconds has passed. `events` events arrive after it has read the node
    /// and before it decides.
    Reconcile { node: u8, events: u8 },
    /// The agent's patch of the node's annotation arrives.
    Publish { node: u8 },
    /// The extender is killed and started again.
    RestartExtender { replica: u8, leftover: Leftover },
    /// A replica stops gracefully and gives the Lease back, and another replica starts.
    Retire { replica: u8 },
    /// A replica reads the Lease.
    Lease { replica: u8, fate: LeaseFate },
    /// A replica stops in the middle of its work, as on a machine that sleeps.
    Freeze { replica: u8 },
    /// A frozen replica continues.
    Thaw { replica: u8 },
    /// The wall clock of a replica's machine is set. No other clock changes.
    Clock { replica: u8, seconds: i16 },
    /// The agent is killed.
    KillAgent { node: u8 },
    /// The agent is marked to be killed after this number of further actions.
    KillAgentAfter { node: u8, actions: u8 },
    /// The agent starts or restarts. It reserves this number of units of each GPU.
    StartAgent { node: u8, reserve: u8, listed: bool },
    /// The kubelet restarts, before or after the agent has registered.
    RestartKubelet { node: u8, registered: bool },
    /// The node reboots.
    Reboot { node: u8, registered: bool },
    /// A GPU is replaced by another one while the node runs.
    ReplaceCard { gpu: u8 },
    /// A GPU fails.
    Fail { gpu: u8 },
    /// A failed GPU recovers.
    Recover { gpu: u8 },
    /// A pod passes through these stages without other events in between: bind, admission, and `steps` steps of its worker.
    Hurry { pod: u8, steps: u8, luck: u8 },
    /// Everything in progress arrives.
    Calm,
}

/// The kind of events that a history emphasizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventMix {
    /// All events that are possible with one extender.
    Everything,
    /// Binds: calls without responses, late writes, and restarts of the extender.
    Binds,
    /// Starts of containers: lists that are slow, or overtaken by the watch.
    Starts,
    /// Pods of different priorities.
    Preemption,
    /// Two extenders, one of which leads.
    Replicas,
    /// GPUs that are replaced, and pods that no extender placed.
    Cards,
    /// A kubelet that creates no cgroups for pods.
    NoPodCgroups,
    /// Agents with `--whole-gpus`: pods with whole GPUs beside pods with shares. Some were bound without the extender and get the GPUs
    /// that their device ids name.
    Whole,
}

/// A history: its number, its emphasis, and its steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpHistory {
    pub mix: EventMix,
    pub steps: Vec<HistoryOp>,
}

impl OpHistory {
    /// Return the history with this number.
    pub fn of(seed: u64) -> OpHistory {
        const MIXES: [EventMix; 8] = [
            EventMix::Everything,
            EventMix::Binds,
            EventMix::Starts,
            EventMix::Preemption,
            EventMix::Replicas,
            EventMix::Cards,
            EventMix::Everything,
            EventMix::NoPodCgroups,
        ];
        let mut chance = chance::of_history(seed);
        // Rare, because most invariants are switched off for one of its nodes.
        let mix = match MIXES[chance.below(MIXES.len())] {
            EventMix::NoPodCgroups if chance.below(4) > 0 => EventMix::Replicas,
            mix => mix,
        };
        let mix = if seed.is_multiple_of(5) { EventMix::Whole } else { mix };
        let length = 1 + chance.below(60);
        OpHistory {
            mix,
            steps: (0..length).map(|_| HistoryOp::from_number(mix, chance.number())).collect(),
        }
    }
}

impl EventMix {
    /// Return the ranges of the table of steps from which two thirds of the steps are drawn.
    fn focus(self) -> &'static [(u16, u16)] {
        match self {
            EventMix::Everything => &[],
            EventMix::Binds => &[(46, 112)],
            EventMix::Starts => &[(0, 36), (113, 130), (133, 180), (229, 254), (258, 261)],
            EventMix::Preemption => &[(0, 24), (46, 63), (101, 112), (161, 180), (229, 254)],
            EventMix::Replicas => &[(46, 112), (200, 203), (229, 240), (262, 313)],
            EventMix::Cards => &[(0, 10), (121, 130), (135, 180), (188, 199), (221, 254), (314, 327)],
            EventMix::NoPodCgroups => &[(0, 36), (135, 180), (188, 196), (229, 254)],
            EventMix::Whole => &[(0, 24), (46, 63), (121, 130), (135, 180), (188, 199), (204, 254), (319, 327)],
        }
    }
}

impl HistoryOp {
    fn from_number(mix: EventMix, number: u64) -> HistoryOp {
        let [low, high, a, b, c, flags, other, spare] = number.to_le_bytes();
        let weight = u16::from_le_bytes([low, high]);
        let focus = mix.focus();
        let weight = if focus.is_empty() || other.is_multiple_of(3) {
            weight % 328
        } else {
            let width: u16 = focus.iter().map(|(first, last)| last - first + 1).sum();
            let mut at = weight % width;
            focus
                .iter()
                .find_map(|(first, last)| {
                    let here = last - first + 1;
                    if at < here {
                        return Some(first + at);
                    }
                    at -= here;
                    None
                })
                .unwrap_or(weight % 328)
        };
        let flag = flags.is_multiple_of(2);
        let replica = spare >> 4;
        let priority = match mix {
            EventMix::Preemption => flags / 2 % 4,
            _ => u8::from(flags.is_multiple_of(16)),
        };
        let fate = match b % 15 {
            0 | 1 => Fate::Taken,
            2..=7 => Fate::Answered,
            8..=10 => Fate::Lost,
            11 => Fate::Repeated,
            // The effect of believing a wrong answer shows when another replica binds the pod.
            _ if mix == EventMix::Replicas && flags % 3 == 0 => Fate::Page(ProxyResponse::MISLEADING),
            _ => Fate::Page(c),
        };
        let how = if c.is_multiple_of(4) {
            ContainerEnding::Crash
        } else {
            ContainerEnding::Well
        };
        match weight {
            0..=24 => HistoryOp::Create {
                name: a,
                shape: b,
                priority,
            },
            25..=30 => HistoryOp::Delete { pod: a },
            31..=36 => HistoryOp::ForceDelete { pod: a },
            37..=42 => HistoryOp::Recreate { pod: a },
            43..=45 => HistoryOp::Evict { pod: a },
            46..=63 => HistoryOp::Schedule {
                pod: a,
                node: b,
                lost: flags.is_multiple_of(4),
                replica,
            },
            64..=68 => HistoryOp::Bind {
                pod: a,
                node: b,
                replica,
            },
            69..=86 => HistoryOp::Call { call: a, fate },
            87..=94 => HistoryOp::LateWrite { call: a },
            95..=98 => HistoryOp::Sweep { replica },
            99..=100 => HistoryOp::Tick {
                seconds: [1, 12, 70][usize::from(a % 3)],
            },
            101..=112 => HistoryOp::ToExtender {
                replica,
                pods: a % 6,
                nodes: b % 3,
            },
            113..=120 => HistoryOp::ToAgent {
                node: a,
                events: 1 + b % 4,
            },
            121..=130 => HistoryOp::ToKubelet {
                node: a,
                events: 1 + b % 5,
                luck: c,
            },
            131..=132 => HistoryOp::RelistExtender { replica },
            133..=134 => HistoryOp::RelistAgent { node: a },
            135..=160 => HistoryOp::Work { pod: a, luck: c },
            161..=180 => HistoryOp::End {
                pod: a,
                container: b,
                how,
            },
            181..=183 => HistoryOp::Report { node: a },
            184..=187 => HistoryOp::Heartbeat { node: a },
            188..=196 => HistoryOp::Reconcile {
                node: a,
                events: if flag { b % 3 } else { 0 },
            },
            197..=199 => HistoryOp::Publish { node: a },
            200..=203 => HistoryOp::RestartExtender {
                replica,
                leftover: match b % 5 {
                    0 => Leftover::Late,
                    1 | 2 => Leftover::Done,
                    _ => Leftover::Dropped,
                },
            },
            204..=205 => HistoryOp::KillAgent { node: a },
            206..=208 => HistoryOp::KillAgentAfter { node: a, actions: b % 3 },
            209..=214 => HistoryOp::StartAgent {
                node: a,
                reserve: u8::from(b.is_multiple_of(8)),
                listed: flag,
            },
            215..=217 => HistoryOp::RestartKubelet {
                node: a,
                registered: flag,
            },
            218..=220 => HistoryOp::Reboot {
                node: a,
                registered: flag,
            },
            221..=224 => HistoryOp::Fail { gpu: a },
            225..=228 => HistoryOp::Recover { gpu: a },
            255..=257 => HistoryOp::Calm,
            258..=261 => HistoryOp::AgentListArrives { node: a },
            262..=269 => HistoryOp::ListArrives { replica },
            270..=277 if mix == EventMix::Replicas => HistoryOp::Tick { seconds: 1 + a % 16 },
            278..=293 if mix == EventMix::Replicas => HistoryOp::Lease {
                replica,
                fate: match b % 8 {
                    0 => LeaseFate::ReadLost,
                    1 => LeaseFate::WriteLost,
                    2 => LeaseFate::AnswerLost,
                    3 => LeaseFate::AnswerLate,
                    _ => LeaseFate::Answered,
                },
            },
            294..=297 if mix == EventMix::Replicas => HistoryOp::Freeze { replica },
            298..=303 if mix == EventMix::Replicas => HistoryOp::Thaw { replica },
            304..=307 if mix == EventMix::Replicas => HistoryOp::Retire { replica },
            308..=313 => HistoryOp::Clock {
                replica,
                seconds: i16::from_le_bytes([a, b]) / if flag { 1 } else { 1024 },
            },
            314..=318 => HistoryOp::ReplaceCard { gpu: a },
            319..=327 => HistoryOp::Forge {
                name: a,
                shape: b,
                node: c,
                gpu: flags,
                how: match mix {
                    // As kube-scheduler binds a pod when its extenders are not asked.
                    EventMix::Whole if flag => Forgery::Nothing,
                    _ => Forgery::ALL[usize::from(spare) % Forgery::ALL.len()],
                },
            },
            // 229..=254, and in worlds with one extender also the steps about several.
            _ => HistoryOp::Hurry {
                pod: a,
                steps: if flag { 9 } else { b % 4 },
                luck: c,
            },
        }
    }
}
