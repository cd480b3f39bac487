"""How often the rows of a table are looked up, and Zipf's law fitted to it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from meshplan.core import ArgumentError


def count_ids(batches: Iterable[np.ndarray], rows: int) -> np.ndarray:
    """Lookups int64 [rows] of each row over batches of ids of any shape; -1 is no id.

    Raises ArgumentError for an id that is no row.
    """
    counts = np.zeros(rows, np.int64)
    for batch in batches:
        ids = np.asarray(batch).reshape(-1)
        ids = ids[ids != -1]
        if len(ids) and (ids.min() < 0 or ids.max() >= rows):
            wrong = int(ids[(ids < 0) | (ids >= rows)][0])
            raise ArgumentError(f"ids: {wrong} is no row of a table of {rows}; -1 alone marks an empty place.")
        counts += np.bincount(ids, minlength=rows)
    return counts


def fit_zipf(counts: np.ndarray, least: int = 10) -> float:
    """The exponent s of Zipf's law, chance of the r-th most frequent row ~ r**-s, by maximum likelihood.

    Read from the rows seen `least` times or more, among which order by frequency is little disturbed by chance; a
    uniform law gives near zero. Raises ArgumentError where fewer than two rows are seen as often. Clauset, Shalizi and
    Newman 2009, arXiv 0706.1062 (for the discrete law cut at a largest rank).
    """
    seen = np.sort(np.asarray(counts))[::-1]
    seen = seen[seen >= least].astype(np.float64)
    if len(seen) < 2:
        raise ArgumentError(f"fit_zipf: {len(seen)} rows were seen {least} times or more; count more batches.")
    logs = np.log(np.arange(1, len(seen) + 1))
    mean = seen @ logs / seen.sum()

    def excess(s: float) -> float:
        """The law's mean log rank over the sample's; falls with s."""
        chances = np.exp(-s * logs)
        return chances @ logs / chances.sum() - mean

    low, high = 0.0, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return (low + high) / 2


def hot_rows(counts: np.ndarray, share: float) -> np.ndarray:
    """The fewest rows, most frequent first, that make up a share (0 to 1) of the lookups: int64 [hot rows]."""
    order = np.argsort(-np.asarray(counts), kind="stable")
    reached = np.cumsum(np.asarray(counts)[order])
    if not len(reached) or not reached[-1]:
        return order[:0]
    return order[: int(np.searchsorted(reached, share * reached[-1] * (1 - 1e-12))) + 1] if share > 0 else order[:0]
