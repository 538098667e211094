# shellcheck shell=bash disable=SC2154
# Checks of NVIDIA's Helm chart and static manifests with Divvy's image in place of NVIDIA's, on the node with three NVIDIA GPUs. Apart from the
# image, only what this cluster lacks is added (nvidia_objects.py). Each shape is one way in which users deploy NVIDIA's programs: it is applied,
# used by a pod, and removed. install.sh sources this file.

NVIDIA_PLUGIN=github.com/NVIDIA/k8s-device-plugin@$K8S_DEVICE_PLUGIN_VERSION
NVIDIA_NAMESPACE=nvidia-device-plugin
NVIDIA_NODE=n2
NVIDIA_FILES=$CLUSTER_DIR/nvidia   # the objects of the shape
FEATURE_FILE=/etc/kubernetes/node-feature-discovery/features.d/gfd
# What is left on a node: NVIDIA's programs also leave the CDI spec, for containers that are started again, and the mount of mount-shm. The feature
# file stays so that labels survive a restart.
CDI_SPEC=/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json
MPS_SHM=/run/nvidia/mps/shm
# The shapes that are a part of `cargo xtask cluster install`, and the others.
NVIDIA_FIRST="configurations mps static"
NVIDIA_OTHER="envvar index volume-mounts cdi-annotations cpu-manager mig-single mig-mixed no-driver static-cpu-manager static-service-account"
NVIDIA_OTHER+=" labels labels-mig-single labels-mig-mixed labels-once"
# Shapes that need NVIDIA's own programs, which are built only for them.
NVIDIA_OWN=from-nvidia

nvidia_plugin() { # SHAPE...
  local shape
  for shape in "$@"; do
    [[ " $NVIDIA_FIRST $NVIDIA_OTHER $NVIDIA_OWN " == *" $shape "* ]] || die "no shape is named $shape; known: $NVIDIA_FIRST $NVIDIA_OTHER $NVIDIA_OWN"
  done
  scene "Divvy's agent leaves the node to NVIDIA's manifests"
  mkdir -p "$NVIDIA_FILES"
  # A run that failed leaves its shape for people to look at.
  kube delete pods -l play=nvidia --wait > /dev/null
  [ ! -e "$NVIDIA_FILES/objects.json" ] || kube delete -f "$NVIDIA_FILES/objects.json" --ignore-not-found --wait > /dev/null
  step labelled "$NVIDIA_NODE: gpushare-, nvidia.com/gpu.present=true"
  kube label node $NVIDIA_NODE gpushare- nvidia.com/gpu.present=true --overwrite > /dev/null
  node_feature_crd
  for shape in "$@"; do
    LEFT=''
    DRIVER_ROOT=$(simulated_driver_root $NVIDIA_NODE "$MACHINES")
    "shape_${shape//-/_}"
    remove_shape
  done

  scene "Divvy's agent is on the node again"
  kube delete namespace $NVIDIA_NAMESPACE --ignore-not-found > /dev/null
  kube delete crd nodefeatures.nfd.k8s-sigs.io > /dev/null
  kube label node $NVIDIA_NODE nvidia.com/gpu.present- gpushare=true > /dev/null
  eventually 30 "Divvy's agent offers the node's memory again" has_units $NVIDIA_NODE
}

# ---- NVIDIA's objects with Divvy's image

# Print the directory of the version of NVIDIA's module that has the chart and the manifests.
nvidia_module() { GOFLAGS=-mod=mod go mod download -json "$NVIDIA_PLUGIN" | sed -n 's/^.*"Dir": "\(.*\)",$/\1/p'; }

# Apply the objects of NVIDIA's chart, with values from the standard input.
chart_is() { # ARGUMENT OF HELM...
  local image; image=$(plugin_image)
  kube get namespace $NVIDIA_NAMESPACE > /dev/null 2>&1 || kube create namespace $NVIDIA_NAMESPACE > /dev/null
  # Node Feature Discovery is another project, whose images are not on this machine.
  "${HELM:-$(type -P helm || echo "$CLUSTER_BIN/helm")}" template nvidia "$(nvidia_module)/deployments/helm/nvidia-device-plugin" \
    --namespace $NVIDIA_NAMESPACE --kube-version "$KUBERNETES_VERSION" --set nfd.enabled=false \
    --set "image.repository=${image%:*},image.tag=${image##*:}" --values - "$@" > "$NVIDIA_FILES/objects.yaml" || die "Helm did not render NVIDIA's chart"
  apply_shape $NVIDIA_NAMESPACE
}
# Apply one of NVIDIA's static manifests.
manifest_is() { # FILE NAMESPACE
  sed "s|NODE_NAME|$NVIDIA_NODE|" "$(nvidia_module)/deployments/static/$1" > "$NVIDIA_FILES/objects.yaml"
  apply_shape "$2"
}
apply_shape() { # NAMESPACE
  kube create -n "$1" --dry-run=client --validate=false -o json -f "$NVIDIA_FILES/objects.yaml" |
    NODE=$NVIDIA_NODE IMAGE=$(plugin_image) API_HOST=$API_HOST API_PORT=$API_PORT DRIVER_ROOT=$DRIVER_ROOT OWN=${OWN:-} \
      python3 "$CLUSTER_ROOT/nvidia_objects.py" > "$NVIDIA_FILES/objects.json" || die "NVIDIA's objects could not be read"
  kube apply -f "$NVIDIA_FILES/objects.json" > /dev/null
}

# Remove the shape's objects and pods, and check that nothing is left but the file or mount LEFT.
remove_shape() {
  kube delete pods -l play=nvidia --wait --timeout=60s > /dev/null
  kube delete -f "$NVIDIA_FILES/objects.json" --ignore-not-found --wait --timeout=120s > /dev/null
  eventually 60 "removed: no pod with the image is left" no_plugin_pods
  eventually 20 "the node offers no device" offers_nothing
  check "${LEFT:-nothing} is left on the node" equals "$(left_on_node)" "$LEFT"
  # shellcheck disable=SC2016
  in_node $NVIDIA_NODE bash -c '! mountpoint -q "$1" || umount "$1"; rm -rf "$1"' clear "$LEFT"
}
no_plugin_pods() { says_not "$(kube get pods -A -o 'jsonpath={..image}')" "$(plugin_image)"; }
offers_nothing() { equals "$(kube get node $NVIDIA_NODE -o 'jsonpath={.status.allocatable}' | grep -oE '"nvidia\.com/[^"]*":"[1-9][0-9]*"')" ""; }
left_on_node() {
  # shellcheck disable=SC2016
  in_node $NVIDIA_NODE bash -c 'shopt -s nullglob
    for path in /var/lib/kubelet/device-plugins/nvidia* /var/run/cdi/k8s.device-plugin.* "$1"/*; do echo "$path"; done
    ! mountpoint -q "$2" || echo "$2"' left "$(dirname $FEATURE_FILE)" $MPS_SHM
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

# ---- what is checked

offers() { # AMOUNT [RESOURCE]
  local resource=${2:-gpu}
  equals "$(kube get node $NVIDIA_NODE -o "jsonpath={.status.allocatable.nvidia\\.com/${resource//./\\.}}")" "$1"
}
# Start a pod with one device. What a pod says itself overrides a device plugin's variable, so the pod sets NVIDIA_VISIBLE_DEVICES only for a CDI spec.
wants_gpu() { # NAME [RESOURCE] [VISIBLE]
  local variables='[]'
  [ -z "${3:-}" ] || variables="[{name: NVIDIA_VISIBLE_DEVICES, value: $3}]"
  kube create -f - > /dev/null <<END
apiVersion: v1
kind: Pod
metadata: {name: $1, labels: {play: nvidia}}
spec:
  terminationGracePeriodSeconds: 2
  nodeSelector: {kubernetes.io/hostname: $NVIDIA_NODE}
  containers:
  - name: main
    image: $PROBE_IMAGE
    imagePullPolicy: Never
    args: [run, /dev/nvidia-caps]
    env: $variables
    resources: {limits: {nvidia.com/${2:-gpu}: 1}}
END
  step created "pod $1: 1 nvidia.com/${2:-gpu}"
  eventually 30 "the pod runs" is_running "$1"
}
# Print the id of the device that the kubelet gave a pod.
device_id() { # POD
  python3 -c '
import json, sys
entries = json.load(sys.stdin)["Data"]["PodDeviceEntries"]
print("".join(i for e in entries if e["PodUID"] == sys.argv[1] for ids in e["DeviceIDs"].values() for i in ids))
' "$(uid "$1")" < "$CLUSTER_DIR/$NVIDIA_NODE/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
}
sees_gpus() { equals "$(gpus_in "$1" | tr -cd ';')" "$2"; } # POD AND A ; FOR EACH GPU
has_capabilities() { equals "$(kube logs "$1" | grep -cE '^ +nvidia-cap[0-9]+ 510:[0-9]+$')" "$2"; } # POD NUMBER
is_not_set() { says_not "$(kube logs "$1")" "$2="; } # POD VARIABLE
has_feature() { # LABEL VALUE: check the NodeFeature object
  equals "$(kube get nodefeature -n $NVIDIA_NAMESPACE "nvidia-features-for-$NVIDIA_NODE" -o "jsonpath={.spec.labels.nvidia\\.com/${1//./\\.}}")" "$2"
}
says_feature() { says "$(in_node $NVIDIA_NODE cat $FEATURE_FILE)" "nvidia.com/$1=$2"; } # LABEL VALUE: check the feature file
config_is() { # NAME
  step labelled "$NVIDIA_NODE: nvidia.com/device-plugin.config=$1"
  kube label node $NVIDIA_NODE "nvidia.com/device-plugin.config=$1" --overwrite > /dev/null
}
no_config() {
  step labelled "$NVIDIA_NODE: nvidia.com/device-plugin.config-"
  kube label node $NVIDIA_NODE nvidia.com/device-plugin.config- > /dev/null
}
# Check the log of a container of the device plugin's pod. The chart gives the pods of its DaemonSets the same labels, so kubectl cannot find it by the DaemonSet.
plugin_says() { # CONTAINER TEXT...
  local container=$1 pod; shift
  pod=$(kube get pods -n $NVIDIA_NAMESPACE -o name | grep -E '/nvidia-nvidia-device-plugin-[a-z0-9]+$')
  says "$(kube logs -n $NVIDIA_NAMESPACE "$pod" -c "$container")" "$@"
}
starts_of() { kube get pods -n $NVIDIA_NAMESPACE -o 'jsonpath={range .items[*]}{.metadata.uid} {.status.containerStatuses[*].restartCount}{"\n"}{end}'; }
is_ready() { kube rollout status -n $NVIDIA_NAMESPACE "daemonset/nvidia-nvidia-device-plugin$1" --timeout=1s; } # SUFFIX

# ---- the shapes of the chart

shape_configurations() {
  scene "NVIDIA's chart with two configurations, CDI, and GPU feature discovery"
  LEFT=$CDI_SPEC
  local before
  chart_is --set nvidiaDriverRoot="$DRIVER_ROOT" <<'END'
deviceListStrategy: cdi-cri
gfd: {enabled: true}
config:
  default: sliced
  map:
    sliced: |-
      version: v1
      sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
    whole: |-
      version: v1
END
  eventually 60 "each of three GPUs is offered four times" offers 12
  wants_gpu sliced gpu all
  check "it sees one GPU, though it sets NVIDIA_VISIBLE_DEVICES=all" sees_gpus sliced ";"
  check "by CDI" report_has sliced main NVIDIA_VISIBLE_DEVICES=void 'nvidiactl 195:255' 'nvidia-uvm 511:0'
  eventually 30 "GPU feature discovery has written a NodeFeature object" has_feature gpu.replicas 4
  check "with the model" has_feature gpu.product NVIDIA-A100-SXM4-40GB-SHARED
  eventually 30 "all containers run" is_ready ""
  before=$(starts_of)

  scene "config-manager gives the node another configuration while a pod runs"
  config_is whole
  eventually 20 "each GPU is offered once" offers 3
  eventually 30 "and the label follows" has_feature gpu.replicas 1
  config_is wrong
  eventually 20 "a wrong name is reported" plugin_says nvidia-device-plugin-sidecar "specified config wrong does not exist" "the previous configuration stays in use: whole"
  check "and changes nothing" offers 3
  no_config
  eventually 20 "without the label, the default is used" offers 12
  check "no container was restarted" equals "$(starts_of)" "$before"
  check "the pod still runs" is_running sliced
}

shape_mps() {
  scene "NVIDIA's chart with sharing.mps"
  LEFT=$MPS_SHM
  PROGRAMS=$DRIVER_ROOT/programs
  mkdir "$PROGRAMS"
  install -m 755 "$CLUSTER_ROOT"/../lab/divvy-testkit/src/mps/nvidia-* "$PROGRAMS"
  chart_is <<'END'
gfd: {enabled: true}
config:
  default: shared
  map:
    shared: |-
      version: v1
      sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
    whole: |-
      version: v1
END
  eventually 60 "GPU feature discovery says that the node has MPS" has_feature mps.capable true
  check "nothing is offered before the control daemon serves" offers_nothing
  step labelled "$NVIDIA_NODE: nvidia.com/mps.capable=true, as Node Feature Discovery does"
  kube label node $NVIDIA_NODE nvidia.com/mps.capable=true > /dev/null
  eventually 60 "each of three GPUs is offered four times" offers 12
  check "each GPU is the control daemon's alone" equals "$(grep -c EXCLUSIVE_PROCESS "$PROGRAMS/calls")" 3
  check "a client gets a quarter of a GPU's memory" says "$(cat "$PROGRAMS/calls")" "set_default_device_pinned_mem_limit 0 10240M" \
    "set_default_device_pinned_mem_limit 2 3840M"
  wants_gpu client
  check "it is a client of the control daemon" report_has client main CUDA_MPS_PIPE_DIRECTORY=/mps/nvidia.com/gpu/pipe \
    'mount /mps/nvidia.com/gpu/pipe' 'mount /dev/shm'
  check "with the id of its GPU" report_has client main "NVIDIA_VISIBLE_DEVICES=$(device_id client | sed 's/::.*//')"
  kube delete pod client --wait > /dev/null
  config_is whole
  eventually 30 "with the other configuration, each GPU is offered once" offers 3
  eventually 30 "and is everyone's" gpus_are_open
  wants_gpu alone
  check "it is not a client" is_not_set alone CUDA_MPS_PIPE_DIRECTORY
  no_config
  eventually 30 "with the default, each is offered four times" offers 12
  step labelled "$NVIDIA_NODE: nvidia.com/mps.capable-"
  kube label node $NVIDIA_NODE nvidia.com/mps.capable- > /dev/null
  eventually 60 "without the control daemon, the GPUs are everyone's" gpus_are_open
}
# Check the last mode of each of the three GPUs.
gpus_are_open() { equals "$(grep nvidia-smi "$PROGRAMS/calls" | tail -n 3 | grep -c ' DEFAULT$')" 3; }

shape_envvar() {
  scene "NVIDIA's chart with its own values"
  chart_is < /dev/null
  eventually 60 "each of three GPUs is offered once" offers 3
  wants_gpu plain
  check "it gets the id of its GPU" report_has plain main "NVIDIA_VISIBLE_DEVICES=$(device_id plain)"
  check "and no device node: that is left to NVIDIA's container runtime" sees_gpus plain ""
}

shape_index() {
  scene "NVIDIA's chart with deviceIDStrategy=index"
  chart_is <<< 'deviceIDStrategy: index'
  eventually 60 "each of three GPUs is offered once" offers 3
  wants_gpu plain
  check "it gets the index of its GPU" report_has plain main "NVIDIA_VISIBLE_DEVICES=[012]"
}

shape_volume_mounts() {
  scene "NVIDIA's chart with deviceListStrategy=volume-mounts"
  chart_is <<< 'deviceListStrategy: volume-mounts'
  eventually 60 "each of three GPUs is offered once" offers 3
  wants_gpu plain
  check "its GPU is the name of a mount" report_has plain main NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices \
    "mount /var/run/nvidia-container-devices/$(device_id plain)"
}

shape_cdi_annotations() {
  scene "NVIDIA's chart with deviceListStrategy=cdi-annotations"
  LEFT=$CDI_SPEC
  chart_is --set nvidiaDriverRoot="$DRIVER_ROOT" <<< 'deviceListStrategy: cdi-annotations'
  eventually 60 "each of three GPUs is offered once" offers 3
  wants_gpu plain gpu all
  check "it sees one GPU, though it sets NVIDIA_VISIBLE_DEVICES=all" sees_gpus plain ";"
  check "by CDI" report_has plain main NVIDIA_VISIBLE_DEVICES=void 'nvidiactl 195:255' 'nvidia-uvm 511:0'
}

shape_cpu_manager() {
  scene "NVIDIA's chart with compatWithCPUManager=true"
  chart_is <<< 'compatWithCPUManager: true'
  passes_device_nodes
  check "with those of the driver" report_has plain main 'nvidiactl 195:255' 'nvidia-uvm 511:0'
}
passes_device_nodes() {
  eventually 60 "each of three GPUs is offered once" offers 3
  wants_gpu plain
  check "it gets the id of its GPU" report_has plain main "NVIDIA_VISIBLE_DEVICES=$(device_id plain)"
  check "and the device nodes of one GPU" sees_gpus plain ";"
}

# Give the node as many A100s as there are arguments: the profiles of a GPU's MIG devices (0: 1g.5gb, 2: 3g.20gb), or - for a GPU without MIG.
divide() { # PROFILES...
  local profiles profile gpu=0 gi minor=3 proc=$DRIVER_ROOT/proc/driver dev=$DRIVER_ROOT/dev/nvidia-caps
  mkdir -p "$proc/nvidia-caps" "$dev"
  printf 'v = 1\n[[node]]\nname = "%s"\n' $NVIDIA_NODE > "$DRIVER_ROOT/machines.toml"
  for profiles in "$@"; do
    printf '[[node.gpu]]\nmodel = "NVIDIA A100-SXM4-40GB"\nmemory_mib = 40960\n' >> "$DRIVER_ROOT/machines.toml"
    gi=0
    for profile in ${profiles#-}; do
      gi=$((gi + 1))
      printf '[[node.gpu.mig]]\ngpu_instance = %d\ncompute_instance = 0\nprofile = %d\n' $gi "$profile" >> "$DRIVER_ROOT/machines.toml"
      printf 'gpu%d/gi%d/access %d\ngpu%d/gi%d/ci0/access %d\n' $gpu $gi $minor $gpu $gi $((minor + 1)) >> "$proc/nvidia-caps/mig-minors"
      mkdir -p "$proc/nvidia/capabilities/gpu$gpu/mig/gi$gi/ci0"
      mknod -m 666 "$dev/nvidia-cap$minor" c 510 $minor; mknod -m 666 "$dev/nvidia-cap$((minor + 1))" c 510 $((minor + 1))
      minor=$((minor + 2))
    done
    gpu=$((gpu + 1))
  done
}

shape_mig_single() {
  scene "NVIDIA's chart with migStrategy=single: two GPUs are divided into two MIG devices each"
  LEFT=$CDI_SPEC
  divide "2 2" "2 2"
  chart_is --set nvidiaDriverRoot="$DRIVER_ROOT" <<< '{migStrategy: single, deviceListStrategy: cdi-cri, gfd: {enabled: true}}'
  eventually 60 "each MIG device is offered as a GPU" offers 4
  wants_gpu part gpu all
  check "the kubelet gave it a MIG device" says "$(device_id part)" MIG-
  check "it sees the GPU of its MIG device" sees_gpus part ";"
  check "and two capabilities" has_capabilities part 2
  eventually 30 "the labels name the strategy" has_feature mig.strategy single
  check "the model is that of the MIG devices" has_feature gpu.product NVIDIA-A100-SXM4-40GB-MIG-3g.20gb
  check "which are counted" has_feature gpu.count 4
}

shape_mig_mixed() {
  scene "NVIDIA's chart with migStrategy=mixed: one of two GPUs is divided"
  LEFT=$CDI_SPEC
  divide "0 0 2" -
  chart_is --set nvidiaDriverRoot="$DRIVER_ROOT" <<< '{migStrategy: mixed, deviceListStrategy: cdi-cri, gfd: {enabled: true}}'
  eventually 60 "the GPU that is not divided is offered" offers 1
  eventually 10 "and the MIG devices by their profiles" offers 2 mig-1g.5gb
  eventually 10 "the larger one, too" offers 1 mig-3g.20gb
  wants_gpu part mig-3g.20gb all
  check "it sees the GPU of its MIG device" equals "$(gpus_in part)" " nvidia0 195:0;"
  check "and two capabilities" has_capabilities part 2
  wants_gpu whole gpu all
  check "it sees the other GPU" equals "$(gpus_in whole)" " nvidia1 195:1;"
  check "and no capability" has_capabilities whole 0
  eventually 30 "the labels name the strategy" has_feature mig.strategy mixed
  check "the MIG devices are counted" has_feature mig-1g.5gb.count 2
  check "and the GPUs" has_feature gpu.count 2
}

shape_no_driver() {
  scene "NVIDIA's chart with failOnInitError=false on a node without a driver"
  DRIVER_ROOT=
  chart_is <<< '{failOnInitError: false, gfd: {enabled: true}}'
  eventually 60 "the device plugin runs" is_ready ""
  eventually 30 "and GPU feature discovery" is_ready -gpu-feature-discovery
  sleep 3
  check "neither has ended" equals "$(starts_of | cut -d' ' -f2 | sort -u)" 0
  check "nothing is offered" offers_nothing
}

shape_from_nvidia() {
  scene "NVIDIA's own program serves NVIDIA's chart"
  LEFT=$CDI_SPEC
  local first; build_nvidia_programs
  OWN=$CLUSTER_BIN/nvidia-device-plugin whole_gpus_are_offered "Registered device plugin for 'nvidia.com/gpu'"
  wants_gpu first gpu all
  check "it sees one GPU" sees_gpus first ";"
  first=$(gpus_in first)

  scene "The image becomes Divvy's while the pod runs"
  whole_gpus_are_offered '"registered nvidia.com/gpu'
  check "the pod's container was not restarted" equals "$(restarts_of first)" 0
  wants_gpu second gpu all
  check "a new pod sees one GPU" sees_gpus second ";"
  check "and not that of the first" refused_with expected equals "$(gpus_in second)" "$first"
  step killed "the program of the first pod"
  kill_program first
  eventually 30 "it is started again" has_restarts first 1
  eventually 30 "and runs" is_running first
  check "on the same GPU" equals "$(gpus_in first)" "$first"

  scene "The image becomes NVIDIA's again"
  OWN=$CLUSTER_BIN/nvidia-device-plugin whole_gpus_are_offered "Registered device plugin for 'nvidia.com/gpu'"
  check "no container was restarted" equals "$(restarts_of first)$(restarts_of second)" 10
  wants_gpu third gpu all
  check "a new pod sees one GPU" sees_gpus third ";"
  check "three pods have three GPUs" equals "$(for pod in first second third; do gpus_in $pod; done | tr ';' '\n' | sort -u | grep -c .)" 3
}
whole_gpus_are_offered() { # TEXT IN THE LOG
  chart_is --set nvidiaDriverRoot="$DRIVER_ROOT" --set "cdi.nvidiaHookPath=$CLUSTER_BIN/nvidia-cdi-hook" <<< 'deviceListStrategy: cdi-cri'
  eventually 60 "one pod has taken the place of the other" is_ready ""
  eventually 60 "its log says: $1" plugin_says nvidia-device-plugin-ctr "$1"
  eventually 60 "each of three GPUs is offered once" offers 3
}
restarts_of() { field "$1" '.status.containerStatuses[0].restartCount'; }
has_restarts() { equals "$(restarts_of "$1")" "$2"; }
kill_program() { # POD
  local pid id; id=$(field "$1" '.status.containerStatuses[0].containerID')
  for pid in $(pids_of "/probe run" $NVIDIA_NODE); do ! grep -q "${id##*/}" "/proc/$pid/cgroup" || kill -9 "$pid"; done
}

# ---- NVIDIA's static manifests

shape_static() {
  scene "NVIDIA's nvidia-device-plugin.yml"
  manifest_is nvidia-device-plugin.yml kube-system
  eventually 60 "each of three GPUs is offered once" offers 3
  wants_gpu plain
  check "it gets the id of its GPU" report_has plain main "NVIDIA_VISIBLE_DEVICES=$(device_id plain)"
}
shape_static_cpu_manager() {
  scene "NVIDIA's nvidia-device-plugin-compat-with-cpumanager.yml"
  manifest_is nvidia-device-plugin-compat-with-cpumanager.yml kube-system
  passes_device_nodes
}
shape_static_service_account() {
  scene "NVIDIA's nvidia-device-plugin-privileged-with-service-account.yml"
  # It contains the namespace.
  kube delete namespace $NVIDIA_NAMESPACE --ignore-not-found > /dev/null
  manifest_is nvidia-device-plugin-privileged-with-service-account.yml $NVIDIA_NAMESPACE
  passes_device_nodes
}
shape_labels() {
  scene "NVIDIA's gpu-feature-discovery-daemonset.yaml"
  LEFT=$FEATURE_FILE
  manifest_is gpu-feature-discovery-daemonset.yaml default
  eventually 60 "the feature file names the model" says_feature gpu.product NVIDIA-A100-SXM4-40GB
  check "and counts its GPUs" says_feature gpu.count 2
}
shape_labels_mig_single() {
  scene "NVIDIA's gpu-feature-discovery-daemonset-with-mig-single.yaml"
  LEFT=$FEATURE_FILE
  divide "2 2" "2 2"
  manifest_is gpu-feature-discovery-daemonset-with-mig-single.yaml default
  eventually 60 "the feature file names the strategy" says_feature mig.strategy single
  check "the model is that of the MIG devices" says_feature gpu.product NVIDIA-A100-SXM4-40GB-MIG-3g.20gb
  check "which are counted" says_feature gpu.count 4
}
shape_labels_mig_mixed() {
  scene "NVIDIA's gpu-feature-discovery-daemonset-with-mig-mixed.yaml"
  LEFT=$FEATURE_FILE
  divide "0 0 2" -
  manifest_is gpu-feature-discovery-daemonset-with-mig-mixed.yaml default
  eventually 60 "the feature file names the strategy" says_feature mig.strategy mixed
  check "the MIG devices are counted" says_feature mig-1g.5gb.count 2
}
shape_labels_once() {
  scene "NVIDIA's gpu-feature-discovery-job.yaml.template"
  LEFT=$FEATURE_FILE
  manifest_is gpu-feature-discovery-job.yaml.template default
  eventually 60 "the Job is complete" kube wait --for=condition=complete job/gpu-feature-discovery --timeout=1s
  check "the feature file has the model" says_feature gpu.product NVIDIA-A100-SXM4-40GB
}
