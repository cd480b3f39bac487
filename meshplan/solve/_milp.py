"""The integer program, solved by HiGHS (Huangfu and Hall 2018) through scipy.

A 0/1 variable per strategy, a continuous one per allowed entry of a pair table, whose row and
column sums are the strategies' variables. This relaxation is tight, and mostly integral.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from meshplan.cost._problem import Floats, Ints
from meshplan.solve._model import Model, Pairs

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MOST_VARIABLES = 3_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`choice` None: none found. `bound` on cost, or on peak excess; inf: proven that there is none."""

    choice: Ints | None
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Where each node's and pair's variables start, and the entries that each pair's stand for."""

    node_start: Ints
    pair_start: dict[tuple[int, int], int]
    entries: dict[tuple[int, int], tuple[Ints, Ints]]
    count: int


def variables(model: Model) -> int:
    """How many variables the integer program of `model` has."""
    return sum(model.sizes) + sum(int(np.isfinite(t).sum()) for t in model.pairs.values())


def integer_optimum(
    model: Model, *, upper: float, seconds: float, relative_gap: float, peak: bool = False
) -> Answer:
    """Least cost within the limits, or (`peak`) least excess over the rows whatever the cost.

    `upper`: a cost already known, for scaling; inf where none is.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    if seconds <= 0 or variables(model) > MOST_VARIABLES or not model.possible:
        return Answer(choice=None, bound=-math.inf if model.possible or peak else math.inf)
    unary, pairs, constant = _normal(model)
    columns = _columns(model)
    rows_matrix, rows_limit, rows_scale = _rows(model, columns, peak)
    objective = _objective(columns, unary, pairs)
    unit = _unit(objective, upper - constant)
    if peak:
        objective, constant, unit = np.zeros(columns.count + 1), 0.0, rows_scale
        objective[-1] = 1.0
    else:
        objective = objective / unit
    sums, right = _marginals(model, columns, objective.size)
    integrality = np.zeros(objective.size)
    integrality[: sum(model.sizes)] = 1
    lower, most = np.zeros(objective.size), np.ones(objective.size)
    if peak:
        lower[-1], most[-1] = -np.inf, np.inf
    constraints: list[Any] = [LinearConstraint(sums, cast(Any, right), cast(Any, right))]
    if rows_limit.size:
        constraints.append(LinearConstraint(rows_matrix, -np.inf, cast(Any, rows_limit)))
    known = upper if math.isfinite(upper) else constant
    gap = relative_gap if peak else min(0.5, relative_gap * abs(known) / max(abs(known - constant), 1e-300))
    result = milp(
        objective, integrality=integrality, bounds=Bounds(cast(Any, lower), cast(Any, most)), constraints=constraints,
        options={"time_limit": seconds, "mip_rel_gap": gap, "presolve": True},
    )
    return _answer(model, result, columns, constant, unit)


def _answer(model: Model, result: Any, columns: _Columns, constant: float, unit: float) -> Answer:
    status, x = int(result.status), result.x
    bound = getattr(result, "mip_dual_bound", None)
    if status == 2:
        return Answer(choice=None, bound=math.inf)
    lower = -math.inf if bound is None or not math.isfinite(bound) else constant + float(bound) * unit
    if x is None:
        return Answer(choice=None, bound=lower)
    picks = [int(x[a : a + k].argmax()) for a, k in zip(columns.node_start, model.sizes, strict=True)]
    return Answer(choice=np.array(picks, dtype=np.int64), bound=lower)


def _normal(model: Model) -> tuple[list[Floats], Pairs, float]:
    """Costs with the least entries of the tables moved into the nodes and on into a constant."""
    unary, pairs = list(model.unary), {}
    for (u, v), table in model.pairs.items():
        by_row = table.min(axis=1)
        table = table - by_row[:, None]
        by_column = table.min(axis=0)
        pairs[u, v] = table - by_column[None, :]
        unary[u], unary[v] = unary[u] + by_row, unary[v] + by_column
    constant = math.fsum(float(c.min()) for c in unary)
    return [c - c.min() for c in unary], pairs, constant


def _columns(model: Model) -> _Columns:
    sizes = model.sizes
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    count = int(starts[-1])
    pair_start: dict[tuple[int, int], int] = {}
    entries: dict[tuple[int, int], tuple[Ints, Ints]] = {}
    for pair, table in model.pairs.items():
        rows, cols = np.nonzero(np.isfinite(table))
        pair_start[pair], entries[pair] = count, (rows, cols)
        count += rows.size
    return _Columns(node_start=starts[:-1], pair_start=pair_start, entries=entries, count=count)


def _objective(columns: _Columns, unary: list[Floats], pairs: Pairs) -> Floats:
    parts = [*unary, *(pairs[p][columns.entries[p]] for p in columns.pair_start)]
    return np.concatenate(parts) if parts else np.zeros(0)


def _unit(objective: Floats, span: float) -> float:
    """Cost of one unit of the objective: fine against the span still open, but no entry above 1e6."""
    largest = float(objective.max(initial=0.0))
    fine = span / 1e3 if math.isfinite(span) and span > 0 else largest / 1e3
    return max(fine, largest / 1e6, 1e-300)


def _marginals(model: Model, columns: _Columns, width: int) -> tuple[csr_array, Floats]:
    """One strategy per node; a pair's variables sum to its strategies' variables."""
    from scipy.sparse import csr_array

    sizes = model.sizes
    rows = [np.repeat(np.arange(len(sizes)), sizes)]
    cols = [np.arange(sum(sizes))]
    data = [np.ones(sum(sizes))]
    at = len(sizes)
    for pair, (left, right) in columns.entries.items():
        here = columns.pair_start[pair] + np.arange(left.size)
        for node, ends in zip(pair, (left, right), strict=True):
            k = sizes[node]
            rows += [at + ends, at + np.arange(k)]
            cols += [here, columns.node_start[node] + np.arange(k)]
            data += [np.ones(left.size), -np.ones(k)]
            at += k
    entries = (np.concatenate(data), (np.concatenate(rows), np.concatenate(cols)))
    right = np.zeros(at)
    right[: len(sizes)] = 1.0
    return csr_array(entries, shape=(at, width)), right


def _rows(model: Model, columns: _Columns, peak: bool) -> tuple[csr_array, Floats, float]:
    """The memory rows, each divided by its limit (`peak`: all by one scale, less the peak variable)."""
    from scipy.sparse import csr_array

    loads = model.loads
    rows: list[Ints] = [np.zeros(0, np.int64)]
    cols: list[Ints] = [np.zeros(0, np.int64)]
    data: list[Floats] = [np.zeros(0)]
    for item in loads.items:
        if len(item.nodes) == 1:
            held, where = item.table, columns.node_start[item.nodes[0]] + np.arange(item.table.size)
        else:
            u, v = item.nodes
            held = item.table[columns.entries[u, v]]
            where = columns.pair_start[u, v] + np.arange(held.size)
        live = held != 0.0
        rows.append(np.repeat(item.rows, int(live.sum())))
        cols.append(np.tile(where[live], item.rows.size))
        data.append(np.outer(item.weights, held[live]).reshape(-1))
    row, col, value = np.concatenate(rows), np.concatenate(cols), np.concatenate(data)
    count = loads.limits.size
    most = np.zeros(count)
    np.maximum.at(most, row, np.abs(value))
    scale = np.maximum(np.abs(loads.limits), np.maximum(most, 1e-300))
    if peak:
        scale = np.full(count, float(scale.max(initial=1e-300)))
        row, col = np.concatenate([row, np.arange(count)]), np.concatenate([col, np.full(count, columns.count)])
        value = np.concatenate([value, -scale])
    matrix = csr_array((value / scale[row], (row, col)), shape=(count, columns.count + int(peak)))
    return matrix, loads.limits / scale, float(scale.max(initial=1.0))
