"""Which collectives a compiler combines: those of one kind, group and region that do not wait for each other.

XLA's combiner goes through a computation in order and fills a set until the next collective depends on one in the
set, or the set would be too large; then it starts a new one (measured on the three back ends). What is moved comes in
the order in which the results are traced back, first operands first (measured on GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshplan.core import Collective
from meshplan.program import Program

SUMS = ("all-reduce", "reduce-scatter")
# One that is larger goes alone, and no more bytes are combined.
COMBINED_BYTES = 30 << 20
LAST = 1 << 60
# One below this never needs a latency of its own.
SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """A collective and where it runs.

    It moves `value` on its way to the operands `uses`, or completes it inside operation `op`. `combine` says how it
    combines, "" where it stays alone. `waits`: a product follows in its region. `laid_out`: bytes read and written
    to bring pieces in order, as they are where another dim than the first is gathered or split.
    """

    collective: Collective
    region: int
    combine: str = ""
    waits: bool = True
    value: int = -1
    op: int = -1
    uses: tuple[tuple[int, int], ...] = ()
    laid_out: float = 0.0

    @property
    def sums(self) -> bool:
        """Whether it combines as a reduction does: with its like of one dtype."""
        return bool(self.combine) and self.collective.kind in SUMS


@dataclass(frozen=True, slots=True)
class Run:
    """Collectives that are combined into one."""

    members: tuple[Emitted, ...]

    @property
    def count(self) -> float:
        return max(e.collective.count for e in self.members)

    @property
    def nbytes(self) -> int:
        """Of all members together, each time it runs."""
        return sum(e.collective.nbytes for e in self.members)

    def shares(self) -> Iterator[tuple[Emitted, float]]:
        """What part of the latency each small member bears: nothing where a larger one takes it along."""
        small = [e for e in self.members if e.collective.nbytes < SMALL_BYTES]
        for e in small:
            yield e, 1.0 / len(small) if len(small) == len(self.members) else 0.0


def combined_bytes(c: Collective) -> float:
    """Bytes of operands up to which a set is filled with collectives like this one: the combiner counts results."""
    return COMBINED_BYTES * (c.group_size if c.kind == "reduce-scatter" else 1)


def runs(
    program: Program, emitted: Sequence[Emitted], limit: Callable[[Collective], float] = combined_bytes
) -> list[Run]:
    """The collectives that are left, those that are no reductions as they are. `limit`: as `combined_bytes`."""
    together: dict[object, list[int]] = {}
    for i, e in enumerate(emitted):
        c = e.collective
        key = (c.kind, c.axes, c.dtype if e.sums else "", e.region, e.combine) if e.combine else i
        together.setdefault(key, []).append(i)
    before = _before(program, emitted, [i for found in together.values() if len(found) > 1 for i in found])
    moves = any(len(found) > 1 and not emitted[found[0]].sums for found in together.values())
    order = _traced_back(program) if moves else {}
    sets = [run for found in together.values() for run in _filled(emitted, found, before, limit, order)]
    return [Run(tuple(emitted[i] for i in run)) for run in sets]


def _filled(
    emitted: Sequence[Emitted], found: Sequence[int], before: dict[int, int], limit: Callable[[Collective], float],
    order: dict[tuple[int, int], int],
) -> Iterator[list[int]]:
    """Sets that the combiner fills, in the order of the program or, of moves, in that of the uses."""
    run: list[int] = []
    mask = nbytes = 0
    for i in sorted(found, key=lambda i: (_place(emitted[i], order), i)):
        size, most = emitted[i].collective.nbytes, limit(emitted[i].collective)
        if size >= most or len(found) == 1:
            yield [i]
            continue
        if run and (before[i] & mask or nbytes + size > most):
            yield run
            run, mask, nbytes = [], 0, 0
        run.append(i)
        mask |= 1 << i
        nbytes += size
    if run:
        yield run


def _place(e: Emitted, order: dict[tuple[int, int], int]) -> int:
    if not e.sums and order:
        return min((order.get(use, LAST) for use in e.uses), default=LAST)
    return e.op if e.op >= 0 else min((op for op, _ in e.uses), default=LAST)


def _traced_back(program: Program) -> dict[tuple[int, int], int]:
    """Uses of values, (operation, operand index), in the order of a search from the results, depth first."""
    order: dict[tuple[int, int], int] = {}
    seen: set[int] = set()
    waiting = [program.values[leaf.value].op for leaf in reversed(program.results) if leaf.value is not None]
    stack = [(op, 0) for op in waiting]
    while stack:
        op, k = stack.pop()
        if op < 0 or (k == 0 and op in seen):
            continue
        seen.add(op)
        operands = program.ops[op].operands
        if k:
            order[op, k - 1] = len(order)
        if k < len(operands):
            stack.append((op, k + 1))
            value = operands[k]
            stack += [(program.values[value].op, 0)] if value is not None else []
    return order


def _before(program: Program, emitted: Sequence[Emitted], tracked: Sequence[int]) -> dict[int, int]:
    """For each of the tracked collectives the set of those that it depends on, as bits.

    What one iteration of a loop leaves to the next does not count: a body is compiled once.
    """
    inside: dict[int, int] = {}
    arriving: dict[tuple[int, int], int] = {}
    for i in tracked:
        e = emitted[i]
        if e.op >= 0:
            inside[e.op] = inside.get(e.op, 0) | 1 << i
        for use in e.uses:
            arriving[use] = arriving.get(use, 0) | 1 << i
    reach: dict[int, int] = {}
    reads: dict[int, int] = {}
    for op in program.ops:
        got = 0
        for k, value in enumerate(op.operands):
            if value is not None:
                got |= reach.get(value, 0) | arriving.get((op.index, k), 0)
        reads[op.index] = got
        got |= inside.get(op.index, 0)
        if got:
            for value in op.results:
                reach[value] = got
    return {i: reads.get(emitted[i].op, 0) if emitted[i].op >= 0 else reach.get(emitted[i].value, 0) for i in tracked}
