"""Why an array is split as it is, what the collectives are, what memory is for: from the plan alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshplan.core import (
    ArgumentError,
    Collective,
    MeshShape,
    PinError,
    Spec,
    format_bytes,
    format_seconds,
    local_bytes,
)
from meshplan.cost import Rates, reshard_path
from meshplan.hints import find, match, nearest_paths
from meshplan.plan._data import ArrayPlan, PlanData
from meshplan.plan._group import PathGroup, grouped
from meshplan.plan._price import CollectiveCost, collective_costs, machine_of, short_source, short_sources

TOPICS = ("collectives", "memory", "time")
MOST_WAITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """`text` is the whole explanation. The arrays and collectives it speaks of are there as data too."""

    subject: str
    text: str
    arrays: tuple[ArrayPlan, ...] = ()
    collectives: tuple[CollectiveCost, ...] = ()

    def __str__(self) -> str:
        return self.text


def explain(data: PlanData, subject: str) -> Explanation:
    """What the plan does with an argument or result, named by its path or by a pattern as in pins.

    `subject` may also be "collectives" (all of them by source line), "memory" (what is held at the peak) or "time"
    (what a step computes, and which collectives it waits for).
    Raises `ArgumentError` with the nearest paths where nothing matches.
    """
    if subject == "collectives":
        costs = collective_costs(data)
        return Explanation(subject=subject, text="\n".join(_collectives_text(data, costs)), collectives=costs)
    if subject == "memory":
        return Explanation(subject=subject, text="\n".join(_memory_text(data)))
    if subject == "time":
        return Explanation(subject=subject, text="\n".join(_time_text(data)))
    side, arrays = _found(data, subject)
    parts: list[str] = []
    costs: tuple[CollectiveCost, ...] = ()
    for group in grouped(arrays, lambda a: a.path, _alike):
        lines, found = _array_text(data, group, side)
        parts.append("\n".join(lines))
        costs += found
    return Explanation(subject=subject, text="\n\n".join(parts), arrays=arrays, collectives=costs)


def _found(data: PlanData, subject: str) -> tuple[Literal["argument", "result"], tuple[ArrayPlan, ...]]:
    paths = [a.path for a in data.arguments]
    try:
        return "argument", tuple(data.arguments[i] for i in find(subject, paths))
    except PinError as error:
        results = tuple(r for r in data.results if _matches(subject, r.path))
        if results:
            return "result", results
        known = (*paths, *(r.path for r in data.results))
        raise ArgumentError(
            f"'{subject}' matches no argument or result of the plan. {nearest_paths(subject, known)} Or ask for "
            f"{', '.join(TOPICS[:-1])} or {TOPICS[-1]}."
        ) from error


def _matches(pattern: str, path: str) -> bool:
    try:
        return match(pattern, path)
    except PinError:
        return False


def _alike(a: ArrayPlan) -> tuple[object, ...]:
    return (a.shape, a.dtype, a.spec, a.used, a.dims, a.pinned, a.pair >= 0, a.moves)


# ------------------------------------------------------------------------------------------------------- arrays


def _array_text(
    data: PlanData, group: PathGroup[ArrayPlan], side: Literal["argument", "result"]
) -> tuple[list[str], tuple[CollectiveCost, ...]]:
    a, mesh = group.first, data.mesh
    lines = [f"{group.label}  {a.dtype}[{', '.join(map(str, a.shape))}]"]

    def say(what: str, text: str) -> None:
        lines.append(f"  {what:<12}{text}")

    if any(a.dims):
        say("dims", " ".join(name or "_" for name in a.dims))
    say("stored", f"{a.spec}  {'pinned' if a.pinned else 'chosen'}: {in_words(a, a.spec, mesh)}")
    local = a.spec.local_shape(a.shape, mesh)
    nbytes = local_bytes(a.nbytes, a.spec, mesh)
    of = f" of {format_bytes(a.nbytes)}" if nbytes != a.nbytes else ", the whole array"
    say("each device", f"[{', '.join(map(str, local))}], {format_bytes(nbytes)}{of}")
    if len(group.members) > 1:
        total = nbytes * len(group.members)
        say("together", f"{format_bytes(total)} on each device for {len(group.members)} arrays")
    say("memory", _pair_text(data, a, side))
    found: tuple[CollectiveCost, ...] = ()
    if side == "argument":
        say("used", _used_text(a, mesh))
        for i, line in enumerate(moves_text(data, a)):
            say("" if i else "moves", line)
        found = collective_costs(data, named_collectives(data, group.members))
        for i, cost in enumerate(found):
            say("" if i else "in a step", cost_text(cost))
    elif a.moves:
        say("comes by", " -> ".join(map(str, a.moves)))
    return lines, found


def in_words(a: ArrayPlan, spec: Spec, mesh: MeshShape) -> str:
    """`mlp over model (4)`; `whole on every device` where nothing is split."""
    parts = []
    for d, axes in enumerate(spec.dims):
        if axes:
            name = a.dims[d] if a.dims and a.dims[d] else f"dim {d}"
            parts.append(f"{name} over {'+'.join(axes)} ({mesh.size(axes)})")
    copies = mesh.devices // spec.shards(mesh)
    if not parts:
        return "whole on every device"
    return ", ".join(parts) + (f", {copies} copies" if copies > 1 else "")


def _pair_text(data: PlanData, a: ArrayPlan, side: Literal["argument", "result"]) -> str:
    if a.pair < 0:
        return "kept, no result takes it over" if side == "argument" else "new"
    if side == "argument":
        return f"donated, becomes result {data.results[a.pair].path}"
    return f"taken over from argument {data.arguments[a.pair].path}"


def _used_text(a: ArrayPlan, mesh: MeshShape) -> str:
    if not a.used:
        return "as stored"
    parts = [f"{s}: {in_words(a, s, mesh)}, {format_bytes(local_bytes(a.nbytes, s, mesh))}" for s in a.used]
    return "as " + "; as ".join(parts)


def named_collectives(data: PlanData, arrays: Sequence[ArrayPlan]) -> tuple[Collective, ...]:
    """The collectives whose operation's name carries one of the arrays' paths."""
    paths = {a.path for a in arrays}
    return tuple(c for c in data.collectives if paths & set(c.op_name.split()))


def moves_text(data: PlanData, a: ArrayPlan) -> list[str]:
    """One line per step on the way from the stored spec to each used one: what it moves and how long it takes, once."""
    machine = machine_of(data.machine)
    rates = Rates(machine, data.mesh) if machine is not None and machine.devices == data.mesh.devices else None
    lines = []
    for step in (s for used in a.used for s in reshard_path(a.spec, used, data.mesh)):
        if step.kind == "slice":
            lines.append(f"slice over {'+'.join(step.axes)}, free: every device has its part already")
            continue
        nbytes = a.nbytes * step.fraction * (rates.emission.bytes_factor(a.dtype) if rates else 1.0)
        text = f"{step.kind} over {'+'.join(step.axes)}, {format_bytes(nbytes)}"
        if rates is not None and (kind := rates.emission.kind(step)) is not None:
            latency, per_byte = rates.collective(kind, step.axes)
            text += f", {format_seconds(latency + per_byte * nbytes)}"
        lines.append(text + " each time")
    return lines


# ----------------------------------------------------------------------------------------- collectives, memory


def cost_text(c: CollectiveCost) -> str:
    time = f", {format_seconds(c.seconds)}" if c.seconds is not None else ""
    where = f" at {c.source}" if c.source else ""
    operations = f" ({', '.join(c.op_names)})" if c.op_names else ""
    return f"{c.runs:g} x {c.kind} over {'+'.join(c.axes) or '?'}: {format_bytes(c.nbytes)}{time}{where}{operations}"


def _collectives_text(data: PlanData, costs: Sequence[CollectiveCost]) -> list[str]:
    if not costs:
        return ["no collectives: nothing moves between devices"]
    total = sum(c.nbytes for c in costs)
    head = f"{format_bytes(total)} in {format_seconds(data.communication_seconds)}, per device and step"
    rows = [("kind", "over", "runs", "bytes", "time", "source", "operations")]
    for c in costs:
        time = format_seconds(c.seconds) if c.seconds is not None else "?"
        rows.append((
            c.kind, "+".join(c.axes), f"{c.runs:g}", format_bytes(c.nbytes), time, c.source or "?",
            ", ".join(c.op_names),
        ))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [head, *("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)]


def _time_text(data: PlanData) -> list[str]:
    line = data.timeline
    if line is None:
        return ["this plan was saved without a timeline: plan again."]
    flops = format_seconds(data.compute_seconds)
    lines = [
        f"{format_seconds(line.seconds)} a step on a timeline, modelled",
        f"  {format_seconds(line.busy_seconds)} computing: {flops} of FLOPs at peak rate, the rest memory traffic",
        f"  {format_seconds(line.exposed_seconds)} waiting for collectives",
        f"  {format_seconds(line.hidden_seconds)} of collectives hidden beside computation",
        "the collectives on the critical path, those it waits for longest first:" if line.waits else
        "no collective is on the critical path",
    ]
    shown = line.waits[:MOST_WAITS]
    times = [format_seconds(w.seconds) for w in shown]
    width = max(map(len, times), default=0)
    for w, time in zip(shown, times, strict=True):
        where = f" at {short_source(w.source)}" if w.source else ""
        lines.append(f"  {time.rjust(width)}  {w.runs:g} x {w.kind} over {'+'.join(w.axes)}{where}")
    rest = line.waits[MOST_WAITS:]
    if rest:
        lines.append(f"  {format_seconds(sum(w.seconds for w in rest)).rjust(width)}  {len(rest)} more")
    return lines


def _memory_text(data: PlanData) -> list[str]:
    lines = [
        f"peak {format_bytes(data.peak_bytes)} of {format_bytes(data.memory_limit)} allowed{share_of_limit(data)}, per "
        f"device; arguments take {format_bytes(data.argument_bytes)}",
        f"the largest of what is held at the peak{':' if data.at_peak else ': nothing is listed'}",
    ]
    held = [(format_bytes(h.nbytes), short_sources(h.what)) for h in data.at_peak]
    rest = data.peak_bytes - sum(h.nbytes for h in data.at_peak)
    if held and rest > 0.5:
        held.append((format_bytes(rest), "all else"))
    width = max((len(size) for size, _ in held), default=0)
    return lines + [f"  {size.rjust(width)}  {what}" for size, what in held]


def share_of_limit(data: PlanData) -> str:
    """` (19%)` of the memory limit, where there is one."""
    if not 0 < data.memory_limit < float("inf"):
        return ""
    share = data.peak_bytes / data.memory_limit
    return f" ({share:.0%})" if share >= 0.01 else " (under 1%)"
