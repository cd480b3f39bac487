"""Is the problem well formed? Said in a sentence, before any work starts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshplan.core import ProblemError
from meshplan.cost._problem import Problem


def check(problem: Problem) -> None:
    """Raise `ProblemError` naming the first thing that is wrong with `problem`."""
    reason = _nodes(problem) or _edges(problem) or _edge_usages(problem)
    wrong = np.isnan(problem.limits) | np.isneginf(problem.limits)
    if not reason and wrong.any():
        r = int(wrong.argmax())
        reason = f"limits[{r}] is {problem.limits[r]}; give bytes, or drop the row."
    if reason:
        raise ProblemError(f"problem: {reason}")


def check_choice(problem: Problem, choice: tuple[int, ...], what: str = "choice") -> None:
    """Raise `ProblemError` unless `choice` names one existing strategy per node."""
    n = len(problem.node_costs)
    if len(choice) != n:
        raise ProblemError(f"{what} has {len(choice)} entries, the problem has {n} nodes; give one strategy per node.")
    for i, s in enumerate(choice):
        if not 0 <= s < len(problem.node_costs[i]):
            raise ProblemError(
                f"{what}[{i}] is strategy {s}; {_name(problem, i)} has strategies "
                f"0 to {len(problem.node_costs[i]) - 1}."
            )


def _name(problem: Problem, i: int) -> str:
    return f"node {i} ({problem.names[i]})" if i < len(problem.names) else f"node {i}"


def _nodes(problem: Problem) -> str:
    n = len(problem.node_costs)
    for what in ("usages", "rows", "row_weights"):
        found = len(getattr(problem, what))
        if found != n:
            return f"{what} has {found} entries, node_costs has {n}; give one per node."
    if problem.names and len(problem.names) != n:
        return f"names has {len(problem.names)} entries, node_costs has {n}; give one per node, or none."
    for i, costs in enumerate(problem.node_costs):
        if costs.ndim != 1 or not costs.size:
            return f"{_name(problem, i)} has costs of shape {costs.shape}; it needs at least one strategy."
        if problem.usages[i].shape != costs.shape:
            return f"{_name(problem, i)} has {costs.size} strategies but usages of shape {problem.usages[i].shape}."
        reason = (
            _numbers(costs, "costs")
            or _usage(problem.usages[i])
            or _rows(problem.rows[i], problem.row_weights[i], len(problem.limits))
        )
        if reason:
            return f"{_name(problem, i)}: {reason}"
    return ""


def _edges(problem: Problem) -> str:
    n = len(problem.node_costs)
    if len(problem.edge_costs) != len(problem.edges):
        return f"edge_costs has {len(problem.edge_costs)} tables, edges has {len(problem.edges)}; give one per edge."
    for e, ((u, v), table) in enumerate(zip(problem.edges, problem.edge_costs, strict=True)):
        if not (0 <= u < n and 0 <= v < n) or u == v:
            return f"edge {e} joins nodes {u} and {v}; it must join two different nodes of 0 to {n - 1}."
        reason = _shape(problem, e, table) or _numbers(table, "costs")
        if reason:
            return f"edge {e} ({u}, {v}): {reason}"
    return ""


def _edge_usages(problem: Problem) -> str:
    for e, table in problem.edge_usages.items():
        if not 0 <= e < len(problem.edges):
            return f"edge_usages names edge {e}; edges are 0 to {len(problem.edges) - 1}."
        if e not in problem.edge_rows or e not in problem.edge_row_weights:
            return f"edge {e} has edge_usages but no edge_rows or edge_row_weights; give all three."
        reason = (
            _shape(problem, e, table)
            or _usage(table)
            or _rows(problem.edge_rows[e], problem.edge_row_weights[e], len(problem.limits))
        )
        if reason:
            return f"edge {e} usages: {reason}"
    return ""


def _shape(problem: Problem, e: int, table: npt.NDArray[np.float64]) -> str:
    u, v = problem.edges[e]
    wanted = (problem.node_costs[u].size, problem.node_costs[v].size)
    return "" if table.shape == wanted else f"table of shape {table.shape}, its nodes have {wanted[0]} x {wanted[1]}."


def _numbers(costs: npt.NDArray[np.float64], what: str) -> str:
    if np.isnan(costs).any():
        return f"{what} hold NaN at {np.argwhere(np.isnan(costs))[0].tolist()}; use FORBIDDEN for what is not allowed."
    if np.isneginf(costs).any():
        return f"{what} hold -inf at {np.argwhere(np.isneginf(costs))[0].tolist()}; costs must be finite or FORBIDDEN."
    return ""


def _usage(usage: npt.NDArray[np.float64]) -> str:
    return "" if np.isfinite(usage).all() else f"usages hold {usage[~np.isfinite(usage)][0]}; give finite bytes."


def _rows(rows: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], count: int) -> str:
    if rows.shape != weights.shape or rows.ndim != 1:
        return f"rows of shape {rows.shape} but row_weights of shape {weights.shape}; give one weight per row."
    if rows.size and (rows.min() < 0 or rows.max() >= count):
        return f"row {int(rows.min() if rows.min() < 0 else rows.max())} does not exist; limits has {count} rows."
    return "" if np.isfinite(weights).all() else "row_weights must be finite."
