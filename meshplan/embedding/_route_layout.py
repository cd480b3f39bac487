"""Where every row of a group lies: packs of equal width on each device, and the lanes by which ids reach them.

A device keeps all shards of one width and dtype below one another in one local array, a *pack*; an array over the
mesh needs the same shape on every device, so a pack is as high as that of the fullest device. A *stream* is one
column piece of a table, cut into rows over some devices. Streams of a pack that travel together form a *lane*: one
all-to-all out and one back, however many tables there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.core import ArgumentError, nearest
from meshplan.embedding._table import Collection, Placement, Shard, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """`rows` local rows of `width` entries on every device of a group; `used` of them hold a table, by device."""

    width: int
    dtype: str
    rows: int
    used: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A shard of table number `table`, from local row `start` on in pack number `pack` of the shard's device."""

    table: int
    shard: Shard
    pack: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Columns [column, column_end) of a table; rows from cuts[i] on lie on devices[i] from local row starts[i] on.

    `slots[i]`: the number of the stream among those of its lane on that device (pooled lanes alone use it).
    """

    table: int
    column: int
    column_end: int
    cuts: tuple[int, ...]
    devices: tuple[int, ...]
    starts: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Streams of one pack that travel together.

    "local": every device has the rows (scheme "data"), nothing travels forward. "bags": owners sum the rows of a bag
    and send sums. "rows": owners send single rows. `slots`: streams on the fullest device.
    """

    pack: int
    kind: str
    streams: tuple[Stream, ...]
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A collection on the `shards` devices of a group."""

    tables: tuple[Table, ...]
    shards: int
    packs: tuple[Pack, ...]
    pieces: tuple[Piece, ...]
    lanes: tuple[Lane, ...]

    @property
    def used_bytes(self) -> tuple[int, ...]:
        """Bytes of tables on each device of a group."""
        sizes = [np.dtype(p.dtype).itemsize * p.width for p in self.packs]
        return tuple(
            sum(size * p.used[d] for size, p in zip(sizes, self.packs, strict=True)) for d in range(self.shards)
        )

    @property
    def padded_bytes(self) -> int:
        """Bytes that every device gives to tables: as many as the fullest one needs of each width."""
        return sum(np.dtype(p.dtype).itemsize * p.width * p.rows for p in self.packs)

    def split_columns(self, table: int) -> bool:
        """Whether the columns of a table lie on several devices."""
        return sum(s.table == table for lane in self.lanes for s in lane.streams) > 1


def make_layout(collection: Collection, placements: Sequence[Placement], shards: int) -> Layout:
    """The layout of the placements on a group of `shards` devices.

    Raises ArgumentError for placements that miss, repeat or tear a table, or name a device outside the group.
    """
    by_table = _by_table(collection, placements, shards)
    order = sorted(range(len(collection.tables)), key=lambda i: by_table[i].scheme != "data")  # equal starts first
    keys = dict.fromkeys(
        (s.column_end - s.column, collection.tables[i].dtype) for i in range(len(by_table)) for s in by_table[i].shards
    )
    numbers = {key: n for n, key in enumerate(sorted(keys))}
    used = np.zeros((len(numbers), shards), dtype=np.int64)
    pieces: list[Piece] = []
    for i in order:
        for shard in by_table[i].shards:
            pack = numbers[shard.shape[1], collection.tables[i].dtype]
            if shard.shape[0]:
                pieces.append(Piece(table=i, shard=shard, pack=pack, start=int(used[pack, shard.device])))
                used[pack, shard.device] += shard.shape[0]
    packs = tuple(
        Pack(width=w, dtype=dtype, rows=int(used[n].max()), used=tuple(int(u) for u in used[n]))
        for (w, dtype), n in numbers.items()
    )
    lanes = _lanes(collection.tables, [p.scheme for p in by_table], pieces, shards)
    return Layout(tables=collection.tables, shards=shards, packs=packs, pieces=tuple(pieces), lanes=lanes)


def _lanes(
    tables: tuple[Table, ...], schemes: list[str], pieces: list[Piece], shards: int
) -> tuple[Lane, ...]:
    grouped: dict[tuple[int, str], list[list[Piece]]] = {}
    ordered = sorted(pieces, key=lambda p: (p.table, p.shard.column, p.shard.row))
    for (t, _), found in itertools.groupby(ordered, key=lambda p: (p.table, p.shard.column)):
        rows = list(found)
        kind = "local" if schemes[t] == "data" else "bags" if _sums_at_owner(tables[t], len(rows)) else "rows"
        grouped.setdefault((rows[0].pack, kind), []).append(rows)
    return tuple(_lane(pack, kind, grouped[pack, kind], shards) for pack, kind in sorted(grouped))


def _sums_at_owner(table: Table, down: int) -> bool:
    """Whether a sum from each row piece is less to send than a row for each id."""
    return table.pooling != "none" and table.bag > down


def _lane(pack: int, kind: str, streams: list[list[Piece]], shards: int) -> Lane:
    taken = [0] * shards
    made: list[Stream] = []
    for pieces in streams:
        kept = pieces[:1] if kind == "local" else pieces
        here = dict.fromkeys(p.shard.device for p in kept)
        slots = {d: taken[d] for d in here}
        for d in here:
            taken[d] += 1
        made.append(
            Stream(
                table=kept[0].table, column=kept[0].shard.column, column_end=kept[0].shard.column_end,
                cuts=tuple(p.shard.row for p in kept), devices=tuple(p.shard.device for p in kept),
                starts=tuple(p.start for p in kept), slots=tuple(slots[p.shard.device] for p in kept),
            )
        )  # fmt: skip
    return Lane(pack=pack, kind=kind, streams=tuple(made), slots=max(taken))


def _by_table(collection: Collection, placements: Sequence[Placement], shards: int) -> list[Placement]:
    found: dict[str, Placement] = {}
    for p in placements:
        if p.table not in collection.by_name:
            raise ArgumentError(f"a placement names table {p.table!r}. {nearest(p.table, collection.by_name)}")
        if p.table in found:
            raise ArgumentError(f"table {p.table!r} has two placements; give one.")
        found[p.table] = p
        outside = [s.device for s in p.shards if not 0 <= s.device < shards]
        if outside:
            raise ArgumentError(
                f"table {p.table!r}: a shard is on device {outside[0]}, but a group has {shards} devices, numbered "
                f"from 0; place it again for groups of {shards}."
            )
        _check_whole(collection.by_name[p.table], p, shards)
    missing = [t.name for t in collection.tables if t.name not in found]
    if missing:
        raise ArgumentError(f"table {missing[0]!r} has no placement; give one for each table.")
    return [found[t.name] for t in collection.tables]


def _check_whole(table: Table, placement: Placement, shards: int) -> None:
    """The shards are a grid of row pieces by column pieces that covers the table once (on each device: "data")."""
    held = [s for s in placement.shards if s.shape[0] and s.shape[1]]
    where = f"table {table.name!r}, scheme {placement.scheme!r}"
    if placement.scheme == "data":
        whole = all(s.shape == (table.rows, table.dim) for s in held)
        if not whole or sorted(s.device for s in held) != list(range(shards)):
            raise ArgumentError(f"{where}: every one of the {shards} devices of a group keeps the whole table once.")
        return
    rows = sorted({(s.row, s.row_end) for s in held})
    columns = sorted({(s.column, s.column_end) for s in held})
    tiled = {(s.row, s.row_end, s.column, s.column_end) for s in held}
    if not (
        len(tiled) == len(held) == len(rows) * len(columns)
        and _covers(rows, table.rows) and _covers(columns, table.dim)
    ):  # fmt: skip
        raise ArgumentError(
            f"{where}: its {len(held)} shards are no grid of row pieces by column pieces that covers "
            f"{table.rows} x {table.dim} once; `place` makes such grids."
        )


def _covers(ranges: list[tuple[int, int]], end: int) -> bool:
    edges = [0, *(b for _, b in ranges)]
    return edges[:-1] == [a for a, _ in ranges] and edges[-1] == end


def capacities(layout: Layout, lane: Lane, batch: int, factor: float) -> tuple[int, int]:
    """(requests that one device may send to another in a lane, the most that it ever could), `batch` samples a device.

    A row piece is given its share of rows, `factor` times; a table whose rows are whole needs no margin.
    """
    expected, most = np.zeros(layout.shards), np.zeros(layout.shards)
    for s in lane.streams:
        table = layout.tables[s.table]
        ids = batch * table.bag
        heights = np.diff([*s.cuts, table.rows])
        share = np.zeros(layout.shards)
        np.add.at(share, list(s.devices), heights / table.rows)
        expected += np.minimum(ids, ids * share * (factor if len(s.cuts) > 1 else 1.0))
        most += ids * (share > 0)
    full = int(most.max())
    return min(full, max(1, int(np.ceil(expected.max() - 1e-9)))), full
