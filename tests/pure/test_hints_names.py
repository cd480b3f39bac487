"""Names of dims of argument leaves: from classes, frameworks' metadata, through optimizer states."""

from __future__ import annotations

from dataclasses import dataclass

import equinox
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from jax.tree_util import register_dataclass

from meshplan.core import ArgumentError
from meshplan.hints import leaf_paths, named_leaves, params


def names_of(tree) -> dict:
    """Names by path, of an argument called x."""
    return {path[2:]: names for path, names in zip(leaf_paths((tree,), ("x",)), named_leaves(tree), strict=True)}


@register_dataclass
@params(up="embed mlp", bias="mlp")
@dataclass
class Mlp:
    up: jax.Array
    bias: jax.Array
    other: jax.Array


def mlp(*stack: int) -> Mlp:
    return Mlp(jnp.ones((*stack, 4, 6)), jnp.ones((*stack, 6)), jnp.ones((*stack, 3)))


def test_leaves_take_the_names_of_their_class_and_others_have_none():
    assert names_of({"layer": mlp(), "count": jnp.ones(4)}) == {
        "count": None, "layer/up": ("embed", "mlp"), "layer/bias": ("mlp",), "layer/other": None,
    }  # fmt: skip


def test_a_stack_of_layers_has_an_unnamed_leading_dim():
    assert names_of(mlp(5)) == {"up": (None, "embed", "mlp"), "bias": (None, "mlp"), "other": None}


def test_a_dim_of_size_one_has_no_name():
    layer = Mlp(jnp.ones((1, 6)), jnp.ones(1), jnp.ones(1))
    assert names_of(layer) == {"up": (None, "mlp"), "bias": None, "other": None}


def test_moments_of_adam_are_named_like_their_parameters():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    found = names_of({"params": mlp(), "opt": jax.eval_shape(tx.init, mlp())})
    assert found["opt/1/0/mu/up"] == found["opt/1/0/nu/up"] == found["params/up"] == ("embed", "mlp")
    assert found["opt/1/0/count"] is None


@pytest.mark.parametrize(
    ("stack", "row", "column"),
    [((), ("embed",), ("mlp",)), ((5,), (None, "embed"), ("embed", "mlp"))],
    ids=["one layer", "stacked: factored over layers and mlp"],
)
def test_factored_moments_keep_the_names_of_the_dims_that_are_left(stack, row, column):
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    found = names_of({"params": mlp(*stack), "opt": jax.eval_shape(tx.init, mlp(*stack))})
    assert found["params/up"] == (None,) * len(stack) + ("embed", "mlp")
    assert (found["opt/0/v_row/up"], found["opt/0/v_col/up"]) == (row, column)
    assert found["opt/0/v/up"] is None


def test_the_innermost_class_that_names_the_leaf_wins():
    @register_dataclass
    @params(**{"mlp.up": "a b", "mlp.other": "c"})
    @dataclass
    class Outer:
        mlp: Mlp

    assert names_of(Outer(mlp())) == {"mlp/up": ("embed", "mlp"), "mlp/bias": ("mlp",), "mlp/other": ("c",)}


def test_a_sequence_of_arrays_shares_the_names_of_its_attribute():
    @register_dataclass
    @params(weights="embed mlp")
    @dataclass
    class Stack:
        weights: list[jax.Array]

    assert names_of(Stack([jnp.ones((4, 6))] * 2)) == {"weights/0": ("embed", "mlp"), "weights/1": ("embed", "mlp")}


def test_more_names_than_dims_are_an_error_that_says_where():
    layer = Mlp(jnp.ones(6), jnp.ones(6), jnp.ones(3))
    with pytest.raises(ArgumentError) as caught:
        named_leaves({"layer": layer})
    assert str(caught.value) == (
        "layer/up has 1 dims, shape (6,), but params(...) on a class above it names 2: 'embed mlp'. "
        "Write one name per dim."
    )


def test_equinox_modules_are_named():
    @params(weight="mlp embed")
    class Layer(equinox.Module):
        weight: jax.Array
        bias: jax.Array

    assert names_of(Layer(jnp.ones((2, 3)), jnp.ones(2))) == {"weight": ("mlp", "embed"), "bias": None}


class Module(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        boxed = nnx.with_partitioning(nnx.initializers.ones_init(), ("embed", None), eager_sharding=False)
        self.marked = nnx.Param(jnp.ones((4, 6)))
        self.plain = nnx.Param(jnp.ones((4, 6)))
        self.linear = nnx.Linear(4, 6, kernel_init=boxed, rngs=rngs)
        self.spec = nnx.Param(jnp.ones((4, 6)), out_sharding=jax.P(("a", "b"), "mlp"), eager_sharding=False)


params(marked="embed mlp")(Module)


def test_nnx_modules_are_named_by_class_and_by_the_metadata_of_variables():
    module = jax.eval_shape(lambda: Module(nnx.Rngs(0)))
    expected = {
        "marked": ("embed", "mlp"), "plain": None, "linear/kernel": ("embed", None), "linear/bias": None,
        "spec": (None, "mlp"),
    }  # fmt: skip
    assert names_of(module) == expected
    moments = names_of(jax.eval_shape(optax.adam(1e-3).init, module))
    assert {path: moments[f"0/mu/{path}"] for path in expected} == expected


def test_an_nnx_state_keeps_the_names_of_its_variables_only():
    state = nnx.split(Module(nnx.Rngs(0)))[1]
    assert names_of(state) == {
        "marked": None, "plain": None, "linear/kernel": ("embed", None), "linear/bias": None, "spec": (None, "mlp"),
    }  # fmt: skip


def test_boxes_of_linen_name_their_arrays():
    kernel = linen.with_partitioning(linen.initializers.ones_init(), ("embed", "mlp"))
    variables = linen.Dense(3, kernel_init=kernel).init(jax.random.key(0), jnp.ones((1, 2)))
    assert names_of(variables) == {"params/bias": None, "params/kernel": ("embed", "mlp")}
