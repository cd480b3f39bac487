"""`mp.plan(..., tables=...)`: embedding tables placed by their own planner, inside the plan of a whole step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import meshplan as mp
from meshplan.core import ArgumentError, MemoryLimitError, MeshError
from meshplan.embedding import Collection, Pricing, StepTables, Table, load_embedding_plan
from models import dlrm, dlrm_sharded
from tests._programs import f32

CFG = replace(dlrm.SIZES["tiny"], batch=64, rows=(512, 64, 3), bags=(4, 1, 2))
TABLES = {f"state/params/tables/{i}": t for i, t in enumerate(dlrm_sharded.tables(CFG).tables)}


def workload() -> mp.Workload:
    return dlrm.workload("tiny", batch=CFG.batch, rows=CFG.rows, bags=CFG.bags)


@cache
def planned() -> mp.Plan:
    return mp.plan(workload(), machine="cpu:8", tables=TABLES)


def test_the_figures_are_those_of_tables_and_dense_part_together() -> None:
    plan, tables = planned(), planned().embedding
    assert tables is not None
    assert plan.step_seconds == tables.step_seconds == pytest.approx(sum(tables.parts.values()))
    assert tables.parts["dense"] == pytest.approx(plan.data.step_seconds) and tables.parts["lookup"] > 0
    assert plan.peak_bytes == tables.peak_bytes > tables.pricing.reserved_bytes > 0
    assert plan.mesh_shape == {"shard": tables.groups.shards, "replica": tables.groups.replicas}
    assert {c.replicas for c in tables.considered} == {1, 2, 4, 8}


def test_the_dense_part_has_features_in_the_tables_place() -> None:
    paths = [a.path for a in planned().data.arguments]
    assert not [p for p in paths if "tables" in p or "ids" in p]  # nor the optimizer's sums of tables
    assert [p for p in paths if p.startswith("features/")] == ["features/t0", "features/t1", "features/t2"]
    assert any(p.startswith("batch/numbers") for p in paths)


def test_a_table_is_explained_by_name_and_by_path() -> None:
    by_name, by_path = planned().explain("t0"), planned().explain("state/params/tables/0")
    assert by_name.text == by_path.text
    assert "512, 16" in by_name.text and "models/dlrm.py" in by_name.text and "4 ids a bag" in by_name.text
    assert "state/params/bottom" in planned().explain("state/params/bottom/0/kernel").text
    assert "embedding tables, which are planned beside it" in str(planned())


def test_tables_are_found_where_none_are_named() -> None:
    found = mp.plan(workload(), machine="cpu:8", tables="find").embedding
    assert found is not None and [(t.rows, t.dim) for t in found.tables] == [(512, 16), (64, 16), (3, 16)]


def test_less_memory_chooses_fewer_replicas_and_too_little_is_refused() -> None:
    big = replace(CFG, rows=(65536, 64, 3))
    wide = {f"state/params/tables/{i}": t for i, t in enumerate(dlrm_sharded.tables(big).tables)}
    step = dlrm.workload("tiny", batch=big.batch, rows=big.rows, bags=big.bags)
    whole = big.rows[0] * big.width * 4
    plan = mp.plan(step, machine="cpu:8", tables=wide, memory_limit=whole // 2)
    assert plan.embedding is not None and plan.embedding.groups.replicas < 4
    assert plan.peak_bytes <= whole // 2
    with pytest.raises(MemoryLimitError, match="fit"):
        mp.plan(step, machine="cpu:8", tables=wide, memory_limit=whole // 10)


def test_a_mesh_and_pricing_are_the_users() -> None:
    given = StepTables(leaves=TABLES, pricing=Pricing(hashed=True), sync_every=4)
    plan = mp.plan(workload(), machine="cpu:8", tables=given, mesh={"shard": 2, "replica": 4})
    assert plan.embedding is not None
    assert (plan.embedding.groups.replicas, plan.embedding.groups.sync_every) == (4, 4)
    assert plan.embedding.pricing.hashed
    with pytest.raises(MeshError, match="'replica' and 'shard'"):
        mp.plan(workload(), machine="cpu:8", tables=TABLES, mesh={"data": 8})


def test_further_pins_keep_the_tables() -> None:
    again = planned().pin({"state/params/bottom/0/kernel": jax.sharding.PartitionSpec(None, "shard")})
    assert again.embedding is not None and tuple(again.specs["state/params/bottom/0/kernel"]) == (None, "shard")


def test_the_tables_half_goes_to_text_and_back_and_no_half_is_saved_alone(tmp_path: Any) -> None:
    tables = planned().embedding
    assert tables is not None and load_embedding_plan(tables.to_json()) == tables
    with pytest.raises(ArgumentError, match="to_json"):
        planned().save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_a_plan_without_tables_has_none() -> None:
    plain = mp.plan(workload(), machine="cpu:8", mesh={"data": 8})
    assert plain.embedding is None and plain.step_seconds == plain.data.step_seconds
    with pytest.raises(ArgumentError, match="tables="):
        plain.embeddings(mp.embedding.RowSgd(learning_rate=0.1))


TABLE = Table(name="t", rows=64, dim=8)
IDS = jax.ShapeDtypeStruct((16,), jnp.int32)


def clipped(params: Any, ids: Any) -> Any:
    grads = jax.grad(lambda p: jnp.sin(p["table"][ids] @ p["w"]).sum())(params)
    scale = 1 / (1 + sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: p - 0.1 * scale * g, params, grads)


def read_twice(params: Any, ids: Any) -> Any:
    grads = jax.grad(lambda p: (jnp.sin(p["table"][ids] @ p["w"]) + p["table"][ids + 1].sum(-1)).sum())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def only_read(params: Any, ids: Any) -> Any:
    return jnp.sin(params["table"][ids] @ params["w"]).sum()


def multiplied(params: Any, ids: Any) -> Any:
    return (params["table"] @ params["w"])[ids].sum()


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (clipped, "otherwise than by its lookup.*norm over all gradients"), (read_twice, "at 2 places"),
        (only_read, "at 0 places, not one"), (multiplied, "looks up no rows"),
    ],
)  # fmt: skip
def test_a_step_that_does_more_with_a_table_is_refused(step: Any, told: str) -> None:
    args = ({"table": f32(64, 8), "w": f32(8)}, IDS)
    with pytest.raises(ArgumentError, match=told):
        mp.plan(step, *args, machine="cpu:8", donate_argnums=(), tables={"params/table": TABLE})


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"params/tabel": TABLE}, r"matches no argument.*params/table"),
        ({"params/table": Table(name="t", rows=63, dim=8)}, "give the table the argument's rows"),
        ({"params/table": 3}, "give an mp.embedding.Table"),
        (Collection(tables=(TABLE,)), "tables is a Collection; give"),
    ],
)
def test_tables_that_are_not_there_are_refused(tables: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        mp.plan(only_read, {"table": f32(64, 8), "w": f32(8)}, IDS, machine="cpu:8", tables=tables)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    step = dlrm.workload("tiny", batch=12, rows=CFG.rows, bags=CFG.bags)
    with pytest.raises(ArgumentError, match="12 bags, which do not divide over the 8 devices"):
        mp.plan(step, machine="cpu:8", tables=TABLES)
