#!/bin/sh
# container.sh ROOT MOUNTS VARIABLE=VALUE... PROGRAM ARGUMENT...
#
# What a container runtime does, in the mount namespace that it was started in: lays out a root at the folder ROOT, with
# the machine's own programs and libraries for an image, and runs PROGRAM there with this environment and no other.
# Each line of the file MOUNTS has a path here, a path in the container, and "ro" or "rw", with tabs between.
# The process stays the same from beginning to end.
set -eu
root=$1 mounts=$2
shift 2
tab=$(printf '\t')

mount -t tmpfs tmpfs "$root"
for name in bin lib lib64 sbin usr; do
  if [ -L "/$name" ]; then
    cp -P "/$name" "$root/$name"
  elif [ -d "/$name" ]; then
    mkdir "$root/$name"
    mount --rbind "/$name" "$root/$name"
  fi
done
while IFS=$tab read -r here inside _; do
  if [ -d "$here" ]; then
    mkdir -p "$root$inside"
  else
    mkdir -p "$(dirname "$root$inside")"
    [ -e "$root$inside" ] || : > "$root$inside"
  fi
  mount --rbind "$here" "$root$inside"
done < "$mounts"
# After all of them are there: one may have its place in another that nobody may write to.
while IFS=$tab read -r _ inside mode; do
  [ "$mode" = rw ] || mount -o remount,bind,ro "$root$inside"
done < "$mounts"
mount -o remount,ro "$root"
exec chroot "$root" /usr/bin/env -i "$@"
