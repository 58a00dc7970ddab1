"""A trainer's container and engines of transformers behind a Service, as examples/engines/engines.yaml has them.

The image that examples/engines/Dockerfile makes is the agent's with a folder more. Here that folder is mounted from the
node, where tests/engines/install.sh puts it; all else is the example's.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubectl import Tree
from operator_process import eventually
from pod_cluster import FAILED, PodCluster, WeightSyncOnCluster, must_not_skip

pytestmark = pytest.mark.timeout(900)

EXAMPLE = Path(__file__).parents[2] / "examples" / "engines"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
PACKAGES = Path(os.environ.get("WEIGHTSYNC_ENGINES") or CACHE / "weightsync" / "engines") / "pods" / "packages"

TRAINER = """
import os, time
import torch
import tiny_model
from weightsync_agent import JoinTimeout, Sender, StepFailed
from weightsync_agent.sources.computed import Computed

model = tiny_model.model(seed=1)
prompt = torch.tensor([[7, 80, 81, 99]])

def last():
    # The last tensor of a step: when it can't be read, the engines hold the others of the new step already.
    if os.path.exists("/tmp/break"):
        raise RuntimeError("the weights can't be read")
    return model.model.norm.weight

weights = dict(model.state_dict(keep_vars=True))
weights["model.norm.weight"] = Computed(model.model.norm.weight, last)
with Sender.from_env(source=weights) as sender:
    while True:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        said = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 4:].tolist()
        try:
            step = sender.step().step
        except StepFailed as failure:
            step = failure.report.step  # which some of them hold
            print("failed:", str(failure)[:200], flush=True)
        except (JoinTimeout, RuntimeError) as failure:
            print("failed:", str(failure)[:200], flush=True)
            continue
        finally:
            time.sleep(1)
        print("step", step, "says", said, flush=True)
"""

ENGINE = """
import os
from weightsync_agent import receive_step
from weightsync_agent.engines.transformers import main

class Breaking(receive_step.ReceiverStepChannel):
    def wait_commit(self):
        # The step's data is in the model already.
        if os.path.exists("/tmp/break"):
            raise RuntimeError("this engine can't load it")
        return super().wait_commit()

receive_step.ReceiverStepChannel = Breaking
main()
"""

ROUTED = """
import urllib.request
for _ in range(20):
    urllib.request.urlopen("http://completions:8000/readyz", timeout=60).close()
"""
"""Ends well where every engine that the Service leads to is ready: of two, each is met, but for one time in 500,000."""

ASK = """
import json, urllib.request
body = {"prompt": [7, 80, 81, 99], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
asked = urllib.request.Request("http://completions:8000/v1/completions", json.dumps(body).encode())
print(urllib.request.urlopen(asked, timeout=60).read().decode())
"""


def documents() -> dict[str, Tree]:
    """The example's objects by kind, with the agent's image and the folder that the engine's image has besides."""
    found = {tree["kind"]: tree for tree in yaml.safe_load_all((EXAMPLE / "engines.yaml").read_text())}
    spec = found["WeightSync"]["spec"]
    for side in (spec["sender"], spec["receivers"]):
        pod = json.loads(json.dumps(side["template"]["spec"]))  # a copy: the file's anchors are one object
        pod["volumes"].append({"name": "packages", "hostPath": {"path": str(PACKAGES)}})
        (container,) = pod["containers"]
        container["args"] = [
            word.replace("-m weightsync_agent.engines.transformers", "/programs/engine.py")
            for word in container.get("args", [])
        ]
        del container["image"]
        container["volumeMounts"].append({"name": "packages", "mountPath": "/opt/packages", "readOnly": True})
        container["env"] = [
            {"name": "PYTHONPATH", "value": "/opt/packages"},
            {"name": "HF_HUB_OFFLINE", "value": "1"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ]
        side["template"]["spec"] = pod
    return found


@pytest.fixture(scope="module")
def engines(pod_cluster: PodCluster) -> Iterator[WeightSyncOnCluster]:
    if not (PACKAGES / "transformers").is_dir():
        reason = f"transformers for pods is not in {PACKAGES}: tests/engines/install.sh pods puts it there"
        pytest.fail(reason) if must_not_skip() else pytest.skip(reason)
    with pod_cluster.namespace() as namespace:
        # A folder of the node is nothing that a restricted pod may have.
        level = "pod-security.kubernetes.io/enforce"
        pod_cluster.kubectl("label", "namespace", namespace, f"{level}=privileged", "--overwrite")
        words = ["-n", namespace, "create", "configmap", "programs"]
        model = (EXAMPLE.parent / "tiny_model.py").read_text()
        programs = {"trainer.py": TRAINER, "engine.py": ENGINE, "tiny_model.py": model}
        pod_cluster.kubectl(*words, *(f"--from-literal={name}={text}" for name, text in programs.items()))
        found = documents()
        pod_cluster.kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps(found["Service"]))
        ws = pod_cluster.make(namespace, found["WeightSync"])
        try:
            ws.wait_ready()
        except AssertionError:
            print(pod_cluster.told(namespace))
            raise
        yield ws


@pytest.fixture(autouse=True)
def tells(engines: WeightSyncOnCluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a test that failed it tells what was there at the end."""
    yield
    if request.node.stash.get(FAILED, False):
        print(engines.cluster.told(engines.namespace))


def endpoints(ws: WeightSyncOnCluster) -> set[str]:
    """Pods that the Service sends requests to."""
    words = ("get", "endpointslices", "-l", "kubernetes.io/service-name=completions", "-o", "json")
    slices = json.loads(ws.kubectl(*words))["items"]
    return {
        point["targetRef"]["name"]
        for one in slices
        for point in one.get("endpoints") or []
        if point["conditions"].get("ready")
    }


def routed(ws: WeightSyncOnCluster, pods: set[str]) -> None:
    """Returns once the Service has these endpoints and kube-proxy leads to no others, which it hears of later."""
    took = eventually(lambda: endpoints(ws) == pods)
    words = ("-n", ws.namespace, "exec", "engines-sender-0", "--", "python3", "-c", ROUTED)
    eventually(lambda: ws.cluster.run(*words, check=False).returncode == 0)
    print(f"{sorted(pods)} are the endpoints after {took:.1f} s")


def states_are(ws: WeightSyncOnCluster, states: dict[str, str]) -> None:
    """Returns once the status has these states. It is written by the sender's word, the endpoints by the kubelet's."""
    eventually(lambda: states.items() <= {agent["pod"]: agent["state"] for agent in ws.status()["agents"]}.items())


def said(ws: WeightSyncOnCluster) -> dict[int, list[int]]:
    """What the trainer itself generated, by step."""
    lines = re.findall(r"^step (\d+) says (\[.*\])$", ws.kubectl("logs", "engines-sender-0"), re.M)
    return {int(step): ast.literal_eval(tokens) for step, tokens in lines}


def ask(ws: WeightSyncOnCluster) -> Any:
    """One request through the Service, from another pod."""
    return json.loads(ws.kubectl("exec", "engines-sender-0", "--", "python3", "-c", ASK))


def agrees(ws: WeightSyncOnCluster) -> int:
    """Whose weights an engine's answer is by, which is what the trainer generated with them."""
    answer: Tree = {}

    def by_one_step() -> bool:
        nonlocal answer
        answer = ask(ws)
        return "," not in answer["system_fingerprint"]  # else a step came while it answered, by both

    eventually(by_one_step)
    step = int(answer["system_fingerprint"].removeprefix("step-"))
    eventually(lambda: step in said(ws))  # the engine has a step a moment before the trainer tells of it
    assert answer["choices"][0]["token_ids"] == said(ws)[step]
    return step


ENGINES = {"engines-receivers-0", "engines-receivers-1"}


def test_requests_to_the_service_are_answered_by_the_trainers_weights(engines: WeightSyncOnCluster) -> None:
    routed(engines, ENGINES)
    seen: set[int] = set()

    def five_updates() -> bool:
        seen.add(agrees(engines))
        return len(seen) >= 5

    eventually(five_updates)


def test_tainted_engines_leave_the_service_and_come_back_with_the_next_whole_step(engines: WeightSyncOnCluster) -> None:
    eventually(lambda: endpoints(engines) == ENGINES)
    engines.kubectl("exec", "engines-sender-0", "--", "touch", "/tmp/break")
    took = eventually(lambda: endpoints(engines) == set())
    print(f"out of the endpoints after {took:.1f} s")
    states_are(engines, dict.fromkeys(ENGINES, "Tainted"))
    before = engines.step()
    engines.kubectl("exec", "engines-sender-0", "--", "rm", "/tmp/break")
    routed(engines, ENGINES)
    assert agrees(engines) > before


def test_an_engine_that_is_tainted_alone_leaves_the_service_and_the_other_goes_on(engines: WeightSyncOnCluster) -> None:
    eventually(lambda: endpoints(engines) == ENGINES)
    other, broken = sorted(ENGINES)
    engines.kubectl("exec", broken, "--", "touch", "/tmp/break")
    routed(engines, {other})
    before = engines.step()
    seen: set[int] = set()

    def three_whole_steps() -> bool:
        """That come to the other one, while each breaks in this one."""
        seen.add(agrees(engines))
        assert broken not in endpoints(engines)
        return len(seen) >= 3

    eventually(three_whole_steps)
    assert max(seen) > before
    assert endpoints(engines) == {other}
    states_are(engines, {other: "Synced", broken: "Tainted"})
    engines.kubectl("exec", broken, "--", "rm", "/tmp/break")
    routed(engines, ENGINES)
    assert agrees(engines) > max(seen)
