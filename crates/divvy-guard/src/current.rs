//! For which GPU a call is. If the process sees one GPU, as nearly all containers do, the driver is not asked.
//!
//! If it sees several, the driver is asked each time. An answer cannot be kept by the handle of a context or a stream, because the driver reuses handles, nor by
//! thread, because the current context of a thread also changes in ways that the guard does not see.

use crate::cuda::{CuDevice, DEVICE, HOST, HOST_NUMA_CURRENT, MemLocation};
use crate::driver;
use crate::gpu::GuardedGpu;
use crate::process::process;

/// The GPU of a process that sees one. Its ordinal is 0.
pub(crate) fn only_gpu() -> Option<&'static GuardedGpu> {
    process()?.only_gpu(driver::gpus)
}

/// The GPU of the thread's current context. A process with one GPU gets that GPU, even without a context.
pub(crate) fn device() -> Option<CuDevice> {
    match only_gpu() {
        Some(_) => Some(0),
        None => driver::device(),
    }
}

/// The GPU in whose memory a location is; `None` for the host's. Later versions of CUDA have locations of other types, such as a part of a GPU: all that are not
/// known to be the host's count as the current GPU's.
pub(crate) fn device_at(location: MemLocation) -> Option<CuDevice> {
    match location.kind {
        DEVICE => Some(location.id),
        HOST..=HOST_NUMA_CURRENT => None,
        _ => device(),
    }
}

/// The GPU and the current context of the thread.
pub(crate) fn context() -> Option<(CuDevice, u64)> {
    Some((device()?, driver::context()?))
}

/// The GPU of a stream. The streams that every context has are those of the current one.
pub(crate) fn device_of_stream(stream: u64) -> Option<CuDevice> {
    let device = device()?;
    if only_gpu().is_some() {
        return Some(device);
    }
    let other = driver::context_of_stream(stream).filter(|context| driver::context() != Some(*context));
    other.and_then(driver::device_of_context).or(Some(device))
}
