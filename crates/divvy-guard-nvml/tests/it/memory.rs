//! How much memory programs see.

use divvy_share::limits::ShareLimits;

use crate::sandbox::{CONTEXT, FOREIGN, MIB, Program, Sandbox, Slot, limits};

const GPU: u64 = 8192 * MIB;
const SHARE: u64 = 4096 * MIB;
/// `nvmlMemory_v2`.
const VERSION: u64 = 40 | 2 << 24;

/// What both versions say: total, free, used of version 1, used of version 2, reserved.
fn seen(program: &mut Program, device: &str) -> [u64; 5] {
    let first = program.call(&format!("memory {device}"));
    let second = program.call(&format!("memory2 {device} {VERSION}"));
    assert_eq!((first[0], second[0]), (0, 0));
    assert_eq!(first[1..3], second[1..3], "total and free");
    assert_eq!(first[1], first[2] + first[3], "the total of version 1");
    assert_eq!(second[1], second[2] + second[3] + second[4], "the total of version 2");
    [first[1], first[2], first[3], second[3], second[4]]
}

#[test]
fn the_share_looks_like_the_gpu() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let mut watcher = sandbox.watcher();
    assert_eq!(seen(&mut watcher, "0"), [SHARE, SHARE, 0, 0, 0]);
    let mut first = sandbox.user(96 * MIB);
    let used = CONTEXT + 96 * MIB;
    for program in [&mut watcher, &mut first] {
        assert_eq!(seen(program, "0"), [SHARE, SHARE - used, used, used, 0]);
    }
    assert_eq!(first.call("info"), [0, SHARE - used, SHARE], "CUDA says the same");
    let _second = sandbox.user(200 * MIB);
    let used = used + CONTEXT + 200 * MIB;
    assert_eq!(seen(&mut watcher, "0"), [SHARE, SHARE - used, used, used, 0]);
    first.kill();
    let used = used - CONTEXT - 96 * MIB;
    assert_eq!(seen(&mut watcher, "0"), [SHARE, SHARE - used, used, used, 0]);
}

#[test]
fn memory_that_a_process_is_about_to_get_is_not_free() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let slot = Slot {
        pending: 30 * MIB,
        ..Slot::of(7, 50 * MIB)
    };
    let owner = sandbox.occupy(3, slot);
    let mut watcher = sandbox.watcher();
    assert_eq!(seen(&mut watcher, "0"), [SHARE, SHARE - 80 * MIB, 80 * MIB, 80 * MIB, 0]);
    drop(owner);
    assert_eq!(seen(&mut watcher, "0"), [SHARE, SHARE, 0, 0, 0]);
}

#[test]
fn what_the_agent_measured_besides_the_slots_is_used() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let mut user = sandbox.user(MIB);
    for (overhead, used) in [(100 * MIB, CONTEXT + 102 * MIB), (u64::MAX, SHARE)] {
        sandbox.change(&ShareLimits {
            overhead,
            ..limits(SHARE)
        });
        assert_eq!(seen(&mut user, "0"), [SHARE, SHARE - used, used, used, 0]);
        assert_eq!(user.call("info"), [0, SHARE - used, SHARE]);
    }
}

#[test]
fn limits_below_use_leave_nothing_free() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let mut user = sandbox.user(1024 * MIB);
    sandbox.change(&limits(512 * MIB));
    assert_eq!(seen(&mut user, "0"), [512 * MIB, 0, 512 * MIB, 512 * MIB, 0]);
}

/// Another pod, or the driver itself, may have taken what the share promises. The numbers are then those of the driver.
#[test]
fn what_the_gpu_does_not_have_is_not_free() {
    let sandbox = Sandbox::with_share(GPU, GPU);
    let mut user = sandbox.user(100 * MIB);
    let own = CONTEXT + 100 * MIB;
    let free = GPU - FOREIGN - own;
    assert_eq!(seen(&mut user, "0"), [GPU, free, own + FOREIGN, own, FOREIGN]);
    assert_eq!(seen(&mut sandbox.plain(), "0")[..3], [GPU, free, own + FOREIGN]);
    // A share that is larger than the GPU.
    sandbox.change(&limits(2 * GPU));
    assert_eq!(seen(&mut user, "0"), [GPU, free, own + FOREIGN, own, FOREIGN]);
}

#[test]
fn errors_are_the_drivers() {
    let sandbox = Sandbox::with_share(GPU, SHARE);
    let mut program = sandbox.start();
    let mut plain = sandbox.plain();
    assert_eq!(plain.code("shutdown"), 0);
    let versions = [0, 1, 2, 40, 40 | 1 << 24, 40 | 3 << 24, 48 | 2 << 24, u64::from(u32::MAX)];
    let mut calls = vec!["memory null".to_owned(), format!("memory2 null {VERSION}")];
    calls.extend(["0", "1", "null"].map(|device| format!("null nvmlDeviceGetMemoryInfo {device}")));
    calls.extend(["0", "1", "null"].map(|device| format!("null nvmlDeviceGetMemoryInfo_v2 {device}")));
    calls.extend(versions.map(|version| format!("memory2 0 {version}")));
    calls.extend(["memory 0".to_owned(), format!("memory2 0 {VERSION}")]);
    // Before nvmlInit, after it, and after nvmlShutdown.
    for phase in ["init", "shutdown", "init"] {
        for call in &calls {
            let (ours, theirs) = (program.call(call), plain.call(call));
            assert_eq!(ours[0], theirs[0], "{call}");
            if ours[0] != 0 {
                assert_eq!(ours, theirs, "{call}: nothing is written");
            }
        }
        assert_eq!((program.code(phase), plain.code(phase)), (0, 0));
    }
}

/// A driver that takes any version of the structure.
#[test]
fn a_later_structure_is_left_as_the_driver_has_written_it() {
    let memory = format!(
        "int nvmlDeviceGetMemoryInfo_v2(void *device, unsigned long *memory) {{
            memory[1] = memory[3] = {GPU};
            memory[2] = memory[4] = 0;
            return 0;
        }}"
    );
    let sandbox = Sandbox::with_share(GPU, SHARE);
    sandbox.driver_with(&memory);
    let mut program = sandbox.watcher();
    assert_eq!(program.call(&format!("memory2 0 {VERSION}")), [0, SHARE, SHARE, 0, 0]);
    for later in [48 | 3 << 24, 40 | 3 << 24, 48 | 2 << 24] {
        assert_eq!(program.call(&format!("memory2 0 {later}")), [0, GPU, GPU, 0, 0]);
    }
}
