"""Queries that every server has to answer: waits by Lindley's recursion, all servers at once, seeded.

Arrivals are Poisson. Every query asks all servers at the same moment and is answered when the last has: a fork and
join. A server is two stages of constant seconds, memory then link, each first come first served; in such a row of
queues the order does not matter, so that a query waits as before the longest stage alone (Avi-Itzhak 1965).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Sizes = Literal["constant", "exponential"]


def draw(queries: int, per_second: float, sizes: Sizes, seed: int) -> tuple[Floats, Floats]:
    """(seconds between a query and the next, size of each query over the mean size)."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / per_second, queries)
    return gaps, rng.exponential(1.0, queries) if sizes == "exponential" else np.ones(queries)


def waits(gaps: Floats, busy: Floats) -> Floats:
    """Seconds that each query waits, [servers, queries], where it keeps server k busy for busy[k, query].

    Lindley: w[n + 1] = max(0, w[n] + busy[n] - gap[n]), which is a random walk less its least value so far.
    """
    steps = np.concatenate([np.zeros((len(busy), 1)), (busy - gaps)[:, :-1]], axis=1)
    walk = np.cumsum(steps, axis=1)
    return walk - np.minimum.accumulate(walk, axis=1)


def latencies(gaps: Floats, sizes: Floats, stages: Floats, fixed_seconds: float) -> Floats:
    """Seconds from a query's arrival to its answer; `stages` [servers, 2] are a mean query's seconds in each."""
    used = stages.sum(axis=1) > 0
    stages = stages[used]
    waiting = waits(gaps, stages.max(axis=1)[:, None] * sizes)
    return (waiting + stages.sum(axis=1)[:, None] * sizes).max(axis=0) + fixed_seconds
