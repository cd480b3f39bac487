"""The form of a plan file: JSON, one record a line, specs and texts in tables.

A record of an argument, operation or collective is an array in the order of the fields below;
it names specs, paths of specs and texts by their places in the tables. A million bytes hold
more than 15,000 operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshplan.core import CollectiveKind

KIND = "meshplan plan"
FORMAT = 1

# JSON has no infinity: a machine may have no memory limit, a solver may know no bound
Figure = float | Literal["inf", "-inf", "nan"]
SpecRow = tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Header:
    """Enough to tell whether the file is a plan, and of which version."""

    kind: str = ""
    format: int = 0


class ArrayRow(NamedTuple):
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: int
    used: tuple[int, ...]
    dims: tuple[str, ...]
    pair: int
    pinned: bool
    moves: int


class OpRow(NamedTuple):
    index: int
    results: tuple[int, ...]
    uses: tuple[tuple[int, int], ...]


class CollectiveRow(NamedTuple):
    kind: CollectiveKind
    nbytes: int
    group_size: int
    count: float
    axes: tuple[str, ...]
    dtype: str
    source: int
    op_name: int


class CandidateRow(NamedTuple):
    mesh: tuple[tuple[str, int], ...]
    step_seconds: Figure
    peak_bytes: Figure
    feasible: bool


class WaitRow(NamedTuple):
    kind: CollectiveKind
    axes: tuple[str, ...]
    source: str
    runs: float
    seconds: float


class HeldRow(NamedTuple):
    what: str
    nbytes: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A whole file. `paths[i]` are places in `specs`; records point into `specs`, `paths` and `texts`."""

    kind: Literal["meshplan plan"]
    format: int
    step: str
    workload: str
    template: str
    fingerprint: str
    machine: str
    mesh: tuple[tuple[str, int], ...]
    flops: Figure
    compute_seconds: Figure
    communication_seconds: Figure
    argument_bytes: Figure
    peak_bytes: Figure
    memory_limit: Figure
    gap: Figure
    donated: tuple[int, ...]
    pins: tuple[tuple[str, str], ...]
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]
    candidates: tuple[CandidateRow, ...]
    at_peak: tuple[HeldRow, ...]
    specs: tuple[SpecRow, ...]
    paths: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    arguments: tuple[ArrayRow, ...]
    results: tuple[ArrayRow, ...]
    collectives: tuple[CollectiveRow, ...]
    ops: tuple[OpRow, ...]
    stated: tuple[tuple[str, str], ...] = ()
    kept: tuple[tuple[int, int], ...] = ()
    timeline: tuple[float, float, float, float] | None = None  # seconds in all, busy, exposed, hidden
    waits: tuple[WaitRow, ...] = ()
    ranked_by: Literal["sum", "timeline"] = "sum"


ROWS: dict[str, tuple[str, ...]] = {
    "arguments": ArrayRow._fields, "results": ArrayRow._fields, "ops": OpRow._fields,
    "collectives": CollectiveRow._fields, "candidates": CandidateRow._fields, "at_peak": HeldRow._fields,
}
FIGURES = (
    "flops", "compute_seconds", "communication_seconds", "argument_bytes", "peak_bytes", "memory_limit", "gap",
)
TEXTS = ("step", "workload", "template", "fingerprint", "machine")
LINES = (*ROWS, "specs", "paths", "texts", "notes", "stated", "waits")


def to_figure(x: float) -> Figure:
    value = float(x)
    if value != value:
        return "nan"
    return value if abs(value) != float("inf") else "inf" if value > 0 else "-inf"
