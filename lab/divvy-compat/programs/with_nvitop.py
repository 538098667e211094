"""nvitop, which shows GPUs and their processes on a terminal."""

import subprocess
import sys

import nvitop
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
step("compute", lambda: gpu.compute_mode())


def screen():
    said = subprocess.run([sys.executable, "-m", "nvitop", "--once", "--no-unicode"], capture_output=True, text=True)
    shows = [total for total in ("8192MiB", "1024MiB", "8.00GiB", "1.00GiB", "1GiB", "8GiB") if total in said.stdout]
    return {"8192MiB": 8 << 30, "8.00GiB": 8 << 30, "1024MiB": 1 << 30, "1.00GiB": 1 << 30}.get("".join(shows), f"error {said.stdout}{said.stderr}")


step("memory:screen", screen)
