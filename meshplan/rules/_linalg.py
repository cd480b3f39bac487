"""Matrix decompositions and transforms: batch dims are factors, matrix dims stay whole.

Work counts are the leading terms of the usual dense algorithms (Golub and Van Loan, Matrix
Computations, 4th edition); a transform of n points counts 5 n log2 n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from meshplan.rules._elementwise import whole_rule
from meshplan.rules._rule import FactorBuilder, OpRule, OpView, RuleFn

_MATRIX = "the decomposition of a matrix is not put together from those of its parts"
Work = Callable[[tuple[int, ...], tuple[int, ...]], float]
Columns = Callable[[Mapping[str, Any]], int]


def batched(
    core: int, work: Work, linear: tuple[int, ...] = (), reason: str = _MATRIX, columns: Columns | None = None
) -> RuleFn:
    """The rule where operand 0's last `core` dims are the matrix (or vector) and all before are batch dims.

    `work(first, last)` are the operations for one matrix, from the first and last operand's own dims.
    `columns(params)`: the dim, counted from the end, of the last operand and the result whose rows are
    independent of each other (right-hand sides).
    """

    def rule(view: OpView) -> OpRule:
        batch = view.operands[0].shape[: len(view.operands[0].shape) - core]
        arrays = [*view.operands, *view.results]
        if any(a.shape[: len(batch)] != batch for a in arrays):
            return whole_rule(view, f"{view.primitive} of operands with different batch dims")
        builder = FactorBuilder()
        factors = builder.dims(batch)
        entries = [factors + [()] * (len(a.shape) - len(batch)) for a in arrays]
        if columns is not None:
            dim = columns(view.params)
            entries[len(view.operands) - 1][dim] = entries[-1][dim] = builder.new(view.results[0].shape[dim])
        first, last = (view.operands[i].shape[len(batch) :] for i in (0, -1))
        return builder.rule(
            entries[: len(view.operands)], entries[len(view.operands) :], flops=math.prod(batch) * work(first, last),
            anchor=True, linear=linear, whole=reason,
        )  # fmt: skip

    return rule


def _sides(params: Mapping[str, Any]) -> int:
    """Right-hand sides are columns where the matrix stands left of them, else rows."""
    return -1 if params.get("left_side", params.get("left")) else -2


def _square(scale: float) -> Work:
    """scale * n^3 for an n x n matrix."""
    return lambda first, last: scale * first[-1] ** 3


def _tall(scale: float, cubic: float = 0.0) -> Work:
    """scale * m n k + cubic * k^3 for an m x n matrix, k = min(m, n)."""
    return lambda first, last: scale * math.prod(first) * min(first) + cubic * min(first) ** 3


def _per_column(scale: float) -> Work:
    """scale * n for every element of the last operand, n x n being the first."""
    return lambda first, last: scale * first[-1] * math.prod(last)


def fft(view: OpView) -> OpRule:
    """Transformed dims (the last ones) stay whole."""
    operand, result = view.operands[0].shape, view.results[0].shape
    lengths = view.params["fft_lengths"]
    builder = FactorBuilder()
    factors = builder.dims(operand[: len(operand) - len(lengths)])
    points = max(math.prod(operand), math.prod(result))
    flops = 5.0 * points * sum(math.log2(max(n, 2)) for n in lengths)
    whole = [()] * len(lengths)
    return builder.rule(
        [factors + whole], [factors + whole], flops=flops, anchor=True, linear=(0,),
        whole="every output of a transform depends on every input",
    )  # fmt: skip


RULES: MappingProxyType[str, RuleFn] = MappingProxyType({
    "cholesky": batched(2, _square(1 / 3)),
    "cholesky_update": batched(2, _per_column(2.0)),
    "triangular_solve": batched(2, _per_column(1.0), linear=(1,), columns=_sides),
    "lu": batched(2, _tall(1.0, -1 / 3)),
    "qr": batched(2, _tall(4.0)),
    "geqrf": batched(2, _tall(2.0)),
    "geqp3": batched(2, _tall(4.0)),
    "householder_product": batched(2, _tall(2.0)),
    "ormqr": batched(2, _per_column(4.0), linear=(2,), columns=_sides),
    "eigh": batched(2, _square(9.0)),
    "eig": batched(2, _square(25.0)),
    "schur": batched(2, _square(25.0)),
    "hessenberg": batched(2, _square(10 / 3)),
    "svd": batched(2, _tall(4.0, 22.0)),
    "tridiagonal": batched(2, _square(4 / 3)),
    "tridiagonal_solve": batched(
        1, lambda first, last: 8.0 * math.prod(last), linear=(3,), columns=lambda params: -1
    ),
    "symmetric_product": batched(2, lambda first, last: 2.0 * math.prod(first) * last[-1]),
    "lu_pivots_to_permutation": batched(
        1, lambda first, last: float(first[-1]), reason="pivots are applied in the order of the matrix' rows"
    ),
    "fft": fft,
})  # fmt: skip
