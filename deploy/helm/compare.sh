#!/usr/bin/env bash
# Compares `divvy manifests` with `helm template`, byte for byte, over the value sets in values/, and lints the chart. Status 1: they differ.
#   compare.sh [DIVVY]      default: divvy from the PATH. Helm: $HELM, else the PATH; `go install helm.sh/helm/v3/cmd/helm@v3.19.0` builds one
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
divvy=${1:-divvy} helm=${HELM:-helm}
command -v "$helm" > /dev/null || { echo "SKIPPED: there is no $helm; the chart was not compared with Helm's own rendering" >&2; exit 77; }
result=0
compare() { # WHAT ARGUMENT...
  local what=$1; shift
  if diff <("$helm" template divvy "$here/divvy" --namespace divvy-system --kube-version 1.36.0 "$@") <("$divvy" manifests "$@" 2> /dev/null); then
    echo "same  $what"
  else
    echo "DIFFERS  $what"; result=1
  fi
}
for file in "$here"/values/*.yaml; do
  "$helm" lint --quiet --strict "$here/divvy" --values "$file" || result=1
  compare "$(basename "$file")" --values "$file"
done
compare "--set" --set memoryUnit=256MiB,agent.metrics.port=9401 --set 'agent.extraArgs={--a,b\,c}' --set image.tag=0123 \
  --set 'extender.nodeSelector.kubernetes\.io/os=null' --set extender.resources.limits.memory=1Gi --set extender.tls.lifetime=7d
for wrong in extender.replicas=1 extender.service.clusterIP=10.96.0.7 extender.tls.existingSecret=x extender.webhook=true; do
  for render in "$helm template divvy $here/divvy" "$divvy manifests"; do
    if $render --set extender.loopback=true --set $wrong > /dev/null 2>&1; then echo "NOT REFUSED  $render: loopback with $wrong"; result=1; fi
  done
done
exit $result
