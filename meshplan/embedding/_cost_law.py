"""How the ids of a table fall on its rows: the share of a range of rows, and how many different rows a batch touches.

Row r (from 0, the hottest first) is drawn with a chance in proportion to (first + r + 1)**-zipf; all alike for zipf 0.
Sums over ranks are exact up to `_HEAD` and integrals from half to half beyond it, where the terms change slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_HEAD = 256
_STEPS_PER_DECADE = 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IdLaw:
    """`edges` are ranks, `below` the chance that an id is below each, for a table whose first row has rank `first`."""

    rows: int
    edges: Floats
    below: Floats

    def share(self, low: ArrayLike, high: ArrayLike) -> Floats:
        """The chance that an id is in [low, high)."""
        return self._at(high, self.below) - self._at(low, self.below)

    @property
    def hottest(self) -> float:
        """The chance of the hottest row."""
        return float(self.share(0, 1))

    def touched(self, draws: float) -> Floats:
        """Expected number of different rows below each edge that `draws` independent ids touch."""
        count = np.diff(self.edges)
        chance = np.minimum(np.diff(self.below) / count, 1 - 1e-15)
        return np.concatenate([[0.0], np.cumsum(count * -np.expm1(draws * np.log1p(-chance)))])

    def unique(self, draws: float, low: ArrayLike = 0, high: ArrayLike | None = None) -> Floats:
        """Expected number of different rows in [low, high) that `draws` independent ids of the whole table touch."""
        found = self.touched(draws)
        return self._at(self.rows if high is None else high, found) - self._at(low, found)

    def rows_for(self, share: float) -> int:
        """The least number of hottest rows that together have this share of the ids."""
        return int(np.ceil(np.interp(share, self.below, self.edges) - 1e-9))

    def _at(self, rank: ArrayLike, values: Floats) -> Floats:
        return np.interp(np.asarray(rank, dtype=np.float64), self.edges, values)


@lru_cache(maxsize=8192)
def id_law(rows: int, zipf: float, first: int = 0) -> IdLaw:
    """The law of a table of `rows` rows; its first row has rank `first` among those that the exponent speaks of."""
    if zipf == 0 or rows == 1:
        return IdLaw(rows=rows, edges=np.array([0.0, rows]), below=np.array([0.0, 1.0]))
    head = np.arange(min(rows, _HEAD) + 1, dtype=np.float64)
    if rows > _HEAD:
        steps = int(np.ceil(np.log10(rows / _HEAD) * _STEPS_PER_DECADE)) + 1
        tail = np.unique(np.round(np.geomspace(_HEAD, rows, steps + 1)))
        edges = np.concatenate([head, tail[tail > _HEAD]])
    else:
        edges = head
    ends = first + edges
    exact = (first + head[1:]) ** -zipf
    lows, highs = ends[:-1][len(exact) :] + 0.5, ends[1:][len(exact) :] + 0.5
    if zipf == 1:
        sums = np.log(highs / lows)
    else:
        sums = (highs ** (1 - zipf) - lows ** (1 - zipf)) / (1 - zipf)
    total = np.concatenate([[0.0], np.cumsum(np.concatenate([exact, sums]))])
    return IdLaw(rows=rows, edges=edges, below=total / total[-1])
