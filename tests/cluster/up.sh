#!/usr/bin/env bash
# up.sh [FLAGS]: builds what is missing, starts a cluster in the background and
# says how to use it. FLAGS are those of "cluster up". The state folder is
# $CLUSTER_STATE, by default one per user below /tmp: socket paths are short.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/state.sh"
"$here/build.sh"
"$here/bin/cluster" start "$state" "$@"
echo "The cluster runs. Use it with"
echo "  export KUBECONFIG=$state/admin.kubeconfig PATH=$here/bin:\$PATH"
echo "  kubectl get nodes"
echo "and end it with tests/cluster/down.sh."
