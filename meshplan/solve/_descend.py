"""Improve a choice one coordinate at a time, each time exactly.

Every strategy of every node is a point with the same few coordinates (which factor each mesh
axis splits). With all coordinates but one held at the present choice, a node has a handful
of strategies left and the whole problem is solved exactly in a moment. The cost never
rises; a round without gain ends it. This reaches good choices where the whole problem is too
large for exact solving in the time given.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from meshplan.cost._problem import Problem, Solution
from meshplan.solve._evaluate import evaluate, meets
from meshplan.solve._solve import solve

Coordinates = Sequence[npt.NDArray[np.int8]]


def descend(
    problem: Problem, coordinates: Coordinates, start: Sequence[int], *, width: int = 1, seconds: float = 10.0,
    most_rounds: int = 6,
) -> Solution:
    """The choice reached from `start`. `coordinates[i]`: (k_i, a) of node i's strategies.

    `width` coordinates at a time are set free. A start that breaks a memory row is replaced by the first
    choice that keeps all rows, if one is met. `bound` is that of `star_bound`: valid, cheap, not tight.
    """
    started = time.monotonic()
    deadline = started + seconds
    current = tuple(int(s) for s in start)
    cost, usage = evaluate(problem, current)
    fits = meets(usage, problem.limits)
    axes = coordinates[0].shape[1] if len(coordinates) else 0
    moves = list(itertools.combinations(range(axes), min(width, axes)))
    unchanged = 0
    for turn in range(most_rounds * len(moves)):
        if time.monotonic() > deadline or unchanged >= len(moves):
            break
        free = moves[turn % len(moves)]
        keep = [_free_in(c, s, free) for c, s in zip(coordinates, current, strict=True)]
        found = solve(restricted(problem, keep), seconds=max(0.5, deadline - time.monotonic()))
        better = found.feasible and (not fits or found.cost < cost * (1 - 1e-9))
        unchanged = 0 if better else unchanged + 1
        if better:
            current = tuple(int(k[s]) for k, s in zip(keep, found.choice, strict=True))
            cost, fits = found.cost, True
    _, usage = evaluate(problem, current)
    return Solution(
        choice=current, cost=cost, bound=min(star_bound(problem), cost), feasible=fits, optimal=False,
        row_usage=usage, seconds=time.monotonic() - started, status="descent",
    )


def star_bound(problem: Problem) -> float:
    """No choice costs less: every node alone with half of the least that each of its edges can cost."""
    alone = [c.copy() for c in problem.node_costs]
    for (u, v), table in zip(problem.edges, problem.edge_costs, strict=True):
        alone[u] += table.min(axis=1) / 2
        alone[v] += table.min(axis=0) / 2
    return float(sum(c.min() for c in alone))


def _free_in(coordinates: npt.NDArray[np.int8], strategy: int, free: Sequence[int]) -> npt.NDArray[np.int64]:
    """Strategies that differ from the given one in the free coordinates at most."""
    others = [a for a in range(coordinates.shape[1]) if a not in free]
    same = (coordinates[:, others] == coordinates[strategy, others]).all(axis=1)
    return np.flatnonzero(same)


def restricted(problem: Problem, keep: Sequence[npt.NDArray[np.int64]]) -> Problem:
    """The problem with the strategies `keep[i]` of each node alone."""
    return replace(
        problem,
        node_costs=tuple(c[k] for c, k in zip(problem.node_costs, keep, strict=True)),
        edge_costs=tuple(
            t[np.ix_(keep[u], keep[v])] for (u, v), t in zip(problem.edges, problem.edge_costs, strict=True)
        ),
        usages=tuple(u[k] for u, k in zip(problem.usages, keep, strict=True)),
        edge_usages={
            e: t[np.ix_(keep[problem.edges[e][0]], keep[problem.edges[e][1]])] for e, t in problem.edge_usages.items()
        },
    )
