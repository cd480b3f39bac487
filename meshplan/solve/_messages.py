"""Lower bounds for graphs too dense to eliminate: costs are moved between nodes and pairs.

Sequential reweighted message passing (Kolmogorov 2006, 2015): moving costs leaves the cost of
every choice as it is, and the sum of all least entries is a bound. Each pass moves costs
along the nodes' order and back, which never lowers the bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from meshplan.cost._problem import Floats, Ints
from meshplan.solve._model import Masks, Pairs


@dataclass(slots=True, kw_only=True)
class Moved:
    """Node costs after the moves, and per pair what its table lost to its two nodes."""

    unary: list[Floats]
    pairs: Pairs
    taken: dict[tuple[int, int], list[Floats]]
    near: list[list[tuple[tuple[int, int], int]]]

    def collect(self, i: int, pair: tuple[int, int], side: int) -> None:
        """The least of the pair's rest for each strategy of node i goes to the node."""
        taken, table = self.taken[pair], self.pairs[pair]
        rest = (table - taken[1][None, :]).min(axis=1) if side == 0 else (table - taken[0][:, None]).min(axis=0)
        self.unary[i] = self.unary[i] + (rest - taken[side])
        taken[side] = rest

    def push(self, pair: tuple[int, int], side: int, amount: Floats) -> None:
        self.taken[pair][side] = self.taken[pair][side] - amount

    def bound(self) -> float:
        """Sum of all least entries; no choice costs less."""
        total = sum(float(u.min()) for u in self.unary)
        for pair, table in self.pairs.items():
            left, right = self.taken[pair]
            total += float((table - left[:, None] - right[None, :]).min())
        return total

    def open_strategies(self, upper: float) -> Masks:
        """The strategies that a choice of cost `upper` or less could still use."""
        base = self.bound()
        own = [u - u.min() for u in self.unary]
        for (u, v), table in self.pairs.items():
            left, right = self.taken[u, v]
            rest = table - left[:, None] - right[None, :]
            own[u] = own[u] + (rest.min(axis=1) - rest.min())
            own[v] = own[v] + (rest.min(axis=0) - rest.min())
        slack = 1e-9 * max(abs(base), abs(upper))
        return [base + o <= upper + slack for o in own]

    def decode(self) -> Ints:
        """Node after node, the best strategy given those before it."""
        choice = np.zeros(len(self.unary), dtype=np.int64)
        for i, own in enumerate(self.unary):
            for (u, v), side in self.near[i]:
                other = v if side == 0 else u
                if other < i:
                    left, right = self.taken[u, v]
                    table = self.pairs[u, v]
                    own = own + (table[:, choice[v]] - left if side == 0 else table[choice[u]] - right)
            choice[i] = int(own.argmin())
        return choice


def start(unary: list[Floats], pairs: Pairs) -> Moved:
    """Nothing moved yet."""
    near: list[list[tuple[tuple[int, int], int]]] = [[] for _ in unary]
    for pair in pairs:
        near[pair[0]].append((pair, 0))
        near[pair[1]].append((pair, 1))
    taken = {p: [np.zeros(t.shape[0]), np.zeros(t.shape[1])] for p, t in pairs.items()}
    return Moved(unary=list(unary), pairs=pairs, taken=taken, near=near)


def tighten(moved: Moved, *, passes: int, deadline: float) -> None:
    """Move costs forwards and backwards `passes` times, in place."""
    order = range(len(moved.unary))
    for _ in range(passes):
        for forward in (True, False):
            for count, i in enumerate(order if forward else reversed(order)):
                if count % 256 == 0 and time.monotonic() > deadline:
                    return
                _visit(moved, i, forward)


def _visit(moved: Moved, i: int, forward: bool) -> None:
    """Take what the pairs behind hold, share the node's costs among the pairs ahead."""
    ahead: list[tuple[tuple[int, int], int]] = []
    for pair, side in moved.near[i]:
        moved.collect(i, pair, side)
        if (side == 0) == forward:
            ahead.append((pair, side))
    behind = len(moved.near[i]) - len(ahead)
    if not ahead:
        return
    share = moved.unary[i] / max(len(ahead), behind)
    for pair, side in ahead:
        moved.push(pair, side, share)
    moved.unary[i] = moved.unary[i] - share * len(ahead)
