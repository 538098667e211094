#!/usr/bin/env bash
# Shows the running processes with their PIDs and versions, the nodes, and Divvy. Exit status: 0 if a cluster runs and answers, 3 if no cluster
# runs, 1 if a part is missing.
set -uo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
# version NAME: print the version of the program that runs under this name
version() {
  case $1 in
    etcd) echo "$ETCD_VERSION" ;;
    kube-* | *.kubelet) echo "$KUBERNETES_VERSION" ;;
    *.containerd) echo "$CONTAINERD_VERSION (runc $RUNC_VERSION)" ;;
    divvy-extender | *.agent) "/proc/$(pid_of "$1")/exe" --version 2> /dev/null ;;
  esac
}
shopt -s nullglob
names=("$CLUSTER_DIR"/pids/*)
if [ ${#names[@]} -eq 0 ]; then
  echo "no cluster runs in $CLUSTER_DIR"
  if "$CLUSTER_ROOT/build.sh" --present > /dev/null; then echo "built: $CLUSTER_BIN"; else echo "not built yet: $CLUSTER_BIN"; fi
  exit 3
fi
result=0
printf '%-24s %-8s %-10s %-8s %s\n' PROCESS PID MEMORY AGE VERSION
for file in "${names[@]}"; do
  name=$(basename "$file")
  if alive "$name"; then
    pid=$(pid_of "$name")
    printf '%-24s %-8s %-10s %-8s %s\n' "$name" "$pid" "$(awk '/^VmRSS/ {printf "%d MiB", $2 / 1024}' "/proc/$pid/status")" \
      "$(ps -o etime= -p "$pid" | tr -d ' ')" "$(version "$name")"
  else
    printf '%-24s %-8s %s\n' "$name" - "ended; log: $LOGS/$name.log"; result=1
  fi
done
echo
[ "$AUTHORIZATION" = RBAC ] && echo "authorization: Node, RBAC" || echo "authorization: everything is allowed"
case $EXTENDER_URL in "" | none) echo "kube-scheduler has no extender" ;; *) echo "kube-scheduler calls $EXTENDER_URL" ;; esac
echo "logs: $LOGS"
echo "export KUBECONFIG=$CLUSTER_DIR/admin.kubeconfig PATH=$CLUSTER_BIN:\$PATH"
echo
if [ "$(kube get --raw /readyz 2>&1)" = ok ]; then kube get nodes -o custom-columns=NODE:.metadata.name,READY:'.status.conditions[?(@.type=="Ready")].status',KUBELET:.status.nodeInfo.kubeletVersion,RUNTIME:.status.nodeInfo.containerRuntimeVersion,GPU-MEM:'.status.allocatable.aliyun\.com/gpu-mem'
else echo "the API server does not answer"; result=1; fi
exit $result
