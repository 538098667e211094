//! Physical memory, its handles, and its mappings.

use crate::sandbox::{CONTEXT, MIB, OUT_OF_MEMORY, Program, Sandbox, ok};

const PAGE: u64 = 2 * MIB;

fn check(sandbox: &Sandbox, program: &Program, pages: u64) {
    let expected = CONTEXT + pages * PAGE;
    assert_eq!((sandbox.charged(program), sandbox.driver_gave(0)), (expected, expected));
}

#[test]
fn memory_lives_until_its_last_handle_and_mapping() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.ready();
    let space = ok(&mut program, &format!("reserve {}", 16 * PAGE));
    let handle = ok(&mut program, &format!("create {} 0", 4 * PAGE));
    check(&sandbox, &program, 4);
    // PyTorch's expandable segments release the handle as soon as the memory is mapped.
    ok(&mut program, &format!("map {space} {} {handle}", 4 * PAGE));
    ok(&mut program, &format!("drop {handle}"));
    check(&sandbox, &program, 4);
    // The mapping gives a handle again.
    assert_eq!(ok(&mut program, &format!("again {space}")), handle);
    ok(&mut program, &format!("unmap {space} {}", 4 * PAGE));
    check(&sandbox, &program, 4);
    ok(&mut program, &format!("drop {handle}"));
    check(&sandbox, &program, 0);
}

#[test]
fn one_call_can_remove_several_mappings() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.ready();
    let space = ok(&mut program, &format!("reserve {}", 16 * PAGE));
    let mut handles = Vec::new();
    for index in 0..4 {
        let handle = ok(&mut program, &format!("create {PAGE} 0"));
        ok(&mut program, &format!("map {} {PAGE} {handle}", space + index * PAGE));
        handles.push(handle);
    }
    // One of them has a second mapping, outside.
    ok(&mut program, &format!("map {} {PAGE} {}", space + 8 * PAGE, handles[1]));
    for handle in &handles {
        ok(&mut program, &format!("drop {handle}"));
    }
    check(&sandbox, &program, 4);
    ok(&mut program, &format!("unmap {space} {}", 4 * PAGE));
    check(&sandbox, &program, 1);
    ok(&mut program, &format!("unmap {} {PAGE}", space + 8 * PAGE));
    check(&sandbox, &program, 0);
}

#[test]
fn memory_of_the_host_is_not_charged() {
    let sandbox = Sandbox::with_share(8192 * MIB, CONTEXT);
    let mut program = sandbox.ready();
    let handle = ok(&mut program, &format!("create-host {} 0", 4 * PAGE));
    check(&sandbox, &program, 0);
    ok(&mut program, &format!("drop {handle}"));
    check(&sandbox, &program, 0);
}

#[test]
fn refused_calls_change_nothing() {
    let sandbox = Sandbox::with_share(8192 * MIB, CONTEXT + 4 * PAGE);
    let mut program = sandbox.ready();
    let space = ok(&mut program, &format!("reserve {}", 16 * PAGE));
    let handle = ok(&mut program, &format!("create {} 0", 4 * PAGE));
    assert_eq!(program.code(&format!("create {PAGE} 0")), OUT_OF_MEMORY);
    assert_eq!(program.code("alloc 1"), OUT_OF_MEMORY);
    // Not on the page's boundary; no such handle; no such mapping.
    for call in [
        format!("map {} {} {handle}", space + 1, 4 * PAGE),
        format!("map {space} {PAGE} 12345"),
        format!("unmap {space} {PAGE}"),
        "drop 12345".to_owned(),
        "again 12345".to_owned(),
    ] {
        assert_ne!(program.code(&call), 0, "{call}");
        check(&sandbox, &program, 4);
    }
    ok(&mut program, &format!("map {space} {} {handle}", 4 * PAGE));
    // A part of a mapping cannot be removed.
    assert_ne!(program.code(&format!("unmap {space} {PAGE}")), 0);
    ok(&mut program, &format!("drop {handle}"));
    check(&sandbox, &program, 4);
    ok(&mut program, &format!("unmap {space} {}", 4 * PAGE));
    check(&sandbox, &program, 0);
}

/// The driver can fail at any of the calls; what it did not do is not counted.
#[test]
fn failed_calls_change_nothing() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let fail = "cuMemMap:1=999,cuMemUnmap:1=999,cuMemRelease:1=999,cuMemRelease:3=999,cuMemRetainAllocationHandle:1=999";
    let mut program = sandbox.start_with(&[("DIVVY_CUDA_SIM_FAIL", fail)]);
    assert_eq!((program.code("init"), program.code("retain 0")), (0, 0));
    let space = ok(&mut program, &format!("reserve {}", 16 * PAGE));
    for _ in 0..2 {
        let handle = ok(&mut program, &format!("create {} 0", 4 * PAGE));
        let map = format!("map {space} {} {handle}", 4 * PAGE);
        let unmap = format!("unmap {space} {}", 4 * PAGE);
        // Each fails in the first round, and some in the second.
        let mut until_it_works = |call: &str| while program.code(call) == 999 {};
        until_it_works(&map);
        until_it_works(&format!("drop {handle}"));
        until_it_works(&format!("again {space}"));
        until_it_works(&unmap);
        check(&sandbox, &program, 4);
        let mut until_it_works = |call: &str| while program.code(call) == 999 {};
        until_it_works(&format!("drop {handle}"));
        check(&sandbox, &program, 0);
    }
}

/// CUDA 13.5 has locations that are a part of a GPU.
#[test]
fn memory_at_a_location_that_is_not_known_is_the_current_gpus() {
    let sandbox = Sandbox::with_share(8192 * MIB, CONTEXT + 4 * PAGE).with_driver("13.5");
    let mut program = sandbox.ready();
    // CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN: domain 1 of the first GPU.
    let handle = ok(&mut program, &format!("create-at 6 256 {}", 4 * PAGE));
    check(&sandbox, &program, 4);
    assert_eq!(program.code(&format!("create-at 6 256 {PAGE}")), OUT_OF_MEMORY);
    ok(&mut program, &format!("drop {handle}"));
    check(&sandbox, &program, 0);
}
