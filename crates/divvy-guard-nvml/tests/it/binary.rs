//! What the library is, as a file.

use divvy_shadow_testkit::Elf;

use crate::sandbox::shadow;

/// Each function that is replaced. What is not here belongs to the driver.
pub(crate) const REPLACED: [&str; 11] = [
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses_v2",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
];

#[test]
fn it_exports_what_it_replaces_and_nothing_else() {
    assert_eq!(Elf::of(shadow()).exports(), REPLACED);
}

/// In particular not `divvy_guard_can_panic`, which stands for the code of a panic.
#[test]
fn it_needs_no_function_but_dlsym_and_has_no_code_that_panics() {
    assert_eq!(Elf::of(shadow()).imports(), ["dlsym"]);
}

/// The guard's library needs only the real library, which it names by its path.
#[test]
fn it_has_the_name_of_the_drivers_library() {
    assert_eq!(Elf::of(shadow()).names(), ["libnvidia-ml.so.1"]);
    assert_eq!(Elf::of(shadow()).needed(), ["/run/divvy/guard/libnvidia-ml.so.real"]);
}

#[test]
fn it_asks_for_no_version_and_runs_no_code_at_loading() {
    Elf::of(shadow()).assert_loads_anywhere();
}

#[test]
fn it_is_small() {
    assert!(shadow().len() <= 64 << 10, "{} bytes", shadow().len());
}
