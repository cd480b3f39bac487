"""A report as one HTML file: no scripts, no resources from elsewhere, light and dark."""

from __future__ import annotations

from html import escape

from meshplan.report._doc import (
    BarPart,
    Bars,
    Cell,
    Code,
    Column,
    Doc,
    Figures,
    Heading,
    Paragraph,
    Part,
    Split,
    SplitCell,
    Splits,
    Table,
)
from meshplan.report._style import STYLE


def html(doc: Doc) -> str:
    """The whole page as text. Everything that came from a user is escaped."""
    body = "\n".join(part_html(part) for part in doc.parts)
    subtitle = f'<p class="sub">{escape(doc.subtitle)}</p>' if doc.subtitle else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(doc.title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{escape(doc.title)}</h1>{subtitle}</header>\n{body}\n</main>\n</body>\n</html>\n"
    )


def part_html(part: Part) -> str:
    match part:
        case Heading():
            level = min(max(part.level, 2), 6)
            return f"<h{level}>{escape(part.text)}</h{level}>"
        case Paragraph():
            return f"<p{_tone(part.tone)}>{escape(part.text)}</p>"
        case Code():
            return f"<pre><code>{escape(part.text)}</code></pre>"
        case Figures():
            return _figures(part)
        case Table():
            return _table(part)
        case Bars():
            return _bars(part)
        case Splits():
            return f'<div class="splits">{"".join(map(_split, part.items))}</div>'


def _tone(tone: str) -> str:
    return f' class="{tone}"' if tone else ""


def _figures(part: Figures) -> str:
    tiles = "".join(
        f'<div class="tile"><div class="what">{escape(what)}</div><div class="value">{escape(value)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
        for what, value, more in part.items
    )
    return f'<div class="tiles">{tiles}</div>'


def _table(part: Table) -> str:
    head = "".join(f'<th class="{c.kind}">{escape(c.name)}</th>' for c in part.columns)
    rows = "\n".join(
        f"<tr>{''.join(_cell(cell, column) for cell, column in zip(row, part.columns, strict=True))}</tr>"
        for row in part.rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _cell(cell: Cell, column: Column) -> str:
    classes = f"{column.kind} {cell.tone}".strip()
    bar = "" if cell.share is None else f' style="--share:{_percent(cell.share)}"'
    classes += " bar" if bar else ""
    text = escape(cell.text)
    if column.kind == "code":  # a path may break after a slash, a spec stays in one piece
        text = text.replace("/", "/<wbr>").replace(" ", "&nbsp;")
    return f'<td class="{classes}"{bar}>{text}</td>'


def _percent(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.4g}%"


def _bars(part: Bars) -> str:
    rows = []
    for bar in part.bars:
        pieces = "".join(map(_bar_part, bar.parts))
        rows.append(
            f'<div class="barlabel">{escape(bar.label)}</div><div class="track">{pieces}</div>'
            f'<div class="bartext">{escape(bar.text)}</div>'
        )
    names = dict.fromkeys((p.name, p.series % 4) for b in part.bars for p in b.parts if p.name)
    legend = "".join(f'<span><i class="s{series}"></i>{escape(name)}</span>' for name, series in names)
    shown = f'<div class="legend">{legend}</div>' if len(names) > 1 else ""
    return f'<div class="bars">{"".join(rows)}</div>{shown}'


def _bar_part(part: BarPart) -> str:
    title = escape(f"{part.name} {part.text}".strip())
    return f'<span class="s{part.series % 4}" style="width:{_percent(part.share)}" title="{title}"></span>'


def _split(split: Split) -> str:
    rows = "".join(f"<tr>{''.join(_piece(c, split.pieces) for c in row)}</tr>" for row in split.grid)
    kind = "pieces tall" if len(split.grid[0]) == 1 and split.pieces > 1 else "pieces"
    down = f'<div class="down">{escape(split.down)}</div>' if split.down else ""
    across = f'<div class="across">{escape(split.across)}</div>' if split.across else ""
    return (
        f'<figure class="split"><figcaption><b>{escape(split.title)}</b><br>{escape(split.subtitle)}</figcaption>'
        f'<div class="picture">{down}<div>{across}<table class="{kind}">{rows}</table></div></div></figure>'
    )


def _piece(cell: SplitCell, pieces: int) -> str:
    if pieces <= 1:
        return f'<td class="whole">{escape(cell.text)}</td>'
    hue = round(360 * cell.piece / pieces + 200) % 360
    return f'<td style="--hue:{hue}">{escape(cell.text)}</td>'
