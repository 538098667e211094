//! Streams and launches of the driver.

use divvy_ptx::{Kernel, KernelFault, KernelLaunch, ThreadOrder};

use super::SimulatedDriver;
use crate::codes::{CuCode, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED};
use crate::contents::KernelMemory;
use crate::context::top;
use crate::module::{LoadedModule, ModuleFunction, compile};
use crate::trace::{self, complain};
use crate::work::{CudaStream, now};

/// After how many instructions a kernel counts as one that never ends: some minutes.
const LIMIT: u64 = 1 << 36;

impl SimulatedDriver {
    /// Make a stream in the current context.
    pub(crate) fn create_stream(&mut self) -> Result<usize, CuCode> {
        let device = self.current_device()?;
        let handle = self.new_handle();
        let stream = CudaStream {
            device,
            ends: 0,
            capture: None,
        };
        self.work.streams.insert(handle, stream);
        Ok(handle)
    }

    /// End a stream.
    pub(crate) fn destroy_stream(&mut self, handle: usize) -> Result<(), CuCode> {
        self.work.streams.remove(&handle).map(drop).ok_or(INVALID_HANDLE)
    }

    /// Return a stream. NULL, CU_STREAM_LEGACY, and CU_STREAM_PER_THREAD are streams of the current context's device.
    pub(crate) fn stream(&mut self, handle: usize) -> Result<&mut CudaStream, CuCode> {
        if let Some(code) = top().and_then(|handle| self.contexts.get(&handle)?.fault) {
            return Err(code);
        }
        if handle > 2 {
            return self.work.streams.get_mut(&handle).ok_or(INVALID_HANDLE);
        }
        let device = self.current_device()?;
        // Below the handles that the driver gives out.
        let key = device * 4 + handle;
        Ok(self.work.streams.entry(key).or_insert(CudaStream {
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
    pub(crate) fn create_function(&mut self, module: usize, name: &str) -> Result<usize, CuCode> {
        let function = self.work.modules.get(&module).ok_or(INVALID_HANDLE)?.function(name)?;
        let handle = self.new_handle();
        self.work.functions.insert(handle, function);
        Ok(handle)
    }

    /// Return a function.
    pub(crate) fn function(&self, handle: usize) -> Result<&ModuleFunction, CuCode> {
        self.work.functions.get(&handle).ok_or(INVALID_HANDLE)
    }

    /// Return how long a function takes as a node of a graph. There it cannot be executed.
    pub(crate) fn node(&self, handle: usize) -> Result<u64, CuCode> {
        match self.function(handle)? {
            ModuleFunction { kernel: Some(_), .. } => Err(NOT_SUPPORTED),
            ModuleFunction { length, .. } => Ok(*length),
        }
    }

    /// Launch a function in a stream, or add it to the graph that the stream is captured into. `parameters` reads the bytes of the parameters.
    pub(crate) fn launch(
        &mut self,
        function: usize,
        stream: usize,
        grid: [u32; 3],
        block: [u32; 3],
        parameters: impl Fn(&Kernel) -> Result<Vec<u8>, CuCode>,
    ) -> Result<(), CuCode> {
        let ModuleFunction { name, length, kernel } = self.function(function)?.clone();
        if grid.contains(&0) || block.contains(&0) {
            return Err(INVALID_VALUE);
        }
        if let Some(graph) = self.stream(stream)?.capture {
            let length = self.node(function)?;
            return self.add_kernel(graph, length).map(drop);
        }
        let parameters = kernel.as_deref().map(&parameters).transpose()?;
        if trace::hangs(&name) {
            self.stream(stream)?.ends = u64::MAX;
            return Ok(());
        }
        let (waited, fault) = match (kernel, parameters) {
            (Some(kernel), Some(parameters)) => self.execute(&kernel, stream, grid, block, parameters)?,
            _ => (0, None),
        };
        self.run(stream, length.saturating_add(waited))?;
        if let Some(code) = fault.or_else(|| trace::injected(&name)) {
            self.fail(code);
        }
        Ok(())
    }

    /// Execute a kernel. Its work is done when this returns. Return for how long it waited, and with what it failed, if it did.
    fn execute(
        &mut self,
        kernel: &Kernel,
        stream: usize,
        grid: [u32; 3],
        block: [u32; 3],
        parameters: Vec<u8>,
    ) -> Result<(u64, Option<CuCode>), CuCode> {
        let wrong = trace::wrong(kernel.name()).map(|(index, offset)| {
            let parameter = kernel.parameters().get(index).filter(|parameter| parameter.bytes == 8);
            let bytes = parameter.and_then(|of| parameters.get(of.offset..)?.first_chunk());
            bytes.and_then(|bytes| u64::from_le_bytes(*bytes).checked_add(offset))
        });
        let launch = KernelLaunch {
            grid,
            only: None,
            block,
            parameters,
            order: ThreadOrder::Forward,
            timer: now(),
            limit: LIMIT,
        };
        let outcome = kernel.run(&launch, &mut KernelMemory::new(&mut self.memory, &mut self.vmm));
        match wrong {
            Some(Some(address)) => self.corrupt(address),
            Some(None) => complain(&format!(
                "DIVVY_CUDA_SIM_WRONG: this parameter of {} is no address",
                kernel.name()
            )),
            None => {}
        }
        match outcome {
            Ok(outcome) => Ok((outcome.nanoseconds, None)),
            Err(KernelFault::Launch) => Err(INVALID_VALUE),
            Err(fault) => {
                complain(&format!("the kernel {}: {fault}", kernel.name()));
                if let KernelFault::Endless { .. } = fault {
                    self.stream(stream)?.ends = u64::MAX;
                }
                Ok((0, fault.code()))
            }
        }
    }

    /// Make the current context unusable.
    fn fail(&mut self, code: CuCode) {
        if let Some(context) = top().and_then(|handle| self.contexts.get_mut(&handle)) {
            context.fault = Some(code);
        }
    }

    /// Load code into a module. An error has the text of the compiler's log.
    pub(crate) fn load(&mut self, text: Option<&str>) -> Result<usize, (CuCode, String)> {
        let device = self.current_device().unwrap_or(0);
        let loaded = match text {
            None => LoadedModule::Unread,
            Some(text) => compile(text, self.version, self.devices[device].card.capability())?,
        };
        let handle = self.new_handle();
        self.work.modules.insert(handle, loaded);
        Ok(handle)
    }

    /// Put work into a stream.
    pub(crate) fn run(&mut self, stream: usize, length: u64) -> Result<(), CuCode> {
        let CudaStream { device, ends, .. } = *self.stream(stream)?;
        if length == 0 || ends == u64::MAX {
            return Ok(());
        }
        let until = self.devices[device].run(ends.max(now()), length)?;
        self.stream(stream)?.ends = until;
        Ok(())
    }
}
