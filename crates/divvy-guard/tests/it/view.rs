//! The amounts of memory that programs see.

use divvy_share::limits::ShareLimits;

use crate::sandbox::{CONTEXT, MIB, OUT_OF_MEMORY, Sandbox, limits};

#[test]
fn the_share_looks_like_the_gpu() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.ready();
    program.alloc(96 * MIB);
    let left = 4096 * MIB - CONTEXT - 96 * MIB;
    assert_eq!(program.call("info"), [0, left, 4096 * MIB]);
    assert_eq!(program.call("info-free"), [0, left, 0]);
    assert_eq!(program.call("info-total"), [0, 0, 4096 * MIB]);
    assert_eq!(program.call("total 0")[..2], [0, 4096 * MIB]);
    // Another process of the pod takes from the same share.
    let mut other = sandbox.ready();
    assert_eq!(other.call("info"), [0, left - CONTEXT, 4096 * MIB]);
}

/// Another pod may have taken what the share promises: then it is not free.
#[test]
fn what_the_gpu_does_not_have_is_not_free() {
    let sandbox = Sandbox::with_share(1024 * MIB, 4096 * MIB);
    let mut program = sandbox.ready();
    assert_eq!(program.call("info"), [0, 1024 * MIB - CONTEXT, 1024 * MIB]);
    assert_eq!(program.call("total 0")[1], sandbox.memory());
}

#[test]
fn limits_below_use_leave_nothing_free_and_take_nothing_away() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.ready();
    let memory = program.alloc(1024 * MIB);
    sandbox.change(&limits(512 * MIB));
    assert_eq!(program.call("info"), [0, 0, 512 * MIB]);
    assert_eq!(program.code("alloc 1"), OUT_OF_MEMORY);
    assert_eq!(sandbox.driver_gave(0), CONTEXT + 1024 * MIB);
    assert_eq!(program.code(&format!("free {memory}")), 0);
    assert_eq!(program.call("info"), [0, 512 * MIB - CONTEXT, 512 * MIB]);
    program.alloc(MIB);
}

#[test]
fn what_the_agent_measured_besides_the_slots_is_not_free() {
    let sandbox = Sandbox::with_share(8192 * MIB, 1024 * MIB);
    let mut program = sandbox.ready();
    sandbox.change(&ShareLimits {
        overhead: 100 * MIB,
        ..limits(1024 * MIB)
    });
    assert_eq!(program.call("info"), [0, 924 * MIB - CONTEXT, 1024 * MIB]);
    assert_eq!(program.code(&format!("alloc {}", 926 * MIB - CONTEXT)), OUT_OF_MEMORY);
    program.alloc(924 * MIB - CONTEXT);
}

#[test]
fn managed_memory_is_refused_where_the_limits_say_so() {
    let sandbox = Sandbox::with_share(8192 * MIB, 1024 * MIB);
    let mut program = sandbox.ready();
    sandbox.change(&ShareLimits {
        refuse_managed: true,
        ..limits(1024 * MIB)
    });
    assert_eq!(program.code("managed 1048576"), 801);
    program.alloc(MIB);
}
