"""The demo's page: the plan's own report, with the comparison, the checks and the training added."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import meshplan as mp
from meshplan.plan import write_atomically
from meshplan.report import Doc, audit_doc, compare_doc, html, plan_doc, verify_doc
from meshplan.report._doc import Bar, BarPart, Bars, Cell, Heading, Paragraph, Part, Table, columns

BARS = 24


def write(
    path: Path, plan: mp.Plan, comparison: mp.Comparison, audit: mp.Audit, verification: mp.Verification,
    losses: Sequence[float], checks: Sequence[tuple[str, bool, str]],
) -> None:  # fmt: skip
    """One self-contained file at `path`, its folder made where it is missing."""
    whole = plan_doc(plan.data)
    parts: list[Part] = [Heading("What was checked"), checks_table(checks)]
    parts += [Heading("Loss against steps"), curve(losses), Heading("The plan"), *whole.parts]
    for doc in (compare_doc(comparison.rows), audit_doc(audit), verify_doc(verification)):
        parts += [Heading(doc.title), *([Paragraph(doc.subtitle, "quiet")] if doc.subtitle else []), *doc.parts]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(html(Doc(f"Demo: {whole.title}", whole.subtitle, tuple(parts))).encode(), path)


def checks_table(checks: Sequence[tuple[str, bool, str]]) -> Table:
    verdict = {True: Cell("holds", "good"), False: Cell("fails", "bad")}
    rows = tuple((Cell(what), verdict[ok], Cell(found)) for what, ok, found in checks)
    return Table(columns("check", "", "found"), rows)


def curve(losses: Sequence[float]) -> Bars:
    """One bar for each of a few steps, evenly spread, the first and the last among them."""
    count = min(BARS, len(losses))
    places = sorted({round(i * (len(losses) - 1) / max(1, count - 1)) for i in range(count)})
    top = max(losses)
    return Bars(tuple(
        Bar(f"step {i + 1}", (BarPart("", losses[i] / top, 0),), f"{losses[i]:.3f} nats per byte") for i in places
    ))  # fmt: skip
