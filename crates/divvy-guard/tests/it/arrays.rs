//! Arrays.

use crate::sandbox::{CONTEXT, MIB, OUT_OF_MEMORY, Sandbox};

#[test]
fn an_array_is_charged_with_its_size() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.ready();
    // Elements of 16 bytes.
    for (create, destroy) in [
        ("array 1024 1024", "array-destroy"),
        ("array 100000 0", "array-destroy"),
        ("array3d 256 256 64 0", "array-destroy"),
        // Six layers.
        ("array3d 512 512 6 1", "array-destroy"),
        // Its memory is mapped later (CUDA_ARRAY3D_DEFERRED_MAPPING).
        ("array3d 1024 1024 0 128", "array-destroy"),
        ("mipmap 1024 1024 0 11", "mipmap-destroy"),
        ("mipmap 256 256 256 9", "mipmap-destroy"),
    ] {
        let [code, array, _] = program.call(create);
        assert_eq!(code, 0, "{create}");
        assert_eq!(sandbox.charged(&program), sandbox.driver_gave(0), "{create}");
        assert_eq!(sandbox.driver_gave(0) > CONTEXT, !create.ends_with("128"), "{create}");
        assert_eq!(program.code(&format!("{destroy} {array}")), 0, "{create}");
        assert_eq!(
            (sandbox.charged(&program), sandbox.driver_gave(0)),
            (CONTEXT, CONTEXT),
            "{create}"
        );
    }
}

#[test]
fn an_array_that_does_not_fit_is_refused() {
    let sandbox = Sandbox::with_share(8192 * MIB, CONTEXT + 16 * MIB);
    let mut program = sandbox.ready();
    assert_eq!(program.code("array 1024 1024"), 0);
    for create in ["array 1 1", "array3d 1 1 1 0", "mipmap 1 1 0 1"] {
        assert_eq!(program.code(create), OUT_OF_MEMORY, "{create}");
    }
    assert_eq!(sandbox.refusals(), [""; 0]);
}

#[test]
fn arrays_die_with_their_context() {
    let sandbox = Sandbox::with_share(8192 * MIB, 4096 * MIB);
    let mut program = sandbox.ready();
    let [_, context, _] = program.call("context 0");
    assert_eq!(program.code("array 1024 1024"), 0);
    assert_eq!(program.code(&format!("destroy {context}")), 0);
    assert_eq!((sandbox.charged(&program), sandbox.driver_gave(0)), (CONTEXT, CONTEXT));
}
