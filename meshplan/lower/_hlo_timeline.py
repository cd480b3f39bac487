"""One device's step of a compiled module on a timeline: what an optimised, scheduled module would take.

The instructions run in the order of the schedule, one after the other. What is started beside them (start/done pairs,
the TPU's asynchronous fusions) queues on the links of its group's axes, first come first served, and the device waits
for it at its done; a collective without a start blocks. What computes and what moves do not slow each other down.
A loop's body is run turn by turn until a turn begins as the one before did, the rest are as long as that one; links
that are still busy when a loop begins stay so inside it. Of a conditional the longest branch runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshplan.core import Axes, MeshShape
from meshplan.lower._hlo_parse import Module, parse_module
from meshplan.lower._hlo_steps import Branch, Compute, Done, Loop, Moved, Start, Step, StepReader
from meshplan.machine import Machine

SAME_SECONDS = 1e-15  # turns of a loop whose links are busy for equally long but for rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedTime:
    """What is moved from one source line, all runs of a step: seconds in all, and of these exposed (waited for)."""

    kind: str
    source: str
    axes: Axes
    count: float
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimeline:
    """A step of one device.

    `seconds = compute_seconds + exposed_seconds + copy_seconds`: the device computes, waits for collectives, or waits
    for copies between memories (0 in most modules). `collective_seconds` is the sum of all collectives as if each ran
    alone, `hidden_seconds` the part of it that adds nothing to the step: behind computation, or behind another
    collective on other links. What is exposed counts for the collective that the device waited for, the queue before it
    included. `collectives`: by kind, source line and axes, most exposed first. `by_cycles`: computation is the
    compiler's estimate of cycles, not a roofline.
    """

    seconds: float
    compute_seconds: float
    collective_seconds: float
    exposed_seconds: float
    copy_seconds: float
    by_cycles: bool
    collectives: tuple[MovedTime, ...]

    @property
    def hidden_seconds(self) -> float:
        return self.collective_seconds - self.exposed_seconds


def module_timeline(
    text: str, machine: Machine, mesh_shape: MeshShape, module: Module | None = None
) -> ModuleTimeline:
    """The timeline of an optimised module (`compiled.as_text()`, which may be given parsed too).

    Computation by a roofline, or by the TPU compiler's estimated cycles where the machine states its clock; collectives
    by `collective_time`, with the figures fitted to a collectives library. Raises MeshError where the module has
    collectives and the mesh is not of the machine's size.
    """
    module = parse_module(text) if module is None else module
    reader = StepReader(module, text, machine, mesh_shape)
    part = _Player(reader).play(module.entry, {})
    rows = [
        MovedTime(
            kind=what.kind, source=what.source, axes=what.axes, count=s.count, seconds=s.seconds,
            exposed_seconds=s.exposed,
        )
        for what, s in part.moved.items()
    ]
    collectives = [row for row in rows if row.kind != "copy"]
    return ModuleTimeline(
        seconds=part.seconds, compute_seconds=part.compute,
        collective_seconds=sum(row.seconds for row in collectives),
        exposed_seconds=sum(row.exposed_seconds for row in collectives),
        copy_seconds=sum(row.exposed_seconds for row in rows if row.kind == "copy"), by_cycles=reader.by_cycles,
        collectives=tuple(sorted(collectives, key=lambda r: (-r.exposed_seconds, -r.seconds, r.kind, r.source))),
    )


@dataclass(slots=True)
class _Sum:
    count: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0


Busy = dict[str, float]  # for how long from now on each resource that is in use still is


@dataclass(slots=True)
class _Part:
    """A stretch of the step, from its own second 0; `free`: when each resource that was in use gets free."""

    free: Busy
    seconds: float = 0.0
    compute: float = 0.0
    moved: dict[Moved, _Sum] = field(default_factory=dict)

    def busy(self) -> Busy:
        return {r: at - self.seconds for r, at in self.free.items() if at > self.seconds}

    def wait(self, until: float, what: Moved) -> None:
        if until > self.seconds:
            self.moved[what].exposed += until - self.seconds
            self.seconds = until

    def add(self, other: _Part, times: float) -> None:
        """What follows, so many times; what it leaves busy, as of the last time."""
        self.seconds += times * other.seconds
        self.compute += times * other.compute
        for what, s in other.moved.items():
            own = self.moved.setdefault(what, _Sum())
            own.count += times * s.count
            own.seconds += times * s.seconds
            own.exposed += times * s.exposed
        self.free = {r: self.seconds + left for r, left in other.busy().items()}


class _Player:
    def __init__(self, reader: StepReader) -> None:
        self._reader = reader
        self._steps: dict[str, list[Step]] = {}
        self._known: dict[tuple[str, tuple[tuple[str, float], ...]], _Part] = {}

    def play(self, name: str, busy: Busy) -> _Part:
        """One run of a computation that begins with these resources in use."""
        key = name, tuple(sorted(busy.items()))
        if key not in self._known:
            if name not in self._steps:
                self._steps[name] = self._reader.steps(name)
            self._known[key] = self._run(self._steps[name], busy)
        return self._known[key]

    def _run(self, steps: list[Step], busy: Busy) -> _Part:
        part = _Part(dict(busy))
        pending: dict[str, tuple[float, Moved]] = {}
        for step in steps:
            if isinstance(step, Compute):
                part.seconds += step.seconds
                part.compute += step.seconds
            elif isinstance(step, Start):
                pending[step.key] = self._begin(part, step), step.what
            elif isinstance(step, Done):
                if step.key in pending:
                    part.wait(*pending.pop(step.key))
            elif isinstance(step, Loop):
                self._turns(part, step)
            else:
                self._longest(part, step)
        for end, what in sorted(pending.values(), key=lambda item: item[0]):  # nothing outlives what started it
            part.wait(end, what)
        return part

    def _begin(self, part: _Part, step: Start) -> float:
        """When it ends: it begins as soon as all its resources are free."""
        end = max((part.free.get(r, 0.0) for r in step.resources), default=0.0)
        end = max(end, part.seconds) + step.seconds
        for resource in step.resources:
            part.free[resource] = end
        total = part.moved.setdefault(step.what, _Sum())
        total.count += 1
        total.seconds += step.seconds
        return end

    def _turns(self, part: _Part, loop: Loop) -> None:
        left = loop.trips
        while left > 0:
            before = part.busy()
            turn = _Part(dict(before))
            for name in loop.names:
                turn.add(self.play(name, turn.busy()), 1.0)
            moves = bool(turn.moved)
            alike = not moves or _same(before, turn.busy())
            times = left if alike else min(1.0, left)
            still = {r: part.seconds + seconds for r, seconds in before.items()}
            part.add(turn, times)
            if not moves:  # what was in use goes on in the meantime
                part.free = still
            left -= times

    def _longest(self, part: _Part, branch: Branch) -> None:
        runs = [self.play(name, part.busy()) for name in branch.names]
        if runs:
            part.add(max(runs, key=lambda run: run.seconds), 1.0)


def _same(one: Busy, other: Busy) -> bool:
    return one.keys() == other.keys() and all(abs(s - other[r]) <= SAME_SECONDS for r, s in one.items())
