"""An audit as a readable table."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from meshplan.core import Collective, format_bytes, format_flops, format_seconds
from meshplan.lower._aot import words

if TYPE_CHECKING:
    from meshplan.lower._audit import Audit
    from meshplan.lower._hlo_timeline import ModuleTimeline

HEADER = ("kind", "axes", "group", "runs", "each", "a step", "dtype", "source", "operation")


def audit_text(audit: Audit, rows: int = 40) -> str:
    """Memory, work and time, then the collectives by source line, those that move most bytes first."""
    compiled = format_seconds(audit.compile_seconds)
    lines = [f"{audit.name} on {audit.target}, mesh {audit.mesh_shape}, compiled in {compiled}"]
    lines += [f"  memory       {line}" for line in _memory(audit)]
    if audit.memory is not None:
        lines.append(f"  compute      {_work(audit)}")
        lines.append(f"  time         {_time(audit)}")
        if audit.timeline is not None:
            lines.append(f"  timeline     {timeline_text(audit.timeline)}")
        lines += _collectives(audit.collectives, rows)
    lines += [f"  {m}" for m in _mismatches(audit)]
    lines += [f"  note: {note}" for note in audit.notes]
    return "\n".join(lines)


def _memory(audit: Audit) -> list[str]:
    use, limit = audit.memory, audit.memory_limit
    if audit.out_of_memory is not None:
        return [words(audit.out_of_memory)]
    if use is None:
        return ["unknown"]
    of = f" of {format_bytes(limit)}" if limit else ""
    over = "" if audit.fits else "  DOES NOT FIT"
    lines = [
        f"{format_bytes(use.peak_bytes)}{of} a device = {format_bytes(use.argument_bytes)} arguments + "
        f"{format_bytes(use.output_bytes)} results + {format_bytes(use.temp_bytes)} temporaries - "
        f"{format_bytes(use.alias_bytes)} shared by arguments and results{over}"
    ]
    if use.host_peak_bytes:
        lines.append(f"{format_bytes(use.host_peak_bytes)} in the host's memory")
    return lines


def _work(audit: Audit) -> str:
    parts = [f"{format_flops(n)} in {dtype}" for dtype, n in audit.flops_by_dtype.items() if n] or ["no dots"]
    if audit.estimated_cycles is not None:
        parts.append(f"{audit.estimated_cycles / 1e6:.3g} million cycles by the compiler's estimate")
    return ", ".join(parts)


def _time(audit: Audit) -> str:
    if audit.seconds is None or audit.compute_seconds is None or audit.collective_seconds is None:
        return "not priced"
    return (
        f"{format_seconds(audit.seconds)} a step = {format_seconds(audit.compute_seconds)} FLOPs at peak + "
        f"{format_seconds(audit.collective_seconds)} collectives (no overlap, no memory traffic)"
    )


def timeline_text(timeline: ModuleTimeline) -> str:
    """`31.2 ms with overlap = 28 ms computing (roofline, modelled) + 3.2 ms waiting for collectives; ...`."""
    how = "the compiler's estimated cycles" if timeline.by_cycles else "roofline, modelled"
    parts = [
        f"{format_seconds(timeline.compute_seconds)} computing ({how})",
        f"{format_seconds(timeline.exposed_seconds)} waiting for collectives",
    ]
    if timeline.copy_seconds:
        parts.append(f"{format_seconds(timeline.copy_seconds)} waiting for copies between memories")
    hidden = format_seconds(timeline.hidden_seconds)
    return f"{format_seconds(timeline.seconds)} with overlap = {' + '.join(parts)}; {hidden} of collectives hidden"


def _collectives(collectives: tuple[Collective, ...], most: int) -> list[str]:
    if not collectives:
        return ["  collectives  none"]
    merged: dict[tuple[object, ...], float] = {}
    for c in collectives:
        key = (c.kind, c.axes, c.group_size, c.nbytes, c.dtype, c.source, c.op_name)
        merged[key] = merged.get(key, 0.0) + c.count
    by_bytes = sorted(merged.items(), key=lambda item: -float(item[0][3]) * item[1])  # type: ignore[arg-type]
    total = sum(c.total_bytes for c in collectives)
    table = [HEADER]
    for (kind, axes, group, nbytes, dtype, source, op_name), count in by_bytes[:most]:
        names = "+".join(axes) or "?"  # type: ignore[arg-type]
        table.append((
            str(kind), names, str(group), f"{count:g}", format_bytes(float(nbytes)),  # type: ignore[arg-type]
            format_bytes(float(nbytes) * count), str(dtype), _short(str(source)), _operation(str(op_name)),  # type: ignore[arg-type]
        ))
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADER))]
    lines = [f"  collectives  {format_bytes(total)} a step, on each device"]
    lines += ["    " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
    if len(by_bytes) > most:
        rest = sum(float(key[3]) * n for key, n in by_bytes[most:])  # type: ignore[arg-type]
        lines.append(f"    and {len(by_bytes) - most} more, {format_bytes(rest)}")
    return lines


def _short(source: str) -> str:
    return "/".join(PurePath(source).parts[-2:]) if source else "?"


def _operation(op_name: str) -> str:
    """The last two steps of a traced name, and whether it is backward: 'backward closed_call/dot_general'."""
    end = "/".join(op_name.split("/")[-2:])
    return f"backward {end}" if "transpose(" in op_name else end


def _mismatches(audit: Audit) -> list[str]:
    if audit.predicted is None:
        return []
    rows = audit.mismatches()
    if not rows:
        return ["predicted    agrees with compiled"]
    figure = {"flops": format_flops}
    return [
        f"MISMATCH     {r.kind}: predicted {figure.get(r.kind, format_bytes)(r.predicted)}, "
        f"compiled {figure.get(r.kind, format_bytes)(r.compiled)}"
        for r in rows
    ]
