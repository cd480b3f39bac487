"""Cutting layers into stages: equal to brute force, within memory, and sentences for what cannot be."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import ArgumentError, MemoryLimitError
from meshplan.pipeline import cut_layers, schedule


def brute(stages, seconds, crossing, state, kept, held, limits):
    """The least (slowest seconds, crossing bytes) over every cut, None where none fits; seconds [stages, layers]."""
    layers = len(state)
    best = None
    for inner in combinations(range(1, layers), stages - 1):
        bounds = (0, *inner, layers)
        parts = list(enumerate(pairwise(bounds)))
        if any(sum(state[i:j]) + held[k] * sum(kept[i:j]) > limits[k] for k, (i, j) in parts):
            continue
        found = (max(sum(seconds[k][i:j]) for k, (i, j) in parts), sum(crossing[at - 1] for at in inner))
        best = found if best is None else min(best, found)
    return best


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_cut_equals_brute_force(data) -> None:
    layers = data.draw(st.integers(1, 10))
    stages = data.draw(st.integers(1, min(4, layers)))

    def row(length, low=0, high=6):
        return data.draw(st.lists(st.integers(low, high), min_size=length, max_size=length))

    forward, backward = [row(layers) for _ in range(stages)], [row(layers) for _ in range(stages)]
    crossing, state, kept = row(layers - 1), row(layers), row(layers)
    held, limits = row(stages, 1, 4), row(stages, 5, 120)
    want = brute(stages, np.add(forward, backward).tolist(), crossing, state, kept, held, limits)
    given_: dict[str, Any] = {
        "forward_seconds": forward, "backward_seconds": backward, "crossing_bytes": crossing, "state_bytes": state,
        "activation_bytes": kept, "in_flight": held, "memory_limits": limits,
    }
    if want is None:
        with pytest.raises(MemoryLimitError, match="no cut of"):
            cut_layers(stages, **given_)
        return
    found = cut_layers(stages, **given_)
    assert (found.slowest_seconds, sum(found.crossing_bytes)) == want
    assert found.bounds[0] == 0 and found.bounds[-1] == layers
    assert all(i < j for i, j in pairwise(found.bounds))
    assert all(used <= limit for used, limit in zip(found.nbytes, limits, strict=True))
    assert len(found.crossing_bytes) == stages - 1


def test_equal_layers_are_cut_evenly_where_it_is_narrow() -> None:
    found = cut_layers(4, forward_seconds=[1.0] * 8, backward_seconds=[2.0] * 8, crossing_bytes=[5.0] * 7)
    assert found.bounds == (0, 2, 4, 6, 8) and found.seconds == (6.0,) * 4
    # 7 layers in 3 stages: 3 + 2 + 2 in some order; the boundaries after layers 1 and 4 are narrow
    crossing = [9, 1, 9, 9, 1, 9]
    found = cut_layers(3, forward_seconds=[1] * 7, backward_seconds=[2] * 7, crossing_bytes=crossing)
    assert found.bounds == (0, 2, 5, 7) and found.crossing_bytes == (1, 1)


def test_a_slow_chip_gets_fewer_layers() -> None:
    seconds = np.outer([1.0, 3.0], np.ones(8))
    found = cut_layers(2, forward_seconds=seconds, backward_seconds=2 * seconds, crossing_bytes=[0] * 7)
    assert found.bounds == (0, 6, 8) and found.seconds == (18.0, 18.0)


def test_memory_by_position_moves_the_cut() -> None:
    """1F1B holds 4 micro-batches on the first stage and 1 on the last: equal limits push layers to the end."""
    table = schedule("1f1b", 4, 8)
    even: dict[str, Any] = {"forward_seconds": [1.0] * 8, "backward_seconds": [2.0] * 8, "crossing_bytes": [1.0] * 7}
    found = cut_layers(
        4, **even, state_bytes=[1.0] * 8, activation_bytes=[10.0] * 8, in_flight=table.in_flight_bounds,
        memory_limits=62.0,
    )
    assert found.bounds == (0, 1, 3, 5, 8)
    assert found.nbytes == (41.0, 62.0, 42.0, 33.0)
    assert found.slowest_seconds == 9.0


def test_what_cannot_be_cut_is_refused() -> None:
    figures: dict[str, Any] = {"forward_seconds": [1.0] * 3, "backward_seconds": [1.0] * 3, "crossing_bytes": [1.0] * 2}
    with pytest.raises(ArgumentError) as error:
        cut_layers(4, **figures)
    assert str(error.value) == (
        "3 layers cannot be cut into 4 stages: each needs one layer or more; give at most 3 stages."
    )
    with pytest.raises(ArgumentError, match="a cut into 0 stages cannot be; give a whole number from 1 on"):
        cut_layers(0, **figures)
    with pytest.raises(ArgumentError) as error:
        cut_layers(2, **{**figures, "crossing_bytes": [1.0] * 3})
    assert str(error.value) == (
        "crossing_bytes has shape (3,) and there are 2 boundaries between layers; give one figure for each."
    )
    with pytest.raises(ArgumentError, match=r"backward_seconds has shape \(2,\); give \(3,\), one figure for each"):
        cut_layers(2, **{**figures, "backward_seconds": [1.0] * 2})
    with pytest.raises(ArgumentError, match="state_bytes has -1; give figures of at least 0"):
        cut_layers(2, **figures, state_bytes=[1, -1, 1])


def test_a_stage_that_does_not_fit_is_told_with_its_numbers() -> None:
    gib = 1 << 30
    with pytest.raises(MemoryLimitError) as error:
        cut_layers(
            2, forward_seconds=[1.0] * 4, backward_seconds=[1.0] * 4, crossing_bytes=[1.0] * 3,
            state_bytes=[6 * gib, 9 * gib, 6 * gib, 2 * gib], memory_limits=[14 * gib, 10 * gib],
        )
    assert str(error.value) == (
        "no cut of 4 layers into 2 stages fits: in the one that comes nearest, stage 0 (layers 0 to 1) needs 16.1 GB "
        "and has 15 GB; take more stages, fewer micro-batches in flight, or rematerialise."
    )
