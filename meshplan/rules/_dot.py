"""Products that contract dims: batch, free and contracting factors."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

from meshplan.rules._rule import FactorBuilder, OpRule, OpView, RuleFn

Entry = tuple[int, ...]


def _dot_dims(
    lhs: tuple[int, ...], rhs: tuple[int, ...], numbers: Any, builder: FactorBuilder
) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """Entries of lhs, rhs and of the result (batch, free of lhs, free of rhs)."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    left: list[Entry] = [()] * len(lhs)
    right: list[Entry] = [()] * len(rhs)
    for pairs in (zip(lhs_batch, rhs_batch, strict=True), zip(lhs_contract, rhs_contract, strict=True)):
        for i, j in pairs:
            left[i] = right[j] = builder.new(lhs[i])
    free_left = [d for d in range(len(lhs)) if d not in (*lhs_contract, *lhs_batch)]
    free_right = [d for d in range(len(rhs)) if d not in (*rhs_contract, *rhs_batch)]
    for d in free_left:
        left[d] = builder.new(lhs[d])
    for d in free_right:
        right[d] = builder.new(rhs[d])
    result = [left[d] for d in lhs_batch] + [left[d] for d in free_left] + [right[d] for d in free_right]
    return left, right, result


def dot_general(view: OpView) -> OpRule:
    """`batch free_l contract, batch free_r contract -> batch free_l free_r`; linear in either operand."""
    lhs, rhs = view.operands[0].shape, view.operands[1].shape
    numbers = view.params["dimension_numbers"]
    builder = FactorBuilder()
    left, right, result = _dot_dims(lhs, rhs, numbers, builder)
    contracted = math.prod(lhs[d] for d in numbers[0][0])
    flops = 2.0 * view.results[0].size * contracted
    return builder.rule([left, right], [result], flops=flops, anchor=True, linear=(0, 1))


def scaled_dot(view: OpView) -> OpRule:
    """`dot_general` of operands with a scale for every stretch of a contracted dim, which is not cut.

    A contracted dim carries the factor of its stretches, whose number both operands' scales must agree on.
    """
    lhs, rhs = view.operands[0].shape, view.operands[1].shape
    numbers = view.params["dimension_numbers"]
    (lhs_contract, rhs_contract), _ = numbers
    builder = FactorBuilder()
    stretches = [
        math.gcd(*(a.shape[d] for a, d in zip(view.operands, (i, j, i, j), strict=False)))
        for i, j in zip(lhs_contract, rhs_contract, strict=True)
    ]
    shapes = [list(lhs), list(rhs)]
    for i, j, n in zip(lhs_contract, rhs_contract, stretches, strict=True):
        shapes[0][i] = shapes[1][j] = n
    left, right, result = _dot_dims(tuple(shapes[0]), tuple(shapes[1]), numbers, builder)
    flops = 2.0 * view.results[0].size * math.prod(lhs[d] for d in lhs_contract)
    entries = [left, right, left, right][: len(view.operands)]
    return builder.rule(entries, [result], flops=flops, anchor=True, linear=(0, 1))


def ragged_dot_general(view: OpView) -> OpRule:
    """`ragged_dot`: groups of rows of lhs meet different matrices of rhs.

    The ragged dim splits: a shard counts which of its rows belong to which group. So does the dim of
    the groups: a shard multiplies the rows of its groups and leaves zeros for the others, and the parts sum;
    where the ragged dim is contracted the groups lead the result, and every shard makes its own.
    `group_sizes` is read whole but for dims it shares with lhs.
    """
    lhs, rhs = view.operands[0].shape, view.operands[1].shape
    spec = view.params["ragged_dot_dimension_numbers"]
    (ragged,), groups = spec.lhs_ragged_dimensions, tuple(spec.rhs_group_dimensions)
    (lhs_contract, _), (lhs_batch, _) = numbers = spec.dot_dimension_numbers
    builder = FactorBuilder()
    left, right, full = _dot_dims(lhs, rhs, numbers, builder)
    free_right = [d for d in range(len(rhs)) if d not in numbers[0][1] and d not in numbers[1][1]]
    lead = len(full) - len(free_right)
    result = full[:lead] + [f for d, f in zip(free_right, full[lead:], strict=True) if d not in groups]
    missing = len(view.results[0].shape) - len(result)
    result = [builder.new(n) for n in view.results[0].shape[:missing]] + result
    free = [d for d in range(len(lhs)) if d not in (*lhs_contract, *lhs_batch)]
    kind = lhs_contract if ragged in lhs_contract else lhs_batch if ragged in lhs_batch else free
    prefix = [*(() if kind is lhs_batch else lhs_batch), *kind[: list(kind).index(ragged)]]
    counts = view.operands[2].shape
    shared = [left[d] for d in prefix][: len(counts) - 1]
    columns = [rhs[d] for d in free_right if d not in groups]
    return builder.rule(
        [left, right, [*shared, ()], *([()] * len(a.shape) for a in view.operands[3:])], [result],
        flops=2.0 * math.prod(lhs) * math.prod(columns), anchor=True, linear=(0, 1),
    )  # fmt: skip


RULES: MappingProxyType[str, RuleFn] = MappingProxyType({
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot_general,
    "scaled_dot": scaled_dot,
})  # fmt: skip
