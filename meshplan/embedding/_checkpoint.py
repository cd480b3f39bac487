"""States as whole tables on the host, and back under any other groups and placements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshplan.core import ArgumentError
from meshplan.embedding._route_layout import Piece
from meshplan.embedding._runtime import Embeddings
from meshplan.embedding._runtime_state import BY_DEVICE, EmbeddingState, small_state, sum_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTables:
    """`weights` [rows, dim] by table, `sums` [rows] or [rows, dim] by table and sum; `noise` f32 [2, tables], `count`
    (see `EmbeddingState`). Tables are those of the collection, also where they are kept as hot and cold rows."""

    weights: dict[str, np.ndarray]
    sums: dict[str, dict[str, np.ndarray]]
    noise: np.ndarray
    count: int


def to_tables(embeddings: Embeddings, state: EmbeddingState) -> SavedTables:
    """The state's tables and sums, whole, on this host (which must reach all devices).

    Replicas that differ (between two syncs; sums that are not synced) are averaged, in double precision: equal ones
    come out bit-equal. To go on exactly with the same groups and placements, save the state itself.
    """
    layout, tables, origins = embeddings.layout, embeddings.collection.tables, embeddings.origins
    weights = {t.name: np.zeros((t.rows, t.dim), t.dtype) for t in tables}
    sums: dict[str, dict[str, np.ndarray]] = {t.name: {} for t in tables}
    late = state.late or tuple({} for _ in layout.packs)
    for n in range(len(layout.packs)):
        held = {"": _replicas(state.packs[n])}
        for name, array in state.sums[n].items():
            held[name] = _replicas(array + late[n][name] if name in late[n] else array)
        for piece in (p for p in layout.pieces if p.pack == n):
            owner, first = _whole(embeddings, piece)
            table = embeddings.collection.by_name[owner]
            for name, found in held.items():
                rows = found[piece.shard.device][piece.start : piece.start + piece.shard.shape[0]]
                out = weights[table.name] if not name else sums[table.name].setdefault(
                    name, np.zeros((table.rows, table.dim)[: rows.ndim], np.float32)
                )  # fmt: skip
                _part(out, piece, first)[...] = rows
    noise, seen = np.zeros((2, len(tables)), np.float32), np.asarray(state.noise)
    np.add.at(noise.T, [o.table for o in origins], seen.T)
    return SavedTables(weights=weights, sums=sums, noise=noise, count=int(state.count))


def from_tables(embeddings: Embeddings, saved: SavedTables | dict[str, np.ndarray]) -> EmbeddingState:
    """A state that holds the saved tables and sums, or given tables [rows, dim] by name with fresh sums.

    Raises ArgumentError for a table that is missing, of another shape, or without a sum that the optimizer keeps.
    """
    layout, optimizer = embeddings.layout, embeddings.optimizer
    if not isinstance(saved, SavedTables):
        noise = np.zeros((2, len(embeddings.collection.tables)), np.float32)
        saved = SavedTables(weights=saved, sums={}, noise=noise, count=0)
    for table in embeddings.collection.tables:
        found = saved.weights.get(table.name)
        if found is None or found.shape != (table.rows, table.dim):
            shape = "nothing" if found is None else list(found.shape)
            raise ArgumentError(f"table {table.name!r}: {[table.rows, table.dim]} is wanted, {shape} was given.")
    packs, sums = [], []
    for n, pack in enumerate(layout.packs):
        packs.append(_packed(embeddings, n, (pack.rows, pack.width), pack.dtype, _weights(embeddings, saved)))
        sums.append({
            name: _packed(embeddings, n, shape, "float32", _sums(embeddings, saved, name))
            for name, shape in sum_shapes(layout, optimizer, n).items()
        })  # fmt: skip
    late = jax.tree.map(jax.numpy.zeros_like, tuple(sums)) if embeddings.keeps_late_sums else ()
    noise = saved.noise[:, [o.table for o in embeddings.origins]]
    small = small_state(len(layout.tables), embeddings.device_mesh, noise, saved.count)
    return EmbeddingState(packs=tuple(packs), sums=tuple(sums), late=late, **small)


def _replicas(array: jax.Array) -> np.ndarray:
    """[M, N, ...] -> [N, ...]."""
    found = np.asarray(array)
    if len(found) == 1:
        return found[0]
    return found.astype(np.float64).mean(0).astype(found.dtype)


def _part(whole: np.ndarray, piece: Piece, first: int) -> np.ndarray:
    """A piece's part of a table [rows, dim], or of something by row; the piece counts rows from `first` on."""
    rows = whole[first + piece.shard.row : first + piece.shard.row_end]
    return rows if rows.ndim == 1 else rows[:, piece.shard.column : piece.shard.column_end]


def _weights(embeddings: Embeddings, saved: SavedTables) -> Callable[[Piece], np.ndarray]:
    def read(piece: Piece) -> np.ndarray:
        table, first = _whole(embeddings, piece)
        return _part(saved.weights[table], piece, first)

    return read


def _whole(embeddings: Embeddings, piece: Piece) -> tuple[str, int]:
    """The name of the collection's table that a piece is of, and the row of it that the piece counts from."""
    origin = embeddings.origins[piece.table]
    return embeddings.collection.tables[origin.table].name, origin.first


def _sums(embeddings: Embeddings, saved: SavedTables, name: str) -> Callable[[Piece], np.ndarray | float]:
    def read(piece: Piece) -> np.ndarray | float:
        table, first = _whole(embeddings, piece)
        if not saved.sums:
            return embeddings.optimizer.initial_sum
        if name not in saved.sums[table]:
            raise ArgumentError(
                f"table {table!r}: the saved state has no sum {name!r}, which {type(embeddings.optimizer).__name__} "
                f"keeps; it has {sorted(saved.sums[table])}. Give the tables alone to start with fresh sums."
            )
        return _part(saved.sums[table][name], piece, first)

    return read


def _packed(
    embeddings: Embeddings, pack: int, shape: tuple[int, ...], dtype: str, read: Callable[[Piece], np.ndarray | float]
) -> jax.Array:
    """An array [M, N, *shape], made device by device."""
    groups, layout = embeddings.groups, embeddings.layout

    def device(index: Any) -> np.ndarray:
        here = range(groups.shards)[index[1]][0]
        out = np.zeros(shape, dtype)
        for piece in layout.pieces:
            if piece.pack == pack and piece.shard.device == here:
                out[piece.start : piece.start + piece.shard.shape[0]] = read(piece)
        return out[None, None]

    whole = (groups.replicas, groups.shards, *shape)
    return jax.make_array_from_callback(whole, NamedSharding(embeddings.device_mesh, BY_DEVICE), device)
