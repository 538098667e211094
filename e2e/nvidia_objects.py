#!/usr/bin/env python3
"""Prepare NVIDIA's objects for the test cluster: read objects as JSON, and print them changed.

A user changes the image. This cluster lacks a driver and access to the API server's Service, so containers get the simulated driver, the scripts that stand in
for the driver's programs, and the API server's address as well. One node has NVIDIA's GPUs.
"""

import json
import os
import sys

NVIDIA = "nvcr.io/nvidia/k8s-device-plugin:"
# The containers into which NVIDIA's container runtime puts the driver.
DRIVEN = ("nvidia-device-plugin-ctr", "gpu-feature-discovery-ctr", "gpu-feature-discovery", "mps-control-daemon-ctr")
# What the scripts need: a shell and its programs.
HOST = ("/bin", "/lib", "/lib64")


def setting(name):
    return os.environ[name]


def mount(container, volumes, path, host):
    """Mount a directory or file of the node, unless the container has a mount there."""
    mounts = container.setdefault("volumeMounts", [])
    if any(found["mountPath"] == path for found in mounts):
        return
    name = "simulated-" + path.strip("/").replace("/", "-").lower()
    mounts.append({"name": name, "mountPath": path})
    if all(volume["name"] != name for volume in volumes):
        volumes.append({"name": name, "hostPath": {"path": host}})


def prepare(pod):
    volumes = pod.setdefault("volumes", [])
    # The chart writes `initContainers:` also where there are none.
    for container in (pod.get("initContainers") or []) + pod["containers"]:
        if container["image"].startswith(NVIDIA):
            container["image"] = setting("IMAGE")
        variables = {"KUBERNETES_SERVICE_HOST": setting("API_HOST"), "KUBERNETES_SERVICE_PORT": setting("API_PORT")}
        if container["name"] in DRIVEN and setting("DRIVER_ROOT"):
            root = "/driver-root"
            mount(container, volumes, root, setting("DRIVER_ROOT"))
            variables |= {"DIVVY_NVML_SIM": root + "/machines.toml", "DIVVY_NVML_SIM_NODE": setting("NODE")}
            if container["name"].startswith("mps-"):
                variables["PATH"] = root + "/programs:/usr/bin:/bin"
                for path in HOST:
                    mount(container, volumes, path, path)
        own = os.environ.get("OWN")
        if own and container["name"] == "nvidia-device-plugin-ctr":
            # NVIDIA's image is not on this machine. Divvy's has the libraries that NVIDIA's program needs.
            mount(container, volumes, "/usr/bin/nvidia-device-plugin", own)
        container.setdefault("env", []).extend({"name": name, "value": value} for name, value in variables.items())


def objects(text):
    """Parse objects that follow one another, as kubectl prints them."""
    decoder, at = json.JSONDecoder(), 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        item, at = decoder.raw_decode(text, at)
        yield item


def main():
    items = list(objects(sys.stdin.read()))
    for item in items:
        if item["kind"] not in ("DaemonSet", "Job"):
            continue
        pod = item["spec"]["template"]["spec"]
        prepare(pod)
        if "affinity" not in pod and "nodeName" not in pod:
            pod.setdefault("nodeSelector", {})["kubernetes.io/hostname"] = setting("NODE")
    json.dump({"apiVersion": "v1", "kind": "List", "items": items}, sys.stdout, indent=1)


main()
