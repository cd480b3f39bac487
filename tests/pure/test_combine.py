"""Which collectives are left after combining: sets of the combiner, in the order of the program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from meshplan.core import Collective
from meshplan.cost._combine import COMBINED_BYTES, Emitted, Run, runs
from meshplan.cost._emission import Emission
from meshplan.program import Call, Program, trace
from tests._programs import f32


def program_of(step: Any, *args: Any) -> Program:
    return trace(Call(step=step, args=args, kwargs={}))


def reduction(nbytes: int = 1024, region: int = -1, dtype: str = "float32", **about: Any) -> Emitted:
    found = Collective(
        kind="all-reduce", nbytes=nbytes, group_size=8, count=1, axes=("data",), dtype=dtype, source="", op_name=""
    )
    return Emitted(collective=found, region=region, **{"combine": "sum", **about})


def inside(program: Program, primitive: str, **about: Any) -> list[Emitted]:
    """One reduction for each operation of this primitive, completed inside it."""
    return [reduction(op=op.index, region=op.region, **about) for op in program.ops if op.primitive == primitive]


def sizes(found: list[Run]) -> list[int]:
    return [len(run.members) for run in found]


def chain(x: Any) -> Any:
    for _ in range(4):
        x = jnp.tanh(x - jnp.sum(x))
    return x


def side_by_side(x: Any) -> Any:
    return [jnp.sum(x * k) for k in (2.0, 3.0, 4.0)]


def test_reductions_that_need_each_other_run_one_after_the_other():
    program = program_of(chain, f32(8))
    assert sizes(runs(program, inside(program, "reduce_sum"))) == [1, 1, 1, 1]


def test_reductions_that_do_not_need_each_other_run_together():
    program = program_of(side_by_side, f32(8))
    assert sizes(runs(program, inside(program, "reduce_sum"))) == [3]


def test_a_set_is_full_by_the_bytes_of_its_results():
    """A reduce-scatter over eight devices leaves an eighth of what it takes."""
    program = program_of(side_by_side, f32(8))
    whole = inside(program, "reduce_sum", nbytes=COMBINED_BYTES // 2)
    assert sizes(runs(program, whole)) == [2, 1]
    pieces = [replace(e, collective=replace(e.collective, kind="reduce-scatter")) for e in whole]
    assert sizes(runs(program, pieces)) == [3]


def test_a_tpu_fills_sets_of_reduce_scatters_less():
    """Compiled for a v5e with eight devices in a group, arrays of 4.7 MB are scattered two at a time."""
    program = program_of(side_by_side, f32(8))
    whole = inside(program, "reduce_sum", nbytes=768 * 3072 * 2)
    pieces = [replace(e, collective=replace(e.collective, kind="reduce-scatter")) for e in whole]
    assert sizes(runs(program, pieces, Emission("tpu").combined_bytes)) == [2, 1]
    assert sizes(runs(program, pieces, Emission("gpu").combined_bytes)) == [3]
    assert sizes(runs(program, whole, Emission("tpu").combined_bytes)) == [3]


def test_a_set_ends_where_one_needs_what_is_in_it():
    def step(x: Any) -> Any:
        a, b = jnp.sum(x), jnp.sum(x * 2)
        return jnp.sum(x * a), b

    program = program_of(step, f32(8))
    assert sizes(runs(program, inside(program, "reduce_sum"))) == [2, 1]


def test_sums_completed_on_their_way_to_an_operand_count_for_what_follows():
    def step(x: Any, w: Any, v: Any) -> Any:
        return (x @ w) @ v

    program = program_of(step, f32(8, 8), f32(8, 8), f32(8, 8))
    first, second = [op for op in program.ops if op.primitive == "dot_general"]
    moves = [
        reduction(value=first.results[0], uses=((second.index, 0),)),
        reduction(value=second.results[0]),  # on its way to a result
    ]
    assert sizes(runs(program, moves)) == [1, 1]


def test_moves_fill_sets_in_the_order_in_which_the_results_are_traced_back():
    def step(x: Any, u: Any, v: Any, w: Any) -> Any:
        first, second, third = x @ u, x @ v, x @ w
        return third, first, second

    program = program_of(step, f32(8, 8), f32(8, 8), f32(8, 8), f32(8, 8))
    dots = [op for op in program.ops if op.primitive == "dot_general"]
    sizes_of = (20 << 20, 20 << 20, 10 << 20)
    moves = [
        reduction(nbytes=n, value=op.operands[1], uses=((op.index, 1),))
        for op, n in zip(dots, sizes_of, strict=True)
    ]
    moves = [replace(e, collective=replace(e.collective, kind="all-gather")) for e in moves]
    assert [[e.uses[0][0] for e in r.members] for r in runs(program, moves)] == [
        [dots[2].index, dots[0].index], [dots[1].index],
    ]  # fmt: skip


def test_what_an_iteration_leaves_to_the_next_does_not_separate():
    def step(x: Any) -> Any:
        def body(c: Any, y: Any) -> Any:
            return c + jnp.sum(y), jnp.max(y) + jnp.sum(y * c)

        return lax.scan(body, 0.0, x)

    program = program_of(step, f32(4, 8))
    assert sizes(runs(program, inside(program, "reduce_sum"))) == [2]


@pytest.mark.parametrize("about", [{"dtype": "bfloat16"}, {"region": 3}, {"combine": "max"}])
def test_what_differs_is_not_combined(about: dict[str, Any]):
    program = program_of(side_by_side, f32(8))
    one, two, three = inside(program, "reduce_sum")
    other = reduction(**{"op": three.op, "region": three.region, **about})
    assert sorted(sizes(runs(program, [one, two, other]))) == [1, 2]


def test_large_ones_go_alone_and_sets_hold_so_many_bytes():
    program = program_of(side_by_side, f32(8))
    one, two, three = inside(program, "reduce_sum", nbytes=COMBINED_BYTES // 2)
    large = reduction(nbytes=COMBINED_BYTES, op=one.op, region=one.region)
    assert sorted(sizes(runs(program, [one, two, three, large]))) == [1, 1, 2]


def test_small_ones_share_a_latency_unless_a_large_one_takes_them_along():
    program = program_of(side_by_side, f32(8))
    (run,) = runs(program, inside(program, "reduce_sum"))
    assert [share for _, share in run.shares()] == [1 / 3] * 3
    one, two, _ = inside(program, "reduce_sum")
    (run,) = runs(program, [one, two, reduction(nbytes=4 << 20, op=one.op, region=one.region)])
    assert [share for _, share in run.shares()] == [0.0, 0.0]
