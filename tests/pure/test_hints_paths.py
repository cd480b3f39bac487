"""Paths of argument leaves and the patterns that find them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.tree_util import register_dataclass

from meshplan.core import ArgumentError, PinError
from meshplan.hints import argument_names, find, leaf_paths, match

LAYERS = [
    f"state/{kind}/layers/{i}/{leaf}"
    for kind in ("opt_state/0/mu", "params")
    for i in range(12)
    for leaf in ("attn/q/kernel", "attn/q/bias", "mlp/up/kernel", "mlp/up/bias")
]
PATHS = (*LAYERS, "state/params/embed", "batch/tokens", "batch/targets")


@register_dataclass
@dataclass
class Linear:
    value: jax.Array
    bias: jax.Array | None


def test_paths_are_argument_keys_indices_and_attributes():
    layers = [Linear(jnp.ones(2), None), Linear(jnp.ones(2), jnp.ones(1))]
    paths = leaf_paths(({"params": layers, "step": 0}, (jnp.ones(1),)), ("state", "rest"))
    assert paths == (
        "state/params/0/value", "state/params/1/value", "state/params/1/bias", "state/step", "rest/0",
    )  # fmt: skip


def test_boxes_of_nnx_leave_no_entry_and_a_field_called_value_does():
    class Module(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            self.blocks = nnx.List([nnx.Param(jnp.ones(1))])
            self.value = nnx.Param(jnp.ones(1))

    expected = {"m/up/kernel", "m/up/bias", "m/blocks/0", "m/value"}
    assert set(leaf_paths((Module(),), ("m",))) == expected
    assert set(leaf_paths((nnx.split(Module())[1],), ("m",))) == expected


def test_paths_of_an_optax_state_end_like_those_of_the_parameters():
    params = {"mlp": {"up": jnp.ones((2, 3))}}
    paths = leaf_paths((optax.adam(1e-3).init(params),), ("opt",))
    assert paths == ("opt/0/count", "opt/0/mu/mlp/up", "opt/0/nu/mlp/up")


TREES = st.recursive(
    st.just(0) | st.none(),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    | st.tuples(inner, inner)
    | st.builds(Linear, inner, inner),
    max_leaves=12,
)


@given(TREES, TREES)
@settings(max_examples=80, deadline=None)
def test_there_is_one_path_per_leaf_in_flatten_order(first, second):
    leaves, treedef = jax.tree.flatten((first, second))
    numbered = jax.tree.unflatten(treedef, range(len(leaves)))
    paths = leaf_paths(numbered, ("x", "y"))
    assert len(set(paths)) == len(paths) == len(leaves)
    for i, path in enumerate(paths):
        node = {"x": numbered[0], "y": numbered[1]}
        for entry in path.split("/"):
            if isinstance(node, dict):
                node = node[entry]
            else:
                node = getattr(node, entry) if isinstance(node, Linear) else node[int(entry)]
        assert node == i


def test_keyword_arguments_follow_in_the_order_of_their_names():
    args, kwargs = (jnp.ones(1),), {"z": jnp.ones(1), "key": {"a": jnp.ones(1)}}
    assert leaf_paths(args, ("x",), kwargs) == ("x", "key/a", "z")
    assert len(jax.tree.leaves((args, kwargs))) == 3


def test_argument_names_come_from_the_signature():
    def step(state, /, batch, *rest, key=None):
        return state

    assert argument_names(step, 2) == ("state", "batch")
    assert argument_names(step, 4) == ("state", "batch", "rest/0", "rest/1")
    assert argument_names(jax.jit(step), 1) == ("state",)
    assert argument_names(functools.partial(step, 1), 1) == ("batch",)


def test_more_arguments_than_the_step_takes_are_an_error():
    with pytest.raises(ArgumentError, match=r"<lambda> takes 1 positional arguments \(state\), 2 were given"):
        argument_names(lambda state: state, 2)
    with pytest.raises(ArgumentError, match=r"2 arguments, 1 names \(x\)"):
        leaf_paths((1, 2), ("x",))


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("batch.tokens", "batch/tokens", True),
        ("batch/tokens", "batch/tokens", True),
        ("tokens", "batch/tokens", True),
        ("okens", "batch/tokens", False),
        ("batch", "batch/tokens", False),
        (r"params/.*/kernel", "state/params/layers/0/up/kernel", True),
        (r"params/.*/kernel", "state/params/kernel", False),
        (r"layers/\d+/up|down", "state/layers/7/up", True),
        (r"layers/\d+/up|down", "state/down", True),
        (r"(?i)STATE/.*", "state/down", True),
    ],
)
def test_a_pattern_is_the_whole_path_or_a_whole_end_of_it(pattern, path, expected):
    assert match(pattern, path) is expected


@given(st.lists(st.text(alphabet="ab.+(", min_size=1, max_size=3), min_size=1, max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_every_end_of_a_path_matches_it_and_no_part_of_an_entry_does(entries, data):
    path = "/".join(entries)
    start = data.draw(st.integers(0, len(entries) - 1))
    assert match(re.escape("/".join(entries[start:])), path)
    assert not match(re.escape("x" + "/".join(entries[start:])), path)


def test_find_returns_every_index():
    assert find("batch.*", PATHS) == (len(PATHS) - 2, len(PATHS) - 1)
    assert len(find(r"params/.*/kernel", PATHS)) == 24
    assert len(find(r"kernel", PATHS)) == 48


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("params/.*/kernal", "Nearest: state/params/layers/0/attn/q/kernel, state/params/layers/0/mlp/up/kernel."),
        ("batch.tokns", "Nearest: batch/tokens."),
        (r"params/embd\w", "Nearest: state/params/embed."),
        ("qqqq", "Known: state/opt_state/0/mu/layers/0/attn/q/kernel, "),
    ],
)
def test_a_pin_that_matches_nothing_names_the_nearest_paths(pattern, hint):
    with pytest.raises(PinError) as caught:
        find(pattern, PATHS)
    assert str(caught.value).startswith(f"pin {pattern!r} matches no argument. {hint}")


def test_a_malformed_regex_is_a_pin_error():
    with pytest.raises(PinError, match=r"pin 'params/\(' is no regular expression: missing \), unterminated"):
        match("params/(", "state/params/w")
