//! Measures how long it takes to choose several of 16 GPUs: the slowest case found for each number of GPUs. The machines have
//! many sets of equal worth, because such machines are the hard ones.
//!
//! `cargo bench -p divvy-placement`

#![allow(clippy::print_stdout)]

use divvy_model::{GpuLink, LinkKind, MiB};
use divvy_placement::{GpuCandidate, Topology};
use divvy_testkit::dice::Dice;
use rustix::time::{ClockId, clock_gettime};

const GPUS: usize = 16;

/// Return the processor time of this thread in microseconds.
fn now() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

fn machine(nvlinks: impl Fn(usize, usize) -> u32) -> Topology {
    let uuids: Vec<String> = (0..GPUS).map(|at| format!("GPU-{at}")).collect();
    let links: Vec<Vec<GpuLink>> = (0..GPUS)
        .map(|a| {
            let others = (0..GPUS).filter(|b| *b != a);
            others
                .flat_map(|b| {
                    let bus = if a / 8 == b / 8 { LinkKind::Node } else { LinkKind::System };
                    let (low, high) = (a.min(b), a.max(b));
                    [(LinkKind::NvLink, nvlinks(low, high)), (bus, 0)].map(|(kind, count)| GpuLink {
                        peer: uuids[b].clone(),
                        kind,
                        count,
                    })
                })
                .collect()
        })
        .collect();
    let gpus: Vec<(&str, &[GpuLink])> = uuids
        .iter()
        .map(String::as_str)
        .zip(links.iter().map(Vec::as_slice))
        .collect();
    Topology::new(&gpus)
}

fn main() {
    let mut machines: Vec<(String, Topology)> = vec![
        ("no NVLink".to_owned(), machine(|_, _| 0)),
        ("all alike".to_owned(), machine(|_, _| 6)),
        ("pairs".to_owned(), machine(|a, b| if a / 2 == b / 2 { 4 } else { 0 })),
        ("all but pairs".to_owned(), machine(|a, b| u32::from(a / 2 != b / 2))),
        ("fours".to_owned(), machine(|a, b| u32::from(a / 4 == b / 4))),
        ("all but fours".to_owned(), machine(|a, b| u32::from(a / 4 != b / 4))),
        ("ring".to_owned(), machine(|a, b| u32::from(b - a == 1 || b - a == 15))),
        (
            "all but a ring".to_owned(),
            machine(|a, b| u32::from(b - a != 1 && b - a != 15)),
        ),
        ("cube".to_owned(), machine(|a, b| u32::from((a ^ b).count_ones() == 1))),
        (
            "all but a cube".to_owned(),
            machine(|a, b| u32::from((a ^ b).count_ones() != 1)),
        ),
        ("grid".to_owned(), machine(|a, b| u32::from(a / 4 == b / 4 || a % 4 == b % 4))),
    ];
    // A separate generator, so that the machines are the same every time.
    let mut dice = Dice::new(0);
    for number in 0..60 {
        let most = 2 + number % 3;
        let links: Vec<u32> = (0..GPUS * GPUS).map(|_| (dice.number() % most) as u32).collect();
        machines.push((format!("random {number}, below {most}"), machine(|a, b| links[a * GPUS + b])));
    }
    let candidates: Vec<GpuCandidate> = (0..GPUS)
        .map(|position| GpuCandidate {
            position,
            free: MiB(dice.number() % 4),
            must: false,
        })
        .collect();
    let positions: Vec<usize> = (0..GPUS).collect();
    println!("{:>5} {:>10}  choose (microseconds)", "GPUs", "most");
    slowest(&machines, |topology, count| topology.choose(&candidates, count));
    println!("{:>5} {:>10}  choose_divided (microseconds)", "GPUs", "most");
    slowest(&machines, |topology, count| topology.choose_divided(&positions, &[], count));
    println!("{:>5} {:>10}  choose_divided with GPU 9 (microseconds)", "GPUs", "most");
    slowest(&machines, |topology, count| topology.choose_divided(&positions, &[9], count));
}

/// Print the machine that takes the longest, for each number of GPUs.
fn slowest(machines: &[(String, Topology)], choose: impl Fn(&Topology, usize) -> Option<Vec<usize>>) {
    for count in 1..=GPUS {
        let worst = machines.iter().map(|(name, topology)| {
            // The least of three measurements, to exclude other work on the machine.
            let micros = (0..3).map(|_| {
                let started = now();
                std::hint::black_box(choose(topology, count));
                now() - started
            });
            (micros.fold(f64::MAX, f64::min), name)
        });
        if let Some((micros, name)) = worst.max_by(|a, b| a.0.total_cmp(&b.0)) {
            println!("{count:>5} {micros:>10.1}  {name}");
        }
    }
}
