"""What a lookup found wrong, as a sentence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from meshplan.core import ArgumentError
from meshplan.embedding._route_layout import Lane, Layout, capacities
from meshplan.embedding._runtime_ids import bad_id_sentence
from meshplan.embedding._runtime_split import Origin
from meshplan.embedding._table import Table


def raise_bad_ids(tables: Sequence[Table], origins: Sequence[Origin], bad: np.ndarray) -> None:
    """Raises ArgumentError for ids that are no rows: `bad` [devices, kept tables, 2] says how many, and one of them."""
    for t, origin in enumerate(origins):
        wrong = int(bad[:, t, 0].sum())
        if wrong:
            at = int(np.argmax(bad[:, t, 0] > 0))
            raise ArgumentError(bad_id_sentence(tables[origin.table], int(bad[at, t, 1]) + origin.first, wrong))


def raise_overflow(layout: Layout, counts: Sequence[np.ndarray], batch: int, factor: float) -> None:
    """Raises ArgumentError where a device asks another one for more rows than fit, `batch` samples a device.

    `counts` [devices, streams, N] by lane. The first lane that overflows is named, with its fullest exchange.
    """
    for lane, found in zip(layout.lanes, counts, strict=True):
        if lane.kind == "local":
            continue
        limit, sums = capacities(layout, lane, batch, factor)[0], found.sum(1)
        device, owner = (int(i) for i in np.unravel_index(int(sums.argmax()), sums.shape))
        most = int(sums[device, owner])
        if most <= limit:
            continue
        heaviest = layout.tables[lane.streams[int(found[device, :, owner].argmax())].table]
        others = len({s.table for s in lane.streams}) - 1
        beside = f" (with {others} tables that travel beside it)" if others else ""
        raise ArgumentError(
            f"table {heaviest.name!r}{beside}: device {device} (replica {device // layout.shards}, shard "
            f"{device % layout.shards}) asks shard {owner} for {most} rows, {limit} fit. The bags concerned are NaN in "
            f"this step. Give capacity={_enough(layout, lane, batch, factor, most):g} or more (it is {factor:g}), or "
            f"overflow='exact'."
        )


def _enough(layout: Layout, lane: Lane, batch: int, factor: float, most: int) -> float:
    """The first multiple of a quarter by which the requests fit."""
    tried = (n / 4 for n in itertools.count(int(4 * factor) + 1))
    return next(f for f in tried if capacities(layout, lane, batch, f)[0] >= most)
