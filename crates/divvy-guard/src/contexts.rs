//! Contexts: each takes memory that no other call accounts for.

use core::sync::atomic::Ordering;

use crate::charge;
use crate::cuda::{Code, Device, OUT_OF_MEMORY, SUCCESS};
use crate::driver;
use crate::gpu::{Gpu, Reserved};
use crate::ledger::Kind;
use crate::pools;
use crate::process::process;
use crate::sys;

/// The primary context is not charged.
const ABSENT: u32 = 0;
/// A thread is about to make it.
const COMING: u32 = 1;
/// It is charged.
const CHARGED: u32 = 2;

/// `cuCtxCreate`, `cuGreenCtxCreate`.
pub(crate) fn create(device: Device, call: impl FnOnce() -> Code, context: impl FnOnce() -> u64) -> Code {
    match charge::held(device) {
        Ok(held) => held.allocate(Kind::Context, 0, held.gpu.context(), call, context),
        Err(Some(code)) => code,
        Err(None) => call(),
    }
}

/// `cuCtxDestroy`, `cuGreenCtxDestroy`: memory of a context dies with it.
pub(crate) fn destroy(context: u64, call: impl FnOnce() -> Code) -> Code {
    let code = charge::free(Kind::Context, context, call);
    if code == SUCCESS
        && let Some(process) = process()
    {
        charge::sweep(process, context);
        pools::settle_all(process);
    }
    code
}

/// `cuDevicePrimaryCtxRetain`: the first one makes the context.
pub(crate) fn retain(device: Device, call: impl FnOnce() -> Code, context: impl FnOnce() -> u64) -> Code {
    let held = match charge::held(device) {
        Ok(held) => held,
        Err(Some(code)) => return code,
        Err(None) => return call(),
    };
    let (gpu, charge) = (held.gpu, held.gpu.context());
    let first = first(gpu);
    let reserved = if first {
        gpu.reserve(charge, &held.allowed)
    } else {
        Reserved::Free
    };
    if matches!(reserved, Reserved::Refused) {
        gpu.primary.store(ABSENT, Ordering::Release);
        return OUT_OF_MEMORY;
    }
    let code = call();
    if code == SUCCESS {
        gpu.primary_context.store(context(), Ordering::Release);
    }
    match reserved {
        Reserved::Charged if code == SUCCESS => {
            gpu.commit(charge);
            gpu.primary.store(CHARGED, Ordering::Release);
        }
        Reserved::Charged => {
            gpu.cancel(charge);
            gpu.primary.store(ABSENT, Ordering::Release);
        }
        _ if first => gpu.primary.store(ABSENT, Ordering::Release),
        _ => {}
    }
    code
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
///
/// Between the driver's answer and the change of the charge, another thread can make the context again. It is then not charged until it ends; the agent
/// sees the difference in the driver's numbers.
pub(crate) fn release(device: Device, call: impl FnOnce() -> Code) -> Code {
    let code = call();
    if code != SUCCESS {
        return code;
    }
    let Some(process) = process() else { return code };
    let Some(gpu) = process.gpu(device) else { return code };
    if driver::primary_exists(device) != Some(false) {
        return code;
    }
    if gpu
        .primary
        .compare_exchange(CHARGED, ABSENT, Ordering::AcqRel, Ordering::Acquire)
        .is_ok()
    {
        gpu.free(gpu.context());
    }
    charge::sweep(process, gpu.primary_context.load(Ordering::Acquire));
    pools::settle_all(process);
    code
}
