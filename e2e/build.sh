#!/usr/bin/env bash
# Builds the programs of the test cluster into $CLUSTER_BIN. A program that exists in the wanted version is not built again.
#   ./build.sh [NAME...]      build all programs, or only those named (etcd runc containerd ... kubelet images). NVIDIA's own nvidia-device-plugin
#                             and nvidia-cdi-hook are built only if they are named
#   ./build.sh --check        change nothing; check that versions.env and go/*/go.mod agree
#   ./build.sh --present      change nothing; check that all programs exist
# Needs: go (at least the version in the `go` line of go/*/go.mod), gcc and pkg-config (only for runc), rustc (for the test images). Exit status 77:
# one of them, or the module proxy, is missing.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=lib.sh
. "$here/lib.sh"

# module NAME: print the directory below go/, the module, and the version
module() {
  case $1 in
    etcd) echo etcd go.etcd.io/etcd/server/v3 "$ETCD_VERSION" ;;
    runc) echo runc github.com/opencontainers/runc "$RUNC_VERSION" ;;
    containerd | containerd-shim-runc-v2 | ctr) echo containerd github.com/containerd/containerd/v2 "$CONTAINERD_VERSION" ;;
    helm) echo helm helm.sh/helm/v3 "$HELM_VERSION" ;;
    nvidia-*) echo k8s-device-plugin github.com/NVIDIA/k8s-device-plugin "$K8S_DEVICE_PLUGIN_VERSION" ;;
    kube*) echo kubernetes k8s.io/kubernetes "$KUBERNETES_VERSION" ;;
    *) die "no program is named $1; known: $PROGRAMS images $NVIDIA_PROGRAMS" ;;
  esac
}

# If a version changed only in a go.mod file, the programs would have other versions than the name of their directory says.
for p in etcd runc containerd helm kubelet nvidia-device-plugin; do
  read -r directory path version < <(module $p)
  grep -qE "^[[:space:]]*(require )?$path $version( |$)" "$here/go/$directory/go.mod" ||
    die "versions.env wants $path $version, go/$directory/go.mod has $(grep -oE "$path v[^ ]+" "$here/go/$directory/go.mod" | head -1)"
done
staging=v0.${KUBERNETES_VERSION#v1.}
if grep -E '^[[:space:]]*k8s.io/[a-z-]+ => ' "$here/go/kubernetes/go.mod" | grep -v " $staging$"; then
  die "go/kubernetes/go.mod: these replace lines are not at $staging, the staging version of $KUBERNETES_VERSION"
fi
[ "${1:-}" != --check ] || { echo "versions.env and go/*/go.mod agree"; exit 0; }

only_look=0
[ "${1:-}" != --present ] || { only_look=1; shift; }
wanted=("$@")
[ ${#wanted[@]} -gt 0 ] || read -ra wanted <<< "$PROGRAMS images"
images_version=$(sha256sum "$here/image/probe.rs" "$here/image/pack.sh" | sha256sum | cut -c1-12)
wanted_version() { # NAME
  if [ "$1" = images ]; then echo "$images_version"; else module "$1" | cut -d' ' -f3; fi
}
present() { # NAME: report whether it exists in the wanted version
  local file=$1; [ "$1" != images ] || file=images.tar
  [ -e "$CLUSTER_BIN/$file" ] && [ "$(cat "$CLUSTER_BIN/.$1.version" 2> /dev/null)" = "$(wanted_version "$1")" ]
}

missing=()
for name in "${wanted[@]}"; do
  [ "$name" = images ] || module "$name" > /dev/null
  present "$name" || missing+=("$name")
done
[ ${#missing[@]} -gt 0 ] || { echo "build: all ${#wanted[@]} are present in $CLUSTER_BIN"; exit 0; }
[ $only_look = 0 ] || { echo "build: missing in $CLUSTER_BIN: ${missing[*]}"; exit 1; }
[ "$(uname -sm)" = "Linux x86_64" ] || skip "the cluster needs Linux x86_64, but this machine is $(uname -sm)"
mkdir -p "$CLUSTER_BIN"
exec 9> "$CLUSTER_BIN/.lock"
flock -n 9 || { echo "waiting for another build into $CLUSTER_BIN"; flock 9; }

echo "build: ${#missing[@]} of ${#wanted[@]} are missing: ${missing[*]}"
[ ${#missing[@]} -lt 5 ] || echo "build: the first time takes about 6 minutes of download and compilation on 2 cores"
began=$SECONDS number=0

go_ready= # the directories whose modules have been downloaded
need_module() { # DIRECTORY MODULE
  [[ " $go_ready " != *" $1 "* ]] || return 0
  need go "https://go.dev/dl, at least $(sed -n 's/^go //p' "$here/go/$1/go.mod")" "to build Kubernetes, containerd, runc, etcd, Helm, and NVIDIA's programs"
  local text
  text=$(cd "$here/go/$1" && go mod download "$2" 2>&1) ||
    skip "go could not download $2; it needs a module proxy (GOPROXY=$(go env GOPROXY)) and go at least $(sed -n 's/^go //p' "$here/go/$1/go.mod")
  go said: $(tail -n 3 <<< "$text")"
  go_ready+=" $1"
}

# build NAME PACKAGE CGO TAGS LDFLAGS
# -s -w keep debug information out of the program; -dwarf=false does not create it at all, which takes a tenth off the time.
build() {
  local name=$1 package=$2 cgo=$3 tags=$4 ldflags=$5 start=$SECONDS directory path version pid
  present "$name" && return 0
  read -r directory path version < <(module "$name")
  need_module "$directory" "$path"
  number=$((number + 1))
  echo "[$number/${#missing[@]}] $name $version ..."
  (cd "$here/go/$directory" && CGO_ENABLED=$cgo nice go build -trimpath -tags "$tags" -gcflags all=-dwarf=false -ldflags "-s -w $ldflags" -o "$CLUSTER_BIN/$name.new" "$package") \
    > "$CLUSTER_BIN/.$name.log" 2>&1 9>&- & pid=$!
  while kill -0 $pid 2> /dev/null; do
    sleep 1
    [ $(((SECONDS - start) % 30)) -ne 29 ] || echo "      $name: $((SECONDS - start)) s$(tail -n 1 "$CLUSTER_BIN/.$name.log" | sed 's/^/, /' | cut -c1-100)"
  done
  wait $pid || { tail -n 20 "$CLUSTER_BIN/.$name.log" >&2; die "$name was not built; go's full output is in $CLUSTER_BIN/.$name.log"; }
  mv "$CLUSTER_BIN/$name.new" "$CLUSTER_BIN/$name"
  echo "$version" > "$CLUSTER_BIN/.$name.version"
  rm -f "$CLUSTER_BIN/.$name.log"
  echo "[$number/${#missing[@]}] $name $version: built in $((SECONDS - start)) s"
}

# The first stage of runc is written in C, and runc enforces the seccomp profile of every pod sandbox. Therefore it needs cgo and libseccomp. If
# libseccomp's development package is not installed, it is unpacked next to the programs, without being installed.
libseccomp() {
  pkg-config --exists libseccomp && return 0
  local sysroot=$CLUSTER_BIN/libseccomp download
  [ -d "$sysroot" ] || {
    command -v apt-get dpkg > /dev/null || skip "libseccomp's headers and static library are missing (Fedora: libseccomp-devel libseccomp-static); runc needs them"
    download=$(mktemp -d)
    (cd "$download" && apt-get download -q libseccomp-dev > /dev/null 2>&1 && dpkg -x libseccomp-dev_*.deb "$sysroot.new") ||
      { rm -rf "$download"; skip "libseccomp-dev could not be downloaded, but runc needs it; run apt-get update, or apt-get install libseccomp-dev"; }
    mv "$sysroot.new" "$sysroot"
    rm -rf "$download"
  }
  export PKG_CONFIG_SYSROOT_DIR=$sysroot PKG_CONFIG_ALLOW_SYSTEM_CFLAGS=1 PKG_CONFIG_ALLOW_SYSTEM_LIBS=1
  PKG_CONFIG_PATH=$(dirname "$(find "$sysroot" -name libseccomp.pc)"); export PKG_CONFIG_PATH
}

build_images() {
  local start=$SECONDS
  need rustc "https://rustup.rs" "to build the test images"
  need gcc "Debian: build-essential" "to link the test images"
  number=$((number + 1))
  rustc --edition 2024 -O -C target-feature=+crt-static -C strip=symbols -o "$CLUSTER_BIN/probe" "$here/image/probe.rs"
  "$here/image/pack.sh" "$CLUSTER_BIN/probe" "$CLUSTER_BIN/images.tar" "$PAUSE_IMAGE" "$PROBE_IMAGE"
  echo "$images_version" > "$CLUSTER_BIN/.images.version"
  echo "[$number/${#missing[@]}] images $images_version: built in $((SECONDS - start)) s"
}

# Without gitVersion the programs report the version v0.0.0-master and refuse to work with each other.
minor=${KUBERNETES_VERSION#v1.}; minor=${minor%%.*}
p=k8s.io/component-base/version
stamp="-X $p.gitVersion=$KUBERNETES_VERSION -X $p.gitMajor=1 -X $p.gitMinor=$minor -X $p.gitTreeState=clean"
for name in "${missing[@]}"; do
  case $name in
    etcd) build etcd go.etcd.io/etcd/server/v3 0 "" "" ;;
    runc)
      need gcc "Debian: build-essential" "to build runc"
      need pkg-config "Debian: pkg-config" "to build runc"
      libseccomp
      build runc github.com/opencontainers/runc 1 "seccomp netgo osusergo" "-X main.version=${RUNC_VERSION#v} -extldflags -static" ;;
    containerd | containerd-shim-runc-v2 | ctr)
      build "$name" "github.com/containerd/containerd/v2/cmd/$name" 0 "no_btrfs no_zfs no_aufs no_devmapper" \
        "-X github.com/containerd/containerd/v2/version.Version=$CONTAINERD_VERSION" ;;
    helm) build helm helm.sh/helm/v3/cmd/helm 0 "" "-X helm.sh/helm/v3/internal/version.version=$HELM_VERSION" ;;
    nvidia-*)
      need gcc "Debian: build-essential" "to build NVIDIA's programs, which load the driver's library"
      package=github.com/NVIDIA/k8s-device-plugin/cmd/$name
      [ "$name" != nvidia-cdi-hook ] || package=github.com/NVIDIA/nvidia-container-toolkit/cmd/$name
      # NVML's functions are resolved when they are called, because this machine has no driver.
      build "$name" "$package" 1 "netgo osusergo" \
        "-extldflags=-Wl,-z,lazy -X github.com/NVIDIA/k8s-device-plugin/internal/info.version=$K8S_DEVICE_PLUGIN_VERSION" ;;
    images) build_images ;;
    *) build "$name" "k8s.io/kubernetes/cmd/$name" 0 "" "$stamp" ;;
  esac
done
echo "build: $((SECONDS - began)) s, in $CLUSTER_BIN"
