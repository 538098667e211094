//! The driver's library. This is the only module with unsafe code.

#![allow(unsafe_code, reason = "calls of a C ABI; each block says why it is sound")]

use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::ops::{Deref, DerefMut};
use std::ptr;

use libloading::Library;

use crate::driver::{
    CallFailure, CudaCode, Driver, DriverHandle, GpuAddress, Grid, KernelArgument, ModuleText, Pinned, Result, agrees,
};
use crate::options::Via;

/// `CUjit_option`: the buffers for what the compiler says, and their sizes (cuda.h).
const JIT_OPTIONS: [c_uint; 4] = [3, 4, 5, 6];
/// The size of each of the two buffers.
const LOG: usize = 16 << 10;
/// The version of CUDA whose functions `cuGetProcAddress` is asked for. Later versions have functions of other types under some of the names.
const ABI: i32 = 12_000;

/// The reason why a library cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnusableLibrary {
    #[error("{0}")]
    NotLoaded(#[from] libloading::Error),
    // The newest of the functions without an older form is cuDeviceGetUuid.
    #[error("it has no {0}: divvy-smoke needs CUDA 9.2 or newer, which NVIDIA's driver has from version 396 on")]
    Lacks(&'static str),
}

macro_rules! functions {
    ($($field:ident = $symbol:literal $(or $older:literal)?: fn($($type:ty),*);)*) => {
        /// The functions, with their types from cuda.h. `CUdeviceptr` and `size_t` have 64 bits, `CUdevice` is an int.
        struct Functions {
            $($field: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        impl Functions {
            /// # Safety
            /// `find` returns the address of CUDA's function of that name, which stays valid.
            unsafe fn find(find: impl Fn(&'static str) -> Option<*mut c_void>) -> std::result::Result<Functions, UnusableLibrary> {
                Ok(Functions {
                    $($field: {
                        let address = find($symbol)$(.or_else(|| find($older)))?.ok_or(UnusableLibrary::Lacks($symbol))?;
                        // SAFETY: the address is that of a function of this type, by this function's contract and cuda.h.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> c_int>(address) }
                    },)*
                })
            }
        }
    };
}

functions! {
    init = "cuInit": fn(c_uint);
    version = "cuDriverGetVersion": fn(*mut c_int);
    count = "cuDeviceGetCount": fn(*mut c_int);
    device = "cuDeviceGet": fn(*mut c_int, c_int);
    name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    // CUDA 11.4 has the second version, which knows MIG devices.
    uuid = "cuDeviceGetUuid_v2" or "cuDeviceGetUuid": fn(*mut [u8; 16], c_int);
    attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int);
    total = "cuDeviceTotalMem_v2": fn(*mut usize, c_int);
    retain = "cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int);
    // CUDA 11.0 has the second version.
    release = "cuDevicePrimaryCtxRelease_v2" or "cuDevicePrimaryCtxRelease": fn(c_int);
    enter = "cuCtxSetCurrent": fn(*mut c_void);
    memory = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    allocate = "cuMemAlloc_v2": fn(*mut u64, usize);
    free = "cuMemFree_v2": fn(u64);
    allocate_pinned = "cuMemAllocHost_v2": fn(*mut *mut c_void, usize);
    free_pinned = "cuMemFreeHost": fn(*mut c_void);
    upload = "cuMemcpyHtoD_v2": fn(u64, *const c_void, usize);
    download = "cuMemcpyDtoH_v2": fn(*mut c_void, u64, usize);
    copy = "cuMemcpyDtoDAsync_v2": fn(u64, u64, usize, *mut c_void);
    set = "cuMemsetD8_v2": fn(u64, u8, usize);
    load = "cuModuleLoadDataEx": fn(*mut *mut c_void, *const c_void, c_uint, *mut c_uint, *mut *mut c_void);
    function = "cuModuleGetFunction": fn(*mut *mut c_void, *mut c_void, *const c_char);
    unload = "cuModuleUnload": fn(*mut c_void);
    launch = "cuLaunchKernel": fn(*mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void, *mut *mut c_void);
    stream = "cuStreamCreate": fn(*mut *mut c_void, c_uint);
    wait = "cuStreamSynchronize": fn(*mut c_void);
    event = "cuEventCreate": fn(*mut *mut c_void, c_uint);
    record = "cuEventRecord": fn(*mut c_void, *mut c_void);
    elapsed = "cuEventElapsedTime": fn(*mut f32, *mut c_void, *mut c_void);
    synchronize = "cuCtxSynchronize": fn();
}

/// What a [`DriverHandle`] means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HandleMeaning {
    Context,
    Module(ModuleText),
    Function(ModuleText, &'static str),
    Stream,
    Event,
}

/// CUDA's driver.
pub(crate) struct CudaDriver {
    functions: Functions,
    /// The pointers behind the handles. One that is no longer valid is `None`.
    handles: RefCell<Vec<Option<(HandleMeaning, *mut c_void)>>>,
    /// The addresses of page-locked memory that was not freed.
    pinned: RefCell<Vec<*mut c_void>>,
    /// Never unloaded, because the driver's threads run its code.
    _library: std::mem::ManuallyDrop<Library>,
}

/// Page-locked memory. It is freed by [`Driver::free_pinned`], or when the process ends.
struct PinnedMemory {
    at: *mut u8,
    bytes: usize,
}

impl Deref for PinnedMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the driver allotted these bytes, they were set to zero, and they are freed only together with this value, which alone has the address.
        unsafe { std::slice::from_raw_parts(self.at, self.bytes) }
    }
}

impl DerefMut for PinnedMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and this reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) }
    }
}

fn check(call: &'static str, code: c_int) -> Result<()> {
    match code {
        0 => Ok(()),
        code => Err(CallFailure::new(call, CudaCode(code))),
    }
}

impl CudaDriver {
    /// Load the library, and find its functions.
    pub(crate) fn load(path: impl AsRef<OsStr>, via: Via) -> std::result::Result<CudaDriver, UnusableLibrary> {
        // SAFETY: the driver's library may be loaded at any time, from any thread; that is how CUDA's runtime library loads it.
        let library = unsafe { Library::new(path) }?;
        let symbol = |name: &'static str| -> Option<*mut c_void> {
            // SAFETY: the symbol is a function, and only its address is read.
            let found = unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) };
            found.ok().map(|function| *function as *mut c_void)
        };
        let functions = match via {
            // SAFETY: the library is CUDA's driver, and it is never unloaded.
            Via::Dlsym => unsafe { Functions::find(symbol) }?,
            Via::GetProcAddress => {
                let lookup = Lookup::find(&symbol)?;
                // SAFETY: `cuGetProcAddress` returns the function that has this name in the version ABI, whose types are used here.
                unsafe { Functions::find(|name| lookup.address(name)) }?
            }
        };
        Ok(CudaDriver {
            functions,
            handles: RefCell::default(),
            pinned: RefCell::default(),
            _library: std::mem::ManuallyDrop::new(library),
        })
    }

    fn keep(&self, kind: HandleMeaning, pointer: *mut c_void) -> DriverHandle {
        let mut handles = self.handles.borrow_mut();
        handles.push(Some((kind, pointer)));
        DriverHandle(handles.len() - 1)
    }

    fn get(&self, call: &'static str, handle: DriverHandle) -> Result<(HandleMeaning, *mut c_void)> {
        let known = self.handles.borrow().get(handle.0).copied().flatten();
        known.ok_or(CallFailure::new(call, CudaCode::INVALID_HANDLE))
    }

    /// Return the pointer behind a handle of this kind.
    fn pointer(&self, call: &'static str, handle: DriverHandle, kind: HandleMeaning) -> Result<*mut c_void> {
        match self.get(call, handle)? {
            (known, pointer) if known == kind => Ok(pointer),
            _ => Err(CallFailure::new(call, CudaCode::INVALID_HANDLE)),
        }
    }
}

/// `cuGetProcAddress`, in the version that the driver has.
enum Lookup {
    First(OldGetProcAddress, c_int),
    Second(GetProcAddressV2, c_int),
}

/// `cuGetProcAddress` of CUDA 11.3.
type OldGetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;
/// `cuGetProcAddress_v2` of CUDA 12.0, which also returns a status.
type GetProcAddressV2 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

impl Lookup {
    fn find(symbol: &impl Fn(&'static str) -> Option<*mut c_void>) -> std::result::Result<Lookup, UnusableLibrary> {
        let version = symbol("cuDriverGetVersion").ok_or(UnusableLibrary::Lacks("cuDriverGetVersion"))?;
        // SAFETY: cuda.h has this type for cuDriverGetVersion.
        let version = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> c_int>(version) };
        let mut driver = 0;
        // SAFETY: the place for the result is valid. The function needs no cuInit.
        unsafe { version(&raw mut driver) };
        let wanted = driver.clamp(11_030, ABI);
        if let Some(address) = symbol("cuGetProcAddress_v2") {
            // SAFETY: cuda.h of CUDA 12 has this type for cuGetProcAddress_v2.
            return Ok(Lookup::Second(
                unsafe { std::mem::transmute::<*mut c_void, GetProcAddressV2>(address) },
                wanted,
            ));
        }
        let address = symbol("cuGetProcAddress").ok_or(UnusableLibrary::Lacks("cuGetProcAddress"))?;
        // SAFETY: cuda.h of CUDA 11.3 has this type for cuGetProcAddress.
        Ok(Lookup::First(
            unsafe { std::mem::transmute::<*mut c_void, OldGetProcAddress>(address) },
            wanted,
        ))
    }

    /// Return a function's address. The names have no `_v2` here: the version of CUDA selects the variant.
    fn address(&self, symbol: &'static str) -> Option<*mut c_void> {
        let name = CString::new(symbol.trim_end_matches("_v2")).ok()?;
        let (mut address, mut status) = (ptr::null_mut(), 0);
        let code = match self {
            // SAFETY: the name ends with a zero byte, and the place for the result is valid.
            Lookup::First(function, version) => unsafe { function(name.as_ptr(), &raw mut address, *version, 0) },
            // SAFETY: as above, and the place for the status is valid.
            Lookup::Second(function, version) => unsafe {
                function(name.as_ptr(), &raw mut address, *version, 0, &raw mut status)
            },
        };
        (code == 0 && !address.is_null()).then_some(address)
    }
}

/// Call a function that writes one result through its first argument.
macro_rules! written {
    ($self:ident.$function:ident = $symbol:literal, $empty:expr $(, $argument:expr)*) => {{
        let mut to = $empty;
        // SAFETY: the place for the result is valid, and the other arguments are numbers.
        check($symbol, unsafe { ($self.functions.$function)(&raw mut to $(, $argument)*) })?;
        to
    }};
}

impl Driver for CudaDriver {
    fn init(&self) -> Result<()> {
        // SAFETY: it takes a number.
        check("cuInit", unsafe { (self.functions.init)(0) })
    }

    fn version(&self) -> Result<i32> {
        Ok(written!(self.version = "cuDriverGetVersion", 0))
    }

    fn count(&self) -> Result<i32> {
        Ok(written!(self.count = "cuDeviceGetCount", 0))
    }

    fn device(&self, index: i32) -> Result<i32> {
        Ok(written!(self.device = "cuDeviceGet", 0, index))
    }

    fn name(&self, device: i32) -> Result<String> {
        let mut name = [0_u8; 256];
        // SAFETY: the buffer has 256 bytes; the device is a number that the driver checks.
        check("cuDeviceGetName", unsafe {
            (self.functions.name)(name.as_mut_ptr().cast(), 256, device)
        })?;
        Ok(CStr::from_bytes_until_nul(&name).map_or_else(|_| String::new(), |name| name.to_string_lossy().into_owned()))
    }

    fn uuid(&self, device: i32) -> Result<[u8; 16]> {
        Ok(written!(self.uuid = "cuDeviceGetUuid_v2", [0; 16], device))
    }

    fn attribute(&self, attribute: i32, device: i32) -> Result<i32> {
        Ok(written!(self.attribute = "cuDeviceGetAttribute", 0, attribute, device))
    }

    fn total(&self, device: i32) -> Result<u64> {
        Ok(written!(self.total = "cuDeviceTotalMem_v2", 0, device) as u64)
    }

    fn retain(&self, device: i32) -> Result<DriverHandle> {
        let context = written!(self.retain = "cuDevicePrimaryCtxRetain", ptr::null_mut(), device);
        Ok(self.keep(HandleMeaning::Context, context))
    }

    fn release(&self, device: i32) -> Result<()> {
        // Page-locked memory would be gone with the context, while somebody still has it.
        if !self.pinned.borrow().is_empty() {
            return Err(CallFailure::new("cuDevicePrimaryCtxRelease_v2", CudaCode::INVALID_HANDLE));
        }
        // What was in the context is gone with it.
        self.handles.borrow_mut().iter_mut().for_each(|handle| *handle = None);
        // SAFETY: it takes a number, and no handle of the context is used any more.
        check("cuDevicePrimaryCtxRelease_v2", unsafe { (self.functions.release)(device) })
    }

    fn enter(&self, context: DriverHandle) -> Result<()> {
        let context = self.pointer("cuCtxSetCurrent", context, HandleMeaning::Context)?;
        // SAFETY: the driver returned the context, and it was not released.
        check("cuCtxSetCurrent", unsafe { (self.functions.enter)(context) })
    }

    fn memory(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the places for the results are valid.
        check("cuMemGetInfo_v2", unsafe {
            (self.functions.memory)(&raw mut free, &raw mut total)
        })?;
        Ok((free as u64, total as u64))
    }

    fn allocate(&self, bytes: u64) -> Result<GpuAddress> {
        Ok(written!(self.allocate = "cuMemAlloc_v2", 0, bytes as usize))
    }

    fn free(&self, address: GpuAddress) -> Result<()> {
        // SAFETY: the driver returns an error for what is not the start of an allocation.
        check("cuMemFree_v2", unsafe { (self.functions.free)(address) })
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<Pinned> {
        let at: *mut c_void = written!(self.allocate_pinned = "cuMemAllocHost_v2", ptr::null_mut(), bytes);
        // SAFETY: the driver allotted these bytes.
        unsafe { ptr::write_bytes(at.cast::<u8>(), 0, bytes) };
        self.pinned.borrow_mut().push(at);
        Ok(Box::new(PinnedMemory { at: at.cast(), bytes }))
    }

    fn free_pinned(&self, memory: Pinned) -> Result<()> {
        let at: *mut c_void = memory.as_ptr().cast_mut().cast();
        drop(memory);
        let mut pinned = self.pinned.borrow_mut();
        let known = pinned.iter().position(|known| *known == at);
        let known = known.ok_or(CallFailure::new("cuMemFreeHost", CudaCode::INVALID_HANDLE))?;
        pinned.swap_remove(known);
        // SAFETY: the driver allotted the memory at this address, and nothing refers to it any more.
        check("cuMemFreeHost", unsafe { (self.functions.free_pinned)(at) })
    }

    fn upload(&self, to: GpuAddress, from: &[u8]) -> Result<()> {
        // SAFETY: that many bytes can be read. The driver returns an error for a place that is not in an allocation.
        check("cuMemcpyHtoD_v2", unsafe {
            (self.functions.upload)(to, from.as_ptr().cast(), from.len())
        })
    }

    fn download(&self, to: &mut [u8], from: GpuAddress) -> Result<()> {
        // SAFETY: that many bytes can be written, and the call returns after they were. The driver checks the address.
        check("cuMemcpyDtoH_v2", unsafe {
            (self.functions.download)(to.as_mut_ptr().cast(), from, to.len())
        })
    }

    fn copy(&self, to: GpuAddress, from: GpuAddress, bytes: u64, stream: DriverHandle) -> Result<()> {
        let stream = self.pointer("cuMemcpyDtoDAsync_v2", stream, HandleMeaning::Stream)?;
        // SAFETY: the stream is valid; the addresses come from `allocate`, which returns memory of the GPU.
        check("cuMemcpyDtoDAsync_v2", unsafe {
            (self.functions.copy)(to, from, bytes as usize, stream)
        })
    }

    fn set(&self, to: GpuAddress, value: u8, bytes: u64) -> Result<()> {
        // SAFETY: the address comes from `allocate`, which returns memory of the GPU.
        check("cuMemsetD8_v2", unsafe { (self.functions.set)(to, value, bytes as usize) })
    }

    fn load(&self, text: ModuleText) -> Result<DriverHandle> {
        let failure = |code, log| CallFailure {
            log,
            ..CallFailure::new("cuModuleLoadDataEx", CudaCode(code))
        };
        let Ok(ptx) = CString::new(text.ptx()) else {
            return Err(failure(200, String::new()));
        };
        let (mut info, mut error) = (vec![0_u8; LOG], vec![0_u8; LOG]);
        let (mut options, mut module) = (JIT_OPTIONS, ptr::null_mut());
        let size = ptr::without_provenance_mut::<c_void>(LOG);
        let mut values = [info.as_mut_ptr().cast(), size, error.as_mut_ptr().cast(), size];
        // SAFETY: the text ends with a zero byte; there are four options with four values, whose sizes are those of the buffers, and the buffers outlive the call.
        let code = unsafe {
            (self.functions.load)(
                &raw mut module,
                ptx.as_ptr().cast(),
                4,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if code != 0 {
            let said = |log: &[u8]| String::from_utf8_lossy(log.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned();
            return Err(failure(code, format!("{} {}", said(&error), said(&info)).trim().to_owned()));
        }
        Ok(self.keep(HandleMeaning::Module(text), module))
    }

    fn function(&self, module: DriverHandle, name: &'static str) -> Result<DriverHandle> {
        const CALL: &str = "cuModuleGetFunction";
        let (HandleMeaning::Module(text), pointer) = self.get(CALL, module)? else {
            return Err(CallFailure::new(CALL, CudaCode::INVALID_HANDLE));
        };
        let symbol = CString::new(name).map_err(|_| CallFailure::new(CALL, CudaCode(500)))?;
        let mut function = ptr::null_mut();
        // SAFETY: the place for the result and the module are valid, and the name ends with a zero byte.
        check(CALL, unsafe {
            (self.functions.function)(&raw mut function, pointer, symbol.as_ptr())
        })?;
        Ok(self.keep(HandleMeaning::Function(text, name), function))
    }

    fn unload(&self, module: DriverHandle) -> Result<()> {
        let (HandleMeaning::Module(text), pointer) = self.get("cuModuleUnload", module)? else {
            return Err(CallFailure::new("cuModuleUnload", CudaCode::INVALID_HANDLE));
        };
        // Its functions are gone with it.
        for handle in self.handles.borrow_mut().iter_mut() {
            if handle.is_some_and(|(kind, _)| {
                kind == HandleMeaning::Module(text) || matches!(kind, HandleMeaning::Function(of, _) if of == text)
            }) {
                *handle = None;
            }
        }
        // SAFETY: the driver returned the module, and no handle refers to it any more.
        check("cuModuleUnload", unsafe { (self.functions.unload)(pointer) })
    }

    fn launch(&self, function: DriverHandle, grid: Grid, arguments: &[KernelArgument], stream: DriverHandle) -> Result<()> {
        const CALL: &str = "cuLaunchKernel";
        let (HandleMeaning::Function(text, name), pointer) = self.get(CALL, function)? else {
            return Err(CallFailure::new(CALL, CudaCode::INVALID_HANDLE));
        };
        if !agrees(text.ptx(), name, arguments) {
            return Err(CallFailure::new(CALL, CudaCode(1)));
        }
        let stream = self.pointer(CALL, stream, HandleMeaning::Stream)?;
        // The first bytes of a little-endian number are its low half.
        let mut values: Vec<u64> = arguments
            .iter()
            .map(|argument| match argument {
                KernelArgument::U32(number) => u64::from(*number),
                KernelArgument::U64(number) => *number,
            })
            .collect();
        let mut places: Vec<*mut c_void> = values.iter_mut().map(|value| ptr::from_mut(value).cast()).collect();
        let ((x, y), (width, height)) = (grid.blocks, grid.threads);
        // SAFETY: function and stream are valid. There is a place for each parameter that the text declares, with at least as many bytes; the driver copies
        // them before it returns. The kernels read and write below the addresses that they are given, which are the GPU's.
        let code = unsafe {
            (self.functions.launch)(
                pointer,
                x,
                y,
                1,
                width,
                height,
                1,
                0,
                stream,
                places.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check(CALL, code)
    }

    fn stream(&self) -> Result<DriverHandle> {
        let stream = written!(self.stream = "cuStreamCreate", ptr::null_mut(), 0);
        Ok(self.keep(HandleMeaning::Stream, stream))
    }

    fn wait(&self, stream: DriverHandle) -> Result<()> {
        let stream = self.pointer("cuStreamSynchronize", stream, HandleMeaning::Stream)?;
        // SAFETY: the stream is valid.
        check("cuStreamSynchronize", unsafe { (self.functions.wait)(stream) })
    }

    fn event(&self) -> Result<DriverHandle> {
        let event = written!(self.event = "cuEventCreate", ptr::null_mut(), 0);
        Ok(self.keep(HandleMeaning::Event, event))
    }

    fn record(&self, event: DriverHandle, stream: DriverHandle) -> Result<()> {
        let event = self.pointer("cuEventRecord", event, HandleMeaning::Event)?;
        let stream = self.pointer("cuEventRecord", stream, HandleMeaning::Stream)?;
        // SAFETY: both are valid.
        check("cuEventRecord", unsafe { (self.functions.record)(event, stream) })
    }

    fn elapsed(&self, start: DriverHandle, end: DriverHandle) -> Result<f32> {
        let start = self.pointer("cuEventElapsedTime", start, HandleMeaning::Event)?;
        let end = self.pointer("cuEventElapsedTime", end, HandleMeaning::Event)?;
        let mut time = 0.0;
        // SAFETY: the place for the result and both events are valid.
        check("cuEventElapsedTime", unsafe {
            (self.functions.elapsed)(&raw mut time, start, end)
        })?;
        Ok(time)
    }

    fn synchronize(&self) -> Result<()> {
        // SAFETY: it has no arguments.
        check("cuCtxSynchronize", unsafe { (self.functions.synchronize)() })
    }
}
