"""Rules of operations that move elements."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.rules import Aval, OpRule, OpView, rule_for
from tests._proof import Shard, cut


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
