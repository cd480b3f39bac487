"""Rules of dots, reductions and convolutions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from meshplan.rules import Aval, OpRule, OpView, rule_for, with_halos
from tests._proof import equation, prove, random_operands, view_of
from tests._rule_cases import CONVOLUTIONS, DOTS, REDUCTIONS, UNCOMBINED, Case


def test_a_dot_counts_two_operations_per_product() -> None:
    view = view_of(equation("dot_general", lambda x, y: x @ y, jnp.ones((4, 6)), jnp.ones((6, 3))))
    rule = rule_for(view)
    assert rule is not None
    assert rule.flops == 2 * 4 * 6 * 3
    assert rule.reduced_factors() == (0,)
    assert rule.sizes[0] == 6


@pytest.mark.parametrize("case", REDUCTIONS, ids=[c.name for c in REDUCTIONS])
def test_partial_reductions_combine(case: Case) -> None:
    rule = rule_for(view_of(equation(case.name, case.fn, *case.args)))
    assert rule is not None
    assert rule.sizes == (2, 3, 4)
    assert rule.reduced_factors()


@pytest.mark.parametrize("case", UNCOMBINED, ids=[c.name for c in UNCOMBINED])
def test_reductions_without_a_combination_keep_their_dims_whole(case: Case) -> None:
    rule = rule_for(view_of(equation(case.name, case.fn, *case.args)))
    assert rule is not None
    assert rule.sizes == (2, 4)
    assert rule.reduced_factors() == ()
    assert rule.whole


# ------------------------------------------------------------------------------------------- ragged dots


def _ragged(k: int) -> OpRule:
    case = [c for c in DOTS if c.name == "ragged_dot_general"][k]
    rule = rule_for(view_of(equation(case.name, case.fn, *case.args)))
    assert rule is not None
    return rule


def test_experts_split_their_matrices_and_tokens_split_over_all_experts() -> None:
    rule = _ragged(0)  # rows features, experts features hidden -> rows hidden
    assert rule.sizes == (4, 8, 4, 6)
    assert rule.operands == (((1,), (0,)), ((2,), (0,), (3,)), ((),))
    assert rule.results == (((1,), (3,)),)
    assert rule.reduced_factors() == (0, 2)
    assert rule.flops == 2 * 8 * 4 * 6


def test_the_groups_of_a_ragged_contraction_lead_the_result() -> None:
    rule = _ragged(1)
    assert rule.results[0][0] != ()
    assert rule.sizes[rule.results[0][0][0]] == 4
    assert len(rule.reduced_factors()) == 1


def test_group_sizes_of_batches_split_with_the_batch() -> None:
    rule = _ragged(4)
    assert rule.operands[2] == (rule.operands[0][0], ())


# ------------------------------------------------------------------------------------------ convolutions


def _rule_of(name: str) -> OpRule:
    case = CONVOLUTIONS[name]
    rule = rule_for(view_of(equation(case.name, case.fn, *case.args)))
    assert rule is not None
    return rule


_SIZES = {
    "plain": (4, 6, 2), "depthwise": (4, 2, 2), "groups_of_several": (2, 2, 3, 2), "batch_groups": (4, 6, 2),
    "batch_groups_of_several": (4, 6, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", list(_SIZES))
def test_channels_groups_and_batch_of_a_convolution_split(name: str) -> None:
    rule = _rule_of(name)
    assert rule.sizes == _SIZES[name]
    assert rule.anchor


def test_a_convolution_counts_its_window() -> None:
    rule = _rule_of("plain")
    assert rule.flops == 2 * (2 * 6) * 4 * (6 * 3 - 2), "the padding at both ends is not multiplied"
    assert "window" in rule.whole


def test_the_gradients_of_a_strided_convolution_count_as_much_as_itself() -> None:
    """The zeros between the inputs of a dilated convolution are not multiplied."""

    def convolve(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, (2, 2), ((0, 1), (0, 1)))

    def flops(fn: Any) -> list[float]:
        jaxpr = jax.make_jaxpr(fn)(jnp.ones((2, 8, 16, 16)), jnp.ones((4, 8, 3, 3))).jaxpr
        rules = [rule_for(view_of(e)) for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
        return [rule.flops for rule in rules if rule is not None]

    (forward,) = flops(convolve)
    met = sum(i * 2 + t < 16 for i in range(8) for t in range(3))
    assert forward == 2 * (2 * 4) * 8 * met**2
    assert sorted(flops(jax.grad(lambda x, k: convolve(x, k).sum(), (0, 1)))) == [forward] * 3


def test_a_window_says_how_many_rows_a_shard_needs_of_others() -> None:
    (halo,) = _rule_of("plain").halos
    assert (halo.size, halo.out, halo.window, halo.low) == (6, 6, 3, 1)
    assert [halo.received(n) for n in (1, 2, 3)] == [0, 1, 2]
    assert halo.rows(0, 3) == (0, 3)
    assert halo.rows(1, 3) == (1, 5)
    assert _rule_of("strided").halos[0].received(2) == 1
    (wide,) = _rule_of("dilated_window").halos
    assert wide.received(4) == 4


def test_patches_split_without_an_exchange() -> None:
    rule = _rule_of("patches")
    assert rule.halos == ()
    assert rule.whole == ""
    assert rule.results[0] == ((2,), (3,), (4,), (1,))
    assert rule.operands[0][1:3] == ((3,), (4,))
    assert [rule.sizes[f] for f in (3, 4)] == [2, 3]


def test_halos_become_factors_on_demand() -> None:
    rule = _rule_of("channels_last")
    extended, halos = with_halos(rule)
    assert len(extended.sizes) == len(rule.sizes) + 2
    assert [extended.sizes[f] for f in halos] == [4, 6]
    assert extended.operands[0][1:3] == extended.results[0][1:3] == ((3,), (4,))


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
