"""A plan becomes objects that the API server takes, with pods in which the agents can work."""

from __future__ import annotations

from typing import Any

import pytest
from operator_samples import planned, weightsync
from weightsync_agent.launch import agents_from_env, commands_from_env
from weightsync_api.agent_config import AgentConfig
from weightsync_operator.curve_keys import CurveKeys
from weightsync_operator.objects import Options, Rendered, child_names, render

OPTIONS = Options(image="agent:1")
TREE = dict[str, Any]


def rendered(name: str = "demo", keys: CurveKeys | None = None, **spec: Any) -> Rendered:
    return render(planned(weightsync(name, **spec)), OPTIONS, keys)


def one(made: Rendered, kind: str, name: str = "") -> TREE:
    (tree,) = [o for o in made.objects if o["kind"] == kind and name in ("", o["metadata"]["name"])]
    return tree


def pod(made: Rendered, name: str) -> TREE:
    spec: TREE = one(made, "StatefulSet", name)["spec"]["template"]["spec"]
    return spec


def container(made: Rendered, name: str, index: int = 0) -> TREE:
    found: TREE = pod(made, name)["containers"][index]
    return found


def values(tree: TREE) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in tree["env"]}


def messages(made: Rendered) -> list[str]:
    return [problem.message for problem in made.problems]


def test_every_object_is_owned_labelled_and_named_after_the_weightsync() -> None:
    made = rendered(receivers={"replicas": 2})
    kinds = [(o["kind"], o["metadata"]["name"]) for o in made.objects]
    assert kinds == [
        ("ConfigMap", "demo-agents"),
        ("Secret", "demo-keys"),
        ("Service", "demo-agents"),
        ("NetworkPolicy", "demo-agents"),
        ("PodDisruptionBudget", "demo-receivers"),
        ("StatefulSet", "demo-sender"),
        ("StatefulSet", "demo-receivers"),
    ]
    assert set(kinds) == set(child_names(planned(weightsync())))
    for tree in made.objects:
        (owner,) = tree["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("WeightSync", "demo", "u1", True)
        assert tree["metadata"]["labels"]["weightsync.dev/name"] == "demo"
        assert tree["metadata"]["namespace"] == "default"


def test_the_same_spec_gives_the_same_objects_and_another_one_other_hashes() -> None:
    def hashes(made: Rendered) -> list[str]:
        return [o["metadata"]["annotations"]["weightsync.dev/planned"] for o in made.objects]

    assert hashes(rendered()) == hashes(rendered())
    assert hashes(rendered())[0] != hashes(rendered(device="CPU"))[0]


def test_one_pod_needs_no_keys_and_pods_apart_get_their_own_side_s_secret_only() -> None:
    assert [o["kind"] for o in rendered(placement="Node").objects].count("Secret") == 0
    keys = CurveKeys.generate()
    made = rendered(keys=keys)
    assert set(one(made, "Secret")["data"]) == {
        "sender.key",
        "sender.key_secret",
        "receiver.key",
        "receiver.key_secret",
    }
    for name, hidden in (("demo-sender", "receiver.key_secret"), ("demo-receivers", "sender.key_secret")):
        (volume,) = [v for v in pod(made, name)["volumes"] if v["name"] == "weightsync-keys"]
        paths = [item["path"] for item in volume["secret"]["items"]]
        assert len(paths) == 3
        assert hidden not in paths


def test_new_keys_roll_the_pods() -> None:
    one_set, other = rendered(keys=CurveKeys.generate()), rendered(keys=CurveKeys.generate())
    assert one(one_set, "StatefulSet", "demo-sender") != one(other, "StatefulSet", "demo-sender")


def test_generated_keys_are_read_by_the_agents_library(tmp_path: Any) -> None:
    from zmq.auth import load_certificate

    keys = CurveKeys.generate()
    assert keys.complete
    assert not CurveKeys({}).complete
    for name, text in keys.files.items():
        (tmp_path / name).write_text(text)
        public, secret = load_certificate(tmp_path / name)
        assert len(public) == 40
        assert (secret is not None) == name.endswith("_secret")


def test_the_launcher_reads_the_list_of_agents_of_every_placement() -> None:
    colocated = values(container(rendered(placement="Colocated", receivers={"replicas": 2}), "demo-group"))
    assert [(a.role, a.rank, a.gpu) for a in agents_from_env(colocated)] == [
        ("sender", 0, 0),
        ("receiver", 1, 0),
        ("receiver", 2, 0),
    ]
    receivers = values(container(rendered(receivers={"replicas": 2, "gpusPerPod": 2}), "demo-receivers"))
    found = agents_from_env(receivers | {"WEIGHTSYNC_POD": "demo-receivers-1"})
    assert [(a.rank, a.gpu) for a in found] == [(3, 0), (4, 1)]
    cpu = values(container(rendered(placement="Node", device="CPU"), "demo-group"))
    assert [a.gpu for a in agents_from_env(cpu)] == [None, None]


@pytest.mark.parametrize(
    ("spec", "gpus"),
    [
        ({"placement": "Colocated", "receivers": {"replicas": 3}}, {"demo-group": "1"}),
        ({"placement": "Node", "receivers": {"replicas": 3}}, {"demo-group": "4"}),
        ({"receivers": {"replicas": 3, "gpusPerPod": 8}}, {"demo-sender": "1", "demo-receivers": "8"}),
        ({"device": "CPU"}, {"demo-sender": None, "demo-receivers": None}),
    ],
)
def test_pods_ask_for_the_gpus_of_their_placement(spec: TREE, gpus: dict[str, str | None]) -> None:
    made = rendered(**spec)
    for name, count in gpus.items():
        assert container(made, name)["resources"].get("limits", {}).get("nvidia.com/gpu") == count


def test_pods_meet_the_restricted_level_and_get_no_token() -> None:
    made = rendered()
    for name in ("demo-sender", "demo-receivers"):
        spec, agent = pod(made, name), container(made, name)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert agent["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert not {"hostIPC", "hostPID", "hostNetwork"} & spec.keys()
        assert {"name": "weightsync-shm", "mountPath": "/dev/shm"} in agent["volumeMounts"]
        assert spec["volumes"][0]["emptyDir"]["medium"] == "Memory"


def test_every_mount_has_its_volume() -> None:
    for placement in ("Colocated", "Node", "Dedicated"):
        for tree in rendered(placement=placement, network={"sharedMemory": "Host"}).objects:
            if tree["kind"] == "StatefulSet":
                spec = tree["spec"]["template"]["spec"]
                mounted = {mount["name"] for c in spec["containers"] for mount in c["volumeMounts"]}
                assert mounted <= {volume["name"] for volume in spec["volumes"]}


def test_the_configuration_reads_back_and_only_what_running_agents_read_rolls_the_pods() -> None:
    made, more = rendered(receivers={"replicas": 2}), rendered(receivers={"replicas": 5})
    config = AgentConfig.model_validate_json(one(more, "ConfigMap")["data"]["agent.json"])
    assert config.receivers == 5
    for name in ("demo-sender", "demo-receivers"):
        assert one(made, "StatefulSet", name)["spec"]["template"] == one(more, "StatefulSet", name)["spec"]["template"]
    slower = rendered(receivers={"replicas": 2}, transfer={"ackTimeoutSeconds": 9})
    template = one(slower, "StatefulSet", "demo-sender")["spec"]["template"]
    assert template != one(made, "StatefulSet", "demo-sender")["spec"]["template"]


def test_suspended_keeps_the_objects_and_no_pod() -> None:
    made = rendered(suspend=True, receivers={"replicas": 2})
    assert [o["spec"]["replicas"] for o in made.objects if o["kind"] == "StatefulSet"] == [0, 0]


# --- NCCL -----------------------------------------------------------------------------------------------------------


def test_shared_host_memory_never_sets_the_host_id_without_turning_p2p_off() -> None:
    made = rendered(network={"sharedMemory": "Host"})
    for name in ("demo-sender", "demo-receivers"):
        env = values(container(made, name))
        assert pod(made, name)["hostIPC"] is True
        assert "NCCL_HOSTID" in env
        assert (env["NCCL_P2P_DISABLE"], env["NCCL_CUMEM_HOST_ENABLE"]) == ("1", "0")
        assert "/dev/shm" not in [mount["mountPath"] for mount in container(made, name)["volumeMounts"]]


@pytest.mark.parametrize(
    "spec",
    [
        {"network": {"sharedMemory": "Pod"}},
        {"network": {"sharedMemory": "Host"}, "placement": "Node", "receivers": {"replicas": 3}},
        {"network": {"sharedMemory": "Host"}, "placement": "Colocated"},
        {"network": {"sharedMemory": "Host"}, "device": "CPU"},
    ],
)
def test_host_memory_is_asked_for_only_where_gpus_are_apart(spec: TREE) -> None:
    for tree in rendered(**spec).objects:
        if tree["kind"] == "StatefulSet":
            template = tree["spec"]["template"]["spec"]
            assert "hostIPC" not in template
            assert not {"NCCL_HOSTID", "NCCL_P2P_DISABLE"} & values(template["containers"][0]).keys()


def test_pods_apart_use_more_sockets_unless_the_user_says_otherwise() -> None:
    assert values(container(rendered(), "demo-sender"))["NCCL_SOCKET_NTHREADS"] == "4"
    made = rendered(agent={"env": [{"name": "NCCL_SOCKET_NTHREADS", "value": "2"}]})
    assert values(container(made, "demo-sender"))["NCCL_SOCKET_NTHREADS"] == "2"
    assert made.problems == []


def test_a_host_id_of_the_user_s_is_refused_where_nccl_would_crash() -> None:
    made = rendered(agent={"env": [{"name": "NCCL_HOSTID", "value": "x"}]})
    assert "NCCL_HOSTID is set without NCCL_P2P_DISABLE=1" in messages(made)[0]
    off = [{"name": "NCCL_HOSTID", "value": "x"}, {"name": "NCCL_P2P_DISABLE", "value": "1"}]
    assert messages(rendered(agent={"env": off})) == []
    contrary = rendered(network={"sharedMemory": "Host"}, agent={"env": [{"name": "NCCL_P2P_DISABLE", "value": "0"}]})
    assert messages(contrary) == ['spec.agent.env[NCCL_P2P_DISABLE].value: is "0", but the agent needs "1"']


# --- templates ------------------------------------------------------------------------------------------------------


def test_a_template_s_pod_level_fields_reach_the_pod() -> None:
    template = {
        "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}, "annotations": {"a": "b"}},
        "spec": {
            "nodeSelector": {"gpu": "h200"},
            "priorityClassName": "high",
            "schedulerName": "other",
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "volumes": [{"name": "weights", "persistentVolumeClaim": {"claimName": "w"}}],
        },
    }
    made = rendered(sender={"source": {"checkpoint": {"path": "/w"}}, "template": template})
    sender = one(made, "StatefulSet", "demo-sender")["spec"]["template"]
    for name, value in template["spec"].items():
        assert sender["spec"][name] == value or value[0] in sender["spec"][name]
    assert sender["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert sender["metadata"]["labels"]["weightsync.dev/name"] == "demo"
    assert sender["metadata"]["annotations"]["a"] == "b"
    assert "nodeSelector" not in pod(made, "demo-receivers")
    assert made.problems == []


def test_the_user_s_container_gets_the_agents_part_and_keeps_its_own() -> None:
    mine = {
        "name": "trainer",
        "image": "trainer:1",
        "command": ["python", "train.py"],
        "args": ["--rank=$(WEIGHTSYNC_RANK)"],
        "env": [{"name": "LR", "value": "1e-5"}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "resources": {"limits": {"memory": "64Gi"}},
    }
    beside = {"name": "logs", "image": "logs:1"}
    spec = {"containers": [beside, mine], "volumes": [{"name": "data", "emptyDir": {}}]}
    made = rendered(sender={"source": {"trainer": {}}, "template": {"spec": spec}})
    assert made.problems == []
    trainer = container(made, "demo-sender")
    assert (trainer["name"], trainer["image"], trainer["command"]) == (
        "trainer",
        "trainer:1",
        ["weightsync-agent", "launch"],
    )
    assert "args" not in trainer
    env = values(trainer)
    # As the kubelet hands it on: $$ becomes $.
    handed_on = {name: value.replace("$$", "$") for name, value in env.items()}
    assert commands_from_env(handed_on) == {"sender": ("python", "train.py", "--rank=$(WEIGHTSYNC_RANK)")}
    assert env["LR"] == "1e-5"
    assert trainer["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "1"}
    assert {"name": "data", "mountPath": "/data"} in trainer["volumeMounts"]
    assert "livenessProbe" not in trainer, "a trainer may load for an hour before it makes its Sender"
    assert container(made, "demo-sender", 1) == beside


def test_trainer_and_engine_of_one_pod_share_one_container_with_a_program_each() -> None:
    made = rendered(
        placement="Colocated",
        sender={
            "source": {"trainer": {}},
            "template": {"spec": {"containers": [{"name": "trainer", "image": "rl:1", "command": ["train"]}]}},
        },
        receivers={
            "replicas": 2,
            "template": {"spec": {"containers": [{"name": "engine", "image": "rl:1", "command": ["serve"]}]}},
        },
    )
    assert made.problems == []
    assert len(pod(made, "demo-group")["containers"]) == 1
    agent = container(made, "demo-group")
    assert (agent["name"], agent["image"]) == ("agent", "rl:1")
    assert commands_from_env(values(agent)) == {"sender": ("train",), "receiver": ("serve",)}


def images(claim: str) -> TREE:
    return {
        "placement": "Node",
        "gpus": {"claimTemplate": claim},
        "sender": {
            "source": {"trainer": {}},
            "template": {"spec": {"containers": [{"name": "t", "image": "train:1", "command": ["train"]}]}},
        },
        "receivers": {"template": {"spec": {"containers": [{"name": "e", "image": "engine:1", "command": ["serve"]}]}}},
    }


def test_two_images_need_a_claim_that_two_containers_share() -> None:
    apart = rendered(**images(""))
    assert "share one container" in messages(apart)[0]
    assert messages(apart)[0].startswith('spec.receivers.template.spec.containers[0].image: is "engine:1"')
    made = rendered(**images("two-gpus"))
    assert made.problems == []
    spec = pod(made, "demo-group")
    assert spec["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}]
    assert spec["shareProcessNamespace"] is True
    sender, receivers = spec["containers"]
    assert [c["image"] for c in (sender, receivers)] == ["train:1", "engine:1"]
    for one_of_two in (sender, receivers):
        assert one_of_two["resources"] == {"claims": [{"name": "gpus"}]}
    ports = [port["containerPort"] for c in (sender, receivers) for port in c["ports"]]
    assert ports == [8080, 8081]
    assert values(receivers)["WEIGHTSYNC_HTTP_OFFSET"] == "1"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ({"spec": {"hostPID": True}}, "spec.sender.template.spec.hostPID: must not be true"),
        ({"spec": {"hostIPC": True}}, "spec.sender.template.spec.hostIPC: write network.sharedMemory: Host"),
        (
            {"spec": {"restartPolicy": "Never"}},
            'spec.sender.template.spec.restartPolicy: is "Never", but the agent needs',
        ),
        (
            {"metadata": {"labels": {"weightsync.dev/name": "other"}}},
            'spec.sender.template.metadata.labels.weightsync.dev/name: is "other", but the agent needs "demo"',
        ),
        (
            {"spec": {"containers": [{"name": "agent", "env": [{"name": "WEIGHTSYNC_CONFIG", "value": "/x"}]}]}},
            "spec.sender.template.spec.containers[0].env[WEIGHTSYNC_CONFIG].value:",
        ),
        (
            {"spec": {"containers": [{"name": "agent", "volumeMounts": [{"name": "x", "mountPath": "/dev/shm"}]}]}},
            'spec.sender.template.spec.containers[0].volumeMounts[/dev/shm].name: is "x"',
        ),
        (
            {"spec": {"containers": [{"name": "agent", "resources": {"limits": {"nvidia.com/gpu": 2}}}]}},
            "spec.sender.template.spec.containers[0].resources.limits.nvidia.com/gpu: is 2, but the agent needs",
        ),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.sender.template.spec.containers[0]: must be an object with"),
        ({"spec": {"containers": [{"name": "a", "args": ["x"]}]}}, "args without command"),
        ({"spec": {"volumes": {}}}, "spec.sender.template.spec.volumes: is {}, where a list belongs"),
        ({"spec": "x"}, "spec.sender.template.spec: must be an object"),
        ({"sepc": {}}, "spec.sender.template.sepc: unknown field"),
    ],
)
def test_a_clash_names_the_field(template: TREE, sentence: str) -> None:
    made = rendered(sender={"source": {"synthetic": {"model": "qwen3-0.6b"}}, "template": template})
    assert any(sentence in message for message in messages(made)), messages(made)


def test_without_any_image_there_is_nothing_to_run() -> None:
    made = render(planned(weightsync()), Options())
    assert "spec.agent.image" in messages(made)[0]


def test_the_policy_lets_in_the_group_the_operator_and_who_the_templates_serve() -> None:
    ports = [{"name": "api", "containerPort": 8000}]
    engine = {"spec": {"containers": [{"name": "engine", "command": ["serve"], "ports": ports}]}}
    made = rendered(receivers={"template": engine, "gpusPerPod": 2})
    group, operator, anybody = one(made, "NetworkPolicy")["spec"]["ingress"]
    assert group == {"from": [{"podSelector": {"matchLabels": {"weightsync.dev/name": "demo"}}}]}
    assert operator["ports"] == [{"protocol": "TCP", "port": 8080, "endPort": 8081}]
    assert anybody == {"ports": [{"protocol": "TCP", "port": 8000}]}


def test_names_of_63_characters_give_names_that_fit() -> None:
    made = rendered("a" * 63, receivers={"replicas": 2})
    assert all(len(o["metadata"]["name"]) <= 52 for o in made.objects)
