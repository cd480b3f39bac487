"""From a model to its best choice: bounds and choices close in on each other.

Each round bounds the cost from below, improves the best choice known, and drops the strategies
that no better choice can use. What is left in the end goes to the integer program.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np

from meshplan.cost._problem import Floats, Ints
from meshplan.solve._dual import Dual, maximise_bound
from meshplan.solve._eliminate import Plan, decode, eliminate, min_marginals, plan
from meshplan.solve._local import INFINITE_PRICE, Search, repair
from meshplan.solve._messages import start, tighten
from meshplan.solve._milp import integer_optimum, variables
from meshplan.solve._model import Masks, Model, Pairs, restrict
from meshplan.solve._peak import least_peak
from meshplan.solve._reduce import drop_dominated, put_back, reduce_nodes

FIRST_STEPS, MOST_STEPS = 8, 60
MOST_REPAIRS = 12
SMALL_PROGRAM = 600
LEAST_STEP = 0.01  # of the way to the best choice known: shorter steps along memory prices change nothing


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


@dataclass(slots=True, kw_only=True)
class Memory:
    """What one round hands to the next: prices of the problem's rows, choices seen on the way."""

    prices: Floats
    choices: list[tuple[int, ...]] = field(default_factory=list)
    rounds: int = 0

    def keep(self, model: Model, dual: Dual) -> None:
        self.rounds += 1
        self.prices[:] = 0.0
        self.prices[model.loads.row_ids] = dual.prices
        self.choices = [model.original(c) for c in dual.choices]

    def seeds(self, model: Model) -> list[Ints]:
        local = [model.local(c) for c in self.choices]
        return [c for c in local if c is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a round proved: a bound, and the model less what cannot be in a better choice."""

    bound: float
    model: Model


def search(model: Model, best: Best) -> float:
    """A bound on the cost of every choice better than `best`, which is improved in place."""
    bound, memory = -math.inf, Memory(prices=np.zeros(int(model.loads.row_ids.max(initial=-1)) + 1))
    while model.possible and not best.late:
        order = plan(model)
        if order is None:
            model = drop_dominated(model)
            order = plan(model)
        done = _dense_round(model, best) if order is None else _exact_round(model, order, best, memory)
        bound = max(bound, done.bound)
        if best.closed(bound) or not done.model.possible:
            return bound if done.model.possible else math.inf
        shrunk = sum(done.model.sizes) < 0.8 * sum(model.sizes)
        model = done.model
        if not shrunk and memory.rounds != 1:
            break
    return max(bound, _integer_rounds(model, best, bound, memory)) if model.possible else math.inf


def _exact_round(model: Model, order: Plan, best: Best, memory: Memory) -> Round:
    """Elimination; prices on memory where the cheapest choice does not fit."""
    if not model.loads.items:
        value, messages = eliminate(order, list(model.unary), model.pairs)
        if math.isfinite(value):
            best.offer(model, decode(order, list(model.unary), model.pairs, messages))
        return Round(bound=value, model=model)
    seeds = memory.seeds(model) if memory.rounds else _seeds(model, order, best)
    tries = 0

    def on_choice(choice: Ints, prices: Floats) -> float:
        nonlocal tries
        tries += 1
        if not best.offer(model, choice) and tries <= MOST_REPAIRS:
            best.offer(model, repair(model, choice, prices, best.deadline))
        return best.upper

    dual = maximise_bound(
        model, order, upper=best.upper, seeds=seeds, prices=memory.prices[model.loads.row_ids],
        deadline=best.deadline, relative_gap=best.relative_gap, on_choice=on_choice,
        most_steps=MOST_STEPS if memory.rounds else FIRST_STEPS,
    )
    memory.keep(model, dual)
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
    step, best_prices, excess = 1.0, prices, prices
    for _ in range(20 if loads.items else 4):
        unary, pairs = model.priced(prices)
        moved = start(unary, pairs)
        tighten(moved, passes=6, deadline=best.deadline)
        bound = moved.bound() - float(prices @ loads.limits)
        choice = moved.decode()
        best.offer(model, repair(model, choice, prices, best.deadline))
        if bound > best_bound:
            best_bound, best_prices, excess = bound, prices, loads.usage(choice) - loads.limits
            best_masks = moved.open_strategies(best.upper + float(prices @ loads.limits))
        else:
            step *= 0.25
        if best.late or best.closed(best_bound) or not loads.items or step < LEAST_STEP:
            break
        wanted = best.upper - best_bound if math.isfinite(best.upper) else abs(best_bound)
        norm = float(excess @ excess)
        if norm == 0.0 or (not prices.any() and not (excess > 0).any()):
            break
        prices = np.maximum(0.0, best_prices + step * wanted / norm * excess)
    usable: Masks | None = best_masks if math.isfinite(best.upper) else None
    return Round(bound=best_bound, model=restrict(model, usable) if usable is not None else model)


def _integer_rounds(model: Model, best: Best, bound: float, memory: Memory) -> float:
    """The integer program; a large one first over the strategies that a much better choice could use.

    What that finds is optimal if it costs no more than those left out must, and else lets more be dropped.
    """
    span = best.upper - bound
    order = plan(model) if math.isfinite(span) and variables(model) > SMALL_PROGRAM else None
    if order is None:
        return _integer(model, best)
    prices = memory.prices[model.loads.row_ids]
    for share in (0.3, 0.6):
        cutoff = bound + share * span
        if cutoff >= best.upper:
            break
        inner = _integer(_fixed(model, order, prices, cutoff), best)
        if best.upper <= cutoff or best.closed(bound) or best.late:
            return max(bound, min(inner, cutoff))
    model = _fixed(model, order, prices, best.upper)
    return _integer(model, best) if model.possible else math.inf


def _integer(model: Model, best: Best) -> float:
    """The integer program on what is left: its bound. Its best choice goes to `best`.

    HiGHS meets rows to 1e-6 of their limit; where that is not within them, they are drawn tighter.
    """
    if not model.possible:
        return math.inf
    core, removed = reduce_nodes(model)
    bound = -math.inf
    for _ in range(3):
        answer = integer_optimum(
            core, upper=best.upper, seconds=best.deadline - time.monotonic(), relative_gap=best.relative_gap
        )
        bound = max(bound, answer.bound) if bound == -math.inf else bound
        if answer.choice is None:
            break
        excess = core.loads.usage(answer.choice) - core.loads.limits
        choice = put_back(model, core, removed, answer.choice)
        if best.offer(model, choice) or model.loads.met(model.loads.usage(choice)):
            break
        tighter = np.where(excess > 0, core.loads.limits - 1e-5 * np.abs(core.loads.limits) - excess, core.loads.limits)
        core = replace(core, loads=replace(core.loads, limits=tighter))
    return bound
