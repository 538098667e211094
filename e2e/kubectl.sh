#!/usr/bin/env bash
# kubectl.sh ARGS...   the cluster's kubectl, with Divvy's plugins where kubectl looks for them: kubectl inspect gpushare, kubectl divvy why
# It replaces this process, so its status is the caller's. DIVVY_BIN: the folder with divvy.
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
