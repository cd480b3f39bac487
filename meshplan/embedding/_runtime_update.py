"""The owners' half of a step: duplicates of a row summed, its mean square joined over columns, one sparse step."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshplan.embedding._optim import Merged, RowOptimizer, Sums, apply_rows, merge
from meshplan.embedding._route import (
    GROUP,
    REPLICA,
    Batch,
    Route,
    Sent,
    bag_grads,
    forward_values,
    known,
    request_grads,
    return_values,
    send_back,
)
from meshplan.embedding._route_layout import Lane, Layout

BUCKETS = 256


def merge_lane(
    layout: Layout, lane: Lane, routed: Route, sent: Sent | None, batch: Batch, grads: Sequence[jax.Array]
) -> Merged:
    """The lane's gradients at the owners; those of a local lane are gathered from the whole group."""
    end = layout.packs[lane.pack].rows
    if sent is not None:
        return merge(sent.rows.reshape(-1), send_back(layout, lane, sent, batch, grads), end)
    rows = jnp.where(routed.device < layout.shards, routed.row, end)
    values = request_grads(layout, lane, batch, grads)
    if layout.shards > 1:
        rows = jax.lax.all_gather(rows, GROUP, tiled=True)
        values = jax.lax.all_gather(values, GROUP, tiled=True)
    return merge(rows, values, end)


def mean_squares(
    layout: Layout, merged: Sequence[Merged], sent: Sequence[Sent | None], batch: Batch
) -> list[jax.Array]:
    """For each lane the mean square, over a table's whole width, of each unique row's gradient; f32 [k].

    Where columns lie on several devices the parts meet at the devices that asked for the row, and their sum goes back
    over the same route, a float each way: the owners then all move the row as one device would.
    """
    own = [jnp.square(m.grads).sum(1) for m in merged]
    totals: dict[int, jax.Array] = {}
    for lane, m, s, q in zip(layout.lanes, merged, sent, own, strict=True):
        if s is None or not _split(layout, lane):
            continue
        by_request = jnp.zeros_like(q).at[m.order].set(q[m.segments], unique_indices=True)
        back, start = return_values(s, by_request, layout.shards), 0
        for stream in lane.streams:
            end = start + batch.ids[stream.table].size
            part = back[start:end]
            totals[stream.table] = totals[stream.table] + part if stream.table in totals else part
            start = end
    out = []
    for lane, m, s, q in zip(layout.lanes, merged, sent, own, strict=True):
        if s is None or not _split(layout, lane):
            out.append(q / layout.packs[lane.pack].width)
            continue
        shares = jnp.concatenate([totals[st.table] / layout.tables[st.table].dim for st in lane.streams])
        at_owner = forward_values(s, shares, layout.shards)
        out.append(at_owner[m.order][m.firsts])
    return out


def _split(layout: Layout, lane: Lane) -> bool:
    return any(layout.split_columns(s.table) for s in lane.streams)


def apply_lanes(
    layout: Layout, optimizer: RowOptimizer, packs: Sequence[jax.Array], sums: Sequence[Sums],
    merged: Sequence[Merged], squares: Sequence[jax.Array | None], *,
    rate: jax.Array | float, count: jax.Array, scales: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[Sums, ...]]:  # fmt: skip
    """One optimizer step on every touched row. `scales`: c, one for all or f32 [tables]."""
    packs, sums = list(packs), list(sums)
    for lane, m, q in zip(layout.lanes, merged, squares, strict=True):
        scale = scales[row_tables(layout, lane.pack, m.targets)] if scales.ndim else scales
        packs[lane.pack], sums[lane.pack] = apply_rows(
            optimizer, packs[lane.pack], sums[lane.pack], m, q, rate=rate, count=count, scale=scale
        )
    return tuple(packs), tuple(sums)


def piece_table(layout: Layout, pack: int) -> dict[str, np.ndarray]:
    """What lies where in a pack: int32 [N, pieces] of "start" (ascending, filled up with the pack's end), "table",
    "row" and "column" (the first of each piece)."""
    held = [[p for p in layout.pieces if p.pack == pack and p.shard.device == d] for d in range(layout.shards)]
    most = max(len(h) for h in held)
    end = layout.packs[pack].rows

    def array(read: object, empty: int) -> np.ndarray:
        assert callable(read)
        return np.asarray([[*(read(p) for p in h), *[empty] * (most - len(h))] for h in held], np.int32)

    return {
        "start": array(lambda p: p.start, end), "table": array(lambda p: p.table, 0),
        "row": array(lambda p: p.shard.row, 0), "column": array(lambda p: p.shard.column, 0),
    }  # fmt: skip


def row_tables(layout: Layout, pack: int, rows: jax.Array) -> jax.Array:
    """The number of the table to which each local row of this device's pack belongs."""
    held = piece_table(layout, pack)
    here = jax.lax.axis_index(GROUP)
    piece = jnp.searchsorted(jnp.asarray(held["start"])[here], rows, side="right") - 1
    return jnp.asarray(held["table"])[here][piece]


def noise(layout: Layout, batch: Batch, grads: Sequence[jax.Array], count: jax.Array, replicas: int) -> jax.Array:
    """(mean over replicas of a table's squared gradient, square of the replicas' mean gradient), f32 [2, tables].

    Both are read from a sketch: each row's gradient is multiplied by one random sign a column, summed, and added with a
    sign into one of a few buckets by a hash of its id. The sketch is linear, so the replicas' sketches may be averaged
    in place of their gradients; its squared norm is the gradient's on average over the signs (new ones each step).
    Charikar, Chen and Farach-Colton 2002.
    """
    parts = []
    for t, (table, ids) in enumerate(zip(layout.tables, batch.ids, strict=True)):
        whole = bag_grads(layout, t, batch, grads)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), t), count)
        along = whole @ jax.random.rademacher(key, (table.dim,), jnp.float32)
        along = along if along.ndim == 2 else jnp.broadcast_to(along[:, None], ids.shape)
        if t in batch.weights:
            along = along * batch.weights[t].astype(jnp.float32)
        mixed = (ids.astype(jnp.uint32) + count.astype(jnp.uint32)) * jnp.uint32(2654435761)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
        mixed = mixed ^ (mixed >> 13)
        signed = jnp.where(mixed & 1, along, -along) * known(ids, table.rows)
        bucket = ((mixed >> 8) % BUCKETS).astype(jnp.int32)
        parts.append(jnp.zeros(BUCKETS, jnp.float32).at[bucket.reshape(-1)].add(signed.reshape(-1)))
    group = jnp.stack(parts)
    group = jax.lax.psum(group, GROUP) if layout.shards > 1 else group
    both = jax.lax.psum(jnp.stack([jnp.square(group), group]), REPLICA) / replicas
    return jnp.stack([both[0].sum(-1), jnp.square(both[1]).sum(-1)])

