#!/usr/bin/env python3
"""A minimal Service for a cluster without kube-proxy: it accepts connections at its address and forwards each to the next ready pod.

  service.py KUBECTL KUBECONFIG NAMESPACE SERVICE ADDRESS PORT

Like kube-proxy, it knows only the EndpointSlices. It does not inspect the connections, and does not try a second pod.
"""
import json
import os
import socket
import subprocess
import sys
import threading
import time

kubectl, kubeconfig, namespace, service, address, port = sys.argv[1:]
slices = {}  # name -> [(address, port)]


def watch():
    command = [kubectl, "--kubeconfig", kubeconfig, "get", "endpointslices", "-n", namespace,
               "-l", f"kubernetes.io/service-name={service}", "-o", "json", "--watch", "--output-watch-events"]
    while True:
        found = {}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            text, decoder = "", json.JSONDecoder()
            for line in process.stdout:
                text += line
                try:
                    event, _ = decoder.raw_decode(text.lstrip())
                except ValueError:
                    continue
                text = ""
                item = event["object"]
                ready = [endpoint["addresses"][0] for endpoint in item.get("endpoints") or []
                         if endpoint.get("conditions", {}).get("ready")]
                found[item["metadata"]["name"]] = [(ip, item["ports"][0]["port"]) for ip in ready] if event["type"] != "DELETED" else []
                slices.clear()
                slices.update(found)
        time.sleep(0.5)  # the watch has ended because the API server is away


def copy(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    finally:
        for end, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
            try:
                end.shutdown(how)
            except OSError:
                pass


def serve(client, turn):
    pods = sorted(pod for ready in list(slices.values()) for pod in ready)
    with client:
        if not pods:
            return
        try:
            pod = socket.create_connection(pods[turn % len(pods)], timeout=3)
        except OSError:
            return
        pod.settimeout(None)
        with pod:
            back = threading.Thread(target=copy, args=(pod, client), daemon=True)
            back.start()
            copy(client, pod)
            back.join()


threading.Thread(target=watch, daemon=True).start()
listener = socket.create_server((address, int(port)), backlog=128)
print(f"{namespace}/{service} is at {address}:{port}, PID {os.getpid()}", flush=True)
turn = 0
while True:
    connection, _ = listener.accept()
    turn += 1
    threading.Thread(target=serve, args=(connection, turn), daemon=True).start()
