import json, sys
import torch

share = int(sys.argv[1])
torch.manual_seed(1)
a, b = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
product = (a @ b).sum().item()

stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    for _ in range(3):
        c = a @ b
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    c = a @ b
graph.replay()
torch.cuda.synchronize()
replayed = torch.allclose(c, a @ b)

try:
    torch.empty(share + (1 << 30), dtype=torch.uint8, device="cuda")
    above = "success"
except torch.cuda.OutOfMemoryError:
    above = "out of memory"
after = torch.ones(1 << 20, device="cuda").sum().item()
_, total = torch.cuda.mem_get_info()
print(json.dumps({"same": [torch.__version__, product, replayed, after], "total": total, "above": above}))
