"""Names written on functions and classes, and workloads."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import NamedTuple

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.tree_util import register_dataclass

from meshplan.core import ArgumentError, SpecError
from meshplan.hints import Workload, dims, params, params_of, tagged_names
from meshplan.hints._patterns import parse_group, parse_signature


@dims("batch embed, embed mlp -> batch mlp")
def layer(x, w):
    return jnp.tanh(x @ w)


def plain(x, w):
    return jnp.tanh(x @ w)


X, W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), np.linspace(0, 1, 6, dtype=np.float32).reshape(3, 2)


def test_dims_tags_arguments_and_results_in_the_jaxpr():
    tags = [eqn.params["name"] for eqn in jax.make_jaxpr(layer)(X, W).eqns if eqn.primitive.name == "name"]
    assert [tagged_names(tag) for tag in tags] == [("batch", "embed"), ("embed", "mlp"), ("batch", "mlp")]


def test_a_tag_of_someone_else_names_nothing():
    assert tagged_names("attention_out") is None


TRANSFORMS = {
    "jit": jax.jit,
    "grad": lambda f: jax.jit(jax.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1))),
    "vmap": lambda f: lambda x, w: jax.vmap(f, in_axes=(0, None))(jnp.stack([x, 2 * x]), w),
    "remat": lambda f: jax.grad(lambda x, w: jax.checkpoint(f)(x, w).sum(), argnums=1),
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda c, _: (f(c, w @ w.T), None), x, None, length=3)[0],
    "hessian": lambda f: jax.hessian(lambda x, w: f(x, w).sum(), argnums=1),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_dims_changes_no_value_and_no_gradient(name):
    transform = TRANSFORMS[name]
    jax.tree.map(np.testing.assert_array_equal, transform(layer)(X, W), transform(plain)(X, W))


def test_dims_takes_keywords_self_blanks_and_open_groups():
    class Model:
        @dims("_, ... embed -> ... embed, _")
        def __call__(self, config, x):
            return x + 1, {"anything": config}

    jaxpr = jax.make_jaxpr(lambda x: Model()(x=x, config=None)[0])(np.ones((2, 3, 4)))
    assert [eqn.params["name"] for eqn in jaxpr.eqns if eqn.primitive.name == "name"] == ["meshplan:_ _ embed"] * 2


def test_a_named_tuple_of_results_stays_one():
    class Pair(NamedTuple):
        left: jax.Array
        right: jax.Array

    result = dims("batch -> batch, _")(lambda x: Pair(x, x))(np.ones(3))
    assert isinstance(result, Pair)


def test_a_rank_mismatch_names_function_argument_pattern_and_shape():
    with pytest.raises(ArgumentError) as caught:
        layer(np.ones((5, 4, 3)), W)
    assert str(caught.value) == (
        "layer: argument 'x' has 3 dims, shape (5, 4, 3), but the pattern 'batch embed, embed mlp -> batch mlp' "
        "names 2: 'batch embed'. Write one name per dim, _ for a dim without a name."
    )


def test_a_result_of_another_rank_is_an_error():
    with pytest.raises(ArgumentError, match=r"the result has 0 dims, shape \(\), but the pattern 'a -> a' names 1"):
        dims("a -> a")(lambda x: x.sum())(np.ones(3))


def test_a_pytree_where_an_array_is_named_is_an_error():
    with pytest.raises(ArgumentError, match=r"argument 'x' is a dict, not an array, .*names its dims 'batch'. Write _"):
        dims("batch -> _")(lambda x: x)({"a": X})


def test_another_number_of_results_is_an_error():
    with pytest.raises(ArgumentError, match="returned one ArrayImpl, but the pattern 'a -> a, a' has 2 groups"):
        dims("a -> a, a")(lambda x: x + 1)(jnp.ones(3))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("batch embed", "pattern 'batch embed': 0 arrows. Write 'names of arguments -> names of results'."),
        ("a -> b -> c", "pattern 'a -> b -> c': 2 arrows"),
        ("a, , b -> c", "pattern 'a, , b -> c': an empty group of names. Write _"),
        ("a -> ", "pattern 'a -> ': an empty group of names"),
        ("a-b c -> a", "pattern 'a-b c -> a': 'a-b' is no name of a dim"),
        ("embed embed -> a", "pattern 'embed embed -> a': 'embed' names two dims of one array"),
        ("a ... -> a", "pattern 'a ... -> a': '...' is no name of a dim"),
        ("a, b, c -> a", "has 3 groups of arguments, but plain takes 2 (x, w)"),
    ],
)
def test_a_malformed_pattern_is_quoted(pattern, message):
    with pytest.raises(SpecError) as caught:
        dims(pattern)(plain)
    assert message in str(caught.value)


@given(st.lists(st.sampled_from(["batch", "seq", "embed", "kv_heads", "_"]), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_a_group_reads_as_it_is_written(words):
    named = [word for word in words if word != "_"]
    text = "  ".join(words)
    if len(set(named)) < len(named):
        with pytest.raises(SpecError):
            parse_group(text, "p")
    else:
        assert parse_group(text, "p").expand(len(words)) == tuple(None if w == "_" else w for w in words)
        assert parse_group("... " + text, "p").expand(len(words) + 2) == (None, None, *parse_group(text, "p").names)
        assert parse_signature(f"{text}, _ -> {text}").results == (parse_group(text, "p"),)


def test_params_marks_any_pytree_class_and_wraps_nothing():
    @params(up="embed mlp")
    @dataclass
    class Plain:
        up: jax.Array

    @params(up="embed mlp")
    class Flax(nnx.Module):
        def __init__(self):
            self.up = nnx.Param(jnp.ones((2, 3)))

    @params(up="embed mlp")
    class Equinox(equinox.Module):
        up: jax.Array

    for cls in (Plain, Flax, Equinox):
        assert params_of(cls) == {"up": ("embed", "mlp")}
    x = jnp.ones((2, 3))
    assert Plain(x).up is x
    assert Equinox(x).up is x


def test_params_of_a_subclass_add_to_its_bases_without_touching_them():
    @params(up="embed mlp", bias="mlp")
    class Base:
        pass

    @params(bias="_", down="mlp embed")
    class Sub(Base):
        pass

    assert params_of(Sub) == {"up": ("embed", "mlp"), "bias": (None,), "down": ("mlp", "embed")}
    assert params_of(Base) == {"up": ("embed", "mlp"), "bias": ("mlp",)}


def test_params_on_an_unknown_field_names_the_nearest():
    with pytest.raises(SpecError, match=r"params\(upp='embed mlp'\): Mlp has no field 'upp'. Nearest: up."):

        @params(upp="embed mlp")
        @register_dataclass
        @dataclass
        class Mlp:
            up: jax.Array
            down: jax.Array


def test_params_on_a_function_is_an_error():
    with pytest.raises(ArgumentError, match=r"names attributes of a class.*Use dims\(...\) for it"):
        params(up="embed mlp")(plain)  # type: ignore[type-var]


def test_a_workload_checks_its_arguments():
    with pytest.raises(ArgumentError, match="args is a dict, not a tuple"):
        Workload(plain, {"x": X})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"donate_argnums \(2,\) holds 2, but there are 2 arguments"):
        Workload(plain, (X, W), donate_argnums=(2,))


def test_hints_import_no_framework():
    code = "import sys, meshplan.hints; print([m for m in ('flax', 'optax', 'equinox', 'scipy') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
