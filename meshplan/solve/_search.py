"""From a model to its best choice: bounds and choices close in on each other.

Each round bounds the cost from below, improves the best choice known, and drops the strategies
that no better choice can use. What is left in the end goes to the integer program.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from meshplan.cost._problem import Floats, Ints
from meshplan.solve._dual import maximise_bound
from meshplan.solve._eliminate import Plan, decode, eliminate, min_marginals, plan
from meshplan.solve._local import INFINITE_PRICE, Search, repair
from meshplan.solve._messages import start, tighten
from meshplan.solve._milp import integer_optimum
from meshplan.solve._model import Masks, Model, Pairs, restrict
from meshplan.solve._peak import least_peak
from meshplan.solve._reduce import drop_dominated, put_back, reduce_nodes

CHEAP_ENTRIES = 3_000_000
MOST_CUTS = 8


@dataclass(slots=True, kw_only=True)
class Best:
    """The best choice known, in the problem's strategies. `upper`: no choice above it is of interest."""

    upper: float
    deadline: float
    relative_gap: float
    choice: tuple[int, ...] | None = None
    cost: float = math.inf

    def offer(self, model: Model, choice: Ints | None) -> bool:
        """Take `choice` where it is allowed, within the limits and better."""
        if choice is None or not model.loads.met(model.loads.usage(choice)):
            return False
        cost = model.cost(choice)
        if cost >= self.cost:
            return False
        self.cost, self.choice = cost, model.original(choice)
        self.upper = min(self.upper, cost)
        return True

    def closed(self, bound: float) -> bool:
        if not math.isfinite(self.upper):
            return bound == math.inf
        return self.upper - bound <= self.relative_gap * abs(self.upper)

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a round proved: a bound, and the model less what cannot be in a better choice."""

    bound: float
    model: Model


def search(model: Model, best: Best) -> float:
    """A bound on the cost of every choice better than `best`, which is improved in place."""
    bound = -math.inf
    while model.possible and not best.late:
        order = plan(model)
        if order is None or (order.entries > CHEAP_ENTRIES and model.loads.items):
            model = drop_dominated(model)
            order = plan(model)
        done = _dense_round(model, best) if order is None else _exact_round(model, order, best)
        bound = max(bound, done.bound)
        if best.closed(bound) or not done.model.possible:
            return bound if done.model.possible else math.inf
        shrunk = sum(done.model.sizes) < 0.8 * sum(model.sizes)
        model = done.model
        if not shrunk:
            break
    return max(bound, _integer(model, best)) if model.possible else math.inf


def _exact_round(model: Model, order: Plan, best: Best) -> Round:
    """Elimination; prices on memory where the cheapest choice does not fit."""
    if not model.loads.items:
        value, messages = eliminate(order, list(model.unary), model.pairs)
        if math.isfinite(value):
            best.offer(model, decode(order, list(model.unary), model.pairs, messages))
        return Round(bound=value, model=model)
    seeds = _seeds(model, order, best)
    tries = 0

    def on_choice(choice: Ints, prices: Floats) -> float:
        nonlocal tries
        if not best.offer(model, choice) or tries < 4:
            tries += 1
            if tries <= 12:
                best.offer(model, repair(model, choice, prices, best.deadline))
        return best.upper

    dual = maximise_bound(
        model, order, upper=best.upper, seeds=seeds, deadline=best.deadline, relative_gap=best.relative_gap,
        on_choice=on_choice,
    )
    if best.closed(dual.bound) or best.late or not math.isfinite(best.upper):
        return Round(bound=dual.bound, model=model)
    return Round(bound=dual.bound, model=_fixed(model, order, dual.prices, best.upper))


def _fixed(model: Model, order: Plan, prices: Floats, upper: float) -> Model:
    """The model less strategies and pairs of strategies whose bound at `prices` is above `upper`."""
    unary, pairs = model.priced(prices)
    value, messages = eliminate(order, unary, pairs)
    nodes, edges = min_marginals(order, unary, pairs, messages)
    slack = 1e-9 * (abs(upper) + abs(value))
    most = upper + float(prices @ model.loads.limits) + slack
    kept: Pairs = {p: np.where(edges[p] <= most, t, np.inf) for p, t in model.pairs.items()}
    return restrict(replace(model, pairs=kept), [m <= most for m in nodes])


def _seeds(model: Model, order: Plan | None, best: Best) -> list[Ints]:
    """The best choice known, or one of little memory, so that prices cannot run away."""
    known = model.local(best.choice) if best.choice is not None else None
    if known is not None:
        return [known]
    first = np.array([int(u.argmin()) for u in model.unary], dtype=np.int64)
    peak = least_peak(model, order, first, enough=0.0, deadline=best.deadline)
    best.offer(model, peak.choice)
    best.offer(model, _polished(model, peak.choice, best.deadline))
    return [peak.choice] if math.isfinite(peak.excess) else []


def _polished(model: Model, choice: Ints, deadline: float) -> Ints:
    """Locally best without exceeding more than `choice` does."""
    climb = Search(model, choice)
    climb.descend(np.full(model.loads.limits.size, INFINITE_PRICE), deadline=deadline)
    return climb.choice


def _dense_round(model: Model, best: Best) -> Round:
    """Message passing, prices on memory by subgradient; for graphs that elimination cannot hold."""
    loads = model.loads
    prices = np.zeros(loads.limits.size)
    best_bound, best_masks = -math.inf, None
    seeds = _seeds(model, None, best) if loads.items else []
    for seed in seeds:
        best.offer(model, repair(model, seed, prices, best.deadline))
    step = 1.0
    for _ in range(20 if loads.items else 4):
        unary, pairs = model.priced(prices)
        moved = start(unary, pairs)
        tighten(moved, passes=6, deadline=best.deadline)
        bound = moved.bound() - float(prices @ loads.limits)
        choice = moved.decode()
        best.offer(model, repair(model, choice, prices, best.deadline))
        if bound > best_bound:
            best_bound = bound
            best_masks = moved.open_strategies(best.upper + float(prices @ loads.limits))
        else:
            step *= 0.5
        if best.late or best.closed(best_bound) or not loads.items:
            break
        excess = loads.usage(choice) - loads.limits
        wanted = best.upper - bound if math.isfinite(best.upper) else abs(bound)
        norm = float(excess @ excess)
        if norm == 0.0 or (not prices.any() and not (excess > 0).any()):
            break
        prices = np.maximum(0.0, prices + step * wanted / norm * excess)
    usable: Masks | None = best_masks if math.isfinite(best.upper) else None
    return Round(bound=best_bound, model=restrict(model, usable) if usable is not None else model)


def _integer(model: Model, best: Best) -> float:
    """The integer program on what is left; choices that only its tolerance lets pass are cut off."""
    core, removed = reduce_nodes(model)
    answer = integer_optimum(
        core, upper=best.upper, seconds=best.deadline - time.monotonic(), relative_gap=best.relative_gap
    )
    if answer.choice is None:
        return answer.bound
    choice = put_back(model, core, removed, answer.choice)
    if not model.loads.met(model.loads.usage(choice)):
        best.offer(model, repair(model, choice, np.zeros(model.loads.limits.size), best.deadline))
        return answer.bound
    best.offer(model, choice)
    return answer.bound
