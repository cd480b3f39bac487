"""Bags of a table that a plan keeps as two, hot rows on every device and cold ones in shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshplan.embedding._plan_data import Split


def split_ids(
    splits: Sequence[Split], ids: Mapping[str, Any], weights: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ids, weights) by the plan's tables from those by the user's: an id is in the hot or the cold table, -1 in the
    other. An id that is no row stays none. NumPy arrays stay on the host."""
    ids, weights = dict(ids), dict(weights or {})
    for s in splits:
        whole = ids.pop(s.table)
        xp = np if isinstance(whole, np.ndarray) else jnp
        ids[s.hot] = xp.where(whole < s.hot_rows, whole, -1)
        ids[s.cold] = xp.where(whole >= s.hot_rows, whole - s.hot_rows, -1)
        if s.table in weights:
            weights[s.hot] = weights[s.cold] = weights.pop(s.table)
    return ids, weights


def join_features(splits: Sequence[Split], features: Mapping[str, Any]) -> dict[str, Any]:
    """Features by the user's tables: of a table kept as two the sum. Gradients of them go to both as they are."""
    out = dict(features)
    for s in splits:
        out[s.table] = out.pop(s.hot) + out.pop(s.cold)
    return out
