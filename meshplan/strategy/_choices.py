"""The legal strategies of one node over a mesh, and the specs that follow from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshplan.core import MeshShape, Spec
from meshplan.rules import Dims
from meshplan.strategy._graph import Node

Assignments = npt.NDArray[np.int8]
UNUSED, UNREDUCED = -1, -2


@dataclass(frozen=True, slots=True)
class Choices:
    """`assign[s, a]`: the factor that axis a of the mesh splits in strategy s, or UNUSED, or
    UNREDUCED (the node's value stays to be summed over that axis). `split[s, f]`: into how many
    parts factor f is cut."""

    mesh: MeshShape
    assign: Assignments
    split: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.assign)

    def take(self, keep: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Choices:
        """Some of the strategies, by mask or by number."""
        return Choices(self.mesh, self.assign[keep], self.split[keep])

    def shards(self, dims: Dims | Iterable[int]) -> npt.NDArray[np.float64]:
        """(n,) into how many pieces an array with these dims (or these factors) is cut."""
        factors = sorted({f for d in dims for f in (d if isinstance(d, tuple) else (d,))})
        if not factors:
            return np.ones(len(self.assign))
        return self.split[:, factors].prod(axis=1).astype(np.float64)

    def over(self, factors: Iterable[int]) -> npt.NDArray[np.bool_]:
        """(n, axes) which axes split any of the factors."""
        return np.isin(self.assign, list(factors))

    def specs(
        self, dims: Dims, partial: tuple[int, ...] = (), unreduced: bool = False
    ) -> tuple[list[Spec], npt.NDArray[np.int64]]:
        """Distinct specs of an array with these dims, and which one each strategy gives it.

        `partial`: factors summed away, whose axes leave the array unreduced. `unreduced`: also
        name the axes marked UNREDUCED.
        """
        columns = sorted({f for d in dims for f in d})
        code = np.where(np.isin(self.assign, columns), self.assign, UNUSED).astype(np.int64)
        if partial:
            code = np.where(np.isin(self.assign, partial), UNREDUCED, code)
        if unreduced:
            code = np.where(self.assign == UNREDUCED, UNREDUCED, code)
        rows, index = np.unique(code, axis=0, return_inverse=True)
        return [self._spec(dims, row) for row in rows], index.reshape(-1)

    def _spec(self, dims: Dims, row: npt.NDArray[np.int64]) -> Spec:
        names = self.mesh.names
        entry = {f: tuple(names[a] for a, g in enumerate(row) if g == f) for d in dims for f in d}
        left = tuple(names[a] for a, g in enumerate(row) if g == UNREDUCED)
        return Spec(tuple(tuple(a for f in d for a in entry[f]) for d in dims), left)


def enumerate_choices(node: Node, mesh: MeshShape) -> Choices:
    """All assignments of axes to factors that divide and that every value of the node can hold."""
    options = [*range(len(node.sizes)), UNUSED] + ([UNREDUCED] if node.kind == "sum" else [])
    splittable = [f for f in options if f < 0 or f not in node.whole]
    rows = list(itertools.product(*[_divisors(splittable, node, size) for size in mesh.sizes]))
    assign = np.array(rows, np.int8).reshape(len(rows), len(mesh.sizes))
    split = np.ones((len(rows), len(node.sizes)), np.int64)
    for f in range(len(node.sizes)):
        split[:, f] = np.where(assign == f, np.array(mesh.sizes), 1).prod(axis=1)
    sizes = np.array(node.sizes, np.int64).reshape(1, -1)
    legal = (sizes % split == 0).all(axis=1) if node.sizes else np.ones(len(rows), bool)
    for dims in _all_dims(node):
        for d in dims:
            for major, minor in itertools.pairwise(d):
                # a minor part may be split only when its major part is split completely
                later = split[:, list(d[d.index(minor) :])].prod(axis=1) > 1
                legal &= ~later | (split[:, major] == node.sizes[major])
    return Choices(mesh, assign[legal], split[legal])


def _divisors(options: list[int], node: Node, size: int) -> list[int]:
    """What an axis of this size may be given to."""
    if size == 1:
        return [UNUSED]  # splits nothing
    return [f for f in options if f < 0 or node.sizes[f] % size == 0]


def _all_dims(node: Node) -> Iterable[Dims]:
    group = (*node.group.operands.values(), *node.group.results.values()) if node.group else ()
    multi = {d for d in (*node.values.values(), *node.arguments.values(), *group) if any(len(x) > 1 for x in d)}
    return sorted(multi)
