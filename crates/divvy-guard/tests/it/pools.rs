//! Stream-ordered allocation.

use divvy_share::limits::ShareLimits;

use crate::sandbox::{CONTEXT, MIB, OUT_OF_MEMORY, Program, Sandbox, limits, ok};

const CHUNK: u64 = 32 * MIB;

fn check(sandbox: &Sandbox, program: &Program, bytes: u64) {
    let expected = CONTEXT + bytes;
    assert_eq!((sandbox.charged(program), sandbox.driver_gave(0)), (expected, expected));
}

#[test]
fn a_pool_is_charged_with_what_it_has_reserved() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.ready();
    let first = ok(&mut program, "async 1000");
    check(&sandbox, &program, CHUNK);
    // From the same chunk.
    let second = ok(&mut program, &format!("async-ptsz {}", 30 * MIB));
    check(&sandbox, &program, CHUNK);
    let third = ok(&mut program, &format!("async {}", 40 * MIB));
    check(&sandbox, &program, 3 * CHUNK);
    for pointer in [first, second, third] {
        ok(&mut program, &format!("async-free {pointer}"));
    }
    check(&sandbox, &program, 3 * CHUNK);
    for sync in ["sync", "sync-stream"] {
        let pointer = ok(&mut program, "async 1000");
        ok(&mut program, &format!("async-free {pointer}"));
        ok(&mut program, sync);
        check(&sandbox, &program, 0);
    }
    // Synchronous functions free what is of a pool, too.
    let pointer = ok(&mut program, "async 1000");
    ok(&mut program, &format!("free {pointer}"));
    ok(&mut program, "sync");
    check(&sandbox, &program, 0);
}

#[test]
fn a_pool_that_keeps_memory_can_give_it_out_again_at_the_limit() {
    let sandbox = Sandbox::with_share(8192 * MIB, CONTEXT + 4 * CHUNK);
    let mut program = sandbox.ready();
    let pool = ok(&mut program, "pool-of 0");
    ok(&mut program, &format!("pool-keep {pool} {}", u64::MAX / 2));
    let all = ok(&mut program, &format!("async {}", 4 * CHUNK));
    assert_eq!(program.code("async 1"), OUT_OF_MEMORY);
    assert_eq!(program.code("alloc 1"), OUT_OF_MEMORY);
    ok(&mut program, &format!("async-free {all}"));
    ok(&mut program, "sync");
    check(&sandbox, &program, 4 * CHUNK);
    let some = ok(&mut program, &format!("async {CHUNK}"));
    check(&sandbox, &program, 4 * CHUNK);
    ok(&mut program, &format!("pool-trim {pool} 0"));
    check(&sandbox, &program, CHUNK);
    ok(&mut program, &format!("alloc {}", 3 * CHUNK));
    assert_eq!(program.code(&format!("async {}", CHUNK + 1)), OUT_OF_MEMORY);
    ok(&mut program, &format!("async-free {some}"));
    // A request to a pool is decided twice, and counts once.
    assert_eq!(sandbox.slots()[0].denied, 3);
    assert_eq!(sandbox.totals().denied_bytes, Some(3 * CHUNK + 2 * MIB));
}

#[test]
fn a_pool_of_the_program_is_charged_until_it_is_destroyed() {
    let sandbox = Sandbox::with_share(8192 * MIB, CONTEXT + 2 * CHUNK);
    let mut program = sandbox.ready();
    let pool = ok(&mut program, "pool 0");
    check(&sandbox, &program, 0);
    let pointer = ok(&mut program, &format!("async-from {} {pool}", 40 * MIB));
    check(&sandbox, &program, 2 * CHUNK);
    assert_eq!(program.code(&format!("async-from {} {pool}", 40 * MIB)), OUT_OF_MEMORY);
    ok(&mut program, &format!("async-free {pointer}"));
    ok(&mut program, &format!("pool-destroy {pool}"));
    check(&sandbox, &program, 0);
    assert_ne!(program.code(&format!("pool-destroy {pool}")), 0);
    check(&sandbox, &program, 0);
}

/// RAPIDS allocates from such a pool. Managed memory counts as if all of it were on the GPU.
#[test]
fn pools_of_managed_memory_are_charged_or_refused() {
    const NOT_SUPPORTED: u64 = 801;
    // The location is none, the first GPU, or the host; 2 is CU_MEM_ALLOCATION_TYPE_MANAGED.
    for location in ["0 0", "1 0", "2 0"] {
        for call in [
            format!("pool-managed {location}"),
            format!("pool-default {location} 2"),
            format!("pool-current {location} 2"),
        ] {
            let sandbox = Sandbox::with_share(8192 * MIB, CONTEXT + 2 * CHUNK).with_driver("13.4");
            let mut program = sandbox.ready();
            let pool = ok(&mut program, &call);
            ok(&mut program, &format!("async-from {} {pool}", 40 * MIB));
            check(&sandbox, &program, 2 * CHUNK);
            assert_eq!(
                program.code(&format!("async-from {} {pool}", 40 * MIB)),
                OUT_OF_MEMORY,
                "{call}"
            );
            sandbox.change(&ShareLimits {
                refuse_managed: true,
                ..limits(8192 * MIB)
            });
            assert_eq!(program.code(&call), NOT_SUPPORTED, "{call}");
        }
    }
}

#[test]
fn the_default_pool_of_another_gpu_is_charged_to_that_gpu() {
    let sandbox = Sandbox::with_share(8192 * MIB, CONTEXT + CHUNK);
    sandbox.give(1, &limits(CONTEXT + CHUNK));
    let sandbox = sandbox.with_driver("13.4");
    for get in ["pool-of 1", "pool-default 1 1 1"] {
        let mut program = sandbox.start();
        assert_eq!(program.code("init"), 0);
        ok(&mut program, "retain 1");
        ok(&mut program, "retain 0");
        let pool = ok(&mut program, get);
        ok(&mut program, &format!("async-from {} {pool}", 20 * MIB));
        assert_eq!(sandbox.charged(&program), CONTEXT);
        assert_eq!(
            program.code(&format!("async-from {} {pool}", 20 * MIB)),
            OUT_OF_MEMORY,
            "{get}"
        );
    }
}
