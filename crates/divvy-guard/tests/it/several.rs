//! Several processes of a pod, some of which are killed.

use crate::sandbox::{CONTEXT, MIB, OUT_OF_MEMORY, Sandbox, kill_and_wait, limits};

const PROCESSES: u64 = 6;

/// The GPU is as large as the share, so the driver refuses whatever the guard should have refused.
#[test]
fn parallel_processes_never_exceed_the_share() {
    let share = PROCESSES * CONTEXT + 400 * MIB;
    let sandbox = Sandbox::with_share(share, share);
    let mut programs: Vec<_> = (0..PROCESSES).map(|_| sandbox.ready()).collect();
    for (seed, program) in programs.iter_mut().enumerate() {
        program.send(&format!("storm {seed} 2000"));
    }
    for program in &mut programs {
        assert_eq!(program.answer().unwrap()[0], 0);
    }
    assert_eq!(sandbox.refusals(), [""; 0]);
    let charged: u64 = programs.iter().map(|program| sandbox.charged(program)).sum();
    assert_eq!(charged, sandbox.driver_gave(0));
    assert!(
        sandbox.slots().iter().any(|slot| slot.denied > 0),
        "the share was too large for this test"
    );
}

#[test]
fn threads_of_a_process_are_charged_together() {
    let share = CONTEXT + 100 * MIB;
    let sandbox = Sandbox::with_share(share, share);
    let mut program = sandbox.ready();
    // Large and small allocations; the small ones share pages.
    for largest in [40 * MIB, 64 << 10] {
        assert_eq!(program.code(&format!("threads 8 {largest}")), 0);
        assert_eq!((sandbox.charged(&program), sandbox.driver_gave(0)), (CONTEXT, CONTEXT));
    }
    assert_eq!(sandbox.refusals(), [""; 0]);
    assert!(sandbox.slots()[0].denied > 0, "the share was too large for this test");
}

/// The driver keeps a page until it has freed everything in the page.
#[test]
fn a_shared_page_is_charged_until_entirely_freed() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.start_with(&[("DIVVY_CUDA_SIM_HANG", "cuMemFree_v2:1")]);
    assert_eq!((program.code("init"), program.code("retain 0")), (0, 0));
    let (first, second) = (program.alloc(1024), program.alloc(1024));
    assert_eq!(program.code(&format!("free-apart {first}")), 0);
    sandbox.logged("cuMemFree_v2 600");
    assert_eq!(program.code(&format!("free {second}")), 0);
    let has = CONTEXT + 2 * MIB;
    assert_eq!((sandbox.charged(&program), sandbox.driver_gave(0)), (has, has));
    program.kill();
}

/// What is free in a pool can go to another thread before this one comes, so that the pool grows.
#[test]
fn threads_on_one_pool_never_exceed_the_share() {
    let share = CONTEXT + 64 * MIB;
    let sandbox = Sandbox::with_share(share, share);
    let mut program = sandbox.ready();
    assert_eq!(program.code(&format!("threads 8 {} 1", 20 * MIB)), 0);
    assert_eq!(program.code("sync"), 0);
    assert_eq!((sandbox.charged(&program), sandbox.driver_gave(0)), (CONTEXT, CONTEXT));
    assert_eq!(sandbox.refusals(), [""; 0]);
    assert!(sandbox.slots()[0].denied > 0, "the share was too large for this test");
}

/// If the share is too small for the context, all threads are refused together.
#[test]
fn threads_making_one_context_are_charged_once() {
    let sandbox = Sandbox::with_share(8192 * MIB, CONTEXT - 1);
    let mut program = sandbox.start();
    assert_eq!(program.code("init"), 0);
    assert_eq!(program.call("retain-threads 8 500"), [0, 0, 0]);
    assert_eq!(sandbox.driver_gave(0), 0);
    sandbox.change(&limits(CONTEXT));
    assert_eq!(program.call("retain-threads 8 500"), [0, 4000, 0]);
    assert_eq!((sandbox.charged(&program), sandbox.driver_gave(0)), (CONTEXT, CONTEXT));
}

/// Four processes are killed in each round. `DIVVY_GUARD_ROUNDS=20000` takes about ten minutes.
#[test]
fn what_killed_processes_had_is_free_at_once() {
    let rounds = std::env::var("DIVVY_GUARD_ROUNDS").map_or(30, |rounds| rounds.parse().unwrap());
    let share = 4 * CONTEXT + 400 * MIB;
    let sandbox = Sandbox::with_share(share, share);
    for round in 0..rounds {
        let mut programs: Vec<_> = (0..4).map(|_| sandbox.ready()).collect();
        for (index, program) in programs.iter_mut().enumerate() {
            program.send(&format!("storm {} 1000000", round * 4 + index as u64));
        }
        // At a moment that depends on how far the others are: the kills fall into all parts of the protocol.
        while sandbox.slots().iter().map(|slot| slot.denied).sum::<u64>() < round % 50 {
            std::hint::spin_loop();
        }
        for program in programs {
            program.kill();
        }
        let mut next = sandbox.ready();
        let all = next.alloc(share - CONTEXT);
        assert_eq!(next.code("alloc 1"), OUT_OF_MEMORY);
        assert_eq!(next.code(&format!("free {all}")), 0);
        assert_eq!((sandbox.charged(&next), sandbox.driver_gave(0)), (CONTEXT, CONTEXT));
    }
    assert_eq!(sandbox.refusals(), [""; 0]);
}

/// The driver keeps a process's memory while a child has its descriptors.
#[test]
fn a_child_keeps_its_parents_slot_until_it_ends() {
    let sandbox = Sandbox::with_share(8192 * MIB, 2 * CONTEXT + 100 * MIB);
    let mut parent = sandbox.ready();
    parent.alloc(60 * MIB);
    let [child, ..] = parent.call("fork");
    parent.kill();
    let mut other = sandbox.ready();
    assert_eq!(other.code(&format!("alloc {}", 60 * MIB)), OUT_OF_MEMORY);
    assert_eq!(sandbox.driver_gave(0), 2 * CONTEXT + 60 * MIB);
    kill_and_wait(child);
    other.alloc(60 * MIB);
}

#[test]
fn a_child_does_not_write_into_its_parents_slot() {
    let sandbox = Sandbox::with_share(8192 * MIB, 2 * CONTEXT + 100 * MIB);
    let mut parent = sandbox.ready();
    parent.alloc(10 * MIB);
    // The child's memory is gone with it, also if it got some.
    parent.call(&format!("fork-alloc {}", 20 * MIB));
    assert_eq!(sandbox.charged(&parent), CONTEXT + 10 * MIB);
    assert_eq!(parent.code(&format!("alloc {}", 20 * MIB)), 0);
    assert_eq!(sandbox.charged(&parent), CONTEXT + 30 * MIB);
}

#[test]
fn more_processes_than_slots_are_refused_and_counted() {
    let sandbox = Sandbox::with_share(400_000 * MIB, 400_000 * MIB);
    let programs: Vec<_> = (0..256).map(|_| sandbox.ready()).collect();
    let mut one_more = sandbox.start();
    assert_eq!((one_more.code("init"), one_more.code("retain 0")), (0, OUT_OF_MEMORY));
    assert_eq!(sandbox.totals().crowded, 1);
    drop(programs);
    assert_eq!(one_more.code("retain 0"), 0);
}
