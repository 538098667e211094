//! The ways in which programs get the library.

use std::process::Command;

use divvy_shadow_testkit::compile;

use crate::sandbox::{MIB, Sandbox, drivers};

/// A program that is linked with NVML: the loader finds the shadow by the name that NVML has. It returns the GPU's memory in units of 64 MiB.
const SOURCE: &str = "
    struct memory { unsigned long total, free, used; };
    int nvmlInit_v2(void), nvmlDeviceGetHandleByIndex_v2(unsigned, void **), nvmlDeviceGetMemoryInfo(void *, struct memory *);
    int main(void) {
        void *device;
        struct memory memory;
        if (nvmlInit_v2() || nvmlDeviceGetHandleByIndex_v2(0, &device) || nvmlDeviceGetMemoryInfo(device, &memory)) return 255;
        return memory.total >> 26;
    }";

#[test]
fn a_program_that_is_linked_with_nvml_sees_the_share() {
    let sandbox = Sandbox::with_share(8192 * MIB, 1024 * MIB);
    let linked = sandbox.path("linked");
    compile(SOURCE, &linked, &[drivers()[0].to_str().unwrap()]);
    let total = || {
        let mut command = Command::new(&linked);
        command
            .env("LD_LIBRARY_PATH", sandbox.path(""))
            .env("DIVVY_NVML_SIM", sandbox.path("machine.toml"));
        command.status().unwrap().code()
    };
    assert_eq!(total(), Some(16));
    std::fs::remove_file(sandbox.file(0, "limits")).unwrap();
    assert_eq!(total(), Some(128));
}
