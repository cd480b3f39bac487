"""Optimisation problems for tests and benchmarks: small random ones, and transformer-like ladders."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import strategies as st

from meshplan.cost._problem import FORBIDDEN, Problem
from meshplan.solve import evaluate


def random_problem(seed: int) -> Problem:
    """1 to 6 nodes of 1 to 4 strategies, whole numbers; forbidden entries, rows and pair memory at random."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    k = rng.integers(1, 5, n)
    row_count = int(rng.integers(0, 4))
    node_costs = [rng.integers(0, 30, x).astype(float) for x in k]
    count = int(rng.integers(0, 2 * n)) if n > 1 else 0
    pairs = [tuple(int(x) for x in rng.choice(n, 2, replace=False)) for _ in range(count)]
    tables = [rng.integers(0, 30, (k[u], k[v])).astype(float) for u, v in pairs]
    share = rng.choice([0.0, 0.0, 0.1, 0.4])
    for costs in (*node_costs, *tables):
        costs[rng.random(costs.shape) < share] = FORBIDDEN
    usages = [rng.integers(0, 20, x).astype(float) for x in k]
    rows = [np.sort(rng.permutation(row_count)[: rng.integers(0, row_count + 1)]) for _ in k]
    weights = [rng.choice([1.0, 1.0, 0.5, 2.0], r.size) for r in rows]
    holds = [e for e in range(count) if row_count and rng.random() < 0.3]
    held = {e: rng.integers(0, 10, tables[e].shape).astype(float) for e in holds}
    limits = np.floor(np.full(row_count, rng.uniform(0.1, 0.9) * sum(u.max() for u in usages)))
    return Problem(
        node_costs=tuple(node_costs), edges=tuple((u, v) for u, v in pairs), edge_costs=tuple(tables),
        usages=tuple(usages), rows=tuple(rows), row_weights=tuple(weights), limits=limits, edge_usages=held,
        edge_rows={e: np.array([e % row_count]) for e in held}, edge_row_weights={e: np.ones(1) for e in held},
    )


def problems() -> st.SearchStrategy[Problem]:
    return st.integers(0, 2**32 - 1).map(random_problem)


def least_peak_by_trial(problem: Problem) -> tuple[float, float] | None:
    """(least peak excess, least cost among those) over all allowed choices."""
    found = []
    for choice in itertools.product(*(range(c.size) for c in problem.node_costs)):
        cost, usage = evaluate(problem, choice)
        if cost < FORBIDDEN:
            found.append((float((usage - problem.limits).max()) if usage.size else -math.inf, cost))
    return min(found) if found else None


def ladder(nodes: int, strategies: int, *, seed: int = 0, rows: int = 32, room: float | None = None) -> Problem:
    """Forward chain, backward chain, rungs between them, residual skips; edge costs are distances.

    Cheap strategies hold much memory. `room`: how far the limits lie between the least and the most
    usage of the fullest row; None: nothing can exceed them.
    """
    rng = np.random.default_rng(seed)
    half = nodes // 2
    places = [rng.integers(0, 4, (strategies, 3)).astype(float) for _ in range(4)]
    sizes = [np.float64(1e9) * 0.5 ** rng.integers(0, 4, strategies).astype(np.float64) for _ in range(4)]
    usages = [sizes[i % 4] * (1 + i % 3) for i in range(nodes)]
    costs = [
        rng.random(strategies) * 1e-3 * (1 + 5 * (i % 5 == 0)) + 2e-3 * (u.max() / u - 1) / (8 if i % 2 else 16)
        for i, u in enumerate(usages)
    ]
    edges = [(i, i + 1) for i in range(nodes - 1) if i != half - 1]
    edges += [(i, nodes - 1 - i) for i in range(half)] + [(i, i + 2) for i in range(0, half - 4, 8)]
    tables = [
        np.abs(places[u % 4][:, None] - places[v % 4][None]).sum(-1) * rng.uniform(2e-5, 4e-4) for u, v in edges
    ]
    spans = [(i, nodes - 1 - i) if i < half else (i, i) for i in range(nodes)]
    live = [np.arange(a * rows // nodes, b * rows // nodes + 1) for a, b in spans]
    most, least = np.zeros(rows), np.zeros(rows)
    for usage, at in zip(usages, live, strict=True):
        most[at] += usage.max()
        least[at] += usage.min()
    limit = most.max() if room is None else least.max() + room * (most.max() - least.max())
    return Problem(
        node_costs=tuple(costs), edges=tuple(edges), edge_costs=tuple(tables), usages=tuple(usages),
        rows=tuple(live), row_weights=tuple(np.ones(r.size) for r in live), limits=np.full(rows, limit),
    )
