//! Processes that use a GPU together, and how they end.

use proptest::prelude::*;

use crate::bed::{Bed, CONTEXT, MEMORY, MIB, Num, Out, PAGE, Process};

const OUT_OF_MEMORY: i32 = 2;
const NOT_INITIALIZED: i32 = 3;

#[test]
fn processes_that_fill_a_gpu_at_once_get_exactly_its_memory() {
    const PROCESSES: u64 = 6;
    let bed = Bed::new();
    let mut processes: Vec<Process> = (0..PROCESSES).map(|_| bed.user()).collect();
    let mut got = 0;
    // All of them have a call under way in each round.
    loop {
        for process in &mut processes {
            process.ask("cuMemAlloc_v2", &[Out, Num(PAGE)]);
        }
        let codes: Vec<i32> = processes.iter_mut().map(|process| process.answered().code).collect();
        assert!(codes.iter().all(|code| matches!(*code, 0 | OUT_OF_MEMORY)), "{codes:?}");
        let granted = codes.iter().filter(|code| **code == 0).count() as u64;
        got += granted;
        if granted == 0 {
            break;
        }
    }
    assert_eq!(got, (MEMORY - PROCESSES * CONTEXT) / PAGE);
    assert_eq!(bed.used(), MEMORY);
}

#[test]
fn only_one_process_gets_over_half_a_gpu() {
    const PROCESSES: u64 = 3;
    let bed = Bed::new();
    let mut processes: Vec<Process> = (0..PROCESSES).map(|_| bed.user()).collect();
    let free = MEMORY - PROCESSES * CONTEXT;
    let bytes = free / PAGE * PAGE - 40 * PAGE;
    for process in &mut processes {
        process.ask("contend", &[Num(bytes), Num(1000), Num(free - bytes)]);
    }
    let granted: Vec<u64> = processes.iter_mut().map(|process| process.answered().words[0]).collect();
    assert!(granted.iter().any(|granted| *granted > 0), "{granted:?}");
    assert_eq!(bed.used(), PROCESSES * CONTEXT);
}

/// The child keeps the memory of its parent in use after the parent has ended.
#[test]
fn a_forked_child_cannot_use_cuda() {
    let bed = Bed::new();
    let mut process = bed.user();
    process.ok("cuMemAlloc_v2", &[Out, Num(PAGE)]);
    process.ask("fork", &[]);
    let answer = process.answer();
    let words: Vec<i32> = answer.split(' ').map(|word| word.parse().expect("a number")).collect();
    assert_eq!(words[1..], [NOT_INITIALIZED, NOT_INITIALIZED]);
    assert_eq!(bed.used(), CONTEXT + PAGE, "once");
    process.kill();
    assert_eq!(bed.used(), CONTEXT + PAGE, "the child has the descriptors");
    // The child ends when its input ends, and its output ends with it.
    process.close();
    assert_eq!(bed.usage(0), []);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 20, ..ProptestConfig::default() })]

    /// Each number is a process of a storm, and after how many answers it is killed.
    #[test]
    fn a_process_that_is_killed_at_any_moment_leaves_nothing(ends in prop::collection::vec(0usize..60, 1..6)) {
        let bed = Bed::new();
        let mut storms: Vec<(Process, usize)> = ends.into_iter().map(|end| (bed.user(), end)).collect();
        for (process, end) in &mut storms {
            process.ask("storm", &[Num(3 * MIB + *end as u64)]);
        }
        for (process, end) in &mut storms {
            for _ in 0..*end {
                process.answer();
            }
            prop_assert!(bed.used() <= MEMORY);
            process.kill();
        }
        prop_assert_eq!(bed.usage(0), []);
        let mut next = bed.user();
        next.ok("cuMemAlloc_v2", &[Out, Num(MEMORY - CONTEXT)]);
    }
}
