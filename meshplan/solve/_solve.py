"""The front door: a problem in, its best choice and what is known about it out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshplan.cost._problem import FORBIDDEN, Problem, Solution
from meshplan.solve._check import check, check_choice
from meshplan.solve._eliminate import decode, eliminate, plan
from meshplan.solve._evaluate import evaluate, meets, peak_excess, solution
from meshplan.solve._large import is_large, search_large
from meshplan.solve._local import repair
from meshplan.solve._milp import integer_optimum
from meshplan.solve._model import Model, build, restrict
from meshplan.solve._peak import least_peak, open_strategies
from meshplan.solve._search import Best, search


def solve(
    problem: Problem, *, seconds: float = 30.0, warm_starts: Sequence[Sequence[int]] = (),
    upper_bound: float | None = None, relative_gap: float = 1e-6,
) -> Solution:
    """The choice of least cost within the limits, proven to `relative_gap` where `seconds` suffice.

    Args:
      problem: nodes, edges, memory rows.
      seconds: wall clock; the best choice found by then comes back with its bound.
      warm_starts: choices to start from; those outside the limits are repaired.
      upper_bound: choices that cost more are of no interest.
      relative_gap: (cost - bound) / cost that counts as proven.

    Returns:
      `status` "optimal"; "time limit"; "gap open" (too large to finish, whatever the time);
      "infeasible" (proven: `choice` has the least peak excess found, `bound` is of that excess,
      infinite where every choice is forbidden); "nothing below the upper bound" (proven; `choice`
      is the best one met on the way).

    Raises:
      ProblemError: shapes that do not fit, NaN, rows or strategies that do not exist.
    """
    started = time.monotonic()
    check(problem)
    for at, warm in enumerate(warm_starts):
        check_choice(problem, tuple(warm), f"warm_starts[{at}]")
    best = Best(
        upper=math.inf if upper_bound is None else float(upper_bound),
        deadline=started + seconds, relative_gap=relative_gap,
    )
    if is_large(problem):
        return _solve_large(problem, warm_starts, started, best)
    model = build(problem)
    if not model.possible:
        return _infeasible(problem, started, seconds)
    for warm in warm_starts:
        _offer_warm(problem, model, best, tuple(int(s) for s in warm))
    bound = search(model, best)
    if best.choice is not None and (upper_bound is None or best.cost <= upper_bound):
        return solution(
            problem, best.choice, bound=min(bound, best.cost), started=started, status=_unproven(best),
            relative_gap=relative_gap,
        )
    if upper_bound is None and bound == math.inf:
        return _infeasible(problem, started, seconds)
    return _nothing_found(problem, best, bound, started, seconds)


def minimum_peak(problem: Problem, *, seconds: float = 10.0) -> Solution:
    """The choice of least peak excess, max over the rows of usage - limit; of least cost among equals.

    `bound` is of that excess in bytes (-inf without rows, inf where every choice is forbidden);
    `optimal` says that the excess is proven least, `feasible` that it is not above 0.
    Raises `ProblemError` for a malformed problem.
    """
    started = time.monotonic()
    check(problem)
    unlimited = build(replace(problem, limits=np.full(problem.limits.shape, np.inf)))
    if not unlimited.possible:
        return _all_forbidden(problem, started)
    least = _least_usage(problem, unlimited)
    floor = peak_excess(least, problem.limits)
    model = build(replace(problem, limits=problem.limits + floor)) if problem.limits.size else unlimited
    excess, bound, choice = _lowered(model, started + 0.6 * seconds)
    if bound == math.inf:
        return _all_forbidden(problem, started)
    rounding = 1e-12 * float(np.abs(problem.limits).max(initial=0.0))
    proven = excess <= bound + rounding
    room = floor + max(excess, 0.0) + rounding
    cheap = Best(upper=math.inf, deadline=started + seconds, relative_gap=1e-9)
    tight = build(replace(problem, limits=problem.limits + room)) if problem.limits.size else unlimited
    cheap.offer(tight, tight.local(choice))
    search(replace(tight, possible=True), cheap)
    final = cheap.choice if cheap.choice is not None else choice
    cost, usage = evaluate(problem, final)
    if cost >= FORBIDDEN:
        return _all_forbidden(problem, started)
    return Solution(
        choice=final, cost=cost, bound=min(floor + bound, peak_excess(usage, problem.limits)),
        feasible=meets(usage, problem.limits), optimal=proven, row_usage=usage,
        seconds=time.monotonic() - started, status="optimal" if proven else "time limit",
    )


def _lowered(model: Model, deadline: float) -> tuple[float, float, tuple[int, ...]]:
    """(excess over the model's limits, bound on it, the choice); nothing open: both 0."""
    first = np.array([int(u.argmin()) for u in model.unary], dtype=np.int64)
    order = plan(model)
    if not model.loads.items:
        if order is not None:
            value, messages = eliminate(order, list(model.unary), model.pairs)
            first = decode(order, list(model.unary), model.pairs, messages)
            return (0.0, 0.0 if math.isfinite(value) else math.inf, model.original(first))
        best = Best(upper=math.inf, deadline=deadline, relative_gap=1.0)
        bound = search(replace(model, possible=True), best)
        picked = best.choice if best.choice is not None else model.original(first)
        return 0.0, (math.inf if best.choice is None and bound == math.inf else 0.0), picked
    peak = least_peak(model, order, first, enough=0.0, deadline=deadline)
    if peak.bound == math.inf or peak.excess <= max(peak.bound, 0.0) * (1 + 1e-12):
        return peak.excess, max(peak.bound, 0.0), model.original(peak.choice)
    smaller = model
    if order is not None and math.isfinite(peak.excess):
        smaller = restrict(model, open_strategies(model, order, peak))
    answer = integer_optimum(
        replace(smaller, possible=True), upper=math.inf, seconds=deadline - time.monotonic(), relative_gap=1e-9,
        peak=True,
    )
    choice, bound = model.original(peak.choice), max(peak.bound, 0.0, min(answer.bound, peak.excess))
    if answer.choice is not None:
        excess = peak_excess(smaller.loads.usage(answer.choice), smaller.loads.limits)
        if excess < peak.excess:
            return excess, max(peak.bound, 0.0, answer.bound), smaller.original(answer.choice)
    return peak.excess, bound, choice


def _least_usage(problem: Problem, model: Model) -> np.ndarray:
    """Bytes per row that no choice of the model's strategies goes below, (R,)."""
    least = np.zeros(problem.limits.size)
    parts = [
        (problem.usages[i][model.kept[i]], problem.rows[i], problem.row_weights[i]) for i in range(len(model.kept))
    ]
    for e, table in problem.edge_usages.items():
        u, v = problem.edges[e]
        held = table[np.ix_(model.kept[u], model.kept[v])]
        parts.append((held, problem.edge_rows[e], problem.edge_row_weights[e]))
    for held, rows, weights in parts:
        np.add.at(least, rows, np.where(weights > 0, weights * held.min(), weights * held.max()))
    return least


def _offer_warm(problem: Problem, model: Model, best: Best, warm: tuple[int, ...]) -> None:
    """A warm start as it is, and repaired where it does not fit."""
    cost, usage = evaluate(problem, warm)
    local = model.local(warm)
    if local is not None:
        if not best.offer(model, local):
            best.offer(model, repair(model, local, np.zeros(model.loads.limits.size), best.deadline))
    elif cost < FORBIDDEN and meets(usage, problem.limits) and cost < best.cost:
        best.choice, best.cost, best.upper = warm, cost, min(best.upper, cost)


def _unproven(best: Best) -> str:
    """Why the gap is open: no time left, or what is left is too large for the integer program."""
    return "time limit" if best.late else "gap open"


def _infeasible(problem: Problem, started: float, seconds: float) -> Solution:
    """Proven: no choice meets the limits. The choice is the one that exceeds them least."""
    lowest = minimum_peak(problem, seconds=max(1.0, started + seconds - time.monotonic()))
    bound = lowest.bound
    return replace(
        lowest, bound=bound, feasible=False, optimal=False, status="infeasible", seconds=time.monotonic() - started
    )


def _nothing_found(problem: Problem, best: Best, bound: float, started: float, seconds: float) -> Solution:
    """No choice at or below the bound of interest was found, by proof or for lack of time."""
    proven = best.closed(bound)
    status = "nothing below the upper bound" if proven else _unproven(best)
    choice = best.choice
    if choice is None:
        choice = minimum_peak(problem, seconds=max(1.0, started + seconds - time.monotonic())).choice
    found = solution(problem, choice, bound=bound, started=started, status=status)
    return replace(found, bound=best.upper if proven else bound, optimal=False, status=status)


def _solve_large(problem: Problem, warm_starts: Sequence[Sequence[int]], started: float, best: Best) -> Solution:
    """The large-scale search's answer; what it does not find is not proven absent."""
    left = best.deadline - time.monotonic()  # a round takes seconds: the last one must end in time
    warm = tuple(tuple(int(s) for s in w) for w in warm_starts)
    found = search_large(problem, warm, best.deadline - 0.12 * left)
    if found is None:
        return _all_forbidden(problem, started)
    return solution(
        problem, found.choice, bound=found.bound, started=started, status="time limit",
        relative_gap=best.relative_gap,
    )


def _all_forbidden(problem: Problem, started: float) -> Solution:
    """Proven: every choice uses something that is not allowed."""
    choice = tuple(int(c.argmin()) for c in problem.node_costs)
    cost, usage = evaluate(problem, choice)
    return Solution(
        choice=choice, cost=cost, bound=math.inf, feasible=False, optimal=False, row_usage=usage,
        seconds=time.monotonic() - started, status="infeasible",
    )
