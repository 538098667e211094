//! Contexts: each takes memory that no other call accounts for.

use core::sync::atomic::Ordering;

use crate::charge::{self, Held};
use crate::cuda::{Code, Device, OUT_OF_MEMORY, SUCCESS};
use crate::driver;
use crate::gpu::Gpu;
use crate::ledger::{Entry, Kind};
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
pub(crate) fn create(device: Device, call: impl FnOnce() -> Code, context: impl FnOnce() -> u64) -> Code {
    match charge::held(device) {
        Ok(held) => held.allocate(Kind::Context, 0, held.gpu.context(), call, context),
        Err(Some(code)) => code,
        Err(None) => call(),
    }
}

/// `cuCtxDestroy`: memory of a context dies with it.
pub(crate) fn destroy(context: u64, call: impl FnOnce() -> Code) -> Code {
    let code = charge::free(Kind::Context, context, call);
    if code == SUCCESS {
        destroyed(context);
    }
    code
}

#[inline(never)]
fn destroyed(context: u64) {
    if let Some(process) = process() {
        charge::sweep(process, |entry, _| entry.of == context);
        pools::settle_all(process);
    }
}

/// `cuDevicePrimaryCtxRetain`: the first one makes the context.
pub(crate) fn retain(device: Device, call: impl FnOnce() -> Code) -> Code {
    let held = match charge::held(device) {
        Ok(held) => held,
        Err(Some(code)) => return code,
        Err(None) => return call(),
    };
    let is_first = first(held.gpu);
    if is_first && !coming(&held) {
        return OUT_OF_MEMORY;
    }
    let code = call();
    if is_first {
        came(held.gpu, code);
    }
    code
}

/// `cuGreenCtxCreate`: a green context is a part of the primary context, which it retains.
pub(crate) fn create_green(device: Device, call: impl FnOnce() -> Code, context: impl FnOnce() -> u64) -> Code {
    let code = retain(device, call);
    if code == SUCCESS
        && let Some(process) = process()
    {
        charge::note(process, Entry::new(Kind::Green, context(), device.unsigned_abs(), 0, 0));
    }
    code
}

/// `cuGreenCtxDestroy`.
pub(crate) fn destroy_green(context: u64, call: impl FnOnce() -> Code) -> Code {
    let green = process().and_then(|process| process.ledger.get(Kind::Green, context));
    let code = charge::free(Kind::Green, context, call);
    match green.map(|green| Device::try_from(green.gpu)) {
        Some(Ok(device)) if code == SUCCESS => released(device),
        _ => {}
    }
    code
}

/// Reserve the memory of the primary context, which this thread has to make. `false`: it was refused.
#[inline(never)]
fn coming(held: &Held) -> bool {
    let fits = held.gpu.reserve(held.gpu.context(), &held.allowed).is_ok();
    if !fits {
        held.gpu.primary.store(ABSENT, Ordering::Release);
    }
    fits
}

/// The driver has made the primary context, or not.
#[inline(never)]
fn came(gpu: &Gpu, code: Code) {
    let charge = gpu.context();
    if code == SUCCESS {
        gpu.commit(charge);
        gpu.primary.store(CHARGED, Ordering::Release);
    } else {
        gpu.cancel(charge);
        gpu.primary.store(ABSENT, Ordering::Release);
    }
}

/// Whether this thread has to make the primary context. While another one does, this one waits, because only then it is known whether the context fits.
///
/// It does not wait longer than [`WAITS`]: a tool that the driver calls back can ask for the context in the middle of its making.
fn first(gpu: &Gpu) -> bool {
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
pub(crate) fn release(device: Device, call: impl FnOnce() -> Code) -> Code {
    let code = call();
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
fn released(device: Device) {
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
        gpu.free(gpu.context());
    }
    // The memory of green contexts, which have handles of their own, belongs to the primary context, too.
    let device = device.unsigned_abs();
    charge::sweep(process, |entry, table| {
        entry.gpu == device && !table.has(Kind::Context, entry.of)
    });
    pools::settle_all(process);
}
