#!/usr/bin/env bash
# Builds the programs of the test cluster and links them into ./bin:
#   kube     etcd, kube-apiserver, kube-scheduler, kube-controller-manager, kubelet
#   kubectl  the same file, by another name
#   fakecri  the container runtime that runs nothing
#   cluster  what starts and stops them all
# Needs only Go. From cold it takes 10 to 15 minutes, nearly all of it for kube;
# a second run takes no time.
set -euo pipefail
cd "$(dirname "$0")"
version=$(sed -n 's/^[[:space:]]*k8s.io\/kubernetes \(v[0-9.]*\)$/\1/p' go.mod)
minor=${version#v1.}
stamp=k8s.io/component-base/version
# The components report this version, and refuse to run without one.
ldflags="-s -w -X $stamp.gitVersion=$version -X $stamp.gitMajor=1 -X $stamp.gitMinor=${minor%%.*}"
. ./cache.sh
export CGO_ENABLED=0

build_kube() {
  echo "building Kubernetes $version, once: 10 to 15 minutes from cold"
  go build -ldflags "$ldflags" -o "$1/kube" ./kube
}
build_tools() {
  go build -ldflags "-s -w" -o "$1/fakecri" ./fakecri
  go build -ldflags "-s -w" -o "$1/cluster" ./run
}
kube=$cache/kube-$(hash go.mod go.sum kube/*.go)
tools=$cache/cluster-$(hash go.mod go.sum fakecri/*.go run/*.go)
build "$kube" build_kube
build "$tools" build_tools
link "$kube" kube
ln -sfn "$kube/kube" bin/kubectl
link "$tools" fakecri cluster
prune
echo "tests/cluster/bin is ready after $SECONDS s"
