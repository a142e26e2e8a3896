#!/usr/bin/env bash
# churn-long.sh: many runs of `make churn`, and their table in tests/bench/churn.
#
# What has a result in target/churn-long is not run again, so a run that was
# broken off goes on where it was; remove the folder to begin anew. Two runs
# at a time is what two cores carry: say another number with JOBS.
# SEEDS="1 2 3" and SHARE=100 (percent of the pods below) can be said too, and
# other loads with BRIDGE and STAND_INS, which are best kept elsewhere: OUT has
# their results, and KEPT their table.
# LAUNCH is a command that starts each run, if it needs one.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${OUT:-target/churn-long}
kept=${KEPT:-tests/bench/churn}
seeds=${SEEDS:-1 2 3}
share=${SHARE:-100}

# 1,000 pods a seed for the goal, and beside them what it is not for. Nobody
# follows the stand-ins in an update.
bridge=${BRIDGE:-high:500 mid:300 burst:200 volley:120 restarts:100 kills:100 updates:100 one:40 eight:80}
stand_ins=${STAND_INS:-high:200 mid:125 burst:96 kills:100}

cargo test -p gpu-bridge --test e2e --no-run
mkdir -p "$results" "$kept"

# plan DAEMON SEEDS LOADS: a line for each run.
plan() {
  local seed load
  for seed in $2; do
    for load in $3; do echo "$1 $seed ${load%:*} $((${load#*:} * share / 100))"; done
  done
}

# run DAEMON SEED LOAD PODS: one run, unless there is a result.
run() {
  [ -f "$results/$1-$3-$2.json" ] && return
  echo "== $1, load $3, seed $2, $4 pods"
  DAEMON=$1 SEED=$2 LOAD=$3 PODS=$4 OUT=$results ${LAUNCH:-} cargo test -q -p gpu-bridge --test e2e -- \
    --ignored --exact churn::program::one_run --nocapture >"$results/$1-$3-$2.log" 2>&1 ||
    { echo "== failed: $results/$1-$3-$2.log"; return 1; }
}
export -f run
export results LAUNCH

{ plan bridge "$seeds" "$bridge"; plan stand-ins "${seeds%% *}" "$stand_ins"; } |
  xargs -P "${JOBS:-2}" -L 1 bash -c 'run "$@"' run
cat "$results"/*.json >"$kept/runs.jsonl"
OUT=$results KEPT=$kept/README.md cargo test -q -p gpu-bridge --test e2e -- --ignored --exact churn::program::all_runs_in_one_table --nocapture
