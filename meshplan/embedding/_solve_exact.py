"""Few tables: every placement, table by table, without those that cannot become the best (branch and bound in layers).

A layer holds the loads of all placements of the first tables that are still in the race: their least cost, with what
the other tables must add (each resource alone, at its least and spread evenly), is below the best known. Placements
that only permute alike devices are kept once.
"""

from __future__ import annotations

import itertools

import numpy as np

from meshplan.embedding._cost import (
    COMMON_MEMORY,
    MEMORY,
    Option,
)
from meshplan.embedding._solve import Choice, Floats, Placed, Placing, State, as_placed, priced_parts, sized_order
from meshplan.machine import CollectiveLine

_DEVICES, _TABLES, _STATES, _GROWN, _PLACEMENTS = 8, 8, 6_000, 40_000, 400


def solve_exact(problem: Placing, known: Placed) -> Placed | None:
    """The best placement of all; None where the tables or devices are too many to be sure of it."""
    n, order = problem.devices, sized_order(problem)
    if n > _DEVICES or len(order) > _TABLES or known.overflow > 0:
        return None
    ways = [_ways(problem.options[t], n) for t in order]
    if max(map(len, ways)) > _PLACEMENTS:
        return None
    dense = [[_dense(problem.options[t][k], at, n) for k, at in found] for t, found in zip(order, ways, strict=True)]
    rest_loads, rest_common = _remaining(problem, order)
    alike = not any(o.at.size or o.unit.ndim == 2 for found in problem.options for o in found)
    loads, common = np.zeros((1, 7, n)), np.zeros((1, 4))
    history: list[tuple[np.ndarray, np.ndarray]] = []
    for step, found in enumerate(dense):
        added = np.stack([d[0] for d in found])
        shared = np.stack([d[1] for d in found])
        if len(loads) * len(added) > _GROWN:
            return None
        grown = (loads[:, None] + added[None]).reshape(-1, 7, n)
        grown_common = (common[:, None] + shared[None]).reshape(-1, 4)
        cost = _bound(problem, grown, grown_common, rest_loads[step + 1], rest_common[step + 1])
        kept = np.flatnonzero(cost < known.seconds * (1 - 1e-12))
        if not len(kept):
            return known
        kept = kept[_distinct(grown[kept], grown_common[kept], alike)]
        if len(kept) > _STATES:
            return None
        history.append((kept // len(added), kept % len(added)))
        loads, common, cost = grown[kept], grown_common[kept], cost[kept]
    best = int(np.argmin(cost))
    choices: list[Choice | None] = [None] * len(order)
    for step in reversed(range(len(order))):
        parents, numbers = history[step]
        choices[order[step]] = ways[step][int(numbers[best])]
        best = int(parents[best])
    return as_placed(State(problem, choices))


def _ways(options: tuple[Option, ...], n: int) -> list[Choice]:
    """Every option on every set of devices that it can be on."""
    found: list[Choice] = []
    for k, option in enumerate(options):
        if option.unit.ndim == 2:
            found += [(k, (node,)) for node in range(n // option.unit.shape[1])]
        else:
            found += [(k, at) for at in itertools.combinations(range(n), option.pieces)]
    return found


def _dense(option: Option, at: tuple[int, ...], n: int) -> tuple[Floats, Floats]:
    loads = np.repeat(option.even[:, None], n, axis=1)
    loads[:, option.at] += option.extra
    for device in at:
        width = option.unit.shape[1] if option.unit.ndim == 2 else 1
        loads[:, device * width : (device + 1) * width] += option.unit.reshape(7, width)
    return loads, option.common


def _remaining(problem: Placing, order: list[int]) -> tuple[Floats, Floats]:
    """What the tables from each place on must add at least: loads summed over the devices [.., 7], common [.., 4]."""
    n = problem.devices
    loads = np.array([np.min([o.totals(n) for o in problem.options[t]], axis=0) for t in order])
    common = np.array([np.min([o.common for o in problem.options[t]], axis=0) for t in order])
    end = np.zeros((1, 7)), np.zeros((1, 4))
    return (
        np.concatenate([np.cumsum(loads[::-1], axis=0)[::-1], end[0]]),
        np.concatenate([np.cumsum(common[::-1], axis=0)[::-1], end[1]]),
    )


def _bound(problem: Placing, loads: Floats, common: Floats, rest: Floats, rest_common: Floats) -> Floats:
    """Seconds that each state costs at least, infinite where it cannot fit."""
    group, n = problem.group, problem.devices
    peaks = np.maximum(loads.max(axis=2), (loads.sum(axis=2) + rest) / n)
    common = common + rest_common
    cost = np.sum([*priced_parts(group, peaks.T, common.T, _seconds).values()], axis=0)
    cost[peaks[:, MEMORY] + common[:, COMMON_MEMORY] > problem.limit * (1 + 1e-12)] = np.inf
    return cost


def _seconds(lines: tuple[CollectiveLine, ...], nbytes: Floats) -> Floats:
    if not lines:
        return np.zeros_like(nbytes)
    each = [x.latency_seconds + nbytes * x.seconds_per_byte + np.sqrt(nbytes) * x.seconds_per_root_byte for x in lines]
    return np.where(nbytes > 0, np.min(each, axis=0), 0.0)


def _distinct(loads: Floats, common: Floats, alike: bool) -> np.ndarray:
    """One state of each that differ in nothing (or, on alike devices, in the order of the devices alone)."""
    if alike:
        order = np.lexsort(tuple(loads[:, r, :] for r in range(7)), axis=-1)
        loads = np.take_along_axis(loads, order[:, None, :], axis=2)
    flat = np.concatenate([loads.reshape(len(loads), -1), common], axis=1)
    scale = np.maximum(np.abs(flat).max(axis=0), 1e-300)
    _, first = np.unique(np.round(flat / scale, 11), axis=0, return_index=True)
    return np.sort(first)
