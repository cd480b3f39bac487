"""Equal broadcasts that a plan splits in different ways are found, others are left alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshplan.core import Spec
from meshplan.lower._fills import mixed_fills
from meshplan.program import Call, Program, trace

WHOLE, SPLIT, ROWS = Spec(((), ())), Spec(((), ("x",))), Spec((("x",), ()))


def program_of(step: Any) -> Program:
    wide, long = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32)
    return trace(Call(step=step, args=(wide, wide, long, long), kwargs={}))


def scaled(x: Any, n: Any) -> Any:
    return x * (1 / jnp.maximum(n, 1))[:, None]


def found(step: Any, *specs: Spec, primitive: str = "mul") -> list[tuple[Spec, ...]]:
    program = program_of(step)
    keys = [op.key for op in program.ops if op.primitive == primitive and op.view.results[0].shape == (8, 16)]
    fills = mixed_fills(program, {(key, 0): (spec,) for key, spec in zip(keys, specs, strict=True)})
    assert all(f.op.key in keys for f in fills)
    return [f.path for f in fills]


def twice(a: Any, b: Any, n: Any, m: Any) -> Any:
    return scaled(a, n), scaled(b, n)


def test_of_equal_fills_the_one_that_is_split_is_made_whole_first():
    assert found(twice, WHOLE, SPLIT) == [(WHOLE,), (WHOLE, SPLIT)]


def test_fills_that_are_split_alike_stay_as_they_are():
    assert found(twice, SPLIT, SPLIT) == []


def test_dims_that_are_not_filled_keep_their_axes():
    assert found(twice, WHOLE, ROWS) == []


def test_fills_of_different_values_are_not_merged():
    assert found(lambda a, b, n, m: (scaled(a, n), scaled(b, m)), WHOLE, SPLIT) == []


def test_broadcasts_that_the_program_writes_out_are_fills_too():
    def step(a: Any, b: Any, n: Any, m: Any) -> Any:
        return a * jnp.broadcast_to(n[:, None], a.shape), jnp.sin(jnp.broadcast_to(n[:, None], b.shape))

    assert found(step, WHOLE, SPLIT, primitive="broadcast_in_dim") == [(WHOLE,), (WHOLE, SPLIT)]


def test_counts_that_a_rematerialised_block_makes_again_are_merged_with_the_first_ones():
    def hot(n: Any) -> Any:
        return jnp.where(n[:, None] == jnp.arange(16)[None], 1.0, 0.0)

    def step(a: Any, b: Any, n: Any, m: Any) -> Any:
        return jax.grad(lambda a: jax.checkpoint(lambda a: (jnp.sin(a) * hot(n)).sum())(a))(a) + hot(m)

    program = program_of(step)
    counted = [op for op in program.ops if op.primitive == "eq"]
    assert len({op.scope for op in counted}) == 2
    (key, *_), (other, *_) = ([op.key for op in counted if op.scope == s] for s in {op.scope for op in counted})
    fills = mixed_fills(program, {(key, 0): (WHOLE,), (other, 0): (ROWS,)})
    assert {f.op.key: f.path for f in fills} == {key: (WHOLE,), other: (WHOLE, ROWS)}
    assert mixed_fills(program, {(key, 0): (ROWS,), (other, 0): (ROWS,)}) == []
