//! Memory of graphs, and imported memory.

use crate::sandbox::{CONTEXT, MIB, OUT_OF_MEMORY, Sandbox, ok};

#[test]
fn what_graphs_have_is_charged_from_their_launch_on() {
    let sandbox = Sandbox::with_share(8192 * MIB, 1024 * MIB).with_driver("13.4");
    let mut program = sandbox.ready();
    for way in 0..4 {
        let graph = ok(&mut program, "graph");
        ok(&mut program, &format!("graph-alloc {graph} {} {way}", 100 * MIB));
        assert_eq!(
            program.code(&format!("graph-alloc {graph} {} {way}", 1024 * MIB)),
            OUT_OF_MEMORY
        );
        let executable = ok(&mut program, &format!("graph-make {graph}"));
        assert_eq!(
            (sandbox.charged(&program), sandbox.driver_gave(0)),
            (CONTEXT, CONTEXT),
            "{way}"
        );
        ok(&mut program, &format!("graph-launch {executable}"));
        assert_eq!(
            (sandbox.charged(&program), sandbox.driver_gave(0)),
            (CONTEXT + 100 * MIB, CONTEXT + 100 * MIB),
            "{way}"
        );
        assert_eq!(
            program.code(&format!("alloc {}", 1024 * MIB - CONTEXT - 99 * MIB)),
            OUT_OF_MEMORY
        );
        ok(&mut program, &format!("graph-end {executable}"));
        ok(&mut program, "sync");
        ok(&mut program, "graph-trim 0");
        assert_eq!(sandbox.charged(&program), sandbox.driver_gave(0), "{way}");
        // The driver keeps memory that a launch has left; the reset of the context frees it.
        ok(&mut program, "reset 0");
        ok(&mut program, "retain 0");
    }
}

#[test]
fn what_an_upload_takes_is_charged() {
    let sandbox = Sandbox::with_share(8192 * MIB, 1024 * MIB);
    let mut program = sandbox.ready();
    for (upload, count) in [("graph-upload", 1), ("graph-upload-ptsz", 2)] {
        let graph = ok(&mut program, "graph");
        for _ in 0..count {
            ok(&mut program, &format!("graph-alloc {graph} {}", 100 * MIB));
        }
        let executable = ok(&mut program, &format!("graph-make {graph}"));
        ok(&mut program, &format!("{upload} {executable}"));
        assert_eq!(sandbox.charged(&program), sandbox.driver_gave(0), "{upload}");
        assert!(sandbox.charged(&program) > CONTEXT, "{upload}");
    }
}

#[test]
fn imported_memory_is_charged_once_and_until_its_end() {
    let sandbox = Sandbox::with_share(8192 * MIB, 1024 * MIB);
    let mut program = sandbox.ready();
    let memory = ok(&mut program, &format!("import {}", 100 * MIB));
    assert_eq!(sandbox.charged(&program), CONTEXT + 100 * MIB);
    assert_eq!(program.code(&format!("import {}", 1024 * MIB)), OUT_OF_MEMORY);
    ok(&mut program, &format!("import-end {memory}"));
    assert_eq!(sandbox.charged(&program), CONTEXT);
    assert_ne!(program.code(&format!("import-end {memory}")), 0);
    assert_eq!(sandbox.charged(&program), CONTEXT);
}
