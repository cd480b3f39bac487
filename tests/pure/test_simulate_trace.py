"""Timelines as Chrome traces."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.simulate import Task, Tasks, chrome_trace, simulate, unlimited, write_chrome_trace
from tests._timelines import (
    ENGINE,
    LINKS,
    STREAM,
    WIDE,
    one_forward_one_backward,
    pipeline,
    resources_strategy,
    task_graphs,
)

# What the Trace Event Format document asks of each phase that we write, beyond ph, name, pid, tid, ts.
NEEDED = {"X": {"dur", "cat"}, "M": {"args"}, "C": {"args"}, "s": {"id", "cat"}, "f": {"id", "cat", "bp"}}


def faults(trace: dict[str, Any]) -> list[str]:
    """What a reader of the format would stumble over; empty for a valid trace."""
    found, events = [], trace["traceEvents"]
    names = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    slices = defaultdict(list)
    for event in events:
        missing = ({"ph", "name", "pid", "tid", "ts"} | NEEDED.get(event["ph"], {"a known phase"})) - event.keys()
        found += [f"{event} lacks {name}" for name in sorted(missing)]
        whole = all(isinstance(event[key], int) for key in ("pid", "tid"))
        if not whole or not isinstance(event["name"], str) or not event["name"] or event["ts"] < 0:
            found.append(f"{event} has a pid, tid, name or ts that cannot be")
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "C" and not all(isinstance(v, int | float) for v in event["args"].values()):
            found.append(f"{event} counts something that is no number")
    stamps = [event["ts"] for event in events]
    found += ["events do not rise in time"] * (stamps != sorted(stamps))
    for track, spans in slices.items():
        found += [f"track {track} has no name"] * (track not in names)
        for (_, end), (begin, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            found += [f"slices of track {track} overlap"] * (round(begin * 1000) < round(end * 1000))
    return found + _loose_arrows(events, slices)


def _loose_arrows(events: list[dict[str, Any]], slices: dict[tuple[int, int], list[tuple[float, float]]]) -> list[str]:
    found = []
    ends = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    if ends["s"].keys() != ends["f"].keys():
        found.append("an arrow has one end")
    for number, leaves in ends["s"].items():
        arrives = ends["f"].get(number, leaves)
        if arrives["ts"] < leaves["ts"]:
            found.append(f"arrow {number} goes back in time")
        for event in (leaves, arrives):
            spans = slices[event["pid"], event["tid"]]
            if not any(begin <= event["ts"] and (event["ts"] < end or begin == end) for begin, end in spans):
                found.append(f"arrow {number} ends outside of every slice")
    return found


def example() -> Tasks:
    return Tasks.of([
        Task(id=0, kind="compute", seconds=1e-3, uses=(0,), name="dot", allocates=64, source="model.py:7"),
        Task(id=1, kind="collective", seconds=2e-3, uses=(1,), after=(0,), detail="all-reduce", nbytes=128),
        Task(id=2, kind="compute", seconds=1e-3, uses=(0,), after=(1,), name="add", frees=64),
    ])


def test_a_small_trace_holds_its_slices_arrows_and_memory() -> None:
    trace = chrome_trace(simulate(example(), (ENGINE, LINKS[0])))
    events = trace["traceEvents"]
    assert [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("dot", 0, 1000), ("all-reduce", 1000, 2000), ("add", 3000, 1000),
    ]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["device 0", "compute", "link0"]
    assert [(e["ph"], e["ts"]) for e in events if e["ph"] in "sf"] == [
        ("s", 999.999), ("f", 1000), ("s", 2999.999), ("f", 3000),
    ]
    assert [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"] == [(0, 64), (4000, 0)]
    collective = next(e for e in events if e["name"] == "all-reduce")
    assert collective["args"] == {"task": 1, "detail": "all-reduce", "nbytes": 128}
    assert faults(trace) == []


def test_what_the_check_must_find() -> None:
    good = chrome_trace(simulate(example(), (ENGINE, LINKS[0])))
    first = next(place for place, e in enumerate(good["traceEvents"]) if e["ph"] == "X")
    for change in ({"dur": 1500.0, "tid": 2}, {"ts": 5000}, {"tid": 9}, {"name": ""}, {"ph": "Q"}, {"pid": "0"}):
        events = [dict(event) for event in good["traceEvents"]]
        events[first].update(change)
        assert faults({"traceEvents": events}), change


@given(st.data(), st.sampled_from(["fifo", "fair"]), st.booleans(), st.sampled_from([1.0, 1e-6, 1e-9 / 3]))
@settings(max_examples=100, deadline=None)
def test_every_trace_is_valid(data: st.DataObject, sharing: str, congested: bool, scale: float) -> None:
    resources = data.draw(resources_strategy(ENGINE, STREAM, WIDE, *LINKS))
    tasks = data.draw(task_graphs(15, len(resources)))
    scaled = [Task(**{**{f: getattr(t, f) for f in Task.__slots__}, "seconds": t.seconds * scale}) for t in tasks]
    resources = resources if congested else unlimited(resources)
    found = simulate(Tasks.of(scaled), resources, sharing=sharing)  # type: ignore[arg-type]
    assert faults(json.loads(json.dumps(chrome_trace(found), allow_nan=False))) == []


def test_a_pipeline_has_a_process_per_stage(tmp_path: Path) -> None:
    found = simulate(*pipeline(one_forward_one_backward(3, 4), forward=1e-3, backward=2e-3))
    write_chrome_trace(found, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["device 0", "device 1", "device 2"]
    assert faults(trace) == []
    last = max(e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X")
    assert last == pytest.approx(found.makespan_seconds * 1e6)
