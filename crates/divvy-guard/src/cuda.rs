//! The part of cuda.h that the guard needs. The names are NVIDIA's.

use core::ffi::{c_int, c_uint, c_void};

/// `CUresult`.
pub(crate) type CuResult = c_int;

pub(crate) const SUCCESS: CuResult = 0;
pub(crate) const OUT_OF_MEMORY: CuResult = 2;
pub(crate) const NOT_FOUND: CuResult = 500;
pub(crate) const NOT_SUPPORTED: CuResult = 801;

/// `CU_MEM_ALLOCATION_TYPE_MANAGED`.
pub(crate) const MANAGED: c_int = 2;

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const DEVICE: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_HOST`.
pub(crate) const HOST: c_int = 2;
/// `CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT`. `CU_MEM_LOCATION_TYPE_HOST_NUMA` is between the two.
pub(crate) const HOST_NUMA_CURRENT: c_int = 4;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct MemLocation {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// `CUmemAllocationProp` and `CUmemPoolProps`, up to what the guard reads: they begin alike.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct AllocationProp {
    pub(crate) kind: c_int,
    handle_types: c_int,
    pub(crate) location: MemLocation,
}

impl AllocationProp {
    pub(crate) fn new(kind: c_int, location: MemLocation) -> Self {
        Self {
            kind,
            location,
            ..Self::default()
        }
    }
}

/// The driver's function with the program's arguments. One for all functions, so that each rule is in the library once, and not once for each function.
pub(crate) struct DriverCall {
    function: *mut c_void,
    arguments: [u64; Self::MOST],
}

impl DriverCall {
    /// No function with a rule has more arguments, so on 64-bit machines all of them are in registers.
    const MOST: usize = 6;

    /// # Safety
    ///
    /// The function is the driver's, and has these arguments: integers of up to 64 bits, and pointers. The program vouches for what they point to.
    pub(crate) unsafe fn new<const N: usize>(function: *mut c_void, given: [u64; N]) -> Self {
        const { assert!(N <= Self::MOST, "more arguments than are passed in registers") };
        let mut arguments = [0; Self::MOST];
        for (to, from) in arguments.iter_mut().zip(given) {
            *to = from;
        }
        Self { function, arguments }
    }

    /// Call it.
    #[inline(never)]
    pub(crate) fn run(&self) -> CuResult {
        let [a, b, c, d, e, f] = self.arguments;
        // SAFETY: the caller of `new` promised that the function takes at most six arguments, all integers or pointers. On x86-64 and AArch64, the first six such
        // arguments are passed in registers, and a function ignores the registers that it has no argument for.
        let function: unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> CuResult =
            unsafe { core::mem::transmute(self.function) };
        // SAFETY: as above.
        unsafe { function(a, b, c, d, e, f) }
    }
}

/// An argument of one of the driver's functions, as [`DriverCall`] has it.
pub(crate) trait CallArgument {
    fn bits(self) -> u64;
}

impl<T> CallArgument for *mut T {
    fn bits(self) -> u64 {
        self.expose_provenance() as u64
    }
}

impl<T> CallArgument for *const T {
    fn bits(self) -> u64 {
        self.expose_provenance() as u64
    }
}

impl CallArgument for u64 {
    fn bits(self) -> u64 {
        self
    }
}

impl CallArgument for usize {
    fn bits(self) -> u64 {
        self as u64
    }
}

impl CallArgument for u32 {
    fn bits(self) -> u64 {
        self.into()
    }
}

impl CallArgument for i32 {
    fn bits(self) -> u64 {
        self.cast_unsigned().into()
    }
}

/// Where the driver writes a number for the program: a handle, or an address.
#[derive(Clone, Copy)]
pub(crate) struct OutPointer {
    pointer: *const c_void,
    is_wide: bool,
}

impl OutPointer {
    /// # Safety
    ///
    /// `T` has 32 or 64 bits, all values of which are valid. [`OutPointer::get`] is called only after the driver has succeeded with this pointer.
    pub(crate) unsafe fn new<T>(pointer: *const T) -> Self {
        Self {
            pointer: pointer.cast(),
            is_wide: size_of::<T>() == size_of::<u64>(),
        }
    }

    /// What the driver has written.
    pub(crate) fn get(self) -> u64 {
        // A program may have given an unaligned pointer.
        if self.is_wide {
            // SAFETY: by the promise of `new`.
            unsafe { self.pointer.cast::<u64>().read_unaligned() }
        } else {
            // SAFETY: by the promise of `new`.
            unsafe { self.pointer.cast::<u32>().read_unaligned() }.into()
        }
    }
}

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Uuid(pub(crate) [u8; 16]);

/// `CUdevice`.
pub(crate) type CuDevice = c_int;
/// `CUcontext`, `CUgreenCtx`.
pub(crate) type CuContext = *mut c_void;
/// `CUdeviceptr`.
pub(crate) type Pointer = u64;
/// `CUmemGenericAllocationHandle`.
pub(crate) type AllocationHandle = u64;
/// `unsigned int`.
pub(crate) type Uint = c_uint;

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcHandle([u8; 64]);

/// `CUDA_MEM_ALLOC_NODE_PARAMS`, up to what the guard reads.
#[repr(C)]
pub(crate) struct AllocationNode {
    pub(crate) pool: AllocationProp,
    rest_of_pool: [u64; 9],
    access: *const c_void,
    access_count: usize,
    pub(crate) bytes: u64,
}

/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`.
pub(crate) const ALLOCATION_NODE: c_int = 10;

/// `CUgraphNodeParams`, up to what the guard reads. The driver demands all of it, so the part of another type of node can be read as well.
#[repr(C)]
pub(crate) struct GraphNodePrefix {
    pub(crate) kind: c_int,
    reserved: [c_int; 3],
    pub(crate) allocation: AllocationNode,
}

/// `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`, up to what the guard reads.
#[repr(C)]
pub(crate) struct ExternalMemory {
    kind: c_int,
    handle: [usize; 2],
    pub(crate) bytes: u64,
}

/// `CUDA_LAUNCH_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct LaunchParameters {
    function: u64,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    pub(crate) stream: u64,
    parameters: *mut c_void,
}

// As the C compiler lays them out.
const _: () = assert!(size_of::<AllocationProp>() == 16 && core::mem::offset_of!(AllocationNode, bytes) == 104);
const _: () =
    assert!(core::mem::offset_of!(GraphNodePrefix, allocation) == 16 && core::mem::offset_of!(ExternalMemory, bytes) == 24);
const _: () = assert!(size_of::<LaunchParameters>() == 56 && core::mem::offset_of!(LaunchParameters, stream) == 40);
