"""What a cache of a table's rows must fetch and give back where the coming batches are known (BagPipe, 2202.12429)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from meshplan.core import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStep:
    """What one batch asks of the cache. Lists are int32 [most], filled up with -1 (ids) or the number of slots.

    `ids`: the batch with slots in place of rows. `fetch_ids` go into `fetch_slots` before the step: rows that the host
    has in their last version. `evict_ids` leave `evict_slots` after it: no batch of the window names them. Of the
    slots that the step changes the next batch reads `sync_now`, a later one of the window `sync_later`, and none
    `no_sync`, whose rows go to the host alone. `held`: rows cached during the step.
    """

    ids: np.ndarray
    fetch_ids: np.ndarray
    fetch_slots: np.ndarray
    evict_ids: np.ndarray
    evict_slots: np.ndarray
    sync_now: np.ndarray
    sync_later: np.ndarray
    no_sync: np.ndarray
    held: int

    @property
    def fetched(self) -> int:
        return int((self.fetch_ids >= 0).sum())

    @property
    def evicted(self) -> int:
        return int((self.evict_ids >= 0).sum())


def look_ahead(batches: Iterable[np.ndarray], *, rows: int, window: int, slots: int) -> Iterator[CacheStep]:
    """The steps of a cache of `slots` rows that sees `window` batches beyond the present one.

    Batches are ids of one shape, -1 where there is none. A row stays cached from its first use to the last one that
    the window shows. Raises ArgumentError where that needs more slots, or for an id that is no row.
    """
    if window < 1 or slots < 1:
        raise ArgumentError(f"look_ahead: window {window} and slots {slots} have to be at least 1.")
    source, queue = iter(batches), deque()
    slot_of, last_use = np.full(rows, -1, np.int32), np.full(rows, -1, np.int64)
    free = np.arange(slots, dtype=np.int32)[::-1]
    read = done = 0
    while True:
        while len(queue) <= window and (batch := next(source, None)) is not None:
            unique = _unique(np.asarray(batch), rows, read)
            last_use[unique] = read
            queue.append((np.asarray(batch), unique))
            read += 1
        if not queue:
            return
        ids, unique = queue.popleft()
        new = unique[slot_of[unique] < 0]
        if len(new) > len(free):
            raise ArgumentError(
                f"look_ahead: batch {done} with a window of {window} needs {slots - len(free) + len(new)} cached rows, "
                f"there are {slots} slots; give more slots or a shorter window."
            )
        taken, free = free[len(free) - len(new) :][::-1], free[: len(free) - len(new)]
        slot_of[new] = taken
        held = slots - len(free)
        gone = unique[last_use[unique] == done]
        soon = np.isin(unique, queue[0][1], assume_unique=True) if queue else np.zeros(len(unique), bool)
        kept = last_use[unique] > done
        most, here = ids.size, slot_of[unique]
        yield CacheStep(
            ids=np.where(ids < 0, -1, slot_of[np.maximum(ids, 0)]).astype(np.int32),
            fetch_ids=_filled(new, most, -1), fetch_slots=_filled(taken, most, slots),
            evict_ids=_filled(gone, most, -1), evict_slots=_filled(slot_of[gone], most, slots),
            sync_now=_filled(here[soon], most, slots), sync_later=_filled(here[kept & ~soon], most, slots),
            no_sync=_filled(here[~kept], most, slots), held=held,
        )  # fmt: skip
        free = np.concatenate([free, slot_of[gone][::-1]])
        slot_of[gone] = -1
        done += 1


def _unique(ids: np.ndarray, rows: int, batch: int) -> np.ndarray:
    found = np.unique(ids)
    if len(found) and (found[0] < -1 or found[-1] >= rows):
        wrong = int(found[0] if found[0] < -1 else found[-1])
        raise ArgumentError(f"look_ahead: batch {batch} has id {wrong}; rows are in [0, {rows}), -1 is no id.")
    return found[found >= 0]


def _filled(values: np.ndarray, most: int, empty: int) -> np.ndarray:
    out = np.full(most, empty, np.int32)
    out[: len(values)] = values
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraffic:
    """Mean bytes of rows a step between host and device: `total` both ways, and `exposed`, those whose fetch could not
    start before the batch was due, so that the step waits. `slots`: rows of device memory."""

    exposed: float
    total: float
    slots: int


def host_traffic(
    batches: Iterable[np.ndarray], *, rows: int, row_bytes: int, window: int, slots: int | None = None
) -> dict[str, HostTraffic]:
    """Rows moved by "look_ahead", by "lru" (a cache of as many slots that learns of a batch when it is due) and by
    "none" (each batch fetches its rows and writes them back). `slots`: None gives the look-ahead what it needs.

    A look-ahead fetch needs no waiting for but that of the first batch: a row that it fetches was not cached, so the
    host's version stands from before the previous step began.
    """
    all_batches = [np.asarray(b) for b in batches]
    steps = list(look_ahead(all_batches, rows=rows, window=window, slots=slots or rows))
    held = slots or max(s.held for s in steps)
    uniques = [_unique(b, rows, i) for i, b in enumerate(all_batches)]
    n, none = len(steps), sum(len(u) for u in uniques)
    misses = _lru_misses(uniques, held)
    moved = sum(s.fetched + s.evicted for s in steps)
    scale = row_bytes / n
    return {
        "look_ahead": HostTraffic(exposed=steps[0].fetched * scale, total=moved * scale, slots=held),
        "lru": HostTraffic(exposed=misses * scale, total=2 * misses * scale, slots=held),
        "none": HostTraffic(exposed=none * scale, total=2 * none * scale, slots=max(len(u) for u in uniques)),
    }


def _lru_misses(uniques: list[np.ndarray], slots: int) -> int:
    """Rows fetched by a cache that drops the row unused for longest; every used row is changed, so as many go back."""
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for unique in uniques:
        for row in unique.tolist():
            if row in cache:
                cache.move_to_end(row)
                continue
            misses += 1
            cache[row] = None
            if len(cache) > slots:
                cache.popitem(last=False)
    return misses
