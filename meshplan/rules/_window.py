"""Dims read through a window that moves: which blocks need rows of their neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from meshplan.rules._rule import FactorBuilder, Halo

Entry = tuple[int, ...]
WINDOW = "dims with a window stay whole: shards would exchange the rows at their borders"


def self_contained(halo: Halo) -> int:
    """The number of blocks, as many as divide both dims, if none of them reads rows of another; else 1."""
    if halo.low < 0 and halo.dilation > 1:
        return 1  # XLA's partitioner aborts the process: it expects the first row of a spread block to be there
    count = gcd(halo.size, halo.out)
    own = halo.size // count
    alike = halo.size * halo.dilation == halo.out * halo.stride and not halo.reverse  # all inner blocks read alike
    for k in (0, min(1, count - 1), count - 1) if alike else range(count):
        start, stop = halo.rows(k, count)
        if start < k * own or stop > (k + 1) * own:
            return 1
    return count


@dataclass(slots=True)
class Windows:
    """Entries of the operand's and the result's dims while they are found, and the halos of dims that stay whole."""

    builder: FactorBuilder
    operand: list[Entry]
    result: list[Entry]
    halos: list[Halo] = field(default_factory=list)
    crossed: bool = False

    def place(self, halo: Halo, operand_dim: int, result_dim: int, alone: bool = True) -> None:
        """One dim of operand 0 and result 0: a factor where blocks are self-contained and run `alone`, else a halo."""
        count = self_contained(halo) if alone else 1
        if count > 1:
            self.operand[operand_dim] = self.result[result_dim] = self.builder.new(count)
        elif halo.size > 1 or halo.out > 1:
            self.crossed = True
            if gcd(halo.size, halo.out) > 1:
                self.halos.append(replace(halo, operands=((0, operand_dim),), results=((0, result_dim),)))

    def copied(self, operands: Iterable[int] = (0,), results: Iterable[int] = (0,)) -> tuple[Halo, ...]:
        """The halos, with their dims in all these operands and results."""
        operands, results = tuple(operands), tuple(results)
        return tuple(
            replace(
                h, operands=tuple((i, h.operands[0][1]) for i in operands),
                results=tuple((i, h.results[0][1]) for i in results),
            )
            for h in self.halos
        )  # fmt: skip


def halo_of(
    size: int, out: int, *, window: int = 1, stride: int = 1, low: int = 0, dilation: int = 1, spread: int = 1,
    reverse: bool = False,
) -> Halo:  # fmt: skip
    """A halo without places; `spread` is the distance between neighbours within the window."""
    return Halo(
        operands=(), results=(), size=size, out=out, window=(window - 1) * spread + 1, stride=stride, low=low,
        dilation=dilation, reverse=reverse,
    )  # fmt: skip


def same_rank(
    shape: Sequence[int], out: Sequence[int], halos: Sequence[Halo | None], builder: FactorBuilder
) -> Windows:
    """Dims one to one; `halos[d]` None where dim d passes unread."""
    found = Windows(builder, [()] * len(shape), [()] * len(out))
    for d, halo in enumerate(halos):
        if halo is None:
            found.operand[d] = found.result[d] = builder.new(shape[d])
        else:
            found.place(halo, d, d)
    return found
