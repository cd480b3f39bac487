"""From a step to a `Program`: arguments, donated pairs, calls opened, regions with their trips, names, sources."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.tree_util import register_dataclass

import meshplan as mp
from meshplan.core import TraceError
from meshplan.program import CARRY, CROSSINGS, MERGE, SLICE, STACK, Call, Op, Program, trace
from meshplan.rules import Aval, OpRule, OpView


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def traced(step: Any, *args: Any, donate: tuple[int, ...] = (), kwargs: dict[str, Any] | None = None, **call: Any):
    return trace(Call(step=step, args=args, kwargs=kwargs or {}, donate_argnums=donate, **call))


def kinds(program: Program) -> list[str]:
    return [op.primitive for op in program.ops]


def only(program: Program, primitive: str) -> Op:
    (found,) = [op for op in program.ops if op.primitive == primitive]
    return found


def pairs(program: Program) -> dict[str, str]:
    return {leaf.path: program.results[leaf.pair].path for leaf in program.args if leaf.pair >= 0}


def check(program: Program) -> None:
    """What holds for every program."""
    for op in program.ops:
        assert program.ops[op.index] is op
        assert len(op.view.results) == len(op.results) == len(op.rule.results)
        for r, value in enumerate(op.results):
            assert program.values[value].op == op.index
            assert program.values[value].aval == op.view.results[r]
        for k, operand in enumerate(op.operands):
            if operand is not None:
                assert (op.index, k) in program.consumers[operand]
                late = program.values[operand].op >= op.index
                assert not late or (op.primitive == CARRY and k == 1)
        runs, region = 1.0, op.region
        while region >= 0:
            runs *= program.regions[region].trips
            assert program.regions[region].parent < region
            region = program.regions[region].parent
        assert op.count == runs
    assert len({op.key for op in program.ops}) == len(program.ops)
    for i, leaf in enumerate(program.args):
        assert leaf.pair < 0 or program.results[leaf.pair].pair == i
        assert leaf.pair < 0 or program.results[leaf.pair].aval == leaf.aval
    for j, leaf in enumerate(program.results):
        assert leaf.pair < 0 or program.args[leaf.pair].pair == j


# ------------------------------------------------------------------------------------- arguments and results


def test_leaves_are_named_by_argument_and_key_path():
    def step(state: Any, batch: Any, scale: Any) -> Any:
        return {"w": state["w"] * scale, "b": state["b"]}, batch.sum()

    program = traced(step, {"w": f32(4, 4), "b": f32(4)}, f32(2, 4), f32())
    assert [leaf.path for leaf in program.args] == ["state/b", "state/w", "batch", "scale"]
    assert [leaf.path for leaf in program.results] == ["0/b", "0/w", "1"]
    assert [leaf.aval for leaf in program.args] == [
        Aval((4,), "float32", 4), Aval((4, 4), "float32", 4), Aval((2, 4), "float32", 4), Aval((), "float32", 4),
    ]  # fmt: skip
    assert program.results[0].value == program.args[0].value  # passes through
    check(program)


def test_donated_arguments_meet_the_result_of_their_own_path_before_one_of_their_shape():
    def step(state: Any, x: Any) -> Any:
        return {"second": state["first"] + 1, "first": state["second"] * x}, state["first"].sum()

    program = traced(step, {"first": f32(4), "second": f32(4)}, f32(4), donate=(0,))
    assert pairs(program) == {"state/first": "0/first", "state/second": "0/second"}
    check(program)


def test_donated_arguments_without_a_result_of_their_path_meet_one_of_their_shape_and_dtype():
    def step(old: Any, count: Any, spare: Any) -> Any:
        return count + 1, old["w"] * 2.0, old["w"].astype(jnp.int32)

    program = traced(step, {"w": f32(3, 5)}, jax.ShapeDtypeStruct((), jnp.int32), f32(7), donate=(0, 1, 2))
    assert pairs(program) == {"old/w": "1", "count": "0"}
    check(program)


def test_what_is_not_donated_has_no_pair():
    program = traced(lambda a, b: (a + 1, b + 1), f32(4), f32(4), donate=(1,))
    assert pairs(program) == {"b": "0"}


def test_two_results_of_one_value_are_two_leaves():
    def step(w: Any) -> Any:
        new = w + 1
        return new, new

    program = traced(step, f32(4), donate=(0,))
    assert program.results[0].value == program.results[1].value
    assert [leaf.pair for leaf in program.results] == [0, -1]


def test_a_result_made_of_a_literal_has_no_value():
    program = traced(lambda x: (x + 1, 3.0), f32(4))
    assert program.results[1].value is None
    assert program.results[1].aval.shape == ()


def test_keyword_arguments_follow_the_positional_ones_by_name():
    def step(x: Any, *, scale: Any, bias: Any) -> Any:
        return x * scale + bias

    program = traced(step, f32(4), kwargs={"scale": f32(4), "bias": f32(4)})
    assert [leaf.path for leaf in program.args] == ["x", "bias", "scale"]
    mul = only(program, "mul")
    assert mul.operands == (program.args[0].value, program.args[2].value)


def test_static_arguments_are_no_leaves():
    def step(x: Any, power: int, *, mode: str) -> Any:
        assert mode == "up"
        return x**power

    call = Call(
        step=step, args=(f32(4), 3), kwargs={"mode": "up"}, static_argnums=(1,), static_argnames=("mode",)
    )
    program = trace(call)
    assert [leaf.path for leaf in program.args] == ["x"]
    assert call.argument_names() == ("x",)
    assert only(program, "integer_pow").view.params["y"] == 3


def test_donation_counts_positions_with_the_static_ones():
    program = traced(lambda n, w: w * n, 2, f32(4), donate=(1,), static_argnums=(0,))
    assert pairs(program) == {"w": "0"}


# --------------------------------------------------------------------------------------------------- calls


@jax.custom_jvp
def soft(x: Any) -> Any:
    return jnp.log1p(jnp.exp(x))


@soft.defjvp
def _soft_jvp(primals: Any, tangents: Any) -> Any:
    return soft(primals[0]), tangents[0] * jnp.tanh(primals[0])


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -1, 1) * jnp.cos(x),))


def test_calls_are_opened_in_place():
    inner = jax.jit(jnp.tanh)
    program = traced(lambda x: clipped(soft(inner(inner(x)))), f32(8))
    assert kinds(program) == ["tanh", "tanh", "exp", "log1p", "sin"]
    assert {op.region for op in program.ops} == {0}
    check(program)


def test_gradients_use_the_custom_derivatives():
    program = traced(jax.grad(lambda x: clipped(soft(x)).sum()), f32(8))
    assert "tanh" in kinds(program)
    assert "cos" in kinds(program)
    assert not any("custom" in kind for kind in kinds(program))


def test_remat_is_opened_and_its_operations_are_marked():
    block = jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))
    program = traced(jax.grad(lambda x: block(block(x)).sum()), f32(8))
    assert not any("remat" in kind or "checkpoint" in kind for kind in kinds(program))
    scopes = {op.scope for op in program.ops if op.scope}
    assert len(scopes) == 2, "the backward pass has one rematerialised block for each of the two"
    assert sum(kind == "cos" for kind in kinds(program)) > 2
    check(program)


# ------------------------------------------------------------------------------------------------- regions


def test_a_scan_is_a_region_of_its_length_with_carries_slices_and_stacks():
    def step(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, ws)

    program = traced(step, f32(4, 4), f32(6, 4, 4))
    (region,) = program.regions[1:]
    assert (region.kind, region.trips, region.parent, region.known_trips) == ("scan", 6.0, 0, True)
    carry, piece, stack = only(program, CARRY), only(program, SLICE), only(program, STACK)
    assert program.values[piece.results[0]].aval.shape == (4, 4)
    assert program.values[stack.results[0]].aval.shape == (6,)
    tanh = only(program, "tanh")
    assert carry.operands == (program.args[0].value, tanh.results[0])
    assert piece.operands == (program.args[1].value,)
    assert [leaf.value for leaf in program.results] == [carry.results[0], stack.results[0]]
    assert only(program, "dot_general").count == 6.0
    assert piece.rule.operands[0][0] == (), "the scanned dim is never split"
    check(program)


def test_nested_scans_multiply_their_trips():
    def inner(c: Any, _: Any) -> Any:
        return jnp.sin(c), None

    def outer(c: Any, _: Any) -> Any:
        return jax.lax.scan(inner, jnp.cos(c), length=5)[0], None

    program = traced(lambda x: jax.lax.scan(outer, x, length=3)[0], f32(8))
    assert only(program, "cos").count == 3.0
    assert only(program, "sin").count == 15.0
    check(program)


def test_fori_loop_has_its_known_trip_count():
    program = traced(lambda x: jax.lax.fori_loop(2, 9, lambda i, c: c * 2.0, x), f32(8))
    (region,) = program.regions[1:]
    assert (region.trips, region.known_trips) == (7.0, True)
    assert program.notes == ()
    check(program)


@pytest.mark.parametrize(
    ("start", "stop", "by", "trips"), [(0, 10, 1, 10), (0, 10, 3, 4), (4, 5, 2, 1), (0.0, 1.5, 1.0, 2)]
)
def test_a_counting_while_loop_has_known_trips(start: float, stop: float, by: float, trips: int):
    def step(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < stop, lambda c: (c[0] + by, c[1] * 2.0), (start, x))[1]

    assert int(np.log2(jax.jit(step)(jnp.ones(2)))[0]) == trips  # what it really does
    program = traced(step, f32(2))
    (region,) = program.regions[1:]
    assert (region.kind, region.trips, region.known_trips) == ("while", trips, True)
    check(program)


def test_a_while_loop_of_unknown_length_is_noted():
    def step(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c.sum() < 100.0, lambda c: c * 2.0, x)

    program = traced(step, f32(8))
    (region,) = program.regions[1:]
    assert (region.kind, region.trips, region.known_trips) == ("while", 1.0, False)
    assert program.notes == ("1 while loop(s) with an unknown number of trips are priced as one trip",)
    assert only(program, CARRY).operands == (program.args[0].value, only(program, "mul").results[0])
    check(program)


def test_a_while_loop_up_to_an_argument_is_of_unknown_length():
    def step(x: Any, n: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda i, c: c * 2.0, x)

    program = traced(step, f32(8), jax.ShapeDtypeStruct((), jnp.int32))
    assert not program.regions[1].known_trips
    check(program)


def test_branches_of_a_cond_are_regions_and_their_results_merge():
    def step(x: Any, flag: Any) -> Any:
        return jax.lax.cond(flag, lambda y: (jnp.sin(y), y), lambda y: (y, jnp.cos(y)), x)

    program = traced(step, f32(8), jax.ShapeDtypeStruct((), jnp.bool_))
    assert [r.kind for r in program.regions[1:]] == ["branch", "branch"]
    x, sin, cos = program.args[0].value, only(program, "sin"), only(program, "cos")
    merges = [op for op in program.ops if op.primitive == MERGE]
    made = {x, sin.results[0], cos.results[0]}
    assert all(set(m.operands) <= made and len(set(m.operands)) == 2 and m.region == 0 for m in merges)
    assert {sin.region, cos.region} == {1, 2}
    assert [leaf.value for leaf in program.results] == [m.results[0] for m in merges]
    check(program)


def test_a_loop_in_a_branch_in_a_loop():
    def body(c: Any, w: Any) -> Any:
        halved = jax.lax.cond(c.sum() > 0, lambda y: jax.lax.fori_loop(0, 4, lambda i, z: z @ w, y), lambda y: y, c)
        return halved, None

    program = traced(lambda x, ws: jax.lax.scan(body, x, ws)[0], f32(4, 4), f32(3, 4, 4))
    dot = only(program, "dot_general")
    assert dot.count == 12.0
    lineage, region = [], dot.region
    while region >= 0:
        lineage.append(program.regions[region].kind)
        region = program.regions[region].parent
    assert lineage == ["scan", "branch", "scan", "top"]
    check(program)


def test_a_scan_of_no_steps_is_a_region_of_no_trips():
    program = traced(lambda x, ws: jax.lax.scan(lambda c, w: (c @ w, None), x, ws)[0], f32(4, 4), f32(0, 4, 4))
    assert program.regions[1].trips == 0.0
    check(program)


# ------------------------------------------------------------------------------------- constants, literals


def test_arrays_closed_over_are_constant_values():
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    program = traced(lambda x: x @ jnp.asarray(table), f32(2, 3))
    dot = only(program, "dot_general")
    made = program.values[dot.operands[1]]  # type: ignore[index]
    assert made.constant
    assert made.op == -1
    assert made.aval == Aval((3, 4), "float32", 4)
    assert {leaf.value for leaf in program.args}.isdisjoint({dot.operands[1]})
    check(program)


def test_scalar_literals_are_no_values_and_their_numbers_are_seen_by_rules():
    program = traced(lambda x: x * 2.0 + 1.0, f32(4))
    mul, add = only(program, "mul"), only(program, "add")
    assert mul.operands[1] is None
    assert mul.view.constants[1] == 2.0
    assert mul.view.constants[0] is None
    assert add.operands == (mul.results[0], None)


def test_equal_equations_share_one_view_and_different_integers_do_not():
    program = traced(lambda x: jax.lax.dynamic_slice(x, (1,), (2,)) + jax.lax.dynamic_slice(x, (3,), (2,)), f32(8))
    first, second = (op for op in program.ops if op.primitive == "dynamic_slice")
    assert first.view is not second.view
    program = traced(lambda x: jnp.sin(jnp.sin(x)), f32(8))
    assert program.ops[0].view is program.ops[1].view


def test_typed_random_keys_have_bytes():
    key = jax.eval_shape(lambda: jax.random.key(0))
    program = traced(lambda k: jax.random.normal(k, (4,)), key)
    assert program.args[0].aval == Aval((), "key<fry>", 8)
    check(program)


# --------------------------------------------------------------------------------------- names and sources


@partial(register_dataclass, data_fields=["up", "down"], meta_fields=[])
@mp.params(up="embed mlp", down="mlp embed")
class Block:
    def __init__(self, up: Any, down: Any) -> None:
        self.up, self.down = up, down


@mp.dims("batch embed, _ -> batch embed")
def apply(x: Any, block: Block) -> Any:
    return jnp.tanh(x @ block.up) @ block.down


def test_names_of_dims_and_params_are_found():
    program = traced(apply, f32(8, 16), Block(f32(16, 32), f32(32, 16)))
    by_path = {leaf.path: program.names.get(leaf.value) for leaf in program.args}  # type: ignore[arg-type]
    assert by_path == {"x": None, "block/up": ("embed", "mlp"), "block/down": ("mlp", "embed")}
    tags = [op for op in program.ops if op.primitive == "name"]
    assert [program.names[t.results[0]] for t in tags] == [("batch", "embed")] * 2
    assert tags[1].results[0] == program.results[0].value


def test_names_survive_differentiation_and_scan():
    def loss(x: Any, blocks: Block) -> Any:
        return jax.lax.scan(lambda c, b: (apply(c, b), None), x, blocks)[0].sum()

    program = traced(jax.grad(loss, argnums=1), f32(8, 16), Block(f32(3, 16, 32), f32(3, 32, 16)))
    by_path = {leaf.path: program.names.get(leaf.value) for leaf in program.args}  # type: ignore[arg-type]
    assert by_path["blocks/up"] == (None, "embed", "mlp")
    assert ("batch", "embed") in program.names.values()


def test_sources_are_lines_of_the_user_named_from_the_import_root():
    program = traced(jax.grad(lambda x, b: apply(x, b).sum(), argnums=1), f32(8, 16), Block(f32(16, 32), f32(32, 16)))
    sources = {op.primitive: op.source for op in program.ops if op.primitive not in CROSSINGS}
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    for op in program.ops:
        assert re.fullmatch(r"(tests/)?pure/test_program\.py:\d+", op.source), op
        line = text[int(op.source.rsplit(":")[1]) - 1]
        if op.primitive in ("dot_general", "tanh"):
            assert "block.up" in line
    assert "dot_general" in sources


# -------------------------------------------------------------------------------- rules, notes and errors


def test_a_primitive_without_a_rule_is_kept_whole_and_noted_with_its_bytes():
    noted = traced(unruled, f32(500, 500))
    (op,) = [op for op in noted.ops if not op.ruled]
    assert noted.notes == (
        "primitive 'meshplan_test_opaque' has no sharding rule: kept whole, 2 MB per step are not split. "
        "Give one with Options(rules={'meshplan_test_opaque': ...})",
    )
    assert all(d == () for dims in (*op.rule.operands, *op.rule.results) for d in dims)
    check(noted)


opaque = Primitive("meshplan_test_opaque")
opaque.def_abstract_eval(lambda x: x)


def unruled(x: Any) -> Any:
    return opaque.bind(x)


def test_a_rule_can_be_given_as_text_or_as_a_function():
    call = Call(step=unruled, args=(f32(4, 8),), kwargs={})
    program = trace(call, rules={"meshplan_test_opaque": "i j -> i j"})
    op = only(program, "meshplan_test_opaque")
    assert op.ruled
    assert op.rule.operands == op.rule.results == (((0,), (1,)),)
    assert program.notes == ()

    def rule(view: OpView) -> OpRule:
        return OpRule((4,), (((0,), ()),), (((0,), ()),))

    assert only(trace(call, rules={"meshplan_test_opaque": rule}), "meshplan_test_opaque").rule.sizes == (4,)


def test_a_step_that_does_not_trace_is_an_error_with_jax_as_its_cause():
    def train_step(params: Any, batch: Any) -> Any:
        return params @ batch

    with pytest.raises(TraceError, match=r"step 'train_step' does not trace with arguments \(params, batch\); JAX says:"
                       r" dot_general requires contracting dimensions"):  # fmt: skip
        traced(train_step, f32(4, 4), f32(5, 4))
    with pytest.raises(TraceError) as found:
        traced(train_step, f32(4, 4), f32(5, 4))
    assert isinstance(found.value.__cause__, TypeError)


def test_the_same_step_gives_the_same_program():
    def step(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, ws)

    first, second = (traced(step, f32(4, 4), f32(6, 4, 4)) for _ in range(2))
    assert [(o.key, o.primitive, o.operands, o.source) for o in first.ops] == [
        (o.key, o.primitive, o.operands, o.source) for o in second.ops
    ]
    assert first.values == second.values
