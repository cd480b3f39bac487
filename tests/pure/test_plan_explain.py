"""Explanations of arguments, results, collectives and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from inline_snapshot import snapshot

from meshplan.core import ArgumentError
from meshplan.plan import StepTimeline, Wait, collective_costs, explain, in_words
from tests._plans import MESH, array, make_plan, spec


def test_an_argument_in_full() -> None:
    found = explain(make_plan(), "state/params/layers/0/up")
    assert found.text == snapshot("""\
state/params/layers/0/up  float32[64, 256]
  dims        embed mlp
  stored      (data, model)  chosen: embed over data (2), mlp over model (4)
  each device [32, 64], 8.19 kB of 65.5 kB
  memory      donated, becomes result 0/params/layers/0/up
  used        as (None, model): mlp over model (4), 2 copies, 16.4 kB
  moves       all-gather over data, 16.4 kB, 1.16 us each time
  in a step   3 x all-gather over data: 197 kB, 4.97 us at models/gpt.py:12 (dot_general state/params/layers/0/up)\
""")
    assert [a.path for a in found.arrays] == ["state/params/layers/0/up"]
    assert [c.kind for c in found.collectives] == ["all-gather"]
    assert str(found) == found.text


def test_a_pattern_shows_equal_layers_once() -> None:
    found = explain(make_plan(), "params/layers/.*/scale")
    assert len(found.arrays) == 3
    assert found.text == snapshot("""\
state/params/layers/*/scale x 3  float32[64]
  dims        embed
  stored      (None)  chosen: whole on every device
  each device [64], 256 B, the whole array
  together    768 B on each device for 3 arrays
  memory      donated, becomes result 0/params/layers/0/scale
  used        as stored\
""")


def test_a_pinned_argument_says_so() -> None:
    text = str(explain(make_plan(), "batch.tokens"))
    assert "stored      (data, None)  pinned: batch over data (2), 4 copies" in text
    assert "memory      kept, no result takes it over" in text


def test_a_move_that_needs_no_communication_is_free() -> None:
    data = make_plan(arguments=(array("x", (8, 8), spec("data", None), used=(spec("data", "model"),)),))
    assert "moves       slice over model, free: every device has its part already" in str(explain(data, "x"))


def test_a_result_is_explained_where_no_argument_matches() -> None:
    assert str(explain(make_plan(), "0/params/layers/0/up")) == snapshot("""\
0/params/layers/0/up  float32[64, 256]
  stored      (data, model)  chosen: dim 0 over data (2), dim 1 over model (4)
  each device [32, 64], 8.19 kB of 65.5 kB
  memory      taken over from argument state/params/layers/0/up
  comes by    (data, model)\
""")


def test_an_unknown_path_names_the_nearest() -> None:
    with pytest.raises(ArgumentError) as caught:
        explain(make_plan(), "params/layers/0/upp")
    assert str(caught.value) == snapshot(
        "'params/layers/0/upp' matches no argument or result of the plan. Nearest: state/params/layers/0/up, "
        "0/params/layers/0/up, state/mu/layers/0/up. Or ask for collectives, memory or time."
    )
    with pytest.raises(ArgumentError, match="matches no argument or result"):
        explain(make_plan(), "params/(")


def test_collectives_by_source_line() -> None:
    assert str(explain(make_plan(), "collectives")) == snapshot("""\
197 kB in 1 ms, per device and step
kind        over        runs  bytes   time     source            operations
all-gather  data        3     197 kB  4.97 us  models/gpt.py:12  dot_general state/params/layers/0/up
all-reduce  data+model  1     4 B     0.07 ns  models/gpt.py:40  reduce_sum\
""")
    assert str(explain(make_plan(collectives=()), "collectives")) == "no collectives: nothing moves between devices"


def test_memory_at_the_peak() -> None:
    assert str(explain(make_plan(), "memory")) == snapshot("""\
peak 5 MB of 16 GB allowed (under 1%), per device; arguments take 200 kB
the largest of what is held at the peak:
     3 MB  dot_general float32[16,32,256] models/gpt.py:12
  32.8 kB  state/params/embed float32[512,64]
  1.97 MB  all else\
""")


def test_time_on_the_timeline_and_what_is_waited_for() -> None:
    waits = (
        Wait(kind="all-reduce", axes=("data",), source="/home/me/models/gpt.py:12", runs=16, seconds=1.5e-3),
        Wait(kind="all-gather", axes=("data", "model"), source="", runs=1, seconds=2e-6),
    )
    line = StepTimeline(seconds=5e-3, busy_seconds=3.498e-3, exposed_seconds=1.502e-3, hidden_seconds=0.0, waits=waits)
    assert str(explain(make_plan(timeline=line), "time")) == snapshot("""\
5 ms a step on a timeline, modelled
  3.5 ms computing: 3 ms of FLOPs at peak rate, the rest memory traffic
  1.5 ms waiting for collectives
  0 s of collectives hidden beside computation
the collectives on the critical path, those it waits for longest first:
  1.5 ms  16 x all-reduce over data at models/gpt.py:12
    2 us  1 x all-gather over data+model\
""")
    assert "no collective is on the critical path" in str(explain(make_plan(timeline=replace(line, waits=())), "time"))
    assert str(explain(make_plan(), "time")) == "this plan was saved without a timeline: plan again."


def test_costs_without_a_known_machine_have_no_seconds() -> None:
    costs = collective_costs(make_plan(machine="measured here"))
    assert [c.seconds for c in costs] == [None, None]
    assert [c.kind for c in costs] == ["all-gather", "all-reduce"], "most bytes first"


def test_a_split_in_words() -> None:
    a = array("x", (8, 8), spec("data", "model"), dims=("rows", ""))
    assert in_words(a, a.spec, MESH) == "rows over data (2), dim 1 over model (4)"
    assert in_words(a, spec(None, None), MESH) == "whole on every device"
