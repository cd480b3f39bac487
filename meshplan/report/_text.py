"""A report as plain text: what a log file or a terminal without colours gets."""

from __future__ import annotations

import textwrap

from meshplan.report._doc import Bars, Code, Doc, Figures, Heading, Paragraph, Part, Split, Splits, Table

FILL = ("█", "▓", "▒", "░")


def text(doc: Doc, width: int = 100) -> str:
    """The report without colours. Paragraphs and bars keep to `width`; tables are as wide as their texts."""
    blocks = [f"{doc.title}\n{doc.subtitle}".rstrip()]
    blocks += [block for part in doc.parts if (block := part_text(part, width))]
    return "\n\n".join(blocks) + "\n"


def part_text(part: Part, width: int) -> str:
    match part:
        case Heading():
            return f"{part.text}\n{'-' * len(part.text)}"
        case Paragraph():
            return "\n".join(textwrap.wrap(part.text, width, break_long_words=False, break_on_hyphens=False))
        case Code():
            return textwrap.indent(part.text, "    ")
        case Figures():
            return _figures(part)
        case Table():
            return table_text(part)
        case Bars():
            return "\n".join(bar_lines(part, width))
        case Splits():
            return "\n\n".join("\n".join(split_lines(s)) for s in part.items)


def _figures(part: Figures) -> str:
    wide = max((len(what) for what, _, _ in part.items), default=0)
    value = max((len(v) for _, v, _ in part.items), default=0)
    return "\n".join(f"{what.ljust(wide)}  {v.rjust(value)}  {more}".rstrip() for what, v, more in part.items)


def table_text(table: Table) -> str:
    rows = [[c.name for c in table.columns], *([cell.text for cell in row] for row in table.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    lines = []
    for row in rows:
        parts = []
        for said, column, size in zip(row, table.columns, widths, strict=True):
            parts.append(said.rjust(size) if column.kind == "figure" else said.ljust(size))
        lines.append("  ".join(parts).rstrip())
    lines.insert(1, "  ".join("-" * size for size in widths))
    return "\n".join(lines)


def bar_lines(part: Bars, width: int) -> list[str]:
    label = max((len(b.label) for b in part.bars), default=0)
    said = max((len(b.text) for b in part.bars), default=0)
    room = max(10, min(48, width - label - said - 4))
    lines = []
    for bar in part.bars:
        drawn, done = "", 0.0
        for p in bar.parts:
            done += p.share
            drawn += FILL[p.series % len(FILL)] * max(0, round(min(1.0, done) * room) - len(drawn))
        lines.append(f"{bar.label.ljust(label)}  {drawn.ljust(room, '·')}  {bar.text}")
    names = dict.fromkeys((p.name, p.series) for b in part.bars for p in b.parts if p.name)
    if len(names) > 1:
        lines.append(" " * (label + 2) + "   ".join(f"{FILL[series % len(FILL)]} {name}" for name, series in names))
    return lines


def split_lines(split: Split) -> list[str]:
    """A grid in box characters; one line of devices per piece."""
    texts = [[c.text for c in row] for row in split.grid]
    size = max(len(t) for row in texts for t in row)
    left = " " * (len(split.down) + 1 if split.down else 0)

    def rule(a: str, b: str, c: str) -> str:
        return left + a + b.join("─" * (size + 2) for _ in texts[0]) + c

    across = left + f"  {split.across}" if split.across else ""
    lines = [split.title, split.subtitle, "", across, rule("┌", "┬", "┐")]
    middle = (len(texts) - 1) // 2
    for r, row in enumerate(texts):
        start = (split.down + " ") if split.down and r == middle else left
        lines.append(start + "│" + "│".join(f" {t.center(size)} " for t in row) + "│")
        if r + 1 == len(texts):
            lines.append(rule("└", "┴", "┘"))
        elif len(texts) <= 4:
            lines.append(rule("├", "┼", "┤"))
    return [line for i, line in enumerate(lines) if line or i == 2]
