#!/usr/bin/env bash
# Stops every process of the test cluster, restores what up.sh changed on the machine, removes $CLUSTER_DIR, and checks whether anything is
# left. If so, it prints what is left and fails.
#   down.sh [--keep-logs]     --keep-logs: keep $CLUSTER_DIR/logs
set -uo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
[ -d "$CLUSTER_DIR" ] || { echo "no cluster runs: $CLUSTER_DIR does not exist"; exit 0; }
[ "$(id -u)" = 0 ] || die "only root can stop the cluster"
mkdir -p "$CLUSTER_DIR/pids"

for n in $(known_nodes); do stop "$n.agent"; done
for n in $(known_nodes); do stop "$n.kubelet"; done
for n in $(known_nodes); do
  # Stop the containers: first the tasks that containerd knows, then all processes in the cgroups that this node's kubelet created.
  alive "$n.containerd" && for task in $(in_node "$n" "$CLUSTER_BIN/ctr" -n k8s.io task ls -q 2>/dev/null); do
    in_node "$n" "$CLUSTER_BIN/ctr" -n k8s.io task kill -s KILL "$task" > /dev/null 2>&1
  done
  find /sys/fs/cgroup/*/"$CGROUP_PREFIX-$n" /sys/fs/cgroup/"$CGROUP_PREFIX-$n" -name cgroup.procs -exec cat {} + 2>/dev/null |
    sort -u | while read -r pid; do kill -9 "$pid" 2>/dev/null; done
  stop "$n.containerd"
done
for name in divvy-extender kube-scheduler kube-controller-manager kube-apiserver etcd; do stop $name; done
for n in $(known_nodes); do stop "$n.holder" 1; done
# The remaining processes, such as the shims, carry the cluster's mark in their environment.
for environ in /proc/[0-9]*/environ; do
  pid=${environ#/proc/}; pid=${pid%/environ}
  [ "$pid" != $$ ] && grep -qzxF "$MARK" "$environ" 2>/dev/null && kill -9 "$pid" 2>/dev/null
done

ip link del "$BRIDGE" 2> /dev/null

sleep 0.2
find /sys/fs/cgroup -depth -type d -path "*/$CGROUP_PREFIX-n[0-9]*" -exec rmdir {} + 2>/dev/null
for directory in /sys/fs/cgroup/*/k8s.io; do [ -d "$directory" ] && find "$directory" -depth -type d -exec rmdir {} + 2>/dev/null; done
while read -r key value; do
  [ "$(cat "/proc/sys/$key")" = "$value" ] || echo "$value" > "/proc/sys/$key"
done < <(cat "$CLUSTER_DIR/sysctl.saved" 2>/dev/null)
# Removing a directory that is a mount point in another mount namespace unmounts it there, so do not do it while another test cluster runs.
others=$(grep -lzs '^DIVVY_TEST_CLUSTER=' /proc/[0-9]*/environ | head -1)
if [ -e "$CLUSTER_DIR/made-directories" ] && [ -z "$others" ]; then
  sort -ru "$CLUSTER_DIR/made-directories" | while read -r directory; do rmdir "$directory" 2>/dev/null; done
fi
if [ "${1:-}" = --keep-logs ]; then
  find "$CLUSTER_DIR" -mindepth 1 -maxdepth 1 ! -name logs -exec rm -rf --one-file-system {} +
else
  rm -rf --one-file-system "$CLUSTER_DIR"
fi

# ---- is anything left?
left=()
for environ in /proc/[0-9]*/environ; do
  pid=${environ#/proc/}; pid=${pid%/environ}
  if [ "$pid" != $$ ] && grep -qzxF "$MARK" "$environ" 2> /dev/null; then left+=("process $pid: $(tr '\0' ' ' < "/proc/$pid/cmdline" | cut -c1-80)"); fi
done
for mountinfo in /proc/[0-9]*/mountinfo; do   # containers do not carry the mark, but live in namespaces with the cluster's mounts
  pid=${mountinfo#/proc/}; pid=${pid%/mountinfo}
  if grep -qsF "$CLUSTER_DIR/n" "$mountinfo"; then left+=("mounts of the cluster in process $pid: $(tr '\0' ' ' < "/proc/$pid/cmdline" | cut -c1-80)"); fi
done
while read -r directory; do left+=("cgroup $directory"); done < <(find /sys/fs/cgroup -type d -name "$CGROUP_PREFIX-n[0-9]*" 2> /dev/null)
[ ! -e "/sys/class/net/$BRIDGE" ] || left+=("network bridge $BRIDGE")
[ "${1:-}" = --keep-logs ] || [ ! -e "$CLUSTER_DIR" ] || left+=("directory $CLUSTER_DIR")
if [ ${#left[@]} -gt 0 ]; then
  printf 'left behind: %s\n' "${left[@]}" >&2
  die "the cluster is not stopped completely"
fi
say "down; no process, mount, cgroup, or directory is left"
