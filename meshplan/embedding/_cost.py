"""What a table costs on the devices of a group, option by option: bytes held, bytes exchanged, bytes of memory traffic.

One step of N devices with b samples each, as the runtime does it. Owners of a shard get its ids from all N devices
(all-to-all), read their rows, and return one sum a bag and shard, or one row an id where bags are no longer than there
are row pieces; gradients go back the same way. The owner sums the gradients of equal rows, for which it has one a
request, and each touched row and its optimizer sums are read and written once. A "data" table is looked up at home, and
all gather the gradients of the group's requests. Memory holds weights, sums, the requests, what is sent and received
in the larger of the two directions, and a gradient for each request with their sums (`fused`: neither).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshplan.core import ArgumentError, MeshShape, nearest
from meshplan.embedding._cost_law import IdLaw, id_law
from meshplan.embedding._table import SCHEMES, Groups, Scheme, Table
from meshplan.machine import CollectiveLine, Machine, collective_lines

Floats = NDArray[np.float64]
OptimizerSums = Literal["sgd", "row_adagrad", "adagrad", "adam"]
# (f32 sums of a row, f32 sums of an entry)
_SUMS: dict[str, tuple[int, int]] = {"sgd": (0, 0), "row_adagrad": (1, 0), "adagrad": (0, 1), "adam": (0, 2)}
RESOURCES = MEMORY, IDS, OUT, GRADS, READ, WRITE, WEIGHTS = tuple(range(7))
COMMON = COMMON_MEMORY, RECEIVED, SENT_GRADS, GATHERED = tuple(range(4))
_ACCUMULATED = 4  # bytes of an entry of sums and gradients: they are added in f32
_PASSES = 4  # over the gradients of requests where the update is not fused: spread out, sorted (read, written), summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """What a plan takes for granted beside tables, machine and batch.

    `optimizer` says what sums are kept beside the weights. `exchange_dtype`: the type in which rows, sums and
    gradients travel; "" is the runtime's: rows and sums in their table's type, gradients in float32. `fused`: one
    kernel sums gradients as it updates (FBGEMM's), so that none is kept for each request. `dense_data`: the gradient
    of a "data" table may be summed as a whole table (an all-reduce, priced as two gathers) where that is less than all
    requests. `min_columns`: the narrowest piece of a table. `hashed`: hot rows lie anywhere; else row 0 is the
    hottest, as in logs numbered by frequency, and equal row pieces get unequal shares of the ids. `dense_seconds`: the
    rest of a step. `reserved_bytes`: a device's memory for all else. `sync_sums`: replicas average the optimizer's
    sums too. Raises ArgumentError for values that cannot be.
    """

    optimizer: OptimizerSums = "row_adagrad"
    schemes: tuple[Scheme, ...] = SCHEMES
    exchange_dtype: str = ""
    fused: bool = False
    dense_data: bool = False
    id_bytes: int = 4
    min_columns: int = 32
    hashed: bool = False
    dense_seconds: float = 0.0
    reserved_bytes: int = 0
    sync_sums: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in _SUMS:
            raise ArgumentError(f"optimizer {self.optimizer!r} is unknown. {nearest(self.optimizer, _SUMS)}")
        for scheme in self.schemes:
            if scheme not in SCHEMES:
                raise ArgumentError(f"scheme {scheme!r} is unknown. {nearest(scheme, SCHEMES)}")
        for name in ("dense_seconds", "reserved_bytes"):
            if not getattr(self, name) >= 0:
                raise ArgumentError(f"{name} is {getattr(self, name)}; give 0 or more.")
        for name in ("id_bytes", "min_columns"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name} is {getattr(self, name)}; give 1 or more.")

    def sum_bytes(self, rows: float, columns: int) -> float:
        """Bytes of the optimizer's sums of a shard."""
        return rows * self.row_sum_bytes(columns)

    def row_sum_bytes(self, columns: int) -> float:
        """Bytes of the optimizer's sums of a row."""
        per_row, per_entry = _SUMS[self.optimizer]
        return 4.0 * (per_row + per_entry * columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A table as the planner sees it; `first`: the rank of its first row (above 0 for the cold rows of a split)."""

    table: Table
    first: int = 0

    @property
    def law(self) -> IdLaw:
        return id_law(self.table.rows, self.table.zipf, self.first)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """One way to keep a table: `pieces` units on different devices (or one on a node), and `even` on every device.

    `unit` [7] by resource (node: [7, devices of a node]); `even` [7]; `extra` [7, k] falls on devices `at`;
    `common` [4], on every device alike: memory, bytes received, bytes of gradients sent, bytes gathered.
    """

    scheme: Scheme
    common: Floats
    pieces: int = 0
    columns: int = 1
    unit: Floats = field(default_factory=lambda: np.zeros(7))
    even: Floats = field(default_factory=lambda: np.zeros(7))
    at: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    extra: Floats = field(default_factory=lambda: np.zeros((7, 0)))

    def totals(self, devices: int) -> Floats:
        """Loads summed over the devices of a group, [7]."""
        unit = self.unit.sum(axis=1) if self.unit.ndim == 2 else self.unit * self.pieces
        return unit + self.even * devices + self.extra.sum(axis=1)

    @property
    def peak(self) -> Floats:
        """The most that one device bears, [7]."""
        unit = self.unit.max(axis=1) if self.unit.ndim == 2 else self.unit
        return unit + self.even + (self.extra.max(axis=1) if self.extra.size else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of the machine: its size, the devices of it that share a node, samples a device, and its collectives."""

    groups: Groups
    batch: int
    node: int
    memory_bytes_per_second: float
    exchange: tuple[CollectiveLine, ...]
    gather: tuple[CollectiveLine, ...]
    sync: tuple[CollectiveLine, ...]

    @property
    def devices(self) -> int:
        return self.groups.shards


def make_group(machine: Machine, groups: Groups, batch: int) -> Group:
    """The group's collectives by the machine's model; `batch` samples a device. Near replicas lie innermost."""
    m, n = groups.replicas, groups.shards
    order = {"shard": n, "replica": m} if groups.near else {"replica": m, "shard": n}
    mesh, levels = MeshShape.of(order), machine.levels
    node = 1
    if len(levels) > 1:
        inside = levels[-1].size
        node = inside // m if groups.near and inside % m == 0 else 1 if groups.near else inside
    if node <= 1 or n % node or node >= n:
        node = 1
    return Group(
        groups=groups, batch=batch, node=node, memory_bytes_per_second=machine.chip.memory_bytes_per_second,
        exchange=collective_lines(machine, mesh, "all-to-all", ("shard",)),
        gather=collective_lines(machine, mesh, "all-gather", ("shard",)),
        sync=collective_lines(machine, mesh, "all-reduce", ("replica",)),
    )  # fmt: skip


def seconds(lines: tuple[CollectiveLine, ...], nbytes: float) -> float:
    """Of one collective by the best of its algorithms; nothing for no bytes."""
    return min((line.seconds(nbytes) for line in lines), default=0.0) if nbytes > 0 else 0.0


def largest_over_mean(loads: Mapping[str, Floats]) -> dict[str, float]:
    """The imbalance of loads by device; 1 where there is nothing."""
    return {k: float(v.max() / v.mean()) if v.mean() > 0 else 1.0 for k, v in loads.items()}


def options(feature: Feature, group: Group, pricing: Pricing) -> list[Option]:
    """Every way to keep the table on the group that the pricing admits."""
    n, table = group.devices, feature.table
    maker = _Maker(feature, group, pricing)
    found: list[Option] = []
    splits = [c for c in _divisors(table.dim) if 1 < c <= n and table.dim // c >= pricing.min_columns]
    for scheme in pricing.schemes:
        if scheme == "table":
            found.append(maker.units("table", 1))
        elif scheme == "column":
            found += [maker.units("column", c) for c in splits]
        elif scheme == "data":
            found.append(maker.data())
        elif scheme == "row" and n > 1 and table.rows >= n:
            found.append(maker.rows("row", 1))
        elif scheme == "grid":
            found += [maker.rows("grid", c) for c in splits if n % c == 0 and c < n and table.rows >= n // c]
        elif scheme == "row_in_node" and group.node > 1 and table.rows >= group.node:
            found.append(maker.in_node())
    return found


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


class _Maker:
    """Options of one table."""

    def __init__(self, feature: Feature, group: Group, pricing: Pricing) -> None:
        self.table, self.law = feature.table, feature.law
        self.group, self.pricing = group, pricing
        self.samples = group.devices * group.batch
        self.draws = self.samples * self.table.hotness
        self.pooled = self.table.pooling != "none"
        self.entry = np.dtype(self.table.dtype).itemsize
        self.out = np.dtype(pricing.exchange_dtype or self.table.dtype).itemsize
        self.back = np.dtype(pricing.exchange_dtype or "float32").itemsize

    def sums(self, down: int) -> bool:
        """Whether owners return a sum for each bag rather than a row for each id."""
        return self.pooled and self.table.bag > down

    def id(self, down: int) -> int:
        """Bytes of a request: the row, for sums its bag, and its factor."""
        if not self.sums(down):
            return self.pricing.id_bytes
        return 2 * self.pricing.id_bytes + (_ACCUMULATED if self.table.pooling == "weighted" else 0)

    def shard(self, rows: Floats, share: Floats, unique: Floats, columns: int, down: int) -> Floats:
        """Loads [7, ...] of shards of `rows` x `columns` that get `share` of the ids, each one of `down` row pieces."""
        ids, request = self.draws * share, self.id(down)
        sent = (self.samples * np.ones_like(ids) if self.sums(down) else ids) * columns
        kept = rows * self.pricing.row_sum_bytes(columns)
        weights = rows * columns * self.entry
        row, passes = columns * self.entry, 1 if self.pricing.fused else _PASSES
        changed = 2 * (row + self.pricing.row_sum_bytes(columns))
        return np.stack(
            [
                weights + kept + ids * (request + self.gradients(columns)) + sent * self.held,
                ids * request,
                sent * self.out,
                sent * self.back,
                ids * (row + request) + sent * self.out,
                ids * (passes * _ACCUMULATED * columns + request) + sent * self.back + unique * changed,
                weights + (kept if self.pricing.sync_sums else 0.0),
            ]
        )

    def gradients(self, columns: int) -> int:
        """Bytes kept for the gradient of a request and, of as many rows, the sums of equal rows."""
        return 0 if self.pricing.fused else 2 * _ACCUMULATED * columns

    @property
    def held(self) -> int:
        """Bytes of an entry that travels, with the f32 one that it is cast from or to where that is another."""
        return max(_ACCUMULATED + (self.out if self.out != _ACCUMULATED else 0),
                   _ACCUMULATED + (self.back if self.back != _ACCUMULATED else 0))  # fmt: skip

    def common(self, down: int, across: int) -> Floats:
        """A device that asks: requests sent, what comes back, the result and its gradient."""
        b, h, dim = self.group.batch, self.table.hotness, self.table.dim
        entries = b * (down if self.sums(down) else h) * dim
        result = b * (1 if self.pooled else h) * dim * _ACCUMULATED
        here = entries * self.held + 2 * result + b * h * self.id(down) * across
        return np.array([here, entries * self.out, entries * self.back, 0.0])

    def units(self, scheme: Scheme, pieces: int) -> Option:
        one, columns = np.ones(()), self.table.dim // pieces
        unique = self.law.unique(self.draws)
        unit = self.shard(self.table.rows * one, one, unique, columns, 1)
        return Option(scheme=scheme, pieces=pieces, columns=pieces, unit=unit, common=self.common(1, pieces))

    def data(self) -> Option:
        """Whole everywhere: read at home; every device then updates by all the group's gradients."""
        t, b, n = self.table, self.group.batch, self.group.devices
        mine, request, passes = b * t.hotness, self.pricing.id_bytes, 1 if self.pricing.fused else _PASSES
        result = b * (1 if self.pooled else t.hotness) * t.dim * _ACCUMULATED
        kept, weights = self.pricing.sum_bytes(t.rows, t.dim), float(t.nbytes)
        gathered = self.draws * (t.dim * self.back + request) if n > 1 else 0.0
        dense = self.pricing.dense_data and 2 * t.rows * t.dim * _ACCUMULATED < gathered
        merged, whole = (mine, t.rows * t.dim * _ACCUMULATED) if dense else (self.draws, 0)
        changed = 2 * (t.dim * self.entry + self.pricing.row_sum_bytes(t.dim))
        even = np.zeros(7)
        even[MEMORY] = weights + kept + merged * (self.gradients(t.dim) + request) + whole
        even[READ] = mine * (t.dim * self.entry + request) + result
        even[WRITE] = merged * (passes * _ACCUMULATED * t.dim + request) + 2 * whole
        even[WRITE] += float(self.law.unique(self.draws)) * changed
        even[WEIGHTS] = weights + (kept if self.pricing.sync_sums else 0.0)
        gathered = 2.0 * whole if dense else gathered
        return Option(scheme="data", even=even, common=np.array([2 * result + mine * request, 0.0, 0.0, gathered]))

    def pieces(self, down: int) -> tuple[Floats, Floats, Floats]:
        """(rows, share of ids, different rows touched) of each of `down` row pieces as `place` cuts them.

        Where all rows are alike every piece is taken to be as high as the first, of which the last may fall short.
        """
        rows, law = self.table.rows, self.law
        high = -(-rows // down)
        if self.table.zipf and not self.pricing.hashed:
            edges = np.minimum(np.arange(down + 1, dtype=np.float64) * high, rows)
            low, end = edges[:-1], edges[1:]
            return end - low, law.share(low, end), law.unique(self.draws, low, end)
        # The hottest row is somewhere; the others lie so that every piece gets its share of them.
        top, place = (law.hottest, zlib.crc32(self.table.name.encode()) % down) if self.table.zipf else (0.0, 0)
        share = np.full(down, high / rows * (1 - top))
        share[place] += top
        unique = float(law.unique(self.draws))
        return np.full(down, float(high)), share, np.full(down, unique * high / rows)

    def rows(self, scheme: Scheme, across: int) -> Option:
        n = self.group.devices
        down = n // across
        loads = np.repeat(self.shard(*self.pieces(down), self.table.dim // across, down), across, axis=1)
        even = loads.min(axis=1)
        extra = loads - even[:, None]
        at = np.flatnonzero(extra.any(axis=0))
        return Option(
            scheme=scheme, columns=across, even=even, at=at, extra=extra[:, at], common=self.common(down, across)
        )

    def in_node(self) -> Option:
        down = self.group.node
        unit = self.shard(*self.pieces(down), self.table.dim, down)
        return Option(scheme="row_in_node", pieces=1, unit=unit, common=self.common(down, 1))
