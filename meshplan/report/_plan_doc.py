"""A plan as a report."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.core import Spec, format_bytes, format_flops, format_seconds, local_bytes
from meshplan.plan import (
    ArrayPlan,
    CollectiveCost,
    Family,
    PlanData,
    collective_costs,
    families,
    grouped,
    in_words,
    picture_dims,
    ranges,
    share_of_limit,
    short_sources,
    split_grid,
)
from meshplan.report._doc import (
    Bar,
    BarPart,
    Bars,
    Cell,
    Doc,
    Figures,
    Heading,
    Paragraph,
    Part,
    Split,
    SplitCell,
    Splits,
    Table,
    cells,
    columns,
)

MOST_PICTURES = 4
MOST_DOWN, MOST_ACROSS = 8, 16
MOST_ROWS = 40
MOST_WAITS = 12


def plan_doc(data: PlanData) -> Doc:
    """Everything the plan says, for people: figures, pictures, arguments, collectives, memory, what was tried."""
    parts: list[Part] = [_figures(data), _bars(data)]
    for heading, section in (
        ("How the arrays lie on the devices", _pictures(data)), ("Arguments", [arguments_table(data)]),
        ("Results", _results(data)), ("Collectives", collectives_section(data)),
        ("What a step waits for", _waits(data)),
        ("Memory at the peak", _memory(data)),
        ("Mesh shapes tried", _candidates(data)), ("Pins", _pins(data)), ("Axes of named dims", _rules(data)),
        ("Notes", [Paragraph(note) for note in data.notes]),
    ):
        if section:
            parts += [Heading(heading), *section]
    return Doc(f"{data.step or 'A step'} on {data.machine}", _subtitle(data), tuple(parts))


def _subtitle(data: PlanData) -> str:
    count = data.mesh.devices
    text = f"mesh {data.mesh} ({count} device{'s' if count != 1 else ''})"
    text += f", template {data.template}" if data.template else ""
    return text + (f", {data.workload}" if data.workload else "")


# ------------------------------------------------------------------------------------------------------ summary


def _figures(data: PlanData) -> Figures:
    limited = 0 < data.memory_limit < float("inf")
    share = f", of {format_bytes(data.memory_limit)} allowed{share_of_limit(data)}" if limited else ""
    moved = sum(c.total_bytes for c in data.collectives)
    gap = "proven the best for this mesh" if data.gap <= 1e-6 else "how far it may be above the best for this mesh"
    return Figures((
        *_step(data),
        ("compute", format_seconds(data.compute_seconds), f"{format_flops(data.flops)} a device"),
        ("communication", format_seconds(data.communication_seconds), f"{format_bytes(moved)} in collectives"),
        *([] if data.simulated else _on_timeline(data)),
        ("peak memory", format_bytes(data.peak_bytes), "a device" + share),
        ("gap", f"{data.gap:.1%}" if data.gap > 1e-6 else "0", gap),
    ))


def _step(data: PlanData) -> list[tuple[str, str, str]]:
    if data.simulated:
        return [("step, simulated", seconds, told) for _, seconds, told in _on_timeline(data)]
    return [("step, predicted", format_seconds(data.step_seconds), "compute + communication, not overlapped")]


def _on_timeline(data: PlanData) -> list[tuple[str, str, str]]:
    line = data.timeline
    if line is None:
        return []
    busy, exposed, hidden = map(format_seconds, (line.busy_seconds, line.exposed_seconds, line.hidden_seconds))
    told = f"{busy} computing with memory traffic, {exposed} waiting, {hidden} of collectives hidden; modelled"
    return [("on a timeline", format_seconds(line.seconds), told)]


def _bars(data: PlanData) -> Bars:
    step = data.step_seconds or 1.0
    parts = [("compute", data.compute_seconds), ("communication", data.communication_seconds)]
    if data.simulated and data.timeline is not None:
        parts = [("computing", data.timeline.busy_seconds), ("waiting", data.timeline.exposed_seconds)]
    time = Bar("time", tuple(
        BarPart(name, seconds / step, k, format_seconds(seconds)) for k, (name, seconds) in enumerate(parts)
    ), format_seconds(data.step_seconds))
    limit = data.memory_limit if 0 < data.memory_limit < float("inf") else max(data.peak_bytes, 1.0)
    scale = max(limit, data.peak_bytes)
    rest = max(0.0, data.peak_bytes - data.argument_bytes)
    memory = Bar("memory", (
        BarPart("arguments", data.argument_bytes / scale, 2, format_bytes(data.argument_bytes)),
        BarPart("all else at the peak", rest / scale, 3, format_bytes(rest)),
    ), f"{format_bytes(data.peak_bytes)} of {format_bytes(limit)}")
    return Bars((time, memory))


# ----------------------------------------------------------------------------------------------------- pictures


def _pictures(data: PlanData) -> list[Part]:
    """One picture per way of splitting, of the largest array."""

    def rank(a: ArrayPlan) -> tuple[bool, float, int]:
        return a.pinned, a.nbytes, -a.path.count("/")

    best: dict[Spec, ArrayPlan] = {}
    for a in data.arguments:
        if a.spec not in best or rank(a) > rank(best[a.spec]):
            best[a.spec] = a
    pinned = {a.spec for a in data.arguments if a.pinned}
    chosen = sorted(best.values(), key=lambda a: (a.spec not in pinned, not a.spec.axes, -a.nbytes))
    drawn = [split_picture(a, data) for a in chosen if a.shape][:MOST_PICTURES]
    if not drawn:
        return []
    note = Paragraph("Each cell is one piece of the array, the numbers are the devices that hold it.", "quiet")
    return [note, Splits(tuple(drawn))]


def split_picture(a: ArrayPlan, data: PlanData) -> Split:
    """A drawing of one array's two most interesting dims."""
    down, across = picture_dims(a.spec, a.shape)
    whole = split_grid(a.spec, data.mesh, down, across)
    grid = [list(row[:MOST_ACROSS]) for row in whole[:MOST_DOWN]]
    wide = len(whole[0])
    shown = [
        tuple(SplitCell(ranges(piece), r * wide + c) for c, piece in enumerate(row)) for r, row in enumerate(grid)
    ]
    hidden = len(whole) * wide - sum(map(len, grid))
    more = f"; {hidden} more pieces" if hidden else ""
    return Split(
        title=a.path, subtitle=f"{_shape(a)}: {in_words(a, a.spec, data.mesh)}{more}", down=_dim(a, down),
        across=_dim(a, across), grid=tuple(shown), pieces=len(whole) * wide,
    )


def _dim(a: ArrayPlan, d: int) -> str:
    if d < 0:
        return ""
    name = a.dims[d] if a.dims and a.dims[d] else f"dim {d}"
    axes = a.spec.dims[d]
    return f"{name} / {'+'.join(axes)}" if axes else name


# ---------------------------------------------------------------------------------------------------- arguments


def arguments_table(data: PlanData) -> Table:
    """One row per group of arguments that differ in layer numbers alone; an optimizer's moments share their
    parameter's row where they are stored alike."""
    groups = grouped(data.arguments, lambda a: a.path, lambda a: (a.shape, a.dtype, a.spec, a.used, a.dims, a.pinned))
    found = families(groups, lambda a: a.shape, lambda a: (a.shape, a.spec, a.pinned), lambda a: not a.used)
    sizes = [sum(local_bytes(a.nbytes, a.spec, data.mesh) for a in f.members) for f in found]
    most = max(sizes, default=0.0) or 1.0
    named, mirrored = any(any(f.group.first.dims) for f in found), any(f.mirrors for f in found)
    rows = tuple(
        _argument_row(f, nbytes, nbytes / most, named, mirrored) for f, nbytes in zip(found, sizes, strict=True)
    )
    return Table(columns(
        "`argument", *(("and alike",) if mirrored else ()), "`shape", *(("~dims",) if named else ()), "`stored",
        "`used as", ">each device",
    ), rows)


def _argument_row(
    family: Family[ArrayPlan], nbytes: float, share: float, named: bool, mirrored: bool
) -> tuple[Cell, ...]:
    a = family.group.first
    stored = str(a.spec) + (" pinned" if a.pinned else "")
    used = Cell(", ".join(map(str, a.used))) if a.used else Cell("same", "quiet")
    alike = (Cell(", ".join(family.mirrors), "quiet"),) if mirrored else ()
    names = (Cell(" ".join(n or "_" for n in a.dims) if any(a.dims) else "", "quiet"),) if named else ()
    tone = "quiet" if a.spec.is_replicated and not a.pinned else ""
    return (
        Cell(family.group.label), *alike, Cell(_shape(a)), *names, Cell(stored, tone), used,
        Cell(format_bytes(nbytes), share=share),
    )


def _shape(a: ArrayPlan) -> str:
    return f"{a.dtype}[{','.join(map(str, a.shape))}]"


def _results(data: PlanData) -> list[Part]:
    """Results that do not take over an argument's memory."""
    own = [r for r in data.results if r.pair < 0]
    taken = len(data.results) - len(own)
    parts: list[Part] = []
    if taken:
        said = f"{taken} results take over the memory of a donated argument and are stored as it is."
        parts.append(Paragraph(said, "quiet"))
    if own:
        groups = grouped(own, lambda r: r.path, lambda r: (r.shape, r.dtype, r.spec))
        rows = tuple(
            cells(g.label, _shape(g.first), str(g.first.spec), format_bytes(
                sum(local_bytes(r.nbytes, r.spec, data.mesh) for r in g.members)
            ))
            for g in groups
        )
        parts.append(Table(columns("`result", "`shape", "`stored", ">each device"), rows))
    return parts


# ------------------------------------------------------------------------------------------ collectives, memory


def collectives_section(data: PlanData) -> list[Part]:
    costs = collective_costs(data)
    if not costs:
        return [Paragraph("None: nothing moves between devices.", "quiet")]
    said = "What one device takes part in, per step, by source line; most time first."
    parts: list[Part] = [Paragraph(said, "quiet"), costs_table(costs[:MOST_ROWS])]
    if len(costs) > MOST_ROWS:
        rest = sum(c.nbytes for c in costs[MOST_ROWS:])
        parts.append(Paragraph(f"And {len(costs) - MOST_ROWS} more, {format_bytes(rest)}.", "quiet"))
    return parts


def costs_table(costs: Sequence[CollectiveCost]) -> Table:
    longest = max((c.seconds or 0.0 for c in costs), default=0.0) or 1.0
    rows = tuple(
        (
            Cell(c.kind), Cell("+".join(c.axes)), Cell(f"{c.runs:g}"), Cell(format_bytes(c.nbytes)),
            Cell(format_seconds(c.seconds), share=c.seconds / longest) if c.seconds is not None else Cell("?", "quiet"),
            Cell(c.source or "?"), Cell(", ".join(c.op_names), "quiet"),
        )
        for c in costs
    )
    return Table(columns("kind", "`over", ">runs", ">bytes", ">time", "`source", "~operations"), rows)


def _waits(data: PlanData) -> list[Part]:
    """The collectives on the timeline's critical path."""
    line = data.timeline
    if line is None or not line.waits:
        return []
    longest = line.waits[0].seconds
    rows = tuple(
        (
            Cell(w.kind), Cell("+".join(w.axes)), Cell(f"{w.runs:g}"),
            Cell(format_seconds(w.seconds), share=w.seconds / longest), Cell(short_sources(w.source) or "?"),
        )
        for w in line.waits[:MOST_WAITS]
    )
    said = "Collectives that nothing is computed beside, on the modelled timeline; the longest first."
    return [Paragraph(said, "quiet"), Table(columns("kind", "`over", ">runs", ">waiting", "`source"), rows)]


def _memory(data: PlanData) -> list[Part]:
    if not data.at_peak:
        return []
    largest = max(h.nbytes for h in data.at_peak) or 1.0
    rows = [(Cell(format_bytes(h.nbytes), share=h.nbytes / largest), Cell(short_sources(h.what))) for h in data.at_peak]
    rest = data.peak_bytes - sum(h.nbytes for h in data.at_peak)
    if rest > 0.5:
        rows.append((Cell(format_bytes(rest), share=rest / largest), Cell("all else", "quiet")))
    return [Table(columns(">each device", "`what"), tuple(rows))]


def _candidates(data: PlanData) -> list[Part]:
    if len(data.candidates) < 2:
        return []
    slowest = max(c.step_seconds for c in data.candidates) or 1.0
    rows = tuple(
        (
            Cell(str(c.mesh) + ("  chosen" if c.mesh == data.mesh else ""), "good" if c.mesh == data.mesh else ""),
            Cell(format_seconds(c.step_seconds), share=c.step_seconds / slowest), Cell(format_bytes(c.peak_bytes)),
            Cell("yes", "quiet") if c.feasible else Cell("no", "bad"),
        )
        for c in sorted(data.candidates, key=lambda c: (not c.feasible, c.step_seconds))
    )
    return [Table(columns("mesh", ">step", ">peak memory", "fits"), rows)]


def _pins(data: PlanData) -> list[Part]:
    pins = (*data.pins, *data.stated)
    return [Table(columns("`pin", "`spec"), tuple(cells(*pin) for pin in pins))] if pins else []


def _rules(data: PlanData) -> list[Part]:
    if not data.rules:
        return []
    rows = tuple((Cell(name), Cell("+".join(axes)) if axes else Cell("whole", "quiet")) for name, axes in data.rules)
    return [Table(columns("dim", "`axes"), rows)]
