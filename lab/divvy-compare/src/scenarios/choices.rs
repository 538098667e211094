//! Scenarios of the choice among GPUs.

use crate::scenario::{PluginScenario, SLICES, ScenarioMachine, ScenarioStep, machine, replica, scenario};

pub(super) fn choices() -> Vec<PluginScenario> {
    let dgx1 = ScenarioMachine {
        links: vec![
            (0, 1, 1),
            (0, 2, 1),
            (0, 3, 2),
            (0, 4, 2),
            (1, 2, 2),
            (1, 3, 1),
            (1, 5, 2),
            (2, 3, 2),
            (2, 6, 1),
            (3, 7, 1),
            (4, 5, 1),
            (4, 6, 1),
            (4, 7, 2),
            (5, 6, 2),
            (5, 7, 1),
            (6, 7, 2),
        ],
        near: Some((4, "node")),
        ..machine(8)
    };
    let pairs = ScenarioMachine {
        links: vec![(0, 2, 12), (1, 3, 12), (4, 5, 12), (6, 7, 12)],
        ..machine(8)
    };
    let bus = ScenarioMachine {
        near: Some((2, "single-switch")),
        ..machine(4)
    };
    let one_pair = ScenarioMachine {
        links: vec![(12, 13, 1)],
        ..machine(14)
    };
    let all: Vec<u32> = (0..14).collect();
    let replicas: Vec<String> = (0..2)
        .flat_map(|gpu| (0..3).map(move |number| replica(gpu, number)))
        .collect();
    let one = |must: &[String], size| ScenarioStep::Preferred {
        available: replicas.clone(),
        must: must.to_vec(),
        size,
    };
    let mut dgx = scenario("T12 the GPUs of a DGX-1", dgx1);
    for size in 1..9 {
        dgx = dgx.preferred(&all[..8], &[], size);
    }
    vec![
        dgx.preferred(&all[1..8], &[], 2)
            .preferred(&all[..8], &[5], 2)
            .preferred(&all[..8], &[0, 7], 4)
            .preferred(&all[..8], &[], 9)
            .preferred(&all[..8], &[], 0)
            .preferred(&all[1..8], &[0], 2),
        scenario("T13 pairs", pairs)
            .preferred(&all[..8], &[], 2)
            .preferred(&all[1..8], &[], 2)
            .preferred(&all[..8], &[5], 2)
            .preferred(&all[..8], &[], 3)
            .preferred(&all[..8], &[0, 7], 4),
        scenario("T14 the bus", bus)
            .preferred(&all[..4], &[], 2)
            .preferred(&all[1..4], &[], 2),
        scenario("T15 fourteen GPUs", one_pair).preferred(&all, &[], 2),
        scenario("T17 replicas", machine(2))
            .config(SLICES)
            .step(one(&[], 2))
            .step(one(&[], 4))
            .step(one(&[replica(0, 0)], 2))
            .step(one(&[], 7)),
    ]
}
