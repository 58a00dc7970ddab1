"""The reconciler on a real API server, asked for single passes, and what it left there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from control_plane import ControlPlane, Tree
from operator_process import eventually
from weightsync_operator.cluster import ClusterPlatform
from weightsync_operator.kube_api import KubeApi
from weightsync_operator.objects import Options
from weightsync_operator.plan import Key
from weightsync_operator.readers import LiveReader
from weightsync_operator.reconcile import Pass, Reconciler

CHILDREN = "configmaps,secrets,services,networkpolicies,poddisruptionbudgets,statefulsets"


class Operator:
    """The reconciler of one process, asked for single passes; it keeps its memory between them."""

    def __init__(self, cluster: ControlPlane, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.woken: list[Key] = []

    def passes(self, *names: str) -> list[Pass]:
        """One pass for each name, in one process' life."""

        async def run(reconciler: Reconciler) -> list[Pass]:
            return [await reconciler.reconcile(Key(self.namespace, name)) for name in names]

        return self._with(run)

    def _with(self, run: Callable[[Reconciler], Awaitable[list[Pass]]]) -> list[Pass]:
        async def whole() -> list[Pass]:
            api = await KubeApi.connect(self.cluster.operator_kubeconfig)
            platform = ClusterPlatform(api, LiveReader(api), Options(image="agent:1"), self.woken.append)
            try:
                return await run(Reconciler(platform))
            finally:
                await platform.close()
                await api.close()

        return asyncio.run(whole())


def applied(operator: Operator, tree: Tree) -> None:
    done = operator.cluster.apply(tree, operator.namespace)
    assert done.returncode == 0, done.stderr


def children(operator: Operator) -> dict[tuple[str, str], Tree]:
    found = operator.cluster.list(CHILDREN, operator.namespace)
    return {
        (tree["kind"], tree["metadata"]["name"]): tree
        for tree in found
        if "weightsync.dev/name" in tree["metadata"].get("labels", {})
    }


def condition(operator: Operator, kind: str, name: str = "demo") -> tuple[str, str, str]:
    tree = operator.cluster.get("weightsync", name, operator.namespace)
    assert tree is not None
    found = next(c for c in tree["status"]["conditions"] if c["type"] == kind)
    return found["status"], found["reason"], found["message"]


def unscheduled_pods(operator: Operator, count: int) -> None:
    """Returns once the scheduler has said of so many pods that there is no node for them."""

    def told(pod: Tree) -> bool:
        return any(c["type"] == "PodScheduled" for c in pod["status"].get("conditions", []))

    eventually(lambda: sum(told(pod) for pod in operator.cluster.list("pods", operator.namespace)) == count)


def pod_count(operator: Operator, count: int) -> list[Tree]:
    eventually(lambda: len(operator.cluster.list("pods", operator.namespace)) == count)
    return operator.cluster.list("pods", operator.namespace)
