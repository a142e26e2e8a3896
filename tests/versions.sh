#!/usr/bin/env bash
# versions.sh [VERSION...]: tests on real Kubernetes of older versions, by
# default on each folder of tests/cluster/versions. From cold each version is
# built first, 10 to 15 minutes of two cores.
#
# Ends with a line for each version: how many tests passed, and how many were
# left out, which stand above it by name with the reason. The whole output of a
# version is in target/versions-VERSION.log.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck disable=SC2046 # a list of words
[ $# -gt 0 ] || set -- $(ls tests/cluster/versions)

# What a version can change: how pods are placed and admitted, what the kubelet
# asks and tells, what the API server keeps, and what is said about all that.
tests=(
  split:: sides:: experiments:: lifetimes:: conflicts:: lost_race:: requests:: large::on_an_idle
  switch:: config_map:: mapped:: restarts::what_runs trouble::counted_pods update:: older::
  rights:: rivals:: shipped:: demand::eight churn::four_hundred
)

cargo test -p gpu-bridge --test e2e --no-run
declare -a lines=()
failed=0
for version; do
  tests/cluster/build.sh "$version"
  log=target/versions-$version.log
  status=0
  E2E_KUBERNETES=$version cargo test -p gpu-bridge --test e2e -- --nocapture --include-ignored \
    --test-threads "${E2E_THREADS:-2}" "${tests[@]}" > "$log" 2>&1 || status=$?
  grep -h '^LEFT OUT' "$log" | sort || true
  grep -hE '^(PROOF|FIGURE)' "$log" | sort || true
  left_out=$(grep -c '^LEFT OUT' "$log" || true)
  skipped=$(grep -c '^SKIPPED' "$log" || true)
  passed=$(sed -n 's/^test result: .* \([0-9]*\) passed.*/\1/p' "$log")
  line="Kubernetes $version ($(sed -n 's/.*k8s.io\/kubernetes \(v[0-9.]*\)$/\1/p' "tests/cluster/versions/$version/go.mod")): $((${passed:-0} - left_out - skipped)) passed, $left_out left out"
  [ "$skipped" = 0 ] || line="$line, $skipped SKIPPED"
  if [ $status != 0 ]; then
    failed=1
    line="$line, FAILED: $(grep -hE '^test .* FAILED$|^    [a-z_:]+$' "$log" | sed 's/^test //; s/ \.\.\. FAILED//; s/^ *//' | sort -u | tr '\n' ' ')(see $log)"
  fi
  lines+=("$line")
done
echo
printf '%s\n' "${lines[@]}"
exit $failed
