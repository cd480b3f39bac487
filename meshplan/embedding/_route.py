"""Ids to the devices that own their rows and back, as one device of a group runs it (inside shard_map).

Shapes are static: a device sends every other one `capacity` requests at most in a lane. Requests keep their order,
so the place of a request in the exchange is known at both ends and gradients go back over the same route.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from meshplan.embedding._route_layout import Lane, Layout, Stream

GROUP, REPLICA = "shard", "replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One device's bags. `ids`, int32 [batch, bag] by table, -1 where there is none; `weights` of weighted tables."""

    ids: tuple[jax.Array, ...]
    weights: dict[int, jax.Array]

    @property
    def size(self) -> int:
        return self.ids[0].shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A lane's requests at the device that asks, [requests], the streams behind one another, by bag.

    `device` has the row, its local row is `row`, the bag's place there `slot`; device = N where there is no request.
    `place`: how many requests to that device come before. `counts` [streams, N].
    """

    device: jax.Array
    row: jax.Array
    slot: jax.Array
    place: jax.Array
    counts: jax.Array


@register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A lane's exchange. `at` [requests]: where in the buffer to send, its end for those that do not go.

    At the owner, [N, capacity]: the local `rows` asked for, the pack's end where none is; the bag of each among the
    bags sent back (`slots`) and the factor that the bag gives it (`factors`), in lanes that return bags.
    """

    at: jax.Array
    rows: jax.Array
    slots: jax.Array
    factors: jax.Array


def exchange(x: jax.Array, shards: int) -> jax.Array:
    """x [N, ...] of this device -> [N, ...]: what each device of the group has for this one."""
    return jax.lax.all_to_all(x, GROUP, 0, 0, tiled=True) if shards > 1 else x


def known(ids: jax.Array, rows: int) -> jax.Array:
    """Which ids name a row."""
    return (ids >= 0) & (ids < rows)


def route(layout: Layout, lane: Lane, batch: Batch) -> Route:
    """Device, row and place of every request of the lane."""
    parts = [_route_stream(layout, s, batch) for s in lane.streams]
    device, row, slot = (jnp.concatenate(p) for p in zip(*parts, strict=True))
    columns = layout.shards + 1
    cells = jnp.concatenate([p[0] + i * columns for i, p in enumerate(parts)])
    counts = jnp.zeros(len(parts) * columns, jnp.int32).at[cells].add(1).reshape(-1, columns)
    before = jnp.cumsum(counts.sum(0)) - counts.sum(0)
    order = jnp.argsort(device, stable=True)
    ranks = jnp.arange(device.shape[0], dtype=jnp.int32) - before[device[order]]
    place = jnp.zeros_like(ranks).at[order].set(ranks, unique_indices=True)
    return Route(device=device, row=row, slot=slot, place=place, counts=counts[:, : layout.shards])


def _route_stream(layout: Layout, s: Stream, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    ids = batch.ids[s.table]
    there = known(ids, layout.tables[s.table].rows).reshape(-1)
    flat = ids.reshape(-1)
    bags = jnp.repeat(jnp.arange(batch.size, dtype=jnp.int32), ids.shape[1])
    shift = np.asarray(s.starts) - np.asarray(s.cuts)
    held = np.stack([s.devices, shift, np.asarray(s.slots) * batch.size], 1).astype(np.int32)
    if len(held) == 1:
        device, moved, first = (jnp.int32(x) for x in held[0])
    else:
        piece = (flat[:, None] >= jnp.asarray(s.cuts[1:], jnp.int32)).sum(1)
        device, moved, first = jnp.asarray(held)[piece].T
    return jnp.where(there, device, layout.shards), flat + moved, bags + first


def send(layout: Layout, lane: Lane, routed: Route, batch: Batch, capacity: int) -> Sent:
    """The ids' way to their owners: one all-to-all. Requests over the capacity do not go."""
    n, end = layout.shards, layout.packs[lane.pack].rows
    goes = (routed.device < n) & (routed.place < capacity)
    at = jnp.where(goes, routed.device * capacity + routed.place, n * capacity)

    def buffer(values: jax.Array, empty: int) -> jax.Array:
        return jnp.full(n * capacity, empty, jnp.int32).at[at].set(values, mode="drop").reshape(n, 1, capacity)

    columns = [buffer(routed.row, end)]
    if lane.kind == "bags":
        columns.append(buffer(routed.slot, 0))
        if _weighted(layout, lane):
            columns.append(buffer(jax.lax.bitcast_convert_type(_factors(layout, lane, batch), jnp.int32), 0))
    got = exchange(jnp.concatenate(columns, 1), n)
    nothing = jnp.zeros((n, 0), jnp.int32)
    return Sent(
        at=at, rows=got[:, 0],
        slots=got[:, 1] if len(columns) > 1 else nothing,
        factors=jax.lax.bitcast_convert_type(got[:, 2] if len(columns) > 2 else nothing, jnp.float32),
    )  # fmt: skip


def _weighted(layout: Layout, lane: Lane) -> bool:
    return any(layout.tables[s.table].pooling == "weighted" for s in lane.streams)


def _factors(layout: Layout, lane: Lane, batch: Batch) -> jax.Array:
    """What each request's row is multiplied by in its bag, f32 [requests]; means divide later."""
    return jnp.concatenate([
        batch.weights[s.table].reshape(-1).astype(jnp.float32)
        if layout.tables[s.table].pooling == "weighted"
        else jnp.ones(batch.ids[s.table].size, jnp.float32)
        for s in lane.streams
    ])  # fmt: skip


def fetch(layout: Layout, lane: Lane, pack: jax.Array, sent: Sent, size: int) -> jax.Array:
    """Owners' rows, or their sums of bags of a batch of `size`, back at the device that asked: one all-to-all.

    Lanes of rows: [requests, width]. Lanes of bags: [N, slots * size, width].
    """
    n = layout.shards
    rows = pack.at[sent.rows].get(mode="fill", fill_value=0)
    if lane.kind == "rows":
        back = exchange(rows, n).reshape(-1, rows.shape[-1])
        return back.at[sent.at].get(mode="fill", fill_value=0)
    high = lane.slots * size
    rows = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    if sent.factors.shape[1]:
        rows = rows * sent.factors[..., None]
    bags = (sent.slots + high * jnp.arange(n, dtype=jnp.int32)[:, None]).reshape(-1)
    sums = jax.ops.segment_sum(rows.reshape(-1, rows.shape[-1]), bags, n * high)
    return exchange(sums.astype(pack.dtype).reshape(n, high, -1), n)


def look_here(lane: Lane, pack: jax.Array, routed: Route, shards: int) -> jax.Array:
    """Rows [requests, width] of a local lane."""
    end = pack.shape[0]
    return pack.at[jnp.where(routed.device < shards, routed.row, end)].get(mode="fill", fill_value=0)


def pool(layout: Layout, lane: Lane, fetched: jax.Array, batch: Batch) -> dict[tuple[int, int], jax.Array]:
    """Features by (table, first column): [batch, width], or [batch, bag, width] of a table without pooling."""
    out: dict[tuple[int, int], jax.Array] = {}
    start = 0
    for s in lane.streams:
        table, ids = layout.tables[s.table], batch.ids[s.table]
        end = start + ids.size
        if lane.kind == "bags":
            held = dict.fromkeys(zip(s.devices, s.slots, strict=True))
            sums = [fetched[d, slot * batch.size : (slot + 1) * batch.size] for d, slot in held]
            joined = sum(x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in sums)
        else:
            rows = fetched[start:end].reshape(*ids.shape, fetched.shape[-1])
            joined = rows if table.pooling == "none" else _bag_sums(rows, table.pooling, batch.weights.get(s.table))
        if table.pooling == "mean":
            joined = joined / _lengths(ids, table.rows)[:, None]
        out[s.table, s.column] = jnp.asarray(joined).astype(fetched.dtype)
        start = end
    return out


def _bag_sums(rows: jax.Array, pooling: str, weights: jax.Array | None) -> jax.Array:
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    return (wide * weights[..., None] if pooling == "weighted" and weights is not None else wide).sum(1)


def _lengths(ids: jax.Array, rows: int) -> jax.Array:
    """Ids of each bag, f32, 1 for an empty one, whose sum is zero anyway."""
    return jnp.maximum(known(ids, rows).sum(1), 1).astype(jnp.float32)


def bag_grads(layout: Layout, t: int, batch: Batch, grads: Sequence[jax.Array]) -> jax.Array:
    """The gradient of a table's sums, f32 [batch, dim] ([batch, bag, dim] without pooling)."""
    whole = grads[t].astype(jnp.float32)
    if layout.tables[t].pooling != "mean":
        return whole
    return whole / _lengths(batch.ids[t], layout.tables[t].rows)[:, None]


def request_grads(layout: Layout, lane: Lane, batch: Batch, grads: Sequence[jax.Array]) -> jax.Array:
    """The gradient of each request's row, f32 [requests, width], at the device that asked."""
    parts = []
    for s in lane.streams:
        part, ids = bag_grads(layout, s.table, batch, grads)[..., s.column : s.column_end], batch.ids[s.table]
        if part.ndim == 2:
            part = jnp.broadcast_to(part[:, None], (*ids.shape, part.shape[-1]))
        if s.table in batch.weights:
            part = part * batch.weights[s.table][..., None].astype(jnp.float32)
        parts.append(part.reshape(-1, part.shape[-1]))
    return jnp.concatenate(parts)


def send_back(layout: Layout, lane: Lane, sent: Sent, batch: Batch, grads: Sequence[jax.Array]) -> jax.Array:
    """Gradients over the ids' route to the owners: f32 [N * capacity, width], one all-to-all."""
    n = layout.shards
    width = layout.packs[lane.pack].width
    if lane.kind == "rows":
        return forward_values(sent, request_grads(layout, lane, batch, grads), n)
    out = jnp.zeros((n, lane.slots * batch.size, width), jnp.float32)
    for s in lane.streams:
        part = bag_grads(layout, s.table, batch, grads)[..., s.column : s.column_end]
        for d, slot in dict.fromkeys(zip(s.devices, s.slots, strict=True)):
            out = out.at[d, slot * batch.size : (slot + 1) * batch.size].set(part)
    bags = exchange(out, n)
    found = jnp.take_along_axis(bags, sent.slots[..., None], axis=1)
    if sent.factors.shape[1]:
        found = found * sent.factors[..., None]
    return found.reshape(-1, width)


def forward_values(sent: Sent, values: jax.Array, shards: int) -> jax.Array:
    """values [requests, ...] -> [N * capacity, ...] at the owners, zeros where there is no request."""
    tail = values.shape[1:]
    buffer = jnp.zeros((sent.rows.size, *tail), values.dtype).at[sent.at].set(values, mode="drop")
    return exchange(buffer.reshape(*sent.rows.shape, *tail), shards).reshape(-1, *tail)


def return_values(sent: Sent, values: jax.Array, shards: int) -> jax.Array:
    """values [N * capacity] at the owners -> [requests], zeros where nothing was sent."""
    back = exchange(values.reshape(sent.rows.shape), shards).reshape(-1)
    return back.at[sent.at].get(mode="fill", fill_value=0)
