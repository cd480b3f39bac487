"""Bags as padded ids, and what may be wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshplan.core import ArgumentError, nearest
from meshplan.embedding._table import Collection, Table


def pad_bags(values: np.ndarray, lengths: np.ndarray, bag: int) -> np.ndarray:
    """Ragged bags as ids [len(lengths), bag], filled up with -1.

    `values` are the ids of all bags behind one another, `lengths` how many each has; 0 is an empty bag, whose feature
    is zero. Floating `values` (weights) are filled up with 0. Raises ArgumentError where a bag is longer than `bag` or
    the lengths do not add up.
    """
    values, lengths = np.asarray(values), np.asarray(lengths)
    if lengths.sum() != len(values) or (lengths < 0).any():
        raise ArgumentError(f"bags: the lengths add up to {int(lengths.sum())}, but there are {len(values)} ids.")
    if len(lengths) and lengths.max() > bag:
        at = int(lengths.argmax())
        raise ArgumentError(
            f"bags: bag {at} has {int(lengths[at])} ids, a table's `length` says {bag} at most; give the table a "
            f"length of {int(lengths[at])} or cut the bag."
        )
    empty = 0 if np.issubdtype(values.dtype, np.floating) else -1
    out = np.full((len(lengths), bag), empty, values.dtype)
    out[np.arange(bag) < lengths[:, None]] = values
    return out


def check_ids(collection: Collection, ids: Mapping[str, Any], weights: Mapping[str, Any] | None = None) -> None:
    """Raises ArgumentError where ids [batch, bag] on the host are no bags of the tables: a table is missing or unknown,
    a shape differs, an id is no row and not -1 (no id), or a weighted table has no weights. Device arrays are copied.
    """
    batch = check_shapes(collection, ids, weights or {})
    for table in collection.tables:
        found = np.asarray(ids[table.name]).reshape(batch, -1)
        bad = np.argwhere((found < -1) | (found >= table.rows))
        if len(bad):
            raise ArgumentError(bad_id_sentence(table, int(found[tuple(bad[0])]), len(bad), tuple(bad[0])))


def bad_id_sentence(table: Table, found: int, count: int, at: Sequence[int] = ()) -> str:
    place = f" at [{', '.join(str(int(i)) for i in at)}]" if len(at) else ""
    more = f" ({count} such ids)" if count > 1 else ""
    kind = "is negative; -1 alone marks an empty place" if found < 0 else "is past the table's end"
    return (
        f"table {table.name!r}: id {found}{place} {kind}{more}. Ids are in [0, {table.rows}); mend the ids or give the "
        f"table more rows."
    )


def check_shapes(collection: Collection, ids: Mapping[str, Any], weights: Mapping[str, Any]) -> int:
    """The batch size. Raises ArgumentError as `check_ids`, from names, shapes and dtypes alone."""
    names = [t.name for t in collection.tables]
    unknown = [name for name in ids if name not in collection.by_name]
    if unknown:
        raise ArgumentError(f"ids: table {unknown[0]!r} is unknown. {nearest(unknown[0], names)}")
    sizes: dict[str, int] = {}
    for table in collection.tables:
        if table.name not in ids:
            raise ArgumentError(f"ids: table {table.name!r} has none; give an array of -1 for empty bags.")
        array = ids[table.name]
        wanted = (table.bag,) if array.ndim == 2 or table.bag > 1 else ()
        if array.ndim not in (1, 2) or array.shape[1:] != wanted or not np.issubdtype(array.dtype, np.integer):
            raise ArgumentError(
                f"ids: table {table.name!r} has {array.dtype} {list(array.shape)}; give integers [batch, {table.bag}]."
            )
        sizes[table.name] = array.shape[0]
        if (table.pooling == "weighted") != (table.name in weights):
            verb = "needs" if table.pooling == "weighted" else "takes no"
            raise ArgumentError(f"table {table.name!r}: pooling {table.pooling!r} {verb} weights.")
        if table.name in weights and weights[table.name].shape != array.shape:
            raise ArgumentError(
                f"weights: table {table.name!r} has {list(weights[table.name].shape)}, its ids {list(array.shape)}."
            )
    if len(set(sizes.values())) > 1:
        raise ArgumentError(f"ids: batches differ: {sizes}.")
    return next(iter(sizes.values()))
