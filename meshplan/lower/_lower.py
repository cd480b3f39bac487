"""A plan as an ordinary jitted function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshplan.core import ArgumentError, Spec
from meshplan.lower._constrain import ENTERS, Constraints, constrained
from meshplan.lower._fills import mixed_fills
from meshplan.lower._local import local_form, needs_shards
from meshplan.plan import OpPlan, PlanData, made_specs
from meshplan.program import Call, Op, Program


def constraints_of(data: PlanData, program: Program) -> Constraints:
    """The plan's specs by the keys under which the program's equations are found again."""
    results, uses, local = {}, {}, {}
    for planned in data.ops:
        key = program.ops[planned.index].key
        for r, path in enumerate(planned.results):
            if path:
                results[key, r] = path
        for k, path in planned.uses:
            uses[key, k] = path
    kept = dict(data.kept)
    made, by_op = made_specs(data.arguments, data.ops, program), {planned.index: planned for planned in data.ops}
    inside = made | {v: path[-1] for v, path in kept.items()}  # of rematerialised blocks
    for op in program.ops:
        planned = by_op.get(op.index, OpPlan(index=op.index))
        known = inside if op.scope else made
        if needs_shards(op) and (form := local_form(op, *read_and_left(op, planned, known), data.mesh)):
            local[op.key] = form
    for block in program.blocks:
        uses |= {((*block.key, ENTERS), k): kept[v] for k, v in enumerate(block.values) if v in kept}
    fills = {}
    for f in mixed_fills(program, results):
        if f.op.primitive == "broadcast_in_dim":
            results[f.op.key, 0] = f.path[:-1] + results[f.op.key, 0]
        else:
            fills[f.op.key, f.operand] = f.path
    return Constraints(results, uses, local, fills)


def read_and_left(op: Op, planned: OpPlan, made: Mapping[int, Spec]) -> tuple[list[Spec | None], list[Spec | None]]:
    """Specs in which an operation reads its operands and leaves its results, None where the plan states none."""
    moved = {k: path[-1] for k, path in planned.uses if path}
    read = [moved.get(k, made.get(v)) if v is not None else None for k, v in enumerate(op.operands)]
    paths = planned.results or ((),) * len(op.results)
    return read, [path[-1] if path else None for path in paths]


def shardings(specs: Sequence[Spec], tree: Any, mesh: Any) -> Any:
    """A pytree of NamedShardings."""
    return jax.tree.unflatten(tree, [NamedSharding(mesh, s.partition_spec()) for s in specs])


def planned_function(data: PlanData, program: Program, mesh: Any) -> Callable[..., Any]:
    """The step under the plan's constraints: a function of the dynamic arguments, flat results unflattened."""
    flat = constrained(program.jaxpr, constraints_of(data, program), mesh)

    def place(x: Any, spec: Spec) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec.partition_spec()))

    def planned(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != program.in_tree:
            raise ArgumentError(
                f"the planned step was called with another structure of arguments: planned {program.in_tree}, "
                f"found {tree}. Plan again for these arguments."
            )
        check_shapes(leaves, program)
        if kwargs:  # jit takes no shardings for keyword arguments: they are stated where the step begins
            leaves = [place(x, a.spec) for x, a in zip(leaves, data.arguments, strict=True)]
        outs = flat(*leaves)
        for j, result in enumerate(data.results):
            for spec in (*result.moves, result.spec):
                if jax.numpy.ndim(outs[j]):
                    outs[j] = place(outs[j], spec)
        return jax.tree.unflatten(program.out_tree, outs)

    return planned


def unplaced(program: Program, call: Call) -> Callable[..., Any]:
    """The step without the shardings that it states itself: it runs anywhere, on one device too."""
    flat = constrained(program.jaxpr, Constraints({}, {}), None)

    def step(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.unflatten(program.out_tree, flat(*jax.tree.leaves((args, kwargs))))

    return _with_static(step, call)


def check_shapes(leaves: Sequence[Any], program: Program) -> None:
    """Raise `ArgumentError` where an argument has another shape or dtype than the plan is for."""
    for leaf, planned in zip(leaves, program.args, strict=True):
        shape = tuple(jax.numpy.shape(leaf))
        dtype = str(leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf))
        if shape != planned.aval.shape or dtype != planned.aval.dtype:
            raise ArgumentError(
                f"argument '{planned.path}' has {dtype}{list(shape)}, the plan is for "
                f"{planned.aval.dtype}{list(planned.aval.shape)}. Plan again for this shape, or pass what was planned."
            )


def jit_planned(data: PlanData, program: Program, call: Call, mesh: Any) -> Any:
    """An ordinary jitted function of the step's own arguments, with its shardings and donation."""
    _, kwargs = call.dynamic
    planned = planned_function(data, program, mesh)
    planned.__name__ = getattr(call.step, "__name__", "step")
    planned.__doc__ = getattr(call.step, "__doc__", None)
    static = call.static_argnums
    if static or set(call.kwargs) != set(kwargs):
        planned = _with_static(planned, call)
    out_shardings = shardings([r.spec for r in data.results], program.out_tree, mesh)
    specs = [a.spec for a in data.arguments]
    in_args, _ = shardings(specs, program.in_tree, mesh)
    if kwargs:
        return jax.jit(
            planned, static_argnums=static or None, static_argnames=call.static_argnames or None,
            donate_argnums=call.donate_argnums, out_shardings=out_shardings,
        )
    return jax.jit(
        planned, in_shardings=in_args, out_shardings=out_shardings, donate_argnums=call.donate_argnums,
        static_argnums=static or None, static_argnames=call.static_argnames or None,
    )


def _with_static(planned: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """Accept the static arguments where the step has them; they must be the planned ones."""

    def step(*args: Any, **kwargs: Any) -> Any:
        for i in call.static_argnums:
            if args[i] != call.args[i]:
                raise ArgumentError(f"static argument {i} is {args[i]!r}, planned was {call.args[i]!r}. Plan again.")
        for name in call.static_argnames:
            if kwargs.get(name) != call.kwargs.get(name):
                raise ArgumentError(
                    f"static argument '{name}' is {kwargs.get(name)!r}, planned was {call.kwargs.get(name)!r}. "
                    f"Plan again."
                )
        dynamic = [a for i, a in enumerate(args) if i not in call.static_argnums]
        return planned(*dynamic, **{k: v for k, v in kwargs.items() if k not in call.static_argnames})

    return step
