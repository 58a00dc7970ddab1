"""The bench's arithmetic and its one format; no test here looks at how long anything took."""

from __future__ import annotations

import sys

import pytest
import torch
from weightsync_agent.bench.case import Case, Measured, Memory, slope
from weightsync_agent.bench.models import allocate, fill, manifest_of
from weightsync_agent.bench.rows import Baseline, against, baseline_row, result, row_of, table
from weightsync_agent.bench.series import Series
from weightsync_agent.errors import SourceError
from weightsync_api.bench_result import BenchResult, BenchRow
from weightsync_api.reports import MemorySample
from weightsync_api.v1alpha1.spec import TransferMode

MIB = 1 << 20
CPU = torch.device("cpu")


def a_case(model: str = "310x1KiB", *, verify: bool = False) -> Case:
    return Case(
        model=model, transport="shm", mode=TransferMode.DIRECT, device=CPU, receiver_devices=(CPU, CPU),
        bucket_bytes=MIB, slots=2, steps=3, threads=1, verify=verify,
    )  # fmt: skip


def series(*values: float) -> Series:
    made = Series(len(values))
    for value in values:
        made.append(value)
    return made


def measured(
    mode: str = "Direct", nbytes: int = 310 << 10, seconds: tuple[float, ...] = (0.003, 0.001, 0.002)
) -> Measured:
    memory = [
        Memory(100 * MIB, series(101 * MIB, 103 * MIB, 102 * MIB), peak=104 * MIB),
        Memory(200 * MIB, series(210 * MIB, 210 * MIB, 210 * MIB), peak=217 * MIB),
    ]
    return Measured(mode, nbytes, 310, list(seconds), memory, "SharedMemory")


BASE = Baseline(copy=0.0005, foreach=0.0004, round_trip=0.0001)


def test_many_of_one_size_are_that_many_tensors_of_that_many_bytes() -> None:
    for model, count, size in [("310x1KiB", 310, 1024), ("3x2MiB", 3, 2 * MIB), ("18867x1KB", 18867, 1000)]:
        manifest = manifest_of(model)
        assert len(manifest.tensors) == count
        assert {entry.nbytes for entry in manifest.tensors} == {size}
        assert manifest.nbytes == count * size


def test_a_real_models_name_gives_its_shapes() -> None:
    manifest = manifest_of("qwen3-0.6b")
    assert len(manifest.tensors) == 310
    assert manifest.nbytes == 1_192_099_840


def test_an_unknown_model_is_a_sentence() -> None:
    with pytest.raises(SourceError, match="no-such-model"):
        manifest_of("no-such-model")


def test_weights_in_an_arena_and_apart_are_filled_with_the_same_bytes() -> None:
    manifest = manifest_of("5x1KiB")
    arena = torch.empty(manifest.arena_bytes, dtype=torch.uint8)
    inside, apart, other = allocate(manifest, CPU, arena), allocate(manifest, CPU), allocate(manifest, CPU)
    for weights, seed in ((inside, 7), (apart, 7), (other, 8)):
        fill(weights, seed)
    raw = [[t.view(torch.int16) for t in weights.values()] for weights in (inside, apart, other)]
    assert all(torch.equal(a, b) for a, b in zip(raw[0], raw[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(raw[0], raw[2], strict=True))
    assert not torch.equal(raw[0][0], raw[0][1])


def test_the_slope_is_that_of_the_least_squares_line() -> None:
    assert slope([5] * 10) == 0
    assert slope([7]) == 0
    assert slope([100 + 256 * step for step in range(20)]) == pytest.approx(256)
    # (0, 0), (1, 2), (2, 1): the line through (1, 1) with slope 1/2.
    assert slope([0, 2, 1]) == pytest.approx(0.5)


def test_memory_counts_growth_over_measured_steps_and_the_peak_over_all() -> None:
    memory = Memory(10, Series(3))
    for number, (reserved, peak) in enumerate([(50, 90), (30, 31), (34, 35), (33, 40)]):
        memory.take(MemorySample(reserved_after=reserved, peak=peak), measured=number > 0)
    assert memory.growth == 4
    assert memory.peak == 90
    assert memory.slope == pytest.approx(1.5)


def test_a_series_keeps_what_it_has_room_for_and_never_grows() -> None:
    made = series(3, 1 << 52, 5)
    size = sys.getsizeof(made._values)
    made.append(9)
    assert list(made) == [3, 1 << 52, 5]
    assert (len(made), made[-1], max(made)) == (3, 5, 1 << 52)
    assert sys.getsizeof(made._values) == size


def test_a_row_has_the_median_its_rate_and_the_ratio_to_the_copy() -> None:
    row = row_of(a_case(), measured(), BASE, soak=False)
    assert row.milliseconds == pytest.approx(2.0)
    assert row.gigabytes_per_second == pytest.approx(317_440 / 0.002 / 1e9, rel=1e-2)
    assert row.ratio_to_copy == pytest.approx(0.25)
    assert (row.transport, row.mode, row.model, row.receivers, row.repeats) == ("shm", "Direct", "310x1KiB", 2, 3)
    assert row.peer is None


def test_growth_and_peak_of_a_row_are_the_worst_process() -> None:
    row = row_of(a_case(), measured(), BASE, soak=False)
    assert row.reserved_growth_bytes == 2 * MIB
    assert row.reserved_peak_bytes == 17 * MIB


def test_what_a_step_costs_beyond_its_copies_is_in_round_trips() -> None:
    direct = row_of(a_case(), measured("Direct"), BASE, soak=False).note
    packed = row_of(a_case(), measured("Packed"), BASE, soak=False).note
    # 2 ms less one list copy of 0.4 ms, and less two.
    assert "1600 us, 16.0 bare ZeroMQ round trips of 100 us" in direct
    assert "1200 us, 12.0 bare ZeroMQ round trips" in packed
    assert "5.00 times one _foreach_copy_" in direct


def test_a_large_model_and_digests_have_no_such_note() -> None:
    assert row_of(a_case(), measured(nbytes=1 << 30), BASE, soak=False).note == "joined in 0.00 s"
    verified = row_of(a_case(verify=True), measured(), BASE, soak=False)
    assert verified.note == "joined in 0.00 s"
    assert verified.name.endswith("with digests")


def test_a_soak_tells_slope_and_growth_of_every_process() -> None:
    note = row_of(a_case(), measured(nbytes=1 << 30), BASE, soak=True).note
    assert f"sender {MIB / 2:+.1f} bytes/step, +1MiB" in note
    assert "rank 1 +0.0 bytes/step, +0B" in note


def a_peer() -> BenchRow:
    row = row_of(a_case(), measured(), BASE, soak=False)
    return row.model_copy(
        update={"milliseconds": 20.0, "ratio_to_copy": 9.0, "peer": "other 1.0", "note": "its default"}
    )


def test_a_peers_row_is_set_against_this_runs_copy_and_our_rows() -> None:
    ours = [row_of(a_case(), measured(seconds=(s,)), BASE, soak=False) for s in (0.002, 0.005)]
    row = against(a_peer(), ours, BASE.copy)
    assert row.ratio_to_copy == pytest.approx(0.025)
    assert row.note == "its default; takes 4.0 to 10.0 times as long as ours"
    assert against(a_peer(), [], BASE.copy).note == "its default"


def test_a_result_survives_json_and_its_table_shows_every_row_and_note() -> None:
    rows = [
        baseline_row("310x1KiB", 310 << 10, 1, BASE.copy, BASE, 5),
        row_of(a_case(), measured(), BASE, soak=False),
        against(a_peer(), [], BASE.copy),
    ]
    made = result(rows, CPU, {"other": "1.0"})
    assert BenchResult.model_validate_json(made.model_dump_json()) == made
    assert made.versions["other"] == "1.0"
    assert rows[0].ratio_to_copy == 1.0
    lines = table(rows).splitlines()
    assert len(lines) == 1 + len(rows) + sum(bool(row.note) for row in rows)
    for line, row in zip(lines[1:], rows, strict=False):
        assert row.model in line
        assert f"{row.milliseconds:.3f}" in line
    assert "other 1.0" in lines[3]
    assert len({line.index("GB/S") for line in lines[:1]}) == 1
