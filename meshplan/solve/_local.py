"""Local search: one node at a time to its best strategy, bytes above the limits at a price.

Iterated conditional modes (Besag 1986) with penalties on the memory rows.
"""

from __future__ import annotations

import time

import numpy as np

from meshplan.cost._problem import Floats, Ints
from meshplan.solve._model import Item, Model

INFINITE_PRICE = 1e30


class Search:
    """A choice that improves step by step; costs and row usage are kept up to date.

    Costs that are not allowed count `wall` each, so that a search can leave such a choice.
    """

    def __init__(self, model: Model, choice: Ints) -> None:
        self.model = model
        self.choice = np.array(choice, dtype=np.int64)
        self.wall = 1e3 * (1.0 + sum(float(np.abs(u[np.isfinite(u)]).max(initial=0.0)) for u in model.unary))
        self.unary = [np.where(np.isinf(u), self.wall, u) for u in model.unary]
        self.near: list[list[tuple[int, Floats]]] = [[] for _ in model.unary]
        for (u, v), table in model.pairs.items():
            finite = np.where(np.isinf(table), self.wall, table)
            self.near[u].append((v, np.ascontiguousarray(finite.T)))
            self.near[v].append((u, finite))
        self.items: list[list[tuple[Item, int]]] = [[] for _ in model.unary]
        for item in model.loads.items:
            for axis, node in enumerate(item.nodes):
                self.items[node].append((item, axis))
        self.excess = model.loads.usage(self.choice) - model.loads.limits

    def costs(self, i: int) -> Floats:
        """Cost of every strategy of node i, the others as they are; constant terms left out."""
        total = self.unary[i]
        for j, rows in self.near[i]:
            total = total + rows[self.choice[j]]
        return total

    def _change(self, i: int) -> tuple[Ints | None, Floats]:
        """(rows, bytes (k, rows) that each strategy of node i would add to them)."""
        sole = len(self.items[i]) == 1
        item, axis = self.items[i][0]
        if sole:
            return item.rows, self._held(item, axis, i)[:, None] * item.weights
        total = np.zeros((self.unary[i].size, self.excess.size))
        for item, axis in self.items[i]:
            total[:, item.rows] += self._held(item, axis, i)[:, None] * item.weights
        return None, total

    def _held(self, item: Item, axis: int, i: int) -> Floats:
        if len(item.nodes) == 1:
            held = item.table
        else:
            other = int(self.choice[item.nodes[1 - axis]])
            held = item.table[:, other] if axis == 0 else item.table[other]
        return held - held[self.choice[i]]

    def improve(self, i: int, price: Floats, cost_scale: float = 1.0) -> bool:
        """Move node i to its best strategy; False where it stays. `price`: (R,) per byte above a limit."""
        costs = self.costs(i) * cost_scale if cost_scale != 1.0 else self.costs(i)
        here = int(self.choice[i])
        if not self.items[i]:
            best = int(costs.argmin())
            if costs[best] >= costs[here] - 1e-12 * abs(costs[here]):
                return False
            self.choice[i] = best
            return True
        rows, change = self._change(i)
        excess, prices = (self.excess, price) if rows is None else (self.excess[rows], price[rows])
        total = costs + np.maximum(excess + change, 0.0) @ prices
        best = int(total.argmin())
        if total[best] >= total[here] - 1e-12 * abs(total[here]):
            return False
        self.choice[i] = best
        if rows is None:
            self.excess = self.excess + change[best]
        else:
            self.excess[rows] += change[best]
        return True

    def descend(self, price: Floats, cost_scale: float = 1.0, *, sweeps: int = 50, deadline: float = np.inf) -> None:
        """Improve node after node until none moves, at most `sweeps` rounds."""
        waiting = set(range(len(self.unary)))
        for _ in range(sweeps):
            moved: set[int] = set()
            for count, i in enumerate(sorted(waiting)):
                if count % 64 == 0 and time.monotonic() > deadline:
                    return
                if self.improve(i, price, cost_scale):
                    moved |= {i, *(j for j, _ in self.near[i])}
            waiting = moved
            if not moved:
                break
        self.excess = self.model.loads.usage(self.choice) - self.model.loads.limits

    @property
    def feasible(self) -> bool:
        loads = self.model.loads
        return loads.met(self.excess + loads.limits)


def repair(model: Model, choice: Ints, price: Floats, deadline: float = np.inf) -> Ints | None:
    """A choice within the limits near `choice`, locally best; None where none is found.

    `price`: (R,) what a byte is worth where the limits bind; rows without a price get the mean.
    """
    search = Search(model, choice)
    floor = float(price[price > 0].mean()) if (price > 0).any() else 1e-3 * search.wall / _largest(model)
    now = np.maximum(price, 1e-3 * floor) * 1.5
    for _ in range(12):
        search.descend(now, deadline=deadline)
        if search.feasible or time.monotonic() > deadline:
            break
        now = np.where(search.excess > 0, now * 4.0, now)
    if not search.feasible:
        return None
    search.descend(np.full(price.shape, INFINITE_PRICE), deadline=deadline)
    return search.choice if search.feasible and np.isfinite(model.cost(search.choice)) else None


def _largest(model: Model) -> float:
    """Most bytes that one item adds to a row."""
    sizes = [float(i.table.max()) * float(np.abs(i.weights).max()) for i in model.loads.items]
    return max(sizes, default=1.0)
