"""A timeline in the trace event format, which Perfetto and chrome://tracing open.

One process per device (and one for what belongs to no device), one track per resource; where a
resource serves several tasks at once, one track for each (slices of a track must nest). A task
that uses several resources shows on the tracks of all. Arrows join the tasks of the critical
path, counters show memory. Times are whole nanoseconds, written in microseconds as the format
asks, so that slices that meet do not overlap after rounding.
Source: the Trace Event Format document of the Chromium project.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.simulate._intervals import lanes
from meshplan.simulate._task import TASK_KINDS, Floats
from meshplan.simulate._timeline import Timeline

Event = dict[str, Any]


def _nanoseconds(times: Floats) -> list[int]:
    return np.rint(times * 1e9).astype(np.int64).tolist()


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline as an object for `json.dumps`: {"traceEvents": [...], "displayTimeUnit": "ns", ...}.

    Events rise in time. Devices are processes numbered from 1; process 0 holds what is shared.
    """
    slices, tracks, first_track = _slices(timeline)
    events = slices + _arrows(timeline, first_track) + _counters(timeline)
    events.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": tracks + events, "displayTimeUnit": "ns",
        "otherData": {"makespan_seconds": timeline.makespan_seconds, "sharing": timeline.sharing},
    }


def write_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write `chrome_trace(timeline)` to a file, for ui.perfetto.dev or chrome://tracing."""
    Path(path).write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")


def _slices(timeline: Timeline) -> tuple[list[Event], list[Event], dict[int, tuple[int, int]]]:
    """(slices, names of their tracks, for each task the first track that it is on)."""
    tasks, resources = timeline.tasks, timeline.resources
    begin, end = _nanoseconds(timeline.start), _nanoseconds(timeline.end)
    users = tasks.user
    members = [(r.device, r.name, users[tasks.uses == place]) for place, r in enumerate(resources)]
    idle = np.flatnonzero(np.diff(tasks.use_ptr) == 0)
    members += [(d, "no resource", idle[tasks.device[idle] == d]) for d in np.unique(tasks.device[idle]).tolist()]
    slices, tracks, first = [], [], {}
    used: dict[int, int] = {}
    for device, name, places in members:
        if not used.get(device):
            tracks.append(_label("process_name", device + 1, 0, f"device {device}" if device >= 0 else "shared"))
        found = lanes(np.array(begin)[places], np.array(end)[places]).tolist()
        base = used.get(device, 0) + 1
        used[device] = base + max(found, default=0)
        for lane in range(max(found, default=0) + 1):
            tracks.append(_label("thread_name", device + 1, base + lane, name if not lane else f"{name} ({lane + 1})"))
        for place, lane in zip(places.tolist(), found, strict=True):
            where = first.setdefault(place, (device + 1, base + lane))
            slices.append(_slice(timeline, place, begin[place], end[place], (device + 1, base + lane), where))
    return slices, tracks, first


def _label(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _slice(
    timeline: Timeline, place: int, begin: int, end: int, track: tuple[int, int], first: tuple[int, int]
) -> Event:
    tasks = timeline.tasks
    kind = TASK_KINDS[tasks.kind[place]]
    args: dict[str, Any] = {"task": place}
    facts = {"detail": tasks.details[place], "source": tasks.sources[place], "nbytes": int(tasks.nbytes[place])}
    args.update({name: fact for name, fact in facts.items() if fact})
    if timeline.ready[place] < timeline.start[place]:
        args["queued_seconds"] = float(timeline.start[place] - timeline.ready[place])
    if track != first:
        args["also_on"] = list(first)
    return {
        "ph": "X", "name": tasks.names[place] or tasks.details[place] or kind, "cat": kind, "pid": track[0],
        "tid": track[1], "ts": begin / 1000, "dur": (end - begin) / 1000, "args": args,
    }


def _arrows(timeline: Timeline, tracks: dict[int, tuple[int, int]]) -> list[Event]:
    """An arrow from each task of the critical path to the next; it leaves just inside the slice, to bind to it."""
    steps, events = timeline.critical_path(), []
    begin, end = _nanoseconds(timeline.start), _nanoseconds(timeline.end)
    for number, (step, later) in enumerate(pairwise(steps)):
        leaves, arrives = max(begin[step.task], end[step.task] - 1), begin[later.task]
        common = {"name": f"critical path: {later.waited_for}", "cat": "critical path", "id": number}
        for phase, task, at in (("s", step.task, leaves), ("f", later.task, arrives)):
            event = {"ph": phase, **common, "pid": tracks[task][0], "tid": tracks[task][1], "ts": at / 1000}
            events.append(event if phase == "s" else {**event, "bp": "e"})
    return events


def _counters(timeline: Timeline) -> list[Event]:
    events = []
    for device in timeline.devices:
        times, held = timeline.memory(device)
        if held.any():
            events += [
                {"ph": "C", "name": "memory", "pid": device + 1, "tid": 0, "ts": at / 1000, "args": {"bytes": level}}
                for at, level in zip(_nanoseconds(times), held.tolist(), strict=True)
            ]
    return events
