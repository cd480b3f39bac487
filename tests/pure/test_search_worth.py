"""Of plans that take the same time the one with fewer mesh axes is taken."""

from __future__ import annotations

from dataclasses import replace

from meshplan.core import MeshShape
from meshplan.plan import Found
from tests._programs import adam_args, adam_step, search_of


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
