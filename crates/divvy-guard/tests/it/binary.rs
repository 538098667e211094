//! What the library is, as a file.

use object::read::elf::{Dyn as _, ElfFile64, FileHeader as _, Sym as _};
use object::{Object as _, ObjectSection as _, elf};

use crate::sandbox::guard;

/// Each function that is replaced. What is not here belongs to the driver.
pub(crate) const REPLACED: [&str; 68] = [
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

fn library() -> ElfFile64<'static> {
    ElfFile64::parse(guard()).unwrap()
}

/// The names of the dynamic symbols that are defined, or that are not.
fn symbols(defined: bool) -> Vec<&'static str> {
    let file = library();
    let endian = file.endian();
    let sections = file.elf_header().sections(endian, guard()).unwrap();
    let table = sections.symbols(endian, guard(), elf::SHT_DYNSYM).unwrap();
    let mut names: Vec<&str> = table
        .iter()
        .skip(1)
        .filter(|symbol| symbol.is_undefined(endian) != defined)
        .map(|symbol| std::str::from_utf8(symbol.name(endian, table.strings()).unwrap()).unwrap())
        .collect();
    names.sort_unstable();
    names
}

/// The values of a tag of the dynamic section, as strings.
fn dynamic(tag: i64) -> Vec<String> {
    let file = library();
    let endian = file.endian();
    let sections = file.elf_header().sections(endian, guard()).unwrap();
    let (entries, strings) = sections.dynamic(endian, guard()).unwrap().unwrap();
    let strings = sections.strings(endian, guard(), strings).unwrap();
    let tagged = entries.iter().filter(|entry| entry.tag32(endian).map(i64::from) == Some(tag));
    tagged
        .map(|entry| String::from_utf8(entry.string(endian, strings).unwrap().to_vec()).unwrap())
        .collect()
}

#[test]
fn it_exports_what_it_replaces_and_nothing_else() {
    assert_eq!(symbols(true), REPLACED);
}

/// It takes `dlsym` from the program, and what the compiler puts in place of loops over bytes. In particular not `divvy_guard_can_panic`, which
/// stands for the code of a panic.
#[test]
fn it_needs_no_function_but_dlsym_and_has_no_code_that_panics() {
    let needed = symbols(false);
    let loops = ["memcpy", "memmove", "memset", "memcmp", "bcmp"];
    let others: Vec<_> = needed.iter().filter(|name| !loops.contains(name)).collect();
    assert_eq!(others, [&"dlsym"]);
}

#[test]
fn it_is_named_as_the_driver_and_needs_only_the_real_one_by_its_path() {
    assert_eq!(dynamic(elf::DT_SONAME), ["libcuda.so.1"]);
    assert_eq!(dynamic(elf::DT_NEEDED), ["/run/divvy/guard/libcuda.so.real"]);
}

/// A version of a symbol would make it fail with an older C library, and code that runs at loading would run in programs that never call it.
#[test]
fn it_asks_for_no_version_and_runs_no_code_at_loading() {
    let file = library();
    let names: Vec<&str> = file.sections().filter_map(|section| section.name().ok()).collect();
    for name in [
        ".gnu.version",
        ".gnu.version_r",
        ".init_array",
        ".init",
        ".fini_array",
        ".fini",
        ".tdata",
        ".tbss",
        ".interp",
    ] {
        assert!(!names.contains(&name), "{name}: {names:?}");
    }
    assert!(names.contains(&".dynsym"), "{names:?}");
}

#[test]
fn it_is_small() {
    assert!(guard().len() <= 64 << 10, "{} bytes", guard().len());
}
