//! Memory that several processes have, or that a descriptor keeps.

use crate::sandbox::{CONTEXT, MIB, OUT_OF_MEMORY, Program, Sandbox, ok};

const PAGE: u64 = 2 * MIB;
const SHARE: u64 = 4096 * MIB;
const SIZE: u64 = 1024 * MIB;

fn name(sandbox: &Sandbox) -> String {
    sandbox.path("handle").display().to_string()
}

/// Whatever processes do with memory, all of it together fits into the share, and each process is charged with at least what the driver says it has.
#[track_caller]
fn assert_fits(sandbox: &Sandbox, programs: &[&Program]) {
    assert!(sandbox.driver_gave(0) <= SHARE, "{} MiB", sandbox.driver_gave(0) / MIB);
    for program in programs {
        assert!(sandbox.charged(program) >= sandbox.driver_gave_to(program.pid()));
    }
}

#[test]
fn what_a_descriptor_keeps_stays_charged_until_the_process_ends() {
    let sandbox = Sandbox::with_share(64 * SHARE, SHARE);
    for imports in [false, true] {
        let mut program = sandbox.ready();
        let pid = program.pid();
        let mut code = 0;
        for _ in 0..12 {
            let [result, handle, _] = program.call(&format!("create {SIZE} 0"));
            code = result;
            if code != 0 {
                break;
            }
            let descriptor = ok(&mut program, &format!("export {handle}"));
            ok(&mut program, &format!("drop {handle}"));
            if imports {
                let space = ok(&mut program, &format!("reserve {SIZE}"));
                let handle = ok(&mut program, &format!("import-from {pid} {descriptor}"));
                program.call(&format!("map {space} {SIZE} {handle}"));
            }
            assert_fits(&sandbox, &[&program]);
        }
        assert_eq!(code, OUT_OF_MEMORY);
        program.kill();
        assert_eq!(sandbox.driver_gave(0), 0);
    }
}

#[test]
fn a_failed_export_changes_nothing() {
    let sandbox = Sandbox::with_share(64 * SHARE, SHARE);
    let mut program = sandbox.start_with(&[("DIVVY_CUDA_SIM_FAIL", "cuMemExportToShareableHandle:1=999")]);
    assert_eq!((program.code("init"), program.code("retain 0")), (0, 0));
    let handle = ok(&mut program, &format!("create {SIZE} 0"));
    assert_eq!(program.code(&format!("export {handle}")), 999);
    assert_eq!(sandbox.charged(&program), CONTEXT + SIZE);
    ok(&mut program, &format!("drop {handle}"));
    assert_eq!(sandbox.charged(&program), CONTEXT);
}

/// A descriptor does not tell its size, so imported memory is charged as far as it was mapped at once, and as long as this process has it.
/// The charge stays after the process that made the memory has ended.
#[test]
fn imported_memory_is_charged_where_it_is_mapped() {
    let sandbox = Sandbox::with_share(64 * SHARE, SHARE);
    let (mut owner, mut guest) = (sandbox.ready(), sandbox.ready());
    let handle = ok(&mut owner, &format!("create {SIZE} 0"));
    let descriptor = ok(&mut owner, &format!("export {handle}"));
    let theirs = ok(&mut guest, &format!("import-from {} {descriptor}", owner.pid()));
    assert_eq!(sandbox.charged(&guest), CONTEXT);
    let space = ok(&mut guest, &format!("reserve {}", 2 * SIZE));
    ok(&mut guest, &format!("map {space} {PAGE} {theirs}"));
    assert_eq!(sandbox.charged(&guest), CONTEXT + PAGE);
    for _ in 0..2 {
        ok(&mut guest, &format!("map {} {SIZE} {theirs}", space + SIZE));
        assert_eq!(sandbox.charged(&guest), CONTEXT + SIZE);
        ok(&mut guest, &format!("unmap {} {SIZE}", space + SIZE));
    }
    assert_eq!(sandbox.charged(&guest), CONTEXT + SIZE, "the handle keeps it");
    owner.kill();
    ok(&mut guest, "sync");
    assert_eq!(sandbox.driver_gave(0), CONTEXT + SIZE);
    assert_fits(&sandbox, &[&guest]);
    ok(&mut guest, &format!("drop {theirs}"));
    assert_eq!(sandbox.charged(&guest), CONTEXT + SIZE, "the mapping keeps it");
    ok(&mut guest, &format!("unmap {space} {PAGE}"));
    assert_eq!((sandbox.charged(&guest), sandbox.driver_gave(0)), (CONTEXT, CONTEXT));
}

/// In each of these ways one process gets the memory of others.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Descriptor,
    Ipc,
    IpcOfCuda4,
    Pool,
}

const WAYS: [Way; 4] = [Way::Descriptor, Way::Ipc, Way::IpcOfCuda4, Way::Pool];

/// Have a new process allocate memory, and another one open it. `None`: it was refused.
fn open(sandbox: &Sandbox, guest: &mut Program, way: Way) -> Option<(Program, u64)> {
    let mut owner = sandbox.start();
    assert_eq!(owner.code("init"), 0);
    if owner.code("retain 0") != 0 {
        return None;
    }
    let pid = owner.pid();
    let name = name(sandbox);
    let opened = match way {
        Way::Descriptor => {
            let [code, handle, _] = owner.call(&format!("create {SIZE} 0"));
            if code != 0 {
                return None;
            }
            let descriptor = ok(&mut owner, &format!("export {handle}"));
            let theirs = ok(guest, &format!("import-from {pid} {descriptor}"));
            let space = ok(guest, &format!("reserve {SIZE}"));
            ok(guest, &format!("map {space} {SIZE} {theirs}"));
            ok(guest, &format!("drop {theirs}"));
            space
        }
        Way::Ipc | Way::IpcOfCuda4 => {
            let [code, pointer, _] = owner.call(&format!("alloc {SIZE}"));
            if code != 0 {
                return None;
            }
            ok(&mut owner, &format!("ipc-share {pointer} {name}"));
            let version = if way == Way::Ipc { "ipc-open" } else { "ipc-open-v1" };
            ok(guest, &format!("{version} {name}"))
        }
        Way::Pool => {
            let pool = ok(&mut owner, "pool 0");
            let [code, pointer, _] = owner.call(&format!("async-from {SIZE} {pool}"));
            if code != 0 {
                return None;
            }
            let descriptor = ok(&mut owner, &format!("pool-export {pool}"));
            ok(&mut owner, &format!("pool-share {pointer} {name}"));
            let theirs = ok(guest, &format!("pool-import-from {pid} {descriptor}"));
            ok(guest, &format!("pool-open {theirs} {name}"))
        }
    };
    Some((owner, opened))
}

#[test]
fn one_process_does_not_collect_the_memory_of_many_that_end() {
    for way in WAYS {
        let sandbox = Sandbox::with_share(64 * SHARE, SHARE);
        let mut guest = sandbox.ready();
        let mut count = 0;
        while let Some((owner, _)) = open(&sandbox, &mut guest, way) {
            assert_fits(&sandbox, &[&guest, &owner]);
            owner.kill();
            ok(&mut guest, "sync");
            assert_fits(&sandbox, &[&guest]);
            count += 1;
            assert!(count < 4, "{way:?}: {} MiB", sandbox.driver_gave(0) / MIB);
        }
        assert_eq!(sandbox.driver_gave(0), CONTEXT + count * SIZE, "{way:?}: the driver keeps it");
    }
}

/// It takes no more memory of the GPU. Programs that hand memory on within a pod would otherwise need twice the share.
#[test]
fn to_open_memory_is_not_refused() {
    for way in WAYS {
        let sandbox = Sandbox::with_share(64 * SHARE, 2 * CONTEXT + SIZE + 32 * MIB);
        let mut guest = sandbox.ready();
        let (owner, _) = open(&sandbox, &mut guest, way).expect("it fits");
        assert_eq!(sandbox.charged(&guest), CONTEXT + SIZE, "{way:?}");
        assert_eq!(guest.code("alloc 1"), OUT_OF_MEMORY, "{way:?}");
        owner.kill();
        ok(&mut guest, "alloc 1");
    }
}

#[test]
fn opened_memory_is_charged_once_and_until_it_is_closed() {
    for way in [Way::Ipc, Way::Pool] {
        for close in ["ipc-close", "free", "async-free", "async-free-ptsz"] {
            if (way == Way::Ipc) != (close == "ipc-close") {
                continue;
            }
            let sandbox = Sandbox::with_share(64 * SHARE, SHARE);
            let mut guest = sandbox.ready();
            let (mut owner, opened) = open(&sandbox, &mut guest, way).expect("it fits");
            assert_eq!(sandbox.charged(&guest), CONTEXT + SIZE, "{close}");
            if way == Way::Ipc {
                // The driver counts it, and gives the same address.
                assert_eq!(ok(&mut guest, &format!("ipc-open {}", name(&sandbox))), opened);
                assert_eq!(sandbox.charged(&guest), CONTEXT + SIZE);
                ok(&mut guest, &format!("{close} {opened}"));
                assert_eq!(sandbox.charged(&guest), CONTEXT + SIZE);
            }
            ok(&mut guest, &format!("{close} {opened}"));
            assert_eq!(sandbox.charged(&guest), CONTEXT, "{close}");
            assert_ne!(guest.code(&format!("{close} {opened}")), 0);
            assert_eq!(sandbox.charged(&guest), CONTEXT);
            // It is still its maker's.
            ok(&mut owner, "sync");
            assert_fits(&sandbox, &[&owner, &guest]);
        }
    }
}

#[test]
fn what_an_exported_pool_has_stays_charged() {
    let sandbox = Sandbox::with_share(64 * SHARE, SHARE);
    let mut program = sandbox.ready();
    let pool = ok(&mut program, "pool 0");
    let pointer = ok(&mut program, &format!("async-from {SIZE} {pool}"));
    ok(&mut program, &format!("pool-export {pool}"));
    ok(&mut program, &format!("async-free {pointer}"));
    ok(&mut program, &format!("pool-destroy {pool}"));
    assert_eq!(sandbox.charged(&program), CONTEXT + SIZE);
}

/// With 256 processes, or a file of usage that somebody broke, nothing can be charged.
#[test]
fn without_a_slot_memory_of_others_cannot_be_opened() {
    let sandbox = Sandbox::with_share(64 * SHARE, SHARE);
    let name = name(&sandbox);
    let mut owner = sandbox.ready();
    let handle = ok(&mut owner, &format!("create {SIZE} 0"));
    let descriptor = ok(&mut owner, &format!("export {handle}"));
    let pointer = ok(&mut owner, &format!("alloc {SIZE}"));
    ok(&mut owner, &format!("ipc-share {pointer} {name}"));
    std::fs::rename(sandbox.file(0, "usage"), sandbox.path("usage")).unwrap();
    std::fs::write(sandbox.file(0, "usage"), []).unwrap();
    // It has its context from the driver itself.
    let mut guest = sandbox.start();
    assert_eq!(guest.code("init"), 0);
    assert_eq!(guest.code("bare-retain 0"), 0);
    let theirs = ok(&mut guest, &format!("import-from {} {descriptor}", owner.pid()));
    let space = ok(&mut guest, &format!("reserve {SIZE}"));
    assert_eq!(guest.code(&format!("map {space} {SIZE} {theirs}")), OUT_OF_MEMORY);
    assert_eq!(guest.code(&format!("ipc-open {name}")), OUT_OF_MEMORY);
    owner.kill();
    ok(&mut guest, &format!("drop {theirs}"));
    assert_eq!(sandbox.driver_gave(0), CONTEXT, "it was closed again");
}
