"""Trace a user's step and flatten it into a `Program`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshplan.core import SpecError, TraceError
from meshplan.hints import (
    Followed,
    Pin,
    argument_names,
    followed_leaves,
    leaf_paths,
    named_leaves,
    pin_of,
    pin_of_sharding,
    walk,
)
from meshplan.program._flatten import RuleFor, Walker
from meshplan.program._program import CARRY, CROSSINGS, SLICE, Leaf, Program
from meshplan.rules import (
    Aval,
    OpRule,
    OpView,
    UserRule,
    fixed_rule,
    fixed_specs,
    rule_for,
    rule_names,
    whole_reason,
    whole_rule,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A step and how it is called: static and donated arguments are positions, as in `jax.jit`."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    name: str = ""

    @property
    def dynamic(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that are arrays: (positional, by keyword)."""
        args = tuple(a for i, a in enumerate(self.args) if i not in self.static_argnums)
        return args, {k: v for k, v in sorted(self.kwargs.items()) if k not in self.static_argnames}

    def argument_names(self) -> tuple[str, ...]:
        """Names of the dynamic arguments, positional ones first."""
        names = argument_names(self.step, len(self.args))
        kept = tuple(n for i, n in enumerate(names) if i not in self.static_argnums)
        return kept + tuple(self.dynamic[1])


def crossing_rule(view: OpView) -> OpRule:
    """Rule of an operation that moves values over a region's edge; the scanned dim is never split."""
    result = view.results[0]
    sizes, dims = [], []
    for n in result.shape:
        dims.append((len(sizes),) if n > 1 else ())
        if n > 1:
            sizes.append(n)
    inner = tuple(dims)
    if view.primitive == SLICE:
        return OpRule(tuple(sizes), (((), *inner),), (inner,))
    if view.primitive == "region.stack":
        operand = view.operands[0]
        sizes = [n for n in operand.shape if n > 1]
        dims, k = [], 0
        for n in operand.shape:
            dims.append((k,) if n > 1 else ())
            k += n > 1
        return OpRule(tuple(sizes), (tuple(dims),), (((), *dims),))
    copies = 2 if view.primitive == CARRY else len(view.operands)
    return OpRule(tuple(sizes), (inner,) * copies, (inner,))


def make_rule_for(extra: Mapping[str, UserRule]) -> RuleFor:
    """Finds an operation's rule, and whether there is one: the user's `extra` first; without any, all stays whole."""
    def find(view: OpView) -> tuple[OpRule, bool]:
        if view.primitive in CROSSINGS:
            return crossing_rule(view), True
        fixed = fixed_specs(view)
        if fixed is not None:
            return fixed_rule(fixed), True
        rule = rule_for(view, extra)
        if rule is not None and rule.sizes and view.primitive == "pallas_call" and rule.on_shards is None:
            name = rule_names(view)[0]
            raise SpecError(
                f"rule of '{name}': the grid of a pallas_call is that of whole arrays, so that no shard can run it as "
                "it is. Give the function too that makes the call for a shard's operands: "
                f"rules={{'{name}': (rule, function)}}."
            )
        return (rule, True) if rule is not None else (whole_rule(view, whole_reason(view.primitive)), False)

    return find


def trace(
    call: Call, *, rules: Mapping[str, UserRule] | None = None, follow: bool = True, cut_names: bool = False
) -> Program:
    """The program of `call.step` on the shapes of its arguments.

    `follow`: shardings written in the step and on its arguments are pins. `cut_names`: values that `mp.dims` names
    can be pinned too.

    Raises `TraceError` with JAX's own error as its cause where the step does not trace.
    """
    jitted = jax.jit(
        call.step, static_argnums=call.static_argnums or None, static_argnames=call.static_argnames or None
    )
    try:
        traced = jitted.trace(*call.args, **call.kwargs)
    except Exception as error:
        name = getattr(call.step, "__name__", str(call.step))
        shapes = ", ".join(call.argument_names())
        raise TraceError(
            f"step '{name}' does not trace with arguments ({shapes}); JAX says: {str(error).splitlines()[0]}"
        ) from error
    args, kwargs = call.dynamic
    return _flatten(call, traced, args, kwargs, Walker(make_rule_for(rules or {}), follow, cut_names))


def _flatten(call: Call, traced: Any, args: tuple[Any, ...], kwargs: dict[str, Any], walker: Walker) -> Program:
    from meshplan.core import _jax

    dynamic = (*args, *kwargs.values())
    paths = leaf_paths(dynamic, call.argument_names())
    names = named_leaves(dynamic)
    jaxpr, consts = _jax.open_jaxpr(traced.jaxpr)
    inputs = [
        walker.new_value(walker.aval(v.aval), path=path) for v, path in zip(jaxpr.invars, paths, strict=True)
    ]
    for value, dims in zip(inputs, names, strict=True):
        if dims is not None and len(dims) == len(walker.values[value].aval.shape):
            walker.names[value] = dims
    if walker.follow:
        walker.pins |= _argument_pins(dynamic, inputs, paths)
    outs = walker.walk(jaxpr, consts, inputs, (), 0, 0)
    donated = _donated_leaves(call, args)
    out_info = traced.out_info
    out_tree = jax.tree.structure(out_info)
    out_paths = _result_paths(out_info)
    arg_leaves = [Leaf(v, p, walker.values[v].aval) for v, p in zip(inputs, paths, strict=True)]
    out_leaves = [
        Leaf(o if isinstance(o, int) else None, p, Aval(tuple(i.shape), str(i.dtype), i.dtype.itemsize))
        for o, p, i in zip(outs, out_paths, jax.tree.leaves(out_info), strict=True)
    ]
    arg_leaves, out_leaves = _pair(arg_leaves, out_leaves, donated)
    consumers: list[list[tuple[int, int]]] = [[] for _ in walker.values]
    for op in walker.ops:
        for k, operand in enumerate(op.operands):
            if operand is not None:
                consumers[operand].append((op.index, k))
    notes = _notes(walker)
    return Program(
        values=walker.values, ops=walker.ops, regions=walker.regions, args=tuple(arg_leaves),
        results=tuple(out_leaves), names=walker.names, jaxpr=traced.jaxpr,
        in_tree=jax.tree.structure((args, kwargs)), out_tree=out_tree, notes=notes, consumers=consumers,
        states_shardings=walker.states_shardings, pins=walker.pins, blocks=tuple(walker.blocks),
        **_follows(dynamic, out_info),
    )


def _argument_pins(dynamic: Any, inputs: Sequence[int], paths: Sequence[str]) -> dict[int, Pin]:
    """What the shardings of arrays and `ShapeDtypeStruct`s among the arguments fix, and annotations of frameworks."""
    found = {}
    for view, value, path in zip(walk(dynamic), inputs, paths, strict=True):
        ndim, where = len(view.shape), f"the sharding of '{path}'"
        pin = pin_of_sharding(getattr(view.leaf, "sharding", None), ndim, where)
        if pin is None and view.written is not None and len(view.written.entries) <= ndim:
            pin = pin_of(view.written.entries, ndim, where, view.written.mesh)
        if pin is not None:
            found[value] = pin
    return found


def _follows(dynamic: Any, out_info: Any) -> dict[str, dict[int, Followed]]:
    """Leaves of optimizer states among the arguments and among the results, by the parameters that they belong to."""
    count = len(jax.tree.leaves(dynamic))
    found = followed_leaves([*walk(dynamic), *walk(out_info)])
    mine = {i: f for i, f in found.items() if f.parameter < count}
    return {
        "follows": {i: f for i, f in mine.items() if i < count},
        "results_follow": {i - count: f for i, f in mine.items() if i >= count},
    }


def _result_paths(out_info: Any) -> tuple[str, ...]:
    if isinstance(out_info, tuple) and not hasattr(out_info, "_fields"):
        return leaf_paths(out_info, tuple(str(i) for i in range(len(out_info))))
    return leaf_paths((out_info,), ("0",))


def _donated_leaves(call: Call, args: tuple[Any, ...]) -> list[bool]:
    flags: list[bool] = []
    positions = [i for i in range(len(call.args)) if i not in call.static_argnums]
    for position, arg in zip(positions, args, strict=True):
        flags += [position in call.donate_argnums] * len(jax.tree.leaves(arg))
    return flags + [False] * len(jax.tree.leaves(call.dynamic[1]))


def _pair(args: list[Leaf], results: list[Leaf], donated: Sequence[bool]) -> tuple[list[Leaf], list[Leaf]]:
    """Join donated arguments with the results that take their place: same path below the root,
    else the next result of the same shape and dtype."""
    free: dict[tuple[str, Aval], list[int]] = {}
    by_aval: dict[Aval, list[int]] = {}
    for j, leaf in enumerate(results):
        free.setdefault((_below_root(leaf.path), leaf.aval), []).append(j)
        by_aval.setdefault(leaf.aval, []).append(j)
    pair_of_arg, pair_of_result = [-1] * len(args), [-1] * len(results)

    def join(i: int, candidates: list[int]) -> None:
        for j in candidates:
            if pair_of_result[j] < 0:
                pair_of_arg[i], pair_of_result[j] = j, i
                return

    wanted = [i for i in range(len(args)) if i < len(donated) and donated[i]]
    for i in wanted:
        join(i, free.get((_below_root(args[i].path), args[i].aval), []))
    for i in wanted:
        if pair_of_arg[i] < 0:
            join(i, by_aval.get(args[i].aval, []))
    return (
        [Leaf(x.value, x.path, x.aval, p) for x, p in zip(args, pair_of_arg, strict=True)],
        [Leaf(x.value, x.path, x.aval, p) for x, p in zip(results, pair_of_result, strict=True)],
    )


def _below_root(path: str) -> str:
    return path.partition("/")[2]


def _notes(walker: Walker) -> tuple[str, ...]:
    unruled: dict[str, float] = {}
    for op in walker.ops:
        if not op.ruled:
            size = sum(walker.values[v].aval.nbytes for v in (*op.results, *(o for o in op.operands if o is not None)))
            name = rule_names(op.view)[0]  # of the kernel, where it has one
            unruled[name] = unruled.get(name, 0.0) + size * op.count
    notes = [
        f"primitive '{name}' has no sharding rule: kept whole, {size / 1e6:.3g} MB per step are not split. "
        f"Give one with Options(rules={{'{name}': ...}})"
        for name, size in sorted(unruled.items())
    ]
    notes += dict.fromkeys(
        f"{op.primitive} at {op.source or 'an unknown line'}: {op.rule.refused}" for op in walker.ops if op.rule.refused
    )
    notes += [
        f"{name} is opened ({count} times): the compiler sees its operations, not what it was told by that name"
        for name, count in sorted(walker.opened.items())
    ]
    notes += dict.fromkeys(
        f"shard_map at {op.source or 'an unknown line'} runs as it is written: what it computes and sends inside is "
        "not priced" for op in walker.ops if op.rule.opaque
    )
    loops = [r for r in walker.regions if r.kind == "while" and not r.known_trips]
    if loops:
        notes.append(f"{len(loops)} while loop(s) with an unknown number of trips are priced as one trip")
    if walker.ignored_constraints:
        why = "they name no axes" if walker.follow else "as Options(follow_shardings=False) asks"
        notes.append(
            f"{walker.ignored_constraints} sharding(s) written in the step are not followed, {why}: the plan's specs "
            "take their place"
        )
    return tuple(notes)
