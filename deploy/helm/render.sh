#!/usr/bin/env bash
# Lints the chart, checks that it refuses values that contradict each other, and renders deploy/divvy.yaml with Helm.
#   render.sh            write deploy/divvy.yaml
#   render.sh --check    change nothing; status 1, with a diff, if deploy/divvy.yaml is not what the chart renders
# Helm is $HELM, else target/helm-v3.19.0/helm, else the helm on the PATH. Status 77: there is no helm.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
chart=$here/divvy file=$root/deploy/divvy.yaml
case ${1:-} in
  "" | --check) ;;
  *) echo "usage: render.sh [--check]" >&2; exit 2 ;;
esac

helm=${HELM:-$root/target/helm-v3.19.0/helm}
[ -n "${HELM:-}" ] || [ -x "$helm" ] || helm=helm
if ! command -v "$helm" > /dev/null; then
  echo "SKIPPED: there is no $helm, so the chart was not checked; set HELM, or build Helm:" \
    "GOBIN=$root/target/helm-v3.19.0 go install helm.sh/helm/v3/cmd/helm@v3.19.0" >&2
  exit 77
fi

version=1.36.0 # of Kubernetes
# Without the test of `helm test`: kubectl would create it as an ordinary pod.
template() { "$helm" template divvy "$chart" --skip-tests --namespace divvy-system --kube-version $version "$@"; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
result=0

for values in "$here"/values/*.yaml; do
  "$helm" lint --quiet --strict --kube-version $version "$chart" --values "$values" || { echo "helm lint failed with $values" >&2; result=1; }
done

# Each value makes no sense together with extender.loopback=true. The message must come from the chart: Helm may also fail for another reason.
for wrong in extender.replicas=1 extender.service.clusterIP=10.96.0.7 extender.tls.existingSecret=x extender.webhook=true; do
  if template --set extender.loopback=true --set $wrong > /dev/null 2> "$work/error"; then
    echo "the chart accepts extender.loopback=true with $wrong, and must refuse it" >&2; result=1
  elif ! grep -q "execution error.* extender.loopback.* ${wrong%=*}" "$work/error"; then
    echo "the chart must refuse extender.loopback=true with $wrong; Helm failed for another reason:" >&2
    cat "$work/error" >&2; result=1
  fi
done
[ $result = 0 ] || exit $result

{
  echo "# Made by deploy/helm/render.sh with Helm from the chart in deploy/helm/divvy: default values, release divvy, namespace divvy-system. Do not edit."
  template
} > "$work/divvy.yaml"
if [ "${1:-}" = --check ]; then
  diff -u --label deploy/divvy.yaml --label "the chart, rendered" "$file" "$work/divvy.yaml" || {
    echo "deploy/divvy.yaml is not what the chart renders with Helm $("$helm" version --short); type: deploy/helm/render.sh" >&2
    exit 1
  }
  echo "deploy/divvy.yaml is current"
else
  cp "$work/divvy.yaml" "$file"
  echo "wrote deploy/divvy.yaml"
fi
