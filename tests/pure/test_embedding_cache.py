"""The look-ahead cache's lists, its traffic beside other caches, and statistics of ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import ArgumentError
from meshplan.embedding import count_ids, fit_zipf, host_traffic, hot_rows, look_ahead


def zipf_batches(exponent: float, rows: int, batches: int, size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    chances = np.arange(1, rows + 1) ** -exponent
    return list(rng.choice(rows, (batches, size), p=chances / chances.sum()).astype(np.int32))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(2, 30))
@settings(max_examples=30)
def test_every_slot_read_holds_its_row_in_the_last_version(seed: int, window: int, rows: int) -> None:
    """Rows count their uses, on the host or in a slot; a write back that is a step late still comes in time."""
    rng = np.random.default_rng(seed)
    batches = [rng.integers(-1, rows, (4, 2)) for _ in range(25)]
    host, cache, true = np.zeros(rows, int), np.zeros(rows, int), np.zeros(rows, int)
    late: tuple[np.ndarray, np.ndarray] | None = None
    for b, step in zip(batches, look_ahead(batches, rows=rows, window=window, slots=rows), strict=True):
        n = step.fetched
        cache[step.fetch_slots[:n]] = host[step.fetch_ids[:n]]
        assert ((step.ids < 0) == (b < 0)).all()
        np.testing.assert_array_equal(cache[step.ids[b >= 0]], true[b[b >= 0]])
        cache[np.unique(step.ids[b >= 0])] += 1
        true[np.unique(b[b >= 0])] += 1
        if late is not None:
            host[late[0]] = late[1]
        m = step.evicted
        late = step.evict_ids[:m], cache[step.evict_slots[:m]].copy()
        changed = [*step.sync_now, *step.sync_later, *step.no_sync]
        assert sorted(s for s in changed if s < rows) == sorted(set(step.ids[b >= 0]))
    assert late is not None
    host[late[0]] = late[1]
    np.testing.assert_array_equal(host, true)


def test_lists_of_a_short_run() -> None:
    batches = [np.array(b) for b in ([0, 1, 2], [2, 3, 3], [0, 4, -1], [5, 5, 5])]
    first, second, third, last = look_ahead(batches, rows=6, window=2, slots=6)
    assert first.fetch_ids.tolist() == [0, 1, 2]
    assert first.evict_ids.tolist() == [1, -1, -1]
    assert [x.tolist() for x in (first.sync_now, first.sync_later, first.no_sync)] == [[2, 6, 6], [0, 6, 6], [1, 6, 6]]
    assert (second.fetch_ids.tolist(), second.evict_ids.tolist()) == ([3, -1, -1], [2, 3, -1])
    assert (third.fetch_ids.tolist(), third.ids.tolist()[2]) == ([4, -1, -1], -1)
    assert (last.fetched, last.evicted, last.held) == (1, 1, 1)


def test_a_cache_that_is_too_small_says_how_many_slots_are_needed() -> None:
    batches = [np.array([0, 1]), np.array([2, 3]), np.array([0, 1])]
    with pytest.raises(ArgumentError, match=r"batch 1 with a window of 1 needs 2 cached rows, there are 1 slots"):
        list(look_ahead([np.array([0, 0]), np.array([1, 2])], rows=4, window=1, slots=1))
    with pytest.raises(ArgumentError, match=r"needs 4 cached rows, there are 3 slots; give more slots or a shorter"):
        list(look_ahead(batches, rows=4, window=2, slots=3))
    with pytest.raises(ArgumentError, match=r"batch 0 has id -2; rows are in \[0, 4\), -1 is no id"):
        list(look_ahead([np.array([-2, 1])], rows=4, window=2, slots=3))


def test_look_ahead_exposes_fewer_bytes_than_lru_and_no_cache_on_zipf_ids() -> None:
    found = host_traffic(zipf_batches(1.05, 20_000, 200, 512), rows=20_000, row_bytes=64, window=8)
    ahead, lru, none = found["look_ahead"], found["lru"], found["none"]
    assert ahead.slots == lru.slots
    assert ahead.exposed < 0.02 * lru.exposed
    assert lru.exposed < none.exposed
    assert ahead.total <= 1.3 * lru.total < none.total


@pytest.mark.parametrize("exponent", [0.7, 1.05, 1.4])
def test_zipf_exponent_is_found_again(exponent: float) -> None:
    counts = count_ids(zipf_batches(exponent, 2000, 40, 10_000), 2000)
    assert counts.sum() == 400_000
    assert fit_zipf(np.random.default_rng(1).permutation(counts)) == pytest.approx(exponent, abs=0.03)


def test_uniform_ids_fit_near_zero() -> None:
    assert fit_zipf(count_ids(zipf_batches(0.0, 100, 10, 10_000), 100)) < 0.05


def test_hot_rows_are_the_fewest_that_reach_the_share() -> None:
    assert hot_rows(np.array([1, 6, 0, 3]), 0.6).tolist() == [1]
    assert hot_rows(np.array([1, 6, 0, 3]), 0.61).tolist() == [1, 3]
    assert hot_rows(np.zeros(3, int), 0.5).tolist() == []


def test_statistics_refuse_what_they_cannot_read() -> None:
    with pytest.raises(ArgumentError, match=r"ids: 7 is no row of a table of 5; -1 alone marks an empty place"):
        count_ids([np.array([1, 7])], 5)
    with pytest.raises(ArgumentError, match=r"fit_zipf: 1 rows were seen 10 times or more; count more batches"):
        fit_zipf(np.array([100, 2, 1]))
