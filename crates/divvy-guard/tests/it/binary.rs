//! What the library is, as a file.

use divvy_shadow_testkit::Elf;

use crate::sandbox::guard;

/// Each function that is replaced. What is not here belongs to the driver.
pub(crate) const REPLACED: [&str; 70] = [
    "cuArray3DCreate",
    "cuArray3DCreate_v2",
    "cuArrayCreate",
    "cuArrayCreate_v2",
    "cuArrayDestroy",
    "cuCtxCreate",
    "cuCtxCreate_v2",
    "cuCtxCreate_v3",
    "cuCtxCreate_v4",
    "cuCtxDestroy",
    "cuCtxDestroy_v2",
    "cuCtxSynchronize",
    "cuCtxSynchronize_v2",
    "cuDestroyExternalMemory",
    "cuDeviceGraphMemTrim",
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxReset",
    "cuDevicePrimaryCtxReset_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem",
    "cuDeviceTotalMem_v2",
    "cuEventSynchronize",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuGraphAddMemAllocNode",
    "cuGraphAddNode",
    "cuGraphAddNode_v2",
    "cuGraphExecDestroy",
    "cuGraphLaunch",
    "cuGraphLaunch_ptsz",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
    "cuImportExternalMemory",
    "cuLaunch",
    "cuLaunchCooperativeKernel",
    "cuLaunchCooperativeKernelMultiDevice",
    "cuLaunchCooperativeKernel_ptsz",
    "cuLaunchGrid",
    "cuLaunchGridAsync",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuLaunchKernelEx_ptsz",
    "cuLaunchKernel_ptsz",
    "cuMemAlloc",
    "cuMemAllocAsync",
    "cuMemAllocAsync_ptsz",
    "cuMemAllocFromPoolAsync",
    "cuMemAllocFromPoolAsync_ptsz",
    "cuMemAllocManaged",
    "cuMemAllocPitch",
    "cuMemAllocPitch_v2",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemFree",
    "cuMemFree_v2",
    "cuMemGetInfo",
    "cuMemGetInfo_v2",
    "cuMemMap",
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolSetAttribute",
    "cuMemPoolTrimTo",
    "cuMemRelease",
    "cuMemRetainAllocationHandle",
    "cuMemUnmap",
    "cuMipmappedArrayCreate",
    "cuMipmappedArrayDestroy",
    "cuStreamSynchronize",
    "cuStreamSynchronize_ptsz",
];

/// Those of them that a program without a limit of compute time has from the driver, if it asks `cuGetProcAddress`.
pub(crate) fn only_launches(name: &str) -> bool {
    name.starts_with("cuLaunch")
}

#[test]
fn it_exports_what_it_replaces_and_nothing_else() {
    assert_eq!(Elf::of(guard()).exports(), REPLACED);
}

/// In particular not `divvy_guard_can_panic`, which stands for the code of a panic.
#[test]
fn it_needs_no_function_but_dlsym_and_has_no_code_that_panics() {
    assert_eq!(Elf::of(guard()).imports(), ["dlsym"]);
}

#[test]
fn it_is_named_as_the_driver_and_needs_only_the_real_one_by_its_path() {
    assert_eq!(Elf::of(guard()).names(), ["libcuda.so.1"]);
    assert_eq!(Elf::of(guard()).needed(), ["/run/divvy/guard/libcuda.so.real"]);
}

#[test]
fn it_asks_for_no_version_and_runs_no_code_at_loading() {
    Elf::of(guard()).assert_loads_anywhere();
}

#[test]
fn it_is_small() {
    assert!(guard().len() <= 64 << 10, "{} bytes", guard().len());
}
