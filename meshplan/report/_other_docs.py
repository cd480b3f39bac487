"""Differences, comparisons and verifications as reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshplan.core import KINDS, format_bytes, format_seconds
from meshplan.plan import CollectiveChange, CompareRow, FigureChange, PlanDiff, figure_text
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
    Tone,
    cells,
    columns,
)


class LeafLike(Protocol):
    """One result leaf of a verification."""

    @property
    def path(self) -> str: ...
    @property
    def relative_error(self) -> float: ...
    @property
    def absolute_error(self) -> float: ...
    @property
    def tolerance(self) -> float: ...
    @property
    def ok(self) -> bool: ...


class VerificationLike(Protocol):
    """A planned run held against one device."""

    @property
    def ok(self) -> bool: ...
    @property
    def leaves(self) -> Sequence[LeafLike]: ...


def diff_doc(diff: PlanDiff, before: str = "before", after: str = "after") -> Doc:
    """What differs between two plans; `before` and `after` name them."""
    parts: list[Part] = []
    if diff.empty:
        parts.append(Paragraph("The two plans say the same.", "good"))
    for heading, rows in (("Setting", diff.setting), ("Arguments", diff.arguments), ("Results", diff.results)):
        if rows:
            table = Table(columns("`what", "`" + before, "`" + after), tuple(cells(*r) for r in rows))
            parts += [Heading(heading), table]
    if diff.figures:
        parts += [Heading("Predicted, per device and step"), _figures(diff.figures, before, after)]
    if diff.collectives:
        parts += [Heading("Collectives"), _collectives(diff.collectives, before, after)]
    if diff.operations:
        parts.append(Paragraph(f"{diff.operations} operations are constrained differently.", "quiet"))
    return Doc("Two plans", f"{before} -> {after}", tuple(parts))


def _figures(rows: Sequence[FigureChange], before: str, after: str) -> Table:
    return Table(columns("figure", ">" + before, ">" + after, ">change"), tuple(
        (
            Cell(r.what), Cell(figure_text(r.before, r.unit)), Cell(figure_text(r.after, r.unit)),
            Cell(f"{r.after / r.before - 1:+.1%}" if r.before else "new", _tone(r.before, r.after)),
        )
        for r in rows
    ))


def _collectives(rows: Sequence[CollectiveChange], before: str, after: str) -> Table:
    names = columns("kind", "`source", f">bytes {before}", f">bytes {after}", f">time {before}", f">time {after}")
    return Table(names, tuple(
        (
            Cell(r.kind), Cell(r.source or "?"), Cell(format_bytes(r.bytes_before)),
            Cell(format_bytes(r.bytes_after), _tone(r.bytes_before, r.bytes_after)), Cell(_seconds(r.seconds_before)),
            Cell(_seconds(r.seconds_after)),
        )
        for r in rows
    ))


def _tone(before: float, after: float) -> Tone:
    return "good" if after < before else "bad" if after > before else ""


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else format_seconds(seconds)


def compare_doc(rows: Sequence[CompareRow], title: str = "This plan beside the templates") -> Doc:
    """Ways to shard one step, the fastest that fits first. Figures of compiled modules stand where known."""
    ordered = sorted(rows, key=lambda r: (not r.feasible, r.seconds, r.name))
    slowest = max((r.seconds for r in ordered), default=0.0) or 1.0
    bars = Bars(tuple(
        Bar(r.name, (BarPart("", r.seconds / slowest, 0 if r.feasible else 1),), _bar_text(r)) for r in ordered
    ))
    compiled = any(r.compiled is not None for r in ordered)
    kinds = [k for k in KINDS if any(_kinds(r).get(k) for r in ordered)]
    more = (">compiled",) if compiled else ()
    names = columns("", "mesh", ">step", *more, ">peak memory", "fits", *(f">{k}" for k in kinds))
    table = Table(names, tuple(_compare_row(r, compiled, kinds) for r in ordered))
    whose = "of the compiled modules where there are any" if compiled else "predicted"
    said = Paragraph(f"Bytes of collectives, per device and step, {whose}.", "quiet")
    return Doc(title, "", (bars, table, said))


def _bar_text(r: CompareRow) -> str:
    return format_seconds(r.seconds) + ("" if r.feasible else ", does not fit")


def _kinds(r: CompareRow) -> dict[str, float]:
    return dict((r.compiled or {}).get("bytes_by_kind", r.bytes_by_kind))


def _compare_row(r: CompareRow, compiled: bool, kinds: Sequence[str]) -> tuple[Cell, ...]:
    found = (r.compiled or {}).get("seconds")
    more = (Cell("?" if found is None else format_seconds(float(found))),) if compiled else ()
    peak = (r.compiled or {}).get("peak_bytes")
    moved = _kinds(r)
    return (
        Cell(r.name), Cell(str(r.mesh)), Cell(format_seconds(r.step_seconds)), *more,
        Cell(format_bytes(r.peak_bytes if peak is None else float(peak))),
        Cell("yes", "quiet") if r.feasible else Cell("no", "bad"),
        *(Cell(format_bytes(moved[k])) if moved.get(k) else Cell("0", "quiet") for k in kinds),
    )


def verify_doc(verification: VerificationLike, title: str = "Planned against one device") -> Doc:
    """Result leaves of a planned run against one device's, the worst first."""
    leaves = sorted(verification.leaves, key=lambda x: (x.ok, -x.relative_error / (x.tolerance or 1.0), x.path))
    wrong = sum(not x.ok for x in leaves)
    said = (
        Paragraph(f"All {len(leaves)} result leaves agree.", "good") if verification.ok
        else Paragraph(f"{wrong} of {len(leaves)} result leaves differ by more than their tolerance.", "bad")
    )
    rows = tuple(
        (
            Cell(x.path), Cell(f"{x.relative_error:.2e}", "" if x.ok else "bad"), Cell(f"{x.absolute_error:.2e}"),
            Cell(f"{x.tolerance:.1e}"), Cell("agrees", "good") if x.ok else Cell("differs", "bad"),
        )
        for x in leaves
    )
    table = Table(columns("`result", ">relative error", ">absolute error", ">tolerance", ""), rows)
    return Doc(title, "", (said, table))
