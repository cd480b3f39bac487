"""A table on the host trained through a cache on the devices, against the whole table on the devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshplan.core import ArgumentError
from meshplan.embedding import (
    CachedTable,
    Collection,
    Embeddings,
    EmbeddingState,
    Groups,
    RowAdagrad,
    RowOptimizer,
    RowSgd,
    Table,
    embedding_mesh,
    from_tables,
    place,
    to_tables,
)

ROWS, SLOTS, DIM, BATCH = 3000, 500, 4, 32
Batches = list[tuple[np.ndarray, np.ndarray]]


def whole(rows: int, optimizer: RowOptimizer, scheme: Any = "data") -> Embeddings:
    table = Table(name="item", rows=rows, dim=DIM, length=2)
    groups = Groups(replicas=1, shards=2)
    placement = place(table, scheme, [0, 1])
    mesh = embedding_mesh(groups, jax.devices()[:2])
    return Embeddings(Collection(tables=(table,)), [placement], groups, optimizer=optimizer, mesh=mesh)


def stepper(emb: Embeddings) -> Any:
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: EmbeddingState, ids: Any, wanted: Any) -> EmbeddingState:
        def loss(_: Any, features: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean(jnp.square(features["item"] - wanted))

        return emb.value_and_update(loss, jnp.float32(0), state, {"item": ids})[2]

    return step


def zipf(count: int) -> Batches:
    rng = np.random.default_rng(4)
    chances = np.arange(1, ROWS + 1) ** -1.05
    ids = rng.choice(ROWS, (count, BATCH, 2), p=chances / chances.sum()).astype(np.int32)
    return [(x, rng.normal(size=(BATCH, DIM)).astype(np.float32)) for x in ids]


@pytest.mark.parametrize(
    ("optimizer", "count"), [(RowSgd(learning_rate=0.5), 200), (RowAdagrad(learning_rate=0.1), 40)]
)
def test_cached_training_equals_uncached_bit_for_bit(optimizer: RowOptimizer, count: int) -> None:
    start = np.random.default_rng(5).normal(size=(ROWS, DIM)).astype(np.float32)
    plain = whole(ROWS, optimizer)
    step, state = stepper(plain), from_tables(plain, {"item": start})
    for batch in zipf(count):
        state = jax.block_until_ready(step(state, *batch))
    wanted = to_tables(plain, state)
    small = whole(SLOTS, optimizer)
    host = {"weights": start.copy(), **{k: np.zeros(ROWS, np.float32) for k in optimizer.per_row}}
    cached = CachedTable(embeddings=small, name="item", host=host, window=4)
    empty = from_tables(small, {"item": np.zeros((SLOTS, DIM), np.float32)})
    _, done = cached.train(empty, stepper(small), zipf(count))
    np.testing.assert_array_equal(host["weights"], wanted.weights["item"])
    for name, values in wanted.sums["item"].items():
        np.testing.assert_array_equal(host[name], values)
    assert np.abs(host["weights"] - start).max() > 0.01
    assert len(done) == count
    assert sum(s.fetched for s in done) < sum(len(np.unique(ids)) for ids, _ in zipf(count))


def test_a_cache_has_to_lie_whole_on_every_device() -> None:
    rows = {"weights": np.zeros((ROWS, DIM), np.float32)}
    with pytest.raises(ArgumentError, match=r"cached table 'item': scheme 'row' in 1 groups; a cache is kept whole"):
        CachedTable(embeddings=whole(SLOTS, RowSgd(learning_rate=1), "row"), name="item", host=rows)
    with pytest.raises(ArgumentError, match=r"the host has \['weights'\], needed: \['sum', 'weights'\]"):
        CachedTable(embeddings=whole(SLOTS, RowAdagrad(learning_rate=1)), name="item", host=rows)
