"""Asks CUDA's driver library and NVML by ctypes, as probe.c does."""

from ctypes import CDLL, Structure, byref, c_int, c_size_t, c_ulonglong, c_void_p

cuda, nvml = CDLL("libcuda.so.1"), CDLL("libnvidia-ml.so.1")


class Memory(Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


device, context, gpu = c_int(), c_void_p(), c_void_p()
total, free, pointer, memory = c_size_t(), c_size_t(), c_ulonglong(), Memory()
print("cuInit", cuda.cuInit(0))
print("cuDeviceGet", cuda.cuDeviceGet(byref(device), 0))
print("cuDeviceTotalMem", cuda.cuDeviceTotalMem_v2(byref(total), device))
print("memory:cuda-total", total.value)
print("cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(byref(context), device))
print("cuCtxSetCurrent", cuda.cuCtxSetCurrent(context))
print("cuMemGetInfo", cuda.cuMemGetInfo_v2(byref(free), byref(total)))
print("memory:cuda-info", total.value)
print("within-share:256MiB", cuda.cuMemAlloc_v2(byref(pointer), c_size_t(256 << 20)))
print("above-share:2GiB", cuda.cuMemAlloc_v2(byref(pointer), c_size_t(2 << 30)))
print("nvmlInit", nvml.nvmlInit_v2())
print("nvmlDeviceGetHandleByIndex", nvml.nvmlDeviceGetHandleByIndex_v2(0, byref(gpu)))
print("nvmlDeviceGetMemoryInfo", nvml.nvmlDeviceGetMemoryInfo(gpu, byref(memory)))
print("memory:nvml-total", memory.total)
