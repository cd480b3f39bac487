"""What XLA:TPU does around a loop for what passes its edge, seen in compiled modules of scanned programs.

A conversion to a narrower type of what the loop only reads, whole or a slice at a time, is made once before it. A stack
of a product's results that a collective sums on their way (gradients) is filled with zeros before the loop, and brought
into the order of its dims after it: the product left them as suited it. Other stacks are written once, as they come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshplan.cost._compute_fuse import PRODUCTS, RENAMES
from meshplan.cost._compute_price import KernelPricer, Sizes
from meshplan.cost._problem import Floats
from meshplan.program import CROSSINGS, SLICE, STACK, Op, Program, runs_of


@dataclass(frozen=True, slots=True)
class Around:
    """Work around a loop: seconds of one execution, executions per step, the operation in the loop that it is for."""

    kind: Literal["elementwise", "move"]
    op: Op
    seconds: Floats
    count: float


def around_loops(
    program: Program, moved: frozenset[int], pricer: KernelPricer, sizes: Sizes
) -> Iterator[Around]:
    """All of it; nothing for chips whose compiler is not known to do so. `moved`: values that a collective moves."""
    if not pricer.fit.element_bytes:
        return
    converted: set[tuple[int, str]] = set()
    for op in program.ops:
        if op.view.results and op.view.results[0].size <= 1:
            continue
        if op.primitive == STACK and program.regions[op.region].trips:
            if _summed_product(program, op.operands[0], moved):
                yield _stacked(program, op, pricer, sizes)
        elif op.primitive == "convert_element_type" and op.region:
            source = _read_only(program, op)
            key = (source, op.view.results[0].dtype)
            if source >= 0 and key not in converted:
                converted.add(key)
                yield _converted(program, op, source, pricer, sizes)


def _stacked(program: Program, op: Op, pricer: KernelPricer, sizes: Sizes) -> Around:
    trips, itemsize = program.regions[op.region].trips, op.view.operands[0].itemsize
    elements = pricer.elements(op.view.operands[0].shape, sizes.operand(op, 0)) * trips
    fit, count = pricer.fit, op.count / trips
    written = max(itemsize, fit.element_bytes)
    nbytes = elements * (written + fit.alone_bytes) + elements * (itemsize + written + fit.transpose_bytes)
    return Around("move", op, pricer.passing(nbytes), count)


def _converted(program: Program, op: Op, source: int, pricer: KernelPricer, sizes: Sizes) -> Around:
    fit, before, after = pricer.fit, op.view.operands[0].itemsize, op.view.results[0].itemsize
    made = program.values[op.operands[0]].op  # type: ignore[index]
    sliced = made >= 0 and program.ops[made].primitive == SLICE
    trips = program.regions[op.region].trips if sliced else 1.0
    elements = pricer.elements(op.view.operands[0].shape, sizes.operand(op, 0)) * trips
    nbytes = elements * (before + after + fit.element_bytes + fit.alone_bytes)
    outer = runs_of(program.regions, program.regions[op.region].parent)
    return Around("elementwise", op, pricer.passing(nbytes), outer)


def _read_only(program: Program, op: Op) -> int:
    """The value from outside its loop that an operation narrows, whole or a slice at a time; -1 where it does not."""
    value = op.operands[0]
    if value is None or op.view.results[0].itemsize >= op.view.operands[0].itemsize:
        return -1
    made = program.values[value].op
    if made >= 0 and program.ops[made].primitive == SLICE and program.ops[made].region == op.region:
        value = program.ops[made].operands[0]
        return -1 if value is None else value
    outside = made < 0 or (program.ops[made].region != op.region and program.ops[made].primitive not in CROSSINGS)
    return value if outside else -1


def _summed_product(program: Program, value: int | None, moved: frozenset[int]) -> bool:
    """Whether a product makes the value, or what it is another type or shape of, and a collective moves it."""
    summed = False
    while value is not None and program.values[value].op >= 0:
        summed = summed or value in moved
        op = program.ops[program.values[value].op]
        if op.primitive in PRODUCTS:
            return summed
        if op.primitive not in RENAMES | {"convert_element_type", "transpose"}:
            return False
        value = op.operands[0]
    return False
