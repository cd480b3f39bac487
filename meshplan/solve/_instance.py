"""Instances of the public contest on intra-operator parallelism (google/iopddl) as problems.

JSON, plain or gzip: nodes with strategy costs, usages and one live interval each (half open,
[0, 0]: never live), edges with cost tables in row-major order, one usage limit for every time.
Times at which a subset of another time's nodes is live say nothing new; the rest become rows.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.core import ProblemError
from meshplan.cost._problem import FORBIDDEN, Ints, Problem
from meshplan.solve._solve import solve


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A parsed file: integers as written, usable for exact sums."""

    name: str
    node_costs: list[list[int]]
    usages: list[list[int]]
    intervals: list[tuple[int, int]]
    edges: list[tuple[int, int]]
    edge_costs: list[list[int]]
    usage_limit: int | None


def read_instance(path: str | Path) -> Instance:
    """The file's content, checked. Raises `ProblemError` for a file that is not an instance."""
    where = Path(path)
    try:
        raw = where.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ProblemError(f"{where}: not readable as JSON or gzip JSON: {error}. Give an iopddl instance.") from error
    problem: Any = data.get("problem", data) if isinstance(data, dict) else data
    try:
        nodes, edges = problem["nodes"], problem["edges"]
        instance = Instance(
            name=str(problem.get("name", where.name)), node_costs=nodes["costs"], usages=nodes["usages"],
            intervals=[(int(a), int(b)) for a, b in nodes["intervals"]],
            edges=[(int(u), int(v)) for u, v in edges["nodes"]], edge_costs=edges["costs"],
            usage_limit=problem.get("usage_limit"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProblemError(
            f"{where}: no iopddl instance ({type(error).__name__}: {error}). It needs problem.nodes.costs, .usages, "
            ".intervals and problem.edges.nodes, .costs."
        ) from error
    reason = _malformed(instance)
    if reason:
        raise ProblemError(f"{where}: {reason}")
    return instance


def _malformed(instance: Instance) -> str:
    count = len(instance.node_costs)
    if len(instance.usages) != count or len(instance.intervals) != count:
        return f"{count} nodes, but {len(instance.usages)} usages and {len(instance.intervals)} intervals."
    if len(instance.edges) != len(instance.edge_costs):
        return f"{len(instance.edges)} edges, but {len(instance.edge_costs)} edge costs."
    for e, ((u, v), costs) in enumerate(zip(instance.edges, instance.edge_costs, strict=True)):
        if not (0 <= u < count and 0 <= v < count) or u == v:
            return f"edge {e} joins nodes {u} and {v}; it must join two different nodes of 0 to {count - 1}."
        wanted = len(instance.node_costs[u]) * len(instance.node_costs[v])
        if len(costs) != wanted:
            return f"edge {e} ({u}, {v}) has {len(costs)} costs; its nodes have {wanted} pairs of strategies."
    return ""


def load_instance(path: str | Path) -> Problem:
    """The instance in `path` as a problem; raises `ProblemError` for a file that is not one.

    Costs become 64-bit floats (1e18 and above: not allowed); `evaluate_instance` sums exactly.
    """
    return to_problem(read_instance(path))


def instance_names(folder: str | Path) -> tuple[str, ...]:
    """Names of the instance files in `folder`, sorted: "A" for A.json or A.json.gz."""
    found = {p.name.removesuffix(".gz").removesuffix(".json") for p in Path(folder).glob("*.json.gz")}
    plain = {p.name.removesuffix(".json") for p in Path(folder).glob("*.json")}
    return tuple(sorted(found | (plain - {"bounds"})))


def to_problem(instance: Instance) -> Problem:
    """The problem of a parsed instance, one row per maximal set of nodes live at once."""
    usages = tuple(np.array(u, dtype=np.float64) for u in instance.usages)
    costs = tuple(np.minimum(np.array(c, dtype=np.float64), FORBIDDEN) for c in instance.node_costs)
    limited = instance.usage_limit is not None
    matters = np.array([bool(u.max(initial=0.0) > 0) and limited for u in usages], dtype=bool)
    first, last, count = _maximal_sets(np.array(instance.intervals, dtype=np.int64).reshape(-1, 2), matters)
    tables = []
    for (u, v), table in zip(instance.edges, instance.edge_costs, strict=True):
        shape = (len(instance.node_costs[u]), len(instance.node_costs[v]))
        tables.append(np.minimum(np.array(table, dtype=np.float64), FORBIDDEN).reshape(shape))
    every, ones = np.arange(count), np.ones(count)  # shared: the rows of one node are a stretch of all
    rows = tuple(every[a:b] for a, b in zip(first, last, strict=True))
    return Problem(
        node_costs=costs, edges=tuple(instance.edges), edge_costs=tuple(tables), usages=usages, rows=rows,
        row_weights=tuple(ones[: r.size] for r in rows),
        limits=np.full(count, float(instance.usage_limit or 0.0)),
    )


def _maximal_sets(intervals: Ints, matters: np.ndarray) -> tuple[Ints, Ints, int]:
    """(first set, last + 1, number of sets): the maximal sets of intervals that overlap in one point.

    They are met where an interval ends and some interval has begun since the last such end.
    """
    live = matters & (intervals[:, 1] > intervals[:, 0]) if len(intervals) else matters
    starts, ends = np.unique(intervals[live, 0]), np.unique(intervals[live, 1])
    if not starts.size:
        return np.zeros(len(intervals), np.int64), np.zeros(len(intervals), np.int64), 0
    begun = np.searchsorted(starts, ends, side="left")
    points = ends[np.diff(begun, prepend=0) > 0] - 1
    first = np.where(live, np.searchsorted(points, intervals[:, 0], side="left"), 0)
    last = np.where(live, np.searchsorted(points, intervals[:, 1] - 1, side="right"), 0)
    return first, last, int(points.size)


def evaluate_instance(instance: Instance | str | Path, choice: Sequence[int]) -> tuple[int, int]:
    """Exact (cost, peak usage) of a choice, summed in Python integers."""
    data = instance if isinstance(instance, Instance) else read_instance(instance)
    if len(choice) != len(data.node_costs):
        raise ProblemError(f"choice has {len(choice)} entries, {data.name} has {len(data.node_costs)} nodes.")
    picks = [int(s) for s in choice]
    cost = sum(int(c[s]) for c, s in zip(data.node_costs, picks, strict=True))
    for (u, v), table in zip(data.edges, data.edge_costs, strict=True):
        cost += int(table[picks[u] * len(data.node_costs[v]) + picks[v]])
    change: dict[int, int] = {}
    for (a, b), usage, s in zip(data.intervals, data.usages, picks, strict=True):
        if b > a:
            change[a] = change.get(a, 0) + int(usage[s])
            change[b] = change.get(b, 0) - int(usage[s])
    peak = now = 0
    for at in sorted(change):
        now += change[at]
        peak = max(peak, now)
    return cost, peak


def solve_instance(path: str | Path, seconds: float = 60.0, *, relative_gap: float = 1e-6) -> dict[str, Any]:
    """Solve an instance file within `seconds`, reading included.

    Returns name, status, feasible, optimal, cost and peak_usage (exact integers), usage_limit,
    bound, gap, seconds, nodes, edges, choice. Raises `ProblemError` for a file that is not one.
    """
    started = time.monotonic()
    instance = read_instance(path)
    problem = to_problem(instance)
    left = max(0.1, seconds - (time.monotonic() - started))
    found = solve(problem, seconds=left, relative_gap=relative_gap)
    cost, peak = evaluate_instance(instance, found.choice)
    fits = instance.usage_limit is None or peak <= instance.usage_limit
    return {
        "name": instance.name, "status": found.status, "feasible": fits and cost < FORBIDDEN,
        "optimal": found.optimal, "cost": cost, "peak_usage": peak, "usage_limit": instance.usage_limit,
        "bound": found.bound, "gap": found.gap, "seconds": time.monotonic() - started,
        "nodes": len(instance.node_costs), "edges": len(instance.edges), "choice": list(found.choice),
    }
