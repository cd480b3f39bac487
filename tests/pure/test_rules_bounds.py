"""What is known of positions: interval arithmetic over programs, held against values that occur."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from meshplan.program import trace
from meshplan.program._trace import Call
from meshplan.rules import Aval, OpView, result_bounds

_CACHE, _ROW, _START = jnp.ones((8, 4)), jnp.ones((1, 4)), jnp.int32(3)


def _write(cache: Any, row: Any, start: Any) -> Any:
    return lax.dynamic_update_slice(cache, row, (start, 0))


def _splits(step: Callable[..., Any], *args: Any) -> bool:
    """Whether the written dim splits in every update of the step."""
    program = trace(Call(step=step, args=args, kwargs={}))
    updates = [op for op in program.ops if op.primitive == "dynamic_update_slice"]
    assert updates
    assert all(bool(op.rule.operands[0][0]) == (not op.rule.whole) for op in updates)
    return all(op.rule.operands[0][0] for op in updates)


_IN_RANGE: dict[str, Callable[..., Any]] = {
    "constant": lambda x, u, i: _write(x, u, 5),
    "last": lambda x, u, i: _write(x, u, -1),
    "clip": lambda x, u, i: _write(x, u, jnp.clip(i, 0, 7)),
    "min_max": lambda x, u, i: _write(x, u, jnp.maximum(jnp.minimum(i, 7), 0)),
    "rem_of_positive": lambda x, u, i: _write(x, u, lax.rem(jnp.maximum(i, 0), 8)),
    "mask": lambda x, u, i: _write(x, u, i & 7),
    "argmax": lambda x, u, i: _write(x, u, jnp.argmax(x[:, 0])),
    "counter": lambda x, u, i: lax.fori_loop(0, 8, lambda k, x: _write(x, u, k), x),
    "counted_from": lambda x, u, i: lax.fori_loop(3, 8, lambda k, x: _write(x, u, k - 3), x),
    "scanned": lambda x, u, i: lax.scan(lambda x, k: (_write(x, u, k), None), x, jnp.arange(8))[0],
    "while": lambda x, u, i: lax.while_loop(
        lambda c: c[0] < 8, lambda c: (c[0] + 1, _write(c[1], u, c[0])), (0, x)
    )[1],
    "branch": lambda x, u, i: _write(x, u, lax.select(i > 3, jnp.int32(2), jnp.int32(7))),
}
_UNKNOWN: dict[str, Callable[..., Any]] = {
    "argument": _write,
    "one_too_many": lambda x, u, i: _write(x, u, jnp.clip(i, 0, 8)),
    "half_clipped": lambda x, u, i: _write(x, u, jnp.minimum(i, 7)),
    "counter_beyond": lambda x, u, i: lax.fori_loop(0, 9, lambda k, x: _write(x, u, k), x),
    "after_the_loop": lambda x, u, i: _write(x, u, lax.fori_loop(0, 8, lambda k, c: c + 1, 0)),
    "data": lambda x, u, i: _write(x, u, x[0, 0].astype(jnp.int32)),
    "overflow": lambda x, u, i: _write(x, u, jnp.clip(i, 0, 7) * 2**30 * 4),
    "dynamic_trips": lambda x, u, i: lax.fori_loop(0, i, lambda k, x: _write(x, u, k), x),
}


@pytest.mark.parametrize("name", list(_IN_RANGE))
def test_a_start_that_is_known_to_be_in_range_lets_the_dim_split(name: str) -> None:
    assert _splits(_IN_RANGE[name], _CACHE, _ROW, _START)


@pytest.mark.parametrize("name", list(_UNKNOWN))
def test_a_start_that_may_be_out_of_range_does_not(name: str) -> None:
    assert not _splits(_UNKNOWN[name], _CACHE, _ROW, _START)


_BINARY = ["add", "sub", "mul", "max", "min", "lt", "le", "gt", "ge", "eq", "ne", "rem", "and", "div"]


@settings(max_examples=200)
@given(st.data())
def test_no_value_leaves_its_bounds(data: st.DataObject) -> None:
    """Operands from their bounds, computed by jax: always within the bounds of the result."""
    name = data.draw(st.sampled_from(_BINARY))
    dtype = data.draw(st.sampled_from(["int8", "uint8"]))
    info = np.iinfo(dtype)
    pairs = [sorted(data.draw(st.tuples(*[st.integers(int(info.min), int(info.max))] * 2))) for _ in range(2)]
    values = [data.draw(st.integers(low, high)) for low, high in pairs]
    scalar, boolean = Aval((), dtype, 1), Aval((), "bool", 1)
    result = boolean if name in ("lt", "le", "gt", "ge", "eq", "ne") else scalar
    view = OpView(name, (scalar, scalar), (result,), {}, (None, None), tuple((low, high) for low, high in pairs))
    (bounds,) = result_bounds(view)
    assert bounds is not None
    if name in ("rem", "div") and values[1] == 0:
        return
    function = {"and": lax.bitwise_and}.get(name) or getattr(lax, name)
    with jax.disable_jit():
        found = int(function(np.array(values[0], dtype), np.array(values[1], dtype)))
    assert bounds[0] <= found <= bounds[1], (name, dtype, pairs, values)


def test_clamps_selects_and_counts_have_the_bounds_of_what_they_choose_from() -> None:
    x, flag = Aval((4,), "int32", 4), Aval((4,), "bool", 1)
    clamp = OpView("clamp", (x, x, x), (x,), {}, (), ((0, 0), (-5, 50), (7, 9)))
    assert result_bounds(clamp) == ((0, 9),)
    choice = OpView("select_n", (flag, x, x), (x,), {}, (), ((0, 1), (1, 2), (5, 6)))
    assert result_bounds(choice) == ((1, 6),)
    assert result_bounds(replace(choice, bounds=((1, 1), (1, 2), (5, 6)))) == ((5, 6),)
    assert result_bounds(OpView("iota", (), (Aval((3, 5), "int32", 4),), {"dimension": 1})) == ((0, 4),)
    assert result_bounds(OpView("exp", (Aval((3,), "float32", 4),), (Aval((3,), "float32", 4),), {})) == (None,)
