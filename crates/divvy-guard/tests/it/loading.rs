//! The ways in which programs get the driver's library.

use std::process::Command;

use divvy_shadow_testkit::compile;

use crate::sandbox::{CONTEXT, GPUS, MIB, OUT_OF_MEMORY, Sandbox, driver};

const SHARE: u64 = 1024 * MIB;

#[test]
fn a_namespace_of_its_own_is_held_as_well() {
    let sandbox = Sandbox::with_share(8192 * MIB, SHARE);
    let mut program = sandbox.start();
    assert_eq!(program.code(&format!("namespace {SHARE}")), OUT_OF_MEMORY);
    // For the guard, the second copy of the library is a separate program, and it takes its own slot.
    assert_eq!((sandbox.slots()[0].used, sandbox.slots()[0].contexts), (0, 1));
}

/// A program that is linked with the driver: the loader finds the guard by the name that the driver has, and the functions in the order of loading.
#[test]
fn a_program_that_is_linked_with_the_driver_is_held() {
    const SOURCE: &str = "
        int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *), cuMemAlloc_v2(unsigned long *, unsigned long);
        int main(int count, char **names) {
            void *context;
            unsigned long pointer;
            if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 100;
            return cuMemAlloc_v2(&pointer, (count > 1 ? 2048ul : 512ul) << 20);
        }";
    let sandbox = Sandbox::with_share(8192 * MIB, SHARE);
    let linked = sandbox.path("linked");
    compile(SOURCE, &linked, &[driver().to_str().unwrap()]);
    for (arguments, code) in [(&[][..], 0), (&["more"][..], 2)] {
        let mut command = Command::new(&linked);
        command
            .args(arguments)
            .env("LD_LIBRARY_PATH", sandbox.path(""))
            .env("DIVVY_NVML_SIM", sandbox.path("machine.toml"));
        assert_eq!(command.status().unwrap().code(), Some(code), "{arguments:?}");
    }
    assert_eq!(sandbox.slots()[0].peak, CONTEXT, "{}", GPUS[0]);
}
