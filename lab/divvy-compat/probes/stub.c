/* What a program is linked with, as with the stubs of the CUDA Toolkit: the names of the functions, and nothing behind them. */
#define STUB(name) void name(void) {}
#ifdef NVML
STUB(nvmlInit_v2) STUB(nvmlDeviceGetHandleByIndex_v2) STUB(nvmlDeviceGetMemoryInfo)
#else
STUB(cuInit) STUB(cuDeviceGet) STUB(cuDeviceTotalMem_v2) STUB(cuDevicePrimaryCtxRetain) STUB(cuCtxSetCurrent) STUB(cuMemGetInfo_v2) STUB(cuMemAlloc_v2)
#endif
