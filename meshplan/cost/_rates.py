"""Seconds of collectives, reshard paths and computation on one machine with one mesh."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshplan.core import Axes, CollectiveKind, MeshShape, Spec
from meshplan.cost._emission import Emission
from meshplan.cost._problem import FORBIDDEN, Floats
from meshplan.cost._reshard import Step, canonical, reshard_path
from meshplan.machine import Machine, collective_rate

# what no hardware number covers: starting one kernel
KERNEL_SECONDS = {"gpu": 3e-6, "tpu": 1e-6, "cpu": 5e-6}


Linear = tuple[float, float, float]


class Rates:
    """Prices, remembered per (kind, axes) and per pair of specs."""

    def __init__(self, machine: Machine, mesh: MeshShape) -> None:
        self.machine, self.mesh = machine, mesh
        self.emission = Emission(machine.chip.platform)
        self._rates: dict[tuple[CollectiveKind, Axes], tuple[float, float]] = {}
        self._paths: dict[tuple[Spec, Spec], tuple[Step, ...]] = {}
        self._linear: dict[tuple[Spec, Spec], Linear] = {}
        self._tables: dict[tuple[tuple[Spec, ...], tuple[Spec, ...]], Floats] = {}

    def collective(self, kind: CollectiveKind, axes: Axes) -> tuple[float, float]:
        """(seconds of latency, seconds per byte of the larger local buffer)."""
        key = (kind, axes)
        if key not in self._rates:
            self._rates[key] = collective_rate(self.machine, self.mesh, kind, axes)
        return self._rates[key]

    def path(self, source: Spec, target: Spec) -> tuple[Step, ...]:
        key = (source, target)
        if key not in self._paths:
            self._paths[key] = reshard_path(source, target, self.mesh)
        return self._paths[key]

    def linear(self, source: Spec, target: Spec) -> Linear:
        """(latency, seconds per byte of the whole array in sums, in moves) of the path; FORBIDDEN where there is none."""
        _, a, b = canonical(source, target)
        found = self._linear.get((a, b))
        if found is None:
            found = self._linear[a, b] = self._price(a, b)
        return found

    def _price(self, source: Spec, target: Spec) -> Linear:
        if set(target.unreduced) - set(source.unreduced):
            return FORBIDDEN, 0.0, 0.0
        latency = sums = moves = 0.0
        for step in reshard_path(source, target, self.mesh):
            kind = self.emission.kind(step)
            if kind is not None:
                a, b = self.collective(kind, step.axes)
                latency += a
                if step.reduces:
                    sums += b * step.fraction
                else:
                    moves += b * step.fraction
        return latency, sums, moves

    def tables(self, sources: tuple[Spec, ...], targets: tuple[Spec, ...]) -> Floats:
        """(3, sources, targets): `linear` from each source spec to each target spec; remembered."""
        key = (sources, targets)
        found = self._tables.get(key)
        if found is None:
            found = np.zeros((3, len(sources), len(targets)))
            for i, a in enumerate(sources):
                for j, b in enumerate(targets):
                    if a != b:
                        found[:, i, j] = self.linear(a, b)
            self._tables[key] = found
        return found

    def table(self, sources: Sequence[Spec], targets: Sequence[Spec], sum_bytes: float, move_bytes: float) -> Floats:
        """Seconds from each source spec to each target spec of an array of so many bytes on the wire."""
        latency, sums, moves = self.tables(tuple(sources), tuple(targets))
        return latency + sums * sum_bytes + moves * move_bytes

    def all_reduce(self, over: np.ndarray, local_bytes: Floats) -> Floats:
        """(n,) seconds of an all-reduce of `local_bytes` over the axes that `over` (n, axes) marks."""
        out = np.zeros(len(over))
        patterns, index = np.unique(over, axis=0, return_inverse=True)
        for p, pattern in enumerate(patterns):
            axes = tuple(n for n, used in zip(self.mesh.names, pattern, strict=True) if used)
            if axes:
                latency, per_byte = self.collective("all-reduce", axes)
                rows = index.reshape(-1) == p
                out[rows] = latency + per_byte * local_bytes[rows]
        return out

    @property
    def kernel_seconds(self) -> float:
        return KERNEL_SECONDS[self.machine.chip.platform]
