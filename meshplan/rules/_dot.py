"""Products that contract dims: batch, free and contracting factors."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

from meshplan.rules._rule import Dims, FactorBuilder, OpRule, OpView, RuleFn


def _dot_dims(
    lhs: tuple[int, ...], rhs: tuple[int, ...], numbers: Any, builder: FactorBuilder, whole: tuple[set[int], set[int]]
) -> tuple[Dims, Dims, Dims]:
    """Entries of lhs, rhs and of the result (batch, free of lhs, free of rhs); `whole`: dims of each left alone."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    left: list[tuple[int, ...]] = [()] * len(lhs)
    right: list[tuple[int, ...]] = [()] * len(rhs)
    for pairs in (zip(lhs_batch, rhs_batch, strict=True), zip(lhs_contract, rhs_contract, strict=True)):
        for i, j in pairs:
            if i not in whole[0] and j not in whole[1]:
                left[i] = right[j] = builder.new(lhs[i])
    free_left = [d for d in range(len(lhs)) if d not in (*lhs_contract, *lhs_batch)]
    free_right = [d for d in range(len(rhs)) if d not in (*rhs_contract, *rhs_batch)]
    for d in free_left:
        left[d] = () if d in whole[0] else builder.new(lhs[d])
    for d in free_right:
        right[d] = () if d in whole[1] else builder.new(rhs[d])
    result = [left[d] for d in lhs_batch] + [left[d] for d in free_left] + [right[d] for d in free_right]
    return tuple(left), tuple(right), tuple(result)


def dot_general(view: OpView) -> OpRule:
    """`batch free_l contract, batch free_r contract -> batch free_l free_r`; linear in either operand."""
    lhs, rhs = view.operands[0].shape, view.operands[1].shape
    numbers = view.params["dimension_numbers"]
    builder = FactorBuilder()
    left, right, result = _dot_dims(lhs, rhs, numbers, builder, (set(), set()))
    contracted = math.prod(lhs[d] for d in numbers[0][0])
    flops = 2.0 * view.results[0].size * contracted
    return builder.rule([left, right], [result], flops=flops, anchor=True, linear=(0, 1))


def ragged_dot_general(view: OpView) -> OpRule:
    """`ragged_dot`: groups of rows of lhs meet different matrices of rhs; ragged and group dims stay whole.

    A ragged batch dim is a batch dim for the rule too, and stays whole as the other ragged dims do.
    """
    lhs, rhs = view.operands[0].shape, view.operands[1].shape
    spec = view.params["ragged_dot_dimension_numbers"]
    ragged, groups = set(spec.lhs_ragged_dimensions), set(spec.rhs_group_dimensions)
    numbers = spec.dot_dimension_numbers
    (lhs_contract, _), (lhs_batch, _) = numbers
    builder = FactorBuilder()
    left, right, full = _dot_dims(lhs, rhs, numbers, builder, (ragged, groups))
    batch, free = len(lhs_batch), len(lhs) - len(lhs_batch) - len(lhs_contract)
    free_right = [d for d in range(len(rhs)) if d not in numbers[0][1] and d not in numbers[1][1]]
    tail = [entry for d, entry in zip(free_right, full[batch + free :], strict=True) if d not in groups]
    result = [*full[: batch + free], *tail]
    extra = len(view.results[0].shape) - len(result)
    result = [()] * extra + result  # ragged contraction: the groups lead the result
    flops = 2.0 * lhs_work(lhs, rhs, numbers, groups)
    sizes = [[()] * len(a.shape) for a in view.operands[2:]]
    return builder.rule(
        [left, right, *sizes], [result], flops=flops, anchor=True, linear=(0, 1),
        whole="the ragged dim and the dim of the groups stay whole: a shard would hold parts of several groups",
    )  # fmt: skip


def lhs_work(lhs: tuple[int, ...], rhs: tuple[int, ...], numbers: Any, groups: set[int]) -> int:
    """Multiply-adds of a ragged dot: every row of lhs meets one group's free columns."""
    columns = [n for d, n in enumerate(rhs) if d not in numbers[0][1] and d not in numbers[1][1] and d not in groups]
    return math.prod(lhs) * math.prod(columns)


RULES: MappingProxyType[str, RuleFn] = MappingProxyType({
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot_general,
})  # fmt: skip
