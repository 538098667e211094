#!/usr/bin/env bash
# Starts the test cluster, or the missing parts of it. Needs root. Builds the programs first if they are missing. README.md lists the settings.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

need_root
need nsenter "Debian: util-linux" "to enter a node's mount namespace"
need openssl "Debian: openssl" "to make the cluster's certificates"
need ip "Debian: iproute2" "for the network of the pods"
need flock "Debian: util-linux" "so that only one script at a time changes the cluster"
[[ $NODES =~ ^[1-9]$ ]] || die "NODES=$NODES: use a number from 1 to 9"
[[ $AUTHORIZATION =~ ^(AlwaysAllow|RBAC)$ ]] || die "AUTHORIZATION=$AUTHORIZATION: use AlwaysAllow or RBAC"
[ "$SERVICE_ACCOUNTS" != 1 ] || [ "$KCM" = 1 ] || die "SERVICE_ACCOUNTS=1 needs KCM=1, because the controller manager creates the service accounts"
[ -n "$NODE_IP" ] || die "no address for the nodes; set NODE_IP to an address of this machine that is not a loopback address"
[ ${#CLUSTER_DIR} -le 50 ] || die "CLUSTER_DIR=$CLUSTER_DIR is too long: it contains Unix sockets, whose paths have at most 107 bytes"
if [ -e "$CLUSTER_DIR/settings" ] && ! grep -qF "AUTHORIZATION:=$AUTHORIZATION}" "$CLUSTER_DIR/settings"; then
  die "the cluster in $CLUSTER_DIR runs with another AUTHORIZATION; stop it first (cargo xtask cluster down)"
fi
"$CLUSTER_ROOT/build.sh" --present > /dev/null || "$CLUSTER_ROOT/build.sh"
mkdir -p "$CLUSTER_DIR"/{pids,pki,etcd} "$LOGS"
chmod 700 "$CLUSTER_DIR/pki"
exec 9> "$CLUSTER_DIR/lock"; flock 9   # two tests may start the cluster at once; started processes do not inherit the lock
cd "$CLUSTER_DIR"
for n in $(known_nodes); do   # existing nodes stay, even if NODES is smaller
  [ "${n#n}" -le "$NODES" ] || NODES=${n#n}
done
save_settings
[ -e sysctl.saved ] || for s in $NODE_SYSCTLS; do echo "$s $(cat "/proc/sys/$s")"; done > sysctl.saved

# ---- the pods' network
if [ ! -e "/sys/class/net/$BRIDGE" ]; then
  ip link add "$BRIDGE" type bridge 2> /dev/null || skip "no network bridge can be created (ip link add $BRIDGE type bridge); does root lack CAP_NET_ADMIN?"
fi
ip addr replace "$API_HOST/16" dev "$BRIDGE"
ip link set "$BRIDGE" up

# ---- credentials: one CA, a server certificate for the API server, its client certificate for kubelets, and tokens for users
if [ ! -e tokens.csv ]; then
  cd pki
  key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1" 2>/dev/null; }
  key ca.key
  openssl req -x509 -new -key ca.key -subj /CN=divvy-test-ca -days 365 -out ca.crt 2>/dev/null
  sign() { # NAME SUBJECT EXTENSIONS
    key "$1.key"
    openssl req -new -key "$1.key" -subj "$2" 2>/dev/null |
      openssl x509 -req -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -extfile <(echo "$3") -out "$1.crt" 2>/dev/null
  }
  sign apiserver /CN=kube-apiserver $'extendedKeyUsage=serverAuth\nsubjectAltName='"DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:$API_HOST,IP:$NODE_IP"
  sign kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client extendedKeyUsage=clientAuth
  openssl genrsa -out sa.key 2048 2>/dev/null
  openssl rsa -in sa.key -pubout -out sa.pub 2>/dev/null
  cd ..
  token() { printf '%s,%s,%s,"%s"\n' "$(openssl rand -hex 16)" "$1" "$1" "$2"; }
  (umask 077
    { token admin system:masters
    token system:kube-scheduler ""
    token system:kube-controller-manager ""
    for i in 1 2 3 4 5 6 7 8 9; do token "system:node:n$i" system:nodes; done
    token guest divvy:guests
    token divvy:extender ""
    token divvy:agent ""; } > tokens.new)
  mv tokens.new tokens.csv
  say "credentials created"
fi
kubeconfig admin.kubeconfig admin
kubeconfig guest.kubeconfig guest
kubeconfig scheduler.kubeconfig system:kube-scheduler
kubeconfig kcm.kubeconfig system:kube-controller-manager

# ---- control plane
e=http://127.0.0.1
start etcd etcd --data-dir "$CLUSTER_DIR/etcd" --unsafe-no-fsync --log-level warn \
  --listen-client-urls $e:$PORT_BASE --advertise-client-urls $e:$PORT_BASE \
  --listen-peer-urls $e:$((PORT_BASE + 1)) --initial-advertise-peer-urls $e:$((PORT_BASE + 1)) --initial-cluster default=$e:$((PORT_BASE + 1))

disabled=
[ "$SERVICE_ACCOUNTS" = 1 ] || disabled+=,ServiceAccount
[ "$KCM" = 1 ] || disabled+=,TaintNodesByCondition   # only the controller manager removes its not-ready taint
mode=$AUTHORIZATION extra=()
[ -n "$disabled" ] && extra+=("--disable-admission-plugins=${disabled#,}")
[ "$mode" = RBAC ] && { mode=Node,RBAC; extra+=(--enable-admission-plugins=NodeRestriction); }
[ -n "$RUNTIME_CONFIG" ] && extra+=("--runtime-config=$RUNTIME_CONFIG")
start kube-apiserver kube-apiserver --etcd-servers=$e:$PORT_BASE --bind-address="$API_HOST" --secure-port=$API_PORT --advertise-address="$NODE_IP" \
  --endpoint-reconciler-type=none --tls-cert-file=pki/apiserver.crt --tls-private-key-file=pki/apiserver.key \
  --client-ca-file=pki/ca.crt --kubelet-preferred-address-types=InternalIP --kubelet-client-certificate=pki/kubelet-client.crt --kubelet-client-key=pki/kubelet-client.key \
  --service-account-issuer=https://kubernetes.default.svc --service-account-key-file=pki/sa.pub --service-account-signing-key-file=pki/sa.key \
  --authorization-mode="$mode" --token-auth-file=tokens.csv --allow-privileged \
  --service-cluster-ip-range=10.0.0.0/24 --profiling=false --v="$LOG_LEVEL" "${extra[@]}" "${GATES[@]}"
wait_for "API server ready" 60 kube-apiserver kube get --raw /readyz
kube get namespace default > /dev/null 2>&1 || wait_for "namespace default" 30 kube-apiserver kube get namespace default

if [ "$KCM" = 1 ]; then
  extra=()   # with RBAC each controller has its own role, so it needs its own service account
  [ "$AUTHORIZATION" = RBAC ] && extra=(--use-service-account-credentials)
  start kube-controller-manager kube-controller-manager --kubeconfig=kcm.kubeconfig --authentication-kubeconfig=kcm.kubeconfig \
    --authorization-kubeconfig=kcm.kubeconfig --service-account-private-key-file=pki/sa.key --root-ca-file=pki/ca.crt \
    --leader-elect=false --bind-address=127.0.0.1 --secure-port=$((PORT_BASE + 4)) --cert-dir=pki --v="$LOG_LEVEL" "${extra[@]}" "${GATES[@]}"
fi

template=$SCHEDULER_TEMPLATE
[ -n "$template" ] || case $EXTENDER_URL in
  "" | none) template=$CLUSTER_ROOT/templates/scheduler.yaml.in ;;
  https://*) template=$CLUSTER_DIR/scheduler-tls.yaml.in ;;   # contains the certificates; install.sh creates it
  *) template=$CLUSTER_ROOT/templates/scheduler-divvy.yaml.in ;;
esac
alive kube-scheduler || fill "$template" KUBECONFIG="$CLUSTER_DIR/scheduler.kubeconfig" EXTENDER_URL="$EXTENDER_URL" > scheduler.yaml
start kube-scheduler kube-scheduler --config=scheduler.yaml --authentication-kubeconfig=scheduler.kubeconfig \
  --authorization-kubeconfig=scheduler.kubeconfig --bind-address=127.0.0.1 --secure-port=$((PORT_BASE + 3)) --cert-dir=pki --v="$LOG_LEVEL" "${GATES[@]}"

# ---- nodes
node_up() { # NODE INDEX
  local node=$1 index=$2 dir=$CLUSTER_DIR/$1 directory
  mkdir -p "$dir"/{containerd.d,cni/bin,cni/net.d,nri/plugins,nri/conf.d,sysctl,dev}
  for directory in $NODE_DIRECTORIES; do
    mkdir -p "$dir$directory"
    # A bind mount needs an existing target. down.sh removes the directories that are created here.
    local part=$directory missing=()
    while [ ! -e "$part" ]; do missing+=("$part"); part=$(dirname "$part"); done
    [ ${#missing[@]} -eq 0 ] || { mkdir -p "$directory"; printf '%s\n' "${missing[@]}" >> made-directories; }
  done

  # The holder only keeps the mount namespace alive. All other processes of the node join it.
  # shellcheck disable=SC2016
  start "$node.holder" unshare -m --propagation private bash -c '
    set -e
    dir=$1 directories=$2 sysctls=$3
    for f in $directories; do mount --bind "$dir$f" "$f"; done
    for s in $sysctls; do
      file=$dir/sysctl/${s//\//.}; cat "/proc/sys/$s" > "$file"; mount --bind "$file" "/proc/sys/$s"
    done
    # The node has its own /dev: a copy of the machine'"'"'s entries, to which device nodes can be added that only this node sees.
    mount -t tmpfs -o mode=755 "$(basename "$dir")-dev" "$dir/dev"
    for f in /dev/*; do
      if [ -d "$f" ] && [ ! -L "$f" ]; then mkdir "$dir$f"; mount --rbind "$f" "$dir$f"; else cp -a "$f" "$dir$f"; fi
    done
    mount --move "$dir/dev" /dev
    mount --make-rshared /
    touch "$dir/mounted"
    exec sleep infinity' holder "$dir" "$NODE_DIRECTORIES" "$NODE_SYSCTLS"
  wait_for "$node: namespace" 10 "$node.holder" test -e "$dir/mounted"

  install -m 755 "$CLUSTER_ROOT/templates/cni.sh" "$dir/cni/bin/bridge-of-$BRIDGE"
  fill "$CLUSTER_ROOT/templates/cni.json.in" TYPE="bridge-of-$BRIDGE" BRIDGE="$BRIDGE" NETWORK="$NETWORK" STATE="$CLUSTER_DIR" > "$dir/cni/net.d/10-bridge.conflist"
  fill "$CLUSTER_ROOT/templates/containerd.toml.in" NODE_DIR="$dir" BIN="$CLUSTER_BIN" PAUSE_IMAGE=$PAUSE_IMAGE > "$dir/containerd.toml"
  start "$node.containerd" nsenter -t "$(cat "$(pid_file "$node.holder")")" -m -- containerd --config "$dir/containerd.toml"
  wait_for "$node: containerd ready" 30 "$node.containerd" in_node "$node" "$CLUSTER_BIN/ctr" version
  import_images "$node" "$CLUSTER_BIN/images.tar"

  local root=/ qos=false enforce='[]' c
  if [ "$QOS_CGROUPS" = 1 ]; then
    root=/$CGROUP_PREFIX-$node qos=true enforce='[pods]'
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
      mkdir -p "/sys/fs/cgroup$root"
    else
      for c in /sys/fs/cgroup/*/; do
        [ "$c" = /sys/fs/cgroup/unified/ ] && continue
        mkdir -p "$c$root"
        [ -e "$c$root/cpuset.cpus" ] && { cat "$c/cpuset.cpus" > "$c$root/cpuset.cpus"; cat "$c/cpuset.mems" > "$c$root/cpuset.mems"; }
      done
    fi
  fi
  local port=$((PORT_BASE + 10 * index))
  fill "$CLUSTER_ROOT/templates/kubelet.yaml.in" NODE_IP="$NODE_IP" PORT=$port HEALTH_PORT=$((port + 1)) PKI="$CLUSTER_DIR/pki" \
    CGROUP_ROOT="$root" QOS=$qos ENFORCE="$enforce" > "$dir/kubelet.yaml"
  kubeconfig "$node.kubeconfig" "system:node:$node"
  start "$node.kubelet" nsenter -t "$(cat "$(pid_file "$node.holder")")" -m -- kubelet --config="$dir/kubelet.yaml" \
    --kubeconfig="$CLUSTER_DIR/$node.kubeconfig" --hostname-override="$node" --node-ip="$NODE_IP" --cert-dir=/var/lib/kubelet/pki \
    --v="$LOG_LEVEL" "${GATES[@]}"
}
ready() { [ "$(kube get node "$1" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}{.spec.taints[*].key}')" = True ]; }
i=0; for n in $(nodes); do i=$((i + 1)); node_up "$n" $i; done
# The first check matters after a restart, when the node object may still say Ready.
for n in $(nodes); do
  wait_for "$n: kubelet healthy" 60 "$n.kubelet" kube get --raw "/api/v1/nodes/$n/proxy/healthz"
  wait_for "$n: node Ready" 60 "$n.kubelet" ready "$n"
done
say "up; export KUBECONFIG=$CLUSTER_DIR/admin.kubeconfig"
