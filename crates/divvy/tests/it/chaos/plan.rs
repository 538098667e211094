//! A sequence, drawn by its seed: the machines, and what is done to them. The same seed gives the same plan; what comes of it also
//! depends on how the processes' steps interleave.

use divvy_testbed::builders::{PodBuilder, pod};

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Debug, Clone)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From `low` to `high`, both possible.
    pub(super) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    pub(super) fn percent(&mut self, chance: u64) -> bool {
        self.next() % 100 < chance
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[(self.next() % of.len() as u64) as usize]
    }
}

/// Whose requests a fault is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    Extender,
    Agents,
    /// Kubelets and scheduler.
    InProcess,
}

/// What a pod is like. Amounts are units.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shape {
    Plain(u64),
    Two(u64, u64),
    Init { init: u64, app: u64 },
    Sidecar { init: u64, side: u64, app: u64 },
    /// Ends only by SIGKILL, after this many seconds.
    Stubborn { units: u64, grace_s: u64 },
    /// Ends by itself, for good, after tenths of a second.
    Job { units: u64, tenths: u64 },
    /// Fails, and is started again and again.
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
            Shape::Job { units, tenths } => base.gpu_mem(units).args(&["sleep", &format!("{}.{}", tenths / 10, tenths % 10)]).once(),
            Shape::Failing(units) => base.gpu_mem(units).args(&["fail"]),
        }
    }

    fn draw(dice: &mut Dice) -> Shape {
        // Small pods fill the gaps, large ones have to wait.
        let mut units = |most| if dice.percent(70) { dice.between(1, 4) } else { dice.between(1, most) };
        let (one, other, third) = (units(14), units(4), units(6));
        match dice.between(0, 99) {
            0..=29 => Shape::Plain(one),
            30..=41 => Shape::Two(one.min(8), other),
            42..=53 => Shape::Init { init: third, app: other },
            54..=65 => Shape::Sidecar { init: third, side: dice.between(1, 2), app: other },
            66..=83 => Shape::Stubborn { units: one, grace_s: dice.between(1, 2) },
            84..=93 => Shape::Job { units: one, tenths: dice.between(0, 12) },
            _ => Shape::Failing(other),
        }
    }
}

/// One thing that is done. Nodes and GPUs by position.
#[derive(Debug, Clone)]
pub(super) enum Op {
    Create { name: String, shape: Shape },
    Delete { name: String },
    ForceDelete { name: String },
    /// The name is used again, by force at once or as soon as it is free.
    Replace { name: String, shape: Shape, force: bool },
    KillAgent { node: usize },
    StopAgent { node: usize },
    StartAgent { node: usize },
    KillProbe { node: usize },
    StopKubelet { node: usize, hard: bool },
    StartKubelet { node: usize },
    RestartKubelet { node: usize, hard: bool },
    ReplacePluginDirectory { node: usize },
    DropStreams { node: usize },
    Reboot { node: usize, agent_first: bool },
    KillExtender,
    StartExtender,
    GpuDies { node: usize, gpu: usize, xid: u64 },
    GpuIsLost { node: usize, gpu: usize },
    GpuRecovers { node: usize, gpu: usize },
    HarmlessXid { node: usize, gpu: usize },
    DriverHangs { node: usize },
    CutWatches,
    /// And watches that are cut must list again.
    Compact,
    /// Caches grow old.
    HoldWatches { ms: u64 },
    Refuse { who: Who, code: u16, percent: u32, steps: usize },
    LoseBindingAnswers { times: u64 },
    SlowBindings { ms: u64, steps: usize },
    ApiDown { ms: u64 },
}

#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) op: Op,
    pub(super) pause_ms: u64,
}

#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// Memory of each GPU in MiB, by node.
    pub(super) nodes: Vec<Vec<u64>>,
    /// Whether kubelets have the faults of Kubernetes 1.36.
    pub(super) kubelet_bugs: bool,
    pub(super) steps: Vec<Step>,
}

impl Plan {
    pub(super) fn draw(seed: u64) -> Plan {
        let mut dice = Dice::new(seed);
        let dice = &mut dice;
        let nodes: Vec<Vec<u64>> = (0..2)
            .map(|_| (0..dice.between(1, 3)).map(|_| dice.one_of(&[4096, 6144, 8192, 11264, 15109, 16384])).collect())
            .collect();
        let kubelet_bugs = dice.percent(50);
        let mut steps = Vec::new();
        let name = |dice: &mut Dice| format!("p{}", dice.between(0, 9));
        for at in 0..34 {
            let node = dice.between(0, 1) as usize;
            let gpu = dice.between(0, nodes[node].len() as u64 - 1) as usize;
            let pods = at < 5 || dice.percent(50);
            let op = match (pods, dice.between(0, 99)) {
                (true, _) if at < 5 => Op::Create { name: format!("p{at}"), shape: Shape::draw(dice) },
                (true, 0..=49) => Op::Create { name: name(dice), shape: Shape::draw(dice) },
                (true, 50..=69) => Op::Delete { name: name(dice) },
                (true, 70..=84) => Op::ForceDelete { name: name(dice) },
                (true, _) => Op::Replace { name: name(dice), shape: Shape::draw(dice), force: dice.percent(50) },
                (false, 0..=7) => Op::KillAgent { node },
                (false, 8..=9) => Op::StopAgent { node },
                (false, 10..=20) => Op::StartAgent { node },
                (false, 21..=24) => Op::KillProbe { node },
                (false, 25..=29) => Op::StopKubelet { node, hard: dice.percent(50) },
                (false, 30..=36) => Op::StartKubelet { node },
                (false, 37..=43) => Op::RestartKubelet { node, hard: dice.percent(50) },
                (false, 44..=45) => Op::ReplacePluginDirectory { node },
                (false, 46..=48) => Op::DropStreams { node },
                (false, 49..=52) => Op::Reboot { node, agent_first: dice.percent(50) },
                (false, 53..=58) => Op::KillExtender,
                (false, 59..=65) => Op::StartExtender,
                (false, 66..=69) => Op::GpuDies { node, gpu, xid: dice.one_of(&[48, 63, 79, 94]) },
                (false, 70..=71) => Op::GpuIsLost { node, gpu },
                (false, 72..=75) => Op::GpuRecovers { node, gpu },
                (false, 76..=77) => Op::HarmlessXid { node, gpu },
                (false, 78) => Op::DriverHangs { node },
                (false, 79..=81) => Op::CutWatches,
                (false, 82..=83) => Op::Compact,
                (false, 84..=86) => Op::HoldWatches { ms: dice.between(100, 600) },
                (false, 87..=91) => Op::Refuse {
                    who: dice.one_of(&[Who::Extender, Who::Agents, Who::InProcess]),
                    code: dice.one_of(&[500, 409, 429]),
                    percent: dice.one_of(&[30, 60, 100]),
                    steps: dice.between(1, 4) as usize,
                },
                (false, 92..=94) => Op::LoseBindingAnswers { times: dice.between(1, 3) },
                (false, 95..=96) => Op::SlowBindings { ms: dice.between(50, 400), steps: dice.between(2, 5) as usize },
                (false, _) => Op::ApiDown { ms: dice.between(200, 1000) },
            };
            steps.push(Step { op, pause_ms: dice.one_of(&[0, 5, 20, 60, 150, 300]) });
        }
        Plan { nodes, kubelet_bugs, steps }
    }

    /// The machine description.
    pub(super) fn machines(&self) -> String {
        let mut text = "v = 1\n".to_owned();
        for (position, gpus) in self.nodes.iter().enumerate() {
            text.push_str(&format!("[[node]]\nname = \"n{position}\"\n"));
            for (index, memory) in gpus.iter().enumerate() {
                // Minor numbers that are not the index, as after a card was moved.
                let minor = gpus.len() - 1 - index;
                text.push_str(&format!("[[node.gpu]]\nmodel = \"Tesla T4\"\nmemory_mib = {memory}\nminor = {minor}\n"));
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
