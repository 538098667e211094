//! The plan of a sequence, which is drawn from a seed: the machines and the steps. The same seed gives the same plan. The outcome
//! also depends on how the processes interleave.

use std::collections::BTreeMap;

use divvy_testbed::builders::{PodBuilder, pod};
use divvy_testkit::dice::Dice;

/// The number of steps in a sequence, not counting the steps that restart stopped programs.
const STEPS: usize = 44;

/// The clients whose requests a fault affects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    Extender,
    Agents,
    /// Kubelets and scheduler.
    InProcess,
}

/// The shape of a pod. Amounts are in units.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shape {
    Plain(u64),
    Two(u64, u64),
    Init {
        init: u64,
        app: u64,
    },
    Sidecar {
        init: u64,
        side: u64,
        app: u64,
    },
    /// A pod that ends only by SIGKILL, after `grace_s` seconds.
    Stubborn {
        units: u64,
        grace_s: u64,
    },
    /// A pod that ends on its own after `tenths` tenths of a second, and does not restart.
    Job {
        units: u64,
        tenths: u64,
    },
    /// A pod that fails, and is restarted again and again.
    Failing(u64),
}

impl Shape {
    pub(super) fn manifest(self, name: &str) -> PodBuilder {
        let base = pod(name);
        match self {
            Shape::Plain(units) => base.gpu_mem(units),
            Shape::Two(one, other) => base.gpu_mem(one).container("other", other),
            Shape::Init { init, app } => base.gpu_mem(app).init("prepare", init),
            Shape::Sidecar { init, side, app } => base.gpu_mem(app).sidecar("side", side).init("prepare", init),
            Shape::Stubborn { units, grace_s } => base.gpu_mem(units).args(&["run", "--ignore-term"]).grace_seconds(grace_s),
            Shape::Job { units, tenths } => base
                .gpu_mem(units)
                .args(&["sleep", &format!("{}.{}", tenths / 10, tenths % 10)])
                .once(),
            Shape::Failing(units) => base.gpu_mem(units).args(&["fail"]),
        }
    }

    fn draw(dice: &mut Dice) -> Shape {
        // Small pods fill the gaps, and large pods have to wait.
        let mut units = |most| {
            if dice.percent(50) {
                dice.between(1, 4)
            } else {
                dice.between(1, most)
            }
        };
        let (one, other, third) = (units(12), units(4), units(6));
        match dice.between(0, 99) {
            0..=24 => Shape::Plain(one),
            25..=36 => Shape::Two(one.min(8), other),
            37..=47 => Shape::Init { init: third, app: other },
            48..=58 => Shape::Sidecar {
                init: third,
                side: dice.between(1, 2),
                app: other,
            },
            59..=78 => Shape::Stubborn {
                units: one,
                grace_s: dice.between(1, 2),
            },
            79..=86 => Shape::Job {
                units: one,
                tenths: dice.between(0, 12),
            },
            _ => Shape::Failing(other),
        }
    }
}

/// A step. Nodes and GPUs are given by position.
#[derive(Debug, Clone)]
pub(super) enum Op {
    Create {
        name: String,
        shape: Shape,
    },
    Delete {
        name: String,
    },
    ForceDelete {
        name: String,
    },
    /// Creates a new pod with the same name, either immediately after a forced deletion, or as soon as the name is free.
    Replace {
        name: String,
        shape: Shape,
        force: bool,
    },
    KillAgent {
        node: usize,
    },
    StopAgent {
        node: usize,
    },
    StartAgent {
        node: usize,
    },
    KillProbe {
        node: usize,
    },
    StopKubelet {
        node: usize,
        hard: bool,
    },
    StartKubelet {
        node: usize,
    },
    RestartKubelet {
        node: usize,
        hard: bool,
    },
    ReplacePluginDirectory {
        node: usize,
    },
    DropStreams {
        node: usize,
    },
    Reboot {
        node: usize,
        agent_first: bool,
    },
    KillExtender,
    StartExtender,
    GpuDies {
        node: usize,
        gpu: usize,
        xid: u64,
    },
    GpuIsLost {
        node: usize,
        gpu: usize,
    },
    GpuRecovers {
        node: usize,
        gpu: usize,
    },
    HarmlessXid {
        node: usize,
        gpu: usize,
    },
    DriverHangs {
        node: usize,
    },
    CutWatches,
    /// Cuts watches in such a way that they cannot resume, so that the clients must list again.
    Compact,
    /// Delays watches, so that caches become stale.
    HoldWatches {
        ms: u64,
    },
    Refuse {
        who: Who,
        code: u16,
        percent: u32,
        steps: usize,
        /// Whether watches are also cut, so that they must be resumed during the fault.
        cut: bool,
    },
    LoseBindingAnswers {
        times: u64,
    },
    SlowBindings {
        ms: u64,
        steps: usize,
    },
    ApiDown {
        ms: u64,
    },
}

#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) op: Op,
    pub(super) pause_ms: u64,
}

#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// The memory of each GPU in MiB, by node.
    pub(super) nodes: Vec<Vec<u64>>,
    /// Whether the kubelets have the bugs of Kubernetes 1.36.
    pub(super) kubelet_bugs: bool,
    pub(super) steps: Vec<Step>,
}

impl Plan {
    pub(super) fn draw(seed: u64) -> Plan {
        let mut dice = Dice::new(seed);
        let dice = &mut dice;
        let nodes: Vec<Vec<u64>> = (0..2)
            .map(|_| {
                (0..dice.between(1, 3))
                    .map(|_| dice.one_of(&[4096, 6144, 8192, 11264, 15109, 16384]))
                    .collect()
            })
            .collect();
        let kubelet_bugs = dice.percent(50);
        let mut steps = Vec::new();
        // Stopped programs start again some steps later, so that most programs run most of the time.
        let mut later: Vec<(usize, Op)> = Vec::new();
        let mut shapes: BTreeMap<String, Shape> = BTreeMap::new();
        for at in 0..STEPS {
            let (due, rest): (Vec<_>, Vec<_>) = later.into_iter().partition(|(when, _)| *when <= at);
            later = rest;
            steps.extend(due.into_iter().map(|(_, op)| Step { op, pause_ms: 0 }));
            let node = dice.between(0, 1) as usize;
            let gpu = dice.between(0, nodes[node].len() as u64 - 1) as usize;
            let name = if at < 5 {
                format!("p{at}")
            } else {
                format!("p{}", dice.between(0, 8))
            };
            let drawn = Shape::draw(dice);
            let soon = at + dice.between(1, 4) as usize;
            let op = match (at < 5 || dice.percent(50), dice.between(0, 99)) {
                (true, 0..=44) => Op::Create { name, shape: drawn },
                (true, _) if at < 5 => Op::Create { name, shape: drawn },
                (true, 45..=59) => Op::Delete { name },
                (true, 60..=71) => Op::ForceDelete { name },
                (true, _) => {
                    // Most pods are replaced by equal pods, as a controller does.
                    let shape = shapes.get(&name).copied().filter(|_| dice.percent(70)).unwrap_or(drawn);
                    Op::Replace {
                        name,
                        shape,
                        force: dice.percent(60),
                    }
                }
                (false, 0..=11) => {
                    later.push((soon, Op::StartAgent { node }));
                    if dice.percent(80) {
                        Op::KillAgent { node }
                    } else {
                        Op::StopAgent { node }
                    }
                }
                (false, 12..=16) => Op::KillProbe { node },
                (false, 17..=20) => {
                    later.push((soon, Op::StartKubelet { node }));
                    Op::StopKubelet {
                        node,
                        hard: dice.percent(50),
                    }
                }
                (false, 21..=28) => Op::RestartKubelet {
                    node,
                    hard: dice.percent(50),
                },
                (false, 29..=30) => Op::ReplacePluginDirectory { node },
                (false, 31..=33) => Op::DropStreams { node },
                (false, 34..=36) => Op::Reboot {
                    node,
                    agent_first: dice.percent(50),
                },
                (false, 37..=48) => {
                    later.push((soon, Op::StartExtender));
                    Op::KillExtender
                }
                (false, 49..=54) => Op::GpuDies {
                    node,
                    gpu,
                    xid: dice.one_of(&[48, 63, 79, 94]),
                },
                (false, 55..=59) => {
                    later.push((soon + 3, Op::GpuRecovers { node, gpu }));
                    Op::GpuIsLost { node, gpu }
                }
                (false, 60..=63) => Op::HarmlessXid { node, gpu },
                (false, 64..=65) => Op::DriverHangs { node },
                (false, 66..=68) => Op::CutWatches,
                (false, 69..=71) => Op::Compact,
                (false, 72..=76) => Op::HoldWatches {
                    ms: dice.between(100, 600),
                },
                (false, 77..=86) => Op::Refuse {
                    who: dice.one_of(&[Who::Extender, Who::Agents, Who::InProcess]),
                    code: dice.one_of(&[500, 409, 429]),
                    percent: dice.one_of(&[30, 60, 100]),
                    steps: dice.between(2, 5) as usize,
                    cut: dice.percent(50),
                },
                (false, 87..=92) => Op::LoseBindingAnswers {
                    times: dice.between(1, 3),
                },
                (false, 93..=96) => Op::SlowBindings {
                    ms: dice.between(50, 400),
                    steps: dice.between(2, 5) as usize,
                },
                (false, _) => Op::ApiDown {
                    ms: dice.between(200, 1000),
                },
            };
            if let Op::Create { name, shape } | Op::Replace { name, shape, .. } = &op {
                shapes.insert(name.clone(), *shape);
            }
            steps.push(Step {
                op,
                pause_ms: dice.one_of(&[0, 5, 20, 60, 150, 300]),
            });
        }
        Plan {
            nodes,
            kubelet_bugs,
            steps,
        }
    }

    /// Return the machine description.
    pub(super) fn machines(&self) -> String {
        let mut text = "v = 1\n".to_owned();
        for (position, gpus) in self.nodes.iter().enumerate() {
            text.push_str(&format!("[[node]]\nname = \"n{position}\"\n"));
            for (index, memory) in gpus.iter().enumerate() {
                // Minor numbers that differ from the index, as after a GPU was moved to another slot.
                let minor = gpus.len() - 1 - index;
                text.push_str(&format!(
                    "[[node.gpu]]\nmodel = \"Tesla T4\"\nmemory_mib = {memory}\nminor = {minor}\n"
                ));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::Plan;

    #[test]
    fn a_seed_gives_one_plan() {
        let text = |seed| format!("{:?}", Plan::draw(seed));
        assert_eq!(text(3), text(3));
        assert_ne!(text(3), text(4));
    }
}
