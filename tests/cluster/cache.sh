# Sourced by the build scripts, in their folder: builds that are kept by
# content in ~/.cache/gpu-bridge, and links to them in ./bin, or in $bin.

if ! command -v go > /dev/null; then
  echo "tests/cluster: there is no Go on the PATH; install Go $(sed -n 's/^go //p' go.mod) or later" >&2
  exit 1
fi
export GOFLAGS="-buildvcs=false"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/gpu-bridge
mkdir -p "$cache"
# bin was once a link to a folder, and may still be one.
[ ! -L bin ] || rm bin
bin=${bin:-bin}
mkdir -p "$bin"

# Side by side, one builds and the others wait for what it makes.
exec 9> "$cache/build.lock"
flock 9

# hash FILE...: names a build by all that goes into it: the files, the Go
# version and the linker flags.
hash() { { go version; echo "${ldflags:-}"; cat "$@"; } | sha256sum | cut -c1-16; }

# build DIR COMMAND...: makes a folder by a command that gets its name as last
# argument, and keeps it only if the command went through.
build() {
  local dir=$1
  shift
  if [ ! -d "$dir" ]; then
    rm -rf "$dir.new"
    mkdir "$dir.new"
    "$@" "$dir.new"
    mv "$dir.new" "$dir"
    echo "built $dir in $SECONDS s"
  fi
  # The time of the last use.
  touch "$dir"
}

# link DIR NAME...: links programs of a build into $bin.
link() {
  local dir=$1 name
  shift
  for name in "$@"; do ln -sfn "$dir/$name" "$bin/$name"; done
}

# prune: builds that nobody has used for a month go.
prune() {
  find "$cache" -mindepth 1 -maxdepth 1 -type d \( -name 'kube-*' -o -name 'cluster-*' -o -name 'containerd-*' \) \
    -mtime +30 -exec rm -rf {} +
}
