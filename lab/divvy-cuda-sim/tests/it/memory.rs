//! What allocations take of a GPU.

use proptest::prelude::*;

use crate::bed::{Arg, Bed, CONTEXT, MEMORY, MIB, NULL, Num, Out, PAGE, Process, Words};

const OUT_OF_MEMORY: i32 = 2;
const INVALID_VALUE: i32 = 1;

/// `CUmemAllocationProp` of pinned memory on a GPU.
fn pinned(gpu: u64) -> Arg {
    Words(vec![1, 1 | gpu << 32, 0, 0])
}

/// `CUmemPoolProps` of a pool on a GPU.
fn pool_on(gpu: u64) -> Vec<u64> {
    let mut words = vec![0; 11];
    words[0] = 1;
    words[1] = 1 | gpu << 32;
    words
}

/// `CUDA_ARRAY3D_DESCRIPTOR` of floats.
fn floats(width: u64, height: u64, depth: u64) -> Arg {
    Words(vec![width, height, depth, 0x20 | 1 << 32, 0])
}

#[test]
fn each_allocation_takes_and_returns_whole_pages() {
    let cases: [(&str, Vec<Arg>, &str, u64); 15] = [
        ("cuMemAlloc_v2", vec![Out, Num(1)], "cuMemFree_v2", PAGE),
        ("cuMemAlloc_v2", vec![Out, Num(MIB)], "cuMemFree_v2", PAGE),
        ("cuMemAlloc_v2", vec![Out, Num(PAGE)], "cuMemFree_v2", PAGE),
        ("cuMemAlloc_v2", vec![Out, Num(PAGE + 1)], "cuMemFree_v2", 2 * PAGE),
        ("cuMemAlloc", vec![Out, Num(1)], "cuMemFree", PAGE),
        (
            "cuMemAllocPitch_v2",
            vec![Out, Out, Num(513), Num(8192), Num(4)],
            "cuMemFree_v2",
            4 * PAGE,
        ),
        (
            "cuMemAllocPitch",
            vec![Out, Out, Num(513), Num(8192), Num(4)],
            "cuMemFree",
            4 * PAGE,
        ),
        ("cuMemAllocManaged", vec![Out, Num(3 * MIB), Num(1)], "cuMemFree_v2", 2 * PAGE),
        (
            "cuMemCreate",
            vec![Out, Num(3 * PAGE), pinned(0), Num(0)],
            "cuMemRelease",
            3 * PAGE,
        ),
        (
            "cuArray3DCreate_v2",
            vec![Out, floats(1024, 1024, 0)],
            "cuArrayDestroy",
            2 * PAGE,
        ),
        (
            "cuMipmappedArrayCreate",
            vec![Out, floats(1024, 1024, 0), Num(2)],
            "cuMipmappedArrayDestroy",
            3 * PAGE,
        ),
        ("cuMemAllocHost_v2", vec![Out, Num(64 * MIB)], "cuMemFreeHost", 0),
        ("cuCtxCreate_v2", vec![Out, Num(0), Num(0)], "cuCtxDestroy_v2", CONTEXT),
        (
            "cuCtxCreate_v3",
            vec![Out, NULL, Num(0), Num(0), Num(0)],
            "cuCtxDestroy_v2",
            CONTEXT,
        ),
        ("cuCtxCreate_v4", vec![Out, NULL, Num(0), Num(0)], "cuCtxDestroy", CONTEXT),
    ];
    let bed = Bed::new();
    let mut process = bed.user();
    assert_eq!(bed.used(), CONTEXT);
    for (allocate, arguments, free, taken) in cases {
        let handle = process.ok(allocate, &arguments);
        assert_eq!(bed.used(), CONTEXT + taken, "{allocate}{arguments:?}");
        process.ok(free, &[Num(handle)]);
        assert_eq!(bed.used(), CONTEXT, "{free}");
    }
    process.ok("cuDevicePrimaryCtxRelease_v2", &[Num(0)]);
    assert_eq!(bed.usage(0), []);
}

#[test]
fn small_allocations_share_pages() {
    let bed = Bed::new();
    let mut process = bed.user();
    let addresses: Vec<u64> = (0..4096).map(|_| process.ok("cuMemAlloc_v2", &[Out, Num(1)])).collect();
    assert_eq!(bed.used(), CONTEXT + PAGE, "4096 times 512 bytes");
    process.ok("cuMemAlloc_v2", &[Out, Num(1)]);
    assert_eq!(bed.used(), CONTEXT + 2 * PAGE);
    for address in addresses {
        process.ok("cuMemFree_v2", &[Num(address)]);
    }
    assert_eq!(bed.used(), CONTEXT + PAGE, "the first page is empty");
}

#[test]
fn the_last_page_of_the_gpu_can_be_had_and_no_more() {
    let bed = Bed::new();
    let (mut process, mut other) = (bed.user(), bed.user());
    let left = MEMORY - 2 * CONTEXT;
    let get_info = |process: &mut Process| process.call("cuMemGetInfo_v2", &[Out, Out]).words;
    assert_eq!(get_info(&mut other), [left, MEMORY]);
    assert_eq!(process.code("cuMemAlloc_v2", &[Out, Num(left + 1)]), OUT_OF_MEMORY);
    process.ok("cuMemAlloc_v2", &[Out, Num(left)]);
    assert_eq!(get_info(&mut other), [0, MEMORY]);
    for (name, arguments) in [
        ("cuMemAlloc_v2", vec![Out, Num(1)]),
        ("cuMemAllocManaged", vec![Out, Num(1), Num(1)]),
        ("cuMemCreate", vec![Out, Num(PAGE), pinned(0), Num(0)]),
        ("cuMemAllocAsync", vec![Out, Num(1), Num(0)]),
        ("cuArray3DCreate_v2", vec![Out, floats(1, 0, 0)]),
        ("cuCtxCreate_v2", vec![Out, Num(0), Num(0)]),
    ] {
        assert_eq!(other.code(name, &arguments), OUT_OF_MEMORY, "{name}");
    }
    other.enter(1);
    other.ok("cuMemAlloc_v2", &[Out, Num(MEMORY - CONTEXT)]);
    process.kill();
    other.enter(0);
    other.ok("cuMemAlloc_v2", &[Out, Num(left + CONTEXT)]);
}

#[test]
fn a_context_takes_its_allocations_with_it() {
    let bed = Bed::new();
    let mut process = bed.user();
    let context = process.ok("cuCtxCreate_v2", &[Out, Num(0), Num(0)]);
    let address = process.ok("cuMemAlloc_v2", &[Out, Num(5 * MIB)]);
    process.ok("cuMemAlloc_v2", &[Out, Num(1)]);
    assert_eq!(bed.used(), 2 * CONTEXT + 4 * PAGE);
    process.ok("cuCtxDestroy_v2", &[Num(context)]);
    assert_eq!(bed.used(), CONTEXT);
    assert_eq!(process.code("cuMemFree_v2", &[Num(address)]), INVALID_VALUE);
    process.ok("cuDevicePrimaryCtxRetain", &[Out, Num(0)]);
    process.ok("cuDevicePrimaryCtxRelease", &[Num(0)]);
    process.ok("cuMemAlloc_v2", &[Out, Num(1)]);
    process.ok("cuDevicePrimaryCtxReset_v2", &[Num(0)]);
    assert_eq!(bed.usage(0), []);
    assert_eq!(process.code("cuMemAlloc_v2", &[Out, Num(1)]), 709, "the context is destroyed");
}

/// cuda.h, cuMemRelease: "The memory allocation will be freed when all outstanding mappings to the memory are unmapped and when all outstanding
/// references to the handle (including it's shareable counterparts) are also released".
#[test]
fn physical_memory_lives_until_its_last_use() {
    let bed = Bed::new();
    let mut process = bed.user();
    let with = CONTEXT + PAGE;
    let range = process.ok("cuMemAddressReserve", &[Out, Num(2 * PAGE), Num(0), Num(0), Num(0)]);
    assert_eq!(bed.used(), CONTEXT, "addresses cost nothing");
    let handle = process.ok("cuMemCreate", &[Out, Num(PAGE), pinned(0), Num(0)]);
    for address in [range, range + PAGE] {
        process.ok("cuMemMap", &[Num(address), Num(PAGE), Num(0), Num(handle), Num(0)]);
    }
    assert_eq!(
        process.code("cuMemMap", &[Num(range), Num(PAGE), Num(0), Num(handle), Num(0)]),
        INVALID_VALUE,
        "mapped"
    );
    process.ok("cuMemRelease", &[Num(handle)]);
    assert_eq!(
        process.code("cuMemRelease", &[Num(handle)]),
        INVALID_VALUE,
        "no handle is left"
    );
    assert_eq!(bed.used(), with, "two mappings");
    process.ok("cuMemUnmap", &[Num(range), Num(PAGE)]);
    assert_eq!(bed.used(), with, "a mapping");
    let again = process.ok("cuMemRetainAllocationHandle", &[Out, Num(range + PAGE)]);
    process.ok("cuMemUnmap", &[Num(range + PAGE), Num(PAGE)]);
    assert_eq!(bed.used(), with, "a handle");
    process.ok("cuMemRelease", &[Num(again)]);
    assert_eq!(bed.used(), CONTEXT);
    process.ok("cuMemAddressFree", &[Num(range), Num(2 * PAGE)]);
}

/// A pool reserves more than it uses.
#[test]
fn a_synchronization_returns_a_pools_unused_memory() {
    const CHUNK: u64 = 32 * MIB;
    let bed = Bed::new();
    let mut process = bed.user();
    let pool = process.ok("cuDeviceGetDefaultMemPool", &[Out, Num(0)]);
    let attribute = |process: &mut Process, attribute| process.ok("cuMemPoolGetAttribute", &[Num(pool), Num(attribute), Out]);
    let first = process.ok("cuMemAllocAsync", &[Out, Num(1000), Num(0)]);
    let second = process.ok("cuMemAllocFromPoolAsync", &[Out, Num(CHUNK), Num(pool), Num(0)]);
    assert_eq!(
        (attribute(&mut process, 5), attribute(&mut process, 7)),
        (2 * CHUNK, CHUNK + 1024)
    );
    assert_eq!(bed.used(), CONTEXT + 2 * CHUNK);
    process.ok("cuMemFreeAsync", &[Num(second), Num(0)]);
    assert_eq!(bed.used(), CONTEXT + 2 * CHUNK, "before a synchronization");
    process.ok("cuStreamSynchronize", &[Num(0)]);
    assert_eq!(bed.used(), CONTEXT + PAGE, "what is used");
    process.ok("cuMemPoolSetAttribute", &[Num(pool), Num(4), Words(vec![CHUNK])]);
    process.ok("cuMemFreeAsync", &[Num(first), Num(0)]);
    let third = process.ok("cuMemAllocAsync", &[Out, Num(CHUNK), Num(0)]);
    process.ok("cuMemFreeAsync", &[Num(third), Num(0)]);
    process.ok("cuCtxSynchronize", &[]);
    assert_eq!(attribute(&mut process, 5), CHUNK, "the threshold");
    process.ok("cuMemPoolTrimTo", &[Num(pool), Num(PAGE)]);
    assert_eq!((attribute(&mut process, 5), attribute(&mut process, 6)), (PAGE, 2 * CHUNK));
    process.ok("cuMemAlloc_v2", &[Out, Num(MEMORY - CONTEXT)]);
    assert_eq!(attribute(&mut process, 5), 0, "what the pool did not use was needed");
    assert_eq!(
        process.code("cuMemPoolDestroy", &[Num(pool)]),
        INVALID_VALUE,
        "the default pool"
    );
}

#[test]
fn on_a_gpu_that_is_nearly_full_a_pool_has_what_the_ledger_says() {
    // How much is left next to two pools of one chunk each, what the first is asked for then, and what it answers.
    let cases = [
        (4, 31, 0),
        (0, 29, 0),
        (4, 60, 0),
        (4, 66, 0),
        (4, 67, OUT_OF_MEMORY),
        (40, 31, 0),
        (40, 110, OUT_OF_MEMORY),
    ];
    for (left, asked, code) in cases {
        let bed = Bed::new();
        let mut process = bed.user();
        let pools = [0; 2].map(|_| process.ok("cuMemPoolCreate", &[Out, Words(pool_on(0))]));
        let small = pools.map(|pool| process.ok("cuMemAllocFromPoolAsync", &[Out, Num(PAGE), Num(pool), Num(0)]));
        process.ok("cuMemFreeAsync", &[Num(small[1]), Num(0)]);
        let linear = MEMORY - CONTEXT - 64 * MIB - left * MIB;
        process.ok("cuMemAlloc_v2", &[Out, Num(linear)]);
        let answer = process.code("cuMemAllocFromPoolAsync", &[Out, Num(asked * MIB), Num(pools[0]), Num(0)]);
        let reserved = pools.map(|pool| process.ok("cuMemPoolGetAttribute", &[Num(pool), Num(5), Out]));
        assert_eq!(
            bed.used(),
            CONTEXT + linear + reserved[0] + reserved[1],
            "{left} left, {asked} asked"
        );
        assert_eq!(answer, code, "{left} left, {asked} asked");
    }
}

#[test]
fn a_destroyed_pool_lives_until_its_last_allocation_is_freed() {
    let bed = Bed::new();
    let mut process = bed.user();
    let pool = process.ok("cuMemPoolCreate", &[Out, Words(pool_on(0))]);
    process.ok("cuDeviceSetMemPool", &[Num(0), Num(pool)]);
    let address = process.ok("cuMemAllocAsync", &[Out, Num(PAGE), Num(0)]);
    process.ok("cuMemPoolDestroy", &[Num(pool)]);
    assert_eq!(bed.used(), CONTEXT + PAGE);
    assert_ne!(process.ok("cuDeviceGetMemPool", &[Out, Num(0)]), pool);
    process.ok("cuMemFreeAsync", &[Num(address), Num(0)]);
    assert_eq!(bed.used(), CONTEXT);
}

#[test]
fn a_launched_graph_keeps_memory_until_a_trim() {
    let bed = Bed::new();
    let mut process = bed.user();
    let graph = process.ok("cuGraphCreate", &[Out, Num(0)]);
    let mut parameters = pool_on(0);
    parameters.extend([0, 0, 3 * MIB, 0]);
    let added = process.call("cuGraphAddMemAllocNode", &[Out, Num(graph), NULL, Num(0), Words(parameters)]);
    let address = added.words[15];
    assert_eq!((added.code, bed.used()), (0, CONTEXT), "a node takes nothing");
    let executable = process.ok("cuGraphInstantiateWithFlags", &[Out, Num(graph), Num(0)]);
    process.ok("cuGraphLaunch", &[Num(executable), Num(0)]);
    assert_eq!(bed.used(), CONTEXT + 2 * PAGE);
    assert_eq!(
        process.code("cuGraphLaunch", &[Num(executable), Num(0)]),
        INVALID_VALUE,
        "its memory is in use"
    );
    process.ok("cuMemFreeAsync", &[Num(address), Num(0)]);
    process.ok("cuGraphLaunch", &[Num(executable), Num(0)]);
    process.ok("cuMemFree_v2", &[Num(address)]);
    process.ok("cuGraphExecDestroy", &[Num(executable)]);
    assert_eq!(process.ok("cuDeviceGetGraphMemAttribute", &[Num(0), Num(2), Out]), 2 * PAGE);
    process.ok("cuDeviceGraphMemTrim", &[Num(0)]);
    assert_eq!(process.ok("cuDeviceGetGraphMemAttribute", &[Num(0), Num(2), Out]), 0);
    assert_eq!(bed.used(), CONTEXT);
}

#[test]
fn a_graph_frees_what_a_graph_has_allocated_and_only_once() {
    let bed = Bed::new();
    let mut process = bed.user();
    let graphs = [0; 2].map(|_| process.ok("cuGraphCreate", &[Out, Num(0)]));
    // `CUgraphNodeParams` of the type CU_GRAPH_NODE_TYPE_MEM_ALLOC.
    let mut parameters = vec![0; 32];
    parameters[0] = 10;
    parameters[2..13].copy_from_slice(&pool_on(0));
    parameters[15] = PAGE;
    let added = process.call(
        "cuGraphAddNode_v2",
        &[Out, Num(graphs[0]), NULL, NULL, Num(0), Words(parameters)],
    );
    let (code, address) = (added.code, added.words[1 + 16]);
    assert_eq!(code, 0);
    let mut free = |graph, address| process.code("cuGraphAddMemFreeNode", &[Out, Num(graph), NULL, Num(0), Num(address)]);
    assert_eq!(free(graphs[1], address + PAGE), INVALID_VALUE, "no allocation");
    assert_eq!((free(graphs[1], address), free(graphs[1], address)), (0, INVALID_VALUE));
    let [first, second] = graphs.map(|graph| process.ok("cuGraphInstantiateWithFlags", &[Out, Num(graph), Num(0)]));
    for _ in 0..2 {
        process.ok("cuGraphLaunch", &[Num(first), Num(0)]);
        assert_eq!(process.ok("cuDeviceGetGraphMemAttribute", &[Num(0), Num(0), Out]), PAGE);
        process.ok("cuGraphLaunch", &[Num(second), Num(0)]);
        assert_eq!(process.ok("cuDeviceGetGraphMemAttribute", &[Num(0), Num(0), Out]), 0);
    }
}

#[test]
fn a_graph_that_frees_on_launch_can_be_launched_again() {
    let bed = Bed::new();
    let mut process = bed.user();
    let graph = process.ok("cuGraphCreate", &[Out, Num(0)]);
    let parameters = [pool_on(0), vec![0, 0, PAGE, 0]].concat();
    process.ok("cuGraphAddMemAllocNode", &[Out, Num(graph), NULL, Num(0), Words(parameters)]);
    let executable = process.ok("cuGraphInstantiateWithFlags", &[Out, Num(graph), Num(1)]);
    for _ in 0..3 {
        process.ok("cuGraphLaunch", &[Num(executable), Num(0)]);
        assert_eq!(bed.used(), CONTEXT + PAGE);
    }
    // Another graph needs memory of its own while this one's is in use.
    let graph = process.ok("cuGraphCreate", &[Out, Num(0)]);
    let parameters = [pool_on(0), vec![0, 0, 2 * PAGE, 0]].concat();
    process.ok("cuGraphAddMemAllocNode", &[Out, Num(graph), NULL, Num(0), Words(parameters)]);
    let executable = process.ok("cuGraphInstantiateWithFlags", &[Out, Num(graph), Num(1)]);
    process.ok("cuGraphLaunch", &[Num(executable), Num(0)]);
    assert_eq!(bed.used(), CONTEXT + 3 * PAGE);
}

#[test]
fn while_a_stream_is_captured_nothing_is_allocated() {
    let bed = Bed::new();
    let mut process = bed.user();
    let stream = process.ok("cuStreamCreate", &[Out, Num(0)]);
    process.ok("cuStreamBeginCapture_v2", &[Num(stream), Num(0)]);
    let address = process.ok("cuMemAllocAsync", &[Out, Num(PAGE), Num(stream)]);
    process.ok("cuMemFreeAsync", &[Num(address), Num(stream)]);
    let graph = process.ok("cuStreamEndCapture", &[Num(stream), Out]);
    assert_eq!(bed.used(), CONTEXT);
    let executable = process.ok("cuGraphInstantiateWithFlags", &[Out, Num(graph), Num(0)]);
    for _ in 0..2 {
        process.ok("cuGraphLaunch", &[Num(executable), Num(stream)]);
        assert_eq!(bed.used(), CONTEXT + PAGE);
    }
}

/// The last handle of the memory must be gone, too.
#[test]
fn exported_memory_lives_until_its_last_descriptor() {
    let bed = Bed::new();
    let mut process = bed.user();
    let handle = process.ok("cuMemCreate", &[Out, Num(PAGE), pinned(0), Num(0)]);
    let descriptor = process.ok("cuMemExportToShareableHandle", &[Out, Num(handle), Num(1), Num(0)]);
    let imported = process.ok("cuMemImportFromShareableHandle", &[Out, Num(descriptor), Num(1)]);
    assert_eq!(bed.used(), CONTEXT + PAGE, "it is the same memory");
    process.ok("cuMemRelease", &[Num(handle)]);
    assert_eq!(bed.used(), CONTEXT + PAGE, "the import and the descriptor");
    process.ok("cuMemRelease", &[Num(imported)]);
    assert_eq!(bed.used(), CONTEXT + PAGE, "the descriptor");
    // The C library's.
    process.ok("close", &[Num(descriptor)]);
    process.ok("cuCtxSynchronize", &[]);
    assert_eq!(bed.used(), CONTEXT);
}

#[test]
fn imported_memory_of_another_interface_costs_the_process() {
    let bed = Bed::new();
    let mut process = bed.user();
    let description = [vec![1, 0, 0, 3 * MIB], vec![0; 9]].concat();
    let external = process.ok("cuImportExternalMemory", &[Out, Words(description)]);
    assert_eq!(bed.used(), CONTEXT + 2 * PAGE, "no library simulates Vulkan");
    process.ok("cuDestroyExternalMemory", &[Num(external)]);
    assert_eq!(bed.used(), CONTEXT);
}

#[test]
fn another_process_can_open_memory_and_pays_nothing() {
    let bed = Bed::new();
    let (mut owner, mut guest) = (bed.user(), bed.user());
    let memory = owner.ok("cuMemAlloc_v2", &[Out, Num(5 * MIB)]);
    let handle = owner.call("cuIpcGetMemHandle", &[Words(vec![0; 8]), Num(memory)]).words;
    assert_eq!(owner.code("open", &[Words(handle.clone())]), 201, "its own");
    let mut empty = handle.clone();
    empty[3] = 0;
    assert_eq!(guest.code("open", &[Words(empty)]), INVALID_VALUE, "without a size");
    assert_eq!(guest.code("open", &[Words(vec![u64::MAX; 8])]), INVALID_VALUE, "no handle");
    let opened = guest.ok("open", &[Words(handle)]);
    guest.ok("cuMemsetD8_v2", &[Num(opened), Num(0), Num(5 * MIB)]);
    let pooled = owner.ok("cuMemAllocAsync", &[Out, Num(PAGE), Num(0)]);
    let data = owner.call("cuMemPoolExportPointer", &[Words(vec![0; 8]), Num(pooled)]).words;
    // A process cannot hand its descriptors on here, so the guest imports a pool of its own.
    let pool = guest.ok("cuMemPoolCreate", &[Out, Words(pool_on(0))]);
    let descriptor = guest.ok("cuMemPoolExportToShareableHandle", &[Out, Num(pool), Num(1), Num(0)]);
    let imported = guest.ok("cuMemPoolImportFromShareableHandle", &[Out, Num(descriptor), Num(1), Num(0)]);
    let pointer = guest.ok("cuMemPoolImportPointer", &[Out, Num(imported), Words(data)]);
    let usage = bed.usage(0);
    let of = |process: &Process| usage.iter().find(|of| of.pid == process.pid()).map(|of| of.bytes);
    assert_eq!(of(&guest), Some(CONTEXT));
    assert_eq!(of(&owner), Some(CONTEXT + 3 * PAGE + 32 * MIB));
    for (name, arguments) in [
        ("cuMemAllocFromPoolAsync", vec![Out, Num(1), Num(imported), Num(0)]),
        ("cuDeviceSetMemPool", vec![Num(0), Num(imported)]),
    ] {
        assert_eq!(guest.code(name, &arguments), INVALID_VALUE, "{name} of an imported pool");
    }
    guest.ok("cuMemFreeAsync", &[Num(pointer), Num(0)]);
    guest.ok("cuIpcCloseMemHandle", &[Num(opened)]);
    assert_eq!(bed.usage(0), usage);
}

/// The memory counts as the process's that still has it.
/// The memory also stays if the process that made it frees it.
#[test]
fn opened_memory_outlives_its_maker() {
    let bed = Bed::new();
    let (mut owner, mut guest) = (bed.user(), bed.user());
    let mut made = [0; 2];
    let opened = [0, 1].map(|index: usize| {
        made[index] = owner.ok("cuMemAlloc_v2", &[Out, Num(5 * MIB)]);
        let handle = owner.call("cuIpcGetMemHandle", &[Words(vec![0; 8]), Num(made[index])]).words;
        let address = guest.ok("open", &[Words(handle.clone())]);
        assert_eq!(guest.ok("open", &[Words(handle)]), address, "once more");
        guest.ok("cuIpcCloseMemHandle", &[Num(address)]);
        address
    });
    owner.ok("cuMemFree_v2", &[Num(made[0])]);
    assert_eq!(bed.used(), 2 * CONTEXT + 6 * PAGE);
    drop(owner);
    guest.ok("cuCtxSynchronize", &[]);
    assert_eq!(bed.used(), CONTEXT + 6 * PAGE);
    for address in opened {
        guest.ok("cuIpcCloseMemHandle", &[Num(address)]);
    }
    assert_eq!(bed.used(), CONTEXT);
}

#[test]
fn limits_of_a_context_take_memory_until_its_end() {
    let bed = Bed::new();
    let mut process = bed.user();
    assert_eq!(process.ok("cuCtxGetLimit", &[Out, Num(2)]), 8 * MIB);
    process.ok("cuCtxSetLimit", &[Num(2), Num(108 * MIB)]);
    assert_eq!(bed.used(), CONTEXT + 100 * MIB);
    process.ok("cuCtxSetLimit", &[Num(1), Num(3 * MIB)]);
    assert_eq!(bed.used(), CONTEXT + 102 * MIB);
    process.ok("cuCtxSetLimit", &[Num(2), Num(MIB)]);
    assert_eq!(bed.used(), CONTEXT + 2 * MIB);
    assert_eq!(process.code("cuCtxSetLimit", &[Num(2), Num(1 << 40)]), OUT_OF_MEMORY);
    assert_eq!(
        process.code("cuCtxSetLimit", &[Num(9), Num(1)]),
        215,
        "CUDA_ERROR_UNSUPPORTED_LIMIT"
    );
    process.ok("cuDevicePrimaryCtxReset_v2", &[Num(0)]);
    assert_eq!(bed.used(), 0);
}

/// What a process of the property does.
#[derive(Debug, Clone)]
enum Step {
    Allocate(u64),
    Managed(u64),
    Array(u64),
    /// Create physical memory, map it, and release the handle.
    Map(u64),
    /// Free the allocation at this place of the list.
    Free(prop::sample::Index),
    /// End as by SIGKILL, and start again.
    Kill,
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    // At least a megabyte: smaller allocations share pages, which have a property of their own.
    let bytes = MIB..96 * MIB;
    let step = prop_oneof![
        3 => bytes.clone().prop_map(Step::Allocate),
        1 => bytes.clone().prop_map(Step::Managed),
        1 => bytes.clone().prop_map(Step::Array),
        2 => bytes.prop_map(Step::Map),
        4 => any::<prop::sample::Index>().prop_map(Step::Free),
        1 => Just(Step::Kill),
    ];
    prop::collection::vec((0usize..3, step), 1..40)
}

/// A live allocation: what frees it, and its size in pages.
type Live = (&'static str, Vec<u64>, u64);

/// Perform a step that allocates. Return what is live then, or `None` if the GPU has too little.
fn perform(process: &mut Process, step: &Step) -> Option<Live> {
    let allocated = |process: &mut Process, name: &str, arguments: &[Arg]| {
        let answer = process.call(name, arguments);
        assert!(matches!(answer.code, 0 | OUT_OF_MEMORY), "{name}{arguments:?}: {answer:?}");
        (answer.code == 0).then(|| answer.words[0])
    };
    match *step {
        Step::Allocate(bytes) => {
            let address = allocated(process, "cuMemAlloc_v2", &[Out, Num(bytes)])?;
            Some(("cuMemFree_v2", vec![address], bytes.next_multiple_of(PAGE)))
        }
        Step::Managed(bytes) => {
            let address = allocated(process, "cuMemAllocManaged", &[Out, Num(bytes), Num(1)])?;
            Some(("cuMemFree_v2", vec![address], bytes.next_multiple_of(PAGE)))
        }
        Step::Array(bytes) => {
            let array = allocated(process, "cuArray3DCreate_v2", &[Out, floats(bytes / 4, 0, 0)])?;
            Some((
                "cuArrayDestroy",
                vec![array],
                (bytes / 4 * 4).next_multiple_of(PAGE).max(PAGE),
            ))
        }
        Step::Map(bytes) => {
            let bytes = bytes.next_multiple_of(PAGE);
            let handle = allocated(process, "cuMemCreate", &[Out, Num(bytes), pinned(0), Num(0)])?;
            let address = process.ok("cuMemAddressReserve", &[Out, Num(bytes), Num(0), Num(0), Num(0)]);
            process.ok("cuMemMap", &[Num(address), Num(bytes), Num(0), Num(handle), Num(0)]);
            process.ok("cuMemRelease", &[Num(handle)]);
            Some(("cuMemUnmap", vec![address, bytes], bytes))
        }
        Step::Free(_) | Step::Kill => None,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 200, ..ProptestConfig::default() })]

    /// The ledger never has more memory than the GPU.
    #[test]
    fn the_ledger_equals_the_live_allocations(steps in steps()) {
        let bed = Bed::new();
        let mut processes: Vec<Process> = (0..3).map(|_| bed.user()).collect();
        let mut live: Vec<Vec<Live>> = vec![Vec::new(); 3];
        for (who, step) in steps {
            let sum = |live: &[Vec<Live>]| -> u64 { 3 * CONTEXT + live.iter().flatten().map(|of| of.2).sum::<u64>() };
            let before = sum(&live);
            match &step {
                Step::Kill => {
                    live[who].clear();
                    processes[who].kill();
                    processes[who] = bed.user();
                }
                Step::Free(index) if !live[who].is_empty() => {
                    let index = index.index(live[who].len());
                    let (name, arguments, _) = live[who].swap_remove(index);
                    let arguments: Vec<Arg> = arguments.into_iter().map(Num).collect();
                    processes[who].ok(name, &arguments);
                }
                Step::Free(_) => {}
                Step::Allocate(bytes) | Step::Managed(bytes) | Step::Array(bytes) | Step::Map(bytes) => {
                    match perform(&mut processes[who], &step) {
                        Some(of) => live[who].push(of),
                        None => prop_assert!(before + bytes.next_multiple_of(PAGE) > MEMORY, "refused {step:?} at {before}"),
                    }
                }
            }
            let usage = bed.usage(0);
            prop_assert!(bed.used() <= MEMORY);
            for (process, live) in processes.iter().zip(&live) {
                let held = usage.iter().find(|of| of.pid == process.pid()).map(|of| of.bytes);
                prop_assert_eq!(held, Some(CONTEXT + live.iter().map(|of| of.2).sum::<u64>()), "{:?}", step);
            }
            prop_assert_eq!(bed.used(), sum(&live));
        }
    }

    /// Each step is a size, whether it comes from a pool, and whether an allocation is freed, too.
    #[test]
    fn small_and_pooled_memory_counts_while_it_lives(
        steps in prop::collection::vec((1..3 * MIB, any::<bool>(), any::<Option<prop::sample::Index>>()), 1..60),
        reset in any::<bool>()
    ) {
        let bed = Bed::new();
        let mut process = bed.user();
        let mut live: Vec<(&str, u64, u64)> = Vec::new();
        for (bytes, pooled, victim) in steps {
            let (allocate, free) = if pooled { ("cuMemAllocAsync", "cuMemFreeAsync") } else { ("cuMemAlloc_v2", "cuMemFree_v2") };
            let answer = process.call(allocate, &[Out, Num(bytes), Num(0)]);
            prop_assert!(matches!(answer.code, 0 | OUT_OF_MEMORY));
            if answer.code == 0 {
                live.push((free, answer.words[0], bytes));
            }
            if let (Some(victim), false) = (victim, live.is_empty()) {
                let (free, address, _) = live.swap_remove(victim.index(live.len()));
                process.ok(free, &[Num(address), Num(0)]);
            }
            let needed: u64 = live.iter().map(|of| of.2).sum();
            let used = bed.used();
            prop_assert!(used <= MEMORY && used >= CONTEXT + needed, "{used} for {needed}");
            let hits = |address: u64, bytes: u64| live.iter().filter(|of| (address..address + bytes).contains(&of.1)).count();
            prop_assert!(live.iter().all(|(_, address, bytes)| hits(*address, *bytes) == 1), "no two overlap");
        }
        if reset {
            process.ok("cuDevicePrimaryCtxReset_v2", &[Num(0)]);
            prop_assert_eq!(bed.used(), 0);
            return Ok(());
        }
        for (free, address, _) in live {
            process.ok(free, &[Num(address), Num(0)]);
        }
        process.ok("cuCtxSynchronize", &[]);
        prop_assert_eq!(bed.used(), CONTEXT);
    }
}
