"""`import meshplan` costs at most 50 ms more than `import jax`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPETITIONS = 7
LIMIT_SECONDS = 0.050


def seconds_of(statement: str) -> float:
    """Wall time of a fresh interpreter that runs this statement."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], cwd=ROOT, check=True, capture_output=True, timeout=120)
    return time.perf_counter() - start


def bench_import_is_within_fifty_milliseconds_of_jax() -> None:
    seconds_of("import meshplan")  # writes the bytecode, fills the file cache
    pairs = [(seconds_of("import jax"), seconds_of("import meshplan")) for _ in range(REPETITIONS)]
    jax_seconds, meshplan_seconds = (min(column) for column in zip(*pairs, strict=True))
    extra = meshplan_seconds - jax_seconds
    print(
        f"\nimport jax {jax_seconds * 1e3:.0f} ms, import meshplan {meshplan_seconds * 1e3:.0f} ms: "
        f"{extra * 1e3:+.0f} ms, ratio {meshplan_seconds / jax_seconds:.3f}, the least of {REPETITIONS}"
    )
    assert extra <= LIMIT_SECONDS
