# CUDA's driver library and NVML through ctypes, which every Python has.
import ctypes, json, sys

cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
codes = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0)]
codes.append(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
codes.append(cuda.cuCtxSetCurrent(context))
codes.append(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
pointer = ctypes.c_uint64()
codes.append(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)))
above = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(sys.argv[1]) + (1 << 30)))
print(json.dumps({"same": codes, "total": total.value, "above": {0: "success", 2: "out of memory"}.get(above, above)}))
