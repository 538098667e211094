//! Threads, blocks, barriers, and time.

use divvy_ptx::{KernelFault, KernelLaunch, ThreadOrder};

use crate::memory::{SMOKE, U32, U64, Window, launch, module};

const AT: u64 = 0x1000;

const HEAD: &str = ".version 6.0 .target sm_30 .address_size 64 .entry k(.param .u64 p) {
    .reg .pred %q; .reg .b32 %a, %b, %c; .reg .b64 %at, %offset; .shared .align 4 .b8 row[256];
    ld.param.u64 %at, [p];";

#[test]
fn each_thread_knows_where_it_is() {
    let text = format!(
        "{HEAD}
    mov.u32 %a, %nctaid.x; mov.u32 %b, %ctaid.y; mov.u32 %c, %ctaid.x; mad.lo.u32 %a, %a, %b, %c;
    mov.u32 %b, %ntid.x; mov.u32 %c, %ntid.y; mul.lo.u32 %c, %b, %c; mul.lo.u32 %a, %a, %c;
    mov.u32 %c, %tid.y; mad.lo.u32 %a, %c, %b, %a; mov.u32 %c, %tid.x; add.u32 %a, %a, %c;
    mul.wide.u32 %offset, %a, 4; add.u64 %at, %at, %offset;
    mov.u32 %c, %laneid; shl.b32 %c, %c, 16; add.u32 %a, %a, %c;
    mov.u32 %c, %warpid; shl.b32 %c, %c, 24; add.u32 %a, %a, %c;
    st.global.u32 [%at], %a; ret; }}"
    );
    let module = module(&text);
    let kernel = module.kernel("k").expect("it");
    let mut memory = Window::new(AT, 4 * 3 * 2 * 40);
    kernel
        .run(
            &launch(kernel, [3, 2], [8, 5], &[U64(AT)], ThreadOrder::Backward),
            &mut memory,
        )
        .expect("it runs");
    let expected: Vec<u32> = (0..240)
        .map(|index| index + ((index % 40 % 32) << 16) + ((index % 40 / 32) << 24))
        .collect();
    assert_eq!(memory.words(AT, 240), expected);
}

/// Each thread reads what its neighbor wrote.
#[test]
fn a_missing_barrier_gives_other_results_in_one_of_the_orders() {
    let text = |barrier: &str| {
        format!(
            "{HEAD}
    mov.u32 %a, %tid.x; shl.b32 %b, %a, 2; mov.u32 %c, row; add.u32 %c, %c, %b;
    st.shared.u32 [%c], %a;
    {barrier}
    add.u32 %b, %b, 4; and.b32 %b, %b, 255; mov.u32 %c, row; add.u32 %c, %c, %b;
    ld.shared.u32 %b, [%c];
    mul.wide.u32 %offset, %a, 4; add.u64 %at, %at, %offset; st.global.u32 [%at], %b; ret; }}"
        )
    };
    let run = |text: &str, order| {
        let module = module(text);
        let kernel = module.kernel("k").expect("it");
        let mut memory = Window::new(AT, 256);
        kernel
            .run(&launch(kernel, [1, 1], [64, 1], &[U64(AT)], order), &mut memory)
            .expect("it runs");
        memory.words(AT, 64)
    };
    let right: Vec<u32> = (0..64).map(|thread| (thread + 1) % 64).collect();
    let with = text("bar.sync 0;");
    assert_eq!(
        (run(&with, ThreadOrder::Forward), run(&with, ThreadOrder::Backward)),
        (right.clone(), right.clone())
    );
    let without = text("");
    // Forward, only the last thread reads what another one has written before. Backward, it is the only one that does not, but gets the same by luck.
    let mut forward = vec![0x5a5a_5a5a; 64];
    forward[63] = 0;
    assert_eq!(
        (run(&without, ThreadOrder::Forward), run(&without, ThreadOrder::Backward)),
        (forward, right)
    );
}

#[test]
fn threads_that_have_ended_do_not_hold_up_a_barrier() {
    let text = format!(
        "{HEAD}
    mov.u32 %a, %tid.x; setp.ge.u32 %q, %a, 2; @%q ret; bar.sync 0; red.global.add.u32 [%at], 1; ret; }}"
    );
    let module = module(&text);
    let kernel = module.kernel("k").expect("it");
    let mut memory = Window::new(AT, 4);
    memory.put(AT, &[0; 4]);
    kernel
        .run(
            &launch(kernel, [1, 1], [64, 1], &[U64(AT)], ThreadOrder::Forward),
            &mut memory,
        )
        .expect("it ends");
    assert_eq!(memory.words(AT, 1), [2]);
}

#[test]
fn a_multiplication_needs_the_whole_warp() {
    let text = ".version 7.0 .target sm_80 .address_size 64 .entry k(.param .u32 lanes) {
    .reg .pred %q; .reg .b32 %a, %n; .reg .f32 %c;
    ld.param.u32 %n, [lanes]; mov.u32 %a, %tid.x; setp.ge.u32 %q, %a, %n; @%q ret;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%c, %c, %c, %c}, {%a, %a, %a, %a}, {%a, %a}, {%c, %c, %c, %c};
    ret; }";
    let module = module(text);
    let kernel = module.kernel("k").expect("it");
    let run = |threads, lanes| {
        let launched = launch(kernel, [1, 1], [threads, 1], &[U32(lanes)], ThreadOrder::Forward);
        kernel.run(&launched, &mut Window::new(AT, 0)).map(drop)
    };
    assert_eq!(run(64, 64), Ok(()));
    for (threads, lanes) in [(64, 40), (16, 16)] {
        assert_eq!(
            run(threads, lanes),
            Err(KernelFault::Diverged { line: 4 }),
            "{threads} {lanes}"
        );
    }
}

#[test]
fn time_passes_only_for_a_kernel_that_looks_at_it() {
    let module = module(SMOKE);
    let kernel = module.kernel("spin").expect("it");
    let spin = |nanoseconds: u64, limit: u64| {
        let launched = KernelLaunch {
            limit,
            ..launch(kernel, [2, 1], [32, 1], &[U64(nanoseconds)], ThreadOrder::Forward)
        };
        kernel.run(&launched, &mut Window::new(AT, 0))
    };
    let waited = spin(5_000_000, 100_000_000).expect("it ends").nanoseconds;
    assert!((5_000_000..5_010_000).contains(&waited), "{waited}");
    assert!(matches!(spin(u64::MAX, 1000), Err(KernelFault::Endless { .. })));
}

#[test]
fn a_launch_that_does_not_fit_is_refused() {
    let module = module(SMOKE);
    let kernel = module.kernel("spin").expect("it");
    let right = launch(kernel, [1, 1], [1, 1], &[U64(0)], ThreadOrder::Forward);
    let cases = [
        KernelLaunch {
            grid: [1, 0, 1],
            ..right.clone()
        },
        KernelLaunch {
            block: [1025, 1, 1],
            ..right.clone()
        },
        KernelLaunch {
            block: [0, 1, 1],
            ..right.clone()
        },
        KernelLaunch {
            block: [u32::MAX, u32::MAX, 2],
            ..right.clone()
        },
        KernelLaunch {
            parameters: vec![0; 4],
            ..right.clone()
        },
    ];
    assert!(kernel.run(&right, &mut Window::new(AT, 0)).is_ok());
    for launch in cases {
        assert_eq!(
            kernel.run(&launch, &mut Window::new(AT, 0)),
            Err(KernelFault::Launch),
            "{launch:?}"
        );
    }
}
