#!/usr/bin/env bash
# The images as the Dockerfile makes them, without Docker and without an image registry, as root on Debian.
#
#   images.sh base             make the two base images from Debian packages: Python, and Python with a C compiler
#   images.sh build [NAME...]  build weightsync/operator:dev and weightsync/agent:dev, or those named: `build operator`
#   images.sh load [NAME...]   hand them to the containerd at CONTAINERD_ADDRESS, in its namespace k8s.io
#   images.sh run NAME ...     run a command in an image as a restricted pod would: the image's user and environment, a
#                              root file system that is read-only, /tmp and /dev/shm of its own
#   images.sh clean            remove all that this made
#
# All is kept in ~/.cache/weightsync/images. Of the agent's image 6 GB are torch's layer, made once a lock file; `load`
# hands over only what containerd does not have.
#
#   CONTAINERD_ADDRESS   containerd's socket (that of cluster.sh)
#   IMAGES_CACHE         another folder than ~/.cache/weightsync/images
#   TAG=dev              the images' tag
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/weightsync
export CONTAINERD_ADDRESS=${CONTAINERD_ADDRESS:-${WEIGHTSYNC_CLUSTER_STATE:-$cache/state}/containerd.sock}
export CONTAINERD_NAMESPACE=k8s.io
cache=${IMAGES_CACHE:-$cache/images}
storage=$cache/storage run=/run/weightsync-images layout=$cache/layout
tag=${TAG:-dev}
release=bookworm
# What the images run on, and what builds them. torch needs libstdc++6, and brings all else itself.
runtime=python3,ca-certificates,libstdc++6
build=$runtime,python3-venv,python3-dev,gcc,libc6-dev

say() { echo "images: $*" >&2; }
buildah() { command buildah --root "$storage" --runroot "$run" "$@"; }
image() { echo "docker.io/weightsync/$1:$tag"; }
exists() { [ -n "$(buildah images --quiet "$1" 2>/dev/null)" ]; }

need() {
  local missing=() program
  for program in "$@"; do command -v "$program" >/dev/null || missing+=("$program"); done
  [ ${#missing[@]} = 0 ] && return
  say "installing ${missing[*]}"
  apt-get -o DPkg::Lock::Timeout=300 update -qq
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends \
    "${missing[@]}" >/dev/null
}

# --- building -------------------------------------------------------------------------------------------------------

# bud ARG...: chroot needs no namespaces. With this machine's certificate authorities, so that pip reaches what it does.
bud() {
  buildah bud --quiet --isolation chroot --pull-never --layers --volume /etc/ssl/certs:/etc/ssl/certs:ro "$@" >/dev/null
}

# A base's name says what is in it: other packages are another image.
base_name() { echo "localhost/weightsync-base:$release-$(sha256sum <<<"$1" | cut -c1-12)"; }

base() {
  local packages name work started
  for packages in "$runtime" "$build"; do
    name=$(base_name "$packages")
    exists "$name" && continue
    need mmdebstrap
    started=$SECONDS
    work=$(mktemp -d "$cache/base.XXXXXX")
    mmdebstrap --quiet --variant=essential --include="$packages" --dpkgopt=path-exclude='/usr/share/doc/*' \
      --dpkgopt=path-exclude='/usr/share/man/*' --dpkgopt=path-exclude='/usr/share/locale/*' \
      "$release" "$work/rootfs.tar" >&2
    printf 'FROM scratch\nADD rootfs.tar /\n' >"$work/Dockerfile"
    bud --tag "$name" "$work"
    rm -r "$work"
    say "a base of Debian $release with $packages made in $((SECONDS - started)) s"
  done
}

build() {
  local target argument arguments=() started
  base
  for argument in AGENT_LOCK PIP_INDEX_URL PIP_EXTRA_INDEX_URL; do
    [ -n "${!argument:-}" ] && arguments+=(--build-arg "$argument=${!argument}")
  done
  for target in "$@"; do
    started=$SECONDS
    bud --target "$target" --tag "$(image "$target")" --build-arg "BASE_IMAGE=$(base_name "$runtime")" \
      --build-arg "BUILD_IMAGE=$(base_name "$build")" "${arguments[@]}" "$root"
    say "$(image "$target") built in $((SECONDS - started)) s"
    forget_old "$target"
  done
}

# forget_old NAME: after a change of the recipe, what no image is made of any more: torch's layer of the last lock file
forget_old() {
  local now made=$cache/made-of.$1
  now=$(cat "$root/Dockerfile" "$root"/images/* | sha256sum)
  [ "$now" = "$(cat "$made" 2>/dev/null)" ] && return
  buildah rmi --prune >/dev/null
  echo "$now" >"$made"
}

# --- handing over to containerd -------------------------------------------------------------------------------------

# By way of an OCI layout in which large layers are empty files of the right size once containerd has them: skopeo takes
# them for written already, and the archive leaves them out.

blobs() { find "$layout/blobs" -type f -printf '%s %b %f\n' 2>/dev/null || true; }
stand_ins() { blobs | awk '$1 > 1048576 && $2 == 0 {print $3}' | sort; }

load() {
  local target started
  need skopeo ctr
  for target in "$@"; do
    exists "$(image "$target")" || { say "$(image "$target") is not there: images.sh build"; return 1; }
    started=$SECONDS
    hand_over "$target" || { rm -rf "$layout" && hand_over "$target"; }
    forget_superseded
    say "$(image "$target") loaded in $((SECONDS - started)) s"
  done
}

# forget_superseded: the kubelet's interface names each image by its digest too, and so keeps it when the tag has moved on
forget_superseded() {
  local old
  old=$(ctr images ls | awk 'NR > 1 {if ($1 ~ /^sha256:/) unnamed[$1] = $3; else named[$3]}
    END {for (ref in unnamed) if (!(unnamed[ref] in named)) print ref}')
  # shellcheck disable=SC2086
  [ -z "$old" ] || ctr images rm --sync $old >/dev/null
}

hand_over() {
  local target=$1 digest bytes blocks large
  # Another containerd, or one whose store was removed, has less than the last one.
  for digest in $(comm -23 <(stand_ins) <(ctr content ls -q | sed 's/^sha256://' | sort)); do
    rm "$layout/blobs/sha256/$digest"
  done
  rm -f "$layout/index.json"
  skopeo copy --quiet --dest-oci-accept-uncompressed-layers \
    "containers-storage:[overlay@$storage+$run]$(image "$target")" "oci:$layout:$tag" || return
  large=$(blobs | awk '$1 > 1048576 {print $3, $1}')
  # Removed as they are read: the largest is there once less.
  { printf '%s\n' oci-layout index.json && blobs | awk '$1 <= 1048576 || $2 > 0 {print "blobs/sha256/" $3}'; } |
    tar -C "$layout" --create --files-from - --remove-files |
    ctr images import --base-name "docker.io/weightsync/$target" - >/dev/null || return
  while read -r digest bytes; do truncate -s "$bytes" "$layout/blobs/sha256/$digest"; done <<<"$large"
}

# --- running and removing -------------------------------------------------------------------------------------------

run_in() {
  local image container mounted user config=.OCIv1.Config
  local -a env
  image=$(image "$1")
  exists "$image" || { say "$image is not there: images.sh build"; return 1; }
  readarray -t env < <(buildah inspect --type image --format "{{range $config.Env}}{{println .}}{{end}}" "$image" | grep .)
  user=$(buildah inspect --type image --format "{{$config.User}}" "$image")
  container=$(buildah from --pull-never "$image")
  # shellcheck disable=SC2064
  trap "command buildah --root '$storage' --runroot '$run' rm $container >/dev/null" EXIT
  mounted=$(buildah mount "$container")
  # shellcheck disable=SC2016
  unshare --mount --pid --fork --kill-child sh -c '
    root=$1 && shift
    mount --bind "$root" "$root" && mount -o remount,bind,ro "$root" &&
      mount -t tmpfs none "$root/tmp" && mount -t proc none "$root/proc" &&
      mount --rbind /dev "$root/dev" && mount -t tmpfs -o size=1g none "$root/dev/shm" &&
      user=$1 && shift && exec chroot --userspec="$user" "$root" env --ignore-environment --chdir=/tmp "$@"
  ' sh "$mounted" "${user:-0:0}" "${env[@]}" "${@:2}"
}

clean() {
  [ -d "$storage" ] && command -v buildah >/dev/null && buildah rmi --all --force >/dev/null
  rm -rf "$cache" "$run"
}

command=${1:-}
shift || true
case $command in
base | build | load | clean)
  exec 9>"$run.lock" # one at a time
  flock 9
  need buildah
  mkdir -p "$cache"
  case $command in build | load) [ $# -gt 0 ] || set -- operator agent ;; esac
  "$command" "$@"
  ;;
run)
  need buildah
  run_in "$@"
  ;;
*) sed -n '2,/^set/{/^#/p}' "$0" | cut -c3- >&2 && exit 2 ;;
esac
