#!/usr/bin/env bash
# selftest.sh [containerd]: shows that the test cluster itself works, as this
# user and, for root, side by side as a user without rights; or else that it
# works with containerd. Takes about 30 s when built.
# Exit status 77: this machine cannot run a cluster.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
case ${1:-} in
  '') "$here/build.sh" ;;
  containerd) "$here/build-containerd.sh" ;;
  *) echo "selftest.sh: $1 is not containerd" >&2; exit 2 ;;
esac
bin=$here/bin
work=$(mktemp -d /tmp/gb-self.XXXX)
chmod 755 "$work"
declare -a states=()

# finish: whatever happens, no cluster and no folder stays.
finish() {
  local status=$? state
  for state in "${states[@]}"; do "$bin/cluster" down "$state" > /dev/null 2>&1 || true; done
  rm -rf "$work"
  [ $status = 0 ] || echo "selftest: FAILED with status $status" >&2
}
trap finish EXIT
fail() { echo "selftest: $*" >&2; exit 1; }
passed() { echo "ok: $*"; }

# until_true WHAT SECONDS COMMAND...: waits for a state, with a deadline.
until_true() {
  local what=$1 seconds=$2 deadline
  shift 2
  deadline=$((SECONDS + seconds))
  until "$@" > /dev/null 2>&1; do
    [ $SECONDS -lt $deadline ] || fail "not within $seconds s: $what"
    sleep 0.1
  done
}

# Each process of a cluster has its state folder in its command line. The
# bracket keeps grep from finding itself.
no_process() { ! grep -slE "[/]${1#/}" /proc/[0-9]*/cmdline; }
no_mount() { ! grep -F "$1" /proc/*/mountinfo 2> /dev/null; }

# check STATE [PREFIX...]: one cluster from start to SIGKILL; PREFIX is put
# before the commands that start and end it.
check() {
  local state=$1 kernel outer container pod=$work/pod.yaml
  shift
  states+=("$state")
  kernel=$(cat /proc/sys/kernel/panic /proc/sys/vm/overcommit_memory)
  "$@" "$bin/cluster" start "$state"
  k() { "$bin/kubectl" --kubeconfig "$state/admin.kubeconfig" --cache-dir "$work/cache" "$@"; }

  k apply -f "$pod" > /dev/null
  k wait --for=condition=Ready pod/plain --timeout=60s > /dev/null
  [ "$(ls "$state/nvml/processes/GPU-aaaaaaaa-0000-0000-0000-000000000000")" != "" ] || fail "the fake NVML shows no process"
  passed "$state: a pod with an init container runs, and its process is seen"

  container=$(k get pod plain -o 'jsonpath={.status.containerStatuses[0].containerID}')
  "$@" "$bin/cluster" control "$state" restart kubelet KILL > /dev/null
  until_true "node Ready after the kubelet's restart" 60 k wait --for=condition=Ready node/node-0 --timeout=1s
  [ "$container" = "$(k get pod plain -o 'jsonpath={.status.containerStatuses[0].containerID}')" ] || fail "the container was made anew"
  passed "$state: the kubelet is killed and started, and the container stays"

  "$@" "$bin/cluster" control "$state" stop kube-apiserver KILL > /dev/null
  ! k get nodes > /dev/null 2>&1 || fail "the API server answers after it was stopped"
  "$@" "$bin/cluster" control "$state" start kube-apiserver > /dev/null
  k get pod plain > /dev/null
  passed "$state: the API server is stopped and started"

  k auth whoami --kubeconfig "$state/gpu-bridge.kubeconfig" -o yaml > "$work/who"
  grep -q 'system:serviceaccount:gpu-bridge:gpu-bridge' "$work/who" || fail "the daemon is somebody else: $(cat "$work/who")"
  grep -q -A1 'kubernetes.io/node-name' "$work/who" || fail "the daemon's token names no node"
  ! k get pods --kubeconfig "$state/gpu-bridge.kubeconfig" > /dev/null 2>&1 || fail "the daemon's user has rights that nobody gave it"
  grep -q '"username":"system:serviceaccount:gpu-bridge:gpu-bridge"' "$state/audit.log" || fail "the audit log has no line of the daemon's user"
  passed "$state: the daemon's user is bound to the node, has no rights, and is audited"

  k delete pod plain --grace-period=0 --force > /dev/null 2>&1
  until_true "the process of the deleted pod is gone" 30 grep -q '"event":"process_gone".*"name":"main"' "$state/cri.jsonl"
  passed "$state: a force-deleted pod's process goes"

  outer=$(cut -d' ' -f1 "$state/pids")
  kill -KILL "$outer"
  until_true "all processes are gone after SIGKILL" 30 no_process "$state"
  until_true "all mounts are gone after SIGKILL" 30 no_mount "$state"
  [ "$kernel" = "$(cat /proc/sys/kernel/panic /proc/sys/vm/overcommit_memory)" ] || fail "the kernel's settings were changed"
  passed "$state: SIGKILL leaves no process, no mount and the kernel's settings as they were"
}

cat > "$work/pod.yaml" <<'T'
apiVersion: v1
kind: Pod
metadata: {name: plain, namespace: default}
spec:
  initContainers:
  - {name: first, image: any/image, env: [{name: FAKE_RUN_MS, value: "200"}]}
  containers:
  - {name: main, image: any/image, env: [{name: NVIDIA_VISIBLE_DEVICES, value: GPU-aaaaaaaa-0000-0000-0000-000000000000}]}
T

# check_containerd STATE: one cluster with containerd from start to end.
check_containerd() {
  local state=$1 logs
  states+=("$state")
  mkdir "$state"
  echo '[{"minor":0,"uuid":"GPU-aaaaaaaa-0000-0000-0000-000000000000"}]' > "$state/gpus.json"
  "$bin/cluster" start "$state" --runtime containerd
  k() { "$bin/kubectl" --kubeconfig "$state/admin.kubeconfig" --cache-dir "$work/cache" "$@"; }
  sed -i 's|any/image|gpu-bridge.test/sleeper:1|' "$work/pod.yaml"
  k apply -f "$work/pod.yaml" > /dev/null
  k wait --for=condition=Ready pod/plain --timeout=60s > /dev/null
  logs=$(cat "$state"/pod-logs/default_plain_*/main/0.log)
  [[ $logs == *'{"devices":[],'* ]] || fail "a container without GPUs sees some: $logs"
  passed "$state: a pod runs, and sees no GPU"
  k delete pod plain > /dev/null
  k apply -f "$work/pod.yaml" > /dev/null
  k wait --for=condition=Ready pod/plain --timeout=60s > /dev/null
  "$bin/cluster" down "$state" > /dev/null
  until_true "all processes are gone" 30 no_process "$state"
  until_true "all mounts are gone" 30 no_mount "$state"
  [ -z "$(find /sys/fs/cgroup -type d -path "*/k8s.io/*" 2> /dev/null)" ] || fail "cgroups are left"
  passed "$state: the end leaves no process, no mount, no cgroup"
}

if [ "${1:-}" = containerd ]; then
  check_containerd "$work/s"
  echo "selftest: passed in $SECONDS s"
  exit 0
fi
if [ "$(id -u)" = 0 ] && command -v setpriv > /dev/null; then
  # A second cluster, so that the two run side by side, and one without root.
  mkdir "$work/n"
  chown 65534:65534 "$work/n"
  states+=("$work/other")
  "$bin/cluster" start "$work/other" > /dev/null
  # That user need not be able to reach the programs where they are. The older
  # versions are in folders beside them.
  mkdir "$work/bin"
  find -L "$bin" -maxdepth 1 -type f -exec cp -t "$work/bin" {} +
  bin=$work/bin
  check "$work/n/s" setpriv --reuid 65534 --regid 65534 --clear-groups env HOME="$work/n"
  "$bin/cluster" control "$work/other" status > /dev/null || fail "the cluster beside it has suffered"
  "$bin/cluster" down "$work/other" > /dev/null
  passed "two clusters run side by side"
fi
check "$work/s"
echo "selftest: passed in $SECONDS s"
