#!/bin/bash
# A CNI plugin for one machine. It creates a pair of network devices: one end is in the pod's network namespace, the other on the cluster's
# bridge. There is no route beyond the machine, and there are no services.
set -euo pipefail
config=$(cat)
value() { sed -nE "s/.*\"$1\": *\"([^\"]*)\".*/\1/p" <<< "$config"; }
case $CNI_COMMAND in
  ADD)
    state=$(value state) network=$(value network)
    exec 9> "$state/cni.lock"; flock 9
    number=$(($(cat "$state/cni.last" 2> /dev/null || echo 0) + 1))
    echo $number > "$state/cni.last"
    address=$network.$((number / 250 + 1)).$((number % 250 + 2))
    device=$(value bridge)p$number
    inside() { nsenter --net="$CNI_NETNS" ip "$@"; }
    inside link add "$CNI_IFNAME" type veth peer name "$device" netns $$
    ip link set "$device" master "$(value bridge)" up
    inside addr add "$address/16" dev "$CNI_IFNAME"
    inside link set "$CNI_IFNAME" up
    inside route add default via "$network.0.1"
    echo '{"cniVersion":"1.0.0","interfaces":[{"name":"'"$CNI_IFNAME"'","sandbox":"'"$CNI_NETNS"'"}],"ips":[{"address":"'"$address"'/16","gateway":"'"$network"'.0.1","interface":0}]}' ;;
  VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]}' ;;
  *) ;;   # both devices disappear with the namespace
esac
