"""Rules of dots, reductions and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from meshplan.rules import Aval, OpView, rule_for
from tests._proof import equation, prove, random_operands, view_of

_X = jnp.ones((2, 3, 4))
_DOTS = ["ij,jk->ik", "bij,bjk->bik", "bqhd,bkhd->bhqk", "i,i->", "ij,kl->ikjl", "abij,jbka->abik", "ij,ij->ij"]
_SIZES = {"b": 2, "i": 4, "j": 6, "k": 3, "q": 2, "h": 2, "d": 4, "l": 2, "a": 2}


@pytest.mark.parametrize("text", _DOTS)
def test_every_dim_of_a_dot_is_a_factor(text: str) -> None:
    terms = text.split("->")[0].split(",")
    operands = [jnp.ones([_SIZES[c] for c in term]) for term in terms]
    try:
        eqn = equation("dot_general", lambda x, y: jnp.einsum(text, x, y), *operands)
    except AssertionError:
        assert text == "ij,ij->ij"  # a plain product in jax
        return
    rule = prove(eqn, random_operands(eqn))
    assert rule.anchor
    assert rule.linear == (0, 1)
    assert sorted(rule.sizes) == sorted(_SIZES[c] for c in {*terms[0], *terms[1]})


def test_a_dot_counts_two_operations_per_product() -> None:
    view = view_of(equation("dot_general", lambda x, y: x @ y, jnp.ones((4, 6)), jnp.ones((6, 3))))
    rule = rule_for(view)
    assert rule is not None
    assert rule.flops == 2 * 4 * 6 * 3
    assert rule.reduced_factors() == (0,)
    assert rule.sizes[0] == 6


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("reduce_sum", lambda x: x.sum((0, 2))),
        ("reduce_prod", lambda x: x.prod(1)),
        ("reduce_max", lambda x: x.max((1, 2))),
        ("reduce_min", lambda x: x.min(0)),
        ("reduce_and", lambda x: (x > 0.5).all(1)),
        ("reduce_or", lambda x: (x > 0.5).any((0, 1))),
    ],
)
def test_partial_reductions_combine(name: str, fn: Callable[..., Any]) -> None:
    eqn = equation(name, fn, _X)
    rule = prove(eqn, random_operands(eqn))
    assert rule.sizes == (2, 3, 4)
    assert rule.reduced_factors()


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("argmax", lambda x: lax.argmax(x, 1, jnp.int32)),
        ("argmin", lambda x: lax.argmin(x, 1, jnp.int32)),
        ("reduce_xor", lambda x: lax.reduce_xor(x.astype(jnp.uint32), (1,))),
        ("reduce", lambda x: lax.reduce(x, jnp.float32(1), lambda a, b: a * b + 1, (1,))),
    ],
)
def test_reductions_without_a_combination_keep_their_dims_whole(name: str, fn: Callable[..., Any]) -> None:
    eqn = equation(name, fn, _X)
    rule = prove(eqn, random_operands(eqn))
    assert rule.sizes == (2, 4)
    assert rule.reduced_factors() == ()
    assert rule.whole


# ------------------------------------------------------------------------------------------- ragged dots


def test_rows_of_groups_stay_whole_in_a_ragged_dot() -> None:
    sizes = jnp.array([3, 5])
    eqn = equation("ragged_dot_general", lax.ragged_dot, jnp.ones((8, 4)), jnp.ones((2, 4, 6)), sizes)
    left, right, _ = random_operands(eqn)
    rule = prove(eqn, [left, right, sizes])
    assert rule.sizes == (4, 6)
    assert rule.reduced_factors() == (0,)
    assert rule.flops == 2 * 8 * 4 * 6
    assert "ragged" in rule.whole


def test_a_ragged_contraction_keeps_its_groups_whole() -> None:
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    sizes = jnp.array([3, 5])
    eqn = equation(
        "ragged_dot_general",
        lambda x, y, g: lax.ragged_dot_general(x, y, g, numbers), jnp.ones((8, 4)), jnp.ones((8, 6)), sizes,
    )  # fmt: skip
    left, right, _ = random_operands(eqn)
    rule = prove(eqn, [left, right, sizes])
    assert rule.sizes == (4, 6)
    assert rule.results == (((), (0,), (1,)),)


# ------------------------------------------------------------------------------------------ convolutions


def _conv(x: tuple[int, ...], w: tuple[int, ...], **options: Any) -> Any:
    padding = options.pop("padding", "SAME")
    strides = options.pop("strides", (1,) * (len(x) - 2))
    return equation(
        "conv_general_dilated",
        lambda a, b: lax.conv_general_dilated(a, b, strides, padding, **options), jnp.ones(x), jnp.ones(w),
    )  # fmt: skip


_CONVS = {
    "plain": (_conv((2, 4, 5), (6, 4, 3)), (2, 6, 4)),
    "strided": (_conv((2, 4, 6), (6, 4, 3), strides=(2,), padding="VALID"), (2, 6, 4)),
    "pointwise": (_conv((2, 4, 6, 3), (2, 4, 1, 1)), (2, 2, 4, 6, 3)),
    "channels_last": (
        _conv((2, 5, 5, 4), (3, 3, 4, 6), dimension_numbers=("NHWC", "HWIO", "NHWC")), (2, 6, 4),
    ),
    "depthwise": (_conv((2, 4, 5), (8, 1, 3), feature_group_count=4), (2, 4, 2)),
    "groups_of_several": (_conv((2, 4, 5), (6, 2, 3), feature_group_count=2), (2,)),
    "batch_groups": (_conv((4, 6, 5), (8, 6, 3), batch_group_count=4), (6, 4, 2)),
    "batch_groups_of_several": (_conv((8, 6, 5), (4, 6, 3), batch_group_count=4), (6, 4, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", list(_CONVS))
def test_channels_and_batch_of_a_convolution_split(name: str) -> None:
    eqn, sizes = _CONVS[name]
    rule = prove(eqn, random_operands(eqn))
    assert rule.sizes == sizes
    assert rule.anchor


def test_a_convolution_counts_its_window() -> None:
    rule = rule_for(view_of(_CONVS["plain"][0]))
    assert rule is not None
    assert rule.flops == 2 * (2 * 6 * 5) * (4 * 3)
    assert "window" in rule.whole


def test_the_gradients_of_a_convolution_hold_too() -> None:
    def loss(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (2,), "SAME", feature_group_count=2).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((4, 2, 6)), jnp.ones((4, 1, 3)))
    convs = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    assert len(convs) >= 2
    for eqn in convs:
        assert prove(eqn, random_operands(eqn)).sizes


@settings(max_examples=60)
@given(st.data())
def test_factors_of_any_dot_are_its_einsum_letters(data: st.DataObject) -> None:
    """The rule of a dot from its dimension numbers alone, against the letters they stand for."""
    letters = data.draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1, max_size=6))
    kinds = {c: data.draw(st.sampled_from(["batch", "contract", "left", "right"])) for c in letters}
    sizes = {c: data.draw(st.sampled_from([1, 2, 3, 5])) for c in letters}
    left = data.draw(st.permutations([c for c in letters if kinds[c] != "right"]))
    right = data.draw(st.permutations([c for c in letters if kinds[c] != "left"]))
    contract = [c for c in letters if kinds[c] == "contract"]
    batch = [c for c in letters if kinds[c] == "batch"]
    out = [*batch, *(c for c in left if kinds[c] == "left"), *(c for c in right if kinds[c] == "right")]
    numbers = tuple(tuple(tuple(side.index(c) for c in group) for side in (left, right)) for group in (contract, batch))
    avals = [Aval(tuple(sizes[c] for c in term), "float32", 4) for term in (left, right, out)]
    rule = rule_for(OpView("dot_general", (avals[0], avals[1]), (avals[2],), {"dimension_numbers": numbers}))
    assert rule is not None
    letter_of = {}
    for term, dims in zip((left, right, out), (*rule.operands, *rule.results), strict=True):
        for c, entry in zip(term, dims, strict=True):
            assert len(entry) == (sizes[c] > 1)
            for f in entry:
                assert letter_of.setdefault(f, c) == c
                assert rule.sizes[f] == sizes[c]
    assert len(letter_of) == len(rule.sizes) == sum(n > 1 for n in sizes.values())
    assert {letter_of[f] for f in rule.reduced_factors()} == {c for c in contract if sizes[c] > 1}
