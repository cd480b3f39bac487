"""Pipelines of uniform stages against their closed forms, and the shifted critical path of Merak."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.simulate import simulate
from tests._timelines import gpipe, one_forward_one_backward, pipeline

STAGES, MICRO = st.integers(1, 6), st.integers(1, 12)


@given(STAGES, MICRO, st.integers(1, 4), st.integers(1, 4), st.sampled_from([gpipe, one_forward_one_backward]))
@settings(max_examples=60, deadline=None)
def test_makespan_and_bubble_of_uniform_stages(p: int, m: int, forward: int, backward: int, schedule) -> None:
    found = simulate(*pipeline(schedule(p, m), forward=forward, backward=backward))
    assert found.makespan_seconds == (m + p - 1) * (forward + backward)
    for stage in range(p):
        bubble = found.idle_seconds(stage) / found.makespan_seconds
        assert bubble == pytest.approx((p - 1) / (m + p - 1))
        assert found.utilisation(stage) == pytest.approx(m / (m + p - 1))


@given(STAGES, MICRO)
@settings(max_examples=30, deadline=None)
def test_micro_batches_in_flight(p: int, m: int) -> None:
    """GPipe keeps every micro-batch; stage k of 1F1B at most p - k (stages numbered from 0)."""
    kept = simulate(*pipeline(gpipe(p, m), forward=1, backward=2, nbytes=10))
    assert [kept.peak_bytes(stage) for stage in range(p)] == [10 * m] * p
    kept = simulate(*pipeline(one_forward_one_backward(p, m), forward=1, backward=2, nbytes=10))
    assert [kept.peak_bytes(stage) for stage in range(p)] == [10 * min(m, p - stage) for stage in range(p)]


def test_the_critical_path_of_a_pipeline_has_no_bubble() -> None:
    p, m = 4, 8
    found = simulate(*pipeline(one_forward_one_backward(p, m), forward=1, backward=2))
    path = found.critical_path()
    assert sum(step.end_seconds - step.start_seconds for step in path) == found.makespan_seconds == 33
    devices = [int(found.tasks.device[step.task]) for step in path]
    assert set(devices) == set(range(p)) and devices[0] == devices[-1] == 0


# Merak (arXiv 2206.04959): F = R = 1, B = 2; recomputed figures.
MERAK = {(4, 8): (44, 41, 39, 38), (8, 16): (92, 85, 83, 82), (8, 32): (156, 149, 147, 146)}


@pytest.mark.parametrize(("stages", "micro"), MERAK)
def test_recomputing_early_and_not_at_the_end_shifts_the_critical_path(stages: int, micro: int) -> None:
    """Plain; then (a) the second forward does not wait for the gradient; (b) there is none on the last stage;
    (c) the stage before it runs its third forward before its first backward."""
    plain = one_forward_one_backward(stages, micro)
    ahead = one_forward_one_backward(stages, micro)
    ahead[-2].remove("F2")
    ahead[-2].insert(ahead[-2].index("B0"), "F2")
    times: dict[str, Any] = {"forward": 1, "again": 1, "backward": 2}
    found = (
        simulate(*pipeline(plain, **times)),
        simulate(*pipeline(plain, **times, early=True)),
        simulate(*pipeline(plain, **times, early=True, last_again=False)),
        simulate(*pipeline(ahead, **times, early=True, last_again=False)),
    )
    assert tuple(timeline.makespan_seconds for timeline in found) == MERAK[stages, micro]
    assert found[0].makespan_seconds == (micro + stages - 1) * (1 + 1 + 2)
