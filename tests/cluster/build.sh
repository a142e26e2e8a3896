#!/usr/bin/env bash
# build.sh [VERSION]: builds the programs of the test cluster and links them
# into ./bin, or into ./bin/VERSION for one of the folders in ./versions:
#   kube     etcd, kube-apiserver, kube-scheduler, kube-controller-manager, kubelet
#   kubectl  the same file, by another name
#   fakecri  the container runtime that runs nothing
#   cluster  what starts and stops them all
# Needs only Go. From cold it takes 10 to 15 minutes, nearly all of it for kube;
# a second run takes no time.
set -euo pipefail
cd "$(dirname "$0")"
module=. package=./kube bin=bin
if [ $# -gt 0 ]; then
  module=versions/$1 package=. bin=bin/$1
  if [ ! -f "$module/go.mod" ]; then
    echo "build.sh: there is no Kubernetes $1, only $(ls versions | tr '\n' ' ')besides the one that is built without a word" >&2
    exit 2
  fi
fi
version=$(sed -n 's/^[[:space:]]*k8s.io\/kubernetes \(v[0-9.]*\)$/\1/p' "$module/go.mod")
minor=${version#v1.}
stamp=k8s.io/component-base/version
# The components report this version, and refuse to run without one.
ldflags="-s -w -X $stamp.gitVersion=$version -X $stamp.gitMajor=1 -X $stamp.gitMinor=${minor%%.*}"
. ./cache.sh
export CGO_ENABLED=0

build_kube() {
  echo "building Kubernetes $version, once: 10 to 15 minutes from cold"
  go build -C "$module" -ldflags "$ldflags" -o "$1/kube" "$package"
}
build_tools() {
  go build -ldflags "-s -w" -o "$1/fakecri" ./fakecri
  go build -ldflags "-s -w" -o "$1/cluster" ./run
}
kube=$cache/kube-$(hash "$module/go.mod" "$module/go.sum" "$module/$package"/*.go)
tools=$cache/cluster-$(ldflags='' hash go.mod go.sum fakecri/*.go run/*.go)
build "$kube" build_kube
build "$tools" build_tools
link "$kube" kube
ln -sfn "$kube/kube" "$bin/kubectl"
link "$tools" fakecri cluster
prune
echo "tests/cluster/$bin is ready after $SECONDS s"
