# Sourced by up.sh and down.sh: sets $state, the folder of the one cluster that
# they start and end.
state=${CLUSTER_STATE:-/tmp/gpu-bridge-cluster-$(id -u)}
mkdir -p -m 700 "$state"
if [ ! -O "$state" ]; then
  echo "$state belongs to somebody else; say another folder with CLUSTER_STATE" >&2
  exit 1
fi
