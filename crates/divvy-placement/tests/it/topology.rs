//! Which GPUs of a node work best together.

use divvy_model::{GpuLink, MiB};
use divvy_placement::{GpuCandidate, Topology};
use proptest::prelude::*;

/// A connection: the positions of the two GPUs, its kind, and its count.
type Connection = (usize, usize, &'static str, u32);

fn topology(gpus: usize, connections: &[Connection]) -> Topology {
    let uuid = |at: usize| format!("GPU-{at}");
    let mut links: Vec<(String, Vec<GpuLink>)> = (0..gpus).map(|at| (uuid(at), Vec::new())).collect();
    for (a, b, kind, count) in connections {
        // Only one GPU of a pair reports the connection.
        links[*a].1.push(GpuLink {
            peer: uuid(*b),
            kind: (*kind).to_owned().into(),
            count: *count,
        });
    }
    let gpus: Vec<(&str, &[GpuLink])> = links.iter().map(|(uuid, links)| (uuid.as_str(), links.as_slice())).collect();
    Topology::new(&gpus)
}

/// Return a machine with NVLinks between pairs, one kind of PCI connection within a socket, and another one across sockets. Each
/// socket has `per_socket` GPUs.
fn machine(gpus: usize, per_socket: usize, nvlinks: &[(usize, usize, u32)]) -> Topology {
    let mut connections: Vec<Connection> = nvlinks.iter().map(|(a, b, count)| (*a, *b, "nvlink", *count)).collect();
    for a in 0..gpus {
        for b in 0..a {
            let kind = if a / per_socket == b / per_socket { "node" } else { "system" };
            connections.push((a, b, kind, 0));
        }
    }
    topology(gpus, &connections)
}

/// Return NVIDIA's DGX-1 with eight V100: a cube of NVLinks, some of them double.
fn dgx1() -> Topology {
    let within = |first: usize| {
        let pairs = [(0, 1, 1), (0, 2, 1), (0, 3, 2), (1, 2, 2), (1, 3, 1), (2, 3, 2)];
        pairs.map(|(a, b, count)| (first + a, first + b, count))
    };
    let other = [(4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2)];
    let across = [(0, 4, 2), (1, 5, 2), (2, 6, 1), (3, 7, 1)];
    let nvlinks: Vec<_> = within(0).into_iter().chain(other).chain(across).collect();
    machine(8, 4, &nvlinks)
}

fn candidates(available: impl IntoIterator<Item = usize>, must: &[usize]) -> Vec<GpuCandidate> {
    let candidate = |position| GpuCandidate {
        position,
        free: MiB(1024),
        must: must.contains(&position),
    };
    available.into_iter().map(candidate).collect()
}

#[test]
fn gpus_of_one_xgmi_hive_are_chosen_together() {
    // Eight MI210 in two hives of four, whose GPUs alternate on the bus.
    let mut connections: Vec<Connection> = Vec::new();
    for a in 0..8 {
        for b in 0..a {
            if a % 2 == b % 2 {
                connections.push((a, b, "xgmi", 1));
            }
            connections.push((a, b, if a / 4 == b / 4 { "node" } else { "system" }, 0));
        }
    }
    let hives = topology(8, &connections);
    for (available, count, chosen) in [
        (vec![0, 1, 2, 3, 4, 5, 6, 7], 4, vec![0, 2, 4, 6]),
        (vec![1, 2, 3, 4], 2, vec![1, 3]),
        // What remains, 0 and 3, is on one processor.
        (vec![0, 1, 3, 5, 7], 3, vec![1, 5, 7]),
    ] {
        assert_eq!(
            hives.choose(&candidates(available.clone(), &[]), count),
            Some(chosen),
            "{available:?}"
        );
    }
    let board = topology(
        3,
        &[
            (0, 1, "same-board", 0),
            (0, 1, "xgmi", 1),
            (1, 2, "xgmi", 1),
            (0, 2, "xgmi", 1),
        ],
    );
    assert_eq!(
        board.choose(&candidates(0..3, &[]), 2),
        Some(vec![0, 1]),
        "partitions of one GPU are closest"
    );
}

#[test]
fn right_answers_of_nvidias_plugin_are_ours_too() {
    let dgx1 = dgx1();
    let pairs = machine(8, 4, &[(0, 2, 12), (1, 3, 12), (4, 5, 12), (6, 7, 12)]);
    let close = |a, b| (a, b, "single-switch", 0);
    let far = |a, b| (a, b, "system", 0);
    let bus = topology(4, &[close(0, 1), close(2, 3), far(0, 2), far(0, 3), far(1, 2), far(1, 3)]);
    // NVIDIA's plugin takes 0 and 1 here, because it overwrites its best division.
    let one_pair = machine(14, 7, &[(12, 13, 1)]);
    let seven_pairs: Vec<_> = (0..7).map(|pair| (2 * pair, 2 * pair + 1, 4)).collect();
    let seven_pairs = machine(14, 7, &seven_pairs);
    let check = |topology: &Topology, available: std::ops::Range<usize>, must: &[usize], count: usize, expected: &[usize]| {
        let chosen = topology.choose(&candidates(available.clone(), must), count);
        assert_eq!(chosen.as_deref(), Some(expected), "{count} of {available:?} with {must:?}");
    };
    check(&dgx1, 0..8, &[], 1, &[0]);
    check(&dgx1, 0..8, &[], 2, &[0, 3]);
    check(&dgx1, 0..8, &[], 3, &[0, 2, 3]);
    check(&dgx1, 0..8, &[], 4, &[0, 1, 2, 3]);
    check(&dgx1, 0..8, &[], 5, &[0, 1, 2, 3, 4]);
    check(&dgx1, 0..8, &[], 6, &[0, 1, 2, 3, 4, 5]);
    check(&dgx1, 0..8, &[], 7, &[0, 1, 2, 3, 4, 5, 6]);
    check(&dgx1, 0..8, &[], 8, &[0, 1, 2, 3, 4, 5, 6, 7]);
    check(&dgx1, 1..8, &[], 2, &[1, 2]);
    check(&dgx1, 0..8, &[5], 2, &[5, 6]);
    check(&dgx1, 0..8, &[0, 7], 4, &[0, 4, 6, 7]);
    check(&pairs, 0..8, &[], 2, &[0, 2]);
    check(&pairs, 1..8, &[], 2, &[1, 3]);
    check(&pairs, 0..8, &[5], 2, &[4, 5]);
    check(&pairs, 0..8, &[], 3, &[0, 1, 2]);
    check(&pairs, 0..8, &[0, 7], 4, &[0, 2, 6, 7]);
    check(&bus, 0..4, &[], 2, &[0, 1]);
    check(&bus, 1..4, &[], 2, &[2, 3]);
    check(&one_pair, 0..14, &[], 2, &[12, 13]);
    check(&seven_pairs, 0..14, &[10], 2, &[10, 11]);
}

#[test]
fn there_is_no_answer_where_there_are_not_as_many() {
    let none = |available: std::ops::Range<usize>, must: &[usize], count| {
        assert_eq!(dgx1().choose(&candidates(available, must), count), None);
    };
    none(0..8, &[], 9);
    none(0..8, &[], 0);
    none(0..0, &[], 1);
    none(0..8, &[1, 2, 3], 2);
}

/// A pair of GPUs is worth nothing if neither GPU says anything about it.
#[test]
fn a_pair_is_worth_what_either_gpu_says() {
    let topology = topology(
        3,
        &[
            (0, 1, "nvlink", 4),
            (1, 0, "host-bridge", 0),
            (1, 0, "nvlink", 3),
            (0, 2, "telepathy", 9),
        ],
    );
    assert_eq!((topology.pair(0, 1), topology.pair(1, 0)), (430, 430));
    assert_eq!((topology.pair(0, 2), topology.pair(2, 1), topology.pair(7, 0)), (0, 0, 0));
    assert_eq!(topology.worth(&[2, 0, 1]), 430);
}

/// Of equal sets, the one with the least memory left wins if the other GPUs can still form sets of the same worth.
#[test]
fn equal_sets_are_ranked_by_the_memory_left() {
    let mut four = candidates(0..4, &[]);
    four[3].free = MiB(10);
    // Nothing is known about any pair.
    assert_eq!(Topology::default().choose(&four, 2), Some(vec![0, 3]));
    let close = |a, b| (a, b, "single-switch", 0);
    // A ring of four: if 0 and 1 are chosen, the others are a pair as well. 1 and 2 are worth the same and have less left.
    let ring = topology(4, &[close(0, 1), close(1, 2), close(2, 3), close(3, 0)]);
    four[1].free = MiB(100);
    four[2].free = MiB(100);
    four[3].free = MiB(1024);
    assert_eq!(ring.choose(&four, 2), Some(vec![1, 2]));
    // A path: choosing the middle would leave two unconnected ends.
    let path = topology(4, &[close(0, 1), close(1, 2), close(2, 3)]);
    assert_eq!(path.choose(&four, 2), Some(vec![0, 1]));
}

/// The machine has too many GPUs for a search through all sets.
#[test]
fn well_connected_sets_need_no_full_search() {
    let groups: Vec<_> = (0..32)
        .flat_map(|a| (0..a).filter(move |b| a / 4 == b / 4).map(move |b| (a, b, 6)))
        .collect();
    let machine = machine(32, 16, &groups);
    assert_eq!(machine.choose(&candidates(0..32, &[]), 4), Some(vec![0, 1, 2, 3]));
    assert_eq!(machine.choose(&candidates(0..32, &[17]), 4), Some(vec![16, 17, 18, 19]));
    // One GPU of the first group is not available, so whole groups are better.
    let chosen = machine.choose(&candidates(1..32, &[]), 8).expect("enough");
    assert_eq!(machine.worth(&chosen), 2 * 6 * 620 + 16 * 20);
    let mut one = candidates(0..32, &[]);
    one[20].free = MiB(3);
    assert_eq!(machine.choose(&one, 1), Some(vec![20]));
}

/// Return all sets of `count` of these GPUs.
fn sets(of: &[usize], count: usize) -> Vec<Vec<usize>> {
    match of.split_first() {
        _ if count == 0 => vec![Vec::new()],
        None => Vec::new(),
        Some((first, rest)) => {
            let with = sets(rest, count - 1).into_iter().map(|set| [vec![*first], set].concat());
            with.chain(sets(rest, count)).collect()
        }
    }
}

fn without(all: &[usize], set: &[usize]) -> Vec<usize> {
    all.iter().copied().filter(|at| !set.contains(at)).collect()
}

/// Return the most that these GPUs are worth when they are divided into sets of `count`, the last one smaller. All orders of
/// taking sets away are tried.
fn divided(topology: &Topology, rest: &[usize], count: usize, small: usize) -> u32 {
    if rest.is_empty() {
        return 0;
    }
    let of_size = |size: usize| {
        let parts = sets(rest, size).into_iter().filter(|part| part.contains(&rest[0]));
        let small = if size == count { small } else { 0 };
        parts.map(move |part| topology.worth(&part) + divided(topology, &without(rest, &part), count, small))
    };
    let full = (rest.len() >= count + small).then(|| of_size(count)).into_iter().flatten();
    let smaller = (small > 0).then(|| of_size(small)).into_iter().flatten();
    full.chain(smaller).max().unwrap_or(0)
}

proptest! {
    /// The pairs have few different worths, so that there are many ties.
    #[test]
    fn no_set_is_better_by_all_that_counts(
        gpus in 2_usize..9,
        count in 1_usize..9,
        nvlinks in proptest::collection::vec((0_usize..8, 0_usize..8, 0_u32..3), 0..20),
        left in proptest::collection::vec(0_u64..3, 8),
        must in 0_usize..16,
    ) {
        let nvlinks: Vec<_> = nvlinks.into_iter().filter(|(a, b, _)| a != b && *a.max(b) < gpus).collect();
        let topology = machine(gpus, 4, &nvlinks);
        let mut candidates = candidates(0..gpus, &[must]);
        candidates.iter_mut().for_each(|candidate| candidate.free = MiB(left[candidate.position]));
        let chosen = topology.choose(&candidates, count);
        let all: Vec<usize> = (0..gpus).collect();
        let best = sets(&all, count)
            .into_iter()
            .filter(|set| must >= gpus || set.contains(&must))
            .min_by_key(|set| {
                let rest = without(&all, set);
                let others = divided(&topology, &rest, count, rest.len() % count);
                let free: u64 = set.iter().map(|at| left[*at]).sum();
                (std::cmp::Reverse(topology.worth(set)), std::cmp::Reverse(others), free, set.clone())
            });
        prop_assert_eq!(&chosen, &best);
        // In any order of the candidates.
        candidates.reverse();
        prop_assert_eq!(topology.choose(&candidates, count), chosen);
    }

    /// The chosen GPUs include those that the request must have.
    #[test]
    fn a_large_machine_gives_all_gpus_asked_for(
        count in 1_usize..16,
        nvlinks in proptest::collection::vec((0_usize..20, 0_usize..20, 0_u32..5), 0..60),
        must in 0_usize..40,
    ) {
        let nvlinks: Vec<_> = nvlinks.into_iter().filter(|(a, b, _)| a != b).collect();
        let topology = machine(20, 10, &nvlinks);
        let mut all = candidates(0..20, &[must]);
        let chosen = topology.choose(&all, count).expect("there are enough");
        prop_assert_eq!(chosen.len(), count);
        prop_assert!(chosen.is_sorted_by(|a, b| a < b), "{:?}", chosen);
        prop_assert!(must >= 20 || chosen.contains(&must));
        // No exchange of one GPU improves the set.
        for out in chosen.iter().filter(|out| **out != must) {
            for other in without(&(0..20).collect::<Vec<_>>(), &chosen) {
                let set: Vec<usize> = chosen.iter().map(|at| if at == out { other } else { *at }).collect();
                prop_assert!(topology.worth(&set) <= topology.worth(&chosen));
            }
        }
        all.reverse();
        prop_assert_eq!(topology.choose(&all, count), Some(chosen));
    }
}
