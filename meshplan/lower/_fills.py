"""Broadcasts of one value that a program makes more than once, and the plan splits in different ways.

XLA merges equal operations before it partitions them, whatever their shardings: one broadcast is left, split as one of
its users has it, and the others gather what every device could fill by itself. So each is filled whole and then cut,
which costs nothing: the cut of a filled array is a smaller fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshplan.core import Spec
from meshplan.program import CROSSINGS, Key, Op, Program

# Whose operands may have size 1 where the result has more.
BROADCASTING = frozenset({
    "add", "and", "atan2", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "or", "pow", "rem", "sub",
    "xor",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fill:
    """Operand `operand` of `op` is repeated along the dims `new` of the result, which is left in `spec`."""

    op: Op
    operand: int
    new: frozenset[int]
    spec: Spec

    @property
    def path(self) -> tuple[Spec, ...]:
        """Whole along the new dims, then as it is wanted."""
        whole = Spec(tuple(() if d in self.new else axes for d, axes in enumerate(self.spec.dims)))
        return (whole, self.spec) if whole != self.spec else (whole,)


def mixed_fills(program: Program, results: Mapping[tuple[Key, int], tuple[Spec, ...]]) -> list[Fill]:
    """Equal fills of which the results' specs split some along the new dims, and others in another way."""
    fills = [f for op in program.ops if (path := results.get((op.key, 0))) for f in _fills(op, path[0])]
    groups: dict[object, list[Fill]] = {}
    for f in fills:
        view = f.op.view
        groups.setdefault((view.operands[f.operand], view.results[0].shape, f.new, f.op.region), []).append(f)
    groups = {place: g for place, g in groups.items() if len({f.spec for f in g}) > 1}
    if not groups:
        return []
    (numbers, free), equal = _numbers(program), {}
    for place, group in groups.items():
        for f in group:
            value = f.op.operands[f.operand]
            equal.setdefault((place, numbers[value], -1 if value in free else f.op.scope), []).append(f)
    mixed = [g for g in equal.values() if len({f.spec for f in g}) > 1]
    return [f for g in mixed if any(len(one.path) > 1 for one in g) for f in g]


def _fills(op: Op, spec: Spec) -> Iterable[Fill]:
    if op.primitive == "broadcast_in_dim":
        places = tuple(op.view.params["broadcast_dimensions"])
    elif op.primitive in BROADCASTING:
        places = tuple(range(len(op.view.results[0].shape)))
    else:
        return
    wide = op.view.results[0].shape
    for k, operand in enumerate(op.view.operands[: len(op.operands)]):
        if op.operands[k] is None or operand.size == 1 or len(operand.shape) != len(places):
            continue
        kept = {d for n, d in zip(operand.shape, places, strict=True) if n == wide[d]}
        new = frozenset(d for d, n in enumerate(wide) if n > 1 and d not in kept)
        if new:
            yield Fill(op, k, new, spec)


def _numbers(program: Program) -> tuple[dict[int | None, object], set[int | None]]:
    """(by value, what is equal for values that equal operations make of equal values; those made of literals alone).

    Of what is made of literals a rematerialised block makes no copy of its own.
    """
    known: dict[object, object] = {}
    numbers: dict[int | None, object] = {v: v for v in range(len(program.values))}
    free: set[int | None] = {None}
    for op in program.ops:
        if op.primitive in CROSSINGS:
            continue
        read = tuple(numbers[v] if v is not None else ("literal", k) for k, v in enumerate(op.operands))
        literal = all(v in free for v in op.operands)
        place = (op.region, -1 if literal else op.scope)
        constants = tuple(str(c) for c in op.view.constants)
        key = (op.primitive, str(op.view.params), constants, op.view.operands, read, place)
        first = known.setdefault(key, op.index)
        for r, v in enumerate(op.results):
            numbers[v] = ("made", first, r)
            if literal:
                free.add(v)
    return numbers, free
