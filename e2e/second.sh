# shellcheck shell=bash disable=SC2154
# A second kube-scheduler as `divvy scheduler-config --as-second-scheduler` prints it, in pods, and what gives it its pods: the policy, then
# the webhook. install.sh sources it.

second() { divvy scheduler-config --from-cluster=$NAMESPACE/divvy-extender --as-second-scheduler "$@"; }
# There is no DNS and no kube-proxy on this cluster: what a pod finds by them elsewhere is written into it. The image is on n1.
reachable() {
  sed -e "s|^      serviceAccountName: .*|&\n      hostAliases: [{ip: $SERVICE_HOST, hostnames: [divvy-extender.$NAMESPACE.svc]}]|" \
    -e "s|^        kubernetes.io/os: linux|&\n        kubernetes.io/hostname: n1|" \
    -e "s|^        command:\$|        env: [{name: KUBERNETES_SERVICE_HOST, value: $API_HOST}, {name: KUBERNETES_SERVICE_PORT, value: \"$API_PORT\"}]\n&|"
}
apply_second() { # FLAGS
  # kube-scheduler's key is in it.
  (umask 077; second "$@" 2> "$LOGS/second.log" | reachable > "$CLUSTER_DIR/second.yaml") || die "divvy scheduler-config $*: see $LOGS/second.log"
  kube apply -f "$CLUSTER_DIR/second.yaml" > /dev/null
}
# The scheduler that a pod would get; a dry run passes through admission, too.
scheduler_of() { kube create --dry-run=server -o 'jsonpath={.spec.schedulerName}' "$@" -f -; }
gets() { # SCHEDULER POD...: the function that writes the pod
  local expected=$1; shift
  equals "$("$@" | scheduler_of)" "$expected"
}
gets_in_kube_system() { equals "$(asks | scheduler_of -n kube-system)" "$1"; }
asks() { pod asks 1; }
asks_not() { asks | sed 's|aliyun.com/gpu-mem|cpu|'; }
asks_by_init() { asks_not | sed "s|^  containers:|  initContainers: [{name: init, image: x, restartPolicy: Always, resources: {limits: {aliyun.com/gpu-mem: 1}}}]\n&|"; }
naming() { asks | sed "s|^spec:|&\n  schedulerName: $1|"; }
# Events come a moment later.
is_bound_by() { # POD SCHEDULER
  equals "$(kube get events --field-selector "involvedObject.uid=$(uid "$1"),reason=Scheduled" -o 'jsonpath={.items[*].reportingComponent}')" "$2"
}

gives_pods() { # WHAT
  eventually 20 "$1: a pod that asks for gpu-mem is given to divvy-scheduler" gets divvy-scheduler asks
  check "so is one of which only a sidecar asks" gets divvy-scheduler asks_by_init
  check "and one that names the default" gets divvy-scheduler naming default-scheduler
  check "one that asks for no GPU is left alone" gets default-scheduler asks_not
  check "and one that names another scheduler" gets mine naming mine
}

second_scheduler() {
  scene "A second scheduler, for a control plane that is closed"
  local archive=$CLUSTER_DIR/second.tar
  # The cluster's own program in the place of the published image.
  "$CLUSTER_ROOT/image/pack.sh" "$CLUSTER_BIN/kube-scheduler" "$archive" "registry.k8s.io/kube-scheduler:$KUBERNETES_VERSION"
  in_node n1 "$CLUSTER_BIN/ctr" -n k8s.io images import "$archive" >> "$LOGS/n1.images.log" 2>&1
  rm -f "$archive"

  apply_second   # with the policy: that is this version's own
  gives_pods "by the policy"
  kube delete mutatingadmissionpolicy,mutatingadmissionpolicybinding divvy-scheduler > /dev/null
  eventually 20 "without it nothing is given" gets default-scheduler asks

  apply_second --mutate-with webhook
  gives_pods "by the webhook"
  check "one of kube-system is left alone" gets_in_kube_system default-scheduler
  eventually 60 "its two pods are ready" kube rollout status -n kube-system deployment/divvy-scheduler --timeout=1s
  create by-webhook 1 "" 0 n1   # which says nothing of a scheduler
  eventually 20 "by-webhook runs" is_running by-webhook
  eventually 10 "divvy-scheduler has bound it" is_bound_by by-webhook divvy-scheduler
  check "it sees only its own GPU" own_gpu by-webhook 0
  kube delete pod by-webhook --wait > /dev/null
  check "the scheduler calls the extender" divvy scheduler-config --check --profile divvy-scheduler --timeout 20s

  local began
  stop divvy-service
  began=$(now)
  check "while the extender is away pods are created all the same, by the cluster's own scheduler" gets default-scheduler asks
  measured "a pod is created without the extender: $(($(now) - began)) ms"
  start_service
  eventually 20 "and when it is back they are given again" gets divvy-scheduler asks
  kube delete -f "$CLUSTER_DIR/second.yaml" > /dev/null
}
