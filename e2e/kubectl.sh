#!/usr/bin/env bash
# kubectl.sh ARGS...   runs the cluster's kubectl, with Divvy's plugins in the PATH: kubectl inspect gpushare, kubectl divvy why
# kubectl replaces this process, so the caller gets its exit status. DIVVY_BIN: the directory with divvy.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
plugins=$CLUSTER_DIR/plugins
mkdir -p "$plugins"
for name in kubectl-inspect-gpushare kubectl-divvy; do
  [ ! -e "${DIVVY_BIN:-}/divvy" ] || ln -sfn "$DIVVY_BIN/divvy" "$plugins/$name"
done
export KUBECONFIG=$CLUSTER_DIR/admin.kubeconfig PATH=$plugins:$PATH
exec "$CLUSTER_BIN/kubectl" "$@"
