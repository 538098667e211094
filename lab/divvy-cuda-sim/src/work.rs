//! Streams, events, and kernels: simulated work that takes time of the GPU.

use std::collections::BTreeMap;
use std::env;
use std::thread;
use std::time::Duration;

use crate::module::{LoadedModule, ModuleFunction};

/// Streams, events, and kernels of this process, by handle.
#[derive(Debug, Default)]
pub(crate) struct CudaWork {
    pub(crate) streams: BTreeMap<usize, CudaStream>,
    /// When the work before each event ends; `None` if the event has not been recorded.
    pub(crate) events: BTreeMap<usize, Option<u64>>,
    pub(crate) modules: BTreeMap<usize, LoadedModule>,
    /// The module of each library.
    pub(crate) libraries: BTreeMap<usize, usize>,
    pub(crate) functions: BTreeMap<usize, ModuleFunction>,
}

/// A stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CudaStream {
    pub(crate) device: usize,
    /// When its work ends, on the monotonic clock.
    pub(crate) ends: u64,
    /// The graph that it is being captured into.
    pub(crate) capture: Option<usize>,
}

/// Return the time of the monotonic clock in nanoseconds. All processes have the same.
pub(crate) fn now() -> u64 {
    divvy_gpu_sim::monotonic().as_nanos().try_into().unwrap_or(u64::MAX)
}

/// Return by what the times between events are multiplied (`DIVVY_CUDA_SIM_SLOW`).
pub(crate) fn slowness() -> f64 {
    let factor = env::var("DIVVY_CUDA_SIM_SLOW").ok();
    factor.and_then(|text| text.parse().ok()).unwrap_or(1.0)
}

/// Wait until a time of the monotonic clock. [`u64::MAX`] never comes.
pub(crate) fn wait_until(until: u64) {
    loop {
        match until.saturating_sub(now()) {
            _ if until == u64::MAX => thread::sleep(Duration::from_secs(3600)),
            0 => return,
            left => thread::sleep(Duration::from_nanos(left)),
        }
    }
}
