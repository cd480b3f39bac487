"""Rules of operations along one dim, of windows, random numbers and matrices: the other dims split."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshplan.rules import TABLE, Aval, OpView, rule_for
from tests._proof import equation, equations, prove, random_operands, run, view_of
from tests._rule_cases import ALONG, MATRICES, WINDOWS, Case


@pytest.mark.parametrize("case", ALONG, ids=[f"{c.name}-{i}" for i, c in enumerate(ALONG)])
def test_dims_across_a_sequential_operation_split(case: Case) -> None:
    rule = rule_for(view_of(equation(case.name, case.fn, *case.args)))
    assert rule is not None
    assert len(rule.sizes) == case.factors
    assert rule.whole
    assert rule.reduced_factors() == ()


def test_pools_split_where_windows_do_not_cross() -> None:
    for case in WINDOWS:
        rule = rule_for(view_of(equation(case.name, case.fn, *case.args)))
        assert rule is not None
        assert bool(rule.whole) == (case.factors == 2)


def test_only_sums_are_linear_among_cumulative_operations() -> None:
    linear = {name for name in TABLE if name.startswith("cum") and _linear(name)}
    assert linear == {"cumsum"}


def _linear(name: str) -> bool:
    aval = Aval((4, 4), "float32", 4)
    rule = rule_for(OpView(name, (aval,), (aval,), {"axis": 0}))
    return bool(rule and rule.linear)


# ------------------------------------------------------------------------------------------ random numbers


def test_bits_of_a_counting_generator_split_and_others_stay_whole() -> None:
    threefry = equation("random_bits", lambda k: jax.random.bits(k, (4, 6)), jax.random.key(0))
    rule = rule_for(view_of(threefry))
    assert rule is not None
    assert rule.operands == ((),)
    assert rule.results == (((0,), (1,)),)
    rbg = equation("random_bits", lambda k: jax.random.bits(k, (4, 6)), jax.random.key(0, impl="rbg"))
    rule = rule_for(view_of(rbg))
    assert rule is not None
    assert rule.sizes == ()
    assert "part" in rule.whole


def test_bits_are_counted_by_position_alone() -> None:
    """What lets a shard make its own bits: the shape is used only through an iota and elementwise operations."""
    from jax.extend.random import threefry2x32_p  # the counter itself

    key = jax.random.key(0)
    counts = np.arange(24, dtype=np.uint32)
    words = jax.random.key_data(key)
    high, low = threefry2x32_p.bind(words[0], words[1], np.zeros_like(counts), counts)
    bits = np.asarray(jax.random.bits(key, (4, 6))).ravel()
    np.testing.assert_array_equal(bits, np.asarray(high) ^ np.asarray(low))


def test_the_counter_and_its_positions_split() -> None:
    from jax.extend.random import threefry2x32_p

    words = jnp.arange(6, dtype=jnp.uint32)
    eqn = equation("threefry2x32", lambda k, x: threefry2x32_p.bind(k, k, x, x), words, words)
    assert prove(eqn, random_operands(eqn)).results == (((0,),), ((0,),))
    rule = rule_for(OpView("iota_2x32_shape", (), (Aval((4, 6), "uint32", 4),) * 2, {"shape": (4, 6)}))
    assert rule is not None
    assert rule.results == (((0,), (1,)),) * 2


_KEYS: list[tuple[str, Callable[..., Any], tuple[tuple[Any, ...], ...]]] = [
    ("random_fold_in", lambda k: jax.vmap(lambda k: jax.random.fold_in(k, 3))(k), (((0,),),)),
    ("random_unwrap", lambda k: jax.random.key_data(k), (((0,), ()),)),
    ("random_bits", lambda k: jax.vmap(lambda k: jax.random.bits(k, (1,)))(k), (((0,), ()),)),
    ("random_split", lambda k: jax.vmap(lambda k: jax.random.split(k, 1))(k), (((0,), ()),)),
    ("random_clone", lambda k: jax.random.clone(k), (((0,),),)),
]


@pytest.mark.parametrize(("name", "fn", "results"), _KEYS, ids=[c[0] for c in _KEYS])
def test_an_array_of_keys_splits(name: str, fn: Callable[..., Any], results: Any) -> None:
    keys = jax.random.split(jax.random.key(1), 4)
    rule = prove(equation(name, fn, keys), [keys, np.uint32(3)][: 2 if name == "random_fold_in" else 1])
    assert rule.results == results


_GENERATORS = ("threefry2x32", "rbg", "unsafe_rbg", "threefry4x32", "philox2x32", "philox4x32")
_WITH_KEYS: dict[str, Callable[..., Any]] = {
    "random_bits": lambda k: jax.random.bits(k, (3,)),
    "random_split": lambda k: jax.random.split(k, 2),
    "random_fold_in": lambda k: jax.random.fold_in(k, 1),
}


@pytest.mark.parametrize("name", list(_WITH_KEYS))
@pytest.mark.parametrize("impl", _GENERATORS)
def test_an_array_of_keys_splits_only_where_each_key_answers_for_itself(name: str, impl: str) -> None:
    keys = jax.random.split(jax.random.key(1, impl=impl), 4)
    fn = jax.vmap(_WITH_KEYS[name])
    rule = rule_for(view_of(equation(name, fn, keys)))
    assert rule is not None
    whole, part = (_words(fn(k)) for k in (keys, keys[2:]))
    assert bool(rule.operands[0][0]) == np.array_equal(whole[2:], part)


def _words(x: Any) -> Any:
    return np.asarray(jax.random.key_data(x) if str(x.dtype).startswith("key<") else x)


@pytest.mark.parametrize("impl", _GENERATORS)
def test_bits_split_only_where_every_position_has_bits_of_its_own(impl: str) -> None:
    """A counting generator answers for the first half alone as it does for the whole, whatever the shape."""
    key = jax.random.key(1, impl=impl)
    whole = np.asarray(jax.random.bits(key, (8, 3)))
    halves = [np.asarray(jax.random.bits(key, shape)).ravel() for shape in ((4, 3), (2, 2, 3), (12,))]
    rule = rule_for(view_of(equation("random_bits", lambda k: jax.random.bits(k, (8, 3)), key)))
    assert rule is not None
    if rule.sizes:
        assert all(np.array_equal(whole[:4].ravel(), half) for half in halves)
    assert bool(rule.sizes) == (impl not in ("rbg", "unsafe_rbg"))


def test_words_of_a_key_stay_together() -> None:
    words = np.arange(8, dtype=np.uint32).reshape(4, 2)
    rule = prove(equation("random_wrap", lambda w: jax.random.wrap_key_data(w), words), [words])
    assert rule.operands == (((0,), ()),)
    seeds = np.arange(4, dtype=np.int32)
    assert prove(equation("random_seed", jax.vmap(jax.random.key), seeds), [seeds]).results == (((0,),),)


def test_new_keys_split_where_the_generator_counts() -> None:
    eqn = equation("random_split", lambda k: jax.random.split(k, 4), jax.random.key(0))
    rule = rule_for(view_of(eqn))
    assert rule is not None
    assert rule.results == (((0,),),)
    whole = run(eqn, [jax.random.key(0)], dict(eqn.params))[0]
    fewer = run(eqn, [jax.random.key(0)], dict(eqn.params) | {"shape": (2,)})[0]
    np.testing.assert_array_equal(jax.random.key_data(whole)[:2], jax.random.key_data(fewer))


def test_a_generator_with_a_state_stays_whole() -> None:
    eqn = equation("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (4, 2)), jnp.zeros(4, jnp.uint32))
    assert prove(eqn, random_operands(eqn)).sizes == ()


# -------------------------------------------------------------------------------------------------- matrices


@pytest.mark.parametrize("case", MATRICES, ids=[f"{c.name}-{i}" for i, c in enumerate(MATRICES)])
def test_batches_of_matrices_split_and_the_matrices_stay_whole(case: Case) -> None:
    rule = rule_for(view_of(equation(case.name, case.fn, *case.args)))
    assert rule is not None
    assert rule.flops > 0
    assert rule.whole
    if case.factors:
        assert all(dims[0] == (0,) for dims in (*rule.operands, *rule.results))


def test_a_solve_counts_its_right_hand_sides() -> None:
    a, b = Aval((5, 4, 4), "float32", 4), Aval((5, 4, 10), "float32", 4)
    rule = rule_for(OpView("triangular_solve", (a, b), (b,), {}))
    assert rule is not None
    assert rule.flops == 5 * 4 * 4 * 10


def test_the_table_covers_the_arithmetic_of_jax_lax() -> None:
    """Every primitive that jax.lax's public modules define, but for control flow, collectives, tokens and internals."""
    names = set()
    for module in ("jax.lax", "jax.lax.linalg"):
        found = vars(importlib.import_module(module)).values()
        names |= {p.name for p in found if hasattr(p, "bind") and hasattr(p, "name")}
    elsewhere = {"after_all", "create_token", "dce_sink", "axis_index", "stage"} | _COLLECTIVES | _CONTROL
    assert len(names) > 100
    assert sorted(names - set(TABLE) - elsewhere) == []


_CONTROL = frozenset({"cond", "scan", "while", "custom_linear_solve", "linear_call", "composite", "platform_index"})
_COLLECTIVES = frozenset({
    "all_gather", "all_gather_invariant", "all_to_all", "pmax", "pmin", "ppermute", "psum", "psum_scatter",
    "reduce_scatter", "ragged_all_to_all", "pbroadcast", "psum_invariant", "psend", "precv",
})  # fmt: skip


def test_equations_inside_calls_are_found() -> None:
    names = [e.primitive.name for e in equations(lambda x: jax.jit(jnp.sin)(x) + 1, jnp.ones(2))]
    assert names == ["sin", "add"]
