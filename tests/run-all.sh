#!/usr/bin/env bash
# run-all.sh: everything that must pass, and the minutes that each part took.
# Ends with the first part that fails.
set -euo pipefail
cd "$(dirname "$0")/.."

# Half of a target folder is for rebuilds that a whole run has none of.
export CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
echo "free on this disk: $(df -Ph . | awk 'END { print $4 }'); from cold this needs about 10 GB"

declare -a names=() seconds=()
part=setup
report() {
  local status=$? i
  echo
  echo "minutes  part"
  for i in "${!names[@]}"; do
    printf '%4d:%02d  %s\n' $((seconds[i] / 60)) $((seconds[i] % 60)) "${names[i]}"
  done
  printf '%4d:%02d  in all\n' $((SECONDS / 60)) $((SECONDS % 60))
  [ $status = 0 ] || echo "FAILED in: $part (status $status)"
}
trap report EXIT

# run NAME COMMAND...: one part.
run() {
  part=$1
  shift
  local start=$SECONDS
  echo
  echo "== $part"
  "$@"
  names+=("$part")
  seconds+=($((SECONDS - start)))
}

# What a test of gpu-bridge is called that needs no cluster: each file and each
# folder with a main.rs in bridge/tests.
fast_tests() {
  local file
  for file in bridge/tests/*.rs; do echo "--test=$(basename "$file" .rs)"; done
  for file in bridge/tests/*/main.rs; do echo "--test=$(basename "$(dirname "$file")")"; done
}

# The web page is shown to a browser, and its script is run by Node.js. Where
# they can't be had, their tests say that they are skipped.
browser() {
  local missing=()
  command -v chromium google-chrome chromium-headless-shell > /dev/null || missing+=(chromium)
  command -v node > /dev/null || missing+=(nodejs)
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" && return 0
  fi
  echo "!! this machine has no ${missing[*]}: the tests of the web page that need it are skipped"
}

# The cluster shows itself that it works before anything is judged on it.
# Status 77: this machine can run none; the tests count what they skip then.
cluster_selftest() {
  local status=0
  tests/cluster/selftest.sh || status=$?
  [ $status = 0 ] || [ $status = 77 ]
}

run "setup" tests/setup.sh
run "a browser" browser
run "format" cargo fmt --check
run "lints, warnings denied" cargo clippy --workspace --all-targets -- -D warnings
run "the daemon as make demo has it" cargo check -p gpu-bridge --no-default-features
run "tests of the libraries and tools" cargo test --workspace --exclude gpu-bridge --exclude model
run "every state of small nodes" make model
# shellcheck disable=SC2046 # a list of words
run "tests of the daemon without a cluster" cargo test -p gpu-bridge --lib --bins $(fast_tests)
run "the queries of dashboard and alerts" tests/queries.sh
run "the Helm chart" tests/chart.sh
run "build of Kubernetes" tests/cluster/build.sh
run "the cluster itself" cluster_selftest
run "tests on real Kubernetes" tests/e2e.sh
