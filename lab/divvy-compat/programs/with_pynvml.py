"""NVIDIA's Python bindings of NVML (nvidia-ml-py)."""

import importlib.metadata
import os

import pynvml
from allocation import allocate
from steps import step

step("version", lambda: importlib.metadata.version("nvidia-ml-py"))
step("init", pynvml.nvmlInit)
step("driver", pynvml.nvmlSystemGetDriverVersion)
step("cuda", pynvml.nvmlSystemGetCudaDriverVersion)
step("count", pynvml.nvmlDeviceGetCount)
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
step("name", lambda: pynvml.nvmlDeviceGetName(gpu))
step("uuid", lambda: pynvml.nvmlDeviceGetUUID(gpu))
step("memory:v1", lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu).total)
step("memory:v2", lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2).total)
step("used", lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2).used)
step("processes", lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)))
step("allocate", allocate)
step("used-then", lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2).used)
step("own-process", lambda: {of.pid: of.usedGpuMemory for of in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}[os.getpid()])
step("graphics", lambda: len(pynvml.nvmlDeviceGetGraphicsRunningProcesses(gpu)))
step("mps", lambda: len(pynvml.nvmlDeviceGetMPSComputeRunningProcesses(gpu)))
step("utilization", lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
step("temperature", lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU))
step("power", lambda: pynvml.nvmlDeviceGetPowerUsage(gpu))
step("shutdown", pynvml.nvmlShutdown)
