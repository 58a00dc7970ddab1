#!/usr/bin/env bash
# All of it on the cluster of `make cluster`: the images, the chart by helm, two examples; and what kubectl then shows.
# With WEIGHTSYNC_KUBECONFIG on another cluster, whose images WEIGHTSYNC_HELM_ARGS names (--set registry=...).
#
#   demo.sh          leaves all running
#   demo.sh clean    removes it
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$here/../..
export KUBECONFIG=${WEIGHTSYNC_KUBECONFIG:-$("$here/cluster.sh" kubeconfig)}
PATH=$("$here/build.sh" --where):$PATH
images=(--set "image.repository=weightsync/operator,image.tag=dev,agent.image.repository=weightsync/agent,agent.image.tag=dev")
[ -z "${WEIGHTSYNC_HELM_ARGS:-}" ] || read -ra images <<<"$WEIGHTSYNC_HELM_ARGS"

show() { echo && echo "\$ $*" && "$@"; }
timed() {
  local what=$1 started=$SECONDS
  shift
  "$@"
  times+=("$(printf '%4d s  %s' $((SECONDS - started)) "$what")")
}

[ -e "$KUBECONFIG" ] || { echo "there is no $KUBECONFIG: make cluster brings a cluster up" >&2; exit 2; }
if [ "${1:-}" = clean ]; then
  kubectl delete namespace demo --ignore-not-found
  helm uninstall weightsync -n weightsync-system --wait --ignore-not-found
  kubectl delete crd weightsyncs.weightsync.dev --ignore-not-found
  kubectl delete namespace weightsync-system --ignore-not-found
  exit
fi

times=()
[ -n "${WEIGHTSYNC_KUBECONFIG:-}" ] || timed "images built and loaded" "$here/cluster.sh" images
timed "chart installed, operator ready" helm upgrade --install weightsync "$root/charts/weightsync" \
  -n weightsync-system --create-namespace --wait "${images[@]}"
kubectl get namespace demo >/dev/null 2>&1 || kubectl create namespace demo

# The examples as they are, but for what a cluster without GPUs can't give, and without an end.
examples() {
  kubectl -n demo create configmap programs --from-file="$root/examples/trainer.py" --from-file="$root/examples/engine.py" \
    --dry-run=client -o yaml | kubectl -n demo apply -f -
  kubectl -n demo apply -f "$root/examples/dedicated.yaml"
  kubectl patch --local -f "$root/examples/synthetic.yaml" --type merge -o yaml \
    -p '{"spec": {"device": "CPU", "steps": {"count": 0}}}' | kubectl -n demo apply -f -
  kubectl -n demo wait --for=condition=Ready ws/dedicated ws/synthetic --timeout=240s
}
timed "examples/dedicated.yaml and synthetic.yaml applied, all receivers whole" examples
for _ in 1 2 3; do
  show kubectl -n demo get weightsyncs
  sleep 3
done
show kubectl -n demo get weightsyncs -o wide
show kubectl -n demo get pods -o wide
echo
printf '%s\n' "${times[@]}"
echo
echo "It goes on: export KUBECONFIG=$KUBECONFIG and kubectl -n demo get ws -w. tests/cluster/demo.sh clean removes it."
