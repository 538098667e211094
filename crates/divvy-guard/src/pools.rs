//! Stream-ordered allocation (`cuMemAllocAsync`): a pool takes memory from the GPU, and programs take theirs from the pool.
//!
//! A pool is charged with the memory that it has reserved from the GPU, which the driver reports, and not with what programs have allocated from it. A
//! pool returns memory when a stream, an event, or a context is synchronized, so the charge is corrected then. Memory of graphs is charged in the same way.

use core::sync::atomic::Ordering;

use crate::charge::{self, HeldGpu, give_back, held, note};
use crate::cuda::{
    ALLOCATION_NODE, AllocationNode, AllocationProp, CuDevice, CuResult, DEVICE, DriverCall, GraphNodePrefix, MANAGED,
    MemLocation, NOT_SUPPORTED, OUT_OF_MEMORY, OutPointer, SUCCESS,
};
use crate::current;
use crate::driver::{self, PoolBytes};
use crate::gpu::pages;
use crate::ledger::{HandleEntry, HandleKind};
use crate::process::{GuardedProcess, process};

/// The least amount by which a pool grows.
const CHUNK: u64 = 32 << 20;
/// In `HandleEntry::of` of a pool: it was exported.
const EXPORTED: u64 = 1;
/// The unit of allocations from a pool.
const UNIT: u64 = 512;

/// `cuMemAllocAsync`: from the current pool of the stream's GPU.
pub(crate) fn allocate(bytes: u64, stream: u64, call: &DriverCall) -> CuResult {
    let Some(device) = current::device_of_stream(stream) else {
        return call.run();
    };
    match driver::pool_of(device) {
        Some(pool) => from_pool(device, pool, bytes, call),
        None => call.run(),
    }
}

/// `cuMemAllocFromPoolAsync`. Pools have a record since the program got them, except default pools of GPUs. Others are in the host's memory.
pub(crate) fn allocate_from(pool: u64, bytes: u64, call: &DriverCall) -> CuResult {
    let known = process().and_then(|process| process.reserves.get(HandleKind::Pool, pool));
    let device = match known {
        Some(entry) => CuDevice::try_from(entry.gpu).ok(),
        None => (0..driver::gpus().unwrap_or(0).cast_signed()).find(|device| driver::default_pool_of(*device) == Some(pool)),
    };
    match device {
        Some(device) => from_pool(device, pool, bytes, call),
        None => call.run(),
    }
}

fn from_pool(device: CuDevice, pool: u64, bytes: u64, call: &DriverCall) -> CuResult {
    let held = match held(device) {
        Ok(held) => held,
        Err(Some(code)) => return code,
        Err(None) => return call.run(),
    };
    if know(&held, pool).is_err() {
        return OUT_OF_MEMORY;
    }
    let bytes = bytes.checked_next_multiple_of(UNIT).unwrap_or(u64::MAX);
    // Other threads may be about to take what is free in the pool.
    let others = held.gpu.coming.fetch_add(bytes, Ordering::AcqRel);
    let code = grow(&held, pool, bytes, others, call);
    held.gpu.coming.fetch_sub(bytes, Ordering::AcqRel);
    code
}

fn grow(held: &HeldGpu, pool: u64, bytes: u64, others: u64, call: &DriverCall) -> CuResult {
    let mut settled = false;
    loop {
        let reserved = driver::pool_bytes(pool, PoolBytes::Reserved).unwrap_or(0);
        let used = driver::pool_bytes(pool, PoolBytes::Used).unwrap_or(0);
        let free = reserved.saturating_sub(used).saturating_sub(others);
        let growth = match bytes.saturating_sub(free) {
            0 => 0,
            more => more.checked_next_multiple_of(CHUNK).unwrap_or(u64::MAX),
        };
        let answer = if settled {
            held.gpu.reserve(growth, &held.allowed)
        } else {
            held.gpu.try_reserve(growth, &held.allowed)
        };
        if answer.is_ok() {
            let code = call.run();
            settle(held.process, HandleKind::Pool, pool);
            held.gpu.cancel(growth);
            return code;
        }
        if settled {
            return OUT_OF_MEMORY;
        }
        // Pools may have returned memory with which they are still charged.
        settle_all(held.process);
        settled = true;
    }
}

/// Record a pool, if it has no record yet.
fn know(held: &HeldGpu, pool: u64) -> Result<(), crate::ledger::NoRoom> {
    // During the capture of a graph, what seems to be allocated from the pool becomes the graph's.
    know_graphs(held)?;
    let pool = HandleEntry::new(HandleKind::Pool, pool, held.device.unsigned_abs(), 0, 0);
    held.process.reserves.insert_new(pool)
}

/// Record that graphs may have memory of a GPU.
fn know_graphs(held: &HeldGpu) -> Result<(), crate::ledger::NoRoom> {
    held.process.pools.store(1, Ordering::Release);
    let device = held.device.unsigned_abs();
    held.process
        .reserves
        .insert_new(HandleEntry::new(HandleKind::Graphs, u64::from(device), device, 0, 0))
}

/// `cuGraphAddMemAllocNode`: the driver allocates the node's memory when the graph is launched. A node that does not fit now is refused now. A launch is
/// charged but not refused.
///
/// # Safety
///
/// `node` is null or valid, as the driver demands it.
pub(crate) unsafe fn add_node(node: *const AllocationNode, call: &DriverCall) -> CuResult {
    // SAFETY: the caller's promise.
    match unsafe { node.as_ref() }.and_then(refused) {
        Some(code) => code,
        None => call.run(),
    }
}

/// The error for a node whose memory does not fit.
#[inline(never)]
fn refused(node: &AllocationNode) -> Option<CuResult> {
    let held = match held_pool(&node.pool) {
        Ok(held) => held,
        Err(code) => return code,
    };
    if know_graphs(&held).is_err() {
        return Some(OUT_OF_MEMORY);
    }
    if held.gpu.reserve(pages(node.bytes), &held.allowed).is_err() {
        return Some(OUT_OF_MEMORY);
    }
    held.gpu.cancel(pages(node.bytes));
    None
}

/// `cuGraphAddNode`: the same for a node of any type.
///
/// # Safety
///
/// `node` is null or valid, as the driver demands it.
pub(crate) unsafe fn add_any_node(node: *const GraphNodePrefix, call: &DriverCall) -> CuResult {
    // SAFETY: the caller's promise.
    match unsafe { node.as_ref() } {
        // SAFETY: the reference is valid.
        Some(node) if node.kind == ALLOCATION_NODE => unsafe { add_node(&node.allocation, call) },
        _ => call.run(),
    }
}

/// Charge a pool, or the graphs of a GPU, with what they have reserved.
fn settle(process: &GuardedProcess, kind: HandleKind, pool: u64) {
    // Answers of the driver must be recorded in their order. These calls do not call back into the program.
    let _locked = process.settling.lock();
    let now = match kind {
        HandleKind::Graphs => CuDevice::try_from(pool).ok().and_then(driver::graph_bytes),
        _ => driver::pool_bytes(pool, PoolBytes::Reserved),
    };
    let Some(now) = now.map(pages) else { return };
    let mut before = 0;
    let entry = process.reserves.change(kind, pool, &mut |entry| {
        before = entry.size;
        entry.size = now;
        false
    });
    if let Some(gpu) = entry
        .and_then(|entry| CuDevice::try_from(entry.gpu).ok())
        .and_then(|device| process.gpu(device))
    {
        gpu.adjust(before, now);
    }
}

/// Charge each pool and the graphs of each GPU with what they have reserved.
pub(crate) fn settle_all(process: &GuardedProcess) {
    let mut place = 0;
    while let Some((at, entry)) = process.reserves.next(place) {
        let kind = if entry.is(HandleKind::Graphs) {
            HandleKind::Graphs
        } else {
            HandleKind::Pool
        };
        settle(process, kind, entry.key);
        place = at.wrapping_add(1);
    }
}

/// Handle a call that may change how much memory pools and graphs have: a synchronization, a launch, or the end of a graph.
pub(crate) fn synchronize(code: CuResult) -> CuResult {
    if let Some(process) = process()
        && process.pools.load(Ordering::Acquire) != 0
    {
        settle_all(process);
    }
    code
}

/// How the GPU is held to a share that has the memory of a pool. Managed memory moves to the GPU that uses it, wherever the pool prefers it to be. It is charged as if
/// all of it were there.
fn held_pool(prop: &AllocationProp) -> Result<HeldGpu, Option<CuResult>> {
    let device = match (prop.kind, prop.location.kind) {
        (MANAGED, place) if place != DEVICE => current::device().or(Some(0)),
        _ => current::device_at(prop.location),
    };
    let held = held(device.ok_or(None)?)?;
    if prop.kind == MANAGED && held.allowed.refuse_managed {
        return Err(Some(NOT_SUPPORTED));
    }
    Ok(held)
}

/// `cuMemGetDefaultMemPool`, `cuMemGetMemPool`: the program gets a pool that it may not have created.
///
/// # Safety
///
/// `location` is null or valid, as the driver demands it.
#[inline(never)]
pub(crate) unsafe fn get(location: *const MemLocation, kind: i32, code: CuResult, pool: OutPointer) -> CuResult {
    // SAFETY: the caller's promise.
    let Some(location) = (unsafe { location.as_ref() }).filter(|_| code == SUCCESS) else {
        return code;
    };
    match held_pool(&AllocationProp::new(kind, *location)) {
        Ok(held) if know(&held, pool.get()).is_err() => OUT_OF_MEMORY,
        Ok(_) | Err(None) => code,
        Err(Some(code)) => code,
    }
}

/// `cuMemPoolExportToShareableHandle`.
pub(crate) fn export(pool: u64, call: &DriverCall) -> CuResult {
    let Some(process) = process() else { return call.run() };
    // Before the driver is called, so that another thread cannot give the memory back in between. If the call fails, the pool is charged longer than needed.
    process.reserves.change(HandleKind::Pool, pool, &mut |entry| {
        entry.of = EXPORTED;
        false
    });
    call.run()
}

/// `cuMemPoolCreate`: the pool has no memory yet, but its GPU is recorded.
///
/// # Safety
///
/// `prop` is null or valid, as the driver demands it.
pub(crate) unsafe fn create(prop: *const AllocationProp, call: &DriverCall, pool: OutPointer) -> CuResult {
    // SAFETY: the caller's promise.
    let held = match unsafe { prop.as_ref() }.map_or(Err(None), held_pool) {
        Ok(held) => held,
        Err(Some(code)) => return code,
        Err(None) => return call.run(),
    };
    if held.process.reserves.room().is_err() {
        return OUT_OF_MEMORY;
    }
    let code = call.run();
    if code == SUCCESS {
        held.process.pools.store(1, Ordering::Release);
        note(
            held.process,
            HandleEntry::new(HandleKind::Pool, pool.get(), held.device.unsigned_abs(), 0, 0),
        );
    }
    code
}

/// `cuMemPoolDestroy`: memory that is still allocated from the pool stays allocated, and the driver does not report when it is freed. It stays charged until
/// the driver reuses the handle for another pool, or the process ends. Others may keep all that an exported pool has, so that stays charged until the process ends.
pub(crate) fn destroy(pool: u64, call: &DriverCall) -> CuResult {
    let Some(process) = process() else { return call.run() };
    settle(process, HandleKind::Pool, pool);
    let used = driver::pool_bytes(pool, PoolBytes::Used).map_or(0, pages);
    let Some(mut entry) = process.reserves.take(HandleKind::Pool, pool) else {
        return call.run();
    };
    let code = call.run();
    if code == SUCCESS {
        if entry.of == EXPORTED {
            return code;
        }
        if used == 0 {
            give_back(process, &entry);
            return code;
        }
        if let Some(gpu) = CuDevice::try_from(entry.gpu).ok().and_then(|device| process.gpu(device)) {
            gpu.adjust(entry.size, used);
        }
        entry.size = used;
    }
    charge::note(process, entry);
    code
}

/// `cuMemPoolTrimTo`, `cuMemPoolSetAttribute`.
pub(crate) fn change(pool: u64, code: CuResult) -> CuResult {
    if let Some(process) = process() {
        settle(process, HandleKind::Pool, pool);
    }
    code
}
