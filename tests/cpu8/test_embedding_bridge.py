"""A DLRM step planned with its tables, run as planned: dense part and `Embeddings` together are one device's step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

import meshplan as mp
from meshplan.embedding import RowSgd, from_tables, to_tables
from models import dlrm, dlrm_sharded

RATE = 0.2


def workload(cfg: dlrm.Config) -> tuple[mp.Workload, Any]:
    """The step under plain SGD, and its first state."""
    tx = optax.sgd(RATE)
    params = dlrm.init(jax.random.key(0), cfg)

    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(dlrm.loss)(params, batch, cfg)
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), value

    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), next(dlrm.batches(cfg)))
    return mp.Workload(step=step, args=(jax.eval_shape(lambda: params), batch), donate_argnums=()), params


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_planned_step_with_tables_is_one_devices_step(replicas: int) -> None:
    cfg = replace(dlrm.SIZES["tiny"], batch=64, rows=(4096, 64, 3), bags=(4, 1, 2))
    work, params = workload(cfg)
    tables = {f"params/tables/{i}": t for i, t in enumerate(dlrm_sharded.tables(cfg, zipf=1.2).tables)}
    mesh = {"shard": 8 // replicas, "replica": replicas}
    plan = mp.plan(work, machine="cpu:8", tables=tables, mesh=mesh)
    emb = plan.embeddings(RowSgd(learning_rate=RATE), overflow="exact")
    state = from_tables(emb, {f"t{i}": np.asarray(t) for i, t in enumerate(params.tables)})
    dense = plan.jit(mesh=emb.device_mesh)

    @jax.jit
    def together(held: Any, state: Any, batch: Any) -> Any:
        ids = {f"t{i}": x for i, x in enumerate(batch["ids"])}
        features, residuals = emb.lookup(state, ids)
        held, loss, grads = dense(held, {**batch, "ids": (None,) * 3}, features)
        return held, emb.update(state, residuals, grads), loss

    held, logs = replace(params, tables=(None,) * 3), dlrm.batches(cfg)
    alone, run = params, jax.jit(work.step)
    for _ in range(3):
        batch = next(logs)
        held, state, loss = jax.block_until_ready(together(held, state, batch))
        alone, wanted = run(alone, batch)
        assert float(loss) == pytest.approx(float(wanted), abs=1e-6)
    found = to_tables(emb, state).weights
    for i, table in enumerate(alone.tables):
        np.testing.assert_allclose(found[f"t{i}"], table, atol=2e-6)
    for a, b in zip(jax.tree.leaves((held.bottom, held.top)), jax.tree.leaves((alone.bottom, alone.top)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
