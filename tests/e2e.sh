#!/usr/bin/env bash
# e2e.sh [FILTER...]: the tests on real Kubernetes. The cluster must be built.
#
# Each test starts a cluster of its own. Two at a time is what two cores carry;
# say another number with E2E_THREADS. What was skipped is counted at the end:
# a machine without root and without user namespaces can run no cluster.
set -euo pipefail
cd "$(dirname "$0")/.."
log=target/e2e.log
mkdir -p target
cargo test -p gpu-bridge --test e2e -- --nocapture --test-threads "${E2E_THREADS:-2}" "$@" 2>&1 | tee "$log"
skipped=$(grep -c '^SKIPPED' "$log" || true)
if [ "$skipped" -gt 0 ]; then
  echo
  echo "!! $skipped of the tests on real Kubernetes were SKIPPED: nothing was shown by them. The log $log says why."
fi
