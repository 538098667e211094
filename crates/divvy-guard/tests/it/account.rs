//! What one process is charged with.

use divvy_share::limits::ShareLimits;

use crate::sandbox::{CONTEXT, GPUS, MIB, OUT_OF_MEMORY, Sandbox, limits};

const PAGE: u64 = 2 * MIB;

#[test]
fn what_is_charged_is_what_the_driver_gave() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.ready();
    let check = |program: &crate::sandbox::Program, expected: u64| {
        assert_eq!((sandbox.charged(program), sandbox.driver_gave(0)), (expected, expected));
    };
    check(&program, CONTEXT);
    let large = program.alloc(3 * MIB);
    check(&program, CONTEXT + 2 * PAGE);
    // Small ones share a page.
    let small: Vec<u64> = (0..4).map(|_| program.alloc(512 << 10)).collect();
    check(&program, CONTEXT + 3 * PAGE);
    let [code, pitched, pitch] = program.call("pitch 5000 1000");
    assert_eq!((code, pitch), (0, 5120));
    check(&program, CONTEXT + 6 * PAGE);
    let [code, managed, _] = program.call(&format!("managed {PAGE}"));
    assert_eq!(code, 0);
    check(&program, CONTEXT + 7 * PAGE);
    for pointer in [&[large, pitched, managed][..], &small].concat() {
        assert_eq!(program.code(&format!("free {pointer}")), 0);
    }
    check(&program, CONTEXT);
    assert_eq!(program.code("release 0"), 0);
    check(&program, 0);
}

/// The heap and the buffer of printf of kernels, and a stack for each of the 108 x 2048 threads that can run at the same time.
/// A limit that takes too much memory is refused.
#[test]
fn a_contexts_limits_are_charged_until_it_ends() {
    const THREADS: u64 = 108 * 2048;
    let sandbox = Sandbox::with_share(64 << 30, 4096 * MIB);
    let mut program = sandbox.ready();
    let check = |program: &crate::sandbox::Program, expected: u64| {
        assert_eq!(
            (sandbox.charged(program), sandbox.driver_gave(0)),
            (CONTEXT + expected, CONTEXT + expected)
        );
    };
    for (which, usual, value, takes) in [
        (2, 8 * MIB, 1032 * MIB, 1024 * MIB),
        (1, MIB, 17 * MIB, 16 * MIB),
        (0, 1024, 9216, THREADS * 8192),
    ] {
        assert_eq!(program.code(&format!("limit {which} {usual}")), 0);
        check(&program, 0);
        assert_eq!(program.code(&format!("limit {which} {value}")), 0);
        check(&program, takes);
        assert_eq!(
            program.code(&format!("limit {which} {}", value * 1000)),
            OUT_OF_MEMORY,
            "{which}"
        );
        check(&program, takes);
        assert_eq!(program.code(&format!("limit {which} {}", usual / 2)), 0);
        check(&program, 0);
    }
    // Not one that takes memory; the driver knows it or not.
    assert_eq!(program.code("limit 9 1"), 215);
    let [code, context, _] = program.call("context 0");
    assert_eq!((code, program.code(&format!("limit 2 {}", 108 * MIB))), (0, 0));
    check(&program, CONTEXT + 100 * MIB);
    assert_eq!(program.code(&format!("destroy {context}")), 0);
    check(&program, 0);
    assert_eq!(program.code("retain 0"), 0);
    assert_eq!(program.code(&format!("limit 2 {}", 108 * MIB)), 0);
    assert_eq!(program.code("reset 0"), 0);
    assert_eq!((sandbox.charged(&program), sandbox.driver_gave(0)), (0, 0));
}

#[test]
fn the_share_ends_where_it_ends() {
    // The GPU has more, so only the guard refuses.
    let sandbox = Sandbox::with_share(8192 * MIB, CONTEXT + 10 * PAGE);
    let mut program = sandbox.ready();
    let ten = program.alloc(10 * PAGE);
    for call in [
        "alloc 1",
        "managed 1048576",
        "pitch 1 1",
        "context 0",
        "alloc 18446744073709551615",
        "pitch 18446744073709551615 2",
    ] {
        assert_eq!(program.code(call), OUT_OF_MEMORY, "{call}");
    }
    assert_eq!(sandbox.refusals(), [""; 0], "the driver was not asked");
    assert_eq!(program.code(&format!("free {ten}")), 0);
    program.alloc(9 * PAGE);
    program.alloc(MIB);
    assert_eq!(program.code("alloc 1"), OUT_OF_MEMORY);
    assert_eq!(sandbox.slots()[0].denied, 7);
    // Whole pages and a context, and what no GPU has counts as much as the largest one.
    assert_eq!(sandbox.totals().denied_bytes, Some(4 * PAGE + CONTEXT + (2 << 40)));
    assert_eq!(sandbox.slots()[0].peak, CONTEXT + 10 * PAGE);
}

#[test]
fn what_the_driver_refuses_is_not_charged() {
    // The share is larger than the GPU.
    let sandbox = Sandbox::with_share(1024 * MIB, 8192 * MIB);
    let mut program = sandbox.ready();
    for (call, code) in [
        ("alloc 4294967296", 2),
        ("alloc 0", 1),
        ("alloc-null 1048576", 1),
        ("alloc-null 1", 1),
        ("managed 0", 1),
        ("free 12345", 1),
        ("destroy 12345", 201),
    ] {
        assert_eq!(program.code(call), code, "{call}");
        assert_eq!(sandbox.charged(&program), CONTEXT, "{call}");
    }
}

#[test]
fn what_the_driver_does_not_free_stays_charged_until_it_does() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.start_with(&[(
        "DIVVY_CUDA_SIM_FAIL",
        "cuMemFree_v2:1=999,cuMemFree_v2:3=999,cuCtxDestroy_v2:1=999",
    )]);
    assert_eq!((program.code("init"), program.code("retain 0")), (0, 0));
    // An allocation with its own page, one that shares a page, and a context.
    for size in [PAGE, 1000] {
        let memory = program.alloc(size);
        assert_eq!(program.code(&format!("free {memory}")), 999);
        assert_eq!(
            (sandbox.charged(&program), sandbox.driver_gave(0)),
            (CONTEXT + PAGE, CONTEXT + PAGE),
            "{size}"
        );
        assert_eq!(program.code(&format!("free {memory}")), 0);
        assert_eq!(
            (sandbox.charged(&program), sandbox.driver_gave(0)),
            (CONTEXT, CONTEXT),
            "{size}"
        );
    }
    let [_, context, _] = program.call("context 0");
    assert_eq!(program.code(&format!("destroy {context}")), 999);
    assert_eq!(sandbox.charged(&program), 2 * CONTEXT);
    assert_eq!(program.code(&format!("destroy {context}")), 0);
    assert_eq!((sandbox.charged(&program), sandbox.driver_gave(0)), (CONTEXT, CONTEXT));
}

#[test]
fn memory_freed_twice_is_given_back_once() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.ready();
    program.alloc(PAGE);
    let twice = program.alloc(PAGE);
    assert_eq!(program.code(&format!("free {twice}")), 0);
    assert_ne!(program.code(&format!("free {twice}")), 0);
    assert_eq!(sandbox.charged(&program), CONTEXT + PAGE);
}

/// The page that a small allocation is in stays, however many others that were in it are gone.
#[test]
fn one_small_allocation_keeps_its_page() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.ready();
    let small: Vec<u64> = (0..12).map(|_| program.alloc(512 << 10)).collect();
    assert_eq!(
        (sandbox.charged(&program), sandbox.driver_gave(0)),
        (CONTEXT + 3 * PAGE, CONTEXT + 3 * PAGE)
    );
    for (index, pointer) in small.iter().enumerate() {
        if index % 4 != 0 {
            assert_eq!(program.code(&format!("free {pointer}")), 0);
        }
    }
    assert_eq!(
        (sandbox.charged(&program), sandbox.driver_gave(0)),
        (CONTEXT + 3 * PAGE, CONTEXT + 3 * PAGE)
    );
    for pointer in small.iter().step_by(4) {
        assert_eq!(program.code(&format!("free {pointer}")), 0);
    }
    assert_eq!((sandbox.charged(&program), sandbox.driver_gave(0)), (CONTEXT, CONTEXT));
}

#[test]
fn memory_dies_with_its_context() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.ready();
    program.alloc(PAGE);
    let [code, context, _] = program.call("context 0");
    assert_eq!(code, 0);
    // More than the first table of the guard has room for.
    for _ in 0..1000 {
        program.alloc(MIB);
    }
    assert_eq!(sandbox.charged(&program), 2 * CONTEXT + PAGE + 1000 * PAGE);
    assert_eq!(program.code(&format!("destroy {context}")), 0);
    assert_eq!(
        (sandbox.charged(&program), sandbox.driver_gave(0)),
        (CONTEXT + PAGE, CONTEXT + PAGE)
    );
    assert_eq!(program.code("reset 0"), 0);
    assert_eq!((sandbox.charged(&program), sandbox.driver_gave(0)), (0, 0));
}

#[test]
fn memory_of_another_context_outlives_the_primary_one() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.ready();
    program.alloc(PAGE);
    let [_, context, _] = program.call("context 0");
    program.alloc(1000);
    assert_eq!(program.code("reset 0"), 0);
    assert_eq!(
        (sandbox.charged(&program), sandbox.driver_gave(0)),
        (CONTEXT + PAGE, CONTEXT + PAGE)
    );
    assert_eq!(program.code(&format!("destroy {context}")), 0);
    assert_eq!((sandbox.charged(&program), sandbox.driver_gave(0)), (0, 0));
}

/// CUDA 12.4 (`cuGreenCtxCreate`): "This API will retain the primary context".
#[test]
fn a_green_context_is_charged_with_the_primary_context() {
    let sandbox = Sandbox::with_share(8192 * MIB, CONTEXT + 2 * PAGE);
    let mut program = sandbox.start();
    assert_eq!(program.code("init"), 0);
    let greens = [0; 2].map(|_| {
        let [code, green, _] = program.call("green 0");
        assert_eq!(code, 0);
        green
    });
    assert_eq!((sandbox.charged(&program), sandbox.driver_gave(0)), (CONTEXT, CONTEXT));
    program.alloc(PAGE);
    program.alloc(1000);
    assert_eq!(program.call(&format!("alloc {PAGE}"))[0], OUT_OF_MEMORY);
    let everything = CONTEXT + 2 * PAGE;
    for green in greens {
        assert_eq!((sandbox.charged(&program), sandbox.driver_gave(0)), (everything, everything));
        assert_eq!(program.code(&format!("green-destroy {green}")), 0);
    }
    assert_eq!((sandbox.charged(&program), sandbox.driver_gave(0)), (0, 0));
    sandbox.change(&limits(CONTEXT - 1));
    assert_eq!(program.code("green 0"), OUT_OF_MEMORY);
}

#[test]
fn a_context_that_does_not_fit_is_refused_and_can_come_later() {
    let sandbox = Sandbox::with_share(8192 * MIB, CONTEXT - 1);
    let mut program = sandbox.start();
    assert_eq!(program.code("init"), 0);
    assert_eq!(program.code("retain 0"), OUT_OF_MEMORY);
    sandbox.change(&limits(CONTEXT));
    assert_eq!(program.code("retain 0"), 0);
    // The context is there, so it takes nothing once more.
    assert_eq!(program.code("retain 0"), 0);
    assert_eq!(sandbox.charged(&program), CONTEXT);
    assert_eq!(program.code("release 0"), 0);
    assert_eq!(sandbox.charged(&program), CONTEXT);
}

/// The agent learns what a context takes while the pod runs. The first process here makes no call meanwhile.
#[test]
fn a_contexts_charge_changes_for_all_processes_together() {
    const SHARE: u64 = 4096 * MIB;
    let sandbox = Sandbox::with_share(8192 * MIB, SHARE);
    let idle = sandbox.ready();
    let mut program = sandbox.ready();
    program.alloc(PAGE);
    for context in [CONTEXT, CONTEXT / 4, 0, 3 * CONTEXT, CONTEXT / 4 - 1] {
        sandbox.change(&ShareLimits {
            context,
            ..limits(SHARE)
        });
        let charged = 2 * context.next_multiple_of(PAGE) + PAGE;
        assert_eq!(program.call("info"), [0, SHARE - charged, SHARE]);
        assert_eq!(program.call(&format!("alloc {}", SHARE - charged + 1))[0], OUT_OF_MEMORY);
    }
    drop(idle);
    assert_eq!(program.code("reset 0"), 0);
    assert_eq!(sandbox.charged(&program), 0, "nothing is left of what was charged before");
}

#[test]
fn a_gpu_without_a_share_gives_nothing() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.start();
    assert_eq!(program.code("init"), 0);
    assert_eq!(program.code("retain 1"), OUT_OF_MEMORY);
    assert_eq!(program.call("total 1")[..2], [0, 0]);
    assert_eq!(program.code("retain 0"), 0);
    assert!(!sandbox.path(GPUS[1]).exists());
}

/// The order in which a program sees the GPUs is its own; the share is the GPU's.
#[test]
fn a_share_belongs_to_a_gpu_and_not_to_its_number() {
    let sandbox = Sandbox::new(8192 * MIB);
    sandbox.give(1, &limits(4096 * MIB));
    let mut program = sandbox.start();
    assert_eq!(program.code("init"), 0);
    assert_eq!(program.call("total 0")[1], 0);
    assert_eq!(program.call("total 1")[1], 4096 * MIB);
    assert_eq!(program.code("retain 1"), 0);
    program.alloc(PAGE);
    assert_eq!(sandbox.driver_gave(1), CONTEXT + PAGE);
}
