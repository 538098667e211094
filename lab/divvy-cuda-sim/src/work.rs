//! Streams, events, and kernels: simulated work that takes time of the GPU.

use std::collections::BTreeMap;
use std::env;
use std::thread;
use std::time::Duration;

/// Streams, events, and kernels of this process, by handle.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) streams: BTreeMap<usize, Stream>,
    /// When the work before each event ends; `None` if the event has not been recorded.
    pub(crate) events: BTreeMap<usize, Option<u64>>,
    pub(crate) modules: BTreeMap<usize, ()>,
    /// The module of each library.
    pub(crate) libraries: BTreeMap<usize, usize>,
    /// How long a launch of each function takes, in nanoseconds.
    pub(crate) functions: BTreeMap<usize, u64>,
}

/// A stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream {
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

/// Wait until a time of the monotonic clock.
pub(crate) fn wait_until(until: u64) {
    loop {
        match until.saturating_sub(now()) {
            0 => return,
            left => thread::sleep(Duration::from_nanos(left)),
        }
    }
}

/// Return how long a launch of a kernel of this name takes: `anything_2000ns` takes 2000 ns; others what DIVVY_CUDA_SIM_KERNEL_NS says, or nothing.
pub(crate) fn length_of(name: &str) -> u64 {
    let digits = name.strip_suffix("ns").and_then(|name| name.rsplit_once('_'));
    if let Some(length) = digits.and_then(|(_, digits)| digits.parse().ok()) {
        return length;
    }
    let usual = env::var("DIVVY_CUDA_SIM_KERNEL_NS").ok();
    usual.and_then(|text| text.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_kernel_can_say_how_long_it_takes() {
        for (name, length) in [("gemm_2000ns", 2000), ("_Z4busy_7ns", 7), ("ns", 0), ("x_ns", 0), ("gemm", 0)] {
            assert_eq!(length_of(name), length, "{name}");
        }
    }
}
