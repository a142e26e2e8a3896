#!/usr/bin/env bash
# down.sh: ends the cluster that up.sh started, and returns when it is gone.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/state.sh"
if [ ! -x "$here/bin/cluster" ]; then
  echo "no cluster was ever built here"
  exit 0
fi
exec "$here/bin/cluster" down "$state"
