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
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Combine = Literal["sum", "max", "min", "mul", "and", "or"]
Dims = tuple[tuple[int, ...], ...]
Bounds = tuple[int, int]


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

    `constants[i]` is the numpy value of operand i where it is a small literal, else None;
    `bounds[i]` the least and the largest value that an element of operand i can have, None where
    nothing is known (see `result_bounds`).
    """

    primitive: str
    operands: tuple[Aval, ...]
    results: tuple[Aval, ...]
    params: dict[str, Any]
    constants: tuple[Any, ...] = ()
    bounds: tuple[Bounds | None, ...] = ()

    def bounds_of(self, i: int) -> Bounds | None:
        """Least and largest value of operand i, from its literal or from what is known of the program."""
        constant = self.constants[i] if i < len(self.constants) else None
        if constant is not None and constant.size and constant.dtype.kind in "iub":
            return int(constant.min()), int(constant.max())
        return self.bounds[i] if i < len(self.bounds) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Halo:
    """Dims that split once shards have exchanged the rows at their borders.

    Operand dims of `size` rows, result dims of `out`, all cut into the same number of blocks, which must
    divide both. Result row i reads rows i * stride - low .. i * stride - low + window - 1 of the operand after
    `dilation` - 1 empty rows were put between any two (`size` counts the rows before that);
    `reverse`: of the operand read backwards.
    Source: the halo exchange of GSPMD (Xu et al. 2021, section 4.3).
    """

    operands: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]
    size: int
    out: int
    window: int = 1
    stride: int = 1
    low: int = 0
    dilation: int = 1
    reverse: bool = False

    def reads(self, index: int, count: int) -> tuple[int, int]:
        """First and last row that block `index` of `count` reads, counting empty rows, padding below 0."""
        block = self.out // count
        first = index * block * self.stride - self.low
        return first, first + (block - 1) * self.stride + self.window - 1

    def rows(self, index: int, count: int) -> tuple[int, int]:
        """First row of the operand that block `index` of `count` reads, and the row after the last."""
        first, last = self.reads(index, count)
        start, stop = max(0, -(-first // self.dilation)), min(self.size, last // self.dilation + 1)
        if stop <= start:
            return 0, 0
        return (self.size - stop, self.size - start) if self.reverse else (start, stop)

    def received(self, count: int) -> int:
        """The most rows that one of `count` shards needs from others: what a shard waits for."""
        block = self.size // count
        most = 0
        for index in range(count):
            start, stop = self.rows(index, count)
            own = max(0, min(stop, (index + 1) * block) - max(start, index * block))
            most = max(most, stop - start - own)
        return most


@dataclass(frozen=True, slots=True)
class Fixed:
    """Specs that an operation demands (`shard_map`): mesh axes with their sizes, axes per dim of each array."""

    axes: tuple[tuple[str, int], ...]
    operands: tuple[tuple[tuple[str, ...], ...], ...]
    results: tuple[tuple[tuple[str, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class OpRule:
    """Sizes of the factors and where each is.

    `operands[i][d]` and `results[i][d]` are the factors of dim d, major to minor; () = whole.
    `combine[f]` says how partial results combine for a reduced factor (default sum).
    `flops` of the whole operation (a multiply and an add count 2). `anchor` marks an operation
    that decides for itself rather than following its operands: dots, convolutions, gathers,
    scatters, sorts. `linear` are the operands in which the operation is linear while the others
    are fixed (an unreduced operand may then stay unreduced). `whole` explains, in words, why
    dims without a factor stay whole, where that is no law of the operation; `refused`, which of these are whole because
    XLA computes wrong numbers otherwise, and what the user can do.
    `on_shards`: what a shard does with its parts of the operands, where the user gave it with the rule of a kernel.
    `opaque`: what is in operands but not in results is combined inside, or not at all (`shard_map`).
    `halos` are dims that carry no factor above but split with an exchange of rows (`with_halos`
    gives them factors).
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    combine: dict[int, Combine] = field(default_factory=dict)
    flops: float = 0.0
    anchor: bool = False
    linear: tuple[int, ...] = ()
    whole: str = ""
    refused: str = ""
    on_shards: Callable[..., Any] | None = None
    opaque: bool = False
    halos: tuple[Halo, ...] = ()

    def reduced_factors(self) -> tuple[int, ...]:
        """Factors of operands that no result carries."""
        if self.opaque:
            return ()
        kept = {f for dims in self.results for d in dims for f in d}
        used = {f for dims in self.operands for d in dims for f in d}
        return tuple(sorted(used - kept))


RuleFn = Callable[[OpView], OpRule | None]  # None: no rule for this use of the primitive


def with_halos(rule: OpRule) -> tuple[OpRule, dict[int, Halo]]:
    """The rule with one more factor per halo, and which factor is which halo's.

    The factor's size is the greatest common divisor of both dims, so that any number of shards that
    divides it cuts both into blocks. A dim may be split by its halo's factor or by none.
    """
    sizes = list(rule.sizes)
    values = [[list(dims) for dims in side] for side in (rule.operands, rule.results)]
    found: dict[int, Halo] = {}
    for halo in rule.halos:
        size = math.gcd(halo.size, halo.out)
        if size == 1:
            continue
        found[len(sizes)] = halo
        for side, places in zip(values, (halo.operands, halo.results), strict=True):
            for i, d in places:
                side[i][d] = (len(sizes),)
        sizes.append(size)
    operands, results = (tuple(tuple(dims) for dims in side) for side in values)
    return replace(rule, sizes=tuple(sizes), operands=operands, results=results), found


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
        refused: str = "",
        halos: Iterable[Halo] = (),
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
            refused=refused,
            halos=tuple(halos),
        )
