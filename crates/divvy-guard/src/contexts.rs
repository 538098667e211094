//! Contexts: each takes memory that no other call accounts for.

use core::ffi::c_int;
use core::sync::atomic::Ordering;

use crate::charge::{self, HeldGpu};
use crate::cuda::{CuDevice, CuResult, DriverCall, OUT_OF_MEMORY, OutPointer, SUCCESS};
use crate::current;
use crate::driver;
use crate::gpu::{GuardedGpu, pages};
use crate::ledger::{HandleEntry, HandleKind};
use crate::pools;
use crate::process::process;
use crate::sys;

/// The primary context is not charged.
const ABSENT: u32 = 0;
/// A thread is about to make it.
const COMING: u32 = 1;
/// It is charged.
const CHARGED: u32 = 2;

/// `cuCtxCreate`.
#[inline(never)]
pub(crate) fn create(device: CuDevice, call: &DriverCall, context: OutPointer) -> CuResult {
    match charge::held(device) {
        Ok(held) => held.allocate(HandleKind::Context, 0, held.gpu.context(), call, context),
        Err(Some(code)) => code,
        Err(None) => call.run(),
    }
}

/// `cuCtxDestroy`: memory of a context dies with it.
pub(crate) fn destroy(context: u64, call: &DriverCall) -> CuResult {
    let code = charge::free(HandleKind::Context, context, call);
    if code == SUCCESS {
        destroyed(context);
    }
    code
}

#[inline(never)]
fn destroyed(context: u64) {
    if let Some(process) = process() {
        charge::sweep(process, &|entry, _| entry.of == context);
        pools::settle_all(process);
    }
}

/// `cuDevicePrimaryCtxRetain`: the first one makes the context.
#[inline(never)]
pub(crate) fn retain(device: CuDevice, call: &DriverCall) -> CuResult {
    let held = match charge::held(device) {
        Ok(held) => held,
        Err(Some(code)) => return code,
        Err(None) => return call.run(),
    };
    let is_first = first(held.gpu);
    // What is reserved is what is given back, also if the agent changes it meanwhile.
    let charge = held.gpu.context();
    if is_first && !coming(&held, charge) {
        return OUT_OF_MEMORY;
    }
    let code = call.run();
    if is_first {
        came(held.gpu, charge, code);
    }
    code
}

/// `cuGreenCtxCreate`: a green context is a part of the primary context, which it retains.
pub(crate) fn create_green(device: CuDevice, call: &DriverCall, context: OutPointer) -> CuResult {
    let code = retain(device, call);
    if code == SUCCESS
        && let Some(process) = process()
    {
        charge::note(
            process,
            HandleEntry::new(HandleKind::Green, context.get(), device.unsigned_abs(), 0, 0),
        );
    }
    code
}

/// `cuGreenCtxDestroy`.
pub(crate) fn destroy_green(context: u64, call: &DriverCall) -> CuResult {
    let green = process().and_then(|process| process.ledger.get(HandleKind::Green, context));
    let code = charge::free(HandleKind::Green, context, call);
    match green.map(|green| CuDevice::try_from(green.gpu)) {
        Some(Ok(device)) if code == SUCCESS => released(device),
        _ => {}
    }
    code
}

/// `cuCtxSetLimit`: charge what the context takes in addition to CUDA's usual limits. With those it is made, so they are in what a context is charged with.
#[inline(never)]
pub(crate) fn limit(which: c_int, value: u64, call: &DriverCall) -> CuResult {
    let Some((device, context)) = current::context() else {
        return call.run();
    };
    let (usual, count) = match which {
        // CU_LIMIT_STACK_SIZE: the stack of each thread that can run at the same time.
        0 => (1 << 10, driver::threads(device)),
        // CU_LIMIT_PRINTF_FIFO_SIZE.
        1 => (1 << 20, 1),
        // CU_LIMIT_MALLOC_HEAP_SIZE.
        2 => (8 << 20, 1),
        // Other limits take nothing, or an amount that is not known.
        _ => return call.run(),
    };
    let charge = |limit: u64| pages(limit.saturating_sub(usual).saturating_mul(count));
    let held = match charge::held(device) {
        Ok(held) => held,
        Err(Some(code)) => return code,
        Err(None) => return call.run(),
    };
    // Contexts are pointers, so no two of them differ in the lowest bits only.
    let key = context | u64::from(which.unsigned_abs());
    let ledger = &held.process.ledger;
    let new = HandleEntry::new(HandleKind::Limit, key, device.unsigned_abs(), 0, context);
    if ledger.insert_new(new).is_err() {
        return OUT_OF_MEMORY;
    }
    let before = ledger.get(HandleKind::Limit, key).map_or(0, |entry| entry.size);
    let growth = charge(value).saturating_sub(before);
    if held.gpu.reserve(growth, &held.allowed).is_err() {
        return OUT_OF_MEMORY;
    }
    let code = call.run();
    // Answers of the driver must be recorded in their order. This question does not call back into the program.
    let locked = held.process.settling.lock();
    let now = driver::limit(which).map_or(before, charge);
    let mut before = now;
    ledger.change(HandleKind::Limit, key, &mut |entry| {
        before = core::mem::replace(&mut entry.size, now);
        false
    });
    held.gpu.adjust(before, now);
    drop(locked);
    held.gpu.cancel(growth);
    code
}

/// Reserve the memory of the primary context, which this thread has to make. `false`: it was refused.
#[inline(never)]
fn coming(held: &HeldGpu, charge: u64) -> bool {
    let fits = held.gpu.reserve(charge, &held.allowed).is_ok();
    if !fits {
        held.gpu.primary.store(ABSENT, Ordering::Release);
    }
    fits
}

/// The driver has made the primary context, or not.
#[inline(never)]
fn came(gpu: &GuardedGpu, charge: u64, code: CuResult) {
    if code == SUCCESS {
        gpu.context_made(charge);
        gpu.primary.store(CHARGED, Ordering::Release);
    } else {
        gpu.cancel(charge);
        gpu.primary.store(ABSENT, Ordering::Release);
    }
}

/// Whether this thread has to make the primary context. While another one does, this one waits, because only then it is known whether the context fits.
///
/// It does not wait longer than [`WAITS`]: a tool that the driver calls back can ask for the context in the middle of its making.
fn first(gpu: &GuardedGpu) -> bool {
    for _ in 0..WAITS {
        match gpu
            .primary
            .compare_exchange(ABSENT, COMING, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => return true,
            Err(COMING) => sys::nap(),
            Err(_) => return false,
        }
    }
    false
}

/// Naps of 100 microseconds: 1 s.
const WAITS: u32 = 10_000;

/// `cuDevicePrimaryCtxRelease`, `cuDevicePrimaryCtxReset`. A reset ends the context although it is retained.
pub(crate) fn release(device: CuDevice, code: CuResult) -> CuResult {
    if code == SUCCESS {
        released(device);
    }
    code
}

/// Return the charge of the primary context and of its memory if the context has ended.
///
/// Between the driver's answer and the change of the charge, another thread can make the context again. It is then not charged until it ends; the agent
/// sees the difference in the driver's numbers.
#[inline(never)]
fn released(device: CuDevice) {
    let Some(process) = process() else { return };
    let Some(gpu) = process.gpu(device) else { return };
    if driver::primary_exists(device) != Some(false) {
        return;
    }
    if gpu
        .primary
        .compare_exchange(CHARGED, ABSENT, Ordering::AcqRel, Ordering::Acquire)
        .is_ok()
    {
        gpu.context_ended();
    }
    // The memory of green contexts, which have handles of their own, belongs to the primary context, too.
    let device = device.unsigned_abs();
    charge::sweep(process, &|entry, table| {
        entry.gpu == device && !table.has(HandleKind::Context, entry.of)
    });
    pools::settle_all(process);
}
