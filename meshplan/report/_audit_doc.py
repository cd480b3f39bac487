"""A compiled module as a report, with the prediction beside it where there is one."""

from __future__ import annotations

from meshplan.core import Collective, bytes_by_kind, format_bytes, format_flops, format_seconds
from meshplan.lower._audit import Audit
from meshplan.lower._audit_text import timeline_text
from meshplan.plan import short_source
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
    Table,
    columns,
)

MOST_ROWS = 40


def audit_doc(audit: Audit) -> Doc:
    """What XLA made of a function: memory, work, collectives by source line; predicted against compiled."""
    parts: list[Part] = [_verdict(audit), _figures(audit)]
    if audit.memory is not None:
        parts.append(_memory_bar(audit))
    if audit.predicted is not None and audit.memory is not None:
        parts += [Heading("Predicted against compiled"), _against(audit)]
    parts += [Heading("Collectives"), *_collectives(audit.collectives)]
    if audit.notes:
        parts += [Heading("Notes"), *(Paragraph(n) for n in audit.notes)]
    return Doc(f"{audit.name} compiled for {audit.target}", f"mesh {audit.mesh_shape}", tuple(parts))


def _verdict(audit: Audit) -> Paragraph:
    if audit.memory is None:
        return Paragraph("It does not fit the device's memory: the compiler gave up.", "bad")
    if not audit.fits:
        return Paragraph("It compiles, but its peak is above the device's memory.", "bad")
    if audit.predicted is None:
        return Paragraph("It compiles and fits.", "good")
    wrong = audit.mismatches()
    if not wrong:
        return Paragraph("It compiles, fits, and is what the plan predicted.", "good")
    return Paragraph(f"It compiles and fits; predictions that do not hold: {', '.join(m.kind for m in wrong)}.", "bad")


def _figures(audit: Audit) -> Figures:
    items = []
    if audit.out_of_memory is not None:
        oom = audit.out_of_memory
        items.append(("needed", format_bytes(oom.needed_bytes), f"a device, of {format_bytes(oom.limit_bytes)}"))
    if audit.memory is not None:
        of = f"of {format_bytes(audit.memory_limit)} a device" if audit.memory_limit else "a device"
        items.append(("peak memory", format_bytes(audit.memory.peak_bytes), of))
        items.append(("work", format_flops(audit.flops), "in dots and convolutions, a device"))
        items.append(("collectives", format_bytes(sum(c.total_bytes for c in audit.collectives)), "a device and step"))
    if audit.seconds is not None and audit.compute_seconds is not None and audit.collective_seconds is not None:
        items.append((
            "priced", format_seconds(audit.seconds),
            f"{format_seconds(audit.compute_seconds)} FLOPs at peak + "
            f"{format_seconds(audit.collective_seconds)} collectives",
        ))
    if audit.timeline is not None:
        total, _, parts = timeline_text(audit.timeline).partition(" = ")
        items.append(("on a timeline", total, parts))
    items.append(("compiled in", format_seconds(audit.compile_seconds), ""))
    return Figures(tuple(items))


def _memory_bar(audit: Audit) -> Bars:
    use = audit.memory
    assert use is not None
    scale = max(use.peak_bytes, audit.memory_limit or 0, 1)
    kept = max(0, use.output_bytes - use.alias_bytes)
    parts = (
        BarPart("arguments", use.argument_bytes / scale, 2, format_bytes(use.argument_bytes)),
        BarPart("temporaries", use.temp_bytes / scale, 3, format_bytes(use.temp_bytes)),
        BarPart("results of their own", kept / scale, 0, format_bytes(kept)),
    )
    return Bars((Bar("memory", parts, f"{format_bytes(use.peak_bytes)} of {format_bytes(scale)}"),))


def _against(audit: Audit) -> Table:
    assert audit.predicted is not None and audit.memory is not None
    predicted, compiled = bytes_by_kind(audit.predicted.collectives), audit.bytes_by_kind()
    wrong = {m.kind for m in audit.mismatches()}
    kinds = dict.fromkeys((*predicted, *compiled))
    rows = [(k, predicted.get(k, 0.0), compiled.get(k, 0.0), format_bytes) for k in kinds]
    rows.append(("peak memory", float(audit.predicted.peak_bytes), float(audit.memory.peak_bytes), format_bytes))
    rows.append(("flops", float(audit.predicted.flops), audit.flops, format_flops))
    return Table(columns("figure", ">predicted", ">compiled", ">compiled / predicted", ""), tuple(
        (
            Cell(name), Cell(text(p)), Cell(text(c)), Cell(f"{c / p:.3f}" if p else "" if not c else "inf"),
            Cell("off", "bad") if name in wrong else Cell("holds", "good"),
        )
        for name, p, c, text in rows
    ))


def _collectives(collectives: tuple[Collective, ...]) -> list[Part]:
    if not collectives:
        return [Paragraph("None: nothing moves between devices.", "quiet")]
    sums: dict[tuple[str, str, int, str, str], tuple[float, float]] = {}
    for c in collectives:
        key = (c.kind, "+".join(c.axes) or "?", c.group_size, c.dtype, short_source(c.source) or "?")
        runs, nbytes = sums.get(key, (0.0, 0.0))
        sums[key] = (runs + c.count, nbytes + c.total_bytes)
    ordered = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
    most = max(n for _, n in sums.values()) or 1.0
    rows = tuple(
        (
            Cell(kind), Cell(axes), Cell(str(group)), Cell(f"{runs:g}"), Cell(format_bytes(n), share=n / most),
            Cell(dtype), Cell(source),
        )
        for (kind, axes, group, dtype, source), (runs, n) in ordered[:MOST_ROWS]
    )
    parts: list[Part] = [Table(columns("kind", "`over", ">devices", ">runs", ">bytes", "dtype", "`source"), rows)]
    if len(ordered) > MOST_ROWS:
        rest = sum(n for _, (_, n) in ordered[MOST_ROWS:])
        parts.append(Paragraph(f"And {len(ordered) - MOST_ROWS} more, {format_bytes(rest)}.", "quiet"))
    return parts
