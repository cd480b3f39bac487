"""What the solvers are made of, each part proven by itself against trying every choice."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings

from meshplan.cost._problem import Problem
from meshplan.solve import solve
from meshplan.solve._dual import maximise_bound, priced_optimum
from meshplan.solve._eliminate import decode, eliminate, min_marginals, plan
from meshplan.solve._evaluate import exhaustive
from meshplan.solve._large import search_large
from meshplan.solve._local import repair
from meshplan.solve._messages import start, tighten
from meshplan.solve._milp import integer_optimum
from meshplan.solve._model import Model, build
from meshplan.solve._reduce import drop_dominated, put_back, reduce_nodes
from tests._problems import ladder, problems, random_problem


def all_costs(model: Model) -> dict[tuple[int, ...], float]:
    """Cost of every choice of the model's strategies, infinite where not allowed."""
    return {c: model.cost(np.array(c, np.int64)) for c in itertools.product(*(range(k) for k in model.sizes))}


def best_within_limits(model: Model) -> float:
    costs = all_costs(model)
    met = [v for c, v in costs.items() if model.loads.met(model.loads.usage(np.array(c, np.int64)))]
    return min(met, default=np.inf)


@settings(max_examples=150)
@given(problems())
def test_a_model_keeps_every_cost_and_every_row_that_can_bind(problem: Problem) -> None:
    model = build(problem)
    best = exhaustive(problem)
    assert best.feasible or not math.isfinite(best_within_limits(model)) or not model.possible
    if best.feasible:
        assert model.possible and best_within_limits(model) == pytest.approx(best.cost)


@settings(max_examples=150)
@given(problems())
def test_elimination_finds_the_least_cost_and_a_choice_that_has_it(problem: Problem) -> None:
    model = build(problem)
    order = plan(model)
    assert order is not None
    value, messages = eliminate(order, list(model.unary), model.pairs)
    costs = all_costs(model)
    assert value == pytest.approx(min(costs.values()))
    if math.isfinite(value):
        assert costs[tuple(decode(order, list(model.unary), model.pairs, messages))] == pytest.approx(value)


@settings(max_examples=100)
@given(problems())
def test_min_marginals_are_the_least_cost_with_each_strategy_and_each_pair(problem: Problem) -> None:
    model = build(problem)
    order = plan(model)
    assert order is not None
    costs = all_costs(model)
    assume(math.isfinite(min(costs.values())))
    _, messages = eliminate(order, list(model.unary), model.pairs)
    nodes, edges = min_marginals(order, list(model.unary), model.pairs, messages)
    for i, k in enumerate(model.sizes):
        for s in range(k):
            assert nodes[i][s] == pytest.approx(min(v for c, v in costs.items() if c[i] == s))
    assert edges.keys() == model.pairs.keys()
    for (u, v), table in edges.items():
        for (s, t), least in np.ndenumerate(table):
            assert least == pytest.approx(min(x for c, x in costs.items() if (c[u], c[v]) == (s, t)))


def test_a_graph_too_wide_has_no_plan() -> None:
    model = build(ladder(40, 10))
    assert plan(model, most_entries=500) is None
    order = plan(model)
    assert order is not None and order.entries < 300_000


@settings(max_examples=150)
@given(problems())
def test_dropping_dominated_strategies_keeps_an_optimum_within_the_limits(problem: Problem) -> None:
    model = build(problem)
    assume(model.possible)
    smaller = drop_dominated(model)
    assert sum(smaller.sizes) <= sum(model.sizes)
    before = best_within_limits(model)
    if math.isfinite(before):
        assert smaller.possible and best_within_limits(smaller) == pytest.approx(before)


def test_a_dominated_strategy_goes_unless_it_holds_less_memory() -> None:
    none, row = np.zeros(0, np.int64), np.array([0])
    cheap = Problem(
        node_costs=(np.array([5.0, 1.0]), np.zeros(2)), edges=((0, 1),),
        edge_costs=(np.array([[0.0, 3.0], [1.0, 2.0]]),),
        usages=(np.array([1.0, 2.0]), np.zeros(2)), rows=(none, none), row_weights=(np.zeros(0),) * 2,
        limits=np.array([1.5]),
    )
    assert drop_dominated(build(cheap)).kept[0].tolist() == [1]
    heavy = replace(cheap, rows=(row, none), row_weights=(np.ones(1), np.zeros(0)))
    assert drop_dominated(build(heavy)).kept[0].tolist() == [0, 1]


@settings(max_examples=150)
@given(problems())
def test_reduced_nodes_put_back_give_the_same_optimum(problem: Problem) -> None:
    model = build(replace(problem, edge_usages={}))
    assume(model.possible)
    core, removed = reduce_nodes(model)
    assume(core.possible)
    costs = all_costs(core)
    met = [c for c in costs if core.loads.met(core.loads.usage(np.array(c, np.int64)))]
    assume(met and math.isfinite(best_within_limits(model)))
    best = min(met, key=costs.__getitem__)
    full = put_back(model, core, removed, np.array(best, np.int64))
    assert model.cost(full) == pytest.approx(costs[best]) == pytest.approx(best_within_limits(model))
    assert model.loads.met(model.loads.usage(full))


def test_a_ladder_without_memory_reduces_to_nothing() -> None:
    core, removed = reduce_nodes(build(ladder(8, 6)))
    assert not core.pairs and len(removed) == 8


@settings(max_examples=100)
@given(problems())
def test_message_passing_bounds_from_below_and_drops_nothing_optimal(problem: Problem) -> None:
    model = build(problem)
    costs = all_costs(model)
    least = min(costs.values())
    assume(model.possible and math.isfinite(least))
    moved = start(list(model.unary), model.pairs)
    bounds = [moved.bound()]
    for _ in range(3):
        tighten(moved, passes=1, deadline=np.inf)
        bounds.append(moved.bound())
    assert all(b >= a - 1e-9 * (1 + abs(a)) for a, b in itertools.pairwise(bounds))
    assert bounds[-1] <= least + 1e-9 * (1 + least)
    best = min(costs, key=costs.__getitem__)
    assert all(mask[s] for mask, s in zip(moved.open_strategies(least), best, strict=True))


@settings(max_examples=60)
@given(problems())
def test_prices_bound_the_cost_within_the_limits_from_below(problem: Problem) -> None:
    model = build(problem)
    order, best = plan(model), best_within_limits(model)
    assume(order is not None and model.loads.items and math.isfinite(best))
    assert order is not None
    free, _ = priced_optimum(model, order, np.zeros(model.loads.limits.size))
    dual = maximise_bound(
        model, order, upper=best, seeds=[], prices=np.zeros(model.loads.limits.size), deadline=np.inf,
        relative_gap=1e-9, on_choice=lambda choice, prices: best,
    )
    assert free - 1e-9 <= dual.bound <= best + 1e-9 * (1 + best)
    again, _ = priced_optimum(model, order, dual.prices)
    assert again == pytest.approx(dual.bound) and (dual.prices >= 0).all()


@settings(max_examples=60)
@given(problems())
def test_the_integer_program_alone_agrees_with_trying_every_choice(problem: Problem) -> None:
    model = build(problem)
    assume(model.possible)
    answer = integer_optimum(model, upper=math.inf, seconds=30, relative_gap=0.0)
    best = best_within_limits(model)
    if math.isfinite(best):
        assert answer.choice is not None and model.cost(answer.choice) == pytest.approx(best)
        assert answer.bound == pytest.approx(best, abs=1e-6)
    else:
        assert answer.choice is None and answer.bound == math.inf


def test_repair_brings_a_choice_within_the_limits() -> None:
    model = build(ladder(64, 8, room=0.3))
    cheapest = np.array([int(u.argmin()) for u in model.unary])
    assert not model.loads.met(model.loads.usage(cheapest))
    repaired = repair(model, cheapest, np.zeros(model.loads.limits.size))
    assert repaired is not None and model.loads.met(model.loads.usage(repaired))


def test_the_large_search_generates_rows_and_bounds() -> None:
    problem = ladder(64, 8, room=0.3)
    found = search_large(problem, (), np.inf)
    assert found is not None and found.excess == 0.0
    exact = solve(problem).cost
    assert found.bound <= exact <= found.cost <= 1.5 * exact


def test_the_large_search_sees_a_problem_in_which_nothing_is_allowed() -> None:
    problem = random_problem(0)
    forbidden = replace(problem, node_costs=tuple(np.full(c.shape, 2e18) for c in problem.node_costs))
    assert search_large(forbidden, (), np.inf) is None
