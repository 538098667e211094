import json
import numpy
from numba import cuda


@cuda.jit
def double(x):
    at = cuda.grid(1)
    if at < x.size:
        x[at] *= 2


x = cuda.to_device(numpy.arange(10000, dtype=numpy.float32))
double[40, 256](x)
total = cuda.current_context().get_memory_info().total
print(json.dumps({"same": [float(x.copy_to_host().sum())], "total": total}))
