"""The front door of the solvers, held against trying every choice."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshplan.core import ProblemError
from meshplan.cost._problem import FORBIDDEN, Problem
from meshplan.solve import evaluate, exhaustive, minimum_peak, solve
from tests._problems import ladder, least_peak_by_trial, problems, random_problem


@settings(max_examples=400)
@given(problems())
def test_solve_finds_what_trying_every_choice_finds(problem: Problem) -> None:
    best, found = exhaustive(problem), solve(problem)
    assert found.status == best.status
    if best.feasible:
        assert found.cost == pytest.approx(best.cost, rel=1e-9)
        assert found.optimal and found.gap == 0.0 and found.bound <= found.cost
        cost, usage = evaluate(problem, found.choice)
        assert cost == found.cost and np.array_equal(usage, found.row_usage)
        assert np.all(usage <= problem.limits)


@settings(max_examples=200)
@given(problems())
def test_an_infeasible_problem_comes_back_with_the_least_peak_excess(problem: Problem) -> None:
    best = exhaustive(problem)
    assume(best.status == "infeasible")
    found = solve(problem)
    assert not found.feasible and not found.optimal
    assert found.bound == pytest.approx(best.bound)
    if math.isfinite(best.bound):
        assert (found.row_usage - problem.limits).max() == pytest.approx(best.bound)


@settings(max_examples=200)
@given(problems())
def test_minimum_peak_is_least_and_among_equals_cheapest(problem: Problem) -> None:
    expected, found = least_peak_by_trial(problem), minimum_peak(problem)
    if expected is None:
        assert found.status == "infeasible" and found.bound == math.inf
        return
    assert found.optimal and found.status == "optimal"
    assert found.cost == pytest.approx(expected[1], rel=1e-9)
    if problem.limits.size:
        assert (found.row_usage - problem.limits).max() == pytest.approx(expected[0], abs=1e-9)
        assert found.bound == pytest.approx(expected[0], abs=1e-9)
        assert found.feasible == (expected[0] <= 0)


@settings(max_examples=40)
@given(problems())
def test_the_same_problem_gets_the_same_choice(problem: Problem) -> None:
    assert solve(problem).choice == solve(problem).choice
    assert minimum_peak(problem).choice == minimum_peak(problem).choice


def test_the_same_tight_ladder_gets_the_same_choice() -> None:
    problem = ladder(32, 8, room=0.2)
    first, second = solve(problem), solve(problem)
    assert first.optimal and first.choice == second.choice


def test_equal_choices_go_to_the_lowest_strategy() -> None:
    flat = np.zeros(3)
    problem = _nodes(flat, flat, edges=((0, 1),), tables=(np.zeros((3, 3)),))
    assert solve(problem).choice == (0, 0)


@settings(max_examples=60)
@given(problems(), st.integers(-5, 5))
def test_an_upper_bound_cuts_off_only_what_costs_more(problem: Problem, beside: int) -> None:
    best = exhaustive(problem)
    assume(best.feasible)
    found = solve(problem, upper_bound=best.cost + beside)
    if beside >= 0:
        assert found.optimal and found.cost == pytest.approx(best.cost, rel=1e-9)
    else:
        assert found.status == "nothing below the upper bound" and not found.optimal


@settings(max_examples=60)
@given(problems(), st.integers(0, 2**16))
def test_a_warm_start_never_changes_the_cost(problem: Problem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    warm = tuple(int(rng.integers(c.size)) for c in problem.node_costs)
    cold = solve(problem)
    assume(cold.feasible)
    assert solve(problem, warm_starts=[warm, cold.choice]).cost == pytest.approx(cold.cost, rel=1e-9)


def test_out_of_time_the_answer_is_feasible_and_says_so() -> None:
    problem = ladder(128, 16, room=0.05)
    started = time.monotonic()
    found = solve(problem, seconds=0.4)
    assert time.monotonic() - started < 10
    assert found.feasible and not found.optimal and found.status == "time limit"
    assert found.bound < found.cost and 0 < found.gap <= 1


def test_a_coarse_gap_is_enough_where_it_is_asked_for() -> None:
    problem = ladder(64, 8, room=0.2)
    coarse, fine = solve(problem, relative_gap=0.05), solve(problem)
    assert coarse.optimal and coarse.bound <= fine.cost <= coarse.cost <= fine.cost * 1.05


def test_costs_in_microseconds_and_bytes_in_gigabytes_keep_their_precision() -> None:
    problem = random_problem(5)
    scaled = replace(
        problem, node_costs=tuple(np.where(c < FORBIDDEN, c * 1e-7, c) for c in problem.node_costs),
        edge_costs=tuple(np.where(c < FORBIDDEN, c * 1e-7, c) for c in problem.edge_costs),
        usages=tuple(u * 1e9 for u in problem.usages), limits=problem.limits * 1e9,
        edge_usages={e: t * 1e9 for e, t in problem.edge_usages.items()},
    )
    small, large = solve(problem), solve(scaled)
    assert small.status == large.status == "optimal"
    assert large.cost == pytest.approx(small.cost * 1e-7, rel=1e-9)


def test_a_dense_graph_too_wide_to_eliminate_is_solved() -> None:
    rng = np.random.default_rng(3)
    edges = tuple((i, j) for i in range(9) for j in range(i))
    places = [rng.random((8, 2)) for _ in range(9)]
    tables = tuple(np.abs(places[i][:, None] - places[j][None]).sum(-1) for i, j in edges)
    problem = _nodes(*(rng.random(8) for _ in range(9)), edges=edges, tables=tables)
    found = solve(problem, seconds=60)
    swapped = [
        evaluate(problem, (*found.choice[:i], s, *found.choice[i + 1 :]))[0] for i in range(9) for s in range(8)
    ]
    assert found.optimal and found.cost <= min(swapped) + 1e-12


def test_a_problem_without_nodes_costs_nothing() -> None:
    found = solve(_nodes())
    assert found.optimal and found.choice == () and found.cost == 0.0


def _nodes(
    *costs: np.ndarray, edges: tuple[tuple[int, int], ...] = (), tables: tuple[np.ndarray, ...] = ()
) -> Problem:
    none = np.zeros(0, np.int64)
    return Problem(
        node_costs=costs, edges=edges, edge_costs=tables, usages=tuple(np.zeros(c.size) for c in costs),
        rows=(none,) * len(costs), row_weights=(np.zeros(0),) * len(costs), limits=np.zeros(0),
    )


_GOOD = replace(
    _nodes(np.zeros(2), np.zeros(3), edges=((0, 1),), tables=(np.zeros((2, 3)),)),
    limits=np.array([8.0]), rows=(np.array([0]),) * 2, row_weights=(np.ones(1),) * 2, names=("up", "down"),
)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"usages": (np.zeros(2),)}, "usages has 1 entries, node_costs has 2; give one per node."),
        ({"names": ("up",)}, "names has 1 entries, node_costs has 2; give one per node, or none."),
        ({"usages": (np.zeros(2), np.zeros(2))}, r"node 1 \(down\) has 3 strategies but usages of shape \(2,\)."),
        ({"usages": (np.zeros(2), np.full(3, np.inf))}, r"node 1 \(down\): usages hold inf; give finite bytes."),
        ({"node_costs": (np.array([0, np.nan]), np.zeros(3))}, r"node 0 \(up\): costs hold NaN at \[1\]; use FORB"),
        ({"node_costs": (np.array([0, -np.inf]), np.zeros(3))}, r"costs hold -inf at \[1\]; costs must be finite"),
        ({"node_costs": (np.zeros(0), np.zeros(3))}, "it needs at least one strategy"),
        ({"rows": (np.array([0]), np.array([1]))}, "row 1 does not exist; limits has 1 rows."),
        ({"row_weights": (np.ones(1), np.ones(2))}, "give one weight per row."),
        ({"row_weights": (np.ones(1), np.full(1, np.nan))}, "row_weights must be finite."),
        ({"limits": np.array([np.nan])}, r"limits\[0\] is nan; give bytes, or drop the row."),
        ({"edges": ((0, 0),)}, "edge 0 joins nodes 0 and 0; it must join two different nodes of 0 to 1."),
        ({"edges": ()}, "edge_costs has 1 tables, edges has 0; give one per edge."),
        ({"edge_costs": (np.zeros((3, 2)),)}, r"edge 0 \(0, 1\): table of shape \(3, 2\), its nodes have 2 x 3."),
        ({"edge_usages": {1: np.zeros((2, 3))}}, "edge_usages names edge 1; edges are 0 to 0."),
        ({"edge_usages": {0: np.zeros((2, 3))}}, "edge 0 has edge_usages but no edge_rows or edge_row_weights"),
    ],
)
def test_a_malformed_problem_is_named_in_a_sentence(change: dict[str, object], sentence: str) -> None:
    bad = replace(_GOOD, **change)  # type: ignore[arg-type]
    for call in (solve, minimum_peak, exhaustive):
        with pytest.raises(ProblemError, match=f"^problem: .*{sentence}"):
            call(bad)


def test_a_choice_that_does_not_fit_the_problem_is_named_in_a_sentence() -> None:
    with pytest.raises(ProblemError, match=r"choice has 1 entries, the problem has 2 nodes; give one strategy"):
        evaluate(_GOOD, (0,))
    with pytest.raises(ProblemError, match=r"choice\[1\] is strategy 3; node 1 \(down\) has strategies 0 to 2."):
        evaluate(_GOOD, (0, 3))
    with pytest.raises(ProblemError, match=r"warm_starts\[0\]\[0\] is strategy 9"):
        solve(_GOOD, warm_starts=[(9, 0)])


def test_the_oracle_refuses_more_than_a_million_combinations() -> None:
    with pytest.raises(ProblemError, match="1048576 combinations; it takes at most 1000000"):
        exhaustive(_nodes(*(np.zeros(4) for _ in range(10))))
