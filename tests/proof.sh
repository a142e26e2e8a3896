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
run "kills at every step, restarts, a clock that jumps, churn on one daemon" \
  cargo test -p gpu-bridge --test daemon -- --nocapture kills:: restart_time:: clock:: soak::
run "churn, kills, updates, restarts and switches on real Kubernetes" \
  tests/e2e.sh churn:: update:: switch:: trouble::

# What the tests have told, one line each.
lines() { grep -ho 'PROOF .*' "$log" | cut -c7- | sort; }

# The four numbers of the promise, summed over those lines.
sum_up() {
  awk '
    # The number before or behind some words.
    function before(words) { return match($0, "[0-9]+ " words) ? substr($0, RSTART) + 0 : 0 }
    function behind(words) { return match($0, words " [0-9]+") ? substr($0, RSTART + length(words) + 1) + 0 : 0 }
    /^model: [0-9]+ states/ { states += before("states") }
    /^model: broken rules/  { found = behind("found"); rules = behind("of") }
    /^kills: /              { kills += behind("kills:"); survived += behind("survived"); lost += behind("holds lost"); invented += behind("invented") }
    /^churn: .* on bridge/  { pods += behind("churn:"); blows = before("kills of daemon or kubelet"); kills += blows; survived += blows }
    /^churn: .* on stand/   { strangers += behind("doubled"); strange += behind("churn:") }
    /^soak: /               { pods += before("counted pods") + before("claims") }
    / under load: /         { pods += behind("load:") }
    !/ on stand-ins/        { doubled += behind("doubled") }
    END {
      printf "%9d kills of daemon or kubelet, %d survived; holds lost %d, invented %d\n", kills, survived, lost, invented
      printf "%9d states explored around the pool; of %d rules broken on purpose %d found\n", states, rules, found
      printf "%9d pods churned\n", pods
      printf "%9d double bookings; two daemons that know nothing of each other: %d with %d pods\n", doubled, strangers, strange
    }'
}

echo
echo "== The promise, as it was shown now ($(git rev-parse --short HEAD 2>/dev/null || echo 'no commit'))"
lines | sum_up
echo
echo "== By what"
lines
echo
echo "== What longer runs have shown, kept in tests/bench"
grep -h '^- ' tests/bench/*/README.md | cut -c3-
