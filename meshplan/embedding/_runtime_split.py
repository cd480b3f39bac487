"""Tables that a plan keeps as two, hot rows on every device and cold ones in shards: bags, features, names, checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshplan.core import ArgumentError, nearest
from meshplan.embedding._plan_data import Split
from meshplan.embedding._table import Collection, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a table that is kept comes from: rows from `first` on of the user's table number `table`."""

    table: int
    first: int = 0


def divided(collection: Collection, splits: Sequence[Split]) -> Collection:
    """The tables that are kept: of a split one its hot and its cold rows.

    Raises ArgumentError for a split of a table that is not there, of one that is no sum, or with no row on a side.
    """
    by_table: dict[str, Split] = {}
    for s in splits:
        table = collection.by_name.get(s.table)
        if table is None:
            raise ArgumentError(f"a split names table {s.table!r}. {nearest(s.table, collection.by_name)}")
        if s.table in by_table:
            raise ArgumentError(f"table {s.table!r} is split twice; give one split.")
        if table.pooling not in ("sum", "weighted"):
            raise ArgumentError(
                f"table {s.table!r}: pooling {table.pooling!r} is no sum of a hot and a cold part; split 'sum' or "
                "'weighted' tables alone."
            )
        if not 0 < s.hot_rows < table.rows:
            raise ArgumentError(
                f"table {s.table!r}: {s.hot_rows} hot rows of {table.rows}; give 1 to {table.rows - 1}."
            )
        by_table[s.table] = s
    found: list[Table] = []
    for t in collection.tables:
        found += split_table(t, by_table[t.name]) if t.name in by_table else [t]
    return Collection(tables=tuple(found))


def split_table(table: Table, split: Split) -> tuple[Table, Table]:
    """The hot and the cold rows of a table."""
    share, bag = split.hot_share, table.bag
    hot = replace(table, name=split.hot, rows=split.hot_rows, hotness=table.hotness * share, length=bag)
    cold = replace(
        table, name=split.cold, rows=table.rows - split.hot_rows, hotness=table.hotness * (1 - share), length=bag
    )
    return hot, cold


def origins(collection: Collection, splits: Sequence[Split]) -> tuple[Origin, ...]:
    """Of each table of `divided(collection, splits)`."""
    by_table = {s.table: s for s in splits}
    found: list[Origin] = []
    for i, t in enumerate(collection.tables):
        found.append(Origin(table=i))
        if t.name in by_table:
            found.append(Origin(table=i, first=by_table[t.name].hot_rows))
    return tuple(found)


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


def split_grads(splits: Sequence[Split], grads: Mapping[str, Any]) -> dict[str, Any]:
    """Gradients of features by the plan's tables from those by the user's."""
    out = dict(grads)
    for s in splits:
        out[s.hot] = out[s.cold] = out.pop(s.table)
    return out
