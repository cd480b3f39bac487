"""One row of a forecast: the same step on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshplan.core import MeshShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastRow:
    """Modelled seconds and bytes, per device and step; None where nothing fits, for the `reason` given.

    `peak_bytes` of a row that does not fit: what is needed at least, or the least that was found. `timeline_seconds`:
    the step with memory traffic, and with what communication computation hides. `tokens_per_second_per_device` counts
    what the forecast's `unit` says; `efficiency` is that figure over the one of the smallest machine of the same chip
    that fits. `plan_seconds`: CPU seconds of planning the row; `solves`: problems solved for it. `note`: what a person
    should know of a row that fits.
    """

    machine: str
    chip: str
    devices: int
    mesh: MeshShape | None
    feasible: bool
    step_seconds: float | None = None
    timeline_seconds: float | None = None
    peak_bytes: float | None = None
    memory_limit: float = 0.0
    tokens: int = 0
    tokens_per_second_per_device: float | None = None
    efficiency: float | None = None
    plan_seconds: float = 0.0
    solves: int = 0
    reason: str = ""
    note: str = ""


def with_efficiency(rows: Sequence[ForecastRow]) -> tuple[ForecastRow, ...]:
    """The rows with their scaling efficiency, 1 for the smallest machine of each chip that fits."""
    smallest: dict[str, ForecastRow] = {}
    for row in sorted((r for r in rows if r.feasible), key=lambda r: r.devices):
        smallest.setdefault(row.chip, row)
    out = []
    for row in rows:
        base = smallest.get(row.chip)
        mine, theirs = row.tokens_per_second_per_device, base and base.tokens_per_second_per_device
        out.append(replace(row, efficiency=mine / theirs if mine and theirs else None))
    return tuple(out)
