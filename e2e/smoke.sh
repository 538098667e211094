# shellcheck shell=bash disable=SC2154
# Checks of `divvy smoke`: the program divvy-smoke runs in pods, on a simulated CUDA driver. install.sh sources this file.

SMOKE=$CLUSTER_DIR/sim/smoke
# Give the containers of a node the simulated CUDA driver in place of the text files, by a CDI spec of an administrator. The simulated driver does not
# know which GPU a container was given, so each GPU is described as a separate machine. The GPU BROKEN returns wrong sums.
simulate_cuda() { # NODE [BROKEN]
  local driver; driver=$(driver_of "$1" "$MACHINES")
  mkdir -p "$SMOKE"
  cp "$DIVVY_BIN/libdivvy_cuda_sim.so" "$SMOKE/libcuda.so.$driver"
  kube get node "$1" -o json | python3 -c '
import json, sys
directory, driver, lib, broken = sys.argv[1:5]
inventory = json.loads(json.load(sys.stdin)["metadata"]["annotations"]["divvy.dev/inventory"])
devices = []
for gpu in inventory["gpus"]:
    uuid, model = gpu["uuid"], gpu["model"]
    described = f"""uuid = "{uuid}"\nmemory_mib = {gpu["totalMiB"]}"""
    if gpu.get("partition"):
        # What `divide_gpu` makes of an A100: one MIG device 3g.20gb.
        model = model.split(" MIG ")[0]
        described = f"""memory_mib = 40960\nmig = [{{ gpu_instance = 1, compute_instance = 0, profile = 2, uuid = "{uuid}" }}]"""
    with open(f"{directory}/{uuid}.toml", "w") as machine:
        machine.write(f"""v = 1
[[node]]
name = "n"
driver = "{driver}"
[[node.gpu]]
model = "{model}"
cc = "{gpu["cc"]}"
{described}
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
' "$SMOKE" "$driver" "$LIB" "${2:-}" | in_node "$1" tee /etc/cdi/nvidia.json > /dev/null
}
inventory_of() { kube get node "$1" -o 'jsonpath={.metadata.annotations.divvy\.dev/inventory}'; } # NODE
uuid_of() { # NODE PLACE-IN-INVENTORY
  inventory_of "$1" | python3 -c 'import json, sys; print(json.load(sys.stdin)["gpus"][int(sys.argv[1])]["uuid"])' "$2"
}
# Divide a GPU into these MIG devices, as nvidia-smi does. `null` switches MIG off. The kernel module has files for one MIG device of GPU 0.
divide_gpu() { # NODE GPU DEVICES
  "$CLUSTER_ROOT/program.sh" mig-files "$1" $'gpu0/gi1/access 3\ngpu0/gi1/ci0/access 4\n' gpu0/mig/gi1/ci0 "3 4"
  python3 -c '
import json, socket, sys
stream = socket.socket(socket.AF_UNIX)
stream.connect(sys.argv[1])
request = {"op": "mig", "gpu": int(sys.argv[2]), "devices": json.loads(sys.argv[3])}
stream.sendall((json.dumps(request) + "\n").encode())
answer = stream.makefile().readline()
sys.exit(None if json.loads(answer).get("ok") else answer)' "$CLUSTER_DIR/$1/nvml.sock" "$2" "$3"
}
has_part() { says "$(inventory_of "$1")" '"uuid":"MIG-'; } # NODE
has_undivided() { says "$(inventory_of "$1")" 'MIG mode is on'; } # NODE
has_no_mig() { says_not "$(inventory_of "$1")" 'MIG mode is on' '"uuid":"MIG-'; } # NODE
is_out_of_service() { says "$(inventory_of "$1")" '"out of service: divvy smoke: S02 vector add'; } # NODE
waits_for_gpu() { says "$("$DIVVY" why "$1" 2>&1)" "out of service: divvy smoke"; } # POD
# Print what the command prints, with single spaces, and its exit status.
smokes() { local status=0; { divvy smoke "$@" 2>&1 || status=$?; echo "status $status"; } | tr -s ' '; }
smoke_pods() { kube get pods -A -l divvy.dev/smoke -o name; }
has_smoke_pods() { [ -n "$(smoke_pods)" ]; }
leaves_nothing() { equals "$(smoke_pods)" "" && refused_with NotFound kube get namespace divvy-smoke; }

smoke() {
  scene "divvy smoke tries every GPU of the cluster: one computes wrong results, one is full, and one is divided by MIG"
  local divided broken full part said user pid status=0
  divided=$(uuid_of n2 0) full=$(uuid_of n2 1) broken=$(uuid_of n2 2)
  divide_gpu n2 0 '[{"gpu_instance": 1, "compute_instance": 0, "profile": 2}]'
  eventually 20 "the MIG device of GPU 0 of n2 is offered" has_part n2
  part=$(uuid_of n2 2)
  simulate_cuda n1
  simulate_cuda n2 "$broken"
  # The agent made a spec for the MIG device, which would come before that of the administrator.
  eventually 30 "the agent uses the administrator's CDI spec" in_node n2 test ! -e /var/run/cdi/divvy.dev-driver_nvidia.com-gpu.json
  pod full 40 "" 0 n2 | annotated "divvy.dev/gpu-uuid: $full" | kube create -f - > /dev/null
  step created "pod full: all of GPU 1 of n2"
  eventually 20 "it runs" is_running full
  said=$(smokes --all-nodes --steps S02); shown <<< "$said"
  check "the GPU of n1 adds rightly" says "$said" "n1 0 NVIDIA GeForce RTX 3080 Ti Laptop GPU PASS PASS PASS"
  check "so does the MIG device of n2" says "$said" "n2 100 NVIDIA A100-SXM4-40GB MIG 3g.20gb PASS PASS PASS"
  check "the broken one is named, with the first wrong element" says "$said" "FAIL n2 GPU 2 ($broken)" "Result verification failed at element 250!"
  check "the full one is skipped, with the reason" says "$said" "SKIP n2 GPU 1 ($full): full:"
  check "the GPUs of AMD are left out, with the reason" says "$said" "SKIP n3 GPU 0"
  check "the exit status says that a GPU failed" says "$said" "Result = FAIL" "status 2"
  eventually 20 "nothing is left" leaves_nothing
  said=$(smokes --node n2 --gpu "$broken" --steps S02 --report); shown <<< "$said"
  check "with --report, the broken one goes out of service" says "$said" "The GPU is out of service: Divvy gives it to no pod" "status 2"
  eventually 20 "the agent does not offer it" is_out_of_service n2
  check "an event of the node says so" says "$(kube get events -A --field-selector reason=GpuOutOfService -o 'jsonpath={.items[*].note}{.items[*].message}')" "$broken"
  pod unlucky 1 "" 0 n2 | annotated "divvy.dev/gpu-uuid: $broken" | kube create -f - > /dev/null
  eventually 20 "a pod that wants it waits" waits_for_gpu unlucky
  check "a test of it again fails, and it stays there" says "$(smokes --node n2 --gpu "$broken" --steps S02 --report)" "The GPU is out of service" "status 2"
  simulate_cuda n2
  said=$(smokes --node n2 --gpu "$broken" --steps S02,S03,S04 --report); shown <<< "$said"
  check "when it adds rightly, it is in service again" says "$said" "The GPU is in service again." "status 0"
  eventually 30 "the waiting pod gets it" is_running unlucky
  kube delete pod unlucky --wait > /dev/null
  eventually 20 "nothing is left" leaves_nothing
  check "the MIG device is tried by its UUID" says "$(smokes --node n2 --gpu "$part" --steps S02)" "Result = PASS: 1 passed" "status 0"
  eventually 20 "nothing is left" leaves_nothing
  divide_gpu n2 0 '[]'
  eventually 20 "GPU 0 of n2 is in MIG mode without MIG devices" has_undivided n2
  check "it is skipped, with the reason" says "$(smokes --node n2 --gpu 0)" "SKIP n2 GPU 0 ($divided): the GPU is in MIG mode" "status 3"
  divide_gpu n2 0 null
  eventually 20 "GPU 0 of n2 is whole again" has_no_mig n2

  kube create namespace divvy-smoke > /dev/null
  kube label namespace divvy-smoke pod-security.kubernetes.io/enforce=restricted > /dev/null
  said=$(smokes --node n1 --steps S02,S06,S07)
  check "Pod Security's level restricted admits the pods" says "$said" "Result = PASS" "status 0"
  said=$(smokes --node n1 --steps S02,S06,S07 --image "$PROBE_IMAGE"); shown <<< "$said"
  check "it admits them with another image, too, which has neither the program nor a C library" says "$said" "Result = PASS" "status 0"
  said=$(smokes --node n1 --steps S02 --image registry.invalid/none:1)
  check "an image that cannot be pulled is named" says "$said" "registry.invalid/none:1" "status 3"
  kube delete namespace divvy-smoke > /dev/null

  "$DIVVY" smoke --node n1 --steps S04 > "$LOGS/smoke.log" 2>&1 &
  pid=$!
  eventually 20 "a run has a pod" has_smoke_pods
  # A shell lets its background processes ignore SIGINT. The command treats both alike.
  kill -TERM $pid
  wait $pid || status=$?
  check "after SIGTERM it ends, and says that a GPU was not tried" equals $status 3
  eventually 20 "and nothing is left" leaves_nothing

  "$DIVVY" smoke --node n1 --steps S04 > "$LOGS/smoke.log" 2>&1 &
  pid=$!
  eventually 20 "another run has a pod" has_smoke_pods
  kill -KILL $pid
  wait $pid || true
  eventually 30 "after kill -9, nothing is left either" leaves_nothing

  user=$(user_of team-c)
  said=$(smokes --all-nodes --kubeconfig "$user")
  check "a user without rights is told which role is missing" says "$said" "divvy-viewer" "--here" "status 3"
  kube delete namespace team-c > /dev/null
  kube delete pod full --wait > /dev/null
  for node in n1 n2; do in_node $node rm -f /etc/cdi/nvidia.json; done
}
