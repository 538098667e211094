# shellcheck shell=bash disable=SC2154
# Checks of a second kube-scheduler in pods, as `divvy scheduler-config --as-second-scheduler` prints it. First the policy and then the webhook
# assign pods to it. install.sh sources this file.

second() { divvy scheduler-config --from-cluster=$NAMESPACE/divvy-extender --as-second-scheduler "$@"; }
# This cluster has neither DNS nor kube-proxy, so write the addresses into the pods. The image is only on n1.
reachable() {
  sed -e "s|^      serviceAccountName: .*|&\n      hostAliases: [{ip: $SERVICE_HOST, hostnames: [divvy-extender.$NAMESPACE.svc]}]|" \
    -e "s|^        kubernetes.io/os: linux|&\n        kubernetes.io/hostname: n1|" \
    -e "s|^        command:\$|        env: [{name: KUBERNETES_SERVICE_HOST, value: $API_HOST}, {name: KUBERNETES_SERVICE_PORT, value: \"$API_PORT\"}]\n&|"
}
apply_second() { # FLAGS
  # The file contains kube-scheduler's private key.
  (umask 077; second "$@" 2> "$LOGS/second.log" | reachable > "$CLUSTER_DIR/second.yaml") || die "divvy scheduler-config $*: see $LOGS/second.log"
  kube apply -f "$CLUSTER_DIR/second.yaml" > /dev/null
}
# Print the scheduler that a pod would get. A dry run also passes through admission.
scheduler_of() { kube create --dry-run=server -o 'jsonpath={.spec.schedulerName}' "$@" -f -; }
gets() { # SCHEDULER COMMAND...: check the scheduler of the pod that the command prints
  local expected=$1; shift
  equals "$("$@" | scheduler_of)" "$expected"
}
gets_in_kube_system() { equals "$(asks | scheduler_of -n kube-system)" "$1"; }
asks() { pod asks 1; }
asks_not() { asks | sed 's|aliyun.com/gpu-mem|cpu|'; }
asks_by_init() { asks_not | sed "s|^  containers:|  initContainers: [{name: init, image: x, restartPolicy: Always, resources: {limits: {aliyun.com/gpu-mem: 1}}}]\n&|"; }
naming() { asks | sed "s|^spec:|&\n  schedulerName: $1|"; }
# Callers wait for this, because events are written a moment later.
is_bound_by() { # POD SCHEDULER
  equals "$(kube get events --field-selector "involvedObject.uid=$(uid "$1"),reason=Scheduled" -o 'jsonpath={.items[*].reportingComponent}')" "$2"
}

gives_pods() { # MEANS
  eventually 20 "$1: a pod that requests gpu-mem is assigned to divvy-scheduler" gets divvy-scheduler asks
  check "so is a pod in which only a sidecar requests it" gets divvy-scheduler asks_by_init
  check "and a pod that names the default scheduler" gets divvy-scheduler naming default-scheduler
  check "a pod that requests no GPU is not changed" gets default-scheduler asks_not
  check "nor is a pod that names another scheduler" gets mine naming mine
}

second_scheduler() {
  scene "A second scheduler, for a control plane that cannot be changed"
  local archive=$CLUSTER_DIR/second.tar
  # The cluster's own program replaces the published image.
  "$CLUSTER_ROOT/image/pack.sh" "$CLUSTER_BIN/kube-scheduler" "$archive" "registry.k8s.io/kube-scheduler:$KUBERNETES_VERSION"
  in_node n1 "$CLUSTER_BIN/ctr" -n k8s.io images import "$archive" >> "$LOGS/n1.images.log" 2>&1
  rm -f "$archive"

  apply_second   # with the policy, the default for this version of Kubernetes
  gives_pods "by the policy"
  kube delete mutatingadmissionpolicy,mutatingadmissionpolicybinding divvy-scheduler > /dev/null
  eventually 20 "without the policy no pod is assigned" gets default-scheduler asks

  apply_second --mutate-with webhook
  gives_pods "by the webhook"
  check "a pod in kube-system is not changed" gets_in_kube_system default-scheduler
  eventually 60 "its two pods are ready" kube rollout status -n kube-system deployment/divvy-scheduler --timeout=1s
  create by-webhook 1 "" 0 n1   # names no scheduler
  eventually 20 "by-webhook runs" is_running by-webhook
  eventually 10 "divvy-scheduler has bound it" is_bound_by by-webhook divvy-scheduler
  check "it sees only its own GPU" own_gpu by-webhook 0
  kube delete pod by-webhook --wait > /dev/null
  check "the scheduler calls the extender" divvy scheduler-config --check --profile divvy-scheduler --timeout 20s

  local began
  stop divvy-service
  began=$(now)
  check "while the extender is away, pods are still created, for the cluster's own scheduler" gets default-scheduler asks
  measured "a pod is created without the extender: $(($(now) - began)) ms"
  start_service
  eventually 20 "when the extender is back, pods are assigned again" gets divvy-scheduler asks
  kube delete -f "$CLUSTER_DIR/second.yaml" > /dev/null
}
