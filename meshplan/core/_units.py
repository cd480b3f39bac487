"""Figures as people read them."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def format_bytes(n: float) -> str:
    """Decimal units, three significant digits: `1.84 MB`."""
    for limit, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(n) >= limit:
            return f"{n / limit:.3g} {unit}" if abs(n) < 1000 * limit else f"{n / limit:,.0f} {unit}"
    return f"{n:.0f} B"


def format_seconds(s: float) -> str:
    """`1.23 s`, `45.6 ms`, `7.8 us`."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(s) >= limit:
            return f"{s / limit:.3g} {unit}"
    return f"{s / 1e-9:.3g} ns" if s else "0 s"


def format_flops(n: float) -> str:
    for limit, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if abs(n) >= limit:
            return f"{n / limit:.3g} {unit}"
    return f"{n:.0f} FLOP"
