"""Samples per second: closed forms, the steady pace of asynchronous schedules, seconds modelled on a machine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import ArgumentError, MeshError, MeshShape
from meshplan.machine import Machine, collective_seconds
from meshplan.pipeline import StageSeconds, schedule, stage_seconds, throughput


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_without_flushes_the_bubble_is_gone(n: int, t: int, forward: int, backward: int, update: int) -> None:
    seconds = StageSeconds(forward=forward, backward=backward, update=update)
    flushed = throughput(schedule("1f1b", n, t), seconds)
    assert flushed.seconds == (t + n - 1) * (forward + backward) + update
    free = throughput(schedule("async-1f1b", n, t, mini_batches=2 * n + 4), seconds)
    whole = t * (forward + backward) + update
    assert free.seconds == pytest.approx(whole)
    if not update:
        assert free.samples_per_second / flushed.samples_per_second == pytest.approx((t + n - 1) / t)
        assert free.bubble == pytest.approx(0, abs=1e-12)
        assert flushed.bubble == pytest.approx((n - 1) / (t + n - 1))


def test_the_slowest_stage_sets_the_pace() -> None:
    seconds = StageSeconds(forward=[1, 3, 1, 1], backward=[2, 2, 4, 2])
    found = throughput(schedule("async-1f1b", 4, 5, mini_batches=12), seconds, samples_per_micro_batch=8)
    assert found.seconds == pytest.approx(5 * 5)
    assert found.samples_per_second == pytest.approx(8 * 5 / 25)
    assert found.bubble == pytest.approx(1 - (3 + 5 + 5 + 3) / (4 * 5))


def test_stale_is_the_mean_of_both_its_parts() -> None:
    seconds = StageSeconds(forward=1, backward=2)
    found = throughput(schedule("stale", 4, 4, mini_batches=10, switch_at=0), seconds)
    assert found.seconds <= (4 + 3) * 3
    later = throughput(schedule("stale", 4, 4, mini_batches=10, switch_at=8), seconds)
    assert 4 * 3 < later.seconds < found.seconds


def test_too_few_mini_batches_show_no_pace() -> None:
    with pytest.raises(ArgumentError) as error:
        throughput(schedule("async-1f1b", 4, 4, mini_batches=3), StageSeconds(forward=1, backward=2))
    assert str(error.value) == (
        "throughput(): 3 mini-batches of schedule 'async-1f1b' show no steady pace; lay out mini_batches=4 or more."
    )


@pytest.mark.parametrize("name", ["a100:1x4", "h100:4x8"])
def test_seconds_of_a_stage_on_a_machine(name: str) -> None:
    machine = Machine.preset(name)
    mesh = MeshShape.of({"stage": 4, "data": machine.devices // 4})
    found = stage_seconds(
        machine, mesh, forward_flops=[1e12, 2e12, 2e12, 3e12], boundary_bytes=2**24, sum_axes=("data",),
        gradient_bytes=1e9, update_bytes=7e9,
    )
    rate = machine.chip.flops_for("bfloat16")
    table = schedule("1f1b", 4, 4)
    assert found.slot(table, "forward", 1) == 2e12 / rate
    assert found.slot(table, "backward", 3) == 2 * 3e12 / rate
    assert found.slot(schedule("zb-h1", 4, 4), "backward", 3) == 3e12 / rate
    assert found.of("send", 0, 4) == collective_seconds(machine, mesh, "collective-permute", 2**24, ("stage",)) > 0
    summed = collective_seconds(machine, mesh, "all-reduce", 1e9, ("data",))
    assert found.of("update", 0, 4) == pytest.approx(7e9 / machine.chip.memory_bytes_per_second + summed)
    with pytest.raises(MeshError, match="axis 'stag' is not in the mesh"):
        stage_seconds(machine, mesh, forward_flops=1e12, boundary_bytes=1, axis="stag")


@pytest.mark.parametrize("stages", [2, 4])
def test_xpipe_against_gpipe_on_one_node(stages: int) -> None:
    """With T = N micro-batches the modelled gain is a little under the (2 N - 1)/N of no sends and no update."""
    machine = Machine.preset("a100:1x4")
    mesh = MeshShape.of({"data": 4 // stages, "stage": stages})
    seconds = stage_seconds(machine, mesh, forward_flops=1e12, boundary_bytes=2**24, update_bytes=1e8)
    gain = (
        throughput(schedule("async-1f1b", stages, stages, mini_batches=2 * stages + 4), seconds).samples_per_second
        / throughput(schedule("gpipe", stages, stages), seconds).samples_per_second
    )
    ideal = (2 * stages - 1) / stages
    assert 0.9 * ideal < gain < ideal * 1.02
