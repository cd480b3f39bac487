"""A report in a terminal, through rich where it is installed."""

from __future__ import annotations

from typing import Any, TextIO

from meshplan.report._doc import Bars, Code, Doc, Figures, Heading, Paragraph, Part, Split, Splits, Table
from meshplan.report._text import bar_lines, split_lines
from meshplan.report._text import text as plain_text

SERIES = ("cyan", "magenta", "yellow", "green")
PIECES = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
TONES = {"": "", "good": "green", "bad": "bold red", "quiet": "dim"}


def show(doc: Doc, file: TextIO, *, width: int | None = None) -> None:
    """Print the report: with colours to a terminal, as plain text elsewhere or where rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        file.write(plain_text(doc, width or 100))
        return
    console = Console(file=file, width=width, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        file.write(plain_text(doc, width or 120))
        return
    console.print(renderable(doc, console.width))


def renderable(doc: Doc, width: int = 100) -> Any:
    """The report as an object that rich prints."""
    from rich.console import Group
    from rich.text import Text

    head = Text(doc.title, style="bold")
    parts: list[Any] = [head, Text(doc.subtitle, style="dim")] if doc.subtitle else [head]
    for part in doc.parts:
        parts += [Text(""), _part(part, width)]
    return Group(*parts)


def _part(part: Part, width: int) -> Any:
    from rich.columns import Columns
    from rich.text import Text

    match part:
        case Heading():
            return Text(part.text, style="bold underline")
        case Paragraph():
            return Text(part.text, style=TONES[part.tone])
        case Code():
            return Text(part.text, style="dim")
        case Figures():
            return _figures(part)
        case Table():
            return _table(part, width)
        case Bars():
            return _bars(part, width)
        case Splits():
            return Columns([_split(s) for s in part.items], padding=(1, 4))


def _figures(part: Figures) -> Any:
    from rich.table import Table as Grid

    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(justify="right", style="bold")
    grid.add_column(style="dim")
    for item in part.items:
        grid.add_row(*item)
    return grid


def _table(part: Table, width: int) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    sizes = column_widths(part, width - 2)
    for i, size in sizes.items():
        figure = part.columns[i].kind == "figure"
        grid.add_column(part.columns[i].name, justify="right" if figure else "left", overflow="fold", width=size)
    for row in part.rows:
        grid.add_row(*(Text(row[i].text, style=TONES[row[i].tone]) for i in sizes))
    return grid


def column_widths(part: Table, width: int) -> dict[int, int]:
    """Width of every column that is shown: spare ones go first, then the widest give way, down to a whole word."""
    texts = [[c.name, *(row[i].text for row in part.rows)] for i, c in enumerate(part.columns)]
    sizes = {i: max(map(len, column)) for i, column in enumerate(texts)}
    words = [max(len(w) for text in column for w in text.split() or [""]) for column in texts]
    least = {i: size if part.columns[i].kind == "figure" else words[i] for i, size in sizes.items()}

    def over(found: dict[int, int]) -> int:
        return sum(found.values()) + 2 * len(found) - width

    for i in reversed(range(len(part.columns))):
        if part.columns[i].spare and over(sizes) > 0:
            del sizes[i]
    for floor in (least, dict.fromkeys(least, 12)):  # words are broken only where nothing else helps
        while over(sizes) > 0:
            room = {i: size for i, size in sizes.items() if size > floor[i] and part.columns[i].kind != "figure"}
            if not room:
                break
            sizes[max(room, key=lambda i: room[i])] -= 1
    return sizes


def _bars(part: Bars, width: int) -> Any:
    from rich.text import Text

    text = Text("\n").join(Text(line) for line in bar_lines(part, width))
    for character, colour in zip("█▓▒░", SERIES, strict=True):
        text.highlight_regex(f"[{character}]+", colour)
    return text


def _split(split: Split) -> Any:
    from rich.text import Text

    lines = [Text(line) for line in split_lines(split)]
    lines[0].stylize("bold")
    lines[1].stylize("dim")
    colours = {c.text: PIECES[c.piece % len(PIECES)] for row in split.grid for c in row if split.pieces > 1}
    for line in lines[2:]:
        for text, colour in colours.items():
            line.highlight_words([f" {text} "], style=colour)
    return Text("\n").join(lines)
