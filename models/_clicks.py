"""How well clicks are predicted: the area under the curve and the normalised entropy."""

from __future__ import annotations

import numpy as np


def auc(odds: np.ndarray, clicks: np.ndarray) -> float:
    """The chance that a click has higher odds than none; equal odds count half. Raises ValueError for one kind."""
    order = np.argsort(odds, kind="stable")
    ranked = odds[order]
    _, first, count = np.unique(ranked, return_index=True, return_counts=True)
    rank = np.empty(len(odds))
    rank[order] = np.repeat(first + (count + 1) / 2, count)  # equal odds share their mean rank
    ones = clicks > 0.5
    n, m = int(ones.sum()), int((~ones).sum())
    if not n or not m:
        raise ValueError("auc: all clicks, or none; give both kinds.")
    return float((rank[ones].sum() - n * (n + 1) / 2) / (n * m))


def normalised_entropy(odds: np.ndarray, clicks: np.ndarray) -> float:
    """Cross entropy over that of always predicting the rate of clicks (He et al. 2014): below 1 is better than that."""
    rate = float(clicks.mean())
    base = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    return float(np.mean(np.logaddexp(0.0, odds) - odds * clicks) / base)
