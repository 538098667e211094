import json
import torch

n, times = 8192, 10
a, b = (torch.ones(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
a @ b
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record()
for _ in range(times):
    c = a @ b
end.record()
end.synchronize()
print(json.dumps({"gflops": 2 * n**3 * times / begin.elapsed_time(end) / 1e6}))
