"""nvitop, which shows GPUs and their processes on a terminal."""

import re
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
    found = re.search(r"/ (\d+)MiB", said.stdout)
    return int(found[1]) << 20 if found else f"error {said.stdout}{said.stderr}"


step("memory:screen", screen)
