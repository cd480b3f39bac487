"""A training step with every optimizer of optax, planned, made and run on eight devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshplan as mp
from tests._optimizers import loss, parameters, public_optimizers, train_step

OPTIMIZERS = public_optimizers()
MESH = {"data": 4, "model": 2}


def state_of(tx: Any) -> Any:
    w = parameters()
    return {"w": w, "opt": tx.init(w)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_step_with_every_optimizer_is_planned_and_moments_can_be_stored_in_pieces(name: str) -> None:
    tx = OPTIMIZERS[name]()
    state = jax.eval_shape(lambda: state_of(tx))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    pins = [(r"w/(up|down)|opt/.*/(up|down)$", P("data", "model")), (".*", P())]
    if name == "contrib.galore":  # keeps projections of its own sizes under the parameters' paths
        pins = pins[1:]
    made = mp.plan(train_step(tx), state, x, machine="cpu:8", mesh=MESH, pins=pins)
    assert made.program is not None
    for i, a in enumerate(made.data.arguments):
        followed = made.program.follows.get(i)
        if followed is not None and a.shape in ((32, 128), (128, 16)):
            assert a.spec == made.data.arguments[followed.parameter].spec
    assert made.peak_bytes > 0
    assert jax.tree.structure(made.out_specs[0]) == jax.tree.structure(state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_init_makes_lies_as_the_parameters_do(name: str) -> None:
    """Case 3: no moment of a pinned parameter is left whole."""
    tx = OPTIMIZERS[name]()
    w = jax.eval_shape(parameters)
    pins = {"params/up": P("data"), "params/down": P("data", "model")}
    made = mp.plan(lambda params: tx.init(params), w, machine="cpu:8", mesh=MESH, pins=pins, donate_argnums=())
    specs: dict[tuple[int, ...], P] = {(32, 128): P("data"), (128, 16): P("data", "model")}
    assert made.program is not None
    for j in made.program.results_follow:
        r = made.data.results[j]
        if r.shape in specs and "projector" not in r.path:
            assert r.spec.partition_spec() == specs[r.shape], r.path


@pytest.mark.parametrize("name", ["adam", "adafactor", "sm3", "contrib.schedule_free_adamw"])
def test_a_planned_step_computes_what_one_device_does(name: str) -> None:
    tx = OPTIMIZERS[name]()
    state, x = state_of(tx), np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    pins = {"x": P("data"), "w/up": P(None, "model")}
    made = mp.plan(train_step(tx), state, x, machine="cpu:8", mesh=MESH, pins=pins)
    assert made.verify(state, x, tolerance=1e-3).ok


def test_states_made_and_stepped_by_plans_train() -> None:
    tx = OPTIMIZERS["adam"]()
    w, x = parameters(), np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    state = jax.eval_shape(lambda: state_of(tx))
    pins = {"x": P("data"), "w/up": P("data")}
    made = mp.plan(train_step(tx), state, x, machine="cpu:8", mesh={"data": 8}, pins=pins)
    wanted = made.in_shardings()[0]
    opt = jax.jit(tx.init, out_shardings=wanted["opt"])(w)
    start = {"w": jax.device_put(jax.tree.map(np.asarray, w), wanted["w"]), "opt": opt}
    step, losses = made.jit(), []
    for _ in range(5):
        start, value = step(start, x)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(float(loss(w, jnp.asarray(x))), rel=1e-5)
