#!/usr/bin/env bash
# The tutorial and its accidents on a real Kubernetes, with the real kubectl: each step is told and checked; what is asserted is what the API
# server says and what the containers themselves report. Status 1: a check did not hold. Needs `cluster up` and `cluster divvy`.
#   tutorial.sh [SCENE...]     all scenes, or only those named (functions below); those of node n2 are left out where there is none
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
alive kube-apiserver || die "no cluster runs in $CLUSTER_DIR; cargo xtask cluster up"
# shellcheck source=play.sh
. "$CLUSTER_ROOT/play.sh"
export DIVVY_BIN MACHINES

too_large() {
  scene "A pod asks for more than any GPU has"
  create too-large 41 "" 2
  create waits 12 "" 2 n1
  eventually 10 "kube-scheduler refuses both" refused too-large waits
  check "neither is bound" equals "$(field too-large .spec.nodeName)$(field waits .spec.nodeName)" ""
  divvy why too-large | shown
  check "why: no GPU is that large" says "$(divvy why too-large)" "Pod default/too-large waits; it asks for 41 GiB" "no GPU of this node is that large, even empty"
  check "why: who holds what waits asks for" says "$(divvy why waits)" default/binpack-0 default/binpack-1 "8 GiB"
  kube delete pod too-large waits --wait > /dev/null
}

stubborn() {
  scene "A container that ignores SIGTERM is deleted; the newcomer waits for it"
  clear_pods
  create old 12 ignore-term 4 n1
  started old
  local old; old=$(uid old)
  create new 12 "" 2 n1
  kube delete pod old --wait=false > /dev/null
  step deleted "pod old; its program ignores SIGTERM, 4 s of grace"
  eventually 3 "why: it is being deleted and still holds the memory" why_says new "default/old is being deleted and still holds"
  hand_over "$old" new 20
  check "new's program never ran beside old's" equals "$OVERLAP" 0
  measured "$GAP ms from the end of old's program to new's program"
  started new
  check "new has the GPU" own_gpu new 0
}

forced() {
  scene "A pod is deleted by force; its container goes on for a while, and its memory with it"
  clear_pods
  create old 12 ignore-term 30 n1
  started old
  local old began; old=$(uid old)
  kube delete pod old --force --grace-period=0 > /dev/null 2>&1
  began=$(now)
  check "old is gone from the API, and its program runs" test -n "$(programs_of "$old")"
  create new 12 "" 2 n1
  eventually 5 "the node says of which pod it holds memory" held_event
  hand_over "$old" new 40
  check "new's program never ran beside old's" equals "$OVERLAP" 0
  measured "old's program ended and new's began $(($(now) - began)) ms after the forced deletion"
  started new
}
held_event() { kube get events --field-selector reason=MemoryHeldWithoutPod -o 'jsonpath={.items[*].involvedObject.name}' | grep -qw old; }

agent_restarts() {
  scene "The agent is stopped, and killed; pods run on"
  clear_pods
  create one 3 "" 2 n1
  started one
  local before; before=$(container_ids)
  stop n1.agent
  step stopped "the agent of n1 (SIGTERM)"
  eventually 5 "n1 offers nothing" offers n1 0
  create two 5 "" 2 n1
  eventually 5 "two waits" refused two
  divvy why two | shown
  check "why: the node's agent is away" why_says two agent
  local began; began=$(now)
  start_divvy
  eventually 10 "n1 offers its units again" offers n1 16
  measured "$(($(now) - began)) ms from the agent's start to the units in the node's allocatable"
  started two
  check "one runs in its first container" equals "$(container_ids | grep '^one ')" "$(grep '^one ' <<< "$before")"
  before=$(container_ids)
  kill9 n1.agent
  step killed "the agent of n1 (kill -9)"
  eventually 5 "its probe has ended with it" no_probe
  start_divvy
  eventually 10 "n1 offers its units again" offers n1 16
  check "both run in their first containers" equals "$(container_ids)" "$before"
  check "kubectl inspect gpushare says 8/16" says "$(divvy inspect gpushare n1)" 8/16
}
no_probe() { ! in_node n1 find /proc -maxdepth 2 -name exe -lname '*divvy-probe*' 2> /dev/null | grep -q . || [ "$(known_nodes | wc -l)" -gt 1 ]; }
start_divvy() { "$CLUSTER_ROOT/divvy.sh" up > /dev/null; }

kubelet_restarts() {
  scene "The kubelet is restarted, and killed; pods run on, the agent registers again"
  local how before lines began granted
  before=$(container_ids)
  for how in "" -9; do
    lines=$(log_lines n1.agent)
    began=$(now)
    "$CLUSTER_ROOT/restart.sh" $how n1.kubelet > /dev/null & local restarting=$!
    eventually 15 "the agent is registered again (kubelet restarted${how:+, $how})" registered_since n1 "$lines"
    measured "$(($(now) - began)) ms from the kubelet's end to the registration"
    measured "$(socket_to_registration n1 "$lines") ms of them from the new kubelet's socket to the registration"
    wait $restarting
    eventually 10 "n1 offers its units" offers n1 16
    check "every pod runs in its first container" equals "$(container_ids)" "$before"
    granted=$(tail -n "+$((lines + 1))" "$LOGS/n1.agent.log" | grep -c '"granted"' || true)
    check "nothing was granted anew" equals "$granted" 0
  done
  create after-kubelet 2 "" 2 n1
  started after-kubelet
  check "after-kubelet has the GPU" own_gpu after-kubelet 0
}

containerd_restarts() {
  scene "containerd is restarted, and killed; pods run on"
  local how before; before=$(container_ids)
  for how in "" -9; do
    "$CLUSTER_ROOT/restart.sh" $how n1.containerd > /dev/null
    step restarted "containerd of n1 ${how:-(SIGTERM)}"
    check "every pod runs in its first container" equals "$(container_ids)" "$before"
    create "after-containerd${how/-/}" 1 "" 2 n1
    started "after-containerd${how/-/}"
    before=$(container_ids)
  done
}

extender_restarts() {
  scene "The extender is killed; pods wait, and nothing is bound past it"
  clear_pods
  create one 3 "" 2 n1
  started one
  kill9 divvy-extender
  step killed "the extender (kill -9)"
  create meanwhile 5 "" 2 n1
  eventually 10 "kube-scheduler says that the extender does not answer" scheduling_says meanwhile "connection refused"
  check "meanwhile is not bound" equals "$(field meanwhile .spec.nodeName)" ""
  local began; began=$(now)
  start_divvy
  measured "$(($(now) - began)) ms until the extender answers"
  eventually 30 "meanwhile is bound now" is_bound meanwhile
  measured "$(($(now) - began)) ms from the extender's start until the pod that waited is bound"
  started meanwhile
  check "kubectl inspect gpushare says 8/16" says "$(divvy inspect gpushare n1)" 8/16
}

several_containers() {
  scene "Containers of one pod, an init container and a sidecar share the pod's GPU"
  clear_pods
  kube create -f - > /dev/null <<END
apiVersion: v1
kind: Pod
metadata: {name: several, labels: {play: tutorial}}
spec:
  nodeSelector: {kubernetes.io/hostname: n1}
  terminationGracePeriodSeconds: 2
  initContainers:
  - {name: init, image: $PROBE_IMAGE, imagePullPolicy: Never, args: [env], resources: {limits: {aliyun.com/gpu-mem: 4}}}
  - {name: side, image: $PROBE_IMAGE, imagePullPolicy: Never, args: [run], restartPolicy: Always, resources: {limits: {aliyun.com/gpu-mem: 2}}}
  containers:
  - {name: a, image: $PROBE_IMAGE, imagePullPolicy: Never, args: [run], resources: {limits: {aliyun.com/gpu-mem: 3}}}
  - {name: b, image: $PROBE_IMAGE, imagePullPolicy: Never, args: [run], resources: {limits: {aliyun.com/gpu-mem: 1}}}
END
  step created "pod several: init 4, sidecar 2, a 3, b 1"
  eventually 20 "it runs" is_running several b
  local container units
  while read -r container units; do
    check "$container: its own units, $units" report_has several "$container" ALIYUN_COM_GPU_MEM_IDX=0 "ALIYUN_COM_GPU_MEM_CONTAINER=$units" NVIDIA_VISIBLE_DEVICES=void
  done <<< $'init 4\nside 2\na 3\nb 1'
  check "the pod holds what it takes at most: 2 + 3 + 1" says "$(divvy inspect gpushare n1)" 6/16
}

deployment() {
  scene "A Deployment, scaled up and down"
  clear_pods
  kube create -f - > /dev/null <<END
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, labels: {play: tutorial}}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web, play: tutorial}}
    spec:
      nodeSelector: {kubernetes.io/hostname: n1}
      terminationGracePeriodSeconds: 2
      containers:
      - {name: main, image: $PROBE_IMAGE, imagePullPolicy: Never, args: [run], resources: {limits: {aliyun.com/gpu-mem: 5}}}
END
  kube rollout status deployment/web --timeout=30s > /dev/null
  check "2 replicas of 5 GiB: 10/16" says "$(divvy inspect gpushare n1)" 10/16
  kube scale deployment web --replicas 4 > /dev/null
  eventually 20 "of 4 replicas 3 run and one waits" replicas_ready 3
  check "15/16" says "$(divvy inspect gpushare n1)" 15/16
  kube scale deployment web --replicas 1 > /dev/null
  eventually 20 "1 replica is left" pods_are 1
  eventually 5 "5/16" inspect_says n1 5/16
}
replicas_ready() { equals "$(kube get deployment web -o jsonpath='{.status.readyReplicas}')" "$1"; }
pods_are() { equals "$(kube get pods -l play=tutorial -o name | wc -l)" "$1"; }

mixed() {
  scene "Mixed GPUs: the sum would do, no single GPU does"
  clear_pods
  create train-0 30 ignore-term 2 n2
  started train-0
  create train-1 30 "" 2 n2
  started train-1
  create big 20 "" 2 n2
  eventually 10 "the extender refuses big" scheduling_says big "Insufficient GPU Memory in one device"
  divvy why big | shown
  check "why names who holds the memory" why_says big default/train-0 default/train-1 "20 GiB"
  check "train-0 and train-1 have an A100 each" different_gpus train-0 train-1
  local old; old=$(uid train-0)
  kube delete pod train-0 --wait=false > /dev/null
  hand_over "$old" big 20
  check "big's program never ran beside train-0's" equals "$OVERLAP" 0
  started big

  scene "A GPU falls off the bus (XID 79) while train-1 runs on it"
  local gpu id; gpu=$(gpus_in train-1 | grep -oE 'nvidia[0-9]+' | tr -d a-z)
  id=$(field train-1 '.status.containerStatuses[0].containerID')
  driver n2 "{\"op\":\"xid\",\"gpu\":$gpu,\"xid\":79}" "{\"op\":\"lost\",\"gpu\":$gpu,\"lost\":true}"
  eventually 10 "inspect shows it" inspect_wide_says n2 "XID 79"
  divvy inspect gpushare n2 -o wide | shown
  check "train-1 was left alone" equals "$(field train-1 '.status.containerStatuses[0].containerID') $(field train-1 '.status.containerStatuses[0].restartCount')" "$id 0"
  create fill-0 20 "" 2 n2
  started fill-0
  create fill-2 15 "" 2 n2
  started fill-2
  check "the healthy GPUs go on" own_gpu fill-2 2
  create patient 10 "" 2 n2
  eventually 10 "patient is refused: only the failed GPU has room" refused patient
  check "why names XID 79" why_says patient "XID 79"
  driver n2 "{\"op\":\"lost\",\"gpu\":$gpu,\"lost\":false}"
  step recovered "the GPU answers again"
  eventually 20 "patient runs now" is_running patient
  check "on the GPU that recovered" own_gpu patient "$gpu"
}
different_gpus() { [ "$(gpus_in "$1")" != "$(gpus_in "$2")" ] && [ -n "$(gpus_in "$1")" ]; }
driver() { # NODE REQUEST...: to the simulated NVML
  local node=$1 request; shift
  for request in "$@"; do
    python3 - "$CLUSTER_DIR/$node/nvml.sock" "$request" <<'END'
import socket, sys
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(sys.argv[2].encode() + b"\n")
answer = s.makefile().readline()
sys.exit(0 if '"ok":true' in answer else answer)
END
  done
}

many() {
  scene "Many pods at once"
  clear_pods
  local i began count=40 units=2
  [ "$(known_nodes | wc -l)" -gt 1 ] || count=16 units=1
  began=$(now)
  { for i in $(seq $count); do pod "many-$i" $units; echo ---; done; } | kube create -f - > /dev/null
  step created "$count pods of $units GiB"
  eventually 60 "all run" running_are $count
  measured "$(($(now) - began)) ms until all $count run"
  check "each has one GPU, and gpushare's variables" each_has_one_gpu
  check "no GPU has more than it has" not_overcommitted
  clear_pods
  local node; for node in $(known_nodes); do eventually 15 "$node: no record and no spec is left" no_grants "$node"; done
}
running_are() { equals "$(kube get pods -l play=tutorial --field-selector status.phase=Running -o name | wc -l)" "$1"; }
each_has_one_gpu() {
  local pod
  for pod in $(kube get pods -l play=tutorial -o 'jsonpath={.items[*].metadata.name}'); do
    [[ $(gpus_in "$pod") =~ ^\ nvidia[0-9]\ 195:[0-9]\;$ ]] && report_has "$pod" main 'ALIYUN_COM_GPU_MEM_IDX=[0-9]' NVIDIA_VISIBLE_DEVICES=void || { echo "$pod"; return 1; }
  done
}
# From what the containers report: per node and GPU, the units of its containers against the GPU's.
not_overcommitted() {
  local pod
  for pod in $(kube get pods -l play=tutorial -o 'jsonpath={.items[*].metadata.name}'); do
    echo "$(field "$pod" .spec.nodeName) $(kube logs "$pod" | sed -nE 's/^ALIYUN_COM_GPU_MEM_(IDX|CONTAINER|DEV)=//p' | tr '\n' ' ')"
  done | awk '{used[$1 " " $4] += $2; has[$1 " " $4] = $3} END {for (gpu in used) if (used[gpu] > has[gpu]) {print gpu, used[gpu] "/" has[gpu]; bad = 1} exit bad}'
}

api_server_restarts() {
  scene "The API server is away for 10 s; pods run on"
  clear_pods
  create one 3 "" 2 n1
  started one
  local before; before=$(container_ids)
  kill9 kube-apiserver
  step killed "kube-apiserver (kill -9)"
  sleep 10
  "$CLUSTER_ROOT/up.sh" > /dev/null
  step started "kube-apiserver"
  local began; began=$(now)
  check "one runs in its first container" equals "$(container_ids)" "$before"
  create two 5 "" 2 n1
  # kube-scheduler's own watches are tried again after up to 30 s.
  eventually 60 "two is bound" is_bound two
  measured "$(($(now) - began)) ms until a pod is bound again"
  started two
  check "kubectl inspect gpushare says 8/16" says "$(divvy inspect gpushare n1)" 8/16
}

forced_with_a_waiting_pod() {
  scene "A pod is deleted by force while another waits for its memory"
  clear_pods
  create old 12 ignore-term 30 n1
  started old
  create new 12 "" 2 n1
  eventually 5 "new waits" refused new
  local old began; old=$(uid old)
  kube delete pod old --force --grace-period=0 > /dev/null 2>&1
  began=$(now)
  hand_over "$old" new 60
  check "new's program never ran beside old's" equals "$OVERLAP" 0
  measured "$GAP ms from the end of old's program to new's program, $(($(now) - began)) ms from the forced deletion"
  started new
}

forced_without_kubelet() {
  scene "A pod is deleted by force while its node's kubelet is away and another pod waits"
  clear_pods
  create old 12 ignore-term 30 n1
  started old
  create new 12 "" 2 n1
  eventually 5 "new waits" refused new
  local old; old=$(uid old)
  stop n1.kubelet
  kube delete pod old --force --grace-period=0 > /dev/null 2>&1
  sleep 2
  check "old's program runs" test -n "$(programs_of "$old")"
  "$CLUSTER_ROOT/up.sh" > /dev/null
  hand_over "$old" new 60
  check "new's program began after old's had ended" equals "$OVERLAP" 0
}

past_the_scheduler() {
  scene "A pod names its node itself: it is not started on memory that nobody gave it"
  clear_pods
  pod direct 3 | sed 's/^spec:/spec:\n  nodeName: n1/' | kube create -f - > /dev/null
  step created "pod direct: 3 GiB, nodeName: n1"
  eventually 10 "its event says why" event_says direct NoAllocation "without an allocation"
  check "it does not run" equals "$(programs_of "$(uid direct)")" ""
  check "why says the same" why_says direct "without an allocation" "kubectl delete pod"
}
event_says() { says "$(kube get events --field-selector "involvedObject.name=$1,reason=$2" -o 'jsonpath={.items[*].message}')" "$3"; }

# All that lives in memory is gone: processes, sandboxes, /run, cgroups; the boot id is another one.
reboot() { # NODE: leaves it switched off
  local node=$1 name pid environ
  for name in agent kubelet containerd; do kill9 "$node.$name"; done
  for pid in $(find /sys/fs/cgroup/pids/"$CGROUP_PREFIX-$node" /sys/fs/cgroup/"$CGROUP_PREFIX-$node" -name cgroup.procs -exec cat {} + 2> /dev/null | sort -u); do
    kill -9 "$pid" 2> /dev/null || true
  done
  for environ in /proc/[0-9]*/environ; do   # shims live in the machine's own cgroup
    pid=${environ#/proc/}; pid=${pid%/environ}
    if { tr '\0' ' ' < "/proc/$pid/cmdline"; } 2> /dev/null | grep -q 'containerd-shim.* -namespace k8s.io' && grep -qzxF "$MARK" "$environ" 2> /dev/null &&
      [ "$(stat -Lc %i "/proc/$pid/ns/mnt")" = "$(stat -Lc %i "/proc/$(pid_of "$node.holder")/ns/mnt")" ]; then kill -9 "$pid"; fi
  done
  sleep 0.3
  cat /proc/sys/kernel/random/uuid > "$CLUSTER_DIR/$node/boot_id"
  in_node "$node" bash -c '
    grep -oE " (/run/containerd|/var/lib/kubelet/pods)/[^ ]+" /proc/self/mountinfo | sort -ru | while read -r m; do umount -l "$m" || true; done
    rm -rf /run/containerd/* /run/cdi/* /run/nri/*
    mount --bind "$1" /proc/sys/kernel/random/boot_id' reboot "$CLUSTER_DIR/$node/boot_id"
  find /sys/fs/cgroup -depth -type d -path "*/$CGROUP_PREFIX-$node/kubepods*" -exec rmdir {} + 2> /dev/null || true
}
node_reboots() {
  scene "The node reboots; its kubelet is back before the agent"
  clear_pods
  create bare 3 "" 2 n1
  started bare
  reboot n1
  step rebooted "n1: no process, no /run, no cgroups, another boot id"
  "$CLUSTER_ROOT/up.sh" > /dev/null
  eventually 15 "the kubelet refuses bare for good: no device plugin yet" pod_is bare Failed
  start_divvy
  eventually 10 "n1 offers its units" offers n1 16
  create replacement 16 "" 2 n1
  started replacement
  check "the replacement has the whole GPU" own_gpu replacement 0

  scene "The node reboots; the agent is there first"
  clear_pods
  create bare 3 "" 2 n1
  started bare
  reboot n1
  step rebooted "n1"
  start_divvy & local starting=$!
  wait_for "the agent waits for the kubelet" 10 - alive n1.agent > /dev/null
  "$CLUSTER_ROOT/up.sh" > /dev/null
  eventually 20 "bare runs again, restarted once" restarted_once bare
  wait $starting
  check "bare has its GPU" own_gpu bare 0
  check "kubectl inspect gpushare says 3/16" says "$(divvy inspect gpushare n1)" 3/16
}
pod_is() { equals "$(field "$1" .status.phase)" "$2"; }
restarted_once() { equals "$(field "$1" '.status.phase}{.status.containerStatuses[0].restartCount')" Running1; }

churn() {
  local seconds=${CHURN:-60} seed=${SEED:-$RANDOM}
  scene "Pods come and go for $seconds s while agent, extender, kubelet and containerd are killed (SEED=$seed)"
  clear_pods
  RANDOM=$seed
  local end=$(($(now) + seconds * 1000)) number=0 victim name killed="" created=0
  rm -f "$CLUSTER_DIR/churn.log" "$CLUSTER_DIR/churn.reports"
  "$DIVVY" audit record "$CLUSTER_DIR/churn.log" 2> "$LOGS/audit-record.log" & local record=$!
  eventually 5 "the history is written down" grep -qs '"LISTED","kind":"Pod"' "$CLUSTER_DIR/churn.log"
  python3 "$CLUSTER_ROOT/live.py" "$CGROUP_PREFIX" 0.05 "$CLUSTER_DIR/churn.reports" > "$CLUSTER_DIR/live.log" & local live=$!
  while [ "$(now)" -lt $end ]; do
    number=$((number + 1))
    case $((RANDOM % 10)) in
      0 | 1 | 2 | 3 | 4)
        created=$((created + 1))
        { pod "c$number" $((RANDOM % 9 + 1)) "$([ $((RANDOM % 3)) = 0 ] && echo ignore-term)" $((RANDOM % 4 + 1)) n1 | kube create -f -; } > /dev/null 2>&1 || true ;;
      5 | 6 | 7)
        one_of_them
        [ -z "$name" ] || kube delete "$name" --wait=false > /dev/null 2>&1 || true ;;
      8)
        one_of_them
        [ -z "$name" ] || kube delete "$name" --force --grace-period=0 > /dev/null 2>&1 || true ;;
      9)
        victim=$(printf '%s\n' n1.agent divvy-extender n1.kubelet n1.containerd | sed -n "$((RANDOM % 4 + 1))p")
        killed+=" $victim"
        kill9 "$victim"
        sleep "0.$((RANDOM % 9))"
        "$CLUSTER_ROOT/up.sh" > /dev/null; start_divvy ;;
    esac
    sleep "0.$((RANDOM % 4))"
  done
  step killed "$(wc -w <<< "$killed") times:$(tr ' ' '\n' <<< "$killed" | sort | uniq -c | awk 'NF == 2 {printf " %s %s,", $1, $2}' | sed 's/,$//'); $created pods created"
  eventually 60 "the churn settles: every pod runs, waits for room, or has ended" settled
  clear_pods
  kill $live; local sound=0; wait $live || sound=$?
  measured "$(tail -n 1 "$CLUSTER_DIR/live.log")"
  check "no GPU ever had programs on it for more memory than it has" test "$sound" = 0
  [ "$sound" = 0 ] || head -n 20 "$CLUSTER_DIR/live.log" | shown
  eventually 30 "n1: no record and no spec is left" no_grants n1
  eventually 10 "n1: all of it is free" inspect_says n1 0/16
  create all 16 "" 2 n1
  started all
  kill $record; wait $record || true
  divvy audit "$CLUSTER_DIR/churn.log" --reports "$CLUSTER_DIR/churn.reports" | shown
  check "divvy audit finds nothing in the history, nor in what the containers said of themselves" \
    divvy audit "$CLUSTER_DIR/churn.log" --reports "$CLUSTER_DIR/churn.reports"
}
# Sets `name` to a pod that is bound, mostly: those that wait are many, and to delete them frees nothing.
one_of_them() {
  local names bound=--field-selector=spec.nodeName=n1 any=$((RANDOM % 4)) chosen=$RANDOM
  [ "$any" != 0 ] || bound=
  # shellcheck disable=SC2086
  mapfile -t names < <(kube get pods -l play=tutorial $bound -o name 2> /dev/null)
  name=
  [ ${#names[@]} = 0 ] || name=${names[chosen % ${#names[@]}]}
}
settled() {
  # By phase and not by what kubectl calls the state: a pod whose runtime was killed at the wrong moment ends as ContainerStatusUnknown.
  [ -z "$(kube get pods -l play=tutorial -o 'jsonpath={range .items[?(@.status.phase=="Pending")]}{.spec.nodeName}{end}')" ] &&
    [ -z "$(kube get pods -l play=tutorial -o 'jsonpath={range .items[*]}{.metadata.deletionTimestamp}{end}')" ]
}

all=(two_pods too_large stubborn forced forced_with_a_waiting_pod forced_without_kubelet past_the_scheduler agent_restarts kubelet_restarts containerd_restarts extender_restarts several_containers deployment)
[ "$(known_nodes | wc -l)" = 1 ] || all+=(mixed)
all+=(many node_reboots churn api_server_restarts)
[ $# -gt 0 ] || set -- "${all[@]}"
for name in "$@"; do [ "$(type -t "$name")" = function ] || die "no scene is named $name; the scenes: ${all[*]}"; done
kube delete pods,deployments -l play=tutorial --wait --timeout=60s > /dev/null
for name in "$@"; do "$name"; done
clear_pods
for node in $(known_nodes); do eventually 15 "$node: no record and no spec is left" no_grants "$node"; done
finish
