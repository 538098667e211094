"""nvitop, which shows GPUs and their processes on a terminal."""

import os
import re
import subprocess
import sys

import nvitop
from allocation import allocate
from steps import step

step("version", lambda: nvitop.__version__)
step("count", nvitop.Device.count)
gpu = nvitop.Device(0)
step("name", gpu.name)
step("uuid", gpu.uuid)
step("memory:total", gpu.memory_total)
step("used", gpu.memory_used)
step("percent", gpu.memory_percent)
step("processes", lambda: len(gpu.processes()))
step("allocate", allocate)
step("used-then", gpu.memory_used)
step("own-process", lambda: gpu.processes()[os.getpid()].gpu_memory())
step("compute", lambda: gpu.compute_mode())


def screen():
    said = subprocess.run([sys.executable, "-m", "nvitop", "--once", "--no-unicode"], capture_output=True, text=True)
    found = re.search(r"/ (\d+)MiB", said.stdout)
    return int(found[1]) << 20 if found else f"error {said.stdout}{said.stderr}"


def shows_process():
    said = subprocess.run([sys.executable, "-m", "nvitop", "--once", "--no-unicode"], capture_output=True, text=True).stdout
    return bool(re.search(rf"{os.getpid()}.* 556\.?0?MiB", said)) or f"error {said}"


step("memory:screen", screen)
step("shows-process", shows_process)
