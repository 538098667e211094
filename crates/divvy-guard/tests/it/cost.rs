//! What the guard adds to the driver's functions, in instructions and system calls ([`crate::steps`]). The numbers are upper bounds, with room for a few handles that
//! have the same place in the table of allocations.

use std::collections::BTreeMap;

use divvy_share::limits::{ComputeAccount, ShareLimits, WHOLE};
use nix::libc;

use crate::sandbox::{MIB, Program, Sandbox, limits};
use crate::steps::{Counter, Steps};

/// A process of a pod with a limit of compute time, which it has not used up. It has made its context.
struct Bed {
    program: Program,
    counter: Counter,
    /// What was done for the context.
    start: Steps,
    _sandbox: Sandbox,
}

impl Bed {
    fn new(gpus: usize) -> Bed {
        let sandbox = Sandbox::new(8192 * MIB);
        let account = ComputeAccount {
            balance: i64::MAX,
            at: u64::MAX,
            launches: u64::MAX,
            launch_ns: 1,
        };
        for gpu in 0..gpus {
            let limits = ShareLimits {
                rate: WHOLE / 2,
                account,
                ..limits(4096 * MIB)
            };
            sandbox.give(gpu, &limits);
        }
        let sandbox = if gpus == 1 { sandbox.with_one_gpu() } else { sandbox };
        let mut program = sandbox.start();
        assert_eq!(program.code("init"), 0);
        let mut counter = Counter::of(&mut program, &sandbox);
        let (start, answer) = counter.count(&mut program, "retain 0");
        assert_eq!(answer[0], 0);
        Bed {
            program,
            counter,
            start,
            _sandbox: sandbox,
        }
    }

    fn count(&mut self, request: &str) -> (Steps, u64) {
        let (steps, [code, value, _]) = self.counter.count(&mut self.program, request);
        assert_eq!(code, 0, "{request}");
        (steps, value)
    }
}

/// What may be added to a call of the driver, which counts as one call.
#[derive(Debug)]
struct Most {
    instructions: u64,
    locked: u64,
    driver_calls: u64,
    other_calls: u64,
}

#[track_caller]
fn assert_costs(what: &str, steps: &Steps, most: &Most) {
    let within = steps.instructions <= most.instructions
        && steps.locked <= most.locked
        && steps.driver_calls <= most.driver_calls
        && steps.other_calls <= most.other_calls;
    assert!(within && steps.instructions > 0, "{what}: {steps:?}, of {most:?}");
    assert_eq!(steps.system_calls, BTreeMap::new(), "{what}");
}

/// The limits and the clock are read before every 17th launch, and if there are several GPUs, the driver is asked then for the current one. The limits of
/// other GPUs are read if the process has contexts there.
/// Most launches ask the driver no question.
#[test]
fn an_allowed_launch_takes_few_instructions() {
    for (gpus, used, instructions, locked, driver_calls) in [(1, 1, 890, 4, 1), (2, 1, 1000, 6, 2), (2, 2, 1800, 6, 2)] {
        let mut bed = Bed::new(gpus);
        for gpu in (0..used).rev() {
            bed.count(&format!("retain {gpu}"));
        }
        let (_, kernel) = bed.count("kernel k_7ns");
        let launch = format!("launch cuLaunchKernel {kernel}");
        bed.count(&launch);
        let mut looks = 0;
        for _ in 0..32 {
            let (steps, _) = bed.count(&launch);
            let is_look = steps.instructions > 40;
            looks += u32::from(is_look);
            let most = if is_look {
                Most {
                    instructions,
                    locked,
                    driver_calls,
                    other_calls: 2 * used as u64,
                }
            } else {
                Most {
                    instructions: 40,
                    locked: 1,
                    driver_calls: 1,
                    other_calls: 0,
                }
            };
            assert_costs(&format!("a launch, with {gpus} GPUs of which {used} are used"), &steps, &most);
        }
        assert_eq!(looks, 2, "with {gpus} GPUs of which {used} are used");
    }
}

/// The driver is asked for the current context, with which the memory would end, and for the GPU only if there are several. Small memory counts in its page
/// until the driver has freed it, so the table of allocations is locked once more.
#[test]
fn an_allocation_takes_no_system_call() {
    for (gpus, driver_calls) in [(1, 2), (2, 3)] {
        let mut bed = Bed::new(gpus);
        for bytes in [4096, 2 * MIB] {
            // The first one makes the table of allocations, and finds the driver's functions.
            let (_, kept) = bed.count(&format!("alloc {bytes}"));
            let (allocated, pointer) = bed.count(&format!("alloc {bytes}"));
            bed.count(&format!("free {kept}"));
            let (freed, _) = bed.count(&format!("free {pointer}"));
            let (most, locked) = if bytes == 4096 { (840, 6) } else { (800, 8) };
            assert_costs(
                &format!("an allocation of {bytes} bytes, with {gpus} GPUs"),
                &allocated,
                &Most {
                    instructions: most,
                    locked,
                    driver_calls,
                    other_calls: 0,
                },
            );
            let (most, locked) = if bytes == 4096 { (470, 5) } else { (450, 3) };
            assert_costs(
                &format!("the end of {bytes} bytes"),
                &freed,
                &Most {
                    instructions: most,
                    locked,
                    driver_calls: 1,
                    other_calls: 0,
                },
            );
        }
    }
}

/// The file of usage is opened only if the slots of other processes count.
#[test]
fn a_question_how_much_memory_is_free_takes_no_system_call() {
    let mut bed = Bed::new(1);
    bed.count("info");
    let (steps, _) = bed.count("info");
    assert_costs(
        "cuMemGetInfo",
        &steps,
        &Most {
            instructions: 330,
            locked: 0,
            driver_calls: 1,
            other_calls: 0,
        },
    );
}

/// A program of CUDA's runtime library asks for hundreds of functions when it starts.
#[test]
fn functions_are_compared_only_with_their_own_forms() {
    let mut bed = Bed::new(1);
    // It finds cuGetProcAddress itself.
    bed.count("address cuMemAlloc 12000 0 0");
    for (name, other_calls) in [
        // One form, which is looked up in the driver.
        ("cuMemRelease", 1),
        ("cuMemRelease", 0),
        // Not a function of the guard.
        ("cuMemcpyDtoH", 0),
        ("cuCtxGetCurrent", 0),
    ] {
        let (steps, address) = bed.count(&format!("address {name} 12000 0 0"));
        assert_ne!(address, 0, "{name}");
        let most = Most {
            instructions: 700,
            locked: 0,
            driver_calls: 1,
            other_calls,
        };
        assert_costs(name, &steps, &most);
    }
}

/// The state, the two files, the slot, and its container.
#[test]
fn the_first_context_takes_16_system_calls() {
    let expected = [
        (libc::SYS_mmap, 3),
        (libc::SYS_madvise, 1),
        (libc::SYS_openat, 2),
        (libc::SYS_fstat, 2),
        (libc::SYS_close, 2),
        (libc::SYS_getpid, 1),
        (libc::SYS_newfstatat, 1),
        // Lock the slot for clearing, look whether it has an owner, own it, and unlock it.
        (libc::SYS_fcntl, 4),
    ];
    let bed = Bed::new(2);
    // Nothing is done for the other GPU.
    assert_eq!(
        bed.start.system_calls,
        BTreeMap::from(expected.map(|(call, count)| (call, count)))
    );
    assert_eq!(bed.start.system_calls.values().sum::<u64>(), 16);
    assert!(bed.start.instructions <= 5120, "{:?}", bed.start);
}
/// In each of them the driver is asked what pools and graphs have, if there are any.
#[test]
fn a_synchronization_looks_only_at_pools_and_graphs() {
    let mut bed = Bed::new(1);
    let most = |instructions, locked, driver_calls| Most {
        instructions,
        locked,
        driver_calls,
        other_calls: 0,
    };
    bed.count("sync");
    assert_costs("without pools", &bed.count("sync").0, &most(40, 0, 1));
    bed.count("async 1000000");
    bed.count("sync");
    let (before, _) = bed.count("sync");
    assert_costs("with a pool", &before, &most(1500, 16, 3));
    for _ in 0..300 {
        bed.program.alloc(4096);
    }
    assert_eq!(bed.count("sync").0, before);
    let (steps, _) = bed.count("async 1000000");
    assert_costs("an allocation from the pool", &steps, &most(1050, 16, 5));
}
