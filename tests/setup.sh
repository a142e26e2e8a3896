#!/usr/bin/env bash
# setup.sh: brings what a machine with Rust and Go still lacks, and says what it
# cannot bring. Takes no time when all is there.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=()
need() { command -v "$1" > /dev/null || missing+=("$2"); }
channel=$(sed -n 's/^channel = "\(.*\)"$/\1/p' rust-toolchain.toml)
need cargo "Rust $channel or later, best with rustup"
need go "Go $(sed -n 's/^go //p' tests/cluster/go.mod) or later, which builds the Kubernetes of the tests"
need "${CC:-cc}" "a C compiler (gcc or clang), which links the programs"
need flock "flock (util-linux)"
if [ ${#missing[@]} -gt 0 ]; then
  echo "setup.sh: this machine lacks:" >&2
  printf '  %s\n' "${missing[@]}" >&2
  exit 1
fi

# rust-toolchain.toml pins the compiler; rustup fetches it once.
if command -v rustup > /dev/null && ! rustup toolchain list | grep -q "^$channel"; then
  rustup toolchain install "$channel" --profile minimal --component clippy,rustfmt
fi
if ! cargo clippy --version > /dev/null 2>&1 || ! cargo fmt --version > /dev/null 2>&1; then
  if ! command -v rustup > /dev/null; then
    echo "setup.sh: cargo has no clippy or no rustfmt, and there is no rustup to bring them; install both" >&2
    exit 1
  fi
  rustup component add --toolchain "$channel" clippy rustfmt
fi
