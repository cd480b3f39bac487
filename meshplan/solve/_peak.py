"""The least memory that any choice gets by with."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from meshplan.cost._problem import Floats, Ints
from meshplan.solve._dual import priced_optimum
from meshplan.solve._eliminate import Plan, eliminate, min_marginals
from meshplan.solve._local import Search
from meshplan.solve._model import Masks, Model


@dataclass(slots=True, kw_only=True)
class Peak:
    """Best choice found by its largest excess over the rows, in bytes, and the bound on that excess."""

    choice: Ints
    excess: float
    bound: float
    weights: Floats


def least_peak(model: Model, plan: Plan | None, start: Ints, *, enough: float, deadline: float) -> Peak:
    """Least max over rows of usage - limit, until it is `enough`, proven, or time is up.

    Bound: for weights w >= 0 that sum to 1, min over choices of w . (usage - limit). Without a
    plan the bound leaves out which pairs are not allowed.
    """
    loads = model.loads
    weights = np.full(loads.limits.size, 1.0 / max(1, loads.limits.size))
    peak = Peak(choice=start, excess=np.inf, bound=-np.inf, weights=weights)
    seen: list[Floats] = []
    for _ in range(60):
        value, choice = _weighted(model, plan, weights)
        if not np.isfinite(value):
            peak.bound = np.inf
            return peak
        if value > peak.bound:
            peak.bound, peak.weights = value, weights
        excess = loads.usage(choice) - loads.limits
        seen.append(excess)
        _offer(model, peak, choice)
        if peak.excess > enough:
            _offer(model, peak, _descend(model, choice, weights, deadline))
        close = 1e-12 * max(1.0, float(np.abs(loads.limits).max()))
        if peak.excess <= max(enough, peak.bound + close) or time.monotonic() > deadline:
            break
        promised, weights = _heaviest(np.array(seen))
        if promised <= peak.bound + 1e-6 * abs(peak.excess - peak.bound):
            break
    return peak


def open_strategies(model: Model, plan: Plan, peak: Peak) -> Masks:
    """The strategies that a choice of a lower peak than `peak` could still use."""
    unary, pairs = model.priced(peak.weights, 0.0)
    _, messages = eliminate(plan, unary, pairs)
    nodes, _ = min_marginals(plan, unary, pairs, messages)
    base = float(peak.weights @ model.loads.limits)
    slack = 1e-9 * max(1.0, float(np.abs(model.loads.limits).max()))
    return [m - base <= peak.excess + slack for m in nodes]


def _weighted(model: Model, plan: Plan | None, weights: Floats) -> tuple[float, Ints]:
    if plan is not None:
        return priced_optimum(model, plan, weights, 0.0)
    unary, pairs = model.priced(weights, 0.0)
    choice = np.array([int(u.argmin()) for u in unary], dtype=np.int64)
    value = sum(float(u.min()) for u in unary) + sum(float(t.min()) for t in pairs.values())
    return value - float(weights @ model.loads.limits), choice


def _offer(model: Model, peak: Peak, choice: Ints) -> None:
    excess = float((model.loads.usage(choice) - model.loads.limits).max())
    if excess < peak.excess and np.isfinite(model.cost(choice)):
        peak.choice, peak.excess = choice, excess


def _descend(model: Model, choice: Ints, weights: Floats, deadline: float) -> Ints:
    """Lower the sum of what is above the limits, pairs that are not allowed at a steep price."""
    search = Search(model, choice)
    steep = (1.0 + float(np.abs(search.excess).max())) * model.loads.limits.size
    search.descend(1.0 + weights, steep / search.wall, sweeps=10, deadline=deadline)
    return search.choice


def _heaviest(seen: Floats) -> tuple[float, Floats]:
    """The weights under which the least of the excesses seen, (K, R), is largest."""
    from scipy.optimize import linprog

    unit = max(1e-300, float(np.abs(seen).max()))
    count, rows = seen.shape
    result = linprog(
        np.concatenate([[-1.0], np.zeros(rows)]),
        A_ub=np.hstack([np.ones((count, 1)), -seen / unit]), b_ub=np.zeros(count),
        A_eq=np.concatenate([[0.0], np.ones(rows)])[None], b_eq=[1.0],
        bounds=[(None, None), *((0.0, 1.0) for _ in range(rows))], method="highs",
    )
    weights = np.maximum(result.x[1:], 0.0)
    return float(result.x[0]) * unit, weights / weights.sum()
