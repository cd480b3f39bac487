"""The factor rule of one operation.

A factor is a dimension of an *operation*: `b s k, k f -> b s f` has factors b, s, k, f.
A mesh axis given to a factor splits every dim that carries the factor. A factor that
is in an operand but not in a result is reduced: each shard then holds a partial result,
to be combined (`combine`) over the axes given to it. A dim that carries no factor stays
whole. A dim may carry several factors (reshape merges dims): major to minor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Combine = Literal["sum", "max", "min", "mul", "and", "or"]
Dims = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Aval:
    """Shape and dtype name of a value, without jax types."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


@dataclass(frozen=True, slots=True)
class OpView:
    """What a rule may look at: the primitive's name, its operands and results, its parameters.

    `constants[i]` is the numpy value of operand i where it is a small literal, else None.
    """

    primitive: str
    operands: tuple[Aval, ...]
    results: tuple[Aval, ...]
    params: dict[str, Any]
    constants: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class OpRule:
    """Sizes of the factors and where each is.

    `operands[i][d]` and `results[i][d]` are the factors of dim d, major to minor; () = whole.
    `combine[f]` says how partial results combine for a reduced factor (default sum).
    `flops` of the whole operation (a multiply and an add count 2). `anchor` marks an operation
    that decides for itself rather than following its operands: dots, convolutions, gathers,
    scatters, sorts. `linear` are the operands in which the operation is linear while the others
    are fixed (an unreduced operand may then stay unreduced). `whole` explains, in words, why
    dims without a factor stay whole, where that is no law of the operation.
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    combine: dict[int, Combine] = field(default_factory=dict)
    flops: float = 0.0
    anchor: bool = False
    linear: tuple[int, ...] = ()
    whole: str = ""

    def reduced_factors(self) -> tuple[int, ...]:
        """Factors of operands that no result carries."""
        kept = {f for dims in self.results for d in dims for f in d}
        used = {f for dims in self.operands for d in dims for f in d}
        return tuple(sorted(used - kept))


RuleFn = Callable[[OpView], OpRule]


class FactorBuilder:
    """Hands out factors while a rule is written down."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def new(self, size: int) -> tuple[int, ...]:
        """A fresh factor as a dim's entry; () for size 1, which nothing can split."""
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def dims(self, shape: Iterable[int], whole: Container[int] = ()) -> list[tuple[int, ...]]:
        """A fresh factor for every dim of `shape`, () for the dims named in `whole`."""
        return [() if d in whole else self.new(size) for d, size in enumerate(shape)]

    def rule(
        self,
        operands: Iterable[Iterable[tuple[int, ...]]],
        results: Iterable[Iterable[tuple[int, ...]]],
        *,
        combine: Mapping[int, Combine] | None = None,
        flops: float = 0.0,
        anchor: bool = False,
        linear: tuple[int, ...] = (),
        whole: str = "",
    ) -> OpRule:
        """The rule with the factors handed out so far."""
        return OpRule(
            sizes=tuple(self.sizes),
            operands=tuple(tuple(dims) for dims in operands),
            results=tuple(tuple(dims) for dims in results),
            combine=dict(combine or {}),
            flops=float(flops),
            anchor=anchor,
            linear=linear,
            whole=whole,
        )
