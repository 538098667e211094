//! Streams and launches of the driver.

use super::Driver;
use crate::codes::{Code, INVALID_HANDLE, INVALID_VALUE};
use crate::work::{Stream, length_of, now};

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
