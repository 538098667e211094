"""Memory of the GPU that this process has, by the driver's library and without any other package: a context of 300 MiB and 256 MiB."""

from ctypes import CDLL, byref, c_size_t, c_ulonglong, c_void_p


def allocate():
    cuda, context, pointer = CDLL("libcuda.so.1"), c_void_p(), c_ulonglong()
    codes = [
        cuda.cuInit(0),
        cuda.cuDevicePrimaryCtxRetain(byref(context), 0),
        cuda.cuCtxSetCurrent(context),
        cuda.cuMemAlloc_v2(byref(pointer), c_size_t(256 << 20)),
    ]
    return max(codes)
