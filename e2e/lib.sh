# shellcheck shell=bash disable=SC2016,SC2034
# Settings and functions for the scripts in this directory, which source this file. Every setting can be given in the environment. The settings
# of a running cluster are stored in $CLUSTER_DIR/settings and are the defaults of later commands.

CLUSTER_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=versions.env
. "$CLUSTER_ROOT/versions.env"

: "${CLUSTER_DIR:=${TMPDIR:-/tmp}/divvy-cluster}"  # state, logs and credentials of one cluster; keep it short (Unix socket paths)
CLUSTER_DIR=${CLUSTER_DIR%/}
# shellcheck disable=SC1091
[ ! -e "$CLUSTER_DIR/settings" ] || . "$CLUSTER_DIR/settings"
SETTINGS="CLUSTER_BIN NODES AUTHORIZATION SERVICE_ACCOUNTS KCM FEATURE_GATES RUNTIME_CONFIG EXTENDER_URL SCHEDULER_TEMPLATE QOS_CGROUPS PORT_BASE NODE_IP LOG_LEVEL"

# The programs, in one directory per set of versions.
: "${CLUSTER_BIN:=${XDG_CACHE_HOME:-$HOME/.cache}/divvy-cluster/k8s-$KUBERNETES_VERSION-containerd-$CONTAINERD_VERSION-runc-$RUNC_VERSION-etcd-$ETCD_VERSION}"
: "${NODES:=1}"                # the number of real nodes n1..nN, each with its own mount namespace, containerd, and kubelet
: "${AUTHORIZATION:=AlwaysAllow}"  # or RBAC: Node,RBAC with NodeRestriction
: "${SERVICE_ACCOUNTS:=0}"     # 1: pods get service account tokens (needs KCM=1)
: "${KCM:=1}"                  # 0: no kube-controller-manager (no claim templates, no Deployments, no garbage collection)
: "${FEATURE_GATES:=}"         # e.g. DRADeviceTaintRules=true,DRAListTypeAttributes=true; passed to every Kubernetes program
: "${RUNTIME_CONFIG:=}"        # e.g. resource.k8s.io/v1beta2=true
: "${EXTENDER_URL:=}"          # e.g. http://127.0.0.1:26005/gpushare-scheduler; empty: no extender
: "${SCHEDULER_TEMPLATE:=}"    # a template to use instead of templates/scheduler*.yaml.in
: "${QOS_CGROUPS:=1}"          # 0: no QoS cgroup tree; containers are directly below the runtime's cgroup
: "${PORT_BASE:=26000}"        # etcd +0 +1, apiserver +2, scheduler +3, controller manager +4, extender +5; nI: kubelet +10*I, its healthz +1, agent +2
: "${NODE_IP:=$(hostname -I 2>/dev/null | cut -d' ' -f1)}"  # must not be a loopback address
: "${LOG_LEVEL:=2}"

# Pods have their own network: a bridge on this machine, without a route beyond it. The API server listens at the bridge's address.
BRIDGE=dvy$PORT_BASE
NETWORK=10.$((PORT_BASE / 1000 % 56 + 200))
API_HOST=$NETWORK.0.1
SERVICE_HOST=10.0.0.$((PORT_BASE / 1000 % 56 + 100))   # the address of the extender's Service if Divvy is installed; also an address of the bridge
PAUSE_IMAGE=divvy.test/pause:1
PROBE_IMAGE=divvy.test/probe:1
PROGRAMS="etcd runc containerd containerd-shim-runc-v2 ctr kube-scheduler kube-apiserver kube-controller-manager kubelet kubectl helm"
NVIDIA_PROGRAMS="nvidia-device-plugin nvidia-cdi-hook"   # are built only on request
LOGS=$CLUSTER_DIR/logs
API_PORT=$((PORT_BASE + 2))
CGROUP_PREFIX=divvy-test-$PORT_BASE   # so that two clusters can run side by side
MARK="DIVVY_TEST_CLUSTER=$CLUSTER_DIR"
# The directories that each node has for itself: a node's <path> is $CLUSTER_DIR/<node>/<path> on the machine.
NODE_DIRECTORIES="/var/lib/kubelet /var/lib/containerd /var/lib/cni /run/containerd /run/cdi /run/nri /run/nvidia/driver /run/nvidia/mps /etc/kubernetes/node-feature-discovery/features.d /etc/cdi /var/log/pods /var/log/containers"
# The kubelet would set these for the whole machine. In a node's mount namespace they are ordinary files instead.
NODE_SYSCTLS="vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes"

say() { printf '%7.2f  %s\n' "$(($(date +%s%N) / 1000000 - T0))e-3" "$*"; }
T0=$(($(date +%s%N) / 1000000))
die() { echo "error: $*" >&2; exit 1; }

# If this machine lacks something, the tests have neither failed nor passed, so this case has its own exit status. It is also recorded like the
# skips of tests (crates/divvy-skip).
SKIPPED=77
skip() { # REASON
  [ -z "${DIVVY_SKIPS:-}" ] || printf 'real Kubernetes\t%s\n' "$(tr '\n\t' '  ' <<< "$*")" >> "$DIVVY_SKIPS"
  cat >&2 <<END
SKIPPED: $*
Nothing was tested on a real Kubernetes: not the kubelet's device manager, CDI in containerd, kube-scheduler's calls of the extender,
or RBAC. The embedded cluster (cargo xtask test, cargo xtask demo) does not need what is missing.
END
  case ${DIVVY_NO_SKIP:-0} in 0) exit $SKIPPED ;; *) die "DIVVY_NO_SKIP is set, but this must be skipped" ;; esac
}
need_root() {
  [ "$(uname -sm)" = "Linux x86_64" ] || skip "the cluster needs Linux x86_64, but this machine is $(uname -sm)"
  [ "$(id -u)" = 0 ] || skip "the kubelet and containerd need root, but you are $(id -un) (use sudo -E cargo xtask cluster ...)"
  unshare -m true 2> /dev/null || skip "no mount namespace can be created (unshare -m): root lacks CAP_SYS_ADMIN, as in an unprivileged container"
}
need() { # PROGRAM PACKAGE PURPOSE
  command -v "$1" > /dev/null || skip "$1 is not in the PATH ($2); it is needed $3"
}

pid_file() { echo "$CLUSTER_DIR/pids/$1"; }
pid_of() { cat "$(pid_file "$1")"; }

# Report whether the process that was started under this name still runs. The mark in its environment guards against a reused PID.
alive() {
  local pid; pid=$(cat "$(pid_file "$1")" 2>/dev/null) || return 1
  [ -n "$pid" ] && grep -qzxF "$MARK" "/proc/$pid/environ" 2>/dev/null
}

# start NAME COMMAND...: start a detached process with its own log. Its PID is stored in pids/NAME. The command must exec, not fork.
start() {
  local name=$1; shift
  alive "$name" && return 0
  env "$MARK" PATH="$CLUSTER_BIN:$PATH" setsid bash -c 'echo $$ > "$1"; shift; exec "$@"' _ "$(pid_file "$name")" "$@" \
    >> "$LOGS/$name.log" 2>&1 < /dev/null 9>&- &
  local i; for i in $(seq 100); do alive "$name" && return 0; sleep 0.02; done
  tail -n 15 "$LOGS/$name.log" >&2
  die "$name did not start; see $LOGS/$name.log"
}

# Have the containerd of a node take an archive of images. An error repeats what containerd said last: that the disk is full, for example.
import_images() { # NODE ARCHIVE
  local log="$LOGS/$1.images.log"
  in_node "$1" "$CLUSTER_BIN/ctr" -n k8s.io images import "$2" > "$log" 2>&1 ||
    die "$1: containerd did not take the images of $2: $(tail -n 1 "$log")"
}

# stop NAME [SECONDS]: send SIGTERM, and SIGKILL after SECONDS (10).
stop() {
  local name=$1 limit=${2:-10} pid i
  if alive "$name"; then
    pid=$(pid_of "$name")
    kill "$pid" 2>/dev/null || true
    for i in $(seq $((limit * 20))); do alive "$name" || break; sleep 0.05; done
    ! alive "$name" || kill -9 "$pid" 2>/dev/null || true
    for i in $(seq 100); do alive "$name" || break; sleep 0.02; done
  fi
  rm -f "$(pid_file "$name")"
}

# kill9 NAME: end the process with SIGKILL, like a crash.
kill9() {
  local name=$1 i
  alive "$name" || die "$name is not running"
  kill -9 "$(pid_of "$name")"
  for i in $(seq 100); do alive "$name" || break; sleep 0.02; done
  rm -f "$(pid_file "$name")"
}

# wait_for TEXT SECONDS PROCESS COMMAND...: wait until the command succeeds. Fail at once if PROCESS has ended; - means no process.
wait_for() {
  local what=$1 limit=$2 process=$3 end; shift 3
  end=$((SECONDS + limit))
  until "$@" > /dev/null 2>&1; do
    [ "$process" = - ] || alive "$process" || { tail -n 15 "$LOGS/$process.log" >&2; die "$process ended; log: $LOGS/$process.log"; }
    [ $SECONDS -lt $end ] || { [ "$process" = - ] || tail -n 15 "$LOGS/$process.log" >&2; die "$what: not within $limit s"; }
    sleep 0.1
  done
  say "$what"
}

# Wait until the extender's Deployment is rolled out and its Service leads to exactly these pods. Kubernetes' endpointslice controller retries a failed sync
# after 1 s, 2 s, 4 s, and so on, up to 1000 s. A sync fails while the controller's cache does not have its own last write, and each event of a pod causes a
# sync, so a rollout can stop the updates for minutes. An update of the Service causes a sync at once (onServiceUpdate in endpointslice_controller.go).
extender_rolled_out() { # SECONDS
  local pods endpoints limit=$((SECONDS + $1)) nudge=$((SECONDS + 5))
  kube rollout status -n "$NAMESPACE" deployment/divvy-extender --timeout="$1s" > /dev/null
  while :; do
    pods=$(kube get pods -n "$NAMESPACE" -l app.kubernetes.io/component=extender \
      -o go-template='{{range .items}}{{if not .metadata.deletionTimestamp}}{{.status.podIP}}{{"\n"}}{{end}}{{end}}' | sort)
    endpoints=$(kube get endpointslices -n "$NAMESPACE" -l kubernetes.io/service-name=divvy-extender \
      -o go-template='{{range .items}}{{range .endpoints}}{{if .conditions.ready}}{{index .addresses 0}}{{"\n"}}{{end}}{{end}}{{end}}' | sort)
    [ "$pods" != "$endpoints" ] || return 0
    [ $SECONDS -lt $limit ] || die "the extender's pods are at ${pods//$'\n'/, }, but its Service leads to ${endpoints//$'\n'/, }"
    [ $SECONDS -lt $nudge ] || { nudge=$limit; kube annotate service -n "$NAMESPACE" divvy-extender --overwrite "divvy.dev/look-again=$SECONDS" > /dev/null; }
    sleep 0.2
  done
}

nodes() { local i; for i in $(seq "$NODES"); do echo "n$i"; done; }
known_nodes() { local f; for f in "$CLUSTER_DIR"/pids/*.holder; do [ -e "$f" ] && basename "$f" .holder; done; true; }
in_node() { local node=$1; shift; nsenter -t "$(pid_of "$node.holder")" -m -- "$@"; }
kube() { "$CLUSTER_BIN/kubectl" --kubeconfig "$CLUSTER_DIR/admin.kubeconfig" "$@"; }
GATES=(); [ -z "$FEATURE_GATES" ] || GATES=("--feature-gates=$FEATURE_GATES")

fill() { # TEMPLATE NAME=VALUE...: print the template with every @NAME@ replaced
  local template=$1 text pair; shift
  text=$(cat "$template")
  for pair in "$@"; do text=${text//"@${pair%%=*}@"/"${pair#*=}"}; done
  printf '%s\n' "$text"
}

save_settings() { # the environment takes precedence over this file, and this file over the defaults
  local name
  for name in $SETTINGS; do printf ': "${%s:=%s}"\n' "$name" "${!name}"; done > "$CLUSTER_DIR/settings.new"
  mv "$CLUSTER_DIR/settings.new" "$CLUSTER_DIR/settings"
}

kubeconfig() { # FILE USER [TOKEN]: write a kubeconfig with that token, or with the user's own token
  local token=${3:-}; [ -n "$token" ] || token=$(awk -F, -v u="$2" '$2 == u {print $1}' "$CLUSTER_DIR/tokens.csv")
  [ -e "$1" ] || (umask 077; cat > "$1" <<END
apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "https://$API_HOST:$API_PORT", certificate-authority-data: $(base64 -w0 "$CLUSTER_DIR/pki/ca.crt")}}]
users: [{name: "$2", user: {token: $token}}]
contexts: [{name: test, context: {cluster: test, user: "$2"}}]
current-context: test
END
  )
}

tables_of() { # NODE MACHINES TABLE: print how many tables like [[node.gpu]] the node has in the machine description
  awk -v want="\"$1\"" -v table="[[node.$3]]" \
    '/^\[\[node\]\]/ {here = 0} /^name *=/ {here = ($3 == want)} $0 == table && here {n++} END {print n + 0}' "$2"
}
nvidia_gpus_of() { tables_of "$1" "$2" gpu; }   # NODE MACHINES
amd_gpus_of() { tables_of "$1" "$2" amd; }      # NODE MACHINES
intel_gpus_of() { tables_of "$1" "$2" intel; }  # NODE MACHINES
gpus_of() { echo $(($(nvidia_gpus_of "$1" "$2") + $(amd_gpus_of "$1" "$2") + $(intel_gpus_of "$1" "$2"))); }   # NODE MACHINES
# Print the version of the node's driver in the machine description; without one, the simulated driver reports 550.54.15 (crates/divvy-model/src/machine.rs).
driver_of() { # NODE MACHINES
  awk -v want="\"$1\"" '/^\[\[node\]\]/ {here = 0} /^name *=/ {here = ($3 == want)} /^driver *=/ && here {gsub("\"", "", $3); version = $3}
    END {print version ? version : "550.54.15"}' "$2"
}
LIB=/usr/lib/x86_64-linux-gnu
# Create the driver's libraries in /run/nvidia/driver, like a driver container. n1 has them as Debian's packages install them: in a directory of their own,
# to which links lead through /etc/alternatives.
make_libraries() { # NODE VERSION
  in_node "$1" bash -c '
    find /run/nvidia/driver -mindepth 1 -delete
    root=/run/nvidia/driver lib=$1 own=$1
    [ "$3" != n1 ] || own=$lib/nvidia/current
    mkdir -p "$root$own" "$root/etc/alternatives"
    for name in libcuda libnvidia-ml; do
      echo "$name of $2" > "$root$own/$name.so.$2"; ln -s "$name.so.$2" "$root$own/$name.so.1"
      [ "$own" = "$lib" ] || {
        alternative=/etc/alternatives/nvidia--$name.so.1-x86_64-linux-gnu
        ln -s "$own/$name.so.1" "$root$alternative"; ln -s "$alternative" "$root$lib/$name.so.1"
      }
    done' make "$LIB" "$2" "$1"
}
make_devices() { # NODE MACHINES: create the device nodes and libraries, like the drivers
  [ "$(nvidia_gpus_of "$1" "$2")" = 0 ] || make_nvidia_devices "$1" "$2"
  # The files of both are there before a node sees either.
  [ "$(amd_gpus_of "$1" "$2")" = 0 ] || "$DIVVY_BIN/divvy-amd-sim" "$CLUSTER_DIR/$1" "$1" "$2"
  [ "$(intel_gpus_of "$1" "$2")" = 0 ] || "$DIVVY_BIN/divvy-intel-sim" "$CLUSTER_DIR/$1" "$1" "$2"
  [ "$(amd_gpus_of "$1" "$2")" = 0 ] || make_amd_devices "$1" "$2"
  [ "$(intel_gpus_of "$1" "$2")" = 0 ] || make_intel_devices "$1" "$2"
}
# The drivers of AMD and Intel describe their GPUs by files in /sys. Below the machine's own files, the node sees those that describe its simulated GPUs.
COVER='
    cover() { [ -e "/sys/$1/$2" ] || mount -t overlay "$1" -o "lowerdir=$3/sys/$1:/sys/$1" "/sys/$1"; }
    make() { [ -e "$1" ] || mknod -m 660 "$1" c "$2" "$3"; chgrp "$4" "$1"; }
'
make_amd_devices() { # NODE MACHINES
  in_node "$1" bash -c "$COVER"'
    cover class kfd "$1"; cover module amdgpu "$1"
    make /dev/kfd 511 2 '"$RENDER_GROUP"'; mkdir -p /dev/dri
    for ((i = 0; i < $2; i++)); do
      make "/dev/dri/card$((i + 1))" 226 $((i + 1)) '"$RENDER_GROUP"'; make "/dev/dri/renderD$((i + 128))" 226 $((i + 128)) '"$RENDER_GROUP"'
    done' make "$CLUSTER_DIR/$1" "$(amd_gpus_of "$1" "$2")"
}
make_intel_devices() { # NODE MACHINES
  in_node "$1" bash -c "$COVER"'
    cover module xe "$1"; mkdir -p /dev/dri
    for ((i = 0; i < $2; i++)); do
      make "/dev/dri/card$((i + 33))" 226 $((i + 33)) '"$RENDER_GROUP"'; make "/dev/dri/renderD$((i + 160))" 226 $((i + 160)) '"$RENDER_GROUP"'
    done' make "$CLUSTER_DIR/$1" "$(intel_gpus_of "$1" "$2")"
}
RENDER_GROUP=109   # the group that owns the simulated GPUs' device nodes
make_nvidia_devices() { # NODE MACHINES
  # A scene puts libraries there that programs can load.
  [ -n "$(in_node "$1" find /run/nvidia/driver -name 'libcuda.so.*' -print -quit)" ] || make_libraries "$1" "$(driver_of "$1" "$2")"
  in_node "$1" bash -c '
    make() { [ -e "$1" ] || mknod -m 666 "$1" c "$2" "$3"; }
    for ((i = 0; i < $1; i++)); do make "/dev/nvidia$i" 195 "$i"; done
    make /dev/nvidiactl 195 255; make /dev/nvidia-uvm 511 0; make /dev/nvidia-uvm-tools 511 1' make "$(nvidia_gpus_of "$1" "$2")"
}
# Make a driver's root for the programs under NVIDIA's names, as a driver container provides it, with the simulated library and the machine that it
# simulates. Print its path.
simulated_driver_root() { # NODE MACHINES
  local root=$CLUSTER_DIR/$1/driver-root name i
  rm -rf "$root" && mkdir -p "$root/usr/lib64" "$root/dev"
  cp "$CLUSTER_DIR/sim/libdivvy_nvml_sim.so" "$root/usr/lib64/libnvidia-ml.so.1"
  for name in libcuda libnvidia-ml; do echo simulated > "$root/usr/lib64/$name.so.$(driver_of "$1" "$2")"; done
  for ((i = 0; i < $(nvidia_gpus_of "$1" "$2"); i++)); do mknod -m 666 "$root/dev/nvidia$i" c 195 "$i"; done
  mknod -m 666 "$root/dev/nvidiactl" c 195 255; mknod -m 666 "$root/dev/nvidia-uvm" c 511 0
  cp "$CLUSTER_DIR/sim/machines.toml" "$root/machines.toml"
  echo "$root"
}
# What stands for the driver's kernel module: what the machines have, and which process uses how much of a GPU.
make_driver_state() { # MACHINES
  mkdir -p "$CLUSTER_DIR/sim/ledger"
  cp "$1" "$CLUSTER_DIR/sim/machines.toml"
}
has_units() { # NODE: report whether the node offers GPUs
  local amounts; amounts=$(kube get node "$1" -o 'jsonpath={.status.allocatable.aliyun\.com/gpu-mem} {.status.allocatable.amd\.com/gpu} {.status.allocatable.gpu\.intel\.com/xe}')
  [[ $amounts == *[1-9]* ]]
}

# ---- Divvy after install.sh: its programs run in pods
NAMESPACE=divvy-system
# The objects of the chart in this repository. Helm is $HELM, else the helm on the PATH, else the one that build.sh built.
chart() { # ARGUMENT OF HELM...
  "${HELM:-$(type -P helm || echo "$CLUSTER_BIN/helm")}" template divvy "$CLUSTER_ROOT/../deploy/helm/divvy" --skip-tests \
    --namespace $NAMESPACE --kube-version "$KUBERNETES_VERSION" "$@"
}
# The image that takes the place of NVIDIA's.
plugin_image() { sed -n 's|^ *image: "*\([^"]*/\)divvy\(:[^"]*\)"*$|\1k8s-device-plugin\2|p' "$CLUSTER_DIR/install.objects.yaml" | head -1; }
is_installed() { [ -e "$CLUSTER_DIR/install.objects.yaml" ]; }
pids_of() { # START_OF_COMMAND_LINE [NODE]: print the PIDs of matching processes in pods of this cluster
  local file
  for file in /proc/[0-9]*/cmdline; do
    if { tr '\0' ' ' < "$file" | grep -q "^$1" && grep -q "/$CGROUP_PREFIX-${2:-n}" "${file%cmdline}cgroup"; } 2> /dev/null; then
      file=${file%/cmdline}; echo "${file#/proc/}"
    fi
  done
  true
}
# shellcheck disable=SC2086
build_nvidia_programs() { "$CLUSTER_ROOT/build.sh" $NVIDIA_PROGRAMS > /dev/null || die "NVIDIA's programs were not built; run cargo xtask cluster build $NVIDIA_PROGRAMS"; }
