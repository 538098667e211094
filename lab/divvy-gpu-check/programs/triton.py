import json
import torch, triton
import triton.language as tl


@triton.jit
def add(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


x = torch.arange(10000, device="cuda", dtype=torch.float32)
z = torch.empty_like(x)
add[(triton.cdiv(x.numel(), 1024),)](x, x, z, x.numel(), BLOCK=1024)
print(json.dumps({"same": [triton.__version__, z.sum().item()]}))
