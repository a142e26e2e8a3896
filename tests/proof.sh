#!/usr/bin/env bash
# proof.sh: what shows the promise, run once more, and its numbers on one page.
#
# Each number is a line that a test prints behind the word PROOF; this only runs
# those tests and gathers the lines. What takes longer was measured by hand, and
# is kept in tests/bench: those verdicts come last.
set -euo pipefail
cd "$(dirname "$0")/.."
log=target/proof.log
mkdir -p target
: >"$log"

# run WHAT COMMAND...: one part, whose output goes into the log.
run() {
  local what=$1
  shift
  echo "-- $what"
  "$@" >>"$log" 2>&1 || {
    echo "!! failed; the whole output is in $log"
    exit 1
  }
}

run "every state of small nodes, and rules broken on purpose" make model
run "kills at every step, a restart with many holds, churn on one daemon" \
  cargo test -p gpu-bridge --test daemon -- --nocapture kills:: restart_time:: soak::
run "churn, kills, updates, restarts and switches on real Kubernetes" \
  tests/e2e.sh churn:: update:: switch:: trouble::

echo
echo "== What was shown now ($(git rev-parse --short HEAD 2>/dev/null || echo 'no commit'))"
grep -ho 'PROOF .*' "$log" | cut -c7- | sort
echo
echo "== What longer runs have shown, kept in tests/bench"
grep -h '^- ' tests/bench/*/README.md | cut -c3-
