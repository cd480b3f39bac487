"""A timeline as text, one row a stage."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.core import format_seconds
from meshplan.pipeline._slots import Slot

Span = tuple[Slot, float, float]
_BACKWARD = "abcdefghijklmnopqrst"
LEGEND = "0-9 forward of micro-batch 0-9, 10-19, ..., a-t backward, R second forward, W weight part, U update, . idle"


def draw(rows: Sequence[Sequence[Span]], seconds: float, width: int) -> tuple[str, ...]:
    """A line for each row, of at most `width` columns, the legend, and the time of a column.

    A column shows what runs at its middle; where every span is a whole number of some unit and they fit, a column
    is that unit.
    """
    columns = _whole(rows, seconds, width) or width
    label = len(str(len(rows) - 1))
    lines = []
    for stage, spans in enumerate(rows):
        cells = ["."] * columns
        for slot, start, end in spans:
            first, last = (_column(at, seconds, columns) for at in (start, end))
            for column in range(first, min(last, columns)):
                cells[column] = _letter(slot)
        lines.append(f"{stage:>{label}} |{''.join(cells)}|")
    each = format_seconds(seconds / columns) if columns else "0 s"
    return (*lines, f"{' ' * label}  {LEGEND}", f"{' ' * label}  a column is {each}")


def _column(at: float, seconds: float, columns: int) -> int:
    """The first column whose middle is not before the time."""
    return max(0, -int(-(at / seconds * columns - 0.5) // 1)) if seconds else 0


def _whole(rows: Sequence[Sequence[Span]], seconds: float, width: int) -> int:
    """The number of columns where each is the shortest span and all others are whole numbers of it, or 0."""
    lengths = [end - start for spans in rows for _, start, end in spans if end > start]
    if not lengths:
        return 0
    unit = min(lengths)
    marks = [at / unit for spans in rows for _, start, end in spans for at in (start, end)]
    fits = seconds / unit <= width and all(abs(mark - round(mark)) < 1e-6 * max(1.0, mark) for mark in marks)
    return round(seconds / unit) if fits else 0


def _letter(slot: Slot) -> str:
    if slot.kind == "forward":
        return str(slot.micro_batch % 10)
    if slot.kind == "backward":
        return _BACKWARD[slot.micro_batch % len(_BACKWARD)]
    return {"recompute": "R", "weight": "W", "update": "U"}[slot.kind]
