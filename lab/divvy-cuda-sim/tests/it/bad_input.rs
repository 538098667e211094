//! Wrong calls. The codes are those of the comments in cuda.h, and of the real driver where a comment says how it was found out.

use crate::bed::{Arg, Bed, NULL, Num, Out, PAGE, Text, Words};

const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const NOT_INITIALIZED: i32 = 3;
const INVALID_DEVICE: i32 = 101;
const INVALID_CONTEXT: i32 = 201;
const INVALID_HANDLE: i32 = 400;
const MAX: u64 = u64::MAX;
const NO_OBJECT: u64 = 0x7777;

type Case = (&'static str, Vec<Arg>, i32);

#[test]
fn before_cu_init_each_call_says_so() {
    let cases: [Case; 5] = [
        ("cuDeviceGetCount", vec![Out], NOT_INITIALIZED),
        ("cuMemAlloc_v2", vec![Out, Num(1)], NOT_INITIALIZED),
        ("cuMemFree_v2", vec![NULL], NOT_INITIALIZED),
        ("cuCtxSynchronize", vec![], NOT_INITIALIZED),
        ("cuInit", vec![Num(1)], INVALID_VALUE),
    ];
    let bed = Bed::new();
    let mut process = bed.start_with(&[]);
    for (name, arguments, code) in cases {
        assert_eq!(process.code(name, &arguments), code, "{name}{arguments:?}");
    }
}

#[test]
fn without_a_context_calls_that_need_one_say_so() {
    let cases: [Case; 9] = [
        ("cuMemAlloc_v2", vec![Out, Num(1)], INVALID_CONTEXT),
        ("cuMemGetInfo_v2", vec![Out, Out], INVALID_CONTEXT),
        ("cuMemAllocManaged", vec![Out, Num(1), Num(1)], INVALID_CONTEXT),
        ("cuMemAllocAsync", vec![Out, Num(1), Num(0)], INVALID_CONTEXT),
        ("cuCtxSynchronize", vec![], INVALID_CONTEXT),
        ("cuCtxGetDevice", vec![Out], INVALID_CONTEXT),
        ("cuCtxPopCurrent_v2", vec![Out], INVALID_CONTEXT),
        ("cuDevicePrimaryCtxRelease_v2", vec![Num(0)], INVALID_CONTEXT),
        ("cuCtxGetCurrent", vec![Out], 0),
    ];
    let bed = Bed::new();
    let mut process = bed.start();
    for (name, arguments, code) in cases {
        assert_eq!(process.code(name, &arguments), code, "{name}{arguments:?}");
    }
    assert_eq!(bed.usage(0), []);
}

#[test]
fn wrong_arguments_are_refused_and_cost_nothing() {
    let properties = |place: u64| Words(vec![1, place, 0, 0]);
    let array = |words: [u64; 5]| Words(words.to_vec());
    let cases: Vec<Case> = vec![
        ("cuDeviceGetCount", vec![NULL], INVALID_VALUE),
        ("cuDeviceGet", vec![Out, Num(2)], INVALID_DEVICE),
        ("cuDeviceGet", vec![Out, Num(MAX)], INVALID_DEVICE),
        ("cuDeviceGet", vec![NULL, Num(0)], INVALID_VALUE),
        ("cuDeviceGetName", vec![NULL, Num(10), Num(0)], INVALID_VALUE),
        ("cuDeviceGetName", vec![Words(vec![0; 2]), Num(0), Num(0)], INVALID_VALUE),
        ("cuDeviceTotalMem_v2", vec![Out, Num(9)], INVALID_DEVICE),
        ("cuDeviceGetAttribute", vec![Out, Num(0), Num(0)], INVALID_VALUE),
        ("cuDeviceGetUuid", vec![NULL, Num(0)], INVALID_VALUE),
        ("cuDevicePrimaryCtxRetain", vec![NULL, Num(0)], INVALID_VALUE),
        ("cuDevicePrimaryCtxRetain", vec![Out, Num(9)], INVALID_DEVICE),
        ("cuCtxCreate_v2", vec![NULL, Num(0), Num(0)], INVALID_VALUE),
        ("cuCtxCreate_v2", vec![Out, Num(0), Num(9)], INVALID_DEVICE),
        (
            "cuCtxCreate_v4",
            vec![Out, Words(vec![1, 1, 0]), Num(0), Num(0)],
            INVALID_VALUE,
        ),
        ("cuCtxDestroy_v2", vec![NULL], INVALID_CONTEXT),
        ("cuCtxSetCurrent", vec![Num(NO_OBJECT)], INVALID_CONTEXT),
        ("cuMemGetInfo_v2", vec![NULL, NULL], 0),
        ("cuMemAlloc_v2", vec![NULL, Num(1)], INVALID_VALUE),
        ("cuMemAlloc_v2", vec![Out, Num(0)], INVALID_VALUE),
        ("cuMemAlloc_v2", vec![Out, Num(MAX)], OUT_OF_MEMORY),
        ("cuMemAlloc", vec![Out, Num(u32::MAX.into())], OUT_OF_MEMORY),
        ("cuMemAllocPitch_v2", vec![Out, Out, Num(MAX), Num(1), Num(4)], OUT_OF_MEMORY),
        (
            "cuMemAllocPitch_v2",
            vec![Out, Out, Num(1 << 40), Num(1 << 40), Num(4)],
            OUT_OF_MEMORY,
        ),
        ("cuMemAllocPitch_v2", vec![Out, NULL, Num(1), Num(1), Num(4)], INVALID_VALUE),
        ("cuMemAllocPitch_v2", vec![Out, Out, Num(1), Num(1), Num(5)], INVALID_VALUE),
        ("cuMemAllocManaged", vec![Out, Num(1), Num(0)], INVALID_VALUE),
        ("cuMemAllocManaged", vec![Out, Num(MAX), Num(1)], OUT_OF_MEMORY),
        ("cuMemFree_v2", vec![NULL], 0),
        ("cuMemFree_v2", vec![Num(NO_OBJECT)], INVALID_VALUE),
        ("cuMemFreeHost", vec![NULL], 0),
        ("cuMemFreeHost", vec![Num(NO_OBJECT)], INVALID_VALUE),
        ("cuMemFreeAsync", vec![Num(NO_OBJECT), Num(0)], INVALID_VALUE),
        ("cuMemFreeAsync", vec![NULL, Num(NO_OBJECT)], INVALID_HANDLE),
        ("cuMemAllocAsync", vec![Out, Num(0), Num(0)], INVALID_VALUE),
        ("cuMemAllocAsync", vec![Out, Num(MAX), Num(0)], OUT_OF_MEMORY),
        ("cuMemAllocAsync", vec![Out, Num(1), Num(NO_OBJECT)], INVALID_HANDLE),
        (
            "cuMemAllocFromPoolAsync",
            vec![Out, Num(1), Num(NO_OBJECT), Num(0)],
            INVALID_VALUE,
        ),
        ("cuMemPoolGetAttribute", vec![Num(NO_OBJECT), Num(5), Out], INVALID_VALUE),
        ("cuMemPoolDestroy", vec![Num(NO_OBJECT)], INVALID_VALUE),
        ("cuMemPoolCreate", vec![Out, NULL], INVALID_VALUE),
        ("cuMemCreate", vec![Out, Num(1), properties(1), Num(0)], INVALID_VALUE),
        ("cuMemCreate", vec![Out, Num(0), properties(1), Num(0)], INVALID_VALUE),
        ("cuMemCreate", vec![Out, Num(1 << 50), properties(1), Num(0)], OUT_OF_MEMORY),
        (
            "cuMemCreate",
            vec![Out, Num(PAGE), properties(1 | 9 << 32), Num(0)],
            INVALID_DEVICE,
        ),
        ("cuMemCreate", vec![Out, Num(PAGE), properties(0), Num(0)], INVALID_VALUE),
        ("cuMemCreate", vec![Out, Num(PAGE), NULL, Num(0)], INVALID_VALUE),
        ("cuMemCreate", vec![NULL, Num(PAGE), properties(1), Num(0)], INVALID_VALUE),
        ("cuMemRelease", vec![Num(NO_OBJECT)], INVALID_VALUE),
        ("cuMemRelease", vec![NULL], INVALID_VALUE),
        (
            "cuMemAddressReserve",
            vec![Out, Num(MAX), Num(0), Num(0), Num(0)],
            INVALID_VALUE,
        ),
        (
            "cuMemAddressReserve",
            vec![Out, Num(1 << 60), Num(0), Num(0), Num(0)],
            OUT_OF_MEMORY,
        ),
        (
            "cuMemAddressReserve",
            vec![Out, Num(PAGE), Num(3), Num(0), Num(0)],
            INVALID_VALUE,
        ),
        ("cuMemAddressFree", vec![Num(MAX), Num(MAX)], INVALID_VALUE),
        (
            "cuMemMap",
            vec![Num(PAGE), Num(PAGE), Num(0), Num(NO_OBJECT), Num(0)],
            INVALID_VALUE,
        ),
        ("cuMemUnmap", vec![Num(MAX), Num(MAX)], INVALID_VALUE),
        ("cuMemUnmap", vec![Num(0), Num(0)], INVALID_VALUE),
        ("cuMemImportFromShareableHandle", vec![Out, Num(MAX), Num(1)], INVALID_VALUE),
        ("cuArray3DCreate_v2", vec![Out, NULL], INVALID_VALUE),
        (
            "cuArray3DCreate_v2",
            vec![Out, array([MAX, MAX, MAX, 1 | 1 << 32, 0])],
            OUT_OF_MEMORY,
        ),
        (
            "cuArray3DCreate_v2",
            vec![Out, array([1, 1, 1, 1 | 3 << 32, 0])],
            INVALID_VALUE,
        ),
        ("cuArrayDestroy", vec![Num(NO_OBJECT)], INVALID_HANDLE),
        ("cuGraphLaunch", vec![Num(NO_OBJECT), Num(0)], INVALID_HANDLE),
        ("cuGraphDestroy", vec![NULL], INVALID_HANDLE),
        ("cuStreamSynchronize", vec![Num(NO_OBJECT)], INVALID_HANDLE),
        ("cuStreamEndCapture", vec![Num(0), Out], 401),
        ("cuLaunch", vec![Num(NO_OBJECT)], INVALID_HANDLE),
        ("cuModuleLoadData", vec![Out, NULL], INVALID_VALUE),
        ("cuPointerGetAttribute", vec![Out, Num(2), Num(NO_OBJECT)], INVALID_VALUE),
        ("cuMemsetD32_v2", vec![Num(0), Num(0), Num(MAX)], INVALID_VALUE),
        ("cuMemcpyDtoH_v2", vec![NULL, Num(NO_OBJECT), Num(8)], INVALID_VALUE),
        ("cuImportExternalMemory", vec![Out, NULL], INVALID_VALUE),
        ("cuGetErrorName", vec![Num(12345), Out], INVALID_VALUE),
        ("cuGetErrorName", vec![Num(2), NULL], INVALID_VALUE),
        ("cuGetProcAddress_v2", vec![NULL, Out, Num(12000), Num(0), Out], INVALID_VALUE),
        (
            "cuGetProcAddress_v2",
            vec![Text("cuInit"), NULL, Num(12000), Num(0), Out],
            INVALID_VALUE,
        ),
    ];
    let bed = Bed::new();
    let mut process = bed.user();
    let before = bed.used();
    for (name, arguments, code) in cases {
        assert_eq!(process.code(name, &arguments), code, "{name}{arguments:?}");
        assert_eq!(bed.used(), before, "{name}{arguments:?}");
    }
}

#[test]
fn what_was_freed_cannot_be_freed_again() {
    let cases: [(&str, Vec<Arg>, &str, i32); 6] = [
        ("cuMemAlloc_v2", vec![Out, Num(1)], "cuMemFree_v2", INVALID_VALUE),
        ("cuMemAlloc_v2", vec![Out, Num(PAGE)], "cuMemFree_v2", INVALID_VALUE),
        ("cuMemAllocManaged", vec![Out, Num(1), Num(1)], "cuMemFree_v2", INVALID_VALUE),
        ("cuMemAllocAsync", vec![Out, Num(1), Num(0)], "cuMemFreeAsync", INVALID_VALUE),
        (
            "cuMemCreate",
            vec![Out, Num(PAGE), Words(vec![1, 1, 0, 0]), Num(0)],
            "cuMemRelease",
            INVALID_VALUE,
        ),
        (
            "cuCtxCreate_v2",
            vec![Out, Num(0), Num(0)],
            "cuCtxDestroy_v2",
            INVALID_CONTEXT,
        ),
    ];
    let bed = Bed::new();
    let mut process = bed.user();
    for (allocate, arguments, free, code) in cases {
        let handle = process.ok(allocate, &arguments);
        process.ok(free, &[Num(handle), Num(0)]);
        assert_eq!(process.code(free, &[Num(handle), Num(0)]), code, "{free}");
    }
}
