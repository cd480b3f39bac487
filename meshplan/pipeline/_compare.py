"""Schedules side by side, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshplan.core import format_bytes, format_seconds
from meshplan.pipeline._lag import lags, weight_copies
from meshplan.pipeline._seconds import StageSeconds
from meshplan.pipeline._slots import Schedule
from meshplan.pipeline._time import time_schedule

_HEAD = ("schedule", "seconds", "bubble", "in flight", "activations", "lag", "weight copies")


def compare_schedules(schedules: Iterable[Schedule], seconds: StageSeconds, *, width: int = 100) -> tuple[str, ...]:
    """Lines of text: a row for each schedule, then the picture of each timeline, `width` columns wide.

    "seconds" are of all mini-batches laid out; "in flight", "activations", "lag" and "weight copies" (where every
    backward reads what its forward read) are of the stage that has most.
    """
    timed = [time_schedule(table, seconds) for table in schedules]
    rows: list[list[str]] = [[*_HEAD]]
    for each in timed:
        table = each.schedule
        rows.append([
            table.name, format_seconds(each.makespan_seconds), f"{100 * each.bubble:.1f} %",
            str(max(table.in_flight())), format_bytes(max(each.peak_activation_bytes)), str(max(lags(table))),
            str(max(weight_copies(table))),
        ])
    lines = _aligned(rows)
    legend: tuple[str, ...] = ()
    for each in timed:
        *picture, letters, column = each.picture(width)
        legend = (letters,)
        lines += ["", f"{each.schedule.name}, {column.strip()}", *picture]
    return (*lines, *legend)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) if k else cell.ljust(width) for k, (cell, width) in enumerate(
            zip(row, widths, strict=True)
        )).rstrip()
        for row in rows
    ]
