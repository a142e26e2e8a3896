#!/usr/bin/env bash
# Builds what the containerd mode needs besides build.sh's programs, and links
# it into ./bin: containerd, containerd-shim-runc-v2, ctr, runc, runc-plain and
# sleeper. Needs Go and a C compiler (for runc). From cold it takes about 5
# minutes; a second run takes no time.
set -euo pipefail
cd "$(dirname "$0")"
./build.sh
ldflags="-s -w"
. ./cache.sh
if ! command -v "${CC:-cc}" > /dev/null; then
  echo "tests/cluster/build-containerd.sh: there is no C compiler (${CC:-cc}), and runc needs one: install gcc" >&2
  exit 1
fi
programs="containerd containerd-shim-runc-v2 ctr"

build_containerd() {
  local p
  echo "building containerd and runc, once: about 5 minutes from cold"
  cd containerd
  for p in $programs; do
    CGO_ENABLED=0 go build -ldflags "$ldflags" -o "$1/$p" "github.com/containerd/containerd/v2/cmd/$p"
  done
  CGO_ENABLED=1 go build -ldflags "$ldflags" -o "$1/runc" github.com/opencontainers/runc
  CGO_ENABLED=0 go build -ldflags "$ldflags" -o "$1/" ./sleeper ./runc-plain
  cd ..
}
containerd=$cache/containerd-$(hash containerd/go.mod containerd/go.sum containerd/*/main.go)
build "$containerd" build_containerd
# shellcheck disable=SC2086 # a list of words
link "$containerd" $programs runc runc-plain sleeper
prune
echo "containerd is in tests/cluster/bin after $SECONDS s"
