//! The names of the driver's functions, and which symbol each one is in a version of CUDA.

/// For each symbol that this library has: the name of the function, the CUDA version in which the symbol appeared, the symbol, and whether it uses the
/// default stream of its thread. From cudaTypedefs.h of CUDA 11.7 to 13.5, whose types have the names `PFN_<function>_v<version>`.
#[rustfmt::skip]
const TABLE: [(&str, i32, &str, bool); 54] = [
    ("cuCtxCreate", 2000, "cuCtxCreate", false),
    ("cuCtxCreate", 3020, "cuCtxCreate_v2", false),
    ("cuCtxCreate", 11040, "cuCtxCreate_v3", false),
    ("cuCtxCreate", 12050, "cuCtxCreate_v4", false),
    ("cuCtxDestroy", 2000, "cuCtxDestroy", false),
    ("cuCtxDestroy", 4000, "cuCtxDestroy_v2", false),
    ("cuCtxGetApiVersion", 3020, "cuCtxGetApiVersion", false),
    ("cuCtxGetCurrent", 4000, "cuCtxGetCurrent", false),
    ("cuCtxGetDevice", 2000, "cuCtxGetDevice", false),
    ("cuCtxGetDevice", 13000, "cuCtxGetDevice_v2", false),
    ("cuCtxGetFlags", 7000, "cuCtxGetFlags", false),
    ("cuCtxPopCurrent", 2000, "cuCtxPopCurrent", false),
    ("cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2", false),
    ("cuCtxPushCurrent", 2000, "cuCtxPushCurrent", false),
    ("cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2", false),
    ("cuCtxSetCurrent", 4000, "cuCtxSetCurrent", false),
    ("cuCtxSynchronize", 2000, "cuCtxSynchronize", false),
    ("cuCtxSynchronize", 13000, "cuCtxSynchronize_v2", false),
    ("cuDeviceCanAccessPeer", 4000, "cuDeviceCanAccessPeer", false),
    ("cuDeviceComputeCapability", 2000, "cuDeviceComputeCapability", false),
    ("cuDeviceGet", 2000, "cuDeviceGet", false),
    ("cuDeviceGetAttribute", 2000, "cuDeviceGetAttribute", false),
    ("cuDeviceGetByPCIBusId", 4010, "cuDeviceGetByPCIBusId", false),
    ("cuDeviceGetCount", 2000, "cuDeviceGetCount", false),
    ("cuDeviceGetExecAffinitySupport", 11040, "cuDeviceGetExecAffinitySupport", false),
    ("cuDeviceGetName", 2000, "cuDeviceGetName", false),
    ("cuDeviceGetPCIBusId", 4010, "cuDeviceGetPCIBusId", false),
    ("cuDeviceGetUuid", 9020, "cuDeviceGetUuid", false),
    ("cuDeviceGetUuid", 11040, "cuDeviceGetUuid_v2", false),
    ("cuDevicePrimaryCtxGetState", 7000, "cuDevicePrimaryCtxGetState", false),
    ("cuDevicePrimaryCtxRelease", 7000, "cuDevicePrimaryCtxRelease", false),
    ("cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2", false),
    ("cuDevicePrimaryCtxReset", 7000, "cuDevicePrimaryCtxReset", false),
    ("cuDevicePrimaryCtxReset", 11000, "cuDevicePrimaryCtxReset_v2", false),
    ("cuDevicePrimaryCtxRetain", 7000, "cuDevicePrimaryCtxRetain", false),
    ("cuDevicePrimaryCtxSetFlags", 7000, "cuDevicePrimaryCtxSetFlags", false),
    ("cuDevicePrimaryCtxSetFlags", 11000, "cuDevicePrimaryCtxSetFlags_v2", false),
    ("cuDeviceTotalMem", 2000, "cuDeviceTotalMem", false),
    ("cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2", false),
    ("cuDriverGetVersion", 2020, "cuDriverGetVersion", false),
    ("cuGetErrorName", 6000, "cuGetErrorName", false),
    ("cuGetErrorString", 6000, "cuGetErrorString", false),
    ("cuGetProcAddress", 11030, "cuGetProcAddress", false),
    ("cuGetProcAddress", 12000, "cuGetProcAddress_v2", false),
    ("cuInit", 2000, "cuInit", false),
    ("cuMemAlloc", 2000, "cuMemAlloc", false),
    ("cuMemAlloc", 3020, "cuMemAlloc_v2", false),
    ("cuMemAllocManaged", 6000, "cuMemAllocManaged", false),
    ("cuMemAllocPitch", 3020, "cuMemAllocPitch_v2", false),
    ("cuMemFree", 2000, "cuMemFree", false),
    ("cuMemFree", 3020, "cuMemFree_v2", false),
    ("cuMemGetAddressRange", 3020, "cuMemGetAddressRange_v2", false),
    ("cuMemGetInfo", 2000, "cuMemGetInfo", false),
    ("cuMemGetInfo", 3020, "cuMemGetInfo_v2", false),
];

/// What a search for a function found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// The function is this symbol.
    Symbol(&'static str),
    /// The driver has no such function.
    Unknown,
    /// The driver has the function, but a program of this CUDA version does not know it.
    TooNew,
}

/// Find the function that a program of this CUDA version means.
pub(crate) fn find(function: &str, program: i32, driver: i32, per_thread: bool) -> Found {
    let all = || TABLE.iter().filter(|(name, since, ..)| *name == function && *since <= driver);
    let newest = |thread: bool| all().filter(|(_, since, _, own)| *since <= program && *own == thread).max_by_key(|(_, since, ..)| *since);
    let twin = per_thread.then(|| newest(true)).flatten();
    match twin.or_else(|| newest(false)) {
        Some((_, _, symbol, _)) => Found::Symbol(symbol),
        None if all().next().is_some() => Found::TooNew,
        None => Found::Unknown,
    }
}
