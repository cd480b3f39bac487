"""Lookup and update of sharded tables inside a user's jitted step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import register_dataclass

from meshplan.core import ArgumentError
from meshplan.embedding import _route as ways
from meshplan.embedding._optim import RowOptimizer, Sums
from meshplan.embedding._plan_data import Split
from meshplan.embedding._route import GROUP, Batch, Route, Sent
from meshplan.embedding._route_layout import Layout, capacities, make_layout
from meshplan.embedding._runtime_ids import check_shapes
from meshplan.embedding._runtime_report import raise_bad_ids, raise_overflow
from meshplan.embedding._runtime_split import Origin, divided, join_features, origins, split_grads, split_ids
from meshplan.embedding._runtime_state import (
    BY_BATCH,
    BY_DEVICE,
    EmbeddingState,
    check_mesh,
    embedding_mesh,
    new_state,
)
from meshplan.embedding._runtime_update import apply_lanes, mean_squares, merge_lane, noise
from meshplan.embedding._sync import CHUNK_BYTES, SyncSums, correction, replica_mean
from meshplan.embedding._table import Collection, Groups, Placement

Overflow = Literal["error", "exact"]
Features = dict[str, jax.Array]
_MEMORY = 0.95  # of the running means behind an estimated moment scale


@register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """What `update` needs of a `lookup`, and what `check` reads.

    Leading dims are those of the batch or the devices. `counts`: requests of each device by stream and by the owner's
    device; `bad`: ids of each table that are no row and not -1, with one example.
    """

    ids: tuple[jax.Array, ...]
    weights: dict[int, jax.Array]
    sent: tuple[Sent | None, ...]
    counts: tuple[jax.Array, ...]
    bad: jax.Array


@dataclass(frozen=True)
class Embeddings:
    """Tables sharded over the devices of a group, with M replicas of the groups and a row optimizer.

        emb = Embeddings(collection, placements, Groups(replicas=2, shards=4), optimizer=RowAdagrad(learning_rate=0.1))
        state = emb.init(jax.random.key(0))

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, ids, labels):
            (loss, aux), grads, state, residuals = emb.value_and_update(loss_fn, params, state, ids, labels)
            ...                                  # any optax optimizer for `params`
            return params, state, loss, residuals

        emb.check(residuals)                     # on the host: raises for ids that are no rows, or over capacity

    The batch is split over all M x N devices (its size is a multiple of theirs). Ids go to their owners and rows come
    back inside a group alone. `capacity`: requests that a device may send to another, as a multiple of the even share
    of a table split by rows; tables whose rows are whole need no margin. `overflow`: "error" makes bags that lost an id
    NaN and `check` raise; "exact" takes a slower branch for such a batch, with room for every id.

    The loss is the mean over the whole batch. A group learns from the mean over *its* samples (M times its part of the
    loss's gradient) and the replicas' weights are averaged after every `groups.sync_every` updates, as in
    arXiv 2508.03854: with RowSgd and a sync every step that is one device's step on the whole batch. `sync_sums`:
    average the optimizer's sums, too, at once ("exact") or one step late ("late"). `sync_bytes`: of a pack that are
    averaged at a time; more of them need more memory. `splits`: tables of the collection that the placements keep as
    two (a plan's `splits`); ids, features, gradients and saved tables stay those of the whole table.

    On CPU hosts wait for every step (`jax.block_until_ready`) or put many into one `lax.scan`: collectives of several
    steps under way at once take the threads that they wait for each other on, and XLA ends the process.
    """

    collection: Collection
    placements: Sequence[Placement]
    groups: Groups
    optimizer: RowOptimizer = field(kw_only=True)
    mesh: Mesh | None = field(default=None, kw_only=True)
    capacity: float = field(default=2.0, kw_only=True)
    overflow: Overflow = field(default="error", kw_only=True)
    sync_sums: SyncSums = field(default="none", kw_only=True)
    sync_bytes: int = field(default=CHUNK_BYTES, kw_only=True)
    splits: Sequence[Split] = field(default=(), kw_only=True)
    layout: Layout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.overflow not in ("error", "exact"):
            raise ArgumentError(f"overflow {self.overflow!r} is unknown; give 'error' or 'exact'.")
        if self.sync_sums not in ("none", "exact", "late"):
            raise ArgumentError(f"sync_sums {self.sync_sums!r} is unknown; give 'none', 'exact' or 'late'.")
        if self.capacity <= 0:
            raise ArgumentError(f"capacity is {self.capacity}; give a positive multiple of the even share.")
        mesh = embedding_mesh(self.groups) if self.mesh is None else self.mesh
        check_mesh(mesh, self.groups)
        object.__setattr__(self, "mesh", mesh)
        kept = divided(self.collection, self.splits)
        object.__setattr__(self, "layout", make_layout(kept, self.placements, self.groups.shards))

    def init(self, key: jax.Array, scale: Mapping[str, float] | None = None) -> EmbeddingState:
        """Fresh tables, uniform within +-scale[table] (default: one over the root of its rows), the same for any
        placement; no device or host ever has more than its own part."""
        whole = [self.collection.tables[o.table] for o in self.origins]
        scale = scale or {}
        widths = [scale[t.name] if t.name in scale else 1.0 / math.sqrt(t.rows) for t in whole]
        return new_state(
            key, self.layout, self.optimizer, self.device_mesh, self.keeps_late_sums, self.origins, widths
        )

    def lookup(
        self, state: EmbeddingState, ids: Mapping[str, Any], weights: Mapping[str, Any] | None = None
    ) -> tuple[Features, Residuals]:
        """Features [batch, dim] by table ([batch, bag, dim] without pooling), split over the devices by batch.

        `ids`: integers [batch, bag] by table ([batch] where bags have one id), -1 where a bag is shorter; an empty bag
        gives zeros. `weights`: factors of the ids of weighted tables; they get no gradient. Call it inside jit, where
        jax makes int32 of NumPy's int64 unless x64 is on: `check_ids` on the host sees ids past that, too.
        Raises ArgumentError for names and shapes that are not the collection's.
        """
        batch = self._batch(ids, weights or {})
        run = self._map(self._lookup, (BY_DEVICE, BY_BATCH, BY_BATCH), BY_BATCH)
        found, residuals = run(state.packs, batch.ids, batch.weights)
        features = {t.name: f for t, f in zip(self.layout.tables, found, strict=True)}
        return join_features(self.splits, features), residuals

    def update(
        self, state: EmbeddingState, residuals: Residuals, grads: Mapping[str, jax.Array],
        learning_rate: jax.Array | float | None = None,
    ) -> EmbeddingState:  # fmt: skip
        """The state after one step of the row optimizer on the rows that were looked up, in place where it is donated.

        `grads`: of the mean loss over the whole batch, by feature. `learning_rate` overrides the optimizer's.
        """
        by_table = split_grads(self.splits, grads)
        ordered = tuple(by_table[t.name] for t in self.layout.tables)
        rate = jnp.float32(self.optimizer.learning_rate if learning_rate is None else learning_rate)
        specs = EmbeddingState(
            packs=BY_DEVICE, sums=BY_DEVICE, late=BY_DEVICE, noise=P(), count=P()  # pyright: ignore
        )  # fmt: skip
        return self._map(self._update, (specs, BY_BATCH, BY_BATCH, P()), specs)(state, residuals, ordered, rate)

    def value_and_update(
        self, loss: Callable[..., Any], params: Any, state: EmbeddingState, ids: Mapping[str, Any], *args: Any,
        weights: Mapping[str, Any] | None = None, learning_rate: jax.Array | float | None = None, has_aux: bool = False,
    ) -> tuple[Any, Any, EmbeddingState, Residuals]:  # fmt: skip
        """(value, gradient of params, state, residuals) of `loss(params, features, *args)`, a mean over the batch."""
        features, residuals = self.lookup(state, ids, weights)
        value, (of_params, of_features) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=has_aux)(
            params, features, *args
        )
        return value, of_params, self.update(state, residuals, of_features, learning_rate), residuals

    def sync(self, state: EmbeddingState) -> EmbeddingState:
        """The state with the replicas' weights averaged (and their sums, unless `sync_sums` is "none")."""
        both = self._map(self._sync, (BY_DEVICE, BY_DEVICE), BY_DEVICE)
        packs, sums = both(state.packs, state.sums)
        return EmbeddingState(packs=packs, sums=sums, late=state.late, noise=state.noise, count=state.count)

    def check(self, residuals: Residuals) -> None:
        """Raises ArgumentError where ids were no rows, or were too many for the capacity with overflow="error".

        Reads a few integers from the devices, so it waits for the step that made them.
        """
        size = residuals.ids[0].shape[0] // self.groups.devices
        raise_bad_ids(self.collection.tables, self.origins, np.asarray(residuals.bad))
        if self.overflow == "error":
            raise_overflow(self.layout, [np.asarray(c) for c in residuals.counts], size, self.capacity)

    def moment_scales(self, state: EmbeddingState) -> jax.Array:
        """The c of every table of `layout.tables`, f32 [tables], by which squared sums are divided now."""
        return self._scales(state.noise) * jnp.ones(len(self.layout.tables))

    @property
    def device_mesh(self) -> Mesh:
        """The mesh ("replica", "shard") on which the tables lie."""
        assert self.mesh is not None
        return self.mesh

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Of each table of `layout.tables`: the collection's table that it has rows of."""
        return origins(self.collection, self.splits)

    @property
    def keeps_late_sums(self) -> bool:
        """Whether a state holds corrections that the next step adds to the sums."""
        return self.sync_sums == "late" and self.groups.replicas > 1

    def _map(self, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(body, mesh=self.device_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _batch(self, ids: Mapping[str, Any], weights: Mapping[str, Any]) -> Batch:
        size = check_shapes(self.collection, ids, weights)
        if size % self.groups.devices:
            raise ArgumentError(
                f"ids: a batch of {size} does not split over {self.groups.devices} devices; give a multiple."
            )
        whole = {t.name: _int32(jnp.asarray(ids[t.name]), t.rows) for t in self.collection.tables}
        by_table, factors = split_ids(self.splits, whole, weights)
        tables = list(enumerate(self.layout.tables))
        return Batch(
            ids=tuple(by_table[t.name].reshape(size, t.bag) for _, t in tables),
            weights={i: jnp.asarray(factors[t.name]).reshape(size, t.bag) for i, t in tables if t.name in factors},
        )

    def _capacity(self, lane: int, size: int) -> tuple[int, int]:
        return capacities(self.layout, self.layout.lanes[lane], size, self.capacity)

    def _send(self, routes: Sequence[Route], batch: Batch, full: bool) -> tuple[Sent | None, ...]:
        return tuple(
            None
            if lane.kind == "local"
            else ways.send(self.layout, lane, routed, batch, self._capacity(n, batch.size)[full])
            for n, (lane, routed) in enumerate(zip(self.layout.lanes, routes, strict=True))
        )

    def _over(self, counts: Sequence[jax.Array], size: int) -> jax.Array | None:
        """Whether any device of the group asks for more than the capacity; None where that cannot be."""
        limits = [self._capacity(n, size) for n in range(len(counts))]
        open_ = [
            (c, limit[0])
            for lane, c, limit in zip(self.layout.lanes, counts, limits, strict=True)
            if lane.kind != "local" and limit[0] < limit[1]
        ]
        if self.overflow == "error" or not open_:
            return None
        mine = jnp.stack([(c.reshape(-1, self.groups.shards).sum(0) > limit).any() for c, limit in open_]).any()
        return jax.lax.psum(mine.astype(jnp.int32), GROUP) > 0

    def _lookup(
        self, packs: tuple[jax.Array, ...], ids: tuple[jax.Array, ...], weights: dict[int, jax.Array]
    ) -> tuple[tuple[jax.Array, ...], Residuals]:
        batch, packs = Batch(ids=ids, weights=weights), tuple(p[0, 0] for p in packs)
        routes = [ways.route(self.layout, lane, batch) for lane in self.layout.lanes]
        counts = tuple(r.counts for r in routes)
        sent = self._send(routes, batch, False)
        over = self._over(counts, batch.size)
        if over is None:
            features = self._features(packs, batch, routes, sent)
        else:
            features = jax.lax.cond(
                over,
                lambda: self._features(packs, batch, routes, self._send(routes, batch, True)),
                lambda: self._features(packs, batch, routes, sent),
            )
        bad = [
            jnp.stack([(~fits).sum().astype(jnp.int32), _example(x, fits)])
            for x, t in zip(ids, self.layout.tables, strict=True)
            for fits in [(x >= -1) & (x < t.rows)]
        ]
        lost = self._lost(batch, routes)
        marked = tuple(
            jnp.where(gone.reshape(-1, *[1] * (f.ndim - 1)), jnp.asarray(jnp.nan, f.dtype), f)
            for f, gone in zip(features, lost, strict=True)
        )
        residuals = Residuals(
            ids=ids, weights=weights, sent=sent, counts=tuple(c[None] for c in counts), bad=jnp.stack(bad)[None]
        )
        return marked, residuals

    def _lost(self, batch: Batch, routes: Sequence[Route]) -> list[jax.Array]:
        """Bags [batch] with an id that is no row or, with overflow="error", was over the capacity."""
        lost = [
            ((x < -1) | (x >= t.rows)).any(1) for x, t in zip(batch.ids, self.layout.tables, strict=True)
        ]
        if self.overflow == "exact":
            return lost
        for n, (lane, routed) in enumerate(zip(self.layout.lanes, routes, strict=True)):
            if lane.kind == "local":
                continue
            over = (routed.place >= self._capacity(n, batch.size)[0]) & (routed.device < self.groups.shards)
            start = 0
            for s in lane.streams:
                shape = batch.ids[s.table].shape
                end = start + batch.ids[s.table].size
                lost[s.table] = lost[s.table] | over[start:end].reshape(shape).any(1)
                start = end
        return lost

    def _features(
        self, packs: tuple[jax.Array, ...], batch: Batch, routes: Sequence[Route], sent: Sequence[Sent | None]
    ) -> tuple[jax.Array, ...]:
        parts: dict[tuple[int, int], jax.Array] = {}
        for lane, routed, s in zip(self.layout.lanes, routes, sent, strict=True):
            if s is None:
                rows = ways.look_here(lane, packs[lane.pack], routed, self.groups.shards)
            else:
                rows = ways.fetch(self.layout, lane, packs[lane.pack], s, batch.size)
            parts |= ways.pool(self.layout, lane, rows, batch)
        return tuple(
            jnp.concatenate([parts[key] for key in sorted(parts) if key[0] == t], -1)
            for t in range(len(self.layout.tables))
        )

    def _update(
        self, state: EmbeddingState, residuals: Residuals, grads: tuple[jax.Array, ...], rate: jax.Array
    ) -> EmbeddingState:
        batch = Batch(ids=residuals.ids, weights=residuals.weights)
        m = self.groups.replicas
        grads = tuple(g * m for g in grads) if m > 1 else grads
        count = state.count + 1
        packs = tuple(p[0, 0] for p in state.packs)
        sums = jax.tree.map(lambda x: x[0, 0], state.sums)
        if self.keeps_late_sums:
            sums = jax.tree.map(lambda x, more: x + more[0, 0], sums, state.late)
        seen = state.noise
        if m > 1 and self.optimizer.moment_scale == "estimate":
            seen = _MEMORY * seen + (1 - _MEMORY) * noise(self.layout, batch, grads, count, m)
        routes = [ways.route(self.layout, lane, batch) for lane in self.layout.lanes]

        def apply(
            packs: tuple[jax.Array, ...], sums: tuple[Sums, ...], sent: tuple[Sent | None, ...]
        ) -> tuple[tuple[jax.Array, ...], tuple[Sums, ...]]:
            merged = [
                merge_lane(self.layout, lane, r, s, batch, grads)
                for lane, r, s in zip(self.layout.lanes, routes, sent, strict=True)
            ]
            squares = mean_squares(self.layout, merged, sent, batch) if self.optimizer.per_row else [None] * len(merged)
            return apply_lanes(
                self.layout, self.optimizer, packs, sums, merged, squares,
                rate=rate, count=count, scales=self._scales(seen),
            )  # fmt: skip

        over = self._over([c[0] for c in residuals.counts], batch.size)
        if over is None:
            packs, sums = apply(packs, sums, residuals.sent)
        else:
            packs, sums = jax.lax.cond(
                over,
                lambda p, s: apply(p, s, self._send(routes, batch, True)),
                lambda p, s: apply(p, s, residuals.sent),
                packs, sums,
            )  # fmt: skip
        packs, sums, late = self._synced(packs, sums, count)
        lead = lambda tree: jax.tree.map(lambda x: x[None, None], tree)  # noqa: E731
        return EmbeddingState(packs=lead(packs), sums=lead(sums), late=lead(late), noise=seen, count=count)

    def _scales(self, seen: jax.Array) -> jax.Array:
        """c, one for all or f32 [tables]."""
        m = self.groups.replicas
        if self.optimizer.moment_scale == "estimate":
            ratio = jnp.where(seen[1] > 0, seen[0] / jnp.where(seen[1] > 0, seen[1], 1), m)
            return jnp.clip(ratio, 1, m)
        return jnp.float32(m if self.optimizer.moment_scale == "replicas" else 1)

    def _synced(
        self, packs: tuple[jax.Array, ...], sums: tuple[Sums, ...], count: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[Sums, ...], tuple[Sums, ...]]:
        m, every = self.groups.replicas, self.groups.sync_every
        if m == 1:
            return packs, sums, ()

        def together(packs: Any, sums: Any) -> Any:
            packs = tuple(replica_mean(p, m, self.sync_bytes) for p in packs)
            late = jax.tree.map(lambda x: correction(x, m), sums) if self.keeps_late_sums else ()
            if self.sync_sums == "exact":
                sums = jax.tree.map(lambda x: replica_mean(x, m, self.sync_bytes), sums)
            return packs, sums, late

        def apart(packs: Any, sums: Any) -> Any:
            return packs, sums, jax.tree.map(jnp.zeros_like, sums) if self.keeps_late_sums else ()

        if every == 1:
            return together(packs, sums)
        return jax.lax.cond(count % every == 0, together, apart, packs, sums)

    def _sync(self, packs: tuple[jax.Array, ...], sums: tuple[Sums, ...]) -> Any:
        m = self.groups.replicas
        average = lambda x: replica_mean(x[0, 0], m, self.sync_bytes)[None, None]  # noqa: E731
        packs = jax.tree.map(average, packs)
        return packs, sums if self.sync_sums == "none" else jax.tree.map(average, sums)


def _int32(ids: jax.Array, rows: int) -> jax.Array:
    """Ids of any integer type; one that is no row stays none, where a cast alone could fold it onto a row."""
    if ids.dtype.itemsize < 4 or ids.dtype == jnp.int32:
        return ids.astype(jnp.int32)
    low = ids if jnp.issubdtype(ids.dtype, jnp.unsignedinteger) else jnp.maximum(ids, -2)
    return jnp.minimum(low, rows).astype(jnp.int32)


def _example(ids: jax.Array, fits: jax.Array) -> jax.Array:
    """One id that does not fit, 0 where all do."""
    flat = ids.reshape(-1)
    return jnp.where(fits.all(), 0, flat[jnp.argmin(fits.reshape(-1))])
