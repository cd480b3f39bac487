"""A checkpoint written under one plan is read under another: other mesh, other specs, equal values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshplan as mp

ocp = pytest.importorskip("orbax.checkpoint")

TX = optax.adam(1e-2)
X = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)


def parameters() -> dict[str, Any]:
    key = jax.random.key(1)
    return {"up": jax.random.normal(key, (32, 128)) / 6, "down": jax.random.normal(key, (128, 16)) / 12}


def fresh() -> dict[str, Any]:
    w = parameters()
    return {"w": w, "opt": TX.init(w), "step": jnp.int32(0)}


def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    loss, grads = jax.value_and_grad(lambda w: ((jnp.tanh(x @ w["up"]) @ w["down"] - 1) ** 2).mean())(state["w"])
    updates, opt = TX.update(grads, state["opt"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt, "step": state["step"] + 1}, loss


def planned(mesh: dict[str, int], pins: dict[str, P]) -> mp.Plan:
    return mp.plan(step, jax.eval_shape(fresh), X, machine="cpu:8", mesh=mesh, pins=pins)


@pytest.fixture(scope="module")
def plans() -> tuple[mp.Plan, mp.Plan]:
    first = planned({"data": 8}, {r"(w|mu|nu)/up": P("data"), "down": P("data")})
    other = planned({"data": 2, "model": 4}, {r"(w|mu|nu)/up": P("data", "model"), "down": P("model")})
    return first, other


def test_saved_on_one_mesh_restored_on_another(plans: tuple[mp.Plan, mp.Plan], tmp_path: Path) -> None:
    first, other = plans
    state = jax.device_put(jax.tree.map(np.asarray, fresh()), first.in_shardings()[0])
    run = first.jit()
    for _ in range(3):
        state, _ = run(state, X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", other.abstract_args()[0])
    for a, b, wanted in zip(
        jax.tree.leaves(restored), jax.tree.leaves(state), jax.tree.leaves(other.in_shardings()[0]), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.dtype == b.dtype
        assert a.sharding.is_equivalent_to(wanted, a.ndim)
    up = restored["opt"][0].mu["up"]
    assert dict(up.sharding.mesh.shape) == {"data": 2, "model": 4}
    assert up.addressable_shards[0].data.shape == (16, 32)
    assert state["opt"][0].mu["up"].addressable_shards[0].data.shape == (4, 128)
    ahead = [float(run(state, X)[1]), float(other.jit()(restored, X)[1])]
    assert ahead[0] == pytest.approx(ahead[1], rel=1e-5), "training goes on where it was"


def test_an_nnx_state_is_restored_into_a_plans_arguments(tmp_path: Path, make_mesh: Callable[..., Any]) -> None:
    graph, state = nnx.split(nnx.Linear(32, 128, rngs=nnx.Rngs(0)))
    unplaced: Any = nnx.merge(graph, state)
    values: Any = state

    def apply(state: nnx.State, x: jax.Array) -> tuple[nnx.State, jax.Array]:
        return state, nnx.merge(graph, state)(x)

    plans = [
        mp.plan(apply, state, X, machine="cpu:8", mesh=mesh, pins={"kernel": spec})
        for mesh, spec in (({"data": 8}, P("data")), ({"data": 2, "model": 4}, P(None, "model")))
    ]
    placed = jax.device_put(jax.tree.map(np.asarray, state), plans[0].in_shardings()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", placed)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", plans[1].abstract_args()[0])
    kernel = restored["kernel"].get_value()
    assert kernel.sharding.spec == P(None, "model")
    np.testing.assert_array_equal(np.asarray(kernel), np.asarray(values["kernel"].get_value()))
    np.testing.assert_allclose(plans[1].jit()(restored, X)[1], unplaced(X), rtol=1e-5, atol=1e-6)
