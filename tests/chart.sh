#!/usr/bin/env bash
# chart.sh: renders the Helm chart with Helm's own engine, and compares it with manifests/base.
# CHART_WRITE_TO=FOLDER writes what comes of each set of values in chart/values.
# Needs only Go; a minute from cold.
set -euo pipefail
cd "$(dirname "$0")/chart"
# What it reads is outside its module, where Go does not look for changes.
CGO_ENABLED=0 go test -count=1 ./...
