#!/usr/bin/env bash
# bench.sh: what the daemon costs, in an optimised build. Everything that is written
# lies in memory where the system has such a folder: what a disk takes to flush is
# the disk's figure, and it is in every save.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -d /dev/shm ] && [ -w /dev/shm ]; then
  TMPDIR=$(mktemp -d /dev/shm/gb-bench.XXXXXX)
  export TMPDIR
  trap 'rm -rf "$TMPDIR"' EXIT
fi
cargo test --release -p gpu-bridge --test daemon --no-run
cargo test -q --release -p gpu-bridge --test daemon -- --ignored --exact bench::what_the_daemon_costs --nocapture
