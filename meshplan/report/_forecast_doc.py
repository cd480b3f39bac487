"""A forecast as a report: a table of machines, their throughput and step time as bars."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.core import format_bytes, format_seconds
from meshplan.plan import ForecastRow
from meshplan.report._doc import (
    Bar,
    BarPart,
    Bars,
    Cell,
    Doc,
    Heading,
    Paragraph,
    Part,
    Table,
    columns,
)

SCALED = {
    "strong": "strong scaling: the same batch on every machine",
    "weak": "weak scaling: the batch grows with the devices",
}


def forecast_doc(rows: Sequence[ForecastRow], *, step: str, scaling: str, unit: str, counted: str) -> Doc:
    """Rows in the order they were given. `unit` is what is counted ("tokens"), `counted` says where that is from."""
    fitting = [r for r in rows if r.feasible]
    parts: list[Part] = [_table(rows, unit)]
    if fitting:
        parts += [Heading(f"Modelled {unit} per second and device"), _throughput(fitting, unit)]
        parts += [Heading("Modelled step time"), _steps(fitting)]
    said = [f"{r.machine} does not fit: {r.reason}." for r in rows if not r.feasible]
    said += [f"{r.machine}: {r.note}." for r in fitting if r.note]
    if said:
        parts += [Heading("Remarks"), *(Paragraph(text) for text in said)]
    parts.append(Paragraph(
        "All figures are modelled, per device and step; nothing was run. Step: computation and communication one after "
        f"the other; timeline: with memory traffic and overlap. {unit.capitalize()}: {counted}. Efficiency: {unit} per "
        "second and device over those of the smallest machine of the same chip that fits.", "quiet",
    ))  # fmt: skip
    return Doc(f"Forecast of {step}, modelled", SCALED[scaling], tuple(parts))


def _table(rows: Sequence[ForecastRow], unit: str) -> Table:
    names = columns(
        "`machine", ">devices", "mesh", ">step", ">timeline", ">peak memory", f">{unit}/s/device", ">efficiency",
        ">planned in", "fits",
    )
    return Table(names, tuple(_row(r) for r in rows))


def _row(r: ForecastRow) -> tuple[Cell, ...]:
    return (
        Cell(r.machine), Cell(f"{r.devices:,}"), Cell(str(r.mesh) if r.mesh is not None else ""),
        _seconds(r.step_seconds), _seconds(r.timeline_seconds),
        Cell("" if r.peak_bytes is None else format_bytes(r.peak_bytes), "" if r.feasible else "bad"),
        Cell("" if r.tokens_per_second_per_device is None else _rate(r.tokens_per_second_per_device)),
        Cell("" if r.efficiency is None else f"{r.efficiency:.1%}", share=r.efficiency),
        Cell(format_seconds(r.plan_seconds), "quiet"),
        Cell("yes", "quiet") if r.feasible else Cell("no", "bad"),
    )


def _seconds(seconds: float | None) -> Cell:
    return Cell("" if seconds is None else format_seconds(seconds))


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _throughput(rows: Sequence[ForecastRow], unit: str) -> Bars:
    """One scale for all chips, a colour each."""
    most = max(r.tokens_per_second_per_device or 0.0 for r in rows) or 1.0
    chips = list(dict.fromkeys(r.chip for r in rows))
    return Bars(tuple(
        Bar(
            r.machine, (BarPart(r.chip, (r.tokens_per_second_per_device or 0.0) / most, chips.index(r.chip)),),
            f"{_rate(r.tokens_per_second_per_device or 0.0)} {unit}/s/device, efficiency {r.efficiency or 0.0:.1%}",
        )
        for r in rows
    ))  # fmt: skip


def _steps(rows: Sequence[ForecastRow]) -> Bars:
    most = max(r.step_seconds or 0.0 for r in rows) or 1.0
    chips = list(dict.fromkeys(r.chip for r in rows))
    return Bars(tuple(
        Bar(
            r.machine, (BarPart(r.chip, (r.step_seconds or 0.0) / most, chips.index(r.chip)),),
            format_seconds(r.step_seconds or 0.0),
        )
        for r in rows
    ))  # fmt: skip
