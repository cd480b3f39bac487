"""What a step of sharded tables compiles to, what it refuses, and how replicas come together."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshplan.core import ArgumentError, MeshError, MeshShape
from meshplan.embedding import (
    Collection,
    Embeddings,
    EmbeddingState,
    Groups,
    RowAdagrad,
    RowAdam,
    RowOptimizer,
    RowSgd,
    Table,
    embedding_mesh,
    from_tables,
    place,
    to_tables,
)
from meshplan.lower._hlo import find_collectives

ROWS, DIM, BATCH = 64, 4, 32
# Rows come back one by one from the owners of "item", as sums of bags from those of "long".
TWO = Collection(
    tables=(Table(name="item", rows=ROWS, dim=DIM, length=2), Table(name="long", rows=ROWS, dim=DIM, length=8))
)
QUICK = {"xla_backend_optimization_level": 0}  # compiling is most of these tests' time
Arrays = dict[str, Any]


def made(m: int, n: int, optimizer: RowOptimizer, collection: Collection = TWO, **kw: Any) -> Embeddings:
    groups = Groups(replicas=m, shards=n, sync_every=kw.pop("sync_every", 1))
    mesh = embedding_mesh(groups, jax.devices()[: m * n])
    placements = [place(t, "row", list(range(n))) for t in collection.tables]
    return Embeddings(collection, placements, groups, optimizer=optimizer, mesh=mesh, **kw)


def squared(params: jax.Array, features: Arrays, wanted: jax.Array) -> jax.Array:
    return jnp.mean(sum(jnp.square(params * f - wanted).sum(1) for f in features.values()))


def stepper(emb: Embeddings, options: dict[str, int] | None = QUICK) -> Any:
    @functools.partial(jax.jit, donate_argnums=0, compiler_options=options)
    def step(state: EmbeddingState, ids: Arrays, wanted: Any) -> Any:
        return emb.value_and_update(squared, jnp.float32(1), state, ids, wanted)

    return step


def data(seed: int, rows: int = ROWS) -> tuple[Arrays, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = {t.name: rng.integers(0, rows, (BATCH, t.bag)).astype(np.int32) for t in TWO.tables}
    return ids, rng.normal(size=(BATCH, DIM)).astype(np.float32)


def tables() -> Arrays:
    rng = np.random.default_rng(9)
    return {t.name: (0.1 * rng.normal(size=(ROWS, DIM))).astype(np.float32) for t in TWO.tables}


def grads(held: Arrays, ids: Arrays, wanted: np.ndarray) -> Arrays:
    """By hand: of the mean over these samples of the squared differences."""
    out = {}
    for name, w in held.items():
        slope = 2 * (w[ids[name]].sum(1) - wanted) / len(wanted)
        out[name] = np.zeros_like(w)
        np.add.at(out[name], ids[name], np.broadcast_to(slope[:, None], (*ids[name].shape, DIM)))
    return out


@functools.cache
def tight(overflow: str) -> tuple[Embeddings, Any]:
    emb = made(1, 4, RowSgd(learning_rate=0.1), capacity=1.5, overflow=overflow)
    return emb, stepper(emb)


def test_compiled_lookups_stay_in_a_group_and_syncs_between_replicas() -> None:
    big = Collection(tables=(Table(name="item", rows=1 << 18, dim=16, length=2),))
    emb = made(2, 4, RowAdagrad(learning_rate=0.1), big, sync_bytes=1 << 18)
    state = jax.eval_shape(emb.init, jax.random.key(0))
    where = EmbeddingState(
        packs=P("replica", "shard"), sums=P("replica", "shard"), late=P(), noise=P(), count=P()  # pyright: ignore
    )
    placed = jax.tree.map(
        lambda spec, part: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(emb.device_mesh, spec)), part
        ),
        where, state, is_leaf=lambda x: isinstance(x, P),
    )
    ids = {"item": jax.ShapeDtypeStruct((BATCH, 2), jnp.int32)}
    compiled = stepper(emb, None).lower(placed, ids, jax.ShapeDtypeStruct((BATCH, 16), jnp.float32)).compile()
    found = [f.collective for f in find_collectives(compiled.as_text(), MeshShape.of({"replica": 2, "shard": 4}))]
    lookups = [c for c in found if c.axes == ("shard",)]
    syncs = [c for c in found if c.axes == ("replica",)]
    assert {c.kind for c in lookups} == {"all-to-all"}
    assert len(lookups) == 3  # ids there, rows back, gradients there
    assert {c.group_size for c in lookups} == {4}
    assert {(c.kind, c.group_size) for c in syncs} == {("all-reduce", 2)}
    of_device = big.tables[0].nbytes * 2 // 8
    assert sum(c.nbytes * c.count for c in syncs) == of_device
    assert all(c.nbytes <= 8 for c in found if c not in lookups + syncs)  # the loss, and the gradient of `params`
    assert emb.layout.padded_bytes == of_device == max(emb.layout.used_bytes)
    memory = compiled.memory_analysis()
    sums = emb.layout.packs[0].rows * 4
    assert of_device <= memory.alias_size_in_bytes <= of_device + sums + 1024
    assert memory.temp_size_in_bytes < of_device / 4


def test_ids_over_the_capacity_are_an_error_that_says_how_much_is_needed() -> None:
    emb, step = tight("error")
    ids, wanted = data(0, ROWS // 4)  # all of them on the first of four shards
    loss, _, _, residuals = step(from_tables(emb, tables()), ids, wanted)
    assert np.isnan(loss)
    sentence = (
        r"table 'long': device 0 \(replica 0, shard 0\) asks shard 0 for 64 rows, 24 fit\. The bags concerned are NaN "
        r"in this step\. Give capacity=4 or more \(it is 1\.5\), or overflow='exact'"
    )
    with pytest.raises(ArgumentError, match=sentence):
        emb.check(residuals)


@pytest.mark.parametrize("rows", [ROWS // 4, ROWS])
def test_the_exact_way_loses_no_id_whether_they_fit_or_not(rows: int) -> None:
    emb, step = tight("exact")
    ids, wanted = data(1, rows)
    held = tables()
    loss, _, state, residuals = step(from_tables(emb, held), ids, wanted)
    emb.check(residuals)
    moved = {k: held[k] - 0.1 * g for k, g in grads(held, ids, wanted).items()}
    assert loss == pytest.approx(sum(np.square(held[k][ids[k]].sum(1) - wanted).sum() for k in held) / BATCH, rel=1e-5)
    for name, found in to_tables(emb, state).weights.items():
        np.testing.assert_allclose(found, moved[name], atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (64, r"table 'long': id 64 is past the table's end\. Ids are in \[0, 64\)"),
        (-3, r"table 'long': id -3 is negative; -1 alone marks an empty place\. Ids are in \[0, 64\)"),
        ((1 << 31) - 1, r"table 'long': id 2147483647 is past the table's end"),
    ],
)
def test_an_id_that_is_no_row_is_found_on_the_device(wrong: int, sentence: str) -> None:
    emb, step = tight("exact")
    ids, wanted = data(2)
    ids["long"][5, 3] = wrong
    loss, _, _, residuals = step(from_tables(emb, tables()), ids, wanted)
    assert np.isnan(loss)
    with pytest.raises(ArgumentError, match=sentence):
        emb.check(residuals)


def test_an_empty_bag_gives_zeros_and_moves_nothing() -> None:
    emb, step = tight("exact")
    ids, wanted = data(3)
    ids = {k: np.full_like(v, -1) for k, v in ids.items()}
    loss, _, state, residuals = step(from_tables(emb, tables()), ids, wanted)
    emb.check(residuals)
    assert loss == pytest.approx(2 * np.square(wanted).sum() / BATCH, rel=1e-6)
    for name, found in to_tables(emb, state).weights.items():
        np.testing.assert_array_equal(found, tables()[name])


def replicas(emb: Embeddings, steps: int, late: bool) -> tuple[Arrays, Arrays]:
    """Whole tables and sums of every replica after row-wise AdaGrad steps, by hand."""
    m, every = emb.groups.replicas, emb.groups.sync_every
    w = [tables() for _ in range(m)]
    v = [{k: np.zeros(ROWS) for k in w[0]} for _ in range(m)]
    owed = [dict.fromkeys(w[0], 0.0) for _ in range(m)]
    for i in range(steps):
        ids, wanted = data(10 + i)
        for r in range(m):
            part = slice(r * BATCH // m, (r + 1) * BATCH // m)
            g = grads(w[r], {k: x[part] for k, x in ids.items()}, wanted[part])
            for k in w[r]:
                v[r][k] = v[r][k] + owed[r][k] + np.square(g[k]).mean(1)
                w[r][k] = w[r][k] - 0.1 * g[k] / np.sqrt(v[r][k] / m + 1e-8)[:, None]
                owed[r][k] = 0.0
        if (i + 1) % every == 0:
            for k in w[0]:
                mean = np.mean([x[k] for x in v], 0)
                for r in range(m):
                    owed[r][k] = mean - v[r][k] if late else 0.0
                for r, x in enumerate([np.mean([x[k] for x in w], 0)] * m):
                    w[r][k] = x
    return {k: np.stack([x[k] for x in w]) for k in w[0]}, {k: np.stack([x[k] for x in v]) for k in w[0]}


def by_replica(emb: Embeddings, packed: jax.Array, table: int) -> np.ndarray:
    """[M, rows, ...] of a table split by rows."""
    pieces = sorted((p for p in emb.layout.pieces if p.table == table), key=lambda p: p.shard.row)
    whole = np.asarray(packed)
    return np.concatenate([whole[:, p.shard.device, p.start : p.start + p.shard.shape[0]] for p in pieces], 1)


def test_replicas_drift_between_syncs_and_their_sums_meet_a_step_late() -> None:
    emb = made(2, 2, RowAdagrad(learning_rate=0.1), sync_every=2, sync_sums="late", capacity=4.0)
    step, state = stepper(emb), from_tables(emb, tables())
    for i in range(3):
        _, _, state, residuals = step(state, *data(10 + i))
        emb.check(residuals)
        w, v = replicas(emb, i + 1, late=True)
        apart = np.abs(w["item"][0] - w["item"][1]).max()
        assert (apart == 0) == (i == 1)
        for t, name in enumerate(w):
            np.testing.assert_allclose(by_replica(emb, state.packs[0], t), w[name], atol=1e-5)
            np.testing.assert_allclose(by_replica(emb, state.sums[0]["sum"], t), v[name], rtol=1e-4, atol=1e-7)


def test_lazy_row_adam_moves_the_rows_of_a_batch_alone() -> None:
    emb = made(1, 4, RowAdam(learning_rate=0.1), capacity=4.0)
    step, state, w = stepper(emb), from_tables(emb, tables()), tables()
    first, second = {k: np.zeros((ROWS, DIM)) for k in w}, {k: np.zeros(ROWS) for k in w}
    for i in range(2):
        ids, wanted = data(20 + i, 40)
        _, _, state, _ = step(state, ids, wanted)
        for k, g in grads(w, ids, wanted).items():
            on = np.unique(ids[k])
            first[k][on] = 0.9 * first[k][on] + 0.1 * g[on]
            second[k][on] = 0.999 * second[k][on] + 0.001 * np.square(g[on]).mean(1)
            root = np.sqrt(second[k][on] / (1 - 0.999 ** (i + 1))) + 1e-8
            w[k][on] -= (0.1 * first[k][on] / (1 - 0.9 ** (i + 1)) / root[:, None]).astype(np.float32)
    for name, found in to_tables(emb, state).weights.items():
        np.testing.assert_allclose(found, w[name], atol=1e-5)
        np.testing.assert_array_equal(found[40:], tables()[name][40:])


def test_estimated_moment_scale_is_one_without_noise_and_near_the_replicas_with_noise_alone() -> None:
    emb = made(4, 2, RowAdagrad(learning_rate=0.0, moment_scale="estimate"), capacity=8.0)
    update = jax.jit(emb.update, compiler_options=QUICK)
    ids = {k: np.tile(v[: BATCH // 4], (4, 1)) for k, v in data(30)[0].items()}
    _, residuals = jax.jit(emb.lookup, compiler_options=QUICK)(from_tables(emb, tables()), ids)
    rng = np.random.default_rng(0)
    found = {}
    for kind in ("signal", "noise"):
        state = from_tables(emb, tables())
        for _ in range(40):
            own = rng.normal(size=(4 if kind == "noise" else 1, BATCH // 4, DIM)).astype(np.float32)
            given = np.broadcast_to(own, (4, BATCH // 4, DIM)).reshape(BATCH, DIM)
            # Many steps under way at once take the threads that XLA's CPU collectives wait for each other on.
            state = jax.block_until_ready(update(state, residuals, {"item": given, "long": given}))
        found[kind] = np.asarray(emb.moment_scales(state))
    np.testing.assert_allclose(found["signal"], 1, rtol=1e-5)
    assert ((found["noise"] > 3) & (found["noise"] <= 4)).all()


def test_a_sync_by_hand_averages_weights_and_sums_in_pieces() -> None:
    emb = made(4, 2, RowAdagrad(learning_rate=0.1), sync_sums="exact", sync_bytes=1000)
    rng = np.random.default_rng(0)
    state = from_tables(emb, tables())
    drifted = jax.tree.map(lambda x: jax.device_put(rng.normal(size=x.shape).astype("f4"), x.sharding), state.packs)
    sums = jax.tree.map(lambda x: jax.device_put(rng.normal(size=x.shape).astype("f4"), x.sharding), state.sums)
    state = EmbeddingState(packs=drifted, sums=sums, late=(), noise=state.noise, count=state.count)
    together = jax.jit(emb.sync, compiler_options=QUICK)(state)
    for before, after in ((drifted[0], together.packs[0]), (sums[0]["sum"], together.sums[0]["sum"])):
        mean = np.broadcast_to(np.asarray(before).mean(0, keepdims=True), before.shape)
        np.testing.assert_allclose(np.asarray(after), mean, atol=1e-6)


def test_rows_of_bfloat16_are_pooled_and_moved_in_float32() -> None:
    half = Collection(tables=(Table(name="long", rows=ROWS, dim=DIM, length=8, dtype="bfloat16"),))
    emb = made(1, 2, RowSgd(learning_rate=0.1), half, capacity=2.0)
    held = {"long": tables()["long"].astype("bfloat16")}
    exact = {"long": held["long"].astype(np.float32)}
    ids, wanted = data(40)
    _, _, state, _ = stepper(emb)(from_tables(emb, held), {"long": ids["long"].astype(np.uint8)}, wanted)
    found = to_tables(emb, state).weights["long"]
    moved = exact["long"] - 0.1 * grads(exact, {"long": ids["long"]}, wanted)["long"]
    assert found.dtype == held["long"].dtype
    np.testing.assert_allclose(found.astype(np.float32), moved, rtol=0.01, atol=2e-3)


def test_fresh_tables_are_the_same_for_any_placement() -> None:
    emb = made(1, 2, RowSgd(learning_rate=0.1))
    columns = [place(t, "column", [1, 0]) for t in TWO.tables]
    other = Embeddings(TWO, columns, emb.groups, optimizer=emb.optimizer, mesh=emb.mesh)
    one, two = (to_tables(e, e.init(jax.random.key(3))).weights for e in (emb, other))
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])
        assert 0.9 * ROWS**-0.5 < np.abs(one[name]).max() < ROWS**-0.5


def test_replicas_of_a_shard_are_neighbours_unless_the_groups_are() -> None:
    near = embedding_mesh(Groups(replicas=2, shards=4))
    far = embedding_mesh(Groups(replicas=2, shards=4, near=False))
    assert [d.id for d in near.devices[:, 0]] == [0, 1]
    assert [d.id for d in far.devices[0]] == [0, 1, 2, 3]
    with pytest.raises(MeshError, match=r"groups of 3 replicas x 2 shards need 6 devices, 8 were given"):
        embedding_mesh(Groups(replicas=3, shards=2))
    with pytest.raises(MeshError, match=r"the mesh has axes .*'shard': 4.*, the groups need .*'shard': 2"):
        Embeddings(TWO, [], Groups(replicas=2, shards=2), optimizer=RowSgd(learning_rate=1), mesh=near)
