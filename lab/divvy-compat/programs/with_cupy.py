"""CuPy, which uses the CUDA runtime library that is linked into it."""

import cupy
import numpy
from steps import step

runtime = cupy.cuda.runtime
step("version", lambda: cupy.__version__)
step("processor", lambda: numpy.arange(10).sum())
step("driver", runtime.driverGetVersion)
step("runtime", runtime.runtimeGetVersion)
step("local-runtime", lambda: cupy.cuda.get_local_runtime_version())
step("available", cupy.cuda.is_available)
step("count", runtime.getDeviceCount)
step("memory:total", lambda: runtime.memGetInfo()[1])
step("memory:device", lambda: cupy.cuda.Device(0).mem_info[1])
step("name", lambda: runtime.getDeviceProperties(0)["name"])
step("within-share", lambda: cupy.cuda.alloc(64 << 20).mem.size)
step("above-share:allocate", lambda: cupy.cuda.alloc(2 << 30) and 0)
step("array", lambda: cupy.zeros(8).shape)
step("add", lambda: (cupy.zeros(8) + 1).shape)
