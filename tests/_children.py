"""Measuring in a child process that is started again after a case that the compiler dies of."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence


def reports(script: str, target: str, only: Sequence[str], word: str) -> Iterator[tuple[str, str | None]]:
    """(name of a case, what the child says of it, or None where it died) for every case.

    The child is `script --child target SKIP *only`. It prints `case NUMBER NAME` before a case, `word REST` after it.
    """
    skip, alive = 0, True
    while alive:
        argv = [sys.executable, script, "--child", target, str(skip), *only]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            name = ""
            for line in process.stdout:
                said, _, rest = line.rstrip("\n").partition(" ")
                if said == "case":
                    number, _, name = rest.partition(" ")
                    skip = int(number) + 1
                elif said == word:
                    yield name, rest
                    name = ""
            alive = bool(process.wait()) and bool(name)
        if name:
            yield name, None
