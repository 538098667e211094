#!/usr/bin/env bash
# restart.sh NAME...     stops one process (kube-scheduler, n1.kubelet, n1.containerd, ...) and lets up.sh start it again;
#                        settings in the environment apply, so `EXTENDER_URL=... restart.sh kube-scheduler` changes the extender.
# restart.sh -9 NAME...  kills it, as a crash would.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
limit=10
[ "${1:-}" = -9 ] && { limit=0; shift; }
[ $# -gt 0 ] || die "usage: restart.sh [-9] NAME...; NAME is one of: $(cd "$CLUSTER_DIR/pids" 2> /dev/null && echo *)"
divvy=0
for name in "$@"; do
  alive "$name" || die "$name does not run; what does: $(cd "$CLUSTER_DIR/pids" 2> /dev/null && echo *)"
  if [ $limit = 0 ]; then kill9 "$name"; else stop "$name" 10; fi
  case $name in *.agent | divvy-extender) divvy=1 ;; esac
done
[ $divvy = 0 ] || exec "$CLUSTER_ROOT/divvy.sh" up
exec "$CLUSTER_ROOT/up.sh"
