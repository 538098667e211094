#!/usr/bin/env bash
# Starts Divvy, or its missing parts, on the running cluster as processes of the host: the extender next to kube-scheduler, and in the mount
# namespace of each node in machines.toml an agent with its probe, the simulated driver library, and device nodes.
#   divvy.sh up       start Divvy. DIVVY_BIN: the directory with divvy, divvy-probe, libdivvy_nvml_sim.so,
#                     divvy-amd-sim, and divvy-intel-sim; MACHINES: another machines.toml
#   divvy.sh start NAME   start only divvy-extender (wait until it answers) or n1.agent (which may wait for a kubelet), as `up` does
#   divvy.sh wait     wait until every node with GPUs offers them
#   divvy.sh down     stop Divvy; kube-scheduler continues without an extender
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
alive kube-apiserver || die "no cluster runs in $CLUSTER_DIR; run cargo xtask cluster up"
[ "$(id -u)" = 0 ] || die "only root can do this"

extender_port=$((PORT_BASE + 5))
answers() { curl -sf -m 2 -o /dev/null "http://127.0.0.1:$1/readyz"; }

settings() {
  need curl "Debian: curl" "to check whether Divvy's programs are ready"
  # Settings from an earlier call are stored with the cluster.
  # shellcheck disable=SC1091
  [ ! -e "$CLUSTER_DIR/divvy.settings" ] || . "$CLUSTER_DIR/divvy.settings"
  : "${DIVVY_BIN:?set it to the directory with divvy, divvy-probe, libdivvy_nvml_sim.so, divvy-amd-sim, and divvy-intel-sim, or use cargo xtask cluster divvy}"
  : "${MACHINES:=$CLUSTER_ROOT/machines.toml}" "${MEMORY_UNIT:=GiB}" "${WHOLE_GPUS:=false}" "${MIG_STRATEGY:=mixed}" "${NODE_CONFIGS:=none}"
  DIVVY_BIN=$(realpath "$DIVVY_BIN") MACHINES=$(realpath "$MACHINES")
  for p in divvy divvy-probe libdivvy_nvml_sim.so divvy-amd-sim divvy-intel-sim; do
    [ -e "$DIVVY_BIN/$p" ] || die "$DIVVY_BIN/$p is missing; run cargo build"
  done
  printf ': "${%s:=%s}"\n' DIVVY_BIN "$DIVVY_BIN" MACHINES "$MACHINES" MEMORY_UNIT "$MEMORY_UNIT" WHOLE_GPUS "$WHOLE_GPUS" MIG_STRATEGY "$MIG_STRATEGY" \
    NODE_CONFIGS "$NODE_CONFIGS" > "$CLUSTER_DIR/divvy.settings"
}

start_extender() {
  start divvy-extender "$DIVVY_BIN/divvy" extender --kubeconfig "$CLUSTER_DIR/extender.kubeconfig" --listen "127.0.0.1:$extender_port" --memory-unit "$MEMORY_UNIT"
  wait_for "extender ready" 20 divvy-extender answers $extender_port
}

start_agent() { # NODE
  local node=$1 port=$((PORT_BASE + 10 * ${1#n} + 2)) configs=()
  [ "$NODE_CONFIGS" = none ] || configs=(--node-configs "$NODE_CONFIGS")
  make_devices "$node" "$MACHINES"
  make_driver_state "$MACHINES"
  start "$node.agent" nsenter -t "$(pid_of "$node.holder")" -m -- env \
    DIVVY_NVML_SIM_LEDGER="$CLUSTER_DIR/sim/ledger" DIVVY_NVML_SIM="$MACHINES" DIVVY_NVML_SIM_NODE="$node" DIVVY_NVML_SIM_CONTROL="$CLUSTER_DIR/$node/nvml.sock" \
    "$DIVVY_BIN/divvy" agent --node-name "$node" --memory-unit "$MEMORY_UNIT" --whole-gpus="$WHOLE_GPUS" --mig-strategy "$MIG_STRATEGY" "${configs[@]}" --kubeconfig "$CLUSTER_DIR/agent.kubeconfig" --kubelet-dir /var/lib/kubelet \
    --cdi-dir /var/run/cdi --probe "$DIVVY_BIN/divvy-probe" --nvml-library "$DIVVY_BIN/libdivvy_nvml_sim.so" \
    --metrics "127.0.0.1:$port" --health-recovery 1s --probe-interval 1s
}

wait_for_units() {
  local node
  for node in $(known_nodes); do
    [ "$(gpus_of "$node" "$MACHINES")" -gt 0 ] || continue
    wait_for "$node: agent ready" 20 "$node.agent" answers $((PORT_BASE + 10 * ${node#n} + 2))
    wait_for "$node: GPUs in its allocatable" 20 "$node.agent" has_units "$node"
  done
}

up() {
  settings
  local extender_user=admin agent_user=admin
  if [ "$AUTHORIZATION" = RBAC ]; then
    kube apply -f "$CLUSTER_ROOT/rbac.yaml" > /dev/null
    extender_user=divvy:extender agent_user=divvy:agent
  fi
  kubeconfig "$CLUSTER_DIR/extender.kubeconfig" $extender_user
  kubeconfig "$CLUSTER_DIR/agent.kubeconfig" $agent_user

  start_extender
  local node gpus
  for node in $(known_nodes); do
    gpus=$(gpus_of "$node" "$MACHINES")
    [ "$gpus" -gt 0 ] || { say "$node: no GPUs in $MACHINES, no agent"; continue; }
    start_agent "$node"
    say "$node: agent started, $gpus GPUs"
  done

  local url=http://127.0.0.1:$extender_port/gpushare-scheduler
  if [ "$EXTENDER_URL" != "$url" ]; then
    stop kube-scheduler
    EXTENDER_URL=$url "$CLUSTER_ROOT/up.sh" > /dev/null
    say "kube-scheduler calls the extender"
  fi
  wait_for_units
  say "Divvy is up; export KUBECONFIG=$CLUSTER_DIR/admin.kubeconfig"
}

down() {
  local node
  for node in $(known_nodes); do stop "$node.agent"; done
  if [ -n "$EXTENDER_URL" ] && [ "$EXTENDER_URL" != none ]; then
    stop kube-scheduler
    EXTENDER_URL=none "$CLUSTER_ROOT/up.sh" > /dev/null
  fi
  stop divvy-extender
  say "Divvy is stopped"
}

case "${1:-} ${2:-}" in
  "up ") up ;;
  "down ") down ;;
  "wait ") settings; wait_for_units ;;
  "start divvy-extender") settings; start_extender ;;
  "start "*.agent) settings; start_agent "${2%.agent}" ;;
  *) die "usage: divvy.sh up|down|wait|start NAME" ;;
esac
