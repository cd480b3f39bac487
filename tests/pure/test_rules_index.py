"""Rules of gathers, scatters and slices at computed positions, proved with the masked formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshplan.rules import OpRule, rule_for
from tests._proof import equation, prove, random_operands, view_of
from tests._rule_cases import INDEXED, Case

_TABLE = jnp.ones((6, 4))
_IDS = jnp.zeros((2, 3), jnp.int32)
_MODES = ["fill", "clip", "promise_in_bounds"]


def _proved(name: str, fn: Callable[..., Any], *args: Any) -> OpRule:
    eqn = equation(name, fn, *args)
    return prove(eqn, random_operands(eqn, seed=1))


@pytest.mark.parametrize("mode", _MODES)
def test_an_embedding_lookup_splits_vocabulary_features_and_tokens(mode: str) -> None:
    rule = _proved("gather", lambda t, i: t.at[i].get(mode=mode), _TABLE, _IDS)
    assert rule.operands == (((2,), (3,)), ((0,), (1,), ()))
    assert rule.results == (((0,), (1,), (3,)),)
    assert rule.reduced_factors() == (2,)
    assert rule.combine == {2: "sum"}
    assert rule.anchor
    assert rule.linear == (0,)


_GATHERS = [c for c in INDEXED if c.name == "gather"]


def test_rows_taken_in_stretches_stay_whole() -> None:
    rule = _proved("gather", _GATHERS[-1].fn, *_GATHERS[-1].args)
    assert rule.operands[0][0] == ()
    assert "computed position" in rule.whole


def test_booleans_gather_by_or() -> None:
    (case,) = [c for c in _GATHERS if "or" in _combines(c)]
    assert _combines(case) == {"or"}


def _combines(case: Case) -> set[str]:
    rule = rule_for(view_of(equation(case.name, case.fn, *case.args)))
    assert rule is not None
    return set(rule.combine.values())


def test_a_gather_that_fills_with_a_number_is_not_linear() -> None:
    rule = _proved("gather", lambda t, i: t.at[i].get(mode="fill", fill_value=7.0), _TABLE, _IDS)
    assert rule.linear == ()


_UPDATES = jnp.ones((2, 3, 4))


@pytest.mark.parametrize("mode", ["drop", "clip", "promise_in_bounds"])
def test_an_embedding_gradient_sums_over_tokens_and_splits_the_vocabulary(mode: str) -> None:
    rule = _proved("scatter-add", lambda t, i, u: t.at[i].add(u, mode=mode), _TABLE, _IDS, _UPDATES)
    assert rule.operands == (((2,), (3,)), ((0,), (1,), ()), ((0,), (1,), (3,)))
    assert rule.results == (((2,), (3,)),)
    assert rule.reduced_factors() == (0, 1)
    assert rule.combine == {0: "sum", 1: "sum"}
    assert rule.linear == (0, 2)


@pytest.mark.parametrize(("method", "name"), [("multiply", "mul"), ("min", "min"), ("max", "max"), ("subtract", "sub")])
def test_scatters_that_combine_split_their_updates(method: str, name: str) -> None:
    eqn = equation(f"scatter-{name}", lambda t, i, u: getattr(t.at[i], method)(u), _TABLE, _IDS, _UPDATES)
    assert prove(eqn, random_operands(eqn)).reduced_factors() == (0, 1)


def test_a_scatter_that_overwrites_keeps_its_updates_whole() -> None:
    eqn = equation("scatter", lambda t, i, u: t.at[i].set(u), _TABLE, _IDS, _UPDATES)
    rows = np.array([[[0], [2], [5]], [[-1], [6], [3]]], np.int32)
    table, _, updates = random_operands(eqn)
    rule = prove(eqn, [table, rows, updates])
    assert rule.operands == (((0,), (1,)), ((), (), ()), ((), (), (1,)))
    assert rule.reduced_factors() == ()
    assert "overwrite" in rule.whole


def test_the_gradient_of_a_batched_pick_shares_its_batch() -> None:
    def pick(x: Any, i: Any) -> Any:
        return jnp.take_along_axis(x, i, -1).sum()

    eqn = equation("scatter-add", jax.grad(pick), jnp.ones((2, 3, 4)), jnp.zeros((2, 3, 1), jnp.int32))
    rule = prove(eqn, random_operands(eqn))
    assert {f for d in rule.operands[0][:2] for f in d} == {f for d in rule.results[0][:2] for f in d}
    assert rule.reduced_factors() == ()
    assert len(rule.sizes) == 3


def test_a_window_written_at_a_computed_row_stays_whole() -> None:
    eqn = equation("scatter-add", lambda t: t.at[1:3].add(1.0), _TABLE)
    rule = prove(eqn, [random_operands(eqn)[0], np.array([1], np.int32), np.ones((2, 4), np.float32)])
    assert rule.operands[0] == ((), (0,))


def test_slices_at_computed_positions_pass_the_dims_they_take_in_full() -> None:
    start = jnp.int32(1)
    rule = _proved("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 4)), _TABLE, start)
    assert rule.operands[0] == rule.results[0] == ((), (0,))


def _update(start: Any, height: int = 1, **about: Any) -> OpRule:
    eqn = equation(
        "dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        _TABLE, _TABLE[:height], jnp.int32(1),
    )  # fmt: skip
    view = replace(view_of(eqn), bounds=(None, None, start, None))
    rule = rule_for(view)
    assert rule is not None
    return rule


def test_a_row_written_at_a_start_that_may_be_out_of_range_keeps_its_dim_whole_and_says_so() -> None:
    for bounds in (None, (0, 6), (-1, 5), (-(2**31), 2**31 - 1)):
        rule = _update(bounds)
        assert rule.operands[:2] == (((), (0,)), ((), (0,)))
        assert "start of dim 0 is not known to lie within 0 and 5; clamp it: jnp.clip(start, 0, 5)" in rule.whole


def test_a_row_written_at_a_start_in_range_goes_to_the_shard_that_has_it() -> None:
    rule = _update((0, 5))
    assert rule.operands[:2] == (((0,), (1,)), ((), (1,)))
    assert rule.results == (((0,), (1,)),)
    assert rule.whole == ""
    assert rule.reduced_factors() == ()


def test_several_rows_written_at_once_keep_their_dim_whole() -> None:
    rule = _update((0, 4), height=2)
    assert rule.operands[0][0] == ()
    assert "may lie in two shards" in rule.whole


def test_a_lookup_of_keys_splits_the_indices() -> None:
    keys = jax.random.split(jax.random.key(0), 6)
    rule = rule_for(view_of(equation("gather", lambda k, i: k[i], keys, _IDS)))
    assert rule is not None
    assert rule.results == (((0,), (1,)),)
