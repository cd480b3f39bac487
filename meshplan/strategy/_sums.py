"""Sums over shards that a compiler makes later than they are written: after additions, or after a loop."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from meshplan.program import CARRY, Op, Program
from meshplan.rules import JOINTLY_LINEAR

# Anchors whose sums over shards may be left undone until they are added to another.
SUMMING = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated", "scatter-add"})
# Which sums a back end completes after the loop that adds them up: none, those of one operation, also added ones.
Hoists = Literal["none", "single", "merged"]
# What may lie between a sum and where it is completed.
RESHAPING = frozenset({"convert_element_type", "reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim"})


def find_sums(program: Program) -> tuple[frozenset[int], frozenset[int]]:
    """(additions of values that may still be unreduced, conversions there and back between them).

    What may be unreduced: what only the addition reads of an anchor that sums, and such additions.
    """
    sums: set[int] = set()
    between: set[int] = set()
    results = {leaf.value for leaf in program.results}

    def partial(value: int | None, op: Op) -> list[int] | None:
        """The conversions between the sum and `op`; None where there is no such sum."""
        passed: list[int] = []
        while value is not None and program.values[value].op >= 0 and value not in results:
            made = program.ops[program.values[value].op]
            if (made.region, made.scope) != (op.region, op.scope) or len(program.consumers[value]) != 1:
                return None
            if made.primitive == "convert_element_type":
                passed.append(made.index)
                value = made.operands[0]
                continue
            if not (made.index in sums or (made.primitive in SUMMING and _is_sum(program, made.index))):
                return None
            return passed if program.values[value].aval.dtype == op.view.results[0].dtype else None
        return None

    for op in program.ops:
        if op.primitive in JOINTLY_LINEAR and len(op.operands) == 2:
            ways = [partial(v, op) for v in op.operands]
            if all(w is not None for w in ways):
                sums.add(op.index)
                between.update(i for w in ways if w for i in w)
    return frozenset(sums), frozenset(between)


def find_accumulated(program: Program, sums: Collection[int], hoists: Hoists) -> dict[int, int]:
    """Sums that a loop only adds to what it carries, each with that value: they are completed once, after the loop.

    `sums`: additions whose results may still be unreduced, which count where the back end `hoists` "merged" ones.
    Measured (GPU and TPU): through conversions and reshapes, out of the innermost loop alone, and only where neither
    the sum nor what is carried has another use in the body.
    """
    found: dict[int, int] = {}
    for op in program.ops if hoists != "none" else ():
        if op.primitive != CARRY or len(op.operands) != 2 or program.regions[op.region].trips <= 1:
            continue
        added = _addition(program, op)
        for value in added.operands if added is not None else ():
            if value is not None and value != op.results[0]:
                summed = _summed(program, value, op.region)
                made = program.values[summed].op if summed is not None else -1
                if summed is not None and (hoists == "merged" if made in sums else _is_sum(program, made)):
                    found[summed] = op.results[0]
    return found


def _addition(program: Program, carry: Op) -> Op | None:
    """The addition that alone reads a carry in its loop, if what it makes is carried on and no more."""
    back = carry.operands[1]
    if back is None or program.values[back].op < 0 or program.consumers[back] != [(carry.index, 1)]:
        return None
    added = program.ops[program.values[back].op]
    if added.primitive not in ("add", "add_any") or added.region != carry.region:
        return None
    read = [use for use, _ in program.consumers[carry.results[0]] if _inside(program, use, carry.region)]
    return added if read == [added.index] else None


def _inside(program: Program, op: int, region: int) -> bool:
    here = program.ops[op].region
    while here >= 0 and here != region:
        here = program.regions[here].parent
    return here == region


def _summed(program: Program, value: int, region: int) -> int | None:
    """The value of the region that arrives as this one through conversions and reshapes, read by nothing else."""
    while program.values[value].op >= 0 and len(program.consumers[value]) == 1:
        made = program.ops[program.values[value].op]
        if made.region != region:
            return None
        if not _reshapes(made) or made.operands[0] is None:
            return value
        value = made.operands[0]
    return None


def reshaped_inside(program: Program, value: int, inside: Collection[int]) -> list[int]:
    """The value, then what operations `inside` reshape or convert it to until it leaves; [] where they use it else."""
    results = {leaf.value for leaf in program.results}
    way = [value]
    while uses := [use for use, _ in program.consumers[way[-1]] if use in inside]:
        op = program.ops[uses[0]]
        alone = len(program.consumers[way[-1]]) == 1 and way[-1] not in results
        if not alone or not _reshapes(op):
            return []
        way.append(op.results[0])
    return way


def _reshapes(op: Op) -> bool:
    return op.primitive in RESHAPING and op.view.operands[0].size == op.view.results[0].size


def _is_sum(program: Program, op: int) -> bool:
    rule = program.ops[op].rule
    return bool(rule.reduced_factors()) and set(rule.combine.values()) <= {"sum"}
