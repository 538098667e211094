# shellcheck shell=bash disable=SC2154
# Checks of NVIDIA's Helm chart and static manifest with Divvy's image in place of NVIDIA's, on the node with three NVIDIA GPUs. Apart from the
# image, only what this cluster lacks is added: the driver is simulated, and pods cannot reach Services. install.sh sources this file.

NVIDIA_PLUGIN=github.com/NVIDIA/k8s-device-plugin@v0.19.3
NVIDIA_NAMESPACE=nvidia-device-plugin
NVIDIA_NODE=n2

# Print the directory of the version of NVIDIA's module that has the chart and the manifests.
nvidia_module() { GOFLAGS=-mod=mod go mod download -json $NVIDIA_PLUGIN | sed -n 's/^.*"Dir": "\(.*\)",$/\1/p'; }

nvidia_chart() { # ARGUMENT OF HELM...
  "${HELM:-$(type -P helm || echo "$CLUSTER_BIN/helm")}" template nvidia "$(nvidia_module)/deployments/helm/nvidia-device-plugin" \
    --namespace $NVIDIA_NAMESPACE --kube-version "$KUBERNETES_VERSION" "$@"
}

nvidia_values() { # DRIVER_ROOT
  local image; image=$(plugin_image)
  cat <<END
image: {repository: ${image%:*}, tag: "${image##*:}", pullPolicy: Never}
nvidiaDriverRoot: $1
deviceListStrategy: cdi-cri
mps: {root: $CLUSTER_DIR/$NVIDIA_NODE/mps}
gfd: {enabled: true}
# Another project's images. They are not on this machine.
nfd: {enabled: false}
config:
  default: sliced
  map:
    sliced: |-
      version: v1
      sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
    whole: |-
      version: v1
END
}

# Add what the simulated driver and this cluster's network need to the pods of a DaemonSet.
with_simulator() { # NAMESPACE DAEMONSET CONTAINER DRIVER_ROOT
  kube patch -n "$1" daemonset "$2" -p "{\"spec\": {\"template\": {\"spec\": {
    \"containers\": [{\"name\": \"$3\", \"volumeMounts\": [{\"name\": \"driver-root\", \"mountPath\": \"/driver-root\"}]}],
    \"volumes\": [{\"name\": \"driver-root\", \"hostPath\": {\"path\": \"$4\"}}]}}}}" > /dev/null
  kube set env -n "$1" "daemonset/$2" DIVVY_NVML_SIM=/driver-root/machines.toml DIVVY_NVML_SIM_NODE=$NVIDIA_NODE \
    KUBERNETES_SERVICE_HOST="$API_HOST" KUBERNETES_SERVICE_PORT="$API_PORT" > /dev/null
}

# Node Feature Discovery's resource, in which GPU feature discovery writes labels.
node_feature_crd() {
  kube apply -f - > /dev/null <<'END'
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: nodefeatures.nfd.k8s-sigs.io, annotations: {api-approved.kubernetes.io: "https://github.com/kubernetes-sigs/node-feature-discovery"}}
spec:
  group: nfd.k8s-sigs.io
  scope: Namespaced
  names: {kind: NodeFeature, listKind: NodeFeatureList, plural: nodefeatures, singular: nodefeature}
  versions:
  - name: v1alpha1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
END
}

offers_gpus() { equals "$(kube get node $NVIDIA_NODE -o 'jsonpath={.status.allocatable.nvidia\.com/gpu}')" "$1"; }
wants_gpu() { pod "$1" 1 "" 0 $NVIDIA_NODE | sed 's|aliyun.com/gpu-mem|nvidia.com/gpu|' | kube create -f - > /dev/null; step created "pod $1: 1 nvidia.com/gpu"; }
has_one_gpu() { equals "$(gpus_in "$1" | tr -cd ';')" ";"; }
feature() { kube get nodefeature -n $NVIDIA_NAMESPACE "nvidia-features-for-$NVIDIA_NODE" -o "jsonpath={.spec.labels.nvidia\\.com/${1//./\\.}}"; }
has_feature() { equals "$(feature "$1")" "$2"; } # LABEL VALUE
config_is() { # NAME
  step labelled "$NVIDIA_NODE: nvidia.com/device-plugin.config=$1"
  kube label node $NVIDIA_NODE "nvidia.com/device-plugin.config=$1" --overwrite > /dev/null
}
sidecar_says() { says "$(kube logs -n $NVIDIA_NAMESPACE daemonset/nvidia-nvidia-device-plugin -c nvidia-device-plugin-sidecar)" "$@"; }
starts_of() { kube get pods -n $NVIDIA_NAMESPACE -o 'jsonpath={range .items[*]}{.metadata.uid} {.status.containerStatuses[*].restartCount}{"\n"}{end}'; }

nvidia_plugin() {
  scene "NVIDIA's Helm chart with Divvy's image"
  local root before; root=$(simulated_driver_root $NVIDIA_NODE "$MACHINES")
  step labelled "$NVIDIA_NODE: gpushare-, so that Divvy's agent leaves the node"
  kube label node $NVIDIA_NODE gpushare- > /dev/null
  kube create namespace $NVIDIA_NAMESPACE > /dev/null
  node_feature_crd
  kube label node $NVIDIA_NODE nvidia.com/gpu.present=true --overwrite > /dev/null
  nvidia_values "$root" > "$CLUSTER_DIR/nvidia.yaml"
  nvidia_chart --values "$CLUSTER_DIR/nvidia.yaml" > "$CLUSTER_DIR/nvidia.objects.yaml" || die "Helm did not render NVIDIA's chart"
  kube apply -n $NVIDIA_NAMESPACE -f "$CLUSTER_DIR/nvidia.objects.yaml" > /dev/null
  with_simulator $NVIDIA_NAMESPACE nvidia-nvidia-device-plugin nvidia-device-plugin-ctr "$root"
  with_simulator $NVIDIA_NAMESPACE nvidia-nvidia-device-plugin-gpu-feature-discovery gpu-feature-discovery-ctr "$root"
  eventually 60 "each of three GPUs is offered four times" offers_gpus 12
  wants_gpu sliced
  eventually 20 "a pod runs" is_running sliced
  check "it sees one GPU" has_one_gpu sliced
  eventually 30 "GPU feature discovery has written a NodeFeature object" has_feature gpu.replicas 4
  eventually 30 "all containers run" kube rollout status -n $NVIDIA_NAMESPACE daemonset/nvidia-nvidia-device-plugin --timeout=1s
  before=$(starts_of)

  scene "config-manager gives the node another configuration while a pod runs"
  config_is whole
  eventually 20 "each GPU is offered once" offers_gpus 3
  eventually 30 "and the label follows" has_feature gpu.replicas 1
  config_is wrong
  eventually 20 "a wrong name is reported" sidecar_says "specified config wrong does not exist" "the previous configuration stays in use: whole"
  check "and changes nothing" offers_gpus 3
  step labelled "$NVIDIA_NODE: nvidia.com/device-plugin.config-"
  kube label node $NVIDIA_NODE nvidia.com/device-plugin.config- > /dev/null
  eventually 20 "without the label, the default is used" offers_gpus 12
  check "no container was restarted" equals "$(starts_of)" "$before"
  check "the pod still runs" is_running sliced
  kube delete pod sliced --wait > /dev/null
  kube delete -n $NVIDIA_NAMESPACE -f "$CLUSTER_DIR/nvidia.objects.yaml" --wait > /dev/null

  scene "NVIDIA's static manifest with Divvy's image"
  sed "s|image: .*|image: $(plugin_image)|" "$(nvidia_module)/deployments/static/nvidia-device-plugin.yml" |
    sed "s|^      tolerations:|      nodeSelector: {kubernetes.io/hostname: $NVIDIA_NODE}\n&|" > "$CLUSTER_DIR/nvidia-static.yaml"
  kube apply -f "$CLUSTER_DIR/nvidia-static.yaml" > /dev/null
  with_simulator kube-system nvidia-device-plugin-daemonset nvidia-device-plugin-ctr "$root"
  eventually 60 "each GPU is offered once" offers_gpus 3
  kube delete -f "$CLUSTER_DIR/nvidia-static.yaml" --wait > /dev/null
  kube delete namespace $NVIDIA_NAMESPACE --wait > /dev/null
  kube delete crd nodefeatures.nfd.k8s-sigs.io > /dev/null
  kube label node $NVIDIA_NODE nvidia.com/gpu.present- gpushare=true > /dev/null
  eventually 30 "Divvy's agent offers the node's memory again" has_units $NVIDIA_NODE
}
