#!/usr/bin/env bash
# Divvy on the running cluster as a user installs it: the image, and the objects that `divvy manifests` prints, with service accounts and RBAC.
#   install.sh up      needs a cluster with AUTHORIZATION=RBAC SERVICE_ACCOUNTS=1; DIVVY_BIN: the folder with divvy and libdivvy_nvml_sim.so;
#                      IMAGE: the archive of `cargo xtask image`; MACHINES: another machines.toml
#   install.sh check   what only an installation has: forged annotations, what an agent may write, memory. Status 1: a check did not hold.
#   install.sh down    takes it off again; kube-scheduler goes on without an extender
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
alive kube-apiserver || die "no cluster runs in $CLUSTER_DIR; cargo xtask cluster up --nodes 2 --rbac --service-accounts"
[ "$(id -u)" = 0 ] || die "only root can do this"

extender_port=$((PORT_BASE + 5))
manifests() { "$DIVVY_BIN/divvy" manifests --namespace $NAMESPACE --values "$CLUSTER_DIR/install.yaml" 2> /dev/null; }
scheduler() { # EXTENDER_URL
  [ "$EXTENDER_URL" != "$1" ] || return 0
  stop kube-scheduler
  EXTENDER_URL=$1 "$CLUSTER_ROOT/up.sh" > /dev/null
}

values() {
  cat <<END
image: {pullPolicy: Never}
agent:
  extraArgs: [--health-recovery=1s, --probe-interval=1s]
  # There are no services on this cluster: pods reach the API server where it listens.
  extraEnv: &api
  - {name: KUBERNETES_SERVICE_HOST, value: "$API_HOST"}
  - {name: KUBERNETES_SERVICE_PORT, value: "$API_PORT"}
extender:
  port: $extender_port
  nodeSelector: {node-role.kubernetes.io/control-plane: null, kubernetes.io/hostname: n1}
  extraEnv: *api
probe:
  extraArgs: [--nvml-library=/sim/libdivvy_nvml_sim.so]
  extraEnv:
  - {name: DIVVY_NVML_SIM, value: /sim/machines.toml}
  - {name: DIVVY_NVML_SIM_NODE, value: \$(NODE_NAME)}
  - {name: DIVVY_NVML_SIM_CONTROL, value: /control/\$(NODE_NAME)/nvml.sock}
  extraVolumes:
  - {name: sim, hostPath: {path: $CLUSTER_DIR/sim}}
  - {name: control, hostPath: {path: $CLUSTER_DIR}}
  extraVolumeMounts:
  - {name: sim, mountPath: /sim, readOnly: true}
  - {name: control, mountPath: /control}
END
}

up() {
  need curl "Debian: curl" "to write to the API server as the agent does"
  : "${DIVVY_BIN:?the folder with divvy and libdivvy_nvml_sim.so; cargo xtask cluster install knows it}"
  : "${IMAGE:?the archive that cargo xtask image wrote}"
  : "${MACHINES:=$CLUSTER_ROOT/machines.toml}"
  [ "$AUTHORIZATION $SERVICE_ACCOUNTS" = "RBAC 1" ] ||
    die "this cluster runs without RBAC or without service accounts; cargo xtask cluster down && cargo xtask cluster up --nodes 2 --rbac --service-accounts"
  alive divvy-extender && die "Divvy runs on this cluster as processes of the host; take it off first: cargo xtask cluster divvy --down"
  [ -e "$IMAGE" ] || die "$IMAGE is missing; cargo xtask image"
  IMAGE=$(realpath "$IMAGE")   # a node's commands run in another folder
  for p in divvy libdivvy_nvml_sim.so; do
    [ -e "$DIVVY_BIN/$p" ] || die "$DIVVY_BIN/$p is missing; cargo build -p divvy -p divvy-nvml-sim"
  done
  printf ': "${%s:=%s}"\n' DIVVY_BIN "$(realpath "$DIVVY_BIN")" MACHINES "$(realpath "$MACHINES")" > "$CLUSTER_DIR/divvy.settings"

  local node
  for node in $(known_nodes); do
    in_node "$node" "$CLUSTER_BIN/ctr" -n k8s.io images import "$IMAGE" > "$LOGS/$node.images.log" 2>&1 || die "image import; see $LOGS/$node.images.log"
    make_devices "$node" "$MACHINES"
  done
  # A new file and not a new content: a probe that runs has the old one mapped.
  rm -rf "$CLUSTER_DIR/sim" && mkdir "$CLUSTER_DIR/sim"
  cp "$DIVVY_BIN/libdivvy_nvml_sim.so" "$MACHINES" "$CLUSTER_DIR/sim"
  values > "$CLUSTER_DIR/install.yaml"
  kube get namespace $NAMESPACE > /dev/null 2>&1 || kube create namespace $NAMESPACE > /dev/null
  for node in $(known_nodes); do
    [ "$(gpus_of "$node" "$MACHINES")" -eq 0 ] || kube label node "$node" gpushare=true --overwrite > /dev/null
  done
  # Not through a pipe: what manifests refuses must end this.
  manifests > "$CLUSTER_DIR/install.objects.yaml" || "$DIVVY_BIN/divvy" manifests --values "$CLUSTER_DIR/install.yaml" > /dev/null
  kube apply -f "$CLUSTER_DIR/install.objects.yaml" > /dev/null
  say "applied: $(grep -c '^kind: ' "$CLUSTER_DIR/install.objects.yaml") objects of divvy manifests"
  for what in daemonset/divvy-probe daemonset/divvy-agent deployment/divvy-extender; do
    wait_for "$what ready" 60 - kube rollout status -n $NAMESPACE $what --timeout=1s
  done
  scheduler http://127.0.0.1:$extender_port/gpushare-scheduler
  say "kube-scheduler calls the extender"

  wait_for "the policies are in force" 20 - refuses_forged
  for node in $(known_nodes); do
    [ "$(gpus_of "$node" "$MACHINES")" -eq 0 ] || wait_for "$node: units in its allocatable" 20 - has_units "$node"
  done
  say "Divvy is installed; export KUBECONFIG=$CLUSTER_DIR/admin.kubeconfig"
}

check_all() {
  [ -e "$CLUSTER_DIR/install.objects.yaml" ] || die "Divvy was not installed on this cluster; cargo xtask cluster install"
  # shellcheck source=play.sh
  . "$CLUSTER_ROOT/play.sh"
  two_pods
  forged
  other_nodes
  memory
  clear_pods
  finish
}

# The API server compiles policies a moment after they were written.
refuses_forged() {
  ! kube create --dry-run=server -f - > /dev/null 2>&1 <<< \
    '{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "forged", "annotations": {"divvy.dev/allocation": "x"}}, "spec": {"containers": [{"name": "main", "image": "x"}]}}'
}

annotated() { sed "s|^metadata: {|metadata: {annotations: {${1:-divvy.dev/allocation: x}}, |"; }
refused_with() { # TEXT COMMAND...: fails, and says so; the sentence is shown
  local text=$1 output; shift
  if output=$("$@" 2>&1); then echo "it was not refused: $output"; return 1; fi
  says "$output" "$text"
}
forge() { pod forged 1 | annotated "$1" | kube create -f -; }
bind() { # ANNOTATIONS
  kube create --raw /api/v1/namespaces/default/pods/waits/binding -f - <<< \
    "{\"apiVersion\":\"v1\",\"kind\":\"Binding\",\"metadata\":{\"name\":\"waits\",\"annotations\":$1},\"target\":{\"kind\":\"Node\",\"name\":\"n1\"}}"
}
forged() {
  scene "Users forge what says which GPU a pod got; even the administrator is refused, in words"
  forge 'divvy.dev/allocation: x' 2>&1 | sed 's/.*denied request: //' | shown || true
  check "a new pod brings divvy.dev/allocation" refused_with "divvy.dev/allocation says which GPU a pod got, and only Divvy writes it" \
    forge 'divvy.dev/allocation: x'
  check "a new pod brings gpushare's annotation" refused_with "ALIYUN_COM_GPU_MEM_IDX says which GPU a pod got" forge 'ALIYUN_COM_GPU_MEM_IDX: "0"'
  check "a pod that holds memory is said to hold other memory" refused_with "only Divvy writes it" \
    kube annotate --overwrite pod binpack-0 divvy.dev/allocation=x
  check "through its status, too" refused_with "only Divvy writes it" \
    kube patch pod binpack-0 --subresource=status --type=merge -p '{"metadata":{"annotations":{"divvy.dev/allocation":"x"}}}'
  check "a pod that holds memory is said to hold none" refused_with "delete the pod to free the memory" kube annotate pod binpack-0 divvy.dev/allocation-
  check "other annotations are the user's own" kube annotate pod binpack-0 mine=1
  create waits 12 "" 2 n1
  check "another than the extender binds with an allocation" refused_with "only Divvy's extender (system:serviceaccount:$NAMESPACE:divvy-extender) writes it" \
    bind '{"divvy.dev/allocation":"x"}'
  kube delete pod waits --wait > /dev/null
}

token() { # [of the running agent's pod]
  local pod uid; pod=$(kube get pods -n $NAMESPACE -l app.kubernetes.io/component=agent --field-selector spec.nodeName=n1 -o 'jsonpath={.items[0].metadata.name}')
  uid=$(kube get pod -n $NAMESPACE "$pod" -o 'jsonpath={.metadata.uid}')
  kube create token divvy-agent -n $NAMESPACE ${1:+--bound-object-kind=Pod --bound-object-name="$pod" --bound-object-uid="$uid"}
}
patch() { # TOKEN PATH JSON: as the agent does; the API server's answer, and failure unless it is 200
  curl -s --fail-with-body --cacert "$CLUSTER_DIR/pki/ca.crt" -H "Authorization: Bearer $1" -H 'Content-Type: application/merge-patch+json' \
    -X PATCH "https://$API_HOST:$API_PORT/api/v1/$2" -d "$3"
}
other_nodes() {
  scene "An agent writes the inventory of its own node, and nothing else"
  local own elsewhere inventory='{"metadata":{"annotations":{"divvy.dev/inventory":"x"}}}'
  own=$(token bound) elsewhere=$(token)
  check "its own node's inventory (the agent writes the true one again)" patch "$own" nodes/n1 "$inventory"
  check "not with a token that does not name a node" refused_with "does not say on which node its pod runs" patch "$elsewhere" nodes/n1 "$inventory"
  if kube get node n2 > /dev/null 2>&1; then
    check "not another node" refused_with "Divvy's agent on node n1 may not write to node n2" patch "$own" nodes/n2 "$inventory"
  fi
  check "not another annotation" refused_with "and not mine" patch "$own" nodes/n1 "{\"metadata\":{\"annotations\":{\"mine\":\"$(now)\"}}}"
  check "not a label" refused_with "are not its own" patch "$own" nodes/n1 "{\"metadata\":{\"labels\":{\"mine\":\"$(now)\"}}}"
  check "not whether pods are scheduled there" refused_with "are not its own" patch "$own" nodes/n1 '{"spec":{"unschedulable":true}}'
  kube uncordon n1 > /dev/null   # had it not been refused, nothing could start here again
  check "not a node's status" refused_with 'cannot patch resource' patch "$own" nodes/n1/status '{"status":{"capacity":{"a/b":"1"}}}'
  check "not a pod" refused_with 'cannot patch resource' patch "$own" namespaces/default/pods/binpack-0 '{"metadata":{"annotations":{"mine":"x"}}}'
  eventually 10 "the inventory is the true one" inventory_is_true
  check "the probe's pod has no token" equals "$(kube get pods -n $NAMESPACE -l app.kubernetes.io/component=probe -o json | grep -c serviceaccount)" 0
}
inventory_is_true() { kube get node n1 -o 'jsonpath={.metadata.annotations.divvy\.dev/inventory}' | grep -q '"gpus":\[{"uuid"'; }

memory() {
  scene "Memory of Divvy's containers"
  local program pid
  for program in "/usr/bin/divvy agent" "/usr/bin/divvy-probe --listen" "/usr/bin/divvy extender"; do
    for pid in $(pids_of "$program"); do
      measured "$program: $(awk '/^Rss:/ {rss = $2} /^Pss:/ {pss = $2} /^Anonymous:/ {own = $2}
        END {printf "resident %.1f MiB, of it %.1f anonymous; proportional %.1f", rss / 1024, own / 1024, pss / 1024}' "/proc/$pid/smaps_rollup")"
    done
  done
}
down() {
  # shellcheck disable=SC1091
  . "$CLUSTER_DIR/divvy.settings" 2> /dev/null || die "Divvy was not installed on this cluster; cargo xtask cluster install"
  [ -e "$CLUSTER_DIR/install.objects.yaml" ] || die "Divvy was not installed on this cluster; cargo xtask cluster install"
  scheduler none
  kube delete --ignore-not-found -f "$CLUSTER_DIR/install.objects.yaml" > /dev/null
  kube delete namespace $NAMESPACE --ignore-not-found > /dev/null
  rm -f "$CLUSTER_DIR/install.objects.yaml" "$CLUSTER_DIR/divvy.settings"
  say "Divvy is off the cluster"
}

case ${1:-} in
  up) up ;;
  check) check_all ;;
  up-and-check) (up); check_all ;;
  down) down ;;
  *) die "usage: install.sh up|check|up-and-check|down" ;;
esac
