"""PyTorch with CUDA: work on the processor, and what it asks the driver and NVML."""

import os

import torch
from steps import step

step("version", lambda: torch.__version__)
step("processor", lambda: float((torch.arange(6.0).reshape(2, 3) @ torch.ones(3, 2)).sum()))


def gradient():
    x = torch.tensor(3.0, requires_grad=True)
    (x * x).backward()
    return float(x.grad)


step("gradient", gradient)
step("cuda", lambda: torch.version.cuda)
step("count-by-nvml", torch.cuda.device_count)
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
step("available-by-nvml", torch.cuda.is_available)
del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
step("available", torch.cuda.is_available)
step("init", torch.cuda.init)
step("memory:total", lambda: torch.cuda.mem_get_info()[1])
step("memory:properties", lambda: torch.cuda.get_device_properties(0).total_memory)
step("name", lambda: torch.cuda.get_device_name(0))
step("processes", lambda: torch.cuda.list_gpu_processes(0))
step("within-share", lambda: torch.empty(64 << 20, dtype=torch.uint8, device="cuda").numel())
step("above-share:allocate", lambda: torch.empty(2 << 30, dtype=torch.uint8, device="cuda") is None)
step("zeros", lambda: torch.zeros(8, device="cuda").shape)
