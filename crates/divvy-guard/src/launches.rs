//! Launches of kernels and graphs: they wait while the pod has used up its compute time, or while the agent has stopped the pod.
//!
//! Whether a process is held is decided once, when it first launches something or asks for the address of a function that launches. If none of the pod's
//! GPUs has a limit of compute time then, and the agent stops no pods, `cuGetProcAddress` gives it the driver's own functions, so a launch costs nothing. A program that found the guard's
//! functions by `dlsym` pays one branch, which tests whether the driver's function is known.
//!
//! A launch counts for the GPU of the current context, where the driver demands the stream of a kernel to be. A launch into a graph that is being
//! captured counts, too: to ask for that at each launch would cost more than it is worth. If the process sees one GPU, the driver is not asked for the current
//! context either. Then a launch without a context counts as well, before the driver refuses it.
//!
//! If the process sees several GPUs, the driver is asked before about every 17th launch only. While all GPUs that the process uses would let launches pass,
//! the next ones pass on any of them, and count for the GPU for which the driver was asked. So each GPU's count is a sample, which only the estimate
//! between two measurements needs ([`divvy_share::compute`]). As soon as one GPU lets nothing pass, the driver is asked before each launch.

use core::ffi::c_void;
use core::ptr::{self, from_ref, null_mut};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::cuda::{CuDevice, LaunchParameters, Uint};
use crate::current;
use crate::driver;
use crate::gpu::{Credit, GuardedGpu, any_holds_launches};
use crate::process::{GuardedProcess, process};

/// Return the driver's function when a launch may pass, or `None` if this driver does not have it. If launches are not held, note it in `direct`.
#[cold]
pub(crate) fn pass(found: Option<*mut c_void>, direct: &AtomicPtr<c_void>, on: impl FnOnce()) -> Option<*mut c_void> {
    let found = found?;
    if held() {
        on();
    } else {
        direct.store(found, Ordering::Relaxed);
    }
    Some(found)
}

const UNKNOWN: u32 = 0;
const FREE: u32 = 1;
const HELD: u32 = 2;

/// Report whether the guard limits the launches of this process.
pub(crate) fn held() -> bool {
    // Children have it from their parent: they have the same limits.
    static STATE: AtomicU32 = AtomicU32::new(UNKNOWN);
    match STATE.load(Ordering::Relaxed) {
        UNKNOWN => {
            let held = any_holds_launches();
            STATE.store(if held { HELD } else { FREE }, Ordering::Relaxed);
            held
        }
        state => state == HELD,
    }
}

/// A launch on a GPU. Return that GPU if it was looked at whether the launch may pass.
#[inline(never)]
fn on_device(process: &'static GuardedProcess, device: CuDevice) -> Option<&'static GuardedGpu> {
    let gpu = process.gpu(device)?;
    gpu.launch(|| driver::uuid(device)).then_some(gpu)
}

/// How many launches pass, on whatever GPU: those of the only GPU, or those of all GPUs. Null until something was launched. A child finds 0 there.
static ALLOWED: AtomicPtr<Credit> = AtomicPtr::new(null_mut());

/// Use a launch that was allowed earlier. This calls no other function.
pub(crate) fn spend() -> bool {
    // SAFETY: the pointer is null, or one to a part of the state of the process, which stays where it is.
    unsafe { ALLOWED.load(Ordering::Acquire).as_ref() }.is_some_and(Credit::spend)
}

/// A launch on the current GPU. Without one, the driver refuses the launch.
pub(crate) fn on_current() {
    let Some(process) = process() else { return };
    if let Some(gpu) = current::only_gpu() {
        ALLOWED.store(from_ref(&gpu.credit).cast_mut(), Ordering::Release);
        on_device(process, 0);
    } else if let Some(device) = driver::device() {
        ALLOWED.store(from_ref(&process.credit).cast_mut(), Ordering::Release);
        if let Some(gpu) = on_device(process, device) {
            let others = process.seen().filter(|other| !ptr::eq(*other, gpu));
            let most = others.map(GuardedGpu::would_pass).fold(i64::MAX, i64::min);
            gpu.credit.lend(&process.credit, most);
        }
    }
}

/// A launch of a graph.
pub(crate) fn graph() {
    if held() {
        on_current();
    }
}

/// One launch on each of several GPUs.
///
/// # Safety
///
/// As the driver demands: null, or so many launches.
pub(crate) unsafe fn on_each(launches: *const LaunchParameters, count: Uint) {
    // The driver refuses more launches than there are GPUs.
    for index in 0..count.min(64) as usize {
        if launches.is_null() {
            return;
        }
        // SAFETY: the caller's promise.
        let stream = unsafe { launches.wrapping_add(index).read_unaligned() }.stream;
        if let (Some(process), Some(device)) = (process(), current::device_of_stream(stream)) {
            on_device(process, device);
        }
    }
}
