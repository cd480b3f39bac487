"""Leaves of optax states take the names of the parameters that they follow, for every optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import given
from hypothesis import strategies as st

from meshplan.hints import followed_leaves, leaf_paths, named_leaves, walk
from meshplan.hints.adapters import factored_dims
from tests._optimizers import parameters, public_optimizers

NAMES = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "bias": ("out",)}
OPTIMIZERS = public_optimizers()
# leaves whose dims are none of the parameter's: projections to a lower rank, and moments there
OWN = {"contrib.galore": ("projector", "base_optimizer_state")}


def boxed() -> dict[str, Any]:
    return {k: linen.LogicallyPartitioned(v, NAMES[k]) for k, v in jax.eval_shape(parameters).items()}


def test_all_optimizers_of_optax_are_there() -> None:
    assert len([n for n in OPTIMIZERS if "." not in n]) >= 29
    assert {"adam", "adafactor", "lbfgs", "sm3", "lion", "yogi", "contrib.muon", "contrib.prodigy"} <= set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_named_like_their_parameters_although_the_boxes_are_gone(name: str) -> None:
    opt = jax.eval_shape(OPTIMIZERS[name]().init, jax.eval_shape(parameters))
    state = {"w": boxed(), "opt": opt}
    paths, names, views = leaf_paths((state,), ("s",)), named_leaves(state), list(walk(state))
    wrong = []
    for path, found, view in zip(paths, names, views, strict=True):
        key = next((k for k in NAMES if k in path.split("/")), None)
        shape = parameters()[key].shape if key else ()
        if any(part in path for part in OWN.get(name, ())):
            continue
        if key is None:
            assert found is None
        elif view.shape[-len(shape) :] == shape:  # a moment, or a memory of several
            wrong += [path] if found != (None,) * (len(view.shape) - len(shape)) + NAMES[key] else []
        elif np.prod(view.shape) > 1:  # factored: every dim that is left has its own name
            sizes = dict(zip(NAMES[key], shape, strict=True))
            fits = found is not None and all(sizes[n] == m for n, m in zip(found, view.shape, strict=True) if n)
            wrong += [] if fits else [path]
    assert wrong == []


def test_a_factored_moment_of_a_square_parameter_is_told_by_its_field() -> None:
    w = {"w": jnp.ones((8, 8))}
    state = {"w": {"w": linen.LogicallyPartitioned(w["w"], ("row", "column"))}}
    state["opt"] = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=4).init, w)
    found = dict(zip(leaf_paths((state,), ("s",)), named_leaves(state), strict=True))
    assert (found["s/opt/0/v_row/w"], found["s/opt/0/v_col/w"]) == (("row",), ("column",))


@given(st.lists(st.integers(4, 7), min_size=2, max_size=4))
def test_factored_dims_are_those_that_optax_keeps(shape: list[int]) -> None:
    state = jax.eval_shape(optax.scale_by_factored_rms(min_dim_size_to_factor=2).init, jnp.zeros(shape))
    for field in ("v_row", "v_col"):
        dims = factored_dims(field, tuple(shape))
        assert dims is not None
        assert tuple(shape[d] for d in dims) == getattr(state, field).shape


def test_a_users_transformation_inside_a_chain_and_masked_parts_are_followed_too() -> None:
    w = jax.eval_shape(parameters)
    tx = optax.chain(
        optax.clip(1.0), optax.masked(optax.trace(0.9), {"up": True, "down": False, "bias": True}),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    )  # fmt: skip
    state = {"opt": jax.eval_shape(optax.MultiSteps(tx, 2).init, w), "w": boxed()}
    found = dict(zip(leaf_paths((state,), ("s",)), named_leaves(state), strict=True))
    assert {p.rsplit("/", 1)[1] for p, names in found.items() if "opt" in p and names} == set(NAMES)
    for path, names in found.items():
        key = path.rsplit("/", 1)[1]
        assert names == NAMES.get(key), path


def test_a_bare_array_is_followed_where_its_shape_alone_tells() -> None:
    w = jnp.ones((4, 6))
    views = list(walk({"opt": optax.adam(1e-3).init(w), "w": w, "x": jnp.ones((3, 4))}))
    found = followed_leaves(views)
    assert {views[i].keys: views[f.parameter].keys for i, f in found.items()} == {
        ("opt", "0", "mu"): ("w",), ("opt", "0", "nu"): ("w",),
    }  # fmt: skip
    assert followed_leaves(list(walk({"opt": optax.adam(1e-3).init(w), "w": w, "x": w}))) == {}, "two could be it"


def test_factored_moments_of_an_nnx_optimizer_are_named_after_a_split() -> None:
    class Module(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            kernel = nnx.with_partitioning(nnx.initializers.ones_init(), ("embed", "mlp"), eager_sharding=False)
            self.linear = nnx.Linear(8, 12, kernel_init=kernel, rngs=rngs)

    module = Module(nnx.Rngs(0))
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    state = nnx.split((module, nnx.Optimizer(module, tx, wrt=nnx.Param)))[1]
    found = dict(zip(leaf_paths((state,), ("s",)), named_leaves(state), strict=True))
    assert found["s/0/linear/kernel"] == ("embed", "mlp")
    assert found["s/1/opt_state/0/v_row/linear/kernel"] == ("embed",)
    assert found["s/1/opt_state/0/v_col/linear/kernel"] == ("mlp",)
