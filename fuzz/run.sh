#!/usr/bin/env bash
# run.sh [SECONDS]: fuzzes each reader for so long (default 60), one after the other, from the seeds in the repository.
# A finding ends it; the input is kept in fuzz/artifacts. FUZZ_BUILD=--dev builds faster and fuzzes slower.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}

if ! cargo +nightly fuzz --version >/dev/null 2>&1; then
  echo "fuzzing needs a nightly compiler and cargo-fuzz: rustup toolchain install nightly && cargo install cargo-fuzz" >&2
  exit 1
fi

# The libraries in the versions that the product has.
[ -e fuzz/Cargo.lock ] || cp Cargo.lock fuzz/Cargo.lock

# fuzz TARGET SEED...: goes on from what earlier runs have found.
fuzz() {
  local target=$1
  shift
  mkdir -p "fuzz/corpus/$target"
  cp "$@" "fuzz/corpus/$target"
  echo "== $target, $seconds s"
  # shellcheck disable=SC2086 # a list of words, or none
  cargo +nightly fuzz run ${FUZZ_BUILD-} "$target" -- \
    -max_total_time="$seconds" -max_len=65536 -rss_limit_mb=512 -timeout=10 -print_final_stats=1
}

fuzz ledger tests/golden/ledger-v1*.json
fuzz checkpoints tests/testkit/golden/dra_manager_state*.json fuzz/seeds/checkpoints/*
fuzz config fuzz/seeds/config/*
fuzz claim_parameters fuzz/seeds/claim_parameters/*
