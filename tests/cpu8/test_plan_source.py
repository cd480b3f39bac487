"""The source of a plan, run on eight devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshplan.plan import to_source
from tests._plans import arguments, make_plan


def step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    params = state["params"]
    x = params["embed"][batch["tokens"]]
    for layer in params["layers"]:
        x = x + (x @ layer["up"]).sum(-1, keepdims=True) * layer["scale"]
    mu = jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, state["mu"], params)
    return {"mu": mu, "params": jax.tree.map(lambda p, m: p - 0.1 * m, params, mu)}, {"loss": x.mean()}


def real_arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def leaf(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32) * 0.01

    params = {"embed": leaf(512, 64), "layers": [{"up": leaf(64, 256), "scale": leaf(64)} for _ in range(3)]}
    state = {"mu": jax.tree.map(jnp.zeros_like, params), "params": params}
    return state, {"tokens": jnp.asarray(rng.integers(0, 512, (16, 32)), jnp.int32)}


def test_the_source_places_every_array_as_planned() -> None:
    data = make_plan(arguments=arguments(3))
    names: dict[str, Any] = {}
    exec(compile(to_source(data), "plan.py", "exec"), names)
    args = real_arguments()
    mesh = names["make_mesh"]()
    wanted = {a.path: a.spec.partition_spec() for a in data.arguments}
    found = {
        "/".join([root, *(jax.tree_util.keystr((k,), simple=True) for k in keys)]): sharding.spec
        for root, tree in zip(("state", "batch"), names["in_shardings"](args, mesh), strict=True)
        for keys, sharding in jax.tree_util.tree_leaves_with_path(tree)
    }
    assert found == wanted
    expected = jax.jit(step)(*args)
    planned = names["jit"](step, args, mesh)(*jax.device_put(args, names["in_shardings"](args, mesh)))
    for got, alone in zip(jax.tree.leaves(planned), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, alone, rtol=1e-5, atol=1e-7)
    assert planned[0]["params"]["layers"][1]["up"].sharding.spec == wanted["state/params/layers/1/up"]
    assert len(planned[0]["params"]["embed"].sharding.device_set) == 8
