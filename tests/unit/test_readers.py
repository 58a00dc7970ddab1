"""What watches bring is kept in its newest version, whatever the order in which it comes."""

from __future__ import annotations

import asyncio
from typing import Any

from weightsync_operator.plan import Key
from weightsync_operator.readers import WatchedReader

KEY = Key("ns", "demo")
SERVICE = ("Service", "demo-agents")


def service(version: str, uid: str = "u1", ports: int = 0) -> dict[str, Any]:
    meta = {
        "namespace": "ns",
        "name": "demo-agents",
        "uid": uid,
        "resourceVersion": version,
        "labels": {"weightsync.dev/name": "demo"},
        "managedFields": [{}],
    }
    return {"kind": "Service", "metadata": meta, "spec": {"ports": [{"port": n} for n in range(ports)]}}


def held(reader: WatchedReader) -> dict[str, Any] | None:
    found = asyncio.run(reader.children(KEY, [SERVICE])).get(SERVICE)
    return found.tree if found is not None else None


def test_what_is_not_newer_is_no_news() -> None:
    reader = WatchedReader()
    assert reader.put("Service", service("9")) == KEY
    assert reader.put("Service", service("9")) is None
    assert reader.put("Service", service("10", ports=1)) == KEY
    assert reader.put("Service", service("9")) is None
    kept = held(reader)
    assert kept is not None
    assert kept["metadata"]["resourceVersion"] == "10"
    assert "managedFields" not in kept["metadata"]


def test_an_old_object_s_end_does_not_take_its_successor_away() -> None:
    reader = WatchedReader()
    reader.put("Service", service("9", uid="u1"))
    reader.wrote(service("12", uid="u2"))
    assert reader.drop("Service", service("11", uid="u1")) == KEY
    assert held(reader) is not None
    assert reader.drop("Service", service("13", uid="u2")) == KEY
    assert held(reader) is None


def test_another_version_of_the_same_content_is_no_news() -> None:
    reader = WatchedReader()
    reader.put("Service", service("9"))
    with_status = service("10") | {"status": {"loadBalancer": {}}, "apiVersion": "v1"}
    assert reader.put("Service", with_status) is None
    kept = held(reader)
    assert kept is not None
    assert kept["metadata"]["resourceVersion"] == "10"


def test_a_whole_list_takes_out_what_is_gone_and_no_more() -> None:
    reader = WatchedReader()
    reader.put("Service", service("9"))
    assert reader.keep("Service", "", {"u1"}, "11") == set()
    assert reader.keep("Service", "other", set(), "12") == set()
    assert reader.keep("Pod", "", set(), "12") == set()
    assert held(reader) is not None
    assert reader.keep("Service", "", set(), "8") == set(), "the list is older than what a watch brought"
    assert held(reader) is not None
    assert reader.keep("Service", "", set(), "12") == {KEY}
    assert held(reader) is None


def test_metadata_tells_whether_a_version_is_known() -> None:
    reader = WatchedReader()
    assert not reader.knows("Service", service("9"))
    reader.put("Service", service("9"))
    assert reader.knows("Service", service("9"))
    assert reader.knows("Service", service("8"))
    assert not reader.knows("Service", service("10"))
    assert not reader.knows("Service", service("10", uid="u2"))


def test_an_object_without_the_label_is_nobody_s() -> None:
    stranger = service("1")
    del stranger["metadata"]["labels"]
    assert WatchedReader().put("Service", stranger) is None
