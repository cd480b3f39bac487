"""Of plans that take the same time the one with fewer mesh axes is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

import meshplan as mp
from meshplan.core import MeshShape
from meshplan.plan import Found
from meshplan.plan._codec import to_bytes
from meshplan.plan._decode import from_bytes
from tests._programs import adam_args, adam_block_args, adam_block_step, adam_step, search_of


def test_an_axis_that_gains_nothing_is_left_out():
    search = search_of(adam_step, *adam_args(2, batch=512), machine="h100:1x8", donate=(0,))
    answers = [search.at(MeshShape.of(sizes), "dp") for sizes in ({"data": 2, "fsdp": 2, "model": 2}, {"data": 8})]
    found, simple = [a for a in answers if a is not None]
    assert simple.prediction.step_seconds <= found.prediction.step_seconds * (1 + 1e-9)
    assert search.simplest(found, [found, simple]) is simple
    assert search.simplest(simple, [simple, found]) is simple

    def slower(a: Found, factor: float) -> Found:
        prediction = replace(a.prediction, communication_seconds=a.prediction.communication_seconds * factor)
        return replace(a, prediction=prediction)

    assert search.simplest(found, [found, slower(simple, 1.1)]) is found


def test_the_timeline_ranks_where_it_is_asked_to():
    """A small step on GPUs: few bytes over links, but many kernels and much memory traffic."""
    args = adam_block_args(batch=16, seq=256, width=256, vocab=1024)
    by_sum, by_timeline = (
        mp.plan(adam_block_step, *args, machine="h100:1x8", options=mp.Options(rank_by=rank))
        for rank in ("sum", "timeline")
    )  # fmt: skip
    assert by_timeline.timeline is not None and by_sum.timeline is not None
    assert by_timeline.timeline.seconds < 0.97 * by_sum.timeline.seconds
    assert by_sum.data.serial_seconds < by_timeline.data.serial_seconds
    assert by_sum.step_seconds == by_sum.data.serial_seconds
    assert by_timeline.step_seconds == by_timeline.timeline.seconds, "simulated"
    ranked = [c.step_seconds for c in by_timeline.data.candidates if c.feasible]
    assert by_timeline.step_seconds <= min(ranked)
    assert from_bytes(to_bytes(by_timeline.data)).step_seconds == by_timeline.step_seconds
    with pytest.raises(mp.ArgumentError, match=r"rank_by='time'\) is unknown\. Nearest: timeline"):
        mp.Options(rank_by="time")  # type: ignore[arg-type]
