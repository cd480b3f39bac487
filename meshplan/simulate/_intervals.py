"""Sets of intervals of time as sorted arrays [k, 2] that neither overlap nor touch."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from meshplan.simulate._task import Floats


def union(start: Floats, end: Floats) -> Floats:
    """The times that lie in any of the intervals; empty intervals count for nothing."""
    filled = end > start
    start, end = start[filled], end[filled]
    if not len(start):
        return np.zeros((0, 2))
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.column_stack([start[first], reach[last]])


def seconds(intervals: Floats) -> float:
    """Their length altogether."""
    return float(np.sum(intervals[:, 1] - intervals[:, 0]))


def covered(intervals: Floats, times: Floats) -> Floats:
    """For each time, how much before it lies in the intervals."""
    if not len(intervals):
        return np.zeros(len(times))
    lengths = intervals[:, 1] - intervals[:, 0]
    before = np.concatenate([[0.0], np.cumsum(lengths)])
    place = np.searchsorted(intervals[:, 0], times, side="right")
    inside = np.maximum(place - 1, 0)
    partial = np.minimum(times - intervals[inside, 0], lengths[inside])
    return np.where(place > 0, before[inside] + partial, 0.0)


def uncovered(of: Floats, by: Floats) -> Floats:
    """For each interval of `of`, how much of it lies outside `by`."""
    inside = covered(by, of[:, 1]) - covered(by, of[:, 0])
    return np.maximum(of[:, 1] - of[:, 0] - inside, 0.0)


def lanes(start: Floats, end: Floats) -> NDArray[np.int64]:
    """A lane for each interval so that those of one lane never overlap, as few as can be."""
    found = np.zeros(len(start), dtype=np.int64)
    busy: list[tuple[float, int]] = []  # when each lane gets free
    for place in np.lexsort((end, start)).tolist():
        free = busy and busy[0][0] <= start[place]
        lane = heapq.heappop(busy)[1] if free else len(busy)
        heapq.heappush(busy, (float(end[place]), lane))
        found[place] = lane
    return found
