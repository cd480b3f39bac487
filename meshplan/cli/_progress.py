"""Signs of life on stderr for everything that may take over a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshplan.core import format_seconds


@contextmanager
def working(what: str, seconds: float | None = None) -> Iterator[None]:
    """Shows `what` while the body runs: a bar with the time in a terminal (against the limit `seconds`
    where there is one), else one line at the start and, after more than a second, one with the time."""
    began = time.monotonic()
    if not sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield
        if time.monotonic() - began > 1.0:
            print(f"{what}: {format_seconds(time.monotonic() - began)}", file=sys.stderr, flush=True)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield
        return
    limit = f"of at most {seconds:g} s" if seconds is not None else ""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn(), TextColumn(limit))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(what, total=None)
        yield


@contextmanager
def counting() -> Iterator[Callable[[int, int, str], None]]:
    """Gives `progress(done, total, what)`: a bar in a terminal, else a line whenever another tenth is done."""
    if not sys.stderr.isatty():
        yield _tenths()
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        yield _tenths()
        return
    columns = (TextColumn("{task.description:32}"), BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda done, total, what: progress.update(task, completed=done, total=total, description=what)


def _tenths() -> Callable[[int, int, str], None]:
    said: set[int] = set()

    def progress(done: int, total: int, what: str) -> None:
        tenth = 10 * done // total
        if tenth not in said:
            said.add(tenth)
            print(f"{what}: {done} of {total} ...", file=sys.stderr, flush=True)

    return progress
