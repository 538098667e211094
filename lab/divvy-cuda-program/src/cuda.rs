//! The calls of CUDA's driver library (cuda.h of the CUDA Toolkit).

#![allow(unsafe_code, reason = "it calls a C ABI")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

use anyhow::{Context as _, Result, bail};
use libloading::Library;

/// A `CUresult`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallResult(c_int);

impl From<c_int> for CallResult {
    fn from(code: c_int) -> CallResult {
        CallResult(code)
    }
}

impl CallResult {
    pub(crate) fn is_success(self) -> bool {
        self.0 == 0
    }

    /// Fail unless the call was successful.
    pub(crate) fn ok(self, call: &str, cuda: &CudaLibrary) -> Result<()> {
        if self.is_success() {
            return Ok(());
        }
        bail!("{call}: {}", cuda.name(self))
    }
}

/// The functions of the library, by cuda.h's types. `CUdeviceptr` and `size_t` have 64 bits.
pub(crate) struct CudaLibrary {
    init: unsafe extern "C" fn(c_uint) -> c_int,
    device: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int,
    set_current: unsafe extern "C" fn(*mut c_void) -> c_int,
    mem_info: unsafe extern "C" fn(*mut u64, *mut u64) -> c_int,
    alloc: unsafe extern "C" fn(*mut u64, u64) -> c_int,
    error_name: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
    // The functions are in it.
    library: Library,
}

/// Return a function of the library by its name and the types of its arguments.
macro_rules! function {
    ($cuda:expr, $name:literal($($type:ty),*)) => {
        // SAFETY: the types are those of the symbol in cuda.h. Libraries stay loaded until the process ends.
        unsafe { $cuda.symbol::<unsafe extern "C" fn($($type),*) -> std::ffi::c_int>($name) }
    };
}
pub(crate) use function;

/// Call a function by its name, once. It fails if the library lacks the function or the function returns an error.
macro_rules! call {
    ($cuda:expr, $name:literal($($argument:expr => $type:ty),*)) => {{
        let function = $crate::cuda::function!($cuda, $name($($type),*))?;
        // SAFETY: the comment at each call says why its arguments are valid.
        $crate::cuda::CallResult::from(unsafe { function($($argument),*) }).ok($name, $cuda)
    }};
}
pub(crate) use call;

impl CudaLibrary {
    /// Load the library by its name, or by its path.
    pub(crate) fn load(name: &str) -> Result<CudaLibrary> {
        // SAFETY: the driver's library, and a shadow of it, may be loaded at any time by any program; that is how the CUDA runtime library loads it.
        let library = unsafe { Library::new(name) }.with_context(|| format!("{name} cannot be loaded"))?;
        macro_rules! function {
            ($symbol:literal) => {
                // SAFETY: the field's type is that of the symbol in cuda.h, and the field is dropped together with the library.
                *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.with_context(|| format!("{name} lacks {}", $symbol))?
            };
        }
        Ok(CudaLibrary {
            init: function!("cuInit"),
            device: function!("cuDeviceGet"),
            retain: function!("cuDevicePrimaryCtxRetain"),
            set_current: function!("cuCtxSetCurrent"),
            mem_info: function!("cuMemGetInfo_v2"),
            alloc: function!("cuMemAlloc_v2"),
            error_name: function!("cuGetErrorName"),
            library,
        })
    }

    /// Return a function of the library, for [`function!`].
    ///
    /// # Safety
    /// `F` is the type of the function in cuda.h, and the function is not called after this value was dropped.
    pub(crate) unsafe fn symbol<F: Copy>(&self, name: &str) -> Result<F> {
        // SAFETY: this function's contract.
        let symbol = unsafe { self.library.get::<F>(name.as_bytes()) };
        Ok(*symbol.with_context(|| format!("the library has no {name}"))?)
    }

    pub(crate) fn init(&self) -> CallResult {
        // SAFETY: it takes a number.
        CallResult(unsafe { (self.init)(0) })
    }

    /// Make the first GPU's primary context, and use it in this thread.
    pub(crate) fn enter(&self) -> Result<()> {
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: the place for the result is valid.
        CallResult(unsafe { (self.device)(&raw mut device, 0) }).ok("cuDeviceGet", self)?;
        // SAFETY: the place for the result is valid.
        CallResult(unsafe { (self.retain)(&raw mut context, device) }).ok("cuDevicePrimaryCtxRetain", self)?;
        // SAFETY: the context was just made, and is kept until the process ends.
        CallResult(unsafe { (self.set_current)(context) }).ok("cuCtxSetCurrent", self)
    }

    /// Return how many bytes are free, and how many there are.
    pub(crate) fn memory(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the places for the results are valid.
        CallResult(unsafe { (self.mem_info)(&raw mut free, &raw mut total) }).ok("cuMemGetInfo", self)?;
        Ok((free, total))
    }

    /// Allocate memory, and return its address.
    pub(crate) fn allocate(&self, bytes: u64) -> (CallResult, u64) {
        let mut pointer = 0;
        // SAFETY: the place for the result is valid.
        (CallResult(unsafe { (self.alloc)(&raw mut pointer, bytes) }), pointer)
    }

    /// Return the name of a code, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub(crate) fn name(&self, code: CallResult) -> String {
        let mut text = ptr::null();
        // SAFETY: the place for the result is valid.
        let found = CallResult(unsafe { (self.error_name)(code.0, &raw mut text) });
        if !found.is_success() || text.is_null() {
            return format!("error {}", code.0);
        }
        // SAFETY: the driver returned a pointer to a constant string, which ends with a zero byte and exists as long as the library is loaded.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}
