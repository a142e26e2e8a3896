#!/usr/bin/env bash
# image.sh: builds manifests/Dockerfile with buildah, lets the real kubelet,
# containerd and runc start the image as the DaemonSet says, and runs the
# README's commands in it.
#
# Needs root, and Debian's buildah and mmdebstrap, which are installed where
# apt-get can; what else is missing is said at once, before anything is built.
# The cluster is built first, if it is not yet. An optimised build is most of
# it: a quarter of an hour on two cores, or some minutes with IMAGE_QUICK=1,
# which leaves the optimisation out.
# Where the two images that the Dockerfile begins with can't be pulled, others
# take their places, made of Debian's packages and this machine's Rust.
set -euo pipefail
cd "$(dirname "$0")/.."

# Two base images, the build in one of them and the archive: an estimate, on the safe side.
ROOM_MB=8000

tell() { echo "image.sh: $*" >&2; }
lacks=()
[ "$(id -u)" = 0 ] || lacks+=("root: containers and file systems are made")
for program in cargo go "${CC:-cc}"; do
  command -v "$program" > /dev/null || lacks+=("$program: see tests/setup.sh")
done
missing=()
for program in buildah mmdebstrap; do
  command -v $program > /dev/null || missing+=($program)
done
if [ ${#missing[@]} -gt 0 ] && ! command -v apt-get > /dev/null; then
  lacks+=("${missing[*]}: install them")
fi
free=$(df -Pm /var/tmp | awk 'END { print $4 }')
[ "$free" -ge $ROOM_MB ] || lacks+=("room: /var/tmp has $free MB free, and the image and its build take up to $ROOM_MB")
if [ ${#lacks[@]} -gt 0 ]; then
  tell "this machine lacks:"
  printf '  %s\n' "${lacks[@]}" >&2
  exit 1
fi
if [ ${#missing[@]} -gt 0 ]; then
  if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; }; then
    tell "${missing[*]} can't be installed by apt-get: see above"
    exit 1
  fi
fi
tests/setup.sh
tests/cluster/build-containerd.sh

work=$(mktemp -d /var/tmp/gb-image.XXXXXX)
storage=(--root "$work/storage" --runroot "$work/run")
clean() {
  buildah "${storage[@]}" rm --all > /dev/null 2>&1 || true
  rm -rf "$work"
}
trap clean EXIT
in_storage() { buildah "${storage[@]}" "$@"; }

# stand_in NAME PACKAGES: an image of that name, of a Debian release's own packages.
stand_in() {
  local name=$1 packages=$2 release container
  release=$(grep -o 'bookworm\|trixie' <<< "$name")
  mmdebstrap --quiet --variant=minbase ${packages:+--include="$packages"} "$release" "$work/root.tar"
  container=$(in_storage from scratch)
  in_storage add --quiet "$container" "$work/root.tar" / > /dev/null
  if [ -n "$packages" ]; then
    in_storage config --env CARGO_HOME=/usr/local/cargo \
      --env PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
  fi
  in_storage commit --quiet "$container" "$name" > /dev/null
  in_storage rm "$container" > /dev/null
  rm "$work/root.tar"
}

mounts=()
quick=()
[ -z "${IMAGE_QUICK:-}" ] || quick=(--env CARGO_PROFILE_RELEASE_OPT_LEVEL=0 --env CARGO_PROFILE_RELEASE_LTO=off
  --env CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16)
while read -r name; do
  if in_storage pull --quiet "$name" > /dev/null 2>&1; then
    tell "$name was pulled"
    continue
  fi
  tell "$name can't be pulled: one of Debian's packages takes its place"
  case $name in
    rust:*)
      stand_in "$name" ca-certificates,gcc,libc6-dev
      mkdir -p "${CARGO_HOME:-$HOME/.cargo}/registry"
      mounts=(--volume "$(rustc --print sysroot):/usr/local/rust:ro"
        --volume "${CARGO_HOME:-$HOME/.cargo}/registry:/usr/local/cargo/registry")
      ;;
    *) stand_in "$name" "" ;;
  esac
done < <(sed -n 's/^FROM \([^ ]*\).*/\1/p' manifests/Dockerfile)

image=$(sed -n 's/^ *image: //p' manifests/base/daemonset.yaml)
tell "building $image"
in_storage build --pull=never --network=host --isolation=chroot "${mounts[@]}" "${quick[@]}" -f manifests/Dockerfile -t "$image" .
in_storage push --quiet "$image" "docker-archive:$work/image.tar:$image"
tell "the archive of the image has $(du -m "$work/image.tar" | cut -f1) MB"
in_storage rmi --all --force > /dev/null

cargo test -p gpu-bridge --test e2e --no-run
GPU_BRIDGE_IMAGE=$work/image.tar cargo test -p gpu-bridge --test e2e -- --ignored --nocapture --exact \
  image::the_image_is_started_as_its_daemonset_says_and_serves_the_node
