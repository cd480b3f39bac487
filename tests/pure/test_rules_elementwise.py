"""Rules of elementwise operations, and what keeps the proofs honest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshplan.rules import JOINTLY_LINEAR, TABLE, Aval, OpRule, OpView, rule_for, whole_rule
from tests._proof import equation, prove, random_operands, view_of

# small on purpose: what takes the time is one compilation for every shape of every primitive
_X = jnp.ones((2, 1))
_I = jnp.ones((2, 1), jnp.int32)
_U = jnp.ones((2, 1), jnp.uint32)
_B = jnp.ones((2, 1), bool)
_C = jnp.ones((2, 1), jnp.complex64)

_UNARY = (
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 "
    "expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh"
).split()
_BINARY = "add atan2 div eq ge gt igamma igammac le lt max min mul ne nextafter pow rem sub zeta".split()
_INTEGER = "shift_left shift_right_arithmetic shift_right_logical bitwise_and bitwise_or bitwise_xor".split()
_BOUND = {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor"}

_CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    *[(name, getattr(lax, name), (_X,)) for name in _UNARY],
    *[(name, getattr(lax, name), (_X, _X)) for name in _BINARY],
    *[(_BOUND.get(name, name), getattr(lax, name), (_U, _U)) for name in _INTEGER],
    ("clamp", lambda x: lax.clamp(0.2, x, 0.7), (_X,)),
    ("mul", lax.mul, (jnp.ones((2, 3)), jnp.ones((2, 3)))),
    ("clamp", lax.clamp, (_X, _X, _X)),
    ("integer_pow", lambda x: lax.integer_pow(x, 3), (_X,)),
    ("not", lax.bitwise_not, (_B,)),
    ("clz", lax.clz, (_U,)),
    ("population_count", lax.population_count, (_U,)),
    ("real", lax.real, (_C,)),
    ("imag", lax.imag, (_C,)),
    ("conj", lax.conj, (_C,)),
    ("complex", lax.complex, (_X, _X)),
    ("polygamma", lax.polygamma, (_X, _X)),
    ("regularized_incomplete_beta", lax.betainc, (_X, _X, _X)),
    ("igamma_grad_a", lax.igamma_grad_a, (_X, _X)),
    ("reduce_precision", lambda x: lax.reduce_precision(x, 5, 7), (_X,)),
    ("convert_element_type", lambda x: x.astype(jnp.bfloat16), (_X,)),
    ("convert_element_type", lambda x: x.astype(jnp.float32), (_I,)),
    ("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), (_X,)),
    ("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int8), (_X,)),
    ("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), (jnp.ones((3, 4), jnp.int8),)),
    ("select_n", lax.select_n, (_B, _X, _X)),
    ("select_n", lambda x: lax.select_n(jnp.array(True), x, x), (_X,)),
    ("stop_gradient", lax.stop_gradient, (_X,)),
    ("copy", jnp.copy, (_X,)),
    ("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), (_X, _C)),
    ("name", lambda x: checkpoint_name(x, "kept"), (_X,)),
]


@pytest.mark.parametrize(("name", "fn", "operands"), _CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(_CASES)])
def test_every_dim_of_an_elementwise_operation_splits(name: str, fn: Any, operands: tuple[Any, ...]) -> None:
    try:
        eqn = equation(name, fn, *operands)
    except AssertionError:
        if name not in ("stop_gradient", "polygamma", "copy"):  # no equation of their own in some versions of jax
            raise
        pytest.skip(f"this jax traces no {name}")
    rule = prove(eqn, random_operands(eqn))
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
