#!/usr/bin/env bash
# queries.sh: reads the queries of the dashboard, of the alerts and of the guide
# with Prometheus' own parser, and checks them against tests/golden/metrics.txt.
# Needs only Go; a minute from cold.
set -euo pipefail
cd "$(dirname "$0")/queries"
# What it reads is outside its module, where Go does not look for changes.
CGO_ENABLED=0 go test -count=1 ./...
