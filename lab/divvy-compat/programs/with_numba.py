"""numba, whose CUDA target uses the driver's library by cuda-bindings."""

import importlib.metadata

import numba
import numpy
from numba import cuda
from steps import step

step("version", lambda: f"{numba.__version__} (numba-cuda {importlib.metadata.version('numba-cuda')})")
step("processor", lambda: numba.njit(lambda array: (array * 2).sum())(numpy.arange(10)))
step("available", cuda.is_available)
step("gpus", lambda: len(cuda.gpus))
step("name", lambda: cuda.get_current_device().name)
step("capability", lambda: cuda.get_current_device().compute_capability)
step("context", lambda: bool(cuda.current_context()))
step("memory:total", lambda: cuda.current_context().get_memory_info().total)
step("within-share", lambda: cuda.device_array(64 << 20, numpy.uint8).nbytes)
step("above-share:allocate", lambda: cuda.device_array(2 << 30, numpy.uint8) and 0)
step("copy", lambda: cuda.to_device(numpy.arange(8)).copy_to_host().shape)
step("stream", lambda: cuda.stream().synchronize())


@cuda.jit
def double(array):
    array[cuda.grid(1)] *= 2


step("kernel", lambda: double[32, 32](cuda.to_device(numpy.arange(1024))))
step("synchronize", cuda.synchronize)
