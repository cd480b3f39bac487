"""Reshape: dims matched by their common refinement, major to minor."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshplan.rules._rule import FactorBuilder, OpRule, OpView

Entries = list[tuple[int, ...]]


def _groups(left: Sequence[int], right: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Shortest runs of dims of both sides that hold the same number of elements; dims of size 1 are in none."""
    groups: list[tuple[list[int], list[int]]] = []
    a = [d for d, n in enumerate(left) if n != 1]
    b = [d for d, n in enumerate(right) if n != 1]
    i = j = 0
    while i < len(a) and j < len(b):
        lefts, rights = [a[i]], [b[j]]
        size_left, size_right = left[a[i]], right[b[j]]
        i, j = i + 1, j + 1
        while size_left != size_right:
            if size_left < size_right:
                lefts.append(a[i])
                size_left *= left[a[i]]
                i += 1
            else:
                rights.append(b[j])
                size_right *= right[b[j]]
                j += 1
        groups.append((lefts, rights))
    return groups


def _refine(left: list[int], right: list[int], builder: FactorBuilder) -> tuple[Entries, Entries, bool]:
    """Factors of one group, from the major side as far as both sides share them; False where they stop early.

    [4, 6] -> [8, 3] gives 4, 2, 3. [6, 4] -> [8, 3] gives 2 and stops: 3 * 4 and 4 * 3 share no
    cut. What is left is the minor part of its dim, and stays whole.
    """
    entries_left: Entries = [()] * len(left)
    entries_right: Entries = [()] * len(right)
    i = j = 0
    rest_left, rest_right = left[0], right[0]
    while True:
        common = math.gcd(rest_left, rest_right)
        if common == 1:
            return entries_left, entries_right, False
        factor = builder.new(common)
        entries_left[i] += factor
        entries_right[j] += factor
        rest_left, rest_right = rest_left // common, rest_right // common
        if rest_left == 1:
            i += 1
        if rest_right == 1:
            j += 1
        if i == len(left):
            return entries_left, entries_right, True
        rest_left = left[i] if rest_left == 1 else rest_left
        rest_right = right[j] if rest_right == 1 else rest_right


def match_dims(left: Sequence[int], right: Sequence[int], builder: FactorBuilder) -> tuple[Entries, Entries, str]:
    """Entries of both shapes of a reshape, and the reason why some part stays whole ('' where none does)."""
    entries_left: Entries = [()] * len(left)
    entries_right: Entries = [()] * len(right)
    reason = ""
    if math.prod(left) == 0:
        return entries_left, entries_right, "an array without elements cannot be split"
    for dims_left, dims_right in _groups(left, right):
        sizes_left, sizes_right = [left[d] for d in dims_left], [right[d] for d in dims_right]
        got_left, got_right, complete = _refine(sizes_left, sizes_right, builder)
        for d, entry in zip(dims_left, got_left, strict=True):
            entries_left[d] = entry
        for d, entry in zip(dims_right, got_right, strict=True):
            entries_right[d] = entry
        if not complete:
            reason = f"dims {sizes_left} and {sizes_right} share no further cut"
    return entries_left, entries_right, reason


def reshape(view: OpView) -> OpRule:
    """`[B, H*D] -> [B, H, D]`: dim 1 of the operand carries (h, d), major to minor.

    Where a dim carries factors whose sizes multiply to less than the dim, the rest is its minor
    part and stays whole. `dimensions` (a transpose first) is followed.
    """
    shape, result = view.operands[0].shape, view.results[0].shape
    order = view.params.get("dimensions") or tuple(range(len(shape)))
    builder = FactorBuilder()
    permuted, right, reason = match_dims([shape[d] for d in order], result, builder)
    left: Entries = [()] * len(shape)
    for d, entry in zip(order, permuted, strict=True):
        left[d] = entry
    others = [[()] * len(a.shape) for a in view.operands[1:]]
    return builder.rule([left, *others], [right], linear=(0,), whole=reason)
