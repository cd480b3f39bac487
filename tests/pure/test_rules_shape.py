"""Rules of operations that move elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from meshplan.rules import Aval, OpRule, OpView, rule_for
from tests._proof import Shard, cut, equation, prove, random_operands

_X = jnp.ones((4, 6))
_Y = jnp.ones((2, 3, 4))

_CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...], int]] = [
    ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (2, 4, 6), (1, 2)), (_X,), 3),
    ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 3), (0, 1)), (_X[:, :1],), 2),
    ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 2), ()), (jnp.ones(()),), 2),
    ("iota", lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1), (), 2),
    ("iota", lambda: lax.iota(jnp.float32, 6), (), 1),
    ("empty", lambda: lax.empty((4, 2), jnp.float32), (), 2),
    ("transpose", lambda x: lax.transpose(x, (2, 0, 1)), (_Y,), 3),
    ("squeeze", lambda x: lax.squeeze(x, (1,)), (_Y[:, :1],), 2),
    ("reshape", lambda x: x.reshape(24), (_Y,), 3),
    ("rev", lambda x: lax.rev(x, (1,)), (_X,), 1),
    ("slice", lambda x: lax.slice(x, (0, 1), (4, 5), (1, 2)), (_X,), 1),
    ("slice", lambda x: lax.slice(x, (1, 0), (3, 6)), (_X,), 1),
    ("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 1))), (_X,), 1),
    ("pad", lambda x, v: lax.pad(x, v, ((-1, 0, 0), (0, 0, 0))), (_X, jnp.ones(())), 1),
    ("concatenate", lambda x, y: lax.concatenate([x, y], 1), (_X, _X[:, :2]), 1),
    ("split", lambda x: lax.split(x, (2, 4), 1), (_X,), 1),
    ("reshape", lambda x: lax.reshape(x, (6, 4), (1, 0)), (_X,), 2),
    ("reshape", lambda x: x.reshape(4, 2, 3), (_X,), 3),
    ("reshape", lambda x: x.reshape(6, 4), (_Y,), 3),
    ("reshape", lambda x: x.reshape(8, 3), (_X,), 3),
    ("reshape", lambda x: x.reshape(1, 4, 1, 6), (_X,), 2),
    ("reshape", lambda x: x.reshape(8, 3), (jnp.ones((6, 4)),), 1),
    ("reshape", lambda x: x.reshape(2, 12), (_Y,), 3),
    ("tile", lambda x: lax.tile(x, (2, 1)), (_X,), 3),
    ("tile", lambda x: lax.tile(x, (3, 2)), (_X,), 4),
    ("stack", lambda x, y: jnp.stack([x, y], 1), (_X, _X), 2),
    ("unstack", lambda x: jnp.unstack(x, axis=1), (_Y,), 2),
]
_RECENT = frozenset({"tile", "stack", "unstack", "empty"})


@pytest.mark.parametrize(("name", "fn", "args", "factors"), _CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(_CASES)])
def test_dims_that_an_operation_moves_as_wholes_split(name: str, fn: Any, args: tuple[Any, ...], factors: int) -> None:
    try:
        eqn = equation(name, fn, *args)
    except (AssertionError, AttributeError):
        if name not in _RECENT:
            raise
        pytest.skip(f"this jax has no {name}")
    rule = prove(eqn, random_operands(eqn))
    assert len(rule.sizes) == factors
    carried = {f for dims in rule.results for d in dims for f in d}
    assert carried == set(range(factors))


def _reshape(left: tuple[int, ...], right: tuple[int, ...]) -> OpRule:
    view = OpView("reshape", (Aval(left, "float32", 4),), (Aval(right, "float32", 4),), {"dimensions": None})
    rule = rule_for(view)
    assert rule is not None
    return rule


def test_heads_split_off_a_dim_are_its_major_factor() -> None:
    rule = _reshape((4, 48), (4, 6, 8))
    assert rule.sizes == (4, 6, 8)
    assert rule.operands == (((0,), (1, 2)),)
    assert rule.results == (((0,), (1,), (2,)),)


def test_mixed_dims_share_their_common_cuts() -> None:
    rule = _reshape((4, 6), (8, 3))
    assert rule.sizes == (4, 2, 3)
    assert rule.operands == (((0,), (1, 2)),)
    assert rule.results == (((0, 1), (2,)),)
    assert rule.whole == ""


def test_a_remainder_without_common_cuts_stays_whole_and_says_so() -> None:
    rule = _reshape((5, 6, 4), (5, 8, 3))
    assert rule.sizes == (5, 2)
    assert rule.operands == (((0,), (1,), ()),)
    assert "[6, 4] and [8, 3]" in rule.whole


def test_an_empty_array_stays_whole() -> None:
    assert _reshape((0, 3), (3, 0)).sizes == ()


@st.composite
def _shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of one size: the prime factors of a number dealt out twice, in any order, with ones between."""

    def deal(primes: list[int]) -> tuple[int, ...]:
        cuts = draw(st.lists(st.booleans(), min_size=len(primes), max_size=len(primes)))
        shape = [1]
        for prime, fresh in zip(primes, cuts, strict=True):
            if fresh:
                shape.append(1)
            shape[-1] *= prime
        return tuple(shape)

    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), max_size=5))
    return deal(primes), deal(draw(st.permutations(primes)))


@settings(max_examples=200)
@given(_shapes())
def test_any_reshape_of_a_shard_is_the_shard_of_the_reshape(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    left, right = shapes
    rule = _reshape(left, right)
    x = np.arange(math.prod(left)).reshape(left)
    for factor, size in enumerate(rule.sizes):
        for index in range(size):
            shard = Shard(factor, size, index)
            wanted = cut(x.reshape(right), rule.results[0], rule.sizes, shard)
            np.testing.assert_array_equal(cut(x, rule.operands[0], rule.sizes, shard).reshape(wanted.shape), wanted)


@settings(max_examples=100)
@given(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4), st.data())
def test_merging_dims_keeps_every_one_of_them_as_a_factor(dims: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(dims) - 1))
    merged = (*dims[:at], math.prod(dims[at:]))
    for left, right in ((tuple(dims), merged), (merged, tuple(dims))):
        rule = _reshape(left, right)
        assert rule.sizes == tuple(dims)
        assert rule.whole == ""


def test_padding_with_zero_is_linear_in_the_operand_alone() -> None:
    x, zero = Aval((4,), "float32", 4), Aval((), "float32", 4)
    params = {"padding_config": ((0, 2, 0),)}
    for value, linear in ((np.float32(0), (0,)), (np.float32(1), (0, 1)), (None, (0, 1))):
        rule = rule_for(OpView("pad", (x, zero), (Aval((6,), "float32", 4),), params, (None, value)))
        assert rule is not None
        assert rule.linear == linear
