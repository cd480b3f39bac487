"""What the demo shows while it works: headings, bars with the time, a small chart."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[str], None]


def heading(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]", highlight=False)


@contextmanager
def working(console: Console, what: str) -> Iterator[None]:
    """A moving bar with the time while the body runs; afterwards one line that says how long it took."""
    began = time.monotonic()
    columns = (TextColumn("  {task.description}"), BarColumn(24), TimeElapsedColumn())
    if console.is_terminal:
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(what, total=None)
            yield
    else:
        console.print(f"  {what} ...", highlight=False)
        yield
    console.print(f"  [dim]{what}: {time.monotonic() - began:.1f} s[/dim]", highlight=False)


@contextmanager
def counting(console: Console, what: str, total: int) -> Iterator[Advance]:
    """A bar over `total` steps; the yielded function takes one step and shows a text beside it."""
    began = time.monotonic()
    columns = (
        TextColumn("  {task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[beside]}"),
    )  # fmt: skip
    if console.is_terminal:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(what, total=total, beside="")
            yield lambda text: progress.update(task, advance=1, beside=text)
    else:
        console.print(f"  {what} ...", highlight=False)
        yield lambda text: None
    seconds = time.monotonic() - began
    console.print(f"  [dim]{what}: {total} in {seconds:.1f} s[/dim]", highlight=False)


def chart(values: Sequence[float], height: int = 10, width: int = 60) -> list[str]:
    """Values against their place as lines of text; each column is the mean of its share of them."""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    level = [round((height - 1) * (m - low) / ((high - low) or 1.0)) for m in means]
    rows = []
    for h in reversed(range(height)):
        label = f"{low + (high - low) * h / (height - 1):6.2f}" if h % 3 == 0 else " " * 6
        rows.append(f"{label} ┤{''.join('•' if at == h else ' ' for at in level)}".rstrip())
    rows.append(f"       └{'─' * width}")
    rows.append(f"        1{str(len(values)).rjust(width - 1)}  steps")
    return rows


def console() -> Console:
    """To the terminal where there is one; elsewhere lines of a fixed width."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
