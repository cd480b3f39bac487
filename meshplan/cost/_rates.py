"""Seconds of collectives, reshard paths and computation on one machine with one mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from meshplan.core import Axes, CollectiveKind, MeshShape, Spec
from meshplan.cost._combine import COMBINED_BYTES, SMALL_BYTES
from meshplan.cost._emission import Emission
from meshplan.cost._problem import FORBIDDEN, Floats
from meshplan.cost._reshard import Step, canonical, reshard_path, room_of
from meshplan.machine import CollectiveLine, Machine, collective_lines, collective_rate

# The search prices even a sum that others take along: it is copied to them and back, and where it depends on one
# of them it splits them up. For nothing, tiny sums would be split over devices to save nanoseconds.
LEAST_SHARE = 0.02
# What no hardware number covers: starting one kernel.
KERNEL_SECONDS = {"gpu": 3e-6, "tpu": 1e-6, "cpu": 5e-6}


# By axes, dtype and whether something waits for it, the part of a latency that each small reduction bears.
Shares = Mapping[tuple[Axes, str, bool], float]
Linear = tuple[float, float, float, float]
Room = tuple[int, ...] | None  # see `reshard_path`
Pairs = tuple[tuple[Spec, ...], tuple[Spec, ...], Room]


class Rates:
    """Prices, remembered per (kind, axes) and per pair of specs."""

    def __init__(self, machine: Machine, mesh: MeshShape) -> None:
        self.machine, self.mesh = machine, mesh
        self.emission = Emission(machine.chip.platform)
        self._rates: dict[tuple[CollectiveKind, Axes], tuple[float, float]] = {}
        self._lines: dict[tuple[CollectiveKind, Axes], tuple[CollectiveLine, ...]] = {}
        self._paths: dict[tuple[Spec, Spec, Room], tuple[Step, ...]] = {}
        self._linear: dict[tuple[Spec, Spec, Room], Linear] = {}
        self._codes: dict[Spec, tuple[int, ...] | None] = {}
        self._tables: dict[Pairs, Floats] = {}
        self._kinds: dict[Pairs, npt.NDArray[np.int64] | None] = {}

    def collective(self, kind: CollectiveKind, axes: Axes) -> tuple[float, float]:
        """(seconds of latency, seconds per byte of the larger local buffer)."""
        key = (kind, axes)
        if key not in self._rates:
            self._rates[key] = collective_rate(self.machine, self.mesh, kind, axes)
        return self._rates[key]

    def fitted_seconds(self, kind: CollectiveKind, axes: Axes, nbytes: float) -> float:
        """Seconds of one collective by the best algorithm at these bytes, with the figures of its library."""
        key = (kind, axes)
        if key not in self._lines:
            self._lines[key] = collective_lines(self.machine, self.mesh, kind, axes)
        return min((line.seconds(nbytes) for line in self._lines[key]), default=0.0)

    def room(self, shape: tuple[int, ...]) -> Room:
        """Into how many shards the dims of an array may be cut on its way; None where any mesh axes divide them all."""
        room = room_of(shape, self.mesh)
        return None if all(r in (1, self.mesh.devices) for r in room) else room

    def path(self, source: Spec, target: Spec, room: Room = None) -> tuple[Step, ...]:
        """`reshard_path`, remembered."""
        key = (source, target, room)
        if key not in self._paths:
            self._paths[key] = reshard_path(source, target, self.mesh, room)
        return self._paths[key]

    def linear(self, source: Spec, target: Spec, room: Room = None) -> Linear:
        """(latency of sums, of moves, seconds per byte of the whole array in sums, in moves).

        Latencies are FORBIDDEN where there is no path.
        """
        order, a, b = canonical(source, target)
        small = tuple(room[d] for d in order) if room else None
        if small and not any(r % self.mesh.size(tuple(dict.fromkeys((*a.axes, *b.axes)))) for r in small):
            small = None  # dims that hold all these axes restrain nothing
        found = self._linear.get((a, b, small))
        if found is None:
            found = self._linear[a, b, small] = self._price(a, b, small)
        return found

    def _price(self, source: Spec, target: Spec, room: Room) -> Linear:
        if set(target.unreduced) - set(source.unreduced):
            return FORBIDDEN, 0.0, 0.0, 0.0
        sum_latency = move_latency = sums = moves = 0.0
        for step in reshard_path(source, target, self.mesh, room):
            kind = self.emission.kind(step)
            if kind is not None:
                a, b = self.collective(kind, step.axes)
                if step.reduces:
                    sum_latency += a
                    sums += b * step.fraction
                else:
                    move_latency += a
                    moves += b * step.fraction
        return sum_latency, move_latency, sums, moves

    def tables(self, sources: tuple[Spec, ...], targets: tuple[Spec, ...], room: Room = None) -> Floats:
        """(4, sources, targets): `linear` from each source spec to each target spec; remembered.

        Equal moves are priced once: pairs of specs are reduced to which axes share a dim, for all pairs at a time.
        """
        key = (sources, targets, room)
        if key not in self._tables:
            self._tables[key] = self._each_kind(key, lambda a, b: self.linear(a, b, room))
        return self._tables[key]

    def small_latency(
        self, sources: tuple[Spec, ...], targets: tuple[Spec, ...], dtype: str, waits: bool, shares: Shares,
        room: Room = None,
    ) -> Floats:
        """(sources, targets): seconds of latency that small sums of this dtype bear between the specs."""

        def borne(source: Spec, target: Spec) -> tuple[float]:
            if set(target.unreduced) - set(source.unreduced):
                return (FORBIDDEN,)
            total = 0.0
            for step in self.path(source, target, room):
                kind = self.emission.kind(step) if step.reduces else None
                if kind is not None:
                    total += self.collective(kind, step.axes)[0] * share_of(shares, step.axes, dtype, waits)
            return (total,)

        return self._each_kind((sources, targets, room), borne)[0]

    def _each_kind(self, key: Pairs, price: Callable[[Spec, Spec], tuple[float, ...]]) -> Floats:
        """(numbers, sources, targets) of `price`, which is asked once for each kind of move."""
        sources, targets, _ = key
        if key not in self._kinds:
            self._kinds[key] = self._kinds_of_move(*key)
        kinds = self._kinds[key]
        if kinds is None:
            return np.moveaxis(np.array([[price(a, b) for b in targets] for a in sources]), 2, 0)
        _, first, index = np.unique(kinds, return_index=True, return_inverse=True)
        rows, columns = np.unravel_index(first, kinds.shape)
        prices = [price(sources[i], targets[j]) for i, j in zip(rows, columns, strict=True)]
        return np.moveaxis(np.array(prices)[index.reshape(kinds.shape)], 2, 0)

    def _kinds_of_move(
        self, sources: tuple[Spec, ...], targets: tuple[Spec, ...], room: Room
    ) -> npt.NDArray[np.int64] | None:
        """(sources, targets) a number that is equal for equal moves; None where axes are not in the mesh's order."""
        codes = [self._places(s) for s in (*sources, *targets)]
        if any(c is None for c in codes):
            return None
        places = np.array(codes)
        n, k = len(sources), len(self.mesh.names)
        shape = (n, len(targets))
        both = [np.broadcast_to(places[:n, a, None], shape) for a in range(k)]
        both += [np.broadcast_to(places[None, n:, a], shape) for a in range(k)]
        number = np.zeros(shape, np.int64)
        tight = self._restrained(both, room) if room is not None else None
        for p, here in enumerate(both):
            label = np.full(shape, p)
            for q in range(p - 1, -1, -1):
                label = np.where(both[q] == here, q, label)
            label = np.where(here < 0, 2 * k - here, label)  # unused and unreduced have numbers of their own
            number = number * (2 * k + 3) + label
            if room is not None and tight is not None:
                widths = sorted(set(room))
                width = np.array([1 + widths.index(r) for r in room])[np.maximum(here, 0)]
                number = number * (1 + len(widths)) + np.where((here < 0) | ~tight, 0, width)
        return number

    def _restrained(self, both: Sequence[npt.NDArray[np.int64]], room: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """Where a dim that is split before or after cannot hold all axes that split something, so that it matters."""
        k = len(self.mesh.names)
        axes = [np.where((both[a] >= 0) | (both[a + k] >= 0), n, 1) for a, n in enumerate(self.mesh.sizes)]
        together = np.prod(axes, axis=0)
        widths = np.array(room)
        return np.any([(here >= 0) & (widths[np.maximum(here, 0)] % together != 0) for here in both], axis=0)

    def _places(self, spec: Spec) -> tuple[int, ...] | None:
        """The dim that each axis splits, -1 for none, -2 where the value is unreduced over it."""
        if spec not in self._codes:
            names = self.mesh.names
            where = {a: d for d, axes in enumerate(spec.dims) for a in axes} | dict.fromkeys(spec.unreduced, -2)
            ordered = all(list(axes) == sorted(axes, key=names.index) for axes in spec.dims)
            self._codes[spec] = tuple(where.get(a, -1) for a in names) if ordered else None
        return self._codes[spec]

    def table(
        self, sources: Sequence[Spec], targets: Sequence[Spec], sum_bytes: float, move_bytes: float,
        waits: bool = True, dtype: str = "", shares: Shares | None = None, room: Room = None,
    ) -> Floats:
        """Seconds from each source spec to each target spec of an array of so many bytes on the wire.

        Of a sum that nothing waits for (a gradient on its way to where it is stored) many are combined into
        one collective, which shares its latency out by bytes. `dtype`: on the wire, while it is summed.
        """
        sources, targets = tuple(sources), tuple(targets)
        sum_latency, move_latency, sums, moves = self.tables(sources, targets, room)
        if sum_bytes >= SMALL_BYTES:
            latency = sum_latency * (1.0 if waits else min(1.0, sum_bytes / COMBINED_BYTES))
        elif shares and any((d, w) == (dtype, waits) for _, d, w in shares):
            latency = self.small_latency(sources, targets, dtype, waits, shares, room)
        else:
            latency = sum_latency * share_of({}, (), dtype, waits)
        latency = np.where(sum_latency >= FORBIDDEN, FORBIDDEN, latency)
        return latency + move_latency + sums * sum_bytes + moves * move_bytes

    def all_reduce(
        self, over: np.ndarray, local_bytes: Floats, dtype: str, waits: bool, shares: Shares | None = None
    ) -> Floats:
        """(n,) seconds of an all-reduce of `local_bytes` over the axes that `over` (n, axes) marks."""

        def seconds(axes: Axes, nbytes: Floats) -> Floats:
            latency, per_byte = self.collective("all-reduce", axes)
            share = share_of(shares or {}, axes, dtype, waits)
            return latency * np.where(nbytes >= SMALL_BYTES, 1.0, share) + per_byte * nbytes

        return self._over(over, local_bytes, seconds)

    def over_axes(self, kind: CollectiveKind, over: np.ndarray, local_bytes: Floats) -> Floats:
        """(n,) seconds of a collective of `local_bytes` over the axes that `over` (n, axes) marks."""

        def seconds(axes: Axes, nbytes: Floats) -> Floats:
            latency, per_byte = self.collective(kind, axes)
            return latency + per_byte * nbytes

        return self._over(over, local_bytes, seconds)

    def _over(self, over: np.ndarray, local_bytes: Floats, seconds: Callable[[Axes, Floats], Floats]) -> Floats:
        out = np.zeros(len(over))
        patterns, index = np.unique(over, axis=0, return_inverse=True)
        for p, pattern in enumerate(patterns):
            axes = tuple(n for n, used in zip(self.mesh.names, pattern, strict=True) if used)
            if axes:
                rows = index.reshape(-1) == p
                out[rows] = seconds(axes, local_bytes[rows])
        return out

    @property
    def kernel_seconds(self) -> float:
        """Seconds to start one kernel."""
        return KERNEL_SECONDS[self.machine.chip.platform]


def share_of(shares: Shares, axes: Axes, dtype: str, waits: bool) -> float:
    """What part of a latency a small sum bears: as found, else a whole one where something waits for it."""
    return max(LEAST_SHARE, shares.get((axes, dtype, waits), 1.0 if waits else 0.0))
