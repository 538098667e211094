import json, sys
import cupy

share = int(sys.argv[1])
a = cupy.arange(1 << 20, dtype=cupy.float32)
total = cupy.cuda.Device(0).mem_info[1]
try:
    cupy.cuda.alloc(share + (1 << 30))
    above = "success"
except cupy.cuda.memory.OutOfMemoryError:
    above = "out of memory"
print(json.dumps({"same": [cupy.__version__, float(a.sum())], "total": total, "above": above}))
