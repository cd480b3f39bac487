"""Rules of elementwise operations, and what keeps the proofs honest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshplan.rules import JOINTLY_LINEAR, TABLE, Aval, OpRule, OpView, rule_for, whole_rule
from tests._proof import equation, prove, random_operands, registered, view_of
from tests._rule_cases import ELEMENTWISE, Case


@pytest.mark.parametrize("case", ELEMENTWISE, ids=[f"{c.name}-{i}" for i, c in enumerate(ELEMENTWISE)])
def test_every_dim_of_an_elementwise_operation_splits(case: Case) -> None:
    """The proof is in test_rules_proofs; here: nothing is left out."""
    if case.name not in registered():
        pytest.skip(f"this jax has no {case.name}")
    rule = rule_for(view_of(equation(case.name, case.fn, *case.args)))
    assert rule is not None
    assert all(f for dims in rule.results for f in dims[:1])


def test_scalars_and_broadcast_operands_stay_whole_where_they_are_broadcast() -> None:
    view = OpView(
        "add",
        (Aval((4, 1), "float32", 4), Aval((), "float32", 4), Aval((4, 6), "float32", 4)),
        (Aval((4, 6), "float32", 4),),
        {},
    )
    rule = rule_for(view)
    assert rule is not None
    assert rule.operands == (((0,), ()), (), ((0,), (1,)))
    assert rule.results == (((0,), (1,)),)


def test_a_sum_is_linear_only_jointly_and_a_product_in_either_operand() -> None:
    def linear(name: str) -> tuple[int, ...]:
        aval = Aval((4,), "float32", 4)
        rule = rule_for(OpView(name, (aval, aval), (aval,), {}))
        assert rule is not None
        return rule.linear

    assert {"add", "add_any", "sub"} <= JOINTLY_LINEAR
    assert linear("add") == linear("sub") == linear("add_any") == (0, 1)
    assert linear("mul") == (0, 1)
    assert "mul" not in JOINTLY_LINEAR
    assert linear("div") == (0,)
    assert linear("max") == ()


def test_integer_division_and_rounding_conversions_are_not_linear() -> None:
    ints, floats = Aval((4,), "int32", 4), Aval((4,), "float32", 4)
    for name, operands, result in (("div", (ints, ints), ints), ("convert_element_type", (floats,), ints)):
        rule = rule_for(OpView(name, operands, (result,), {}))
        assert rule is not None
        assert rule.linear == ()


def test_a_dim_of_size_one_gets_no_factor() -> None:
    eqn = equation("exp", jnp.exp, jnp.ones((1, 4)))
    assert prove(eqn, random_operands(eqn)).results == (((), (0,)),)


def test_an_unknown_primitive_has_no_rule_and_can_be_kept_whole() -> None:
    view = OpView("no_such_thing", (Aval((4, 2), "float32", 4),), (Aval((4,), "float32", 4),), {})
    assert rule_for(view) is None
    rule = whole_rule(view)
    assert rule.operands == (((), ()),)
    assert rule.results == (((),),)
    assert "no_such_thing" in rule.whole


def test_control_flow_is_not_in_the_table() -> None:
    calls = {"scan", "while", "cond", "jit", "pjit", "custom_jvp_call", "custom_vjp_call", "remat2", "shard_map"}
    assert not calls & set(TABLE)


def _wrong(eqn: Any, **changes: Any) -> OpRule:
    rule = rule_for(view_of(eqn))
    assert rule is not None
    return replace(rule, **changes)


def test_the_proof_rejects_wrong_rules() -> None:
    """Each of these says something false about an operation; a proof that accepts it proves nothing."""
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    split = (((0,), (1,)),)
    cumsum = equation("cumsum", lambda x: lax.cumsum(x, 1), x)
    total = equation("reduce_max", lambda x: x.max(0), x)
    flip = equation("rev", lambda x: lax.rev(x, (1,)), x)
    transposed = equation("transpose", lambda x: lax.transpose(x, (1, 0)), x)
    merged = equation("reshape", lambda x: x.reshape(24), x)
    wrong = [
        (cumsum, _wrong(cumsum, sizes=(4, 6), operands=split, results=split)),
        (total, _wrong(total, combine={0: "sum"})),
        (flip, _wrong(flip, sizes=(4, 6), operands=split, results=split)),
        (transposed, _wrong(transposed, results=(((0,), (1,)),))),
        (merged, _wrong(merged, results=(((1, 0),),))),
        (equation("exp", jnp.exp, x), _wrong(equation("exp", jnp.exp, x), linear=(0,))),
    ]
    for eqn, rule in wrong:
        with pytest.raises(AssertionError):
            prove(eqn, [x], rule)
