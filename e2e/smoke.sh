# shellcheck shell=bash disable=SC2154
# Checks of `divvy smoke`: the program divvy-smoke runs in pods, on a simulated CUDA driver. install.sh sources this file.

SMOKE=$CLUSTER_DIR/sim/smoke
# Give the containers of a node the simulated CUDA driver in place of the text files, by a CDI spec of an administrator. The simulated driver does not
# know which GPU a container was given, so each GPU is a machine of its own. The one named BROKEN adds wrongly.
simulate_cuda() { # NODE [BROKEN]
  mkdir -p "$SMOKE"
  cp "$DIVVY_BIN/libdivvy_cuda_sim.so" "$SMOKE/libcuda.so.$DRIVER"
  kube get node "$1" -o json | python3 -c '
import json, sys
directory, driver, lib, broken = sys.argv[1:5]
inventory = json.loads(json.load(sys.stdin)["metadata"]["annotations"]["divvy.dev/inventory"])
devices = []
for gpu in inventory["gpus"]:
    uuid = gpu["uuid"]
    with open(f"{directory}/{uuid}.toml", "w") as machine:
        machine.write(f"""v = 1
[[node]]
name = "n"
driver = "{driver}"
[[node.gpu]]
model = "{gpu["model"]}"
uuid = "{uuid}"
memory_mib = {gpu["totalMiB"]}
cc = "{gpu["cc"]}"
""")
    env = [f"DIVVY_NVML_SIM=/sim/{uuid}.toml"]
    if uuid == broken:
        env.append("DIVVY_CUDA_SIM_WRONG=vector_add:1=2+1000")
    devices.append({"name": uuid, "containerEdits": {"env": env}})
options = ["ro", "nosuid", "nodev", "bind"]
mount = lambda host, container: {"hostPath": host, "containerPath": container, "options": options}
real = f"{directory}/libcuda.so.{driver}"
mounts = [mount(directory, "/sim")] + [mount(real, f"{lib}/libcuda.so.{end}") for end in (driver, "1")]
print(json.dumps({"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": {"mounts": mounts}}))
' "$SMOKE" "$DRIVER" "$LIB" "${2:-}" | in_node "$1" tee /etc/cdi/nvidia.json > /dev/null
}
uuid_of() { # NODE INDEX
  kube get node "$1" -o 'jsonpath={.metadata.annotations.divvy\.dev/inventory}' |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["gpus"][int(sys.argv[1])]["uuid"])' "$2"
}
# Print what the command prints, with single spaces, and its exit status.
smokes() { local status=0; { divvy smoke "$@" 2>&1 || status=$?; echo "status $status"; } | tr -s ' '; }
smoke_pods() { kube get pods -A -l divvy.dev/smoke -o name; }
has_smoke_pods() { [ -n "$(smoke_pods)" ]; }
leaves_nothing() { equals "$(smoke_pods)" "" && refused_with NotFound kube get namespace divvy-smoke; }

smoke() {
  scene "divvy smoke tries every GPU of the cluster: one computes wrong results, and one is full"
  local broken full said user pid status=0
  broken=$(uuid_of n2 0) full=$(uuid_of n2 1)
  simulate_cuda n1
  simulate_cuda n2 "$broken"
  pod full 40 "" 0 n2 | annotated "divvy.dev/gpu-uuid: $full" | kube create -f - > /dev/null
  step created "pod full: all of GPU 1 of n2"
  eventually 20 "it runs" is_running full
  said=$(smokes --all-nodes --steps S02); shown <<< "$said"
  check "the GPU of n1 and one of n2 add rightly" says "$said" "n1 0 NVIDIA GeForce RTX 3080 Ti Laptop GPU PASS PASS PASS" "n2 2 Tesla T4 PASS PASS PASS"
  check "the broken one is named, with the first wrong element" says "$said" "FAIL n2 GPU 0 ($broken)" "Result verification failed at element 250!"
  check "the full one is no fault" says "$said" "SKIP n2 GPU 1 ($full): full:"
  check "the GPUs of AMD are left out, with the reason" says "$said" "SKIP n3 GPU 0"
  check "the exit status says that a GPU failed" says "$said" "Result = FAIL" "status 2"
  eventually 20 "nothing is left" leaves_nothing

  kube create namespace divvy-smoke > /dev/null
  kube label namespace divvy-smoke pod-security.kubernetes.io/enforce=restricted > /dev/null
  said=$(smokes --node n1 --steps S02,S06,S07)
  check "Pod Security's level restricted admits the pods" says "$said" "Result = PASS" "status 0"
  kube delete namespace divvy-smoke > /dev/null

  "$DIVVY" smoke --node n1 --steps S04 > "$LOGS/smoke.log" 2>&1 &
  pid=$!
  eventually 20 "a run has a pod" has_smoke_pods
  # A shell lets its background processes ignore SIGINT. The command treats both alike.
  kill -TERM $pid
  wait $pid || status=$?
  check "after SIGTERM it ends, and says that a GPU was not tried" equals $status 3
  eventually 20 "and nothing is left" leaves_nothing

  user=$(user_of team-c)
  said=$(smokes --all-nodes --kubeconfig "$user")
  check "a user without rights is told which role is missing" says "$said" "divvy-viewer" "--here" "status 3"
  kube delete namespace team-c > /dev/null
  kube delete pod full --wait > /dev/null
  for node in n1 n2; do in_node $node rm -f /etc/cdi/nvidia.json; done
}
