"""Exact reductions: strategies never needed, and nodes that can be minimised away.

Dead-end elimination (Goldstein 1994) drops a strategy where another is at least as good
whatever the neighbours choose, memory included. `reduce_nodes` removes nodes of degree 0, 1, 2
without memory (R0, RI, RII of Scholz and Eckstein 2002) and puts them back afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshplan.cost._problem import Floats, Ints
from meshplan.solve._model import Item, Masks, Model, Pairs, restrict

MOST_TABLE = 8_000_000
AT_ONCE = 100_000  # differences taken in one go: one numpy call where many would take longer than their work


def drop_dominated(model: Model, rounds: int = 3) -> Model:
    """The model less dominated strategies; one choice of least cost survives."""
    for _ in range(rounds):
        masks = _undominated(model)
        if all(m.all() for m in masks):
            break
        model = restrict(model, masks)
    return model


def _undominated(model: Model) -> Masks:
    """Masks of what stays, each node judged with its neighbours already cut."""
    masks: Masks = [np.ones(k, dtype=bool) for k in model.sizes]
    near: list[list[tuple[int, bool]]] = [[] for _ in masks]
    tables: list[Floats] = list(model.pairs.values())
    for at, (u, v) in enumerate(model.pairs):
        near[u].append((at, False))
        near[v].append((at, True))
    ends = list(model.pairs)
    items: list[list[tuple[Item, int]]] = [[] for _ in masks]
    for item in model.loads.items:
        for axis, node in enumerate(item.nodes):
            items[node].append((item, axis))
    for i, k in enumerate(model.sizes):
        if k == 1:
            continue
        better = _no_heavier(items[i], k)
        worse_by = model.unary[i][:, None] - model.unary[i][None, :]
        for at, flipped in near[i]:
            other = ends[at][0] if flipped else ends[at][1]
            table = (tables[at].T if flipped else tables[at])[:, masks[other]]
            worse_by = worse_by + _least_difference(table, better)
        beats = better & (worse_by >= 0.0)
        masks[i] = _greedy_cover(beats)
    return masks


def _no_heavier(items: list[tuple[Item, int]], k: int) -> npt.NDArray[np.bool_]:
    """[s, t]: t holds no more than s in any row, whatever the other end of a pair chooses."""
    result = ~np.eye(k, dtype=bool)
    for item, axis in items:
        held = item.table if axis == 0 else item.table.T
        held = held.reshape(k, -1)
        if (item.weights > 0).any():
            result &= (held[:, None, :] >= held[None, :, :]).all(axis=2)
        if (item.weights < 0).any():
            result &= (held[:, None, :] <= held[None, :, :]).all(axis=2)
    return result


def _least_difference(table: Floats, wanted: npt.NDArray[np.bool_]) -> Floats:
    """[s, t]: least of table[s] - table[t] over the other end; -inf where t forbids what s allows."""
    k, m = table.shape
    finite = bool(np.isfinite(table).all())
    if k * k * m <= AT_ONCE and finite:
        return np.where(wanted, (table[:, None, :] - table[None, :, :]).min(axis=2, initial=np.inf), -np.inf)
    result = np.full(wanted.shape, -np.inf)
    for t in np.flatnonzero(wanted.any(axis=0)):
        rows = np.flatnonzero(wanted[:, t])
        with np.errstate(invalid="ignore"):
            difference = table[rows] - table[t]
        if not finite:
            difference[np.isnan(difference)] = np.inf
        result[rows, t] = difference.min(axis=1, initial=np.inf)
    return result


def _greedy_cover(beats: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Drop from the last strategy on what some strategy still there beats: equals keep the first."""
    stays = np.ones(len(beats), dtype=bool)
    for s in range(len(beats) - 1, -1, -1):
        stays[s] = not (beats[s] & stays).any()
    return stays


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Node `node` was minimised away given `neighbours` (0 to 2): its own costs and its tables (k, k_n)."""

    node: int
    neighbours: tuple[int, ...]
    unary: Floats
    tables: tuple[Floats, ...]


def reduce_nodes(model: Model) -> tuple[Model, list[Removed]]:
    """A model of equal optimum in which nodes without memory and of degree <= 2 have one strategy.

    `put_back` completes a choice of it.
    """
    unary = list(model.unary)
    near: list[dict[int, Floats]] = [{} for _ in unary]
    for (u, v), table in model.pairs.items():
        near[u][v], near[v][u] = table, table.T
    loaded = {n for item in model.loads.items for n in item.nodes}
    waiting = [i for i in range(len(unary)) if unary[i].size > 1 and i not in loaded]
    gone: set[int] = set()
    removed: list[Removed] = []
    while waiting:
        i = waiting.pop()
        if i in gone or len(near[i]) > 2 or _table_entries(unary, near, i) > MOST_TABLE:
            continue
        gone.add(i)
        around = tuple(sorted(near[i]))
        tables = tuple(near[i][n] for n in around)
        removed.append(Removed(node=i, neighbours=around, unary=unary[i], tables=tables))
        _minimise(unary, near, i, around, tables)
        waiting += [n for n in around if n not in loaded]
    pairs: Pairs = {(u, v): t for u in range(len(unary)) for v, t in near[u].items() if u < v}
    kept = tuple(k[:1] if i in gone else k for i, k in enumerate(model.kept))
    core = replace(model, kept=kept, unary=tuple(unary), pairs=pairs)
    return restrict(core, [np.ones(u.size, dtype=bool) for u in core.unary]), removed


def _table_entries(unary: list[Floats], near: list[dict[int, Floats]], i: int) -> int:
    entries = unary[i].size
    for n in near[i]:
        entries *= unary[n].size
    return entries


def _minimise(
    unary: list[Floats], near: list[dict[int, Floats]], i: int, around: tuple[int, ...], tables: tuple[Floats, ...]
) -> None:
    """Node i's best answer to every choice of its neighbours goes into their tables."""
    own, unary[i] = unary[i], np.zeros(1)
    near[i] = {}
    for n in around:
        del near[n][i]
    if not around:
        unary[i] = np.array([own.min()])
    elif len(around) == 1:
        unary[around[0]] = unary[around[0]] + (own[:, None] + tables[0]).min(axis=0)
    else:
        a, b = around
        table = ((own[:, None] + tables[0])[:, :, None] + tables[1][:, None, :]).min(axis=0)
        table = near[a][b] + table if b in near[a] else table
        near[a][b], near[b][a] = table, table.T


def put_back(model: Model, core: Model, removed: list[Removed], choice: Ints) -> Ints:
    """The choice of `model` that a choice of its `core` stands for."""
    full = np.zeros(len(model.unary), dtype=np.int64)
    gone = {r.node for r in removed}
    for i, s in enumerate(choice):
        if i not in gone:
            full[i] = int(np.searchsorted(model.kept[i], core.kept[i][s]))
    for r in reversed(removed):
        vector = r.unary
        for n, table in zip(r.neighbours, r.tables, strict=True):
            vector = vector + table[:, full[n]]
        full[r.node] = int(vector.argmin())
    return full
