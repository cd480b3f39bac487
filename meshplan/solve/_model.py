"""The problem as the solvers work on it: only what is still open.

A `Model` holds the strategies that are left, infinite costs for what is not allowed, one
table per pair of nodes, and only those memory rows that some choice could still exceed.
Nodes with one strategy left have no pairs: their tables are folded into their neighbours.
`restrict` makes a smaller model from a larger one; the optimum's cost is unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshplan.cost._problem import FORBIDDEN, Floats, Ints, Problem
from meshplan.solve._evaluate import tolerance

Masks = list[npt.NDArray[np.bool_]]
Pairs = dict[tuple[int, int], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Memory held by one node, table (k,), or by a pair of nodes, table (k_u, k_v); least entry 0."""

    nodes: tuple[int, ...]
    table: Floats
    rows: Ints
    weights: Floats

    def at(self, choice: Ints) -> float:
        return float(self.table[tuple(choice[list(self.nodes)])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """All items, and their (item, row, weight) entries end to end. `limits`: (R,), `slack` for rounding.
    `row_ids`: (R,) the problem's row of each one that is left."""

    items: tuple[Item, ...]
    entry_item: Ints
    entry_row: Ints
    entry_weight: Floats
    limits: Floats
    slack: Floats
    row_ids: Ints

    def usage(self, choice: Ints) -> Floats:
        """Bytes per row, (R,)."""
        if not self.items:
            return np.zeros(self.limits.size)
        held = np.array([item.at(choice) for item in self.items])
        amounts = held[self.entry_item] * self.entry_weight
        return np.bincount(self.entry_row, weights=amounts, minlength=self.limits.size).astype(np.float64)

    def prices(self, multipliers: Floats) -> Floats:
        """What a byte of each item costs at the given price per byte of each row."""
        priced = self.entry_weight * multipliers[self.entry_row]
        return np.bincount(self.entry_item, weights=priced, minlength=len(self.items)).astype(np.float64)

    def met(self, usage: Floats) -> bool:
        return bool(np.all(usage <= self.limits + self.slack))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`kept[i]`: the problem's strategy for each one left; `pairs[u, v]`, u < v; `possible` is
    False where no choice can be allowed and within the limits, as far as is plain to see."""

    kept: tuple[Ints, ...]
    unary: tuple[Floats, ...]
    pairs: Pairs
    loads: Loads
    possible: bool = True

    @property
    def sizes(self) -> list[int]:
        return [u.size for u in self.unary]

    def cost(self, choice: Ints) -> float:
        """Cost of a choice of this model's strategies."""
        total = sum(float(u[s]) for u, s in zip(self.unary, choice, strict=True))
        return total + sum(float(t[choice[u], choice[v]]) for (u, v), t in self.pairs.items())

    def original(self, choice: Ints) -> tuple[int, ...]:
        """The problem's strategies of a choice of this model's."""
        return tuple(int(k[s]) for k, s in zip(self.kept, choice, strict=True))

    def local(self, choice: tuple[int, ...]) -> Ints | None:
        """This model's strategies of a choice of the problem's, None where one is gone."""
        places = [np.flatnonzero(k == s) for k, s in zip(self.kept, choice, strict=True)]
        return np.array([int(p[0]) for p in places], dtype=np.int64) if all(p.size for p in places) else None

    def priced(self, multipliers: Floats, scale: float = 1.0) -> tuple[list[Floats], Pairs]:
        """Node and pair costs times `scale`, the bytes of every row paid for at `multipliers`."""
        unary, pairs = list(self.unary), dict(self.pairs)
        if scale != 1.0:
            unary = [_scaled(u, scale) for u in unary]
            pairs = {p: _scaled(t, scale) for p, t in pairs.items()}
        if self.loads.items:
            for item, price in zip(self.loads.items, self.loads.prices(multipliers), strict=True):
                if price and len(item.nodes) == 1:
                    unary[item.nodes[0]] = unary[item.nodes[0]] + price * item.table
                elif price:
                    u, v = item.nodes
                    pairs[u, v] = pairs[u, v] + price * item.table
        return unary, pairs


def _scaled(costs: Floats, scale: float) -> Floats:
    """`costs * scale`, infinite entries kept even at scale 0."""
    return np.where(np.isinf(costs), np.inf, 0.0) if scale == 0.0 else costs * scale


def build(problem: Problem) -> Model:
    """The model of a checked problem: parallel edges merged, forbidden entries infinite."""
    unary = [np.where(c >= FORBIDDEN, np.inf, c) for c in problem.node_costs]
    pairs: Pairs = {}
    for (u, v), table in zip(problem.edges, problem.edge_costs, strict=True):
        pair, oriented = ((u, v), table) if u < v else ((v, u), table.T)
        allowed = np.where(oriented >= FORBIDDEN, np.inf, oriented)
        pairs[pair] = pairs[pair] + allowed if pair in pairs else allowed
    kept = tuple(np.arange(u.size) for u in unary)
    loads, _ = _loads(_items(problem), _all_rows(problem.limits))
    raw = Model(kept=kept, unary=tuple(unary), pairs=pairs, loads=loads)
    return restrict(raw, [np.isfinite(u) for u in unary])


def _items(problem: Problem) -> list[Item]:
    items = [
        Item(nodes=(i,), table=problem.usages[i], rows=problem.rows[i], weights=problem.row_weights[i])
        for i in range(len(problem.usages))
    ]
    for e in sorted(problem.edge_usages):
        (u, v), table = problem.edges[e], problem.edge_usages[e]
        nodes, oriented = ((u, v), table) if u < v else ((v, u), table.T)
        rows, weights = problem.edge_rows[e], problem.edge_row_weights[e]
        items.append(Item(nodes=nodes, table=oriented, rows=rows, weights=weights))
    return items


def with_rows(base: Model, problem: Problem, rows: Ints) -> Model:
    """`base`, the problem's model without rows, with only these rows of it (ascending)."""
    place = np.full(problem.limits.size, -1)
    place[rows] = np.arange(rows.size)
    picks = list(base.kept)
    pairs = dict(base.pairs)
    items: list[Item] = []
    for item in _items(problem):
        there = place[item.rows]
        cut = replace(item, rows=there[there >= 0], weights=item.weights[there >= 0])
        if cut.rows.size:
            cut = _cut(cut, picks)
            items.append(cut)
            if len(cut.nodes) == 2 and cut.nodes not in pairs:
                pairs[cut.nodes[0], cut.nodes[1]] = np.zeros(cut.table.shape)
    every = _all_rows(problem.limits)
    chosen = replace(every, limits=every.limits[rows], slack=every.slack[rows], row_ids=rows)
    loads, possible = _loads(items, chosen)
    return replace(base, pairs=pairs, loads=loads, possible=possible)


def restrict(model: Model, masks: Masks) -> Model:
    """The model with only the strategies of `masks`, and none that has no partner left.

    Where a node is left without any, the unrestricted model marked impossible.
    """
    consistent = _with_partners(model, masks)
    if consistent is None:
        return _impossible(model)
    picks = [np.flatnonzero(m) for m in consistent]
    unary = [u[p] for u, p in zip(model.unary, picks, strict=True)]
    pairs: Pairs = {}
    for (u, v), table in model.pairs.items():
        full = len(picks[u]) == table.shape[0] and len(picks[v]) == table.shape[1]
        cut = table if full else table[np.ix_(picks[u], picks[v])]
        if cut.shape[0] == 1:
            unary[v] = unary[v] + cut[0]
        elif cut.shape[1] == 1:
            unary[u] = unary[u] + cut[:, 0]
        else:
            pairs[u, v] = cut
    items = [_cut(item, picks) for item in model.loads.items]
    loads, possible = _loads(items, model.loads)
    kept = tuple(k[p] for k, p in zip(model.kept, picks, strict=True))
    return Model(kept=kept, unary=tuple(unary), pairs=pairs, loads=loads, possible=possible)


def _impossible(model: Model) -> Model:
    return Model(kept=model.kept, unary=model.unary, pairs=model.pairs, loads=model.loads, possible=False)


def _with_partners(model: Model, masks: Masks) -> Masks | None:
    """`masks` less strategies that some neighbour leaves no allowed partner (arc consistency)."""
    masks = [m & np.isfinite(u) for m, u in zip(masks, model.unary, strict=True)]
    finite = {p: np.isfinite(t) for p, t in model.pairs.items() if np.isinf(t).any()}
    changed = set(range(len(masks)))
    while changed:
        again: set[int] = set()
        for (u, v), table in finite.items():
            if u not in changed and v not in changed:
                continue
            left, right = masks[u] & table[:, masks[v]].any(axis=1), masks[v] & table[masks[u]].any(axis=0)
            for node, mask in ((u, left), (v, right)):
                if mask.sum() < masks[node].sum():
                    masks[node] = mask
                    again.add(node)
        changed = again
    return masks if all(m.any() for m in masks) else None


def _cut(item: Item, picks: list[Ints]) -> Item:
    """`item` over the picked strategies; over one node where the other's choice is made."""
    table = item.table[np.ix_(*(picks[n] for n in item.nodes))]
    nodes = item.nodes
    if len(nodes) == 2 and 1 in table.shape:
        axis = table.shape.index(1)
        table, nodes = (table[0] if axis == 0 else table[:, 0]), (nodes[1 - axis],)
    return Item(nodes=nodes, table=table, rows=item.rows, weights=item.weights)


def _all_rows(limits: Floats) -> Loads:
    """No items yet, every row."""
    nothing = np.zeros(0, np.int64)
    return Loads(
        items=(), entry_item=nothing, entry_row=nothing, entry_weight=np.zeros(0), limits=limits.astype(np.float64),
        slack=tolerance(limits), row_ids=np.arange(limits.size),
    )


def _loads(items: list[Item], before: Loads) -> tuple[Loads, bool]:
    """Items less their least entry, rows less those that nothing can exceed, and whether all can be met."""
    limits, slack = before.limits, before.slack
    least, most, open_items = np.zeros(limits.size), np.zeros(limits.size), []
    for item in items:
        low, high = float(item.table.min()), float(item.table.max())
        if item.rows.size:
            np.add.at(least, item.rows, item.weights * low)
        if high > low and item.rows.size:
            np.add.at(most, item.rows, np.maximum(item.weights, 0.0) * (high - low))
            open_items.append((item, low, high))
    least_left = np.zeros(limits.size)
    for item, low, high in open_items:
        np.add.at(least_left, item.rows, np.minimum(item.weights, 0.0) * (high - low))
    left = limits - least
    possible = bool(np.all(least_left <= left + slack))
    can_bind = most > left + slack
    place = np.cumsum(can_bind) - 1
    final: list[Item] = []
    for item, low, _ in open_items:
        live = can_bind[item.rows] & (item.weights != 0.0)
        if live.any():
            rows = place[item.rows[live]]
            final.append(Item(nodes=item.nodes, table=item.table - low, rows=rows, weights=item.weights[live]))
    return _gathered(final, left[can_bind], slack[can_bind], before.row_ids[can_bind]), possible


def _gathered(items: list[Item], limits: Floats, slack: Floats, row_ids: Ints) -> Loads:
    counts = [i.rows.size for i in items]
    return Loads(
        items=tuple(items),
        entry_item=np.repeat(np.arange(len(items)), counts),
        entry_row=np.concatenate([i.rows for i in items]) if items else np.zeros(0, np.int64),
        entry_weight=np.concatenate([i.weights for i in items]) if items else np.zeros(0),
        limits=limits,
        slack=slack,
        row_ids=row_ids,
    )
