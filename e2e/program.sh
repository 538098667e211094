#!/usr/bin/env bash
# Stops and starts single programs of the cluster: kube-apiserver, kube-scheduler, n1.kubelet, n1.containerd, n1.agent, divvy-extender, ...
#   program.sh stop NAME...           send SIGTERM, and SIGKILL after 10 s; the program stays stopped. A program that has already ended is ignored.
#   program.sh kill NAME...           kill -9, like a crash
#   program.sh start NAME...          start the programs that do not run; wait until programs of Kubernetes and what they need answer
#   program.sh restart [-9] NAME...   restart the programs in order; settings in the environment apply, so
#                                  `EXTENDER_URL=... program.sh restart kube-scheduler` changes the extender
#   program.sh power-off NODE         lose everything in the node's memory: processes, sandboxes, /run, cgroups; the boot id changes.
#                                  Agent, kubelet, and containerd stay stopped until they are started.
#   program.sh unit UNIT              set this --memory-unit for the extender and all agents; wait until the agents offer their GPUs in this unit
#   program.sh whole true|false none|single|mixed  set --whole-gpus and --mig-strategy for all agents; wait until the agents offer their GPUs again
#   program.sh node-configs JSON      give all agents these settings of single nodes (an object per name), which are also in $CLUSTER_DIR/node-configs;
#                                  {}: none. Wait until the agents run, unless only the settings change
#   program.sh mps true|false NODE... let pods use GPUs through MPS, or no longer: the chart's value agent.mps. Wait until these nodes' control daemons serve, or
#                                  all have ended, and until the agents run. Needs an installed Divvy.
#   program.sh mig-files NODE MINORS DIRECTORIES MINOR...  write what NVIDIA's kernel module has in /proc/driver and /dev for MIG devices
#   program.sh plugin NODE alone|with-mps|off   run nvidia-device-plugin, and with-mps also mps-control-daemon, in place of the node's agent, with the
#                                  configuration $CLUSTER_DIR/NODE/nvidia/config.yaml; off: run the agent again. Needs the image, so an installed Divvy.
#                                  With DEVICE_PLUGIN=nvidia, nvidia-device-plugin is NVIDIA's own program.
#                                  Then NODE.nvidia-device-plugin and NODE.mps-control-daemon can be stopped and killed; the kubelet restarts them.
#   program.sh roll                   replace every program of Divvy: one agent after the other, then the extender
# If Divvy is installed, its programs run in pods: an agent is stopped by removing the node's label, the extender by scaling it to zero. The
# kubelet restarts an agent that is killed, and an agent cannot run before its kubelet.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
[ "$(id -u)" = 0 ] || die "only root can do this"
known() { (cd "$CLUSTER_DIR/pids" 2> /dev/null && echo ./* | sed 's|\./||g') || true; }
usage() { die "usage: program.sh stop|kill|start|restart [-9] NAME..., power-off NODE, unit UNIT, whole true|false none|single|mixed, node-configs JSON, mps true|false NODE..., plugin NODE alone|with-mps|off, roll; NAME is one of: $(known)"; }

replicas=$CLUSTER_DIR/install.replicas   # stores the extender's number of replicas while it is scaled to zero

end_one() { # stop|kill9 NAME
  local how=$1 name=$2 pid
  case $(is_installed && echo pod)-$name in
    pod-*.agent)
      if [ "$how" = stop ]; then
        kube label node "${name%.agent}" gpushare- > /dev/null
        wait_for "$name: its pod is gone" 60 - no_agent_pod "${name%.agent}" > /dev/null
      else
        for pid in $(pids_of "/usr/bin/divvy-agent" "${name%.agent}"); do kill -9 "$pid" 2> /dev/null || true; done
      fi ;;
    *.nvidia-device-plugin | *.mps-control-daemon)
      local before; before=$(starts_of "$name")
      for pid in $(pids_of "/usr/bin/${name#*.}" "${name%.*}"); do kill "$([ "$how" = stop ] && echo -TERM || echo -KILL)" "$pid" 2> /dev/null || true; done
      wait_for "$name: started again" 60 - has_other_starts "$name" "$before" > /dev/null ;;
    pod-divvy-extender)
      [ -e "$replicas" ] || kube get deployment -n $NAMESPACE divvy-extender -o 'jsonpath={.spec.replicas}' > "$replicas"
      kube scale deployment -n $NAMESPACE divvy-extender --replicas 0 > /dev/null
      [ "$how" = stop ] || for pid in $(pids_of "/usr/bin/divvy extender"); do kill -9 "$pid" 2> /dev/null || true; done
      wait_for "the extender's pods are gone" 60 - no_extender_pod > /dev/null ;;
    *) ! alive "$name" || $how "$name" ;;
  esac
}
# ---- NVIDIA's programs
plugin_pod() { echo "nvidia-${1%%.*}"; }   # NODE or NODE.PROGRAM
starts_of() { kube get pod -n kube-system "$(plugin_pod "$1")" -o "jsonpath={.status.containerStatuses[?(@.name==\"${1#*.}\")].restartCount}"; }
has_other_starts() { [ "$(starts_of "$1")" != "$2" ]; } # NODE.PROGRAM COUNT
serves() { # NODE.PROGRAM: report whether the container that runs now has said that it serves
  local said="(\"registered |Registered device plugin for ')nvidia.com/"   # Divvy's program, and NVIDIA's
  [ "${1#*.}" = nvidia-device-plugin ] || said='all MPS control daemons serve'
  [[ $(kube logs -n kube-system "$(plugin_pod "$1")" -c "${1#*.}") =~ $said ]]
}
no_programs_of_divvy() { [ -z "$(kube get pods -n $NAMESPACE -l 'app.kubernetes.io/component in (agent, probe)' --field-selector "spec.nodeName=$1" -o name)" ]; }

# The pod of NVIDIA's programs, with the mounts and flags of NVIDIA's chart, and with the simulated driver. The host's /bin and /lib are for the scripts
# that stand in for the driver's programs.
plugin_manifest() { # NODE DRIVER_ROOT alone|with-mps
  local node=$1 files=$CLUSTER_DIR/$1/nvidia
  local container; container="image: $(plugin_image)
    imagePullPolicy: Never
    securityContext: {privileged: true}"
  local env="{name: DIVVY_NVML_SIM, value: /driver-root/machines.toml}, {name: DIVVY_NVML_SIM_NODE, value: $node},
      {name: DIVVY_PROBE_INTERVAL, value: 1s}, {name: DIVVY_HEALTH_RECOVERY, value: 1s}"
  local mounts="{name: cluster, mountPath: $CLUSTER_DIR}, {name: mps, mountPath: /mps},
      {name: driver-root, mountPath: /driver-root}"
  local program=/usr/bin/nvidia-device-plugin hook='' programs='' volume=''
  if [ "${DEVICE_PLUGIN:-divvy}" = nvidia ]; then
    # The image has what NVIDIA's program needs: glibc, its loader, and its parts.
    hook=", --nvidia-cdi-hook-path=$CLUSTER_BIN/nvidia-cdi-hook"
    programs=", {name: program, mountPath: $program, readOnly: true}"
    volume="- {name: program, hostPath: {path: $CLUSTER_BIN/nvidia-device-plugin, type: File}}"
  fi
  cat << END
apiVersion: v1
kind: Pod
metadata: {name: $(plugin_pod "$node"), namespace: kube-system}
spec:
  nodeName: $node
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: 10
  containers:
  - name: nvidia-device-plugin
    $container
    command: [$program]
    args: [--config-file=$files/config.yaml, --device-list-strategy=cdi-cri, --nvidia-driver-root=$2, --mps-root=$files/mps$hook]
    env: [$env, {name: DIVVY_NVML_SIM_CONTROL, value: $CLUSTER_DIR/$node/nvml.sock}]
    volumeMounts: [$mounts, {name: plugins, mountPath: /var/lib/kubelet/device-plugins}, {name: cdi, mountPath: /var/run/cdi}$programs]
END
  [ "$3" = alone ] || cat << END
  - name: mps-control-daemon
    $container
    command: [/usr/bin/mps-control-daemon]
    args: [--config-file=$files/config.yaml]
    env: [$env, {name: PATH, value: "$files/bin:/usr/bin:/bin"}]
    volumeMounts: [$mounts, {name: bin, mountPath: /bin}, {name: lib, mountPath: /lib}, {name: lib64, mountPath: /lib64}]
END
  cat << END
  volumes:
  - {name: cluster, hostPath: {path: $CLUSTER_DIR}}
  - {name: mps, hostPath: {path: $files/mps}}
  - {name: driver-root, hostPath: {path: $2}}
  - {name: plugins, hostPath: {path: /var/lib/kubelet/device-plugins}}
  - {name: cdi, hostPath: {path: /run/cdi}}
  - {name: bin, hostPath: {path: /bin}}
  - {name: lib, hostPath: {path: /lib}}
  - {name: lib64, hostPath: {path: /lib64}}
  $volume
END
}

run_plugin() { # NODE alone|with-mps|off
  local node=$1
  is_installed || die "nvidia-device-plugin runs from the image; install Divvy with cargo xtask cluster install"
  # shellcheck disable=SC1091
  . "$CLUSTER_DIR/divvy.settings"
  if [ "$2" = off ]; then
    kube delete pod -n kube-system "$(plugin_pod "$node")" --wait --timeout=60s > /dev/null
    kube label node "$node" gpushare=true --overwrite > /dev/null
    wait_for "$node: GPUs in its allocatable" 60 - has_units "$node" > /dev/null
    return
  fi
  case ${DEVICE_PLUGIN:=divvy} in
    divvy) ;;
    nvidia) build_nvidia_programs ;;
    *) die "DEVICE_PLUGIN=$DEVICE_PLUGIN is not known; use divvy or nvidia" ;;
  esac
  kube label node "$node" gpushare- > /dev/null
  wait_for "$node: Divvy's pods are gone" 60 - no_programs_of_divvy "$node" > /dev/null
  mkdir -p "$CLUSTER_DIR/$node/nvidia/mps/shm"
  plugin_manifest "$node" "$(simulated_driver_root "$node" "$MACHINES")" "$2" | kube create -f - > /dev/null
  [ "$2" = alone ] || wait_for "$node: mps-control-daemon serves" 60 - serves "$node.mps-control-daemon" > /dev/null
  wait_for "$node: nvidia-device-plugin is registered" 60 - serves "$node.nvidia-device-plugin" > /dev/null
}

no_agent_pod() { [ -z "$(kube get pods -n $NAMESPACE -l app.kubernetes.io/component=agent --field-selector "spec.nodeName=$1" -o name)" ]; }
no_extender_pod() { [ -z "$(kube get pods -n $NAMESPACE -l app.kubernetes.io/component=extender -o name)" ]; }

start_parts() {
  local name cluster=0
  for name in "$@"; do
    case $(is_installed && echo pod)-$name in
      pod-*.agent) kube label node "${name%.agent}" gpushare=true --overwrite > /dev/null ;;
      *.nvidia-device-plugin | *.mps-control-daemon) wait_for "$name: serves" 60 - serves "$name" > /dev/null ;;
      pod-divvy-extender)
        [ ! -e "$replicas" ] || kube scale deployment -n $NAMESPACE divvy-extender --replicas "$(cat "$replicas")" > /dev/null
        rm -f "$replicas"
        extender_rolled_out 60 ;;
      *.agent | *-divvy-extender) "$CLUSTER_ROOT/divvy.sh" start "$name" > /dev/null ;;
      *) cluster=1 ;;
    esac
  done
  [ $cluster = 0 ] || "$CLUSTER_ROOT/up.sh" > /dev/null
}

restart() {
  local how=stop name
  [ "${1:-}" != -9 ] || { how=kill9; shift; }
  [ $# -gt 0 ] || usage
  for name in "$@"; do
    is_installed || alive "$name" || die "$name is not running; running programs: $(known)"
    end_one $how "$name"
  done
  start_parts "$@"
}

power_off() {
  local node=$1 name pid environ
  for name in agent kubelet containerd; do ! alive "$node.$name" || kill9 "$node.$name"; done
  for pid in $(find /sys/fs/cgroup/pids/"$CGROUP_PREFIX-$node" /sys/fs/cgroup/"$CGROUP_PREFIX-$node" -name cgroup.procs -exec cat {} + 2> /dev/null | sort -u); do
    kill -9 "$pid" 2> /dev/null || true
  done
  for environ in /proc/[0-9]*/environ; do   # shims run in the machine's own cgroup
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

roll() {
  local node what
  if is_installed; then
    for what in daemonset/divvy-probe daemonset/divvy-agent; do
      kube rollout restart -n $NAMESPACE $what > /dev/null
      kube rollout status -n $NAMESPACE $what --timeout=120s > /dev/null
    done
    kube rollout restart -n $NAMESPACE deployment/divvy-extender > /dev/null
    extender_rolled_out 120
    return
  fi
  for node in $(known_nodes); do
    alive "$node.agent" || continue
    stop "$node.agent"
    "$CLUSTER_ROOT/divvy.sh" start "$node.agent" > /dev/null
    "$CLUSTER_ROOT/divvy.sh" wait > /dev/null
  done
  restart divvy-extender
}

change_unit() {
  if is_installed; then
    # shellcheck disable=SC1091
    . "$CLUSTER_DIR/divvy.settings"
    # Change the unit as a user does. Both programs are replaced at the same time.
    chart --values "$CLUSTER_DIR/install.yaml" --set "memoryUnit=$1" | kube apply -f - > /dev/null
    kube rollout status -n $NAMESPACE daemonset/divvy-agent --timeout=120s > /dev/null
    extender_rolled_out 120
    return
  fi
  export MEMORY_UNIT=$1   # divvy.sh stores it
  stop divvy-extender
  "$CLUSTER_ROOT/divvy.sh" start divvy-extender > /dev/null
  restart_agents
}

mig_files() { # NODE MINORS DIRECTORIES MINORS-OF-NODES
  # Nothing can be created in the kernel's own /proc/driver. The programs under NVIDIA's names have a driver's root of their own.
  in_node "$1" bash -euc '
    mountpoint -q /proc/driver || mount -t tmpfs tmpfs /proc/driver
    for root in "" "$4"; do
      [ -z "$root" ] || [ -d "$root" ] || continue
      mkdir -p "$root"/proc/driver/nvidia-caps "$root"/proc/driver/nvidia/capabilities "$root"/dev/nvidia-caps
      for directory in $2; do mkdir -p "$root/proc/driver/nvidia/capabilities/$directory"; done
      printf %s "$1" > "$root/proc/driver/nvidia-caps/mig-minors"
      for minor in $3; do [ -e "$root/dev/nvidia-caps/nvidia-cap$minor" ] || mknod -m 666 "$root/dev/nvidia-caps/nvidia-cap$minor" c 510 "$minor"; done
    done' mig "$2" "$3" "$4" "$CLUSTER_DIR/$1/driver-root"
}

offer_whole() { # true|false none|single|mixed
  if is_installed; then
    # shellcheck disable=SC1091
    . "$CLUSTER_DIR/divvy.settings"
    chart --values "$CLUSTER_DIR/install.yaml" --set "agent.wholeGpus=$1" --set "agent.migStrategy=$2" | kube apply -f - > /dev/null
    kube rollout status -n $NAMESPACE daemonset/divvy-agent --timeout=120s > /dev/null
    return
  fi
  export WHOLE_GPUS=$1 MIG_STRATEGY=$2   # divvy.sh stores them
  restart_agents
}

use_mps() { # true|false NODE...: as the chart's value agent.mps does. The driver's programs are the scripts in the directory of each node.
  # shellcheck disable=SC1091
  . "$CLUSTER_DIR/divvy.settings"
  local node
  chart --values "$CLUSTER_DIR/install.yaml" --set "agent.mps=$1" | kube apply -f - > /dev/null
  if [ "$1" = true ]; then
    for node in "${@:2}"; do wait_for "$node: the control daemon serves" 60 - mps_serves "$node" > /dev/null; done
  else
    kube delete -n $NAMESPACE daemonset/divvy-mps networkpolicy/divvy-mps --ignore-not-found --wait > /dev/null
    wait_for "the control daemons have ended" 60 - no_mps > /dev/null
  fi
  kube rollout status -n $NAMESPACE daemonset/divvy-agent --timeout=120s > /dev/null
}
no_mps() { [ -z "$(kube get pods -n $NAMESPACE -l app.kubernetes.io/component=mps -o name)" ]; }
mps_serves() { in_node "$1" test -e /run/nvidia/mps/.ready; } # NODE

configure_nodes() { # JSON
  local had=false has=true
  [ "$1" != "{}" ] || has=false
  if is_installed; then
    # shellcheck disable=SC1091
    . "$CLUSTER_DIR/divvy.settings"
    [ -z "$(kube get configmap -n $NAMESPACE divvy-agent-node-configs --ignore-not-found -o name)" ] || had=true
    chart --values "$CLUSTER_DIR/install.yaml" --set-json "agent.nodeConfigs=$1" | kube apply -f - > /dev/null
    kube rollout status -n $NAMESPACE daemonset/divvy-agent --timeout=120s > /dev/null
    [ $has = true ] || kube delete configmap -n $NAMESPACE divvy-agent-node-configs --ignore-not-found > /dev/null
    # A kubelet updates the files of a pod at once when the pod changes, otherwise within a minute or so.
    [ $had = false ] || kube annotate pods -n $NAMESPACE -l app.kubernetes.io/component=agent --overwrite "play/files=$(date +%s%N)" > /dev/null
    return
  fi
  # shellcheck disable=SC1091
  . "$CLUSTER_DIR/divvy.settings"
  [ "${NODE_CONFIGS:-none}" = none ] || had=true
  [ $had != $has ] || return 0
  export NODE_CONFIGS=none   # divvy.sh stores it
  [ $has = false ] || NODE_CONFIGS=$CLUSTER_DIR/node-configs
  restart_agents
}

restart_agents() {
  local node
  for node in $(known_nodes); do
    alive "$node.agent" || continue
    stop "$node.agent"
    "$CLUSTER_ROOT/divvy.sh" start "$node.agent" > /dev/null
  done
  "$CLUSTER_ROOT/divvy.sh" wait > /dev/null
}

command=${1:-}; [ $# -eq 0 ] || shift
case $command in
  stop) for name in "$@"; do end_one stop "$name"; done ;;
  kill) for name in "$@"; do end_one kill9 "$name"; done ;;
  start) start_parts "$@" ;;
  restart) restart "$@" ;;
  power-off) [ $# = 1 ] || usage; alive "$1.holder" || die "no node $1 in $CLUSTER_DIR"; power_off "$1" ;;
  unit) [ $# = 1 ] || usage; change_unit "$1" ;;
  whole) [ $# = 2 ] || usage; offer_whole "$@" ;;
  node-configs) [ $# = 1 ] || usage; configure_nodes "$1" ;;
  mps) [ $# -ge 1 ] || usage; use_mps "$@" ;;
  plugin) [ $# = 2 ] || usage; run_plugin "$@" ;;
  mig-files) [ $# = 4 ] || usage; mig_files "$@" ;;
  roll) roll ;;
  *) usage ;;
esac
