"""Seconds of the computation of one node under each of its strategies: a roofline.

A device works on its shard; what is replicated costs its full time on every device. A dot
takes the longer of its arithmetic and its memory traffic, a chain of elementwise operations
reads what enters it once and writes what leaves it. Sums inside a node are added as
all-reduces of the local result. `traffic` weighs what memory traffic adds to arithmetic: 1 where
nothing hides it, 0 where all of it is hidden behind arithmetic and communication.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshplan.cost._emission import Emission
from meshplan.cost._problem import Floats
from meshplan.cost._rates import Rates, Shares
from meshplan.program import Op, Program
from meshplan.strategy import Choices, Node

# Beginnings of the names of operations that decide for themselves, but add or compare elements instead of multiplying.
BY_ELEMENT = ("approx_top_k", "cum", "reduce_", "scatter", "select_and_", "sort", "top_k")


def node_seconds(
    program: Program, node: Node, choices: Choices, rates: Rates, traffic: float = 1.0, shares: Shares | None = None,
    waits: Callable[[int], bool] = lambda value: True,
) -> Floats:
    """(strategies,) seconds per step, the sums inside included. `waits(value)`: whether a product follows."""
    total = compute_seconds(program, node, choices, rates, traffic)
    for reduction in node.inner if not node.free else ():
        dtype = program.values[reduction.value].aval.dtype
        factor = rates.emission.bytes_factor(dtype, sums=True)
        local = program.nbytes(reduction.value) / choices.shards(reduction.dims) * factor
        over = choices.over(reduction.factors)
        sent = rates.emission.dtype(dtype, sums=True)
        seconds = rates.all_reduce(over, local, sent, waits(reduction.value), shares)
        total = total + node.count / reduction.trips * seconds
    return total + node.count * extra_seconds(program, node, choices, rates)


def extra_seconds(program: Program, node: Node, choices: Choices, rates: Rates) -> Floats:
    """(strategies,) seconds of what the back end brings for an operation besides its sums."""
    total = np.zeros(len(choices))
    for index in node.group.ops if node.group is not None and not node.free else ():
        op = program.ops[index]
        for extra in rates.emission.extras(op.view, op.rule):
            dims = node.group.operands[index, extra.operand]  # type: ignore[union-attr]
            others = tuple(d for k, d in enumerate(dims) if k != extra.dim)
            nbytes = op.view.operands[extra.operand].nbytes / choices.shards(others)
            total += rates.over_axes(extra.kind, choices.over(dims[extra.dim]), nbytes)
    return total


def compute_seconds(program: Program, node: Node, choices: Choices, rates: Rates, traffic: float = 1.0) -> Floats:
    """(strategies,) seconds per step of the computation alone."""
    total = np.zeros(len(choices))
    if node.group is None or node.free:
        return total
    if node.kind == "chain":
        return node.count * traffic * chain_seconds(program, node, choices, rates)
    for index in node.group.ops:
        total += op_seconds(program.ops[index], node, choices, rates, traffic)
    return total * node.count


def op_seconds(op: Op, node: Node, choices: Choices, rates: Rates, weight: float) -> Floats:
    assert node.group is not None
    chip = rates.machine.chip
    traffic = np.zeros(len(choices))
    factors: set[int] = set()
    for k, operand in enumerate(op.operands):
        if operand is not None:
            dims = node.group.operands[op.index, k]
            factors.update(f for d in dims for f in d)
            traffic += op.view.operands[k].nbytes / choices.shards(dims)
    for v, aval in zip(op.results, op.view.results, strict=True):
        dims = node.group.results[v]
        factors.update(f for d in dims for f in d)
        traffic += aval.nbytes / choices.shards(dims)
    moving = traffic / chip.memory_bytes_per_second
    peak = chip.flops_for(op.view.operands[0].dtype)
    arithmetic = multiplied(op, rates.emission) / choices.shards(factors) / peak
    return arithmetic + weight * (np.maximum(moving - arithmetic, 0.0) + rates.kernel_seconds)


def chain_seconds(program: Program, node: Node, choices: Choices, rates: Rates) -> Floats:
    assert node.group is not None
    traffic = np.zeros(len(choices))
    inside = node.group.results
    seen: set[int] = set()
    for (op, k), dims in node.group.operands.items():
        operand = program.ops[op].operands[k]
        if operand is not None and operand not in inside and operand not in seen:
            seen.add(operand)
            traffic += program.nbytes(operand) / choices.shards(dims)
    for v, dims in node.values.items():
        traffic += program.nbytes(v) / choices.shards(dims)
    return traffic / rates.machine.chip.memory_bytes_per_second + rates.kernel_seconds


def multiplied(op: Op, emission: Emission) -> float:
    """FLOPs of a product, of the whole arrays; 0 for what goes over each element a few times."""
    return 0.0 if op.primitive.startswith(BY_ELEMENT) else op.rule.flops * emission.flops_factor(op.view)


def op_flops(op: Op, node: Node, choices: Choices, emission: Emission) -> Floats:
    """(strategies,) FLOPs of one execution on one device."""
    assert node.group is not None
    operands = [node.group.operands[op.index, k] for k, v in enumerate(op.operands) if v is not None]
    factors = {f for dims in operands for d in dims for f in d}
    factors |= {f for v in op.results for d in node.group.results[v] for f in d}
    return multiplied(op, emission) / choices.shards(factors)
