"""A chosen plan's step on a timeline, as data: how long it waits, and for which collectives."""

from __future__ import annotations

from meshplan.core import Axes, CollectiveKind
from meshplan.cost import Chosen, timeline_of
from meshplan.plan._data import StepTimeline, Wait


def step_timeline(chosen: Chosen) -> StepTimeline:
    """The figures of the chosen strategies' timeline. A combined collective counts for each line by its bytes."""
    step = timeline_of(chosen)
    runs: dict[tuple[CollectiveKind, Axes, str], float] = {}
    waited: dict[tuple[CollectiveKind, Axes, str], float] = {}
    for run, seconds in step.exposed_by_run():
        whole = run.nbytes or len(run.members)
        for e in run.members:
            c = e.collective
            key = (c.kind, c.axes, c.source)
            runs[key] = runs.get(key, 0.0) + c.count
            waited[key] = waited.get(key, 0.0) + seconds * (c.nbytes or 1) / whole
    waits = [
        Wait(kind=kind, axes=axes, source=source, runs=runs[kind, axes, source], seconds=seconds)
        for (kind, axes, source), seconds in waited.items() if seconds > 0
    ]  # fmt: skip
    return StepTimeline(
        seconds=step.seconds, busy_seconds=step.busy_seconds, exposed_seconds=step.exposed_seconds,
        hidden_seconds=max(0.0, step.collective_seconds - step.exposed_seconds),
        waits=tuple(sorted(waits, key=lambda w: (-w.seconds, w.kind, w.source, w.axes))),
    )
