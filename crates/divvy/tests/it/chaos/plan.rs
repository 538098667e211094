//! What a seed gives a sequence at its start: the machines; and the pods' shapes.

use divvy_testbed::builders::{PodBuilder, pod};
use divvy_testkit::dice::Dice;

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

    pub(super) fn draw(dice: &mut Dice) -> Shape {
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

#[derive(Debug)]
pub(super) struct Plan {
    /// The memory of each GPU in MiB, by node.
    pub(super) nodes: Vec<Vec<u64>>,
    /// Whether the kubelets have the bugs of Kubernetes 1.36.
    pub(super) kubelet_bugs: bool,
}

impl Plan {
    pub(super) fn draw(dice: &mut Dice) -> Plan {
        let nodes = (0..2)
            .map(|_| {
                (0..dice.between(1, 3))
                    .map(|_| dice.one_of(&[4096, 6144, 8192, 11264, 15109, 16384]))
                    .collect()
            })
            .collect();
        let kubelet_bugs = dice.percent(50);
        Plan { nodes, kubelet_bugs }
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
