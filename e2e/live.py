#!/usr/bin/env python3
"""Watches the test programs that live on this machine, and whether any GPU is given to more of them than it has memory for.

  live.py PREFIX SECONDS-BETWEEN [FILE]     until SIGTERM; each overcommitment is a line on standard output, the last line counts

What is read is the witness that no component can talk away: processes in the pods' cgroups, and the variables in their own environment.
FILE gets a line of JSON for each container that is seen first, and one when it is seen no more: what `divvy audit --reports FILE` reads.
"""
import collections, json, os, re, signal, sys, time

prefix, pause = sys.argv[1], float(sys.argv[2])
reports = open(sys.argv[3], "a", buffering=1) if len(sys.argv) > 3 else None
samples = most = overcommitted = wrong = 0
known = {}  # container id -> what was written of it


def told(id, node, uid, pid, env):
    """Writes down what a container has, once: its device files as it sees them, its name as the runtime was told it."""
    if not reports or id in known:
        return
    try:
        with open(f"{os.environ['CLUSTER_DIR']}/{node}/run/containerd/io.containerd.runtime.v2.task/k8s.io/{id}/config.json") as f:
            name = json.load(f)["annotations"]["io.kubernetes.cri.container-name"]
        gpus = sorted(int(path[6:]) for path in os.listdir(f"/proc/{pid}/root/dev") if re.fullmatch(r"nvidia\d+", path))
    except (FileNotFoundError, ProcessLookupError):
        return  # it has just ended
    env = {key: value for key, value in env.items() if key == "NVIDIA_VISIBLE_DEVICES" or key.startswith("ALIYUN_COM_GPU_MEM_")}
    known[id] = {"node": node, "pod_uid": uid, "container": name, "id": id}
    print(json.dumps({"at": time.time(), **known[id], "running": True, "gpus": gpus, "env": env}), file=reports)


def ended(alive):
    for id in set(known) - alive:
        print(json.dumps({"at": time.time(), **known.pop(id), "running": False}), file=reports)


def look():
    """(node, gpu) -> {pod: (units, units of the GPU)}; a pod's containers are added up."""
    found = collections.defaultdict(lambda: collections.defaultdict(int))
    has, bad, alive = {}, [], set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                if not f.read().startswith(b"/probe\0run"):
                    continue
            with open(f"/proc/{pid}/cgroup") as f:
                place = re.search(rf"/{re.escape(prefix)}-(n\d)/.*?pod([0-9a-f_-]+)/([0-9a-f]+)", f.read())
            with open(f"/proc/{pid}/environ") as f:
                env = dict(line.split("=", 1) for line in f.read().split("\0") if "=" in line)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if not place or not env:
            continue
        alive.add(place[3])
        told(place[3], place[1], place[2].replace("_", "-"), pid, env)
        if "ALIYUN_COM_GPU_MEM_IDX" not in env or env.get("NVIDIA_VISIBLE_DEVICES") != "void":
            bad.append(f"{place[2]} runs without a grant: {env}")
            continue
        gpu = (place[1], env["ALIYUN_COM_GPU_MEM_IDX"])
        found[gpu][place[2]] += int(env["ALIYUN_COM_GPU_MEM_CONTAINER"])
        has[gpu] = int(env["ALIYUN_COM_GPU_MEM_DEV"])
    ended(alive)
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
