"""DLRM with sharded tables: it learns the law of its logs, and is one device's model where nothing is replicated."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from meshplan.embedding import Groups, RowSgd, to_tables
from meshplan.machine import Machine
from models import dlrm, dlrm_sharded
from models._clicks import auc, normalised_entropy

CFG = replace(dlrm.SIZES["tiny"], batch=256, rows=(512, 64, 3), bags=(4, 1, 2))


@pytest.mark.parametrize("seed", range(3))
def test_the_figures_of_clicks_are_those_of_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    odds = np.round(rng.normal(size=500), 1 + seed)  # with equal ones
    clicks = (rng.random(500) < 0.3).astype(np.float32)
    assert auc(odds, clicks) == pytest.approx(roc_auc_score(clicks, odds))
    base = log_loss(clicks, np.full(500, clicks.mean()))
    wanted = log_loss(clicks, 1 / (1 + np.exp(-odds))) / base
    assert normalised_entropy(odds, clicks) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="give both kinds"):
        auc(odds, np.ones(500))


def test_a_step_of_one_group_is_a_step_of_one_device() -> None:
    made = dlrm_sharded.make(CFG, Groups(replicas=1, shards=8), RowSgd(learning_rate=0.2), capacity=8.0)
    dense, tables = made.init(jax.random.key(1))
    held = to_tables(made.embeddings, tables).weights
    model = dlrm.Dlrm(tuple(jnp.asarray(held[f"t{i}"]) for i in range(3)), *jax.tree.map(jnp.copy, dense[0]))
    batch = next(dlrm.batches(CFG))
    value, grads = jax.value_and_grad(dlrm.loss)(model, batch, CFG)
    after = [np.asarray(t - 0.2 * g) for t, g in zip(model.tables, grads.tables, strict=True)]
    tx = optax.adagrad(CFG.learning_rate)
    of_dense = (grads.bottom, grads.top)
    updates, _ = tx.update(of_dense, tx.init(dense[0]), dense[0])
    wanted = optax.apply_updates(jax.tree.map(jnp.copy, dense[0]), updates)
    (params, _), tables, loss, residuals = made.step(dense, tables, batch)
    made.embeddings.check(residuals)
    assert float(loss) == pytest.approx(float(value), abs=1e-6)
    found = to_tables(made.embeddings, tables).weights
    for i in range(3):
        np.testing.assert_allclose(found[f"t{i}"], after[i], atol=1e-6)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_replicated_groups_learn_the_law_of_the_logs() -> None:
    groups = Groups(replicas=2, shards=4)
    placements = dlrm_sharded.planned(CFG, Machine.preset("cpu:8"), groups)
    made = dlrm_sharded.make(CFG, groups, placements=placements, overflow="exact")
    dense, tables = made.init(jax.random.key(0))
    logs = dlrm.logs(CFG)
    for _ in range(80):
        dense, tables, _, _ = jax.block_until_ready(made.step(dense, tables, next(logs)[0]))
    batches = [next(logs) for _ in range(8)]
    odds = np.concatenate([np.asarray(made.predict(dense, tables, b), np.float64) for b, _ in batches])
    clicks = np.concatenate([b["clicks"] for b, _ in batches])
    best = normalised_entropy(np.concatenate([true for _, true in batches]), clicks)
    assert best < normalised_entropy(odds, clicks) < 0.9
    assert auc(odds, clicks) > 0.7


def test_the_largest_size_has_its_published_bytes_in_shapes_alone() -> None:
    assert dlrm_sharded.table_bytes(dlrm.SIZES["terabytes"]) == pytest.approx(1.7e12, rel=1e-3)
    assert dlrm.workload("terabytes").args[0]["params"].tables[0].shape[1] == 128
