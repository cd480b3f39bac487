"""Very large problems: message passing for a start and a bound, local search for the rest.

Rows come into play only once some choice exceeds them (row generation), because a problem of
30,000 nodes has 20,000 rows and tens of millions of entries in them, of which few ever bind.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from meshplan.cost._problem import Floats, Ints, Problem
from meshplan.solve._evaluate import evaluate, meets, tolerance
from meshplan.solve._local import INFINITE_PRICE, Search
from meshplan.solve._messages import Moved, start, tighten
from meshplan.solve._model import Model, build, with_rows
from meshplan.solve._reduce import put_back, reduce_nodes

LARGE_NODES = 5_000
LARGE_ENTRIES = 5_000_000
MOST_NEW_ROWS = 24


@dataclass(slots=True, kw_only=True)
class Found:
    """`choice` is within the limits where `excess` is 0; `bound` on the cost of any choice."""

    choice: tuple[int, ...]
    excess: float
    cost: float
    bound: float


def is_large(problem: Problem) -> bool:
    """Whether the exact solvers would take too long even to begin."""
    return len(problem.node_costs) > LARGE_NODES or sum(r.size for r in problem.rows) > LARGE_ENTRIES


def search_large(problem: Problem, warm_starts: tuple[tuple[int, ...], ...], deadline: float) -> Found | None:
    """The best choice found by `deadline`; None where nothing is allowed. Deterministic but for the clock."""
    begun = time.monotonic()
    nothing = replace(
        problem, limits=np.zeros(0), rows=(np.zeros(0, np.int64),) * len(problem.rows),
        row_weights=(np.zeros(0),) * len(problem.rows), edge_usages={},
    )
    base = build(nothing)
    if not base.possible:
        return None
    bound, cheapest = _decoded(base, begun + 0.3 * (deadline - begun))
    _, lightest = _decoded(_light(problem, base), begun + 0.5 * (deadline - begun))
    starts = [lightest, cheapest]
    starts += [c for c in (base.local(w) for w in warm_starts) if c is not None]
    first = base.original(cheapest)
    found = Found(choice=first, excess=math.inf, cost=math.inf, bound=bound)
    stretches = _stretches(problem)
    for at, choice in enumerate(starts):
        _offer(problem, base, stretches, choice, found)
        left = (deadline - time.monotonic()) / (len(starts) - at)
        _generate_rows(problem, base, stretches, choice, found, time.monotonic() + left)
    return found


def _decoded(model: Model, deadline: float) -> tuple[float, Ints]:
    """A bound on the cost without rows, and the choice that message passing comes to."""
    core, removed = reduce_nodes(model)
    moved = start(list(core.unary), core.pairs)
    bound = _bound(moved, deadline)
    return bound, put_back(model, core, removed, moved.decode())


def _light(problem: Problem, base: Model) -> Model:
    """`base` with bytes for costs, as far as they count in some row; costs decide among equals."""
    largest = max((float(u.max(initial=0.0)) for u in problem.usages), default=1.0)
    spread = sum(float(u.max() - u.min()) for u in base.unary) + sum(
        float(t[np.isfinite(t)].max(initial=0.0)) for t in base.pairs.values()
    )
    price = 1e-3 * spread / max(1.0, largest)
    unary = tuple(
        u + price * problem.usages[i][base.kept[i]] if problem.rows[i].size else u for i, u in enumerate(base.unary)
    )
    return replace(base, unary=unary)


def _bound(moved: Moved, deadline: float) -> float:
    """Tighten until time is up or a pass gains little."""
    bound = moved.bound()
    while time.monotonic() < deadline:
        tighten(moved, passes=2, deadline=deadline)
        before, bound = bound, max(bound, moved.bound())
        if bound - before <= 1e-4 * abs(bound):
            break
    return bound


def _generate_rows(
    problem: Problem, base: Model, stretches: _Stretches | None, choice: Ints, found: Found, deadline: float
) -> None:
    """Local search against the rows exceeded so far; more rows as they come to be exceeded."""
    active: list[int] = []
    prices = np.zeros(problem.limits.size)
    search = Search(base, choice)
    search.descend(np.zeros(0), deadline=deadline)
    choice = search.choice
    while True:
        excess = _offer(problem, base, stretches, choice, found)
        exceeded = np.flatnonzero(excess > tolerance(problem.limits))
        if time.monotonic() > deadline or not exceeded.size:
            break
        _raise_prices(problem, base, prices, excess, exceeded)
        active = sorted({*active, *_worst(excess, exceeded)})
        model = with_rows(base, problem, np.array(active, dtype=np.int64))
        search = Search(model, choice)
        search.descend(prices[model.loads.row_ids], sweeps=3, deadline=deadline)
        choice = search.choice
    if active and not exceeded.size and time.monotonic() < deadline:
        _polish(problem, base, stretches, choice, active, found, deadline)


def _polish(
    problem: Problem, base: Model, stretches: _Stretches | None, choice: Ints, active: list[int], found: Found,
    deadline: float,
) -> None:
    """Cheaper choices within the limits: nothing may be exceeded any more, new rows as they appear."""
    for _ in range(20):
        model = with_rows(base, problem, np.array(active, dtype=np.int64))
        search = Search(model, choice)
        search.descend(np.full(model.loads.limits.size, INFINITE_PRICE), deadline=deadline)
        excess = _offer(problem, base, stretches, search.choice, found)
        exceeded = np.flatnonzero(excess > tolerance(problem.limits))
        if not exceeded.size or time.monotonic() > deadline:
            return
        active = sorted({*active, *_worst(excess, exceeded)})


def _offer(
    problem: Problem, base: Model, stretches: _Stretches | None, choice: Ints, found: Found
) -> Floats:
    """Excess (R,) of `choice`; it is kept where it is better: less excess, then less cost."""
    picked = base.original(choice)
    usage = _row_usage(problem, stretches, picked)
    excess = usage - problem.limits
    cost = base.cost(choice)
    above = 0.0 if meets(usage, problem.limits) else max(0.0, float(excess.max(initial=0.0)))
    if not math.isfinite(cost):
        above = math.inf
    if (above, cost) < (found.excess, found.cost):
        found.choice, found.excess, found.cost = picked, above, cost
    return excess


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretches:
    """Rows of every node as [first, last): possible where they are stretches of weight 1."""

    first: Ints
    last: Ints


def _stretches(problem: Problem) -> _Stretches | None:
    """None where some node's rows have gaps or other weights, or pairs hold memory."""
    if problem.edge_usages:
        return None
    for rows, weights in zip(problem.rows, problem.row_weights, strict=True):
        if rows.size and (rows[-1] - rows[0] + 1 != rows.size or (np.diff(rows) != 1).any() or (weights != 1.0).any()):
            return None
    first = np.array([r[0] if r.size else 0 for r in problem.rows], dtype=np.int64)
    return _Stretches(first=first, last=first + np.array([r.size for r in problem.rows], dtype=np.int64))


def _row_usage(problem: Problem, stretches: _Stretches | None, choice: tuple[int, ...]) -> Floats:
    """Bytes per row, (R,)."""
    if stretches is None:
        return evaluate(problem, choice)[1]
    held = np.array([float(u[s]) for u, s in zip(problem.usages, choice, strict=True)])
    size = problem.limits.size + 1
    change = np.bincount(stretches.first, held, size) - np.bincount(stretches.last, held, size)
    return np.cumsum(change[:-1]).astype(np.float64)


def _worst(excess: Floats, exceeded: Ints) -> list[int]:
    """The rows that stand out most, spread over the stretches of exceeded rows."""
    stretches = np.split(exceeded, np.flatnonzero(np.diff(exceeded) > 1) + 1)
    peaks = [int(s[excess[s].argmax()]) for s in stretches]
    if len(peaks) < MOST_NEW_ROWS:
        spread = exceeded[np.linspace(0, exceeded.size - 1, min(MOST_NEW_ROWS, exceeded.size)).astype(np.int64)]
        peaks += [int(r) for r in spread]
    return sorted(set(sorted(peaks, key=lambda r: -excess[r])[:MOST_NEW_ROWS]))


def _raise_prices(problem: Problem, base: Model, prices: Floats, excess: Floats, exceeded: Ints) -> None:
    """Exceeded rows cost four times as much, at first what spreads the typical cost over the typical usage."""
    spans = [float(u.max() - u.min()) for u in base.unary] + [
        float(t[np.isfinite(t)].max(initial=0.0)) for t in list(base.pairs.values())[:2000]
    ]
    sizes = [float(u.max() - u.min()) for u in problem.usages]
    first = float(np.mean(spans)) / max(1e-300, float(np.mean(sizes)))
    prices[exceeded] = np.maximum(4.0 * prices[exceeded], 1e-1 * max(first, 1e-300))
