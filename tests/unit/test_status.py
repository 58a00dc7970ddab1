"""The status says what is, why, and what to do about it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from operator_samples import GIB, MIB, START, observed, planned, report, row, step, weightsync
from weightsync_api.reports import AgentState, Report
from weightsync_api.v1alpha1 import Condition, ConditionType, WeightSync, WeightSyncStatus
from weightsync_operator.platform import Observed, ObservedAgent, Problem
from weightsync_operator.status import condition, next_status

TWO: dict[str, Any] = {"placement": "Dedicated", "receivers": {"replicas": 2}}


def status_of(
    ws: WeightSync,
    told: Report | None,
    seen: Observed | None = None,
    previous: WeightSyncStatus | None = None,
    seconds: int = 0,
) -> WeightSyncStatus:
    now = START + timedelta(seconds=seconds)
    return next_status(ws, planned(ws), seen or observed(ws), told, now, previous or WeightSyncStatus())


def the(status: WeightSyncStatus, kind: str) -> Condition:
    found = condition(status, ConditionType(kind))
    assert found is not None, f"there is no condition {kind}"
    return found


def whole(ws: WeightSync, *numbers: int) -> Report:
    return report(ws, [step(number, [row(1), row(2)]) for number in numbers])


def test_ready_once_a_step_is_complete_and_every_receiver_holds_it() -> None:
    ws = weightsync(**TWO)
    status = status_of(ws, whole(ws, 1, 2))
    ready = the(status, "Ready")
    assert (ready.status, ready.reason, ready.observed_generation) == ("True", "Synced", 3)
    assert (status.step, status.replicas, status.ready_replicas) == (2, 2, 2)
    assert (status.transport, status.mode, status.route) == ("NCCL", "Packed", "P2P/CUMEM")
    assert the(status, "Progressing").status == "True"
    assert the(status, "Suspended").status == "False"


def test_the_columns_read_as_in_the_documentation() -> None:
    ws = weightsync(**TWO)
    summary = status_of(
        ws, report(ws, [step(7, [row(1, reserved=8 * GIB + GIB // 10), row(2, ack=1_200_000)])])
    ).summary
    assert summary.model_dump() == {
        "status": "Syncing",
        "receivers": "2/2",
        "reserved": "8.1GiB",
        "reserved_delta": "+0B",
        "ack": "1.2s",
        "rate": "348GB/s",
        "nodes": "node-a",
        "ack_p99": "1.2s",
        "peak": "8.1GiB",
        "verified": "",
    }


def test_before_the_sender_reports_it_is_named() -> None:
    ws = weightsync(**TWO)
    ready = the(status_of(ws, None), "Ready")
    assert (ready.status, ready.reason) == ("False", "WaitingForSender")
    assert "demo-sender-0" in ready.message


def test_a_receiver_that_fails_is_told_before_a_sender_that_is_on_its_way() -> None:
    ws = weightsync(**TWO)
    crashed = ObservedAgent(2, "demo-receivers-1", exit_code=1, reason="Crashed", message="no such file")
    for sender in (
        ObservedAgent(0, "demo-sender-0", running=True),
        ObservedAgent(0, "demo-sender-0", message="the pod is being started"),
    ):
        ready = the(status_of(ws, None, Observed(ws, (sender, crashed))), "Ready")
        assert (ready.reason, "demo-receivers-1" in ready.message) == ("Crashed", True)
    refused = ObservedAgent(0, "demo-sender-0", reason="ErrImagePull", message="no such image")
    assert the(status_of(ws, None, Observed(ws, (refused, crashed))), "Ready").reason == "ErrImagePull"


def test_a_pod_that_is_being_started_is_starting() -> None:
    ws = weightsync(**TWO)
    sender = ObservedAgent(0, "demo-sender-0", message="the pod is being started")
    assert the(status_of(ws, None, Observed(ws, (sender,))), "Ready").reason == "Starting"


def test_an_agent_that_was_started_again_is_told_with_its_cause_until_it_has_caught_up() -> None:
    ws = weightsync(**TWO)
    again = ObservedAgent(0, "demo-sender-0", running=True, restarts=3, reason="OOMKilled", message="too much memory")
    ready = the(status_of(ws, None, Observed(ws, (again,))), "Ready")
    assert (ready.status, ready.reason) == ("False", "OOMKilled")
    assert ready.message == "the sender (rank 0, pod demo-sender-0) was started again (3 times): too much memory"


def test_an_agent_is_not_created_only_until_it_runs() -> None:
    ws = weightsync(**TWO)
    none = status_of(ws, None, Observed(ws, ()))
    assert {agent.message for agent in none.agents} == {"not created yet"}
    running = status_of(ws, None, observed(ws), none)
    assert {(agent.state, agent.message) for agent in running.agents} == {("Starting", "")}


def test_a_pod_that_does_not_run_is_named_with_the_platforms_own_cause() -> None:
    ws = weightsync(**TWO)
    stuck = ObservedAgent(2, "demo-receivers-1", reason="ImagePullBackOff", message='Back-off pulling image "x:1"')
    ready = the(
        status_of(ws, report(ws, [], states={2: (AgentState.STARTING, "")}), observed(ws, rank_2=stuck)), "Ready"
    )
    assert (ready.status, ready.reason) == ("False", "ImagePullBackOff")
    assert "rank 2" in ready.message
    assert "demo-receivers-1" in ready.message
    assert 'Back-off pulling image "x:1"' in ready.message


def test_a_crashed_receiver_is_lost_until_it_holds_a_step_again() -> None:
    ws = weightsync(**TWO)
    good = status_of(ws, whole(ws, 1))
    dead = ObservedAgent(
        1, "demo-receivers-0", exit_code=-9, restarts=2, reason="Crashed", message="killed by signal 9"
    )
    crashed = status_of(ws, whole(ws, 1), observed(ws, rank_1=dead), good)
    assert (the(crashed, "Ready").reason, crashed.agents[1].state) == ("Crashed", "Lost")
    assert "killed by signal 9" in the(crashed, "Ready").message
    assert "restarted 2 times" in the(crashed, "Ready").message
    assert (crashed.summary.status, crashed.summary.receivers, crashed.ready_replicas) == ("Degraded", "1/2", 1)
    # It runs again, and the sender has not heard of it: its word is about the process that was killed.
    again = ObservedAgent(1, "demo-receivers-0", running=True, restarts=3)
    waiting = crashed
    for _ in range(2):
        waiting = status_of(ws, whole(ws, 1), observed(ws, rank_1=again), waiting)
        assert (the(waiting, "Ready").reason, waiting.summary.receivers) == ("ReceiverStarting", "1/2")
        assert "it was started again and has not joined yet" in the(waiting, "Ready").message
    assert the(status_of(ws, whole(ws, 2), observed(ws, rank_1=again), waiting), "Ready").status == "True"
    back = status_of(ws, whole(ws, 2), previous=crashed)
    assert (the(back, "Ready").status, back.summary.receivers) == ("True", "2/2")


def test_a_broken_step_names_rank_pod_and_cause_and_does_not_count() -> None:
    ws = weightsync(**TWO)
    broken = step(2, [row(1), row(2, state=AgentState.TAINTED, error="step 2, bucket 3: out of memory")])
    told = report(
        ws, [step(1, [row(1), row(2)]), broken], states={2: (AgentState.TAINTED, "step 2, bucket 3: out of memory")}
    )
    status = status_of(ws, told)
    ready, progressing = the(status, "Ready"), the(status, "Progressing")
    assert (ready.status, ready.reason) == ("False", "ReceiverTainted")
    assert "receiver (rank 2, pod demo-receivers-1) is Tainted: step 2, bucket 3: out of memory" in ready.message
    assert (progressing.status, progressing.reason) == ("True", "Retrying")
    assert status.last_step is not None
    assert (status.step, status.last_step.step, status.last_step.complete, status.last_step.receivers) == (
        1,
        2,
        False,
        1,
    )
    # It still says so when the next report brings no new step.
    assert (
        the(status_of(ws, told.model_copy(update={"steps": []}), previous=status), "Progressing").reason == "Retrying"
    )


def test_a_refused_receiver_tells_the_senders_reason() -> None:
    ws = weightsync(**TWO)
    ready = the(status_of(ws, report(ws, [], states={1: (AgentState.REFUSED, "lm_head.weight is missing")})), "Ready")
    assert (ready.reason, "lm_head.weight is missing" in ready.message) == ("ReceiverRefused", True)


def test_only_the_first_of_many_receivers_are_named_and_the_rest_counted() -> None:
    ws = weightsync(placement="Dedicated", receivers={"replicas": 9})
    states = dict.fromkeys(range(1, 10), (AgentState.TAINTED, "x" * 100))
    message = the(status_of(ws, report(ws, [], states=states)), "Ready").message
    assert "9 of 9" in message
    assert "and 6 more" in message


def test_a_problem_of_the_platform_is_the_reason() -> None:
    ws = weightsync(**TWO)
    seen = Observed(ws, (), (Problem("NameTaken", "Secret demo-keys is not ours: rename it or this WeightSync"),))
    status = status_of(ws, None, seen)
    assert (the(status, "Ready").reason, the(status, "Progressing").status) == ("NameTaken", "False")
    assert status.summary.status == "Degraded"


def test_suspended_keeps_the_last_step_and_history() -> None:
    before = status_of(weightsync(**TWO), whole(weightsync(**TWO), 1, 2))
    ws = weightsync(**TWO, suspend=True)
    status = status_of(ws, None, Observed(ws), before)
    assert (the(status, "Suspended").status, the(status, "Ready").reason) == ("True", "Suspended")
    assert (status.summary.status, status.summary.receivers) == ("Suspended", "0/2")
    assert (status.step, len(status.history), status.last_step) == (2, 2, before.last_step)


def test_complete_stays_after_the_processes_are_gone() -> None:
    ws = weightsync(**TWO)
    done = status_of(ws, whole(ws, 1).model_copy(update={"finished": True}))
    assert (done.summary.status, the(done, "Progressing").reason) == ("Complete", "Complete")
    ended = tuple(ObservedAgent(a.rank, a.pod, exit_code=0, reason="Completed") for a in planned(ws).agents())
    later = status_of(ws, None, Observed(ws, ended), done)
    assert (later.summary.status, the(later, "Ready").status) == ("Complete", "True")


def test_history_keeps_the_last_ten_each_once_over_reports_and_sessions() -> None:
    ws = weightsync(**TWO)
    status = status_of(ws, whole(ws, *range(1, 9)))
    status = status_of(ws, whole(ws, *range(5, 13)), previous=status)
    assert [s.step for s in status.history] == list(range(3, 13))
    # All agents were lost and a new sender counts from 1 again, later.
    again = step(1, [row(1), row(2)]).model_copy(update={"started_at": START + timedelta(hours=1)})
    status = status_of(ws, report(ws, [again], session="s2"), previous=status)
    assert [s.step for s in status.history][-2:] == [12, 1]
    assert status.step == 1


def test_transition_times_change_with_the_status_and_not_with_the_words() -> None:
    ws = weightsync(**TWO)
    first = status_of(ws, None, seconds=0)
    waiting = status_of(ws, report(ws, []), previous=first, seconds=10)
    assert the(waiting, "Ready").reason != the(first, "Ready").reason
    assert the(waiting, "Ready").last_transition_time == the(first, "Ready").last_transition_time
    ready = status_of(ws, whole(ws, 1), previous=waiting, seconds=20)
    assert the(ready, "Ready").last_transition_time == START + timedelta(seconds=20)


def test_the_same_facts_give_the_same_status() -> None:
    ws = weightsync(**TWO)
    told = whole(ws, 1, 2)
    once = status_of(ws, told)
    assert status_of(ws, told, previous=once, seconds=60) == once


def test_a_report_of_another_weightsync_is_not_believed() -> None:
    ws = weightsync(**TWO)
    for stranger in ({"uid": "u2"}, {"namespace": "other"}, {"name": "other"}):
        told = whole(ws, 1).model_copy(update=stranger)
        assert the(status_of(ws, told), "Ready").reason == "WaitingForSender"


def test_a_replica_of_several_gpus_is_ready_when_all_its_ranks_are() -> None:
    ws = weightsync(placement="Dedicated", receivers={"replicas": 2, "gpusPerPod": 2})
    told = report(ws, [step(1, [row(rank) for rank in (1, 2, 3)])], states={4: (AgentState.TAINTED, "x")})
    status = status_of(ws, told)
    assert (status.ready_replicas, status.replicas, status.summary.receivers) == (1, 2, "1/2")


# --- memory -----------------------------------------------------------------------------------------------------------


def leaking(ws: WeightSync, steps: int, rank: int, each: int) -> Report:
    def reserved(of: int, number: int) -> int:
        return GIB + (each * number if of == rank else 0)

    return report(
        ws,
        [
            step(n, [row(r, reserved=reserved(r, n)) for r in (1, 2)], sender=reserved(0, n))
            for n in range(1, steps + 1)
        ],
    )


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_leak_of_one_bucket_a_step_is_seen_within_the_window_and_named(rank: int) -> None:
    ws = weightsync(**TWO, memory={"maxReservedGrowth": "64Mi", "window": 8})
    stable = the(status_of(ws, leaking(ws, 8, rank, 256 * MIB)), "MemoryStable")
    assert (stable.status, stable.reason) == ("False", "ReservedGrows")
    assert f"rank {rank}" in stable.message
    assert planned(ws).agents()[rank].pod in stable.message
    assert "64Mi" in stable.message


def test_a_small_leak_is_seen_once_it_exceeds_the_limit() -> None:
    ws = weightsync(**TWO, memory={"maxReservedGrowth": "64Mi", "window": 8})
    assert the(status_of(ws, leaking(ws, 9, 2, 10 * MIB)), "MemoryStable").status == "True"
    assert the(status_of(ws, leaking(ws, 10, 2, 10 * MIB)), "MemoryStable").status == "False"


def test_growth_that_ended_before_the_window_is_forgiven() -> None:
    ws = weightsync(**TWO, memory={"window": 8})
    grown = leaking(ws, 5, 1, 256 * MIB).steps
    flat = [step(n, [row(1, reserved=grown[-1].receivers[0].memory.reserved_after), row(2)]) for n in range(6, 14)]
    told = report(ws, [*[s.model_copy(update={"memory": flat[0].memory}) for s in grown], *flat])
    assert the(status_of(ws, told), "MemoryStable").status == "True"


def test_what_an_agent_allocates_in_its_first_two_steps_is_no_leak() -> None:
    ws = weightsync(**TWO)
    first = [step(n, [row(1, reserved=n * GIB), row(2)]) for n in (1, 2, 3)]
    then = [step(n, [row(1, reserved=3 * GIB), row(2)]) for n in (4, 5)]
    assert the(status_of(ws, report(ws, [*first, *then])), "MemoryStable").status == "True"


def test_a_receiver_that_came_back_warms_up_anew() -> None:
    ws = weightsync(**TWO)
    before = [step(n, [row(1, reserved=GIB // 4), row(2)]) for n in range(1, 5)]
    away = [step(5, [row(2)])]
    again = [step(n, [row(1, reserved=n * GIB), row(2)]) for n in (6, 7)]
    assert the(status_of(ws, report(ws, [*before, *away, *again])), "MemoryStable").status == "True"
    grown = [step(n, [row(1, reserved=n * GIB), row(2)]) for n in (8, 9)]
    assert the(status_of(ws, report(ws, [*before, *away, *again, *grown])), "MemoryStable").status == "False"


def test_memory_is_unknown_before_there_is_something_to_compare_and_stands_when_the_sender_is_silent() -> None:
    ws = weightsync(**TWO)
    assert the(status_of(ws, whole(ws, 1)), "MemoryStable").status == "Unknown"
    leaked = status_of(ws, leaking(ws, 6, 1, 256 * MIB))
    assert the(status_of(ws, None, previous=leaked), "MemoryStable").status == "False"


# --- ACKs and routes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ack", "timely"), [(30_000_000, "True"), (30_000_001, "False")])
def test_an_ack_that_took_more_than_half_of_its_time_is_late(ack: int, timely: str) -> None:
    ws = weightsync(**TWO, transfer={"ackTimeoutSeconds": 60})
    found = the(status_of(ws, report(ws, [step(1, [row(1), row(2, ack=ack)])])), "AcksTimely")
    assert found.status == timely
    assert "rank 2" in found.message


def test_a_step_without_an_ack_in_time_is_named() -> None:
    ws = weightsync(**TWO)
    error = "step 2: not acknowledged within 60 s by rank 1"
    told = report(ws, [step(2, [row(1, state=AgentState.TAINTED, error=error), row(2)])])
    found = the(status_of(ws, told), "AcksTimely")
    assert (found.status, found.reason) == ("False", "AckTimeout")
    assert "demo-receivers-0" in found.message


@pytest.mark.parametrize(
    ("spec", "route", "nodes", "status", "says"),
    [
        (TWO, "NET/Socket", {}, "False", "sharedMemory: Host"),
        (TWO, "NET/Socket", {2: "node-b"}, "False", "RDMA"),
        (TWO, "NET/IB", {2: "node-b"}, "True", ""),
        (TWO, "NET/IB", {}, "False", "placement Node"),
        (TWO, "SHM/direct", {}, "False", "placement Node"),
        ({"placement": "Node"}, "P2P/CUMEM", {}, "True", ""),
        ({"placement": "Node", "device": "CPU"}, "SharedMemory", {}, "True", "CPU"),
        ({**TWO, "device": "CPU"}, "Gloo", {}, "True", "CPU"),
    ],
)
def test_a_slow_route_says_what_would_be_faster(
    spec: dict[str, Any], route: str, nodes: dict[int, str], status: str, says: str
) -> None:
    ws = weightsync(**spec)
    rows = [row(agent.rank) for agent in planned(ws).agents() if agent.rank]
    seen = observed(ws, nodes={agent.rank: nodes.get(agent.rank, "node-a") for agent in planned(ws).agents()})
    found = the(status_of(ws, report(ws, [step(1, rows)], route=route), seen), "TransportOptimal")
    assert found.status == status
    assert route in found.message
    assert says in found.message


def test_ipc_is_verified_by_the_self_test_and_only_where_it_is_used() -> None:
    ws = weightsync(placement="Colocated", receivers={"replicas": 1})
    told = report(ws, [], transport="IPC")
    assert the(status_of(ws, told), "IPCVerified").status == "Unknown"
    assert the(status_of(ws, told.model_copy(update={"self_tested": True})), "IPCVerified").status == "True"
    refused = report(ws, [], states={1: (AgentState.REFUSED, "the self-test read other bytes")})
    assert the(status_of(ws, refused), "IPCVerified").status == "False"
    assert condition(status_of(weightsync(**TWO), None), ConditionType.IPC_VERIFIED) is None
