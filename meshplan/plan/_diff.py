"""Two plans side by side: only what differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshplan.core import Spec, format_bytes, format_flops, format_seconds
from meshplan.plan._data import ArrayPlan, PlanData
from meshplan.plan._group import PathGroup, grouped
from meshplan.plan._price import collective_costs

ABSENT = "absent"
ROWS_SHOWN = 40


class Change(NamedTuple):
    """`what` was `before` and is `after`, as text."""

    what: str
    before: str
    after: str


class FigureChange(NamedTuple):
    """A predicted figure; `unit` is "seconds", "bytes" or "flops"."""

    what: str
    before: float
    after: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChange:
    """Collectives of one kind from one line; seconds are None where a plan's machine is no preset."""

    kind: str
    source: str
    bytes_before: float
    bytes_after: float
    seconds_before: float | None
    seconds_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """What differs between two plans. Paths that differ in layer numbers alone stand once, with their count.

    `results` are those that do not take over an argument's memory (the others change with it).
    `setting`: step, machine, mesh, pins, memory limit, template. `operations`: how many operations are
    constrained differently. How the plans were found (candidates, gap) is not compared.
    """

    setting: tuple[Change, ...] = ()
    figures: tuple[FigureChange, ...] = ()
    arguments: tuple[Change, ...] = ()
    results: tuple[Change, ...] = ()
    collectives: tuple[CollectiveChange, ...] = ()
    operations: int = 0

    @property
    def empty(self) -> bool:
        """The two plans say the same."""
        return not (
            self.setting or self.figures or self.arguments or self.results or self.collectives or self.operations
        )

    def __str__(self) -> str:
        lines = [*_changes("setting", self.setting), *_figures(self.figures)]
        lines += [*_changes("arguments", self.arguments), *_changes("results", self.results)]
        lines += _collectives(self.collectives)
        if self.operations:
            lines.append(f"operations: {self.operations} constrained differently")
        return "\n".join(lines)


def diff(a: PlanData, b: PlanData) -> PlanDiff:
    """What changes from plan `a` to plan `b`."""
    return PlanDiff(
        setting=_setting(a, b), figures=_figure_changes(a, b), arguments=_specs(a.arguments, b.arguments),
        results=_specs(_own(a), _own(b)), collectives=_collective_changes(a, b), operations=_operations(a, b),
    )


def _setting(a: PlanData, b: PlanData) -> tuple[Change, ...]:
    rows = [
        Change("step", a.step, b.step),
        Change("operations", a.fingerprint, b.fingerprint),
        Change("machine", a.machine, b.machine),
        Change("mesh", str(a.mesh), str(b.mesh)),
        Change("template", a.template or "none", b.template or "none"),
        Change("memory limit", format_bytes(a.memory_limit), format_bytes(b.memory_limit)),
        Change("donated", str(a.donated), str(b.donated)),
    ]
    rows += _by_name("stated", a.stated, b.stated)
    rows += _by_name("pin", a.pins, b.pins) + _by_name("rule", _joined(a.rules), _joined(b.rules))
    rows += [Change("note", ABSENT, n) for n in b.notes if n not in a.notes]
    rows += [Change("note", n, ABSENT) for n in a.notes if n not in b.notes]
    return tuple(r for r in rows if r.before != r.after)


def _by_name(word: str, a: Iterable[tuple[str, str]], b: Iterable[tuple[str, str]]) -> list[Change]:
    before, after = dict(a), dict(b)
    names = dict.fromkeys((*before, *after))
    return [Change(f"{word} {n}", before.get(n, ABSENT), after.get(n, ABSENT)) for n in names]


def _joined(rules: Iterable[tuple[str, Sequence[str]]]) -> list[tuple[str, str]]:
    return [(name, "+".join(axes) or "whole") for name, axes in rules]


def _figure_changes(a: PlanData, b: PlanData) -> tuple[FigureChange, ...]:
    names = [
        ("step", "step_seconds", "seconds"), ("compute", "compute_seconds", "seconds"),
        ("communication", "communication_seconds", "seconds"), ("peak memory", "peak_bytes", "bytes"),
        ("arguments", "argument_bytes", "bytes"), ("work", "flops", "flops"),
    ]
    rows = [FigureChange(what, float(getattr(a, f)), float(getattr(b, f)), unit) for what, f, unit in names]
    return tuple(r for r in rows if r.before != r.after)


def _specs(a: Sequence[ArrayPlan], b: Sequence[ArrayPlan]) -> tuple[Change, ...]:
    before, after = {x.path: x for x in a}, {x.path: x for x in b}
    rows = []
    for path in dict.fromkeys((*before, *after)):
        one, two = _told(before.get(path), after.get(path)), _told(after.get(path), before.get(path))
        if one != two:
            rows.append(Change(path, one, two))
    groups: tuple[PathGroup[Change], ...] = grouped(rows, lambda r: r.what, lambda r: (r.before, r.after))
    return tuple(Change(g.label, g.first.before, g.first.after) for g in groups)


def _own(data: PlanData) -> list[ArrayPlan]:
    """Results that do not take over an argument's memory: the others are stored as their arguments are."""
    return [r for r in data.results if r.pair < 0]


def _told(x: ArrayPlan | None, other: ArrayPlan | None) -> str:
    """The stored spec, and whatever else is not as in the other plan."""
    if x is None:
        return ABSENT
    text = str(x.spec)
    if other is None or (x.shape, x.dtype) != (other.shape, other.dtype):
        text = f"{x.dtype}[{','.join(map(str, x.shape))}] {text}"
    if other is not None and (x.used != other.used or x.moves != other.moves):
        text += f" used as {_listed(x.used or (*x.moves,))}"
    if other is not None and x.pinned != other.pinned:
        text += " pinned" if x.pinned else " not pinned"
    return text


def _listed(specs: Iterable[Spec]) -> str:
    return ", ".join(map(str, specs)) or "stored"


def _collective_changes(a: PlanData, b: PlanData) -> tuple[CollectiveChange, ...]:
    before, after = _by_line(a), _by_line(b)
    rows = []
    for kind, source in dict.fromkeys((*before, *after)):
        n, s = before.get((kind, source), (0.0, 0.0))
        m, t = after.get((kind, source), (0.0, 0.0))
        if (n, s) != (m, t):
            rows.append(CollectiveChange(
                kind=kind, source=source, bytes_before=n, bytes_after=m, seconds_before=s, seconds_after=t
            ))
    return tuple(sorted(rows, key=lambda r: (-abs(r.bytes_after - r.bytes_before), r.kind, r.source)))


def _by_line(data: PlanData) -> dict[tuple[str, str], tuple[float, float | None]]:
    sums: dict[tuple[str, str], tuple[float, float | None]] = {}
    for row in collective_costs(data):
        nbytes, seconds = sums.get((row.kind, row.source), (0.0, 0.0))
        both = None if seconds is None or row.seconds is None else seconds + row.seconds
        sums[row.kind, row.source] = (nbytes + row.nbytes, both)
    return sums


def _operations(a: PlanData, b: PlanData) -> int:
    before, after = {op.index: op for op in a.ops}, {op.index: op for op in b.ops}
    return sum(before.get(i) != after.get(i) for i in before.keys() | after.keys())


# ------------------------------------------------------------------------------------------------------ as text


def _changes(title: str, rows: Sequence[Change]) -> list[str]:
    if not rows:
        return []
    width = max(len(r.what) for r in rows)
    return [f"{title}:", *_shortened([f"  {r.what.ljust(width)}  {r.before} -> {r.after}" for r in rows])]


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - ROWS_SHOWN
    return lines if more <= 0 else [*lines[:ROWS_SHOWN], f"  and {more} more"]


def figure_text(value: float, unit: str) -> str:
    return {"seconds": format_seconds, "bytes": format_bytes, "flops": format_flops}[unit](value)


def _figures(rows: Sequence[FigureChange]) -> list[str]:
    if not rows:
        return []
    width = max(len(r.what) for r in rows)
    lines = ["predicted, per device and step:"]
    for r in rows:
        share = f" ({(r.after / r.before - 1) * 100:+.1f} %)" if r.before else ""
        lines.append(
            f"  {r.what.ljust(width)}  {figure_text(r.before, r.unit)} -> {figure_text(r.after, r.unit)}{share}"
        )
    return lines


def _collectives(rows: Sequence[CollectiveChange]) -> list[str]:
    if not rows:
        return []
    kind, line = max(len(r.kind) for r in rows), max(len(r.source) for r in rows)
    lines = []
    for r in rows:
        moved = f"{format_bytes(r.bytes_before)} -> {format_bytes(r.bytes_after)}"
        text = f"  {r.kind.ljust(kind)}  {r.source.ljust(line)}  {moved}"
        if r.seconds_before is not None and r.seconds_after is not None:
            text += f", {format_seconds(r.seconds_before)} -> {format_seconds(r.seconds_after)}"
        lines.append(text)
    return ["collectives, per device and step:", *_shortened(lines)]
