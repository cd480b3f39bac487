"""What a choice costs and holds; and the oracle that tries every choice."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from meshplan.core import ProblemError
from meshplan.cost._problem import FORBIDDEN, Floats, Problem, Solution
from meshplan.solve._check import check, check_choice

MOST_COMBINATIONS = 10**6


def evaluate(problem: Problem, choice: Sequence[int]) -> tuple[float, Floats]:
    """Cost of `choice` and bytes per row, (R,).

    A cost of FORBIDDEN or more: the choice uses something that is not allowed.
    Raises `ProblemError` for a choice that names no existing strategy.
    """
    picks = tuple(int(s) for s in choice)
    check_choice(problem, picks)
    costs = [float(c[s]) for c, s in zip(problem.node_costs, picks, strict=True)]
    costs += [float(t[picks[u], picks[v]]) for (u, v), t in zip(problem.edges, problem.edge_costs, strict=True)]
    held = [float(u[s]) for u, s in zip(problem.usages, picks, strict=True)]
    rows, weights = list(problem.rows), list(problem.row_weights)
    for e in sorted(problem.edge_usages):
        u, v = problem.edges[e]
        held.append(float(problem.edge_usages[e][picks[u], picks[v]]))
        rows.append(problem.edge_rows[e])
        weights.append(problem.edge_row_weights[e])
    usage = np.zeros(len(problem.limits))
    if held and usage.size:
        amounts = np.repeat(held, [r.size for r in rows]) * np.concatenate(weights)
        usage = np.bincount(np.concatenate(rows).astype(np.int64), weights=amounts, minlength=usage.size)
        usage = usage.astype(np.float64)
    return math.fsum(costs) if costs else 0.0, usage


def meets(usage: Floats, limits: Floats) -> bool:
    """True where no row exceeds its limit by more than rounding (1e-12 of the limit)."""
    return bool(np.all(usage <= limits + tolerance(limits)))


def tolerance(limits: Floats) -> Floats:
    """Bytes by which a sum of floats may exceed a limit that it meets exactly."""
    return 1e-12 * np.maximum(1.0, np.abs(np.where(np.isfinite(limits), limits, 1.0)))


def peak_excess(usage: Floats, limits: Floats) -> float:
    """Largest usage less limit over the rows; -inf without rows."""
    return float((usage - limits).max()) if limits.size else -math.inf


def solution(
    problem: Problem, choice: Sequence[int], *, bound: float, started: float, status: str, relative_gap: float = 1e-12
) -> Solution:
    """The `Solution` of `choice`, everything but the bound and status computed afresh."""
    cost, usage = evaluate(problem, choice)
    feasible = meets(usage, problem.limits) and cost < FORBIDDEN
    bound = min(bound, cost) if feasible else bound
    optimal = feasible and cost - bound <= relative_gap * max(abs(cost), 1e-300)
    return Solution(
        choice=tuple(int(s) for s in choice), cost=cost, bound=bound, feasible=feasible, optimal=optimal,
        row_usage=usage, seconds=time.monotonic() - started, status="optimal" if optimal else status,
    )


def exhaustive(problem: Problem) -> Solution:
    """The best of all choices, the first in lexical order among equals; at most 1e6 combinations.

    Where no choice meets the limits: the one of least peak excess, `bound` that excess.
    Where every choice is forbidden: the first, `bound` infinite.
    """
    started = time.monotonic()
    check(problem)
    sizes = [c.size for c in problem.node_costs]
    count = math.prod(sizes)
    if count > MOST_COMBINATIONS:
        raise ProblemError(
            f"problem: exhaustive search of {count} combinations; it takes at most {MOST_COMBINATIONS}. Use solve."
        )
    costs, usage = _all_costs(problem, sizes), _all_usages(problem, sizes)
    excess = np.max(usage - problem.limits, axis=1) if problem.limits.size else np.full(count, -np.inf)
    allowed = costs < FORBIDDEN
    met = allowed & np.all(usage <= problem.limits + tolerance(problem.limits), axis=1)
    if met.any():
        best = int(np.where(met, costs, np.inf).argmin())
        bound, status = float(costs[best]), "optimal"
    else:
        best = int(np.where(allowed, excess, np.inf).argmin())
        bound, status = (float(excess[best]) if allowed.any() else math.inf), "infeasible"
    picks = np.unravel_index(best, sizes) if sizes else ()
    return solution(problem, [int(p) for p in picks], bound=bound, started=started, status=status)


def _spread(table: Floats, axes: tuple[int, ...], sizes: list[int]) -> Floats:
    """`table` over `axes` (ascending) as an array that broadcasts over all combinations."""
    shape = [sizes[a] if a in axes else 1 for a in range(len(sizes))]
    return table.reshape(shape)


def _ascending(edge: tuple[int, int], table: Floats) -> tuple[Floats, tuple[int, int]]:
    u, v = edge
    return (table, (u, v)) if u < v else (table.T, (v, u))


def _all_costs(problem: Problem, sizes: list[int]) -> Floats:
    total = np.zeros(sizes)
    for i, costs in enumerate(problem.node_costs):
        total = total + _spread(costs, (i,), sizes)
    for edge, table in zip(problem.edges, problem.edge_costs, strict=True):
        total = total + _spread(*_ascending(edge, table), sizes)
    return np.asarray(total).reshape(-1)


def _all_usages(problem: Problem, sizes: list[int]) -> Floats:
    total = np.zeros((math.prod(sizes), len(problem.limits)))
    for i, held in enumerate(problem.usages):
        flat = np.broadcast_to(_spread(held, (i,), sizes), sizes).reshape(-1)
        for r, w in zip(problem.rows[i], problem.row_weights[i], strict=True):
            total[:, r] += w * flat
    for e, table in problem.edge_usages.items():
        spread = _spread(*_ascending(problem.edges[e], table), sizes)
        flat = np.broadcast_to(spread, sizes).reshape(-1)
        for r, w in zip(problem.edge_rows[e], problem.edge_row_weights[e], strict=True):
            total[:, r] += w * flat
    return total
