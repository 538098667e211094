# shellcheck shell=bash disable=SC2034
# Functions for checks on the cluster; source this file after lib.sh. The functions print each step, run checks, and count them. `finish` ends the
# script with status 1 if a check failed.

CHECKS=0 FAILURES=0
# shellcheck disable=SC1091
. "$CLUSTER_DIR/divvy.settings" 2> /dev/null || die "Divvy does not run on the cluster; run cargo xtask cluster divvy"
DIVVY=$DIVVY_BIN/divvy
export KUBECONFIG=$CLUSTER_DIR/admin.kubeconfig

now() { echo $(($(date +%s%N) / 1000000)); }   # milliseconds
scene() { printf '\n== %s\n' "$*"; }
step() { printf '%10s  %s\n' "$1" "${*:2}"; }
measured() { printf '%10s  %s\n' measured "$*"; }
shown() { sed 's/^/            /'; }
check() { # TEXT COMMAND...: run a check; continue even if it fails
  local text=$1 output; shift
  CHECKS=$((CHECKS + 1))
  if output=$("$@" 2>&1); then
    printf '        ok  %s\n' "$text"
  else
    FAILURES=$((FAILURES + 1))
    printf '    FAILED  %s\n' "$text"
    printf '%s\n' "${output:-(nothing was found)}" | tail -n 25 | sed 's/^/            found: /'
  fi
}
# Wait for something that must happen. This is also a check; if it fails, the script ends.
eventually() { # SECONDS TEXT COMMAND...
  local limit=$1 text=$2 end output; shift 2
  end=$(($(now) + limit * 1000))
  until output=$("$@" 2>&1); do
    [ "$(now)" -lt $end ] || { check "$text (within $limit s)" "$@"; kube get pods -A -o wide; finish; }
    sleep 0.05
  done
  CHECKS=$((CHECKS + 1))
  printf '        ok  %s\n' "$text"
}
finish() {
  scene "$((CHECKS - FAILURES)) of $CHECKS checks passed"
  [ $FAILURES -eq 0 ]; exit $?
}

says() { # TEXT PART...: check that the text contains every part
  local text=$1 part; shift
  for part in "$@"; do [[ $text == *"$part"* ]] || { printf 'no "%s" in:\n%s\n' "$part" "$text"; return 1; }; done
}
says_not() { # TEXT PART...: check that the text contains none of the parts
  local text=$1 part; shift
  for part in "$@"; do [[ $text != *"$part"* ]] || { printf '"%s" is in:\n%s\n' "$part" "$text"; return 1; }; done
}
equals() { [ "$1" = "$2" ] || { printf 'expected: %s\n   found: %s\n' "$2" "$1"; return 1; }; }

divvy() { "$DIVVY" "$@"; }

# pod NAME UNITS [ignore-term] [GRACE] [NODE]: print a pod like the tutorial's. It sets NVIDIA_VISIBLE_DEVICES=all, as many images do.
pod() {
  local args='run' node=
  [ "${3:-}" != ignore-term ] || args='run, --ignore-term'
  [ -z "${5:-}" ] || node="nodeSelector: {kubernetes.io/hostname: $5}"
  cat <<END
apiVersion: v1
kind: Pod
metadata: {name: $1, labels: {play: tutorial}}
spec:
  terminationGracePeriodSeconds: ${4:-2}
  $node
  containers:
  - name: main
    image: $PROBE_IMAGE
    imagePullPolicy: Never
    args: [$args]
    env: [{name: NVIDIA_VISIBLE_DEVICES, value: all}]
    resources: {limits: {aliyun.com/gpu-mem: $2}}
END
}
create() { # create the pod; same arguments as pod
  pod "$@" | kube create -f - > /dev/null
  step created "pod $1: $2 GiB${3:+, its program ignores SIGTERM}${5:+, on $5}"
}
field() { kube get pod "$1" -o "jsonpath={$2}"; } # POD JSONPATH
uid() { field "$1" .metadata.uid; }
is_running() { # POD: check that the pod runs and its report is complete
  [ "$(field "$1" .status.phase)" = Running ] && kube logs "$1" ${2:+-c "$2"} | grep -q '^probe: running$'
}
started() { # POD
  eventually 20 "pod $1 runs" is_running "$1"
}
report_has() { # POD CONTAINER LINE...: check that the container printed these lines
  local pod=$1 container=$2 log line; shift 2
  log=$(kube logs "$pod" -c "$container")
  for line in "$@"; do grep -qE "^ *$line\$" <<< "$log" || { printf 'no line %s in:\n%s\n' "$line" "$log"; return 1; }; done
}
# Print the GPU device nodes of a container, in the order of `ls`.
gpus_in() { kube logs "$1" -c "${2:-main}" | grep -oE '^ +nvidia[0-9]+ [0-9:]+$' | tr -s ' ' | tr '\n' ';'; }
own_gpu() { # POD MINOR [CONTAINER]: check that the container has this GPU and no other, although the pod says `all`
  equals "$(gpus_in "$1" "${3:-main}")" " nvidia$2 195:$2;" && report_has "$1" "${3:-main}" NVIDIA_VISIBLE_DEVICES=void 'nvidiactl 195:255'
}

clear_pods() {
  kube delete pods,deployments -l play=tutorial --wait --timeout=60s > /dev/null
  step deleted "every pod of these checks"
}
two_pods() {
  scene "Two pods share one GPU"
  local name units sum percent
  while read -r name units sum percent; do
    create "$name" "$units" "" 2 n1
    started "$name"
    check "$name sees GPU 0 and no other, though it sets NVIDIA_VISIBLE_DEVICES=all" own_gpu "$name" 0
    check "$name has gpushare's four variables" report_has "$name" main \
      ALIYUN_COM_GPU_MEM_IDX=0 "ALIYUN_COM_GPU_MEM_POD=$units" "ALIYUN_COM_GPU_MEM_CONTAINER=$units" ALIYUN_COM_GPU_MEM_DEV=16
    divvy inspect gpushare n1 | shown
    check "kubectl inspect gpushare says $sum/16 ($percent)" says "$(divvy inspect gpushare n1)" "$sum/16" "($percent)"
  done <<< $'binpack-0 3 3 18%\nbinpack-1 5 8 50%'
}
