#!/usr/bin/env bash
# Installs Divvy on the running cluster as a user does: the image, and the objects of the Helm chart, with service accounts and RBAC.
#   install.sh up      install Divvy. Needs a cluster with AUTHORIZATION=RBAC SERVICE_ACCOUNTS=1. DIVVY_BIN: the directory with divvy and
#                      libdivvy_nvml_sim.so; IMAGE: the archive of `cargo xtask image`; MACHINES: another machines.toml
#   install.sh check   check what only an installation has: forged annotations, what an agent may write, a second scheduler, memory.
#                      Exit status 1: a check failed.
#   install.sh nvidia [SHAPE...]  check NVIDIA's chart and static manifests with Divvy's image, in all shapes or in those named (nvidia_plugin.sh)
#   install.sh uninstall  remove Divvy as a user does, with `divvy uninstall` and the commands that it prints, and check that nothing is left.
#                      This takes six minutes, because the kubelet remembers a device plugin for that long.
#   install.sh down    remove Divvy; kube-scheduler continues without an extender
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
alive kube-apiserver || die "no cluster runs in $CLUSTER_DIR; run cargo xtask cluster up --nodes 3 --rbac --service-accounts"
[ "$(id -u)" = 0 ] || die "only root can do this"

extender_port=$((PORT_BASE + 5))
service=https://$SERVICE_HOST:$extender_port
scheduler() { # EXTENDER_URL
  stop kube-scheduler
  EXTENDER_URL=$1 "$CLUSTER_ROOT/up.sh" > /dev/null
}

values() {
  cat <<END
image: {pullPolicy: Never}
agent:
  migStrategy: mixed
  # So that the extender may evict pods.
  onEscape: evict
  extraArgs: [--health-recovery=1s, --probe-interval=1s]
  # Services do not work on this cluster, so pods connect to the API server's own address.
  extraEnv: &api
  - {name: KUBERNETES_SERVICE_HOST, value: "$API_HOST"}
  - {name: KUBERNETES_SERVICE_PORT, value: "$API_PORT"}
extender:
  port: $extender_port
  service: {clusterIP: $SERVICE_HOST}
  # The certificate is renewed every 20 s, so that it changes during the checks.
  tls: {lifetime: 30s}
  # second_scheduler.sh also assigns pods to a second scheduler with the webhook.
  webhook: true
  web: {enabled: true, hosts: [gpus.example.com]}
  extraEnv: *api
explainer: {extraEnv: *api}
runtimeClass: {enabled: true, handler: runc}
probe:
  extraArgs: [--nvml-library=/sim/libdivvy_nvml_sim.so]
  extraEnv:
  - {name: DIVVY_NVML_SIM, value: /sim/machines.toml}
  - {name: DIVVY_NVML_SIM_NODE, value: \$(NODE_NAME)}
  - {name: DIVVY_NVML_SIM_CONTROL, value: /control/\$(NODE_NAME)/nvml.sock}
  - {name: DIVVY_NVML_SIM_LEDGER, value: /sim/ledger}
  extraVolumes:
  - {name: sim, hostPath: {path: $CLUSTER_DIR/sim}}
  - {name: control, hostPath: {path: $CLUSTER_DIR}}
  extraVolumeMounts:
  - {name: sim, mountPath: /sim}
  - {name: control, mountPath: /control}
# Only with agent.mps. Scripts stand in for the driver's programs; the host's /bin and /lib are for them.
mps:
  extraEnv:
  - {name: DIVVY_NVML_SIM, value: $CLUSTER_DIR/sim/machines.toml}
  - {name: DIVVY_NVML_SIM_NODE, value: \$(NODE_NAME)}
  - {name: DIVVY_PROBE_INTERVAL, value: 1s}
  - {name: LD_LIBRARY_PATH, value: $CLUSTER_DIR/sim/lib}
  - {name: PATH, value: "$CLUSTER_DIR/\$(NODE_NAME)/nvidia/bin:/usr/bin:/bin"}
  extraVolumes:
  - {name: cluster, hostPath: {path: $CLUSTER_DIR}}
  - {name: bin, hostPath: {path: /bin}}
  - {name: lib, hostPath: {path: /lib}}
  - {name: lib64, hostPath: {path: /lib64}}
  extraVolumeMounts:
  - {name: cluster, mountPath: $CLUSTER_DIR}
  - {name: bin, mountPath: /bin}
  - {name: lib, mountPath: /lib}
  - {name: lib64, mountPath: /lib64}
END
}

up() {
  need curl "Debian: curl" "to write to the API server as the agent does"
  need python3 "Debian: python3" "for the extender's Service"
  : "${DIVVY_BIN:?set it to the directory with divvy, libdivvy_nvml_sim.so, divvy-amd-sim, and divvy-intel-sim, or use cargo xtask cluster install}"
  : "${IMAGE:?set it to the archive of cargo xtask image}"
  : "${MACHINES:=$CLUSTER_ROOT/machines.toml}"
  [ "$AUTHORIZATION $SERVICE_ACCOUNTS" = "RBAC 1" ] ||
    die "this cluster runs without RBAC or without service accounts; run cargo xtask cluster down && cargo xtask cluster up --nodes 3 --rbac --service-accounts"
  alive divvy-extender && die "Divvy runs on this cluster as processes of the host; stop it first: cargo xtask cluster divvy --down"
  [ -e "$IMAGE" ] || die "$IMAGE is missing; run cargo xtask image"
  IMAGE=$(realpath "$IMAGE")   # a node's commands run in another directory
  for p in divvy libdivvy_nvml_sim.so divvy-amd-sim divvy-intel-sim; do
    [ -e "$DIVVY_BIN/$p" ] || die "$DIVVY_BIN/$p is missing; run cargo build"
  done
  printf ': "${%s:=%s}"\n' DIVVY_BIN "$(realpath "$DIVVY_BIN")" MACHINES "$(realpath "$MACHINES")" > "$CLUSTER_DIR/divvy.settings"

  local node
  for node in $(known_nodes); do
    import_images "$node" "$IMAGE"
    make_devices "$node" "$MACHINES"
  done
  # Replace the files instead of overwriting them, because a running probe has the old library mapped.
  rm -rf "$CLUSTER_DIR/sim"
  make_driver_state "$MACHINES"
  cp "$DIVVY_BIN/libdivvy_nvml_sim.so" "$CLUSTER_DIR/sim"
  # By this name, a program finds it that is not told which library to use.
  mkdir -p "$CLUSTER_DIR/sim/lib"
  ln -s ../libdivvy_nvml_sim.so "$CLUSTER_DIR/sim/lib/libnvidia-ml.so.1"
  values > "$CLUSTER_DIR/install.yaml"
  kube get namespace $NAMESPACE > /dev/null 2>&1 || kube create namespace $NAMESPACE > /dev/null
  for node in $(known_nodes); do
    [ "$(gpus_of "$node" "$MACHINES")" -eq 0 ] || kube label node "$node" gpushare=true --overwrite > /dev/null
  done
  # Do not use a pipe: an error of Helm must end this script. `is_installed` looks for the file's final name.
  chart --values "$CLUSTER_DIR/install.yaml" > "$CLUSTER_DIR/install.objects.new" || die "Helm did not render the chart"
  mv "$CLUSTER_DIR/install.objects.new" "$CLUSTER_DIR/install.objects.yaml"
  kube apply -f "$CLUSTER_DIR/install.objects.yaml" > /dev/null
  say "applied: $(grep -c '^kind: ' "$CLUSTER_DIR/install.objects.yaml") objects of the chart"
  for what in daemonset/divvy-probe daemonset/divvy-agent deployment/divvy-extender deployment/divvy-explainer; do
    wait_for "$what ready" 60 - kube rollout status -n $NAMESPACE $what --timeout=1s
  done
  # There is no kube-proxy, so give the Service's address to this machine, and let a program forward the connections.
  ip addr replace "$SERVICE_HOST/32" dev "$BRIDGE"
  stop divvy-service
  start_service
  wait_for "the extender answers at its Service" 20 divvy-service curl -skf -m 2 -o /dev/null "$service/readyz"
  # As a user does, add the address and certificates from the cluster to the scheduler's configuration.
  "$DIVVY_BIN/divvy" scheduler-config --from-cluster=$NAMESPACE/divvy-extender --kubeconfig "$CLUSTER_DIR/admin.kubeconfig" --mig-profile 3g.20gb \
    --merge "$CLUSTER_ROOT/templates/scheduler.yaml.in" -o "$CLUSTER_DIR/scheduler-tls.yaml.in" > "$LOGS/scheduler-config.log" 2>&1 ||
    { cat "$LOGS/scheduler-config.log" >&2; die "the configuration for kube-scheduler could not be created"; }
  scheduler "$service/gpushare-scheduler"
  say "kube-scheduler calls the extender over TLS, through its Service"

  wait_for "the policies are in force" 20 - refuses_forged
  for node in $(known_nodes); do
    [ "$(gpus_of "$node" "$MACHINES")" -eq 0 ] || wait_for "$node: GPUs in its allocatable" 20 - has_units "$node"
  done
  say "Divvy is installed; export KUBECONFIG=$CLUSTER_DIR/admin.kubeconfig"
}

start_service() {
  start divvy-service python3 "$CLUSTER_ROOT/service.py" "$CLUSTER_BIN/kubectl" "$CLUSTER_DIR/admin.kubeconfig" $NAMESPACE divvy-extender \
    "$SERVICE_HOST" $extender_port
}

check_all() {
  [ -e "$CLUSTER_DIR/install.objects.yaml" ] || die "Divvy is not installed on this cluster; run cargo xtask cluster install"
  # shellcheck source=play.sh
  . "$CLUSTER_ROOT/play.sh"
  # shellcheck source=second_scheduler.sh
  . "$CLUSTER_ROOT/second_scheduler.sh"
  # shellcheck source=smoke.sh
  . "$CLUSTER_ROOT/smoke.sh"
  # shellcheck source=nvidia_plugin.sh
  . "$CLUSTER_ROOT/nvidia_plugin.sh"
  two_pods
  libraries
  forged
  wanted
  evictions
  other_nodes
  tls
  replicas
  objects
  namespace_user
  web_page
  smoke
  second_scheduler
  # shellcheck disable=SC2086
  nvidia_plugin $NVIDIA_FIRST
  memory
  clear_pods
  finish
}

check_nvidia() { # [SHAPE...]
  [ -e "$CLUSTER_DIR/install.objects.yaml" ] || die "Divvy is not installed on this cluster; run cargo xtask cluster install --no-check"
  # shellcheck source=play.sh
  . "$CLUSTER_ROOT/play.sh"
  # shellcheck source=nvidia_plugin.sh
  . "$CLUSTER_ROOT/nvidia_plugin.sh"
  # shellcheck disable=SC2086
  [ $# -gt 0 ] || set -- $NVIDIA_FIRST $NVIDIA_OTHER
  nvidia_plugin "$@"
  finish
}

with_driver_spec() { # auto or off: agent.driverSpec
  sed "s|^agent:|&\n  driverSpec: \"$1\"|" "$CLUSTER_DIR/install.yaml" > "$CLUSTER_DIR/driver.yaml"
  chart --values "$CLUSTER_DIR/driver.yaml" > "$CLUSTER_DIR/driver.objects.yaml"
  kube apply -f "$CLUSTER_DIR/driver.objects.yaml" > /dev/null
  kube rollout status -n $NAMESPACE daemonset/divvy-agent --timeout=90s > /dev/null
}
libraries() {
  scene "A driver's container has its root on the node; grants include the driver's libraries without any setting"
  local file=divvy.dev-driver_nvidia.com-gpu.json driver; driver=$(driver_of n1 "$MACHINES")
  eventually 30 "the agent's CDI spec is on the node" in_node n1 test -e "/var/run/cdi/$file"
  check "it names the driver's libraries and the node's devices" says "$(in_node n1 cat "/var/run/cdi/$file")" "/run/nvidia/driver$LIB/nvidia/current/libcuda.so.$driver" '"/dev/nvidia0"'
  eventually 20 "an event of the node says so" event_says DriverSpecMade "was made for driver $driver"
  create driven 1 "" 0 n1 > /dev/null
  eventually 20 "a pod with the GPU runs" is_running driven
  check "the driver's library is in its container" says "$(kube logs driven)" "$LIB/nvidia/current/libcuda.so.$driver"
  check "and is the driver's" equals "$(kube exec driven -- /probe cat "$LIB/libcuda.so.1")" "libcuda of $driver"
  step upgraded "the libraries on the disk, and not the module that is loaded"
  make_libraries n1 560.35.03
  eventually 30 "an event says what is to be done" event_says DriverSpecStale "load the new module, or reboot"
  make_libraries n1 "$driver"
  kube delete pod driven --wait > /dev/null
  with_driver_spec off
  eventually 30 "switched off, the agent removes its spec" in_node n1 test ! -e "/var/run/cdi/$file"
  eventually 30 "also on the other node" in_node n2 test ! -e "/var/run/cdi/$file"
  create bare 1 "" 0 n1 > /dev/null
  eventually 20 "a pod with the GPU runs" is_running bare
  eventually 20 "an event tells its owner that it has no libraries, and what to type" event_says NoDriverLibraries "divvy cdi generate"
  eventually 20 "so says divvy why" prints "none of the driver's libraries" "$DIVVY" why bare --kubeconfig "$CLUSTER_DIR/admin.kubeconfig"
  eventually 20 "so says divvy doctor" prints "none of the driver's libraries" "$DIVVY" doctor --cluster --only K19 --kubeconfig "$CLUSTER_DIR/admin.kubeconfig"
  kube delete pod bare --wait > /dev/null
  with_driver_spec auto
  eventually 30 "switched on, the agent writes the spec again" in_node n1 test -e "/var/run/cdi/$file"
}
prints() { # TEXT COMMAND...: check the command's output, regardless of its exit status
  local text=$1; shift
  says "$("$@" 2> /dev/null | tr '\n' ' ' | tr -s ' ')" "$text"
}
event_says() { says "$(kube get events -A --field-selector "reason=$1" -o 'jsonpath={.items[*].message}')" "$2"; }

# Callers wait for this, because the API server compiles policies a moment after they are written.
refuses_forged() {
  ! kube create --dry-run=server -f - > /dev/null 2>&1 <<< \
    '{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "forged", "annotations": {"divvy.dev/allocation": "x"}}, "spec": {"containers": [{"name": "main", "image": "x"}]}}'
}

annotated() { sed "s|^metadata: {|metadata: {annotations: {${1:-divvy.dev/allocation: x}}, |"; }
refused_with() { # TEXT COMMAND...: check that the command fails with this text
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

would_create() { pod wants 1 | annotated "$1" | kube create --dry-run=server -f - "${@:2}"; } # ANNOTATIONS FLAG...
wanted() {
  scene "A pod says which GPUs it takes; what cannot be read is refused, in words"
  check "a key that means nothing" refused_with "divvy.dev/gpu-modell means nothing to this version of Divvy; a pod may have divvy.dev/gpu-model, " \
    would_create 'divvy.dev/gpu-modell: T4'
  check "products" refused_with 'divvy.dev/gpu-model: "A100*,,T4" was found; patterns of products are separated by commas' \
    would_create 'divvy.dev/gpu-model: "A100*,,T4"'
  check "memory" refused_with 'divvy.dev/gpu-memory: "40Gi" was found; write >= and the size that a GPU must have at least, such as ">=40Gi"' \
    would_create 'divvy.dev/gpu-memory: 40Gi'
  check "memory without a suffix" refused_with 'divvy.dev/gpu-memory: ">=20" was found; that is less than 1 MiB; write the size with a suffix such as Gi' \
    would_create 'divvy.dev/gpu-memory: ">=20"'
  check "a preference" refused_with 'divvy.dev/gpu-prefer: "best" was found; write fastest, most-memory or least-memory' \
    would_create 'divvy.dev/gpu-prefer: best'
  check "names" refused_with 'divvy.dev/gpu-uuid: "GPU-1," was found; GPUs are named by their UUIDs' would_create 'divvy.dev/gpu-uuid: "GPU-1,"'
  check "how many GPUs" refused_with 'divvy.dev/gpus: "17" was found; write the number of GPUs, from 1 to 16' would_create 'divvy.dev/gpus: "17"'
  check "more GPUs than units" refused_with 'divvy.dev/gpus: "2" was found, but a container asks for a number of units of aliyun.com/gpu-mem (1)' \
    would_create 'divvy.dev/gpus: "2"'
  kube create rolebinding tenant --clusterrole=edit --user=tenant > /dev/null
  eventually 10 "a tenant may create pods" would_create 'mine: x' --as=tenant
  check "a tenant's pod claims to test a GPU" refused_with "only users who may patch nodes may write it; tenant may not" \
    would_create 'divvy.dev/gpu-test: 1a2b' --as=tenant
  check "a tenant's pod that is there already, too" refused_with "only users who may patch nodes may write it; tenant may not" \
    kube annotate pod binpack-0 divvy.dev/gpu-test=1a2b --as=tenant
  kube delete rolebinding tenant > /dev/null
  check "what is no id of a test" refused_with 'divvy.dev/gpu-test: "No id" was found; divvy smoke writes the id of its run' \
    would_create 'divvy.dev/gpu-test: No id'
  check "an administrator's pod may be a test" would_create 'divvy.dev/gpu-test: 1a2b'
  check "what is right is taken" would_create \
    'divvy.dev/gpu-model: "A100*, !A100-PCIE*", divvy.dev/gpu-memory: ">=40Gi", divvy.dev/gpu-prefer: fastest, divvy.dev/gpu-uuid: "GPU-1, GPU-2", divvy.dev/gpus: "1"'
}

evict() { # NAMESPACE POD UID [OPTIONS]: ask for an eviction as the extender does; nothing is evicted
  kube create --raw "/api/v1/namespaces/$1/pods/$2/eviction?dryRun=All" --as=system:serviceaccount:$NAMESPACE:divvy-extender -f - <<< \
    "{\"apiVersion\":\"policy/v1\",\"kind\":\"Eviction\",\"metadata\":{\"name\":\"$2\",\"namespace\":\"$1\"},\"deleteOptions\":{\"preconditions\":{\"uid\":\"$3\"}${4:-}}}"
}
evictions() {
  scene "The extender may evict pods with GPUs, and no others"
  local plain uid; plain=$(kube get pods -n $NAMESPACE -l app.kubernetes.io/component=agent -o 'jsonpath={.items[0].metadata.name}')
  uid=$(field binpack-0 .metadata.uid)
  check "a pod with a GPU" evict default binpack-0 "$uid"
  check "not a pod without" refused_with "and $plain has none" evict $NAMESPACE "$plain" "$(kube get pod -n $NAMESPACE "$plain" -o 'jsonpath={.metadata.uid}')"
  check "not another pod of the same name" refused_with "or another UID" evict default binpack-0 00000000-0000-0000-0000-000000000000
  check "not at once" refused_with "leaves it the time to end" evict default binpack-0 "$uid" ',"gracePeriodSeconds":0'
}

token() { # [bound]: print a token of the agent's service account; with an argument, one bound to the running agent's pod
  local pod uid; pod=$(kube get pods -n $NAMESPACE -l app.kubernetes.io/component=agent --field-selector spec.nodeName=n1 -o 'jsonpath={.items[0].metadata.name}')
  uid=$(kube get pod -n $NAMESPACE "$pod" -o 'jsonpath={.metadata.uid}')
  kube create token divvy-agent -n $NAMESPACE ${1:+--bound-object-kind=Pod --bound-object-name="$pod" --bound-object-uid="$uid"}
}
patch() { # TOKEN PATH JSON: patch an object as the agent does; print the API server's answer, and fail unless it is 200
  curl -s --fail-with-body --cacert "$CLUSTER_DIR/pki/ca.crt" -H "Authorization: Bearer $1" -H 'Content-Type: application/merge-patch+json' \
    -X PATCH "https://$API_HOST:$API_PORT/api/v1/$2" -d "$3"
}
event() { # TOKEN CONTROLLER INSTANCE KIND NAME: write an event as the agent does
  curl -s --fail-with-body --cacert "$CLUSTER_DIR/pki/ca.crt" -H "Authorization: Bearer $1" -H 'Content-Type: application/json' \
    -X POST "https://$API_HOST:$API_PORT/apis/events.k8s.io/v1/namespaces/default/events" -d "{
      \"metadata\": {\"name\": \"divvy-check-$(now)\"}, \"eventTime\": \"$(date -u +%Y-%m-%dT%H:%M:%S.000000Z)\", \"type\": \"Normal\",
      \"reason\": \"Check\", \"action\": \"Checking\", \"note\": \"a check of the installation\", \"reportingController\": \"$2\",
      \"reportingInstance\": \"$3\", \"regarding\": {\"kind\": \"$4\", \"name\": \"$5\", \"namespace\": \"$([ "$4" = Node ] || echo default)\"}}"
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
  kube uncordon n1 > /dev/null   # if the request was not refused, the node would stay cordoned
  check "not a node's status" refused_with 'cannot patch resource' patch "$own" nodes/n1/status '{"status":{"capacity":{"a/b":"1"}}}'
  check "not a pod" refused_with 'cannot patch resource' patch "$own" namespaces/default/pods/binpack-0 '{"metadata":{"annotations":{"mine":"x"}}}'
  check "an event about a pod" event "$own" divvy-agent n1 Pod binpack-0
  check "an event about its own node" event "$own" divvy-agent n1 Node n1
  check "not under another node's name" refused_with "may not write an event of divvy-agent on n2" event "$own" divvy-agent n2 Pod binpack-0
  check "not under another program's" refused_with "may not write an event of kubelet on n1" event "$own" kubelet n1 Pod binpack-0
  check "not about another node" refused_with "not about this Node" event "$own" divvy-agent n1 Node n2
  check "not with a token that does not name a node" refused_with "does not say on which node its pod runs" event "$elsewhere" divvy-agent n1 Node n1
  eventually 10 "the inventory is the true one" inventory_is_true
  check "the probe's pod has no token" equals "$(kube get pods -n $NAMESPACE -l app.kubernetes.io/component=probe -o json | grep -c serviceaccount)" 0
}
inventory_is_true() { kube get node n1 -o 'jsonpath={.metadata.annotations.divvy\.dev/inventory}' | grep -q '"gpus":\[{"uuid"'; }

secret() { kube get secret -n $NAMESPACE divvy-extender-tls -o "jsonpath={.data.${1//./\\.}}"; }
serial() { secret tls.crt | base64 -d | openssl x509 -noout -serial; }
ask() { curl -sk -m 5 -X POST "$1/gpushare-scheduler/filter" -d '{}'; }
status_with() { # CERTIFICATE: print the HTTP status of a request that needs a client certificate
  curl -sk -m 5 -o /dev/null -w '%{http_code}' --cert "$CLUSTER_DIR/pki/$1.crt" --key "$CLUSTER_DIR/pki/$1.key" "$service/gpushare-scheduler/inspect"
}
as_extender() { kube auth can-i "$@" --as=system:serviceaccount:$NAMESPACE:divvy-extender; }
tls() {
  scene "kube-scheduler and the extender authenticate each other with certificates"
  divvy scheduler-config --check --timeout 20s 2>&1 | shown || true
  check "the scheduler calls the extender (both pods above were bound over TLS)" divvy scheduler-config --check --timeout 20s
  check "who shows no certificate has no pod placed" says "$(ask "$service")" "presented none" "divvy scheduler-config prints them"
  check "who speaks plain HTTP is told" says "$(ask "http://${service#https://}")" "this port takes TLS only"
  local part
  for part in crt key; do (umask 077; secret client.$part | base64 -d > "$CLUSTER_DIR/pki/extender-client.$part"); done
  check "kube-scheduler's certificate is accepted" equals "$(status_with extender-client)" 200
  check "a certificate of another CA gets no connection" equals "$(status_with kube-scheduler || true)" 000
  check "the extender reads its own Secret" as_extender get secret/divvy-extender-tls -n $NAMESPACE
  check "and no other" refused_with no as_extender get secret/another -n $NAMESPACE
  check "nor may it list them" refused_with no as_extender list secrets -n $NAMESPACE
  local ca first count=0; ca=$(secret ca.crt) first=$(serial)
  while [ "$(serial)" = "$first" ] && [ $count -lt 40 ]; do
    count=$((count + 1))
    create "renewal-$count" 1 "" 0 n1 > /dev/null
    eventually 20 "renewal-$count runs" is_running "renewal-$count" > /dev/null
    kube delete pod "renewal-$count" --wait > /dev/null
  done
  check "the extender's certificate was renewed meanwhile, and $count pods were bound" refused_with "expected" equals "$(serial)" "$first"
  check "by the same CA" equals "$(secret ca.crt)" "$ca"
  create renewed 1 "" 0 n1
  started renewed
  kube delete pod renewed --wait > /dev/null
}

holder() { kube get lease -n $NAMESPACE divvy-extender -o 'jsonpath={.spec.holderIdentity}'; }
leads_another() { local now; now=$(holder); [ -n "$now" ] && [ "$now" != "$1" ]; }
is_bound() { [ -n "$(field "$1" .spec.nodeName)" ]; }
binds_after() { # TEXT POD: measure the time from the fault until the pod is bound
  local began; began=$(now)
  eventually 30 "another replica leads" leads_another "$leader"
  create "$2" 1 "" 0 n1
  eventually 30 "$2 is bound" is_bound "$2"
  measured "$1 until the other replica binds: $(($(now) - began)) ms"
  kube delete pod "$2" --wait > /dev/null
}
replicas() {
  scene "Two replicas, only one of which binds"
  kube get pods -n $NAMESPACE -l app.kubernetes.io/component=extender -o wide | shown
  check "two are ready" equals "$(kube get deployment -n $NAMESPACE divvy-extender -o 'jsonpath={.status.readyReplicas}')" 2
  local leader pod ip node; leader=$(holder)
  check "one of them holds the lease" says "$leader" "divvy-extender-" "@https://"
  # Each connection goes to the next replica. Both get requests, and the leader binds in both cases.
  for i in 1 2 3 4; do create "either-$i" 1 "" 0 n1 > /dev/null; done
  for i in 1 2 3 4; do eventually 20 "either-$i runs" is_running "either-$i" > /dev/null; done
  kube delete pods either-1 either-2 either-3 either-4 --wait > /dev/null
  pod=${leader%%_*} node=$(kube get pod -n $NAMESPACE "${leader%%_*}" -o 'jsonpath={.spec.nodeName}')
  ip=${leader##*//}; ip=${ip%:*}
  step killed "the leader, $pod on $node (kill -9)"
  for i in $(pids_of "/usr/bin/divvy extender" "$node"); do
    ! grep -qzF "POD_IP=$ip" "/proc/$i/environ" 2> /dev/null || kill -9 "$i"
  done
  binds_after "kill -9 of the leader" after-kill
  extender_rolled_out 60
  leader=$(holder)
  step deleted "the leader's pod, ${leader%%_*}"
  kube delete pod -n $NAMESPACE "${leader%%_*}" --wait=false > /dev/null
  binds_after "SIGTERM of the leader" after-term
  extender_rolled_out 60
}

objects() {
  scene "The chart's objects on a real API server"
  kube get service,poddisruptionbudget,networkpolicy,lease -n $NAMESPACE | shown
  kube get runtimeclass | shown
  check "the Service has the requested address" equals "$(kube get service -n $NAMESPACE divvy-extender -o 'jsonpath={.spec.clusterIP}')" "$SERVICE_HOST"
  check "the disruption budget allows one of the two pods to be evicted" equals "$(kube get pdb -n $NAMESPACE divvy-extender -o 'jsonpath={.status.disruptionsAllowed} {.status.expectedPods}')" "1 2"
  check "the network policies exist" says "$(kube get networkpolicy -n $NAMESPACE -o name)" divvy-agent divvy-extender divvy-probe
  runtime_pod | kube create -f - > /dev/null
  eventually 20 "a pod with the RuntimeClass runs" is_running with-class
}
runtime_pod() { pod with-class 1 "" 0 | sed 's|^spec:|spec:\n  runtimeClassName: nvidia|'; }

user_of() { # NAMESPACE: create a service account `ann` that may only view that namespace; print the path of a kubeconfig with its token
  local file=$CLUSTER_DIR/ann.$1.kubeconfig
  kube create namespace "$1" > /dev/null
  kube create serviceaccount ann -n "$1" > /dev/null
  kube create rolebinding ann -n "$1" --clusterrole=view --serviceaccount="$1:ann" > /dev/null
  rm -f "$file"
  kubeconfig "$file" ann "$(kube create token ann -n "$1")"
  echo "$file"
}
why_as() { "$DIVVY" why -n "$@"; } # NAMESPACE ARGS...
namespace_user() {
  scene "A user who may see one namespace asks why a pod waits"
  local ann bob said agent
  ann=$(user_of team-a) bob=$(user_of team-b)
  check "that user may list no nodes" refused_with no kube auth can-i list nodes --as=system:serviceaccount:team-a:ann
  create holds 5 "" 0 n1
  started holds
  agent=$(kube get pods -n $NAMESPACE -l app.kubernetes.io/component=agent --field-selector spec.nodeName=n1 -o 'jsonpath={.items[0].metadata.name}')
  check "the agent's metrics have what the pod was granted, and the GPU's temperature" says \
    "$(kube get --raw "/api/v1/namespaces/$NAMESPACE/pods/$agent:9400/proxy/metrics")" \
    'divvy_container_gpu_memory_limit_bytes{namespace="default",pod="holds",' ' 5368709120' 'divvy_gpu_temperature_celsius{'
  pod waits 12 "" 0 n1 | kube create -n team-a -f - > /dev/null
  step created "pod team-a/waits: 12 GiB, on n1"
  # Wait until the API server has read the new roles and the ConfigMap has the certificate.
  eventually 30 "the explainer looks at the cluster for that user" prints "GPU 0" why_as team-a waits --kubeconfig "$ann"
  said=$(why_as team-a waits --kubeconfig "$ann"); shown <<< "$said"
  check "the answer has each GPU of the node, and what is free" says "$said" "n1: 2 GiB free on its GPU" "2 of 16 GiB free"
  check "pods of other namespaces have no names in it" says_not "$said" "default/" "holds"
  check "an administrator reads the name" says "$(why_as team-a waits --all-nodes)" "default/holds (5 GiB)"
  check "a user of another namespace does not get the pod" refused_with 'cannot list resource "pods"' why_as team-a waits --kubeconfig "$bob"
  check "by the proxy that user reaches the explainer's port only" refused_with 'cannot get resource "services/proxy"' \
    kube --kubeconfig "$ann" get --raw "/api/v1/namespaces/$NAMESPACE/services/https:divvy-extender:extender/proxy/metrics"
  check "and there no question outside of TLS" refused_with "could not find the requested resource" \
    kube --kubeconfig "$ann" get --raw "/api/v1/namespaces/$NAMESPACE/services/divvy-explainer:why/proxy/why/team-a/waits"
  step restarted "the explainer, which creates a new certificate"
  kube rollout restart -n $NAMESPACE deployment/divvy-explainer > /dev/null
  kube rollout status -n $NAMESPACE deployment/divvy-explainer --timeout=60s > /dev/null
  eventually 20 "it answers again" prints "GPU 0" why_as team-a waits --kubeconfig "$ann"
  kube delete pod holds --wait > /dev/null
  kube delete namespace team-a team-b > /dev/null
  rm -f "$ann" "$bob"
}

page() { # ADDRESS HOST TOKEN: print the extender's page about node n1, and its status
  curl -sk -m 10 -w '\nstatus %{http_code}\n' --resolve "$2:8443:$1" -H "Authorization: Bearer $3" "https://$2:8443/nodes/n1"
}
web_page() {
  scene "The extender serves the web page to users who may list nodes and pods"
  local ann address viewer token
  ann=$(user_of team-a)
  token=$(kube create token ann -n team-a)
  kube create serviceaccount viewer -n team-a > /dev/null
  kube create clusterrolebinding team-a-viewer --clusterrole=divvy-viewer --serviceaccount=team-a:viewer > /dev/null
  viewer=$(kube create token viewer -n team-a)
  address=$(kube get pods -n $NAMESPACE -l app.kubernetes.io/component=extender -o 'jsonpath={.items[0].status.podIP}')
  create holds 5 "" 0 n1
  started holds
  eventually 20 "the page has the pod" prints "default/holds" page "$address" gpus.example.com "$viewer"
  eventually 20 "and what the node's agent measured" prints "default/holds</a></td><td>5 GiB</td><td>0 MiB</td>" page "$address" gpus.example.com "$viewer"
  check "a user of one namespace does not see it" says "$(page "$address" gpus.example.com "$token")" "list nodes in the whole cluster" "status 403"
  check "no one sees it without a token" says "$(page "$address" gpus.example.com "")" "status 401"
  check "it is served under its own names only" says "$(page "$address" elsewhere.example.com "$viewer")" "status 421"
  kube delete pod holds --wait > /dev/null
  kube delete clusterrolebinding team-a-viewer > /dev/null
  kube delete namespace team-a > /dev/null
  rm -f "$ann"
}

memory() {
  scene "Memory of Divvy's containers"
  local program pid
  for program in "/usr/bin/divvy-agent" "/usr/bin/divvy-probe --listen" "/usr/bin/divvy extender" "/usr/bin/divvy explainer"; do
    for pid in $(pids_of "$program"); do
      measured "$program: $(awk '/^Rss:/ {rss = $2} /^Pss:/ {pss = $2} /^Anonymous:/ {own = $2}
        END {printf "resident %.1f MiB, of it %.1f anonymous; proportional %.1f", rss / 1024, own / 1024, pss / 1024}' "/proc/$pid/smaps_rollup")"
    done
  done
}
left_objects() { # print all objects with Divvy's label, of every kind that can be listed
  local kinds; kinds=$(kube api-resources --verbs=list -o name | grep -v '^events' | paste -sd,)
  kube get "$kinds" -A -l app.kubernetes.io/name=divvy -o name --ignore-not-found
}
left_on_nodes() { kube get nodes -o json | grep -oE '"(divvy\.dev|aliyun\.com)/[^"]*":' | sort -u; }
left_files() {
  local node
  for node in $(known_nodes); do
    in_node "$node" bash -c 'shopt -s nullglob; for path in /var/lib/kubelet/plugins/divvy.dev /var/run/cdi/divvy.dev-*; do [ ! -e "$path" ] || echo "$0: $path"; done' "$node"
  done
}
uninstall() {
  [ -e "$CLUSTER_DIR/install.objects.yaml" ] || die "Divvy is not installed on this cluster; run cargo xtask cluster install"
  # shellcheck source=play.sh
  . "$CLUSTER_ROOT/play.sh"
  local node command began
  scene "Divvy is removed from the cluster"
  create holds 3 "" 2 n1
  started holds
  check "the plan names the pod that holds memory, and changes nothing" says "$(divvy uninstall)" "default/holds (node n1, 3072 MiB)" "nothing has been changed"
  divvy uninstall | shown
  check "while a pod holds memory it is refused" refused_with "1 pod holds GPU memory, so nothing was removed" divvy uninstall --yes
  check "agents run on" kube rollout status -n $NAMESPACE daemonset/divvy-agent --timeout=1s
  command=$(divvy uninstall | grep -o 'umount .*')
  clear_pods
  began=$(now)
  check "it is removed" divvy uninstall --yes --labels
  measured "divvy uninstall --yes: $(($(now) - began)) ms"
  for node in $(known_nodes); do in_node "$node" bash -c "$command"; done
  # If a kubelet still knew the resources, it would have written them again by now.
  sleep 15
  check "no object of Divvy is left" equals "$(left_objects)" ""
  check "nor its Lease" equals "$(kube get lease -n $NAMESPACE -o name)" ""
  check "nor anything on the nodes' objects" equals "$(left_on_nodes)" ""
  check "nor their label" equals "$(kube get nodes -l gpushare -o name)" ""
  check "nor a file on the nodes" equals "$(left_files)" ""
  check "a second run finds nothing" says "$(divvy uninstall)" "Nothing of Divvy is left in this cluster"
  kube create -f - > /dev/null <<< "$(pod plain 1 | grep -v resources)"
  scheduler none
  eventually 60 "a pod without a GPU runs" is_running plain
  clear_pods
  down > /dev/null
  finish
}
down() {
  # shellcheck disable=SC1091
  . "$CLUSTER_DIR/divvy.settings" 2> /dev/null || die "Divvy is not installed on this cluster; run cargo xtask cluster install"
  [ -e "$CLUSTER_DIR/install.objects.yaml" ] || die "Divvy is not installed on this cluster; run cargo xtask cluster install"
  scheduler none
  stop divvy-service
  ip addr del "$SERVICE_HOST/32" dev "$BRIDGE" 2> /dev/null || true
  rm -f "$CLUSTER_DIR/scheduler-tls.yaml.in"
  kube delete --ignore-not-found -f "$CLUSTER_DIR/install.objects.yaml" > /dev/null
  kube delete namespace $NAMESPACE --ignore-not-found > /dev/null
  rm -f "$CLUSTER_DIR/install.objects.yaml" "$CLUSTER_DIR/divvy.settings"
  say "Divvy is removed from the cluster"
}

case ${1:-} in
  up) up ;;
  check) check_all ;;
  up-and-check) (up); check_all ;;
  nvidia) shift; check_nvidia "$@" ;;
  uninstall) uninstall ;;
  down) down ;;
  *) die "usage: install.sh up|check|up-and-check|nvidia|uninstall|down" ;;
esac
