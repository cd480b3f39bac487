"""What the collectives of a plan cost, summed over those of one kind from one line of source."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath

from meshplan.core import Axes, Collective, MachineError, MeshShape
from meshplan.cost import SMALL_BYTES, SUMS, Rates
from meshplan.machine import Machine
from meshplan.plan._data import PlanData


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Collectives of one kind over the same axes from one line. Bytes and seconds are per device and step.

    `runs`: how often one runs in a step; `seconds` is None where the plan's machine is no preset.
    """

    kind: str
    axes: Axes
    source: str
    op_names: tuple[str, ...]
    runs: float
    nbytes: float
    seconds: float | None


def collective_costs(data: PlanData, chosen: Iterable[Collective] | None = None) -> tuple[CollectiveCost, ...]:
    """The plan's collectives (or some of them) by kind, axes and line, those that take most time first."""
    machine = machine_of(data.machine)
    groups: dict[tuple[str, Axes, str], list[Collective]] = {}
    for c in data.collectives if chosen is None else chosen:
        groups.setdefault((c.kind, c.axes, short_source(c.source)), []).append(c)
    rows = [
        CollectiveCost(
            kind=kind, axes=axes, source=source, op_names=tuple(sorted({c.op_name for c in found if c.op_name})),
            runs=sum(c.count for c in found), nbytes=sum(c.total_bytes for c in found),
            seconds=_seconds(machine, data.mesh, found),
        )
        for (kind, axes, source), found in groups.items()
    ]
    return tuple(sorted(rows, key=lambda r: (-(r.seconds or 0.0), -r.nbytes, r.kind, r.source, r.axes)))


def _seconds(machine: Machine | None, mesh: MeshShape, found: Iterable[Collective]) -> float | None:
    if machine is None or machine.devices != mesh.devices:
        return None
    rates, total = Rates(machine, mesh), 0.0
    for c in found:
        latency, per_byte = rates.collective(c.kind, c.axes)
        alone = c.kind not in SUMS or c.nbytes >= SMALL_BYTES  # small reductions ride along with others
        total += c.count * (latency * alone + per_byte * c.nbytes)
    return total


@lru_cache(maxsize=64)
def machine_of(name: str) -> Machine | None:
    """The preset of that name; None for a machine that was described by hand or measured."""
    try:
        return Machine.preset(name)
    except MachineError:
        return None


def short_source(source: str) -> str:
    """The last two entries of a source line's path: `models/gpt.py:163`."""
    return "/".join(PurePath(source).parts[-2:]) if source else ""


def short_sources(text: str) -> str:
    """The text with the source lines in it shortened: `exp float32[8] models/gpt.py:185`."""
    return re.sub(r"(?<!\S)/\S+:\d+(?!\S)", lambda found: short_source(found[0]), text)
