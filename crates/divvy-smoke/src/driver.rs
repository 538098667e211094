//! What the steps need of CUDA's driver, as a trait: without a GPU, tests run the same steps on a driver in memory, and let each call fail.

use std::ops::DerefMut;

/// A `CUresult` (cuda.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaCode(pub i32);

impl CudaCode {
    pub const OUT_OF_MEMORY: CudaCode = CudaCode(2);
    pub const NO_DEVICE: CudaCode = CudaCode(100);
    pub const INVALID_HANDLE: CudaCode = CudaCode(400);
}

/// A call that returned an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallFailure {
    /// The function's symbol, such as `cuMemAlloc_v2`.
    pub call: &'static str,
    pub code: CudaCode,
    /// What the driver's compiler said.
    pub log: String,
}

impl CallFailure {
    pub fn new(call: &'static str, code: CudaCode) -> CallFailure {
        CallFailure {
            call,
            code,
            log: String::new(),
        }
    }
}

pub type Result<T> = std::result::Result<T, CallFailure>;

/// A context, module, function, stream, or event of the driver. Only the driver that returned it knows what it means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverHandle(pub usize);

/// An address in the GPU's memory.
pub type GpuAddress = u64;

/// Page-locked memory of the host.
pub type Pinned = Box<dyn DerefMut<Target = [u8]>>;

/// The texts that the program brings along. No other text is given to the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModuleText {
    /// The kernels for every GPU.
    Smoke,
    /// The kernel for tensor cores.
    Tensor,
}

impl ModuleText {
    /// Return the PTX, without comments.
    pub fn ptx(self) -> &'static str {
        match self {
            ModuleText::Smoke => include_str!(concat!(env!("OUT_DIR"), "/smoke.ptx")),
            ModuleText::Tensor => include_str!(concat!(env!("OUT_DIR"), "/tensor.ptx")),
        }
    }
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelArgument {
    U32(u32),
    U64(u64),
}

/// A kernel's name and the size of its grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    pub blocks: (u32, u32),
    pub threads: (u32, u32),
}

macro_rules! driver {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $symbol:literal;)*) => {
        /// The functions of the driver that the steps call.
        pub trait Driver {
            $($(#[$doc])* fn $name(&self, $($argument: $type),*) -> Result<$result>;)*
        }

        /// A driver with something before each call. If that fails, the call is not made.
        #[derive(Debug)]
        pub struct Hooked<D, F> {
            pub driver: D,
            pub before: F,
        }

        impl<D: Driver, F: Fn(&'static str) -> Result<()>> Driver for Hooked<D, F> {
            $(fn $name(&self, $($argument: $type),*) -> Result<$result> {
                (self.before)($symbol)?;
                self.driver.$name($($argument),*)
            })*
        }
    };
}

driver! {
    /// Initialize the driver.
    fn init() -> () = "cuInit";
    /// Return the driver's version of CUDA: 12040 is 12.4.
    fn version() -> i32 = "cuDriverGetVersion";
    /// Return how many GPUs there are.
    fn count() -> i32 = "cuDeviceGetCount";
    /// Return a GPU.
    fn device(index: i32) -> i32 = "cuDeviceGet";
    fn name(device: i32) -> String = "cuDeviceGetName";
    fn uuid(device: i32) -> [u8; 16] = "cuDeviceGetUuid_v2";
    fn attribute(attribute: i32, device: i32) -> i32 = "cuDeviceGetAttribute";
    /// Return a GPU's memory in bytes.
    fn total(device: i32) -> u64 = "cuDeviceTotalMem_v2";
    /// Make a GPU's primary context.
    fn retain(device: i32) -> DriverHandle = "cuDevicePrimaryCtxRetain";
    fn release(device: i32) -> () = "cuDevicePrimaryCtxRelease_v2";
    /// Use a context in this thread.
    fn enter(context: DriverHandle) -> () = "cuCtxSetCurrent";
    /// Return how many bytes are free, and how many there are.
    fn memory() -> (u64, u64) = "cuMemGetInfo_v2";
    fn allocate(bytes: u64) -> GpuAddress = "cuMemAlloc_v2";
    fn free(address: GpuAddress) -> () = "cuMemFree_v2";
    fn allocate_pinned(bytes: usize) -> Pinned = "cuMemAllocHost_v2";
    fn free_pinned(memory: Pinned) -> () = "cuMemFreeHost";
    fn upload(to: GpuAddress, from: &[u8]) -> () = "cuMemcpyHtoD_v2";
    fn download(to: &mut [u8], from: GpuAddress) -> () = "cuMemcpyDtoH_v2";
    /// Copy within the GPU, in a stream.
    fn copy(to: GpuAddress, from: GpuAddress, bytes: u64, stream: DriverHandle) -> () = "cuMemcpyDtoDAsync_v2";
    /// Set bytes to a value.
    fn set(to: GpuAddress, value: u8, bytes: u64) -> () = "cuMemsetD8_v2";
    /// Compile one of the program's texts.
    fn load(text: ModuleText) -> DriverHandle = "cuModuleLoadDataEx";
    fn function(module: DriverHandle, name: &'static str) -> DriverHandle = "cuModuleGetFunction";
    fn unload(module: DriverHandle) -> () = "cuModuleUnload";
    fn launch(function: DriverHandle, grid: Grid, arguments: &[KernelArgument], stream: DriverHandle) -> () = "cuLaunchKernel";
    fn stream() -> DriverHandle = "cuStreamCreate";
    fn wait(stream: DriverHandle) -> () = "cuStreamSynchronize";
    fn event() -> DriverHandle = "cuEventCreate";
    fn record(event: DriverHandle, stream: DriverHandle) -> () = "cuEventRecord";
    /// Return the time between two events, in milliseconds.
    fn elapsed(start: DriverHandle, end: DriverHandle) -> f32 = "cuEventElapsedTime";
    fn synchronize() -> () = "cuCtxSynchronize";
}

/// Report whether a kernel's arguments are those that its text declares, in order and size.
///
/// A driver reads as many bytes as the text declares, so fewer arguments would be read from elsewhere.
pub fn agrees(text: &str, kernel: &str, arguments: &[KernelArgument]) -> bool {
    let start = format!(".entry {kernel}(");
    let Some((_, rest)) = text.split_once(&start) else {
        return false;
    };
    let Some((parameters, _)) = rest.split_once(')') else {
        return false;
    };
    let declared = parameters
        .split(',')
        .map(|line| line.split_whitespace().nth(1).unwrap_or_default());
    let given = arguments.iter().map(|argument| match argument {
        KernelArgument::U32(_) => ".u32",
        KernelArgument::U64(_) => ".u64",
    });
    declared.eq(given)
}
