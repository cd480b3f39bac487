"""A report as a small tree of parts, from which text and HTML are both made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tone = Literal["", "good", "bad", "quiet"]


@dataclass(frozen=True, slots=True)
class Cell:
    """Text of a table's cell; `tone` colours it, `share` (0 to 1) draws a bar behind a figure."""

    text: str
    tone: Tone = ""
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """`kind`: "text", "code" (paths, specs) or "figure" (aligned right). A narrow terminal leaves `spare` ones out."""

    name: str
    kind: Literal["text", "code", "figure"] = "text"
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Code:
    text: str


@dataclass(frozen=True, slots=True)
class Figures:
    """A row of key figures: (what, value, small print)."""

    items: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class BarPart:
    """A stretch of a bar: `share` of the whole width, `series` picks its colour."""

    name: str
    share: float
    series: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    parts: tuple[BarPart, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars on one scale, 0 to 1; a legend names the parts where there are several."""

    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class SplitCell:
    """One piece of an array: the devices that hold it, and which of `pieces` it is, for its colour."""

    text: str
    piece: int


@dataclass(frozen=True, slots=True)
class Split:
    """How one array lies on the devices: `down` and `across` name the drawn dims, `grid` holds the pieces."""

    title: str
    subtitle: str
    down: str
    across: str
    grid: tuple[tuple[SplitCell, ...], ...]
    pieces: int


@dataclass(frozen=True, slots=True)
class Splits:
    """Pictures side by side."""

    items: tuple[Split, ...]


Part = Heading | Paragraph | Code | Figures | Table | Bars | Splits


@dataclass(frozen=True, slots=True)
class Doc:
    """A whole report."""

    title: str
    subtitle: str
    parts: tuple[Part, ...]


def cells(*values: str | Cell) -> tuple[Cell, ...]:
    return tuple(v if isinstance(v, Cell) else Cell(v) for v in values)


def columns(*names: str) -> tuple[Column, ...]:
    """`">bytes"`: a figure; `"`path"`: code; `"~dims"`: text that may be left out; else text."""
    made = {
        ">": lambda name: Column(name, "figure"), "`": lambda name: Column(name, "code"),
        "~": lambda name: Column(name, spare=True),
    }
    return tuple(made[name[0]](name[1:]) if name[:1] in made else Column(name) for name in names)
