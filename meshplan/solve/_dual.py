"""Lower bounds with memory rows: the Lagrangian dual, its subproblem solved exactly.

Every byte gets a price per row; at given prices the rows vanish from the constraints and
elimination finds the best choice. The prices with the largest bound come from a cutting-plane
model kept near the best prices so far (a box-step bundle: Marsten, Hogan, Blankenship 1975).
The bound is at least that of the linear relaxation (Geoffrion 1974).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from meshplan.cost._problem import Floats, Ints
from meshplan.solve._eliminate import Plan, decode, eliminate
from meshplan.solve._model import Model


@dataclass(slots=True, kw_only=True)
class Dual:
    """The bound at the best prices, and every choice seen: its cost and excess (R,) per row."""

    bound: float
    prices: Floats
    choices: list[Ints] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    excesses: list[Floats] = field(default_factory=list)

    def add(self, model: Model, choice: Ints) -> None:
        """Keep a choice that is allowed."""
        cost = model.cost(choice)
        if not np.isfinite(cost):
            return
        self.choices.append(choice)
        self.costs.append(cost)
        self.excesses.append(model.loads.usage(choice) - model.loads.limits)


def priced_optimum(model: Model, plan: Plan, prices: Floats, scale: float = 1.0) -> tuple[float, Ints]:
    """Bound at `prices` and the choice that attains it; (inf, zeros) where nothing is allowed."""
    unary, pairs = model.priced(prices, scale)
    value, messages = eliminate(plan, unary, pairs)
    if not np.isfinite(value):
        return np.inf, np.zeros(len(unary), dtype=np.int64)
    return value - float(prices @ model.loads.limits), decode(plan, unary, pairs, messages)


def maximise_bound(
    model: Model, plan: Plan, *, upper: float, seeds: Iterable[Ints], prices: Floats, deadline: float,
    relative_gap: float, on_choice: Callable[[Ints, Floats], float], most_steps: int = 60,
) -> Dual:
    """Raise the bound from `prices` on until its model promises no more, or it meets `upper`.

    `on_choice(choice, prices)` sees every choice and answers with the least cost known by then.
    """
    dual = Dual(bound=-np.inf, prices=prices)
    for seed in seeds:
        dual.add(model, seed)
    value, choice = priced_optimum(model, plan, dual.prices)
    dual.bound = value
    if not np.isfinite(value):
        return dual
    dual.add(model, choice)
    upper = min(upper, on_choice(choice, dual.prices))
    scale = _row_scale(model)
    radius = _first_radius(dual, scale)
    for _ in range(most_steps):
        if time.monotonic() > deadline or upper - dual.bound <= relative_gap * abs(upper):
            break
        promised, prices = _model_maximum(dual, scale, radius)
        gain = promised - dual.bound
        if gain <= max(1e-3 * (upper - dual.bound), 1e-9 * abs(dual.bound)) if np.isfinite(upper) else gain <= 0:
            break
        value, choice = priced_optimum(model, plan, prices)
        dual.add(model, choice)
        if value > dual.bound:
            at_wall = bool(np.any(np.abs(prices - dual.prices) * scale >= 0.99 * radius))
            radius *= 2.0 if at_wall else 1.0
            dual.bound, dual.prices = value, prices
        else:
            radius *= 0.6
        upper = min(upper, on_choice(choice, prices))
    return dual


def _row_scale(model: Model) -> Floats:
    """Bytes that make one unit of each row."""
    loads = model.loads
    most = np.zeros(loads.limits.size)
    for item in loads.items:
        np.add.at(most, item.rows, np.abs(item.weights) * float(item.table.max()))
    return np.maximum(most, 1e-300)


def _first_radius(dual: Dual, scale: Floats) -> float:
    """A price at which the choices seen would change places, in cost per unit of a row."""
    best = dual.costs[-1]
    saved = [float(((dual.excesses[-1] - g) / scale).max()) for g in dual.excesses[:-1]]
    ratios = [(c - best) / s for c, s in zip(dual.costs, saved, strict=False) if s > 0 and c > best]
    return 0.5 * min(ratios) if ratios else max(abs(best), 1e-12)


def _model_maximum(dual: Dual, scale: Floats, radius: float) -> tuple[float, Floats]:
    """Largest value of the cutting planes within `radius` of the best prices: (value, prices)."""
    from scipy.optimize import linprog

    excess = np.array(dual.excesses) / scale
    open_rows = np.flatnonzero((excess > 0).any(axis=0) | (dual.prices > 0))
    unit = max(radius, 1e-300)
    base = dual.bound
    costs = (np.array(dual.costs) - base) / unit
    centre = dual.prices[open_rows] * scale[open_rows] / unit
    result = linprog(
        np.concatenate([[-1.0], np.zeros(open_rows.size)]),
        A_ub=np.hstack([np.ones((costs.size, 1)), -excess[:, open_rows]]), b_ub=costs,
        bounds=[(None, None), *((max(0.0, c - 1.0), c + 1.0) for c in centre)], method="highs",
    )
    prices = dual.prices.copy()
    if not result.success:
        return dual.bound, prices
    prices[open_rows] = np.maximum(result.x[1:], 0.0) * unit / scale[open_rows]
    return base + float(result.x[0]) * unit, prices
