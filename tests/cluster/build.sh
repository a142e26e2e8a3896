#!/usr/bin/env bash
# Builds the programs of the test cluster and puts them where ./bin points:
#   kube     etcd, kube-apiserver, kube-scheduler, kube-controller-manager, kubelet
#   kubectl  a link to kube, which holds it too
#   fakecri  the container runtime that runs nothing
#   cluster  what starts and stops them all
# Needs only Go. From cold it takes 10 to 15 minutes, nearly all of it for kube;
# the results are kept by content, so a second run takes no time.
set -euo pipefail
cd "$(dirname "$0")"

if ! command -v go > /dev/null; then
  echo "tests/cluster/build.sh: there is no Go on the PATH; install Go $(sed -n 's/^go //p' go.mod) or later" >&2
  exit 1
fi
version=$(sed -n 's/^[[:space:]]*k8s.io\/kubernetes \(v[0-9.]*\)$/\1/p' go.mod)
minor=${version#v1.}
stamp=k8s.io/component-base/version
# The components report this version, and refuse to run without one.
ldflags="-s -w -X $stamp.gitVersion=$version -X $stamp.gitMajor=1 -X $stamp.gitMinor=${minor%%.*}"
export CGO_ENABLED=0 GOFLAGS="-buildvcs=false"

# hash FILE...: names a build by all that goes into it.
hash() { { go version; echo "$ldflags"; cat "$@"; } | sha256sum | cut -c1-16; }
cache=${XDG_CACHE_HOME:-$HOME/.cache}/gpu-bridge
kube=$cache/kube-$(hash go.mod go.sum kube/*.go)
tools=$cache/cluster-$(hash go.mod go.sum kube/*.go fakecri/*.go run/*.go)
mkdir -p "$cache"

# Side by side, one builds and the others wait for what it makes.
exec 9> "$cache/build.lock"
flock 9
# build DIR COMMAND...: runs the command with DIR.new as its last argument, and
# keeps the result only if all of it is there.
build() {
  local dir=$1
  shift
  rm -rf "$dir.new"
  mkdir "$dir.new"
  "$@" "$dir.new"
  mv "$dir.new" "$dir"
}
build_kube() { go build -ldflags "$ldflags" -o "$1/kube" ./kube; }
build_tools() {
  go build -ldflags "-s -w" -o "$1/fakecri" ./fakecri
  go build -ldflags "-s -w" -o "$1/cluster" ./run
  ln -s "$kube/kube" "$1/kube"
  ln -s kube "$1/kubectl"
}
if [ ! -d "$kube" ]; then
  echo "building Kubernetes $version, once: this takes 10 to 15 minutes from cold"
  build "$kube" build_kube
  echo "built $kube in $SECONDS s"
fi
[ -d "$tools" ] || build "$tools" build_tools

ln -sfn "$tools" bin
touch "$kube" "$tools"
# Builds that nobody has used for a month go.
find "$cache" -mindepth 1 -maxdepth 1 \( -name 'kube-*' -o -name 'cluster-*' \) -mtime +30 -exec rm -rf {} +
echo "tests/cluster/bin is ready after $SECONDS s"
