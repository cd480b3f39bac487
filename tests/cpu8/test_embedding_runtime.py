"""Sharded tables against one device that keeps them whole."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshplan.embedding import (
    Collection,
    Embeddings,
    EmbeddingState,
    Groups,
    Placement,
    Pooling,
    RowAdagrad,
    RowAdam,
    RowOptimizer,
    RowSgd,
    Table,
    from_tables,
    place,
    to_tables,
)

MESHES = [(1, 8), (2, 4), (4, 2), (8, 1)]
SCHEMES = ("data", "table", "row", "column", "grid", "row_in_node")
BATCH = 32
QUICK = {"xla_backend_optimization_level": 0}  # compiling is most of these tests' time
Weights = dict[str, np.ndarray]

MANY: tuple[Pooling, ...] = ("sum", "mean", "weighted")
FEW: tuple[Pooling, ...] = ("sum", "weighted", "mean", "none")
# Of each scheme a table with short bags and one with long ones; every pooling occurs; rows that do not divide evenly.
TABLES = tuple(
    table
    for n, scheme in enumerate(SCHEMES)
    for table in (
        Table(name=f"{scheme}_many", rows=53 + n, dim=8, pooling=MANY[n % 3], length=10),
        Table(name=f"{scheme}_few", rows=29 + n, dim=8, pooling=FEW[n % 4], length=1 + n % 3),
    )
)
COLLECTION = Collection(tables=TABLES)


def placed(n: int) -> list[Placement]:
    out = []
    for i, table in enumerate(TABLES):
        scheme = SCHEMES[i // 2]
        some = {"table": [i % n], "row_in_node": list(range(max(1, n // 2))), "column": list(range(n))[-2:]}
        devices = some.get(scheme, list(range(n)))
        out.append(place(table, scheme, devices, columns=2 if n > 1 else 1))
    return out


def batch(seed: int = 0) -> tuple[Weights, Weights]:
    """Zipf-like ids with repeats, shorter and empty bags, and weights."""
    rng = np.random.default_rng(seed)
    ids, weights = {}, {}
    for t in TABLES:
        drawn = (t.rows ** rng.random((BATCH, t.bag)) - 1).astype(np.int32)
        short = np.arange(t.bag) >= rng.integers(0, t.bag + 1, (BATCH, 1))
        ids[t.name] = np.where(short, -1, drawn).astype(np.int32)
        if t.pooling == "weighted":
            weights[t.name] = rng.normal(size=(BATCH, t.bag)).astype(np.float32)
    return ids, weights


def whole_tables(seed: int = 1) -> Weights:
    rng = np.random.default_rng(seed)
    return {t.name: (0.2 * rng.normal(size=(t.rows, t.dim))).astype(np.float32) for t in TABLES}


def dense_features(tables: Weights, ids: Weights, weights: Weights) -> Weights:
    def of(t: Table) -> np.ndarray:
        rows = bag_factors(t, ids, weights)[..., None] * rows_of(tables, ids, t)
        return rows if t.pooling == "none" else rows.sum(1)

    return {t.name: of(t) for t in TABLES}


def rows_of(tables: Weights, ids: Weights, t: Table) -> np.ndarray:
    return tables[t.name][np.maximum(ids[t.name], 0)].astype(np.float64)


def bag_factors(t: Table, ids: Weights, weights: Weights) -> np.ndarray:
    there = (ids[t.name] >= 0).astype(np.float64)
    if t.pooling == "mean":
        return there / np.maximum(there.sum(1, keepdims=True), 1)
    return there * weights[t.name] if t.pooling == "weighted" else there


def loss(scale: jax.Array, features: dict[str, jax.Array]) -> jax.Array:
    """A mean over the batch of a sum of sines."""
    return jnp.mean(sum(jnp.sin(scale * f + 0.1).reshape(len(f), -1).sum(1) for f in features.values()))


def group_grads(tables: Weights, ids: Weights, weights: Weights, part: slice) -> Weights:
    """The gradient of the loss of a part of the batch, by hand."""
    ids, weights = ({k: v[part] for k, v in x.items()} for x in (ids, weights))
    features = dense_features(tables, ids, weights)
    out = {t.name: np.zeros((t.rows, t.dim)) for t in TABLES}
    for t in TABLES:
        slope = np.cos(features[t.name] + 0.1) / len(ids[t.name])
        each = bag_factors(t, ids, weights)[..., None] * (slope if t.pooling == "none" else slope[:, None])
        np.add.at(out[t.name], np.maximum(ids[t.name], 0), each)
    return out


def dense_adagrad(w: np.ndarray, v: np.ndarray, g: np.ndarray, rate: float, c: float) -> tuple[np.ndarray, np.ndarray]:
    v = v + np.square(g).mean(1)
    return w - rate * g / np.sqrt(v / c + 1e-8)[:, None], v


@functools.cache
def embeddings(m: int, n: int, optimizer: RowOptimizer, **kw: object) -> Embeddings:
    groups = Groups(replicas=m, shards=n)
    return Embeddings(COLLECTION, placed(n), groups, optimizer=optimizer, capacity=8.0, **kw)  # pyright: ignore


def worst(a: Weights, b: Weights) -> float:
    return max(float(np.abs(np.asarray(a[k]) - np.asarray(b[k])).max()) for k in a)


@functools.cache
def stepped(m: int, n: int) -> tuple[tuple[Embeddings, EmbeddingState], tuple[Embeddings, EmbeddingState], Weights]:
    """One step of SGD and one of row-wise AdaGrad from the same lookup, compiled together, and the features."""
    sgd = embeddings(m, n, RowSgd(learning_rate=0.5))
    adagrad = embeddings(m, n, RowAdagrad(learning_rate=0.1, initial_sum=0.01))

    @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=QUICK)
    def step(a: EmbeddingState, b: EmbeddingState, ids: Weights, weights: Weights):
        features, residuals = sgd.lookup(a, ids, weights)
        grads = jax.grad(loss, argnums=1)(jnp.float32(1), features)
        return sgd.update(a, residuals, grads), adagrad.update(b, residuals, grads), features, residuals

    states = (from_tables(emb, whole_tables()) for emb in (sgd, adagrad))
    a, b, features, residuals = step(*states, *batch())
    sgd.check(residuals)
    return (sgd, a), (adagrad, b), {k: np.asarray(v) for k, v in features.items()}


@pytest.mark.parametrize(("m", "n"), MESHES)
def test_sgd_moves_every_scheme_as_one_device_would(m: int, n: int) -> None:
    tables, (ids, weights) = whole_tables(), batch()
    (emb, state), _, features = stepped(m, n)
    assert worst(dense_features(tables, ids, weights), features) <= 1e-6
    grads = group_grads(tables, ids, weights, slice(None))
    wanted = {k: tables[k] - 0.5 * grads[k] for k in tables}
    assert max(np.abs(g).max() for g in grads.values()) > 0.01
    assert worst(wanted, to_tables(emb, state).weights) <= 1e-6


@pytest.mark.parametrize(("m", "n"), MESHES)
def test_row_adagrad_moves_every_scheme_as_replicas_of_whole_tables_would(m: int, n: int) -> None:
    """Each replica steps with its own samples' mean gradient, then the weights are averaged."""
    tables, (ids, weights) = whole_tables(), batch()
    _, (emb, state), _ = stepped(m, n)
    parts = [slice(i * BATCH // m, (i + 1) * BATCH // m) for i in range(m)]
    moved = {k: [] for k in tables}
    sums = {k: [] for k in tables}
    for part in parts:
        grads = group_grads(tables, ids, weights, part)
        for k in tables:
            w, v = dense_adagrad(tables[k], np.full(len(tables[k]), 0.01, np.float32), grads[k], 0.1, m)
            moved[k].append(w)
            sums[k].append(v)
    saved = to_tables(emb, state)
    assert worst({k: np.mean(v, 0) for k, v in moved.items()}, saved.weights) <= 1e-5
    assert worst({k: np.mean(v, 0) for k, v in sums.items()}, {k: v["sum"] for k, v in saved.sums.items()}) <= 1e-5


def test_a_state_comes_back_bit_equal_under_other_groups_and_schemes() -> None:
    _, (emb, state), _ = stepped(2, 4)
    saved = to_tables(emb, state)
    rotated = [place(t, "row", list(range(2))) if i % 3 else place(t, "data", [0, 1]) for i, t in enumerate(TABLES)]
    other = Embeddings(COLLECTION, rotated, Groups(replicas=4, shards=2), optimizer=emb.optimizer)
    again = to_tables(other, from_tables(other, saved))
    assert again.count == saved.count == 1
    for name in saved.weights:
        np.testing.assert_array_equal(again.weights[name], saved.weights[name])
        np.testing.assert_array_equal(again.sums[name]["sum"], saved.sums[name]["sum"])
    with pytest.raises(Exception, match=r"table 'data_many': the saved state has no sum 'second', which RowAdam keeps"):
        adam = Embeddings(COLLECTION, rotated, Groups(replicas=4, shards=2), optimizer=RowAdam(learning_rate=0.1))
        from_tables(adam, saved)


def test_copies_of_a_table_on_every_device_stay_bit_equal() -> None:
    _, (emb, state), _ = stepped(2, 4)
    copies = [p for p in emb.layout.pieces if TABLES[p.table].name.startswith("data")]
    assert len(copies) == 8
    for piece in copies:
        held = slice(piece.start, piece.start + TABLES[piece.table].rows)
        for array in (state.packs[piece.pack], state.sums[piece.pack]["sum"]):
            found = np.asarray(array)[:, :, held]
            np.testing.assert_array_equal(found[:, piece.shard.device], found[:, 0])
