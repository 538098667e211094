//! What can happen, one step each.
//!
//! Numbers pick among what is there at that moment (modulo), so that every step means something in every world and a
//! shorter sequence is still one. `luck` decides what Kubernetes leaves to chance, together with the pod's UID and not with
//! what happened before, so that taking a step out does not change all later chances.

use proptest::prelude::*;

/// How an API call ends for the extender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The server carries it out; no answer yet.
    Taken,
    /// The server's answer arrives; a call that was not carried out is, first.
    Answered,
    /// No answer arrives. A Binding that was not carried out may be later.
    Lost,
    /// The client repeats the Binding by itself; the second answer arrives.
    Repeated,
}

/// What becomes of Bindings under way when the extender is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leftover {
    /// Carried out before the next process lists.
    Done,
    /// Never carried out.
    Dropped,
    /// They may be carried out when the next process has listed: two writers for a while.
    Late,
}

/// How a container ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// For good.
    Well,
    /// It will be started again.
    Crash,
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    /// A pod of this shape under this name, unless the name is taken.
    Create { name: u8, shape: u8 },
    /// Graceful deletion is asked for.
    Delete { pod: u8 },
    /// The object goes at once, whatever its containers do.
    ForceDelete { pod: u8 },
    /// Force-deleted and made again under the same name (StatefulSet).
    Recreate { pod: u8 },
    /// The kubelet fails the pod while its containers still run.
    Evict { pod: u8 },
    /// kube-scheduler: filter, then bind to one of the nodes that passed; the Binding may be lost at once.
    Schedule { pod: u8, node: u8, lost: bool },
    /// A bind past filter: repeated, or decided long ago.
    Bind { pod: u8, node: u8 },
    /// An API call of the extender's goes on.
    Call { call: u8, fate: Fate },
    /// A Binding without an answer is carried out after all.
    LateWrite { call: u8 },
    /// The extender looks after its reservations.
    Sweep,
    /// Time passes.
    Tick { seconds: u8 },
    /// Events reach the extender.
    ToExtender { pods: u8, nodes: u8 },
    /// Events reach an agent.
    ToAgent { node: u8, events: u8 },
    /// Events reach a kubelet, which admits new pods.
    ToKubelet { node: u8, events: u8, luck: u8 },
    /// A watch was cut: the extender lists again.
    RelistExtender,
    /// A watch was cut: the agent lists again.
    RelistAgent { node: u8 },
    /// A pod worker's next step: sandbox, PreStartContainer, or the runtime's create.
    Work { pod: u8, luck: u8 },
    /// A container ends, or what is left of an ended pod goes.
    End { pod: u8, container: u8, how: Ending },
    /// The kubelet writes the pods' status.
    Report { node: u8 },
    /// The kubelet writes the node's status.
    Heartbeat { node: u8 },
    /// The agent's ten seconds are over; so many events come between its look at the node and its decision.
    Reconcile { node: u8, events: u8 },
    /// The agent's patch of the node's annotation arrives.
    Publish { node: u8 },
    /// The extender is killed and started.
    RestartExtender { leftover: Leftover },
    /// The agent is killed.
    KillAgent { node: u8 },
    /// The agent will be killed between two of its actions.
    KillAgentAfter { node: u8, actions: u8 },
    /// The agent starts (again), with this many units of each GPU kept back.
    StartAgent { node: u8, reserve: u8, listed: bool },
    /// The kubelet starts again, before or after the agent has registered.
    RestartKubelet { node: u8, registered: bool },
    /// Everything on the node starts again.
    Reboot { node: u8, registered: bool },
    /// A GPU fails.
    Fail { gpu: u8 },
    /// It recovers.
    Recover { gpu: u8 },
    /// A pod goes the straight way: bind, admission, then so many steps of its worker.
    Hurry { pod: u8, steps: u8, luck: u8 },
    /// Everything under way arrives.
    Calm,
}

/// What a story is mostly about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mix {
    /// Everything that can happen.
    Everything,
    /// Binds: calls without answers, late writes, restarts of the extender.
    Binds,
}

/// Steps with the weights that make long stories. A step is made from one number: fast, and a failing list of steps shrinks by
/// leaving steps out.
pub(crate) fn op(mix: Mix) -> impl Strategy<Value = Op> {
    any::<u64>().no_shrink().prop_map(move |number| Op::from_number(mix, number))
}

impl Op {
    fn from_number(mix: Mix, number: u64) -> Op {
        let [weight, a, b, c, flags, other, ..] = number.to_le_bytes();
        // Two of three steps of the first 46 … 112 of the table.
        let weight = match mix {
            Mix::Binds if !other.is_multiple_of(3) => 46 + weight % 67,
            Mix::Binds | Mix::Everything => weight,
        };
        let flag = flags.is_multiple_of(2);
        let fate = match b % 11 {
            0 | 1 => Fate::Taken,
            2..=6 => Fate::Answered,
            7..=9 => Fate::Lost,
            _ => Fate::Repeated,
        };
        let how = if c.is_multiple_of(4) { Ending::Crash } else { Ending::Well };
        match weight {
            0..=24 => Op::Create { name: a, shape: b },
            25..=30 => Op::Delete { pod: a },
            31..=36 => Op::ForceDelete { pod: a },
            37..=42 => Op::Recreate { pod: a },
            43..=45 => Op::Evict { pod: a },
            46..=63 => Op::Schedule {
                pod: a,
                node: b,
                lost: flags.is_multiple_of(4),
            },
            64..=68 => Op::Bind { pod: a, node: b },
            69..=86 => Op::Call { call: a, fate },
            87..=94 => Op::LateWrite { call: a },
            95..=98 => Op::Sweep,
            99..=100 => Op::Tick {
                seconds: [1, 12, 70][usize::from(a % 3)],
            },
            101..=112 => Op::ToExtender {
                pods: a % 6,
                nodes: b % 3,
            },
            113..=120 => Op::ToAgent {
                node: a,
                events: 1 + b % 4,
            },
            121..=130 => Op::ToKubelet {
                node: a,
                events: 1 + b % 5,
                luck: c,
            },
            131..=132 => Op::RelistExtender,
            133..=134 => Op::RelistAgent { node: a },
            135..=160 => Op::Work { pod: a, luck: c },
            161..=180 => Op::End {
                pod: a,
                container: b,
                how,
            },
            181..=183 => Op::Report { node: a },
            184..=187 => Op::Heartbeat { node: a },
            188..=196 => Op::Reconcile {
                node: a,
                events: if flag { b % 3 } else { 0 },
            },
            197..=199 => Op::Publish { node: a },
            200..=203 => Op::RestartExtender {
                leftover: match b % 5 {
                    0 => Leftover::Late,
                    1 | 2 => Leftover::Done,
                    _ => Leftover::Dropped,
                },
            },
            204..=205 => Op::KillAgent { node: a },
            206..=208 => Op::KillAgentAfter { node: a, actions: b % 3 },
            209..=214 => Op::StartAgent {
                node: a,
                reserve: u8::from(b.is_multiple_of(8)),
                listed: flag,
            },
            215..=217 => Op::RestartKubelet {
                node: a,
                registered: flag,
            },
            218..=220 => Op::Reboot {
                node: a,
                registered: flag,
            },
            221..=224 => Op::Fail { gpu: a },
            225..=228 => Op::Recover { gpu: a },
            229..=254 => Op::Hurry {
                pod: a,
                steps: if flag { 9 } else { b % 4 },
                luck: c,
            },
            255 => Op::Calm,
        }
    }
}
