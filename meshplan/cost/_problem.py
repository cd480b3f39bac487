"""The optimisation problem, in arrays only.

Choose one strategy per node. The cost is the sum of node costs and of edge costs. Every
memory row sums the usage of what lives at one time and must not exceed its limit.

    minimise   sum_i node_costs[i][s_i] + sum_e edge_costs[e][s_u, s_v]
    subject to sum_i row_weights[i][r] * usages[i][s_i]
             + sum_e edge_row_weights[e][r] * edge_usages[e][s_u, s_v] <= limits[r]

Weights are sparse: node i lives in the rows `rows[i]` only. Costs of 1e18 and above mean
"not allowed".
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FORBIDDEN = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """k_i strategies at node i; edge e joins `edges[e] = (u, v)`, u != v, table (k_u, k_v).

    `usages[i]`: (k_i,) bytes; `rows[i]`: (m_i,) row indices; `row_weights[i]`: (m_i,) factors.
    The same for edges where an edge holds memory (a gathered copy): `edge_usages` maps the
    edge's index to a table (k_u, k_v) with `edge_rows` and `edge_row_weights` beside it.
    `limits`: (R,) bytes, already less whatever no decision changes.
    `names[i]` labels node i in reports; solvers ignore it.
    """

    node_costs: tuple[Floats, ...]
    edges: tuple[tuple[int, int], ...]
    edge_costs: tuple[Floats, ...]
    usages: tuple[Floats, ...]
    rows: tuple[Ints, ...]
    row_weights: tuple[Floats, ...]
    limits: Floats
    edge_usages: dict[int, Floats] = field(default_factory=dict)
    edge_rows: dict[int, Ints] = field(default_factory=dict)
    edge_row_weights: dict[int, Floats] = field(default_factory=dict)
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A choice per node and what is known about it.

    `cost` of the choice; `bound` no choice can beat; `feasible`: every row is met.
    `row_usage`: (R,) bytes of the choice. `optimal` when the gap is proven closed.
    `status` in words: "optimal", "time limit", "infeasible" (then `choice` has the least
    peak excess found, and `bound` is of that excess).
    """

    choice: tuple[int, ...]
    cost: float
    bound: float
    feasible: bool
    optimal: bool
    row_usage: Floats
    seconds: float
    status: str

    @property
    def gap(self) -> float:
        """(cost - bound) / cost, 0 where proven optimal."""
        if self.optimal or self.cost <= 0:
            return 0.0
        return max(0.0, (self.cost - self.bound) / self.cost)
