"""Embedding tables and where their rows live: the types that planner, runtime and cache share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from meshplan.core import ArgumentError, nearest

Pooling = Literal["sum", "mean", "weighted", "none"]
Scheme = Literal["data", "table", "row", "column", "grid", "row_in_node"]
POOLINGS: tuple[Pooling, ...] = ("sum", "mean", "weighted", "none")
SCHEMES: tuple[Scheme, ...] = ("data", "table", "row", "column", "grid", "row_in_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One embedding table of `rows` x `dim` entries of `dtype`.

    `pooling` joins the rows of a bag: their sum, their mean, a sum weighted by the batch's own weights, or "none",
    which returns a row for every id (a sequence). `hotness`: ids per bag, a mean where bags are ragged; the planner
    prices it, the runtime reads `length`, the most ids of a bag (0: hotness rounded up). `zipf`: the exponent of the
    ids' law where it is known (see `fit_zipf`), 0 for uniform ids. Raises ArgumentError for what no table can be.
    """

    name: str
    rows: int
    dim: int
    pooling: Pooling = "sum"
    hotness: float = 1.0
    length: int = 0
    dtype: str = "float32"
    zipf: float = 0.0

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            known = nearest(self.pooling, POOLINGS)
            raise ArgumentError(f"table {self.name!r}: pooling {self.pooling!r} is unknown. {known}")
        for what, value in (("rows", self.rows), ("dim", self.dim), ("hotness", self.hotness)):
            if not value > 0:
                raise ArgumentError(f"table {self.name!r}: {what} is {value}; give a positive number.")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole table, without the optimizer's sums."""
        return self.rows * self.dim * np.dtype(self.dtype).itemsize

    @property
    def bag(self) -> int:
        """The most ids of one bag: the static width of the table's ids."""
        return self.length or int(np.ceil(self.hotness))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A rectangle of a table on one device of a group: rows [row, row_end), columns [column, column_end)."""

    device: int
    row: int
    row_end: int
    column: int
    column_end: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.row_end - self.row, self.column_end - self.column


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How one table is kept inside a group. "data": whole on every device, `shards` has one entry for each."""

    table: str
    scheme: Scheme
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Mesh axes "replica" (M) and "shard" (N): M replicas of tables sharded over N devices each.

    Lookups never leave a group; the replicas' weights are averaged every `sync_every` steps. `near`: the replicas of a
    shard are neighbours on the machine (the paper's default), else the devices of a group are.
    """

    replicas: int
    shards: int
    near: bool = True
    sync_every: int = 1

    @property
    def devices(self) -> int:
        return self.replicas * self.shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Tables in the order in which their features come, every name once."""

    tables: tuple[Table, ...]
    by_name: dict[str, Table] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found: dict[str, Table] = {}
        for table in self.tables:
            if table.name in found:
                raise ArgumentError(f"two tables are named {table.name!r}; give each a name of its own.")
            found[table.name] = table
        object.__setattr__(self, "by_name", found)


def place(table: Table, scheme: Scheme, devices: Sequence[int], *, columns: int = 1) -> Placement:
    """The placement of a table over the devices (numbers inside the group) by a scheme.

    "table": whole on devices[0]. "data": whole on all. "row" and "row_in_node": equal rows over the devices, the last
    ones shorter. "column": equal columns. "grid": `columns` column pieces, rows over the rest. Raises ArgumentError
    where the devices or columns do not fit the scheme.
    """
    n = len(devices)
    if not n:
        raise ArgumentError(f"table {table.name!r}: scheme {scheme!r} needs at least one device.")
    if scheme == "table" and n > 1:
        raise ArgumentError(f"table {table.name!r}: scheme 'table' keeps it on one device, {n} were given.")
    across = {"column": n, "grid": columns}.get(scheme, 1)
    down = {"row": n, "row_in_node": n, "grid": n // max(across, 1)}.get(scheme, 1)
    if across < 1 or table.dim % across or (scheme == "grid" and n % across):
        raise ArgumentError(
            f"table {table.name!r}: {table.dim} columns on {n} devices do not split into {across} equal pieces; "
            f"give a number of pieces that divides both."
        )
    if scheme == "data":
        whole = (Shard(device=d, row=0, row_end=table.rows, column=0, column_end=table.dim) for d in devices)
        return Placement(table=table.name, scheme=scheme, shards=tuple(whole))
    high, wide = -(-table.rows // down), table.dim // across
    shards = [
        Shard(
            device=devices[r * across + c],
            row=min(r * high, table.rows),
            row_end=min((r + 1) * high, table.rows),
            column=c * wide,
            column_end=(c + 1) * wide,
        )
        for r in range(down)
        for c in range(across)
    ]
    return Placement(table=table.name, scheme=scheme, shards=tuple(shards))
