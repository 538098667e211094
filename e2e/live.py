#!/usr/bin/env python3
"""Watches the test programs that live on this machine, and whether any GPU is given to more of them than it has memory for.

  live.py PREFIX SECONDS-BETWEEN     until SIGTERM; each overcommitment is a line on standard output, the last line counts

What is read is the witness that no component can talk away: processes in the pods' cgroups, and the variables in their own environment.
"""
import collections, os, re, signal, sys, time

prefix, pause = sys.argv[1], float(sys.argv[2])
samples = most = overcommitted = wrong = 0


def look():
    """(node, gpu) -> {pod: (units, units of the GPU)}; a pod's containers are added up."""
    found = collections.defaultdict(lambda: collections.defaultdict(int))
    has, bad = {}, []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                if not f.read().startswith(b"/probe\0run"):
                    continue
            with open(f"/proc/{pid}/cgroup") as f:
                place = re.search(rf"/{re.escape(prefix)}-(n\d)/.*?pod([0-9a-f_-]+)", f.read())
            with open(f"/proc/{pid}/environ") as f:
                env = dict(line.split("=", 1) for line in f.read().split("\0") if "=" in line)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if not place or not env:
            continue
        if "ALIYUN_COM_GPU_MEM_IDX" not in env or env.get("NVIDIA_VISIBLE_DEVICES") != "void":
            bad.append(f"{place[2]} runs without a grant: {env}")
            continue
        gpu = (place[1], env["ALIYUN_COM_GPU_MEM_IDX"])
        found[gpu][place[2]] += int(env["ALIYUN_COM_GPU_MEM_CONTAINER"])
        has[gpu] = int(env["ALIYUN_COM_GPU_MEM_DEV"])
    return found, has, bad


def end(*_):
    print(f"{samples} looks, at most {most} units in use at once, {overcommitted} overcommitted, {wrong} without a grant", flush=True)
    os._exit(1 if overcommitted or wrong else 0)


signal.signal(signal.SIGTERM, end)
while True:
    found, has, bad = look()
    samples += 1
    most = max(most, sum(sum(pods.values()) for pods in found.values()))
    for gpu, pods in found.items():
        if sum(pods.values()) > has[gpu]:
            overcommitted += 1
            print(f"{time.time():.3f} {gpu}: {sum(pods.values())} of {has[gpu]}: {dict(pods)}", flush=True)
    for text in bad:
        wrong += 1
        print(f"{time.time():.3f} {text}", flush=True)
    time.sleep(pause)
