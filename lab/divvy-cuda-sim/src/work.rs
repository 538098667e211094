//! Streams, events, and kernels: simulated work that takes time of the GPU.

use std::collections::BTreeMap;
use std::env;
use std::thread;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use crate::codes::{Code, INVALID_HANDLE, INVALID_VALUE};
use crate::driver::Driver;

/// Streams, events, and kernels of this process, by handle.
#[derive(Debug, Default)]
pub(crate) struct Work {
    streams: BTreeMap<usize, Stream>,
    /// When the work before each event ends; `None` if the event has not been recorded.
    pub(crate) events: BTreeMap<usize, Option<u64>>,
    pub(crate) modules: BTreeMap<usize, ()>,
    /// How long a launch of each function takes, in nanoseconds.
    functions: BTreeMap<usize, u64>,
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
    let Ok(time) = clock_gettime(ClockId::CLOCK_MONOTONIC) else { return 0 };
    time.tv_sec().cast_unsigned() * 1_000_000_000 + time.tv_nsec().cast_unsigned()
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
fn length_of(name: &str) -> u64 {
    let digits = name.strip_suffix("ns").and_then(|name| name.rsplit_once('_'));
    if let Some(length) = digits.and_then(|(_, digits)| digits.parse().ok()) {
        return length;
    }
    let usual = env::var("DIVVY_CUDA_SIM_KERNEL_NS").ok();
    usual.and_then(|text| text.parse().ok()).unwrap_or(0)
}

impl Driver {
    /// Make a stream in the current context.
    pub(crate) fn create_stream(&mut self) -> Result<usize, Code> {
        let device = self.current_device()?;
        let handle = self.new_handle();
        let stream = Stream {
            device,
            ends: 0,
            capture: None,
        };
        self.work.streams.insert(handle, stream);
        Ok(handle)
    }

    /// End a stream.
    pub(crate) fn destroy_stream(&mut self, handle: usize) -> Result<(), Code> {
        self.work.streams.remove(&handle).map(drop).ok_or(INVALID_HANDLE)
    }

    /// Return a stream. NULL, CU_STREAM_LEGACY, and CU_STREAM_PER_THREAD are streams of the current context's device.
    pub(crate) fn stream(&mut self, handle: usize) -> Result<&mut Stream, Code> {
        if handle > 2 {
            return self.work.streams.get_mut(&handle).ok_or(INVALID_HANDLE);
        }
        let device = self.current_device()?;
        // Below the handles that the driver gives out.
        let key = device * 4 + handle;
        Ok(self.work.streams.entry(key).or_insert(Stream {
            device,
            ends: 0,
            capture: None,
        }))
    }

    /// Return when all work of a device ends that this process has begun.
    pub(crate) fn device_ends(&self, device: usize) -> u64 {
        let mine = self.work.streams.values().filter(|stream| stream.device == device);
        mine.map(|stream| stream.ends).max().unwrap_or(0)
    }

    /// Make a function of a module.
    pub(crate) fn create_function(&mut self, name: &str) -> usize {
        let handle = self.new_handle();
        self.work.functions.insert(handle, length_of(name));
        handle
    }

    /// Return how long a launch of a function takes.
    pub(crate) fn function(&self, handle: usize) -> Result<u64, Code> {
        self.work.functions.get(&handle).copied().ok_or(INVALID_HANDLE)
    }

    /// Launch a function in a stream, or add it to the graph that the stream is captured into.
    pub(crate) fn launch(&mut self, function: usize, stream: usize, grid: [u32; 3], block: [u32; 3]) -> Result<(), Code> {
        let length = self.function(function)?;
        if grid.contains(&0) || block.contains(&0) {
            return Err(INVALID_VALUE);
        }
        if let Some(graph) = self.stream(stream)?.capture {
            return self.add_kernel(graph, length).map(drop);
        }
        self.run(stream, length)
    }

    /// Put work into a stream.
    pub(crate) fn run(&mut self, stream: usize, length: u64) -> Result<(), Code> {
        let Stream { device, ends, .. } = *self.stream(stream)?;
        if length == 0 {
            return Ok(());
        }
        let until = self.devices[device].run(ends.max(now()), length)?;
        self.stream(stream)?.ends = until;
        Ok(())
    }
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
