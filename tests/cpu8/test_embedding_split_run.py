"""Tables that a plan keeps as two, hot rows on every device and cold ones in shards, run as the whole table does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshplan.core import ArgumentError
from meshplan.embedding import (
    Collection,
    Embeddings,
    Groups,
    Placement,
    RowAdagrad,
    RowOptimizer,
    RowSgd,
    Split,
    Table,
    from_tables,
    place,
    to_tables,
)
from meshplan.embedding._runtime_split import divided

TABLES = (Table(name="t", rows=96, dim=8, length=4), Table(name="w", rows=40, dim=8, pooling="weighted", length=3))
WHOLE = Collection(tables=TABLES)
SPLITS = tuple(
    Split(table=t.name, hot=f"{t.name}/hot", cold=f"{t.name}/cold", hot_rows=8, hot_share=0.6) for t in TABLES
)
BATCH = 32


def batch(seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    ids = {t.name: (t.rows ** rng.random((BATCH, t.bag)) - 1).astype(np.int32) for t in TABLES}
    ids["t"][::3, 1:] = -1
    return ids, {"w": rng.normal(size=(BATCH, 3)).astype(np.float32)}


def placed(collection: Collection, n: int) -> list[Placement]:
    hot = [t.name.endswith("/hot") for t in collection.tables]
    return [
        place(t, "data" if h else "row", range(n)) for t, h in zip(collection.tables, hot, strict=True)
    ]


def trained(optimizer: RowOptimizer, splits: tuple[Split, ...]) -> tuple[Embeddings, Any, dict[str, np.ndarray]]:
    kept = divided(WHOLE, splits)
    groups = Groups(replicas=2, shards=4)
    emb = Embeddings(WHOLE, placed(kept, 4), groups, optimizer=optimizer, splits=splits, capacity=8.0)
    rng = np.random.default_rng(5)
    state = from_tables(emb, {t.name: rng.normal(size=(t.rows, t.dim)).astype(np.float32) for t in TABLES})

    def loss(features: Any) -> jax.Array:
        return jnp.mean(sum(jnp.sin(f).sum(1) for f in features.values()))

    @jax.jit
    def step(state: Any, ids: Any, weights: Any) -> Any:
        features, residuals = emb.lookup(state, ids, weights)
        return emb.update(state, residuals, jax.grad(loss)(features)), features, residuals

    features: Any = {}
    for seed in range(3):
        state, features, residuals = jax.block_until_ready(step(state, *batch(seed)))
        emb.check(residuals)
    return emb, state, {k: np.asarray(v) for k, v in features.items()}


@pytest.mark.parametrize(
    ("optimizer", "near"), [(RowSgd(learning_rate=0.5), 1e-6), (RowAdagrad(learning_rate=0.1, initial_sum=0.01), 1e-5)]
)
def test_a_split_table_runs_as_the_whole_one(optimizer: RowOptimizer, near: float) -> None:
    whole, state, features = trained(optimizer, ())
    split, parts, same = trained(optimizer, SPLITS)
    assert len(split.layout.tables) == 4 and features.keys() == same.keys() == {"t", "w"}
    for name in features:
        np.testing.assert_allclose(same[name], features[name], atol=near)
    saved, wanted = to_tables(split, parts), to_tables(whole, state)
    for t in TABLES:
        assert saved.weights[t.name].shape == (t.rows, t.dim)
        np.testing.assert_allclose(saved.weights[t.name], wanted.weights[t.name], atol=near)
    # tables saved from halves are whole again anywhere
    restored = to_tables(whole, from_tables(whole, saved))
    assert all((restored.weights[t.name] == saved.weights[t.name]).all() for t in TABLES)


def test_an_id_that_is_no_row_is_told_by_the_users_table() -> None:
    emb = Embeddings(WHOLE, placed(divided(WHOLE, SPLITS), 4), Groups(replicas=2, shards=4), splits=SPLITS,
                     optimizer=RowSgd(learning_rate=0.1))  # fmt: skip
    ids, weights = batch(0)
    ids["t"][5, 0] = 96
    _, residuals = emb.lookup(emb.init(jax.random.key(0)), ids, weights)
    with pytest.raises(ArgumentError, match=r"'t'.*96"):
        emb.check(residuals)


@pytest.mark.parametrize(
    ("split", "told"),
    [
        (Split(table="x", hot="a", cold="b", hot_rows=2, hot_share=0.5), "names table 'x'"),
        (Split(table="t", hot="a", cold="b", hot_rows=96, hot_share=0.5), "96 hot rows of 96"),
    ],
)
def test_a_split_that_cannot_be_is_refused(split: Split, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        divided(WHOLE, (split,))
